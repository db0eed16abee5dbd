# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The rule itself, on shapes alone, and what Shardy is told of it."""

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.dot import sides
from jaxplugin.ragged import calls
from jaxplugin.ragged.sharding import assigning
from jaxplugin.ragged.sharding import notation

SIZES = {"a": 2, "b": 4, "c": 3}
A, B, C, NONE = ("a",), ("b",), ("c",), ()
WHOLE = (NONE, NONE, NONE)


def call(m=24, groups=8, n=48, k=256, *, across=False, **options):
  u8 = np.dtype(np.uint8)
  array = lambda *shape: jax.ShapeDtypeStruct(shape, u8)
  lhs = sides.Side(
    name="lhs",
    values=array(m, k),
    scale=array(m, k // 32),
    format=jp.MXFP8,
    axis=1,
    contracting=(1,),
  )
  if across:
    values = jax.ShapeDtypeStruct((m, n), np.dtype(np.float32))
    lhs = sides.Side(name="lhs", values=values, contracting=(1,))
  rhs = sides.Side(
    name="rhs",
    values=array(groups, n, k // 2),
    scale=array(groups, n, k // 32),
    format=jp.MXFP4,
    axis=2,
    contracting=(1 if across else 2,),
  )
  return calls.Call(
    lhs=lhs,
    rhs=rhs,
    group_sizes=jax.ShapeDtypeStruct((groups,), np.dtype(np.int32)),
    preferred_element_type=np.dtype(np.float32),
    **options,
  )


class StepsTest(absltest.TestCase):
  def test_bias_and_activation_follow_the_sum(self):
    array = lambda *shape: jax.ShapeDtypeStruct(shape, np.dtype(np.float32))
    options = {"bias": array(8, 48), "global_scale": array()}
    whole = call(activation="relu", **options)
    # Parts in bf16 are scaled, so that they do not overflow; those in f32 not.
    for dtype, scale in ((None, None), (np.dtype("bfloat16"), array())):
      with self.subTest(dtype=dtype):
        part, after = whole.replace(reduce_dtype=dtype).steps()
        self.assertEqual(part.preferred_element_type, dtype or np.float32)
        self.assertEqual((part.bias, part.activation), (None, None))
        self.assertEqual((after.bias, after.activation), (array(8, 48), "relu"))
        self.assertEqual(part.global_scale, scale)
        self.assertEqual(after.global_scale, array() if scale is None else None)


class AssignAxesTest(parameterized.TestCase):
  def assign(self, lhs, rhs, out=None, **options):
    return assigning.assign_axes(call(**options), lhs, rhs, out, SIZES)

  def test_weights_keep_all_that_they_have(self):
    got = self.assign((B, NONE), (A, B, NONE))
    self.assertEqual((got.groups, got.columns, got.rows), (A, B, NONE))

  def test_rows_are_gathered_to_experts_and_scattered_back(self):
    got = self.assign((B, NONE), (B, NONE, NONE))
    self.assertEqual((got.rows, got.groups, got.out), (NONE, B, (B, NONE)))
    self.assertEqual(got.scatter, ((0, B),))
    got = self.assign((B, NONE), (B, NONE, NONE), (NONE, NONE))
    self.assertEmpty(got.scatter)

  def test_outer_axes_of_rows_stay_and_inner_ones_come_back(self):
    got = self.assign((A + B, NONE), (B, NONE, NONE))
    self.assertEqual((got.rows, got.groups), (A, B))
    self.assertEqual((got.out, got.scatter), ((A + B, NONE), ((0, B),)))

  def test_a_part_of_the_sum_is_scattered(self):
    got = self.assign((NONE, NONE), (A, NONE, B), (B, NONE))
    self.assertEqual((got.reduce, got.scatter), (A + B, ((0, B),)))

  def test_axis_that_does_not_divide_is_dropped(self):
    self.assertEqual(self.assign((NONE, NONE), (C, NONE, NONE)).groups, NONE)
    self.assertEqual(self.assign((B, NONE), WHOLE, m=6).rows, NONE)
    self.assertEqual(self.assign((A + B, NONE), WHOLE, m=6).rows, A)
    # The result's columns must be divisible too, where it is scattered.
    got = self.assign((NONE, B), (NONE, NONE, B), (NONE, B), n=6)
    self.assertEmpty(got.scatter)

  def test_blocks_and_pairs_stay_whole(self):
    k_sharded = (NONE, NONE, B)
    self.assertEqual(self.assign((NONE, B), k_sharded, k=64).contracting, NONE)
    self.assertEqual(self.assign((NONE, B), k_sharded, k=128).contracting, B)
    n_sharded = (NONE, B, NONE)
    self.assertEqual(self.assign((NONE, NONE), n_sharded, n=20).columns, B)
    for activation in ("swiglu", "swigluoai"):
      got = self.assign((NONE, NONE), n_sharded, n=20, activation=activation)
      self.assertEqual(got.columns, NONE)

  def test_gradient_of_rows_has_the_blocks_among_its_columns(self):
    got = self.assign((NONE, NONE), (NONE, NONE, B), k=64, across=True)
    self.assertEqual(got.columns, NONE)
    got = self.assign((NONE, NONE), (NONE, B, A), k=64, across=True)
    self.assertEqual((got.columns, got.contracting), (A, B))

  def test_no_axis_is_taken_twice(self):
    rng = np.random.default_rng(0)
    axes = [NONE, A, B, C, A + B, B + A, B + C]
    draw = lambda count: tuple(
      axes[i] for i in rng.integers(len(axes), size=count)
    )
    for _ in range(500):
      lhs, rhs, out = draw(2), draw(3), draw(2)
      got = self.assign(lhs, rhs, out, activation="swiglu")
      used = [*got.rows, *got.columns, *got.reduce]
      self.assertLen(used, len({*used}))
      flat = [axis for axes in got.out for axis in axes]
      self.assertLen(flat, len({*flat}))
      for name, spec in assigning.operand_specs(call(), got).items():
        flat = [axis for axes in spec for axis in axes]
        self.assertLen(flat, len({*flat}), name)


class NotationTest(parameterized.TestCase):
  def test_groups_and_k_are_summed_and_what_is_inside_stays(self):
    rule, kinds = notation.sharding_rule(call(activation="swiglu"), (2, 4))
    self.assertEqual(
      rule, "m (k k0), g (n n1) (k k2), m k, g (n n3) k, s4 -> m n"
    )
    self.assertEqual(
      kinds,
      {
        **{"k0": 32, "n1": 2, "k2": 16, "n3": 2},
        "reduction_factors": ("k", "g"),
        "need_replication_factors": ("k0", "n1", "k2", "n3", "s4"),
      },
    )

  def test_gradient_of_rows(self):
    rule, kinds = notation.sharding_rule(call(across=True), (2, 4))
    self.assertEqual(rule, "m k, g k (n n0), g k n, s1 -> m (n n2)")
    self.assertEqual((kinds["n0"], kinds["n2"]), (16, 32))

  def test_dimensions_that_an_axis_does_not_divide_are_of_no_other_array(self):
    rule, kinds = notation.sharding_rule(call(), (3,))
    self.assertEqual(rule, "m k0, g n k1, m k2, g n k3, s4 -> m n")
    self.assertEqual(kinds["reduction_factors"], ("g",))


if __name__ == "__main__":
  absltest.main()

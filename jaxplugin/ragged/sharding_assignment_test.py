# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Assignments and Shardy rules of ragged dots, from shapes."""

import jax
import numpy as np
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin.dot import sides
from jaxplugin.operation import notation, split
from jaxplugin.ragged import calls, sharding

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
  return calls.RaggedDotCall(
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


def assign(lhs, rhs, out=None, **options):
  shardings = split.Shardings(
    operands={"lhs": lhs, "rhs": rhs},
    results=None if out is None else [out],
    axis_sizes=SIZES,
  )
  return sharding.assign(call(**options), shardings)


# claim: axes of lhs and rhs, axes wanted for the result or None, options of
# the call, expected fields.
CASES = {
  "weights keep all axes": (
    (B, NONE), (A, B, NONE), None, {}, {"g": A, "n": B, "m": NONE}),
  "rows are gathered to experts and scattered back": (
    (B, NONE), (B, NONE, NONE), None, {},
    {"m": NONE, "g": B, "out": (B, NONE), "scatter": ((0, B),)}),
  "rows are not scattered if the result is wanted whole": (
    (B, NONE), (B, NONE, NONE), (NONE, NONE), {},
    {"g": B, "out": (NONE, NONE), "scatter": ()}),
  "outer axes of rows stay and inner ones come back": (
    (A + B, NONE), (B, NONE, NONE), None, {},
    {"m": A, "g": B, "out": (A + B, NONE), "scatter": ((0, B),)}),
  "a part of the sum is scattered": ((NONE, NONE), (A, NONE, B), (B, NONE), {},
    {"reduce": A + B, "scatter": ((0, B),)}),
  "an axis that does not divide the groups is dropped": (
    (NONE, NONE), (C, NONE, NONE), None, {}, {"g": NONE}),
  "an axis that does not divide the rows is dropped": (
    (B, NONE), WHOLE, None, {"m": 6}, {"m": NONE}),
  "the longest prefix that divides the rows is kept": (
    (A + B, NONE), WHOLE, None, {"m": 6}, {"m": A}),
  "columns that an axis does not divide are not scattered": (
    (NONE, B), (NONE, NONE, B), (NONE, B), {"n": 6}, {"k": B, "scatter": ()}),
  "two blocks are not split over four devices": (
    (NONE, B), (NONE, NONE, B), None, {"k": 64}, {"k": NONE}),
  "four blocks are split over four devices": (
    (NONE, B), (NONE, NONE, B), None, {"k": 128}, {"k": B}),
  "columns are split": (
    (NONE, NONE), (NONE, B, NONE), None, {"n": 20}, {"n": B}),
  "pairs of swiglu stay whole": ((NONE, NONE), (NONE, B, NONE), None,
    {"n": 20, "activation": "swiglu"}, {"n": NONE}),
  "pairs of swigluoai stay whole": ((NONE, NONE), (NONE, B, NONE), None,
    {"n": 20, "activation": "swigluoai"}, {"n": NONE}),
  "blocks among the columns of a gradient stay whole": ((NONE, NONE),
    (NONE, NONE, B), None, {"k": 64, "across": True}, {"n": NONE}),
  "such columns are split between blocks": ((NONE, NONE), (NONE, B, A), None,
    {"k": 64, "across": True}, {"n": A, "k": B}),
}  # fmt: skip


class AssignTest(absltest.TestCase):
  def test_axes_of_dimensions(self):
    for claim, (*args, options, expected) in CASES.items():
      with self.subTest(claim):
        got = assign(*args, **options)
        fields = {
          **got.axes,
          "out": got.results[0],
          "reduce": got.reduce,
          "scatter": got.scatter,
        }
        self.assertEqual({name: fields[name] for name in expected}, expected)

  def test_no_axis_is_taken_twice(self):
    rng = np.random.default_rng(0)
    axes = [NONE, A, B, C, A + B, B + A, B + C]
    draw = lambda count: tuple(
      axes[i] for i in rng.integers(len(axes), size=count)
    )
    for _ in range(500):
      got = assign(draw(2), draw(3), draw(2), activation="swiglu")
      used = [*got.axes["m"], *got.axes["n"], *got.reduce]
      self.assertLen(used, len({*used}))
      for spec in (*got.results, *got.operands):
        flat = [axis for axes in spec for axis in axes]
        self.assertLen(flat, len({*flat}))

  def test_epilogue_has_the_axes_of_the_scattered_sum(self):
    f32 = np.dtype(np.float32)
    array = lambda *shape: jax.ShapeDtypeStruct(shape, f32)
    options = {
      "bias": array(8, 48),
      "global_scale": array(24, 1),
      "global_power": array(24, 1),
    }
    specs = (A, B), (C, NONE, B)
    for k, dtype, bias, scale in (
      (256, None, (NONE, B), (A, NONE)),
      (256, np.dtype("bfloat16"), (NONE, B), (A, NONE)),
      (64, None, (NONE, B), (A, NONE)),
    ):
      with self.subTest(k=k, dtype=dtype):
        got = assign(*specs, (A, B), k=k, reduce_dtype=dtype, **options)
        self.assertEqual(got.operands[5:], (scale, bias, scale))


class RuleTest(absltest.TestCase):
  def test_rules(self):
    for claim, options, axis_sizes, rule, kinds in (
      (
        "groups and k are summed, and blocks and pairs stay whole",
        {"activation": "swiglu"},
        (2, 4),
        "m (k i0), g (n i1) (k i2), m k, g (n i3) k, w0 -> m n",
        {
          **{"i0": 32, "i1": 2, "i2": 16, "i3": 2},
          "reduction_factors": ("k", "g"),
          "need_replication_factors": ("i0", "i1", "i2", "i3", "w0"),
        },
      ),
      (
        "the gradient of rows has blocks in its columns",
        {"across": True},
        (2, 4),
        "m k, g k (n i0), g k n, w0 -> m (n i1)",
        {
          **{"i0": 16, "i1": 32},
          "reduction_factors": ("k", "g"),
          "need_replication_factors": ("i0", "w0", "i1"),
        },
      ),
      ("arrays share no dimension whose blocks an axis does not divide", {},
        (3,), "m x0, g n x1, m x2, g n x3, w0 -> m n",
        {"reduction_factors": ("g",), "need_replication_factors": ("w0",)}),
    ):  # fmt: skip
      with self.subTest(claim):
        whole = call(**options)
        out = jax.ShapeDtypeStruct(whole.shape, np.dtype(np.float32))
        found = notation.sharding_rule(
          sharding.notation(whole), whole.flatten(), [out], axis_sizes
        )
        self.assertEqual(found, (rule, kinds))

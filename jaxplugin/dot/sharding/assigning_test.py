# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Who takes which mesh axis: the rule itself, on shapes alone."""

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.dot import calls
from jaxplugin.dot import sides
from jaxplugin.dot.sharding import assigning

SIZES = {"f": 2, "t": 4}
NONE, F, T = (), ("f",), ("t",)


def side(name, shape, contracting):
  return sides.Side(
    name=name,
    values=jax.ShapeDtypeStruct(shape, jp.MXFP8.values_dtype),
    format=jp.MXFP8,
    axis=contracting[-1],
    contracting=contracting,
  )


def assign(lhs, rhs, contracting, specs, wanted=None):
  call = calls.Call(
    lhs=side("lhs", lhs, contracting[0]),
    rhs=side("rhs", rhs, contracting[1]),
    preferred_element_type=np.dtype(np.float32),
  )
  return assigning.assign_axes(call, *specs, wanted, SIZES)


class LayerTest(parameterized.TestCase):
  """Products of a layer with batch over f, weights over f and t.

  x is [batch, sequence, features], w [features, hidden]; under sequence
  parallelism x is sharded over t along the sequence.
  """

  X, W, H = (8, 256, 512), (512, 1024), (8, 256, 1024)

  def test_forward_gathers_each_operand_over_one_axis(self):
    got = assign(
      self.X, self.W, ((2,), (0,)), ((F, T, NONE), (F, T)), (F, NONE, T)
    )
    self.assertEqual(got.lhs, (F, NONE, NONE))
    self.assertEqual(got.rhs, (NONE, T))
    self.assertEqual((got.out, got.reduce), ((F, NONE, T), NONE))

  def test_row_parallel_result_is_scattered_along_the_sequence(self):
    got = assign(
      self.H, (1024, 512), ((2,), (0,)), ((F, NONE, T), (T, F)), (F, T, NONE)
    )
    self.assertEqual((got.lhs, got.rhs), ((F, NONE, T), (T, NONE)))
    self.assertEqual((got.reduce, got.scatter), (T, ((1, T),)))
    self.assertEqual(got.parts, (F, NONE, NONE))
    self.assertEqual(got.out, (F, T, NONE))

  def test_gradient_of_activations_gathers_each_operand_over_one_axis(self):
    got = assign(
      *(self.X, (1024, 512), ((2,), (1,))),
      *(((F, T, NONE), (T, F)), (F, NONE, T)),
    )
    self.assertEqual((got.lhs, got.rhs), ((F, NONE, NONE), (T, NONE)))
    self.assertEqual((got.out, got.reduce), ((F, NONE, T), NONE))

  def test_gradient_of_weights_keeps_batch_and_scatters_over_it(self):
    got = assign(
      *(self.H, self.X, ((0, 1), (0, 1))),
      *(((F, NONE, T), (F, T, NONE)), (T, F)),
    )
    self.assertEqual((got.lhs, got.rhs), ((F, NONE, T), (F, NONE, NONE)))
    self.assertEqual((got.reduce, got.scatter), (F, ((1, F),)))
    self.assertEqual(got.out, (T, F))

  def test_sum_over_two_axes_is_scattered_along_two_dimensions(self):
    # Rows over both axes (context parallelism), weights as above.
    rows = (F, T, NONE)
    contracting = ((0, 1), (0, 1))
    got = assign(self.H, self.X, contracting, (rows, rows), (T, F))
    self.assertEqual((got.lhs, got.rhs), (rows, rows))
    self.assertEqual((got.reduce, got.scatter), (F + T, ((0, T), (1, F))))
    self.assertEqual((got.parts, got.out), ((NONE, NONE), (T, F)))

  def test_sum_over_two_axes_is_scattered_over_one_where_that_is_wanted(self):
    rows = (F, T, NONE)
    contracting = ((0, 1), (0, 1))
    got = assign(self.H, self.X, contracting, (rows, rows), (NONE, F))
    self.assertEqual((got.reduce, got.scatter), (F + T, ((1, F),)))
    self.assertEqual(got.out, (NONE, F))


class YieldingTest(parameterized.TestCase):
  """Both operands have axes of each other."""

  def test_each_axis_goes_where_the_result_wants_it(self):
    lhs = rhs = (64, 64, 32)
    got = assign(
      *(lhs, rhs, ((2,), (2,))),
      *(((F, T, NONE), (F, T, NONE)), (F, NONE, NONE, T)),
    )
    self.assertEqual((got.lhs, got.rhs), ((F, NONE, NONE), (NONE, T, NONE)))

  def test_what_is_minor_to_an_axis_yields_with_it(self):
    both = (F + T, NONE)
    contracting = ((1,), (1,))
    got = assign((64, 32), (64, 32), contracting, (both, both), (T, F))
    # f, the major axis of lhs, is gathered, so that t has to be too.
    self.assertEqual((got.lhs, got.rhs), ((T, NONE), (F, NONE)))
    specs = (both, (F, NONE))
    got = assign((64, 32), (64, 32), contracting, specs, (NONE, F))
    self.assertEqual((got.lhs, got.rhs), ((NONE, NONE), (F, NONE)))

  def test_no_axis_is_taken_twice_and_all_sums_are_made(self):
    rng = np.random.default_rng(0)
    axes = [NONE, F, T, F + T, T + F]
    draw = lambda count: tuple(
      axes[i] for i in rng.integers(len(axes), size=count)
    )
    for _ in range(500):
      specs, wanted = (draw(3), draw(3)), draw(2)
      got = assign(
        (16, 256, 32), (16, 256, 64), ((0, 1), (0, 1)), specs, wanted
      )
      used = [*got.lhs[2], *got.rhs[2], *got.reduce]
      self.assertLen(used, len({*used}), (specs, wanted))
      self.assertEqual(got.lhs[:2], got.rhs[:2])
      self.assertEqual(got.reduce, got.lhs[0] + got.lhs[1])
      scattered = {a for _, axes in got.scatter for a in axes}
      self.assertContainsSubset(scattered, got.reduce)
      for part, out in zip(got.parts, got.out, strict=True):
        self.assertEqual(out[: len(part)], part)


if __name__ == "__main__":
  absltest.main()

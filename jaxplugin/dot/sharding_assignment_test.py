# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Assignments and Shardy rules of block-scaled dots, from shapes."""

import jax
import numpy as np
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin.dot import calls, sharding, sides
from jaxplugin.operation import notation, split

SIZES = {"f": 2, "t": 4}
NONE, F, T = (), ("f",), ("t",)
K = ((1,), (1,))
F32 = np.dtype(np.float32)

# The matmuls of a layer with batch over f and weights over f and t. x is
# [batch, sequence, features], w [features, hidden]. Under sequence parallelism
# x is sharded over t along the sequence.
X, W, H = (8, 256, 512), (512, 1024), (8, 256, 1024)
ROWS = (F, T, NONE)
# claim: shapes of lhs and rhs, contracting dimensions, axes of both, axes
# wanted for the result or None, expected fields.
CASES = {
  "forward_gathers_each_operand_over_one_axis": (
    *(X, W, ((2,), (0,)), ROWS, (F, T), (F, NONE, T)),
    dict(lhs=(F, NONE, NONE), rhs=(NONE, T), out=(F, NONE, T), reduce=NONE)),
  "row_parallel_result_is_scattered_along_the_sequence": (
    *(H, (1024, 512), ((2,), (0,)), (F, NONE, T), (T, F), ROWS),
    {
      "lhs": (F, NONE, T),
      "rhs": (T, NONE),
      "reduce": T,
      "scatter": ((1, T),),
      "parts": (F, NONE, NONE),
      "out": (F, T, NONE),
    },
  ),
  "gradient_of_activations_gathers_each_operand_over_one_axis": (
    *(X, (1024, 512), ((2,), (1,)), ROWS, (T, F), (F, NONE, T)),
    dict(lhs=(F, NONE, NONE), rhs=(T, NONE), out=(F, NONE, T), reduce=NONE)),
  "gradient_of_weights_keeps_batch_and_scatters_over_it": (
    *(H, X, ((0, 1), (0, 1)), (F, NONE, T), ROWS, (T, F)),
    {
      "lhs": (F, NONE, T),
      "rhs": (F, NONE, NONE),
      "reduce": F,
      "scatter": ((1, F),),
      "out": (T, F),
    },
  ),
  "sum_over_two_axes_is_scattered_along_two_dimensions": (
    *(H, X, ((0, 1), (0, 1)), ROWS, ROWS, (T, F)),
    {
      "lhs": ROWS,
      "rhs": ROWS,
      "reduce": F + T,
      "scatter": ((0, T), (1, F)),
      "parts": (NONE, NONE),
      "out": (T, F),
    },
  ),
  "sum_over_two_axes_is_scattered_over_one_if_that_is_wanted": (
    *(H, X, ((0, 1), (0, 1)), ROWS, ROWS, (NONE, F)),
    {"reduce": F + T, "scatter": ((1, F),), "out": (NONE, F)}),
  "each_axis_goes_to_the_dimension_that_the_result_wants": (
    *((64, 64, 32), (64, 64, 32), ((2,), (2,)), ROWS, ROWS), (F, NONE, NONE, T),
    {"lhs": (F, NONE, NONE), "rhs": (NONE, T, NONE)}),
  # f, the major axis of lhs, is gathered, so t has to be gathered too.
  "a_minor_axis_is_gathered_with_its_major_one": (
    *((64, 32), (64, 32), K, (F + T, NONE), (F + T, NONE), (T, F)),
    {"lhs": (T, NONE), "rhs": (F, NONE)}),
  "a_minor_axis_is_gathered_also_if_nothing_wants_it": (
    *((64, 32), (64, 32), K, (F + T, NONE), (F, NONE), (NONE, F)),
    {"lhs": (NONE, NONE), "rhs": (F, NONE)}),
  "wanted_result_decides_which_operand_is_gathered": (
    *((640, 64), (64, 64), K, (F, NONE), (F, NONE), (NONE, F)),
    {"lhs": (NONE, NONE), "rhs": (F, NONE)}),
  "smaller_operand_is_gathered_if_nothing_is_wanted": (
    *((64, 64), (640, 64), K, (F, NONE), (F, NONE), None),
    {"lhs": (NONE, NONE), "rhs": (F, NONE)}),
  "axis_that_does_not_divide_is_dropped": (
    *((6, 64), (8, 64), K, (T, NONE), (NONE, NONE), None),
    {"lhs": (NONE, NONE)}),
  "longest_prefix_that_divides_is_kept": (
    *((6, 64), (8, 64), K, (F + T, NONE), (NONE, NONE), None),
    {"lhs": (F, NONE)}),
  "two_blocks_are_not_split_over_four_devices": (
    *((8, 64), (8, 64), K, (NONE, T), (NONE, T), None),
    {"lhs": (NONE, NONE), "reduce": NONE}),
  "four_blocks_are_split_over_four_devices": (
    *((8, 128), (8, 128), K, (NONE, T), (NONE, T), None),
    {"lhs": (NONE, T), "reduce": T}),
  "sum_is_scattered_as_the_result_is_wanted": (
    *((8, 128), (8, 128), K, (NONE, T), (NONE, T), (T, NONE)),
    {"scatter": ((0, T),), "out": (T, NONE)}),
  "sum_is_not_scattered_over_more_devices_than_divide_the_rows": (
    *((12, 128), (8, 128), K, (F, T), (NONE, T), (F + T, NONE)),
    {"reduce": T, "scatter": (), "out": (F, NONE)}),
  "replicated_operands_follow_the_wanted_result": (
    *((8, 128), (8, 128), K, (NONE, NONE), (NONE, NONE), (F, T)),
    {"lhs": (F, NONE), "rhs": (T, NONE)}),
}  # fmt: skip


def side(name, shape, contracting, format=jp.MXFP8):
  """A side whose values have no scale."""
  return sides.Side(
    name=name,
    values=jax.ShapeDtypeStruct(shape, jp.MXFP8.values_dtype),
    format=format,
    axis=None if format is None else contracting[-1],
    contracting=contracting,
  )


def assign(lhs, rhs, contracting, lhs_spec, rhs_spec, wanted=None, **options):
  """Returns the fields of an assignment."""
  call = calls.DotCall(
    lhs=side("lhs", lhs, contracting[0], options.pop("format", jp.MXFP8)),
    rhs=side("rhs", rhs, contracting[1]),
    preferred_element_type=F32,
    **options,
  )
  shardings = split.Shardings(
    operands={"lhs": lhs_spec, "rhs": rhs_spec},
    results=None if wanted is None else [wanted],
    axis_sizes=SIZES,
  )
  got = sharding.assign(call, shardings)
  (names,) = sharding.notation(call).results
  return {
    "lhs": got.operands[0],
    "rhs": got.operands[1],
    "epilogue": got.operands[2:],
    "parts": tuple(got.axes[name] for name in names),
    "out": got.results[0],
    "reduce": got.reduce,
    "scatter": got.scatter,
  }


class AssignTest(absltest.TestCase):
  def test_cases(self):
    for claim, (*args, expected) in CASES.items():
      with self.subTest(claim):
        got = assign(*args)
        self.assertEqual({name: got[name] for name in expected}, expected)

  def test_blocks_of_rhs_stay_whole_if_lhs_is_unquantized(self):
    got = assign((8, 64), (8, 64), K, (NONE, T), (NONE, NONE), format=None)
    self.assertEqual(got["reduce"], NONE)

  def test_scales_of_parts_are_not_scattered(self):
    array = lambda *shape: jax.ShapeDtypeStruct(shape, F32)
    options = {
      "global_scale": array(8, 1),
      "bias": array(1, 16),
      "residual": array(8, 16),
    }
    for dtype, scale in ((None, (T, NONE)), (np.dtype("float16"), (F, NONE))):
      wanted = (T, NONE) if dtype is None else (F + T, NONE)
      lhs = (NONE, T) if dtype is None else (F, T)
      got = assign(
        *((8, 128), (16, 128), K, lhs, (NONE, T), wanted),
        reduce_dtype=dtype,
        **options,
      )
      with self.subTest(dtype=dtype):
        self.assertEqual(got["out"], wanted)
        self.assertEqual(got["epilogue"], (scale, (NONE, NONE), wanted))

  def test_no_axis_is_taken_twice_and_all_sums_are_made(self):
    rng = np.random.default_rng(0)
    axes = [NONE, F, T, F + T, T + F]
    draw = lambda count: tuple(
      axes[i] for i in rng.integers(len(axes), size=count)
    )
    for _ in range(500):
      specs, wanted = (draw(3), draw(3)), draw(2)
      got = assign(
        (16, 256, 32), (16, 256, 64), ((0, 1), (0, 1)), *specs, wanted
      )
      lhs, rhs = got["lhs"], got["rhs"]
      used = [*lhs[2], *rhs[2], *got["reduce"]]
      self.assertLen(used, len({*used}), (specs, wanted))
      self.assertEqual(lhs[:2], rhs[:2])
      self.assertEqual(got["reduce"], lhs[0] + lhs[1])
      scattered = {a for _, axes in got["scatter"] for a in axes}
      self.assertContainsSubset(scattered, got["reduce"])
      for part, out in zip(got["parts"], got["out"], strict=True):
        self.assertEqual(out[: len(part)], part)


class RuleTest(absltest.TestCase):
  def test_rules(self):
    u8 = np.dtype(np.uint8)

    def bytes_of(name, format, rows, k):
      stored = k // 2 if format.is_fp4 else k
      return sides.Side(
        name=name,
        values=jax.ShapeDtypeStruct((4, rows, stored), u8),
        scale=jax.ShapeDtypeStruct((4, rows, k // format.block_size), u8),
        format=format,
        axis=2,
        contracting=(2,),
        batch=(0,),
      )

    shared = "b0 m0 (k0 i0), b0 n0 (k0 i1), b0 m0 k0, b0 n0 (k0 i2), x0 x1 n0"
    own = "b0 m0 x0, b0 n0 x1, b0 m0 x2, b0 n0 x3, x4 x5 n0"
    for claim, k, axis_sizes, arrays in (
      ("blocks of the larger size are shared", 128, (2, 4), shared),
      ("an axis does not divide the blocks", 128, (3,), own),
      ("k has one block", 32, (), own),
      ("the last block is short", 144, (2,), own),
    ):
      with self.subTest(claim):
        call = calls.DotCall(
          lhs=bytes_of("lhs", jp.MXFP8, 8, k),
          rhs=bytes_of("rhs", jp.NVFP4, 16, k),
          bias=jax.ShapeDtypeStruct((1, 1, 16), F32),
          preferred_element_type=F32,
        )
        out = jax.ShapeDtypeStruct(call.shape, F32)
        found, kinds = notation.sharding_rule(
          sharding.notation(call), call.flatten(), [out], axis_sizes
        )
        self.assertEqual(found, arrays + " -> b0 m0 n0")
        sizes = {"i0": 32, "i1": 16, "i2": 2} if arrays == shared else {}
        summed = ("k0",) if arrays == shared else ()
        factors = {"need_replication_factors": tuple(sizes)}
        factors |= {"reduction_factors": summed, **sizes}
        self.assertEqual(kinds, factors)

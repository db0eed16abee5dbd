# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Malformed calls: each a typed error, while tracing, that says what is wrong.

TypeError is for rank, dtype and shape, ValueError for a bad parameter, and
NotImplementedError for what is valid but cannot be served. The last test runs
the others again under `python -O`, where `assert` checks nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin import formats

E8M0: Final = formats.E8M0
E4M3: Final = formats.E4M3
E5M2: Final = formats.E5M2
E2M1: Final = formats.E2M1
MIN_MALFORMED_CALLS: Final = 40
_UNDER_O: Final = "JAXPLUGIN_TEST_RUNS_OPTIMIZED"


def ones(shape: tuple[int, ...], dtype: Any) -> jax.Array:
  return jnp.asarray(np.ones(shape, np.float32).astype(dtype))


def mx(*shape: int) -> jax.Array:
  return ones(shape, E4M3)


def e8m0(*shape: int) -> jax.Array:
  return ones(shape, E8M0)


def fp4(*shape: int) -> jax.Array:
  return ones(shape, E2M1)


def e4m3(*shape: int) -> jax.Array:
  return ones(shape, E4M3)


def f32(*shape: int) -> jax.Array:
  return ones(shape, np.float32)


def mxfp8(*shape: int, axis: int = -1) -> jp.ScaledArray:
  scale = list(shape)
  scale[axis] //= 32
  return jp.ScaledArray(mx(*shape), e8m0(*scale), None, jp.MXFP8)


def unchecked(
  values: Any, scale: Any, global_scale: Any, format: jp.BlockFormat
) -> jp.ScaledArray:
  """A `ScaledArray` as a pytree operation may make it, never validated."""
  children = (values, scale, global_scale)
  return jp.ScaledArray.tree_unflatten((format, "linear"), children)


def swizzled(rows: int, k: int) -> jp.ScaledArray:
  scale = jp.swizzle_scale(e8m0(rows, k // 32))
  return jp.ScaledArray(
    mx(rows, k), scale, None, jp.MXFP8, scale_layout="swizzled_128x4"
  )


@dataclasses.dataclass(frozen=True)
class Malformed:
  """A call and what must be raised.

  Attributes:
    error: the exact type.
    fragments: what its message contains: the argument, and the values.
    arrays: keyword arguments that are traced. A well-formed call of
      lhs (4, 64) and rhs (6, 64), both MXFP8, fills in what is left out.
    static: keyword arguments that are not.
  """

  error: type[Exception]
  fragments: tuple[str, ...]
  arrays: dict[str, Any] = dataclasses.field(default_factory=dict)
  static: dict[str, Any] = dataclasses.field(default_factory=dict)


WELL_FORMED: Final[Callable[[], dict[str, Any]]] = lambda: {
  "lhs": mx(4, 64),
  "lhs_scale": e8m0(4, 2),
  "rhs": mx(6, 64),
  "rhs_scale": e8m0(6, 2),
}
LAST: Final = (((1,), (1,)), ((), ()))


def _numbers(value: Any, *fragments: str, **arrays: Any) -> Malformed:
  return Malformed(
    TypeError,
    ("dimension_numbers", *fragments),
    arrays,
    {"dimension_numbers": value},
  )


def _type(*fragments: str, **arrays: Any) -> Malformed:
  return Malformed(TypeError, fragments, arrays)


def _static(
  error: type[Exception], *fragments: str, **static: Any
) -> Malformed:
  return Malformed(error, fragments, {}, static)


def malformed_calls() -> dict[str, Malformed]:
  return {
    # Ranks.
    "lhs_is_a_vector": _type("lhs", "1", lhs=mx(64), lhs_scale=e8m0(2)),
    "rhs_has_one_more_dimension": _type(
      "rhs", "2", "3", rhs=mx(1, 6, 64), rhs_scale=e8m0(1, 6, 2)
    ),
    "lhs_is_a_scalar": _type("lhs", "0", lhs=mx(), lhs_scale=e8m0()),
    "lhs_scale_has_another_rank": _type(
      "lhs_scale", "(8,)", "(4, 64)", lhs_scale=e8m0(8)
    ),
    "rhs_scale_is_a_scalar": _type(
      "rhs_scale", "()", "(6, 64)", rhs_scale=e8m0()
    ),
    # Dtypes.
    "both_operands_plain": _type(
      "lhs",
      "rhs",
      "float32",
      lhs=f32(4, 64),
      lhs_scale=None,
      rhs=f32(6, 64),
      rhs_scale=None,
    ),
    "quantized_lhs_without_scale": _type(
      "lhs", "float8_e4m3fn", "lhs_scale", lhs_scale=None
    ),
    "quantized_rhs_without_scale": _type(
      "rhs", "float8_e4m3fn", "rhs_scale", rhs_scale=None
    ),
    "integer_lhs_with_scale": _type("lhs", "int8", lhs=ones((4, 64), np.int8)),
    "integer_rhs_without_scale": _type(
      "rhs", "int32", rhs=ones((6, 64), np.int32), rhs_scale=None
    ),
    "packed_rhs_without_scale": _type(
      "rhs", "uint8", "rhs_scale", rhs=ones((6, 32), np.uint8), rhs_scale=None
    ),
    "bool_lhs": _type(
      "lhs", "bool", lhs=ones((4, 64), np.bool_), lhs_scale=None
    ),
    "complex_lhs": _type(
      "lhs", "complex64", lhs=ones((4, 64), np.complex64), lhs_scale=None
    ),
    "scale_for_plain_lhs": _type(
      "lhs", "float32", "lhs_scale", "float8_e8m0fnu", lhs=f32(4, 64)
    ),
    "float32_scale": _type(
      "rhs_scale", "float32", "float8_e4m3fn", rhs_scale=f32(6, 2)
    ),
    "e4m3_values_with_e4m3_scale": _type(
      "lhs_scale", "float8_e4m3fn", lhs_scale=e4m3(4, 4)
    ),
    "e5m2_scale": _type(
      "rhs_scale", "float8_e5m2", rhs=fp4(6, 64), rhs_scale=ones((6, 4), E5M2)
    ),
    "uint8_scale": _type(
      "lhs_scale", "uint8", lhs_scale=ones((4, 2), np.uint8)
    ),
    "lhs_is_a_string": Malformed(
      TypeError, ("lhs", "str"), {"lhs": None}, {"lhs": "weights"}
    ),
    "rhs_is_none": Malformed(
      TypeError, ("rhs", "NoneType"), {"rhs": None}, {"rhs": None}
    ),
    # Sizes.
    "contracting_sizes_differ": _type(
      "contracting",
      "lhs",
      "rhs",
      "64",
      "96",
      rhs=mx(6, 96),
      rhs_scale=e8m0(6, 3),
    ),
    "batch_sizes_differ": _type(
      "batch",
      "lhs",
      "rhs",
      "2",
      "3",
      lhs=mx(2, 4, 64),
      lhs_scale=e8m0(2, 4, 2),
      rhs=mx(3, 6, 64),
      rhs_scale=e8m0(3, 6, 2),
    ),
    "batch_size_one_does_not_broadcast": _type(
      "batch",
      "(1, 4, 64)",
      "(3, 6, 64)",
      lhs=mx(1, 4, 64),
      lhs_scale=e8m0(1, 4, 2),
      rhs=mx(3, 6, 64),
      rhs_scale=e8m0(3, 6, 2),
    ),
    "k_is_no_multiple_of_32": _type(
      "lhs",
      "k=100",
      "32",
      lhs=mx(4, 100),
      lhs_scale=e8m0(4, 4),
      rhs=mx(6, 100),
      rhs_scale=e8m0(6, 4),
    ),
    "k_is_no_multiple_of_16": _type(
      "rhs",
      "k=40",
      "16",
      lhs=f32(4, 40),
      lhs_scale=None,
      rhs=fp4(6, 40),
      rhs_scale=e4m3(6, 3),
    ),
    "lhs_scale_too_short": _type(
      "lhs_scale", "(4, 1)", "(4, 2)", lhs_scale=e8m0(4, 1)
    ),
    "rhs_scale_too_long": _type(
      "rhs_scale", "(6, 4)", "(6, 2)", "block_size", rhs_scale=e8m0(6, 4)
    ),
    "rhs_scale_has_too_few_rows": _type(
      "rhs_scale", "(5, 2)", "(6, 2)", rhs_scale=e8m0(5, 2)
    ),
    "scale_per_16_for_mxfp4": _type(
      "rhs_scale",
      "(6, 4)",
      "(6, 2)",
      "mxfp4",
      rhs=fp4(6, 64),
      rhs_scale=e8m0(6, 4),
    ),
    "scale_per_32_for_nvfp4": _type(
      "rhs_scale",
      "(6, 2)",
      "(6, 4)",
      "nvfp4",
      rhs=fp4(6, 64),
      rhs_scale=e4m3(6, 2),
    ),
    "packed_size_taken_for_logical": _type(
      "64", "128", rhs=ones((6, 64), np.uint8), rhs_scale=e8m0(6, 2)
    ),
    "padded_scale_without_block_size": _type(
      "lhs_scale", "(128, 4)", "(4, 2)", "block_size=32", lhs_scale=e8m0(128, 4)
    ),
    "padded_scale_too_small": Malformed(
      TypeError,
      ("lhs_scale", "(128, 1)", "(4, 2)"),
      {"lhs_scale": e8m0(128, 1)},
      {"block_size": 32},
    ),
    "padded_scale_has_too_few_rows": Malformed(
      TypeError,
      ("rhs_scale", "(5, 4)", "(6, 2)"),
      {"rhs_scale": e8m0(5, 4)},
      {"block_size": 32},
    ),
    "padded_scale_is_padded_in_batch": Malformed(
      TypeError,
      ("lhs_scale", "(3, 4, 2)", "(2, 4, 2)", "batch"),
      {
        "lhs": mx(2, 4, 64),
        "lhs_scale": e8m0(3, 4, 2),
        "rhs": mx(2, 6, 64),
        "rhs_scale": e8m0(2, 6, 2),
      },
      {"block_size": 32},
    ),
    "padded_scale_fits_two_contracting_dimensions": Malformed(
      TypeError,
      ("rhs_scale", "(2, 4, 6)"),
      {
        "lhs": f32(2, 3, 4),
        "lhs_scale": None,
        "rhs": mx(2, 3, 6),
        "rhs_scale": e8m0(2, 4, 6),
      },
      {"block_size": 32, "dimension_numbers": (((0, 1), (0, 1)), ((), ()))},
    ),
    # Parameters.
    "block_size_of_another_format": _static(
      ValueError, "block_size", "16", "32", "mxfp8", block_size=16
    ),
    "block_size_64": _static(ValueError, "block_size", "64", block_size=64),
    "block_size_0": _static(ValueError, "block_size", "0", block_size=0),
    "negative_block_size": _static(
      ValueError, "block_size", "-32", block_size=-32
    ),
    "block_size_is_a_string": _static(
      ValueError, "block_size", "'32'", block_size="32"
    ),
    "unknown_implementation": _static(
      ValueError,
      "implementation",
      "'cublas'",
      "cudnn",
      "triton",
      "cpu",
      "xla",
      implementation="cublas",
    ),
    "implementation_in_capitals": _static(
      ValueError, "implementation", "'XLA'", implementation="XLA"
    ),
    "unknown_activation": _static(
      ValueError,
      "activation",
      "'tanh'",
      "relu",
      "gelu",
      "silu",
      activation="tanh",
    ),
    "activation_is_a_function": _static(
      ValueError, "activation", "relu", activation=jax.nn.relu
    ),
    "unknown_precision": _static(
      ValueError, "precision", "'exact'", "highest", precision="exact"
    ),
    "precision_is_a_number": _static(
      ValueError, "precision", "32", precision=32
    ),
    "unknown_precision_in_a_pair": _static(
      ValueError, "precision", "'best'", precision=("highest", "best")
    ),
    "integer_result": _static(
      TypeError,
      "preferred_element_type",
      "int32",
      preferred_element_type=jnp.int32,
    ),
    "float8_result": _static(
      TypeError,
      "preferred_element_type",
      "float8_e4m3fn",
      preferred_element_type=jnp.float8_e4m3fn,
    ),
    "float64_result": _static(
      TypeError,
      "preferred_element_type",
      "float64",
      preferred_element_type=np.float64,
    ),
    "result_dtype_is_no_dtype": _static(
      TypeError,
      "preferred_element_type",
      "'bf17'",
      preferred_element_type="bf17",
    ),
    "result_dtype_is_an_array": _static(
      TypeError, "preferred_element_type", preferred_element_type=np.ones(3)
    ),
    # Dimension numbers.
    "dimension_numbers_is_a_number": _numbers(1, "1"),
    "dimension_numbers_is_a_string": _numbers("mk,nk", "'mk,nk'"),
    "dimension_numbers_without_batch": _numbers(((1,), (1,)), "((1,), (1,))"),
    "dimension_is_a_float": _numbers((((1.5,), (1,)), ((), ())), "1.5"),
    "dimension_is_a_digit": _numbers(((("1",), (1,)), ((), ())), "'1'"),
    "contracting_dimension_out_of_range": _numbers(
      (((2,), (1,)), ((), ())), "lhs", "2", "(4, 64)"
    ),
    "negative_contracting_dimension": _numbers(
      (((1,), (-1,)), ((), ())), "rhs", "-1", "(6, 64)"
    ),
    "negative_batch_dimension": _numbers(
      (((1,), (1,)), ((-2,), (0,))), "lhs", "-2", "(4, 64)"
    ),
    "dimension_twice_in_lhs": _numbers(
      (((1, 1), (1, 0)), ((), ())), "lhs", "(1, 1)"
    ),
    "dimension_both_contracting_and_batch": _numbers(
      (((1,), (1,)), ((0,), (1,))), "rhs", "(1, 1)"
    ),
    "unequal_numbers_of_contracting_dimensions": _numbers(
      (((0, 1), (1,)), ((), ())), "contracting", "(0, 1)", "(1,)"
    ),
    "unequal_numbers_of_batch_dimensions": _numbers(
      (((1,), (1,)), ((0,), ())), "batch", "(0,)", "()"
    ),
    "no_contracting_dimension": _numbers((((), ()), ((), ())), "contracting"),
    "rank_2_and_3_without_dimension_numbers": _type(
      "dimension_numbers",
      "2",
      "3",
      lhs=mx(2, 4, 64),
      lhs_scale=e8m0(2, 4, 2),
    ),
    "contraction_over_rows": Malformed(
      TypeError,
      ("lhs_scale", "(64, 2)"),
      {"lhs": mx(64, 64), "lhs_scale": e8m0(64, 2)},
      {"dimension_numbers": (((0,), (1,)), ((), ()))},
    ),
    # ScaledArrays.
    "scaled_array_and_scale": _type(
      "lhs", "ScaledArray", "lhs_scale", lhs=mxfp8(4, 64)
    ),
    "scaled_array_blocked_along_rows": _type(
      "rhs",
      "dimension 0",
      "(1,)",
      rhs=mxfp8(64, 64, axis=0),
      rhs_scale=None,
    ),
    "swizzled_with_contraction_not_last": Malformed(
      TypeError,
      ("lhs", "dimension 1", "(0,)"),
      {"lhs": swizzled(64, 64), "lhs_scale": None},
      {"dimension_numbers": (((0,), (1,)), ((), ()))},
    ),
    "block_size_of_another_scaled_array": Malformed(
      ValueError,
      ("block_size", "lhs", "16"),
      {"lhs": mxfp8(4, 64), "lhs_scale": None},
      {"block_size": 16},
    ),
    "global_scale_along_the_contraction": _type(
      "global scale",
      "lhs",
      "(4, 64)",
      lhs=unchecked(fp4(4, 64), e4m3(4, 4), f32(4, 64), jp.NVFP4),
      lhs_scale=None,
    ),
    "global_scale_of_scaled_array_of_another_size": _type(
      "global_scale",
      "(3, 1)",
      "(4, 6)",
      lhs=unchecked(fp4(4, 64), e4m3(4, 4), f32(3), jp.NVFP4),
      lhs_scale=None,
    ),
    # Global scale, bias, residual.
    "bfloat16_global_scale": _type(
      "global_scale", "bfloat16", global_scale=ones((), jnp.bfloat16)
    ),
    "integer_global_scale": _type(
      "global_scale", "int32", global_scale=ones((), np.int32)
    ),
    "global_scale_does_not_broadcast": _type(
      "global_scale", "(5,)", "(4, 6)", global_scale=f32(5)
    ),
    "global_scale_of_another_rank": _type(
      "global_scale", "(1, 4, 6)", "(4, 6)", global_scale=f32(1, 4, 6)
    ),
    "global_scale_is_a_string": _static(
      TypeError, "global_scale", "str", global_scale="2"
    ),
    "bias_of_rows": _type("bias", "(4,)", "(6,)", bias=f32(4)),
    "bias_of_rank_2": _type("bias", "(1, 6)", "(6,)", bias=f32(1, 6)),
    "scalar_bias": _type("bias", "()", "(6,)", bias=f32()),
    "integer_bias": _type("bias", "int32", bias=ones((6,), np.int32)),
    "float8_bias": _type("bias", "float8_e4m3fn", bias=e4m3(6)),
    "transposed_residual": _type(
      "residual", "(6, 4)", "(4, 6)", residual=f32(6, 4)
    ),
    "residual_does_not_broadcast": _type(
      "residual", "(1, 6)", "(4, 6)", residual=f32(1, 6)
    ),
    "integer_residual": _type(
      "residual", "int32", residual=ones((4, 6), np.int32)
    ),
    "scaled_array_as_residual": _type(
      "residual", "ScaledArray", residual=mxfp8(4, 64)
    ),
    "bias_is_a_string": _static(TypeError, "bias", "str", bias="none"),
  }


CALLS: Final = malformed_calls()


def run(malformed: Malformed, mode: str) -> None:
  arrays = {**WELL_FORMED(), **malformed.arrays}
  static = malformed.static
  arrays = {k: v for k, v in arrays.items() if k not in static}
  function = lambda arrays: jp.block_scaled_dot(**arrays, **static)
  if mode == "eager":
    function(arrays)
  elif mode == "eval_shape":
    jax.eval_shape(function, arrays)
  elif mode == "jit":
    jax.jit(function).trace(arrays)
  else:
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), arrays)
    jax.vmap(function)(stacked)


MODES: Final = ("eager", "eval_shape", "jit", "vmap")


class MalformedCallTest(parameterized.TestCase):
  @parameterized.named_parameters((name, name) for name in CALLS)
  def test_malformed(self, name):
    malformed = CALLS[name]
    for mode in MODES:
      with self.subTest(mode):
        with self.assertRaises(malformed.error) as caught:
          run(malformed, mode)
        self.assertIs(type(caught.exception), malformed.error)
        message = str(caught.exception)
        self.assertStartsWith(message, "block_scaled_dot: ")
        for fragment in malformed.fragments:
          self.assertIn(fragment, message)
        # An f-string without its f would show a brace.
        self.assertNotRegex(message, r"[{}]")

  @parameterized.parameters(((6,),), ((1, 2, 6),))
  def test_mapped_global_scale_of_another_rank_is_refused(self, shape):
    # NumPy's broadcasting would take the mapped dimension for rows.
    arrays = {**WELL_FORMED(), "lhs": mx(2, 64), "lhs_scale": e8m0(2, 2)}
    function = lambda g: jp.block_scaled_dot(**arrays, global_scale=g)
    with self.assertRaisesRegex(
      TypeError, re.escape(f"global_scale of shape {shape}")
    ):
      jax.vmap(function)(f32(2, *shape))

  @parameterized.parameters(*MODES)
  def test_well_formed_call_passes(self, mode):
    run(Malformed(Exception, ()), mode)

  def test_there_are_enough_kinds(self):
    self.assertGreaterEqual(len(CALLS), MIN_MALFORMED_CALLS)
    kinds = collections.Counter(call.error for call in CALLS.values())
    self.assertGreater(kinds[TypeError], 30)
    self.assertGreater(kinds[ValueError], 8)

  @parameterized.product(
    implementation=("cudnn", "triton", "cpu"),
    mode=("eager", "eval_shape", "jit", "vmap"),
  )
  def test_forced_implementation_that_cannot_serve_is_refused(
    self, implementation, mode
  ):
    # A target that no implementation but xla knows.
    target = jp.Target(name="abacus", platform="abacus")
    malformed = _static(NotImplementedError, implementation=implementation)
    with (
      jp.use_target(target),
      self.assertRaises(NotImplementedError) as caught,
    ):
      run(malformed, mode)
    message = str(caught.exception)
    self.assertStartsWith(
      message, f"block_scaled_dot: implementation={implementation!r}"
    )
    for name in ("cudnn", "triton", "cpu", "xla"):
      self.assertRegex(message, rf"\n  {name}: \w+")
    self.assertIn("\n  xla: serves", message)
    self.assertIn("abacus", message)
    self.assertIn("m=4 n=6 k=64", message)

  @parameterized.parameters("cudnn", "triton")
  def test_gpu_implementation_is_refused_on_a_cpu(self, implementation):
    if jax.default_backend() != "cpu":
      self.skipTest(f"the default backend is {jax.default_backend()}")
    for mode in MODES:
      with self.assertRaisesRegex(
        NotImplementedError, rf"implementation='{implementation}'.*cpu"
      ):
        run(_static(Exception, implementation=implementation), mode)

  @parameterized.parameters("lhs", "rhs")
  def test_negative_nvfp4_scale_is_refused_where_it_is_known(self, side):
    other = "rhs" if side == "lhs" else "lhs"
    scale = np.ones((4, 2), np.float32)
    scale[3, 1] = -1.5
    scale = jnp.asarray(scale.astype(E4M3))
    args = {
      side: fp4(4, 32),
      f"{side}_scale": scale,
      other: fp4(6, 32),
      f"{other}_scale": e4m3(6, 2),
    }
    pattern = rf"{side}_scale.*negative.*-1\.5 at \(3, 1\)"
    with self.assertRaisesRegex(ValueError, pattern):
      jp.block_scaled_dot(**args)
    array = jp.ScaledArray(args[side], scale, None, jp.NVFP4)
    pair = {side: array, f"{side}_scale": None}
    with self.assertRaisesRegex(ValueError, pattern):
      jp.block_scaled_dot(**{**args, **pair})
    # Also as a constant of a function that is being traced.
    values = args.pop(side)
    args.pop(f"{side}_scale")
    function = lambda rest: jp.block_scaled_dot(
      **{side: values, f"{side}_scale": scale}, **rest
    )
    with self.assertRaisesRegex(ValueError, pattern):
      jax.jit(function).trace(args)

  def test_negative_zero_and_nan_nvfp4_scales_are_not_refused(self):
    scale = np.array([[0x80, 0xFF], [0x38, 0x7F]], np.uint8).view(E4M3)
    actual = jp.block_scaled_dot(
      fp4(2, 32), fp4(6, 32), jnp.asarray(scale), e4m3(6, 2)
    )
    self.assertTrue(np.isnan(np.asarray(actual)).all())

  def test_precisions_of_jax_are_accepted(self):
    for precision in (
      None,
      "default",
      "high",
      "highest",
      "bfloat16",
      jax.lax.Precision.HIGH,
      ("highest", "default"),
      (jax.lax.Precision.DEFAULT, None),
    ):
      jp.block_scaled_dot(**WELL_FORMED(), precision=precision)

  def test_error_names_the_remedy(self):
    for name, remedy in (
      ("k_is_no_multiple_of_32", "pad lhs and rhs"),
      ("rhs_scale_too_long", "pass block_size=32"),
      ("both_operands_plain", "jax.lax.dot_general"),
      ("scaled_array_blocked_along_rows", "axis=1"),
      ("quantized_lhs_without_scale", "pass lhs_scale"),
    ):
      with self.assertRaisesRegex(TypeError, re.escape(remedy)):
        run(CALLS[name], "eager")

  def test_asserts_are_gone_where_they_should_be(self):
    expected = int(os.environ.get(_UNDER_O, sys.flags.optimize))
    self.assertEqual(sys.flags.optimize, expected)


class OptimizedPythonTest(absltest.TestCase):
  def test_the_same_errors_under_python_o(self):
    root = pathlib.Path(jp.__file__).parent.parent
    path = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
      [
        sys.executable,
        "-O",
        "-m",
        "jaxplugin.call_errors_test",
        "MalformedCallTest",
      ],
      env={
        **os.environ,
        _UNDER_O: "1",
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
      },
      cwd=tempfile.gettempdir(),
      capture_output=True,
      text=True,
      timeout=300,
      check=False,
    )
    output = result.stdout + result.stderr
    self.assertEqual(result.returncode, 0, output[-5000:])
    (ran,) = re.findall(r"Ran (\d+) tests", output)
    self.assertGreater(int(ran), len(CALLS))


if __name__ == "__main__":
  absltest.main()

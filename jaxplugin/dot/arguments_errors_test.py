# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Malformed calls: each a typed error, while tracing, that says what is wrong.

TypeError is for rank, dtype and shape, ValueError for a bad parameter, and
NotImplementedError for what is valid but cannot be served. The last test runs
the others again under `python -O`, where `assert` checks nothing.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.dot import arguments

pytestmark = pytest.mark.smoke

MODES: Final = ("eager", "eval_shape", "jit", "vmap")
_UNDER_O: Final = "JAXPLUGIN_TEST_RUNS_OPTIMIZED"
E8M0: Final = formats.E8M0
E4M3: Final = formats.E4M3
E5M2: Final = formats.E5M2
E2M1: Final = formats.E2M1


def ones(shape: tuple[int, ...], dtype: Any) -> jax.Array:
  return jax.device_put(np.ones(shape, np.float32).astype(dtype))


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
  return jp.ScaledArray(e4m3(*shape), e8m0(*scale), None, jp.MXFP8)


def unchecked(
  values: Any, scale: Any, global_scale: Any, format: jp.BlockFormat
) -> jp.ScaledArray:
  """A `ScaledArray` as a pytree operation may make it, never validated."""
  children = (values, scale, global_scale)
  return jp.ScaledArray.tree_unflatten((format, "linear"), children)


def swizzled(rows: int, k: int) -> jp.ScaledArray:
  scale = jp.swizzle_scale(e8m0(rows, k // 32))
  return jp.ScaledArray(
    e4m3(rows, k), scale, None, jp.MXFP8, scale_layout="swizzled_128x4"
  )


@dataclasses.dataclass(frozen=True)
class Malformed:
  """A call and what must be raised.

  Attributes:
    error: the exact type.
    text: parts of its message, the argument and the values, between ` | `.
    arrays: keyword arguments that are traced. A well-formed call of
      lhs (4, 64) and rhs (6, 64), both MXFP8, fills in what is left out.
    static: keyword arguments that are not.
  """

  error: type[Exception]
  text: str
  arrays: dict[str, Any] = dataclasses.field(default_factory=dict)
  static: dict[str, Any] = dataclasses.field(default_factory=dict)


WELL_FORMED: Final[Callable[[], dict[str, Any]]] = lambda: {
  "lhs": e4m3(4, 64),
  "lhs_scale": e8m0(4, 2),
  "rhs": e4m3(6, 64),
  "rhs_scale": e8m0(6, 2),
}


def lhs(values: Any, scale: Any) -> dict[str, Any]:
  return {"lhs": values, "lhs_scale": scale}


def rhs(values: Any, scale: Any) -> dict[str, Any]:
  return {"rhs": values, "rhs_scale": scale}


def mx_lhs(*shape: int) -> dict[str, Any]:
  return lhs(e4m3(*shape), e8m0(*shape[:-1], shape[-1] // 32))


def mx_rhs(*shape: int) -> dict[str, Any]:
  return rhs(e4m3(*shape), e8m0(*shape[:-1], shape[-1] // 32))


def wrong(
  text: str, static: dict[str, Any] | None = None, **arrays: Any
) -> Malformed:
  return Malformed(TypeError, text, arrays, static or {})


def wrong_numbers(value: Any, text: str, **arrays: Any) -> Malformed:
  static = {"dimension_numbers": value}
  return wrong(f"dimension_numbers | {text}", static=static, **arrays)


def wrong_value(
  name: str, value: Any, text: str = "", **arrays: Any
) -> Malformed:
  """A ValueError that names the parameter, and its value or `text`."""
  text = f"{name} | {text or repr(value)}"
  return Malformed(ValueError, text, arrays, {name: value})


def wrong_result(dtype: Any, text: str = "") -> Malformed:
  name = "preferred_element_type"
  return wrong(f"{name} | {text}", static={name: dtype})


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
    stacked = jax.tree.map(lambda a: np.stack([a, a]), arrays)
    jax.vmap(function)(stacked)


_PADDED: Final = {"block_size": 32}
_TWO_K: Final = {"dimension_numbers": (((0, 1), (0, 1)), ((), ()))}
_OVER_ROWS: Final = {"dimension_numbers": (((0,), (1,)), ((), ()))}
_OF_FP4: Final = (fp4(4, 64), e4m3(4, 4))
CALLS: Final = {
  # Ranks.
  "lhs_is_a_vector": wrong("lhs | 1", **mx_lhs(64)),
  "rhs_has_one_more_dimension": wrong("rhs | 2 | 3", **mx_rhs(1, 6, 64)),
  "lhs_is_a_scalar": wrong("lhs | 0", lhs=e4m3(), lhs_scale=e8m0()),
  "lhs_scale_has_another_rank": wrong(
    "lhs_scale | (8,) | (4, 64)", lhs_scale=e8m0(8)
  ),
  "rhs_scale_is_a_scalar": wrong("rhs_scale | () | (6, 64)", rhs_scale=e8m0()),
  # Dtypes.
  "both_operands_plain": wrong(
    "lhs | rhs | float32", **lhs(f32(4, 64), None), **rhs(f32(6, 64), None)
  ),
  "quantized_lhs_without_scale": wrong(
    "lhs | float8_e4m3fn | lhs_scale", lhs_scale=None
  ),
  "quantized_rhs_without_scale": wrong(
    "rhs | float8_e4m3fn | rhs_scale", rhs_scale=None
  ),
  "integer_lhs_with_scale": wrong("lhs | int8", lhs=ones((4, 64), np.int8)),
  "integer_rhs_without_scale": wrong(
    "rhs | int32", rhs=ones((6, 64), np.int32), rhs_scale=None
  ),
  "packed_rhs_without_scale": wrong(
    "rhs | uint8 | rhs_scale", rhs=ones((6, 32), np.uint8), rhs_scale=None
  ),
  "bool_lhs": wrong("lhs | bool", lhs=ones((4, 64), np.bool_), lhs_scale=None),
  "complex_lhs": wrong(
    "lhs | complex64", lhs=ones((4, 64), np.complex64), lhs_scale=None
  ),
  "scale_for_plain_lhs": wrong(
    "lhs | float32 | lhs_scale | float8_e8m0fnu", lhs=f32(4, 64)
  ),
  "float32_scale": wrong(
    "rhs_scale | float32 | float8_e4m3fn", rhs_scale=f32(6, 2)
  ),
  "e4m3_values_with_e4m3_scale": wrong(
    "lhs_scale | float8_e4m3fn", lhs_scale=e4m3(4, 4)
  ),
  "e5m2_scale": wrong(
    "rhs_scale | float8_e5m2", rhs=fp4(6, 64), rhs_scale=ones((6, 4), E5M2)
  ),
  "uint8_scale": wrong("lhs_scale | uint8", lhs_scale=ones((4, 2), np.uint8)),
  "lhs_is_a_string": wrong("lhs | str", static={"lhs": "weights"}),
  "rhs_is_none": wrong("rhs | NoneType", static={"rhs": None}),
  # Sizes.
  "contracting_sizes_differ": wrong(
    "contracting | lhs | rhs | 64 | 96", **mx_rhs(6, 96)
  ),
  "batch_sizes_differ": wrong(
    "batch | lhs | rhs | 2 | 3", **mx_lhs(2, 4, 64), **mx_rhs(3, 6, 64)
  ),
  "batch_size_one_does_not_broadcast": wrong(
    "batch | (1, 4, 64) | (3, 6, 64)", **mx_lhs(1, 4, 64), **mx_rhs(3, 6, 64)
  ),
  "k_is_no_multiple_of_32": wrong(
    "lhs | k=100 | 32",
    **lhs(e4m3(4, 100), e8m0(4, 4)),
    **rhs(e4m3(6, 100), e8m0(6, 4)),
  ),
  "k_is_no_multiple_of_16": wrong(
    "rhs | k=40 | 16", **lhs(f32(4, 40), None), **rhs(fp4(6, 40), e4m3(6, 3))
  ),
  "lhs_scale_too_short": wrong(
    "lhs_scale | (4, 1) | (4, 2)", lhs_scale=e8m0(4, 1)
  ),
  "rhs_scale_too_long": wrong(
    "rhs_scale | (6, 4) | (6, 2) | block_size", rhs_scale=e8m0(6, 4)
  ),
  "rhs_scale_has_too_few_rows": wrong(
    "rhs_scale | (5, 2) | (6, 2)", rhs_scale=e8m0(5, 2)
  ),
  "scale_per_16_for_mxfp4": wrong(
    "rhs_scale | (6, 4) | (6, 2) | mxfp4", **rhs(fp4(6, 64), e8m0(6, 4))
  ),
  "scale_per_32_for_nvfp4": wrong(
    "rhs_scale | (6, 2) | (6, 4) | nvfp4", **rhs(fp4(6, 64), e4m3(6, 2))
  ),
  "packed_size_taken_for_logical": wrong(
    "64 | 128", rhs=ones((6, 64), np.uint8), rhs_scale=e8m0(6, 2)
  ),
  "padded_scale_without_block_size": wrong(
    "lhs_scale | (128, 4) | (4, 2) | block_size=32", lhs_scale=e8m0(128, 4)
  ),
  "padded_scale_too_small": wrong(
    "lhs_scale | (128, 1) | (4, 2)", lhs_scale=e8m0(128, 1), static=_PADDED
  ),
  "padded_scale_has_too_few_rows": wrong(
    "rhs_scale | (5, 4) | (6, 2)", rhs_scale=e8m0(5, 4), static=_PADDED
  ),
  "padded_scale_is_padded_in_batch": wrong(
    "lhs_scale | (3, 4, 2) | (2, 4, 2) | batch",
    **lhs(e4m3(2, 4, 64), e8m0(3, 4, 2)),
    **mx_rhs(2, 6, 64),
    static=_PADDED,
  ),
  "padded_scale_fits_two_contracting_dimensions": wrong(
    "rhs_scale | (2, 4, 6)",
    **lhs(f32(2, 3, 4), None),
    **rhs(e4m3(2, 3, 6), e8m0(2, 4, 6)),
    static=_PADDED | _TWO_K,
  ),
  # Parameters.
  "block_size_of_another_format": wrong_value(
    "block_size", 16, "16 | 32 | mxfp8"
  ),
  "block_size_64": wrong_value("block_size", 64),
  "block_size_0": wrong_value("block_size", 0),
  "negative_block_size": wrong_value("block_size", -32),
  "block_size_is_a_string": wrong_value("block_size", "32"),
  "unknown_implementation": wrong_value(
    "implementation", "cublas", "'cublas' | cudnn | triton | cpu | xla"
  ),
  "implementation_in_capitals": wrong_value("implementation", "XLA"),
  "unknown_activation": wrong_value(
    "activation", "tanh", "'tanh' | relu | gelu | silu"
  ),
  "activation_is_a_function": wrong_value("activation", jax.nn.relu, "relu"),
  "unknown_precision": wrong_value("precision", "exact", "'exact' | highest"),
  "precision_is_a_number": wrong_value("precision", 32),
  "unknown_precision_in_a_pair": wrong_value(
    "precision", ("highest", "best"), "'best'"
  ),
  "integer_result": wrong_result(jnp.int32, "int32"),
  "float8_result": wrong_result(jnp.float8_e4m3fn, "float8_e4m3fn"),
  "float64_result": wrong_result(np.float64, "float64"),
  "result_dtype_is_no_dtype": wrong_result("bf17", "'bf17'"),
  "result_dtype_is_an_array": wrong_result(np.ones(3)),
  # Dimension numbers.
  "dimension_numbers_is_a_number": wrong_numbers(1, "1"),
  "dimension_numbers_is_a_string": wrong_numbers("mk,nk", "'mk,nk'"),
  "dimension_numbers_without_batch": wrong_numbers(
    ((1,), (1,)), "((1,), (1,))"
  ),
  "dimension_is_a_float": wrong_numbers((((1.5,), (1,)), ((), ())), "1.5"),
  "dimension_is_a_digit": wrong_numbers(((("1",), (1,)), ((), ())), "'1'"),
  "contracting_dimension_out_of_range": wrong_numbers(
    (((2,), (1,)), ((), ())), "lhs | 2 | (4, 64)"
  ),
  "negative_contracting_dimension": wrong_numbers(
    (((1,), (-1,)), ((), ())), "rhs | -1 | (6, 64)"
  ),
  "negative_batch_dimension": wrong_numbers(
    (((1,), (1,)), ((-2,), (0,))), "lhs | -2 | (4, 64)"
  ),
  "dimension_twice_in_lhs": wrong_numbers(
    (((1, 1), (1, 0)), ((), ())), "lhs | (1, 1)"
  ),
  "dimension_both_contracting_and_batch": wrong_numbers(
    (((1,), (1,)), ((0,), (1,))), "rhs | (1, 1)"
  ),
  "unequal_numbers_of_contracting_dimensions": wrong_numbers(
    (((0, 1), (1,)), ((), ())), "contracting | (0, 1) | (1,)"
  ),
  "unequal_numbers_of_batch_dimensions": wrong_numbers(
    (((1,), (1,)), ((0,), ())), "batch | (0,) | ()"
  ),
  "no_contracting_dimension": wrong_numbers(
    (((), ()), ((), ())), "contracting"
  ),
  "rank_2_and_3_without_dimension_numbers": wrong(
    "dimension_numbers | 2 | 3", **mx_rhs(2, 6, 64)
  ),
  "contraction_over_rows": wrong(
    "lhs_scale | (64, 2)", **mx_lhs(64, 64), static=_OVER_ROWS
  ),
  # Quantized arrays.
  "scaled_array_and_scale": wrong(
    "lhs | ScaledArray | lhs_scale", lhs=mxfp8(4, 64)
  ),
  "scaled_array_blocked_along_rows": wrong(
    "rhs | dimension 0 | (1,)", **rhs(mxfp8(64, 64, axis=0), None)
  ),
  "swizzled_with_contraction_not_last": wrong(
    "lhs | dimension 1 | (0,)", **lhs(swizzled(64, 64), None), static=_OVER_ROWS
  ),
  "block_size_of_another_scaled_array": wrong_value(
    "block_size", 16, "lhs | 16", **lhs(mxfp8(4, 64), None)
  ),
  "global_scale_along_the_contraction": wrong(
    "global_scale | lhs | (4, 64)",
    **lhs(unchecked(*_OF_FP4, f32(4, 64), jp.NVFP4), None),
  ),
  "global_scale_of_scaled_array_of_another_size": wrong(
    "global_scale | float32[3] | (4, 64)",
    **lhs(unchecked(*_OF_FP4, f32(3), jp.NVFP4), None),
  ),
  # Epilogues.
  "bfloat16_global_scale": wrong(
    "global_scale | bfloat16", global_scale=ones((), jnp.bfloat16)
  ),
  "integer_global_scale": wrong(
    "global_scale | int32", global_scale=ones((), np.int32)
  ),
  "global_scale_does_not_broadcast": wrong(
    "global_scale | (5,) | (4, 6)", global_scale=f32(5)
  ),
  "global_scale_of_another_rank": wrong(
    "global_scale | (1, 4, 6) | (4, 6)", global_scale=f32(1, 4, 6)
  ),
  "global_scale_is_a_string": wrong(
    "global_scale | str", static={"global_scale": "2"}
  ),
  "bias_of_rows": wrong("bias | (4,) | (6,)", bias=f32(4)),
  "bias_of_rank_2": wrong("bias | (1, 6) | (6,)", bias=f32(1, 6)),
  "scalar_bias": wrong("bias | () | (6,)", bias=f32()),
  "integer_bias": wrong("bias | int32", bias=ones((6,), np.int32)),
  "float8_bias": wrong("bias | float8_e4m3fn", bias=e4m3(6)),
  "transposed_residual": wrong(
    "residual | (6, 4) | (4, 6)", residual=f32(6, 4)
  ),
  "residual_does_not_broadcast": wrong(
    "residual | (1, 6) | (4, 6)", residual=f32(1, 6)
  ),
  "integer_residual": wrong(
    "residual | int32", residual=ones((4, 6), np.int32)
  ),
  "scaled_array_as_residual": wrong(
    "residual | ScaledArray", residual=mxfp8(4, 64)
  ),
  "bias_is_a_string": wrong("bias | str", static={"bias": "none"}),
}


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
        for fragment in malformed.text.split(" | "):
          self.assertIn(fragment, message)
        # An f-string without its f would show a brace.
        self.assertNotRegex(message, r"[{}]")

  @parameterized.parameters(((6,),), ((1, 2, 6),))
  def test_mapped_global_scale_of_another_rank_is_refused(self, shape):
    # NumPy's broadcasting would take the mapped dimension for rows.
    arrays = {**WELL_FORMED(), **mx_lhs(2, 64)}
    function = lambda g: jp.block_scaled_dot(**arrays, global_scale=g)
    with self.assertRaisesRegex(
      TypeError, re.escape(f"got shape {shape}; reshape it")
    ):
      jax.vmap(function)(f32(2, *shape))

  @parameterized.parameters(*MODES)
  def test_well_formed_call_passes(self, mode):
    run(Malformed(Exception, ""), mode)

  @parameterized.product(implementation=("cudnn", "triton", "cpu"), mode=MODES)
  def test_forced_implementation_that_cannot_serve_is_refused(
    self, implementation, mode
  ):
    # A target that no implementation but xla knows.
    target = jp.Target(name="abacus", platform="abacus")
    error = NotImplementedError
    static = {"implementation": implementation}
    malformed = Malformed(error, "", static=static)
    with jp.use_target(target), self.assertRaises(error) as caught:
      run(malformed, mode)
    message = str(caught.exception)
    self.assertStartsWith(
      message, f"block_scaled_dot: implementation={implementation!r}"
    )
    for name in ("cudnn", "triton", "cpu", "xla"):
      self.assertRegex(message, rf"\n  {name}: \w+")
    self.assertIn("\n  xla: supported", message)
    self.assertIn("abacus", message)
    self.assertIn("m=4 n=6 k=64", message)

  @parameterized.parameters("lhs", "rhs")
  def test_negative_nvfp4_scale_is_refused_where_it_is_known(self, side):
    other = "rhs" if side == "lhs" else "lhs"
    scale = np.ones((4, 2), np.float32)
    scale[3, 1] = -1.5
    scale = jnp.asarray(scale.astype(formats.E4M3))
    args = {side: fp4(4, 32), f"{side}_scale": scale}
    args |= {other: fp4(6, 32), f"{other}_scale": e4m3(6, 2)}
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
    for known in (scale, np.asarray(scale)):
      function = lambda rest, known=known: jp.block_scaled_dot(
        **{side: values, f"{side}_scale": known}, **rest
      )
      with self.assertRaisesRegex(ValueError, pattern):
        jax.jit(function).trace(args)

  def test_negative_padding_of_a_known_scale_is_not_refused(self):
    padded = np.pad(np.ones((4, 2)), ((0, 0), (0, 2)), constant_values=-1)
    padded = padded.astype(formats.E4M3)
    for scale in (padded, jnp.asarray(padded)):
      dot = lambda x, scale=scale: jp.block_scaled_dot(
        x, x, scale, scale, block_size=16
      )
      self.assertEqual(jax.eval_shape(dot, fp4(4, 32)).shape, (4, 4))

  def test_negative_zero_and_nan_nvfp4_scales_are_not_refused(self):
    scale = np.array([[0x80, 0xFF], [0x38, 0x7F]], np.uint8).view(formats.E4M3)
    actual = jp.block_scaled_dot(
      fp4(2, 32), fp4(6, 32), jnp.asarray(scale), e4m3(6, 2)
    )
    self.assertTrue(np.isnan(np.asarray(actual)).all())

  def test_precisions_of_jax_are_accepted(self):
    of_jax = jax.lax.Precision
    highest = ("highest", ("highest", "default"), ("default", "highest"))
    for precision in (
      *(None, "fastest", "default", "high", "bfloat16", of_jax.HIGH),
      *((of_jax.DEFAULT, None), *highest),
    ):
      is_highest = precision in highest
      jp.block_scaled_dot(**WELL_FORMED(), precision=precision)
      self.assertIs(arguments.canonical_precision(precision), is_highest)

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
  @pytest.mark.full
  def test_the_same_errors_under_python_o(self):
    root = pathlib.Path(jp.__file__).parent.parent
    path = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
      [
        *(sys.executable, "-O", "-m", "jaxplugin.dot.arguments_errors_test"),
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


if __name__ == "__main__":  # the test of python -O runs it
  absltest.main()

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations of the interpreter that Triton's own does wrongly or unchecked.

Triton's interpreter keeps bf16 and FP8 as unsigned integers. It adds and
multiplies bf16 tensors as if they were such, hands their bits to `np.matmul`,
and truncates where it casts to them (triton 3.9). The methods here decode to
f32, compute, and round once to nearest even.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from jaxplugin.kernels.gpu import decode
from jaxplugin.testing.interpreter import interpret_memory

# Types whose bits the interpreter keeps in unsigned integers.
_ENCODED: Final = {
  tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
  tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
  tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
}
_SATURATING: Final = (tl.float8e4nv, tl.float8e5)
_ON_BITS: Final = (
  np.bitwise_and,
  np.bitwise_or,
  np.bitwise_xor,
  np.left_shift,
  np.right_shift,
  np.where,
)

Handle = interpreter.TensorHandle


def methods(
  builder: Any, memory: interpret_memory.Memory
) -> dict[str, Callable[..., Any]]:
  """Methods to put in the place of `builder`'s own."""
  return {
    "create_masked_load": _load(memory, builder.create_masked_load),
    "create_masked_store": _store(memory, builder.create_masked_store),
    "create_atomic_rmw": _atomic_rmw(memory, builder.create_atomic_rmw),
    "create_atomic_cas": _atomic_cas(memory, builder.create_atomic_cas),
    "cast_impl": _cast(builder.cast_impl),
    "create_fp_to_fp": _convert,
    "unary_op": _on_values(builder.unary_op, 1),
    "binary_op": _on_values(builder.binary_op, 2),
    "ternary_op": _on_values(builder.ternary_op, 3),
    "create_dot": _dot,
    "create_inline_asm": _inline_assembly,
  }


def _check(
  memory: interpret_memory.Memory, pointers: Any, mask: Any, write: bool
) -> None:
  bits = max(8, pointers.get_element_ty().primitive_bitwidth)
  memory.check(pointers.data, mask.data, bits // 8, write)


def _load(
  memory: interpret_memory.Memory, original: Callable[..., Any]
) -> Callable[..., Any]:
  def create_masked_load(
    pointers: Any, mask: Any, *args: Any, **kwargs: Any
  ) -> Any:
    _check(memory, pointers, mask, write=False)
    return original(pointers, mask, *args, **kwargs)

  return create_masked_load


def _store(
  memory: interpret_memory.Memory, original: Callable[..., Any]
) -> Callable[..., Any]:
  def create_masked_store(
    pointers: Any, value: Any, mask: Any, *args: Any, **kwargs: Any
  ) -> Any:
    _check(memory, pointers, mask, write=True)
    return original(pointers, value, mask, *args, **kwargs)

  return create_masked_store


def _atomic_rmw(
  memory: interpret_memory.Memory, original: Callable[..., Any]
) -> Callable[..., Any]:
  def create_atomic_rmw(
    op: Any, pointers: Any, value: Any, mask: Any, *args: Any
  ) -> Any:
    _check(memory, pointers, mask, write=True)
    return original(op, pointers, value, mask, *args)

  return create_atomic_rmw


def _atomic_cas(
  memory: interpret_memory.Memory, original: Callable[..., Any]
) -> Callable[..., Any]:
  def create_atomic_cas(pointers: Any, *args: Any) -> Any:
    everywhere = Handle(np.ones_like(pointers.data, dtype=bool), tl.int1)
    _check(memory, pointers, everywhere, write=True)
    return original(pointers, *args)

  return create_atomic_cas


def _decode(handle: Any) -> np.ndarray:
  """The numbers of a tensor; f32 where the interpreter keeps bits."""
  dtype = _ENCODED.get(handle.dtype.scalar)
  if dtype is None:
    return handle.data
  return np.ascontiguousarray(handle.data).view(dtype).astype(np.float32)


def _encode(data: np.ndarray, dtype: Any) -> Any:
  """A tensor of numbers rounded to nearest even to the scalar type `dtype`."""
  target = _ENCODED.get(dtype)
  if target is None:
    return Handle(data.astype(interpreter._get_np_dtype(dtype)), dtype)
  if dtype in _SATURATING:
    largest = float(ml_dtypes.finfo(target).max)
    data = np.clip(data, -largest, largest)  # NaN stays
  bits = np.dtype(f"uint{8 * target.itemsize}")
  return Handle(data.astype(np.float32).astype(target).view(bits), dtype)


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
  def cast_impl(source: Any, dtype: Any) -> Any:
    if source.dtype.scalar in _ENCODED or dtype.scalar in _ENCODED:
      return _encode(_decode(source), dtype.scalar)
    return original(source, dtype)

  return cast_impl


def _convert(source: Any, dtype: Any, rounding: Any) -> Any:
  """`create_fp_to_fp`; FP8 conversions come here."""
  if rounding == interpreter._ir.ROUNDING_MODE.RTZ:
    raise NotImplementedError("the interpreter rounds to nearest even only")
  unknown = {source.dtype.scalar, dtype.scalar} - {
    *_ENCODED,
    tl.float16,
    tl.float32,
    tl.float64,
  }
  if unknown:
    raise NotImplementedError(f"the interpreter does not support {unknown}")
  return _encode(_decode(source), dtype.scalar)


def _on_values(original: Callable[..., Any], arity: int) -> Callable[..., Any]:
  """`unary_op` and its kind, computing in f32 where tensors hold bits."""

  def operation(*args: Any) -> Any:
    operands, op = args[:arity], args[arity]
    dtype = operands[-1].dtype.scalar
    if dtype not in _ENCODED or op in _ON_BITS:
      return original(*args)
    result = op(*(_decode(operand) for operand in operands))
    if result.dtype == np.bool_:
      return Handle(result, tl.int1)
    return _encode(result, dtype)

  return operation


def _dot(
  lhs: Any, rhs: Any, acc: Any, input_precision: Any, max_imprecise: Any
) -> Any:
  """`create_dot`: products and sums in the accumulator's type, f32 at least."""
  del input_precision, max_imprecise
  dtype = np.promote_types(
    acc.data.dtype,
    np.float32 if acc.dtype.scalar.is_floating() else np.int32,
  )
  product = np.matmul(_decode(lhs).astype(dtype), _decode(rhs).astype(dtype))
  return _encode(product + _decode(acc), acc.dtype.scalar)


def _halves(word: Any) -> tuple[np.ndarray, ...]:
  data = np.ascontiguousarray(word.data)
  return (data & 0xFFFF).astype(np.uint16), (data >> 16).astype(np.uint16)


def _reciprocal(x: Any) -> tuple[np.ndarray, ...]:
  with np.errstate(divide="ignore"):
    return (np.float32(1) / x.data,)


def _pairs_to_e2m1(low: Any, high: Any) -> tuple[np.ndarray, ...]:
  """Saturating; NaN becomes the largest number (PTX ISA, "cvt")."""

  def code(x: Any) -> np.ndarray:
    finite = np.where(np.isnan(x.data), np.inf, x.data)
    clipped = np.clip(finite, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return clipped.view(np.uint8) & np.uint8(0xF)

  return (code(low) | code(high) << np.uint8(4),)


def _e4m3_pairs(pairs: Any) -> tuple[np.ndarray, ...]:
  data = np.ascontiguousarray(pairs.data)
  return tuple(
    code.astype(np.uint8)
    .view(ml_dtypes.float8_e4m3fn)
    .astype(ml_dtypes.bfloat16)
    .view(np.uint16)
    for code in (data & 0xFF, data >> 8)
  )


def _e2m1_pairs(pairs: Any) -> tuple[np.ndarray, ...]:
  """Converts bytes to one word each, or words to four words each."""
  data = np.ascontiguousarray(pairs.data)
  if data.dtype == np.uint8:
    return (_e2m1_pair(data),)
  return tuple(
    _e2m1_pair((data >> np.uint32(shift)).astype(np.uint8))
    for shift in (0, 8, 16, 24)
  )


def _e2m1_pair(codes: np.ndarray) -> np.ndarray:
  low, high = (
    code.view(ml_dtypes.float4_e2m1fn)
    .astype(ml_dtypes.bfloat16)
    .view(np.uint16)
    .astype(np.uint32)
    for code in (codes & np.uint8(0xF), codes >> np.uint8(4))
  )
  return low | high << np.uint32(16)


def _e2m1_pair_in_f32(codes: Any) -> tuple[np.ndarray, ...]:
  data = np.ascontiguousarray(codes.data)
  low, high = (
    (data >> np.uint32(shift) & np.uint32(0xF))
    .astype(np.uint8)
    .view(ml_dtypes.float4_e2m1fn)
    .astype(np.float32)
    .view(np.uint32)
    .astype(np.uint64)
    for shift in (0, 4)
  )
  return (low | high << np.uint64(32),)


def _bf16_of(dtype: Any) -> Callable[[Any], tuple[np.ndarray, ...]]:
  """The conversion of codes of one of ml_dtypes' types."""

  def convert(codes: Any) -> tuple[np.ndarray, ...]:
    values = np.ascontiguousarray(codes.data).view(dtype)
    return (values.astype(ml_dtypes.bfloat16).view(np.uint16),)

  return convert


def _bf16_products(x: Any, y: Any) -> tuple[np.ndarray, ...]:
  product = _decode(x).astype(np.float32) * _decode(y).astype(np.float32)
  return (product.astype(ml_dtypes.bfloat16).view(np.uint16),)


# The kernels' inline PTX, and its computation in NumPy. If the PTX has several
# instructions in braces, the function computes their combined result. Tests of
# compiled kernels check the instructions themselves.
_ASSEMBLY: Final[dict[str, Callable[..., tuple[np.ndarray, ...]]]] = {
  decode.E4M3_TO_BF16.value: _bf16_of(ml_dtypes.float8_e4m3fn),
  decode.E2M1_TO_BF16.value: _e2m1_pairs,
  decode.E2M1_TO_F32.value: _e2m1_pair_in_f32,
  decode.INT8_TO_BF16.value: _bf16_of(np.int8),
  decode.INT8_PAIR_TO_BF16.value: _bf16_of(np.int8),
  decode.E5M2_TO_BF16.value: _bf16_of(ml_dtypes.float8_e5m2),
  decode.PRODUCTS_OF_PAIRS.value: _bf16_products,
  decode.HALVES.value: _halves,
  decode.E4M3_PAIR_TO_BF16.value: _e4m3_pairs,
  "// $0": lambda x: (x.data,),  # no instruction
  "and.b32 $0, $1, $2;": lambda a, b: (a.data & b.data,),
  "rcp.approx.ftz.f32 $0, $1;": _reciprocal,
  "cvt.rn.satfinite.e2m1x2.f32": _pairs_to_e2m1,
}


class _Results:
  """Results of a call of inline assembly."""

  def __init__(self, handles: list[Any]) -> None:
    self._handles = handles

  def get_result(self, index: int) -> Any:
    return self._handles[index]


def _inline_assembly(
  text: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int
) -> _Results:
  """`create_inline_asm`, of what `_ASSEMBLY` has."""
  del constraints, is_pure, pack
  known = text
  if text.startswith("{"):
    names = {line.split()[0] for line in text.splitlines() if line.split()}
    known = next((name for name in sorted(names) if name in _ASSEMBLY), text)
  if known not in _ASSEMBLY:
    raise NotImplementedError(f"the interpreter does not support PTX {text!r}")
  results = _ASSEMBLY[known](*values)
  return _Results(
    [Handle(x, type.scalar) for x, type in zip(results, types, strict=True)]
  )


# Absent before Triton 3.9, where `interpret.unsupported` says so.
_triton_scale: Any = getattr(interpreter, "_dot_scaled_scale_to_f32", None)
_triton_values: Any = getattr(
  interpreter, "_mxfp_value_handle_to_float32", None
)


def dot_scaled_scale(handle: Any, compute_type: Any) -> np.ndarray:
  """f32 of a scale of `tl.dot_scaled`; Triton 3.9 reads E4M3 as E8M0."""
  if handle.dtype.scalar not in _ENCODED:
    return _triton_scale(handle, compute_type)
  return _decode(handle).astype(np.float32)


def dot_scaled_values(handle: Any) -> np.ndarray:
  """f32 of values of `tl.dot_scaled`; Triton 3.9 loses E5M2's subnormals."""
  if handle.dtype.scalar not in _ENCODED:
    return _triton_values(handle)
  return _decode(handle).astype(np.float32)


# What of `tl.dot_scaled` is replaced, by Triton's names.
DOT_SCALED: Final = {
  "_dot_scaled_scale_to_f32": dot_scaled_scale,
  "_mxfp_value_handle_to_float32": dot_scaled_values,
}

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds, reads and checks the block-scaled calls of a StableHLO module.

XLA and JAX define these calls. Sizes are static. Arrays stand for their logical
values, whatever their layouts.

  custom_call @__op$quantize(x) -> (values, scale)
    Blocks are along the last dimension. The result types determine the formats
    and the block size.
  custom_call @__op$dequantize(values, scale) -> floats
  custom_call @__op$block_scaled_dot(lhs, rhs, lhs_scale[, rhs_scale[,
      global_scale]]) -> result
    [m, k] x [n, k], or [batch, m, k] x [batch, n, k]. With 3 operands rhs is
    unquantized. The global_scale is a scalar of the result's dtype. A scale may
    have more rows than its operand. It may have more columns if backend_config
    has {"block_scaled_dot_backend_config": {"block_size": 32}}.
  custom_call @__cudnn$blockScaledDot(lhs, rhs, lhs_scale, rhs_scale[,
      global_scale]) -> (result, u8[...] workspace)
    The same with scales in the 128x4 layout of tcgen05.
  composite "xla.scaled_dot"(lhs, rhs, lhs_scale, rhs_scale) -> result
    The lowering of `jax.lax.scaled_dot`. For an operand without scale JAX
    passes E8M0 ones, one for each row. A scale may also cover several rows, as
    XLA's scaled dot allows. JAX writes version 0 and XLA version 1; both mean
    the same.

Several results may also be one tuple, as in HLO.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any, Final

import jax
import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

from jaxplugin.core import formats
from jaxplugin.dot.backends import cudnn
from jaxplugin.stablehlo import module_parsing, modules

QUANTIZE: Final = "__op$quantize"
DEQUANTIZE: Final = "__op$dequantize"
DOT: Final = cudnn.DOT_TARGET
SWIZZLED_DOT: Final = cudnn.SWIZZLED_DOT_TARGET
SCALED_DOT: Final = "xla.scaled_dot"

# Versions of the composite. XLA's own rewriter does not read them.
_VERSIONS: Final = (0, 1)

# A JSON string, or a word that only protobuf's JSON parser accepts: a string in
# single quotes, or a field name without quotes.
_JSON_WORD: Final = re.compile(
  r"""\"(?:[^"\\]|\\.)*"|'([^'\\]*)'|([A-Za-z_]\w*)(?=\s*:)"""
)

# Numbers of operands, and the number of results, of each call.
_ARITY: Final = {
  QUANTIZE: ((1,), 2),
  DEQUANTIZE: ((2,), 1),
  DOT: ((3, 4, 5), 1),
  SWIZZLED_DOT: ((4, 5), 2),
  SCALED_DOT: ((4,), 1),
}

# MLIR's names of supported element types.
_DTYPES: Final = {
  "f16": np.dtype(np.float16),
  "bf16": formats.BF16,
  "f32": np.dtype(np.float32),
  "f8E4M3FN": formats.E4M3,
  "f8E5M2": formats.E5M2,
  "f8E8M0FNU": formats.E8M0,
  "f4E2M1FN": formats.E2M1,
  "f8E3M4": np.dtype(ml_dtypes.float8_e3m4),
  "f8E4M3": np.dtype(ml_dtypes.float8_e4m3),
  "f8E4M3B11FNUZ": np.dtype(ml_dtypes.float8_e4m3b11fnuz),
  "f8E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
  "f8E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
  "i1": np.dtype(np.bool_),
  "i4": np.dtype(ml_dtypes.int4),
  "ui4": np.dtype(ml_dtypes.uint4),
  "i8": np.dtype(np.int8),
  "ui8": np.dtype(np.uint8),
  "i16": np.dtype(np.int16),
  "ui16": np.dtype(np.uint16),
  "i32": np.dtype(np.int32),
  "ui32": np.dtype(np.uint32),
}

DimensionNumbers = tuple[tuple[tuple[int, ...], ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleCall:
  """All facts of a call that determine its computation. Hashable.

  Attributes:
    name: `QUANTIZE`, `DEQUANTIZE`, `DOT`, `SWIZZLED_DOT` or `SCALED_DOT`.
    operands, results: shapes and dtypes.
    block_sizes: block sizes of the quantized operands, in order. A block size
      comes from backend_config, or is k divided by the columns of the scale.
    dimension_numbers: dimension numbers of a `SCALED_DOT`, as for
      `lax.dot_general`.
    has_scale: whether lhs and rhs have a scale. An unquantized operand with a
      scale of ones has none.
  """

  name: str
  operands: tuple[jax.ShapeDtypeStruct, ...]
  results: tuple[jax.ShapeDtypeStruct, ...]
  block_sizes: tuple[int, ...] = ()
  dimension_numbers: DimensionNumbers | None = None
  has_scale: tuple[bool, bool] = (True, True)


def find(source: modules.ParsedModule) -> list[Any]:
  """Returns the block-scaled calls of `source`, in the module's order."""
  return [
    operation
    for operation in modules.walk(source.module.operation)
    if call_name(operation) is not None
  ]


def call_name(operation: Any) -> str | None:
  """Returns the name of a block-scaled call; None for other operations."""
  if operation.name == "stablehlo.composite":
    name = module_parsing.string(operation.attributes["name"])
    return name if name == SCALED_DOT else None
  name = module_parsing.custom_call(operation)
  return name if name in _ARITY and name != SCALED_DOT else None


def title(operation: Any, source: modules.ParsedModule) -> str:
  """Returns a call's name, operand types and location, for messages."""
  types = ", ".join(str(operand.type) for operand in operation.operands)
  place = source.location(operation)
  return f"{call_name(operation)}({types})" + (f" at {place}" if place else "")


def read(operation: Any) -> ModuleCall:
  """Reads and checks a call.

  Raises:
    TypeError: If its operands or results do not fit the call.
    ValueError: If one of its attributes is invalid.
    NotImplementedError: If sizes are dynamic, or it aliases buffers.
  """
  name = call_name(operation)
  assert name is not None
  operands = [operand.type for operand in operation.operands]
  results = result_types(operation)
  counts, num_results = _ARITY[name]
  if len(operands) not in counts or len(results) != num_results:
    raise TypeError(
      f"it must have {' or '.join(map(str, counts))} operands and"
      f" {num_results} results, got {len(operands)} and {len(results)}"
    )
  _refuse_attributes(operation)
  call = ModuleCall(
    name=name,
    operands=tuple(map(array_type, operands)),
    results=tuple(map(array_type, results)),
  )
  if name == SCALED_DOT:
    return _with_composite_attributes(call, operation)
  return dataclasses.replace(
    call, block_sizes=_block_sizes(call, _given_block_size(operation))
  )


def result_types(operation: Any) -> list[Any]:
  """Returns the types of the results, also if they are one tuple."""
  types = [result.type for result in operation.results]
  if has_tuple(operation):
    (tuple_type,) = types
    return [tuple_type.get_type(i) for i in range(tuple_type.num_types)]
  return types


def has_tuple(operation: Any) -> bool:
  """Returns whether the results are one tuple."""
  results = operation.results
  return len(results) == 1 and isinstance(results[0].type, ir.TupleType)


def array_type(ir_type: Any) -> jax.ShapeDtypeStruct:
  """Returns the shape and dtype of an MLIR tensor type.

  Raises:
    TypeError: If the type is not supported in a call.
    NotImplementedError: If the sizes are not static.
  """
  if not isinstance(ir_type, ir.RankedTensorType):
    raise TypeError(f"operands and results must be arrays, got {ir_type}")
  if not ir_type.has_static_shape:
    raise NotImplementedError(
      f"sizes must be static, got {ir_type}; refine the module's shapes first"
    )
  dtype = _DTYPES.get(str(ir_type.element_type))
  if dtype is None:
    raise TypeError(
      f"an array must have an element type among {', '.join(_DTYPES)}, got"
      f" {ir_type}"
    )
  return jax.ShapeDtypeStruct(tuple(ir_type.shape), dtype)


def has_default_layouts(operation: Any) -> bool:
  """Returns whether all layouts of a call are row-major."""
  for name in ("operand_layouts", "result_layouts"):
    if name in operation.attributes:
      for layout in operation.attributes[name]:
        order = [int(i) for i in ir.DenseIntElementsAttr(layout)]
        if order != sorted(order, reverse=True):
          return False
  return True


def _refuse_attributes(operation: Any) -> None:
  """Raises NotImplementedError for attributes with an effect besides values."""
  attributes = operation.attributes
  for name in ("called_computations", "output_operand_aliases"):
    if name in attributes and len(attributes[name]):
      raise NotImplementedError(
        f"it must have no {name}, got {attributes[name]}"
      )
  if operation.name == "stablehlo.composite" and "version" in attributes:
    version = attributes["version"].value
    if version not in _VERSIONS:
      raise NotImplementedError(f"its version must be 0 or 1, got {version}")


def _given_block_size(operation: Any) -> int | None:
  """Returns the block size in a call's backend_config, or None."""
  config = None
  for name in ("backend_config", "mhlo.backend_config"):
    if name in operation.attributes:
      config = config or _as_python(operation.attributes[name])
  if isinstance(config, str) and config:
    try:
      config = json.loads(_JSON_WORD.sub(_quoted, config))
    except (ValueError, RecursionError) as error:
      shown = config if len(config) < 200 else f"{config[:200]}..."
      raise ValueError(
        f"its backend_config must be JSON, got {shown!r}: {error}"
      ) from None
  config = config or {}
  if not isinstance(config, dict):
    raise ValueError(f"its backend_config must be an object, got {config!r}")
  # Protobuf's JSON accepts both cases of names, and 64-bit integers as strings.
  inner = config.get(
    "block_scaled_dot_backend_config", config.get("blockScaledDotBackendConfig")
  )
  if inner is None:
    return None
  given: Any = None
  if isinstance(inner, dict):
    given = inner.get("block_size", inner.get("blockSize"))
  is_number = isinstance(given, int) and not isinstance(given, bool)
  if isinstance(given, str) and given.isascii() and given.isdigit():
    given, is_number = int(given), True
  if not is_number or given <= 0:
    raise ValueError(
      "its backend_config must have a positive block_size in"
      f" block_scaled_dot_backend_config, got {inner!r}"
    )
  return given


def _quoted(word: re.Match[str]) -> str:
  """Returns a word of `_JSON_WORD` in JSON's form, with double quotes."""
  found = word[1] if word[2] is None else word[2]
  return word[0] if found is None else json.dumps(found)


def _as_python(attribute: Any) -> Any:
  """Converts an attribute of integers, strings and dictionaries."""
  if isinstance(attribute, ir.DictAttr):
    return {item.name: _as_python(item.attr) for item in attribute}
  if isinstance(attribute, ir.StringAttr):
    return module_parsing.string(attribute)
  if isinstance(attribute, ir.IntegerAttr):
    return attribute.value
  return str(attribute)


def _block_sizes(call: ModuleCall, given: int | None) -> tuple[int, ...]:
  """Returns the block size of each (values, scale) pair of a call."""
  if call.name in (QUANTIZE, DEQUANTIZE):
    pair, (floats,), other = (
      (call.results, call.operands, "the operand")
      if call.name == QUANTIZE
      else (call.operands, call.results, "the result")
    )
    values, scale = pair
    if values.shape != floats.shape:
      raise TypeError(
        f"values and {other} must have the same shape, got {values.shape} and"
        f" {floats.shape}"
      )
    return (_block_size("values", values, "scale", scale, None, False),)
  _check_dot(call)
  if call.name == SWIZZLED_DOT:
    return ()
  sides = zip(
    ("lhs", "rhs"), call.operands[:2], call.operands[2:4], strict=False
  )
  return tuple(
    _block_size(side, values, f"{side}_scale", scale, given, True)
    for side, values, scale in sides
  )


def _block_size(
  side: str,
  values: jax.ShapeDtypeStruct,
  scale_name: str,
  scale: jax.ShapeDtypeStruct,
  given: int | None,
  may_pad_rows: bool,
) -> int:
  """Returns the block size along the last dimension, and checks the scale."""
  what = f"{side} {values.shape} with {scale_name} {scale.shape}"
  if len(values.shape) != len(scale.shape) or not values.shape:
    raise TypeError(
      f"{side} and {scale_name} must have the same rank, at least 1, got {what}"
    )
  num_exact = len(values.shape) - (2 if may_pad_rows else 1)
  if values.shape[:num_exact] != scale.shape[:num_exact] or any(
    have < need
    for have, need in zip(scale.shape[:-1], values.shape[:-1], strict=True)
  ):
    raise TypeError(
      f"{scale_name} must have the dimensions of {side} but the last"
      f"{', or more rows' if may_pad_rows else ''}, got {what}"
    )
  size, columns = values.shape[-1], scale.shape[-1]
  if given is not None:
    if columns * given < size:
      raise TypeError(
        f"{scale_name} must have a column for every {given} values, got {what}"
      )
    return given
  if columns == 0 or size == 0 or size % columns:
    raise TypeError(
      f"k must be a positive multiple of the columns of {scale_name}, got"
      f" {what}; a padded scale needs a block size in backend_config"
    )
  return size // columns


def _check_dot(call: ModuleCall) -> None:
  """Raises TypeError unless shapes are valid for `__op$block_scaled_dot`."""
  lhs, rhs, result = *call.operands[:2], call.results[0]
  shapes = f"lhs {lhs.shape} and rhs {rhs.shape}"
  if len(lhs.shape) not in (2, 3) or len(lhs.shape) != len(rhs.shape):
    raise TypeError(
      f"lhs and rhs must have rank 2 or 3, the same, got {shapes}"
    )
  if lhs.shape[-1] != rhs.shape[-1] or lhs.shape[:-2] != rhs.shape[:-2]:
    raise TypeError(
      "lhs and rhs must agree in the last dimension, k, and in the batch, got"
      f" {shapes}"
    )
  expected = (*lhs.shape[:-1], rhs.shape[-2])
  if result.shape != expected:
    raise TypeError(
      f"the result must have shape {expected}, got {result.shape} for {shapes}"
    )
  if len(call.operands) == 5:
    scale = call.operands[4]
    if scale.shape or scale.dtype != result.dtype:
      raise TypeError(
        f"the global scale must be a scalar of the result's dtype"
        f" {result.dtype}, got {scale.dtype}{list(scale.shape)}"
      )


def _with_composite_attributes(call: ModuleCall, operation: Any) -> ModuleCall:
  attributes = None
  try:
    attributes = operation.attributes["composite_attributes"]
    numbers = tuple(
      tuple(tuple(int(d.value) for d in dims) for dims in kind)
      for kind in attributes["dimension_numbers"]
    )
    (_, _), (_, _) = numbers
  except (KeyError, TypeError, ValueError, AttributeError):
    raise ValueError(
      "its composite_attributes must have dimension_numbers such as [[[1],"
      f" [0]], [[], []]], got {attributes}"
    ) from None
  operands = list(operation.operands)
  has_lhs_scale, has_rhs_scale = (
    not (values.dtype in formats.FLOAT_DTYPES and _is_one(scale.owner))
    for values, scale in zip(call.operands[:2], operands[2:], strict=True)
  )
  return dataclasses.replace(
    call,
    dimension_numbers=numbers,
    has_scale=(has_lhs_scale, has_rhs_scale),
  )


def _is_one(producer: Any) -> bool:
  """Returns whether an operation makes ones in the way that JAX makes them."""
  broadcasting = ("stablehlo.convert", "stablehlo.broadcast_in_dim")
  while (
    not isinstance(producer, ir.Block)
    and producer.operation.name in broadcasting
  ):
    producer = producer.operation.operands[0].owner
  if isinstance(producer, ir.Block):
    return False
  operation = producer.operation
  if operation.name != "stablehlo.constant":
    return False
  value = operation.attributes["value"]
  if not isinstance(value, ir.DenseElementsAttr) or not value.is_splat:
    return False
  return str(value.get_splat_value()).startswith("1.000000e+00 ")


def shape_list(arrays: Sequence[jax.ShapeDtypeStruct]) -> str:
  """Returns text such as "float8_e4m3fn[8,64], float32[]"."""
  return ", ".join(
    f"{x.dtype.name}[{','.join(map(str, x.shape))}]" for x in arrays
  )

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands and expected results of block-scaled matmuls, for kernel tests.

`dot.reference.oracle_dequantize` gives an operand's dequantized values, in f64
from its codes by ml_dtypes. This module writes the storage (packing, layout,
swizzling) in NumPy. Each byte that is not an element is 0xFF: NaN as an FP8
value, as a float and as a scale, and -6 as FP4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np

from jaxplugin.core import formats
from jaxplugin.dot import reference
from jaxplugin.kernels import architectures, launching
from jaxplugin.kernels import formats as kernel_formats
from jaxplugin.kernels.gpu import block_scaled_matmul, configs, matmul_plans
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import epilogue as dot_epilogue
from jaxplugin.testing.interpreter import interpret

DTYPES: Final = {
  "f32": np.dtype(np.float32),
  "bf16": np.dtype(ml_dtypes.bfloat16),
  "f16": np.dtype(np.float16),
}
_VIEWS: Final = {
  "u8": np.dtype(np.uint8),
  "u32": np.dtype(np.uint32),
  "e4m3": formats.E4M3,
  **DTYPES,
}
POISON: Final = 0xFF
UNWRITTEN: Final = 0xA5  # bytes that no test expects everywhere
_PADDING: Final = (1, 3, 16)  # elements beyond batch, rows and columns
# E8M0 scales of random data are 2^-30 to 2^30: f32 holds every product.
_SCALE_EXPONENT: Final = 30


def block_format(name: str) -> formats.BlockFormat:
  """Returns the format that kernels call `name`."""
  facts = kernel_formats.readable_by_name(name)
  assert facts is not None, name
  if name in kernel_formats.FORMATS:
    return formats.by_name(name)
  dtypes = {
    formats.encoding(dtype): dtype
    for dtype in (*formats.VALUES_DTYPES, *formats.SCALE_DTYPES)
  }
  fraction_bits = 6 if facts.element == kernel_formats.MXINT8_ELEMENT else 0
  return formats.BlockFormat(
    name=name,
    values_dtype=dtypes.get(facts.element, formats.INT8),
    scale_dtype=dtypes[facts.scale],
    block_size=facts.block_size,
    fraction_bits=fraction_bits,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
  """An operand: its description, its arrays and its meaning.

  Attributes:
    kind: as `configs` describes it.
    values: what the kernel gets, before `Launch.views`.
    scale: uint8, or floats of more bits; None of a plain operand.
    exact: f64[batch, rows, k].
  """

  kind: configs.OperandKind
  values: np.ndarray
  scale: np.ndarray | None
  exact: np.ndarray


def make_operand(
  rng: np.random.Generator,
  format: str,
  shape: tuple[int, int, int],
  *,
  integers: bool = False,
  k_is_minor: bool = True,
  swizzled: bool = False,
  interleaved: bool = False,
  rows_per_scale: int = 1,
) -> Operand:
  """A random operand of `shape` (batch, rows, k).

  Args:
    rng: where it comes from.
    format: name for `formats.readable_by_name`, or of plain floats.
    shape: logical.
    integers: small integers under scales 2^-2 to 2^2, whose sums f32 holds;
      otherwise all finite codes.
    k_is_minor: whether rows follow each other, or k.
    swizzled: the scale's layout.
    interleaved: whether FP4 values are.
    rows_per_scale: number of rows of a square block.
  """
  if format in DTYPES:
    values = rng.integers(-8, 9, shape) if integers else rng.normal(size=shape)
    values = values.astype(DTYPES[format])
    return store_operand(format, values, None, k_is_minor=k_is_minor)
  block = block_format(format)
  columns = -(-shape[2] // block.block_size)
  scale_shape = (shape[0], -(-shape[1] // rows_per_scale), columns)
  if integers:
    choices = np.arange(-6, 7)
    choices = choices[np.abs(choices) != 5].astype(block.values_dtype)
    values = rng.choice(choices.view(np.uint8), shape)
    scale = np.exp2(rng.integers(-2, 3, scale_shape).astype(np.float32))
    scale = _codes(scale.astype(block.scale_dtype))
  else:
    values = reference.finite_codes(rng, shape, block.values_dtype)
    values = values.view(np.uint8)
    scale = _codes(
      reference.random_scale(
        rng, scale_shape, block.scale_dtype, _SCALE_EXPONENT
      )
    )
  return store_operand(
    format,
    values,
    scale,
    k_is_minor=k_is_minor,
    swizzled=swizzled,
    interleaved=interleaved,
    rows_per_scale=rows_per_scale,
  )


def _codes(scale: np.ndarray) -> np.ndarray:
  return scale.view(np.uint8) if scale.itemsize == 1 else scale


def store_operand(
  format: str,
  values: np.ndarray,
  scale: np.ndarray | None,
  *,
  k_is_minor: bool = True,
  swizzled: bool = False,
  interleaved: bool = False,
  rows_per_scale: int = 1,
) -> Operand:
  """An operand of given codes (uint8[batch, rows, k]) and scales.

  A byte has one code. Scales of one byte are codes too.
  """
  if scale is None:
    exact = values.astype(np.float64)
    values = _lay_out(values, k_is_minor)
    kind = configs.OperandKind(format=format, strides=_strides(values))
    return Operand(kind=kind, values=values, scale=None, exact=exact)
  block = block_format(format)
  of_rows = np.repeat(scale, rows_per_scale, axis=1)[:, : values.shape[1]]
  exact = reference.oracle_dequantize(
    values.view(block.array_dtype), of_rows.view(block.scale_dtype), block
  )
  if interleaved:
    values = interleave(values)
  elif block.has_pairs:
    values &= 0xF
    values = values[..., 0::2] | values[..., 1::2] << 4
  values = _lay_out(values, k_is_minor)
  if swizzled:
    scale = swizzle(scale)
    row_tile = 128 * scale.shape[2]
    scale_strides: tuple[int, ...] = (scale[0].size, row_tile)
  else:
    scale = _lay_out(scale, k_is_minor)
    scale_strides = _strides(scale)
  kind = configs.OperandKind(
    format=format,
    strides=_strides(values),
    scale_strides=scale_strides,
    is_interleaved=interleaved,
    rows_per_scale=rows_per_scale,
  )
  return Operand(kind=kind, values=values, scale=scale, exact=exact)


# Where bit `3 - i` of FP4 value v of 16 lies in two interleaved words, sign
# first: (word, bit).
_INTERLEAVED_BITS: Final = (
  ((0, 15), (0, 8), (0, 7), (0, 6)),
  ((0, 31), (0, 24), (0, 23), (0, 22)),
  ((0, 11), (0, 4), (0, 3), (0, 2)),
  ((0, 27), (0, 20), (0, 19), (0, 18)),
  ((0, 21), (0, 14), (0, 13), (0, 12)),
  ((0, 5), (0, 30), (0, 29), (0, 28)),
  ((1, 15), (1, 8), (1, 7), (1, 6)),
  ((1, 31), (1, 24), (1, 23), (1, 22)),
  ((1, 12), (1, 5), (1, 4), (1, 3)),
  ((1, 28), (1, 21), (1, 20), (1, 19)),
  ((1, 9), (1, 2), (1, 1), (1, 0)),
  ((1, 25), (1, 18), (1, 17), (1, 16)),
  ((0, 16), (0, 9), (1, 11), (1, 10)),
  ((0, 0), (0, 25), (1, 27), (1, 26)),
  ((0, 17), (0, 10), (1, 14), (1, 13)),
  ((0, 1), (0, 26), (1, 30), (1, 29)),
)


def interleave(codes: np.ndarray) -> np.ndarray:
  """uint32[..., k / 8] of FP4 codes (uint8[..., k]), bit by bit."""
  *lead, k = codes.shape
  units = codes.reshape(*lead, k // 16, 16).astype(np.uint32)
  words = np.zeros((*lead, k // 16, 2), np.uint32)
  for value, bits in enumerate(_INTERLEAVED_BITS):
    for i, (word, bit) in enumerate(bits):
      code_bit = units[..., value] >> np.uint32(3 - i) & np.uint32(1)
      words[..., word] |= code_bit << np.uint32(bit)
  return words.reshape(*lead, k // 8)


def _lay_out(array: np.ndarray, k_is_minor: bool) -> np.ndarray:
  """`array` as a window of a larger one, k minor or rows minor."""
  order = (0, 1, 2) if k_is_minor else (0, 2, 1)
  array = array.transpose(order)
  padded = [s + p for s, p in zip(array.shape, _PADDING, strict=True)]
  outer = np.full(
    (*padded[:2], padded[2] * array.itemsize), POISON, np.uint8
  ).view(array.dtype)
  window = outer[tuple(slice(size) for size in array.shape)]
  window[...] = array
  return window.transpose(order)


def _strides(array: np.ndarray) -> tuple[int, ...]:
  return tuple(stride // array.itemsize for stride in array.strides)


def swizzle(scale: np.ndarray) -> np.ndarray:
  """uint8[batch, rows, columns] in tiles of 128 x 4, padded with 0xFF.

  Written element by element from the layout's definition: byte (r, c) of a
  tile is at (r % 32) * 16 + (r // 32) * 4 + c, tiles follow row by row.
  """
  batch, rows, columns = scale.shape
  padded = (-(-rows // 128) * 128, -(-columns // 4) * 4)
  flat = np.full((batch, padded[0] * padded[1]), POISON, np.uint8)
  r, c = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
  tile = r // 128 * (padded[1] // 4) + c // 4
  flat[:, tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scale
  return flat.reshape(batch, *padded)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epilogue:
  """Arrays of an epilogue; None if the epilogue has no such array.

  global_scale: f32[] or f32[2].
  second_global_scale: f32[], which multiplies the result too.
  """

  global_scale: np.ndarray | None = None
  second_global_scale: np.ndarray | None = None
  bias: np.ndarray | None = None
  activation: str = "none"
  residual: np.ndarray | None = None


# Roundings of f32 in an epilogue, of sums and exponentials, and hardware that
# approximates exponentials and quotients.
_EPILOGUE_BOUND: Final = 16 * 2.0**-24
_SLOPE: Final = 1.13  # of gelu and silu, at most


def expected(
  lhs: Operand, rhs: Operand, epilogue: Epilogue
) -> tuple[np.ndarray, np.ndarray]:
  """Returns a product with its epilogue in f64, and a bound on its error."""
  x, magnitude = contract.dot(lhs.exact, rhs.exact)
  factor = 1.0
  if epilogue.global_scale is not None:
    factor = float(np.prod(epilogue.global_scale, dtype=np.float64))
  x = x * factor
  if epilogue.bias is not None:
    x = x + epilogue.bias.astype(np.float64)
  bound = contract.DOT_BOUND * magnitude * abs(factor)
  bound = bound + _EPILOGUE_BOUND * np.abs(x)
  name = None if epilogue.activation == "none" else epilogue.activation
  x = dot_epilogue.activate(x, name)
  if epilogue.residual is not None:
    x = x + epilogue.residual.astype(np.float64)
  return x, _SLOPE * bound + _EPILOGUE_BOUND * np.abs(x)


def shape_of(
  lhs: Operand,
  rhs: Operand,
  epilogue: Epilogue,
  out_dtype: str,
  layer: int | None,
  *,
  may_round_sums: bool = False,
) -> configs.MatmulShape:
  """Returns the shape of a product. With a layer, rhs is a stack of layers."""
  batch, m, k = lhs.exact.shape
  global_scale = epilogue.global_scale
  return configs.MatmulShape(
    batch=batch,
    m=m,
    n=rhs.exact.shape[1],
    k=k,
    lhs=lhs.kind,
    rhs=rhs.kind,
    out_dtype=out_dtype,
    has_global_scale=global_scale is not None,
    has_global_power=global_scale is not None and global_scale.size == 2,
    has_two_global_scales=epilogue.second_global_scale is not None,
    has_bias=epilogue.bias is not None,
    activation=epilogue.activation,
    has_residual=epilogue.residual is not None,
    layers=None if layer is None else len(rhs.exact),
    may_round_sums=may_round_sums,
  )


def arrays_of(
  lhs: Operand, rhs: Operand, epilogue: Epilogue, layer: int | None
) -> dict[str, Any]:
  """Returns the arrays of a product by the names of launches."""
  return {
    "lhs": lhs.values,
    "lhs_scale": lhs.scale,
    "rhs": rhs.values,
    "rhs_scale": rhs.scale,
    "layer": None if layer is None else np.array([layer], np.int32),
    "global_scale": epilogue.global_scale,
    "second_global_scale": epilogue.second_global_scale,
    "bias": epilogue.bias,
    "residual": epilogue.residual,
  }


def run(
  lhs: Operand,
  rhs: Operand,
  config: configs.MatmulConfig,
  *,
  epilogue: Epilogue = Epilogue(),
  out_dtype: str = "f32",
  architecture: str = "sm_80",
  layer: int | None = None,
  planned_m: int | None = None,
) -> np.ndarray:
  """The product that the kernels compute in the interpreter.

  With a layer the batches of rhs are layers, and this one is meant. With
  planned_m, kernels read m. If they are for any m, there are three programs.
  """
  shape = shape_of(lhs, rhs, epilogue, out_dtype, layer)
  arrays = arrays_of(lhs, rhs, epilogue, layer)
  m = shape.m
  if planned_m is not None:
    shape = dataclasses.replace(shape, m=planned_m, reads_m=True)
    arrays["m"] = np.array([m], np.int32)
  launches = [
    dataclasses.replace(
      launch.with_size(m),
      grid=min(launch.grid, 3) if shape.is_for_any_m else launch.grid,
    )
    for launch in matmul_plans.plan(
      shape, config, architectures.by_name(architecture)
    )
  ]
  return run_launches(block_scaled_matmul.KERNELS, launches, arrays)["out"]


def unwritten(shape: tuple[int, ...], dtype: str) -> np.ndarray:
  """Returns an array of `UNWRITTEN` bytes, or of NaN."""
  out = np.empty(shape, dtype)
  out.view(np.uint8)[...] = UNWRITTEN if dtype == "uint8" else POISON
  return out


def run_launches(
  kernels: Mapping[str, Any],
  launches: Sequence[launching.Launch],
  arrays: Mapping[str, Any],
  **options: Any,
) -> dict[str, np.ndarray]:
  """Returns the arrays, and those that launches compute in the interpreter.

  Bytes that a kernel does not write are `UNWRITTEN`, or NaN in floats.
  """
  arrays = dict(arrays)
  for launch in launches:
    views = dict(launch.views)
    inputs = [
      arrays[name].view(_VIEWS[views[name]]) if name in views else arrays[name]
      for name in launch.inputs
    ]
    for output in launch.outputs:
      arrays[output.name] = unwritten(output.shape, output.dtype)
    interpret.launch(
      kernels[launch.kernel],
      launch.grid,
      *launch.described(inputs),
      *(arrays[output.name] for output in launch.outputs),
      **options,
      **dict(launch.constexprs),
    )
  return arrays

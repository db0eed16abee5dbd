# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts problems of quantizing and dequantizing to table rows and back.

A row has the number of rows m, the size k of the blocked dimension, and which
of the two is last. It applies to arrays of any rank with this m and k. An array
blocked along a middle dimension or along merged dimensions has no row.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any
from typing import Final

from jaxplugin.arrays import layouts
from jaxplugin.core import blocking
from jaxplugin.core import formats
from jaxplugin.quantization import problems
from jaxplugin.quantization import prologues
from jaxplugin.tables import records
from jaxplugin.tables import row_fields

_QUANTIZE: Final = row_fields.defaults_of(
  problems.QuantizationProblem,
  without=("num_maxima", "pads_values", "options", "prologue"),
)
_QUANTIZE_WORDS: Final = {
  "scale_rounding": ("up", "floor"),
  "scale_layout": (layouts.LINEAR, layouts.SWIZZLED),
}
# The blocked dimensions: the last one of (m, k), the first one of (k, m), or
# both of (m, k) in either order.
_ALONG: Final = ("last", "first", "last,first", "first,last")
_OPTIONS: Final[dict[str, records.Scalar]] = {
  **row_fields.defaults_of(problems.RecipeOptions, without=("strides",)),
  "square": False,
}
_OPTION_WORDS: Final = {"key_impl": (problems.THREEFRY,)}
_OPTION_NUMBERS: Final = ("hadamard",)
# Fields of a prologue. Numbers such as its epsilon do not affect the time.
_PROLOGUE: Final[dict[str, records.Scalar]] = {
  "prologue": None,
  "operands": "",
  "halves": None,
}
_PROLOGUE_WORDS: Final = {
  "prologue": (*prologues.NORMS, *prologues.GATED),
  "operands": [
    ",".join(names)
    for count in range(1, len(prologues.OPERANDS) + 1)
    for names in itertools.combinations(prologues.OPERANDS, count)
  ],
  "halves": prologues.HALVES,
}
_DEQUANTIZE: Final[dict[str, records.Scalar]] = {"global_scale": "none"}
_DEQUANTIZE_WORDS: Final = {"global_scale": ("none", "scalar")}


@functools.lru_cache(maxsize=4096)
def fields_of(problem: problems.QuantizationProblem) -> records.Fields | None:
  """Returns a problem's fields, or None if it has no row."""
  if not problem.sizes_are_static or 0 in problem.shape:
    return None
  if not problem.format.is_known or problem.dtype.name not in row_fields.DTYPES:
    return None
  if problem.pads_values:  # Rows have no field for it.
    return None
  # With maxima a kernel reads x once, as with a given global scale.
  if problem.num_maxima is not None:
    problem = problem.with_global_scale()
  sizes = _sizes_of(problem)
  if sizes is None:
    return None
  fields: dict[str, Any] = {
    **sizes,
    "dtype": problem.dtype.name,
    "format": problem.format.name,
    **row_fields.not_default(problem, _QUANTIZE),
  }
  if (prologue := problem.prologue) is not None:
    if "along" in sizes and len(problem.shape) != 2:
      return None  # Rows merge dimensions that a norm does not.
    values = (prologue.function, ",".join(prologue.operands), prologue.halves)
    found = zip(_PROLOGUE, values, strict=True)
    fields |= {name: value for name, value in found if value}
  for number, options in enumerate(problem.options):
    if options.key_impl not in (None, problems.THREEFRY):
      return None
    if options.strides is not None:  # x is a shard
      return None
    square = None if options.square is None else len(options.square)
    if square is not None and square != len(problem.shape) - 1:
      return None
    for name, default in _OPTIONS.items():
      value = getattr(options, name)
      value = square is not None if name == "square" else value
      if value != default:
        fields[_extra(name, number)] = value
  return records.fields_of("problem", fields)


def _extra(name: str, number: int) -> str:
  return f"second_{name}" if number else name


def _sizes_of(problem: problems.QuantizationProblem) -> dict[str, Any] | None:
  """Returns m, k and the blocked dimension, or None if there is no row."""
  shape = problem.shape
  along = []
  for b in problem.blockings:
    if len(b.dims) != 1 or b.multiple != problem.format.block_size:
      return None
    (axis,) = b.dims
    if axis not in (0, len(shape) - 1):
      return None
    along.append("last" if axis == len(shape) - 1 else "first")
  if len(along) > 1 and (len(shape) != 2 or len({*along}) < len(along)):
    return None
  is_last = len(along) > 1 or along == ["last"]
  k = shape[-1] if is_last else shape[0]
  fields = {"m": math.prod(shape) // k, "k": k}
  if along != ["last"]:
    fields["along"] = ",".join(along)
  return fields


def problem_of(fields: records.Fields) -> problems.QuantizationProblem:
  """Returns a problem of rank 2 that has these fields.

  Raises:
    ValueError: If a field is wrong. The message says what it must be.
  """
  row = row_fields.RowFields("quantize", fields, ("m", "k", "dtype", "format"))
  m, k = row.size("m"), row.size("k")
  along = row.text("along", _ALONG) if "along" in row else "last"
  format = row.named("format", row_fields.FORMATS)
  dtype = row.named("dtype", row_fields.DTYPES)
  places = along.split(",")
  found = row.optional(_QUANTIZE, _QUANTIZE_WORDS)
  options = tuple(_options_of(row, i, p) for i, p in enumerate(places))
  prologue = _prologue_of(row)
  row.finish()
  return problems.QuantizationProblem(
    shape=(k, m) if along == "first" else (m, k),
    dtype=dtype,
    format=format,
    blockings=tuple(
      blocking.Blocking.along(int(p == "last"), 2, format.block_size)
      for p in places
    ),
    options=options,
    prologue=prologue,
    **found,
  )


def _options_of(
  row: row_fields.RowFields, number: int, place: str
) -> problems.RecipeOptions:
  found = row.optional(
    {_extra(name, number): value for name, value in _OPTIONS.items()},
    {_extra(name, number): words for name, words in _OPTION_WORDS.items()},
    [_extra(name, number) for name in _OPTION_NUMBERS],
  )
  found = {name.removeprefix("second_"): v for name, v in found.items()}
  other = (0,) if place == "last" else (1,)
  found["square"] = other if found["square"] else None
  return problems.RecipeOptions(**found)


def _prologue_of(row: row_fields.RowFields) -> prologues.Prologue | None:
  found = row.optional(_PROLOGUE, _PROLOGUE_WORDS)
  if found["prologue"] is None:
    return None
  return prologues.Prologue(
    function=found["prologue"],
    operands=tuple(filter(None, found["operands"].split(","))),
    halves=found["halves"],
  )


@functools.lru_cache(maxsize=4096)
def dequantize_fields_of(
  problem: problems.DequantizationProblem,
) -> records.Fields | None:
  """Returns a problem's fields, or None if it has no row."""
  format, shape = problem.format, problem.logical_shape
  if not all(isinstance(size, int) and size for size in shape):
    return None
  if not format.is_known or problem.out_dtype.name not in row_fields.DTYPES:
    return None
  if problem.axis not in (0, len(shape) - 1):
    return None
  if problem.global_shape not in (None, ()):
    return None
  k = shape[problem.axis]
  fields: dict[str, Any] = {
    "m": math.prod(shape) // k,
    "k": k,
    "format": format.name,
    "out": problem.out_dtype.name,
  }
  if problem.axis != len(shape) - 1:
    fields["along"] = "first"
  if problem.dtype != format.array_dtype:
    fields["dtype"] = problem.dtype.name
  if problem.global_shape is not None:
    fields["global_scale"] = "scalar"
  return records.fields_of("problem", fields)


def dequantize_problem_of(
  fields: records.Fields,
) -> problems.DequantizationProblem:
  """Returns a problem of rank 2 that has these fields.

  Raises:
    ValueError: If a field is wrong. The message says what it must be.
  """
  row = row_fields.RowFields("dequantize", fields, ("m", "k", "format", "out"))
  m, k = row.size("m"), row.size("k")
  along = row.text("along", _ALONG[:2]) if "along" in row else "last"
  format = row.named("format", row_fields.FORMATS)
  out_dtype = row.named("out", row_fields.DTYPES)
  dtype = row.stored_dtype("dtype", format)
  found = row.optional(_DEQUANTIZE, _DEQUANTIZE_WORDS)
  row.finish()
  is_packed = format.is_fp4 and dtype == formats.PACKED
  stored = k // 2 if is_packed else k
  return problems.DequantizationProblem(
    shape=(stored, m) if along == "first" else (m, stored),
    dtype=dtype,
    format=format,
    axis=0 if along == "first" else 1,
    out_dtype=out_dtype,
    global_shape=() if found["global_scale"] == "scalar" else None,
  )

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cpu implementation: the C++ kernels of kernels/cpu, through XLA's FFI.

Kernels quantize along the last axis. They quantize along any axis with
`RecipeOptions`, to FP4, for which XLA ops take longest, and for matmuls, which
read the blocked axis last. They quantize the result of a prologue along the
last axis, along rows, or along both. They dequantize along the last axis, and
results below 2^-126 are exact.

Compared with XLA ops on f32 (AVX2, 2 cores of an EPYC, jax 0.10.2, 2026-11),
the kernels are:

* along the last axis, 10x to 15x faster to FP4 and 1.2x to 3.6x to FP8
* along axis 0, 1.1x to 8.5x faster to FP4, and 2.9x slower to FP8
* dequantizing the last axis, 1.3x to 3x faster, but 0.8x to 1.1x for results of
  64 MB, where page faults dominate; along axis 0, 2x to 10x slower

`python -m jaxplugin bench --shapes quantize:1536x384,dequantize:1536x384`
measures those along the last axis.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from typing import Final

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.core import blocking, decisions, formats, targets
from jaxplugin.operation import choice
from jaxplugin.quantization import operations, problems, prologues
from jaxplugin.runtime import cpu_library

_QUANTIZE: Final = "jaxplugin_quantize"
_QUANTIZE_OPERAND: Final = "jaxplugin_quantize_operand"
_DEQUANTIZE: Final = "jaxplugin_dequantize"
# Attribute values of the custom calls, listed in kernels/cpu/README.md.
_FUNCTIONS: Final = {
  name: number for number, name in enumerate(prologues.FUNCTIONS, 1)
}
_HALVES: Final = {None: 0, "split": 1, "interleaved": 2}
_GRADIENTS: Final = {None: 0, "x": 1, "up": 2}
_SHARD: Final = (
  "a kernel draws the random bits of a whole array, and x is one device's shard"
)
_MOST_PADDING: Final = 128  # kMostPadding of kernels/cpu/kernels.h
# The options that only describe a key, with their values without one.
_KEY: Final = {
  name: getattr(problems.NO_OPTIONS, name)
  for name in ("is_stochastic", "key_impl", "is_partitionable", "strides")
}


def supports_quantize(
  problem: problems.QuantizationProblem, target: targets.Target
) -> decisions.Unsupported | None:
  """Supports one blocking, with the options of training recipes."""
  if (refusal := cpu_library.refusal(target)) is not None:
    return refusal
  reason = _quantize_refusal(problem)
  return decisions.Unsupported(reason) if reason else None


def _quantize_refusal(problem: problems.QuantizationProblem) -> str:
  if problem.format not in cpu_library.FORMATS:
    return f"its kernels do not support {problem.format}"
  if problem.pads_values:
    return "kernels write as many rows as x has"
  if problem.prologue is not None:
    return _prologue_refusal(problem)
  if len(problem.blockings) != 1:
    return "kernels quantize x along one axis at a time"
  (single,), (options,) = problem.each(), problem.options
  # Kernels write k last, so another axis needs a transpose of the result unless
  # a matmul reads it. For codes of a byte the transpose costs more time than
  # the kernel saves.
  axis = single.blockings[0].axis()
  is_last = axis == len(single.shape) - 1
  is_plain = options == problems.NO_OPTIONS
  if is_plain and not (
    is_last or problem.format.is_fp4 or problem.for_products
  ):
    return (
      f"kernels are slower for FP{problem.format.value_bits} along another"
      " axis than the last"
    )
  if reason := options.bits_refusal():
    return f"a kernel {reason}"
  if options.strides is not None:
    return _SHARD
  if options.hadamard is not None and single.shape[axis] % options.hadamard:
    return (
      f"kernels transform whole groups of {options.hadamard}, got"
      f" {single.shape[axis]} values"
    )
  if options.is_stochastic and _square_rows(problem) is None:
    return (
      "kernels draw random bits in the order of the array, whose square blocks"
      f" merge dimensions {list(options.square or ())}"
    )
  return ""


def _as_written(
  problem: problems.QuantizationProblem,
) -> problems.QuantizationProblem:
  """Returns a problem of one blocking as kernels compute it.

  For matmuls, the dimension is merged with those that they contract with it.
  """
  (b,), (options,) = problem.blockings, problem.options
  if problem.for_products and not options.square:
    b = b.as_in_product(problem.shape)
  return dataclasses.replace(problem, blockings=(b,))


def _prologue_refusal(problem: problems.QuantizationProblem) -> str:
  """Returns why kernels do not compute the problem's prologue, or ""."""
  runs = list(map(_run_of, problem.singles()))
  if None in runs or len({bool(run) for run in runs}) < len(runs):
    dims = [list(b.dims) for b in problem.blockings]
    return (
      "kernels compute a prologue with blocks along the last dimension, along"
      f" those directly before it, or along both, got {dims}"
    )
  if problem.shape[-1] % problem.format.block_size:
    return (
      "kernels compute a prologue only for whole blocks of"
      f" {problem.format.block_size} features, got {problem.shape[-1]}"
    )
  if any(runs) and not blocking.are_static(problem.shape):
    return "kernels need static sizes to compute a prologue with blocks of rows"
  rows = math.prod(problem.shape[problem.column_sums or 0 : -1])
  crossing = [run for run in runs if run and rows % run]
  if problem.column_sums and crossing:
    return (
      f"kernels sum columns of whole runs of {crossing[0]} rows under vmap, got"
      f" {rows}"
    )
  for options, b in zip(problem.options, problem.blockings, strict=True):
    if dataclasses.replace(options, **_KEY) != problems.NO_OPTIONS:
      return f"kernels do not compute a prologue of values {options}"
    if reason := options.bits_refusal():
      return f"a kernel {reason}"
    if options.is_stochastic and (len(runs) > 1 or len(b.dims) > 1):
      return (
        "kernels draw the random bits of a prologue's result for one axis of"
        " one dimension"
      )
    if options.strides is not None:
      return _SHARD
    if b.multiple > _MOST_PADDING:
      return f"kernels pad by up to {_MOST_PADDING} rows, got {b.multiple}"
  return ""


def _run_of(single: problems.QuantizationProblem) -> int | None:
  """Returns how many rows one blocking divides into blocks.

  Rows are all dimensions except the last one, in order. The number is 0 for
  blocks along the last dimension, and None if the blocked dimensions are not
  the last rows.
  """
  (b,) = _as_written(single).blockings
  last = len(single.shape) - 1
  if b.dims == (last,):
    return 0
  is_last = b.dims == tuple(range(last))[last - len(b.dims) :] and b.dims
  is_in_order = len(b.dims) == 1 or list(b.lead) == sorted(b.lead)
  if not (is_last and is_in_order):
    return None
  return math.prod(single.shape[d] for d in b.dims)


def _square_rows(problem: problems.QuantizationProblem) -> int | None:
  """Returns how many adjacent rows square blocks divide into groups.

  Rows are all dimensions except the blocked one, in order. The number is 0
  without square blocks, and None if their dimensions are not the last rows.
  """
  (options,), (b,), (single,) = (
    problem.options,
    problem.blockings,
    problem.each(),
  )
  if not options.square:
    return 0
  rows = [d for d in range(len(single.shape)) if d != b.axis()]
  merged = list(map(b.position, options.square))
  if rows[-len(merged) :] != merged:
    return None
  return math.prod(single.shape[d] for d in merged)


def supports_dequantize(
  problem: problems.DequantizationProblem, target: targets.Target
) -> decisions.Unsupported | None:
  """Supports the last axis, on CPUs."""
  if target.platform != "cpu":
    return decisions.Unsupported(
      "XLA fuses the operations with what uses the result"
    )
  if (refusal := cpu_library.refusal(target)) is not None:
    return refusal
  reason = _dequantize_refusal(problem)
  return decisions.Unsupported(reason) if reason else None


def _dequantize_refusal(problem: problems.DequantizationProblem) -> str:
  k = problem.logical_shape[problem.axis]
  refusal = cpu_library.format_refusal(
    problem.format, k if isinstance(k, int) else None
  )
  if refusal is not None:
    return f"the kernel {refusal}"
  # Another axis would need a transpose of the kernel's f32 result.
  if problem.axis != len(problem.shape) - 1:
    return "kernels are slower along another axis than the last"
  if problem.out_dtype not in formats.FLOAT_DTYPES:
    known = ", ".join(d.name for d in formats.FLOAT_DTYPES)
    return f"kernels write {known}, got {problem.out_dtype}"
  return ""


def quantize(
  x: jax.Array,
  global_scale: jax.Array | None,
  problem: problems.QuantizationProblem,
  target: targets.Target | None = None,
  keys: Sequence[jax.Array | None] = (),
  more: Mapping[str, jax.Array] = types.MappingProxyType({}),
) -> list[jax.Array]:
  """Computes the results of `quantize_p`."""
  cpu_library.register()
  attributes = {
    **cpu_library.call_attributes(target),
    "format": np.int64(cpu_library.FORMATS[problem.format]),
    "rounding": np.int64(cpu_library.ROUNDINGS[problem.scale_rounding]),
    "compute_global": np.int64(problem.computes_global_scale),
  }
  if problem.prologue is not None:
    return _quantize_prologue(x, global_scale, problem, attributes, keys, more)
  (b,), (single,) = problem.blockings, problem.each()
  is_last = single.blockings[0].axis() == len(single.shape) - 1
  is_turned = b.merges_in_place and b.dims[-1] < len(problem.shape) - 1
  if (
    is_last
    and not (is_turned and problem.for_products)
    and problem.options == (problems.NO_OPTIONS,)
  ):
    return _quantize_rows(x, global_scale, problem, attributes)
  return _quantize_operand(x, global_scale, problem, attributes, *keys)


def _quantize_rows(
  x: jax.Array,
  global_scale: jax.Array | None,
  problem: problems.QuantizationProblem,
  attributes: dict[str, np.int64],
) -> list[jax.Array]:
  """Quantizes along the last dimension, without options."""
  (b,) = problem.blockings
  *lead, k = b.shape(problem.shape)
  x = b.apply(x)
  rows = x.reshape(-1, x.shape[-1])
  results = jax.ffi.ffi_call(_QUANTIZE, _types(problem, rows.shape[0], k))(
    rows, cpu_library.or_absent(global_scale), **attributes
  )
  return _shaped(results, problem, (*lead, k))


def _quantize_prologue(
  x: jax.Array,
  global_scale: jax.Array | None,
  problem: problems.QuantizationProblem,
  attributes: dict[str, np.int64],
  keys: Sequence[jax.Array | None],
  more: Mapping[str, jax.Array],
) -> list[jax.Array]:
  """Quantizes a prologue's result along features, rows, or both."""
  prologue, singles = problem.prologue, problem.singles()
  assert prologue is not None
  runs = [_run_of(single) or 0 for single in singles]
  # The kernel's first results are those along features.
  order = sorted(range(len(runs)), key=lambda i: runs[i] > 0)
  if global_scale is not None and global_scale.ndim:
    global_scale = global_scale[jnp.array(order)]
  rows, k = x.reshape(-1, x.shape[-1]), problem.shape[-1]
  run, sums = max(runs), list[jax.ShapeDtypeStruct]()
  if problem.column_sums is not None:
    entries = math.prod(problem.shape[: problem.column_sums])
    run = run or rows.shape[0] // entries
    sums = [jax.ShapeDtypeStruct((entries, 1, k), jnp.float32)]
  types: list[jax.ShapeDtypeStruct] = []
  for i in order:
    written = rows.shape[0], k
    if runs[i]:
      (b,) = _as_written(singles[i]).blockings
      padded = b.shape(problem.shape)[b.axis()]
      written = rows.shape[0] // runs[i] * k, padded
    types += _types(problem, *written)
  types += [jax.ShapeDtypeStruct(rows.shape, x.dtype)] * problem.returns_sum
  types += [jax.ShapeDtypeStruct((), jnp.float32)] * problem.returns_amax + sums
  arrays = [
    more[name].reshape(-1, more[name].shape[-1])
    if name in more and name in prologues.OF_X
    else cpu_library.or_absent(more.get(name))
    for name in prologues.OPERANDS
    if name != "cotangent" or prologue.gradient
  ]
  results = jax.ffi.ffi_call(_QUANTIZE, types)(
    rows,
    cpu_library.or_absent(global_scale),
    *arrays,
    *(key for key in keys if key is not None),
    prologue=np.int64(_FUNCTIONS[prologue.function]),
    halves=np.int64(_HALVES[prologue.halves]),
    gradient=np.int64(_GRADIENTS[prologue.gradient]),
    epsilon=np.float32(prologue.epsilon),
    alpha=np.float32(prologue.alpha),
    limit=np.float32(prologue.limit),
    along=np.int64(sum({1 + (run > 0) for run in runs})),
    run=np.int64(run),
    **attributes,
  )
  found: dict[int, list[jax.Array]] = {}
  for at, i in enumerate(order):
    each = results[3 * at :][:3]
    found[i] = _restored(each, singles[i], _as_written(singles[i]).blockings[0])
  # The kernel's first further result is the sum of a norm, which is the last.
  rest = results[3 * len(order) :]
  rest = [*rest[problem.returns_sum :], *rest[: problem.returns_sum]]
  leaves = [leaf for i in range(len(order)) for leaf in found[i]]
  shapes = [shape for shape, _ in problem.result_types()[len(leaves) :]]
  more_results = zip(rest, shapes, strict=True)
  return [*leaves, *(a.reshape(shape) for a, shape in more_results)]


def _quantize_operand(
  x: jax.Array,
  global_scale: jax.Array | None,
  problem: problems.QuantizationProblem,
  attributes: dict[str, np.int64],
  key: jax.Array | None = None,
) -> list[jax.Array]:
  """Quantizes along any dimension, with the options of recipes."""
  (given,), (options,) = problem.blockings, problem.options
  (b,) = _as_written(problem).blockings
  square = _square_rows(problem)
  axis, shape = b.axis(), b.shape(problem.shape)
  order = list(range(len(shape)))
  # Random bits follow the order of the array that `given` blocks.
  is_in_order = b != given or not options.is_stochastic
  if b.merges_in_place and is_in_order and not options.square:
    axis, end = b.dims[0], b.dims[-1] + 1
    merged_size = math.prod(x.shape[axis:end])
    x = x.reshape(*x.shape[:axis], merged_size, *x.shape[end:])
  else:
    # The kernel pads, so `apply` need not.
    x = dataclasses.replace(b, multiple=1).apply(x)
    # The kernel needs the dimensions of squares last, before the blocked one.
    if square is None:
      merged = list(map(b.position, options.square or ()))
      order = [d for d in order if d not in (*merged, axis)] + [*merged, axis]
      x, axis = x.transpose(order), len(order) - 1
      square = math.prod(shape[d] for d in merged)
  outer, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
  padded = shape[b.axis()]
  results = jax.ffi.ffi_call(
    _QUANTIZE_OPERAND, _types(problem, outer * inner, padded)
  )(
    x.reshape(outer, x.shape[axis], inner),
    cpu_library.or_absent(global_scale),
    jnp.zeros((0,), jnp.uint32) if key is None else key,
    hadamard=np.int64(options.hadamard or 1),
    square=np.int64(square or 0),
    four_over_six=np.int64(options.four_over_six),
    scale_up=np.int64(options.scale_up),
    **attributes,
  )
  return _restored(results, problem, b, order)


def _restored(
  results: Sequence[jax.Array],
  problem: problems.QuantizationProblem,
  b: blocking.Blocking,
  order: Sequence[int] | None = None,
) -> list[jax.Array]:
  """Returns results of a kernel in the order of the blocked array.

  Args:
    results: values, scale and global scale; the blocked dimension is last.
    b: the blocking as the kernel computes it.
    order: order of the kernel's other dimensions; by default that of the array.
  """
  shape = b.shape(problem.shape)
  order = [d for d in order or range(len(shape)) if d != b.axis()] + [b.axis()]
  results = _shaped(results, problem, tuple(shape[d] for d in order))
  if b != problem.blockings[0]:
    moved = [b.unmerged(r, problem.shape) for r in results[:2]]
  else:
    back = [order.index(d) for d in range(len(order))]
    moved = [r.transpose(back) for r in results[:2]]
  return moved + results[2:]


def _types(
  problem: problems.QuantizationProblem, rows: int, k: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Returns the custom calls' result types: values, scale, global scale."""
  format = problem.format
  stored, dtype = k, format.array_dtype
  if problem.packed:
    # The kernel writes packed bytes; with this type XLA:CPU needs no copy.
    stored, dtype = k // 2, formats.PACKED
  return (
    jax.ShapeDtypeStruct((rows, stored), dtype),
    jax.ShapeDtypeStruct((rows, k // format.block_size), format.scale_dtype),
    jax.ShapeDtypeStruct((), jnp.float32),
  )


def _shaped(
  results: Sequence[jax.Array],
  problem: problems.QuantizationProblem,
  shape: tuple[int, ...],
) -> list[jax.Array]:
  """Returns a custom call's results, reshaped to the array's dimensions."""
  values, scale, computed = results
  *lead, k = shape
  values = values.reshape(*lead, values.shape[-1])
  scale = scale.reshape(*lead, k // problem.format.block_size)
  if problem.scale_layout == layouts.SWIZZLED:
    scale = layouts.swizzle_scale(scale)
  return [values, scale, computed][: problem.results_each]


def dequantize(
  values: jax.Array,
  scale: jax.Array,
  global_scale: jax.Array | None,
  problem: problems.DequantizationProblem,
  target: targets.Target | None = None,
) -> jax.Array:
  """Computes the result of `dequantize_p`."""
  cpu_library.register()
  *lead, k = problem.logical_shape
  factor = None
  if global_scale is not None:
    factor = operations.expand_global_scale(global_scale, values.ndim)
  # The kernel multiplies by a scalar. XLA multiplies by an array afterwards.
  is_fused = factor is None or factor.ndim == 0
  dtype = problem.out_dtype if is_fused else np.dtype(np.float32)
  rows = values.reshape(-1, values.shape[-1])
  result = jax.ffi.ffi_call(
    _DEQUANTIZE, jax.ShapeDtypeStruct((rows.shape[0], k), dtype)
  )(
    rows,
    scale.reshape(-1, scale.shape[-1]),
    cpu_library.or_absent(factor if is_fused else None),
    **cpu_library.format_attributes(problem.format, rows.dtype),
    **cpu_library.call_attributes(target),
  ).reshape(*lead, k)
  if factor is None or is_fused:
    return result
  return (result * factor).astype(problem.out_dtype)


QUANTIZE: Final[decisions.BackendRecord[problems.QuantizationProblem]] = (
  choice.cpu_backend(
    summary="C++ kernels", supports=supports_quantize, emit=quantize
  )
)
# It is tried on all platforms, so that on others `explain` shows its reason for
# XLA ops.
DEQUANTIZE: Final[decisions.BackendRecord[problems.DequantizationProblem]] = (
  choice.cpu_backend(
    summary="C++ kernels",
    platforms=(),
    supports=supports_dequantize,
    emit=dequantize,
  )
)

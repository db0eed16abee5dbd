# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Maps arrays to the rows or matrices that the Triton quantize kernels read.

For one blocked axis, x is rows. For two, x must be a matrix or a batch of
matrices: one blocking covers the last dimensions of x, the other one those
before them. A kernel then reads x once for both.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.core import blocking, decisions, targets
from jaxplugin.kernels import launching
from jaxplugin.kernels.gpu.quantization import quantize_config, quantize_plans
from jaxplugin.quantization import hadamard, problems
from jaxplugin.quantization.sharding import offsets
from jaxplugin.runtime import triton_library

_PLANNED_ROWS: Final = 16  # if the number of rows is symbolic
_MAX_PROGRAMS: Final = 2**31 - 1  # CUDA's limit on the first grid dimension


def launches(
  problem: problems.QuantizationProblem, target: targets.Target
) -> list[launching.Launch] | decisions.Unsupported:
  """Returns the launches for a problem, or why kernels do not support it."""
  architecture = triton_library.supported_architecture(target)
  if reason := _prologue_refusal(problem):
    return decisions.Unsupported(reason)
  if not problem.sizes_are_static:
    return _launches_of_m(problem, target)
  x = _input(problem)
  if isinstance(x, decisions.Unsupported):
    return x
  found = quantize_plans.plan(x, architecture)
  entries = math.prod(problem.shape[: problem.column_sums or 0])
  if x.batch % entries:
    tile = dict(found[-1].constexprs)["TILE"]
    size = tile.block_m if tile.is_row_major else tile.block_k
    rows = math.prod(problem.shape[:-1]) // entries
    if rows % size:
      return decisions.Unsupported(
        f"sums columns of whole tiles of {size} rows under vmap, got {rows}"
      )
  programs = max(each.grid for each in found)
  if programs > _MAX_PROGRAMS:
    return decisions.Unsupported(
      f"needs {programs} programs, a launch has at most {_MAX_PROGRAMS}"
    )
  return found


def _prologue_refusal(problem: problems.QuantizationProblem) -> str:
  """Returns why kernels compute the prologue separately, or ""."""
  prologue, ndim = problem.prologue, len(problem.shape)
  if prologue is None:
    return ""
  if not problem.sizes_are_static:
    return f"needs static sizes for {prologue.name}, got {problem}"
  if prologue.gradient_of_halves:
    granule = problem.format.block_size
    if prologue.halves != "split" or problem.shape[-1] % (2 * granule):
      return (
        f"computes the gradient of gates and factors in two halves of whole"
        f" blocks of {granule}, got {prologue.halves} halves of"
        f" {problem.shape[-1] // 2}"
      )
  dims = [b.dims for b in problem.blockings]
  if len(dims) == 1:
    (b,) = problem.blockings
    is_along = dims[0] == (ndim - 1,) or (
      dims[0] == (ndim - 2,) and problem.shape[-1] > 1
    )
    is_found = is_along and b.shape(problem.shape) == problem.shape
  else:
    found = _found(problem)
    is_found = found is None or found[2] == ndim - 1
  if is_found:
    return ""
  return (
    f"computes {prologue.name} with whole blocks along the last or the"
    f" second to last dimension, got {dims} of {ndim}"
  )


def _launches_of_m(
  problem: problems.QuantizationProblem, target: targets.Target
) -> list[launching.Launch] | decisions.Unsupported:
  """Returns the launch for symbolic sizes before a static, blocked last one."""
  first = problem.blockings[0]
  *lead, k = first.shape(problem.shape)
  if (
    len(problem.blockings) > 1
    or first.axis() != len(lead)
    or not blocking.are_static([k])
  ):
    return decisions.Unsupported(
      "needs static sizes, or one blocked dimension, which is static and the"
      f" last one, got {problem}"
    )
  if problem.scale_layout != layouts.LINEAR or problem.num_maxima is not None:
    return decisions.Unsupported(
      "needs a linear scale of an unsharded array if sizes are symbolic"
    )
  if problem.options[0] != problems.NO_OPTIONS:
    return decisions.Unsupported(
      f"needs static sizes for {problem.options[0]}, got {problem}"
    )
  architecture = triton_library.supported_architecture(target)
  rows = quantize_config.Rows(
    batch=1,
    rows=_PLANNED_ROWS,
    k=k,
    k_is_minor=True,
    **_common(
      problem.with_global_scale() if problem.computes_global_scale else problem
    ),
  )
  cores = target.core_count or 1
  return [quantize_plans.plan_of_m(rows, architecture, cores)]


def maxima_launch(
  problem: problems.QuantizationProblem, target: targets.Target
) -> launching.Launch:
  """Returns the launch that finds partial amax values of x.

  `launches` must support the problem.
  """
  architecture = triton_library.supported_architecture(target)
  x = _input(problem)
  assert not isinstance(x, decisions.Unsupported)
  return quantize_plans.plan_maxima(x, architecture)


def _input(
  problem: problems.QuantizationProblem,
) -> quantize_config.Rows | quantize_config.Matrices | decisions.Unsupported:
  """Returns x as kernels read it, or why they do not support the problem."""
  return _rows(problem) if len(problem.blockings) == 1 else _matrices(problem)


def _rows(
  problem: problems.QuantizationProblem,
) -> quantize_config.Rows | decisions.Unsupported:
  """Returns x as rows of one blocked axis, or why kernels do not support it.

  The rows are the dimensions after the blocked axis, or those before it if it
  is the last. With square blocks they are the dimensions of the squares' other
  side, which must be next to the axis.
  """
  (blocking,), (options,) = problem.blockings, problem.options
  shape, axis = blocking.shape(problem.shape), blocking.axis()
  swizzled = problem.scale_layout == layouts.SWIZZLED
  outer, k = math.prod(shape[:axis]), shape[axis]
  batch, rows, k_is_minor = outer, math.prod(shape[axis + 1 :]), False
  groups = [range(axis), range(axis + 1, len(shape)), (axis,)]
  if options.square:
    square = tuple(map(blocking.position, options.square))
    first = axis - len(square) if axis == len(shape) - 1 else axis + 1
    if square != tuple(range(first, first + len(square))) or (
      axis < len(shape) - 1 and axis + 1 + len(square) < len(shape)
    ):
      return decisions.Unsupported(
        f"needs square blocks over the last dimension and dimension {axis},"
        f" got {list(square)} of {len(shape)}"
      )
    if axis == len(shape) - 1:
      batch, rows = math.prod(shape[:first]), math.prod(shape[first:axis])
      k_is_minor = True
      groups[:2] = range(first), range(first, axis)
  elif swizzled:  # Each matrix of a stack has separate tiles.
    batch, rows, k_is_minor = math.prod(shape[:-2]), shape[-2], True
    groups[:2] = range(axis - 1), range(axis - 1, axis)
  elif rows == 1:
    batch, rows, k_is_minor = 1, outer, True
    groups[:2] = (), range(axis)
  return quantize_config.Rows(
    batch=batch,
    rows=rows,
    k=k,
    k_is_minor=k_is_minor,
    swizzled=swizzled,
    pads_values=problem.pads_values,
    options=_options(options),
    places=_places(shape, _strides(shape, options), groups),
    **_common(problem),
  )


def rows_of_matmul(
  problem: problems.QuantizationProblem, sizes: tuple[int, int, int]
) -> quantize_config.Rows:
  """Returns the result of a matmul as rows. Its last dimension is blocked.

  Args:
    sizes: (batch, m, n).
  """
  batch, m, n = sizes
  (options,) = problem.options
  return quantize_config.Rows(
    batch=batch,
    rows=m,
    k=n,
    k_is_minor=True,
    options=_options(options),
    **_common(problem),
  )


def _strides(
  shape: Sequence[int], options: problems.RecipeOptions
) -> tuple[int, ...]:
  """Returns strides, in the array whose offsets determine random bits."""
  return offsets.strides(shape) if options.strides is None else options.strides


def _places(
  shape: Sequence[int], strides: Sequence[int], groups: Sequence[Sequence[int]]
) -> quantize_config.Places:
  """Returns the places of (batch, row, k), each a group of dimensions.

  Dimensions that are contiguous in the array become one.

  Args:
    groups: dimensions of each group, major to minor.
  """
  result = []
  for dims in groups:
    axis: list[tuple[int, int]] = []
    for dim in dims:
      if shape[dim] == 1:
        continue
      if axis and axis[-1][1] == shape[dim] * strides[dim]:
        size, _ = axis.pop()
        axis.append((size * shape[dim], strides[dim]))
      else:
        axis.append((shape[dim], strides[dim]))
    result.append(tuple(itertools.chain(*axis)) or (1, 0))
  return quantize_config.Places(*result)


def _options(
  options: problems.RecipeOptions,
) -> quantize_config.QuantizeOptions:
  size = options.hadamard or 1
  negative = hadamard.signs(size) < 0
  words = np.packbits(negative, bitorder="little")
  words = np.pad(words, (0, -len(words) % 4)).view(np.int32)
  return quantize_config.QuantizeOptions(
    hadamard=size,
    sign_words=tuple(map(int, words)) if size > 1 else (),
    factor=float(hadamard.factor(size)),
    is_square=bool(options.square),
    four_over_six=options.four_over_six,
    scale_up=options.scale_up,
    is_stochastic=options.is_stochastic,
    is_part=options.strides is not None,
  )


def as_written(
  problem: problems.QuantizationProblem,
) -> problems.QuantizationProblem:
  """Returns the problem with blockings in the order that matmuls read.

  A blocking with stochastic rounding stays, because random bits follow the
  order of the array. All stay if packed values must have that order in memory.
  """
  if problem.packed_in_order:
    return problem
  blockings = tuple(
    b if options.is_stochastic else b.as_in_product(problem.shape)
    for b, options in zip(problem.blockings, problem.options, strict=True)
  )
  return dataclasses.replace(problem, blockings=blockings)


def order(problem: problems.QuantizationProblem) -> tuple[int, int] | None:
  """Returns the indices of the blockings of columns and of rows.

  The result is None unless x is an array of matrices with two blockings.
  """
  found = _found(problem)
  return None if found is None else found[0]


def _found(
  problem: problems.QuantizationProblem,
) -> tuple[tuple[int, int], int, int] | None:
  """Returns `order`, and the first dimensions of rows and columns."""
  if len(problem.blockings) != 2:
    return None
  ndim, blockings = len(problem.shape), as_written(problem).blockings
  for found in ((0, 1), (1, 0)):
    of_columns, of_rows = (blockings[i] for i in found)
    middle = ndim - len(of_columns.dims)
    if of_columns.dims == (ndim - 1,) and of_rows.dims:
      # If the last dimension has whole blocks, it can merge with the dimensions
      # before it, up to those of rows.
      is_whole = problem.shape[-1] % of_columns.multiple == 0
      middle = of_rows.dims[-1] + 1 if is_whole else middle
    start = middle - len(of_rows.dims)
    batch = tuple(range(start))
    rows, columns = tuple(range(start, middle)), tuple(range(middle, ndim))
    if (
      rows
      and columns
      and of_rows.dims == rows
      and (
        of_columns.dims == (ndim - 1,)
        or (of_columns.dims == columns and of_columns.lead == batch + rows)
      )
      and (len(rows) == 1 or of_rows.lead == batch + columns)
    ):
      return found, start, middle
  return None


def _matrices(
  problem: problems.QuantizationProblem,
) -> quantize_config.Matrices | decisions.Unsupported:
  found = _found(problem)
  if found is None:
    return decisions.Unsupported(
      "needs the blocked dimensions to be the last ones of x, got"
      f" {[b.dims for b in problem.blockings]} of {len(problem.shape)}"
    )
  shape = problem.shape
  positions, start, middle = found
  blockings = as_written(problem).blockings
  of_columns, of_rows = (blockings[i] for i in positions)
  columns = math.prod(shape[middle:])
  groups = [range(*ends) for ends in ((0, start), (start, middle))]
  groups.append(range(middle, len(shape)))
  of_bits = [
    _places(shape, _strides_of_x(problem, blockings[i], i), (groups[0], *rest))
    for i, rest in zip(positions, (groups[1:], groups[:0:-1]), strict=True)
  ]
  return quantize_config.Matrices(
    batch=math.prod(shape[:start]),
    rows=math.prod(shape[start:middle]),
    columns=columns,
    k=blocking.round_up(columns, of_columns.multiple),
    k_t=of_rows.shape(shape)[of_rows.axis()],
    is_transposed=len(of_rows.dims) > 1,
    row=positions[0],
    options=_options(problem.options[positions[0]]),
    options_t=_options(problem.options[positions[1]]),
    places=of_bits[0],
    places_t=of_bits[1],
    **_common(problem),
  )


def _strides_of_x(
  problem: problems.QuantizationProblem, b: blocking.Blocking, i: int
) -> list[int]:
  """Returns strides of x's dimensions in the array of random bits' offsets.

  `b` is the blocking of index `i`, perhaps in the order that matmuls read.
  """
  shape = problem.shape
  strides = _strides(b.shape(shape), problem.options[i])
  # Only the first of merged dimensions may be sharded.
  return [
    strides[b.axis()]
    * math.prod(shape[d] for d in b.dims[b.dims.index(dim) + 1 :])
    if dim in b.dims
    else strides[b.position(dim)]
    for dim in range(len(shape))
  ]


def _common(problem: problems.QuantizationProblem) -> dict[str, Any]:
  global_scale = "given" if problem.has_global_scale else "none"
  if problem.num_maxima is not None:
    global_scale = "of_maxima"
  elif problem.computes_global_scale:
    global_scale = "computed"
  prologue = problem.prologue
  if prologue is not None and prologue.is_norm_gradient:
    prologue = prologue.with_statistics()  # XLA ops compute them
  return {
    "num_maxima": problem.num_maxima or 0,
    "format": problem.format.name,
    "scale_rounding": problem.scale_rounding,
    "global_scale": global_scale,
    "packed_in_place": problem.packed_in_order,
    "prologue": prologue,
    "dtype": problem.dtype.name,
    "returns_amax": problem.returns_amax,
    "sums_columns": problem.column_sums is not None,
  }

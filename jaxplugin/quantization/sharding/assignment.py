# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which mesh axes each dimension of a quantized array is computed with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from jaxplugin.core import blocking
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import assignment as assignment_lib
from jaxplugin.operation import notation
from jaxplugin.quantization import problems

Assignment = assignment_lib.Assignment
Axes = mesh_axes.Axes
Spec = mesh_axes.Spec


def quantize_granules(
  problem: problems.QuantizeProblem,
) -> tuple[int | None, ...]:
  """Returns how many values of each dimension of x stay together on a device.

  None stands for a dimension that is not split. Blocks stay whole, and so do
  transformed groups and both sides of squares. A padded dimension is not split.
  If several dimensions are merged into the blocked one, only the first is
  split, so that a device's part of the result is contiguous.
  """
  granules: list[int | None] = [1] * len(problem.shape)

  def need(dim: int, granule: int | None) -> None:
    known = granules[dim]
    if known is None or granule is None:
      granules[dim] = None
    else:
      granules[dim] = math.lcm(known, granule)

  for b, extras in zip(problem.blockings, problem.extras_each, strict=True):
    block = problem.format.block_size
    size = math.prod(problem.shape[d] for d in b.dims)
    group = math.lcm(block, extras.hadamard or 1)
    inside = _granules_of_merged([problem.shape[d] for d in b.dims], group)
    for i, dim in enumerate(b.dims):
      is_whole = i > 0 or size % b.multiple != 0
      need(dim, None if is_whole else inside[i])
    if extras.square is not None:
      sizes = [problem.shape[d] for d in extras.square]
      for dim, granule in zip(
        extras.square, _granules_of_merged(sizes, block), strict=True
      ):
        need(dim, granule)
  return tuple(granules)


def _granules_of_merged(sizes: Sequence[int], group: int) -> list[int | None]:
  """Returns how many values of each merged dimension stay together.

  Args:
    sizes: sizes of the dimensions, major to minor.
    group: values of the merged dimension that stay together. The last group may
      be smaller.
  """
  result: list[int | None] = [None] * len(sizes)
  minor = 1
  for i in reversed(range(len(sizes))):
    if sizes[i] * minor % group == 0:
      result[i] = group // math.gcd(group, minor)
      result[:i] = [1] * i  # groups lie inside the dimensions from here on
      break
    minor *= sizes[i]
  return result


def assign_quantize(
  problem: problems.QuantizeProblem,
  x_spec: Spec,
  wanted: Sequence[Spec] | None,
  axis_sizes: Mapping[str, int],
  num_operands: int,
) -> Assignment:
  """Decides how an array is split to be quantized.

  x stays as it is sharded if that leaves blocks whole, because the results are
  smaller and cheaper to move. An axis that would cut blocks goes to another
  dimension that it divides, the largest first, which exchanges x between the
  devices. If there is none, x is gathered over the axis. Axes that split no
  dimension of x but are wanted for the results also split x, at no cost.

  Args:
    problem: the problem of the whole array.
    x_spec: axes of the dimensions of x.
    wanted: axes wanted for the values of each blocking; None if nothing is
      known.
    axis_sizes: size of each mesh axis.
    num_operands: counts x and the operands that every device has in full.
  """
  taker = mesh_axes.Taker(axis_sizes)
  granules = quantize_granules(problem)
  axes: list[Axes] = [()] * len(x_spec)
  left: list[tuple[int, str]] = []
  for dim, given in enumerate(x_spec):
    granule = granules[dim]
    if granule is not None:
      axes[dim] = taker.take(given, problem.shape[dim], granule)
    left += [(dim, axis) for axis in given[len(axes[dim]) :]]

  def add(dim: int, more: Axes) -> bool:
    granule, own = granules[dim], axes[dim]
    if granule is None:
      return False
    parts = granule * taker.count(own)
    if not taker.fits(more, problem.shape[dim], parts):
      return False
    axes[dim] = own + taker.take(more, problem.shape[dim], parts)
    return True

  order = sorted(range(len(axes)), key=lambda d: -problem.shape[d])
  for from_dim, axis in left:
    for dim in order:
      if dim != from_dim and add(dim, (axis,)):
        break
  for b, spec in zip(problem.blockings, wanted or (), strict=False):
    for dim, want in enumerate(spec_of_x(b, spec, len(axes))):
      if want[: len(axes[dim])] == axes[dim]:
        add(dim, want[len(axes[dim]) :])
  x = tuple(axes)
  return Assignment(
    operands=(x, *[()] * (num_operands - 1)),
    results=tuple(
      spec for b in problem.blockings for spec in result_specs(problem, b, x)
    ),
  )


def with_whole_blocks(
  problem: problems.QuantizeProblem, x_spec: Spec, axis_sizes: Mapping[str, int]
) -> Spec:
  """Removes the axes that would cut a block from `x_spec`."""
  taker = mesh_axes.Taker(axis_sizes)
  return tuple(
    () if granule is None else taker.take(axes, size, granule)
    for axes, size, granule in zip(
      x_spec, problem.shape, quantize_granules(problem), strict=True
    )
  )


def result_spec(b: blocking.Blocking, x_spec: Spec) -> Spec:
  """Returns the axes of values and scales of an array split as `x_spec`."""
  if len(b.dims) == 1:
    return x_spec
  lead = [x_spec[d] for d in (b.lead if b.dims else range(len(x_spec)))]
  return (*lead, x_spec[b.dims[0]] if b.dims else ())


def result_specs(
  problem: problems.QuantizeProblem, b: blocking.Blocking, x_spec: Spec
) -> tuple[Spec, ...]:
  """Returns the axes of values, scale, and a computed global scale."""
  spec = result_spec(b, x_spec)
  return (spec, spec, ())[: problem.results_each]


def spec_of_x(b: blocking.Blocking, spec: Spec, ndim: int) -> Spec:
  """Returns the axes of x whose values are split as `spec` says."""
  result: list[Axes] = [()] * ndim
  for dim in range(ndim):
    if dim not in b.dims:
      result[dim] = spec[b.position(dim)]
  if b.dims:
    result[b.dims[0]] = spec[b.axis()]
  return tuple(result)


def dequantize_granules(
  problem: problems.DequantizeProblem,
) -> tuple[int | None, ...]:
  """Returns the granules of the logical array, as `quantize_granules` does."""
  granules: list[int | None] = [1] * len(problem.shape)
  block = problem.format.block_size
  is_even = problem.logical_shape[problem.axis] % block == 0
  granules[problem.axis] = block if is_even else None
  return tuple(granules)


def assign_dequantize(
  problem: problems.DequantizeProblem,
  values_spec: Spec,
  wanted: Spec | None,
  axis_sizes: Mapping[str, int],
) -> Assignment:
  """Decides how an array is split to be dequantized: as the result is wanted.

  Bytes are moved, and not floats. If nothing is wanted, the values stay.

  Args:
    problem: the problem of the whole array.
    values_spec: axes of the dimensions of the values.
    wanted: axes wanted for the result; None if nothing is known.
    axis_sizes: size of each mesh axis.
  """
  taker = mesh_axes.Taker(axis_sizes)
  given = values_spec if wanted is None else wanted
  x = tuple(
    () if granule is None else taker.take(axes, size, granule)
    for axes, size, granule in zip(
      given, problem.logical_shape, dequantize_granules(problem), strict=True
    )
  )
  operands: list[Spec] = [x, x]
  if problem.global_shape is not None:
    operands.append(
      tuple(
        axes if size != 1 else ()
        for axes, size in zip(x, problem.global_shape, strict=False)
      )
    )
  return Assignment(operands=tuple(operands), results=(x,))


def uneven_notes(
  shape: Sequence[int],
  granules: Sequence[int | None],
  axis_sizes: Mapping[str, int],
) -> tuple[str, ...]:
  """Returns the notes of `explain` about dimensions of whole blocks.

  Args:
    shape: shape of the logical array.
    granules: granules of its dimensions.
    axis_sizes: size of each mesh axis.
  """
  notes = []
  for dim, (size, granule) in enumerate(zip(shape, granules, strict=True)):
    if granule == 1:
      continue
    if granule is None:
      cut = [name for name, count in axis_sizes.items() if count > 1]
      what = f"dimension {dim} of size {size} stays whole"
    else:
      parts = size // granule
      cut = [name for name, count in axis_sizes.items() if parts % count]
      what = f"dimension {dim} has {parts} parts of {granule} that stay whole"
    if cut:
      names = ", ".join(f"{name} ({axis_sizes[name]})" for name in cut)
      notes.append(
        f"{what}: where mesh axis {names} splits it, another dimension is split"
        " instead, or it is gathered; pad it to avoid that"
      )
  return tuple(notes)


def quantize_notation(
  problem: problems.QuantizeProblem, operands: Sequence[Any]
) -> notation.Notation:
  """Returns the names of the dimensions of x, and of what comes from them.

  Shardy may split a mesh axis that does not divide the number of blocks.
  `assign_quantize` gives the rest of that axis to another dimension.
  """
  x, sizes = _dimensions(problem.shape, quantize_granules(problem))
  results: list[notation.Names] = []
  for b in problem.blockings:
    names = x
    if len(b.dims) != 1:
      blocked = [x[b.dims[0]] if b.dims else notation.WHOLE]
      names = [x[d] for d in (b.lead if b.dims else range(len(x)))] + blocked
    results += [names, names, ()][: problem.results_each]
  more = [[notation.WHOLE] * len(a.shape) for a in operands[1:]]
  return notation.Notation(operands=[x, *more], results=results, sizes=sizes)


def dequantize_notation(
  problem: problems.DequantizeProblem, operands: Sequence[Any]
) -> notation.Notation:
  """Returns the names of the dimensions of values, scale and result."""
  x, sizes = _dimensions(problem.logical_shape, dequantize_granules(problem))
  more = [
    [
      name if size != 1 else notation.WHOLE
      for name, size in zip(x, global_scale.shape, strict=False)
    ]
    for global_scale in operands[2:]
  ]
  return notation.Notation(operands=[x, x, *more], results=[x], sizes=sizes)


def _dimensions(
  shape: Sequence[int], granules: Sequence[int | None]
) -> tuple[list[str], dict[str, tuple[int, int]]]:
  """Returns the names of dimensions, and the sizes of those of two parts up."""
  sizes = {
    f"d{dim}": (size, granule)
    for dim, (size, granule) in enumerate(zip(shape, granules, strict=True))
    if granule is not None and size > granule
  }
  names = [f"d{dim}" for dim in range(len(shape))]
  return [n if n in sizes else notation.WHOLE for n in names], sizes

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which mesh axes split which dimension of what is quantized."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from collections.abc import Sequence

from jaxplugin.core import blocking
from jaxplugin.jaxext import mesh_axes
from jaxplugin.quantization import problems

Axes = mesh_axes.Axes
Spec = mesh_axes.Spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
  """The mesh axes that each dimension is computed with.

  Attributes:
    x: of the array that is quantized, or that dequantizing gives.
    operands: of each operand.
    results: of each result.
  """

  x: Spec
  operands: tuple[Spec, ...]
  results: tuple[Spec, ...]


def quantize_granules(
  problem: problems.QuantizeProblem,
) -> tuple[int | None, ...]:
  """How many values of each dimension of x stay together on a device.

  None for a dimension that no device has a part of. A block stays whole, and
  so do a group that is transformed and the other side of a square; what is
  padded is not split. Of several dimensions that are merged into the blocked
  one the first alone is split, which leaves a part of the result in one piece.
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
  """How many values of each of the dimensions that are merged stay together.

  Args:
    sizes: of the dimensions, major to minor.
    group: how many values of the merged one do; the last group may be smaller.
  """
  result: list[int | None] = [None] * len(sizes)
  minor = 1
  for i in reversed(range(len(sizes))):
    if sizes[i] * minor % group == 0:
      result[i] = group // math.gcd(group, minor)
      result[:i] = [1] * i  # groups lie inside of the dimensions from here on
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
  """How an array is split to be quantized.

  As it lies, where that leaves blocks whole: results are smaller, so they
  travel better than x. An axis that would cut blocks goes to another dimension
  that it divides, the largest first, which is an exchange of x among the
  devices; without one x is gathered over it. Axes that split no dimension of x,
  but are wanted for the results, split it too, which costs nothing.

  Args:
    problem: of the whole array.
    x_spec: the axes of its dimensions.
    wanted: those of values, of each blocking; None where nothing is known.
    axis_sizes: size of each mesh axis.
    num_operands: x, and what every device has whole.
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
    x=x,
    operands=(x, *[()] * (num_operands - 1)),
    results=tuple(
      spec for b in problem.blockings for spec in result_specs(problem, b, x)
    ),
  )


def with_whole_blocks(
  problem: problems.QuantizeProblem, x_spec: Spec, axis_sizes: Mapping[str, int]
) -> Spec:
  """`x_spec` without the axes that would cut a block."""
  taker = mesh_axes.Taker(axis_sizes)
  return tuple(
    () if granule is None else taker.take(axes, size, granule)
    for axes, size, granule in zip(
      x_spec, problem.shape, quantize_granules(problem), strict=True
    )
  )


def result_spec(b: blocking.Blocking, x_spec: Spec) -> Spec:
  """The axes of values, and of scales, of an array that is split so."""
  if len(b.dims) == 1:
    return x_spec
  lead = [x_spec[d] for d in (b.lead if b.dims else range(len(x_spec)))]
  return (*lead, x_spec[b.dims[0]] if b.dims else ())


def result_specs(
  problem: problems.QuantizeProblem, b: blocking.Blocking, x_spec: Spec
) -> tuple[Spec, ...]:
  """Of values, scale, and global scale where it is computed."""
  spec = result_spec(b, x_spec)
  return (spec, spec, ())[: problem.results_each]


def spec_of_x(b: blocking.Blocking, spec: Spec, ndim: int) -> Spec:
  """The axes of x that leave values split as `spec` says."""
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
  """As `quantize_granules`, of the logical array."""
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
  """How an array is split to be dequantized: as the result is wanted.

  So whatever has to travel does as bytes. Without a wish it stays as it is.

  Args:
    problem: of the whole array.
    values_spec: the axes of its dimensions.
    wanted: those of the result; None where nothing is known.
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
  return Assignment(x=x, operands=tuple(operands), results=(x,))


def uneven_notes(
  shape: Sequence[int],
  granules: Sequence[int | None],
  axis_sizes: Mapping[str, int],
) -> tuple[str, ...]:
  """What `explain` says of dimensions that cannot be split as others are.

  Args:
    shape: of the logical array.
    granules: of its dimensions.
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

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which mesh axes each dimension of a quantized array is computed with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import assignment as assignment_lib
from jaxplugin.operation import notation
from jaxplugin.quantization import problems

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
  operands: Sequence[Any],
  x_spec: Spec,
  wanted: Sequence[Spec] | None,
  axis_sizes: Mapping[str, int],
) -> assignment_lib.Assignment:
  """Decides how an array is split to be quantized.

  x stays as it is sharded if that leaves blocks whole, because the results are
  smaller and cheaper to move. An axis that would cut blocks goes to another
  dimension that it divides, the largest first, which exchanges x between the
  devices. If there is none, x is gathered over the axis. Axes that split no
  dimension of x but are wanted for the results also split x, at no cost.

  Args:
    problem: the problem of the whole array.
    operands: x, and the operands that every device has in full.
    x_spec: axes of the dimensions of x.
    wanted: axes wanted for each result; None if nothing is known.
    axis_sizes: size of each mesh axis.
  """
  dims = quantize_notation(problem, operands, least_parts=1)
  taker = mesh_axes.Taker(axis_sizes)
  axes = axes_of_whole_blocks(dims, dims.operands[0], x_spec, taker)

  def add(name: str, more: Axes) -> bool:
    size, granule = dims.sizes[name]
    parts = granule * taker.count(axes[name])
    fits = taker.fits(more, size, parts)
    if fits:
      axes[name] += taker.take(more, size, parts)
    return fits

  order = sorted(axes, key=lambda name: -dims.sizes[name][0])
  for name, given in zip(dims.operands[0], x_spec, strict=True):
    for axis in given[len(axes.get(name, ())) :]:
      for other in order:
        if other != name and add(other, (axis,)):
          break
  values = slice(None, None, problem.results_each)
  for names, spec in zip(
    dims.results[values], (wanted or ())[values], strict=False
  ):
    want = dict(zip(names, spec, strict=True))
    for name in axes:
      own, more = axes[name], want.get(name, ())
      if more[: len(own)] == own:
        add(name, more[len(own) :])
  return assignment_lib.Assignment(
    operands=notation.specs(dims.operands, axes),
    results=notation.specs(dims.results, axes),
  )


def axes_of_whole_blocks(
  dims: notation.Notation,
  names: notation.Names,
  spec: Spec,
  taker: mesh_axes.Taker,
) -> dict[str, Axes]:
  """Returns the axes of each named dimension, without those that cut a block.

  Args:
    dims: names and sizes of the dimensions.
    names: the name of each dimension of an array.
    spec: axes of each dimension of that array.
    taker: knows the mesh.
  """
  given = dict(zip(names, spec, strict=True))
  return {
    name: taker.take(given.get(name, ()), *size)
    for name, size in dims.sizes.items()
  }


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
  operands: Sequence[Any],
  values_spec: Spec,
  wanted: Spec | None,
  axis_sizes: Mapping[str, int],
) -> assignment_lib.Assignment:
  """Decides how an array is split to be dequantized: as the result is wanted.

  Bytes are moved, and not floats. If nothing is wanted, the values stay.

  Args:
    problem: the problem of the whole array.
    operands: values, scale, and perhaps a global scale.
    values_spec: axes of the dimensions of the values.
    wanted: axes wanted for the result; None if nothing is known.
    axis_sizes: size of each mesh axis.
  """
  dims = dequantize_notation(problem, operands, least_parts=1)
  spec = values_spec if wanted is None else wanted
  taker = mesh_axes.Taker(axis_sizes)
  axes = axes_of_whole_blocks(dims, dims.results[0], spec, taker)
  return assignment_lib.Assignment(
    operands=notation.specs(dims.operands, axes),
    results=notation.specs(dims.results, axes),
  )


def uneven_notes(
  problem: problems.QuantizeProblem | problems.DequantizeProblem,
  axis_sizes: Mapping[str, int],
) -> tuple[str, ...]:
  """Returns the notes of `explain` about dimensions of whole blocks."""
  if isinstance(problem, problems.DequantizeProblem):
    shape, granules = problem.logical_shape, dequantize_granules(problem)
  else:
    shape, granules = problem.shape, quantize_granules(problem)
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
  problem: problems.QuantizeProblem,
  operands: Sequence[Any] = (),
  least_parts: int = 2,
) -> notation.Notation:
  """Returns the names of the dimensions of x and of the results.

  Shardy may split a mesh axis that does not divide the number of blocks.
  `assign_quantize` gives the rest of that axis to another dimension.

  Args:
    problem: the problem of the whole array.
    operands: x, and the operands that every device has in full.
    least_parts: a dimension of fewer parts has no name.
  """
  x, sizes = _dimensions(problem.shape, quantize_granules(problem), least_parts)
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
  problem: problems.DequantizeProblem,
  operands: Sequence[Any],
  least_parts: int = 2,
) -> notation.Notation:
  """Returns the names of the dimensions of values, scale and result."""
  x, sizes = _dimensions(
    problem.logical_shape, dequantize_granules(problem), least_parts
  )
  more = [
    [
      name if size != 1 else notation.WHOLE
      for name, size in zip(x, global_scale.shape, strict=False)
    ]
    for global_scale in operands[2:]
  ]
  return notation.Notation(operands=[x, x, *more], results=[x], sizes=sizes)


def _dimensions(
  shape: Sequence[int], granules: Sequence[int | None], least_parts: int
) -> tuple[list[str], dict[str, tuple[int, int]]]:
  """Returns the names of dimensions, and the sizes of the named ones."""
  sizes = {
    f"d{dim}": (size, granule)
    for dim, (size, granule) in enumerate(zip(shape, granules, strict=True))
    if isinstance(size, int)
    and granule is not None
    and size >= least_parts * granule
  }
  names = [f"d{dim}" for dim in range(len(shape))]
  return [n if n in sizes else notation.WHOLE for n in names], sizes

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Assigns auto and explicit mesh axes to dimensions of quantized arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import assignment as assignment_lib
from jaxplugin.operation import notation
from jaxplugin.quantization import problems, prologues

Axes = mesh_axes.Axes
Spec = mesh_axes.Spec


def quantize_granules(
  problem: problems.QuantizationProblem,
) -> tuple[int | None, ...]:
  """Returns the granule of each dimension of x: shards have a multiple of it.

  None means that the dimension must not be sharded. Granules keep blocks,
  Hadamard groups and both sides of square blocks whole. A padded dimension is
  not sharded, nor is the last one of a norm. Only the first of the dimensions
  merged into the blocked one may be sharded, so that shards of the result are
  contiguous.
  """
  granules: list[int | None] = [1] * len(problem.shape)

  def need(dim: int, granule: int | None) -> None:
    known = granules[dim]
    if known is None or granule is None:
      granules[dim] = None
    else:
      granules[dim] = math.lcm(known, granule)

  for b, options in zip(problem.blockings, problem.options, strict=True):
    block = problem.format.block_size
    size = math.prod(problem.shape[d] for d in b.dims)
    group = math.lcm(block, options.hadamard or 1)
    inside = _granules_of_merged([problem.shape[d] for d in b.dims], group)
    for i, dim in enumerate(b.dims):
      is_whole = i > 0 or size % b.multiple != 0
      need(dim, None if is_whole else inside[i])
    if options.square is not None:
      sizes = [problem.shape[d] for d in options.square]
      for dim, granule in zip(
        options.square, _granules_of_merged(sizes, block), strict=True
      ):
        need(dim, granule)
  if problem.prologue is not None and problem.prologue.is_norm:
    need(-1, None)
  return tuple(granules)


def _granules_of_merged(sizes: Sequence[int], group: int) -> list[int | None]:
  """Returns the granules of dimensions that are merged.

  Args:
    group: granule of the merged dimension. The last group may be smaller.
  """
  result: list[int | None] = [None] * len(sizes)
  minor = 1
  for i in reversed(range(len(sizes))):
    if sizes[i] * minor % group == 0:
      result[i] = group // math.gcd(group, minor)
      result[:i] = [1] * i  # Groups do not span these dimensions.
      break
    minor *= sizes[i]
  return result


def assign_quantize(
  problem: problems.QuantizationProblem,
  operands: Sequence[Any],
  shardings: assignment_lib.Shardings,
) -> assignment_lib.Assignment:
  """Assigns mesh axes to quantizing an array.

  x keeps its sharding if that leaves blocks whole: the quantized results are
  smaller, so moving them is cheaper. An axis that would cut blocks moves to
  another dimension that it divides, the largest first, by an all-to-all of x.
  If there is no such dimension, x is all-gathered over the axis. An axis that
  does not shard x but is wanted for the results also shards x, at no cost.

  Args:
    operands: operands of `quantize_p`, with paired halves.
  """
  dims = quantize_notation(problem, operands, least_parts=1)
  taker, x_spec = mesh_axes.Taker(shardings.axis_sizes), shardings.operands[0]
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
    dims.results[values], (shardings.results or ())[values], strict=False
  ):
    want = dict(zip(names, spec, strict=True))
    for name in axes:
      own, more = axes[name], want.get(name, ())
      if more[: len(own)] == own:
        add(name, more[len(own) :])
  return assignment_lib.Assignment(
    axis_sizes=shardings.axis_sizes,
    operands=notation.specs(dims.operands, axes),
    results=notation.specs(dims.results, axes),
  )


def axes_of_whole_blocks(
  dims: notation.Notation,
  names: notation.Names,
  spec: Spec,
  taker: mesh_axes.Taker,
) -> dict[str, Axes]:
  """Returns the mesh axes of each named dimension that leave blocks whole.

  `names` and `spec` are the dimensions' names and mesh axes in one array.
  """
  given = dict(zip(names, spec, strict=True))
  return {
    name: taker.take(given.get(name, ()), *size)
    for name, size in dims.sizes.items()
  }


def dequantize_granules(
  problem: problems.DequantizationProblem,
) -> tuple[int | None, ...]:
  """Returns the granules of the logical array (`quantize_granules`)."""
  granules: list[int | None] = [1] * len(problem.shape)
  block = problem.format.block_size
  is_even = problem.logical_shape[problem.axis] % block == 0
  granules[problem.axis] = block if is_even else None
  return tuple(granules)


def assign_dequantize(
  problem: problems.DequantizationProblem,
  operands: Sequence[Any],
  shardings: assignment_lib.Shardings,
) -> assignment_lib.Assignment:
  """Assigns mesh axes to dequantizing: those wanted for the result.

  Collectives then move quantized bytes instead of floats. If the wanted axes
  are unknown, the values keep their sharding.
  """
  dims = dequantize_notation(problem, operands, least_parts=1)
  spec = shardings.wanted(shardings.operands[0])
  taker = mesh_axes.Taker(shardings.axis_sizes)
  axes = axes_of_whole_blocks(dims, dims.results[0], spec, taker)
  return assignment_lib.Assignment(
    axis_sizes=shardings.axis_sizes,
    operands=notation.specs(dims.operands, axes),
    results=notation.specs(dims.results, axes),
  )


def uneven_notes(
  problem: problems.QuantizationProblem | problems.DequantizationProblem,
  axis_sizes: Mapping[str, int],
) -> tuple[str, ...]:
  """Returns `explain` notes on dimensions that mesh axes do not divide."""
  if isinstance(problem, problems.DequantizationProblem):
    shape, granules = problem.logical_shape, dequantize_granules(problem)
  else:
    shape, granules = problem.shape, quantize_granules(problem)
  notes = []
  prologue = getattr(problem, "prologue", None)
  if prologue is not None and prologue.merged_halves == "split":
    notes.append(
      "x is resharded where a mesh axis splits its last dimension, which has"
      " gates and factors in two halves; pass two arrays to avoid that"
    )
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
  problem: problems.QuantizationProblem,
  operands: Sequence[Any] = (),
  least_parts: int = 2,
) -> notation.Notation:
  """Returns names for the dimensions of the operands and of the results.

  A pair of halves has two dimensions (`prologues.pair`), and the pair itself is
  not sharded. Shardy may split a mesh axis that does not divide the number of
  blocks. `assign_quantize` gives the rest of that axis to another dimension. A
  dimension has a name if it has at least `least_parts` granules.
  """
  x, sizes = _dimensions(problem.shape, quantize_granules(problem), least_parts)
  results: list[notation.Names] = []
  for b in problem.blockings:
    names = x
    if len(b.dims) != 1:
      blocked = [x[b.dims[0]] if b.dims else notation.WHOLE]
      names = [x[d] for d in (b.lead if b.dims else range(len(x)))] + blocked
    results += [names, names, ()][: problem.results_each]
  named: list[notation.Names] = [x]
  if (prologue := problem.prologue) is not None:
    if problem.returns_amax:
      results.append(())
    if problem.column_sums is not None:
      results.append([*x[: problem.column_sums], x[-1]])
    if problem.returns_sum:
      results.append(x)
    paired = prologues.paired(x, prologue.halves, notation.WHOLE)
    if prologue.merged_halves:
      named = [paired]
    for name in prologue.operands:
      named.append(x if name in prologues.OF_X else x[-1:])
      if name == "bias" and prologue.is_gated:
        named[-1] = paired[-2:]
  others = operands[len(named) :]
  named += [[notation.WHOLE] * len(a.shape) for a in others]
  return notation.Notation(operands=named, results=results, sizes=sizes)


def dequantize_notation(
  problem: problems.DequantizationProblem,
  operands: Sequence[Any],
  least_parts: int = 2,
) -> notation.Notation:
  """Returns names for the dimensions of values, scale and result."""
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
  """Returns names of dimensions, and {name: (size, granule)}."""
  sizes = {
    f"d{dim}": (size, granule)
    for dim, (size, granule) in enumerate(zip(shape, granules, strict=True))
    if isinstance(size, int)
    and granule is not None
    and size >= least_parts * granule
  }
  names = [f"d{dim}" for dim in range(len(shape))]
  return [n if n in sizes else notation.WHOLE for n in names], sizes


# Explicit axes.


def quantize_specs(
  problem: problems.QuantizationProblem, x: Any, mesh: Any
) -> list[mesh_axes.Spec]:
  """Returns the mesh axes of each dimension of `quantize_p`'s results.

  They are those of x, except for axes that would cut a block. A swizzled scale
  is replicated, because its tiles mix the rows of a matrix.
  """
  dims = quantize_notation(problem, [x], least_parts=1)
  spec = mesh_axes.spec_of(x)
  if problem.prologue is not None and problem.prologue.merged_halves:
    # Shards of interleaved halves hold pairs. The others are gathered.
    halves = problem.prologue.halves
    last = spec[-1] if halves == "interleaved" else ()
    spec = tuple(prologues.paired((*spec[:-1], last), halves, ()))
  axes = axes_of_whole_blocks(
    dims, dims.operands[0], spec, mesh_axes.Taker(mesh.shape)
  )
  specs = list(notation.specs(dims.results, axes))
  if problem.scale_layout != layouts.LINEAR:
    for i in range(1, len(specs), problem.results_each):
      specs[i] = ((),) * len(specs[i])
  return specs


def moved(
  who: str,
  values: jax.Array,
  scale: jax.Array,
  format: formats.BlockFormat,
  axis: int,
  out_sharding: Any,
) -> tuple[jax.Array, jax.Array]:
  """Reshards values and a linear scale over explicit axes, as bytes.

  Raises:
    ValueError: If the sharding would cut a block, or if JAX rejects it.
  """
  mesh: Any = jax.sharding.get_abstract_mesh()
  spec = out_sharding
  if isinstance(out_sharding, NamedSharding):
    mesh, spec = out_sharding.mesh, out_sharding.spec
  if isinstance(spec, jax.sharding.PartitionSpec) and not mesh.empty:
    axes = mesh_axes.normalize_spec(spec, values.ndim)[axis]
    if set(axes) <= set(mesh.axis_names):
      parts = mesh_axes.Taker(mesh.shape).count(axes)
      if scale.shape[axis] % parts:
        raise ValueError(
          f"{who}: out_sharding must not cut a block, got {out_sharding},"
          f" which splits {scale.shape[axis]} blocks of axis {axis} into"
          f" {parts} parts; shard another axis"
        )
  mesh_axes.validate_out_sharding(who, out_sharding)
  dtype = values.dtype
  is_unpacked = dtype in formats.FOUR_BITS and format.block_size % 2 == 0
  if is_unpacked:  # Collectives do not support 4-bit values.
    values = layouts.pack_fp4(values, axis=axis)
  dtypes = values.dtype, scale.dtype
  values, scale = (
    layouts.from_bytes(
      jax.sharding.reshard(layouts.to_bytes(x), out_sharding), d
    )
    for x, d in zip((values, scale), dtypes, strict=True)
  )
  if is_unpacked:
    values = layouts.unpack_fp4(values, axis=axis, dtype=dtype)
  return values, scale

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block-scaled dots on several devices.

`assign` decides which mesh axes shard which dimension, and `compute` is the
part of each device. `operation/split.py` splits a call by them: over auto axes
by a partitioning rule, over explicit axes by a `shard_map`, because the types
of the arrays contain their shardings. Sides are converted to bytes, so that
collectives move quantized data.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jaxplugin.dot import calls, epilogue, sides
from jaxplugin.jaxext import jax_private, mesh_axes
from jaxplugin.operation import assignment as assignment_lib
from jaxplugin.operation import notation as notation_lib
from jaxplugin.operation import split

Spec = mesh_axes.Spec
AxesByName = dict[str, mesh_axes.Axes]
Dot = Callable[[calls.DotCall], jax.Array]

# Assignment of mesh axes.


def notation(call: calls.DotCall) -> notation_lib.Notation:
  """Returns the names of the dimensions: b0, m0, n0, k0 and so on."""
  lhs, rhs = [""] * call.lhs.ndim, [""] * call.rhs.ndim
  lhs_shape, rhs_shape = call.lhs.shape, call.rhs.shape
  sizes: dict[str, tuple[Any, int]] = {}
  contracting, batch = call.dimension_numbers
  for letter, dims in (("b", batch), ("k", contracting)):
    for i, (l, r) in enumerate(zip(*dims, strict=True)):
      name = lhs[l] = rhs[r] = f"{letter}{i}"
      blocks = block_of(call.lhs, l), block_of(call.rhs, r)
      granule = notation_lib.granule_of(lhs_shape[l], *blocks)
      sizes[name] = lhs_shape[l], granule
  for letter, names, shape, side in (
    ("m", lhs, lhs_shape, call.lhs),
    ("n", rhs, rhs_shape, call.rhs),
  ):
    for i, d in enumerate(side.free):
      names[d] = f"{letter}{i}"
      granule = notation_lib.granule_of(shape[d], block_of(side, d))
      sizes[names[d]] = shape[d], granule
  out = [lhs[d] for d in (*call.lhs.batch, *call.lhs.free)]
  out += [rhs[d] for d in call.rhs.free]
  of_sides = {"lhs": lhs, "rhs": rhs, "lhs_scale": lhs, "rhs_scale": rhs}

  def of_result(shape: Sequence[Any]) -> list[str]:
    dims = zip(shape, out if shape else (), strict=True)
    return [name if size != 1 else notation_lib.OWN for size, name in dims]

  return notation_lib.Notation(
    operands=[
      of_sides[name] if name in of_sides else of_result(x.shape)
      for name, x in call.arrays().items()
    ],
    results=[out],
    sizes=sizes,
    reductions=[lhs[d] for d in call.lhs.contracting],
  )


def assign(call: calls.DotCall, shardings: split.Shardings) -> split.Assignment:
  """Decides which mesh axes shard which dimension.

  In this order, an axis goes to the first dimension that has it:

  1. Batch dimensions keep the sharding of either operand.
  2. k keeps a sharding that both operands have.
  3. m and n keep the sharding of their operand. If both have an axis, the
     wanted result decides. If it does not use the axis, the smaller operand is
     gathered over it.
  4. k takes the sharding of one operand. The other operand is sliced, which
     costs nothing.
  5. Dimensions without sharding take that of the wanted result.

  An axis that does not divide its dimension into whole blocks is dropped.
  """
  dims = notation(call)
  lhs_names, rhs_names = dims.operands[:2]
  (out,) = dims.results
  wanted = shardings.wanted(((),) * len(out))
  want = dict(zip(out, wanted, strict=True))
  lhs = dict(zip(lhs_names, shardings.operands["lhs"], strict=True))
  rhs = dict(zip(rhs_names, shardings.operands["rhs"], strict=True))
  m_first, n_first = _preferences(call, lhs, rhs, want)
  k = dims.reductions
  preferences = [
    *((b, lhs[b] or rhs[b]) for b in out[: len(call.lhs.batch)]),
    *((d, lhs[d]) for d in k if lhs[d] == rhs[d]),
    *m_first,
    *n_first,
    *((d, lhs[d] or rhs[d]) for d in k if not (lhs[d] and rhs[d])),
    *want.items(),
  ]
  found = assignment_lib.assign(
    dims, preferences, wanted, call.shape, shardings.axis_sizes
  )
  # The epilogue follows the sum over devices, except for a global scale that
  # multiplies each partial sum.
  in_parts = steps(call)[0].arrays()
  return found.with_axes_of(
    dims,
    [i for i, name in enumerate(call.arrays()) if name not in in_parts],
    dict(zip(out, found.results[0], strict=True)),
  )


def _preferences(
  call: calls.DotCall, lhs: AxesByName, rhs: AxesByName, want: AxesByName
) -> list[list[tuple[str, mesh_axes.Axes]]]:
  """Returns the axes of m and n, in order of priority.

  If both sides are sharded over an axis and only one side's dimensions have it
  in the wanted result, the other side is gathered over it. That side is also
  gathered over its minor axes, because its data would otherwise move between
  devices.
  """
  m = {name: axes for name, axes in lhs.items() if name[0] == "m"}
  n = {name: axes for name, axes in rhs.items() if name[0] == "n"}
  want_m = _flat(want[name] for name in m)
  want_n = _flat(want[name] for name in n)
  both = _flat(m.values()) & _flat(n.values())

  def without(dims: AxesByName, gathered: set[str]) -> AxesByName:
    return {
      name: tuple(itertools.takewhile(lambda a: a not in gathered, axes))
      for name, axes in dims.items()
    }

  m, n = (
    without(m, both & (want_n - want_m)),
    without(n, both & (want_m - want_n)),
  )
  is_n_first = not _flat(m.values()) & want_m and (
    bool(_flat(n.values()) & want_n)
    or _count(call.rhs.shape) > _count(call.lhs.shape)
  )
  order = (n, m) if is_n_first else (m, n)
  return [list(dims.items()) for dims in order]


def _flat(specs: Iterable[mesh_axes.Axes]) -> set[str]:
  return {axis for axes in specs for axis in axes}


def _count(shape: Sequence[Any]) -> int:
  return math.prod(size for size in shape if isinstance(size, int))


def block_of(side: sides.Side, dim: int) -> int:
  """Returns the number of values along a dimension that share a scale.

  In a gradient's matmul the blocked dimension is not contracted.
  """
  if side.format is None or side.axis != dim:
    return 1
  return side.format.block_size


def steps(call: calls.DotCall) -> tuple[calls.DotCall, calls.DotCall]:
  """Returns a call for partial sums and a call for the epilogue.

  Each device computes the first call. The epilogue of the second call is
  applied to the sum over devices.
  """
  if call.reduce_dtype is None:
    return call.bare(), call
  part = call.replace(
    preferred_element_type=call.reduce_dtype,
    bias=None,
    activation=None,
    residual=None,
  )
  return part, call.replace(global_scale=None, global_power=None)


# The part of each device.


def can_partition(call: calls.DotCall) -> bool:
  """Returns whether a call can be split: no byte of two blocks, no size 0."""
  call = call.without_origins_of_sides()
  if any(0 in x.shape for x in call.flatten()):
    return False
  if not (call.lhs.has_whole_pairs and call.rhs.has_whole_pairs):
    return False
  dims = notation(call)
  sizes = (dims.sizes[name] for name in dims.reductions)
  return all(size % granule == 0 for size, granule in sizes)


def prepared(call: calls.DotCall) -> calls.DotCall:
  """Converts a call's sides to bytes, with linear scales without padding.

  Two global scales stay separate, so that a backend may read both. A side loses
  its origin: a shard of a layer is not a slice of the device's shard of the
  stack, and quantizing a shard to NVFP4 would compute another global scale.
  """
  call = call.without_origins_of_sides().with_scales_alone()
  return call.with_sides(sides.Side.as_bytes, padded_scales=False)


def restored(call: calls.DotCall) -> calls.DotCall:
  """Undoes `prepared`: views bytes as values and scales of their dtypes."""
  return call.with_sides(sides.Side.as_elements)


def compute(
  local: Dot, call: calls.DotCall, assignment: split.Assignment
) -> jax.Array:
  """Computes a device's dot, the sum over devices, and the epilogue.

  Args:
    call: `prepared` call of the device's shards.
  """
  call = restored(call)
  if not assignment.reduce:
    return local(call)
  part, after = steps(call)
  total = assignment_lib.reduced(local(part), assignment)
  if not after.has_epilogue:
    # The result is the bare sum, so that XLA can merge nested all-reduces.
    return total.astype(call.preferred_element_type)
  return epilogue.apply(total.astype(np.float32), epilogue.with_product(after))


# Meshes with explicit axes.


def result_sharding(call: calls.DotCall) -> NamedSharding | None:
  """Returns the sharding of the result's type; None without explicit axes.

  It is `call.out_sharding`, or the one that `lax.dot_general` would return.

  Raises:
    ShardingTypeError: If both sides shard a contracting dimension and
      `out_sharding` is None, or if the shardings of the sides do not fit.
  """
  has_mesh = mesh_axes.mesh_of(call.flatten()) is not None
  if call.out_sharding is not None or not has_mesh:
    return call.out_sharding
  return asked_sharding(call, None)


def asked_sharding(call: calls.DotCall, out_sharding: Any) -> NamedSharding:
  """Returns the sharding that the result of `lax.dot_general` would have.

  Args:
    call: call of arrays on a mesh with explicit axes.
    out_sharding: as for `lax.dot_general`.

  Raises:
    NotImplementedError: If the result would be unreduced.
  """
  return dot_general_sharding(
    sides.who(),
    [(side.shape, side.values) for side in (call.lhs, call.rhs)],
    call.dimension_numbers,
    out_sharding,
    mesh_axes.mesh_of(call.flatten()),
  )


def dot_general_sharding(
  who: str,
  given: Sequence[tuple[Sequence[int], Any]],
  numbers: sides.DimensionNumbers,
  out_sharding: Any,
  mesh: Any,
) -> NamedSharding:
  """Returns `asked_sharding` of operands of these shapes, sharded like arrays.

  `mesh` is the explicit mesh of the arrays, or None.
  """
  mesh_axes.validate_out_sharding(who, out_sharding)
  if mesh is None:  # jit refuses the mesh of out_sharding, with a remedy
    mesh = getattr(out_sharding, "mesh", None)
    mesh = getattr(mesh, "abstract_mesh", mesh)
  types = [mesh_axes.type_of(shape, x, mesh) for shape, x in given]
  return _dot_general_sharding(*types, numbers, out_sharding, mesh)


@functools.lru_cache(maxsize=1024)
def _dot_general_sharding(
  lhs: jax.ShapeDtypeStruct,
  rhs: jax.ShapeDtypeStruct,
  numbers: sides.DimensionNumbers,
  out_sharding: Any,
  mesh: Any,
) -> NamedSharding:
  dot_general = functools.partial(
    lax.dot_general, dimension_numbers=numbers, out_sharding=out_sharding
  )
  return mesh_axes.result_sharding(dot_general, lhs, rhs, mesh=mesh)


def split_dot(
  local: Dot, call: calls.DotCall, sharding: NamedSharding
) -> jax.Array:
  """Computes a call split over the devices of a mesh with explicit axes."""
  mesh: Any = sharding.mesh
  with jax.sharding.use_abstract_mesh(mesh):
    call = prepared(call.form().filled(map(mesh_axes.on_mesh, call.flatten())))
    call = call.replace(out_sharding=None)
  spec = mesh_axes.normalize_spec(sharding.spec, len(call.shape))
  operation = split.of_call(
    call.form(),
    assign=assign,
    notation=notation,
    per_device=functools.partial(compute, local),
  )
  function = split.on_explicit_axes(operation, mesh, [spec])
  return function(*call.flatten())[0]


def product_across_blocks(
  local: Callable[[jax.Array, sides.Side, sides.DimensionNumbers], jax.Array],
  g: jax.Array,
  side: sides.Side,
  numbers: sides.DimensionNumbers,
  out: mesh_axes.Spec,
) -> jax.Array:
  """Computes a gradient's matmul in f32, split over devices.

  The quantized side is gathered as bytes.

  Args:
    local: (g, side, numbers) -> f32 result on one device.
    g: unquantized cotangent, on a mesh with explicit axes.
    side: quantized operand, not blocked along the contracting dimensions.
    out: mesh axes of each dimension of the result.
  """
  (g_dims, side_dims), (g_batch, side_batch) = numbers
  call = calls.DotCall(
    lhs=sides.Side(name="lhs", values=g, contracting=g_dims, batch=g_batch),
    rhs=side.replace(
      name="rhs", contracting=side_dims, batch=side_batch, global_scale=None
    ),
    preferred_element_type=np.dtype(np.float32),
    padded_scales=side.format is not None and side.scale_is_padded,
  ).without_origins()
  mesh = mesh_axes.sharding_of(g).mesh
  result = split_dot(
    lambda call: local(call.lhs.values, call.rhs, call.dimension_numbers),
    call,
    NamedSharding(mesh, mesh_axes.partition_spec(out)),
  )
  return jax_private.varying_as(result, *call.flatten())

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The primitives of the ragged dot and the contraction, and their JAX rules.

`operation/primitive.py` describes their operands and parameters.

Without an activation, a ragged dot is jointly linear in an unquantized lhs and
the bias. It is also linear in unquantized weights and in the global scale. A
contraction is linear in each of lhs, rhs and the global scale. Their tangents
are therefore calls with a tangent as operand.

The cotangent of lhs of a ragged dot is a ragged dot that contracts the weights
across their blocks. The cotangent of unquantized weights is a contraction. The
cotangent of an operand of a contraction is a ragged dot.

`vmap` of a ragged dot is one ragged dot of the rows of all entries. If the
weights are not mapped, all entries share the groups. Rows are sorted by group,
so that each weight is read once for all entries. Otherwise each entry has
separate groups. A contraction with one mapped operand becomes one with more
columns.

`dot/straight_through.py` computes straight-through gradients from `RaggedDot`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import batching

from jaxplugin import quantization
from jaxplugin.core import decisions, targets
from jaxplugin.dot import epilogue as dot_epilogue
from jaxplugin.dot import sides, straight_through
from jaxplugin.operation import choice, primitive
from jaxplugin.ragged import backends, calls, epilogue, groups, sharding
from jaxplugin.runtime import lowering
from jaxplugin.tables import resolution

ragged_dot_p = calls.ragged_dot_p
ragged_contraction_p = calls.ragged_contraction_p
PRIMITIVES: Final = (ragged_dot_p, ragged_contraction_p)
bind = primitive.bind
Bind = primitive.Bind

_ROWS: Final = frozenset({"lhs", "lhs_scale"})
_WEIGHTS: Final = frozenset({"rhs", "rhs_scale", "rhs_square_scale"})
_SCALES: Final = frozenset({"global_scale", "global_power"})
_EPILOGUE: Final = _SCALES | {"bias"}
_F32: Final = np.dtype(np.float32)
_REMEDY: Final = (
  "Differentiate with respect to an unquantized lhs, bias and global scales,"
  " with jax.lax.stop_gradient around the quantized operands"
)


# Tangents.


def _jvp(
  bind: Bind,
  call: calls.Call,
  tangents: Mapping[str, Any],
) -> tuple[jax.Array, jax.Array]:
  """Returns the result of a call and its tangent.

  Args:
    tangents: tangent of each array by name, without symbolic zeros.
  """
  # `global_power` is computed from the bits of the scales, and group sizes are
  # integers, so both have zero tangents.
  constants = ("global_power", "group_sizes")
  active = {k: x for k, x in tangents.items() if k not in constants}
  if isinstance(call, calls.RaggedContraction) or call.activation is None:
    return bind(call), _linear_tangent(bind, call, active)
  before = call.before_activation()
  tangent = _linear_tangent(bind, before, active)
  # Kernels that fuse an activation do not return its argument. A dot without
  # one gives both results.
  activate = functools.partial(epilogue.activate, activation=call.activation)
  result, tangent = jax.jvp(activate, (bind(before),), (tangent,))
  # Rows without a group are 0, but the activation's tangent there may not be.
  tangent = jnp.where(epilogue.is_in_group(call), tangent, np.float32(0))
  dtype = call.preferred_element_type
  return result.astype(dtype), tangent.astype(dtype)


def _linear_tangent(
  bind: Bind,
  call: calls.Call,
  active: Mapping[str, Any],
) -> jax.Array:
  """Returns the tangent of a call without activation."""
  in_f32 = call.replace(preferred_element_type=_F32)
  if isinstance(in_f32, calls.RaggedDotCall):
    in_f32 = in_f32.replace(bias=None)
  terms = [
    bind(in_f32.with_arrays(**{name: active[name]}))
    for name in ("lhs", "rhs", "global_scale")
    if name in active
  ]
  if "bias" in active:
    assert isinstance(call, calls.RaggedDotCall)
    bias = active["bias"].astype(_F32)
    terms.append(groups.per_row(bias, epilogue.rows_of(call)))
  if not terms:
    return jnp.zeros(call.shape, call.preferred_element_type)
  total = sum(terms[1:], start=terms[0])
  return total.astype(call.preferred_element_type)


# Cotangents.


def _cotangent(
  bind: Bind, name: str, g: jax.Array, call: calls.RaggedDotCall
) -> jax.Array:
  """Returns the cotangent of one array of a ragged dot that is linear in it.

  Args:
    name: the array's name in `RaggedDotCall.ARRAYS`.
    call: call whose arrays are abstract where a cotangent is wanted.
  """
  g = g.astype(_F32)
  if name == "lhs":
    return bind(_gradient_of_lhs(epilogue.scaled(g, call), call))
  if name == "rhs":
    return bind(_gradient_of_rhs(epilogue.scaled(g, call), call))
  if name == "bias":
    return groups.sums(g, epilogue.rows_of(call), call.num_groups)
  assert name == "global_scale"
  by_rows = jnp.sum(bind(call.bare()) * g, axis=1, keepdims=True)
  # In rows without a group g is not read, and may be NaN.
  by_rows = jnp.where(epilogue.is_in_group(call), by_rows, np.float32(0))
  scale, power = call.global_scale, call.global_power
  if scale.ndim == 1:
    of_row = epilogue.rows_of(call)
    total = groups.sums(by_rows[:, 0], of_row, call.num_groups)
  else:
    total = by_rows if scale.ndim else jnp.sum(by_rows)
  return total if power is None else total * power


def _gradient_of_lhs(
  g: jax.Array, call: calls.RaggedDotCall
) -> calls.RaggedDotCall:
  """Returns the ragged dot of g and the weights, which contracts columns."""
  (contracting,) = call.rhs.contracting
  lhs = sides.Side(name="lhs", values=g, contracting=(1,))
  rhs = call.rhs.without_origin().replace(contracting=(3 - contracting,))
  # The requested backend may not support a contraction across blocks.
  return call.bare().replace(lhs=lhs, rhs=rhs, implementation=None)


def _gradient_of_rhs(
  g: jax.Array, call: calls.RaggedDotCall
) -> calls.RaggedContraction:
  """Returns the contraction of g and the dequantized lhs, shaped like rhs."""
  lhs = call.lhs.in_usual_order().dequantized()
  arrays = (g, lhs) if call.rhs.contracting == (2,) else (lhs, g)
  return calls.plain_contraction(
    *arrays, call.group_sizes, overlay=call.overlay
  )


def _contraction_cotangent(
  bind: Bind, name: str, g: jax.Array, call: calls.RaggedContraction
) -> jax.Array:
  """Returns the cotangent of one array of a contraction (see `cotangent`)."""
  g = g.astype(_F32)
  scale, power = call.global_scale, call.global_power
  if name == "global_scale":
    product = bind(call.bare()) * g
    axes = [d for d in range(3) if not scale.ndim or scale.shape[d] == 1]
    total = jnp.sum(product, tuple(axes), keepdims=bool(scale.ndim))
    return total if power is None else total * power
  if scale is not None:
    g = dot_epilogue.multiply(g, scale, power)
  other = call.rhs if name == "lhs" else call.lhs
  return bind(
    calls.plain(
      other.in_usual_order().dequantized(),
      g,
      call.group_sizes,
      contracting=2 if name == "lhs" else 1,
      overlay=call.overlay,
    )
  )


def _require_linear(call: calls.Call, names: Sequence[str]) -> None:
  """Raises NotImplementedError unless a call is jointly linear in arrays.

  Only a user's `jax.linear_transpose` can violate it: `jvp` binds linear calls.
  """
  what = ""
  if isinstance(call, calls.RaggedContraction):
    what = " at once" if len(names) > 1 else ""
  elif call.activation is not None:
    what = f" through {call.activation}"
  elif len({"lhs", "rhs", "global_scale"} & {*names}) > 1 or (
    "global_scale" in names and "bias" in names
  ):
    what = " at once"
  if what:
    raise primitive.not_linear(calls.WHO, names, what)


# Batching.


def _batch(
  bind: Bind, call: calls.RaggedDotCall, mapped: Mapping[str, int], size: int
) -> tuple[jax.Array, int]:
  """Returns the batched result and its mapped dimension.

  Args:
    mapped: mapped dimension of each array that has one.
    size: number of entries.
  """
  names = set(mapped)
  if names <= _ROWS:
    return _batch_rows(bind, call, mapped, size)
  if not names & _WEIGHTS and names & _EPILOGUE:
    return _batch_epilogues(bind, call, mapped, size)
  return _batch_groups(bind, call, mapped, size)


def _batch_contraction(
  bind: Bind,
  call: calls.RaggedContraction,
  mapped: Mapping[str, int],
  size: int,
) -> tuple[jax.Array, int]:
  """Batches a contraction, with arguments and results as for `batch`."""
  names = {name.removesuffix("_scale") for name in mapped}
  # A scalar global scale applies to all columns.
  is_number = call.global_scale is None or not call.global_scale.ndim
  if not is_number or names not in ({"lhs"}, {"rhs"}):
    return _one_by_one(bind, call, mapped)
  (name,) = names
  side = getattr(call, name)
  changed = side.replace(
    values=_merged_columns(side.values, mapped.get(name), size),
    scale=_merged_columns(side.scale, mapped.get(f"{name}_scale"), size),
  )
  result = bind(call.replace(**{name: changed}))
  # `shape` is that of an entry. The result does not show its columns if `size`
  # is 0.
  shape = list(side.values.shape)
  if name in mapped:
    del shape[mapped[name]]
  dim = 1 if name == "lhs" else 2
  split = (*result.shape[:dim], size, shape[1], *result.shape[dim + 1 :])
  return result.reshape(split), dim


def _merged_columns(x: Any, dim: int | None, size: int) -> Any:
  """Merges batched [rows, columns] to [rows, entries * columns]."""
  if x is None:
    return None
  x = jnp.moveaxis(batching.bdim_at_front(x, dim, size), 0, 1)
  return x.reshape(x.shape[0], size * x.shape[2])


def _one_by_one(
  bind: Bind, call: calls.RaggedContraction, mapped: Mapping[str, int]
) -> tuple[jax.Array, int]:
  arrays = call.arrays()
  moved = {name: jnp.moveaxis(arrays[name], d, 0) for name, d in mapped.items()}
  return lax.map(lambda entry: bind(call.with_arrays(**entry)), moved), 0


def _batch_rows(
  bind: Bind, call: calls.RaggedDotCall, mapped: Mapping[str, int], size: int
) -> tuple[jax.Array, int]:
  """Batches a call with only lhs mapped: a row's entries are in its group."""

  def merged(name: str, x: jax.Array) -> jax.Array:
    x = batching.bdim_at_front(x, mapped.get(name), size)
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0] * size, *x.shape[2:])

  arrays = call.arrays()
  # The number of rows is read from the shape, because `size` may be 0.
  num_rows = arrays["lhs"].shape[1 if mapped.get("lhs") == 0 else 0]
  changes = {name: merged(name, arrays[name]) for name in _ROWS & {*arrays}}
  for name in _SCALES & {*arrays}:
    if arrays[name].ndim == 2:
      changes[name] = jnp.repeat(arrays[name], size, axis=0)
  # Sizes are clipped first, so that the product does not wrap around in i32.
  sizes = jnp.clip(call.group_sizes, 0, num_rows) * size
  result = bind(call.with_arrays(group_sizes=sizes, **changes))
  return result.reshape(num_rows, size, result.shape[1]), 1


def _batch_epilogues(
  bind: Bind, call: calls.RaggedDotCall, mapped: Mapping[str, int], size: int
) -> tuple[jax.Array, int]:
  """Batches a call with a mapped bias or global scale and unmapped weights."""
  rest = {name: d for name, d in mapped.items() if name not in _EPILOGUE}
  dim: int | None = None
  if rest:
    sums, dim = _batch(bind, call.bare(), rest, size)
  else:
    sums = bind(call.bare())
  arrays = call.arrays()
  names = [name for name in arrays if name not in _WEIGHTS]

  def apply(sums: jax.Array, *own: jax.Array) -> jax.Array:
    entry = call.with_arrays(**dict(zip(names, own, strict=True)))
    return epilogue.apply(sums, entry)

  follow = jax.vmap(apply, in_axes=(dim, *map(mapped.get, names)))
  return follow(sums, *(arrays[name] for name in names)), 0


def _batch_groups(
  bind: Bind, call: calls.RaggedDotCall, mapped: Mapping[str, int], size: int
) -> tuple[jax.Array, int]:
  """Batches a call with mapped group sizes or weights.

  Rows are sorted by group, and the result's rows are put back in order.
  """
  has_weights = bool(_WEIGHTS & {*mapped})
  arrays = call.arrays()

  def entries(name: str) -> jax.Array:
    return batching.bdim_at_front(arrays[name], mapped.get(name), size)

  sizes = entries("group_sizes")
  num_groups = sizes.shape[1]
  num_rows = entries("lhs").shape[1]
  ends = jax.vmap(groups.ends, (0, None))(sizes, num_rows)
  starts = jax.vmap(groups.starts)(ends)
  of_row = jax.vmap(groups.of_rows, (0, None))(ends, num_rows)
  new_sizes = ends - starts
  if has_weights:
    first = num_groups * jnp.arange(size, dtype=jnp.int32)[:, None]
    of_row = jnp.where(of_row < num_groups, of_row + first, size * num_groups)
    new_sizes = new_sizes.reshape(-1)
  else:
    new_sizes = jnp.sum(new_sizes, axis=0, dtype=jnp.int32)
  order = jnp.argsort(of_row.reshape(-1), stable=True)

  changes = {"group_sizes": new_sizes}
  # `global_scale` and `global_power` must have the same shape.
  scales_are_mapped = bool(_SCALES & {*mapped})
  for name, x in arrays.items():
    is_scale = name in _SCALES
    ndim = x.ndim - (name in mapped)
    if name in _ROWS or (is_scale and ndim == 2):
      changes[name] = _merged(entries(name))[order]
    elif is_scale and ndim == 0 and scales_are_mapped:
      by_groups = (size, num_groups)
      x = jnp.broadcast_to(entries(name)[:, None], by_groups)
      changes[name] = _merged(x)
    elif has_weights and ndim and name != "group_sizes":
      changes[name] = _merged(entries(name))
  result = bind(call.with_arrays(**changes))
  result = jnp.zeros_like(result).at[order].set(result, unique_indices=True)
  return result.reshape(size, num_rows, result.shape[1]), 0


def _merged(x: jax.Array) -> jax.Array:
  """Merges the first two dimensions."""
  return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


# Straight-through gradients.


class RaggedArrays(NamedTuple):
  """The array arguments of `ragged_dot`, or their tangents."""

  lhs: Any
  rhs: Any
  group_sizes: Any
  bias: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedDot(straight_through.Matmul):
  """A call of `ragged_dot`, with the tuning tables of its forward pass."""

  overlay: resolution.Overlay | None

  def of_tangent(self, side: str) -> Self:
    if side == "lhs":
      return self
    # The requested backend may not support unquantized weights.
    function = functools.partial(self.function, implementation=None)
    return self.replace(function=function)

  def activated(self, arrays: RaggedArrays) -> jax.Array:
    before = self.replace(dtype=_F32, activation=None)
    result = straight_through.dot(before, arrays)
    result = epilogue.activate(result, self.activation)
    rows = result.shape[0]
    ends = groups.ends(arrays.group_sizes, rows)
    is_own = groups.of_rows(ends, rows)[:, None] < len(arrays.group_sizes)
    result = jnp.where(is_own, result, np.float32(0))
    return result.astype(self.dtype)

  def plain(self, arrays: RaggedArrays) -> jax.Array:
    lhs, rhs, sizes, _ = arrays
    call = calls.plain(lhs, rhs, sizes, 2, overlay=self.overlay)
    return bind(call).astype(self.dtype)

  def transpose(
    self, side: str, g: jax.Array, arrays: RaggedArrays
  ) -> jax.Array:
    sizes, overlay = arrays.group_sizes, self.overlay
    if side == "lhs":
      rhs = quantization.dequantize(arrays.rhs)
      return bind(calls.plain(g, rhs, sizes, 1, overlay=overlay))
    lhs = quantization.dequantize(arrays.lhs)
    return bind(calls.plain_contraction(g, lhs, sizes, overlay=overlay))


# Lowering.


def decide(
  eqn: Any,
  target: targets.Target | None,
  num_devices: int = 1,
  *,
  for_export: bool = False,
) -> choice.DecidedCall:
  """Returns `choice.decide` of an equation of one of `PRIMITIVES`.

  XLA partitions the equation over `num_devices`.
  """

  def choose(call: calls.Call, target: targets.Target) -> decisions.Decision:
    # If the call is split, each device chooses a backend for its shard.
    is_partitioned = num_devices > 1 and not sharding.can_partition(call)
    module = lowering.Module(
      platforms=(target.platform,), is_partitioned=is_partitioned
    )
    return backends.choose_in(module, call, target)

  return choice.decide(eqn, target, choose, for_export=for_export)


_rules = functools.partial(
  primitive.Rules,
  remedy=_REMEDY,
  local=backends.lower,
  jvp=_jvp,
  require_linear=_require_linear,
  can_partition=sharding.can_partition,
  prepared=sharding.prepared,
)
primitive.register_call(
  ragged_dot_p,
  _rules(
    who=calls.WHO,
    cotangent=_cotangent,
    batch=_batch,
    assign=sharding.assign,
    notation=sharding.notation,
    per_device=sharding.compute,
  ),
)
primitive.register_call(
  ragged_contraction_p,
  _rules(
    who=calls.CONTRACTION_WHO,
    cotangent=_contraction_cotangent,
    batch=_batch_contraction,
    assign=sharding.assign_contraction,
    notation=sharding.contraction_notation,
    per_device=sharding.compute_contraction,
  ),
)

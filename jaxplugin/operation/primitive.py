# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""JAX rules that the primitives of all operations share.

`register` registers the rules of any primitive. `register_call` also defines
the rules, for a primitive that takes an `OperationCall`: the arrays and options
that an operation is called with. The operands of a primitive are arrays, and
its parameters are hashable. The form of a call, which is the call without its
arrays, is such a parameter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Self

import jax
from jax.extend import core as extend_core
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from jaxplugin.core import error_context, targets
from jaxplugin.jaxext import jax_private, mesh_axes, partitioner_private
from jaxplugin.operation import failures, logs, split
from jaxplugin.operation import notation as notation_lib
from jaxplugin.plugins import registry
from jaxplugin.runtime import fingerprints, lowering
from jaxplugin.tables import resolution

Call = Any  # the operation's subclass of `OperationCall`
Bind = Callable[[Call], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoweringContext:
  """An equation that is being lowered.

  Attributes:
    module: module that the equation is lowered into.
    target: target to choose a backend for.
    avals_in, avals_out: types of the operands and results.
    mesh: mesh with explicit axes of the operands, or None.
  """

  module: lowering.Module
  target: targets.Target
  avals_in: Sequence[Any]
  avals_out: Sequence[Any]
  mesh: Any


def register(
  primitive: extend_core.Primitive,
  *,
  who: str,
  abstract_eval: Callable[..., Any],
  batch: Callable[..., Any],
  jvp: Callable[..., Any] | None = None,
  lower: Callable[..., Callable[..., Any]],
) -> None:
  """Registers the rules of a primitive.

  `checkify.nan_checks` finds NaNs in its results.

  Args:
    primitive: primitive with a parameter `target`, the `targets.Request` of the
      enclosing contexts, or None.
    who: name of the function in errors.
    abstract_eval, batch, jvp: JAX rules. A primitive without `jvp` has no
      derivative.
    lower: (context, **params) -> function of the operands, which is lowered.
  """
  rule = functools.partial(_lower, primitive, who, lower)
  primitive.def_impl(functools.partial(_impl, primitive))
  primitive.def_abstract_eval(abstract_eval)
  if jvp is not None:
    ad.primitive_jvps[primitive] = jvp
  batching.primitive_batchers[primitive] = batch
  lowering.register_kernels(primitive, rule)
  jax_private.check_nans(primitive)


def _impl(primitive, *args, **params):
  with failures.noted():
    results = lowering.impl(primitive, *args, **params)
    return jax.block_until_ready(results) if failures.is_on() else results


def _lower(primitive, who, lower, ctx, *args, target, platform=None, **params):
  module = lowering.module_of(ctx)
  lowering.require_shardy(who, module)
  lowering.require_exportable(error_context.who(who), ctx)
  resolution.require_same_in_processes()
  context = LoweringContext(
    module=module,
    target=targets.requested(
      target,
      lambda asked: lowering.resolve_target(
        asked, platform or module.platforms[0]
      ),
    ),
    avals_in=ctx.avals_in,
    avals_out=ctx.avals_out,
    mesh=mesh_axes.mesh_of(ctx.avals_in),
  )
  failures.remember(primitive.name, params, ctx.avals_in)
  layer = "" if target is None else target.layer
  with (
    logs.lowering(primitive.name, jax_private.module_name(ctx), layer),
    partitioner_private.devices_of(ctx.module_context.axis_context),
  ):
    if target is None or target.target is None:
      logs.disabled(context.target)
    results = mlir.lower_fun(
      lower(context, target=target, **params),
      multiple_results=primitive.multiple_results,
    )(ctx, *args)
  return [
    jax_private.lower_with_sharding_in_types(ctx, x, aval)
    for x, aval in zip(results, ctx.avals_out, strict=True)
  ]


def result_type(
  like: Any,
  shape: Sequence[Any],
  dtype: Any,
  sharding: NamedSharding | None = None,
) -> Any:
  """Returns the type of a result on the mesh of an operand's type.

  Args:
    like: type of the operand.
    sharding: sharding of the result; None if no mesh has explicit axes.
  """
  if sharding is None:
    spec = PartitionSpec(*(None,) * len(shape))
    sharding = like.sharding.update(spec=spec)
  return like.update(
    shape=tuple(shape), dtype=dtype, weak_type=False, sharding=sharding
  )


def bind_problem(
  primitive: extend_core.Primitive,
  operands: Sequence[jax.Array],
  problem: Any,
  **params: Any,
) -> Any:
  """Binds a primitive whose results vary over the mesh axes of all operands."""
  first, *rest = operands
  first = jax_private.varying_as(first, *rest)
  return primitive.bind(first, *rest, problem=problem, **params)


def partition_key(
  context: LoweringContext,
  name: str,
  problem: Any,
  overlay: resolution.Overlay | None,
  operation: str | None = None,
) -> str | None:
  """Returns the key of an equation for `split.partitioned`.

  Args:
    problem: problem that determines what the equation computes.
    operation: operation whose backends may compute it; None for all.
  """
  return fingerprints.of(
    name,
    problem,
    context.target,
    registry.usable(operation),  # Plugin backends make the key None.
    resolution.decides(overlay),
  )


# Operations whose primitive takes a call.

_SIDE_ARRAYS: Final = {
  "lhs": ("lhs", "values"),
  "rhs": ("rhs", "values"),
  "lhs_scale": ("lhs", "scale"),
  "rhs_scale": ("rhs", "scale"),
}


class Placeholder(enum.Enum):
  """Placeholder of an array in `OperationCall.form`."""

  ARRAY = "array"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationCall:
  """The arrays and parameters of a call.

  Attributes:
    PRIMITIVE: JAX primitive of the call, set by each subclass.
    ARRAYS: {name: path} of each array, in the order of the primitive's
      operands, set by each subclass. A path is (field,) or (field, field of the
      field), where the outer field is a dataclass with a method `replace`.
  """

  PRIMITIVE: ClassVar[Any]
  ARRAYS: ClassVar[Mapping[str, tuple[str, ...]]]

  def replace(self, **changes: Any) -> Self:
    return dataclasses.replace(self, **changes)

  def with_sides(self, function: Callable[[Any], Any], **changes: Any) -> Self:
    """Replaces lhs and rhs by a function of each, and other fields."""
    call: Any = self
    return self.replace(
      lhs=function(call.lhs), rhs=function(call.rhs), **changes
    )

  def arrays(self) -> dict[str, Any]:
    """Returns the arrays that are not None by name, in order of `ARRAYS`."""
    found = {
      name: functools.reduce(getattr, path, self)
      for name, path in self.ARRAYS.items()
    }
    return {name: x for name, x in found.items() if x is not None}

  def flatten(self) -> list[Any]:
    return list(self.arrays().values())

  def with_arrays(self, **arrays: Any) -> Self:
    """Returns the call with other arrays; None removes an array."""
    changes: dict[str, Any] = {}
    for name, x in arrays.items():
      field, *inner = self.ARRAYS[name]
      if inner:
        side = changes.get(field, getattr(self, field))
        x = side.replace(**{inner[0]: x})
      changes[field] = x
    return self.replace(**changes)

  def form(self) -> Self:
    """Returns the call with placeholders as arrays, which is hashable."""
    return self.with_arrays(**dict.fromkeys(self.arrays(), Placeholder.ARRAY))

  def named(self, flat: Iterable[Any]) -> dict[str, Any]:
    """Returns {name: item} for a list with an item for each array."""
    return dict(zip(self.arrays(), flat, strict=True))

  def filled(self, flat: Iterable[Any]) -> Self:
    """Returns this form with arrays in place of the placeholders."""
    return self.with_arrays(**self.named(flat))

  def vary_alike(self) -> Self:
    """Returns the call with arrays that vary alike inside `shard_map`."""
    return self.filled(jax_private.vary_alike(self.flatten()))


def paths_of_two_sides(*others: str) -> dict[str, tuple[str, ...]]:
  """Returns `OperationCall.ARRAYS` of a call with lhs, rhs and other arrays."""
  return _SIDE_ARRAYS | {name: (name,) for name in others}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """The functions that define the JAX rules of one operation.

  Attributes:
    who: default name of the function in errors. A public function that calls
      the operation replaces it.
    remedy: "Differentiate with respect to ..." for the error about derivatives
      of quantized operands.
    local: (call, target, module) -> result, computed on one device.
    jvp: (bind, call, tangents by name) -> (result, tangent).
    require_linear: (form, names of arrays) -> None; raises unless the call is
      jointly linear in these arrays.
    cotangent: (bind, name, cotangent of the result, call) -> cotangent of one
      array. Arrays whose cotangent is wanted are abstract in the call.
    batch: (bind, call of batched arrays, {name: mapped dimension}, number of
      entries) -> (result, its mapped dimension).
    can_partition: call -> whether the call can be split over devices.
    prepared: call -> call whose quantized arrays are bytes, for collectives.
    restored: undoes the changes of `prepared` to dtypes.
    assign, notation: as for `split.of_call`.
    per_device: (local, *arguments of `split.of_call`'s per_device) -> a
      device's shard of the result. `local` computes a call on one device.
    result_sharding: call -> sharding of the result's type, or None without
      explicit axes. None if calls never have operands on a mesh with such axes.
    on_explicit_axes: (bind, call, sharding of the result) -> result. None under
      the same condition as for `result_sharding`.
  """

  who: str
  remedy: str
  local: Callable[[Call, targets.Target, lowering.Module], jax.Array]
  jvp: Callable[[Bind, Call, Mapping[str, Any]], tuple[jax.Array, jax.Array]]
  require_linear: Callable[[Call, Sequence[str]], None]
  cotangent: Callable[[Bind, str, jax.Array, Call], jax.Array]
  batch: Callable[[Bind, Call, Mapping[str, int], int], tuple[jax.Array, int]]
  can_partition: Callable[[Call], bool]
  prepared: Callable[[Call], Call]
  assign: Callable[..., split.Assignment]
  notation: Callable[[Call], notation_lib.Notation]
  per_device: Callable[..., jax.Array]
  result_sharding: Callable[[Call], Any] | None = None
  on_explicit_axes: Callable[[Bind, Call, Any], jax.Array] | None = None
  restored: Callable[[Call], Call] = lambda call: call


def bind(call: OperationCall) -> jax.Array:
  """Binds the primitive of a validated call with the current contexts."""
  return bind_for(targets.request(), call)


def bind_for(target: targets.Request | None, call: OperationCall) -> jax.Array:
  """Binds the primitive of a validated call with these contexts."""
  return call.PRIMITIVE.bind(*call.flatten(), call=call.form(), target=target)


def register_call(primitive: extend_core.Primitive, rules: Rules) -> None:
  """Registers the rules of a primitive that takes a call.

  Its operands are the arrays of the call. Its parameters are `call`, the form
  of the call, and `target`, the `targets.Request` of its contexts.
  """
  register(
    primitive,
    who=rules.who,
    abstract_eval=functools.partial(_abstract_eval, rules),
    jvp=functools.partial(_jvp, rules),
    batch=functools.partial(_batch, rules),
    lower=functools.partial(_lower_call, rules),
  )
  ad.primitive_transposes[primitive] = functools.partial(_transpose, rules)


def _abstract_eval(rules, *flat, call, target):
  del target
  call, sharding = call.filled(flat), None
  if rules.result_sharding is not None:
    sharding = rules.result_sharding(call)
  return result_type(
    call.lhs.values, call.shape, call.preferred_element_type, sharding
  )


def _jvp(rules, primals, tangents, *, call, target):
  active = {
    name: x
    for name, x in call.named(tangents).items()
    if type(x) is not ad.Zero
  }
  _refuse_quantized(rules, call, active)
  return rules.jvp(
    functools.partial(bind_for, target), call.filled(primals), active
  )


def _transpose(rules, g, *flat, call, target):
  if type(g) is ad.Zero:
    return [None] * len(flat)
  is_wanted = call.named(map(ad.is_undefined_primal, flat))
  names = [name for name, wanted in is_wanted.items() if wanted]
  _refuse_quantized(rules, call, names)
  rules.require_linear(call, names)
  cotangents = dict.fromkeys(is_wanted)
  call = call.filled(x.aval if ad.is_undefined_primal(x) else x for x in flat)
  mesh: Any = contextlib.nullcontext()
  if (mesh_of_g := mesh_axes.mesh_of([g])) is not None:
    mesh = jax.sharding.use_abstract_mesh(mesh_of_g)
  with mesh:
    for name in names:
      cotangents[name] = rules.cotangent(
        functools.partial(bind_for, target), name, g, call
      ).astype(call.arrays()[name].dtype)
  return list(cotangents.values())


def _batch(rules, args, dims, *, call, target):
  mapped = {name: d for name, d in call.named(dims).items() if d is not None}
  call = call.filled(args)
  name, dim = next(iter(mapped.items()))
  size = call.arrays()[name].shape[dim]
  return rules.batch(functools.partial(bind_for, target), call, mapped, size)


def _refuse_quantized(rules: Rules, call: Call, names: Container[str]) -> None:
  """Raises NotImplementedError if a name is that of a quantized array."""
  quantized = [
    f"{name} ({side.format})"
    for side in (call.lhs, call.rhs)
    for name in (side.name, f"{side.name}_scale")
    if side.format is not None and name in names
  ]
  if quantized:
    raise NotImplementedError(
      f"{error_context.who(rules.who)}: quantized values and block scales have"
      f" no derivative, got {' and '.join(quantized)}. {rules.remedy}"
    )


def not_linear(
  who: str, names: Sequence[str], what: str
) -> NotImplementedError:
  """Returns the error of a `jax.linear_transpose` of a call.

  Args:
    what: text after "the result is not linear in lhs and rhs".
  """
  return NotImplementedError(
    f"{error_context.who(who)}: jax.linear_transpose needs a linear function,"
    f" and the result is not linear in {' and '.join(names)}{what}; use jax.vjp"
  )


def _lower_call(rules, context, *, call, target):
  # The function of each device binds the primitive for its shards.
  share = functools.partial(bind_for, target)

  def function(*flat):
    whole = call.filled(flat)
    if context.mesh is not None and rules.on_explicit_axes is not None:
      return rules.on_explicit_axes(share, whole, context.avals_out[0].sharding)
    if not context.module.is_split or not rules.can_partition(whole):
      return rules.local(whole, context.target, context.module)
    exact = rules.prepared(whole)
    form = exact.form()
    local = functools.partial(
      rules.local, target=context.target, module=context.module.of_device()
    )
    key = partition_key(
      context, call.PRIMITIVE.name, form.replace(overlay=None), form.overlay
    )
    operation = split.of_call(
      form,
      assign=rules.assign,
      notation=rules.notation,
      per_device=functools.partial(rules.per_device, local),
      whole=lambda call: share(rules.restored(call)),
    )
    return split.partitioned(operation, key)(*exact.flatten())[0]

  return function

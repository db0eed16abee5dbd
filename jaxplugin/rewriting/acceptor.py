# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Replaces matmuls of dequantized weights by those of the quantized weights.

An `Acceptor` sees each operation of a function. Code gets a weight as a plain
array. Its result after reshapes, transposes, slices and conversions is a
`weights.View`, which maps its dimensions to those of the weight. A matmul by a
view is a matmul by the stored weight.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxplugin import dot, quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import error_context, formats
from jaxplugin.dot import sides
from jaxplugin.dropin import linear as linear_lib
from jaxplugin.jaxext import jax_private
from jaxplugin.jaxext import tangents as tangents_lib
from jaxplugin.jaxext.tracing import binding_private, interception_private
from jaxplugin.quantization import operands, prologues
from jaxplugin.ragged import groups
from jaxplugin.rewriting import (
  calls,
  facts,
  patterns,
  ragged_dots,
  sites,
  sources,
  weights,
)
from jaxplugin.training import ragged as training_ragged

WHO: Final = "accept_quantized"

_TRACED_BEFORE: Final = (
  "a gradient runs the rule of a custom derivative after JAX has traced the"
  " function around it (jit, scan, ...)"
)
_BARRIER: Final = "optimization_barrier"
_MIXED: Final = "another factor is multiplied into it first"
_OTHER_DIMENSIONS: Final = (
  "the matmul contracts other dimensions than the blocked one"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptOptions:
  """Arguments of `accept_quantized`.

  Attributes:
    activations: format of the other operand of matmuls; None if unquantized.
    implementation: see `block_scaled_dot`.
    fuse_activations: see `accept_quantized`.
  """

  activations: formats.BlockFormat | None
  implementation: str | None
  fuse_activations: bool = False


@dataclasses.dataclass
class Outcome:
  """What happened to the weights of one call.

  Attributes:
    warned: a weight and an operation for each warning.
    is_taken: whether a matmul uses a quantized weight.
  """

  warned: set[tuple[str, str]] = dataclasses.field(default_factory=set)
  is_taken: bool = False


class Acceptor(calls.Walker, interception_private.Interceptor):
  """Replaces matmuls by weights in one function that is being traced."""

  is_rebuilding = True

  def __init__(
    self,
    options: AcceptOptions,
    outcome: Outcome | None = None,
    around: sites.Surroundings = sites.Surroundings(),
  ):
    """Args:
    options: of `accept_quantized`.
    outcome: of the call, if this is a function inside the accepted one.
    around: of the function.
    """
    self._options = options
    self._around = around
    # Names of the scopes around the operation that is being replaced.
    self._scopes: list[str] = []
    self.outcome = Outcome() if outcome is None else outcome
    self._products = facts.ArrayProducts()
    # Dequantized weights of this function.
    self._weights = facts.Values[weights.Weight]()
    self._outside = patterns.Outside()

  def enter(self, weight: weights.Weight, dtype: Any) -> jax.Array:
    """Dequantizes a weight, and records the result as a view of it."""
    value = weight.dequantized(dtype)
    self._weights.put(value, weight)
    return value

  def _rebuild(
    self, view: weights.View, dtype: Any
  ) -> tuple[jax.Array, facts.ArrayProduct]:
    """Dequantizes a view in this function, and records the result."""
    value, product = view.value(dtype)
    (factor,) = product.factors
    self._weights.put(factor.array, view.weight)
    self._products.put(value, product)
    return value, product

  def view(self, x: Any) -> weights.View | None:
    """Returns the view of one weight that a value is, or None."""
    found = self._factors(x)
    if found is None or len(found.factors) != 1:
      return None
    (factor,) = found.factors
    weight = self._weights.get(factor.array)
    assert weight is not None
    return weights.View(weight=weight, dims=found.dims, stored=factor.dims)

  def _factors(self, x: Any) -> facts.ArrayProduct | None:
    """Returns the product that a value is, if a weight is among its factors."""
    found = self._products.of(x)
    return found if found is not None and self._weights_of(found) else None

  def _weights_of(self, product: facts.ArrayProduct) -> list[weights.Weight]:
    found = (self._weights.get(factor.array) for factor in product.factors)
    return [weight for weight in found if weight is not None]

  def _names(self, x: Any) -> list[str]:
    """Returns the paths of the weights among a value's factors."""
    found = self._products.of(x)
    return [] if found is None else [w.path for w in self._weights_of(found)]

  def _origin(self, x: Any) -> sources.Origin | None:
    """Returns the origin of a weight among a value's factors, or None."""
    names = self._names(x)
    return sources.Origin(path=names[0]) if names else None

  # As an Interceptor.

  def replace(self, operation: binding_private.BoundOperation) -> Any:
    if self._options.activations:
      patterns.record_own(operation)
    name, args = operation.name, operation.args
    if name == _BARRIER:
      return self._without_weights(operation)
    if name not in (*sites.NUMBERS, *calls.FOLLOWED, *weights.OPERATIONS):
      return None
    if not any(self._names(x) for x in args):
      return None
    try:
      if name in weights.OPERATIONS:
        return self._views(operation)
      if name in sites.NUMBERS:
        multiply = self._dot if name == sites.DOT else self._ragged_dot
        result = multiply(operation)
        self.outcome.is_taken = True
        sites.note_taken(operation, self._around)
        return result
    except facts.NotSupported as reason:
      self.warn(name, args, str(reason))
      return None
    if not calls.any_contains(operation, frozenset(sites.NUMBERS)):
      if name != "jit" or binding_private.is_placed(operation):
        return None
      if not calls.any_contains(operation, weights.OPERATIONS):
        return None
      # A function such as jnp.take, which returns a part of a weight.
      jaxpr = operation.params["jaxpr"]
      return interception_private.evaluate(jaxpr, args, self)
    mixed = [x for x in args if self._names(x) and self.view(x) is None]
    self.warn(name, mixed, _MIXED)
    known = list(map(self.view, args))
    self._scopes, around = sites.scope_names(), self._around
    # JAX defines the body of lax.map, whose operations have lines of the code.
    if name == "jit":
      self._around = around.at_call(operation.params["jaxpr"])
    with sites.inside(operation, []):
      if self._options.activations and not calls.is_inlined(operation):
        origins = list(map(self._origin, args))
        patterns.record_outside(operation, origins, around)
      out = calls.results(self, operation, known)
    self._around = around
    if out is not None:
      self._products.note(operation, operation.results_of(out))
    return out

  def _without_weights(
    self, barrier: binding_private.BoundOperation
  ) -> list[Any] | None:
    """Returns the results of a barrier, which the weights do not pass."""
    others = [x for x in barrier.args if not self._names(x)]
    if len(others) == len(barrier.args):
      return None
    passed = iter(barrier.primitive.bind(*others) if others else ())
    return [x if self._names(x) else next(passed) for x in barrier.args]

  def note(
    self, operation: binding_private.BoundOperation, results: Sequence[Any]
  ) -> None:
    if not any(self._names(x) for x in operation.args):
      return
    self._products.note(operation, results)
    is_product = operation.name in sites.NUMBERS
    if not is_product and not any(map(self._names, results)):
      name = operation.function_name
      self.warn(name, operation.args, "that is not a matmul")

  def inside(
    self, operation: binding_private.BoundOperation, index: int
  ) -> interception_private.MakeInterceptor:
    known = list(map(self._factors, operation.args))
    scopes = sites.scope_names()
    outside = patterns.find_outside(operation.name, operation.args)

    found = [w for x in known if x for w in self._weights_of(x)]
    leaves = jax.tree.leaves([(w.array, w.layers) for w in found])
    may_use = binding_private.use_of(leaves)

    def make(inner: Sequence[Any]) -> Acceptor:
      if not may_use():
        self.warn(operation.name, operation.args, _TRACED_BEFORE)
        return self._child(scopes)
      acceptor = self._closure(scopes)
      inner = calls.own_args(operation, index, inner)
      for x, product in zip(inner, known, strict=False):
        if product is not None and len(product.factors) == 1:
          self._products.put(x, product)
      acceptor._outside.put_all(inner, outside)
      return acceptor

    return make

  def shards(
    self, args: Sequence[Any], mesh: Any, in_specs: Sequence[Any]
  ) -> interception_private.Shards | None:
    shards: dict[int, tuple[weights.View, Any]] = {}
    for i, (x, spec) in enumerate(zip(args, in_specs, strict=True)):
      view = self.view(x)
      if view is None:
        if self._names(x):
          self.warn("shard_map", [x], _MIXED)
        continue
      try:
        shards[i] = view.shard(mesh, spec)
      except facts.NotSupported as reason:
        self.warn("shard_map", [x], str(reason))
    is_own = [i not in shards for i in range(len(args))]
    views, specs = zip(*shards.values(), strict=True) if shards else ((), ())
    leaves, structure = jax.tree.flatten(views)
    scopes = sites.scope_names()
    outside = patterns.find_outside("shard_map", args)

    def start(inner: Sequence[Any]) -> tuple[Acceptor, list[Any]]:
      acceptor = self._closure(scopes)
      parts = iter(jax.tree.unflatten(structure, inner[: len(leaves)]))
      rest = iter(inner[len(leaves) :])
      own = [
        next(rest) if flag else acceptor._rebuild(next(parts), x.dtype)[0]
        for x, flag in zip(args, is_own, strict=True)
      ]
      acceptor._outside.put_all(own, outside)
      return acceptor, own

    return interception_private.Shards(
      args=[*leaves, *itertools.compress(args, is_own)],
      in_specs=[
        *jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)),
        *itertools.compress(in_specs, is_own),
      ],
      start=start,
    )

  def note_own(self, function: Any, args: Sequence[Any]) -> None:
    patterns.record_own_function(function, args)

  # As a `calls.Walker`.

  def layers(
    self, fact: weights.View, length: int
  ) -> tuple[weights.View, tuple[bool, ...]] | None:
    layer = fact.at(jnp.arange(length, dtype=np.int32))
    if layer is None:
      return None
    # Each trip gets the whole stack and the number of its layer.
    fixed = (False,) * (len(jax.tree.leaves(layer)) - 1)
    return layer, (*fixed, True)

  def leave(self, name: str, x: Any, fact: weights.View, reason: str) -> None:
    self.warn(name, [x], reason)

  def interceptor_of(
    self, jaxpr: Any, known: list[tuple[int, Any]], args: list[Any]
  ) -> Acceptor:
    child = self._child(self._scopes)
    invars = getattr(jaxpr, "jaxpr", jaxpr).invars
    for i, view in known:
      value, product = child._rebuild(view, invars[i].aval.dtype)
      if args[i] is None:
        args[i] = value
      else:
        child._products.put(args[i], product)
    return child

  def _child(self, scopes: list[str]) -> Acceptor:
    """Returns the acceptor of a function of an operation inside scopes."""
    around = self._around.unless_open(scopes)
    return Acceptor(self._options, self.outcome, around)

  def _closure(self, scopes: list[str]) -> Acceptor:
    """Returns `_child` of a function that may close over known values."""
    child = self._child(scopes)
    child._products, child._weights = self._products, self._weights
    child._outside = self._outside
    return child

  def warn(self, name: str, args: Sequence[Any], reason: str) -> None:
    """Warns that an operation dequantizes the weights among its arguments."""
    found = (self._products.of(x) for x in args)
    for weight in (w for x in found if x for w in self._weights_of(x)):
      path = weight.path
      if (path, name) in self.outcome.warned:
        continue
      self.outcome.warned.add((path, name))
      frame = self._around.source or jax_private.user_frame()
      place = f" at {frame}" if frame else ""
      is_part = weight.is_part or weight.layers
      extent = "a part" if is_part else "the whole"
      remedy = "Change that line"
      if name in weights.PARTS:
        remedy = "Split the parameters before quantize_params"
      if name in weights.PLACES:
        remedy = "Place the quantized weight with jaxplugin.shard"
      if reason.startswith(_OTHER_DIMENSIONS):
        remedy = "Find the contracted dimension with quantize_params(call=)"
      warnings.warn(
        f"{WHO}: {extent} of {path} is dequantized for {name}{place}:"
        f" {reason}. The result is correct, but this saves no memory traffic."
        f" {remedy}, or leave the weight unquantized with"
        " quantize_params(where=)",
        error_context.NotQuantizedWarning,
        stacklevel=2,
      )

  # Views and products.

  def _views(self, operation: binding_private.BoundOperation) -> Any:
    """Returns results of an operation that the quantized weight can do."""
    x, *_ = operation.args
    if operation.name == weights.CONCATENATE:
      views = list(map(self.view, operation.args))
      parts = [weights.concatenated(views, operation.params["dimension"])]
    else:
      view = self.view(x)
      if view is None:
        raise facts.NotSupported(_MIXED)
      parts = weights.RULES[operation.name](view, operation)
    self.outcome.is_taken |= operation.name in weights.PARTS
    results = [
      part.value(x.dtype)[0]
      if part.weight.is_rows
      else self._rebuild(part, x.dtype)[0]
      for part in parts
    ]
    return results if operation.primitive.multiple_results else results[0]

  def _dot(self, operation: binding_private.BoundOperation) -> jax.Array | None:
    args, params = operation.args, operation.params
    found = [self.view(x) for x in args]
    if None not in found:
      # A part next to a whole weight is data, such as rows of positions.
      found = [v if v and not v.weight.is_part else None for v in found]
      if found.count(None) != 1:
        raise facts.NotSupported("both operands are quantized weights")
    index = 0 if found[0] is not None else 1
    view = found[index]
    if view is None:
      raise facts.NotSupported(_MIXED)
    x = args[1 - index]
    result = operation.result_type()
    _require_servable(x, result, params)
    numbers = params["dimension_numbers"]
    contracting, batch = (
      [tuple(map(int, dims)) for dims in pair] for pair in numbers
    )
    dims = _stored_dims(view, contracting[index], batch[index])
    of_view = {
      theirs: view.dims[ours]
      for pair in (contracting, batch)
      for theirs, ours in zip(pair[1 - index], pair[index], strict=True)
    }
    x_dims: list[facts.Atoms] = [
      of_view.get(d, (facts.Atom(n),)) for d, n in enumerate(x.shape)
    ]
    own = [atoms for d, atoms in enumerate(x_dims) if d not in of_view]
    stored_batch, stored_free = (
      [view.stored[d] for d in kind] for kind in dims
    )
    wanted = [*stored_batch, *own, view.stored[-1]]
    x = facts.laid_out(x, x_dims, wanted)
    note = "" if x_dims == wanted else training_ragged.OTHER_LAYOUT
    call = self._call(operation, 1 - index, note)
    free = [
      view.dims[d]
      for d in sides.free_dims(len(view.dims), contracting[index], batch[index])
    ]
    lhs_rhs = [*free, *own] if index == 0 else [*own, *free]
    result_dims = [*(view.dims[d] for d in batch[index]), *lhs_rhs]
    product_dims = [*stored_batch, *own, *stored_free]
    sharding = params["out_sharding"]
    if sharding is not None:
      sharding = facts.laid_out_sharding(sharding, result_dims, product_dims)
    product = self._product(
      x, call, view.weight, dims[0], result.dtype, sharding
    )
    return facts.laid_out(product, product_dims, result_dims)

  def _call(
    self, operation: binding_private.BoundOperation, index: int, note: str
  ) -> prologues.PrologueCall | None:
    """Returns the prologue to fuse that computes the activations, or None.

    Args:
      operation: the matmul.
      index: which operand is the activations.
      note: why the matmul fuses no prologue; "" if it may fuse one.
    """
    options, x = self._options, operation.args[index]
    format = options.activations
    if format is None or not (options.fuse_activations or sites.is_recording()):
      return None
    found = patterns.find(x) or self._outside.get(x)
    if found is None:
      return None
    result = operation.result_type()
    origins = list(map(self._origin, operation.args[:2]))
    site = sites.make(operation, result, origins, self._around)
    note = found.reason or note
    note = note or operands.prologue_refusal([_spec(x, format)], x.shape)
    if not note and not options.fuse_activations:
      note = f"pass fuse_activations=True to {WHO}"
    sites.record_chain(found.before(site, note, is_fused=not note, x=x))
    return None if note else found.call

  def _product(
    self,
    x: jax.Array,
    call: prologues.PrologueCall | None,
    weight: weights.Weight,
    batch: tuple[int, ...],
    dtype: np.dtype,
    out_sharding: Any,
  ) -> jax.Array:
    """Multiplies x (batch..., rows..., k) by a weight.

    The weight's noncontracting dimensions are the last ones of the result.
    `call` is the prologue that computes x, or None.
    """
    options: dict[str, Any] = {
      "out_sharding": out_sharding,
      "preferred_element_type": dtype,
      "reduce_dtype": dtype,  # that of the matmul it replaces
      "implementation": self._options.implementation,
    }

    def multiply(x: Any, array: Any, layers: Sequence[Any]) -> jax.Array:
      is_matrix = array.ndim - len(layers) == 2 and not batch
      if is_matrix and len(layers) == 1:
        return linear_lib.linear(x, array, layer=layers[0], **options)
      for layer in layers:
        array = array[layer]
      contracting = (x.ndim - 1,), (array.ndim - 1,)
      return dot.block_scaled_dot(
        x,
        array,
        dimension_numbers=(contracting, (tuple(range(len(batch))), batch)),
        **options,
      )

    with error_context.in_function(WHO):
      format = self._options.activations
      if format is None:
        return multiply(x, weight.array, weight.layers)
      _require_blocks(x, format)
      both = _straight_through(multiply, format)
      return both(x, call, weight.array, weight.layers)

  def _ragged_dot(
    self, operation: binding_private.BoundOperation
  ) -> jax.Array | None:
    lhs, rhs, *_ = operation.args
    view, format = self.view(rhs), self._options.activations
    if view is None or self._names(lhs):
      raise facts.NotSupported("only rhs may be a quantized weight")
    of_rows, of_weights = ragged_dots.orders(operation)
    if view.stored != tuple(view.dims[d] for d in of_weights):
      raise facts.NotSupported(_OTHER_DIMENSIONS)
    weights, rows = view.weight.selected(), None
    with error_context.in_function(WHO):
      if format is not None:
        rows = self._rows(operation, of_rows, format)
      return ragged_dots.multiplied(
        operation, rows, weights, self._options.implementation
      )

  def _rows(
    self,
    operation: binding_private.BoundOperation,
    order: tuple[int, int],
    format: formats.BlockFormat,
  ) -> scaled_array.ScaledArray:
    """Quantizes lhs of a ragged dot, with its dimensions in an order."""
    lhs, _, group_sizes, *_ = operation.args
    note = "" if order == (0, 1) else training_ragged.OTHER_LAYOUT
    if format.has_global_scale:
      note = f"rows without a group must not change the scale of {format}"
    call = self._call(operation, 0, note)
    rows = lhs.transpose(order)
    _require_blocks(rows, format)
    if format.has_global_scale:
      sizes = groups.sizes_within(group_sizes, rows.shape[0])
      rows = groups.masked(rows, sizes)
    # `ragged_dots.multiplied` has the derivative.
    call, rows = lax.stop_gradient((call, rows))
    return _quantized(call, rows, format)


def _stored_dims(
  view: weights.View, contracting: Sequence[int], batch: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns batch and noncontracting dimensions of the weight in a matmul.

  The last dimension of the stored weight is contracted.

  Args:
    view: an operand of the matmul.
    contracting, batch: dimensions of the view.

  Raises:
    facts.NotSupported: If the matmul is not one by the stored weight.
  """
  if not view.has_all_once():
    raise facts.NotSupported("its elements are repeated")
  contracted = {atom for d in contracting for atom in view.dims[d]}
  batched = {atom for d in batch for atom in view.dims[d]}
  if contracted != set(view.stored[-1]):
    raise facts.NotSupported(
      f"{_OTHER_DIMENSIONS} (a derivative does: differentiate outside of the"
      " function)"
    )
  kinds: dict[bool, list[int]] = {True: [], False: []}
  for d, atoms in enumerate(view.stored[:-1]):
    is_batch = [atom in batched for atom in atoms]
    if len(set(is_batch)) > 1:
      raise facts.NotSupported(
        "only a part of a stored dimension is a batch dimension"
      )
    kinds[any(is_batch)].append(d)
  return tuple(kinds[True]), tuple(kinds[False])


def _require_servable(x: Any, result: Any, params: dict[str, Any]) -> None:
  """Raises NotSupported if a block-scaled dot cannot replace a matmul."""
  if np.dtype(x.dtype) not in formats.FLOAT_DTYPES:
    raise facts.NotSupported(f"the other operand is {x.dtype}")
  reason = calls.unsupported(result.dtype, params["precision"])
  if reason:
    raise facts.NotSupported(reason)


_NO_DERIVATIVE: Final = (
  f"{WHO}: quantized weights have no derivative. Differentiate with respect to"
  " the other parameters only, and pass the quantized ones as a separate"
  " argument: use eqx.partition, or nnx.DiffState with a filter"
)


def without_derivative(tree: Any) -> Any:
  """Returns the weights such that differentiating by one is an error."""
  return tangents_lib.without_derivative(tree, _NO_DERIVATIVE)


def _straight_through(
  function: Callable[..., jax.Array], format: formats.BlockFormat
) -> Callable[..., jax.Array]:
  """Returns `function` of quantized activations, differentiated as if they were
  not quantized.
  """

  @jax.custom_jvp
  def of_quantized(
    x: jax.Array, call: prologues.PrologueCall | None, array: Any, layers: Any
  ) -> jax.Array:
    return function(_quantized(call, x, format), array, layers)

  @functools.partial(of_quantized.defjvp, symbolic_zeros=True)
  def jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    result = of_quantized(*primals)
    if tangents_lib.is_constant(tangents[0]):
      return result, jnp.zeros_like(result)
    _, _, array, layers = primals
    return result, function(tangents[0], array, layers)

  return of_quantized


def _quantized(
  call: prologues.PrologueCall | None, x: jax.Array, format: formats.BlockFormat
) -> scaled_array.ScaledArray:
  """Quantizes activations, or the result of the prologue that computes x."""
  if call is None:
    return quantization.quantize(x, format)
  return operands.quantize(call.canonical(x.shape), _spec(x, format))


def _require_blocks(x: jax.Array, format: formats.BlockFormat) -> None:
  """Raises NotSupported if the last dimension does not have whole blocks."""
  if not format.fits(x.shape[-1]):
    raise facts.NotSupported(
      f"the contracting size {x.shape[-1]} of the activations is not a"
      f" multiple of the block size of {format}"
    )


def _spec(x: jax.Array, format: formats.BlockFormat) -> operands.QuantizeSpec:
  """Returns how activations are quantized along the last dimension."""
  return operands.QuantizeSpec.along_axis(x.ndim - 1, x.shape, format)

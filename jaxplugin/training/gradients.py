# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The derivative of `dot_general`.

The forward matmul and the backward matmul contract an operand along different
dimensions, and each quantizes it along its contracting dimension. If a gradient
is needed, the forward pass quantizes the operand along both dimensions at once,
and the second copy is the residual. The backward pass quantizes the
result's gradient along both dimensions at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding

from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.dot import sides
from jaxplugin.jaxext import jax_private, linear_calls
from jaxplugin.quantization import operands
from jaxplugin.training import activation_gradients, products

# Names of quantized residuals, for policies of `jax.checkpoint`.
KEPT_NAMES: Final = {
  "lhs": "jaxplugin_quantized_lhs",
  "rhs": "jaxplugin_quantized_rhs",
  "operand": "jaxplugin_quantized_operand",  # of `quantize_operand`
}


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def quantized_dot(
  setting: products.Setting,
  lhs: jax.Array,
  rhs: jax.Array,
  key: Any,
  sizes: Any = None,
  held: Any = None,
) -> jax.Array:
  """Multiplies as `setting` says, and has the derivatives of the recipe.

  Args:
    key: data of a key, or None.
    sizes: i32[groups], sizes of the groups of rows; None without groups.
    held: by side, `products.Held` of operands that are quantized already.
  """
  del key
  arrays: dict[products.Side, jax.Array] = {"lhs": lhs, "rhs": rhs}
  now: dict[products.Side, Any] = dict.fromkeys(products.SIDES)
  if setting.scheme.recipe.quantize_forward:
    found = setting.operands(lhs, rhs, dict.fromkeys(products.SIDES))
    for side, operand in found.items():
      now[side], _ = operand.quantize(
        arrays[side], sizes, is_needed=False, held=(held or {}).get(side)
      )
  return setting.multiply(lhs, rhs, now["lhs"], now["rhs"], sizes)


def _dot_jvp(
  setting: products.Setting,
  primals: tuple[jax.Array, jax.Array, Any, Any, Any],
  tangents: tuple[Any, Any, Any, Any, Any],
) -> tuple[jax.Array, Any]:
  lhs, rhs, key, sizes, held = primals
  arrays: dict[products.Side, jax.Array] = {"lhs": lhs, "rhs": rhs}
  active = {
    side: not isinstance(t, SymbolicZero)
    for side, t in zip(products.SIDES, tangents[:2], strict=True)
  }
  backward = setting.backward(lhs, rhs, active)
  found = setting.operands(lhs, rhs, backward)
  kept: dict[products.Side, Any] = dict(arrays)
  keeps_quantized = setting.scheme.recipe.backward_from_quantized
  if not any(backward.values()) and not keeps_quantized:
    # `quantized_dot` has a custom derivative, so the result has a second one.
    result = quantized_dot(setting, lhs, rhs, key, sizes, held)
  else:
    now: dict[products.Side, Any] = {}
    for side, operand in found.items():
      now[side], kept[side] = operand.quantize(
        arrays[side],
        sizes,
        is_needed=active[products.other_side(side)],
        name=KEPT_NAMES[side],
        held=(held or {}).get(side),
      )
    result = setting.multiply(lhs, rhs, now["lhs"], now["rhs"], sizes)

  dims = setting.gradient_dims(lhs, rhs)
  shardings = setting.gradient_shardings(lhs, rhs)
  terms = []
  for side in products.SIDES:
    if active[side]:
      numbers, order = dims.of_side(side)
      term = _Term(
        side=side,
        dtype=arrays[side].dtype,
        numbers=numbers,
        order=order,
        out_sharding=shardings[side],
        other=found[products.other_side(side)],
      )
      terms.append(term)
  residuals = [kept[term.other.side] for term in terms]
  constants, tree = jax.tree.flatten((residuals, sizes, key))
  function = _Tangent(
    setting=setting,
    terms=tuple(terms),
    shape=tuple(result.shape),
    dtype=result.dtype,
    constants=tree,
  )
  linear = [t for t in tangents[:2] if not isinstance(t, SymbolicZero)]
  tangent = linear_calls.linear_call(function, linear, constants, like=result)
  return result, tangent


quantized_dot.defjvp(_dot_jvp, symbolic_zeros=True)


def backward_of(
  setting: products.Setting, lhs: Any, rhs: Any, layer: str
) -> activation_gradients.Backward | None:
  """Returns how the gradient of a matmul's result in a layer is quantized.

  Returns None if it is not quantized, or not with a prologue.
  """
  recipe, shape = setting.scheme.recipe, setting.shape(lhs, rhs)
  if recipe.grad_format is None or recipe.stochastic_rounding:
    return None
  found = setting.backward(lhs, rhs, dict.fromkeys(products.SIDES, True))
  used = [product for product in found.values() if product is not None]
  specs = tuple(setting.scheme.spec_of_gradient(p, shape) for p in used)
  if not specs or operands.prologue_refusal(specs, shape):
    return None
  message = f"{setting.scheme.who}{products.NO_SECOND}"
  return activation_gradients.Backward(
    shape=shape, specs=specs, message=message, layer=layer
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Term:
  """The matmul for the tangent of an operand, and for its gradient.

  Attributes:
    side: the operand.
    dtype: of the operand.
    numbers: dimension numbers of g and the other operand.
    order: brings the dimensions of their product into the operand's order.
    other: the other operand.
    out_sharding: of the matmul's result on a mesh with explicit axes, or None.
  """

  side: products.Side
  dtype: np.dtype
  numbers: sides.DimensionNumbers
  order: tuple[int, ...]
  other: products.TrainingOperand
  out_sharding: NamedSharding | None = None

  @property
  def product(self) -> products.Product | None:
    """The quantized matmul for the gradient; None in high precision."""
    return self.other.product


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tangent(linear_calls.Linear):
  """The linear function from tangents of the operands to that of the result.

  `apply` multiplies tangents in high precision by the residuals. `transpose`
  multiplies the gradient g by the same residuals. The two are transposes of
  each other, except for the rounding of g.

  Attributes:
    setting: the call.
    terms: one for each operand that has a tangent.
    shape, dtype: of the result.
    constants: structure of the constants: the residual of the other operand for
      each of `terms`, the sizes of groups or None, and the data of a key or
      None.
  """

  setting: products.Setting
  terms: tuple[_Term, ...]
  shape: tuple[Any, ...]
  dtype: np.dtype
  constants: Any

  def apply(
    self, linear: Sequence[jax.Array], constants: Sequence[jax.Array]
  ) -> jax.Array:
    sharding = self.setting.out_sharding
    g: Any = jax.ShapeDtypeStruct(self.shape, np.float32, sharding=sharding)
    if jax_private.varying_axes(linear[0]):
      # Inside `shard_map` the transpose of a function of g sums over devices
      # if all devices have the same g.
      zeros = jnp.zeros(self.shape, np.float32)
      if sharding is not None:
        zeros = jax.sharding.reshard(zeros, sharding)
      g = jax_private.vary_alike([zeros, *linear])[0]
    residuals, sizes, _ = self.constants.unflatten(constants)
    summands = []
    for term, tangent, kept in zip(self.terms, linear, residuals, strict=True):
      gradient = functools.partial(self._plain_gradient, term, kept, sizes)
      (summand,) = jax.linear_transpose(gradient, g)(tangent.astype(np.float32))
      summands.append(summand)
    return sum(summands[1:], start=summands[0]).astype(self.dtype)

  def _plain_gradient(
    self, term: _Term, kept: Any, sizes: Any, g: jax.Array
  ) -> jax.Array:
    """Returns the operand's gradient in f32, from an unquantized g."""
    other, numbers = term.other.taken(kept, sizes), term.numbers
    if isinstance(other, scaled_array.ScaledArray):
      other = quantization.dequantize(other, np.float32)
    if term.product is not None:
      g = term.product.prepared("lhs", g, sizes)
      g = term.product.blocked(g, term.product.lhs)
      numbers = term.product.numbers
    product = self.setting.plain_dot(
      g,
      other,
      np.float32,
      sizes,
      numbers=numbers,
      product=term.product,
      out_sharding=term.out_sharding,
    )
    return product.transpose(term.order)

  def transpose(
    self,
    wanted: Sequence[bool],
    g: jax.Array,
    constants: Sequence[jax.Array],
  ) -> list[jax.Array | None]:
    residuals, sizes, key = self.constants.unflatten(constants)
    pairs = zip(self.terms, wanted, strict=True)
    blocked = self._blocked_gradients(
      g, [term for term, is_wanted in pairs if is_wanted], key, sizes
    )
    result: list[jax.Array | None] = []
    for term, kept, is_wanted in zip(
      self.terms, residuals, wanted, strict=True
    ):
      if not is_wanted:
        result.append(None)
        continue
      with jax.named_scope(self.setting.scheme.gradient(term.side)):
        gradient = self._gradient(term, kept, g, blocked.get(term.side), sizes)
      result.append(gradient)
    return result

  def _blocked_gradients(
    self, g: jax.Array, terms: Sequence[_Term], key: Any, sizes: Any
  ) -> dict[products.Side, Any]:
    """Returns the g that each backward matmul takes, blocked or quantized.

    The keys of the result are the operands whose gradients are computed.
    """
    scheme = self.setting.scheme
    format = scheme.recipe.grad_format
    used = {t.side: t.product for t in terms if t.product is not None}
    given = {side: p.prepared("lhs", g, sizes) for side, p in used.items()}
    if format is None:
      return {side: p.blocked(given[side], p.lhs) for side, p in used.items()}
    keys: list[Any] = [None] * len(used)
    if scheme.recipe.stochastic_rounding and used:
      if key is None:
        raise ValueError(
          f"{scheme.who}: key must be given, because the recipe rounds"
          " gradients stochastically, got key=None. Pass a different key in"
          " each step, for example"
          " key=jax.random.fold_in(jax.random.key(seed), step), or round to"
          " nearest with dataclasses.replace(recipe,"
          " stochastic_rounding=False)"
        )
      keys = [self.setting.key(key, side) for side in used]
    specs = [
      scheme.spec_of_gradient(p, given[side].shape) for side, p in used.items()
    ]
    if all(x is g for x in given.values()):
      found = activation_gradients.find(g)
      if found and all(spec in found.quantized for spec in specs):
        results = [found.quantized[spec] for spec in specs]
      else:
        call = None if found is None else found.call
        results = products.quantized(g, specs, keys, who=scheme.who, call=call)
    else:
      each = zip(given.values(), specs, keys, strict=True)
      results = [
        products.quantized(x, [spec], [own], who=scheme.who)[0]
        for x, spec, own in each
      ]
    return dict(zip(used, results, strict=True))

  def _gradient(
    self, term: _Term, kept: Any, g: jax.Array, blocked: Any, sizes: Any
  ) -> jax.Array:
    other = term.other.taken(kept, sizes)
    if term.product is None:
      return self.setting.plain_dot(
        g,
        other,
        term.dtype,
        sizes,
        numbers=term.numbers,
        out_sharding=term.out_sharding,
      ).transpose(term.order)
    return term.product.gradient(
      blocked, other, term.dtype, self.setting.scheme, sizes, term.order
    )

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The derivative of `dot_general`, and the gradients of such products.

Forward an operand is contracted along one dimension, backward along another,
and is quantized along that which is contracted. Where a gradient will be taken,
the forward pass quantizes an operand along both at once and keeps the second
for the backward pass; that quantizes the incoming gradient along both at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxplugin import dot
from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.dot import reference
from jaxplugin.dot import sides
from jaxplugin.dot.autodiff import derivatives
from jaxplugin.jaxext import jax_private
from jaxplugin.jaxext import linear_calls
from jaxplugin.training import products

# Names of what is kept quantized, for policies of `jax.checkpoint`.
KEPT_NAMES: Final = {
  "lhs": "jaxplugin_quantized_lhs",
  "rhs": "jaxplugin_quantized_rhs",
}
_SIDES: Final[tuple[products.Side, products.Side]] = ("lhs", "rhs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """What a call of `dot_general` is, beside its arrays.

  Attributes:
    scheme: what is quantized to what.
    numbers: dimension numbers.
    precision: of products in high precision.
    dtype: of the result.
    key_impl: of the key whose data is given; None for a raw key.
  """

  scheme: products.Scheme
  numbers: sides.DimensionNumbers
  precision: Any
  dtype: Any
  key_impl: Any = None

  def forward(self, lhs: jax.Array, rhs: jax.Array) -> products.Product:
    return products.Product.forward(
      self.scheme, self.numbers, lhs.ndim, rhs.ndim
    )

  def multiply(
    self,
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_q: Any,
    rhs_q: Any,
  ) -> jax.Array:
    """The forward product; of what is not quantized as it is."""
    if not self.scheme.recipe.quantize_forward:
      return reference.plain_dot(
        lhs, rhs, self.numbers, self.dtype, self.precision
      )
    product = self.forward(lhs, rhs)
    if lhs_q is None:
      lhs_q = product.lhs.apply(lhs)
    if rhs_q is None:
      rhs_q = product.rhs.apply(rhs)
    return product.multiply(lhs_q, rhs_q, self.dtype, self.scheme)

  def operands(
    self,
    lhs: jax.Array,
    rhs: jax.Array,
    backward: dict[products.Side, products.Product | None],
  ) -> list[products.Operand]:
    """Both, given the products that make gradients, by whose they are."""
    product = self.forward(lhs, rhs)
    contracting, batch = self.numbers
    return [
      products.Operand.of(
        self.scheme,
        side,
        x,
        sides.free_dims(x.ndim, k, b),
        along,
        backward[products.other_side(side)],
      )
      for side, x, k, b, along in zip(
        _SIDES,
        (lhs, rhs),
        contracting,
        batch,
        (product.lhs, product.rhs),
        strict=True,
      )
    ]

  def key(self, data: Any, side: products.Side) -> Any:
    """The key of the gradient of an operand: 0 or 1 folded into the call's."""
    if self.key_impl is not None:
      data = jax.random.wrap_key_data(data, impl=self.key_impl)
    return jax.random.fold_in(data, _SIDES.index(side))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def quantized_dot(
  setting: Setting, lhs: jax.Array, rhs: jax.Array, key: Any
) -> jax.Array:
  """`dot_general`.

  Args:
    key: data of a key, or None.
  """
  del key
  found = setting.operands(lhs, rhs, {"lhs": None, "rhs": None})
  lhs_q = rhs_q = None
  if setting.scheme.recipe.quantize_forward:
    lhs_q, rhs_q = (
      operand.quantize(x, is_needed=False)[0]
      for operand, x in zip(found, (lhs, rhs), strict=True)
    )
  return setting.multiply(lhs, rhs, lhs_q, rhs_q)


def _dot_jvp(
  setting: Setting,
  primals: tuple[jax.Array, jax.Array, Any],
  tangents: tuple[Any, Any, Any],
) -> tuple[jax.Array, Any]:
  lhs, rhs, key = primals
  scheme = setting.scheme
  arrays: dict[products.Side, jax.Array] = {"lhs": lhs, "rhs": rhs}
  active = {
    side: not isinstance(t, SymbolicZero)
    for side, t in zip(_SIDES, tangents[:2], strict=True)
  }
  dims = derivatives.GradientDims.of(setting.numbers, lhs.ndim, rhs.ndim)
  backward = {
    side: products.backward_product(
      scheme, side, dims, arrays[products.other_side(side)].ndim
    )
    if active[side]
    else None
    for side in _SIDES
  }
  found = setting.operands(lhs, rhs, backward)
  kept: dict[products.Side, Any] = dict(arrays)
  keeps_quantized = scheme.recipe.backward_from_quantized
  if not any(backward.values()) and not keeps_quantized:
    # A custom derivative again, so that there is a second one.
    result = quantized_dot(setting, lhs, rhs, key)
  else:
    now: dict[products.Side, Any] = {}
    for operand in found:
      side = operand.side
      now[side], kept[side] = operand.quantize(
        arrays[side],
        is_needed=active[products.other_side(side)],
        name=KEPT_NAMES[side],
      )
    result = setting.multiply(lhs, rhs, now["lhs"], now["rhs"])

  terms = []
  linear, constants = [], []
  for side, tangent in zip(_SIDES, tangents[:2], strict=True):
    if not active[side]:
      continue
    other = products.other_side(side)
    leaves, tree = jax.tree.flatten(kept[other])
    terms.append(
      _Term(
        side=side,
        shape=tuple(arrays[side].shape),
        dtype=arrays[side].dtype,
        numbers=dims.dgrad if side == "lhs" else dims.wgrad,
        order=dims.lhs_order if side == "lhs" else dims.rhs_order,
        other=found[_SIDES.index(other)],
        kept=tree,
      )
    )
    linear.append(tangent)
    constants += leaves
  if key is not None:
    constants.append(key)
  function = _Tangent(
    setting=setting,
    terms=tuple(terms),
    shape=tuple(result.shape),
    dtype=result.dtype,
    has_key=key is not None,
  )
  return result, linear_calls.linear_call(function, linear, constants)


quantized_dot.defjvp(_dot_jvp, symbolic_zeros=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Term:
  """What the tangent of an operand is multiplied with, and its gradient of.

  Attributes:
    side: the operand.
    shape, dtype: of the operand.
    numbers: dimension numbers of g and the other operand.
    order: brings the dimensions of their product into the operand's order.
    other: the other operand.
    kept: structure of what is kept of the other operand: an array, or a
      `ScaledArray` of it.
  """

  side: products.Side
  shape: tuple[Any, ...]
  dtype: np.dtype
  numbers: sides.DimensionNumbers
  order: tuple[int, ...]
  other: products.Operand
  kept: Any

  @property
  def product(self) -> products.Product | None:
    """Of g and the other operand, quantized; None in high precision."""
    return self.other.product


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tangent(linear_calls.Linear):
  """The result's tangent, of one operand's or of the sum of both.

  Forward it multiplies in high precision with what the backward pass multiplies
  with, so that both are one matrix, but for how the backward pass rounds g.

  Attributes:
    setting: the call's.
    terms: of the operands that have a tangent.
    shape, dtype: of the result.
    has_key: whether the last constant is the data of a key.
  """

  setting: Setting
  terms: tuple[_Term, ...]
  shape: tuple[Any, ...]
  dtype: np.dtype
  has_key: bool

  def _kept(self, constants: Sequence[jax.Array]) -> list[Any]:
    rest = list(constants)
    kept = []
    for term in self.terms:
      count = term.kept.num_leaves
      kept.append(term.kept.unflatten(rest[:count]))
      rest = rest[count:]
    return kept

  def apply(
    self, linear: Sequence[jax.Array], constants: Sequence[jax.Array]
  ) -> jax.Array:
    g: Any = jax.ShapeDtypeStruct(self.shape, np.float32)
    if jax_private.varying_axes(linear[0]):
      # Inside `shard_map`: of a g that is the same on all devices the transpose
      # would be the sum over them.
      g = dot.vary_alike([jnp.zeros(self.shape, np.float32), *linear])[0]
    summands = []
    for term, tangent, kept in zip(
      self.terms, linear, self._kept(constants), strict=True
    ):
      gradient = functools.partial(self._plain_gradient, term, kept)
      (summand,) = jax.linear_transpose(gradient, g)(tangent.astype(np.float32))
      summands.append(summand)
    return sum(summands[1:], start=summands[0]).astype(self.dtype)

  def _plain_gradient(self, term: _Term, kept: Any, g: jax.Array) -> jax.Array:
    """The operand's gradient of a g that is not quantized, in f32."""
    other, numbers = term.other.taken(kept), term.numbers
    if isinstance(other, scaled_array.ScaledArray):
      other = quantization.dequantize(other, np.float32)
    if term.product is not None:
      g = term.product.blocked(g, term.product.lhs)
      numbers = term.product.numbers
    product = reference.plain_dot(
      g, other, numbers, np.float32, self.setting.precision
    )
    return product.transpose(term.order)

  def transpose(
    self,
    wanted: Sequence[bool],
    g: jax.Array,
    constants: Sequence[jax.Array],
  ) -> list[jax.Array | None]:
    key = constants[-1] if self.has_key else None
    pairs = zip(self.terms, wanted, strict=True)
    blocked = self._blocked_gradients(
      g, [term for term, is_wanted in pairs if is_wanted], key
    )
    result: list[jax.Array | None] = []
    for term, kept, is_wanted in zip(
      self.terms, self._kept(constants), wanted, strict=True
    ):
      if not is_wanted:
        result.append(None)
        continue
      with jax.named_scope(self.setting.scheme.gradient(term.side)):
        gradient = self._gradient(term, kept, g, blocked.get(term.side))
      result.append(gradient.transpose(term.order))
    return result

  def _blocked_gradients(
    self, g: jax.Array, terms: Sequence[_Term], key: Any
  ) -> dict[products.Side, Any]:
    """g as each product takes it, by the operand whose gradient that is."""
    scheme = self.setting.scheme
    format = scheme.recipe.grad_format
    used = {t.side: t.product for t in terms if t.product is not None}
    if format is None:
      return {side: p.blocked(g, p.lhs) for side, p in used.items()}
    keys: list[Any] = [None] * len(used)
    if scheme.recipe.stochastic_rounding and used:
      if key is None:
        raise ValueError(
          "dot_general: the recipe rounds gradients stochastically, which takes"
          " a key where a gradient is taken, got key=None; pass another"
          " jax.random key to each call, as"
          " key=jax.random.fold_in(jax.random.key(seed), step), or have them"
          " rounded to nearest:"
          " dataclasses.replace(recipe, stochastic_rounding=False)"
        )
      keys = [self.setting.key(key, side) for side in used]
    manners = [
      scheme.manner(format, p.lhs, transform=p.hadamard, is_gradient=True)
      for p in used.values()
    ]
    results = products.quantized(g, manners, keys)
    return dict(zip(used, results, strict=True))

  def _gradient(
    self, term: _Term, kept: Any, g: jax.Array, blocked: Any
  ) -> jax.Array:
    other = term.other.taken(kept)
    if term.product is None:
      return reference.plain_dot(
        g, other, term.numbers, term.dtype, self.setting.precision
      )
    return term.product.multiply(
      blocked, other, term.dtype, self.setting.scheme
    )


Product = Callable[[jax.Array, Any, sides.DimensionNumbers, Any], jax.Array]


def gradients(
  g: jax.Array,
  lhs: Any,
  rhs: Any,
  numbers: sides.DimensionNumbers,
  *,
  dgrad: Product,
  wgrad: Product,
) -> tuple[jax.Array, jax.Array]:
  """Gradients of `dot_general(lhs, rhs, numbers)`, given that of its result.

  Args:
    g: [batch..., m..., n...].
    lhs, rhs: the operands, or what the products take for them that has their
      ndim and dtype.
    numbers: their dimension numbers.
    dgrad: (g, rhs, dimension_numbers, dtype) -> product, used for lhs.
    wgrad: (g, lhs, dimension_numbers, dtype) -> product, used for rhs.

  Returns:
    Gradients with the shapes and dtypes of lhs and rhs.
  """
  dims = derivatives.GradientDims.of(numbers, lhs.ndim, rhs.ndim)
  # Profiles and `explain` tell them apart by these names.
  with jax.named_scope("dgrad"):
    lhs_gradient = dgrad(g, rhs, dims.dgrad, lhs.dtype)
  with jax.named_scope("wgrad"):
    rhs_gradient = wgrad(g, lhs, dims.wgrad, rhs.dtype)
  return (
    lhs_gradient.transpose(dims.lhs_order).astype(lhs.dtype),
    rhs_gradient.transpose(dims.rhs_order).astype(rhs.dtype),
  )

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The ragged dot of training: a recipe quantizes both operands on the fly.

Forward and for dgrad, each row is quantized along the contracting dimension,
and its group does not matter. wgrad contracts the rows, so each group gets
separate blocks (`groups.align`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Final

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxplugin.core import blocking, error_context, formats
from jaxplugin.dot import arguments as dot_arguments
from jaxplugin.dot import derivatives, sides
from jaxplugin.jaxext import jax_private, mesh_axes
from jaxplugin.operation import choice
from jaxplugin.ragged import api as ragged_api
from jaxplugin.ragged import backends, calls, general, groups, primitive
from jaxplugin.ragged import sharding as sharding_lib
from jaxplugin.training import gradients, products, quantized_operand, recipes

WHO: Final = "ragged_dot_general"
OTHER_LAYOUT: Final = "the matmul needs its dimensions in another order"

# (m, k) x (groups, n, k) -> (m, n). rhs has the groups as a batch dimension.
_FORWARD: Final = (((1,), (2,)), ((), (0,)))
# Those of `jp.ragged_dot`.
_NUMBERS: Final = jax.lax.RaggedDotDimensionNumbers(
  (((1,), (2,)), ((), ())), (0,), (0,)
)


def ragged_dot_general(
  lhs: jax.Array,
  rhs: jax.Array | quantized_operand.QuantizedOperand,
  group_sizes: jax.Array,
  ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers = _NUMBERS,
  *,
  recipe: recipes.Recipe | formats.BlockFormat | str,
  key: jax.Array | None = None,
  preferred_element_type: Any = None,
  reduce_dtype: Any = None,
  implementation: str | None = None,
  out_sharding: Any = None,
) -> jax.Array:
  """Multiplies groups of rows by their weights, quantized by a recipe.

  With Q for quantization along the contracting dimension, g for the group of
  row i and G for the result's gradient::

    result[i, n] = sum_k(Q(lhs)[i, k] * Q(rhs)[g, n, k])
    dgrad[i, k] = sum_n(Q(G)[i, n] * Q(rhs)[g, n, k])
    wgrad[g, n, k] = sum over rows i of g (Q(G)[i, n] * Q(lhs)[i, k])

  Products accumulate in f32. Rows after the sum of the sizes are zero, with
  zero gradients; NaN in these rows has no effect. An empty group has a zero
  gradient. docs/how_to/mixture_of_experts.md explains blocks, scales and
  memory.

  Args:
    lhs: f32, bf16 or f16 [m, k], rows sorted by group.
    rhs: f32, bf16 or f16 [groups, n, k], or the `QuantizedOperand` of
      `jp.quantize_operand(rhs, recipe, contracting=2, batch=0)`.
    group_sizes: integers [groups], see `jp.ragged_dot`.
    ragged_dot_dimension_numbers: for other orders of dimensions. The ragged
      dimension must not be contracted.
    recipe: a `jp.training.Recipe`, a format or its name.
    key: a `jax.random` key for stochastic rounding, see `jp.dot_general`.
    preferred_element_type: f32, bf16 or f16; by default `lax.ragged_dot`'s
      dtype, and bf16 for bf16 times f16.
    reduce_dtype: dtype of sums over devices, see `jp.dot_general`.
    implementation: backend of result and dgrad, see `jp.ragged_dot`.
    out_sharding: see `jp.ragged_dot`.

  Returns:
    preferred_element_type[m, n]. Gradients have the dtypes of their operands.

  Raises:
    TypeError: If the rank, dtype or shape of an argument is wrong.
    ValueError: If a stochastically rounded gradient has no key, implementation
      is unknown, or out_sharding does not fit.
    NotImplementedError: If dimension numbers are not supported, out_sharding
      has unreduced axes, or a quantized gradient is differentiated.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> x, w = jnp.ones((3, 64)), jnp.ones((2, 32, 64))
    >>> sizes = jnp.array([1, 2])
    >>> y = jp.training.ragged_dot_general(x, w, sizes, recipe="mxfp8")
    >>> print(y.shape, y[0, 0])
    (3, 32) 64.0
  """
  with error_context.in_function(error_context.who(WHO)):
    recipe = recipes.resolve(sides.who(), "recipe", recipe)
    choice.validate_name(backends.OPERATION, implementation)
    given: tuple[Any, Any] = (_unless_quantized(lhs), rhs)
    lhs = dot_arguments.float_operand("lhs", quantized_operand.primal_of(lhs))
    rhs = dot_arguments.float_operand("rhs", quantized_operand.primal_of(rhs))
    order = general.Order.of(ragged_dot_dimension_numbers, lhs, rhs)
    if order.is_contraction:
      raise NotImplementedError(
        f"{sides.who()}: the ragged dimension must not be a contracting one"
        " under a recipe, which uses that contraction only for the gradients"
        " of weights; for quantized arrays call jaxplugin.ragged_dot_general"
      )
    lhs = lhs.transpose(order.lhs)
    group, _, contracting = order.rhs
    group_sizes = dot_arguments.integers("group_sizes", group_sizes)
    calls.validate_groups(group_sizes, rhs.shape[group])
    if preferred_element_type is None:
      preferred_element_type = dot_arguments.product_dtype(lhs.dtype, rhs.dtype)
    dtype = dot_arguments.result_dtype(preferred_element_type)
    scheme = products.Scheme(
      recipe=recipe,
      weight="rhs",
      implementation=implementation,
      who=sides.who(),
      reduce_dtype=dot_arguments.parts_dtype(reduce_dtype),
    )
    key_data, key_impl = products.data_of_key(scheme, key)
    setting = _Setting(
      scheme=scheme,
      numbers=(((1,), (contracting,)), ((), (group,))),
      dtype=dtype,
      key_impl=key_impl,
    )
    sizes = groups.sizes_within(group_sizes, lhs.shape[0])
    held = quantized_operand.taken(given, (lhs, rhs), setting)
    # Outside of the custom derivative: see `QuantizedDotGeneral.__call__`.
    arrays = jax_private.vary_alike((lhs, rhs, key_data, sizes, held))
    product = functools.partial(gradients.quantized_dot, setting)
    sharding = sharding_lib.result_sharding(
      calls.plain(
        arrays[0], arrays[1].transpose(order.rhs), sizes, contracting=2
      ),
      out_sharding,
    )
    return mesh_axes.automatic(product, sharding)(*arrays)


def prologue_refusals(
  recipe: recipes.Recipe,
  lhs: Any,
  rhs: Any,
  numbers: jax.lax.RaggedDotDimensionNumbers,
) -> tuple[str, str]:
  """Returns why lhs is quantized without its prologue.

  See `quantized_operand.prologue_refusals`. The numbers are those of a ragged
  dot that `ragged_dot_general` supports.
  """
  order = general.Order.of(numbers, lhs, rhs)
  if order.lhs != (0, 1):
    return OTHER_LAYOUT, OTHER_LAYOUT
  scheme = products.Scheme(recipe=recipe, weight="rhs")
  return quantized_operand.prologue_refusals(
    _Setting(scheme=scheme, dtype=lhs.dtype),
    jax.eval_shape(order.transposed, lhs, rhs),
  )


def _unless_quantized(lhs: Any) -> Any:
  """Returns `lhs`. Raises NotImplementedError if it is a QuantizedOperand."""
  if isinstance(lhs, quantized_operand.QuantizedOperand):
    raise NotImplementedError(
      f"{sides.who()}: lhs must be an unquantized array, because wgrad"
      f" quantizes each group separately, got {lhs!r}; pass lhs.primal"
    )
  return lhs


def _order_of(numbers: sides.DimensionNumbers) -> tuple[int, int, int]:
  """Returns the dimensions of rhs: groups, columns and contracted ones."""
  (_, (contracting,)), (_, (group,)) = numbers
  (column,) = {0, 1, 2} - {contracting, group}
  return group, column, contracting


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product(products.Product):
  """A matmul of groups of rows by weights, or of rows by rows.

  lhs has the rows.
  """

  @property
  def masks(self) -> bool:
    """Whether rows without a group are set to zero.

    They would otherwise change a scale of other rows: a global scale, or that
    of a block with all rows.
    """
    rows, _ = self.operand_formats
    if rows is None:
      return False
    has_one_block = self.is_contraction and self.lhs.multiple == 1
    return rows.has_global_scale or has_one_block

  @property
  def is_contraction(self) -> bool:
    """Whether rows are contracted."""
    return self.lhs.dims == (0,)

  def prepared(
    self, side: products.Side, x: jax.Array, sizes: Any
  ) -> jax.Array:
    if self.is_contraction and self.lhs.multiple > 1:
      return groups.align(x, sizes, self.lhs.multiple)[0]
    if not self.masks or (side == "rhs" and not self.is_contraction):
      return x
    return groups.masked(x, sizes)

  def prologue_refusal(self, side: products.Side) -> str:
    if self.is_contraction:
      return "wgrad moves the rows of each group to whole blocks"
    if side == "lhs" and self.masks:
      return (
        "rows without a group must not change the scale of"
        f" {self.operand_formats[0]}"
      )
    return ""

  def multiply(
    self,
    lhs: Any,
    rhs: Any,
    dtype: Any,
    scheme: products.Scheme,
    sizes: Any,
  ) -> jax.Array:
    dtypes = {
      "preferred_element_type": dtype,
      "reduce_dtype": scheme.reduce_dtype or dtype,
    }
    with error_context.in_function(scheme.who):
      if self.is_contraction:
        sizes = blocking.round_up(sizes, self.lhs.multiple)
        return general.contract(lhs, rhs, sizes, **dtypes)
      rhs = rhs.transpose(_order_of(self.numbers))  # kernels have blocks last
      return ragged_api.product(
        lhs, rhs, sizes, implementation=scheme.implementation, **dtypes
      )

  def gradient(
    self,
    g: Any,
    other: Any,
    dtype: Any,
    scheme: products.Scheme,
    sizes: Any,
    order: tuple[int, ...],
  ) -> jax.Array:
    if order == (0, 2, 1):
      return self._from_the_right(order).multiply(
        other, g, dtype, scheme, sizes
      )
    return self.multiply(g, other, dtype, scheme, sizes).transpose(order)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Setting(products.Setting):
  """A call of `ragged_dot_general` without its arrays."""

  numbers: sides.DimensionNumbers = _FORWARD
  precision: Any = jax.lax.Precision.HIGHEST

  kind: ClassVar[type[products.Product]] = _Product

  def gradient_dims(
    self, lhs: jax.Array, rhs: jax.Array
  ) -> derivatives.GradientDims:
    group, n, _ = order = _order_of(self.numbers)
    return derivatives.GradientDims(
      dgrad=(((1,), (n,)), ((), (group,))),
      wgrad=(((0,), (0,)), ((), ())),
      lhs_order=(0, 1),
      rhs_order=tuple(order.index(d) for d in range(3)),
    )

  def shape(self, lhs: Any, rhs: Any) -> tuple[Any, ...]:
    _, n, _ = _order_of(self.numbers)
    return lhs.shape[0], rhs.shape[n]

  def plain_dot(
    self,
    lhs: jax.Array,
    rhs: jax.Array,
    dtype: Any,
    sizes: Any,
    *,
    numbers: sides.DimensionNumbers,
    product: products.Product | None = None,
    out_sharding: NamedSharding | None = None,
  ) -> jax.Array:
    del out_sharding
    options = {
      "preferred_element_type": np.dtype(dtype),
      "reduce_dtype": self.scheme.reduce_dtype or np.dtype(dtype),
    }
    call: calls.Call
    if rhs.ndim == 2:
      if product is not None:
        sizes = blocking.round_up(sizes, product.lhs.multiple)
      call = calls.plain_contraction(lhs, rhs, sizes, **options)
    else:
      order = _order_of(self.numbers)
      ((_, (dim,)), _) = numbers
      rhs = rhs.transpose(order)
      call = calls.plain(lhs, rhs, sizes, order.index(dim), **options)
    call = call.vary_alike()
    return primitive.bind(call)

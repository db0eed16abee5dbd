# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`dot_general`: a differentiable matmul that quantizes both operands."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Final

import jax
from jax import lax
from jax.sharding import NamedSharding

from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import error_context, formats
from jaxplugin.dot import arguments as dot_arguments
from jaxplugin.dot import backends, sides
from jaxplugin.dot import sharding as dot_sharding
from jaxplugin.jaxext import jax_private, mesh_axes
from jaxplugin.quantization import arguments
from jaxplugin.training import gradients, products, quantized_operand, recipes


class _NotGiven(enum.Enum):
  """The default of an argument that may be None."""

  NOT_GIVEN = enum.auto()


_NOT_GIVEN: Final = _NotGiven.NOT_GIVEN
_WEIGHTS: Final = ("lhs", "rhs", None)


def dot_general(
  lhs_format: formats.BlockFormat | str | None | _NotGiven = _NOT_GIVEN,
  rhs_format: formats.BlockFormat | str | None | _NotGiven = _NOT_GIVEN,
  *,
  recipe: recipes.Recipe | None = None,
  weight: products.Side | None | _NotGiven = _NOT_GIVEN,
  grad_format: formats.BlockFormat | str | None = None,
  quantize_dgrad: bool | _NotGiven = _NOT_GIVEN,
  quantize_wgrad: bool | _NotGiven = _NOT_GIVEN,
  scale_rounding: quantization.ScaleRounding | _NotGiven = _NOT_GIVEN,
  reduce_dtype: Any = None,
  implementation: str | None = None,
) -> QuantizedDotGeneral:
  """Returns a function like `lax.dot_general` that quantizes its operands.

  Each matmul quantizes high-precision values along its contracting dimension::

    f(lhs, rhs) = quantize(lhs) x quantize(rhs)
    gradient of lhs = quantize(g) x quantize(rhs)  # g: the result's gradient
    gradient of rhs = quantize(g) x quantize(lhs)

  Products accumulate in f32. Quantization has the derivative of the identity
  (straight-through). Residuals stay quantized. docs/concepts/recipes.md
  explains keys, derivatives and residuals.

  Args:
    lhs_format, rhs_format: such as "mxfp8"; None leaves that operand
      unquantized.
    recipe: a `jp.training.Recipe`, a format or its name, in place of formats
      and switches. A format rounds all operands to nearest.
    weight: with a recipe, which operand is the weight: "lhs", "rhs" or None.
      Its gradient is wgrad, the other one dgrad.
    grad_format: format of g; lhs_format by default.
    quantize_dgrad, quantize_wgrad: False computes the gradient of lhs or of rhs
      in high precision.
    scale_rounding: "up" or "floor", see `quantize`. "floor" requires an MX
      format among the formats.
    reduce_dtype: f32, bf16 or f16 for sums over devices; None is the dtype of
      each matmul.
    implementation: a backend, see `block_scaled_dot`.

  Returns:
    f(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None,
    *, key=None, out_sharding=None), with the meaning of `lax.dot_general`. It
    takes f32, bf16, f16 and `QuantizedOperand`s, and pads the contracting
    dimension with zeros. Gradients have the operands' dtypes.

  Raises:
    TypeError: If formats or recipe are missing, given twice or of a wrong type.
    ValueError: If a name is unknown; from f, if stochastic rounding of a
      gradient has no key.
    NotImplementedError: From f, if a quantized gradient is differentiated.

  Source: arXiv 2506.08027, section 3.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> dot = jp.dot_general("mxfp8", "mxfp8")
    >>> x, w = jnp.ones((2, 64)), jnp.full((64, 1), 0.5)
    >>> print(dot(x, w, (((1,), (0,)), ((), ()))))
    [[32.]
     [32.]]
  """
  with error_context.in_function("dot_general"):
    backends.validate_name(implementation)
    reduce_dtype = dot_arguments.parts_dtype(reduce_dtype)
  for name, format in (("lhs_format", lhs_format), ("rhs_format", rhs_format)):
    _refuse_array(name, format)
  given = {
    "lhs_format": lhs_format,
    "rhs_format": rhs_format,
    "grad_format": _NOT_GIVEN if grad_format is None else grad_format,
    "quantize_dgrad": quantize_dgrad,
    "quantize_wgrad": quantize_wgrad,
    "scale_rounding": scale_rounding,
  }
  given = {k: v for k, v in given.items() if v is not _NOT_GIVEN}
  side: Any = weight
  if recipe is None:
    used, side = _recipe_of_formats(given, weight), "rhs"
  else:
    used = _resolve_recipe(recipe, given, weight)
  scheme = products.Scheme(
    recipe=used,
    weight=side,
    is_weight_given=recipe is not None,
    implementation=implementation,
    reduce_dtype=reduce_dtype,
  )
  return QuantizedDotGeneral(scheme=scheme)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedDotGeneral:
  """A function that `dot_general` returns.

  Equal arguments of `dot_general` give equal functions with equal hashes, so
  `jit` caches them. It is a pytree without leaves: an argument of `jit`, or a
  static field of a module.

  Attributes:
    scheme: formats and rounding of each matmul.
  """

  scheme: products.Scheme

  def __call__(
    self,
    lhs: jax.Array | quantized_operand.QuantizedOperand,
    rhs: jax.Array | quantized_operand.QuantizedOperand,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    key: jax.Array | None = None,
    out_sharding: Any = None,
  ) -> jax.Array:
    scheme = self.scheme
    given = lhs, rhs
    lhs, rhs = _operand("lhs", lhs), _operand("rhs", rhs)
    with error_context.in_function("dot_general"):
      numbers = dot_arguments.canonical_dimension_numbers(
        dimension_numbers, lhs.ndim, rhs.ndim
      )
      dot_arguments.canonical_precision(precision)
    dot_arguments.validate_dimension_numbers(
      "dot_general", numbers, lhs.shape, rhs.shape
    )
    if preferred_element_type is None:
      preferred_element_type = dot_arguments.product_dtype(lhs.dtype, rhs.dtype)
    result_dtype = formats.as_dtype(preferred_element_type)
    if result_dtype is None:
      raise TypeError(
        "dot_general: preferred_element_type must be a dtype, got"
        f" {error_context.shown(preferred_element_type)}"
      )
    key_data, key_impl = products.data_of_key(scheme, key)
    setting = products.Setting(
      scheme=scheme,
      numbers=numbers,
      precision=(
        lax.Precision(precision) if isinstance(precision, str) else precision
      ),
      dtype=result_dtype,
      key_impl=key_impl,
      out_sharding=_explicit_sharding(lhs, rhs, numbers, out_sharding),
    )
    held = quantized_operand.taken(given, (lhs, rhs), setting)
    # Outside of the custom derivative: an operand that is the same on all
    # devices of a `shard_map` then gets the sum of their gradients.
    arrays = jax_private.vary_alike((lhs, rhs, key_data, None, held))
    return gradients.quantized_dot(setting, *arrays)


def _refuse_array(name: str, format: Any) -> None:
  """Raises TypeError for an array, as `jnp.dot` and `lax.dot_general` take."""
  if not hasattr(format, "shape"):
    return
  remedy = (
    "dot_general returns the function that multiplies: call"
    ' jaxplugin.dot_general("mxfp8", "mxfp8")(lhs, rhs, dimension_numbers)'
  )
  if isinstance(format, scaled_array.ScaledArray):
    remedy = "for quantized arrays call jaxplugin.block_scaled_dot(lhs, rhs)"
  raise TypeError(
    f"dot_general: {name} must be a BlockFormat or its name, got"
    f" {error_context.shown(format)}; {remedy}"
  )


def _recipe_of_formats(given: dict[str, Any], weight: Any) -> recipes.Recipe:
  """Returns the recipe of a call of `dot_general` without `recipe`."""
  if weight is not _NOT_GIVEN:
    raise TypeError(
      "dot_general: weight must be left out without a recipe, got"
      f" weight={error_context.shown(weight)}; pass recipe=, or leave weight"
      " out"
    )
  missing = [n for n in ("lhs_format", "rhs_format") if n not in given]
  if missing:
    raise TypeError(
      "dot_general: lhs_format and rhs_format, or recipe, must be given, got no"
      f" {' and no '.join(missing)}; pass recipe=jp.training.MXFP8_RECIPE, for"
      " example"
    )
  resolved = {
    name: None
    if given.get(name) is None
    else recipes.resolve_format("dot_general", given[name], name)
    for name in ("lhs_format", "rhs_format", "grad_format")
  }
  lhs_format, rhs_format, grad_format = resolved.values()
  if lhs_format is None and rhs_format is None:
    raise TypeError(
      "dot_general: lhs_format or rhs_format must be given, got None for both;"
      " without quantization use jax.lax.dot_general"
    )
  grad_format = grad_format or lhs_format or rhs_format
  scale_rounding = given.get("scale_rounding", "up")
  used = dict.fromkeys(
    f for f in (lhs_format, rhs_format, grad_format) if f is not None
  )
  arguments.validate_scale_rounding("dot_general", scale_rounding, list(used))
  for name in ("quantize_dgrad", "quantize_wgrad"):
    error_context.require_bool("dot_general", name, given.get(name, True))
  return recipes.Recipe(
    activation_format=lhs_format,
    weight_format=rhs_format,
    grad_format=grad_format,
    quantize_dgrad=bool(given.get("quantize_dgrad", True)),
    quantize_wgrad=bool(given.get("quantize_wgrad", True)),
    scale_rounding=scale_rounding,
  )


def _resolve_recipe(
  recipe: Any, given: dict[str, Any], weight: Any
) -> recipes.Recipe:
  """Returns the recipe of a call of `dot_general` with `recipe`."""
  recipe = recipes.resolve("dot_general", "recipe", recipe)
  if given:
    shown = [f"{k}={error_context.shown(v)}" for k, v in given.items()]
    raise TypeError(
      "dot_general: formats and roundings must be left out with a recipe, got"
      f" {', '.join(shown)};"
      " change the recipe with dataclasses.replace, or leave recipe out"
    )
  if weight is _NOT_GIVEN:
    raise TypeError(
      "dot_general: weight must be given with a recipe, because weights and"
      ' activations are quantized differently; pass weight="rhs" or'
      ' weight="lhs", or weight=None if both operands are activations'
    )
  if weight not in _WEIGHTS:
    raise ValueError(
      'dot_general: weight must be "lhs", "rhs" or None, got'
      f" {error_context.shown(weight)}; pass None if both operands are"
      " activations"
    )
  if weight is None and recipe.activation_format is None:
    raise TypeError(
      "dot_general: weight=None means two activations, and the recipe's"
      " activation_format is None; without quantization use"
      " jax.lax.dot_general"
    )
  return recipe


def _explicit_sharding(
  lhs: jax.Array,
  rhs: jax.Array,
  numbers: sides.DimensionNumbers,
  out_sharding: Any,
) -> NamedSharding | None:
  """Returns the sharding of the result; None without explicit mesh axes."""
  mesh = mesh_axes.mesh_of((lhs, rhs))
  if out_sharding is None and mesh is None:
    return None
  given = [(x.shape, x) for x in (lhs, rhs)]
  return dot_sharding.dot_general_sharding(
    "dot_general", given, numbers, out_sharding, mesh
  )


def _operand(name: str, x: Any) -> jax.Array:
  x = quantized_operand.primal_of(x)
  x = scaled_array.as_array("dot_general", name, x)
  if x.dtype not in formats.FLOAT_DTYPES:
    raise TypeError(
      f"dot_general: {name} must be float32, bfloat16 or float16, got"
      f" {x.dtype}{list(x.shape)}; cast it"
    )
  return x

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A differentiable `dot_general` that quantizes both operands on the fly."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jaxplugin import dot
from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.core import speaking
from jaxplugin.dot import backends
from jaxplugin.dot import rules
from jaxplugin.dot import sides
from jaxplugin.jaxext import explicit_axes
from jaxplugin.quantization import arguments
from jaxplugin.training import gradients
from jaxplugin.training import products
from jaxplugin.training import quantized_operand
from jaxplugin.training import recipes
from jaxplugin.training import settings


class _NotGiven(enum.Enum):
  """What an argument is that may be None and was left out."""

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
  """Makes a drop-in for `lax.dot_general` that multiplies in block formats.

  The function returned quantizes both operands along the contracting dimension
  and multiplies them with `block_scaled_dot`. Backward, with g the gradient of
  the result, lhs's gradient is g x rhs and rhs's is g x lhs: each quantizes g
  and the operand along the dimension which that product contracts, from the
  high-precision values that the forward pass was given (quantizing twice would
  add up errors). Quantization itself counts as the identity (straight-through).

  What is quantized to what, and how, is said by a recipe,

    dot_general(recipe=jp.training.NVFP4_RECIPE, weight="rhs")

  or by formats alone, `dot_general(jp.MXFP8, jp.MXFP8)`: that is a recipe with
  lhs for activations and rhs for weights, in which everything is in blocks of
  one row and rounded to nearest.

  Under differentiation the forward pass quantizes activations along both
  dimensions, and what is kept for the backward pass is the second quantization
  and not the operand: 1 byte a value for FP8, half a byte for FP4, and scales.
  `checkpoint_policies.quantized_saveable` saves what is kept. Of weights no
  copy is kept, as they live anyway: the backward pass quantizes them itself, or
  takes what `quantize_operand` made once for many calls. (Of formats alone rhs
  with batch dimensions counts as activations, as in attention.)
  An operand is kept as it is, and quantized forward only, where its format is
  None or its product backward is not quantized. g is quantized along both
  dimensions where both products are. On GPUs both take one read where
  `quantize_both` does: dimensions that are contracted together lie side by
  side in order, those of the other product beside them, batch dimensions first.
  Without differentiation, and under `jit` for a gradient that is not used,
  nothing is quantized twice.

  Forward mode (`jax.jvp`, `jax.jacfwd`) multiplies tangents, in high precision
  and as they are, with what the backward pass multiplies g with: both modes are
  the same matrix, but for the quantization of g. Second derivatives, in any
  order of modes, are there where neither product is quantized backward; else
  they are an error.

  Where the recipe rounds gradients stochastically, the gradient needs a key. It
  is an argument of the call: with equal keys all bits are equal, under `jit`,
  `vmap`, `scan` and `jax.checkpoint` alike. Give each layer and each step its
  own, `jax.random.fold_in(key, step * layers + layer)`. Do not fold in one
  number after the other: `fold_in` of "unsafe_rbg" keys ignores their order.
  From it come two, `fold_in(key, 0)` for lhs's gradient and `fold_in(key, 1)`
  for rhs's, after `jax.random.split(key, 1)` of "unsafe_rbg" keys. On
  devices of a `shard_map` that have one key, equal places of their parts of g
  are rounded by equal bits: fold `jax.lax.axis_index` in for others.

  Use it as `flax.linen.Dense(dot_general=...)`, in
  `jnp.einsum(..., _dot_general=...)` (which may swap its operands, so give both
  the same format there, or see which is the weight), or directly.

  Args:
    lhs_format: e.g. `jp.MXFP8`, or its name, "mxfp8"; None leaves lhs in its
      own dtype (a plain f32, bf16 or f16 operand of a one-sided product).
    rhs_format: likewise for rhs. One of the two must be given.
    recipe: a `jp.training.Recipe`, instead of all arguments but weight and
      implementation; or a format or its name, which is then that of weights,
      activations and gradients, rounded to nearest: "nvfp4" is not
      `jp.training.NVFP4_RECIPE`.
    weight: with a recipe, the operand that is weights: "lhs", "rhs" or None,
      where both are activations. Its gradient is the recipe's wgrad, the other
      one's dgrad; where both are activations, both are dgrad.
    grad_format: format of the gradient in the backward products; lhs_format by
      default (rhs_format where that is None).
    quantize_dgrad: False computes lhs's gradient in high precision.
    quantize_wgrad: False computes rhs's gradient in high precision.
    scale_rounding: "up" or "floor", see `quantize`.
    reduce_dtype: f32, bf16 or f16: what devices send each other, under `jit`,
      where a dimension that a product contracts is sharded (rows in wgrad under
      FSDP, k under tensor parallelism), see `block_scaled_dot`. None is the
      dtype of each product, as `lax.dot_general` has it: bf16 results and
      gradients are sums over devices in bf16.
    implementation: None chooses; a name forces one, see `block_scaled_dot`.

  Returns:
    f(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None,
    *, key=None, out_sharding=None) with the meaning of `lax.dot_general`: lhs
    and rhs are f32, bf16 or f16 of any rank, or what `quantize_operand` made of
    such; the result has preferred_element_type, by default the dtype that
    `lax.dot_general` gives it, bf16 for bf16 and f16. Contracting sizes need
    not be multiples of the block: they are padded with zeros inside, before
    anything is transformed. `precision` is that of products in high precision,
    by default the highest. `key` is a `jax.random` key. Under explicit mesh
    axes the result has the sharding that `lax.dot_general` gives it:
    `out_sharding`, or else that of the operands' remaining dimensions; between,
    what has to be gathered travels quantized, as the types say. Gradients
    have the operands' dtypes and shardings. Functions of equal arguments are
    equal, and pytrees without leaves.

  Raises:
    TypeError: a format is no BlockFormat, both are None, there is a recipe and
      a format, or neither, or a recipe without weight, or reduce_dtype is none
      of its three; and from the function returned: operands are no floats,
      their shapes do not fit, or key is none.
    ValueError: weight, scale_rounding, implementation or a format's name is
      unknown; and while a gradient is traced, of a recipe that rounds it
      stochastically, no key was given.
    NotImplementedError: out_sharding has unreduced axes, or from the function
      returned, a second derivative where products backward are quantized.
    JAX's own errors of shardings, those of `lax.dot_general`: out_sharding
      names an axis that is not explicit, or is needed, as a contracting
      dimension is sharded, and is not given.

  Source: NVIDIA, "Recipes for Pre-training LLMs with MXFP8" (2025), section 3.
  """
  with speaking.speaking_for("dot_general"):
    backends.validate_name(implementation)
    reduce_dtype = rules.parts_dtype(reduce_dtype)
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
  if recipe is None:
    scheme = _scheme_of_formats(given, weight, implementation)
  else:
    scheme = _scheme_of_recipe(recipe, given, weight, implementation)
  return QuantizedDotGeneral(
    scheme=dataclasses.replace(scheme, reduce_dtype=reduce_dtype)
  )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedDotGeneral:
  """What `dot_general` returns: see there.

  Those made with equal arguments are equal and of one hash, so that caches of
  `jit` know them by. It is a pytree without leaves: an argument of `jit`, or
  the field of a module, that is no array.

  Attributes:
    scheme: what is quantized to what.
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
    with speaking.speaking_for("dot_general"):
      numbers = rules.canonical_dimension_numbers(
        dimension_numbers, lhs.ndim, rhs.ndim
      )
      rules.canonical_precision(precision)
    rules.validate_dimension_numbers(
      "dot_general", numbers, lhs.shape, rhs.shape
    )
    if preferred_element_type is None:
      preferred_element_type = rules.product_dtype(lhs.dtype, rhs.dtype)
    result_dtype = formats.as_dtype(preferred_element_type)
    if result_dtype is None:
      raise TypeError(
        "dot_general: preferred_element_type must be a dtype, got"
        f" {speaking.shown(preferred_element_type)}"
      )
    arguments.validate_key("dot_general", key)
    key_data = key_impl = None
    if scheme.recipe.stochastic_rounding:
      key_data, key_impl = data_of_key(key)
    setting = settings.Setting(
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
    leaves, tree = jax.tree.flatten((key_data, held))
    # Here and not inside, so that an operand that is the same on all devices of
    # a `shard_map` gets the sum of their gradients.
    lhs, rhs, *leaves = dot.vary_alike([lhs, rhs, *leaves])
    data, held = jax.tree.unflatten(tree, leaves)
    return gradients.quantized_dot(setting, lhs, rhs, data, None, held)


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
    f" {speaking.shown(format)}; {remedy}"
  )


def _scheme_of_formats(
  given: dict[str, Any], weight: Any, implementation: str | None
) -> products.Scheme:
  """That of the arguments of `dot_general` but recipe."""
  if weight is not _NOT_GIVEN:
    raise TypeError(
      "dot_general: weight must be left out without a recipe, got"
      f" weight={speaking.shown(weight)}; pass recipe=, or leave weight out"
    )
  missing = [n for n in ("lhs_format", "rhs_format") if n not in given]
  if missing:
    raise TypeError(
      "dot_general: lhs_format and rhs_format, or recipe, must be given, got no"
      f" {' and no '.join(missing)}"
    )
  resolved = {
    name: None
    if given.get(name) is None
    else formats.resolve("dot_general", given[name], name)
    for name in ("lhs_format", "rhs_format", "grad_format")
  }
  lhs_format, rhs_format, grad_format = resolved.values()
  if lhs_format is None and rhs_format is None:
    raise TypeError(
      "dot_general: lhs_format or rhs_format must be given, got None for both;"
      " without quantization use jax.lax.dot_general"
    )
  scale_rounding = given.get("scale_rounding", "up")
  if scale_rounding not in quantization.SCALE_ROUNDINGS:
    raise ValueError(
      "dot_general: scale_rounding must be one of"
      f" {quantization.SCALE_ROUNDINGS}, got {speaking.shown(scale_rounding)}"
    )
  for name in ("quantize_dgrad", "quantize_wgrad"):
    speaking.require_bool("dot_general", name, given.get(name, True))
  recipe = recipes.Recipe(
    activation_format=lhs_format,
    weight_format=rhs_format,
    grad_format=grad_format or lhs_format or rhs_format,
    quantize_dgrad=bool(given.get("quantize_dgrad", True)),
    quantize_wgrad=bool(given.get("quantize_wgrad", True)),
    scale_rounding=scale_rounding,
  )
  return products.Scheme(
    recipe=recipe,
    weight="rhs",
    is_weight_given=False,
    implementation=implementation,
  )


def _scheme_of_recipe(
  recipe: Any,
  given: dict[str, Any],
  weight: Any,
  implementation: str | None,
) -> products.Scheme:
  """That of the arguments of `dot_general` with a recipe."""
  recipe = recipes.resolve("dot_general", "recipe", recipe)
  if given:
    raise TypeError(
      "dot_general: formats and roundings must be left out with a recipe, got"
      f" {', '.join(f'{k}={speaking.shown(v)}' for k, v in given.items())};"
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
      f" {speaking.shown(weight)}"
    )
  if weight is None and recipe.activation_format is None:
    raise TypeError(
      "dot_general: weight=None means two activations, and the recipe's"
      " activation_format is None; without quantization use"
      " jax.lax.dot_general"
    )
  return products.Scheme(
    recipe=recipe, weight=weight, implementation=implementation
  )


def data_of_key(key: jax.Array | None) -> tuple[jax.Array | None, Any]:
  """Numbers of a key, and what makes a key of them; of a raw key None."""
  if key is None or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    return key, None
  return jax.random.key_data(key), jax.random.key_impl(key)


def _explicit_sharding(
  lhs: jax.Array,
  rhs: jax.Array,
  numbers: sides.DimensionNumbers,
  out_sharding: Any,
) -> NamedSharding | None:
  """The sharding in the type of the result; None without explicit mesh axes.

  JAX is asked what `lax.dot_general` would give, or raise.
  """
  if out_sharding is None and explicit_axes.mesh_of((lhs, rhs)) is None:
    return None
  explicit_axes.refuse_unreduced("dot_general", out_sharding)

  def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return lax.dot_general(
      # Of one dtype: which pairs of them go together is our own rule.
      lhs.astype(np.float32),
      rhs.astype(np.float32),
      numbers,
      out_sharding=out_sharding,
    )

  sharding = jax.eval_shape(product, lhs, rhs).sharding
  assert sharding is None or isinstance(sharding, NamedSharding)
  return sharding


def _operand(name: str, x: Any) -> jax.Array:
  x = quantized_operand.primal_of(x)
  x = scaled_array.as_array("dot_general", name, x)
  if x.dtype not in sides.PLAIN_DTYPES:
    raise TypeError(
      f"dot_general: {name} must be float32, bfloat16 or float16, got"
      f" {x.dtype}{list(x.shape)}"
    )
  return x

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A drop-in for `jax.nn.scaled_dot_general`, with its configs and gradients.

It quantizes both operands and multiplies them. What differs from JAX's is
listed in `jaxplugin.nn`, which has the same names.

Source: the documentation of `jax.nn`, JAX 0.10 to 0.12.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin import dot, quantization
from jaxplugin.arrays import validation
from jaxplugin.core import blocking, error_context, formats
from jaxplugin.dot import backends, derivatives, sides
from jaxplugin.dot.backends import xla
from jaxplugin.dropin import nn_operands
from jaxplugin.jaxext import jax_private, tangents

Mode = Literal["mxfp8", "mxfp4", "nvfp4"]
MODES: Final = ("mxfp8", "mxfp4", "nvfp4")

_NO_SECOND_DERIVATIVE: Final = (
  "scaled_dot_general: a gradient computed from quantized arrays has no"
  " derivative; for a second derivative use mode nvfp4 for configs[2], which"
  " does not quantize the gradient, and use reverse mode"
)
_QUANTIZABLE: Final = (formats.E4M3, formats.E5M2, formats.E2M1)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["global_scale"],
  meta_fields=["mode", "block_size", "data_type", "scale_type", "infer_only"],
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BlockScaleConfig:
  """A config of `scaled_dot_general`: how one array is quantized.

  The fields are those of JAX's config. It is a pytree with one leaf, the global
  scale. So a jitted function can take it as an argument.

  Attributes:
    mode: "mxfp8", "mxfp4" or "nvfp4".
    block_size: number of consecutive values that share one scale.
    data_type: dtype of the quantized values.
    scale_type: dtype of the block scales.
    global_scale: f32[] or f32[1] for "nvfp4", else None.
    infer_only: not used, as in JAX.

  Example:
    >>> import jaxplugin as jp
    >>> config = jp.nn.get_scaled_dot_general_config("mxfp8")
    >>> config.mode, config.block_size
    ('mxfp8', 32)
  """

  mode: str
  block_size: int
  data_type: Any
  scale_type: Any
  global_scale: Any = None
  infer_only: bool = False


def get_scaled_dot_general_config(
  mode: Mode, global_scale: jax.Array | None = None
) -> BlockScaleConfig:
  """Returns a config of `scaled_dot_general`, as `jax.nn` does.

  Args:
    mode: "mxfp8" (E4M3 values, an E8M0 scale per 32), "mxfp4" (E2M1 values,
      an E8M0 scale per 32) or "nvfp4" (E2M1 values, an E4M3 scale per 16).
    global_scale: f32[] or f32[1] for "nvfp4"; default 1. Magnitudes above
      global_scale * 6 * 448 saturate. "mxfp8" ignores it, as in JAX.

  Returns:
    A `BlockScaleConfig`.

  Raises:
    ValueError: If the mode is unknown, or "mxfp4" is given a global scale.

  Example:
    >>> import jaxplugin as jp
    >>> jp.nn.get_scaled_dot_general_config("nvfp4").block_size
    16

  Source: `jax.nn.get_scaled_dot_general_config`.
  """
  who = "get_scaled_dot_general_config"
  if not error_context.is_one_of(mode, MODES):
    raise ValueError(
      f"{who}: mode must be one of {', '.join(MODES)}, got"
      f" {error_context.shown(mode)}"
    )
  if mode == "mxfp4" and global_scale is not None:
    raise ValueError(
      f"{who}: mxfp4 has no global scale, got"
      f" {error_context.shown(global_scale)}; leave it out"
    )
  format = formats.by_name(mode)
  if not format.has_global_scale:
    global_scale = None
  elif global_scale is None:
    global_scale = jnp.ones((1,), jnp.float32)
  return BlockScaleConfig(
    mode=mode,
    block_size=format.block_size,
    data_type=format.values_dtype,
    scale_type=format.scale_dtype,
    global_scale=global_scale,
  )


def scaled_dot_general(
  lhs: jax.Array,
  rhs: jax.Array,
  dimension_numbers: Any,
  preferred_element_type: Any = np.float32,
  configs: Sequence[Any] | None = None,
  implementation: str | None = None,
) -> jax.Array:
  """Quantizes and multiplies, as `jax.nn.scaled_dot_general` does.

  Sums are in f32, and one cast follows::

    result = dot_general(quantize(lhs, configs[0]), quantize(rhs, configs[1]))

  `jp.quantize` quantizes along the contracting dimension, with the config's
  global scale. Several contracting dimensions count as one, in the order of
  lhs. They are padded to whole blocks.

  The gradient of an operand is computed in f32 and cast once. With g the
  gradient of the result::

    "mxfp8", "mxfp4": dot_general(quantize(g, configs[2]), quantize(other))
    "nvfp4":          dot_general(g, other), and 0 where the operand saturated

  Both are quantized along the dimensions that this dot contracts. The global
  scales have zero gradients. Second derivatives exist for "nvfp4", in reverse
  mode.

  Args:
    lhs: an array of a real dtype. Integers are converted to f32.
    rhs: the same.
    dimension_numbers: as for `lax.dot_general`.
    preferred_element_type: f32, bf16 or f16.
    configs: of lhs, of rhs and of the gradient; without the third there is no
      gradient. None multiplies by `lax.dot_general`, unquantized.
    implementation: backend of all dots; None chooses. (JAX ignores it.)

  Returns:
    preferred_element_type[batch..., m..., n...], with batch dimensions in the
    order of `dimension_numbers`. (JAX sorts them.)

  Raises:
    TypeError: If a rank, dtype or shape does not fit, or a config is invalid.
    ValueError: If fields of a config disagree.
    NotImplementedError: If the named backend does not support the call, or a
      quantized gradient is differentiated.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> configs = [jp.nn.get_scaled_dot_general_config("mxfp8")] * 3
    >>> numbers = (((1,), (1,)), ((), ()))
    >>> x, w = jnp.ones((2, 32)), jnp.ones((3, 32))
    >>> jp.nn.scaled_dot_general(x, w, numbers, configs=configs)
    Array([[32., 32., 32.],
           [32., 32., 32.]], dtype=float32)

  Source: `jax.nn.scaled_dot_general`.
  """
  who = "scaled_dot_general"
  with error_context.in_function(who):
    backends.validate_name(implementation)
  if configs is None:
    nn_operands.require_portable(who, implementation, "configs=None")
    return lax.dot_general(
      lhs, rhs, dimension_numbers, preferred_element_type=preferred_element_type
    )
  if dimension_numbers is None or preferred_element_type is None:
    raise TypeError(
      f"{who}: dimension_numbers and preferred_element_type must not be None,"
      f" got {error_context.shown(dimension_numbers)} and"
      f" {error_context.shown(preferred_element_type)}"
    )
  if not isinstance(configs, (list, tuple)) or len(configs) not in (2, 3):
    raise ValueError(
      f"{who}: configs must be a list of three, for lhs, rhs and the gradient,"
      f" got {error_context.shown(configs)}"
    )
  parsed = [_parse_config(who, i, c) for i, c in enumerate(configs)]
  lhs_format, rhs_format, *gradient = [format for format, _ in parsed]
  lhs_global, rhs_global, *_ = [global_scale for _, global_scale in parsed]
  lhs = _quantizable(who, "lhs", lhs)
  rhs = _quantizable(who, "rhs", rhs)
  with error_context.in_function(who):
    numbers = nn_operands.canonical_numbers(
      who, dimension_numbers, lhs.shape, rhs.shape
    )
    recipe = _Recipe(
      dimension_numbers=numbers,
      preferred_element_type=nn_operands.result_dtype(
        who, preferred_element_type
      ),
      lhs=lhs_format,
      rhs=rhs_format,
      gradient=gradient[0] if gradient else None,
      implementation=implementation,
    )
    # In `shard_map` a gradient varies over the same axes as the result. The
    # transpose of `vary_alike` sums the gradient over the axes over which the
    # operand did not vary.
    arrays = jax_private.vary_alike((lhs, rhs, (lhs_global, rhs_global)))
    return _differentiable_dot(*arrays, recipe)


def _quantizable(who: str, name: str, x: Any) -> jax.Array:
  """Returns `x` as an array that `quantize` takes, by a differentiable cast."""
  x = nn_operands.array(who, name, x)
  if x.dtype in (*formats.FLOAT_DTYPES, np.float64):
    return x
  return nn_operands.as_float(who, name, x).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Recipe:
  """Everything about a `scaled_dot_general` that is not an array.

  Attributes:
    dimension_numbers: in tuples.
    preferred_element_type: dtype of the result.
    lhs, rhs: formats that the operands are quantized to.
    gradient: format of the result's gradient; None without gradients. One with
      a global scale asks for a high-precision backward pass.
    implementation: the backend that the caller named, or None.
  """

  dimension_numbers: sides.DimensionNumbers
  preferred_element_type: np.dtype
  lhs: formats.BlockFormat
  rhs: formats.BlockFormat
  gradient: formats.BlockFormat | None
  implementation: str | None


def _parse_config(
  who: str, position: int, config: Any
) -> tuple[formats.BlockFormat, jax.Array | None]:
  """Returns the format and the f32[] global scale of a config.

  The config is a `BlockScaleConfig`, or the class of the same name in JAX.
  """
  name = f"configs[{position}]"
  names = [field.name for field in dataclasses.fields(BlockScaleConfig)]
  missing = [field for field in names if not hasattr(config, field)]
  if missing:
    raise TypeError(
      f"{who}: {name} must be a config, got {error_context.shown(config)},"
      f" which has no {', '.join(missing)}; create it with"
      " get_scaled_dot_general_config"
    )
  mode, global_scale = config.mode, config.global_scale
  if not error_context.is_one_of(mode, MODES):
    raise ValueError(
      f"{who}: the mode of {name} must be one of {', '.join(MODES)}, got"
      f" {error_context.shown(mode)}"
    )
  has_global_scale = formats.by_name(mode).has_global_scale
  scale_dtype = formats.by_name(mode).scale_dtype
  try:
    data_type, scale_type = (
      jnp.dtype(config.data_type),
      jnp.dtype(config.scale_type),
    )
  except TypeError:
    data_type = scale_type = None
  if data_type not in _QUANTIZABLE or scale_type != scale_dtype:
    raise ValueError(
      f"{who}: {name} of mode {mode} must have data_type"
      f" {', '.join(d.name for d in _QUANTIZABLE)} and scale_type"
      f" {scale_dtype.name}, got {error_context.shown(config.data_type)} and"
      f" {error_context.shown(config.scale_type)}"
    )
  block_size = config.block_size
  if not isinstance(block_size, int) or block_size < nn_operands.MIN_BLOCK_SIZE:
    raise ValueError(
      f"{who}: block_size of {name} must be an integer of at least"
      f" {nn_operands.MIN_BLOCK_SIZE}, got {error_context.shown(block_size)}"
    )
  if has_global_scale != (global_scale is not None):
    rule = "have a" if has_global_scale else "not have a"
    raise ValueError(
      f"{who}: {name} of mode {mode} must {rule} global_scale, got"
      f" {error_context.shown(global_scale)}"
    )
  if has_global_scale:
    given = global_scale
    global_scale = nn_operands.array(who, f"global_scale of {name}", given)
    if global_scale.size != 1 or global_scale.dtype != np.float32:
      raise TypeError(
        f"{who}: global_scale of {name} must be one float32, f32[] or f32[1],"
        f" got {global_scale.dtype}{list(global_scale.shape)}"
      )
    wrong = validation.first_not_positive(given)
    if wrong is not None:
      raise ValueError(
        f"{who}: global_scale of {name} must be positive and finite, got"
        f" {wrong}; pass 1 for an array of zeros"
      )
    global_scale = global_scale.reshape(())
  format = nn_operands.block_format(
    data_type, scale_type, block_size, has_global_scale
  )
  return format, global_scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _differentiable_dot(
  lhs: jax.Array, rhs: jax.Array, global_scales: Any, recipe: _Recipe
) -> jax.Array:
  lhs_global, rhs_global = global_scales
  return _quantize_and_dot(
    (lhs, recipe.lhs, lhs_global),
    (rhs, recipe.rhs, rhs_global),
    recipe.dimension_numbers,
    recipe.preferred_element_type,
    recipe.implementation,
  )


def _forward(
  lhs: jax.Array, rhs: jax.Array, global_scales: Any, recipe: _Recipe
) -> tuple[jax.Array, Any]:
  result = _differentiable_dot(lhs, rhs, global_scales, recipe)
  return result, (lhs, rhs, global_scales)


def _backward(recipe: _Recipe, residuals: Any, g: jax.Array) -> Any:
  lhs, rhs, (lhs_global, rhs_global) = residuals
  gradient = recipe.gradient
  if gradient is None:
    raise ValueError(
      "scaled_dot_general: differentiation needs configs for lhs, rhs and the"
      " gradient, got two configs; append one for the gradient"
    )
  is_quantized = not gradient.has_global_scale

  def product(
    other: jax.Array,
    format: Any,
    global_scale: Any,
    numbers: sides.DimensionNumbers,
    dtype: Any,
  ) -> jax.Array:
    if not is_quantized:
      return xla.plain_dot(g, other, numbers, dtype)
    operands = tangents.without_derivative(
      (g, other, global_scale), _NO_SECOND_DERIVATIVE
    )
    return _quantize_and_dot(
      (operands[0], gradient, None),
      (operands[1], format, operands[2]),
      numbers,
      dtype if dtype in formats.FLOAT_DTYPES else jnp.float32,
      recipe.implementation,
    )

  dims = derivatives.GradientDims.of(
    recipe.dimension_numbers, lhs.ndim, rhs.ndim
  )
  # Profiles and `explain` print these names.
  with jax.named_scope("dgrad"):
    lhs_gradient = product(rhs, recipe.rhs, rhs_global, dims.dgrad, lhs.dtype)
  with jax.named_scope("wgrad"):
    rhs_gradient = product(lhs, recipe.lhs, lhs_global, dims.wgrad, rhs.dtype)
  lhs_gradient = lhs_gradient.transpose(dims.lhs_order).astype(lhs.dtype)
  rhs_gradient = rhs_gradient.transpose(dims.rhs_order).astype(rhs.dtype)
  if not is_quantized:
    lhs_gradient = _unless_clipped(lhs_gradient, lhs, recipe.lhs, lhs_global)
    rhs_gradient = _unless_clipped(rhs_gradient, rhs, recipe.rhs, rhs_global)
  zeros = jax.tree.map(jnp.zeros_like, (lhs_global, rhs_global))
  return lhs_gradient, rhs_gradient, zeros


_differentiable_dot.defvjp(_forward, _backward)


def _unless_clipped(
  gradient: jax.Array,
  x: jax.Array,
  format: formats.BlockFormat,
  global_scale: jax.Array | None,
) -> jax.Array:
  """Returns the gradient, with 0 for each element of `x` that was clipped.

  NaN counts as clipped. MX scales are rounded up, so without a global scale no
  element is clipped.
  """
  if global_scale is None:
    return gradient
  limit = global_scale * format.values_encoding.max * format.scale_encoding.max
  dtype = np.promote_types(x.dtype, np.float32)
  is_kept = jnp.abs(x).astype(dtype) <= limit.astype(dtype)
  return jnp.where(is_kept, gradient, 0)


# An array, the format to quantize it to, and its f32[] global scale or None.
_Side = tuple[jax.Array, formats.BlockFormat, jax.Array | None]


def _quantize_and_dot(
  lhs: _Side,
  rhs: _Side,
  numbers: sides.DimensionNumbers,
  dtype: Any,
  implementation: str | None,
) -> jax.Array:
  """Merges and pads the contracting dimensions, quantizes and multiplies.

  The dimensions are merged in the order of lhs. The order in `numbers` then
  does not change the blocks.
  """
  order = np.argsort(numbers[0][0])
  multiple = math.lcm(lhs[1].block_size, rhs[1].block_size)
  arrays, contracting, batches = [], [], []
  for (x, format, global_scale), dims, batch in zip(
    (lhs, rhs), *numbers, strict=True
  ):
    merge = blocking.Blocking(
      dims=tuple(dims[i] for i in order),
      lead=(*batch, *sides.free_dims(x.ndim, dims, batch)),
      multiple=multiple,
    )
    arrays.append(
      quantization.quantize(
        merge.apply(x),
        format,
        axis=merge.axis(),
        global_scale=global_scale,
        packed=False,
      )
    )
    contracting.append((merge.axis(),))
    batches.append(tuple(map(merge.position, batch)))
  lhs_q, rhs_q = arrays
  return dot.block_scaled_dot(
    lhs_q,
    rhs_q,
    dimension_numbers=(contracting, batches),
    preferred_element_type=dtype,
    reduce_dtype=dtype,  # as in JAX's function
    implementation=implementation,
  )

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Drop-ins for `jax.nn.scaled_*` and `jax.lax.scaled_dot`, on every platform.

Same names, defaults and meaning as JAX's, plus `implementation=`, so code
written for JAX works by changing the import. What differs, for all of them:

* Everything is multiplied and accumulated in f32 and cast once at the end.
  JAX multiplies in `preferred_element_type` or in bf16 on some platforms.
* Results are f32, bf16 or f16 (JAX's `scaled_dot` and `scaled_matmul` also
  give integers).
* k = 0 gives zeros, and several contracting dimensions pair up in the order
  in which they are named, as in `lax.dot_general`.

A pair that is one of the package's formats is served by whichever
implementation fits. Any other pair that JAX takes (other block sizes, bf16, f32
or integer scales and values, one scale a row) is described by a `BlockFormat`
of its own, which only the xla implementation serves.

Source: the documentation of `jax.nn` and `jax.lax`, JAX 0.10 to 0.12.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from jaxplugin import backends
from jaxplugin import call
from jaxplugin import dot
from jaxplugin import formats
from jaxplugin import gradients
from jaxplugin import quantization
from jaxplugin import reference
from jaxplugin import scaled_array

Mode = Literal["mxfp8", "mxfp4", "nvfp4"]
MODES: Final = ("mxfp8", "mxfp4", "nvfp4")

_MATMUL_NUMBERS: Final = (((2,), (2,)), ((0,), (0,)))
_QUANTIZABLE: Final = (formats.E4M3, formats.E5M2, formats.E2M1)
_MIN_BLOCK_SIZE: Final = 2  # of `scaled_dot` and of a config, as in JAX


def scaled_matmul(
  lhs: jax.Array,
  rhs: jax.Array,
  lhs_scales: jax.Array,
  rhs_scales: jax.Array,
  preferred_element_type: Any = np.float32,
  *,
  implementation: str | None = None,
) -> jax.Array:
  """`jax.nn.scaled_matmul`: batched matmul of block-scaled operands.

  With block = k / k_blocks, the number of values that one scale covers:

    a = lhs * repeat(lhs_scales, block, axis=-1)
    b = rhs * repeat(rhs_scales, block, axis=-1)
    result = einsum("bmk,bnk->bmn", a, b)

  accumulated in f32 and cast once. A NaN scale makes its whole block NaN.

  Args:
    lhs: any real dtype[batch, m, k]. uint8 are integers here, as in JAX: packed
      FP4 goes to `block_scaled_dot`.
    rhs: any real dtype[batch, n, k].
    lhs_scales: any real dtype[batch, m, k_blocks], k_blocks a divisor of k.
    rhs_scales: any real dtype[batch, n, k_blocks].
    preferred_element_type: f32, bf16 or f16: dtype of the result.
    implementation: None chooses; "xla", "cudnn", "triton" or "cpu" forces one.

  Returns:
    preferred_element_type[batch, m, n].

  Raises:
    ValueError: a rank other than 3, sizes that disagree, an unknown
      implementation, or a negative NVFP4 scale.
    TypeError: k is no multiple of k_blocks, or a dtype is not acceptable.
    NotImplementedError: the implementation asked for cannot serve.

  Source: `jax.nn.scaled_matmul`.
  """
  who = "scaled_matmul"
  arrays = {
    "lhs": _array(who, "lhs", lhs),
    "rhs": _array(who, "rhs", rhs),
    "lhs_scales": _array(who, "lhs_scales", lhs_scales),
    "rhs_scales": _array(who, "rhs_scales", rhs_scales),
  }
  shapes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in arrays.items())
  lhs, rhs, lhs_scales, rhs_scales = arrays.values()
  if any(x.ndim != 3 for x in arrays.values()):
    raise ValueError(
      f"{who}: all operands must have rank 3, (batch, rows, k) and (batch,"
      f" rows, k_blocks), got {shapes}; reshape them, or call scaled_dot"
    )
  if (lhs.shape[0], lhs.shape[2]) != (rhs.shape[0], rhs.shape[2]):
    raise ValueError(
      f"{who}: lhs and rhs must agree in batch and k, got {shapes}"
    )
  if lhs_scales.shape[2] != rhs_scales.shape[2]:
    raise ValueError(
      f"{who}: lhs_scales and rhs_scales must have as many blocks, got"
      f" {shapes}; scaled_dot takes a block size for each side"
    )
  if (
    lhs_scales.shape[:2] != lhs.shape[:2]
    or rhs_scales.shape[:2] != rhs.shape[:2]
  ):
    raise ValueError(
      f"{who}: scales must have the batch and the rows of their operand, got"
      f" {shapes}"
    )
  if preferred_element_type is None:
    raise ValueError(
      f"{who}: preferred_element_type must be float32, bfloat16 or float16,"
      " got None"
    )
  with _speaking_for(who):
    return _dot_of_scaled(
      who,
      (lhs, lhs_scales),
      (rhs, rhs_scales),
      _MATMUL_NUMBERS,
      preferred_element_type,
      implementation,
    )


def scaled_dot(
  lhs: jax.Array,
  rhs: jax.Array,
  *,
  lhs_scale: jax.Array | None = None,
  rhs_scale: jax.Array | None = None,
  dimension_numbers: Any = None,
  preferred_element_type: Any = None,
  implementation: str | None = None,
) -> jax.Array:
  """`jax.lax.scaled_dot`: `dot_general` of block-scaled operands.

    result = dot_general(lhs * repeat(lhs_scale), rhs * repeat(rhs_scale))

  accumulated in f32 and cast once. Each scale is repeated along the contracting
  dimensions to the size of its operand. A NaN scale makes its whole block NaN.
  An operand without a scale is used as it is (JAX rounds it to bf16).

  Args:
    lhs: any real dtype of any rank. uint8 are integers here, as in JAX: packed
      FP4 goes to `block_scaled_dot`.
    rhs: any real dtype, of the rank of lhs.
    lhs_scale: any real dtype, of the shape of lhs except that the size of every
      contracting dimension is divided by 2 or more. None leaves lhs unscaled.
    rhs_scale: likewise for rhs. Its block sizes may differ from those of lhs.
    dimension_numbers: as `lax.dot_general`'s. Default: (..., m, k) times
      (..., k, n), leading dimensions batch.
    preferred_element_type: f32, bf16 or f16: dtype of the result. Default bf16.
    implementation: None chooses; "xla", "cudnn", "triton" or "cpu" forces one.

  Returns:
    preferred_element_type[batch..., m..., n...], dimensions ordered as by
    `lax.dot_general`.

  Raises:
    TypeError: rank, dtype or shape of an argument is wrong.
    ValueError: unknown implementation, or a negative NVFP4 scale.
    NotImplementedError: the implementation asked for cannot serve, or a
      quantized operand is differentiated.

  Source: `jax.lax.scaled_dot`.
  """
  who = "scaled_dot"
  lhs, rhs = _array(who, "lhs", lhs), _array(who, "rhs", rhs)
  scales = {}
  for name, scale, operand in (
    ("lhs_scale", lhs_scale, lhs),
    ("rhs_scale", rhs_scale, rhs),
  ):
    scales[name] = None if scale is None else _array(who, name, scale)
    if scale is not None and scales[name].ndim != operand.ndim:
      raise TypeError(
        f"{who}: {name} must have the rank of its operand, got {name}"
        f" {tuple(scales[name].shape)} for {tuple(operand.shape)}"
      )
  if lhs.ndim != rhs.ndim:
    raise TypeError(
      f"{who}: lhs and rhs must have the same rank, got {tuple(lhs.shape)} and"
      f" {tuple(rhs.shape)}; reshape one, or call block_scaled_dot"
    )
  if dimension_numbers is None:
    if lhs.ndim < 2:
      raise TypeError(
        f"{who}: without dimension_numbers operands must have rank 2 or more,"
        f" (..., m, k) and (..., k, n), got {tuple(lhs.shape)} and"
        f" {tuple(rhs.shape)}; pass dimension_numbers"
      )
    batch = tuple(range(lhs.ndim - 2))
    dimension_numbers = (((lhs.ndim - 1,), (lhs.ndim - 2,)), (batch, batch))
  if preferred_element_type is None:
    preferred_element_type = jnp.bfloat16
  with _speaking_for(who):
    numbers = _canonical_numbers(who, dimension_numbers, lhs.shape, rhs.shape)
    for side, operand, contracting in zip(
      ("lhs", "rhs"), (lhs, rhs), numbers[0], strict=True
    ):
      scale = scales[f"{side}_scale"]
      if scale is not None:
        _check_scale(who, side, operand.shape, scale.shape, contracting)
    return _dot_of_scaled(
      who,
      (lhs, scales["lhs_scale"]),
      (rhs, scales["rhs_scale"]),
      numbers,
      preferred_element_type,
      implementation,
    )


def _check_scale(
  who: str,
  side: str,
  shape: Sequence[Any],
  scale_shape: Sequence[Any],
  contracting: call.Dims,
) -> None:
  """The rule of `jax.lax.scaled_dot` about the shape of a scale."""

  def fits(dim, size, scale_size):
    if dim not in contracting:
      return size == scale_size
    if not isinstance(size, int) or not isinstance(scale_size, int):
      return True  # symbolic: `_block_size` asks for more
    if 0 in (size, scale_size):
      return size == scale_size
    return size % scale_size == 0 and size >= _MIN_BLOCK_SIZE * scale_size

  pairs = enumerate(zip(shape, scale_shape, strict=True))
  if not all(fits(dim, *sizes) for dim, sizes in pairs):
    raise TypeError(
      f"{who}: {side}_scale must have the shape of {side}, every contracting"
      f" dimension divided by {_MIN_BLOCK_SIZE} or more, got {side}_scale"
      f" {tuple(scale_shape)} for {side} {tuple(shape)} with contracting"
      f" dimensions {contracting}"
    )


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["global_scale"],
  meta_fields=["mode", "block_size", "data_type", "scale_type", "infer_only"],
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BlockScaleConfig:
  """How `scaled_dot_general` quantizes one of its arrays.

  The fields are those of JAX's own config. It is a pytree whose one leaf is the
  global scale, so it can be an argument of a jitted function.

  Attributes:
    mode: "mxfp8", "mxfp4" or "nvfp4".
    block_size: number of consecutive values that share one scale.
    data_type: dtype of the quantized values.
    scale_type: dtype of the block scales.
    global_scale: f32[] or f32[1] for "nvfp4", else None.
    infer_only: without meaning, here as in JAX.
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
  """`jax.nn.get_scaled_dot_general_config`: a config of `scaled_dot_general`.

  Args:
    mode: "mxfp8" (E4M3 values, an E8M0 scale per 32), "mxfp4" (E2M1 values,
      an E8M0 scale per 32) or "nvfp4" (E2M1 values, an E4M3 scale per 16).
    global_scale: f32[] or f32[1], for "nvfp4" only; default 1. Values larger
      than global_scale * 6 * 448 saturate. Ignored for "mxfp8", as in JAX.

  Raises:
    ValueError: the mode is unknown, or "mxfp4" is given a global scale.

  Source: `jax.nn.get_scaled_dot_general_config`.
  """
  who = "get_scaled_dot_general_config"
  if mode not in MODES:
    raise ValueError(
      f"{who}: mode must be one of {', '.join(MODES)}, got {mode!r}"
    )
  if mode == "mxfp4" and global_scale is not None:
    raise ValueError(
      f"{who}: mxfp4 has no global scale, got {global_scale!r}; leave it out"
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
  """`jax.nn.scaled_dot_general`: `dot_general` that quantizes both operands.

    result = dot_general(quantize(lhs, configs[0]), quantize(rhs, configs[1]))

  accumulated in f32 and cast once. Quantization is that of `jaxplugin.quantize`
  with the config's global scale, along the contracting dimension; several
  contracting dimensions are one, in the order in which lhs has them. They are
  padded inside to whole blocks. Blocks with NaN or Inf become NaN, blocks of
  zeros stay zero.

  The gradient of an operand, g being the gradient of the result:

    configs[2] "mxfp8", "mxfp4": the dot of quantize(g, configs[2]) with the
      other operand, quantized afresh by its own config, both along the
      dimensions that this dot contracts.
    configs[2] "nvfp4": the dot of g with the other operand, neither quantized;
      zero where the operand was clipped, |x| > global_scale * 6 * 448.

  Both in f32, cast once to the operand's dtype. The global scales get zero
  gradients. Without a third config there is no gradient.

  Args:
    lhs: a real array. Integers are converted to f32.
    rhs: likewise.
    dimension_numbers: as `lax.dot_general`'s; any order, any number.
    preferred_element_type: f32, bf16 or f16: dtype of the result.
    configs: for lhs, for rhs, and for the gradient: configs that
      `get_scaled_dot_general_config` makes, here or in `jax.nn`. Their global
      scale may be traced. None is `lax.dot_general`, nothing is quantized.
    implementation: None chooses; "xla", "cudnn", "triton" or "cpu" forces one,
      for the gradient's quantized dots as well. (JAX ignores it.)

  Returns:
    preferred_element_type[batch..., m..., n...], batch dimensions in the order
    of `dimension_numbers`, as `lax.dot_general` has them. (JAX sorts them.)

  Raises:
    TypeError: rank, dtype or shape of an argument is wrong, or a config is no
      config.
    ValueError: a config's fields do not go together, or the implementation is
      unknown.
    NotImplementedError: the implementation asked for cannot serve.

  Source: `jax.nn.scaled_dot_general`.
  """
  who = "scaled_dot_general"
  with _speaking_for(who):
    backends.validate_name(implementation)
  if configs is None:
    _require_xla(who, implementation, "configs=None")
    return lax.dot_general(
      lhs,
      rhs,
      dimension_numbers,
      preferred_element_type=preferred_element_type,
    )
  if dimension_numbers is None or preferred_element_type is None:
    raise TypeError(
      f"{who}: dimension_numbers and preferred_element_type must not be None,"
      f" got {dimension_numbers!r} and {preferred_element_type!r}"
    )
  if not isinstance(configs, (list, tuple)) or len(configs) not in (2, 3):
    raise ValueError(
      f"{who}: configs must be a list of three, for lhs, rhs and the gradient,"
      f" got {configs!r}"
    )
  parsed = [_parse_config(who, i, c) for i, c in enumerate(configs)]
  lhs = _quantizable(who, "lhs", lhs)
  rhs = _quantizable(who, "rhs", rhs)
  with _speaking_for(who):
    numbers = _canonical_numbers(who, dimension_numbers, lhs.shape, rhs.shape)
    recipe = _Recipe(
      dimension_numbers=numbers,
      preferred_element_type=_result_dtype(who, preferred_element_type),
      lhs=parsed[0][0],
      rhs=parsed[1][0],
      gradient=parsed[2][0] if len(parsed) == 3 else None,
      implementation=implementation,
    )
    global_scales = (parsed[0][1], parsed[1][1])
    # In `shard_map` a gradient varies as the result does; the transpose of this
    # step sums it over the axes over which its operand did not vary.
    flat, tree = jax.tree.flatten((lhs, rhs, global_scales))
    arrays = jax.tree.unflatten(tree, dot.vary_alike(flat))
    return _differentiable_dot(*arrays, recipe)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Recipe:
  """Everything about a `scaled_dot_general` that is not an array.

  Attributes:
    dimension_numbers: in tuples.
    preferred_element_type: dtype of the result.
    lhs, rhs: formats that the operands are quantized to.
    gradient: format of the result's gradient; None without gradients. One with
      a global scale asks for a high-precision backward pass.
    implementation: the one asked for, or None.
  """

  dimension_numbers: call.DimensionNumbers
  preferred_element_type: np.dtype
  lhs: formats.BlockFormat
  rhs: formats.BlockFormat
  gradient: formats.BlockFormat | None
  implementation: str | None


def _parse_config(
  who: str, position: int, config: Any
) -> tuple[formats.BlockFormat, jax.Array | None]:
  """The format and the f32[] global scale of a config, ours or JAX's."""
  name = f"configs[{position}]"
  names = [field.name for field in dataclasses.fields(BlockScaleConfig)]
  missing = [field for field in names if not hasattr(config, field)]
  if missing:
    raise TypeError(
      f"{who}: {name} must be a config, got {config!r}, which has no"
      f" {', '.join(missing)}; make it with get_scaled_dot_general_config"
    )
  mode, global_scale = config.mode, config.global_scale
  if mode not in MODES:
    raise ValueError(
      f"{who}: the mode of {name} must be one of {', '.join(MODES)}, got"
      f" {mode!r}"
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
      f" {scale_dtype.name}, got {config.data_type!r} and"
      f" {config.scale_type!r}"
    )
  block_size = config.block_size
  if not isinstance(block_size, int) or block_size < _MIN_BLOCK_SIZE:
    raise ValueError(
      f"{who}: block_size of {name} must be an integer of at least"
      f" {_MIN_BLOCK_SIZE}, got {block_size!r}"
    )
  if has_global_scale != (global_scale is not None):
    rule = "have a" if has_global_scale else "not have a"
    raise ValueError(
      f"{who}: {name} of mode {mode} must {rule} global_scale, got"
      f" {global_scale!r}"
    )
  if has_global_scale:
    global_scale = _array(who, f"global_scale of {name}", global_scale)
    if global_scale.size != 1 or global_scale.dtype != np.float32:
      raise TypeError(
        f"{who}: global_scale of {name} must be one float32, f32[] or f32[1],"
        f" got {global_scale.dtype}{list(global_scale.shape)}"
      )
    if not isinstance(global_scale, jax.core.Tracer):
      number = np.asarray(global_scale).item()
      if not 0 < number < np.inf:
        raise ValueError(
          f"{who}: global_scale of {name} must be positive and finite, got"
          f" {number}"
        )
    global_scale = global_scale.reshape(())
  format = _format(data_type, scale_type, block_size, has_global_scale)
  return format, global_scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _differentiable_dot(lhs, rhs, global_scales, recipe):
  lhs_global, rhs_global = global_scales
  return _quantize_and_dot(
    (lhs, recipe.lhs, lhs_global),
    (rhs, recipe.rhs, rhs_global),
    recipe.dimension_numbers,
    recipe.preferred_element_type,
    recipe.implementation,
  )


def _forward(lhs, rhs, global_scales, recipe):
  result = _differentiable_dot(lhs, rhs, global_scales, recipe)
  return result, (lhs, rhs, global_scales)


def _backward(recipe, residuals, g):
  lhs, rhs, (lhs_global, rhs_global) = residuals
  if recipe.gradient is None:
    raise ValueError(
      "scaled_dot_general: differentiation needs configs for lhs, rhs and the"
      " gradient, got two configs; append one for the gradient"
    )
  is_quantized = not recipe.gradient.has_global_scale

  def product(format, global_scale):
    if not is_quantized:
      return reference.plain_dot
    return lambda g, other, numbers, dtype: _quantize_and_dot(
      (g, recipe.gradient, None),
      (other, format, global_scale),
      numbers,
      dtype if dtype in call.RESULT_DTYPES else jnp.float32,
      recipe.implementation,
    )

  lhs_gradient, rhs_gradient = gradients.gradients(
    g,
    lhs,
    rhs,
    recipe.dimension_numbers,
    dgrad=product(recipe.rhs, rhs_global),
    wgrad=product(recipe.lhs, lhs_global),
  )
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
  """Zeros the gradient where quantizing `x` clipped it (or it is NaN).

  Without a global scale nothing is ever clipped: MX scales are rounded up.
  """
  if global_scale is None:
    return gradient
  limit = global_scale * format.values_encoding.max * format.scale_encoding.max
  return jnp.where(jnp.abs(x) <= limit, gradient, 0)


# An array, the format to quantize it to, and its f32[] global scale or None.
_Side = tuple[jax.Array, formats.BlockFormat, jax.Array | None]


def _quantize_and_dot(
  lhs: _Side,
  rhs: _Side,
  numbers: call.DimensionNumbers,
  dtype: Any,
  implementation: str | None,
) -> jax.Array:
  """Quantizes along what `numbers` contract, merged and padded, and multiplies.

  Contracting dimensions are merged in the order of lhs, so that the order in
  which they are named decides nothing.
  """
  (lhs_k, rhs_k), (lhs_batch, rhs_batch) = numbers
  order = np.argsort(lhs_k)
  block = math.lcm(lhs[1].block_size, rhs[1].block_size)
  sides = []
  for (x, format, global_scale), contracting, batch in (
    (lhs, [lhs_k[i] for i in order], lhs_batch),
    (rhs, [rhs_k[i] for i in order], rhs_batch),
  ):
    x, axis, batch = _merge(x, tuple(contracting), batch)
    x = _pad_to_blocks(x, axis, block)
    x = quantization.quantize(x, format, axis=axis, global_scale=global_scale)
    sides.append((x, axis, batch))
  (lhs_q, lhs_axis, lhs_batch), (rhs_q, rhs_axis, rhs_batch) = sides
  return dot.block_scaled_dot(
    lhs_q,
    rhs_q,
    dimension_numbers=(((lhs_axis,), (rhs_axis,)), (lhs_batch, rhs_batch)),
    preferred_element_type=dtype,
    implementation=implementation,
  )


def _merge(
  x: jax.Array, contracting: call.Dims, batch: call.Dims
) -> tuple[jax.Array, int, call.Dims]:
  """Leaves one contracting dimension: merged, or for none of size 1."""
  if len(contracting) == 1:
    return x, contracting[0], batch
  free = call.free_dims(x.ndim, contracting, batch)
  lead = (*batch, *free)
  sizes = [x.shape[d] for d in lead]
  k = math.prod(x.shape[d] for d in contracting)
  x = x.transpose(*lead, *contracting).reshape(*sizes, k)
  return x, len(lead), tuple(range(len(batch)))


def _pad_to_blocks(x: jax.Array, axis: int, block: int) -> jax.Array:
  """Pads with zeros to whole blocks."""
  size = x.shape[axis]
  padded = scaled_array.round_up(size, block)  # may be symbolic
  if padded == size:
    return x
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, padded - size)
  return jnp.pad(x, widths)


def _dot_of_scaled(
  who: str,
  lhs: tuple[jax.Array, jax.Array | None],
  rhs: tuple[jax.Array, jax.Array | None],
  numbers: call.DimensionNumbers,
  dtype: Any,
  implementation: str | None,
) -> jax.Array:
  """Multiplies two (values, scale or None) pairs."""
  backends.validate_name(implementation)
  dtype = _result_dtype(who, dtype)
  (lhs_k, rhs_k), batch = numbers
  is_empty = 0 in (lhs[0].shape[d] for d in lhs_k)
  is_plain = lhs[1] is None and rhs[1] is None
  if not lhs_k:  # blocks of one, in a contracting dimension of size 1
    unit = lambda x: None if x is None else jnp.expand_dims(x, -1)
    lhs_k, rhs_k = (lhs[0].ndim,), (rhs[0].ndim,)
    lhs, rhs = tuple(map(unit, lhs)), tuple(map(unit, rhs))
  operands = [
    _block_scaled(who, side, values, None if is_empty else scale, contracting)
    for side, (values, scale), contracting in (
      ("lhs", lhs, lhs_k),
      ("rhs", rhs, rhs_k),
    )
  ]
  if is_empty or is_plain:
    _require_xla(who, implementation, "a call without any block scale")
    return reference.plain_dot(*operands, ((lhs_k, rhs_k), batch), dtype)
  return dot.block_scaled_dot(
    *operands,
    dimension_numbers=((lhs_k, rhs_k), batch),
    preferred_element_type=dtype,
    implementation=implementation,
  )


def _block_scaled(
  who: str,
  side: str,
  values: jax.Array,
  scale: jax.Array | None,
  contracting: call.Dims,
) -> jax.Array | scaled_array.ScaledArray:
  """What `block_scaled_dot` takes for values and a scale of any real dtype.

  A scale with blocks along several contracting dimensions is repeated along all
  but the last of them: one dimension is blocked in a `ScaledArray`.
  """
  values = _as_float(who, side, values)
  if scale is None:
    if ml_dtypes.finfo(values.dtype).bits <= 8:
      return values.astype(jnp.bfloat16)  # exact
    return values
  scale = _as_float(who, f"{side}_scale", scale)
  *others, axis = contracting
  for dim in others:
    scale = _repeat(scale, values.shape[dim] // scale.shape[dim], dim)
  block_size = _block_size(who, side, values, scale, axis)
  format = _format(values.dtype, scale.dtype, block_size, False)
  return scaled_array.ScaledArray(values, scale, None, format)


def _block_size(
  who: str, side: str, values: jax.Array, scale: jax.Array, axis: int
) -> int:
  size, scale_size = values.shape[axis], scale.shape[axis]
  format = formats.infer(values.dtype, scale.dtype)
  if format is not None and scale_size * format.block_size == size:
    return format.block_size  # sizes may be symbolic
  if not isinstance(size, int) or not isinstance(scale_size, int):
    raise TypeError(
      f"{who}: with a symbolic contracting size {side} must be of a known"
      f" format, got {values.dtype}{list(values.shape)} and"
      f" {scale.dtype}{list(scale.shape)}; known: {formats.pairs_table()}"
    )
  if scale_size == 0 or size % scale_size:
    raise TypeError(
      f"{who}: k must be a multiple of the number of blocks, got {side}"
      f" {tuple(values.shape)} with a scale {tuple(scale.shape)}"
    )
  return size // scale_size


def _format(
  values_dtype: np.dtype,
  scale_dtype: np.dtype,
  block_size: int,
  has_global_scale: bool,
) -> formats.BlockFormat:
  """The known format, or one made up for what only xla serves."""
  values_dtype, scale_dtype = np.dtype(values_dtype), np.dtype(scale_dtype)
  known = formats.infer(values_dtype, scale_dtype)
  if known is not None and known.block_size == block_size:
    return known
  return formats.BlockFormat(
    name=f"{values_dtype.name} + {scale_dtype.name} per {block_size}",
    values_dtype=values_dtype,
    scale_dtype=scale_dtype,
    block_size=block_size,
    has_global_scale=has_global_scale,
  )


def _repeat(x: jax.Array, count: int, axis: int) -> jax.Array:
  shape = (*x.shape[:axis], x.shape[axis] * count, *x.shape[axis + 1 :])
  x = jnp.expand_dims(x, axis + 1)
  repeated = (*x.shape[: axis + 1], count, *x.shape[axis + 2 :])
  return jnp.broadcast_to(x, repeated).reshape(shape)


def _array(who: str, name: str, x: Any) -> jax.Array:
  is_array = hasattr(x, "shape") and hasattr(x, "dtype")
  if isinstance(x, scaled_array.ScaledArray) or not (
    is_array or isinstance(x, (int, float))
  ):
    raise TypeError(
      f"{who}: {name} must be an array, got {x!r}; a ScaledArray goes to"
      " block_scaled_dot"
    )
  return jnp.asarray(x)


def _as_float(who: str, name: str, x: jax.Array) -> jax.Array:
  """Integers of up to 8 bits become bf16, exactly; wider types become f32."""
  dtype = x.dtype
  if jnp.issubdtype(dtype, jnp.floating):
    return x.astype(jnp.float32) if dtype == np.float64 else x
  if dtype == np.bool_:
    return x.astype(jnp.bfloat16)
  if jnp.issubdtype(dtype, jnp.integer):
    is_narrow = ml_dtypes.iinfo(dtype).bits <= formats.BF16_SIGNIFICAND_BITS
    return x.astype(jnp.bfloat16 if is_narrow else jnp.float32)
  raise TypeError(f"{who}: {name} must have a real dtype, got {dtype}")


def _quantizable(who: str, name: str, x: Any) -> jax.Array:
  """A floating-point array that `quantize` takes; its gradient passes."""
  x = _array(who, name, x)
  if x.dtype in (*call.PLAIN_DTYPES, np.float64):
    return x
  return _as_float(who, name, x).astype(jnp.float32)


def _canonical_numbers(
  who: str,
  dimension_numbers: Any,
  lhs_shape: Sequence[Any],
  rhs_shape: Sequence[Any],
) -> call.DimensionNumbers:
  """Dimension numbers in tuples, checked against the shapes."""
  numbers = call.canonical_dimension_numbers(
    dimension_numbers, len(lhs_shape), len(rhs_shape)
  )
  call.validate_dimension_numbers(who, numbers, lhs_shape, rhs_shape)
  return numbers


def _result_dtype(who: str, dtype: Any) -> np.dtype:
  """f32, bf16 or f16; f64 means f32 unless x64 is enabled, as in JAX."""
  try:
    result = jax.dtypes.canonicalize_dtype(dtype)
  except TypeError:
    result = None
  if result not in call.RESULT_DTYPES:
    raise TypeError(
      f"{who}: preferred_element_type must be float32, bfloat16 or float16, got"
      f" {dtype!r}"
    )
  return np.dtype(result)


def _require_xla(who: str, implementation: str | None, what: str) -> None:
  """Refuses a forced kernel for a dot that has nothing quantized."""
  if implementation in (None, "xla"):
    return
  raise NotImplementedError(
    f"{who}: implementation={implementation!r} cannot serve {what}: that is"
    " lax.dot_general, and cudnn, triton and cpu multiply quantized operands"
    " only; leave implementation out"
  )


@contextlib.contextmanager
def _speaking_for(who: str) -> Iterator[None]:
  """Errors about a call that `who` makes are errors about `who`'s call."""
  try:
    yield
  except (TypeError, ValueError, NotImplementedError) as error:
    speaker, colon, message = str(error).partition(": ")
    if not colon or speaker not in (call.WHO, "quantize"):
      raise
    raise type(error)(f"{who}: {message}") from error

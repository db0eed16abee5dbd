# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Norms and activations, whose results may be quantized.

Without `out_format` they are plain JAX operations. With it, `quantize_p`
computes them as its prologue, so a kernel writes quantized bytes only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import scaled_array
from jaxplugin.core import error_context, formats
from jaxplugin.jaxext import tangents
from jaxplugin.quantization import arguments, operands, prologues
from jaxplugin.quantization import out_format as out_format_lib

_MOST: Final = float(np.finfo(np.float32).max)


def rms_norm(
  x: jax.Array,
  weight: jax.Array | None = None,
  *,
  residual: jax.Array | None = None,
  epsilon: float = 1e-6,
  out_format: out_format_lib.OutFormatLike | None = None,
) -> Any:
  """Divides rows by their root mean square; the result may be quantized.

  Computes in f32, along the last dimension::

    s = cast(x + residual, x.dtype)
    result = s * rsqrt(mean(s * s) + epsilon) * weight

  A NaN in a row of s makes the whole row NaN. An Inf becomes NaN, and the
  finite values beside it 0.

  Args:
    x: floats[..., k].
    weight: floats[k]; None is 1.
    residual: floats of x's shape. Two dtypes are promoted to one.
    epsilon: number added to the mean square.
    out_format: format, name or `jp.OutFormat` of a quantized result. If its
      global scale is not given, a second pass computes it.

  Returns:
    The result, in x's dtype. With `out_format` it is the `ScaledArray` that
    `quantize` of the f32 result returns, or what `OutFormat` says. With
    `residual`: (result, s).

  Raises:
    TypeError: If a dtype, rank or size does not fit.
    ValueError: If a parameter is invalid.
    NotImplementedError: If a quantized result is differentiated without
      derivative="straight_through".

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> x = jnp.arange(64.0).reshape(2, 32)
    >>> y, s = jp.nn.rms_norm(x, residual=x, out_format="mxfp8")
    >>> y.format.name, y.shape, s[0, :3]
    ('mxfp8', (2, 32), Array([0., 2., 4.], dtype=float32))

  See also:
    `jp.linear`, which takes the quantized result.

  Source: arXiv 1910.07467.
  """
  return _norm("rms_norm", x, weight, None, residual, epsilon, out_format)


def layer_norm(
  x: jax.Array,
  weight: jax.Array | None = None,
  bias: jax.Array | None = None,
  *,
  residual: jax.Array | None = None,
  epsilon: float = 1e-5,
  out_format: out_format_lib.OutFormatLike | None = None,
) -> Any:
  """Normalizes rows to mean 0, variance 1; the result may be quantized.

  Computes in f32, along the last dimension::

    s = cast(x + residual, x.dtype)
    c = s - mean(s)
    result = c * rsqrt(mean(c * c) + epsilon) * weight + bias

  A NaN or Inf in a row of s makes its whole row NaN.

  Args:
    x: floats[..., k].
    weight: floats[k]; None is 1.
    bias: floats[k]; None is 0.
    residual: as for `rms_norm`.
    epsilon: number added to the variance.
    out_format: as for `rms_norm`.

  Returns:
    As for `rms_norm`.

  Raises:
    TypeError: If a dtype, rank or size does not fit.
    ValueError: If a parameter is invalid.
    NotImplementedError: If a quantized result is differentiated without
      derivative="straight_through".

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> jp.nn.layer_norm(jnp.array([1.0, 3.0]), epsilon=0.0)
    Array([-1.,  1.], dtype=float32)

  See also:
    `jp.nn.rms_norm`.

  Source: arXiv 1607.06450.
  """
  return _norm("layer_norm", x, weight, bias, residual, epsilon, out_format)


def silu(
  x: jax.Array,
  *,
  bias: jax.Array | None = None,
  out_format: out_format_lib.OutFormatLike | None = None,
) -> Any:
  """Computes silu(x); the result may be quantized.

  Computes in f32::

    result = (x + bias) * sigmoid(x + bias)

  Args:
    x: floats[..., k].
    bias: floats[k]; None is 0.
    out_format: as for `rms_norm`.

  Returns:
    The result, in x's dtype. With `out_format` it is the `ScaledArray` that
    `quantize` of the f32 result returns, or what `OutFormat` says.

  Raises:
    TypeError: If a dtype, rank or size does not fit.
    NotImplementedError: If a quantized result is differentiated without
      derivative="straight_through".

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> jp.nn.silu(jnp.array([0.0, 30.0]))
    Array([ 0., 30.], dtype=float32)

  See also:
    `jp.nn.silu_and_mul`; `activation` of `jp.linear`, if a matmul computes x.

  Source: arXiv 1606.08415.
  """
  return _ungated("silu", x, bias, out_format)


def gelu(
  x: jax.Array,
  approximate: bool = True,
  *,
  bias: jax.Array | None = None,
  out_format: out_format_lib.OutFormatLike | None = None,
) -> Any:
  """Computes gelu(x); the result may be quantized.

  Computes in f32, for x with the bias added::

    result = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))

  and without `approximate`::

    result = x / 2 * (1 + erf(x / sqrt(2)))

  Args:
    x: as for `silu`.
    approximate: whether to compute the tanh approximation, as in `jax.nn.gelu`.
    bias: as for `silu`.
    out_format: as for `rms_norm`.

  Returns:
    As for `silu`.

  Raises:
    TypeError: If a dtype, rank or size does not fit.
    NotImplementedError: If a quantized result is differentiated without
      derivative="straight_through".

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> jp.nn.gelu(jnp.array([0.0, 30.0]))
    Array([ 0., 30.], dtype=float32)

  See also:
    `jp.nn.gelu_and_mul`; `activation` of `jp.linear`, if a matmul computes x.

  Source: arXiv 1606.08415, section 2.
  """
  who = error_context.who("gelu")
  error_context.require_bool(who, "approximate", approximate)
  return _ungated("gelu", x, bias, out_format, is_exact=not approximate)


def relu(
  x: jax.Array,
  *,
  bias: jax.Array | None = None,
  out_format: out_format_lib.OutFormatLike | None = None,
) -> Any:
  """Computes max(x, 0); the result may be quantized.

  Computes max(x + bias, 0) in f32. The derivative is 0 at 0, and NaN stays NaN.

  Args:
    x: as for `silu`.
    bias: as for `silu`.
    out_format: as for `rms_norm`.

  Returns:
    As for `silu`.

  Raises:
    TypeError: If a dtype, rank or size does not fit.
    NotImplementedError: If a quantized result is differentiated without
      derivative="straight_through".

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> jp.nn.relu(jnp.array([-1.0, 2.0]))
    Array([0., 2.], dtype=float32)

  See also:
    `jp.nn.silu`; `activation` of `jp.linear`, if a matmul computes x.
  """
  return _ungated("relu", x, bias, out_format)


def silu_and_mul(
  gate: jax.Array,
  up: jax.Array | None = None,
  *,
  bias: jax.Array | None = None,
  out_format: out_format_lib.OutFormatLike | None = None,
) -> Any:
  """Computes silu(gate) * up, as in SwiGLU; the result may be quantized.

  Computes in f32, after adding the bias::

    result = gate * sigmoid(gate) * up

  Args:
    gate: floats[..., k]. If `up` is None, floats[..., 2 * k] with the gates in
      the first half.
    up: floats of gate's shape. Two dtypes are promoted to one.
    bias: floats[2 * k]: the gate's bias, then the bias of `up`.
    out_format: as for `rms_norm`.

  Returns:
    The result [..., k], in gate's dtype. With `out_format` it is the
    `ScaledArray` that `quantize` of the f32 result returns, or what `OutFormat`
    says.

  Raises:
    TypeError: If a dtype, rank or size does not fit.
    NotImplementedError: If a quantized result is differentiated without
      derivative="straight_through".

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> x = jnp.array([0.0, 30.0, 1.0, 2.0])
    >>> jp.nn.silu_and_mul(x)
    Array([ 0., 60.], dtype=float32)

  See also:
    `jp.nn.gelu_and_mul`, `jp.nn.swigluoai`, `jp.nn.rms_norm`.

  Source: arXiv 2002.05202.
  """
  return _gated("silu_and_mul", gate, up, bias, out_format, "split")


def gelu_and_mul(
  gate: jax.Array,
  up: jax.Array | None = None,
  *,
  approximate: bool = True,
  bias: jax.Array | None = None,
  out_format: out_format_lib.OutFormatLike | None = None,
) -> Any:
  """Computes gelu(gate) * up, as in GeGLU; the result may be quantized.

  Computes `jp.nn.gelu(gate) * up` in f32, after adding the bias.

  Args:
    gate: as for `silu_and_mul`.
    up: as for `silu_and_mul`.
    approximate: as for `gelu`.
    bias: as for `silu_and_mul`.
    out_format: as for `rms_norm`.

  Returns:
    As for `silu_and_mul`.

  Raises:
    TypeError: If a dtype, rank or size does not fit.
    NotImplementedError: If a quantized result is differentiated without
      derivative="straight_through".

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> jp.nn.gelu_and_mul(jnp.array([0.0, 30.0]), jnp.array([1.0, 2.0]))
    Array([ 0., 60.], dtype=float32)

  See also:
    `jp.nn.silu_and_mul`.

  Source: arXiv 2002.05202.
  """
  who = error_context.who("gelu_and_mul")
  error_context.require_bool(who, "approximate", approximate)
  return _gated(
    "gelu_and_mul",
    gate,
    up,
    bias,
    out_format,
    "split",
    is_exact=not approximate,
  )


def swigluoai(
  gate: jax.Array,
  up: jax.Array | None = None,
  *,
  alpha: float = 1.702,
  limit: float = 7.0,
  interleaved: bool = True,
  bias: jax.Array | None = None,
  out_format: out_format_lib.OutFormatLike | None = None,
) -> Any:
  """Computes the gated activation of gpt-oss; the result may be quantized.

  Computes in f32, after adding the bias::

    gate, up = min(gate, limit), clip(up, -limit, limit)
    result = gate * sigmoid(alpha * gate) * (up + 1)

  Args:
    gate: floats[..., k]. If `up` is None, floats[..., 2 * k] with both.
    up: floats of gate's shape. Two dtypes are promoted to one.
    alpha: factor of the sigmoid's argument.
    limit: bound of gate and up, at least 0.
    interleaved: whether gate and up alternate if `up` is None. Otherwise the
      gates are the first half.
    bias: floats[2 * k] in the order of gate with both, or else the gate's bias
      first.
    out_format: as for `rms_norm`.

  Returns:
    As for `silu_and_mul`.

  Raises:
    TypeError: If a dtype, rank or size does not fit.
    ValueError: If a parameter is invalid.
    NotImplementedError: If a quantized result is differentiated without
      derivative="straight_through".

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> jp.nn.swigluoai(jnp.array([0.0, 1.0, 30.0, 2.0]))
    Array([ 0.      , 20.999859], dtype=float32)

  See also:
    `jp.nn.silu_and_mul`.

  Source: arXiv 2508.10925, section 2.2.
  """
  who = error_context.who("swigluoai")
  error_context.require_bool(who, "interleaved", interleaved)
  return _gated(
    "swigluoai",
    gate,
    up,
    bias,
    out_format,
    "interleaved" if interleaved else "split",
    alpha=_number(who, "alpha", alpha, -_MOST),
    limit=_number(who, "limit", limit, 0.0),
  )


def _norm(
  function: str,
  x: Any,
  weight: Any,
  bias: Any,
  residual: Any,
  epsilon: Any,
  out_format: out_format_lib.OutFormatLike | None,
) -> Any:
  who = error_context.who(function)
  epsilon = _number(who, "epsilon", epsilon, 0.0)
  x, residual = _alike(who, "x", x, "residual", residual)
  more = {
    "weight": _row(who, "weight", weight, x.shape[-1]),
    "bias": _row(who, "bias", bias, x.shape[-1]),
    "residual": residual,
  }
  return _computed(who, x, more, out_format, function=function, epsilon=epsilon)


def _gated(
  function: str,
  gate: Any,
  up: Any,
  bias: Any,
  out_format: out_format_lib.OutFormatLike | None,
  halves: str | None,
  *,
  is_exact: bool = False,
  **numbers: float,
) -> Any:
  who = error_context.who(function)
  function = f"exact_{function}" if is_exact else function
  gate, up = _alike(who, "gate", gate, "up", up)
  size = gate.shape[-1]
  if up is not None:
    halves, size = None, 2 * size
  elif size % 2:
    raise TypeError(
      f"{who}: gate must have an even last dimension if up is None, got shape"
      f" {tuple(gate.shape)}. Pass gate and up in one array, or pass up"
    )
  more = {"up": up, "bias": _row(who, "bias", bias, size)}
  return _computed(
    who, gate, more, out_format, function=function, halves=halves, **numbers
  )


def _ungated(
  function: str,
  x: Any,
  bias: Any,
  out_format: out_format_lib.OutFormatLike | None,
  *,
  is_exact: bool = False,
) -> Any:
  who = error_context.who(function)
  function = f"exact_{function}" if is_exact else function
  x, _ = _alike(who, "x", x, "", None)
  more = {"bias": _row(who, "bias", bias, x.shape[-1])}
  return _computed(who, x, more, out_format, function=function)


def _computed(
  who: str,
  x: jax.Array,
  more: Mapping[str, jax.Array | None],
  out_format: out_format_lib.OutFormatLike | None,
  **fields: Any,
) -> Any:
  """Computes the prologue of these fields, and may quantize its result."""
  given = {n: a for n in prologues.OPERANDS if (a := more.get(n)) is not None}
  prologue = prologues.Prologue(operands=tuple(given), **fields)
  dtype = x.dtype
  if dtype not in formats.FLOAT_DTYPES:  # f64
    x, given = jax.tree.map(lambda a: a.astype(jnp.float32), (x, given))
  with error_context.in_function(who):
    if out_format is None:
      result, *sums = _plain(x, given, prologue)
      result = result.astype(dtype)
    else:
      out = out_format_lib.OutFormat.of(who, out_format)
      result, *sums = _quantized(who, x, given, prologue, out)
  return (result, *(s.astype(dtype) for s in sums)) if sums else result


@functools.partial(jax.jit, static_argnames="prologue")
def _plain(
  x: jax.Array, more: Mapping[str, jax.Array], prologue: prologues.Prologue
) -> list[jax.Array]:
  return prologues.compute(prologue, x, more)


def _quantized(
  who: str,
  x: jax.Array,
  more: Mapping[str, jax.Array],
  prologue: prologues.Prologue,
  out: out_format_lib.OutFormat,
) -> list[Any]:
  """Returns the quantized result as `out` says, and the sum if any."""
  shape = prologue.shape_of(x.shape)
  format = out.block_format
  axes = out.axes_in(who, shape)
  sizes = [shape[axis] for axis in axes]
  source = None if out.derivative is None else _source(x, more, prologue)
  block_sizes = {format.along(size).block_size for size in sizes}
  if (
    out.scale_rounding not in arguments.SCALE_ROUNDINGS
    or format.is_square
    or not format.scales_codes
    or len(block_sizes) > 1
    or (format.may_be_short and any(n % b for n in sizes for b in block_sizes))
  ):
    # `quantize` does not compute these with `quantize_p`, or not in one call.
    y, *sums = _plain(x, more, prologue)
    return [out_format_lib.quantized(who, y, out, source), *sums]
  y_type: Any = jax.ShapeDtypeStruct(shape, np.float32)
  arguments.validate(who, y_type, format, axes, out.scale_rounding)
  arguments.validate_key(who, out.key, format)
  packed = arguments.whether_packed(who, out.packed, format, sizes[0])
  if source is None:
    x, more, global_scale = tangents.without_derivative(
      (x, more, out.global_scale), f"{who}: {out_format_lib.NO_DERIVATIVE}"
    )
  else:
    global_scale = lax.stop_gradient(out.global_scale)
  spec_of = lambda axis: operands.QuantizeSpec.along_axis(
    axis, shape, format, scale_rounding=out.scale_rounding
  )
  found = operands.quantize_all(
    prologues.PrologueCall(prologue=prologue, x=x, more=more),
    tuple(map(spec_of, axes)),
    (out.key,) * len(axes),
    global_scale,
    packed=packed,
    for_products=False,
    returns_amax=out.returns_amax,
  )
  arrays = [scaled_array.replace(found.pop(0), format=format) for _ in axes]
  amax = [found.pop(0)] if out.returns_amax else []
  result: Any = tuple(arrays) if len(arrays) == 2 else arrays[0]
  result = (result, *amax) if amax else result
  return [out_format_lib.with_source(result, out, source), *found]


# The backward pass reads x, not f32 intermediates.
@functools.partial(jax.checkpoint, static_argnums=2)
def _source(
  x: jax.Array, more: Mapping[str, jax.Array], prologue: prologues.Prologue
) -> jax.Array:
  return prologues.compute(prologue, x, more)[0]


def _alike(
  who: str, name: str, x: Any, other_name: str, other: Any
) -> tuple[jax.Array, jax.Array | None]:
  """Returns x and the other array or None, in one dtype."""
  x = _floats(who, name, x)
  if x.ndim == 0:
    raise TypeError(
      f"{who}: {name} must have rank 1 or more, got a scalar. Pass rows"
    )
  if other is None:
    return x, None
  other = _floats(who, other_name, other)
  if other.shape != x.shape:
    raise TypeError(
      f"{who}: {other_name} must have the shape of {name}, got"
      f" {tuple(other.shape)} and {tuple(x.shape)}. Broadcast it first"
    )
  dtype = jnp.promote_types(x.dtype, other.dtype)
  return x.astype(dtype), other.astype(dtype)


def _row(who: str, name: str, row: Any, size: Any) -> jax.Array | None:
  if row is None:
    return None
  row = _floats(who, name, row)
  if row.shape != (size,):
    raise TypeError(
      f"{who}: {name} must have shape ({size},), got {tuple(row.shape)}. Pass"
      " one number for each column"
    )
  return row.astype(jnp.float32)


def _floats(who: str, name: str, x: Any) -> jax.Array:
  if not isinstance(x, scaled_array.ScaledArray):
    x = scaled_array.as_array(who, name, x)
    if x.dtype in (*formats.FLOAT_DTYPES, np.float64):
      return x
  raise TypeError(
    f"{who}: {name} must be float32, bfloat16, float16 or float64, got"
    f" {error_context.shown(x)}. Cast or dequantize it first"
  )


def _number(who: str, name: str, value: Any, least: float) -> float:
  """Returns a number that is at least `least` and finite in f32."""
  is_number = isinstance(value, (int, float, np.number)) and not isinstance(
    value, bool
  )
  if not (is_number and least <= value <= _MOST):
    raise ValueError(
      f"{who}: {name} must be a number from {least:.8g} to {_MOST:.8g}, got"
      f" {error_context.shown(value)}. Pass a Python number in this range"
    )
  return float(value)

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`linear`: a layer's product with a quantized weight.

XLA:CPU passes whole arrays to a custom call, so it copies the slice that a
`lax.scan` over weights takes at each step. The kernels of the ragged dot take
the stack, and read only groups with rows. A layer is then the only group with
rows. If these kernels do not support a call, the layer is sliced.

The lowering decides (`operation.alternatives`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from jaxplugin import dot
from jaxplugin.arrays import scaled_array
from jaxplugin.core import error_context, formats
from jaxplugin.dot import arguments, problems
from jaxplugin.dot.backends import cpu
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import alternatives, primitive
from jaxplugin.quantization import out_format as out_format_lib
from jaxplugin.quantization import quantized_results
from jaxplugin.ragged import api as ragged
from jaxplugin.runtime import cpu_library

WHO: Final = "linear"


def linear(
  x: dot.Operand,
  w_q: dot.Operand,
  bias: jax.Array | None = None,
  activation: problems.Activation | None = None,
  *,
  layer: Any = None,
  preferred_element_type: Any = None,
  precision: Any = None,
  out_sharding: Any = None,
  reduce_dtype: Any = None,
  implementation: str | None = None,
  out_format: out_format_lib.OutFormatLike | None = None,
) -> Any:
  """Multiplies rows by a quantized weight, as a linear layer does.

  The formula is that of `block_scaled_dot`, with its bound and derivatives::

    result = cast(activation(x @ w_q^T + bias))

  Args:
    x: f32, bf16, f16 or f64[..., k], or a `ScaledArray` blocked along k. f64 is
      rounded to f32.
    w_q: a `ScaledArray` [n, k] blocked along k. A kernel [k, n] becomes one by
      `quantize(kernel.T, format)`. It may be a plain array if x is quantized.
    bias: f32, bf16 or f16[n].
    activation: None, "relu", "gelu" (tanh approximation) or "silu".
    layer: integer[]. If given, w_q is a stack [layers, n, k], bias is
      [layers, n], and this layer is used. Under `jit` it is clamped.
      x must then be unquantized or of rank 2.
    preferred_element_type: f32, bf16 or f16. Default: the dtype of x, or f32 if
      x is quantized or f64.
    precision: as for `block_scaled_dot`.
    out_sharding: as for `block_scaled_dot`.
    reduce_dtype: as for `block_scaled_dot`.
    implementation: backend; None chooses.
    out_format: as for `block_scaled_dot`.

  Returns:
    preferred_element_type[..., n], or a quantized result.

  Raises:
    TypeError: If a rank, dtype or shape does not fit.
    ValueError: If a parameter is invalid, or an NVFP4 scale is negative.
    NotImplementedError: If the named backend does not support the call.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> w_q = jp.quantize(jnp.ones((3, 32)), "mxfp4")
    >>> jp.linear(jnp.ones((2, 32), jnp.bfloat16), w_q)
    Array([[32, 32, 32],
           [32, 32, 32]], dtype=bfloat16)

  See also:
    `jp.block_scaled_dot`; the page "Write a decode loop" for `layer`.
  """
  with error_context.in_function(WHO):
    lhs, rhs = dot.as_operand("x", x), dot.as_operand("w_q", w_q)
    _validate_ranks(lhs, rhs, layer)
    for name, operand in (("x", lhs), ("w_q", rhs)):
      if not isinstance(operand, scaled_array.ScaledArray):
        if operand.dtype not in formats.FLOAT_DTYPES:
          raise TypeError(
            f"{WHO}: {name} must be float32, bfloat16, float16 or a"
            f" ScaledArray, got {operand.dtype}{list(operand.shape)}; cast it,"
            " or quantize it"
          )
      elif operand.axis != operand.ndim - 1:
        raise TypeError(
          f"{WHO}: {name} must be blocked along k, its last dimension, got"
          f" {name} {tuple(operand.shape)} blocked along dimension"
          f" {operand.axis}; {_blocked_remedy(name, operand)}"
        )
    if not any(isinstance(x, scaled_array.ScaledArray) for x in (lhs, rhs)):
      raise TypeError(
        f"{WHO}: x or w_q must be quantized, got x {lhs.dtype}"
        f"{list(lhs.shape)} and w_q {rhs.dtype}{list(rhs.shape)}. Pass"
        ' jaxplugin.quantize(w, "mxfp8"), or compute x @ w.T'
      )
    _validate_sizes(lhs, rhs)
    out = None
    if out_format is not None:
      out = out_format_lib.OutFormat.of_matmul(
        WHO, out_format, preferred_element_type
      )
      preferred_element_type = jnp.float32
    if preferred_element_type is None:
      is_plain = not isinstance(lhs, scaled_array.ScaledArray)
      preferred_element_type = lhs.dtype if is_plain else jnp.float32
    options: dict[str, Any] = dict(
      activation=activation,
      preferred_element_type=preferred_element_type,
      precision=precision,
      out_sharding=out_sharding,
      reduce_dtype=reduce_dtype,
      implementation=implementation,
    )
    if layer is not None:
      _require_whole_layers(rhs)
      return layer_dot(
        lhs,
        rhs,
        _layer_number(layer, rhs.shape[0]),
        _stacked_bias(bias, rhs),
        out=out,
        **options,
      )
    return dot.block_scaled_dot(
      lhs,
      rhs,
      dimension_numbers=(((lhs.ndim - 1,), (1,)), ((), ())),
      bias=bias,
      out_format=out,
      **options,
    )


def _validate_ranks(lhs: Any, rhs: Any, layer: Any) -> None:
  rank, names, remedy = 2, "(n, k)", "call block_scaled_dot for other ranks"
  if layer is not None:
    rank, names = 3, "(layers, n, k) if layer is given"
    remedy = "leave layer out, or pass a stack of weights"
  elif rhs.ndim == 3:
    remedy = "pass layer= for a stack, or call block_scaled_dot"
  if lhs.ndim < 1 or rhs.ndim != rank:
    raise TypeError(
      f"{WHO}: x must be (..., k) and w_q {names}, got x {tuple(lhs.shape)}"
      f" and w_q {tuple(rhs.shape)}; {remedy}"
    )
  if layer is not None and not isinstance(rhs, scaled_array.ScaledArray):
    raise TypeError(
      f"{WHO}: w_q must be a ScaledArray if layer is given, got"
      f" {rhs.dtype}{list(rhs.shape)}; pass w_q[layer] and leave layer out"
    )


def _blocked_remedy(name: str, operand: scaled_array.ScaledArray) -> str:
  if operand.axis == operand.ndim - 2:
    order = (*range(operand.ndim - 2), operand.ndim - 1, operand.ndim - 2)
    return f"pass {name}.transpose{order}"
  return "quantize it along its last axis"


def _validate_sizes(lhs: Any, rhs: Any) -> None:
  """Raises TypeError unless both have the same k."""
  if lhs.shape[-1] == rhs.shape[-1]:
    return
  kernel = "kernel.T for a kernel (k, n)"
  if rhs.ndim == 3:
    kernel = "jnp.swapaxes(kernels, 1, 2) for kernels (layers, k, n)"
  verb = "quantize" if isinstance(rhs, scaled_array.ScaledArray) else "pass"
  remedy = arguments.sizes_remedy(
    *(lhs, rhs, (lhs.ndim - 1, rhs.ndim - 1)),
    names=("x", "w_q"),
    transposed=f"weights are (n, k): {verb} {kernel}",
  )
  raise TypeError(
    f"{WHO}: x (..., k) and w_q (..., n, k) must have the same k, got x"
    f" {tuple(lhs.shape)} and w_q {tuple(rhs.shape)}{remedy}"
  )


def _layer_number(layer: Any, count: int) -> jax.Array:
  """i32[] in range; raises TypeError unless it is one integer."""
  number = dot.integers("layer", layer)
  if number.ndim or not jnp.issubdtype(number.dtype, jnp.integer):
    raise TypeError(
      f"{WHO}: layer must be one integer, got"
      f" {number.dtype}{list(number.shape)}"
    )
  # As Python's integer: within a trace a comparison of arrays is traced.
  if not isinstance(layer, jax.core.Tracer) and not 0 <= int(layer) < count:
    raise ValueError(
      f"{WHO}: layer must be at least 0 and below the {count} layers of w_q,"
      f" got {int(layer)}; count layers from 0"
    )
  return jnp.clip(number, 0, count - 1)


def _require_whole_layers(stack: scaled_array.ScaledArray) -> None:
  """Raises NotImplementedError if the type divides a stack's layers."""
  spec = mesh_axes.spec_of(stack.values)
  if spec[0]:
    whole = mesh_axes.partition_spec(((), *spec[1:]))
    raise NotImplementedError(
      f"{WHO}: w_q must have all its layers on each device if layer is given,"
      f" got a stack {tuple(stack.shape)} divided over the explicit mesh axes"
      f" {spec[0]}; pass jp.shard(w_q, {whole})"
    )


def _stacked_bias(bias: Any, rhs: Any) -> jax.Array | None:
  if bias is None:
    return None
  bias = dot.as_operand("bias", bias)
  if tuple(bias.shape) != tuple(rhs.shape[:2]):
    raise TypeError(
      f"{WHO}: bias must have a row for each layer, shape (layers, n)"
      f" {tuple(rhs.shape[:2])}, got {tuple(bias.shape)}; pass the biases of"
      " all layers, or leave layer out and pass w_q[layer]"
    )
  return bias


def layer_dot(
  x: dot.Operand,
  stack: scaled_array.ScaledArray,
  layer: jax.Array,
  bias: jax.Array | None,
  *,
  out_sharding: Any = None,
  out: out_format_lib.OutFormat | None = None,
  **options: Any,
) -> Any:
  """Multiplies x (..., k) by stack[layer] (n, k), and adds bias[layer].

  Args:
    x: plain, or blocked along k.
    stack: (layers, n, k), blocked along k.
    layer: integer[], in range.
    bias: floats[layers, n], or None.
    out_sharding: see `block_scaled_dot`. If given, the layer is sliced, because
      a device's part of a stack may not be whole groups.
    out: how to quantize the result, or None.
    **options: activation, preferred_element_type, precision, reduce_dtype and
      implementation, see `block_scaled_dot`.
  """
  if isinstance(x, scaled_array.ScaledArray) and x.offset is not None:
    x = x.dequantize()
  if out is not None and out.derivative is not None:
    operands = x, stack, layer, bias
    source = layer_dot(*operands, out_sharding=out_sharding, **options)
    if options["activation"] is not None:  # as in `quantized_results.compute`
      return out_format_lib.quantized("linear", source, out)
    operands, bare = lax.stop_gradient((operands, out))
    bare = dataclasses.replace(bare, derivative=None)
    result = layer_dot(
      *operands, out_sharding=out_sharding, out=bare, **options
    )
    return out_format_lib.with_source(result, out, source)
  args = x, stack, layer, bias, out
  if out_sharding is not None:
    return _sliced(*args, out_sharding=out_sharding, **options)
  if not _has_groups(x, stack, **options):
    return _sliced(*args, **options)
  leaves, tree = jax.tree.flatten(args)
  forms = _Layer(
    tree=tree,
    options=tuple(options.items()),
    is_plain=not isinstance(x, scaled_array.ScaledArray) and out is None,
  )
  return alternatives.compute(forms, *leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layer(alternatives.Forms):
  """The matmul by a slice of the stack, and by a group of the stack.

  Its operands are the leaves of x, stack, layer, bias and out.

  Attributes:
    tree: structure of these arguments.
    options: options of `layer_dot`.
    is_plain: whether x is a plain array, and so is the result.
  """

  tree: Any
  options: tuple[tuple[str, Any], ...]
  is_plain: bool

  @property
  def rows(self) -> frozenset[int]:
    return frozenset([0] if self.is_plain else ())

  def operations(self, *operands: Any) -> Any:
    args = jax.tree.unflatten(self.tree, operands)
    return _sliced(*args, **dict(self.options))

  def kernel(
    self, context: primitive.LoweringContext
  ) -> Callable[..., Any] | None:
    target = context.target
    stack = jax.tree.unflatten(self.tree, context.avals_in)[1]
    if cpu_library.refusal(target) or _refusal(stack):
      return None

    def function(*operands: Any) -> Any:
      args = jax.tree.unflatten(self.tree, operands)
      return _in_place(*args, **dict(self.options))

    return function


def _sliced(
  x: Any, stack: Any, layer: Any, bias: Any, out: Any, **options: Any
) -> Any:
  """Slices the layer, and calls `block_scaled_dot`."""
  return dot.block_scaled_dot(
    x,
    stack[layer],
    dimension_numbers=(((x.ndim - 1,), (1,)), ((), ())),
    bias=None if bias is None else bias[layer],
    out_format=out,
    **options,
  )


def _has_groups(x: Any, stack: Any, *, implementation: Any, **_: Any) -> bool:
  """Whether the layers can be groups of a ragged dot."""
  if not error_context.is_one_of(implementation, (None, cpu.BACKEND.name)):
    return False
  if isinstance(x, scaled_array.ScaledArray) and x.ndim != 2:
    return False  # cannot be reshaped to rows
  for side in (x, stack):
    if isinstance(side, scaled_array.ScaledArray) and (
      side.surrogate is not None
      or (side is x and side.format.codebook is not None)
      or _refusal(side) is not None
    ):
      return False
  scale = scaled_array.full_global_scale(stack)
  return scale is None or scale.shape[1:] == (1, 1)


def _refusal(side: Any) -> str | None:
  """Returns why kernels cannot read an array along its last axis, or None."""
  k = side.shape[-1]
  format = side.format.along(k)
  return cpu_library.format_refusal(format, k, reads_codebooks=True)


def _in_place(
  x: Any,
  stack: Any,
  layer: Any,
  bias: Any,
  out: Any,
  *,
  implementation: Any,
  **options: Any,
) -> Any:
  """Calls `ragged_dot` with all rows in the group `layer`."""
  del implementation  # the lowering uses this jaxpr only for the CPU kernels
  lead = x.shape[:-1]
  layers, n, _ = stack.shape
  of_ragged_dot = None
  if out is not None and not quantized_results.refusal((*lead, n), out):
    of_ragged_dot = dataclasses.replace(out, axis=-1)
  if not isinstance(x, scaled_array.ScaledArray):
    x = x.reshape(math.prod(lead), x.shape[-1])
  sizes = jnp.where(jnp.arange(layers, dtype=jnp.int32) == layer, x.shape[0], 0)
  result = ragged.ragged_dot(
    x, stack, sizes, bias=bias, out_format=of_ragged_dot, **options
  )
  if of_ragged_dot is None or out is None:
    result = result.reshape(*lead, n)
    return (
      result if out is None else out_format_lib.quantized("linear", result, out)
    )
  array, *amax = result if out.returns_amax else (result,)
  to_rank = lambda leaf: leaf.reshape(*lead, leaf.shape[1])
  global_scale = array.global_scale
  if global_scale is not None:
    global_scale = global_scale.reshape((1,) * (len(lead) + 1))
  array = scaled_array.ScaledArray(
    to_rank(array.values), to_rank(array.scale), global_scale, array.format
  )
  return (array, *amax) if amax else array

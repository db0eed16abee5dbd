# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prologues of quantizing, their operands, and their results in f64."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from jaxplugin.core import blocking, formats
from jaxplugin.quantization import prologues, quantize_primitive

Prologue = prologues.Prologue
SHAPE = (2, 64, 96)
# Kernels and XLA's operations differ in the last bits of f32, so a value next
# to a tie has another code: the next one, in few places.
_STEP = 2.0**-3
_AMAX_ERROR = 16 * 2.0**-24  # roundings of the largest result
_MOST_OTHER = 0.002

# At least one of each function, operand and order of halves.
CASES = (
  Prologue(function="rms_norm", epsilon=1e-6),
  Prologue(function="rms_norm", operands=("weight", "residual"), epsilon=1e-6),
  Prologue(function="layer_norm", operands=("residual",), epsilon=1e-5),
  Prologue(function="layer_norm", operands=("weight", "bias"), epsilon=1e-5),
  Prologue(function="silu_and_mul", operands=("up",)),
  Prologue(function="silu_and_mul", halves="split"),
  Prologue(function="gelu_and_mul", operands=("bias",), halves="split"),
  Prologue(function="gelu_and_mul", operands=("up", "bias")),
  Prologue(function="swigluoai", operands=("bias",), halves="interleaved"),
  Prologue(function="swigluoai", operands=("up",), alpha=1.5, limit=2.0),
  Prologue(function="exact_gelu_and_mul", operands=("bias",), halves="split"),
  Prologue(function="exact_gelu", operands=("bias",)),
  Prologue(function="silu"),
  Prologue(function="gelu", operands=("bias",)),
  Prologue(function="relu", operands=("bias",)),
)


def _gradient(function, operand, *operands, **fields):
  return Prologue(
    function=function,
    operands=(*operands, "cotangent"),
    gradient=operand,
    **fields,
  )


GRADIENTS = (
  _gradient("silu_and_mul", "x", "up"),
  _gradient("silu_and_mul", "up", "up"),
  _gradient("silu_and_mul", "x", "bias", halves="split"),
  _gradient("gelu_and_mul", "x", "up", "bias"),
  _gradient("gelu_and_mul", "x", halves="split"),
  # With limit=2, scales are ties of E4M3: they depend on the last bits.
  _gradient("swigluoai", "up", "up", alpha=1.5, limit=1.75),
  _gradient("swigluoai", "x", "bias", halves="interleaved", limit=1.5),
  _gradient("exact_gelu_and_mul", "x", "up", "bias"),
  _gradient("exact_gelu_and_mul", "up", "up"),
  _gradient("rms_norm", "x", "weight", "residual", epsilon=1e-6),
  _gradient("rms_norm", "x", epsilon=1e-6),
  _gradient("layer_norm", "x", "weight", epsilon=1e-5),
  _gradient("layer_norm", "x", "residual", epsilon=1e-5),
  _gradient("exact_gelu", "x"),
  _gradient("silu", "x", "bias"),
  _gradient("gelu", "x"),
  _gradient("relu", "x"),
)
ALL = (*CASES, *GRADIENTS)


def operands(prologue, shape, dtype, seed=0):
  """Returns x and {name: operand} for a result of a shape."""
  rng = np.random.default_rng(seed)
  x = jax.device_put(
    np.asarray(3 * rng.standard_normal(prologue.x_shape(shape)), dtype)
  )
  types = prologues.operand_types(prologue, shape, np.dtype(dtype))
  more = {
    name: jax.device_put(np.asarray(rng.standard_normal(size), kind))
    for name, (size, kind) in zip(prologue.operands, types, strict=True)
  }
  return x, more


def exact(prologue, x, more):
  """Returns a prologue's result in f64, and x + residual in x's dtype."""
  f64 = lambda a: np.asarray(a).astype(np.float64)
  p, values, total = prologue, f64(x), None
  if p.is_norm_gradient:
    h, factor = _standardized(p, values)
    d = f64(more["cotangent"]) * f64(more.get("weight", 1))
    mean = lambda a: a.mean(-1, keepdims=True)
    change = d - h * mean(d * h)
    change -= mean(d) if p.function == "layer_norm" else 0
    return factor * change + f64(more.get("residual", 0)), None
  if "residual" in more:
    total = (values + f64(more["residual"])).astype(x.dtype)
    values = f64(total)
  if p.is_norm:
    values, _ = _standardized(p, values)
    return values * f64(more.get("weight", 1)) + f64(more.get("bias", 0)), total
  k = values.shape[-1] // (2 if p.halves else 1)

  def halves(a):
    if p.halves == "interleaved":
      return a[..., ::2], a[..., 1::2]
    return a[..., :k], a[..., k:]

  gate, up = halves(values) if p.halves else (values, f64(more.get("up", 1)))
  if "bias" in more:
    biases = f64(more["bias"])
    gate_bias, up_bias = halves(biases) if p.is_gated else (biases, 0)
    gate, up = gate + gate_bias, up + up_bias
  if p.gradient is None:
    return _activated(p, gate, up), None
  # The derivative is exact: the square of the step is nothing in f64. That with
  # respect to a gate does not change where the sigmoid does not.
  step, cotangent = 1e-200, f64(more["cotangent"])
  most = 8 if p.activation == "gelu" else 40
  near = np.clip(gate, -most, most)
  of_gate, of_up = (
    cotangent * _activated(p, *moved).imag / step
    for moved in ((near + step * 1j, up), (gate, up + step * 1j))
  )
  if p.halves == "interleaved":
    return np.stack([of_gate, of_up], -1).reshape(values.shape), None
  if p.halves:
    return np.concatenate([of_gate, of_up], -1), None
  return of_up if p.gradient == "up" else of_gate, None


def _standardized(p, values):
  """Returns rows of a norm without its weight, and their factors."""
  if p.function == "layer_norm":
    values = values - values.mean(-1, keepdims=True)
  square = np.mean(values**2, -1, keepdims=True)
  factor = 1 / np.sqrt(square + p.epsilon)
  return values * factor, factor


def summed(prologue, x, more):
  """Returns the rows in f64 that `column_sums` adds."""
  if not prologue.is_norm_gradient:
    return exact(prologue, x, more)[0]
  h, _ = _standardized(prologue, np.asarray(x).astype(np.float64))
  return np.asarray(more["cotangent"]).astype(np.float64) * h


def statistics(prologue, arrays):
  """Returns f32[rows, 5], as `prologues.gradient_statistics`."""
  x = np.asarray(arrays["x"]).astype(np.float64)
  h, inverse = _standardized(prologue, x)
  d = np.asarray(arrays["cotangent"]).astype(np.float64)
  d = d * arrays.get("weight", 1)
  mean = lambda a: a.mean(-1, keepdims=True)
  is_centered = prologue.function == "layer_norm"
  means = [mean(a) * is_centered for a in (x, d)]
  numbers = [means[0], np.ones_like(inverse), inverse, means[1], mean(d * h)]
  return np.concatenate(numbers, -1).reshape(-1, 5).astype(np.float32)


def _activated(p, gate, up):
  """Returns an activation in f64, or of complex numbers."""
  if p.function == "swigluoai":
    gate = _limited(gate, -np.inf, p.limit)
    up = _limited(up, -p.limit, p.limit)
    return gate / (1 + np.exp(-p.alpha * gate)) * (up + 1)
  if p.activation == "silu":
    return gate / (1 + np.exp(-gate)) * up
  if p.function == "relu":
    return np.where(gate.real > 0, gate, np.maximum(gate.real, 0))
  if p.activation == "exact_gelu":
    x, share = gate.real, scipy.special.ndtr(gate.real)
    y = x * share
    if np.iscomplexobj(gate):
      density = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
      y = y + 1j * gate.imag * (share + x * density)
    return y * up
  exponent = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
  return gate / (1 + np.exp(-exponent)) * up


def _limited(x, low, high):
  """Clips real parts. A number on a limit has half of its imaginary part."""
  real = np.clip(x.real, low, high)
  passes = np.where(x.real == real, 1, 0) - 0.5 * np.isin(x.real, (low, high))
  return real + 1j * passes * x.imag if np.iscomplexobj(x) else real


def assert_sums(got, prologue, x, more, start):
  """Asserts that sums of columns over dimensions from `start` on are near f64.

  Each addition rounds once. Each row may have the error of the largest result.
  """
  y = summed(prologue, x, more)
  over = tuple(range(start, y.ndim - 1))
  count = y.size // y.sum(over).size
  bound = (count * np.abs(y).sum(over) + 16 * count * np.abs(y).max()) * 2**-24
  np.testing.assert_array_less(np.abs(got - y.sum(over)), bound)


def assert_gradient(got, prologue, x, more):
  """Asserts that the floats of a norm's gradient are near f64."""
  y = exact(prologue, x, more)[0]
  rounding = float(jnp.finfo(got.dtype).eps) / 2
  bound = rounding * np.abs(y) + 2 * _AMAX_ERROR * np.abs(y).max()
  np.testing.assert_array_less(np.abs(np.asarray(got, np.float64) - y), bound)


def along(*dims, merged=False):
  """Returns blockings along dimensions of SHAPE."""
  found = [blocking.Blocking.along(d, len(SHAPE), 32) for d in dims]
  if merged:
    found.append(blocking.Blocking(dims=(0, 1), lead=(2,), multiple=32))
  return tuple(found)


@dataclasses.dataclass(frozen=True)
class KernelCase:
  """A call that quantizes a prologue's result by Triton kernels.

  Attributes:
    kernel: what follows "quantize_" in the name of the launched kernel.
    prologue: computed before quantizing.
    call: function of `args()`. It returns values and scale of each blocking,
      and amax, sums of columns, and the prologue's sum, each or None. With
      prologue=None it only quantizes x.
    others: the other launched kernels.
    column_sums: of the problem.
  """

  kernel: str
  prologue: Prologue
  call: Callable
  others: tuple[str, ...] = ()
  column_sums: int | None = None

  def args(self):
    """Returns x and {name: operand}."""
    return operands(self.prologue, SHAPE, jnp.bfloat16)

  def check(self, test, found, wanted, args):
    """Asserts that results of the kernels agree with those of operations."""
    quantized, amax, sums, total = found
    expected, other_amax, other_total = wanted
    for got, want in zip(quantized, expected, strict=True):
      (values, scale), (other, other_scale) = (
        [np.asarray(a).astype(np.float32) for a in each] for each in (got, want)
      )
      np.testing.assert_array_equal(scale, other_scale)
      test.assertLess(np.mean(values != other), _MOST_OTHER)
      np.testing.assert_allclose(values, other, rtol=_STEP, atol=0.5)
    test.assertEqual(amax is not None, self.kernel.endswith("amax"))
    if amax is not None:
      largest = np.abs(exact(self.prologue, *args)[0]).max()
      for each in (amax, other_amax):
        np.testing.assert_allclose(each, largest, rtol=_AMAX_ERROR)
    if self.column_sums is not None:
      assert_sums(sums, self.prologue, *args, self.column_sums)
    test.assertEqual(total is None, not self.prologue.returns_sum)
    if self.prologue.is_norm_gradient:
      assert_gradient(total, self.prologue, *args)
    elif total is not None:
      np.testing.assert_array_equal(
        np.asarray(total, np.float32), np.asarray(other_total, np.float32)
      )


def kernel_cases():
  """Returns a case of each kernel that computes a prologue."""
  norm, with_residual, with_bias = CASES[1:4]
  with_up, gated = CASES[7:9]
  of_gate, of_up, of_halves = GRADIENTS[:3]
  of_norm, _, _, of_layer_norm = (p for p in GRADIENTS if p.is_norm)
  silu, gelu, relu = CASES[-3:]
  of_silu, _, of_relu = GRADIENTS[-3:]
  both, last, nvfp4 = along(2, merged=True), along(2), formats.NVFP4

  def case(
    kernel, prologue, blockings=last, format=formats.MXFP8, given=None,
    others=(), returns_amax=False, column_sums=None, **options,
  ):  # fmt: skip
    def call(x, more, prologue=prologue):
      of_prologue = {"returns_amax": returns_amax, "column_sums": column_sums}
      found, *rest = quantize_primitive.produce(
        x,
        None if given is None else jnp.float32(given),
        blockings=blockings,
        format=format,
        packed=False,
        prologue=prologue,
        more=more,
        **options,
        **(of_prologue if prologue is not None else {}),
      )
      return [each[:2] for each in found], *rest

    return KernelCase(kernel, prologue, call, others, column_sums)

  # fmt: off
  return (
    case("rms_norm_mxfp8_amax", norm, returns_amax=True),
    case("rms_norm_nvfp4", norm, format=nvfp4, given=0.02),
    case("rms_norm_mxfp8", norm),
    case("layer_norm_mxfp8", with_bias),
    case("gelu_and_mul_mxfp8", with_up, along(1)),
    case("swigluoai_mxfp8_stochastic", gated, keys=[jax.random.key(3)]),
    case("both_gelu_and_mul_nvfp4", with_up, both, nvfp4,
         others=("finite_amax_both",)),
    case("both_swigluoai_mxfp8_amax", gated, both, returns_amax=True),
    case("both_rms_norm_mxfp8", norm, along(2, 1),
         others=("rms_norm_statistics",)),
    case("both_layer_norm_nvfp4_amax", with_residual, both, nvfp4,
         others=("layer_norm_statistics", "finite_amax_both"),
         returns_amax=True),
    case("layer_norm_mxfp8", with_bias, along(1),
         others=("layer_norm_statistics",)),
    case("silu_and_mul_gradient_mxfp8", of_gate),
    case("silu_and_mul_gradient_mxfp8", of_up, along(1)),
    case("both_silu_and_mul_gradient_mxfp8", of_gate, both),
    case("both_swigluoai_gradient_nvfp4", GRADIENTS[5], both, nvfp4,
         others=("finite_amax_both",)),
    case("both_silu_and_mul_gradient_nvfp4", of_halves, both, nvfp4, 0.02),
    case("exact_gelu_and_mul_mxfp8", CASES[-5]),
    case("exact_gelu_gradient_mxfp8", GRADIENTS[-4], along(1)),
    case("silu_nvfp4", silu, format=nvfp4, given=0.02),
    case("both_gelu_mxfp8", gelu, both),
    case("relu_mxfp8_amax", relu, along(1), returns_amax=True),
    case("silu_gradient_mxfp8", of_silu, along(1)),
    case("both_relu_gradient_nvfp4", of_relu, both, nvfp4,
         others=("finite_amax_both",)),
    case("silu_gradient_mxfp8_sums", of_silu, column_sums=0),
    case("exact_gelu_gradient_mxfp8_sums", GRADIENTS[-4], along(1),
         column_sums=1),
    case("both_silu_and_mul_gradient_nvfp4_sums", of_halves, both, nvfp4, 0.02,
         column_sums=0),
    case("both_rms_norm_gradient_mxfp8_sums", of_norm, both, column_sums=0),
    case("both_layer_norm_gradient_nvfp4", of_layer_norm, both, nvfp4,
         others=("finite_amax_both",)),
    case("rms_norm_gradient_mxfp8_sums", of_norm, along(1), column_sums=1),
  )
  # fmt: on

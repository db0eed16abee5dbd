# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions of x whose result is quantized: their names and parameters.

Sources: arXiv 1910.07467 (RMSNorm); arXiv 1607.06450 (LayerNorm); arXiv
1606.08415 (gelu, silu); arXiv 2002.05202 (gated activations); arXiv 2508.10925,
section 2.2 (swigluoai).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

NORMS: Final = ("rms_norm", "layer_norm")
GATED: Final = (
  "silu_and_mul",
  "gelu_and_mul",
  "swigluoai",
  "exact_gelu_and_mul",
)
UNGATED: Final = ("silu", "gelu", "relu", "exact_gelu")
FUNCTIONS: Final = (*NORMS, *GATED, *UNGATED)
OPERANDS: Final = ("up", "weight", "bias", "residual", "cotangent")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prologue:
  """A function of x, whose result is quantized.

  A norm computes, for each row along the last dimension::

    s = cast(x + residual, x.dtype)
    rms_norm    (s * rsqrt(mean(s * s) + epsilon)) * weight
    layer_norm  (c * rsqrt(mean(c * c) + epsilon)) * weight + bias,
                c = s - mean(s)

  A gated activation computes for each gate g and each factor u::

    silu_and_mul  (g * sigmoid(g)) * u
    gelu_and_mul  (g * sigmoid(2 * sqrt(2 / pi) * (g + 0.044715 g^3))) * u
    swigluoai     (g * sigmoid(alpha * g)) * (u + 1), after g = min(g, limit)
                  and u = clip(u, -limit, limit)
    exact_gelu_and_mul  (g / 2 * (1 + erf(g / sqrt(2)))) * u

  `silu`, `gelu` and `exact_gelu` compute the same of each g, without a factor.
  `relu` is max(g, 0).

  The gradient of an activation, for the cotangent c of its result, is that with
  respect to x or to `up`. A number on a limit has half a gradient, as in
  `jnp.minimum` and `jnp.clip`. The gradient of relu is 0 at 0, as in
  `jax.nn.relu`.

  The gradient of a norm is that with respect to x. With h, the normalized row
  before the weight, and d = c * weight::

    rms_norm    r * (d - h * mean(d * h)) + residual
    layer_norm  r * (d - mean(d) - h * mean(d * h)) + residual
                r = rsqrt(mean square + epsilon)

  Its sums of columns are those of c * h, the gradient of the weight.

  Attributes:
    function: one of `FUNCTIONS`.
    operands: operands besides x, in the order of `OPERANDS`. `up` and
      `residual` have the dtype and shape of x. `weight` and `bias` are f32[k],
      but the `bias` of a gated activation is f32[2 * k]. It has the order of x
      with `halves`; otherwise the gate's bias comes first. A gradient has the
      `cotangent`, of x's dtype and the shape of the function's result. The
      `residual` of a norm's gradient is another gradient with respect to x. A
      kernel's norm has "statistics" in place of `residual` if a kernel before
      it computes them.
    epsilon: number added to the mean square of a norm.
    halves: "split" if gates are the first half of x's last dimension and
      factors the second half; "interleaved" if they alternate; None if the
      factors are the operand `up`, or without factors.
    alpha, limit: parameters of swigluoai.
    gradient: "x" or "up" for the gradient with respect to that operand; None
      for the function.
  """

  function: str
  operands: tuple[str, ...] = ()
  epsilon: float = 0.0
  halves: str | None = None
  alpha: float = 1.702
  limit: float = 7.0
  gradient: str | None = None

  def __str__(self) -> str:
    names = [name for name in self.operands if name != "cotangent"]
    parts = [*names, *([f"{self.halves} halves"] * bool(self.halves))]
    return self.name + (f" with {', '.join(parts)}" if parts else "")

  @property
  def name(self) -> str:
    """The function without its operands."""
    return f"gradient of {self.function}" if self.gradient else self.function

  @property
  def is_norm(self) -> bool:
    return self.function in NORMS

  @property
  def is_gated(self) -> bool:
    return self.function in GATED

  @property
  def activation(self) -> str:
    """The function of a gate, without its factor."""
    return self.function.removesuffix("_and_mul")

  @property
  def has_weight(self) -> bool:
    return "weight" in self.operands

  @property
  def has_bias(self) -> bool:
    return "bias" in self.operands

  @property
  def has_residual(self) -> bool:
    return "residual" in self.operands

  @property
  def is_norm_gradient(self) -> bool:
    return self.is_norm and self.gradient is not None

  @property
  def returns_sum(self) -> bool:
    """Whether an array with the dtype and shape of x is a result.

    It is x + residual, or the gradient of a norm.
    """
    return self.has_residual or self.is_norm_gradient

  @property
  def has_statistics(self) -> bool:
    return "statistics" in self.operands

  @property
  def needs_whole_rows(self) -> bool:
    """Whether tiles have whole rows, whose statistics they compute."""
    return self.is_norm and not self.has_statistics

  def with_statistics(self) -> Prologue:
    """Returns the norm, whose statistics are an operand.

    Its x is x + residual, unless it is a gradient.
    """
    summed = "" if self.gradient else "residual"
    names = tuple(name for name in self.operands if name != summed)
    return dataclasses.replace(self, operands=("statistics", *names))

  @property
  def least_exponent(self) -> int:
    """Exponent field of the root of epsilon in f32, at least 1."""
    root = max(math.sqrt(self.epsilon), 2.0**-126)
    return 126 + math.frexp(root)[1]

  @property
  def merged_halves(self) -> str | None:
    """`halves` if the result has one value for each gate and factor of x."""
    return None if self.gradient else self.halves

  @property
  def gradient_of_halves(self) -> bool:
    return bool(self.gradient and self.halves)

  def x_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the shape of x if the function's result has `shape`."""
    *lead, k = shape
    return (*lead, 2 * k if self.merged_halves else k)

  def shape_of(self, x_shape: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the shape of the function's result."""
    *lead, k = x_shape
    return (*lead, k // 2 if self.merged_halves else k)

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The error that block formats must have, by integration and by a formula.

`block_noise` integrates the squared rounding error of a block format over a
distribution, with no sampling and no model of the rounding error: for
independent values it is what any correct quantizer measures, up to chance.
`chen_qsnr_db` is a published closed form that rests on such a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import numpy as np
import scipy.special

import jaxplugin as jp

# Cells of the integral over a block's largest magnitude, by the probability p
# of a larger one: uniform, and geometric towards p = 0, where a saturating
# scale makes few blocks err a lot. The integrand jumps where the scale does; a
# jump as large as the mean noise is worth 1 / UNIFORM_CELLS of it, or 0.005 dB.
UNIFORM_CELLS: Final = 768
CELLS_PER_OCTAVE: Final = 16
OCTAVES: Final = 42
_TAIL: Final = 1 / 64
_PROBABILITIES: Final = np.concatenate(
  [
    np.linspace(1, _TAIL, UNIFORM_CELLS, endpoint=False),
    _TAIL * np.exp2(-np.arange(CELLS_PER_OCTAVE * OCTAVES) / CELLS_PER_OCTAVE),
    [0],
  ]
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distribution:
  """A symmetric distribution of variance 1.

  Attributes:
    name: how tables call it.
    moments: f64 a >= 0 -> integrals of p(t), t p(t) and t^2 p(t) over 0..a.
    inverse_tail: q -> the a with P(x > a) = q, for 0 < q <= 1/2.
  """

  name: str
  moments: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
  inverse_tail: Callable[[np.ndarray], np.ndarray]


def _gaussian_moments(a):
  density = np.exp(-np.square(a) / 2) / np.sqrt(2 * np.pi)
  zeroth = scipy.special.erf(a / np.sqrt(2)) / 2
  first = 1 / np.sqrt(2 * np.pi) - density
  # d(-t p) = (t^2 - 1) p dt.
  return zeroth, first, zeroth - a * density


def _laplace_moments(a):
  # p(t) = exp(-r t) r / 2 with r = sqrt(2) for variance 1; by parts.
  rate = np.sqrt(2)
  tail = np.exp(-rate * a) / 2
  zeroth = 0.5 - tail
  first = 0.5 / rate - tail * (a + 1 / rate)
  second = 0.5 - tail * (np.square(a) + 2 * a / rate + 1)
  return zeroth, first, second


GAUSSIAN: Final = Distribution(
  name="Gaussian",
  moments=_gaussian_moments,
  inverse_tail=lambda q: -scipy.special.ndtri(q),
)
LAPLACE: Final = Distribution(
  name="Laplace",
  moments=_laplace_moments,
  inverse_tail=lambda q: -np.log(2 * q) / np.sqrt(2),
)


def rounding_noise(
  distribution: Distribution,
  levels: np.ndarray,
  scale: np.ndarray,
  largest: np.ndarray,
) -> np.ndarray:
  """E[(Q(x) - x)^2 given |x| <= largest], Q rounding to `scale * levels`.

  Args:
    distribution: of x.
    levels: f64[levels], rising from zero; what exceeds the last rounds to it.
    scale: f64[points].
    largest: f64[points].

  Returns:
    f64[points]. Between the middles b of its neighbours, level q contributes
    the integral of (t - q)^2 p(t) = M2 - 2 q M1 + q^2 M0 over the cell.
  """
  middles = (levels[:-1] + levels[1:]) / 2
  inner = np.minimum(scale[:, None] * middles, largest[:, None])
  edges = np.concatenate([inner, largest[:, None]], axis=1)
  moments = distribution.moments(edges)
  zeroth, first, second = (np.diff(m, axis=1, prepend=0) for m in moments)
  q = scale[:, None] * levels
  squares = second - 2 * q * first + np.square(q) * zeroth
  return squares.sum(axis=1) / moments[0][:, -1]


def block_noise(
  distribution: Distribution,
  levels: np.ndarray,
  block_size: int,
  scale_of: Callable[[np.ndarray], np.ndarray],
) -> float:
  """The mean squared error of a value in a block format; the signal's is 1.

  The largest magnitude m of a block of B independent values has distribution
  function F(m)^B, with F that of one magnitude. Given m, one value is m itself,
  and the others are independent and below m:

    noise = E_m[(Q(m) - m)^2 / B + (B - 1) / B * E[(Q(x) - x)^2 | |x| <= m]]

  Args:
    distribution: of the values.
    levels: f64[levels], the values' positive numbers, and zero.
    block_size: B.
    scale_of: f64[points] m -> f64[points] the scale of a block.
  """
  weight = -np.diff(_PROBABILITIES)
  larger = (_PROBABILITIES[1:] + _PROBABILITIES[:-1]) / 2
  # F(m)^B = 1 - larger; the upper tail of x at m is (1 - F(m)) / 2.
  tail = -np.expm1(np.log1p(-larger) / block_size) / 2
  largest = distribution.inverse_tail(tail)
  scale = scale_of(largest)
  middles = (levels[:-1] + levels[1:]) / 2
  ratio = np.divide(largest, scale, out=np.zeros_like(scale), where=scale > 0)
  image = scale * levels[np.searchsorted(middles, ratio)]
  own = np.square(image - largest)
  others = rounding_noise(distribution, levels, scale, largest)
  noise = (own + (block_size - 1) * others) / block_size
  return float(np.sum(weight * noise))


def to_db(noise: float, signal: float = 1.0) -> float:
  return float(10 * np.log10(signal / noise))


def chen_qsnr_db(
  format: jp.BlockFormat, crest_factor: float, scale_overhead: float
) -> float:
  """Theorem 2 (equations 14, 40 and 43) of Chen et al., for Gaussian data.

    -10 log10(a w + b (rho kappa)^2 p)          E8M0 scale
    -10 log10(a (w - kappa^2 / g) + b kappa^2 p) E4M3 scale

  with a = 1 / (24 * 2^(2 M)), b = 2^(2 (1 - B - M)) / (12 Qmax^2), w the share
  of the energy in values that become normal numbers, p the probability of a
  subnormal one. The rounding error is modelled as uniform and independent.

  Args:
    format: gives M, B, Qmax and the block size g.
    crest_factor: kappa, max |x| / sigma of a block.
    scale_overhead: rho, by how much rounding enlarges the scale; 1 for E4M3.

  Source: Chen et al., "INT v.s. FP: A Comprehensive Study of Fine-Grained
  Low-bit Quantization Formats", arXiv 2510.25602v1, section 4.1, appendix B.3.
  """
  encoding = format.values_encoding
  mantissa, bias = encoding.mantissa_bits, encoding.bias
  alpha = 1 / (24 * 4**mantissa)
  beta = 4.0 ** (1 - bias - mantissa) / (12 * encoding.max**2)
  scale = scale_overhead * crest_factor / encoding.max
  threshold = np.float64(scale * 2.0**encoding.min_exponent)
  zeroth, _, second = GAUSSIAN.moments(threshold)
  normal_energy, subnormal = 1 - 2 * second, 2 * zeroth
  if not format.scale_is_power_of_two:
    normal_energy = normal_energy - crest_factor**2 / format.block_size
  noise = alpha * normal_energy
  noise += beta * (scale_overhead * crest_factor) ** 2 * subnormal
  return to_db(float(noise))

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares quantize's prologues with NumPy in float64.

Codes are those of quantizing the kernel's own f32 result, by NumPy.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys

import jax
import numpy as np
import scipy.special
from absl.testing import absltest, parameterized

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing

BF16, F16, F32 = testing.BF16, testing.F16, testing.F32
RMS_NORM, LAYER_NORM, SILU, GELU, SWIGLUOAI, EXACT_GELU = range(1, 7)
# Without a factor.
ONLY_SILU, ONLY_GELU, ONLY_RELU, ONLY_EXACT_GELU = range(7, 11)
NONE, SPLIT, INTERLEAVED = range(3)
OF_X, OF_UP = 1, 2
# Roundings of a result, in units of its last place: at most half for each of
# two products and a quotient, doubled by a change of the exponent, and one for
# the exponential function.
ULPS = 4
# exact_gelu's polynomial multiplies two roundings of its variable by up to 2.3.
ULPS_OF_EXACT_GELU = ULPS + 2
# Below e^-88.7 the sum 1 + exp(-x) overflows, and an activation is 0.
TINY = 2.0**-121


@dataclasses.dataclass(frozen=True)
class Case:
  function: int
  halves: int = NONE
  dtype: type = F32
  format: str = "mxfp8"
  shape: tuple[int, int] = (9, 96)
  operands: tuple[str, ...] = ()
  epsilon: float = 1e-5
  alpha: float = 1.702
  limit: float = 7.0
  gradient: int = 0

  @property
  def is_norm_gradient(self) -> bool:
    return self.function <= LAYER_NORM and self.gradient > 0

  @property
  def columns(self) -> int:
    """Columns of the result."""
    return self.shape[1] * (2 if self.gradient and self.halves else 1)


CASES = (
  Case(RMS_NORM),
  Case(RMS_NORM, NONE, BF16, "nvfp4", (9, 1040), ("weight",), 1e-6),
  Case(RMS_NORM, NONE, BF16, "mxfp4", (70, 1056), ("weight", "residual")),
  Case(RMS_NORM, NONE, F16, "mxfp8_e5m2", (9, 32), ("residual",)),
  Case(LAYER_NORM, NONE, BF16, "mxfp6_e2m3", (9, 2080), ("weight", "bias")),
  Case(LAYER_NORM, NONE, F32, "nvfp4", (9, 48), ("bias", "residual")),
  Case(SILU, NONE, BF16, "mxfp8", (70, 1056)),
  Case(SILU, SPLIT, F16, "mxfp6_e3m2", (9, 1120), ("bias",)),
  Case(GELU, SPLIT, F32, "mxfp8"),
  Case(GELU, NONE, BF16, "nvfp4", (9, 16), ("bias",)),
  Case(SWIGLUOAI, INTERLEAVED, BF16, "mxfp4", (70, 1056), ("bias",)),
  Case(SWIGLUOAI, SPLIT, F32, "nvfp4", (9, 1072), (), 0, 0.7, 2.5),
  Case(SILU, NONE, BF16, "mxfp8", (9, 1056), gradient=OF_X),
  Case(SILU, NONE, F16, "mxfp4", (9, 96), ("bias",), gradient=OF_UP),
  Case(SILU, SPLIT, BF16, "mxfp8", (9, 1072), ("bias",), gradient=OF_X),
  Case(GELU, NONE, F32, "nvfp4", (9, 48), gradient=OF_X),
  Case(GELU, SPLIT, BF16, "mxfp6_e2m3", (9, 48), gradient=OF_X),
  Case(SWIGLUOAI, NONE, BF16, "mxfp8", (9, 64), limit=2.5, gradient=OF_X),
  Case(SWIGLUOAI, NONE, BF16, "mxfp8", (9, 64), limit=1.0, gradient=OF_UP),
  Case(SWIGLUOAI, INTERLEAVED, F32, "mxfp4", (9, 48), ("bias",), gradient=OF_X),
  Case(EXACT_GELU, NONE, BF16, "mxfp8", (9, 1056), ("bias",)),
  Case(EXACT_GELU, SPLIT, F32, "nvfp4", (70, 1072)),
  Case(EXACT_GELU, NONE, F32, "mxfp8", (9, 96), gradient=OF_UP),
  Case(EXACT_GELU, INTERLEAVED, BF16, "mxfp4", (9, 48), gradient=OF_X),
  Case(ONLY_SILU, NONE, BF16, "mxfp8", (70, 1056)),
  Case(ONLY_GELU, NONE, F32, "mxfp4", (9, 96), ("bias",)),
  Case(ONLY_RELU, NONE, F16, "nvfp4", (9, 1040), ("bias",)),
  Case(ONLY_SILU, NONE, F16, "mxfp8", (9, 96), ("bias",), gradient=OF_X),
  Case(ONLY_GELU, NONE, BF16, "nvfp4", (9, 1040), gradient=OF_X),
  Case(ONLY_RELU, NONE, BF16, "mxfp8", (70, 1056), gradient=OF_X),
  Case(ONLY_EXACT_GELU, NONE, F16, "mxfp8", (70, 1056), ("bias",)),
  Case(ONLY_EXACT_GELU, NONE, F32, "nvfp4", (9, 1040), gradient=OF_X),
  Case(RMS_NORM, NONE, BF16, "mxfp8", (9, 1056), ("weight", "residual"),
       gradient=OF_X),
  Case(RMS_NORM, NONE, F32, "nvfp4", (9, 48), gradient=OF_X),
  Case(LAYER_NORM, NONE, F16, "mxfp4", (70, 96), ("weight",), gradient=OF_X),
  Case(LAYER_NORM, NONE, F32, "mxfp8", (9, 1056), ("residual",), gradient=OF_X),
)  # fmt: skip


def inputs(case: Case) -> dict[str, np.ndarray]:
  """Returns x and the other operands. Some rows have extreme numbers."""
  rng = np.random.default_rng(0)
  rows, k = case.shape
  columns = 2 * k if case.halves else k
  x = rng.standard_normal((rows, columns)).astype(np.float32) * 3
  x[1] = 0
  x[2, 5], x[3, 7], x[3, 8] = np.nan, np.inf, -np.inf
  x[4] *= np.float32(1e-4)
  x[5] = np.where(rng.integers(0, 2, columns), 5, -5)
  x[6, :8] = -110, -100, -89, -80, 80, 89, 100, 1e4
  found = {"x": x.astype(case.dtype)}
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  is_gated = SILU <= case.function <= EXACT_GELU
  if is_gated and not case.halves:
    found["up"] = draw(rows, k).astype(case.dtype)
  for name in case.operands:
    found[name] = draw(2 * k if is_gated else k)
    if name == "residual":
      found[name] = draw(rows, k).astype(case.dtype)
  if case.gradient:
    found["cotangent"] = draw(rows, k).astype(case.dtype)
  return found


def reference(
  case: Case,
  x,
  up=None,
  weight=None,
  bias=None,
  residual=None,
  cotangent=None,
):
  """Returns the sum, the result in f64, and a bound of the f32 error."""
  if case.is_norm_gradient:
    return None, *norm_gradient(case, x, weight, residual, cotangent)[:2]
  total = x
  if residual is not None:
    total = x.astype(np.float32) + residual.astype(np.float32)
    total = total.astype(case.dtype)
  if case.function <= LAYER_NORM:
    s = total.astype(np.float64)
    lost = 0.0
    if case.function == LAYER_NORM:
      mean = s.mean(-1, keepdims=True)
      s, lost = s - mean, np.abs(mean) * 2.0**-24
    factor = 1 / np.sqrt((s * s).mean(-1, keepdims=True) + case.epsilon)
    factor = factor * (1 if weight is None else weight)
    y, bias = s * factor, 0.0 if bias is None else bias
    largest = np.abs(y) + np.abs(bias)
    return total, y + bias, ULPS * spacing(largest) + lost * np.abs(factor)
  k = case.shape[1]
  pair = lambda v: (v[..., 0::2], v[..., 1::2])
  if case.halves != INTERLEAVED:
    pair = lambda v: (v[..., :k], v[..., k:])
  f32 = lambda v: v.astype(np.float32)
  is_gated = case.function <= EXACT_GELU
  if not is_gated:
    pair = lambda v: (v, np.float32(1))
  gate, up = (f32(x), f32(up)) if up is not None else pair(f32(x))
  if bias is not None:
    gate = gate + pair(bias)[0]
    up = up + pair(bias)[1] if is_gated else up
  gate, up = gate.astype(np.float64), up.astype(np.float64)
  if case.gradient:
    return total, *gradients(case, gate, up, cotangent.astype(np.float64))
  if case.function == ONLY_RELU:
    return total, np.maximum(gate, 0), 0.0
  if case.function in (SILU, ONLY_SILU):
    argument, roundings = gate, 0.0
  elif case.function in (GELU, ONLY_GELU):
    argument = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    roundings = 3.0
  elif case.function in (EXACT_GELU, ONLY_EXACT_GELU):
    argument, roundings = gate**2 / 2, 0.5
  else:
    limit = np.float64(np.float32(case.limit))
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
    argument = np.float64(np.float32(case.alpha)) * gate
    roundings = 0.5
  if case.function in (EXACT_GELU, ONLY_EXACT_GELU):
    y, ulps = gate * scipy.special.ndtr(gate) * up, ULPS_OF_EXACT_GELU
  else:
    y, ulps = gate / (1 + np.exp(-argument)) * up, ULPS
  # A rounding of the argument multiplies the exponential by e^(2^-24 argument).
  ulps = ulps + 2 * roundings * np.abs(argument)
  return total, y, ulps * spacing(y) + TINY * np.abs(up)


def norm_gradient(case: Case, x, weight, residual, cotangent):
  """Returns the gradient in f64, a bound of its error, and those of weights.

  The last two are the gradients of the weight for each row, and a bound.
  """
  x, given = x.astype(np.float64), cotangent.astype(np.float64)
  mean = lambda v: v.mean(-1, keepdims=True)
  lost = np.zeros((len(x), 1))
  if case.function == LAYER_NORM:
    lost = np.abs(mean(x))
    x = x - mean(x)
  factor = 1 / np.sqrt(mean(x * x) + case.epsilon)
  h, d = x * factor, given * (1 if weight is None else weight)
  of_mean = mean(d) if case.function == LAYER_NORM else 0
  residual = 0 if residual is None else residual.astype(np.float64)
  y = factor * (d - h * mean(d * h) - of_mean) + residual
  size = np.abs(h) + lost * factor  # the rounding of a mean is not relative
  sizes = np.abs(d) + size * mean(np.abs(d) * size) + np.abs(of_mean)
  bound = 2 * ULPS * 2.0**-24 * (factor * sizes + np.abs(residual))
  return y, bound, given * h, 2 * ULPS * 2.0**-24 * np.abs(given) * size


def gradients(case: Case, gate, up, cotangent):
  """Returns the gradient in f64, and a bound of the f32 error."""
  passes = lambda v, limit: np.where(v == limit, 0.5, v < limit)
  if case.function == ONLY_RELU:
    return np.where(gate > 0, cotangent, 0), 0.0
  of_limits, roundings, slope = (1, 1), 0.0, 1.0
  if case.function in (GELU, ONLY_GELU):
    root = 2 * np.sqrt(2 / np.pi)
    argument = root * (gate + 0.044715 * gate**3)
    slope, roundings = root * (1 + 3 * 0.044715 * gate**2), 3.0
  elif case.function == SWIGLUOAI:
    limit, slope = (np.float64(np.float32(v)) for v in (case.limit, case.alpha))
    of_limits = passes(gate, limit), passes(abs(up), limit)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
    argument, roundings = slope * gate, 0.5
  else:
    argument = gate
  sigmoid = 1 / (1 + np.exp(-argument))
  derivative = 1 / (2 + np.exp(argument) + np.exp(-argument))
  if case.function in (EXACT_GELU, ONLY_EXACT_GELU):
    argument, roundings = gate**2 / 2, 0.5
    sigmoid = scipy.special.ndtr(gate)
    derivative = np.exp(-argument) / np.sqrt(2 * np.pi)
  change = np.where(derivative == 0, 0, gate * slope * derivative)
  ulps = 2 * ULPS + 2 * roundings * np.minimum(np.abs(argument), 1e9)
  tiny = TINY * np.abs(cotangent) * (1 + np.abs(gate * slope))
  of_gate = cotangent * up * (sigmoid + change) * of_limits[0]
  size = np.abs(cotangent * up) * (sigmoid + np.abs(change))
  of_up = cotangent * (gate * sigmoid) * of_limits[1]
  both = [
    (of_gate, ulps * spacing(size) + tiny * np.abs(up)),
    (of_up, ulps * spacing(of_up) + tiny),
  ]
  if not case.halves:
    return both[case.gradient - OF_X]
  if case.halves == SPLIT:
    return [np.concatenate(each, -1) for each in zip(*both, strict=True)]
  return [
    np.stack(each, -1).reshape(gate.shape[0], -1)
    for each in zip(*both, strict=True)
  ]


def spacing(x):
  return np.spacing(np.abs(x).astype(np.float32)).astype(np.float64)


def attributes(case: Case) -> dict[str, np.float32]:
  if case.gradient:
    rest = dataclasses.replace(case, gradient=0)
    return {"gradient": case.gradient} | attributes(rest)
  if case.function <= LAYER_NORM:
    return {"epsilon": np.float32(case.epsilon)}
  if case.function == SWIGLUOAI:
    return {"alpha": np.float32(case.alpha), "limit": np.float32(case.limit)}
  return {}


def column_sums(y, entries):
  """Returns the sums of f32 over strips of 64 rows, in order, and then in f64.

  The error is at most 64 * 2^-24 times the sum of magnitudes.
  """
  total = []
  for entry in y.reshape(entries, -1, y.shape[-1]):
    strips = [entry[i : i + 64] for i in range(0, len(entry), 64)]
    sums = [functools.reduce(np.add, strip) for strip in strips]
    total.append(np.sum(np.float64(sums), axis=0))
  return np.float32(total)


class PrologueTest(parameterized.TestCase):
  @testing.each(case=CASES)
  def test_result_is_that_of_f64_and_codes_are_those_of_the_result(
    self, case, isa
  ):
    given = inputs(case)
    scale = np.float32(0.01) if case.format == "nvfp4" else None
    for rounding in (0, 1):
      values, scales, _, *sums, amax, y = testing.prologue(
        **given,
        **attributes(case),
        global_scale=scale,
        format=testing.QUANTIZED.index(case.format),
        function=case.function,
        halves=case.halves,
        rounding=rounding,
        isa=isa,
      )
      with np.errstate(all="ignore"):
        total, expected, bound = reference(case, **given)
        error = np.abs(y - expected)
        same = (y == expected) | (np.isnan(y) & np.isnan(expected))
      self.assertTrue(np.all(same | (error <= bound)), np.nanmax(error / bound))
      self.assertFalse(np.isnan(y).all())
      self.assertEqual(amax, np.abs(y[np.isfinite(y)]).max())
      if sums:
        total = y.astype(case.dtype) if case.is_norm_gradient else total
        np.testing.assert_array_equal(
          *(v.astype("f4") for v in (sums[0], total))
        )
      codes, expected_scale, _ = testing.quantized_reference(
        y, case.format, rounding, scale
      )
      np.testing.assert_array_equal(
        testing.one_a_byte(values, case.format), codes
      )
      np.testing.assert_array_equal(scales, expected_scale)

  @testing.each(
    case=(
      Case(ONLY_EXACT_GELU, NONE, F16),
      Case(ONLY_EXACT_GELU, NONE, F32),
      Case(ONLY_EXACT_GELU, NONE, F16, gradient=OF_X),
      Case(ONLY_EXACT_GELU, NONE, F32, gradient=OF_X),
    )
  )
  def test_exact_gelu_of_many_numbers_is_within_its_bound(self, case, isa):
    x = np.arange(2**16, dtype=np.uint16).view(F16)  # all f16 numbers
    if case.dtype == F32:
      x = np.linspace(-15, 15, 2**20, dtype=F32)
    given = {"x": x.reshape(-1, 1024)}
    if case.gradient:
      given["cotangent"] = np.ones_like(given["x"])
    *_, y = testing.prologue(
      **given,
      **attributes(case),
      format=0,
      function=case.function,
      halves=NONE,
      isa=isa,
    )
    with np.errstate(all="ignore"):
      _, expected, bound = reference(case, **given)
      error = np.abs(y - expected)
      same = (y == expected) | (np.isnan(y) & np.isnan(expected))
    self.assertTrue(np.all(same | (error <= bound)), np.nanmax(error / bound))

  @testing.each(case=CASES, along=(2, 3))
  def test_blocks_of_rows_have_codes_of_the_same_result(self, case, along, isa):
    """A run has its tail, or fills two strips and is padded by a block."""
    case = dataclasses.replace(case, shape=(2 * 70, case.shape[1]))
    given, k = inputs(case), case.columns
    options = {
      **given,
      **attributes(case),
      "format": testing.QUANTIZED.index(case.format),
      "function": case.function,
      "halves": case.halves,
      "isa": isa,
    }
    is_nvfp4 = case.format == "nvfp4"
    one = np.float32(0.01) if is_nvfp4 else None
    *_, expected_amax, expected = testing.prologue(global_scale=one, **options)
    both = np.float32([0.01, 0.02]) if is_nvfp4 and along == 3 else one
    for scale in (both, None) if is_nvfp4 else (None,):
      is_computed = is_nvfp4 and scale is None
      *sides, amax, y, sums = testing.prologue(
        global_scale=scale,
        entries=2,
        compute_global=int(is_computed),
        along=along,
        run=70,
        padded=160 if case.halves else None,
        **options,
      )
      if case.is_norm_gradient:
        want = y.astype(case.dtype)
      elif "residual" in given:
        want = reference(case, **given)[0]
      else:
        want = None
      if want is not None:
        total = sides.pop()
        np.testing.assert_array_equal(total.astype("f4"), want.astype("f4"))
      np.testing.assert_array_equal(y, expected)
      self.assertEqual(amax, expected_amax)
      if case.is_norm_gradient:
        rest = {"weight": None, "residual": None}
        with np.errstate(all="ignore"):
          *_, rows, bound = norm_gradient(case, **rest | given)
        # Rows of the first entry have a NaN. 64 additions are rounded.
        bound = bound + 64 * 2.0**-24 * np.abs(rows)
        error = np.abs(sums[1, 0] - rows[70:].sum(0))
        self.assertTrue(np.all(error <= bound[70:].sum(0)))
        self.assertTrue(np.isnan(sums[0]).all())
      else:
        np.testing.assert_array_equal(sums[:, 0], column_sums(y, entries=2))
      columns = y.reshape(2, 70, k).transpose(0, 2, 1)
      width = testing.one_a_byte(sides[-3], case.format).shape[-1] - 70
      columns = np.pad(columns, ((0, 0), (0, 0), (0, width)))
      blocked = [y, columns.reshape(2 * k, -1)][along == 2 :]
      scales = [None] * 2 if scale is None else np.broadcast_to(scale, 2)
      for i, (each, own) in enumerate(zip(blocked, scales, strict=False)):
        values, scale_codes, global_scale = sides[3 * i :][:3]
        codes, want, own_global = testing.quantized_reference(
          each, case.format, 0, own
        )
        np.testing.assert_array_equal(
          testing.one_a_byte(values, case.format), codes
        )
        np.testing.assert_array_equal(scale_codes, want)
        if is_nvfp4:
          self.assertEqual(global_scale, own_global)

  @testing.each(along=(1, 2), name=("mxfp8", "nvfp4"))
  def test_key_draws_the_bits_of_the_result_on_its_own(self, along, name, isa):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2 * 70, 96)).astype(BF16)
    key = np.uint32([3, 5])
    options = {"format": testing.QUANTIZED.index(name), "isa": isa}
    scale = np.float32(0.01) if name == "nvfp4" else None
    values, codes, _, _, y = testing.prologue(
      x, scale, along=along, run=70, key=key, **options
    )
    y = y[..., None] if along == 1 else y.reshape(2, 70, 96)
    padded = 96 if along == 1 or name == "mxfp8" else 80
    want, want_codes, _ = testing.quantize_operand(
      y, scale, key, padded=padded, **options
    )
    np.testing.assert_array_equal(values, want)
    np.testing.assert_array_equal(codes, want_codes)

  def test_no_rows_and_no_columns_give_empty_results(self):
    for shape in ((0, 64), (3, 0)):
      x = np.zeros(shape, BF16)
      for along in (1, 2, 3):
        *_, total, amax, y = testing.prologue(
          x, residual=x, weight=np.ones(shape[1], F32), along=along
        )
        self.assertEqual((total.shape, y.shape, amax), (shape, shape, 0))

  @parameterized.named_parameters(
    ("function", {"function": 11}, "prologue must be"),
    ("halves", {"halves": 1}, "halves must be"),
    ("halves_of_silu", {"function": 7, "halves": 1}, "for a gated act.*got 1"),
    ("gradient_of_norm", {"gradient": 2}, "gradient must be"),
    ("no_gradient_of_norm", {"gradient": 1, "cotangent": np.ones((2, 32), "f4"),
                             "results": [((), "f4")]}, "the sum must have"),
    ("norm_gradient_bias", {"gradient": 1, "bias": np.ones(32, "f4"),
                            "cotangent": np.ones((2, 32), "f4")},
     "bias must be"),
    ("gradient", {"function": 3, "gradient": 3}, "gradient must be"),
    ("gradient_of_half", {"function": 3, "halves": 1, "gradient": 2},
     "gradient must be .* without halves, 2"),
    ("gradient_of_up", {"function": 7, "gradient": 2}, "for a gated act"),
    ("no_cotangent", {"function": 3, "halves": 1, "gradient": 1},
     "the cotangent of a gradient"),
    ("cotangent", {"function": 3, "halves": 1, "gradient": 1,
                   "cotangent": np.ones((2, 32), "f4")},
     r"the cotangent must have .* got f32\[2,32\]"),
    ("gradient_bias", {"function": 3, "halves": 1, "gradient": 1,
                       "cotangent": np.ones((2, 16), "f4"),
                       "bias": np.ones(64, "f4")}, "bias must be"),
    ("odd", {"x": np.ones((2, 65), "f4"), "halves": 1, "function": 3}, "k mus"),
    ("no_up", {"function": 3}, "up must have"),
    ("up", {"up": np.ones((2, 32), "f4")}, "up must have"),
    ("up_of_silu", {"function": 7, "up": np.ones((2, 32), "f4")},
     "for a gated activation without halves, else be"),
    ("bias_of_silu", {"function": 7, "bias": np.ones(64, "f4")},
     "bias must be .* for a gated activation, else"),
    ("up_dtype", {"function": 3, "up": np.ones((2, 32), BF16)}, "up must have"),
    ("weight", {"weight": np.ones(33, "f4")}, "weight must be"),
    (
      "weight_of_activation",
      {
        "function": 3,
        "up": np.ones((2, 32), "f4"),
        "weight": np.ones(32, "f4"),
      },
      "weight must be",
    ),
    ("bias", {"bias": np.ones(64, "f4")}, "bias must be"),
    ("residual", {"residual": np.ones((2, 32), BF16)}, "residual must have"),
    ("computed", {"compute_global": 1}, "compute_global must be"),
    ("along", {"along": 5}, "along must be"),
    ("run", {"along": 2, "run": 3}, "run must be 0 or divide the rows, got 3"),
    ("padded", {"along": 2, "padded": 160}, "by at most 128, got 160 for .* 2"),
    ("short", {"along": 3, "run": 1, "padded": 0}, "must have the run padded"),
    ("scales", {"format": 3, "global_scale": np.ones(2, "f4")}, "f32.0., got"),
    ("keys", {"along": 3, "key": np.zeros(2, "u4")}, "the key of one side"),
    ("key", {"along": 2, "key": np.zeros(3, "u4")}, r"u32.2., got u32.3."),
    ("sum", {"residual": np.ones((2, 32), "f4"), "results": [((2, 33), "f4")]},
     "the sum must have"),
    ("result", {"results": [((2, 32), BF16)]}, r"last .* amax.*got bf16\[2,32"),
    ("results", {"results": [((2, 32), "f4")] * 2}, r"once, got f32\[2,32"),
    ("sums", {"entries": 3}, r"sums must be .* got f32\[3,1,32\]"),
    ("sums_run", {"along": 2, "entries": 2},
     "run must divide the rows of an entry"),
    ("two_amax", {"results": [((), "f4")] * 2}, r"at most once, got f32\[\]"),
    ("no_sum", {"residual": np.ones((2, 32), "f4"), "results": [((), "f4")]},
     "the sum must have x's dtype and shape, got f32"),
    ("epsilon", {"epsilon": np.int64(1)}, "attribute epsilon must be f32"),
  )  # fmt: skip
  def test_malformed_call_is_an_error(self, change, message):
    arguments = {"x": np.ones((2, 32), "f4")} | change
    types = arguments.pop("results", ())
    with self.assertRaisesRegex(testing.HandlerError, message):
      testing.prologue(
        **arguments, results=[jax.ShapeDtypeStruct(*each) for each in types]
      )


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks a decoder's step in f64, one matmul after another.

The input of each matmul is compared with an f64 computation from the outputs of
earlier matmuls. The output of each matmul is compared with an f64 matmul of the
same input, after the variant's rounding or quantization, at a sample of the
weights. Errors of matmuls therefore do not add up. Each error has the bound of
a single matmul, which is smaller than the error of quantization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from typing import Final

import numpy as np

from jaxplugin.dot import reference
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.peers import decoder_model
from jaxplugin.lab.bench.peers import verification
from jaxplugin.repro import oracle

# Bound of XLA's f32 operations between two matmuls, such as sums and
# exponentials.
BETWEEN_BOUND: Final = verification.PEER_BOUND
# Bound of x + y, in units of |x| + |y|. Three values are rounded: y, XLA's sum,
# and the sum in this module.
_ADDITION_BOUND: Final = 3 * verification.UNIT

# Maps (layer, matmul) to a sample of columns, and their weights
# f64[columns, k].
Weights = Callable[[int, str], tuple[np.ndarray, np.ndarray]]
# Rounds f32[m, k] as the variant does. The result is f64.
Rounded = Callable[[np.ndarray], np.ndarray]


def check(
  result: Any,
  x: Any,
  caches: dict[str, Any],
  *,
  weights: Weights,
  rounded: Rounded,
  bound: float,
  relative: float,
) -> float:
  """Checks all results of a step, and returns the largest error of a matmul.

  Args:
    result: the result of a function of `decoder_model`.
    x: f32[m, channels], the input of the step.
    caches: `decoder_model.CACHES`, f32[layers, m, groups, length, d].
    weights, rounded: see the types `Weights` and `Rounded`.
    bound, relative: as for `verification.check_dot`.

  Raises:
    WrongResultError: If a result is wrong. The text names the layer.
  """
  y, seen = result
  x = np.asarray(x)
  largest = 0.0
  keys, values = (np.asarray(caches[name]) for name in decoder_model.CACHES)

  def product(i: int, name: str) -> np.ndarray:
    nonlocal largest
    one = decoder_model.of_layer(seen, i)[name]
    given, got = np.asarray(one["input"]), np.asarray(one["output"])
    columns, w = weights(i, name)
    lhs = rounded(given)
    expected = verification.Expected(
      rows=np.arange(len(lhs)),
      columns=columns,
      exact=lhs @ w.T,
      magnitude=np.abs(lhs) @ np.abs(w).T,
    )
    try:
      error = verification.check_dot(
        got, expected, bound=bound, relative=relative
      )
    except verification.WrongResultError as wrong:
      raise verification.WrongResultError(
        f"layer {i}, {name}: {wrong}"
      ) from wrong
    largest = max(largest, error)
    return got

  def goes_into(i: int, name: str, exact: Any, magnitude: Any) -> None:
    got = np.asarray(decoder_model.of_layer(seen, i)[name]["input"])
    _compare(f"layer {i}, what goes into {name}", got, exact, magnitude)

  drift = np.zeros(x.shape)  # bound of the difference from XLA's x

  def add(y: np.ndarray) -> None:
    nonlocal x, drift
    drift = drift + _ADDITION_BOUND * (np.abs(x) + np.abs(y))
    x = x + y

  for i in range(len(keys)):
    goes_into(i, "qkv", *_norm(x, drift))
    goes_into(i, "out", *_attention(product(i, "qkv"), keys[i], values[i]))
    add(product(i, "out"))
    goes_into(i, "gate_up", *_norm(x, drift))
    gated = _gated(product(i, "gate_up"))
    goes_into(i, "down", gated, np.abs(gated))
    add(product(i, "down"))
  _compare("the result", np.asarray(y), x, drift / BETWEEN_BOUND)
  return largest


def _compare(
  what: str,
  got: np.ndarray,
  exact: np.ndarray,
  magnitude: np.ndarray,
) -> None:
  error = np.abs(got.astype(np.float64) - exact)
  limit = BETWEEN_BOUND * magnitude + np.finfo(np.float32).tiny
  if not (error <= limit).all():  # also true for NaN
    at = np.unravel_index(np.argmax(np.nan_to_num(error - limit)), error.shape)
    place = tuple(int(index) for index in at)
    raise verification.WrongResultError(
      f"{what}, at {place}: got {got[place]:.8g}, exact {exact[place]:.8g},"
      f" error {error[place]:.3g} above the bound {limit[place]:.3g}"
    )


def _norm(x: np.ndarray, drift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the norm, and the unit of its error if x has error `drift`."""
  x = x.astype(np.float64)
  mean = np.square(x).mean(axis=-1, keepdims=True)
  size = np.sqrt(mean + decoder_model.NORM_EPSILON)
  return x / size, (np.abs(x) + drift / BETWEEN_BOUND) / size


def _gated(gate_up: np.ndarray) -> np.ndarray:
  gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
  return gate / (1 + np.exp(-gate)) * up


def _attention(
  qkv: np.ndarray, keys: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns attention over the values, and over their magnitudes."""
  query, key, value = (
    part.astype(np.float64)
    for part in decoder_model.split_qkv(qkv, keys.shape[1])
  )
  keys = np.concatenate([keys, key], axis=2)
  values = np.concatenate([values, value], axis=2)
  scores = query @ keys.swapaxes(2, 3) / np.sqrt(workloads.HEAD_SIZE)
  part = np.exp(scores - scores.max(axis=-1, keepdims=True))
  part /= part.sum(axis=-1, keepdims=True)
  flat = lambda x: x.reshape(len(qkv), -1)
  return flat(part @ values), flat(part @ np.abs(values))


def quantized(format: Any) -> Rounded:
  """Returns the `Rounded` of a variant that quantizes to `format`."""

  def rounded(x: np.ndarray) -> np.ndarray:
    global_scale = oracle.global_scale_of(x, format)
    values, scale = oracle.quantize_rows(x, format, global_scale)
    if format.is_fp6:
      values = values.view(np.uint8)
    exact = reference.oracle_dequantize(values, scale, format)
    return exact if global_scale is None else exact * np.float64(global_scale)

  return rounded


def cast(dtype: Any) -> Rounded:
  """Returns the `Rounded` of a variant that casts to `dtype`."""
  return lambda x: x.astype(dtype).astype(np.float64)

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Times a `lax.scan` over stacked layers for one row of activations, on a CPU.

  python examples/serving/scan_layers.py                # the table
  python examples/serving/scan_layers.py --shape 4x4096x4096 --rounds 15

Each step multiplies by the weight of one layer. A scan over the weights copies
each weight first. A scan over the numbers of the layers ("by number") reads
each weight in place. The peers are XLA's f32 matmuls in a scan, and without a
scan, each in the form that is fastest for XLA. Each result is checked. The
variants take turns, and each one is called once before it is timed.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxplugin as jp

SHAPE = (8, 512, 1536)  # layers, n, k
ROUNDS = 31
# Relative to the largest result. FP4 on both sides errs by 0.16 of a result's
# deviation: five times that are 0.2 of the largest. Another layer errs by more
# than the largest itself.
TOLERANCE = 0.3


def plain(x, w):
  return lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def both_sides(x, w):
  return jp.block_scaled_dot(jp.quantize(x, w.format), w)


def scanned(product, x, weights):
  """Results of each layer, (layers, 1, n); each waits for the one before it."""

  def step(x, w):
    y = product(x, w)
    return x + 0 * y.sum(), y

  return lax.scan(step, x, weights)[1]


def by_number(quantizes, x, weights):
  """The same as `scanned`, of the layers' numbers."""

  def step(x, i):
    given = jp.quantize(x, weights.format) if quantizes else x
    y = jp.linear(given, weights, layer=i)
    return x + 0 * y.sum(), y

  return lax.scan(step, x, jnp.arange(weights.shape[0]))[1]


def unrolled(product, x, weights):
  results = []
  for w in weights:
    results.append(product(x, w))
    x = x + 0 * results[-1].sum()
  return jnp.stack(results)


def variants(weights):
  """Name -> (function of x and weights, weights)."""
  made = {
    "f32": (functools.partial(scanned, plain), weights),
    "f32, no scan": (functools.partial(unrolled, plain), list(weights)),
  }
  for format in (jp.MXFP8, jp.MXFP4, jp.NVFP4):
    w_q = jp.quantize(weights, format, batch_dims=1)
    cpu = jp.named_target("cpu")
    for stored, w in (
      ("as quantized", w_q),
      ("prepared", jp.prepare_weights(w_q, cpu)),
    ):
      for sides, product in (
        ("f32 x", jp.block_scaled_dot),
        ("both", both_sides),
      ):
        name = f"{format.name} {sides}, {stored}"
        made[name] = (functools.partial(scanned, product), w)
        function = functools.partial(by_number, product is both_sides)
        made[f"{name}, by number"] = (function, w)
    separate = list(w_q)
    function = functools.partial(unrolled, jp.block_scaled_dot)
    made[f"{format.name} f32 x, no scan"] = (function, separate)
  return made


def measure(shape, rounds):
  """Name -> milliseconds of each round."""
  layers, n, k = shape
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(1, k)), jnp.float32)
  weights = jnp.asarray(rng.normal(size=(layers, n, k)), jnp.float32)
  expected = np.asarray(x, float) @ np.swapaxes(
    np.asarray(weights, float), 1, 2
  )
  calls = {}
  for name, (function, w) in variants(weights).items():
    calls[name] = functools.partial(jax.jit(function), x, w)
    error = np.abs(np.asarray(calls[name]()) - expected).max()
    if error > TOLERANCE * np.abs(expected).max():
      raise ValueError(f"{name} is wrong by {error}")
  times = {name: [] for name in calls}
  for _ in range(rounds):
    for name, call in calls.items():
      jax.block_until_ready(call())
      start = time.perf_counter()
      jax.block_until_ready(call())
      times[name].append(1e3 * (time.perf_counter() - start))
  return times


def table(times):
  """Lines: medians, and ratios to the f32 scan round by round."""
  lines = [f"{'':40}{'ms':>8}{'least':>8}{'x f32':>8}"]
  for name, samples in times.items():
    ratio = np.median(np.divide(samples, times["f32"]))
    lines.append(
      f"{name:40}{np.median(samples):8.2f}{min(samples):8.2f}{ratio:8.2f}"
    )
  return lines


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--shape",
    default="x".join(map(str, SHAPE)),
    help="layers x n x k; default: %(default)s",
  )
  parser.add_argument("--rounds", type=int, default=ROUNDS)
  args = parser.parse_args()
  shape = tuple(int(size) for size in args.shape.split("x"))
  print("\n".join(table(measure(shape, args.rounds))))


if __name__ == "__main__":
  main()

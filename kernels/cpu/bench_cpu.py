# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Times the handlers beside XLA, interleaved in one run, caches cold.

  python kernels/cpu/bench_cpu.py [--rows decode,m16,m128,square,quantize]

Every variant of a row is checked before it is timed; variants take turns, each
call on the next of several weights that together exceed the last-level cache;
the minimum and the median of a variant's times are shown. To be replaced by
`python -m jaxplugin bench`.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing

CACHE_BYTES = 40 << 20  # rotate past a 32 MiB last-level cache
FORMATS = {
  "mxfp8": (0, jnp.float8_e4m3fn, jnp.float8_e8m0fnu, 32),
  "mxfp4": (2, jnp.float4_e2m1fn, jnp.float8_e8m0fnu, 32),
  "nvfp4": (3, jnp.float4_e2m1fn, jnp.float8_e4m3fn, 16),
}


def make(rows: int, k: int, name: str, seed: int):
  """(values, scale, dequantized f32) of random data, as device arrays."""
  number, _, _, block = FORMATS[name]
  rng = np.random.default_rng(seed)
  bits = rng.integers(0, 256, (rows, k // (2 if number >= 2 else 1)))
  bits = bits.astype(np.uint8)
  if number == 0:  # no NaN
    bits = np.where((bits & 0x7F) == 0x7F, 0x38, bits).astype(np.uint8)
    values = bits.view(ml_dtypes.float8_e4m3fn)
  else:
    values = np.stack([bits & 15, bits >> 4], -1).reshape(rows, k)
    values = values.view(ml_dtypes.float4_e2m1fn)
  if number == 3:
    scale = rng.integers(0x20, 0x50, (rows, k // block)).astype(np.uint8)
    scale = scale.view(ml_dtypes.float8_e4m3fn)
  else:
    scale = rng.integers(118, 130, (rows, k // block)).astype(np.uint8)
    scale = scale.view(ml_dtypes.float8_e8m0fnu)
  return jnp.asarray(values), jnp.asarray(scale)


def measure(variants, rounds: int, seconds: float):
  """{name: (min, median) ms} of callables run in turns."""
  times = {name: [] for name in variants}
  for _, call in variants.values():
    call(0)
  begin = time.perf_counter()
  for i in range(rounds):
    for name, (rotation, call) in variants.items():
      start = time.perf_counter()
      call(i % rotation)
      times[name].append((time.perf_counter() - start) * 1e3)
    if time.perf_counter() - begin > seconds and i >= 4:
      break
  return {n: (min(t), float(np.median(t))) for n, t in times.items()}


def read_bandwidth_call():
  """A call that reads 256 MiB with two threads: f32 product of m = 1."""
  w = jnp.ones((8192, 8192), jnp.float32)
  x = jnp.ones((1, 8192), jnp.float32)
  f = jax.jit(lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))))
  return lambda i: f(x, w).block_until_ready()


def dot_row(m: int, n: int, k: int, name: str, seconds: float, best: bool):
  number, _, _, block = FORMATS[name]
  bytes_each = n * k * (0.5 if number >= 2 else 1) + n * k / block
  count = int(np.clip(np.ceil(CACHE_BYTES / bytes_each), 2, 12))
  weights = [make(n, k, name, s) for s in range(count)]
  x, xs = make(m, k, name, 99)

  @jax.jit
  def ours(x, xs, w, ws):
    return testing.dot(
      x[None], xs[None], w[None], ws[None],
      lhs_block_size=block, rhs_block_size=block,
    )[0]  # fmt: skip

  @jax.jit
  def scaled_dot(x, xs, w, ws):
    return jax.lax.scaled_dot(
      x, w.T, lhs_scale=xs, rhs_scale=ws.T,
      preferred_element_type=jnp.float32,
    )  # fmt: skip

  @jax.jit
  def plain(x, w):
    return jax.lax.dot_general(
      x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )

  def deq(v, s, dtype=np.float32):
    s = np.repeat(np.asarray(s).astype(np.float32), block, axis=1)
    return jnp.asarray((np.asarray(v).astype(np.float32) * s).astype(dtype))

  ready = [deq(*w) for w in weights[:2]]
  ready16 = [w.astype(jnp.bfloat16) for w in ready]
  x32 = deq(x, xs)
  x16 = x32.astype(jnp.bfloat16)
  expected = np.asarray(x32, np.float64) @ np.asarray(ready[0], np.float64).T
  bound = np.abs(np.asarray(x32, np.float64)) @ np.abs(
    np.asarray(ready[0], np.float64).T
  )

  def worst(got):
    return np.max(np.abs(np.asarray(got) - expected) / (bound * 2.0**-24))

  error = worst(ours(x, xs, *weights[0]))
  print(
    f"   error / (2^-24 sum|ab|): ours {error:.2f},"
    f" f32 {worst(plain(x32, ready[0])):.2f},"
    f" bf16 {worst(plain(x16, ready16[0])):.2f}"
  )
  if error > 16:
    print("   ERROR: out of bound")

  variants = {
    "ours": (count, lambda i: ours(x, xs, *weights[i]).block_until_ready()),
    "f32": (2, lambda i: plain(x32, ready[i]).block_until_ready()),
    "scaled_dot": (
      count,
      lambda i: scaled_dot(x, xs, *weights[i]).block_until_ready(),
    ),
  }
  if m > 1 or not best:
    variants["bf16"] = (2, lambda i: plain(x16, ready16[i]).block_until_ready())
  if m == 1:
    variants["read"] = (1, read_bandwidth_call())
  t = measure(variants, 200, seconds)
  line = f"({m:5d},{n:5d},{k:5d}) {name}"
  print(line, " ".join(f"{n} {a:.3f}/{b:.3f}" for n, (a, b) in t.items()))
  ours_min, ours_median = t["ours"]
  ratios = {
    n: (a / ours_min, b / ours_median) for n, (a, b) in t.items() if n != "read"
  }
  print(
    "   x ours (min, median):",
    " ".join(f"{n} {a:.2f} {b:.2f};" for n, (a, b) in ratios.items()),
    f"error {error:.2f} * 2^-24",
  )
  if m == 1:
    peak = [8192 * 8192 * 4 / t["read"][i] / 1e6 for i in (0, 1)]
    got = [bytes_each / t["ours"][i] / 1e6 for i in (0, 1)]
    print(
      f"   {got[0]:.1f}, {got[1]:.1f} GB/s of {peak[0]:.1f}, {peak[1]:.1f}:"
      f" {100 * got[0] / peak[0]:.0f} %, {100 * got[1] / peak[1]:.0f} %"
    )
  else:
    print(f"   {2 * m * n * k / ours_min / 1e6:.0f} GFLOP/s")


def quantize_row(name: str, seconds: float):
  number = FORMATS[name][0]
  xs = [
    jnp.asarray(np.random.default_rng(s).standard_normal((4096, 4096)), "f4")
    for s in range(2)
  ]
  ours = jax.jit(
    lambda x: testing.quantize(
      x, format=number, compute_global=int(number == 3)
    )
  )
  copy = jax.jit(lambda x: x + 1)
  variants = {
    "ours": (2, lambda i: jax.block_until_ready(ours(xs[i]))),
    "copy": (2, lambda i: copy(xs[i]).block_until_ready()),
  }
  sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
  import jaxplugin as jp

  theirs = jax.jit(lambda x: jp.quantize(x, getattr(jp, name.upper())))
  variants["jp.quantize"] = (2, lambda i: jax.block_until_ready(theirs(xs[i])))
  t = measure(variants, 60, seconds)
  moved = 4096 * 4096 * (4 + (0.5 if number >= 2 else 1))
  gb = moved / t["ours"][0] / 1e6
  peak = 4096 * 4096 * 8 / t["copy"][0] / 1e6
  line = " ".join(f"{n} {a:.2f}/{b:.2f}" for n, (a, b) in t.items())
  print(f"quantize 4096^2 {name} {line}")
  print(
    f"   {gb:.1f} GB/s of copy {peak:.1f}: {100 * gb / peak:.0f} %;"
    f" jp.quantize / ours {t['jp.quantize'][0] / t['ours'][0]:.1f}"
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rows", default="decode,m16,m128,square,quantize")
  parser.add_argument("--formats", default="mxfp8,mxfp4,nvfp4")
  parser.add_argument("--seconds", type=float, default=3)
  args = parser.parse_args()
  shapes = {
    "decode": [(1, 4096, 4096), (1, 8192, 8192)],
    "m4": [(2, 4096, 4096), (4, 4096, 4096), (8, 4096, 4096)],
    "m16": [(16, 4096, 4096)],
    "m128": [(128, 4096, 4096)],
    "square": [(1024, 1024, 1024), (2048, 2048, 2048)],
  }
  print("isa", testing.library().jaxplugin_cpu_isa().decode())
  for row in args.rows.split(","):
    for name in args.formats.split(","):
      if row == "quantize":
        quantize_row(name, args.seconds)
        continue
      for m, n, k in shapes[row]:
        dot_row(m, n, k, name, args.seconds, best=True)


if __name__ == "__main__":
  main()

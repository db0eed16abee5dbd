# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A function that calls every handler of the CPU kernels, and its results.

`python -m jaxplugin.testing.exported.sample NAME` exports it to NAME.bin next
to this file, once a release, with the oldest JAX that the release supports.
Later releases load that file (docs/how_to/export.md).
"""

from __future__ import annotations

import pathlib
import sys
import zlib

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import jaxplugin as jp

K, N, GROUPS = 64, 8, 2


def weights() -> dict[str, np.ndarray]:
  """f32[N, K] and f32[GROUPS, N, K]: integers that each format here holds."""
  rng = np.random.default_rng(7)
  return {
    "w": rng.integers(-2, 3, (N, K)).astype(np.float32),
    "experts": rng.integers(-2, 3, (GROUPS, N, K)).astype(np.float32),
  }


def rows(m: int) -> np.ndarray:
  """f32[m, K] of integers; each block has a 2, so that scales are exact."""
  x = np.random.default_rng(m).integers(-2, 3, (m, K)).astype(np.float32)
  x[:, ::16] = 2
  return x


def function(x: jax.Array) -> dict[str, jax.Array]:
  """The exported function of f32[m, K]."""
  given = {name: jnp.asarray(w) for name, w in weights().items()}
  w, experts = given["w"], given["experts"]
  x_q = jp.quantize(x, jp.MXFP8)
  sizes = jnp.stack([jnp.int32(1), jnp.int32(x.shape[0]) - 1])
  across = jp.quantize(w.T, jp.MXFP4, axis=0, packed=True)
  plain = jp.block_scaled_dot(x_q, jp.quantize(w, jp.MXFP6_E2M3))
  return {
    "dot": plain,
    "epilogue": jp.block_scaled_dot(
      x_q,
      jp.quantize(w, jp.MXFP4, packed=True),
      global_scale=0.5,
      bias=jnp.arange(N, dtype=jnp.float32),
      activation="relu",
      residual=plain,
    ),
    "bf16": jp.block_scaled_dot(
      x.astype(jnp.bfloat16), jp.quantize(w, jp.MXFP8_E5M2)
    ),
    "ragged": jp.ragged_dot(x_q, jp.quantize(experts, jp.MXFP8), sizes),
    "quantized": jp.dequantize(x_q),
    "two_level": jp.dequantize(jp.quantize(x, jp.NVFP4), jnp.bfloat16),
    "other_axis": across.values,
    "other_axis_scale": jax.lax.bitcast_convert_type(across.scale, jnp.uint8),
  }


def expected(x: np.ndarray) -> dict[str, np.ndarray]:
  """Its results, by NumPy: all sums are exact."""
  w, experts = weights()["w"], weights()["experts"]
  dot = x @ w.T
  # Blocks whose largest value is 2 get the scale 1/2, and values twice as big.
  codes = (w.T * 2).astype(jnp.float4_e2m1fn).view(np.uint8) & 15
  return {
    "dot": dot,
    "epilogue": np.maximum(dot * 0.5 + np.arange(N), 0) + dot,
    "bf16": dot,
    "ragged": np.concatenate([x[:1] @ experts[0].T, x[1:] @ experts[1].T]),
    "quantized": x,
    "two_level": x,
    "other_axis": codes[0::2] | codes[1::2] << 4,
    "other_axis_scale": np.full((K // 32, N), 126),
  }


def export() -> bytes:
  """The serialized module, for any number of rows."""
  (m,) = jax.export.symbolic_shape("m")
  exported = jp.export(function)(jax.ShapeDtypeStruct((m, K), jnp.float32))
  return bytes(exported.serialize())


def path(name: str) -> pathlib.Path:
  return pathlib.Path(__file__).with_name(f"{name}.bin")


def read(name: str) -> bytes:
  """The module that this program wrote."""
  return zlib.decompress(path(name).read_bytes())


if __name__ == "__main__":
  path(sys.argv[1]).write_bytes(zlib.compress(export(), 9))

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Computes the same results in several processes, for a comparison with one.

  python examples/distributed/agreement.py FOLDER --processes 2

The program quantizes, multiplies and differentiates arrays that are split over
a mesh with two devices for each process. Each process writes its parts of the
results to a file.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import launcher
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp

DEVICES: Final = 2  # of a process
TOKENS, K, N = 256, 256, 128
FORMATS: Final = (jp.MXFP8, jp.NVFP4)
TIMEOUT_S: Final = 120
_NUMBERS: Final = (((1,), (0,)), ((), ()))


def operands() -> dict[str, np.ndarray]:
  """x[TOKENS, K], w[K, N] and g[TOKENS, N], of very different magnitudes."""
  rng = np.random.default_rng(0)
  shapes = {"x": (TOKENS, K), "w": (K, N), "g": (TOKENS, N)}
  return {
    name: (
      rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 8, (shape[0], 1))
    ).astype(np.float32)
    for name, shape in shapes.items()
  }


def _as_bytes(x: jax.Array) -> jax.Array:
  """An array that every collective takes, with the same bits."""
  if x.dtype == jnp.float4_e2m1fn:
    return jp.pack_fp4(x)
  return x if x.dtype.itemsize > 1 else x.view(jnp.uint8)


def _quantize(x: Any) -> dict[str, jax.Array]:
  """x in each format along each axis, as bytes."""
  found = {}
  for format in FORMATS:
    for name, axis in (("rows", 1), ("columns", 0)):
      array = jp.quantize(x, format, axis=axis)
      found[f"{format}.{name}.values"] = _as_bytes(array.values)
      found[f"{format}.{name}.scale"] = _as_bytes(array.scale)
      if array.global_scale is not None:
        found[f"{format}.{name}.global_scale"] = array.global_scale
  return found


def _multiply(format: jp.BlockFormat, x: Any, w: Any, g: Any) -> Any:
  """A product and its gradients."""
  dot_general = jp.dot_general(format, format)
  y, vjp = jax.vjp(lambda x, w: dot_general(x, w, _NUMBERS), x, w)
  dx, dw = vjp(g)
  return {f"{format}.y": y, f"{format}.dx": dx, f"{format}.dw": dw}


def _dot(format: jp.BlockFormat, x: Any, w: Any) -> Any:
  y = jp.block_scaled_dot(
    jp.quantize(x, format),
    jp.quantize(w, format, axis=0),
    dimension_numbers=_NUMBERS,
  )
  return {f"{format}.summed": y}


def results(
  mesh: Mesh, formats: Sequence[jp.BlockFormat] = FORMATS
) -> dict[str, jax.Array]:
  """Returns results on a mesh with axes "data" and "model", by format and name.

  Tokens are split over data and n over model. The sums of dw go from process to
  process, and the sums of dx from device to device. "summed" splits k over
  data.

  Args:
    mesh: of the devices of all processes.
    formats: of products; arrays are quantized to each of `FORMATS`.
  """

  def placed(name: str, *axes: str | None) -> jax.Array:
    array = operands()[name]
    return jax.make_array_from_callback(
      array.shape, NamedSharding(mesh, P(*axes)), lambda index: array[index]
    )

  x, w = placed("x", "data", None), placed("w", None, "model")
  found = {**jax.jit(_quantize)(x)}
  multiply = jax.jit(_multiply, static_argnums=0)
  dot = jax.jit(_dot, static_argnums=0)
  for format in formats:
    found |= multiply(format, x, w, placed("g", "data", None))
    found |= dot(format, placed("x", None, "data"), placed("w", "data", None))
  return found


def write(found: dict[str, jax.Array], folder: pathlib.Path) -> None:
  """Writes the parts that this process has, each with its place."""
  parts = {}
  for name, array in found.items():
    for shard in array.addressable_shards:
      places = [
        s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True)
      ]
      parts[json.dumps([name, array.shape, places])] = np.asarray(shard.data)
  np.savez(folder / f"{jax.process_index()}.npz", **parts)


def read(folder: pathlib.Path) -> dict[str, np.ndarray]:
  """The whole arrays of what all processes wrote.

  Raises:
    ValueError: a part of an array is missing, or two differ.
  """
  found: dict[str, np.ndarray] = {}
  written: dict[str, np.ndarray] = {}
  for path in sorted(folder.glob("*.npz")):
    with np.load(path) as parts:
      for key, part in parts.items():
        name, shape, places = json.loads(key)
        index = tuple(slice(*place) for place in places)
        whole = found.setdefault(name, np.zeros(shape, part.dtype))
        seen = written.setdefault(name, np.zeros(shape, bool))
        if not np.array_equal(whole[index][seen[index]], part[seen[index]]):
          raise ValueError(f"{name}: two devices differ at {places}")
        whole[index], seen[index] = part, True
  missing = [name for name, seen in written.items() if not seen.all()]
  if missing:
    raise ValueError(f"parts are missing of {missing}")
  return found


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "folder",
    type=pathlib.Path,
    metavar="FOLDER",
    help="output folder, with a file for each process",
  )
  parser.add_argument("--processes", type=int, default=2, metavar="N")
  parser.add_argument(
    "--formats", nargs="+", default=[str(format) for format in FORMATS]
  )
  arguments = parser.parse_args(argv)
  if not launcher.is_launched():
    given = sys.argv[1:] if argv is None else [*argv]
    launcher.launch(
      [sys.executable, __file__, *given],
      arguments.processes,
      timeout_s=TIMEOUT_S,
    )
    return
  launcher.join(DEVICES)
  devices = np.asarray(jax.devices()).reshape(-1, DEVICES)
  mesh = Mesh(devices, ("data", "model"))
  formats = [f for f in FORMATS if str(f) in arguments.formats]
  write(results(mesh, formats), arguments.folder)
  jax.distributed.shutdown()


if __name__ == "__main__":
  main()

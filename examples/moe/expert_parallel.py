# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Splits the experts of a mixture-of-experts layer over several devices.

The tokens are split over the same devices. The program has two variants:

* `automatic`: the layer of `moe.py`, with weights placed on the devices. Each
  device multiplies the rows of its experts, and the results are summed.
* `dispatched`: expert parallelism in a `jax.shard_map`. Each device quantizes
  its tokens to MXFP8, and sends values and scale factors to the devices of
  their experts. Results return in bf16. Both transfers are an all-to-all with
  a fixed number of rows, the capacity. Rows beyond the capacity are left out
  and counted. The default capacity holds all rows. On GPUs and TPUs,
  `jax.lax.ragged_all_to_all` needs no capacity. XLA has none for CPUs.

  python examples/moe/expert_parallel.py

The program compares both with NumPy in f64. It prints the bytes that each one
sends, from the compiled program. The devices are parts of one CPU, so it
measures no time.
"""

from __future__ import annotations

import argparse
import functools
import re
from typing import Any, Final

import jax
import jax.numpy as jnp
import moe
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp

AXIS: Final = "experts"
LAYER_SPECS: Final = moe.Layer(
  router=P(), up=P(AXIS), up_bias=P(AXIS), down=P(AXIS), down_bias=P(AXIS)
)
_BYTES: Final = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "u16": 2}
_COLLECTIVE: Final = re.compile(
  r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|"
  r"collective-permute)(?:-start)?\("
)


def placed(layer: moe.Layer, mesh: jax.sharding.Mesh) -> moe.Layer:
  """The layer, each device with its part of the experts."""
  shardings = moe.Layer(*(NamedSharding(mesh, s) for s in LAYER_SPECS))
  return jp.shard(layer, shardings)


def automatic(layer: moe.Layer, x: jax.Array) -> jax.Array:
  """The layer's result, by whatever its arrays' shardings ask for.

  Args:
    layer: `placed`.
    x: f32[tokens, model], its tokens over the devices or not.
  """
  return moe.apply(layer, x, moe.ours)


def dispatched(
  layer: moe.Layer,
  x: jax.Array,
  mesh: jax.sharding.Mesh,
  *,
  capacity: int | None = None,
  combine_dtype: Any = jnp.bfloat16,
) -> tuple[jax.Array, jax.Array]:
  """The layer's result, f32[tokens, model], and how many rows were left out.

  Args:
    layer: `placed`.
    x: f32[tokens, model], its tokens over the devices.
    mesh: of one axis, `AXIS`.
    capacity: rows that a device sends to another at most; None is all of them.
    combine_dtype: f32 or bf16: of the results on their way back.
  """
  rows = x.shape[0] // mesh.shape[AXIS] * moe.TOP
  local = functools.partial(
    _dispatched,
    capacity=rows if capacity is None else capacity,
    combine_dtype=combine_dtype,
  )
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(LAYER_SPECS, P(AXIS)),
    out_specs=(P(AXIS), P()),
  )(layer, x)


def _dispatched(
  layer: moe.Layer, x: jax.Array, *, capacity: int, combine_dtype: Any
) -> tuple[jax.Array, jax.Array]:
  """`dispatched` of one device: its tokens, and its experts."""
  num_own = layer.up.shape[0]
  experts, weights = moe.route(layer, x)
  expert, token = experts.reshape(-1), jnp.arange(experts.size) // moe.TOP
  to, slot = _slots(expert // num_own, lax.axis_size(AXIS))
  is_kept = slot < capacity

  # Quantized once a token, however many experts get it.
  tokens = jp.quantize(x, jp.MXFP8)
  send = functools.partial(_sent, to, slot, capacity=capacity)
  values = send(tokens.values[token], fill=0)
  scale = send(tokens.scale[token], fill=0)
  own = send(
    expert % num_own, fill=num_own
  )  # an empty slot belongs to no expert

  # As anywhere: rows sorted by expert, and how many there are of each.
  order = jnp.argsort(own, stable=True)
  sizes = jnp.bincount(own, length=num_own).astype(jnp.int32)
  rows = jp.ScaledArray(values[order], scale[order], None, jp.MXFP8)
  results = moe.ours(layer, rows, sizes)

  results = jnp.zeros_like(results).at[order].set(results)
  back = _all_to_all(results.astype(combine_dtype), capacity)
  mine = back.at[to * capacity + slot].get(mode="fill", fill_value=0)
  mine = jnp.where(is_kept[:, None], mine.astype(jnp.float32), 0)
  weighted = mine.reshape(*weights.shape, -1) * weights[..., None]
  return weighted.sum(1), lax.psum(jnp.sum(~is_kept), AXIS)


def _slots(to: jax.Array, devices: int) -> tuple[jax.Array, jax.Array]:
  """The device of each row, and the row's place among those for it."""
  is_for = jax.nn.one_hot(to, devices, dtype=jnp.int32)
  before = jnp.cumsum(is_for, axis=0) - is_for
  return to, jnp.sum(before * is_for, axis=1)


def _sent(
  to: jax.Array, slot: jax.Array, x: jax.Array, *, capacity: int, fill: int
) -> jax.Array:
  """What this device gets of all: [devices * capacity, ...]."""
  shape = (lax.axis_size(AXIS), capacity, *x.shape[1:])
  # A slot beyond the capacity is dropped.
  buffer = jnp.full(shape, fill, x.dtype).at[to, slot].set(x, mode="drop")
  return _all_to_all(buffer.reshape(-1, *x.shape[1:]), capacity)


def _all_to_all(x: jax.Array, capacity: int) -> jax.Array:
  """Rows for each device, `capacity` of each, against those from each."""
  dtype = x.dtype
  if dtype.itemsize < 4:  # XLA:CPU would send such floats as wider ones
    x = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * dtype.itemsize}"))
  parts = x.reshape(-1, capacity, *x.shape[1:])
  parts = lax.all_to_all(parts, AXIS, split_axis=0, concat_axis=0)
  return lax.bitcast_convert_type(parts.reshape(x.shape), dtype)


def collectives(compiled: jax.stages.Compiled) -> list[tuple[str, int]]:
  """The collectives of a program, and the bytes that each device gets."""
  found = []
  for types, kind in _COLLECTIVE.findall(compiled.as_text()):
    total = 0
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", types):
      count = int(np.prod([int(d) for d in dims.split(",") if d]))
      total += count * _BYTES.get(dtype, 4)
    found.append((kind, total))
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--devices", type=int, default=4)
  parser.add_argument("--tokens", type=int, default=64)
  parser.add_argument(
    "--format", default="mxfp4", help="format of the experts; default: mxfp4"
  )
  args = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", args.devices)
  mesh = jax.make_mesh(
    (args.devices,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,)
  )
  layer = moe.quantized(moe.make_layer(moe.SMALL), args.format)
  plain = moe.dequantized(layer)
  rng = np.random.default_rng(1)
  x = rng.standard_normal((args.tokens, moe.SMALL.model), dtype=np.float32)
  tokens = jax.device_put(x, NamedSharding(mesh, P(AXIS)))
  weights = placed(layer, mesh)

  ways: dict[str, Any] = {
    "automatic": jax.jit(automatic),
    "dispatched": jax.jit(lambda layer, x: dispatched(layer, x, mesh)[0]),
  }
  seen = {
    "automatic": x,
    "dispatched": np.asarray(jp.dequantize(jp.quantize(x, jp.MXFP8))),
  }
  for name, run in ways.items():
    exact = moe.oracle(plain, x, seen[name])
    error = moe.relative_error(run(weights, tokens), exact)
    print(f"{name}: relative error to NumPy in f64 {error:.1e}; each device")
    for kind, size in collectives(run.lower(weights, tokens).compile()):
      print(f"  {kind:18s} {size / 1024:8.1f} KiB")


if __name__ == "__main__":
  main()

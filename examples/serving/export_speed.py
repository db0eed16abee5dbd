# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Times an exported matmul in turns with the same matmul under `jit`.

    python examples/serving/export_speed.py --json times.json

The matmul is `jp.linear` of x (m, k) with an MXFP8 weight (n, k). It runs on
one CPU device, and split over two devices along n and along k:

    jit          the function itself, under `jit`
    jp.export    the module of `jp.export`, serialized and loaded
    jax.export   the module of `jax.export.export`, with XLA's operations only

Before they are timed, the first two must have the same bits, and the third must
be within a relative difference of 1e-5. A time is that of one call from Python
until its result is ready.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxplugin as jp
from jaxplugin.lab.bench import devices, timing

NUM_DEVICES: Final = 2
VARIANTS: Final = ("jit", "jp.export", "jax.export")
# How x and the weight are split over the devices; None: one device.
LAYOUTS: Final[dict[str, Any]] = {
  "one device": None,
  "n over two": ((), ("d",)),
  "k over two": ((None, "d"), (None, "d")),
}
# Relative to the largest result: f32 sums in two orders.
_TOLERANCE: Final = 1e-5
# Time for the three variants of a layout. A variant that has used its third
# leaves the remaining rounds, so fast variants have hundreds of rounds.
_SECONDS: Final = 9.0


def operands(
  layout: str, m: int, n: int, k: int
) -> tuple[jax.Array, jp.ScaledArray]:
  """x f32[m, k] and a weight MXFP8[n, k], placed."""
  random = np.random.default_rng(0)
  x = jnp.asarray(random.normal(size=(m, k)), jnp.float32)
  w = jp.quantize(jnp.asarray(random.normal(size=(n, k)), jnp.float32), "mxfp8")
  split = LAYOUTS[layout]
  if split is None:
    return x, w
  mesh = Mesh(np.asarray(jax.devices()[:NUM_DEVICES]), ("d",))
  of_x, of_w = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in split)
  return jax.device_put(x, of_x), jp.shard(w, of_w)


def functions(args: Any) -> dict[str, Callable[..., jax.Array]]:
  """The compiled function of each variant."""
  made = {"jit": jp.linear}
  for name, export in (
    ("jp.export", jp.export),
    ("jax.export", jax.export.export),
  ):
    exported = export(jax.jit(jp.linear))(*args)
    made[name] = jax.export.deserialize(exported.serialize()).call
  return {
    name: jax.jit(function).lower(*args).compile()
    for name, function in made.items()
  }


def measure(layout: str, m: int, n: int, k: int, rounds: int) -> dict[str, Any]:
  """Times of each variant, and its ratio to that of `jit`, round by round.

  Raises:
    AssertionError: results differ.
  """
  args = operands(layout, m, n, k)
  calls = functions(args)
  results = {name: np.asarray(call(*args)) for name, call in calls.items()}
  np.testing.assert_array_equal(results["jp.export"], results["jit"])
  np.testing.assert_allclose(
    results["jax.export"],
    results["jit"],
    rtol=0,
    atol=_TOLERANCE * float(np.abs(results["jit"]).max()),
  )

  def timed(name: str) -> float:
    call = calls[name]
    jax.block_until_ready(call(*args))  # what the one before it left behind
    start = time.perf_counter()
    jax.block_until_ready(call(*args))
    return 1e3 * (time.perf_counter() - start)

  times = timing.in_turns(
    {name: functools.partial(timed, name) for name in calls},
    rounds=rounds,
    seconds=_SECONDS,
  )
  found: dict[str, Any] = {}
  for name, samples in times.items():
    ratio = timing.ratio(samples, times["jit"])
    assert ratio is not None
    milliseconds = timing.stats([x for x in samples if x is not None])
    found[name] = {
      "ms": dataclasses.asdict(milliseconds),
      "times_jit": dataclasses.asdict(ratio),
    }
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--m", type=int, default=1)
  parser.add_argument("--n", type=int, default=4096)
  parser.add_argument("--k", type=int, default=4096)
  parser.add_argument("--rounds", type=int, default=500)
  parser.add_argument("--json", metavar="FILE")
  args = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
  rows = []
  for layout in LAYOUTS:
    variants = measure(layout, args.m, args.n, args.k, args.rounds)
    rows.append({"layout": layout, "variants": variants})
    for name, row in variants.items():
      ms, ratio = row["ms"], row["times_jit"]
      print(
        f"{layout:10} {name:10} {ms['median']:8.3f} ms   {ratio['median']:.2f}"
        f" times jit's ({ratio['q1']:.2f}-{ratio['q3']:.2f})"
      )
  if args.json:
    # Not the file: where it lies is this machine's own affair.
    given = [x for x in sys.argv[1:] if x not in ("--json", args.json)]
    given = [x for x in given if not x.startswith("--json=")]
    result = {
      "command": ["examples/serving/export_speed.py", *given],
      "environment": devices.environment(devices.find("cpu")),
      "sizes": {"m": args.m, "n": args.n, "k": args.k},
      "rows": rows,
    }
    with open(args.json, "w") as file:
      file.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
  main()

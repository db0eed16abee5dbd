# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the device can do at most, measured in the same run.

Each ceiling is the best sample of the best of its ways, with the same clock and
the same rotation as the rows:

  read   bytes/s of reading memory. CPU: an f32 product of m = 1 by XLA, and
         NumPy's maximum in one thread a core. GPU: XLA's sum.
  copy   bytes/s read and written by x + 1 into a fresh result, as XLA's are.
  bf16   flop/s of a large bf16 product by XLA.
  f32    flop/s of a large f32 product by XLA.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.bench import devices
from jaxplugin.bench import execution
from jaxplugin.bench import timing
from jaxplugin.bench.peers import variants
from jaxplugin.core import targets

NAMES: Final = ("read", "copy", "bf16", "f32")
_LAST: Final = (((1,), (1,)), ((), ()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ceilings:
  """Bytes or floating-point operations a second; see the module.

  `memory` is what products are measured against: `read` on a CPU; `copy` on a
  GPU, where it is the usual measure.
  """

  read: float
  copy: float
  bf16: float
  f32: float
  is_gpu: bool

  @property
  def memory(self) -> float:
    return self.copy if self.is_gpu else self.read

  def raised(self, name: str, value: float) -> Ceilings:
    """With a ceiling that turned out higher."""
    return dataclasses.replace(self, **{name: max(value, getattr(self, name))})

  def seconds(self, num_bytes: float, flops: float, *, is_f32: bool) -> float:
    """The least that moving the bytes and doing the operations can take."""
    rate = self.f32 if is_f32 else max(self.bf16, self.f32)
    return max(num_bytes / self.memory, flops / rate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """What ceilings are measured with.

  Attributes:
    side: of the matrix that is read and copied, f32[side, side].
    product: m = n = k of the products.
    rounds: samples of each.
  """

  side: int
  product: int
  rounds: int


CPU_SIZES: Final = Sizes(side=8192, product=2048, rounds=15)
GPU_SIZES: Final = Sizes(side=16384, product=8192, rounds=10)
QUICK_SIZES: Final = Sizes(side=2048, product=512, rounds=5)


def _variant(
  name: str,
  function: Callable[..., Any],
  operands: Callable[[int], tuple[Any, ...]],
  *,
  num_bytes: int = 0,
  flops: int = 0,
  on_host: bool = False,
) -> variants.Variant:
  return variants.Variant(
    name=name,
    role="ceiling",
    function=function,
    operands=operands,
    check=lambda i, result: None,
    num_bytes=num_bytes,
    flops=flops,
    on_host=on_host,
  )


def read_variants(side: int, is_gpu: bool) -> list[variants.Variant]:
  """Ways to read f32[side, side]; a result depends on every byte."""
  x = jnp.ones((side, side), jnp.float32)
  num_bytes = x.size * x.itemsize
  if is_gpu:
    return [_variant("read", jnp.sum, lambda i: (x,), num_bytes=num_bytes)]
  row = jnp.ones((1, side), jnp.float32)
  parts = np.array_split(np.asarray(x), _cores())
  pool = concurrent.futures.ThreadPoolExecutor(len(parts))

  def read_by_numpy(*arrays: Any) -> list[Any]:
    return list(pool.map(np.max, arrays))

  return [
    _variant(
      "read",
      lambda x, y: lax.dot_general(x, y, _LAST),
      lambda i: (row, x),
      num_bytes=num_bytes,
    ),
    _variant(
      "read by numpy",
      read_by_numpy,
      lambda i: tuple(parts),
      num_bytes=num_bytes,
      on_host=True,
    ),
  ]


def warm_copy_variant(rows: int, columns: int) -> variants.Variant:
  """x + 1 into memory that is there, by NumPy in one thread a core.

  A result of XLA:CPU is fresh memory, which the system fills with zeros page by
  page: a copy that pays for it too is no hard ceiling.
  """
  x = np.ones((rows, columns), np.float32)
  out = np.zeros_like(x)
  parts = np.array_split(x, _cores()), np.array_split(out, _cores())
  pool = concurrent.futures.ThreadPoolExecutor(_cores())

  def copy(x: np.ndarray, out: np.ndarray) -> None:
    del x, out
    list(pool.map(lambda x, out: np.add(x, 1, out=out), *parts))

  return _variant(
    "warm copy",
    copy,
    lambda i: (x, out),
    num_bytes=2 * x.nbytes,
    on_host=True,
  )


def _cores() -> int:
  return targets.detect_target("cpu").core_count or 1


def _products(size: int, is_gpu: bool) -> list[variants.Variant]:
  # Of random numbers: a GPU that multiplies ones needs less power, and clocks
  # higher.
  x = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
  result = []
  for name, dtype, result_dtype, precision in (
    ("bf16", jnp.bfloat16, jnp.bfloat16 if is_gpu else jnp.float32, None),
    ("f32", jnp.float32, jnp.float32, lax.Precision.HIGHEST),
  ):
    pair = (x.astype(dtype), x.T.astype(dtype))
    function = functools.partial(
      lax.dot_general,
      dimension_numbers=_LAST,
      precision=precision,
      preferred_element_type=result_dtype,
    )
    result.append(
      _variant(
        name,
        function,
        lambda i, pair=pair: pair,  # type: ignore[misc]
        flops=2 * size**3,
      )
    )
  return result


def measure(device: devices.Device, sizes: Sizes) -> Ceilings:
  """Measures all of them, in turns."""
  x = jnp.ones((sizes.side, sizes.side), jnp.float32)
  copy = _variant(
    "copy",
    lambda x: x + 1,
    lambda i: (x,),
    num_bytes=2 * x.size * x.itemsize,
  )
  all_variants = [
    *read_variants(sizes.side, device.is_gpu),
    copy,
    *_products(sizes.product, device.is_gpu),
  ]
  # On a GPU several calls are under way, as in the rows.
  plan = execution.Plan(groups=1, repeats=8 if device.is_gpu else 1)
  best = dict.fromkeys(NAMES, 0.0)
  timed = {v.name: execution.Timed(v, plan) for v in all_variants}
  for one in timed.values():
    one.warm_up()
  samples = timing.in_turns(
    {name: one.sample for name, one in timed.items()},
    rounds=sizes.rounds,
    seconds=float("inf"),
  )
  for variant in all_variants:
    milliseconds = min(s for s in samples[variant.name] if s is not None)
    rate = (variant.num_bytes or variant.flops) / milliseconds * 1e3
    name = variant.name.partition(" ")[0]
    best[name] = max(best[name], rate)
  return Ceilings(is_gpu=device.is_gpu, **best)

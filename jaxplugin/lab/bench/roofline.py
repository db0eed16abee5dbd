# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the ceilings of the device in the same run.

A ceiling is the best sample of several ways to do the work. Rows and ceilings
are timed by the same function:

  read   bytes/s of reading memory. CPU: an f32 dot of m = 1 by XLA, and NumPy's
         maximum in one thread per core. NumPy reads XLA's memory, and an array
         for which NumPy requests huge pages. GPU: XLA's sum.
  copy   bytes/s that x + 1 reads and writes, with a new result of XLA. GPU: the
         limit of memory. CPU: the system spends most of this time on filling
         new pages with zeros, so `warm` is usually higher.
  warm   bytes/s that NumPy's x + 1 or a plain copy reads and writes. The result
         is in mapped memory. One thread per core (CPU).
  fresh  bytes/s of a plain copy into newly mapped memory, with huge pages if
         the system has them (CPU). XLA allocates results in such memory, whose
         pages the system fills with zeros. `fresh` is printed, but it is not a
         limit.
  bf16   flop/s of a large bf16 dot by XLA.
  f32    flop/s of a large f32 dot by XLA.
  int8   integer operations/s (CPU). Not measured: f32's rate times a factor of
         the instruction set. bf16's rate is raised in the same way.

A run has one ceiling of each kind: the highest sample of the whole run.
Memory-bound rows are timed in turns with reading memory, because the bandwidth
of a shared machine varies. A sample above the ceiling raises the ceiling, also
for earlier rows.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import mmap
import os
from collections.abc import Callable, Collection
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.core import targets
from jaxplugin.lab.bench import devices, execution, timing
from jaxplugin.lab.bench.peers import variants

NAMES: Final = ("read", "copy", "warm", "fresh", "bf16", "f32")
# Ceilings that are also peers.
PRODUCTS: Final = ("bf16", "f32")
_LAST: Final = (((1,), (1,)), ((), ()))
# Operations that a core does in the time of one f32 operation, by flags in
# /proc/cpuinfo. With equal width and rate, vdpbf16ps does 2 times and vpdpbusd
# 4 times as many operations as an FMA. vpmaddubsw and vpmaddwd together do 4
# times as many operations in two instructions.
_BF16_FACTORS: Final = (("avx512_bf16", 2.0),)
# Flags that are used if the instruction set is limited.
_LIMITED_FLAGS: Final = ("avx2",)
_INT8_FACTORS: Final = (("avx512_vnni", 4.0), ("avx_vnni", 4.0), ("avx2", 2.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ceilings:
  """Bytes or operations per second; 0 if not measured. See the module.

  `memory` is the ceiling of dots: `copy` on a GPU, `read` on a CPU. `codec` is
  the ceiling of quantizing and dequantizing: the larger of `copy` and `warm`.
  """

  read: float
  copy: float
  bf16: float
  f32: float
  is_gpu: bool
  warm: float = 0.0
  fresh: float = 0.0
  int8: float = 0.0

  @property
  def memory(self) -> float:
    return self.copy if self.is_gpu else self.read

  @property
  def codec(self) -> float:
    return max(self.copy, self.warm)

  def raised(self, name: str, value: float) -> Ceilings:
    """Returns the ceilings, with `name` raised to `value` if that is higher."""
    return dataclasses.replace(self, **{name: max(value, getattr(self, name))})

  def rate(self, arithmetic: variants.Arithmetic) -> float:
    """Returns operations per second."""
    if arithmetic == "f32":
      return self.f32
    floats = max(self.bf16, self.f32)
    return max(floats, self.int8) if arithmetic == "int8" else floats

  def seconds(
    self,
    num_bytes: float,
    flops: float,
    arithmetic: variants.Arithmetic = "floats",
  ) -> float:
    """Returns the least time to move the bytes and do the operations."""
    if not flops:
      return num_bytes / self.codec
    return max(num_bytes / self.memory, flops / self.rate(arithmetic))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CeilingSizes:
  """Sizes for measuring ceilings, and the number of samples of each way."""

  side: int  # of the f32 matrix that is read and copied
  product: int  # m = n = k of the dots
  rounds: int


CPU_SIZES: Final = CeilingSizes(side=8192, product=2048, rounds=15)
GPU_SIZES: Final = CeilingSizes(side=16384, product=8192, rounds=10)
QUICK_SIZES: Final = CeilingSizes(side=2048, product=512, rounds=5)


def _variant(
  name: str,
  function: Callable[..., Any],
  operands: Callable[[int], tuple[Any, ...]],
  **fields: Any,
) -> variants.Variant:
  return variants.Variant(
    name=name,
    role="ceiling",
    function=function,
    operands=operands,
    check=lambda i, result: None,
    **fields,
  )


def read_variants(side: int, is_gpu: bool) -> list[variants.Variant]:
  """Returns ways to read f32[side, side]. Each result needs every byte."""
  x = jnp.ones((side, side), jnp.float32)
  num_bytes = x.size * x.itemsize
  if is_gpu:
    return [_variant("read", jnp.sum, lambda i: (x,), num_bytes=num_bytes)]
  row = jnp.ones((1, side), jnp.float32)
  pool = concurrent.futures.ThreadPoolExecutor(_cores())

  def read_by_numpy(*arrays: Any) -> list[Any]:
    return list(pool.map(np.max, arrays))

  def by_numpy(name: str, array: np.ndarray) -> variants.Variant:
    parts = tuple(np.array_split(array, _cores()))
    return _variant(
      name,
      read_by_numpy,
      lambda i: parts,
      num_bytes=num_bytes,
      on_host=True,
    )

  return [
    _variant(
      "read",
      lambda x, y: lax.dot_general(x, y, _LAST),
      lambda i: (row, x),
      num_bytes=num_bytes,
    ),
    by_numpy("read by numpy", np.asarray(x)),
    by_numpy("read huge pages", np.ones((side, side), np.float32)),
  ]


def copy_variants(rows: int, columns: int) -> list[variants.Variant]:
  """Returns ways to copy f32[rows, columns] by NumPy in one thread per core.

  Two ways copy into mapped memory. One way copies into new memory.
  """
  x = np.ones((rows, columns), np.float32)
  there = np.zeros_like(x)
  pool = concurrent.futures.ThreadPoolExecutor(_cores())

  def in_parts(copy: Callable[..., Any], out: np.ndarray) -> np.ndarray:
    # Reads the outer `x`, because the caller's argument may be a copy of it.
    parts = np.array_split(out, _cores()), np.array_split(x, _cores())
    list(pool.map(copy, *parts))
    return out

  def plus_one(out: np.ndarray, x: np.ndarray) -> None:
    np.add(x, 1, out=out)

  def variant(name: str, copy: Callable[[], Any]) -> variants.Variant:
    return _variant(
      name,
      lambda x: copy(),
      lambda i: (x,),
      num_bytes=2 * x.nbytes,
      on_host=True,
    )

  return [
    variant("warm copy", lambda: in_parts(plus_one, there)),
    variant("warm plain copy", lambda: in_parts(np.copyto, there)),
    variant("fresh copy", lambda: in_parts(np.copyto, _fresh_like(x))),
  ]


def _fresh_like(x: np.ndarray) -> np.ndarray:
  """Returns an array in newly mapped memory. The array owns the memory."""
  if not hasattr(mmap, "MAP_PRIVATE"):
    return np.empty_like(x)
  memory = mmap.mmap(-1, x.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
  if hasattr(mmap, "MADV_HUGEPAGE"):
    # Fails on a system without huge pages.
    with contextlib.suppress(OSError):
      memory.madvise(mmap.MADV_HUGEPAGE)
  return np.frombuffer(memory, x.dtype).reshape(x.shape)


def _cores() -> int:
  return targets.detect_target("cpu").core_count or 1


def _products(size: int, is_gpu: bool) -> list[variants.Variant]:
  # Random numbers: a GPU that multiplies ones needs less power, so it would run
  # at a higher clock.
  x = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)

  def product(
    name: str, dtype: Any, result_dtype: Any, precision: Any
  ) -> variants.Variant:
    pair = (x.astype(dtype), x.T.astype(dtype))
    function = functools.partial(
      lax.dot_general,
      dimension_numbers=_LAST,
      precision=precision,
      preferred_element_type=result_dtype,
    )
    return _variant(name, function, lambda i: pair, flops=2 * size**3)

  of_bf16 = jnp.bfloat16 if is_gpu else jnp.float32
  return [
    product("bf16", jnp.bfloat16, of_bf16, None),
    product("f32", jnp.float32, jnp.float32, lax.Precision.HIGHEST),
  ]


def measure(device: devices.BenchDevice, sizes: CeilingSizes) -> Ceilings:
  """Measures all ceilings, in turns."""
  x = jnp.ones((sizes.side, sizes.side), jnp.float32)
  copy = _variant(
    "copy",
    lambda x: x + 1,
    lambda i: (x,),
    num_bytes=2 * x.size * x.itemsize,
  )
  all_variants = [
    *read_variants(sizes.side, device.is_gpu),
    *([] if device.is_gpu else copy_variants(sizes.side, sizes.side)),
    copy,
    *_products(sizes.product, device.is_gpu),
  ]
  # On a GPU, several calls are in flight, as in "step" mode.
  plan = execution.CallPlan(groups=1, repeats=8 if device.is_gpu else 1)
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
    name = ceiling_of(variant.name)
    best[name] = max(best[name], rate)
  found = Ceilings(is_gpu=device.is_gpu, **best)
  return found if device.is_gpu else with_factors(found, _cpu_flags())


def ceiling_of(variant: str) -> str:
  """Returns the element of `NAMES` that a variant measures."""
  return variant.partition(" ")[0]


def with_factors(found: Ceilings, flags: Collection[str]) -> Ceilings:
  """Returns the ceilings, with bf16 and int8 derived from a CPU's f32 rate."""
  for name, known in (("bf16", _BF16_FACTORS), ("int8", _INT8_FACTORS)):
    factor = next((factor for flag, factor in known if flag in flags), 0.0)
    found = found.raised(name, factor * found.f32)
  return found


def _cpu_flags() -> frozenset[str]:
  found = frozenset(devices.cpu_info("flags").split())
  is_limited = devices.KERNELS_LIMIT in os.environ
  return found.intersection(_LIMITED_FLAGS) if is_limited else found

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights in the layout that one device reads fastest, prepared at load.

docs/concepts/layouts.md has the measurements. The gain is not measured on GPUs.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
from collections.abc import Callable
from typing import Any, Final, Literal

import jax
import numpy as np

from jaxplugin.arrays import interleaving, layouts, scaled_array, validation
from jaxplugin.core import formats, targets

_Weights = list[scaled_array.ScaledArray]
Preparation = Literal["none", "packed", "bytes", "interleaved", "swizzled"]

_WHO: Final = "prepare_weights"
_FIRST_UPCAST: Final = (8, 0)
_FIRST_NATIVE: Final = (10, 0)
# An array of this rank or more is a stack, which programs slice.
_STACK_RANK: Final = 3
# On x86-64, and on aarch64 with pages of 4 KiB.
_HUGE_PAGE: Final = 2 << 20
# Weights of fewer bytes are not copied to huge pages.
_LEAST_BYTES: Final = 4 << 20


def prepare_weights(tree: Any, target: targets.Target | None = None) -> Any:
  """Returns the same weights in the order that `target` reads fastest.

  Shapes, formats and dequantized values do not change. Every function accepts
  the result. A backend that needs the usual order restores it in each call, and
  `jp.explain` says so. The page "Layouts" has measurements.

  On CPUs:

  * Stacks (rank 3 or more) become bytes, with FP4 packed. XLA:CPU then slices
    them without a conversion. Do not prepare an FP8 stack that one dot takes as
    a batch, because each call would copy it.
  * Other FP4 weights are packed.
  * Linux, outside of `jit`: weights of 4 MiB or more in all are copied to huge
    pages, which small weights share. Delete the original arrays.

  On NVIDIA GPUs, if the last axis is the blocked one:

  * Compute capability 8.0 to 9.x: FP4 values are interleaved as
    uint32[..., k / 8].
  * 10.0 and later: scales become "swizzled_128x4".

  On xla, cpu and triton, the bits of a matmul do not change, with one
  exception: Triton's kernel for up to 64 rows of interleaved values on 9.0 adds
  in another order, within the bound.

  Interleaved values can be sharded between whole blocks. A swizzled scale
  cannot be sharded; inside of `shard_map`, prepare each device's part.

  Args:
    tree: a `ScaledArray`, or a tree. Other leaves are returned unchanged.
    target: the device. None is that of `use_target`, or the local one.

  Returns:
    A tree of the same structure.

  Raises:
    TypeError: If target is not a `Target`.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> w_q = jp.quantize(jnp.ones((2, 8, 32)), "mxfp8")
    >>> jp.prepare_weights(w_q, jp.named_target("cpu")).values.dtype.name
    'uint8'
  """
  if target is None:
    target = targets.current_target()
  targets.require(_WHO, target, "a jp.Target or None")
  known = target
  # The target may describe another machine.
  has_kernels = (
    known.platform == "cpu"
    and known.cpu_kernels is not None
    and targets.detect_target("cpu").cpu_kernels is not None
  )

  def prepare(array: scaled_array.ScaledArray) -> scaled_array.ScaledArray:
    validation.require_unconverted(_WHO, array)
    how = preparation(array, known)
    return array if how == "none" else _prepared(array, how)

  tree = _map_weights(prepare, tree)
  if not has_kernels or not hasattr(mmap, "MADV_HUGEPAGE"):  # not on Linux
    return tree
  weights = iter(_in_huge_pages(_weights(tree)))
  return _map_weights(lambda _: next(weights), tree)


def unprepare_weights(tree: Any) -> Any:
  """Undoes `prepare_weights`: usual order of values, linear scales.

  FP4 values that were prepared stay packed, two per byte.

  Args:
    tree: a `ScaledArray`, or a tree. Other leaves are returned unchanged.

  Returns:
    A tree of the same structure.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> w_q = jp.quantize(jnp.ones((2, 8, 32)), "mxfp8")
    >>> prepared = jp.prepare_weights(w_q, jp.named_target("cpu"))
    >>> jp.unprepare_weights(prepared).values.dtype.name
    'float8_e4m3fn'
  """

  def unprepare(array: scaled_array.ScaledArray) -> scaled_array.ScaledArray:
    validation.require_unconverted("unprepare_weights", array)
    return _unprepared(array)

  return _map_weights(unprepare, tree)


def preparation(
  array: scaled_array.ScaledArray, target: targets.Target
) -> Preparation:
  """Returns the step that `prepare_weights` takes for an array. Pure."""
  if target.platform == "cpu" and 0 not in array.shape:
    has_byte_scales = array.scale.dtype.itemsize == 1
    if array.ndim >= _STACK_RANK and has_byte_scales:
      return "none" if array.is_bytes else "bytes"
    is_packed = array.is_packed or not array.format.has_pairs
    is_usual = is_packed and array.scale_layout == layouts.LINEAR
    return "none" if is_usual else "packed"
  capability = target.compute_capability
  if capability is None or array.axis != array.ndim - 1 or 0 in array.shape:
    return "none"
  if capability >= _FIRST_NATIVE:
    can = array.format.is_known and array.ndim > 1
    return "swizzled" if can else "none"
  if capability < _FIRST_UPCAST:
    return "none"
  can = layouts.may_be_interleaved(array.format)
  has_whole_blocks = array.shape[-1] % array.block_size == 0
  return "interleaved" if can and has_whole_blocks else "none"


def _in_huge_pages(weights: _Weights) -> _Weights:
  """Copies the arrays that are on one CPU device to huge pages.

  All copies share one block of memory, because arrays in separate blocks have
  small pages at both ends. JAX uses the copies where they are. The system gets
  the memory back when all are deleted.
  """
  leaves, structure = jax.tree.flatten(weights)
  places = [i for i, x in enumerate(leaves) if _is_movable(x)]
  # JAX would copy an array that does not start at a multiple of 64 bytes.
  sizes = [-(-leaves[i].nbytes // 64) * 64 for i in places]
  if sum(sizes) < _LEAST_BYTES:
    return weights
  # Private, because the pages of a shared mapping are small.
  block = mmap.mmap(
    -1, sum(sizes) + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
  )
  with contextlib.suppress(OSError):  # a system without huge pages
    block.madvise(mmap.MADV_HUGEPAGE)
  memory = np.frombuffer(block, np.uint8)
  start = -memory.ctypes.data % _HUGE_PAGE
  for i, size in zip(places, sizes, strict=True):
    leaves[i] = _copied(leaves[i], memory[start : start + size])
    start += size
  return jax.tree.unflatten(structure, leaves)


def _is_movable(x: Any) -> bool:
  if isinstance(x, jax.core.Tracer) or x.dtype in formats.FOUR_BITS:
    return False
  if isinstance(x, jax.Array):
    devices = x.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"
  return isinstance(x, np.ndarray)  # not a jax.ShapeDtypeStruct


def _copied(x: jax.Array | np.ndarray, memory: np.ndarray) -> jax.Array:
  """Copies `x` to the first bytes of `memory`, on the device of `x`."""
  values = np.asarray(x)
  copy = memory[: values.nbytes].view(values.dtype).reshape(values.shape)
  np.copyto(copy, values)
  if isinstance(x, np.ndarray):
    return jax.device_put(copy, may_alias=True)
  if x.committed:
    return jax.device_put(copy, x.sharding, may_alias=True)
  with jax.default_device(next(iter(x.devices()))):
    return jax.device_put(copy, may_alias=True)


def _is_weight(x: Any) -> bool:
  return isinstance(x, scaled_array.ScaledArray)


def _weights(tree: Any) -> _Weights:
  leaves = jax.tree.leaves(tree, is_leaf=_is_weight)
  return [x for x in leaves if _is_weight(x)]


def _map_weights(
  function: Callable[[scaled_array.ScaledArray], scaled_array.ScaledArray],
  tree: Any,
) -> Any:
  return jax.tree.map(
    lambda x: function(x) if _is_weight(x) else x, tree, is_leaf=_is_weight
  )


@functools.partial(jax.jit, static_argnames="how")
def _prepared(
  array: scaled_array.ScaledArray, how: Preparation
) -> scaled_array.ScaledArray:
  if how == "packed":
    return _unprepared(array).pack()
  if how == "bytes":
    return _unprepared(array).to_bytes()
  array = array.to_floats()
  if how == "interleaved":
    if array.is_interleaved:
      return array
    array = _unprepared(array).pack()
    values = interleaving.interleave(array.values)
    return scaled_array.replace(array, values=values)
  # An array that was prepared for another device gets the usual order first.
  if array.is_interleaved:
    array = array.pack()
  if array.scale_layout == layouts.SWIZZLED:
    return array
  return scaled_array.replace(
    array,
    scale=layouts.swizzle_scale(array.scale),
    scale_layout=layouts.SWIZZLED,
  )


@jax.jit
def _unprepared(array: scaled_array.ScaledArray) -> scaled_array.ScaledArray:
  array = array.to_floats()
  if array.is_interleaved:
    array = array.pack()
  if array.scale_layout == layouts.LINEAR:
    return array
  return scaled_array.replace(
    array, scale=array.linear_scale(), scale_layout=layouts.LINEAR
  )

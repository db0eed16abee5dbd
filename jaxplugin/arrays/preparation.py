# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights brought into the order that one device reads fastest, once at load.

What it is worth is known from compiled kernels alone, not from a GPU: see
`prepare_weights`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from typing import Final
from typing import Literal

import jax
import jax.ffi
import numpy as np

from jaxplugin.arrays import interleaving
from jaxplugin.arrays import layouts
from jaxplugin.arrays import scaled_array
from jaxplugin.arrays import validation
from jaxplugin.core import formats
from jaxplugin.core import targets

Preparation = Literal["none", "packed", "bytes", "interleaved", "swizzled"]

_WHO: Final = "prepare_weights"
_FIRST_UPCAST: Final = (8, 0)
_FIRST_NATIVE: Final = (10, 0)
# What is indexed or scanned over before it is an operand.
_STACK_RANK: Final = 3
# From here on kernels/cpu asks for huge pages (parallel.cc).
_HUGE_PAGES_BYTES: Final = 8 << 20


def prepare_weights(tree: Any, target: targets.Target | None = None) -> Any:
  """Returns the same weights, in the order that `target` reads fastest.

  For CPUs:

  * stacks, of rank 3 and more: values and scales are stored as their bits,
    uint8, FP4 packed. XLA:CPU slices 8-bit floats through f16, and FP4 that is
    not packed element by element. A scan over 8 layers of 512 x 1536 with one
    row of f32 took 4.0 ms in MXFP8 and 170 in NVFP4 as float4_e2m1fn, prepared
    0.9 and 0.8, and of f32 weights 2.7 (least of 21 in turns, 2 busy cores with
    AVX-512, jax 0.10.2; examples/serving/scan_layers.py). The dot of a whole
    FP8 stack, as a batch, copies it once a call: leave that one as it is.
  * other FP4 weights are packed, if they are not. FP8 matrices stay as they
    are, which is what the kernels read.
  * arrays of 8 MiB and more that are on one local CPU are copied to huge pages,
    where there are C++ kernels, but not while tracing. What quantize writes
    lies in such pages; what `device_put` or a checkpoint brings does not, and a
    row times 4096 x 4096 of MXFP8 took 0.59 ms with it, 0.53 prepared (medians
    of 80 in turns, inputs rotated, 2 cores with AVX-512). Let go of the array
    that was given.

  For NVIDIA GPUs and an array whose last axis is the blocked one:

  * compute capability 8.0 to 9.x, FP4: values are interleaved as uint32[..., k
    / 8], so that the Triton kernels decode 16 of them in 18 instead of 30
    operations (shifts, masks). Of bf16 x NVFP4 with one row of lhs, the main
    loop has 2.7 instead of 3.5 instructions a value on sm_90, and 3.8 instead
    of 5.3 on sm_80, by the compiler's count (Triton 3.9); no GPU has measured
    what that gains. FP8 takes one conversion for two values as it is.
  * 10.0 and later: the scale is swizzled ("swizzled_128x4"), as the matrix
    instruction takes it; a linear one is rearranged at every call by cuDNN's
    calls, and in registers by Triton's kernels. Up to 128 rows of lhs these
    copy the swizzled one from shared to tensor memory as it is (10.0 and 10.3);
    for more it takes fewer instructions than the linear one, through registers
    (Triton 3.9, by the compiler's count: 156 instead of 175 a step of NVFP4).

  Anything else is returned as it is: other devices read the usual order.

  Shape, format and dequantized values stay the same, and every implementation
  takes the result; one that has no use for it puts it back in order at every
  call, which `jp.explain` tells. By xla, cpu and triton a product has the same
  bits as of the weight as it was, except for interleaved values and up to 64
  rows of lhs on compute capability 9.0 (`block_scaled_small_m` in
  `jp.explain`): that kernel then adds along k in another order, and both are
  within the contract's bound. Of cuDNN's library that alone is claimed. It is a
  pytree like any other.

  Interleaved values may be sharded along any axis, k at multiples of its block
  size. A swizzled scale cannot be sharded as its values are: where a
  partitioner splits the call, it is put back in order; inside `shard_map`
  prepare each device's share.

  Args:
    tree: a `ScaledArray`, prepared or not, or any tree of parameters. Leaves of
      it that are no `ScaledArray` are returned as they are.
    target: the device it will be used on; by default that of an enclosing
      `use_target`, or the local one.

  Raises:
    TypeError: target is no `Target`.
  """
  if target is None:
    target = targets.current_target()
  targets.require(_WHO, target, "a jp.Target or None")
  known = target
  # A target may be of another machine, or made by hand.
  has_kernels = (
    known.platform == "cpu"
    and known.cpu_kernels is not None
    and targets.detect_target("cpu").cpu_kernels is not None
  )

  def prepare(array: scaled_array.ScaledArray) -> scaled_array.ScaledArray:
    validation.require_unconverted(_WHO, array)
    how = preparation(array, known)
    array = array if how == "none" else _prepared(array, how)
    return jax.tree.map(_in_huge_pages, array) if has_kernels else array

  return _map_weights(prepare, tree)


def unprepare_weights(tree: Any) -> Any:
  """Undoes `prepare_weights`: values in their usual order, a linear scale.

  FP4 values are packed, two a byte, if they were prepared.
  """

  def unprepare(array: scaled_array.ScaledArray) -> scaled_array.ScaledArray:
    validation.require_unconverted("unprepare_weights", array)
    return _unprepared(array)

  return _map_weights(unprepare, tree)


def preparation(
  array: scaled_array.ScaledArray, target: targets.Target
) -> Preparation:
  """What `prepare_weights` does for a target, by shapes and dtypes alone."""
  if target.platform == "cpu" and 0 not in array.shape:
    if array.ndim >= _STACK_RANK:
      return "none" if array.is_bytes else "bytes"
    is_packed = array.is_packed or not array.format.is_fp4
    is_usual = is_packed and array.scale_layout == layouts.LINEAR
    return "none" if is_usual else "packed"
  capability = target.compute_capability
  if capability is None or array.axis != array.ndim - 1 or 0 in array.shape:
    return "none"
  if capability >= _FIRST_NATIVE:
    return "swizzled" if array.ndim > 1 else "none"
  if capability < _FIRST_UPCAST:
    return "none"
  can = layouts.may_be_interleaved(array.format)
  has_whole_blocks = array.shape[-1] % array.format.block_size == 0
  return "interleaved" if can and has_whole_blocks else "none"


def _in_huge_pages(x: Any) -> Any:
  """A copy of `x` there, or `x` where there is no use or no way."""
  if isinstance(x, jax.core.Tracer) or not isinstance(
    x, jax.Array | np.ndarray
  ):
    return x
  if x.nbytes < _HUGE_PAGES_BYTES or x.dtype == formats.E2M1:
    return x
  if isinstance(x, jax.Array):
    devices = x.devices()
    if len(devices) > 1 or next(iter(devices)).platform != "cpu":
      return x
  return _copied(x)


@jax.jit
def _copied(x: jax.Array) -> jax.Array:
  result = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return jax.ffi.ffi_call("jaxplugin_copy", result)(x)


def _map_weights(
  function: Callable[[scaled_array.ScaledArray], scaled_array.ScaledArray],
  tree: Any,
) -> Any:
  is_weight = lambda x: isinstance(x, scaled_array.ScaledArray)
  return jax.tree.map(
    lambda x: function(x) if is_weight(x) else x, tree, is_leaf=is_weight
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
    array = _unprepared(array)
    return scaled_array.ScaledArray(
      interleaving.interleave(array.pack().values),
      array.scale,
      array.global_scale,
      array.format,
      surrogate=array.surrogate,
    )
  # One that was prepared for another device is put in order first.
  if array.is_interleaved:
    array = array.pack()
  if array.scale_layout == layouts.SWIZZLED:
    return array
  return scaled_array.ScaledArray(
    array.values,
    layouts.swizzle_scale(array.scale),
    array.global_scale,
    array.format,
    scale_layout=layouts.SWIZZLED,
    surrogate=array.surrogate,
  )


@jax.jit
def _unprepared(array: scaled_array.ScaledArray) -> scaled_array.ScaledArray:
  array = array.to_floats()
  if array.is_interleaved:
    array = array.pack()
  if array.scale_layout == layouts.LINEAR:
    return array
  return scaled_array.ScaledArray(
    array.values,
    array.linear_scale(),
    array.global_scale,
    array.format,
    surrogate=array.surrogate,
  )

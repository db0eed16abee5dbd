# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights in the layout that one device reads fastest, prepared at load.

docs/concepts/layouts.md has the measurements. The gain is not measured on GPUs.
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
# An array of this rank or more is a stack, which programs slice.
_STACK_RANK: Final = 3
# kernels/cpu asks for huge pages from this size on (parallel.cc).
_HUGE_PAGES_BYTES: Final = 8 << 20


def prepare_weights(tree: Any, target: targets.Target | None = None) -> Any:
  """Returns the same weights in the order that `target` reads fastest.

  Shapes, formats and dequantized values do not change. Every function accepts
  the result. A backend that needs the usual order restores it in each call;
  `jp.explain` prints this. The page "Layouts" has the measurements.

  On CPUs:

  * Stacks (rank 3 or more) become bytes, with FP4 packed. XLA:CPU then slices
    them without a conversion. Do not prepare an FP8 stack that one dot takes as
    a batch, because each call would copy it.
  * Other FP4 weights are packed.
  * Arrays of 8 MiB or more are copied to huge pages, outside of `jit`. Delete
    the original array.

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
    array = array if how == "none" else _prepared(array, how)
    return jax.tree.map(_in_huge_pages, array) if has_kernels else array

  return _map_weights(prepare, tree)


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


def _in_huge_pages(x: Any) -> Any:
  """Copies `x` to huge pages if it is large and on one CPU device."""
  if isinstance(x, jax.core.Tracer) or not isinstance(
    x, jax.Array | np.ndarray
  ):
    return x
  if x.nbytes < _HUGE_PAGES_BYTES or x.dtype in formats.FOUR_BITS:
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
    (packed, *rest), aux = _unprepared(array).pack().tree_flatten()
    return array.tree_unflatten(aux, (interleaving.interleave(packed), *rest))
  # An array that was prepared for another device gets the usual order first.
  if array.is_interleaved:
    array = array.pack()
  if array.scale_layout == layouts.SWIZZLED:
    return array
  return _with_scale(
    array, layouts.swizzle_scale(array.scale), layouts.SWIZZLED
  )


@jax.jit
def _unprepared(array: scaled_array.ScaledArray) -> scaled_array.ScaledArray:
  array = array.to_floats()
  if array.is_interleaved:
    array = array.pack()
  if array.scale_layout == layouts.LINEAR:
    return array
  return _with_scale(array, array.linear_scale(), layouts.LINEAR)


def _with_scale(
  array: scaled_array.ScaledArray,
  scale: jax.Array,
  scale_layout: layouts.ScaleLayout,
) -> scaled_array.ScaledArray:
  (values, _, *rest), _ = array.tree_flatten()
  aux = array.format, scale_layout
  return array.tree_unflatten(aux, (values, scale, *rest))

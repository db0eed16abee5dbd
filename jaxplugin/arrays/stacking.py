# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`concatenate` and `stack` for block-scaled arrays, which keep all bits.

`legacy_global_scales` converts to the global scales of version 0.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import layouts, scaled_array
from jaxplugin.core import error_context

_CONCATENATE: Final = "concatenate"
_STACK: Final = "stack"


def concatenate(
  arrays: Sequence[scaled_array.ScaledArray], axis: int = 0
) -> scaled_array.ScaledArray:
  """Joins block-scaled arrays along an existing axis.

  Values and block scales keep their bits, and so do dequantized values. One
  matmul can then replace several, for example the three before attention.

  Equal global scales stay one, or one per layer of stacks. Others become one
  per index of `axis`, which a backend multiplies after the dot. Different
  tracers count as different. To get one, quantize the joined weights, or pass
  the same `global_scale` to each call of `quantize`.

  Args:
    arrays: `ScaledArray`s of one format, with the same blocked axis and the
      same shape except along `axis`. FP4 values in different layouts are
      packed.
    axis: the axis along which to join. It may be the blocked one if the global
      scales are equal.

  Returns:
    A `ScaledArray`.

  Raises:
    TypeError: If formats or shapes differ, axis is not an integer, or global
      scales differ along the blocked axis.
    ValueError: If axis is out of range, or arrays is empty.
    NotImplementedError: If swizzled scales would be split.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> w_q = jp.quantize(jnp.ones((2, 32)), "mxfp8")
    >>> jp.concatenate([w_q, w_q, w_q]).shape
    (6, 32)
  """
  arrays = _checked(_CONCATENATE, arrays)
  first = arrays[0]
  axis = layouts.canonical_axis(_CONCATENATE, axis, first.ndim)
  _require_shapes(_CONCATENATE, arrays, but=axis)
  _require_whole_tiles(arrays, axis)
  _require_whole_blocks(arrays, axis)

  def join(leaves: Sequence[Any]) -> Any:
    return jnp.concatenate(leaves, axis)

  global_scales = _full_global_scales(arrays)
  global_scale = global_scales[0]
  if not _can_stay(global_scales, axis):
    if axis == first.axis:
      raise TypeError(
        f"{_CONCATENATE}: arrays must have the same global scale to be joined"
        f" along the blocked axis {axis}, got {len(arrays)} arrays whose"
        " global scales differ or are traced; quantize them with the same"
        " global_scale"
      )
    global_scale = join(_alike(global_scales, arrays, axis))
  return _made_of(arrays, join, global_scale)


def stack(
  arrays: Sequence[scaled_array.ScaledArray], axis: int = 0
) -> scaled_array.ScaledArray:
  """Joins block-scaled arrays along a new axis.

  Each array keeps its global scale. `stack(arrays)[i]` has the bits of
  `arrays[i]`. `lax.scan` and `vmap` split the result again.

  Args:
    arrays: `ScaledArray`s of one format, one shape and one blocked axis. FP4
      values in different layouts are packed.
    axis: position of the new axis in the result.

  Returns:
    A `ScaledArray`.

  Raises:
    TypeError: If formats or shapes differ, or axis is not an integer.
    ValueError: If axis is out of range, or arrays is empty.
    NotImplementedError: If rows of swizzled scales, or interleaved values,
      would be split.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> w_q = jp.quantize(jnp.ones((2, 32)), "mxfp8")
    >>> jp.stack([w_q, w_q]).shape
    (2, 2, 32)
  """
  arrays = _checked(_STACK, arrays)
  first = arrays[0]
  axis = layouts.canonical_axis(_STACK, axis, first.ndim + 1)
  _require_shapes(_STACK, arrays)
  last, is_square = first.ndim, first.format.is_square
  if first.scale_layout == layouts.SWIZZLED:
    last = first.ndim - 2
  elif first.is_interleaved:
    last = first.ndim - 1
  elif is_square:
    last = first.ndim - 2
  if axis > last:
    raise NotImplementedError(
      f"{_STACK}: axis must be at most {last} for arrays"
      f" {f'of {first.format}' if is_square else 'prepared for a GPU'} of shape"
      f" {first.shape}, got {axis}; stack"
      f" {'array.dequantize()' if is_square else 'unprepare_weights(array)'}"
    )

  def join(leaves: Sequence[Any]) -> Any:
    return jnp.stack(leaves, axis)

  global_scales = _full_global_scales(arrays)
  global_scale = None
  if global_scales[0] is not None:
    global_scale = join(_alike(global_scales, arrays, None))
  return _made_of(arrays, join, global_scale)


def legacy_global_scales(tree: Any) -> Any:
  """Returns the tree with global scales in the shapes of version 0.1.

  Those are f32[], or f32 of the leading dimensions of a stack. Every function
  accepts both shapes. Only two things need the old ones:

  * A checkpoint of that version: `restore(path, legacy_global_scales(target))`,
    with `target` from `jax.eval_shape`.
  * A function that `jax.export` wrote with that version: call it with
    `legacy_global_scales(arguments)`.

  Args:
    tree: a tree of arrays, or of shapes and dtypes, with `ScaledArray`s.

  Returns:
    A tree of the same structure.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> w_q = jp.quantize(jnp.ones((2, 32)), "nvfp4")
    >>> old = jp.legacy_global_scales(w_q)
    >>> w_q.global_scale.shape, old.global_scale.shape
    ((1, 1), ())
  """

  def convert(x: Any) -> Any:
    if not isinstance(x, scaled_array.ScaledArray) or x.global_scale is None:
      return x
    global_scale = x.global_scale
    shape = list(global_scale.shape)
    while shape and shape[-1] == 1:
      shape.pop()
    if shape != list(x.shape[: len(shape)]):
      return x  # version 0.1 did not have this shape
    if isinstance(global_scale, jax.ShapeDtypeStruct):
      global_scale = jax.ShapeDtypeStruct(tuple(shape), global_scale.dtype)
    else:
      global_scale = global_scale.reshape(shape)
    return scaled_array.replace(x, global_scale=global_scale)

  is_leaf = lambda x: isinstance(x, scaled_array.ScaledArray)
  return jax.tree.map(convert, tree, is_leaf=is_leaf)


def _checked(who: str, arrays: Any) -> list[scaled_array.ScaledArray]:
  """Returns the arrays in one layout; raises if their formats differ."""
  if not isinstance(arrays, Iterable) or hasattr(arrays, "shape"):
    raise TypeError(
      f"{who}: arrays must be a sequence of ScaledArrays, got"
      f" {error_context.shown(arrays)}; pass a list or a tuple"
    )
  arrays = list(arrays)
  if not arrays:
    raise ValueError(f"{who}: arrays must have at least one element, got none")
  for array in arrays:
    if not isinstance(array, scaled_array.ScaledArray):
      is_weight = hasattr(array, "array")
      remedy = "pass its array" if is_weight else "quantize it first"
      raise TypeError(
        f"{who}: arrays must be ScaledArrays, got {type(array).__name__};"
        f" {remedy}"
      )
    scaled_array.require_global_scale(who, array)
  first = arrays[0]
  for name, read, remedy in (
    ("format", lambda x: x.format, "quantize them to one format"),
    (
      "scale layout",
      lambda x: x.scale_layout,
      "call unprepare_weights on each first",
    ),
  ):
    for array in arrays:
      if read(array) != read(first):
        raise TypeError(
          f"{who}: arrays must have the same {name}, got {read(first)} and"
          f" {read(array)}; {remedy}"
        )
  if len({(array.values.dtype, array.scale.dtype) for array in arrays}) > 1:
    arrays = [array.to_floats().pack() for array in arrays]
  return arrays


def _require_shapes(
  who: str,
  arrays: Sequence[scaled_array.ScaledArray],
  but: int | None = None,
) -> None:
  first = arrays[0]
  for array in arrays:
    sizes = [
      tuple(size for d, size in enumerate(x.shape) if d != but)
      for x in (first, array)
    ]
    if first.ndim != array.ndim or sizes[0] != sizes[1]:
      rule = "shape" if but is None else f"shape, but in axis {but}"
      raise TypeError(
        f"{who}: arrays must have the same {rule}, got {first.shape} and"
        f" {array.shape}"
      )
    if first.axis != array.axis:
      raise TypeError(
        f"{who}: arrays must be blocked along the same axis, got {first.axis}"
        f" and {array.axis} of shapes {first.shape} and {array.shape}; pass"
        " quantize the same axis="
      )


def _require_whole_tiles(
  arrays: Sequence[scaled_array.ScaledArray], axis: int
) -> None:
  """Raises unless swizzled scales are joined between whole tiles."""
  first = arrays[0]
  if first.scale_layout != layouts.SWIZZLED or axis < first.ndim - 2:
    return
  tile = layouts.SCALE_TILE_ROWS
  is_whole = all(x.shape[axis] % tile == 0 for x in arrays[:-1])
  if axis == first.axis or not is_whole:
    raise NotImplementedError(
      f"{_CONCATENATE}: swizzled scales must be joined along rows, at multiples"
      f" of {tile}, got shapes {[x.shape for x in arrays]} along axis {axis};"
      " join unprepare_weights(array)"
    )


def _require_whole_blocks(
  arrays: Sequence[scaled_array.ScaledArray], axis: int
) -> None:
  """Raises unless arrays are joined between whole blocks."""
  first = arrays[0]
  is_blocked = axis == first.axis or (
    first.format.is_square and axis == first.ndim - 2
  )
  if not is_blocked or not first.format.may_be_short:
    return
  block = first.format.block_size
  if not block or any(x.shape[axis] % block for x in arrays[:-1]):
    unit = "row" if not block else f"block of {block}"
    raise TypeError(
      f"{_CONCATENATE}: arrays of {first.format} must be joined along axis"
      f" {axis} between whole blocks, and a {unit} shares one scale, got shapes"
      f" {[x.shape for x in arrays]}; join array.dequantize() and quantize the"
      " result"
    )


def _full_global_scales(
  arrays: Sequence[scaled_array.ScaledArray],
) -> list[Any]:
  """Returns global scales of the arrays' rank: all None, or none is None."""
  scales = [scaled_array.full_global_scale(x) for x in arrays]
  if all(scale is None for scale in scales):
    return scales
  one = np.ones((1,) * arrays[0].ndim, np.float32)
  return [one if scale is None else scale for scale in scales]


def _can_stay(scales: Sequence[Any], axis: int) -> bool:
  """Returns whether equal global scales, one along `axis`, cover the result."""
  first = scales[0]
  if first is None:
    return True
  if first.shape[axis] != 1:
    return False
  if all(scale is first for scale in scales):
    return True
  if any(isinstance(scale, jax.core.Tracer) for scale in scales):
    return False
  if not all(getattr(x, "is_fully_addressable", True) for x in scales):
    return False
  return all(np.array_equal(first, scale) for scale in scales)


def _alike(
  scales: Sequence[Any],
  arrays: Sequence[scaled_array.ScaledArray],
  axis: int | None,
) -> list[jax.Array]:
  """Broadcasts global scales to shapes that can be joined.

  A scale gets the array's full size along `axis`, and elsewhere the largest
  size of all scales.
  """
  ndim = arrays[0].ndim
  most = [max(scale.shape[d] for scale in scales) for d in range(ndim)]
  shapes = [list(most) for _ in arrays]
  if axis is not None:
    for shape, array in zip(shapes, arrays, strict=True):
      shape[axis] = array.shape[axis]
  return [
    jnp.broadcast_to(scale, shape)
    for scale, shape in zip(scales, shapes, strict=True)
  ]


def _made_of(
  arrays: Sequence[scaled_array.ScaledArray], join: Any, global_scale: Any
) -> scaled_array.ScaledArray:
  flat = [array.tree_flatten() for array in arrays]
  longest, aux = max(flat, key=lambda f: len(f[0]))
  parts = []
  for array, (children, _) in zip(arrays, flat, strict=True):
    values, scale, _, *own = children
    # A surrogate that only others have is constant zeros, without a derivative.
    missing = longest[len(children) :]
    own += [jnp.zeros(array.shape, x.dtype) for x in missing]
    parts.append((values, scale, *own))
  values, scale, *rest = map(join, zip(*parts, strict=True))
  return scaled_array.ScaledArray.tree_unflatten(
    aux, (values, scale, global_scale, *rest)
  )

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ScaledArray`, a block-scaled array as one pytree, and its layouts."""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import Literal

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import indexing
from jaxplugin.arrays import interleaving
from jaxplugin.core import formats
from jaxplugin.jaxext import jax_private

ScaleLayout = Literal["linear", "swizzled_128x4"]
LINEAR: Final = "linear"
SWIZZLED: Final = "swizzled_128x4"
SCALE_LAYOUTS: Final = (LINEAR, SWIZZLED)

# One 512-byte tile of the swizzled layout covers 128 rows and 4 scale columns:
# 4 groups of 32 rows, interleaved so that 16 consecutive bytes hold the same
# row of each group (PTX ISA, "tcgen05.mma: scale factor 1X layout"; cuDNN
# calls it F8_128x4).
SCALE_TILE_ROWS: Final = 128
SCALE_TILE_COLUMNS: Final = 4
_ROW_GROUP: Final = 32

_BLOCKED: Final = (
  "it is blocked; dequantize, take the part and quantize it again"
)
_SWIZZLED_ROWS: Final = (
  "its rows are swizzled; take the part of unprepare_weights(array)"
)


# Block scales from here on, E4M3's top binade (its largest is 448). A tensor
# with a global scale of its own reaches 448 exactly, and one that shares that
# of another, as in fused layers, comes near. Without a global scale they would
# stand for values beyond 1000.
_FIRST_TOP_SCALE: Final = 256.0


class GlobalScaleWarning(UserWarning):
  """A format's global scale seems to have been forgotten."""


def round_up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple


@jax.tree_util.register_pytree_with_keys_class
class ScaledArray:
  """A block-scaled array: `values * repeat(scale) * global_scale`.

  It is a pytree whose leaves are the arrays, so it passes through `jit`,
  `vmap`, `scan`, `tree.map`, `device_put`, checkpoints and the like.

  Attributes:
    values: format.values_dtype[..., k, ...], or for FP4 formats uint8 with the
      blocked axis halved: two values a byte, the first in the low nibble. Or
      FP4 as uint32[..., k / 8], interleaved: what `prepare_weights` makes.
    scale: format.scale_dtype[..., k / block_size, ...], the shape of `values`
      with the blocked axis divided by the block size. Multiplies to dequantize.
      For scale_layout "swizzled_128x4" the array `swizzle_scale` returns. Of
      what `to_bytes` returns both are uint8, their bits; here that is an error,
      as uint8 does not say which format's bits they are.
    global_scale: f32 that multiplies everything, or None. It follows the array:
      it has the rank of `values`, and in each dimension size 1 or the logical
      size, 1 along the blocked axis. So it is stacked, mapped over and indexed
      as the other leaves are. Also taken: f32[], and f32 of the leading
      dimensions alone, as earlier versions wrote them. None for NVFP4 means
      that there is none, as 1.0 does; `GlobalScaleWarning` where the block
      scales, if they are known on a CPU, say that there must be one.
    format: the `BlockFormat`; may be given by its name, "nvfp4".
    scale_layout: "linear" or "swizzled_128x4".
    surrogate: a float array of the logical shape, to which the derivatives of
      `dequantize` and `block_scaled_dot` go, or None. Its numbers are not used:
      see `quantize`, which makes it for derivative="straight_through". Where it
      is None it is no leaf.

  Raises:
    TypeError: dtypes are not the format's, the scale's shape is not that of the
      values with one axis divided by the block size, the global scale's shape
      does not follow that of the values, or the surrogate is no float array of
      the logical shape.
    ValueError: `scale_layout` or the format's name is unknown.
  """

  values: Any
  scale: Any
  global_scale: Any
  format: formats.BlockFormat
  scale_layout: ScaleLayout
  surrogate: Any

  def __init__(
    self,
    values: Any,
    scale: Any,
    global_scale: Any,
    format: formats.BlockFormat | str,
    *,
    scale_layout: ScaleLayout = LINEAR,
    surrogate: Any = None,
  ) -> None:
    if isinstance(global_scale, (int, float)):
      rank = len(getattr(values, "shape", ()))
      global_scale = np.full((1,) * rank, global_scale, np.float32)
    self.values = values
    self.scale = scale
    self.global_scale = global_scale
    self.format = formats.resolve("ScaledArray", format)
    self.scale_layout = scale_layout
    self.surrogate = surrogate
    _validate(self)

  def tree_flatten_with_keys(self) -> tuple[Any, Any]:
    children, aux = self.tree_flatten()
    key = jax.tree_util.GetAttrKey
    names = ("values", "scale", "global_scale", "surrogate")
    named = zip(map(key, names), children, strict=False)
    return tuple(named), aux

  def tree_flatten(self) -> tuple[Any, Any]:
    children: tuple[Any, ...] = (self.values, self.scale, self.global_scale)
    if self.surrogate is not None:
      children = (*children, self.surrogate)
    return children, (self.format, self.scale_layout)

  @classmethod
  def tree_unflatten(cls, aux: Any, children: Any) -> ScaledArray:
    # Leaves may be anything here (shardings, specs, None), so no validation.
    self = object.__new__(cls)
    self.values, self.scale, self.global_scale, *rest = children
    self.surrogate = rest[0] if rest else None
    self.format, self.scale_layout = aux
    return self

  def __repr__(self) -> str:
    def brief(x: Any) -> str:
      if not hasattr(x, "shape"):
        return repr(x)
      return f"{x.dtype}{list(x.shape)}"

    layout = "" if self.scale_layout == LINEAR else f", {self.scale_layout}"
    if self.surrogate is not None:
      layout += f", surrogate={brief(self.surrogate)}"
    return (
      f"ScaledArray({self.format}: values={brief(self.values)},"
      f" scale={brief(self.scale)},"
      f" global_scale={brief(self.global_scale)}{layout})"
    )

  @property
  def is_packed(self) -> bool:
    return self.format.is_fp4 and self.values.dtype == formats.PACKED

  @property
  def is_bytes(self) -> bool:
    """Whether values and scale are their bits; `to_floats` undoes it."""
    return self.scale.dtype == formats.PACKED

  @property
  def is_interleaved(self) -> bool:
    """Whether values are FP4 in words; `pack` and `unpack` undo it."""
    return self.values.dtype == interleaving.WORDS

  @property
  def axis(self) -> int:
    """The blocked axis of `values`, found from the shapes; never negative."""
    if self.scale_layout == SWIZZLED or self.is_interleaved:
      return self.values.ndim - 1
    return blocked_axis(self.values.shape, self.scale.shape)

  @property
  def shape(self) -> tuple[int, ...]:
    """The logical shape, that of `dequantize(self)`."""
    return _logical_shape(self.format, self.values, self.axis)

  @property
  def ndim(self) -> int:
    return self.values.ndim

  @property
  def dtype(self) -> np.dtype:
    """dtype of the stored values."""
    return self.values.dtype

  @property
  def nbytes(self) -> int:
    """Bytes of all leaves, FP4 values counted as half a byte each."""
    bits = 8 if self.is_packed else self.format.value_bits
    if self.is_interleaved:
      bits = 8 * interleaving.WORDS.itemsize
    total = -(-self.values.size * bits // 8)
    total += self.scale.size * self.scale.dtype.itemsize
    for leaf in (self.global_scale, self.surrogate):
      if leaf is not None:
        total += leaf.size * leaf.dtype.itemsize
    return total

  @property
  def size(self) -> int:
    """The number of logical values."""
    return math.prod(self.shape)

  @property
  def sharding(self) -> jax.sharding.Sharding:
    """That of `values`; the other leaves have their own."""
    return self.values.sharding

  def block_until_ready(self) -> ScaledArray:
    """Waits for the computation of all leaves, and returns itself."""
    jax.block_until_ready(self.tree_flatten()[0])
    return self

  @property
  def T(self) -> ScaledArray:
    """`transpose()`."""
    return self.transpose()

  def transpose(self, *axes: Any) -> ScaledArray:
    """The same array with its dimensions in another order, exactly.

    The blocked dimension goes with the others: w (n, k) in blocks along k
    becomes (k, n) in blocks along k, as a product contracts it.

    Args:
      *axes: as of an array of NumPy: none, which reverses the dimensions, the
        dimensions, or one tuple of them.

    Raises:
      ValueError: axes are no permutation of the dimensions.
      NotImplementedError: values or scales lie as `prepare_weights` or
        `swizzle_scale` put them, which have the blocked dimension last.
    """
    require_global_scale("ScaledArray", self)
    given = axes[0] if len(axes) == 1 and not _is_int(axes[0]) else axes
    order = tuple(given or reversed(range(self.ndim)))
    if sorted(d % self.ndim for d in order) != list(range(self.ndim)):
      raise ValueError(
        f"ScaledArray: transpose takes each of {self.ndim} dimensions once, got"
        f" {order}"
      )
    if self.scale_layout != LINEAR or self.is_interleaved:
      raise NotImplementedError(
        "ScaledArray: values and scales that were rearranged for a kernel have"
        f" the blocked dimension last, got {self!r}; transpose"
        " unprepare_weights(array), or call linear, which takes it as it is"
      )
    (values, scale, _, *rest), aux = self.tree_flatten()
    global_scale = full_global_scale(self)
    if global_scale is not None:
      global_scale = global_scale.transpose(order)
    others = [leaf.transpose(order) for leaf in (values, scale, *rest)]
    return self.tree_unflatten(aux, (*others[:2], global_scale, *others[2:]))

  def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
    """`jaxplugin.dequantize` of it: `values * scale * global_scale`."""
    return _provided["dequantize"](self, dtype)

  def __matmul__(self, other: Any) -> jax.Array:
    """NumPy's matmul of the dequantized arrays, by `block_scaled_dot`.

    The last dimension of the left side with the last but one of the right:
    `x @ w_q.T` for w_q (n, k). Both are blocked along it, where quantized. The
    result is f32, as that of the dequantized arrays. Leading dimensions are
    batch where both sides have the same; either side may have none.

    Raises:
      TypeError: sizes disagree, or a side is blocked along another dimension.
      NotImplementedError: leading dimensions would have to be broadcast.
    """
    if not isinstance(other, (ScaledArray, jax.Array, np.ndarray)):
      return NotImplemented
    return _provided["matmul"](self, other)

  def __rmatmul__(self, other: Any) -> jax.Array:
    if not isinstance(other, (jax.Array, np.ndarray)):
      return NotImplemented
    return _provided["matmul"](other, self)

  # NumPy's operators leave the work to the methods above.
  __array_ufunc__ = None

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
    del dtype, copy
    raise TypeError(
      f"ScaledArray: it is no plain array, got {self!r}; array.dequantize() is"
      " one of its numbers, array.values of its codes"
    )

  def pack(self) -> ScaledArray:
    """The same array with FP4 values stored as uint8, two a byte."""
    if not self.format.is_fp4 or self.is_packed:
      return self
    if self.is_interleaved:
      return self._replace_values(interleaving.deinterleave(self.values))
    return self._replace_values(pack_fp4(self.values, axis=self.axis))

  def unpack(self) -> ScaledArray:
    """The same array with FP4 values in `float4_e2m1fn`, logical shape."""
    if self.is_packed and self.is_bytes:
      return self.to_floats().unpack()
    if self.is_interleaved:
      return self.pack().unpack()
    if not self.is_packed:
      return self
    return self._replace_values(unpack_fp4(self.values, axis=self.axis))

  def to_bytes(self) -> ScaledArray:
    """The same array as uint8: the bits of values and scale, FP4 packed.

    XLA:CPU slices these as they are, and 8-bit floats through 16 bits.
    """
    if self.is_bytes:
      return self
    return self.pack()._replace_types(formats.PACKED, formats.PACKED)

  def to_floats(self) -> ScaledArray:
    """Undoes `to_bytes`; FP4 values stay packed."""
    if not self.is_bytes:
      return self
    format = self.format
    values_dtype = formats.PACKED if format.is_fp4 else format.values_dtype
    return self._replace_types(values_dtype, format.scale_dtype)

  def _replace_types(
    self, values_dtype: np.dtype, scale_dtype: np.dtype
  ) -> ScaledArray:
    """The same bits with other dtypes."""
    (values, scale, *rest), aux = self.tree_flatten()
    values = lax.bitcast_convert_type(values, values_dtype)
    scale = lax.bitcast_convert_type(scale, scale_dtype)
    return self.tree_unflatten(aux, (values, scale, *rest))

  def without_surrogate(self) -> ScaledArray:
    """The same array, a constant of every derivative by what it was made of."""
    (values, scale, global_scale, *_), aux = self.tree_flatten()
    return self.tree_unflatten(aux, (values, scale, global_scale))

  def __getitem__(self, index: Any) -> ScaledArray:
    """Takes what `index` says, of all dimensions but the blocked one.

    As of a JAX array: ints, slices, an ellipsis, integer and boolean arrays.
    The blocked dimension is taken whole, and of a swizzled scale the rows too.

    Raises:
      TypeError: one of these is not taken whole.
      IndexError: an int is out of bounds, or there are too many indices.
    """
    require_global_scale("ScaledArray", self)
    wholes = {self.axis: _BLOCKED}
    if self.scale_layout == SWIZZLED:
      wholes[self.ndim - 2] = _SWIZZLED_ROWS
    (values, scale, _, *rest), aux = self.tree_flatten()
    global_scale = full_global_scale(self)
    own, of_global = indexing.leaf_indices(
      index,
      self.shape,
      wholes,
      (1,) * self.ndim if global_scale is None else global_scale.shape,
    )
    is_dynamic = any(isinstance(item, jax.Array) for item in own)

    def take(leaf: Any, index: Any) -> Any:
      # NumPy cannot take what is traced.
      return (jnp.asarray(leaf) if is_dynamic else leaf)[index]

    if global_scale is not None:
      global_scale = take(global_scale, of_global)
    others = [take(leaf, own) for leaf in (values, scale, *rest)]
    return self.tree_unflatten(aux, (*others[:2], global_scale, *others[2:]))

  def __iter__(self) -> Iterator[ScaledArray]:
    """One array for each index of the first dimension."""
    return (self[i] for i in range(self.shape[0]))

  def _replace_values(self, values: jax.Array) -> ScaledArray:
    (_, *children), aux = self.tree_flatten()
    return self.tree_unflatten(aux, (values, *children))


# What methods do that need more than this module: "dequantize" and "matmul".
_provided: Final[dict[str, Callable[..., Any]]] = {}


def provide(**functions: Callable[..., Any]) -> None:
  """Called by the modules that have what methods of `ScaledArray` do."""
  _provided.update(functions)


def _is_int(x: Any) -> bool:
  return isinstance(x, (int, np.integer))


def as_array(who: str, name: str, x: Any) -> jax.Array:
  """An argument as a plain array.

  Raises:
    TypeError: it is none, e.g. a format (arguments in another order), a shape
      without numbers, or a `ScaledArray`.
  """
  remedy = ""
  if isinstance(x, ScaledArray):
    remedy = "; dequantize it"
  elif isinstance(x, (str, formats.BlockFormat)):
    remedy = "; arrays come first, then the format"
  elif isinstance(x, jax.ShapeDtypeStruct):
    remedy = "; for types alone trace the call, by jax.eval_shape or jit"
  else:
    try:
      return jnp.asarray(x)
    except (TypeError, ValueError):
      pass
  raise TypeError(f"{who}: {name} must be an array, got {x!r}{remedy}")


def require_numbers(who: str, name: str, x: ScaledArray) -> None:
  """Raises TypeError for a `ScaledArray` of shapes or of other placeholders."""
  for leaf in x.tree_flatten()[0][:2]:
    if not isinstance(leaf, (jax.Array, np.ndarray)):
      raise TypeError(
        f"{who}: {name} must be a ScaledArray of arrays, got {x!r}; for types"
        " alone trace the call, by jax.eval_shape or jit"
      )


def view_remedy(given: Any, dtype: np.dtype) -> str:
  """What helps where raw bytes are given for values or scales of `dtype`."""
  if np.dtype(given) not in (np.dtype(np.uint8), np.dtype(np.int8)):
    return ""
  return f"; view it as {dtype.name}: array.view(jnp.{dtype.name})"


def _serialize_aux(aux: tuple[formats.BlockFormat, ScaleLayout]) -> bytes:
  format, scale_layout = aux
  if not format.is_standard:
    raise ValueError(
      f"ScaledArray: cannot serialize the non-standard format {format.name}"
    )
  return json.dumps([format.name, scale_layout]).encode()


def _deserialize_aux(data: bytes) -> tuple[formats.BlockFormat, ScaleLayout]:
  name, scale_layout = json.loads(data)
  return formats.by_name(name), scale_layout


jax_private.register_pytree_serialization(
  ScaledArray,
  serialized_name="jaxplugin.ScaledArray",
  serialize_auxdata=_serialize_aux,
  deserialize_auxdata=_deserialize_aux,
)


def blocked_axis(
  values_shape: Sequence[int], scale_shape: Sequence[int]
) -> int:
  """The axis in which the shapes differ.

  None does when the blocked axis is empty: then the last empty axis, or the
  last axis of all.
  """
  axes = range(len(values_shape))
  pairs = list(zip(values_shape, scale_shape, strict=True))
  different = [axis for axis in axes if pairs[axis][0] != pairs[axis][1]]
  empty = [axis for axis in axes if pairs[axis][0] == 0]
  return (different or empty[-1:] or [len(values_shape) - 1])[0]


def logical_shape(values: Any, axis: int) -> tuple[int, ...]:
  """Shape of `values` with `axis` as long as FP4 values there are many."""
  shape = tuple(values.shape)
  per_element = 1
  if values.dtype == formats.PACKED:
    per_element = 2
  elif values.dtype == interleaving.WORDS:
    per_element = interleaving.VALUES_PER_WORD
  return (*shape[:axis], per_element * shape[axis], *shape[axis + 1 :])


def full_global_scale(array: ScaledArray) -> Any:
  """The global scale with the array's rank, whatever it came as; or None."""
  scale = array.global_scale
  if scale is None or scale.ndim == array.ndim:
    return scale
  return scale.reshape(full_global_scale_shape(array))


def full_global_scale_shape(array: ScaledArray) -> tuple[int, ...]:
  """Shape of `full_global_scale`, of one that is there."""
  scale = array.global_scale
  if scale.ndim == array.ndim:
    return tuple(scale.shape)
  shape = () if scale.size == 1 else tuple(scale.shape)
  return (*shape, *(1,) * (array.ndim - len(shape)))


def _logical_shape(
  format: formats.BlockFormat, values: Any, axis: int
) -> tuple[int, ...]:
  # Of FP8 a byte is one value.
  return logical_shape(values, axis) if format.is_fp4 else tuple(values.shape)


def may_be_interleaved(format: formats.BlockFormat) -> bool:
  """Whether values of a format may be FP4 in words."""
  return format.is_fp4 and format.block_size % interleaving.UNIT == 0


def _validate(array: ScaledArray) -> None:
  format = array.format
  if array.scale_layout not in SCALE_LAYOUTS:
    raise ValueError(
      f"ScaledArray: scale_layout must be one of {SCALE_LAYOUTS},"
      f" got {array.scale_layout!r}"
    )
  values, scale = array.values, array.scale
  leaves = (values, scale, array.global_scale, array.surrogate)
  if not all(x is None or hasattr(x, "dtype") for x in leaves):
    return  # placeholders: a tree of specs or of shardings
  is_interleaved = values.dtype == interleaving.WORDS
  if (
    values.dtype not in format.storage_dtypes
    and not (is_interleaved and may_be_interleaved(format))
  ):
    allowed = " or ".join(dtype.name for dtype in format.storage_dtypes)
    raise TypeError(
      f"ScaledArray: {format} values must be {allowed}, got {values.dtype}"
      f"{view_remedy(values.dtype, format.values_dtype)}"
    )
  if scale.dtype != format.scale_dtype:
    raise TypeError(
      f"ScaledArray: {format} scale must be {format.scale_dtype.name},"
      f" got {scale.dtype}{view_remedy(scale.dtype, format.scale_dtype)}"
    )
  min_rank = 2 if array.scale_layout == SWIZZLED else 1
  if scale.ndim != values.ndim or values.ndim < min_rank:
    raise TypeError(
      f"ScaledArray: {array.scale_layout} scale must have the rank of values"
      f" (at least {min_rank}), got values {tuple(values.shape)} and scale"
      f" {tuple(scale.shape)}"
    )
  if array.scale_layout == SWIZZLED:
    axis = values.ndim - 1
    shape = _logical_shape(format, values, axis)
    columns = -(-shape[-1] // format.block_size)
    expected = swizzled_shape((*shape[:-1], columns))
  else:
    axis = values.ndim - 1
    if not is_interleaved:
      axis = blocked_axis(values.shape, scale.shape)
    shape = _logical_shape(format, values, axis)
    if scale.shape[axis] * format.block_size != shape[axis]:
      expected = None
    else:
      expected = (*shape[:axis], scale.shape[axis], *shape[axis + 1 :])
  if tuple(scale.shape) != expected:
    raise TypeError(
      f"ScaledArray: {format} {array.scale_layout} scale must have the logical"
      f" shape of values with one axis divided by {format.block_size}"
      f"{' (padded to 128 x 4)' if array.scale_layout == SWIZZLED else ''},"
      f" got values of logical shape {shape} and scale {tuple(scale.shape)}"
    )
  _validate_global_scale("ScaledArray", array.global_scale, shape, axis)
  if array.global_scale is None and format.has_global_scale:
    _warn_of_forgotten_global_scale(format, scale)
  surrogate = array.surrogate
  if surrogate is not None and not (
    tuple(surrogate.shape) == shape
    and jnp.issubdtype(surrogate.dtype, jnp.floating)
  ):
    raise TypeError(
      "ScaledArray: surrogate must be a float array of the logical shape"
      f" {shape}, got {surrogate.dtype}{list(surrogate.shape)}"
    )


def _warn_of_forgotten_global_scale(
  format: formats.BlockFormat, scale: Any
) -> None:
  """Warns where scales are known, on this host, and fill their range."""
  if scale.dtype != formats.E4M3 or not _is_on_host(scale):
    return
  codes = np.asarray(scale).view(np.uint8)
  limits = np.array([_FIRST_TOP_SCALE, np.inf]).astype(formats.E4M3)
  first, nan = limits.view(np.uint8)
  top = codes[(codes >= first) & (codes < nan)]
  if top.size:
    largest = float(top.max().reshape(1).view(formats.E4M3)[0])
    warnings.warn(
      f"ScaledArray: {format} without global_scale, but block scales reach"
      f" {largest:g}, which without one means values beyond 1000. A checkpoint"
      " keeps the global scale beside the block scales (weight_scale_2, or the"
      " inverse of weight_global_scale): pass it, or global_scale=1.0 to say"
      " that there is none",
      GlobalScaleWarning,
      stacklevel=4,
    )


def _is_on_host(x: Any) -> bool:
  """Whether reading `x` copies nothing from a device."""
  if isinstance(x, np.ndarray):
    return True
  return (
    isinstance(x, jax.Array)
    and not isinstance(x, jax.core.Tracer)
    and x.is_fully_addressable
    and all(device.platform == "cpu" for device in x.devices())
  )


def require_global_scale(who: str, array: ScaledArray) -> None:
  """Raises TypeError unless the global scale's shape follows the array's.

  It need not where leaves were joined or indexed one by one.
  """
  _validate_global_scale(who, array.global_scale, array.shape, array.axis)


def _validate_global_scale(
  who: str, global_scale: Any, shape: Sequence[int], axis: int
) -> None:
  """Checks a global scale for values of logical `shape`; raises TypeError."""
  if global_scale is None:
    return
  given = tuple(global_scale.shape)
  if len(given) == len(shape):
    allowed = [{1, size} for size in shape]
    allowed[axis] = {1}
    fits = all(size in a for size, a in zip(given, allowed, strict=True))
  else:
    fits = global_scale.size == 1 or given == tuple(shape[: len(given)])
  if global_scale.dtype != np.float32 or not fits:
    raise TypeError(
      f"{who}: global_scale must be float32 of the rank of values, with size 1"
      " or theirs in each dimension and 1 along the blocked one, or one number,"
      f" or have their leading dimensions; values {tuple(shape)} are blocked"
      f" along dimension {axis}, got {global_scale.dtype}{list(given)}"
      " (jaxplugin.concatenate and stack join global scales too)"
    )


def pack_fp4(values: jax.Array, *, axis: int = -1) -> jax.Array:
  """Packs FP4 values two a byte along `axis`, the first in the low nibble.

  Args:
    values: float4_e2m1fn[..., k, ...], k even.
    axis: the axis to halve.

  Returns:
    uint8[..., k / 2, ...].

  Raises:
    TypeError: wrong dtype, or an odd size.
  """
  if values.dtype != formats.E2M1:
    raise TypeError(
      f"pack_fp4: values must be float4_e2m1fn, got {values.dtype}"
    )
  axis = canonical_axis("pack_fp4", axis, values.ndim)
  size = values.shape[axis]
  if size % 2:
    raise TypeError(
      f"pack_fp4: the size of axis {axis} must be even, got shape"
      f" {values.shape}; pad it"
    )
  values = jnp.moveaxis(values, axis, -1)
  pairs = values.reshape(*values.shape[:-1], size // 2, 2)
  packed = lax.bitcast_convert_type(pairs, jnp.uint8)
  return jnp.moveaxis(packed, -1, axis)


def unpack_fp4(packed: jax.Array, *, axis: int = -1) -> jax.Array:
  """Inverse of `pack_fp4`: uint8[..., k / 2, ...] to FP4 [..., k, ...].

  Raises:
    TypeError: `packed` is not uint8.
  """
  if packed.dtype != formats.PACKED:
    raise TypeError(f"unpack_fp4: packed must be uint8, got {packed.dtype}")
  axis = canonical_axis("unpack_fp4", axis, packed.ndim)
  packed = jnp.moveaxis(packed, axis, -1)
  # XLA of jaxlib 0.10.2 folds this cast of a constant to other numbers.
  packed = lax.optimization_barrier(packed)
  if jax.export.is_symbolic_dim(math.prod(packed.shape)):
    # XLA cannot refine the sizes of a bitcast that changes the rank.
    nibbles = jnp.stack([packed & 15, packed >> 4], axis=-1).astype(jnp.uint4)
    values = lax.bitcast_convert_type(nibbles, formats.E2M1)
  else:
    values = lax.bitcast_convert_type(packed, formats.E2M1)
  values = values.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
  return jnp.moveaxis(values, -1, axis)


def canonical_axis(who: str, axis: int, ndim: int) -> int:
  if not -ndim <= axis < ndim:
    raise ValueError(f"{who}: axis {axis} is out of range for rank {ndim}")
  return axis % ndim


def swizzled_shape(scale_shape: Sequence[int]) -> tuple[int, ...]:
  """Shape of a swizzled scale: rows padded to 128, columns to 4."""
  *batch, rows, columns = scale_shape
  return (
    *batch,
    round_up(rows, SCALE_TILE_ROWS),
    round_up(columns, SCALE_TILE_COLUMNS),
  )


def _validate_scale_array(who: str, scale: jax.Array) -> None:
  if scale.dtype.itemsize != 1 or scale.dtype == formats.E2M1:
    raise TypeError(
      f"{who}: scale must have a dtype of one byte, got {scale.dtype.name}"
    )
  if scale.ndim < 2:
    raise TypeError(
      f"{who}: scale must have rank 2 or more (..., rows, columns), got shape"
      f" {scale.shape}"
    )


@jax.jit
def swizzle_scale(scale: jax.Array) -> jax.Array:
  """Brings a linear scale into the layout that tcgen05 and cuDNN read.

  Done once, at load time, for a static weight. Byte (r, c) of a tile of 128
  rows and 4 columns goes to offset (r % 32) * 16 + (r // 32) * 4 + c; tiles
  follow each other row by row. Padding is zero.

  Args:
    scale: any 1-byte dtype[..., rows, columns], linear; columns = k / block.

  Returns:
    The same dtype[..., rows padded to 128, columns padded to 4].

  Raises:
    TypeError: the rank is below 2.

  Source: PTX ISA, tcgen05 scale-factor layout "1X"; cuDNN F8_128x4.
  """
  _validate_scale_array("swizzle_scale", scale)
  batch = scale.shape[:-2]
  padded = swizzled_shape(scale.shape)
  code = lax.bitcast_convert_type(scale, jnp.uint8)
  widths = [(0, p - s) for p, s in zip(padded, scale.shape, strict=True)]
  code = jnp.pad(code, widths)
  groups = SCALE_TILE_ROWS // _ROW_GROUP
  code = code.reshape(
    *batch,
    padded[-2] // SCALE_TILE_ROWS,
    groups,
    _ROW_GROUP,
    padded[-1] // SCALE_TILE_COLUMNS,
    SCALE_TILE_COLUMNS,
  )
  lead = len(batch)
  order = (*range(lead), *(lead + d for d in (0, 3, 2, 1, 4)))
  code = code.transpose(order).reshape(padded)
  return lax.bitcast_convert_type(code, scale.dtype)


@functools.partial(jax.jit, static_argnames="shape")
def unswizzle_scale(swizzled: jax.Array, shape: tuple[int, int]) -> jax.Array:
  """Inverse of `swizzle_scale`.

  Args:
    swizzled: dtype[..., rows padded to 128, columns padded to 4].
    shape: (rows, columns) of the linear scale.

  Returns:
    dtype[..., rows, columns].

  Raises:
    TypeError: the shape of `swizzled` is not what (rows, columns) pad to.
  """
  _validate_scale_array("unswizzle_scale", swizzled)
  rows, columns = shape
  *batch, padded_rows, padded_columns = swizzled.shape
  if (padded_rows, padded_columns) != swizzled_shape(shape):
    raise TypeError(
      f"unswizzle_scale: a scale of shape {tuple(shape)} swizzles to"
      f" {swizzled_shape(shape)}, got {swizzled.shape[-2:]}"
    )
  code = lax.bitcast_convert_type(swizzled, jnp.uint8)
  code = code.reshape(
    *batch,
    padded_rows // SCALE_TILE_ROWS,
    padded_columns // SCALE_TILE_COLUMNS,
    _ROW_GROUP,
    SCALE_TILE_ROWS // _ROW_GROUP,
    SCALE_TILE_COLUMNS,
  )
  lead = len(batch)
  order = (*range(lead), *(lead + d for d in (0, 3, 2, 1, 4)))
  code = code.transpose(order).reshape(*batch, padded_rows, padded_columns)
  code = code[..., :rows, :columns]
  return lax.bitcast_convert_type(code, swizzled.dtype)

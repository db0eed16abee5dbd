# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ScaledArray`, a block-scaled array as one pytree."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn, TypeGuard

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import (
  indexing,
  interleaving,
  layouts,
  operators,
  validation,
)
from jaxplugin.core import blocking, error_context, formats
from jaxplugin.jaxext import jax_private

_WHO: Final = "ScaledArray"
_BLOCKED: Final = (
  "the array is blocked along it; index array.dequantize() and quantize it"
  " again"
)
_SWIZZLED_ROWS: Final = (
  "scales of its rows are swizzled; index unprepare_weights(array)"
)


@operators.refuse
@jax.tree_util.register_pytree_with_keys_class
class ScaledArray:
  """A block-scaled array: values, block scales and a global scale.

  It stands for::

    values * repeat(scale, block_size) * global_scale

  `BlockFormat` says how `offset` changes that. It is a pytree of these arrays.
  So it passes through `jit`, `vmap`, `scan`, `jax.tree.map`, `device_put` and
  checkpoints.

  Attributes:
    values: format.values_dtype[..., k, ...]. MXFP6: uint8, a code in the low
      six bits. FP4 and INT4: also uint8[..., k / 2, ...], the first value in
      the low nibble. FP4: also uint32[..., k / 8] (`prepare_weights`).
    scale: format.scale_dtype[..., k / block_size, ...], which multiplies to
      dequantize; or the result of `swizzle_scale`. A short last block has a
      scale too. Square blocks: [..., n / block_size, k / block_size].
    global_scale: f32 that multiplies everything, or None. It has the rank of
      values. Each dimension has size 1 or the logical size, and the blocked one
      has size 1. f32[] and f32 of the leading dimensions are accepted too. None
      means 1.0.
    format: a `BlockFormat`, or its name.
    scale_layout: "linear" or "swizzled_128x4".
    surrogate: a float array of the logical shape that receives derivatives, or
      None. Its numbers are not used. `quantize` sets it if
      derivative="straight_through".
    offset: format.offset_dtype of scale's shape; None for other formats. The
      global scale is then None, and the scale linear.

  Raises:
    TypeError: If dtypes are not those of the format, or shapes do not fit.
    ValueError: If scale_layout or the format's name is unknown.

  Warns:
    GlobalScaleWarning: If NVFP4's block scales, known on a CPU, need a global
      scale and there is none.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> values = jnp.ones((2, 32), jnp.float8_e4m3fn)
    >>> scale = jnp.full((2, 1), 0.5, jnp.float8_e8m0fnu)
    >>> x_q = jp.ScaledArray(values, scale, None, "mxfp8")
    >>> x_q.format.name, x_q.shape
    ('mxfp8', (2, 32))
    >>> x_q.dequantize()[0, :3]
    Array([0.5, 0.5, 0.5], dtype=float32)
  """

  values: Any
  scale: Any
  global_scale: Any
  format: formats.BlockFormat
  scale_layout: layouts.ScaleLayout
  surrogate: Any
  offset: Any
  # (stack, number) if this array is `stack[number]`.
  _layer_of: tuple[ScaledArray, Any] | None = None
  # The array that `quantize` made this one from, and this array's leaves then.
  _quantized_from: tuple[Any, tuple[Any, ...]] | None = None

  def __init__(
    self,
    values: Any,
    scale: Any,
    global_scale: Any,
    format: formats.BlockFormat | str,
    *,
    scale_layout: layouts.ScaleLayout = layouts.LINEAR,
    surrogate: Any = None,
    offset: Any = None,
  ) -> None:
    if error_context.is_number(global_scale):
      number = error_context.finite_f32(_WHO, "global_scale", global_scale)
      rank = len(getattr(values, "shape", ()))
      global_scale = np.full((1,) * rank, number)
    self.values = values
    self.scale = scale
    self.global_scale = global_scale
    self.format = formats.resolve("ScaledArray", format)
    self.scale_layout = scale_layout
    self.surrogate = surrogate
    self.offset = offset
    validation.validate(self)

  def tree_flatten_with_keys(self) -> tuple[Any, Any]:
    children, aux = self.tree_flatten()
    key = jax.tree_util.GetAttrKey
    names = ["values", "scale", "global_scale", "surrogate"]
    if self.format.offset_dtype is not None:
      names.insert(3, "offset")
    named = zip(map(key, names), children, strict=False)
    return tuple(named), aux

  def tree_flatten(self) -> tuple[Any, Any]:
    children: tuple[Any, ...] = (self.values, self.scale, self.global_scale)
    if self.format.offset_dtype is not None:
      children = (*children, self.offset)
    if self.surrogate is not None:
      children = (*children, self.surrogate)
    return children, (self.format, self.scale_layout)

  @classmethod
  def tree_unflatten(cls, aux: Any, children: Any) -> ScaledArray:
    # Leaves may be anything here (shardings, specs, None), so no validation.
    self = object.__new__(cls)
    self.format, self.scale_layout = aux
    self.values, self.scale, self.global_scale, *rest = children
    has_offset = self.format.offset_dtype is not None
    self.offset = rest.pop(0) if has_offset else None
    self.surrogate = rest[0] if rest else None
    return self

  def __repr__(self) -> str:
    layout = (
      "" if self.scale_layout == layouts.LINEAR else f", {self.scale_layout}"
    )
    for name in ("offset", "surrogate"):
      if (leaf := getattr(self, name)) is not None:
        layout += f", {name}={error_context.shown(leaf)}"
    return (
      f"ScaledArray({self.format}: values={error_context.shown(self.values)},"
      f" scale={error_context.shown(self.scale)},"
      f" global_scale={error_context.shown(self.global_scale)}{layout})"
    )

  @property
  def is_packed(self) -> bool:
    """Whether values have 4 bits and are stored as uint8, two per byte."""
    return self.format.has_pairs and self.values.dtype == formats.PACKED

  @property
  def is_bytes(self) -> bool:
    """Whether values and scale are bits; `to_floats` undoes it."""
    return self.scale.dtype == formats.PACKED

  @property
  def is_interleaved(self) -> bool:
    """Whether values are FP4 in words; `pack` and `unpack` undo it."""
    return self.values.dtype == interleaving.WORDS

  @property
  def axis(self) -> int:
    """The blocked axis of `values`, found from the shapes, non-negative.

    It is the last axis for square blocks, which divide the last two, and for
    blocks of one value, which fit any axis.
    """
    if not all(hasattr(leaf, "shape") for leaf in (self.values, self.scale)):
      raise AttributeError(  # so that `hasattr(x, "shape")` is False
        f"ScaledArray: values and scale must be arrays, got {self!r}. Pass the"
        " whole array, as after equinox.combine"
      )
    if (
      self.scale_layout == layouts.SWIZZLED
      or self.is_interleaved
      or self.format.is_square
    ):
      return self.values.ndim - 1
    return layouts.blocked_axis(
      self.values.shape,
      self.scale.shape,
      is_one_each=self.format.block_size == (2 if self.is_packed else 1),
    )

  @property
  def block_size(self) -> int:
    """Number of consecutive values that share a scale, also for whole rows."""
    return self.format.along(self.shape[self.axis]).block_size

  @property
  def shape(self) -> tuple[int, ...]:
    """The logical shape, that of `dequantize(self)`."""
    return layouts.array_shape(self.format, self.values, self.axis)

  @property
  def ndim(self) -> int:
    """The number of dimensions."""
    return self.values.ndim

  @property
  def dtype(self) -> np.dtype:
    """Dtype of the stored values."""
    return self.values.dtype

  @property
  def nbytes(self) -> int:
    """Bytes of all leaves, FP4 values counted as half a byte each."""
    is_byte = self.values.dtype == formats.PACKED
    bits = 8 if is_byte else self.format.value_bits
    if self.is_interleaved:
      bits = 8 * interleaving.WORDS.itemsize
    total = blocking.divide_up(self.values.size * bits, 8)
    total += self.scale.size * self.scale.dtype.itemsize
    for leaf in (self.global_scale, self.offset, self.surrogate):
      if leaf is not None:
        total += leaf.size * leaf.dtype.itemsize
    return total

  @property
  def size(self) -> int:
    """The number of logical values."""
    return math.prod(self.shape)

  @property
  def sharding(self) -> jax.sharding.Sharding:
    """Sharding of `values`; the other leaves have other shardings."""
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
    """Returns the array with its dimensions in another order, exactly.

    The blocked dimension moves too. So w [n, k] in blocks along k becomes
    [k, n] in blocks along k, which a matmul can contract.

    Args:
      *axes: as for a NumPy array: none (reverses the dimensions), the
        dimensions, or one tuple of them.

    Raises:
      ValueError: If axes are not a permutation of the dimensions.
      NotImplementedError: If values or scales are in the order of
        `prepare_weights` or `swizzle_scale`, which block the last dimension.
    """
    require_global_scale("ScaledArray", self)
    is_one = len(axes) == 1 and not isinstance(axes[0], (int, np.integer))
    given = axes[0] if is_one else axes
    order = tuple(given or reversed(range(self.ndim)))
    for axis in order:
      error_context.require_integer("ScaledArray.transpose", "axis", axis)
    if sorted(d % self.ndim for d in order) != list(range(self.ndim)):
      raise ValueError(
        f"ScaledArray: transpose must name each of {self.ndim} dimensions"
        f" once, got {order}"
      )
    if self.format.is_square and min(d % self.ndim for d in order[-2:]) < (
      self.ndim - 2
    ):
      raise NotImplementedError(
        f"ScaledArray: transpose must keep the last two dimensions last, which"
        f" {self.format} divides into blocks, got {order}; transpose"
        " array.dequantize() and quantize it again"
      )
    if self.scale_layout != layouts.LINEAR or self.is_interleaved:
      raise NotImplementedError(
        "ScaledArray: the blocked dimension must stay last in values and"
        f" scales that were rearranged for a kernel, got {self!r}; transpose"
        " unprepare_weights(array), or pass the array to jaxplugin.linear"
      )
    leaves = self._leaves().items()
    return replace(self, **{name: x.transpose(order) for name, x in leaves})

  def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
    """Returns `jaxplugin.dequantize(self, dtype)`."""
    return _provided["dequantize"](self, dtype)

  def __matmul__(self, other: Any) -> jax.Array:
    """Multiplies the dequantized arrays like NumPy, with `block_scaled_dot`.

    The last dimension of the left side is contracted with the last but one of
    the right side: `x @ w_q.T` for w_q [n, k]. A quantized side must be blocked
    along that dimension. The result is f32. Leading dimensions are batch
    dimensions if both sides have the same; one side may have none.

    Raises:
      TypeError: If sizes differ, or a side is blocked along another dimension.
      NotImplementedError: If leading dimensions would have to be broadcast.
    """
    if not isinstance(other, (ScaledArray, jax.Array, np.ndarray)):
      return NotImplemented
    return _provided["matmul"](self, other)

  def __rmatmul__(self, other: Any) -> jax.Array:
    if not isinstance(other, (jax.Array, np.ndarray)):
      return NotImplemented
    return _provided["matmul"](other, self)

  def __array_ufunc__(
    self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any
  ) -> Any:
    # NumPy's operator @ with an array on the left side calls it.
    if ufunc is np.matmul and method == "__call__" and not kwargs:
      return _provided["matmul"](*inputs)
    return operators.refuse_ufunc(self, ufunc, method, *inputs, **kwargs)

  def __eq__(self, other: object) -> Any:
    raise TypeError(
      f"{_WHO}: == and != need plain arrays, got {self!r} and"
      f" {error_context.shown(other)}; compare dequantize() of both, or the"
      " stored bits with jax.tree.map(jnp.array_equal, x, y)"
    )

  @property
  def aval(self) -> Any:
    """Makes `jnp.zeros_like` and similar functions of JAX raise TypeError.

    They read it from a duck-typed array unless they are passed a dtype.
    """
    return self.__array__()

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
    del dtype, copy
    self._refuse(
      "this function",
      ". jnp.zeros_like and similar functions also accept a ScaledArray and a"
      " dtype",
    )

  def __jax_array__(self) -> Any:
    """Returns an object that JAX names in its error, and cannot convert.

    JAX's operators call this method first. If it raised an error, `x @ w_q`
    would not reach `__rmatmul__`.
    """
    return _NotPlain(self)

  def __len__(self) -> int:
    return self.shape[0]

  def _refuse(self, name: str, hint: str = "") -> NoReturn:
    raise TypeError(
      f"{_WHO}: {name} needs a plain array, got {self!r}; pass"
      f" array.dequantize(), or array.values for the codes{hint}"
    )

  def pack(self) -> ScaledArray:
    """Returns the array with 4-bit values as uint8, two per byte.

    Raises:
      NotImplementedError: If a byte would have one scale, and the blocked
        dimension is not the last. The shapes would not show that dimension.
    """
    validation.require_unconverted("ScaledArray.pack", self)
    if not self.format.has_pairs or self.is_packed:
      return self
    if self.is_interleaved:
      return replace(self, values=interleaving.deinterleave(self.values))
    values = layouts.pack_fp4(self.values, axis=self.axis)
    result = replace(self, values=values)
    if result.axis != self.axis:
      raise NotImplementedError(
        "ScaledArray.pack: the blocked dimension must be the last one, or have"
        f" blocks of more than 2 values, got {self!r} blocked along dimension"
        f" {self.axis}; transpose the array first, or keep it unpacked"
      )
    return result

  def unpack(self) -> ScaledArray:
    """Returns the array with 4-bit values as `float4_e2m1fn` or `int4`."""
    validation.require_unconverted("ScaledArray.unpack", self)
    if self.is_packed and self.is_bytes:
      return self.to_floats().unpack()
    if self.is_interleaved:
      return self.pack().unpack()
    if not self.is_packed:
      return self
    values = layouts.unpack_fp4(
      self.values, axis=self.axis, dtype=self.format.values_dtype
    )
    return replace(self, values=values)

  def to_bytes(self) -> ScaledArray:
    """Returns the array with uint8 values and scales; 4-bit values are packed.

    XLA:CPU slices bytes without a conversion, and 8-bit floats through 16 bits.
    An array whose scales have several bytes is only packed.
    """
    validation.require_unconverted("ScaledArray.to_bytes", self)
    if self.is_bytes:
      return self
    if self.format.scale_dtype.itemsize > 1:
      return self.pack()
    return self.pack()._replace_types(formats.PACKED, formats.PACKED)

  def to_floats(self) -> ScaledArray:
    """Undoes `to_bytes`; FP4 values stay packed."""
    if not self.is_bytes:
      return self
    format = self.format
    values_dtype = formats.PACKED if format.has_pairs else format.array_dtype
    return self._replace_types(values_dtype, format.scale_dtype)

  def _replace_types(
    self, values_dtype: np.dtype, scale_dtype: np.dtype
  ) -> ScaledArray:
    """Returns the same bits with other dtypes."""
    return replace(
      self,
      values=lax.bitcast_convert_type(self.values, values_dtype),
      scale=lax.bitcast_convert_type(self.scale, scale_dtype),
    )

  def linear_scale(self) -> Any:
    """Returns the scale in the linear layout, without padding."""
    validation.require_unconverted("ScaledArray.linear_scale", self)
    if self.scale_layout == layouts.LINEAR:
      return self.scale
    rows, k = self.shape[-2:]
    columns = blocking.divide_up(k, self.block_size)
    return layouts.unswizzle_scale(self.scale, (rows, columns))

  def in_rows(self) -> ScaledArray:
    """Returns the array with a known block size and a scale for each row.

    Rows of square blocks get their own scales, blocked along the last axis.
    """
    format = self.format.along(self.shape[self.axis]).of_rows()
    if format == self.format:
      return self
    scale = self.scale
    if self.format.is_square:
      rows = self.ndim - 2
      scale = layouts.scale_of_rows(
        scale, rows, self.shape[rows], self.format.block_rows
      )
    return replace(self, format=format, scale=scale)

  def without_surrogate(self) -> ScaledArray:
    """Returns the array without a derivative by its source."""
    return replace(self, surrogate=None)

  def without_offset(self) -> ScaledArray:
    """Returns the array of values times scales, without the offset.

    It remembers the stack that this array is a layer of.
    """
    if self.format.offset_dtype is None:
      return self
    result = replace(self, format=self.format.without_offset(), offset=None)
    if self._layer_of is not None:
      stack, number = self._layer_of
      result._layer_of = stack.without_offset(), number
    return result

  def __getitem__(self, index: Any) -> ScaledArray:
    """Indexes all dimensions except the blocked one.

    The index may have what a JAX array accepts: ints, slices, an ellipsis,
    integer arrays and boolean arrays. The blocked dimension must be taken
    whole. If the scale is swizzled, the rows must be taken whole too.

    Raises:
      TypeError: If one of these dimensions is not taken whole.
      IndexError: If a Python or NumPy int is out of bounds, or if there are too
        many indices. JAX arrays are clamped, as in a JAX array's index.
    """
    require_global_scale("ScaledArray", self)
    wholes = {self.axis: _BLOCKED}
    if self.scale_layout == layouts.SWIZZLED:
      wholes[self.ndim - 2] = _SWIZZLED_ROWS
    if self.format.is_square:
      wholes[self.ndim - 2] = _BLOCKED
    global_scale = full_global_scale(self)
    own, of_global = indexing.leaf_indices(
      index,
      self.shape,
      wholes,
      (1,) * self.ndim if global_scale is None else global_scale.shape,
    )
    is_dynamic = any(isinstance(item, jax.Array) for item in own)

    def take(leaf: Any, index: Any) -> Any:
      # NumPy arrays cannot be indexed by traced arrays.
      return (jnp.asarray(leaf) if is_dynamic else leaf)[index]

    leaves = {
      name: take(leaf, of_global if name == "global_scale" else own)
      for name, leaf in self._leaves().items()
    }
    result = replace(self, **leaves)
    if indexing.is_layer(own) and isinstance(self.values, jax.core.Tracer):
      result._layer_of = (self, own[0])
    return result

  def layer_of(self) -> tuple[ScaledArray, jax.Array] | None:
    """Returns (stack, i) if this is `stack[i]` in this trace, else None.

    The number i is an i32[] in range. Kernels that read the stack need no copy
    of the layer. Only the result of `stack[i]` itself has this: `jit` and other
    transformations drop it.
    """
    if self._layer_of is None:
      return None
    stack, number = self._layer_of
    count = stack.shape[0]
    number = jnp.asarray(number, jnp.int32)
    number = jnp.where(number < 0, number + count, number)
    return stack, jnp.clip(number, 0, count - 1)

  def quantized_from(self) -> jax.Array | None:
    """Returns the small array that `quantize` was given, or None.

    Quantizing it along its last axis, with this global scale, returns the same
    codes. It is a constant of derivatives. A backend that needs another layout
    can quantize into it directly. Only the result of `quantize` itself has it,
    in the same trace.
    """
    if self._quantized_from is None:
      return None
    x, leaves = self._quantized_from
    same = zip(self.tree_flatten()[0], leaves, strict=False)
    return x if all(now is then for now, then in same) else None

  def remember_origin(self, x: jax.Array) -> None:
    """Stores the array that `quantized_from` returns in a trace."""
    if isinstance(self.values, jax.core.Tracer):
      self._quantized_from = lax.stop_gradient(x), self.tree_flatten()[0]

  def __iter__(self) -> Iterator[ScaledArray]:
    """Returns an iterator over `self[i]` for the first dimension."""
    return (self[i] for i in range(self.shape[0]))

  def _leaves(self) -> dict[str, Any]:
    """Returns the leaves by name; a global scale has the array's rank."""
    found = {name: getattr(self, name) for name in _LEAVES}
    found["global_scale"] = full_global_scale(self)
    return {name: leaf for name, leaf in found.items() if leaf is not None}


class _NotPlain:
  """Prints the remedy in errors of JAX."""

  def __init__(self, array: ScaledArray) -> None:
    self._array = array

  def __repr__(self) -> str:
    try:
      self._array._refuse("this function")
    except TypeError as error:
      return str(error)


_LEAVES: Final = ("global_scale", "values", "scale", "offset", "surrogate")


def replace(array: ScaledArray, **changes: Any) -> ScaledArray:
  """Returns an array with other attributes, which are not checked."""
  result = object.__new__(ScaledArray)
  for name in (*_LEAVES, "format", "scale_layout"):
    value = changes[name] if name in changes else getattr(array, name)
    setattr(result, name, value)
  return result


# Functions of higher packages that methods call: "dequantize" and "matmul".
_provided: Final[dict[str, Callable[..., Any]]] = {}


def provide(**functions: Callable[..., Any]) -> None:
  """Registers functions that methods of `ScaledArray` call."""
  _provided.update(functions)


def as_array(who: str, name: str, x: Any) -> jax.Array:
  """Returns an argument as a plain array.

  Raises:
    TypeError: If `x` is not an array, for example a format (arguments in
      another order), a `ShapeDtypeStruct`, or a `ScaledArray`.
  """
  remedy = ""
  if isinstance(x, ScaledArray):
    remedy = "; dequantize it"
  elif isinstance(getattr(x, "array", None), ScaledArray):
    remedy = "; pass its array, of shape (n, k), or dequantize it"
  elif isinstance(getattr(x, "forward", None), ScaledArray):
    remedy = (
      "; pass it to the function that dot_general returns, or pass its"
      " .forward, a ScaledArray, or its .primal, the array"
    )
  elif isinstance(x, (str, formats.BlockFormat)) and name == "x":
    remedy = "; pass the array before the format"
  elif isinstance(x, jax.ShapeDtypeStruct):
    remedy = "; for shapes and dtypes only, trace the call with jax.eval_shape"
  elif isinstance(x, dict):
    remedy = "; map the function over a tree with jax.tree.map"
  else:
    if isinstance(x, np.ndarray):
      remedy = "; cast it to a dtype that JAX has, such as float32"
    try:
      if isinstance(x, np.ndarray):
        if not x.dtype.isnative:
          x = x.astype(x.dtype.newbyteorder("="))  # JAX refuses other orders
        if jax.sharding.get_abstract_mesh().empty:
          # asarray compiles a copy for each shape. device_put shares memory
          # with a NumPy array, which its owner may change.
          return jax.device_put(x.copy())
      return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError):
      pass
  raise TypeError(
    f"{who}: {name} must be an array, got {error_context.shown(x)}{remedy}"
  )


def has_surrogate(operand: Any) -> TypeGuard[ScaledArray]:
  return isinstance(operand, ScaledArray) and operand.surrogate is not None


def require_arrays(who: str, name: str, x: ScaledArray) -> None:
  """Raises TypeError unless a `ScaledArray`'s leaves are arrays that match."""
  for leaf in x.tree_flatten()[0][:2]:
    if not isinstance(leaf, (jax.Array, np.ndarray)):
      raise TypeError(
        f"{who}: {name} must be a ScaledArray of arrays, got"
        f" {error_context.shown(x)}; for shapes and dtypes only,"
        " trace the call with jax.eval_shape"
      )
  require_global_scale(f"{who}: {name}", x)


def _serialize_aux(
  aux: tuple[formats.BlockFormat, layouts.ScaleLayout],
) -> bytes:
  format, scale_layout = aux
  record: Any = format.name
  if not format.is_named:
    record = dataclasses.asdict(format)
    for field, value in record.items():
      if isinstance(value, np.dtype):
        record[field] = value.name
  return json.dumps([record, scale_layout]).encode()


def _deserialize_aux(
  data: bytes,
) -> tuple[formats.BlockFormat, layouts.ScaleLayout]:
  record, scale_layout = json.loads(data)
  if isinstance(record, str):
    return formats.by_name(record), scale_layout
  return formats.BlockFormat(**record), scale_layout


jax_private.register_pytree_serialization(
  ScaledArray,
  serialized_name="jaxplugin.ScaledArray",
  serialize_auxdata=_serialize_aux,
  deserialize_auxdata=_deserialize_aux,
)


def require_global_scale(who: str, x: ScaledArray) -> None:
  """Raises TypeError unless the global scale's shape fits the array's.

  It may not fit if a caller joined or indexed the leaves one by one. A caller
  may also have cast single leaves, so the dtypes are checked first.
  """
  validation.require_unconverted(who, x)
  validation.validate_global_scale(who, x.global_scale, x.shape, x.axis)


def full_global_scale(array: ScaledArray) -> Any:
  """Returns the global scale with the array's rank, or None."""
  scale = array.global_scale
  if scale is None or scale.ndim == array.ndim:
    return scale
  return scale.reshape(full_global_scale_shape(array))


def full_global_scale_shape(array: ScaledArray) -> tuple[int, ...]:
  """Returns the shape of `full_global_scale` if `array` has a global scale."""
  scale = array.global_scale
  if scale.ndim == array.ndim:
    return tuple(scale.shape)
  shape = () if scale.size == 1 else tuple(scale.shape)
  return (*shape, *(1,) * (array.ndim - len(shape)))

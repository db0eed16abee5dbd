# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`QuantizedWeight`: a weight stored in the order that matmuls read.

CPU kernels, and GPU kernels that decode FP4, read weights [n, k] in blocks
along k. They would copy a flax kernel [k, n] in each call. That copy takes many
times as long as a matmul with one row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import indexing, operators, scaled_array, validation
from jaxplugin.core import error_context, formats
from jaxplugin.jaxext import jax_private

_WHO: Final = "QuantizedWeight"


@operators.refuse
@jax.tree_util.register_pytree_with_keys_class
class QuantizedWeight:
  """A quantized weight with its own shape, stored as [..., n, k].

  `quantize_params` returns it for a weight that is not [..., n, k], for example
  a kernel [k, n]. `accept_quantized` passes it to a function in its own shape.
  `linear` and `block_scaled_dot` accept `weight.array`. It is a pytree with the
  leaves of that array. Its leading dimensions (layers, experts) can be mapped,
  scanned, indexed (`weight[0]`) and stacked (`jax.tree.map(stack, ...)`).

  Attributes:
    array: `ScaledArray` [..., n, k], blocked along k. n holds the kept
      dimensions and k the contracted ones, in the order of the weight.
    kernel_shape: shape of the weight without leading dimensions.
    contracting: the contracted dimensions of `kernel_shape`, ascending.
    dtype: floating dtype of the weight before quantization.

  Raises:
    TypeError: If array is not a `ScaledArray` blocked along its last dimension,
      or its last two sizes do not fit the kernel.
    ValueError: If contracting are not ascending dimensions of the kernel.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> kernel = jnp.ones((32, 3))
    >>> w_q = jp.quantize(kernel.T, "mxfp8")
    >>> weight = jp.QuantizedWeight(w_q, kernel.shape, (0,))
    >>> weight.shape, weight.array.shape
    ((32, 3), (3, 32))
  """

  array: Any
  kernel_shape: tuple[int, ...]
  contracting: tuple[int, ...]
  dtype: np.dtype

  def __init__(
    self,
    array: scaled_array.ScaledArray,
    kernel_shape: Sequence[int],
    contracting: Sequence[int],
    dtype: Any = jnp.float32,
  ) -> None:
    self.array = array
    self.kernel_shape = _integers("kernel_shape", kernel_shape)
    self.contracting = _integers("contracting", contracting)
    found = formats.as_dtype(dtype)
    if found is None or not jnp.issubdtype(found, jnp.floating):
      raise TypeError(
        f"{_WHO}: dtype must be the floating dtype of the kernel, got"
        f" {error_context.shown(dtype)}"
      )
    self.dtype = found
    dims = set(range(len(self.kernel_shape)))
    if list(self.contracting) != sorted(dims & set(self.contracting)):
      raise ValueError(
        f"{_WHO}: contracting must be dimensions of the kernel"
        f" {self.kernel_shape}, in ascending order, got {self.contracting}."
        " Count dimensions from 0, without leading ones (layers, experts)"
      )
    if not isinstance(array, scaled_array.ScaledArray) or array.ndim < 2:
      raise TypeError(
        f"{_WHO}: array must be a ScaledArray of rank 2 or more, got"
        f" {error_context.shown(array)}; pass quantize(kernel.T, format)"
      )
    validation.require_unconverted(_WHO, array)
    if array.axis != array.ndim - 1:
      raise TypeError(
        f"{_WHO}: array must be blocked along its last dimension, got"
        f" {error_context.shown(array)}"
        f" blocked along dimension {array.axis}. Pass the array as [..., n, k]:"
        " quantize(kernel.T, format)"
      )
    self.require_sizes()

  def require_sizes(self) -> None:
    """Raises TypeError if the array does not have the kernel's sizes.

    Slicing the leaves along dimensions other than leading ones causes this.
    """
    sizes = tuple(map(math.prod, self._sizes()))
    if self.array.ndim < 2 or tuple(self.array.shape[-2:]) != sizes:
      raise TypeError(
        f"{_WHO}: the last dimensions of the array must be {sizes}, because"
        f" the kernel has shape {self.kernel_shape} and contracting dimensions"
        f" {self.contracting}, got {self.array!r}; only leading dimensions of"
        " its leaves may be sliced. If a shard_map splits the kernel, call"
        " accept_quantized around the shard_map, or pass .array to"
        " jaxplugin.linear in it"
      )

  def _free(self) -> tuple[int, ...]:
    dims = range(len(self.kernel_shape))
    return tuple(d for d in dims if d not in self.contracting)

  def _sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the sizes of the kernel that are merged into n, and into k."""
    free = tuple(self.kernel_shape[d] for d in self._free())
    return free, tuple(self.kernel_shape[d] for d in self.contracting)

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the weight: leading dimensions, then those of the kernel."""
    return (*self.array.shape[:-2], *self.kernel_shape)

  @property
  def ndim(self) -> int:
    """The number of dimensions of the weight."""
    return len(self.shape)

  @property
  def size(self) -> int:
    """The number of logical values."""
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    """Bytes of the array, FP4 values counted as half a byte each."""
    return self.array.nbytes

  @property
  def format(self) -> Any:
    """The `BlockFormat` of the array."""
    return self.array.format

  def stored_dims(self) -> tuple[tuple[int, ...], ...]:
    """Returns, for each stored dimension, the weight's dimensions in it."""
    lead = self.array.ndim - 2
    free = tuple(lead + d for d in self._free())
    contracting = tuple(lead + d for d in self.contracting)
    return (*((d,) for d in range(lead)), free, contracting)

  def restored(self, x: jax.Array) -> jax.Array:
    """Converts a plain array of the stored shape to the weight's shape."""
    self.require_sizes()
    order = [d for dims in self.stored_dims() for d in dims]
    x = x.reshape([self.shape[d] for d in order])
    return x.transpose(np.argsort(order))

  def dequantize(self, dtype: Any = None) -> jax.Array:
    """Returns the weight as a plain array of shape `shape`.

    Args:
      dtype: f32, bf16 or f16. None is the dtype before quantization.
    """
    dtype = self.dtype if dtype is None else dtype
    return self.restored(self.array.dequantize(dtype))

  def __getitem__(self, index: Any) -> QuantizedWeight:
    """Indexes leading dimensions (layers, experts) like `ScaledArray`.

    Raises:
      TypeError: If a dimension of the kernel is not taken whole.
      IndexError: If an int is out of bounds, or there are too many indices.
    """
    ndim = self.array.ndim
    why = "it has dimensions of the kernel; index weight.array or dequantize()"
    wholes = {ndim - 2: why, ndim - 1: why}
    indexing.leaf_indices(index, self.array.shape, wholes, (1,) * ndim)
    array = self.array[index]
    return self.tree_unflatten(self.tree_flatten()[1], (array,))

  def __len__(self) -> int:
    return self.shape[0]

  def __iter__(self) -> Iterator[QuantizedWeight]:
    """Returns an iterator over `self[i]` for the first leading dimension."""
    return (self[i] for i in range(len(self)))

  def _refuse(self, name: str) -> NoReturn:
    raise TypeError(
      f"{_WHO}: {name} needs a plain array, got {self!r}; pass it as an"
      " argument to jaxplugin.accept_quantized(function), or call"
      " dequantize(), or pass its array to jaxplugin.linear"
    )

  def __repr__(self) -> str:
    # Without arrays, such as in a tree of shardings, `shape` is missing.
    shape = getattr(self, "shape", self.kernel_shape)
    return f"{_WHO}({self.dtype.name}{list(shape)}, stored as {self.array!r})"

  def tree_flatten_with_keys(self) -> tuple[Any, Any]:
    children, aux = self.tree_flatten()
    return ((jax.tree_util.GetAttrKey("array"), children[0]),), aux

  def tree_flatten(self) -> tuple[Any, Any]:
    return (self.array,), (self.kernel_shape, self.contracting, self.dtype)

  @classmethod
  def tree_unflatten(cls, aux: Any, children: Any) -> QuantizedWeight:
    # Leaves may be anything here (shardings, specs, None), so no validation.
    self = object.__new__(cls)
    (self.array,) = children
    self.kernel_shape, self.contracting, self.dtype = aux
    return self


def _integers(name: str, given: Sequence[int]) -> tuple[int, ...]:
  is_sequence = isinstance(given, Sequence)
  if not is_sequence or not all(map(error_context.is_integer, given)):
    raise TypeError(
      f"{_WHO}: {name} must be a tuple of integers, got"
      f" {error_context.shown(given)}"
    )
  return tuple(map(int, given))


def _serialize_aux(aux: Any) -> bytes:
  kernel_shape, contracting, dtype = aux
  return json.dumps([kernel_shape, contracting, dtype.name]).encode()


def _deserialize_aux(data: bytes) -> Any:
  kernel_shape, contracting, name = json.loads(data)
  return tuple(kernel_shape), tuple(contracting), jnp.dtype(name)


jax_private.register_pytree_serialization(
  QuantizedWeight,
  serialized_name="jaxplugin.QuantizedWeight",
  serialize_auxdata=_serialize_aux,
  deserialize_auxdata=_deserialize_aux,
)

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Traced values that are products of arrays, each repeated along dimensions.

Code dequantizes with many orders of reshapes, repeats and multiplications. An
`ArrayProduct` describes the result of any such order: the arrays that are
multiplied, and for each dimension of the value the dimensions of these arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as extend_core
from jax.sharding import NamedSharding, PartitionSpec

from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.jaxext import tangents
from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.quantization import dequantization, problems

# Dtypes of dequantized values.
WIDE: Final = frozenset(formats.FLOAT_DTYPES)

# 8-bit floats whose bits a uint8 array may hold.
_BYTES: Final = frozenset((formats.E4M3, formats.E5M2, formats.E8M0))


class NotSupported(Exception):
  """A matmul of dequantized weights cannot be replaced; has the reason."""


@dataclasses.dataclass(frozen=True, eq=False)
class Atom:
  """A part of a dimension that no reshape splits. Equal by identity."""

  size: int


Atoms = tuple[Atom, ...]
_Fact = TypeVar("_Fact")
_Parts = Mapping[Atom, Atoms]


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("array",),
  meta_fields=("dims", "dtype", "pair"),
)
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Factor:
  """An array of a product.

  Attributes:
    array: the array.
    dims: atoms of each dimension, outermost first. A dimension of size 1 has
      no atoms.
    dtype: of the elements. A uint8 array may hold the bits of another dtype.
    pair: atom of the two FP4 elements in a byte, the first one in the low
      nibble. None if a byte holds one element.
  """

  array: Any
  dims: tuple[Atoms, ...]
  dtype: np.dtype
  pair: Atom | None = None

  @property
  def atoms(self) -> frozenset[Atom]:
    own = frozenset(atom for dim in self.dims for atom in dim)
    return own if self.pair is None else own | {self.pair}

  @property
  def is_bytes(self) -> bool:
    """Whether the array has the elements' bits."""
    return self.array.dtype == formats.PACKED

  def laid_out(
    self, dims: Sequence[Sequence[Atom]], *, as_bytes: bool = False
  ) -> jax.Array:
    """Lays the array out in dimensions of these atoms.

    Args:
      dims: atoms of each dimension. The array is repeated along atoms that the
        factor does not have.
      as_bytes: whether 8-bit floats stay uint8.

    Returns:
      An array of the factor's dtype. FP4 values stay packed if the two values
      of a byte are neighbours along a dimension.
    """
    if self.pair is not None:
      return self._packed(self.pair, dims)
    array = jnp.asarray(self.array)
    if array.dtype != self.dtype and not as_bytes:
      array = lax.bitcast_convert_type(array, self.dtype)
    return laid_out(array, self.dims, dims)

  def _packed(self, pair: Atom, dims: Sequence[Sequence[Atom]]) -> jax.Array:
    if any(dim and dim[-1] is pair for dim in dims):
      without = [[atom for atom in dim if atom is not pair] for dim in dims]
      return laid_out(self.array, self.dims, without)
    values = layouts.unpack_fp4(self.array[..., None])
    return laid_out(values, (*self.dims, (pair,)), dims)


def laid_out(
  array: jax.Array,
  own_dims: Sequence[Sequence[Atom]],
  dims: Sequence[Sequence[Atom]],
) -> jax.Array:
  """Lays out an array with dimensions of `own_dims` in dimensions of `dims`.

  The array is repeated along atoms that it does not have.
  """
  own = [atom for dim in own_dims for atom in dim]
  wanted = [atom for dim in dims for atom in dim]
  array = jnp.reshape(array, [atom.size for atom in own])
  array = array.transpose([own.index(a) for a in wanted if a in own])
  array = array.reshape([a.size if a in own else 1 for a in wanted])
  array = jnp.broadcast_to(array, [atom.size for atom in wanted])
  return array.reshape([math.prod(a.size for a in dim) for dim in dims])


def laid_out_sharding(
  sharding: NamedSharding,
  own_dims: Sequence[Sequence[Atom]],
  dims: Sequence[Sequence[Atom]],
) -> NamedSharding:
  """Converts a sharding of `own_dims` to one of `dims`, as `laid_out` does.

  Raises:
    NotSupported: If it splits another dimension than the outermost part of one
      of `dims`, or has unreduced axes.
  """
  if sharding.spec.unreduced or sharding.spec.reduced:
    raise NotSupported("its sharding has unreduced or reduced axes")
  entries = [None] * len(dims)
  for own, entry in zip(own_dims, sharding.spec, strict=False):
    if not own or entry is None:
      continue
    entries[outermost(dims, own)] = entry
  return sharding.update(spec=PartitionSpec(*entries))


def outermost(dims: Sequence[Sequence[Atom]], own: Sequence[Atom]) -> int:
  """Returns which of `dims` has `own` as its outermost part.

  Raises:
    NotSupported: If none has.
  """
  for d, dim in enumerate(dims):
    if dim[: len(own)] == own:
      return d
  raise NotSupported("it splits a part of a stored dimension")


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("factors",),
  meta_fields=("dims",),
)
@dataclasses.dataclass(frozen=True, eq=False)
class ArrayProduct:
  """A value that is the product of its factors, except for roundings.

  Attributes:
    dims: atoms of each dimension of the value, outermost first.
    factors: at least one. A factor is repeated along atoms it does not have.
  """

  dims: tuple[Atoms, ...]
  factors: tuple[Factor, ...]

  def refined(self, parts: _Parts) -> ArrayProduct:
    """Replaces atoms by their parts, which may have parts too."""
    expand = lambda dims: tuple(_expanded(dim, parts) for dim in dims)
    factors = []
    for factor in self.factors:
      pair = factor.pair
      if pair is not None:
        (pair,) = _expanded((pair,), parts)  # size 2 is never split
      dims = expand(factor.dims)
      factors.append(dataclasses.replace(factor, dims=dims, pair=pair))
    return ArrayProduct(expand(self.dims), tuple(factors))


def _expanded(atoms: Sequence[Atom], parts: _Parts) -> Atoms:
  found: list[Atom] = []
  for atom in atoms:
    if atom in parts:
      found.extend(_expanded(parts[atom], parts))
    else:
      found.append(atom)
  return tuple(found)


def of_array(x: Any) -> ArrayProduct | None:
  """Returns an array as a product of one factor.

  None if a size is symbolic or zero.
  """
  if not _are_known(np.shape(x)):
    return None
  dims = tuple(map(atoms_of, np.shape(x)))
  dtype = np.dtype(jnp.result_type(x))
  return ArrayProduct(dims, (Factor(array=x, dims=dims, dtype=dtype),))


def _are_known(sizes: Sequence[Any]) -> bool:
  return all(isinstance(size, int) and size for size in sizes)


def atoms_of(size: int) -> Atoms:
  """Returns the atoms of a new dimension."""
  return (Atom(size),) if size != 1 else ()


def _applied(
  eqn: Any, operands: Sequence[ArrayProduct | None]
) -> Sequence[ArrayProduct | None]:
  """Returns the products that the results of an operation are.

  Args:
    eqn: the operation: a `BoundOperation` or an equation.
    operands: products, or None for an operand that is not one.
  """
  if eqn.primitive.name == "jit":
    return _of_jaxpr(eqn.params["jaxpr"], operands)
  rule = _RULES.get(eqn.primitive.name)
  if rule is None or any(x is None for x in operands):
    return ()
  return (rule(*operands, **eqn.params),)


def _has_rule(eqn: Any) -> bool:
  """Whether the results of an operation may be products."""
  return eqn.primitive.name in _RULES or eqn.primitive.name == "jit"


def _of_jaxpr(
  closed: Any, operands: Sequence[ArrayProduct | None]
) -> list[ArrayProduct | None]:
  """Returns the products that the results of a jaxpr are."""
  jaxpr = closed.jaxpr
  known: dict[Any, ArrayProduct | None] = dict(
    zip(jaxpr.invars, operands, strict=True)
  )

  def read(x: Any) -> ArrayProduct | None:
    if isinstance(x, extend_core.Literal):
      return of_array(x.val)
    return known.get(x)

  for eqn in jaxpr.eqns:
    if _has_rule(eqn):
      results = _applied(eqn, list(map(read, eqn.invars)))
      known.update(zip(eqn.outvars, results, strict=False))
  return [read(x) for x in jaxpr.outvars]


# Rules. Each takes the operands' products and the operation's parameters.


def _convert(
  x: ArrayProduct, *, new_dtype: Any, **_: Any
) -> ArrayProduct | None:
  return x if np.dtype(new_dtype) in WIDE else None


def _same(x: ArrayProduct, **_: Any) -> ArrayProduct:
  return x


def _transpose(
  x: ArrayProduct, *, permutation: Sequence[int], **_: Any
) -> ArrayProduct:
  return ArrayProduct(tuple(x.dims[d] for d in permutation), x.factors)


def _squeeze(
  x: ArrayProduct, *, dimensions: Sequence[int], **_: Any
) -> ArrayProduct:
  dims = (dim for d, dim in enumerate(x.dims) if d not in dimensions)
  return ArrayProduct(tuple(dims), x.factors)


def _broadcast(
  x: ArrayProduct,
  *_: Any,
  shape: Sequence[Any],
  broadcast_dimensions: Sequence[int],
  **__: Any,
) -> ArrayProduct | None:
  if not _are_known(shape):
    return None
  own = dict(zip(broadcast_dimensions, x.dims, strict=True))
  dims = (own.get(d) or atoms_of(size) for d, size in enumerate(shape))
  return ArrayProduct(tuple(dims), x.factors)


def _tile(x: ArrayProduct, *, reps: Sequence[int], **_: Any) -> ArrayProduct:
  dims = zip(reps, x.dims, strict=True)
  return ArrayProduct(tuple((*atoms_of(n), *dim) for n, dim in dims), x.factors)


def _reshape(
  x: ArrayProduct, *_: Any, new_sizes: Sequence[Any], dimensions: Any, **__: Any
) -> ArrayProduct | None:
  if dimensions is not None or not _are_known(new_sizes):
    return None
  left = [atom for dim in reversed(x.dims) for atom in reversed(dim)]
  parts: dict[Atom, Atoms] = {}
  dims = []
  for size in new_sizes:
    taken: list[Atom] = []
    while size > 1:
      atom = left.pop()
      if atom.size % size == 0 and atom.size != size:
        outer, inner = Atom(size), Atom(atom.size // size)
        parts[atom] = (outer, inner)
        left.append(inner)
        atom = outer
      elif size % atom.size:
        return None  # the dimensions have no common boundary
      taken.append(atom)
      size //= atom.size
    dims.append(tuple(taken))
  # The atoms of `dims` are not split again.
  return ArrayProduct(tuple(dims), x.refined(parts).factors)


def _multiply(
  x: ArrayProduct, y: ArrayProduct, **_: Any
) -> ArrayProduct | None:
  if not x.dims or not y.dims:
    return ArrayProduct(x.dims or y.dims, (*x.factors, *y.factors))
  # If both operands have the same array, one of them may be transposed.
  y = y.refined({a: (Atom(a.size),) for dim in y.dims for a in dim})
  parts: dict[Atom, Atoms] = {}
  for ours, theirs in zip(x.dims, y.dims, strict=True):
    # A dimension of size 1 is repeated.
    if ours and theirs and not _unify(ours, theirs, parts):
      return None
  x, y = x.refined(parts), y.refined(parts)
  dims = (ours or theirs for ours, theirs in zip(x.dims, y.dims, strict=True))
  return ArrayProduct(tuple(dims), (*x.factors, *y.factors))


def _unify(ours: Atoms, theirs: Atoms, parts: dict[Atom, Atoms]) -> bool:
  """Splits the atoms of a dimension until both operands have the same sizes."""
  mine, others = list(reversed(ours)), list(reversed(theirs))
  while mine and others:
    a, b = mine.pop(), others.pop()
    if a.size == b.size:
      parts[b] = (a,)
    elif a.size % b.size == 0:
      inner = Atom(a.size // b.size)
      parts[a] = (b, inner)
      mine.append(inner)
    elif b.size % a.size == 0:
      inner = Atom(b.size // a.size)
      parts[b] = (a, inner)
      others.append(inner)
    else:
      return False
  return not mine and not others


def _bitcast(
  x: ArrayProduct, *, new_dtype: Any, **_: Any
) -> ArrayProduct | None:
  """Reads bytes as 8-bit floats, or each as two FP4 values."""
  dtype = np.dtype(new_dtype)
  (factor, *more) = x.factors
  if dtype == factor.dtype:
    return x
  if more or factor.dtype != formats.PACKED:
    return None
  if dtype == formats.E2M1:
    return _with_pairs(x, len(x.dims), new_dim=True)
  if dtype not in _BYTES:
    return None
  return ArrayProduct(x.dims, (dataclasses.replace(factor, dtype=dtype),))


def _with_pairs(
  x: ArrayProduct, axis: int, new_dim: bool = False
) -> ArrayProduct:
  """Reads each byte as two FP4 values along a dimension."""
  (factor,) = x.factors
  pair = Atom(2)
  dims = [*x.dims, ()] if new_dim else list(x.dims)
  dims[axis] = (*dims[axis], pair)
  factor = dataclasses.replace(factor, dtype=formats.E2M1, pair=pair)
  return ArrayProduct(tuple(dims), (factor,))


def _dequantize(
  values: ArrayProduct,
  scale: ArrayProduct,
  global_scale: ArrayProduct | None = None,
  *,
  problem: problems.DequantizationProblem,
  **_: Any,
) -> ArrayProduct | None:
  """Returns the product of values and scales that `jp.dequantize` computes."""
  format, axis = problem.format, problem.axis
  if format.array_dtype != format.values_dtype or format.is_integer:
    return None  # the values are codes
  if format.is_fp4 and len(values.factors) == 1:
    (factor,) = values.factors
    if factor.dtype == formats.PACKED:
      values = _with_pairs(values, axis)
  dims = list(scale.dims)
  dims[axis] = (*dims[axis], Atom(format.block_size))
  result = _multiply(values, ArrayProduct(tuple(dims), scale.factors))
  if result is None or global_scale is None:
    return result
  return _multiply(result, global_scale)


_RULES: Final[Mapping[str, Callable[..., ArrayProduct | None]]] = {
  "convert_element_type": _convert,
  "copy": _same,
  "name": _same,
  "stop_gradient": _same,
  tangents.without_derivative_p.name: _same,
  "transpose": _transpose,
  "squeeze": _squeeze,
  "broadcast_in_dim": _broadcast,
  "reshape": _reshape,
  "tile": _tile,
  "mul": _multiply,
  "bitcast_convert_type": _bitcast,
  dequantization.dequantize_p.name: _dequantize,
}


def layers(x: ArrayProduct) -> tuple[ArrayProduct, tuple[bool, ...]] | None:
  """Splits a product by its first dimension.

  Returns:
    The product of one index of it, whose arrays are those of `x`, and whether
    each array needs to be sliced. None if an array has only a part of the
    dimension, or has it elsewhere.
  """
  first = x.dims[0] if x.dims else ()
  factors, is_sliced = [], []
  for factor in x.factors:
    has_first = not factor.atoms.isdisjoint(first)
    if has_first and factor.dims[:1] != (first,):
      return None
    dims = factor.dims[1:] if has_first else factor.dims
    factors.append(dataclasses.replace(factor, dims=dims))
    is_sliced.append(has_first)
  return ArrayProduct(x.dims[1:], tuple(factors)), tuple(is_sliced)


class Values(Generic[_Fact]):
  """Facts about values, by identity. A fact is freed with its value."""

  def __init__(self) -> None:
    self._known: dict[int, tuple[weakref.ref, _Fact]] = {}

  def get(self, x: Any) -> _Fact | None:
    found = self._known.get(id(x))
    return found[1] if found is not None and found[0]() is x else None

  def put(self, x: Any, fact: _Fact) -> None:
    # An inlined jitted function may return a number, which has no identity.
    if isinstance(x, (int, float, complex, np.generic)):
      return
    key = id(x)
    forget = lambda reference: self._forget(key, reference)
    self._known[key] = weakref.ref(x, forget), fact

  def _forget(self, key: int, reference: weakref.ref) -> None:
    found = self._known.get(key)
    if found is not None and found[0] is reference:
      del self._known[key]


class ArrayProducts:
  """The products that values of a function are."""

  def __init__(self) -> None:
    self._products = Values[ArrayProduct]()

  def of(self, x: Any) -> ArrayProduct | None:
    """Returns the product that a value is; any array is one of itself."""
    found = self._products.get(x)
    if found is not None:
      return found
    return of_array(x) if _may_be_factor(x) else None

  def put(self, x: Any, product: ArrayProduct) -> None:
    """Records the product that a value is."""
    self._products.put(x, product)

  def note(
    self, operation: binding_private.BoundOperation, results: Sequence[Any]
  ) -> None:
    """Records the products that the results of an operation are."""
    if not _has_rule(operation):
      return
    known = _applied(operation, list(map(self.of, operation.args)))
    for result, product in zip(results, known, strict=False):
      if product is not None:
        self.put(result, product)


def _may_be_factor(x: Any) -> bool:
  dtype = getattr(x, "dtype", None)
  dtype = jnp.result_type(x) if dtype is None else dtype
  if np.ndim(x) == 0:
    return jnp.issubdtype(dtype, jnp.number)
  return dtype == formats.PACKED or jnp.issubdtype(dtype, jnp.floating)

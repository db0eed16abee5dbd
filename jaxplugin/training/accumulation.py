# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`accumulate`: gradients of microbatches, summed over devices once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxplugin.core import error_context
from jaxplugin.jaxext import jax_private, mesh_axes
from jaxplugin.quantization import arguments
from jaxplugin.quantization.sharding import global_scales
from jaxplugin.training import products

_WHO: Final = "accumulate"
_REDUCTIONS: Final = ("mean", "sum")


def accumulate(
  loss: Callable[..., Any],
  microbatches: int,
  *,
  axes: str | Sequence[str] | None = None,
  mesh: Any = None,
  argnums: int | Sequence[int] = 0,
  batch_argnums: int | Sequence[int] = 1,
  key_argnum: int | None = None,
  has_aux: bool = False,
  reduction: Literal["mean", "sum"] = "mean",
) -> Callable[..., Any]:
  """Returns a `jax.value_and_grad` that works in microbatches.

  Each device splits its rows of the batch into parts, and adds their gradients
  in at least f32. Then the devices sum these once. A loop over microbatches x
  devices parts on one device computes the same.

  Args:
    loss: a function that returns a scalar. With `axes` it computes one device's
      part, as in `jax.shard_map`.
    microbatches: number of parts of a device's rows.
    axes: the mesh axes that split the batch. If None or empty, XLA places the
      sums.
    mesh: the mesh; None is the mesh of `jax.set_mesh`.
    argnums, has_aux: as for `jax.value_and_grad`.
    batch_argnums: arguments to split along dimension 0.
    key_argnum: a key. The number of a part is folded in.
    reduction: "mean" or "sum" of the parts' losses and gradients.

  Returns:
    A function with the arguments of `loss` that returns (value, gradient), or
    ((value, aux), gradient). aux has an entry for each part along a new
    dimension 0, in the order of the rows.

  Raises:
    TypeError: If an argument has a wrong type; from the function, if the parts
      do not divide a batch.
    ValueError: If an argument has a wrong value; from the function, if the mesh
      does not have `axes`.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> step = jp.training.accumulate(lambda w, x: (w * x).mean(), 2)
    >>> value, gradient = step(jnp.float32(3), jnp.arange(4.0))
    >>> print(value, gradient)
    4.5 1.5
  """
  error_context.require_function(_WHO, loss)
  microbatches = error_context.require_integer(
    _WHO, "microbatches", microbatches
  )
  if microbatches < 1:
    raise ValueError(
      f"{_WHO}: microbatches must be at least 1, got {microbatches}; pass 1 for"
      " the whole batch at once"
    )
  if not error_context.is_one_of(reduction, _REDUCTIONS):
    raise ValueError(
      f'{_WHO}: reduction must be "mean" or "sum", got'
      f" {error_context.shown(reduction)}"
    )
  axes = () if axes is None else global_scales.axis_names(_WHO, axes, "axes")
  if mesh is not None and not axes:
    raise ValueError(
      f"{_WHO}: mesh must be None without axes, got axes=() and"
      f" {error_context.shown(mesh)}. Pass axes="
    )
  return _Accumulation(
    loss=loss,
    microbatches=microbatches,
    axes=axes,
    mesh=mesh,
    argnums=argnums,
    batch_argnums=batch_argnums,
    key_argnum=key_argnum,
    has_aux=error_context.require_bool(_WHO, "has_aux", has_aux),
    is_mean=reduction == "mean",
  )


# Two functions with equal arguments are not equal, as those of `jax.grad`.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Accumulation:
  """A function that `accumulate` returns, with the arguments of the call."""

  loss: Callable[..., Any]
  microbatches: int
  axes: tuple[str, ...]
  mesh: Any
  argnums: int | Sequence[int]
  batch_argnums: int | Sequence[int]
  key_argnum: int | None
  has_aux: bool
  is_mean: bool

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    wrt, split, key = self._positions(len(args))
    for i in key:
      arguments.validate_key(_WHO, args[i])
    devices, is_mapped = self._devices()
    batch = [args[i] for i in split]
    self._validate_batch(batch, 1 if is_mapped else devices)
    whole = [() if i in split else arg for i, arg in enumerate(args)]
    leaves, tree = jax.tree.flatten((whole, kwargs))
    is_array = [isinstance(x, (jax.Array, np.ndarray)) for x in leaves]
    arrays = [x for x, is_one in zip(leaves, is_array, strict=True) if is_one]

    def sums(batch: Any, arrays: Any) -> Any:
      """Returns value and gradient of all parts, and aux of this device's."""
      given = iter(arrays)
      args, kwargs = jax.tree.unflatten(
        tree,
        [
          next(given) if is_one else x
          for x, is_one in zip(leaves, is_array, strict=True)
        ],
      )
      for i in wrt:
        # Otherwise JAX sums the gradient over the devices in each part.
        args[i] = jax.tree.map(self._varying, args[i])
      zeros: Any = tuple(jax.tree.map(_zeros, args[i]) for i in wrt)

      def part(sums: Any, step: Any) -> Any:
        number, batch = step
        own = [*args]
        for i, x in zip(split, batch, strict=True):
          own[i] = x
        for i in key:
          own[i] = products.fold_in(own[i], number)
        value, gradient = jax.value_and_grad(
          self.loss, wrt, has_aux=self.has_aux
        )(*own, **kwargs)
        value, aux = value if self.has_aux else (value, None)
        add = lambda total, x: total + x.astype(total.dtype)
        return jax.tree.map(add, sums, gradient), (value, aux)

      numbers = jnp.arange(self.microbatches)
      if self.axes:
        numbers += lax.axis_index(self.axes) * self.microbatches
      rows = jax.tree.map(self._parts, batch)
      gradient, (values, aux) = lax.scan(part, zeros, (numbers, rows))
      value = values.astype(_wide(values)).sum()
      sums = value, gradient
      return (lax.psum(sums, self.axes) if self.axes else sums), aux

    if self.axes and not is_mapped:
      by_rows = PartitionSpec(self.axes)
      # Without `jit`, a `shard_map` over some axes of a mesh raises an error.
      sums = jax.jit(
        jax.shard_map(
          sums,
          mesh=self.mesh,
          in_specs=(by_rows, PartitionSpec()),
          out_specs=(PartitionSpec(), by_rows),
          axis_names=set(self.axes),
          # A loss may have a loop whose initial value is the same everywhere.
          check_vma=False,
        )
      )
      arrays = [self._gathered(x) for x in arrays]
    (value, gradient), aux = sums(batch, arrays)
    if self.is_mean:
      parts = self.microbatches * devices
      value, gradient = jax.tree.map(lambda x: x / parts, (value, gradient))
    gradient = jax.tree.map(_sharded_as, gradient, tuple(args[i] for i in wrt))
    if np.ndim(self.argnums) == 0:
      (gradient,) = gradient
    return ((value, aux) if self.has_aux else value), gradient

  def _positions(self, count: int) -> list[tuple[int, ...]]:
    """Returns the positions of argnums, batch_argnums and key_argnum."""
    found = []
    for name in ("argnums", "batch_argnums", "key_argnum"):
      given: Any = getattr(self, name)
      if given is None:
        given = ()
      numbers = [
        error_context.require_integer(_WHO, name, number)
        for number in (given if isinstance(given, Sequence) else [given])
      ]
      if name == "argnums" and not numbers:
        raise ValueError(
          f"{_WHO}: argnums must name an argument, got {self.argnums}. Pass the"
          " position of the parameters"
        )
      if any(not -count <= number < count for number in numbers):
        raise ValueError(
          f"{_WHO}: {name} must be positions of the {count} arguments, got"
          f" {given}; pass the arguments of loss by position"
        )
      found.append(tuple(number % count for number in numbers))
    every = [number for numbers in found for number in numbers]
    if len({*every}) < len(every):
      raise ValueError(
        f"{_WHO}: argnums, batch_argnums and key_argnum must be different"
        f" arguments, got {self.argnums}, {self.batch_argnums} and"
        f" {self.key_argnum}"
      )
    return found

  def _devices(self) -> tuple[int, bool]:
    """Returns how many devices split the batch, and whether a `shard_map` does.

    Raises:
      ValueError: If the mesh does not have the axes, or an enclosing
        `shard_map` is over some of them.
    """
    context = jax.sharding.get_abstract_mesh()
    mesh = context if self.mesh is None else self.mesh
    if any(axis not in mesh.shape for axis in self.axes):
      raise ValueError(
        f"{_WHO}: axes must be axes of the mesh, {(*mesh.shape,)}, got"
        f" {self.axes}. Pass mesh=, or call the function in jax.set_mesh(mesh)."
      )
    types = dict(zip(context.axis_names, context.axis_types, strict=True))
    is_manual = [types.get(axis) == AxisType.Manual for axis in self.axes]
    if any(is_manual) and not all(is_manual):
      raise ValueError(
        f"{_WHO}: the enclosing shard_map must be over all axes or none, got"
        f" axes={self.axes}. Leave out the others."
      )
    return math.prod(mesh.shape[axis] for axis in self.axes), any(is_manual)

  def _validate_batch(self, batch: Any, devices: int) -> None:
    parts = self.microbatches * devices
    for x in jax.tree.leaves(batch):
      if not np.ndim(x) or x.shape[0] % parts:
        raise TypeError(
          f"{_WHO}: dimension 0 of a batch must be a multiple of {parts}"
          f" ({self.microbatches} microbatches x {devices} devices), got"
          f" {error_context.shown(x)}. Pad the batch, or change microbatches."
        )
      if not {*mesh_axes.spec_of(x)[0]} <= {*self.axes}:
        raise ValueError(
          f"{_WHO}: axes must have the explicit mesh axes of dimension 0 of a"
          f" batch, {mesh_axes.spec_of(x)[0]}, got {self.axes}. Add them."
        )

  def _parts(self, x: Any) -> Any:
    rows = x.shape[0] // self.microbatches
    return x.reshape(self.microbatches, rows, *x.shape[1:])

  def _varying(self, x: Any) -> Any:
    axes = {*self.axes} - jax_private.varying_axes(x)
    return lax.pcast(x, tuple(axes), to="varying") if axes else x

  def _gathered(self, x: Any) -> Any:
    """Removes `axes` from an explicit sharding."""
    if mesh_axes.mesh_of([x]) is None:
      return x
    spec = [
      tuple(axis for axis in axes if axis not in self.axes)
      for axes in mesh_axes.spec_of(x)
    ]
    return mesh_axes.reshard(x, tuple(spec))


def _wide(x: Any) -> Any:
  return jnp.promote_types(jnp.result_type(x), np.float32)


def _zeros(x: Any) -> jax.Array:
  return jax_private.varying_as(jnp.zeros_like(x, _wide(x)), x)


def _sharded_as(gradient: jax.Array, x: Any) -> jax.Array:
  """Reshards a gradient to the explicit sharding in the type of its array."""
  if mesh_axes.mesh_of([x]) is None:
    return gradient
  return mesh_axes.reshard(gradient, mesh_axes.spec_of(x))

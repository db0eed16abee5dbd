# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`OutFormat`: how a function quantizes its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax import lax

from jaxplugin.arrays import scaled_array, validation
from jaxplugin.core import error_context, formats
from jaxplugin.jaxext import tangents
from jaxplugin.quantization import api, arguments, codes, integers

_LEAVES: Final = ("global_scale", "key")
NO_DERIVATIVE: Final = (
  "the quantized result has no derivative. Pass"
  ' out_format=jp.OutFormat(..., derivative="straight_through"), whose gradient'
  " is that of the f32 result, or pass jax.lax.stop_gradient of the arguments"
)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class OutFormat:
  """The format of a quantized result: the argument `out_format`.

  The function quantizes its f32 result before the cast. The bits are those of
  `quantize` of that result. A format or its name is an `OutFormat` without
  options. It is a pytree of `global_scale` and `key`, so a jitted function can
  take it as an argument. It is also hashable, for `static_argnames`. Equal
  arrays count as one value only if they are the same object.

  Attributes:
    format: a `BlockFormat` or its name.
    axis: blocked axis of the result. A pair of axes gives two results, as
      `quantize_both` does.
    scale_rounding: as for `quantize`.
    global_scale: as for `quantize`: f32[]. None computes it in a second pass
      over the result. Delayed scaling passes a scale of an earlier step.
    key: as for `quantize`: key of stochastic rounding. Requires one axis.
    returns_amax: whether the function returns (result, amax). The amax is the
      largest finite magnitude of the f32 result, f32[], or 0.
    packed: as for `quantize`.
    derivative: as for `quantize`.

  Raises:
    TypeError: If a field has the wrong type.
    ValueError: If the format's name or a field's value is invalid.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> jp.OutFormat("nvfp4", returns_amax=True).format.block_size
    16
  """

  format: formats.BlockFormat | str
  _: dataclasses.KW_ONLY
  axis: int | tuple[int, int] = -1
  scale_rounding: arguments.ScaleRounding | integers.PackageRule = "up"
  global_scale: jax.Array | float | None = None
  key: jax.Array | None = None
  returns_amax: bool = False
  packed: bool | None = None
  derivative: api.Derivative | None = None

  def __post_init__(self) -> None:
    who = "OutFormat"
    format = formats.resolve(who, self.format)
    object.__setattr__(self, "format", format)
    returns_amax = error_context.require_bool(
      who, "returns_amax", self.returns_amax
    )
    object.__setattr__(self, "returns_amax", returns_amax)
    for name in _LEAVES:
      if isinstance(x := getattr(self, name), np.ndarray):  # it may change
        x = scaled_array.as_array(who, name, x) if x.ndim else x[()]
        object.__setattr__(self, name, x)
    arguments.validate_global_scale(who, self.global_scale, format)
    arguments.validate_key(who, self.key, format, is_stack=True)
    arguments.validate_packed(who, self.packed)
    arguments.package_rule(who, self.scale_rounding, format)
    if not error_context.is_one_of(
      self.derivative, (None, api.STRAIGHT_THROUGH)
    ):
      raise ValueError(
        f"{who}: derivative must be None or {api.STRAIGHT_THROUGH!r}, got"
        f" {error_context.shown(self.derivative)}. Pass"
        f" {api.STRAIGHT_THROUGH!r} to train, or leave derivative out"
      )
    if isinstance(self.axis, (tuple, list)):
      axes = tuple(
        error_context.require_integer(who, "axis", axis) for axis in self.axis
      )
      if len(axes) != 2:
        raise ValueError(
          f"{who}: axis must be an integer or a pair of integers, got"
          f" {error_context.shown(self.axis)}. Pass one axis, or two"
        )
      object.__setattr__(self, "axis", axes)
      if self.key is not None:
        raise ValueError(
          f"{who}: key must be None if axis is a pair, got axis={axes}. Pass"
          " one axis, or leave key out"
        )
    else:
      axis = error_context.require_integer(who, "axis", self.axis)
      object.__setattr__(self, "axis", axis)

  def tree_flatten_with_keys(self) -> tuple[Any, Any]:
    children, aux = self.tree_flatten()
    keys = map(jax.tree_util.GetAttrKey, _LEAVES)
    return tuple(zip(keys, children, strict=True)), aux

  def tree_flatten(self) -> tuple[Any, Any]:
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    children = tuple(fields.pop(name) for name in _LEAVES)
    return children, tuple(fields.items())

  @classmethod
  def tree_unflatten(cls, aux: Any, children: Any) -> OutFormat:
    # Leaves may be anything here (axes, specs, None), so no validation.
    self = object.__new__(cls)
    leaves = zip(_LEAVES, children, strict=True)
    for name, value in (*aux, *leaves):
      object.__setattr__(self, name, value)
    return self

  def _compared(self) -> tuple[Any, ...]:
    """Returns the fields: numbers by value, arrays by their identity."""
    children, aux = self.tree_flatten()
    return aux, *(
      ("number", float(x))
      if isinstance(x, (int, float, np.number))
      else ("array", id(x))
      for x in children
    )

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, OutFormat):
      return NotImplemented
    return self._compared() == other._compared()

  def __hash__(self) -> int:
    return hash(self._compared())

  @property
  def block_format(self) -> formats.BlockFormat:
    """The format if it was given by its name."""
    return formats.resolve("OutFormat", self.format)

  def axes_in(self, who: str, shape: Sequence[Any]) -> tuple[int, ...]:
    """Returns the blocked axes of a result, counted from 0.

    Raises:
      ValueError: If an axis is out of range, or both are the same.
    """
    rank = len(shape)
    given = self.axis if isinstance(self.axis, tuple) else (self.axis,)
    axes = {axis % rank: axis for axis in given if -rank <= axis < rank}
    if len(axes) < len(given):
      raise ValueError(
        f"{who}: axis of out_format must name dimensions of the result, each"
        f" once, got {self.axis} for shape {tuple(shape)}. Pass -1, -2, (-1,"
        " -2) or other axes of it"
      )
    return tuple(axes)

  @classmethod
  def of(cls, who: str, out_format: Any) -> OutFormat:
    """Returns an argument `out_format` of a function as an `OutFormat`.

    Its global scale is f32[] or None.
    """
    out = out_format
    if not isinstance(out, cls):
      out = cls(formats.resolve(who, out, "out_format"))
    where = f"{who}: out_format"
    global_scale = arguments.given_global_scale(
      where, out.global_scale, out.block_format
    )
    arguments.validate_key(where, out.key, out.block_format)
    return cls.tree_unflatten(out.tree_flatten()[1], (global_scale, out.key))

  @classmethod
  def of_matmul(
    cls, who: str, out_format: Any, preferred_element_type: Any
  ) -> OutFormat:
    """Returns `of`; raises unless the matmul's result is f32.

    Args:
      who, out_format: as for `of`.
      preferred_element_type: argument of the matmul; None is the default.
    """
    is_default = preferred_element_type is None
    if (
      not is_default and formats.as_dtype(preferred_element_type) != np.float32
    ):
      raise ValueError(
        f"{who}: preferred_element_type must be float32 if out_format is given,"
        f" got {error_context.shown(preferred_element_type)}. Leave"
        " preferred_element_type out: the f32 result is quantized"
      )
    return cls.of(who, out_format)


def quantized(
  who: str, x: jax.Array, out: OutFormat, source: jax.Array | None = None
) -> Any:
  """Quantizes the f32 result of a function.

  Args:
    source: as for `with_source`; None is x.

  Returns:
    A `ScaledArray`, or two if `out` has two axes; with out.returns_amax a tuple
    of that and the amax.
  """
  global_scale = out.global_scale
  if out.derivative is None:
    x, global_scale = tangents.without_derivative(
      (x, global_scale), f"{who}: {NO_DERIVATIVE}"
    )
  else:
    source = x if source is None else source
    x, global_scale = lax.stop_gradient((x, global_scale))
  axes = out.axes_in(who, x.shape)
  options: dict[str, Any] = {
    "scale_rounding": out.scale_rounding,
    "global_scale": global_scale,
    "packed": out.packed,
  }
  result: Any
  with error_context.in_function(f"{who}: out_format"):
    if len(axes) == 2:
      result = api.quantize_both(x, out.format, axes=axes, **options)
    else:
      result = api.quantize(x, out.format, axis=axes[0], key=out.key, **options)
  result = (result, codes.finite_amax(x)) if out.returns_amax else result
  return with_source(result, out, source)


def with_source(result: Any, out: OutFormat, source: jax.Array | None) -> Any:
  """Returns the result of `quantized` with its straight-through derivative.

  Args:
    source: f32 array that the result is the identity of for derivatives, or
      None.
  """
  is_array = lambda x: isinstance(x, scaled_array.ScaledArray)
  for x in filter(is_array, jax.tree.leaves(result, is_leaf=is_array)):
    if out.scale_rounding != "ggml":
      validation.remember_positive(x.scale)
    x.surrogate = source
  return result


OutFormatLike = OutFormat | formats.BlockFormat | str

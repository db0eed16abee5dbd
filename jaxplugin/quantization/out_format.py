# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`OutFormat`: how a function quantizes its result."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from jaxplugin.core import error_context
from jaxplugin.core import formats
from jaxplugin.quantization import api


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["global_scale", "key"],
  meta_fields=[
    "format",
    "axis",
    "scale_rounding",
    "returns_amax",
    "packed",
    "derivative",
  ],
)
@dataclasses.dataclass(frozen=True, eq=False)
class OutFormat:
  """The format of a quantized result: the argument `out_format`.

  The function quantizes its f32 result before the cast. The bits are those of
  `quantize` of that result. A format or its name is an `OutFormat` without
  options. It is a pytree of `global_scale` and `key`, so a jitted function can
  take it as an argument.

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
  scale_rounding: api.ScaleRounding = "up"
  global_scale: jax.Array | float | None = None
  key: jax.Array | None = None
  returns_amax: bool = False
  packed: bool | None = None
  derivative: api.Derivative | None = None

  def __post_init__(self) -> None:
    who = "OutFormat"
    format = formats.resolve(who, self.format)
    object.__setattr__(self, "format", format)
    error_context.require_bool(who, "returns_amax", self.returns_amax)
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

  @classmethod
  def of(cls, who: str, out_format: Any) -> OutFormat:
    """Returns an argument `out_format` of a function as an `OutFormat`."""
    if isinstance(out_format, cls):
      return out_format
    return cls(formats.resolve(who, out_format, "out_format"))

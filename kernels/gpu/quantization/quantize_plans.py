# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is launched to quantize: pure functions, no Triton.

`plan` quantizes along one axis, reading x where it lies. `plan_both` quantizes
along two, from one read. A global scale that is computed takes one read before;
`plan_partial_scales` and its twin for two have that alone, of a device's part.
Arrays are "x", "global_scale", "key", "partial_amax", "partial_scales",
"values" and "scale"; names that end in "_t" are of columns. No launch lets the
compiler contract a product and a sum, which would change bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from typing import Final

from jaxplugin.kernels.gpu.quantization import quantize_config

from jaxplugin.kernels import architectures
from jaxplugin.kernels import formats
from jaxplugin.kernels import launching

REDUCE_CHUNK: Final = 1024  # CHUNK of `reduce_global_scale`
_REDUCE_WARPS: Final = 4
# The largest scale that `four_over_six` scales to 6, so that one of 1.5 times
# as much is a scale too (arXiv 2512.02010).
FOUR_OVER_SIX_MAX: Final = 256.0


def plan(
  x: quantize_config.Rows, architecture: architectures.Architecture
) -> list[launching.Launch]:
  """What is launched to quantize along k, in order.

  Raises:
    ValueError: unknown format or scale rounding.
  """
  config = quantize_config.default_config(
    x.format,
    architecture,
    *x.covered(),
    k_is_contiguous=x.k_is_minor,
    extras=x.extras,
  )
  result = [_quantize_launch(x, config)]
  if x.global_scale == "computed":
    result[:0] = _global_scale_launches(x, config, architecture)
  return result


def plan_partial_scales(
  x: quantize_config.Rows, architecture: architectures.Architecture
) -> list[launching.Launch]:
  """What is launched for the global scale that a part of an array asks for."""
  config = quantize_config.default_config(
    x.format,
    architecture,
    *x.covered(),
    k_is_contiguous=x.k_is_minor,
    extras=x.extras,
  )
  return _global_scale_launches(x, config, architecture, is_part=True)


def plan_partial_scales_of_both(
  x: quantize_config.Matrices,
  architecture: architectures.Architecture,
  place: int,
) -> list[launching.Launch]:
  """The same of blocks along columns and along rows.

  Args:
    place: of that of columns among both, 0 or 1.
  """
  config = quantize_config.default_config(
    x.format, architecture, x.k_t, x.k, both=True, extras=_of_either(x)
  )
  return _global_scales_launches(x, config, place)


def plan_both(
  x: quantize_config.Matrices, architecture: architectures.Architecture
) -> list[launching.Launch]:
  """What is launched to quantize along columns and along rows, in order.

  Raises:
    ValueError: unknown format or scale rounding.
  """
  config = quantize_config.default_config(
    x.format, architecture, x.k_t, x.k, both=True, extras=_of_either(x)
  )
  result = [_quantize_both_launch(x, config)]
  if x.global_scale == "computed":
    result[:0] = _global_scales_launches(x, config)
  return result


def _quantize_launch(
  x: quantize_config.Rows,
  config: quantize_config.QuantizeConfig,
) -> launching.Launch:
  format = formats.by_name(x.format)
  blocks = x.k // format.block_size
  stored = x.k // format.values_per_byte
  grid_rows, grid_k = x.covered()
  if x.pads_values or (format.is_packed and not x.packed_in_place):
    values = (x.batch, grid_rows if x.pads_values else x.rows, stored)
    values_strides = (values[1] * values[2], values[2], 1)
  else:
    values = x.shape(stored)
    values_strides = x.strides(stored)
  scale: tuple[int, ...] = x.shape(blocks)
  scale_strides = x.strides(blocks)
  if x.swizzled:
    scale = (x.batch, grid_rows, grid_k // format.block_size)
    scale_strides = (scale[1] * scale[2], 0, 0)
  constants = {
    "rows": x.rows,
    "k": x.k,
    "grid_rows": grid_rows,
    "grid_k": grid_k,
    "x_strides": x.strides(x.k),
    "random_places": x.places or tuple(((0, s),) for s in x.strides(x.k)),
    "values_strides": values_strides,
    "scale_strides": scale_strides,
    **quantize_config.constexprs(
      config,
      x.format,
      scale_rounding=x.scale_rounding,
      swizzled=x.swizzled,
      pads_values=x.pads_values,
      extras=x.extras,
      global_scale=x.global_scale,
    ),
  }
  return launching.Launch(
    kernel="quantize",
    name=f"quantize_{x.format}{x.extras.suffix}_{_tile_name(config)}",
    inputs=(
      "x",
      "x" if x.global_scale == "none" else "global_scale",
      "key" if x.extras.is_stochastic else "x",
    ),
    outputs=(
      launching.Output("values", values, "uint8"),
      launching.Output("scale", scale, "uint8"),
    ),
    constexprs=tuple(constants.items()),
    grid=quantize_config.launch_grid(config, x.batch, grid_rows, grid_k)[0],
    num_warps=config.num_warps,
  )


def _global_scale_launches(
  x: quantize_config.Rows,
  config: quantize_config.QuantizeConfig,
  architecture: architectures.Architecture,
  *,
  is_part: bool = False,
) -> list[launching.Launch]:
  """The largest magnitude of each tile, then one program over those.

  One program does all of it where it is quicker than two launches.
  """
  written = "partial_scales" if is_part else "global_scale"
  few = quantize_config.config_of_few(x, architecture)
  if few is not None:
    return [_launch_of_few(x, few, written)]
  (programs,) = quantize_config.launch_grid(config, x.batch, x.rows, x.k)
  made = quantize_config.measured(x.format, x.extras)
  amax = {
    "rows": x.rows,
    "k": x.k,
    "x_strides": x.strides(x.k),
    "BLOCK_M": config.block_m,
    "BLOCK_K": config.block_k,
    "QUANTIZED": made,
  }
  reduce = _reduce_constants(x.format, x.extras, programs)
  return [
    launching.Launch(
      kernel="finite_amax",
      name=f"finite_amax{made.extras.suffix}_{_tile_name(config)}",
      inputs=("x",),
      outputs=(launching.Output("partial_amax", (programs,), "int32"),),
      constexprs=tuple(amax.items()),
      grid=programs,
      num_warps=config.num_warps,
    ),
    launching.Launch(
      kernel="reduce_global_scale",
      name=f"reduce_{written}",
      inputs=("partial_amax",),
      outputs=(launching.Output(written, (1,), "float32"),),
      constexprs=(*reduce.items(), ("NONE", 0.0 if is_part else 1.0)),
      grid=1,
      num_warps=_REDUCE_WARPS,
    ),
  ]


def _launch_of_few(
  x: quantize_config.Rows,
  config: quantize_config.QuantizeConfig,
  written: str,
) -> launching.Launch:
  made = quantize_config.measured(x.format, x.extras)
  (tiles,) = quantize_config.launch_grid(config, x.batch, x.rows, x.k)
  constants = {
    "rows": x.rows,
    "k": x.k,
    "x_strides": x.strides(x.k),
    "TILES": tiles,
    "BLOCK_M": config.block_m,
    "BLOCK_K": config.block_k,
    "QUANTIZED": made,
    "RANGE": _reduce_constants(x.format, x.extras, tiles)["RANGE"],
    "NONE": 0.0 if written == "partial_scales" else 1.0,
  }
  return launching.Launch(
    kernel="global_scale_of_few",
    name=f"{written}_of_few_{_tile_name(config)}",
    inputs=("x",),
    outputs=(launching.Output(written, (1,), "float32"),),
    constexprs=tuple(constants.items()),
    grid=1,
    num_warps=config.num_warps,
  )


def _quantize_both_launch(
  x: quantize_config.Matrices,
  config: quantize_config.QuantizeConfig,
) -> launching.Launch:
  format = formats.by_name(x.format)
  packing = format.values_per_byte
  batch, rows, columns = x.batch, x.rows, x.columns
  k, k_t = x.k, x.k_t
  values_t: tuple[int, ...] = (batch, columns, k_t // packing)
  scale_t: tuple[int, ...] = (batch, columns, k_t // format.block_size)
  is_minor = format.is_packed and not x.packed_in_place
  if not x.is_transposed:
    scale_t = (batch, k_t // format.block_size, columns)
    if not is_minor:
      values_t = (batch, k_t // packing, columns)
  sizes = {"rows": rows, "columns": columns, "k": k, "k_t": k_t}
  made = quantize_config.constexprs(
    config,
    x.format,
    scale_rounding=x.scale_rounding,
    extras=x.extras,
    global_scale=x.global_scale,
  )
  constants = {
    **sizes,
    "grid_rows": k_t,
    "grid_columns": k,
    "x_strides": (rows * columns, columns, 1),
    "random_places": x.places,
    "random_places_t": x.places_t,
    **made,
    "QUANTIZED_T": dataclasses.replace(made["QUANTIZED"], extras=x.extras_t),
    "TRANSPOSED": x.is_transposed,
    "VALUES_TRANSPOSED": x.is_transposed or is_minor,
  }
  global_scales = ("x", "x")
  if x.global_scale != "none":
    global_scales = ("global_scale", "global_scale_t")
  keys = (
    "key" if x.extras.is_stochastic else "x",
    "key_t" if x.extras_t.is_stochastic else "x",
  )
  suffix = f"{_both_suffix(x.extras, x.extras_t)}_{_tile_name(config)}"
  return launching.Launch(
    kernel="quantize_both",
    name=f"quantize_both_{x.format}{suffix}",
    inputs=("x", *global_scales, *keys),
    outputs=(
      launching.Output("values", (batch, rows, k // packing), "uint8"),
      launching.Output("scale", (batch, rows, k // format.block_size), "uint8"),
      launching.Output("values_t", values_t, "uint8"),
      launching.Output("scale_t", scale_t, "uint8"),
    ),
    constexprs=tuple(constants.items()),
    grid=quantize_config.launch_grid(config, batch, k_t, k)[0],
    num_warps=config.num_warps,
  )


def _global_scales_launches(
  x: quantize_config.Matrices,
  config: quantize_config.QuantizeConfig,
  place: int | None = None,
) -> list[launching.Launch]:
  """The largest magnitudes of each tile, then one program over those.

  Args:
    place: as of `plan_partial_scales_of_both`; None for a whole array.
  """
  rows, columns = x.rows, x.columns
  (programs,) = quantize_config.launch_grid(config, x.batch, rows, columns)
  made, made_t = (
    quantize_config.measured(x.format, extras)
    for extras in (x.extras, x.extras_t)
  )
  amax = {
    "rows": rows,
    "columns": columns,
    "x_strides": (rows * columns, columns, 1),
    "BLOCK_M": config.block_m,
    "BLOCK_K": config.block_k,
    "QUANTIZED": made,
    "QUANTIZED_T": made_t,
  }
  reduce = _reduce_constants(x.format, x.extras, programs)
  written = "reduce_global_scales"
  outputs: tuple[launching.Output, ...] = (
    launching.Output("global_scale", (1,), "float32"),
    launching.Output("global_scale_t", (1,), "float32"),
  )
  if place is not None:
    written = "reduce_partial_scales"
    outputs = (launching.Output("partial_scales", (2,), "float32"),)
    reduce["PLACE"] = place
  return [
    launching.Launch(
      kernel="finite_amax_both",
      name=(
        "finite_amax_both"
        f"{_both_suffix(made.extras, made_t.extras)}_{_tile_name(config)}"
      ),
      inputs=("x",),
      outputs=(
        launching.Output("partial_amax", (programs,), "int32"),
        launching.Output("partial_amax_t", (programs,), "int32"),
      ),
      constexprs=tuple(amax.items()),
      grid=programs,
      num_warps=config.num_warps,
    ),
    launching.Launch(
      kernel=written,
      name=written,
      inputs=("partial_amax", "partial_amax_t"),
      outputs=outputs,
      constexprs=tuple(reduce.items()),
      grid=1,
      num_warps=_REDUCE_WARPS,
    ),
  ]


def _reduce_constants(
  format_name: str, extras: quantize_config.Extras, programs: int
) -> dict[str, Any]:
  """Of both kernels that reduce what programs have found."""
  format = formats.by_name(format_name)
  scale = FOUR_OVER_SIX_MAX if extras.four_over_six else format.scale.max
  return {
    "size": programs,
    "RANGE": scale * format.element.max,
    "CHUNK": REDUCE_CHUNK,
  }


def _of_either(x: quantize_config.Matrices) -> quantize_config.Extras:
  """What the tiles and casts of both arrays are chosen for."""
  return quantize_config.Extras(
    hadamard=max(x.extras.hadamard, x.extras_t.hadamard),
    four_over_six=x.extras.four_over_six or x.extras_t.four_over_six,
    is_stochastic=x.extras.is_stochastic or x.extras_t.is_stochastic,
  )


def _both_suffix(
  extras: quantize_config.Extras, extras_t: quantize_config.Extras
) -> str:
  """What names say of either array; of one that is plain "plain"."""
  if extras == extras_t:
    return extras.suffix
  return f"{extras.suffix or '_plain'}_and{extras_t.suffix or '_plain'}"


def _tile_name(config: quantize_config.QuantizeConfig) -> str:
  return f"{config.block_m}x{config.block_k}"

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans the launches of the quantize kernels: pure functions, no Triton.

`plan` quantizes along one axis and reads x without a copy. `plan_both`
quantizes along two axes, from one read. A computed global scale takes one read
before, which finds the largest magnitudes of parts of x, or of a small x all of
its global scale; `plan_maxima` and its twin for two have the former alone.
Arrays are "x", "global_scale", "key", "maxima", "values" and "scale"; names
that end in "_t" are of columns. No launch lets the compiler contract a product
and a sum, which would change bits.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from jaxplugin.kernels.gpu.quantization import quantize_config

from jaxplugin.kernels import architectures
from jaxplugin.kernels import formats
from jaxplugin.kernels import launching

# Upper limit on partial amax values. Every quantize program reads all of them:
# each of 128 threads loads 16 bytes. This number of programs with 512 threads
# is 6/7 of the programs that a B200 can run at once.
MOST_MAXIMA: Final = 512
_WARPS_OF_MANY: Final = 16
# `four_over_six` may scale a block to 4 instead of 6, with 1.5 times the scale.
# 256 is the largest E4M3 scale for which that is a scale (arXiv 2512.02010).
FOUR_OVER_SIX_MAX: Final = 256.0
# Name of the array that kernels read for a global scale; "x" is a placeholder.
_READ: Final[dict[quantize_config.GlobalScale, str]] = {
  "none": "x",
  "given": "global_scale",
  "computed": "maxima",
  "of_maxima": "maxima",
}


def plan(
  x: quantize_config.Rows, architecture: architectures.Architecture
) -> list[launching.Launch]:
  """Returns the launches that quantize along k, in order.

  Raises:
    ValueError: If the format or the scale rounding is unknown.
  """
  config = _config(x, architecture)
  if x.global_scale != "computed":
    return [_quantize_launch(x, config, x.num_maxima)]
  few = quantize_config.config_of_few(x, architecture)
  if few is not None:
    given = dataclasses.replace(x, global_scale="given")
    return [_launch_of_few(x, few), _quantize_launch(given, config, 0)]
  first = _maxima_launch(x, config)
  return [first, _quantize_launch(x, config, first.grid)]


def plan_maxima(
  x: quantize_config.Rows, architecture: architectures.Architecture
) -> launching.Launch:
  """Returns the launch that finds partial amax values of x."""
  return _maxima_launch(x, _config(x, architecture))


def plan_maxima_of_both(
  x: quantize_config.Matrices, architecture: architectures.Architecture
) -> launching.Launch:
  """Returns the launch that finds partial amax values for both blockings."""
  return _maxima_of_both_launch(x, _config_of_both(x, architecture))


def plan_both(
  x: quantize_config.Matrices, architecture: architectures.Architecture
) -> list[launching.Launch]:
  """Returns the launches that quantize along columns and rows, in order.

  Raises:
    ValueError: If the format or the scale rounding is unknown.
  """
  config = _config_of_both(x, architecture)
  if x.global_scale != "computed":
    return [_quantize_both_launch(x, config, x.num_maxima)]
  first = _maxima_of_both_launch(x, config)
  return [first, _quantize_both_launch(x, config, first.grid)]


def _quantize_launch(
  x: quantize_config.Rows,
  config: quantize_config.QuantizeConfig,
  num_maxima: int,
) -> launching.Launch:
  """Returns the launch of `quantize`.

  Args:
    x: the array.
    config: its tiles.
    num_maxima: number of maxima from which the global scale is computed; 0 if
      the kernel does not compute it.
  """
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
      options=x.options,
      maxima=_maxima(num_maxima, 0, x.format, x.options)
      if num_maxima
      else None,
    ),
  }
  # The kernel's fourth argument: the global scale that it computes, if it does.
  computed: tuple[launching.Output, ...] = ()
  not_computed: tuple[str, ...] = ("x",)
  if num_maxima:
    computed = (launching.Output("global_scale", (1,), "float32"),)
    not_computed = ()
  return launching.Launch(
    kernel="quantize",
    name=f"quantize_{x.format}{x.options.suffix}_{_tile_name(config)}",
    inputs=(
      "x",
      _READ[x.global_scale],
      "key" if x.options.is_stochastic else "x",
      *not_computed,
    ),
    outputs=(
      *computed,
      launching.Output("values", values, "uint8"),
      launching.Output("scale", scale, "uint8"),
    ),
    constexprs=tuple(constants.items()),
    grid=quantize_config.launch_grid(config, x.batch, grid_rows, grid_k)[0],
    num_warps=config.num_warps,
  )


def _maxima_launch(
  x: quantize_config.Rows, config: quantize_config.QuantizeConfig
) -> launching.Launch:
  config, tiles, programs = _programs(config, x.batch, x.rows, x.k)
  made = quantize_config.measured(x.format, x.options)
  constants = {
    "rows": x.rows,
    "k": x.k,
    "x_strides": x.strides(x.k),
    "PROGRAMS": programs,
    "TILES": tiles,
    "BLOCK_M": config.block_m,
    "BLOCK_K": config.block_k,
    "QUANTIZED": made,
  }
  return launching.Launch(
    kernel="finite_amax",
    name=f"finite_amax{made.options.suffix}_{_tile_name(config)}",
    inputs=("x",),
    outputs=(launching.Output("maxima", (1, programs), "uint32"),),
    constexprs=tuple(constants.items()),
    grid=programs,
    num_warps=config.num_warps,
  )


def _launch_of_few(
  x: quantize_config.Rows, config: quantize_config.QuantizeConfig
) -> launching.Launch:
  """Returns a launch that computes the global scale before x is quantized.

  cuDNN's matmul needs it. A second kernel writes its codes in whole tiles, and
  XLA drops the first quantize kernel if nothing else uses its codes.
  """
  (tiles,) = quantize_config.launch_grid(config, x.batch, x.rows, x.k)
  constants = {
    "rows": x.rows,
    "k": x.k,
    "x_strides": x.strides(x.k),
    "TILES": tiles,
    "BLOCK_M": config.block_m,
    "BLOCK_K": config.block_k,
    "QUANTIZED": quantize_config.measured(x.format, x.options),
    "RANGE": _maxima(tiles, 0, x.format, x.options).range,
  }
  return launching.Launch(
    kernel="global_scale_of_few",
    name=f"global_scale_of_few_{_tile_name(config)}",
    inputs=("x",),
    outputs=(launching.Output("global_scale", (1,), "float32"),),
    constexprs=tuple(constants.items()),
    grid=1,
    num_warps=config.num_warps,
  )


def _quantize_both_launch(
  x: quantize_config.Matrices,
  config: quantize_config.QuantizeConfig,
  num_maxima: int,
) -> launching.Launch:
  """Returns the launch of `quantize_both`; for args see `_quantize_launch`."""
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
    options=x.options,
  )
  of_columns, of_rows = (
    _maxima(num_maxima, row, x.format, x.options) if num_maxima else None
    for row in (x.row, 1 - x.row)
  )
  constants = {
    **sizes,
    "grid_rows": k_t,
    "grid_columns": k,
    "x_strides": (rows * columns, columns, 1),
    "random_places": x.places,
    "random_places_t": x.places_t,
    **made,
    "QUANTIZED": dataclasses.replace(made["QUANTIZED"], maxima=of_columns),
    "QUANTIZED_T": dataclasses.replace(
      made["QUANTIZED"], options=x.options_t, maxima=of_rows
    ),
    "TRANSPOSED": x.is_transposed,
    "VALUES_TRANSPOSED": x.is_transposed or is_minor,
  }
  read = read_t = _READ[x.global_scale]
  computed: tuple[launching.Output, ...] = ()
  not_computed: tuple[str, ...] = ("x", "x")
  if num_maxima:
    not_computed = ()
    computed = tuple(
      launching.Output(name, (1,), "float32")
      for name in ("global_scale", "global_scale_t")
    )
  elif x.global_scale == "given":
    read_t = "global_scale_t"
  keys = (
    "key" if x.options.is_stochastic else "x",
    "key_t" if x.options_t.is_stochastic else "x",
  )
  suffix = f"{_both_suffix(x.options, x.options_t)}_{_tile_name(config)}"
  return launching.Launch(
    kernel="quantize_both",
    name=f"quantize_both_{x.format}{suffix}",
    inputs=("x", read, read_t, *keys, *not_computed),
    outputs=(
      *computed,
      launching.Output("values", (batch, rows, k // packing), "uint8"),
      launching.Output("scale", (batch, rows, k // format.block_size), "uint8"),
      launching.Output("values_t", values_t, "uint8"),
      launching.Output("scale_t", scale_t, "uint8"),
    ),
    constexprs=tuple(constants.items()),
    grid=quantize_config.launch_grid(config, batch, k_t, k)[0],
    num_warps=config.num_warps,
  )


def _maxima_of_both_launch(
  x: quantize_config.Matrices, config: quantize_config.QuantizeConfig
) -> launching.Launch:
  rows, columns = x.rows, x.columns
  config, tiles, programs = _programs(config, x.batch, rows, columns)
  made, made_t = (
    quantize_config.measured(x.format, options)
    for options in (x.options, x.options_t)
  )
  constants = {
    "rows": rows,
    "columns": columns,
    "x_strides": (rows * columns, columns, 1),
    "ROW": x.row,
    "PROGRAMS": programs,
    "TILES": tiles,
    "BLOCK_M": config.block_m,
    "BLOCK_K": config.block_k,
    "QUANTIZED": made,
    "QUANTIZED_T": made_t,
  }
  suffix = f"{_both_suffix(made.options, made_t.options)}_{_tile_name(config)}"
  return launching.Launch(
    kernel="finite_amax_both",
    name=f"finite_amax_both{suffix}",
    inputs=("x",),
    outputs=(launching.Output("maxima", (2, programs), "uint32"),),
    constexprs=tuple(constants.items()),
    grid=programs,
    num_warps=config.num_warps,
  )


def _programs(
  config: quantize_config.QuantizeConfig, batch: int, rows: int, k: int
) -> tuple[quantize_config.QuantizeConfig, int, int]:
  """Returns (config, number of tiles, number of programs) of amax kernels.

  The config is that of the quantize kernel, with more rows if there are many
  tiles.
  """
  (tiles,) = quantize_config.launch_grid(config, batch, rows, k)
  if tiles > MOST_MAXIMA:
    times = 1 << (tiles // MOST_MAXIMA).bit_length() - 1
    times = min(times, max(1, _WARPS_OF_MANY // config.num_warps))
    config = dataclasses.replace(
      config,
      block_m=config.block_m * times,
      num_warps=config.num_warps * times,
    )
    (tiles,) = quantize_config.launch_grid(config, batch, rows, k)
  return config, tiles, min(tiles, MOST_MAXIMA)


def _maxima(
  count: int,
  row: int,
  format_name: str,
  options: quantize_config.QuantizeOptions,
) -> quantize_config.Maxima:
  format = formats.by_name(format_name)
  scale = FOUR_OVER_SIX_MAX if options.four_over_six else format.scale.max
  return quantize_config.Maxima(
    count=count, row=row, range=scale * format.element.max
  )


def _config(
  x: quantize_config.Rows, architecture: architectures.Architecture
) -> quantize_config.QuantizeConfig:
  return quantize_config.default_config(
    x.format,
    architecture,
    *x.covered(),
    k_is_contiguous=x.k_is_minor,
    options=x.options,
  )


def _config_of_both(
  x: quantize_config.Matrices, architecture: architectures.Architecture
) -> quantize_config.QuantizeConfig:
  return quantize_config.default_config(
    x.format, architecture, x.k_t, x.k, both=True, options=_of_either(x)
  )


def _of_either(x: quantize_config.Matrices) -> quantize_config.QuantizeOptions:
  """Returns the options that determine the tiles and casts of both arrays."""
  return quantize_config.QuantizeOptions(
    hadamard=max(x.options.hadamard, x.options_t.hadamard),
    four_over_six=x.options.four_over_six or x.options_t.four_over_six,
    is_stochastic=x.options.is_stochastic or x.options_t.is_stochastic,
  )


def _both_suffix(
  options: quantize_config.QuantizeOptions,
  options_t: quantize_config.QuantizeOptions,
) -> str:
  """Returns the suffix of kernel names for both arrays' options."""
  if options == options_t:
    return options.suffix
  return f"{options.suffix or '_plain'}_and{options_t.suffix or '_plain'}"


def _tile_name(config: quantize_config.QuantizeConfig) -> str:
  return f"{config.block_m}x{config.block_k}"

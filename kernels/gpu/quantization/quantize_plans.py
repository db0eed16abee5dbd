# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans the launches of the quantize kernels: pure functions, no Triton.

`plan` quantizes `Rows` along one axis without a copy, and `Matrices` along two
axes, from one read.

If the global scale is computed, a launch before reads x. It finds "maxima", the
partial amax values of x, or the whole "global_scale" of a small x.
`plan_maxima` returns only the launch that finds the maxima. A norm also has a
launch before, unless tiles have whole rows. It computes the "statistics" of
rows, which the gradient of a norm takes as an argument.

Other arrays are "x", "key", "values", "scale" and the operands of a prologue.
"total" is x + residual, and "amax" has the largest finite magnitude of each
program's results. "sums" has the sums of each tile's features. Names that end
in "_t" are those of columns. No launch lets the compiler contract a product and
a sum, because that would change bits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final, NamedTuple, TypeAlias

from jaxplugin.kernels.gpu.quantization import quantize_config

from jaxplugin.kernels import architectures, formats, launching, prologues

Rows: TypeAlias = quantize_config.Rows
Matrices: TypeAlias = quantize_config.Matrices

# Upper limit on partial amax values. Every quantize program reads all of them:
# each of 128 threads loads 16 bytes. This number of programs with 512 threads
# is 6/7 of the programs that a B200 can run at once.
MOST_MAXIMA: Final = 512
_WARPS_OF_MANY: Final = 16
# Programs of a kernel that reads the number of rows. A program has four warps.
_PROGRAMS_PER_CORE: Final = 8
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
  x: Rows | Matrices, architecture: architectures.Architecture
) -> list[launching.Launch]:
  """Returns the launches that quantize x, in order.

  Raises:
    ValueError: If the format or the scale rounding is unknown.
  """
  if quantize_config.needs_statistics(x, architecture):
    first, x = _statistics_launch(x, architecture)
    return _reading_total([first, *plan(x, architecture)])
  config = quantize_config.default_config(x, architecture)
  if x.global_scale != "computed":
    return [quantize_launch(x, config, x.num_maxima)]
  few = quantize_config.config_of_few(x, architecture)
  if few is not None:
    given = dataclasses.replace(x, global_scale="given")
    return [_launch_of_few(x, few), quantize_launch(given, config, 0)]
  first = plan_maxima(x, architecture)
  return [first, quantize_launch(x, config, first.grid)]


def plan_of_m(
  x: Rows,
  architecture: architectures.Architecture,
  core_count: int,
) -> launching.Launch:
  """Returns the launch that quantizes any number of rows, which it reads.

  Args:
    x: the array, with the number of rows that tiles are planned for. It is one
      matrix with a minor k. The scale is linear, and a global scale is given.
    architecture: the GPU.
    core_count: number of SMs or CUs.
  """
  config = quantize_config.default_config(x, architecture)
  launch = quantize_launch(x, config, 0)
  constants = dict(launch.constexprs)
  for name in ("total", "amax", "sums"):
    del constants[name]
  constants["TILE"] = dataclasses.replace(
    constants["TILE"], rows=launching.READ, covered_rows=launching.READ
  )
  return dataclasses.replace(
    launch,
    kernel="quantize_of_m",
    name=f"{launch.name}_of_m",
    inputs=("x", "m", _READ[x.global_scale]),
    outputs=tuple(
      output._replace(shape=(1, launching.READ, output.shape[-1]))
      for output in launch.outputs
    ),
    constexprs=tuple(constants.items()),
    grid=_PROGRAMS_PER_CORE * core_count,
  )


def plan_maxima(
  x: Rows | Matrices, architecture: architectures.Architecture
) -> launching.Launch:
  """Returns the launch that finds partial amax values for each result."""
  config, tiles, programs = _programs(
    x, quantize_config.default_config(x, architecture)
  )
  measured = functools.partial(
    quantize_config.measured, x, hardware_cast=config.hardware_cast
  )
  of_columns, of_rows = measured(x.options), None
  count, row, suffix = 1, 0, of_columns.options.suffix
  if isinstance(x, Matrices):
    count, row, of_rows = 2, x.row, measured(x.options_t)
    suffix = f"_both{_both_suffix(of_columns.options, of_rows.options)}"
  return _amax_launch(
    "finite_amax",
    config,
    ("x", *_operands(x.prologue)),
    launching.Output("maxima", (count, programs), "uint32"),
    suffix=suffix,
    grid=programs,
    PROGRAMS=programs,
    TILES=tiles,
    TILE=quantize_config.tile_of(x, config),
    QUANTIZED=of_columns,
    ROW=row,
    QUANTIZED_T=of_rows,
  )


def _launch_of_few(
  x: Rows | Matrices, config: quantize_config.QuantizeConfig
) -> launching.Launch:
  """Returns a launch that computes the global scale before x is quantized.

  cuDNN's matmul needs it. A second kernel writes its codes in whole tiles, and
  XLA drops the first quantize kernel if nothing else uses its codes.
  """
  tiles = quantize_config.num_tiles(config, x.batch, x.rows, x.columns)
  return _amax_launch(
    "global_scale_of_few",
    config,
    ("x",),
    launching.Output("global_scale", (1,), "float32"),
    TILES=tiles,
    TILE=quantize_config.tile_of(x, config),
    QUANTIZED=quantize_config.measured(x, x.options),
    RANGE=_maxima(tiles, 0, x.format, x.options).range,
  )


def _statistics_launch(
  x: Rows | Matrices, architecture: architectures.Architecture
) -> tuple[launching.Launch, Rows | Matrices]:
  """Returns a launch that computes statistics of rows for the prologue of x.

  Also returns x with a prologue that reads them, and "total" if the launch has
  added a residual.
  """
  rows = x.as_norm
  config = quantize_config.config_of_statistics(rows, architecture)
  prologue = rows.prologue
  assert prologue is not None
  constants: dict[str, Any] = {
    "TILE": quantize_config.tile_of(rows, config, (rows.rows, 1)),
    "QUANTIZED": quantize_config.measured(rows, rows.options),
  }
  shape = rows.rows, quantize_config.STATISTICS
  outputs = [launching.Output("statistics", shape, "float32")]
  if prologue.has_residual:
    shape = rows.rows, rows.k
    outputs.append(launching.Output("total", shape, rows.dtype))
  else:
    constants["total"] = None
  launch = launching.Launch(
    kernel="norm_statistics",
    name=f"{prologue.function}_statistics_{_tile_name(config)}",
    inputs=("x", _operands(prologue)[0]),
    outputs=tuple(outputs),
    constexprs=tuple(constants.items()),
    grid=quantize_config.num_tiles(config, 1, rows.rows, 1),
    num_warps=config.num_warps,
  )
  return launch, dataclasses.replace(x, prologue=prologue.with_statistics())


def _reading_total(launches: list[launching.Launch]) -> list[launching.Launch]:
  """Returns launches that read the first one's total, if any, instead of x."""
  first, *rest = launches
  if "total" not in {output.name for output in first.outputs}:
    return launches
  named = lambda name: "total" if name == "x" else name
  return [
    first,
    *(
      dataclasses.replace(each, inputs=tuple(map(named, each.inputs)))
      for each in rest
    ),
  ]


def _amax_launch(
  kernel: str,
  config: quantize_config.QuantizeConfig,
  inputs: tuple[str, ...],
  output: launching.Output,
  *,
  suffix: str = "",
  grid: int = 1,
  **constants: Any,
) -> launching.Launch:
  """Returns the launch of a kernel that reads x and writes one array."""
  return launching.Launch(
    kernel=kernel,
    name=f"{kernel}{suffix}_{_tile_name(config)}",
    inputs=inputs,
    outputs=(output,),
    constexprs=tuple(constants.items()),
    grid=grid,
    num_warps=config.num_warps,
  )


class _Result(NamedTuple):
  """One quantized array of a launch: its constant, and shapes."""

  constant: quantize_config.QuantizeConstant
  values: tuple[int, ...]
  scale: tuple[int, ...]


def quantize_launch(
  x: Rows | Matrices,
  config: quantize_config.QuantizeConfig,
  num_maxima: int,
) -> launching.Launch:
  """Returns the launch of `quantize`, or of `quantize_both` for matrices.

  Args:
    x: the array.
    config: its tiles.
    num_maxima: number of maxima from which the global scale is computed; 0 if
      the kernel does not compute it.
  """
  results: tuple[_Result, ...]
  if isinstance(x, Rows):
    kernel, suffix, covered = "quantize", x.options.suffix, x.covered()
    results = (_result_of_rows(x, config, num_maxima),)
  else:
    kernel, suffix = "quantize_both", _both_suffix(x.options, x.options_t)
    covered = x.k_t, x.k
    results = _results_of_matrices(x, config, num_maxima)
  constants: dict[str, Any] = {
    "TILE": quantize_config.tile_of(x, config, covered)
  }
  scales, keys = [], []
  arrays: list[launching.Output] = []
  for name, result in zip(("", "_t"), results, strict=False):
    constants[f"QUANTIZED{name.upper()}"] = result.constant
    is_given = x.global_scale == "given"
    scales.append(f"global_scale{name}" if is_given else _READ[x.global_scale])
    keys.append(f"key{name}" if result.constant.options.is_stochastic else "x")
    arrays += (
      launching.Output(f"values{name}", result.values, "uint8"),
      launching.Output(f"scale{name}", result.scale, "uint8"),
    )
  total = _total(x)
  arrays += total
  constants |= {} if total else {"total": None}
  not_computed, computed = _global_scales(len(results), num_maxima)
  grid = quantize_config.num_tiles(config, x.batch, *covered)
  amax, constant = _amax_and_sums(x, config, covered)
  return launching.Launch(
    kernel=kernel,
    name=f"{kernel}_{_name(x)}{suffix}_{_tile_name(config)}",
    inputs=("x", *scales, *keys, *_operands(x.prologue), *not_computed),
    outputs=(*computed, *arrays, *amax),
    constexprs=tuple((constants | constant).items()),
    grid=grid,
    num_warps=config.num_warps,
  )


def _result_of_rows(
  x: Rows, config: quantize_config.QuantizeConfig, num_maxima: int
) -> _Result:
  format = formats.by_name(x.format)
  stored = x.k // format.values_per_byte
  grid_rows, grid_k = x.covered()
  values, values_strides = x.layout(stored)
  if x.pads_values or (format.is_packed and not x.packed_in_place):
    values, values_strides = quantize_config.layout(
      x.batch, grid_rows if x.pads_values else x.rows, stored
    )
  scale, scale_strides = x.layout(x.k // format.block_size)
  if x.swizzled:
    scale = (x.batch, grid_rows, grid_k // format.block_size)
    scale_strides = (scale[1] * scale[2], 0, 0)
  constant = dataclasses.replace(
    _constant(x, config, x.options, num_maxima, 0),
    is_swizzled=x.swizzled,
    pads_values=x.pads_values,
    k=x.k,
    random_places=x.places
    or quantize_config.Places.of_strides(x.layout(x.k)[1]),
    values_strides=values_strides,
    scale_strides=scale_strides,
  )
  return _Result(constant, values, scale)


def _results_of_matrices(
  x: Matrices, config: quantize_config.QuantizeConfig, num_maxima: int
) -> tuple[_Result, ...]:
  """Returns the results that are blocked along columns, and along rows."""
  format = formats.by_name(x.format)
  packed_is_minor = format.is_packed and not x.packed_in_place
  results = []
  for rows, k, is_minor, options, row, places in (
    (x.rows, x.k, True, x.options, x.row, x.places),
    (x.columns, x.k_t, x.is_transposed, x.options_t, 1 - x.row, x.places_t),
  ):
    values, values_strides = quantize_config.layout(
      x.batch,
      rows,
      k // format.values_per_byte,
      k_is_minor=is_minor or packed_is_minor,
    )
    scale, scale_strides = quantize_config.layout(
      x.batch, rows, k // format.block_size, k_is_minor=is_minor
    )
    constant = dataclasses.replace(
      _constant(x, config, options, num_maxima, row),
      k=k,
      random_places=places,
      values_strides=values_strides,
      scale_strides=scale_strides,
    )
    results.append(_Result(constant, values, scale))
  return tuple(results)


def _total(x: Rows | Matrices) -> list[launching.Output]:
  """Returns the output like x of a kernel that has the argument."""
  if x.prologue is None or not (
    x.prologue.returns_sum or x.returns_amax or x.sums_columns
  ):
    return []
  shape = (
    x.layout(x.k)[0] if isinstance(x, Rows) else (x.batch, x.rows, x.columns)
  )
  total = launching.Output("total", shape, x.dtype)
  if not x.prologue.returns_sum:  # The kernel does not write it.
    total = total._replace(name="no_total", shape=(1,))
  return [total]


def _operands(prologue: prologues.Prologue | None) -> list[str]:
  """Returns a prologue's operands, or placeholders, for `prologues.load`."""
  given = () if prologue is None else prologue.operands
  groups = [("up", "residual", "statistics"), ("weight",), ("bias",)]
  if prologue is not None and prologue.is_norm_gradient:
    groups = [("residual",), ("weight",), ("statistics",)]
  groups.append(("cotangent",))
  return [
    next((name for name in group if name in given), "x") for group in groups
  ]


def _name(x: Rows | Matrices) -> str:
  """Returns the function of x and the format, for names in profiles."""
  function = ""
  if x.prologue is not None:
    gradient = "gradient_" if x.prologue.gradient else ""
    function = f"{x.prologue.function}_{gradient}"
  results = "_amax" * x.returns_amax + "_sums" * x.sums_columns
  return f"{function}{x.format}{results}"


def _amax_and_sums(
  x: Rows | Matrices,
  config: quantize_config.QuantizeConfig,
  covered: tuple[int, int],
) -> tuple[list[launching.Output], dict[str, None]]:
  """Returns the outputs of a result besides codes, and absent arguments."""
  rows, columns = covered
  if x.sums_columns:
    if isinstance(x, Rows) and not x.k_is_minor:
      pieces, features = -(-columns // config.block_k), x.rows
    else:
      pieces, features = -(-rows // config.block_m), x.columns
    unwritten = launching.Output("no_amax", (1,), "float32")
    sums = launching.Output("sums", (x.batch * pieces, features), "float32")
    return [unwritten, sums], {}
  if x.returns_amax:
    programs = quantize_config.num_tiles(config, x.batch, rows, columns)
    return [launching.Output("amax", (programs,), "float32")], {"sums": None}
  return [], {"amax": None, "sums": None}


def _global_scales(
  count: int, num_maxima: int
) -> tuple[tuple[str, ...], tuple[launching.Output, ...]]:
  """Returns placeholders for global scales, or outputs if they are computed."""
  names = ("global_scale", "global_scale_t")[:count]
  if num_maxima:
    return (), tuple(launching.Output(x, (1,), "float32") for x in names)
  return ("x",) * count, ()


def _programs(
  x: Rows | Matrices, config: quantize_config.QuantizeConfig
) -> tuple[quantize_config.QuantizeConfig, int, int]:
  """Returns (config, number of tiles, number of programs) of amax kernels.

  The config is that of the quantize kernel, with more rows if there are many
  tiles. Tiles of whole rows stay, so that sums of a norm have the same order.
  """
  tiles = quantize_config.num_tiles(config, x.batch, x.rows, x.columns)
  is_whole = x.prologue is not None and x.prologue.needs_whole_rows
  if tiles > MOST_MAXIMA and not is_whole:
    times = 1 << (tiles // MOST_MAXIMA).bit_length() - 1
    times = min(times, max(1, _WARPS_OF_MANY // config.num_warps))
    config = dataclasses.replace(
      config,
      block_m=config.block_m * times,
      num_warps=config.num_warps * times,
    )
    tiles = quantize_config.num_tiles(config, x.batch, x.rows, x.columns)
  return config, tiles, min(tiles, MOST_MAXIMA)


def _constant(
  x: Rows | Matrices,
  config: quantize_config.QuantizeConfig,
  options: quantize_config.QuantizeOptions,
  num_maxima: int,
  row: int,
) -> quantize_config.QuantizeConstant:
  """Returns the constant of one result, whose maxima have index `row`."""
  rounding = x.scale_rounding
  if rounding not in quantize_config.SCALE_ROUNDINGS:
    raise ValueError(
      f"scale_rounding must be one of {quantize_config.SCALE_ROUNDINGS}, got"
      f" {rounding!r}"
    )
  return quantize_config.QuantizeConstant(
    format=formats.by_name(x.format),
    rounds_up=rounding == "up",
    hardware_cast=config.hardware_cast,
    is_swizzled=False,
    options=options,
    prologue=x.prologue,
    maxima=_maxima(num_maxima, row, x.format, options) if num_maxima else None,
  )


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

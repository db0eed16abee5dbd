# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Enumerates the configs of the Triton kernels, and prunes most of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from jaxplugin.core import targets
from jaxplugin.dot import problems
from jaxplugin.dot.backends import triton
from jaxplugin.explanation import estimates
from jaxplugin.kernels import architectures
from jaxplugin.kernels.gpu import configs, constraints, matmul_plans
from jaxplugin.lab.tuning.operations import operation
from jaxplugin.runtime import triton_library
from jaxplugin.tables import records

# The enumerated values. The default config is a candidate even if its values
# are not listed.
_SIZES: Final = {
  "block_m": (16, 32, 64, 128, 256),
  "block_n": (16, 32, 64, 128, 256),
  "block_k": (32, 64, 128, 256, 512),
  "split_k": (1, 2, 4, 8, 16),
}
_GROUPS: Final = (1, 8)
_WARPS: Final = (2, 4, 8)
_STAGES: Final = (1, 2, 3, 4, 5)
_MAX_TILES: Final = 8
_MAX_WAYS: Final = 4  # configs of a tile
# The order in which `_unlike` compares fields.
_VARIED: Final = (
  *("path", "split_k", "block_k", "block_m", "block_n"),
  *("group_m", "swap", "use_descriptors", "num_warps", "num_stages"),
)
_SCARCE: Final = (
  ("shared memory", "much"),
  ("tensor memory", "much"),
  ("accumulators", "many"),
)
# Least k that a halved block_k must cover, by path; 128 for other paths.
_LEAST_DEPTH: Final = {"upcast": 32}


class _Pruning:
  """Counts pruned configs for each rule and reason, with an example."""

  def __init__(self) -> None:
    self._found: dict[tuple[str, str], operation.Pruned] = {}

  def add(
    self, rule: str, reason: str, config: configs.MatmulConfig, count: int = 1
  ) -> None:
    first = operation.Pruned(
      rule=rule,
      reason=reason,
      implementation="triton",
      count=0,
      example=triton.fields_of(config),
    )
    known = self._found.get((rule, reason), first)
    self._found[rule, reason] = dataclasses.replace(
      known, count=known.count + count
    )

  def all(self) -> tuple[operation.Pruned, ...]:
    return tuple(self._found.values())


def space(
  problem: problems.DotProblem, target: targets.Target, margin: float
) -> operation.Space:
  """Returns the supported configs of the Triton kernels for a problem.

  The model ranks only tiles, so tiles are pruned first. Then the configs of
  each remaining tile are enumerated. Configs most like the default come first.
  """
  architecture = triton_library.supported_architecture(target)
  shape, launches = triton.launches(problem, target)
  default = dict(launches[0].constexprs)["TILING"].config
  model = model_of(problem, shape, target)
  pruning = _Pruning()
  tiles = _possible_tiles(shape, architecture, default, pruning)
  seconds = {
    tile: 0.0 if model is None else model.seconds(tile) for tile in tiles
  }
  notes = _notes(seconds, default, model, target, margin)
  # The model ignores latency, so it cannot rank tiles that take less than a
  # launch.
  least = max(min(seconds.values(), default=0.0), LAUNCH_SECONDS)
  kept: list[configs.MatmulConfig] = []
  used = 0
  for tile in sorted(
    seconds, key=lambda t: (max(seconds[t], least), *_unlike(t, default))
  ):
    count = _count(tile.path, architecture)
    if seconds[tile] > margin * least:
      reason = f"at least {margin:g} times the best estimate"
      pruning.add("roofline", reason, tile, count)
    elif used == _MAX_TILES:
      reason = (
        f"{_MAX_TILES} other tiles have a better estimate, or the same and"
        " are more like the default's"
      )
      pruning.add("roofline", reason, tile, count)
    else:
      ways = _configs_of_tile(tile, shape, architecture, default, pruning)
      used += bool(ways)
      kept += ways
  return operation.Space(
    configs=((), *(triton.fields_of(c) for c in kept if c != default)),
    pruned=pruning.all(),
    notes=notes,
  )


def _notes(
  seconds: Mapping[configs.MatmulConfig, float],
  default: configs.MatmulConfig,
  model: Model | None,
  target: targets.Target,
  margin: float,
) -> tuple[str, ...]:
  if model is None:
    return (
      f"no roofline: {target.name} has no published figures; tiles most like"
      " the default's are kept",
    )
  best = min([model.seconds(default), *seconds.values()])
  return (
    f"roofline: a tile takes at least {1e6 * best:.3g} us, the default's"
    f" {1e6 * model.seconds(default):.3g} us; those of {margin:g} times"
    f" the least, and of {margin:g} launches, are pruned",
  )


def _unlike(
  config: configs.MatmulConfig, default: configs.MatmulConfig
) -> tuple[Any, ...]:
  """Returns a sort key. Configs most like the default come first.

  If two configs differ from the default in equally many fields, the config that
  differs in an earlier field of `_VARIED` comes first.
  """
  differs = [
    getattr(config, name) != getattr(default, name) for name in _VARIED
  ]
  return (
    sum(differs),
    [not d for d in differs],
    records.order(triton.fields_of(config)),
  )


def _possible_tiles(
  shape: configs.MatmulShape,
  architecture: architectures.Architecture,
  default: configs.MatmulConfig,
  pruning: _Pruning,
) -> list[configs.MatmulConfig]:
  """Returns the tiles of all paths. Other fields are those of the default."""
  found = []
  for path in configs.PATHS:
    why = _path_error(path, shape, architecture)
    for sizes in itertools.product(*_SIZES.values()):
      fields: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True))
      tile = dataclasses.replace(default, path=path, **fields)
      waste = "" if why else _waste(tile, shape)
      if why or waste:
        rule = "resources" if why else "dominated"
        pruning.add(rule, why or waste, tile, _count(path, architecture))
      else:
        found.append(tile)
  return found


def _configs_of_tile(
  tile: configs.MatmulConfig,
  shape: configs.MatmulShape,
  architecture: architectures.Architecture,
  default: configs.MatmulConfig,
  pruning: _Pruning,
) -> list[configs.MatmulConfig]:
  """Returns the supported configs of a tile, without dominated configs."""
  found: list[configs.MatmulConfig] = []
  for config in sorted(
    _ways(tile, architecture), key=lambda c: _unlike(c, default)
  ):
    error = constraints.config_error(config, shape, architecture)
    same = _same_as(config, tile, shape, architecture)
    if error is not None:
      pruning.add("resources", _brief(error, config), config)
    elif same:
      pruning.add("dominated", same, config)
    elif len(found) == _MAX_WAYS:
      reason = f"{_MAX_WAYS} of its tile are more like the default"
      pruning.add("roofline", reason, config)
    else:
      found.append(config)
  return found


def _choices(
  path: configs.Path, architecture: architectures.Architecture
) -> dict[str, tuple[Any, ...]]:
  """Returns the enumerated values of the fields outside a tile."""
  return {
    "group_m": _GROUPS,
    "num_warps": _WARPS,
    "num_stages": _STAGES,
    # The small_m kernel ignores this field.
    "swap": (True,) if path == "small_m" else (False, True),
    "use_descriptors": (False, True) if architecture.has_tma else (False,),
  }


def _count(path: configs.Path, architecture: architectures.Architecture) -> int:
  """Returns the number of configs of a tile."""
  return math.prod(map(len, _choices(path, architecture).values()))


def _ways(
  tile: configs.MatmulConfig, architecture: architectures.Architecture
) -> Iterator[configs.MatmulConfig]:
  """Yields all configs of one tile."""
  choices = _choices(tile.path, architecture)
  for values in itertools.product(*choices.values()):
    fields = dict(zip(choices, values, strict=True))
    yield dataclasses.replace(tile, **fields)


def _path_error(
  path: configs.Path,
  shape: configs.MatmulShape,
  architecture: architectures.Architecture,
) -> str:
  """Returns why a path is not supported; "" if it may be supported."""
  error = constraints.path_error(path, shape, architecture)
  # With mma.sync, Triton already orders k so that a lane reads adjacent values
  # (`tiles_by_rule`).
  if path == "small_m" and not (
    architecture.has_wgmma or architecture.has_tensor_memory
  ):
    error = (
      f"small_m needs wgmma or tcgen05, which {architecture.name} does not have"
    )
  return "" if error is None else f"path {path}: {error}"


def _waste(config: configs.MatmulConfig, shape: configs.MatmulShape) -> str:
  """Returns why a smaller tile or split is better; "" if none is better."""
  least = constraints.MIN_DOT_SIZE
  for name, block, size in (
    ("block_m", config.block_m, shape.m),
    ("block_n", config.block_n, shape.n),
  ):
    if block > least and block // 2 >= size:
      return f"half of {name} covers all rows"
  if config.block_k // 2 >= max(shape.k, _LEAST_DEPTH.get(config.path, 128)):
    return "half of block_k covers all of k"
  if config.split_k > 1 and (
    configs.cdiv(shape.k, config.block_k) < 2 * config.split_k
  ):
    return "split_k leaves a program less than two steps"
  return ""


def _same_as(
  config: configs.MatmulConfig,
  tile: configs.MatmulConfig,
  shape: configs.MatmulShape,
  architecture: architectures.Architecture,
) -> str:
  """Returns why another config is as good or better; "" if none is."""
  tiling = configs.Tiling(shape=shape, config=config)
  if config.num_stages > max(tiling.steps, 1):
    return "more stages than steps"
  two = dataclasses.replace(config, num_stages=2)
  if (
    config.num_stages == 1
    and tiling.steps > 1
    and constraints.config_error(two, shape, architecture) is None
  ):
    return "one stage hides no load, and two stages fit"
  single = tiling.tiles_m == 1 or tiling.tiles_n == 1
  if config.group_m != tile.group_m and single:
    return "one row or column of tiles has the same order for every group_m"
  return ""


def _brief(error: str, config: configs.MatmulConfig) -> str:
  """Returns an error without the config's numbers, so that errors merge."""
  text = error.replace(f"{config} ", "").replace(f", got {config}", "")
  for word, much in _SCARCE:
    if word in text:
      return f"too {much} {word} ({text.rpartition(', ')[2]})"
  return text


# Bandwidth of the L2 cache / bandwidth of memory: about 2 to 5 on H100 and A100
# (arXiv:2402.13499). A higher ratio prunes fewer configs.
CACHE_RATE: Final = 5.0
LAUNCH_SECONDS: Final = 2e-6
_F32_BYTES: Final = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """The least time of a config on one GPU: a roofline with tiles.

  A matmul takes at least the longest of three times, which overlap:

    memory      Reading each operand once, and writing the result.
    cache       Reading all tiles of the busiest core's programs. A core reads
                from the cache at `CACHE_RATE` times its share of the memory
                bandwidth.
    arithmetic  Multiplying the busiest core's whole tiles, at the core's share
                of the published rate. The fp8 path is modelled at the bf16
                rate.

  If k is split, the model adds a launch, and the time to write and read the
  partial sums. The model ignores latency, registers, and how well stages hide
  loads, so it cannot rank numbers of warps or stages.

  Attributes:
    shape: the shape and formats of the matmul.
    bandwidth: bandwidth of memory, bytes per second.
    bf16: operations per second if operands are decoded to bf16.
    native: operations per second if the matrix instruction reads quantized
      operands and their block scales.
    core_count: number of cores of the GPU.
  """

  shape: configs.MatmulShape
  bandwidth: float
  bf16: float
  native: float
  core_count: int

  def seconds(self, config: configs.MatmulConfig) -> float:
    """Returns the least time of a config."""
    shape = self.shape
    tiling = configs.Tiling(**matmul_plans.for_path(shape, config))
    rounds = configs.cdiv(tiling.programs, self.core_count)
    depth = tiling.steps * config.block_k
    tile_bytes = depth * (
      config.block_m * _bytes_per_value(shape.lhs)
      + config.block_n * _bytes_per_value(shape.rhs)
    )
    is_native = config.path in ("native", "fp8", "int8")
    rate = self.native if is_native else self.bf16
    flops = 2.0 * config.block_m * config.block_n * depth
    pieces = 1
    if not is_native:
      pieces = shape.lhs.pieces * shape.rhs.pieces
    core = max(
      tile_bytes / (CACHE_RATE * self.bandwidth / self.core_count),
      pieces * flops / (rate / self.core_count),
    )
    seconds = max(self._bytes() / self.bandwidth, rounds * core)
    if tiling.is_split:
      partial = config.split_k * shape.batch * shape.m * shape.n * _F32_BYTES
      seconds += LAUNCH_SECONDS + 2 * partial / self.bandwidth
    return seconds

  def _bytes(self) -> float:
    shape = self.shape
    operands = shape.k * (
      shape.m * _bytes_per_value(shape.lhs)
      + shape.n * _bytes_per_value(shape.rhs)
    )
    out = shape.m * shape.n * configs.PLAIN_BYTES[shape.out_dtype]
    return shape.batch * (operands + out)


def _bytes_per_value(kind: configs.OperandKind) -> float:
  scale = 1 / kind.values_per_scale if kind.is_quantized else 0
  return kind.bits / 8 + scale


def model_of(
  problem: problems.DotProblem,
  shape: configs.MatmulShape,
  target: targets.Target,
) -> Model | None:
  """Returns the model; None if the GPU's figures are not published."""

  def rate(is_native: bool) -> float | None:
    precision = estimates.precision_of(
      problem.lhs, problem.rhs, is_native=is_native
    )
    # One operation takes 1 / peak seconds.
    least = estimates.estimate(0.0, 1.0, precision, target)
    if least.seconds is None or least.bound != "compute":
      return None
    return 1 / least.seconds

  sheet = estimates.sheet_of(target)
  if sheet is None or target.core_count is None:
    return None
  bandwidth = targets.named_target(sheet).memory_bandwidth
  bf16, native = rate(False), rate(True)
  known = bf16 or native
  if bandwidth is None or known is None:
    return None
  return Model(
    shape=shape,
    bandwidth=bandwidth,
    bf16=bf16 or known,
    native=native or known,
    core_count=target.core_count,
  )

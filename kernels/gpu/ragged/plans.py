# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shapes, constraints and launches of the ragged kernels.

They build on `configs`, `constraints` and `tiles_by_rule`, and are pure
functions of plain values, without Triton.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from jaxplugin.kernels.gpu import (
  configs,
  constraints,
  matmul_plans,
  tiles_by_rule,
)

from jaxplugin.kernels import architectures, launching

Architecture = architectures.Architecture
MatmulConfig = configs.MatmulConfig

# Gated activations, which compute one column of the result from a gate and a
# value. These are columns of the first and second half with "swiglu", and
# adjacent columns with "swigluoai".
GATED: Final = ("swiglu", "swigluoai")

# Rows of a group, on average, that kernels which read m are planned for.
_PLANNED_ROWS: Final = (4, 16, 64, 256)
# Every program has a few numbers for each group in registers.
_MAX_GROUPS: Final = 4095


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedShape(configs.MatmulShape):
  """A ragged matmul: a `MatmulShape` whose rows m are divided into groups.

  The batch is 1, and the epilogue has no residual. rhs is [groups, n, k]. In a
  matmul across the blocks it is [groups, k, n], blocked along n.

  Attributes:
    groups: number of groups.
    is_across: whether k runs across the blocks of rhs.
    has_scale_of_group: whether each group has a separate global scale.
    activation: one of `configs.ACTIVATIONS` or of `GATED`.
  """

  groups: int
  is_across: bool = False
  has_scale_of_group: bool = False

  @property
  def is_for_any_m(self) -> bool:
    """Whether a shape is planned for the last one of `planned_m`."""
    return self.reads_m and self.m >= planned_m(self.groups)[-1]

  @property
  def is_gated(self) -> bool:
    return self.activation in GATED

  @property
  def out_columns(self) -> int:
    return self.n // 2 if self.is_gated else self.n

  @property
  def global_factors(self) -> int:
    """Number of factors of a global scale."""
    return 2 if self.has_global_power else 1

  def of_groups(self) -> configs.MatmulShape:
    """Returns the dense matmul whose config the ragged matmul uses.

    It has a batch for each group that may have rows, with the average number of
    rows. Across the blocks, n and k are rounded up to whole blocks.
    """
    used = min(self.m, self.groups)
    n, k = self.n, self.k
    if self.is_across:
      n, k = max(n, self.rhs.values_per_scale), configs.cdiv(k, 32) * 32
    return configs.MatmulShape(
      batch=used,
      m=configs.cdiv(self.m, used),
      n=n,
      k=k,
      lhs=self.lhs,
      rhs=self.rhs,
      out_dtype=self.out_dtype,
      has_global_scale=self.has_global_scale,
      has_global_power=self.has_global_power,
      has_bias=self.has_bias,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedTiling(configs.Tiling):
  """The single compile-time constant of a ragged kernel."""

  shape: RaggedShape

  @property
  def is_ragged(self) -> bool:
    return True

  @property
  def is_across(self) -> bool:
    return self.shape.is_across

  @property
  def tiles_m(self) -> int:
    """Maximum number of tiles of rows for any group sizes.

    A tile has rows of only one group, and rows after the last group count as
    one more group. With u nonempty groups, sum(ceil(rows / block_m)) is at most
    this number.
    """
    shape, block_m = self.shape, self.config.block_m
    used = min(shape.groups + 1, shape.m)
    return (shape.m - used) // block_m + used

  @property
  def padded_groups(self) -> int:
    """A power of two above the number of groups."""
    return 1 << self.shape.groups.bit_length()

  @property
  def pair(self) -> int | None:
    """Distance between a gate's and its value's column; None if adjacent."""
    return self.shape.n // 2 if self.shape.activation == "swiglu" else None

  @property
  def lhs(self) -> configs.OperandTile:
    # Groups begin at any row, so a tile may exceed the last row.
    return dataclasses.replace(super().lhs, even_rows=False)

  @property
  def rhs(self) -> configs.OperandTile:
    shape, config = self.shape, self.config
    tile = super().rhs
    if not shape.is_across:
      return dataclasses.replace(
        tile, pair=self.pair, takes_scale_tiles=self.pair is None
      )
    return dataclasses.replace(
      tile,
      rows=shape.k,
      k=shape.n,
      block_rows=config.block_k,
      block_k=config.block_n,
      even_rows=tile.even_k,
      even_k=tile.even_rows,
      takes_scale_tiles=False,  # Rows are contracted, so padding would count.
    )


def planned_m(groups: int) -> tuple[int, ...]:
  """Returns each m that kernels are planned for if they read m.

  The last one is for all larger m.
  """
  few = configs.PLANNED_M[0]
  averages = {max(few, rows * groups) for rows in _PLANNED_ROWS}
  return tuple(sorted({few} | averages))


def plan(
  shape: RaggedShape, config: MatmulConfig, architecture: Architecture
) -> tuple[launching.Launch, ...]:
  """Returns the launches that compute `shape` with `config`, in order.

  Requires that `config_error` is None.
  """
  tiling = matmul_plans.tiling_of(RaggedTiling, shape, config, architecture)
  return matmul_plans.launches(
    tiling,
    architecture,
    out=(shape.m, shape.out_columns),
    part=(shape.m, shape.n),
    rows=shape.m,
  )


def config_error(
  config: MatmulConfig, shape: RaggedShape, architecture: Architecture
) -> str | None:
  """Returns why `config` cannot compute `shape`, or None if it can."""
  # Every program computes the rows of all groups.
  if not 1 <= shape.groups <= _MAX_GROUPS:
    return f"groups must be 1 to {_MAX_GROUPS}, got {shape.groups}"
  if config.use_descriptors:
    return "ragged kernels load values by threads, not TMA descriptors"
  if not shape.rhs.is_quantized:
    return f"rhs must have a block format, got {shape.rhs.format}"
  # A tile of rows begins at any row, a swizzled tile at a multiple of 128.
  if shape.lhs.is_swizzled:
    return "the scale of lhs must be linear, got a swizzled one"
  error = _across_error(config, shape) if shape.is_across else None
  if error is not None:
    return error
  # The ragged kernels use the main loop of the dense kernels.
  error = constraints.config_error(config, shape.of_groups(), architecture)
  if error is not None:
    return error
  most = constraints.MAX_INDEX
  tiling = RaggedTiling(shape=shape, config=config)
  if max(tiling.programs, shape.m + config.block_m) > most:
    return f"more than 2^31 rows or programs: {shape}, {config}"
  return None


def _across_error(config: MatmulConfig, shape: RaggedShape) -> str | None:
  # The other kernels require blocks along k.
  if config.path != "upcast":
    return f"{config.path} needs rhs blocked along the contracting dimension"
  if shape.rhs.scales_sums:
    return (
      f"scales of {shape.rhs.format} multiply sums, which needs rhs blocked"
      " along the contracting dimension"
    )
  # A tile has whole blocks.
  if config.block_n % max(shape.rhs.values_per_scale, 32):
    return f"block_n must be a multiple of a block, got {config.block_n}"
  return None


def default_config(
  shape: RaggedShape, architecture: Architecture, *, core_count: int
) -> MatmulConfig:
  """Returns the config that rules choose for a dense matmul of the groups.

  Only the device knows the sizes of groups, so the rules use their average. The
  result is correct for any sizes.

  Raises:
    ValueError: If no config fits. The message has the reason.
  """
  config = tiles_by_rule.default_config(
    shape.of_groups(),
    architecture,
    core_count=core_count,
    path="upcast" if shape.is_across else None,
  )
  if shape.is_across:
    # The transposed tiles of rhs are in shared memory, so rhs is the right
    # operand of the matrix instruction.
    config = dataclasses.replace(config, swap=False)
  if shape.is_for_any_m:  # The parts of all rows could fill the memory.
    config = dataclasses.replace(config, split_k=1)
  error = config_error(config, shape, architecture)
  if error is not None:
    raise ValueError(f"no config computes {shape}: {error}")
  return config

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the compiled PTX of matmul and quantize kernels on a CPU."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from jaxplugin.kernels import architectures
from jaxplugin.kernels import launching as planned
from jaxplugin.kernels.gpu import (
  configs,
  matmul_plans,
  quantized_plans,
  tiles_by_rule,
)
from jaxplugin.kernels.gpu.quantization import (
  quantize,
  quantize_config,
  quantize_plans,
)
from jaxplugin.kernels.gpu.ragged import plans as ragged_plans
from jaxplugin.lab.inspection import compile as kernel_compile
from jaxplugin.lab.inspection.ptx import launching
from jaxplugin.testing.kernels import gpu_operands

CORES: Final = {
  "sm_80": 108,
  "sm_89": 142,
  "sm_90": 132,
  "sm_100": 148,
  "sm_120": 170,
}
_TRITON_DTYPES: Final = {
  "float32": "*fp32",
  "bfloat16": "*bf16",
  "float16": "*fp16",
  "uint8": "*u8",
  "int32": "*i32",
  "uint32": "*u32",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
  """A product that is planned: what `compiled` and `run` take.

  Attributes:
    architecture: by name.
    shape, config: as `matmul_plans.plan` takes them.
    arrays: by name.
    ptxas_version: of the architecture.
    rows: the result if it is quantized, with its amax.
  """

  architecture: str
  shape: configs.MatmulShape
  config: configs.MatmulConfig
  arrays: Mapping[str, np.ndarray | None]
  ptxas_version: tuple[int, ...] | None = None
  rows: quantize_config.Rows | None = None

  def with_planned_m(self, m: int) -> Product:
    """Returns the product of kernels that read m, with the plan for `m`."""
    lhs = self.shape.lhs
    of_scale = lhs.scale_strides and (0, *lhs.scale_strides[1:])
    # The strides of the batch depend on m, and the kernel does not.
    lhs = dataclasses.replace(
      lhs, strides=(0, *lhs.strides[1:]), scale_strides=of_scale
    )
    return dataclasses.replace(
      self,
      shape=dataclasses.replace(self.shape, m=m, reads_m=True, lhs=lhs),
      arrays={**self.arrays, "m": np.array([self.shape.m], np.int32)},
    )

  @property
  def launches(self) -> tuple[planned.Launch, ...]:
    architecture = dataclasses.replace(
      architectures.by_name(self.architecture), ptxas_version=self.ptxas_version
    )
    if isinstance(self.shape, ragged_plans.RaggedShape):
      return ragged_plans.plan(self.shape, self.config, architecture)
    found = matmul_plans.plan(self.shape, self.config, architecture)
    if self.rows is None:
      return found
    rows = dataclasses.replace(self.rows, returns_amax=True)
    return quantized_plans.plan(found, rows, architecture)

  def compiled(self, launch: planned.Launch) -> Any:
    """The kernel of one of its launches."""
    return _compiled(self.architecture, launch, self.shape)

  def run(
    self,
    *,
    ptx: Mapping[str, str] | None = None,
    **options: Any,
  ) -> tuple[np.ndarray, collections.Counter[str]]:
    """The result, and counts of all launches.

    Args:
      ptx: in the place of what is compiled, by the launch's kernel.
      **options: as `launching.run` takes them.
    """
    arrays, counts = self.run_all(ptx=ptx, **options)
    (output,) = self.launches[-1].outputs
    return arrays[output.name], counts

  def run_all(
    self, *, ptx: Mapping[str, str] | None = None, **options: Any
  ) -> tuple[dict[str, Any], collections.Counter[str]]:
    """All arrays, and counts of all launches; for args see `run`."""
    arrays = dict(self.arrays)
    counts: collections.Counter[str] = collections.Counter()
    for launch in self.launches:
      m = arrays.get("m")
      if self.shape.is_for_any_m:  # programs compute several tiles
        launch = dataclasses.replace(launch, grid=min(launch.grid, 5))
      outputs, found = launching.run(
        self.compiled(launch),
        launch if m is None else launch.with_size(m.item()),
        arrays,
        ptx=(ptx or {}).get(launch.kernel),
        **options,
      )
      arrays.update(outputs)
      counts.update(found)
    return arrays, counts


@functools.cache
def _compiled(
  architecture: str, launch: planned.Launch, shape: configs.MatmulShape
) -> Any:
  return kernel_compile.compile_matmul(launch, shape, architecture)


def dense(operand: gpu_operands.Operand) -> gpu_operands.Operand:
  """The same operand without bytes between its rows, as XLA has arrays."""
  if operand.kind.is_swizzled or not operand.kind.k_is_minor:
    return operand
  _, rows, k = operand.exact.shape
  scale = operand.scale
  return dataclasses.replace(
    operand,
    kind=configs.operand(
      operand.kind.format,
      rows,
      k,
      interleaved=operand.kind.is_interleaved,
      rows_per_scale=operand.kind.rows_per_scale,
    ),
    values=np.ascontiguousarray(operand.values),
    scale=None if scale is None else np.ascontiguousarray(scale),
  )


def product(
  architecture: str,
  lhs: gpu_operands.Operand,
  rhs: gpu_operands.Operand,
  *,
  epilogue: gpu_operands.Epilogue = gpu_operands.Epilogue(),
  out_dtype: str = "f32",
  config: configs.MatmulConfig | None = None,
  layer: int | None = None,
  ptxas_version: tuple[int, ...] | None = None,
  may_round_sums: bool = False,
) -> Product:
  """A product with its default config, where none is given.

  With a layer the batches of rhs are layers, and this one is meant.
  """
  shape = gpu_operands.shape_of(
    lhs, rhs, epilogue, out_dtype, layer, may_round_sums=may_round_sums
  )
  if config is None:
    config = tiles_by_rule.default_config(
      shape,
      architectures.by_name(architecture),
      core_count=CORES[architecture],
    )
  return Product(
    architecture=architecture,
    shape=shape,
    config=config,
    ptxas_version=ptxas_version,
    arrays=gpu_operands.arrays_of(lhs, rhs, epilogue, layer),
  )


def quantized(
  x: np.ndarray,
  architecture: str,
  rows: quantize_config.Rows,
  *,
  planned_m: int | None = None,
  **arrays: np.ndarray,
) -> dict[str, np.ndarray]:
  """Returns the outputs of the launches of `quantize_plans.plan`, by name.

  With planned_m it is `plan_of_m`'s launch for this number of rows, on a GPU
  with one core.

  Args:
    x: the array that `rows` describes.
    architecture: by name.
    rows: what is quantized, and how.
    **arrays: further inputs by name.
  """
  known: dict[str, np.ndarray] = {"x": x, **arrays}
  target = architectures.by_name(architecture)
  launches = [*quantize_plans.plan(rows, target)]
  if planned_m is not None:
    known["m"] = np.array([rows.rows], np.int32)
    any_m = dataclasses.replace(rows, rows=planned_m)
    launches = [quantize_plans.plan_of_m(any_m, target, 1)]
  for launch in launches:
    found, _ = launching.run(
      compiled_quantize(
        architecture,
        launch,
        tuple(known[name].dtype.name for name in launch.inputs),
      ),
      launch.with_size(rows.rows),
      known,
    )
    known.update(found)
  return known


@functools.cache
def compiled_quantize(
  architecture: str, launch: planned.Launch, dtypes: tuple[str, ...]
) -> Any:
  kernel = quantize.KERNELS[launch.kernel]
  types = [*dtypes, *(output.dtype for output in launch.outputs)]
  constants = dict(launch.constexprs)
  names = [name for name in kernel.arg_names if name not in constants]
  signature = {
    name: _TRITON_DTYPES[dtype]
    for name, dtype in zip(names, types, strict=True)
  }
  return kernel_compile.compile_launch(kernel, launch, signature, architecture)

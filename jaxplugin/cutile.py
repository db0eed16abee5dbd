# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The backend "cutile": a kernel in NVIDIA's tile language, by cuda-tile.

Like a backend of another package, it imports only public names and kernels.
`plugins/registry.py` lists it. The kernel reads row-major operands with
swizzled scales. No GPU has run it, so only a caller's request selects it.

cuda-tile's front end (Apache-2.0) compiles a kernel for any architecture. Its
`cutile_call` for JAX compiles for the attached GPU instead. This module
therefore compiles the kernel itself, and emits the custom call of
`cutile_call`, which contains the machine code.

Source: cuda-tile 1.7, `cuda.tile.jax`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.metadata
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxplugin as jp
from jaxplugin import backends
from jaxplugin.kernels import architectures, formats
from jaxplugin.kernels.gpu import configs
from jaxplugin.kernels.gpu.cutile import assembler, plans

Config = Mapping[str, Any]

CALL_TARGET: Final = "cutile_launch"
_SWIZZLED: Final = "swizzled_128x4"
_INDEX_BITS: Final = 32  # of sizes and strides, as `assembler` compiles them
_KERNEL_FILES: Final = ("assembler.py", "matmul_kernel.py", "plans.py")
_TOOLCHAIN: Final = (assembler.PACKAGE, "nvidia-cuda-tileiras")
_NAMES: Final = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_APPLICATIONS: Final[dict[str, Literal["none", "fused", "separate"]]] = {
  "none": "none",
  "scalar": "fused",
  "array": "separate",
}
_FORMATS: Final = (
  *(jp.MXFP8, jp.MXFP8_E5M2, jp.MXFP4, jp.NVFP4),
  *(jp.MXFP6_E2M3, jp.MXFP6_E3M2),
)


def supports(problem: backends.Problem, target: jp.Target) -> str | None:
  """Returns why the kernel cannot compute a problem, or None if it can."""
  if _architecture(target) is None:
    return (
      f"compiles for {', '.join(plans.ARCHITECTURES)}, whose matrix"
      f" instructions take block scales; the target is {target}"
    )
  for operand in (problem.lhs, problem.rhs):
    if operand.format is None:
      return "needs both operands quantized"
    if operand.format not in _FORMATS:
      names = ", ".join(format.name for format in _FORMATS)
      return f"supports {names}, got {operand.format}"
  if not problem.blocks_pair_up:
    return "needs both sides blocked along the same k"
  try:
    launch_of(problem, target)
  except ValueError as error:
    return str(error)
  return None


def _architecture(target: jp.Target) -> architectures.Architecture | None:
  """Returns the architecture of exactly the target's compute capability."""
  if target.compute_capability is None:
    return None
  name = "sm_{}{}".format(*target.compute_capability)
  if name not in plans.ARCHITECTURES:
    return None
  return architectures.by_name(name)


def _plan(
  problem: backends.Problem, target: jp.Target, config: Config
) -> backends.Plan:
  launch = launch_of(problem, target, config=config_of(config))
  notes = [
    f"kernel: {launch.name}",
    "the kernel was compiled for the target and inspected; no GPU has run it"
    " yet",
  ]
  moved = [
    name
    for name, operand in (("lhs", problem.lhs), ("rhs", problem.rhs))
    if not _is_read_swizzled(operand, problem)
  ]
  if moved:
    notes.append(
      f"scales of {' and '.join(moved)} are swizzled before each call"
    )
  k = _padded_k(problem)
  return backends.Plan(
    global_scale=_APPLICATIONS[problem.global_scale],
    padding="" if k == problem.k else f"k {problem.k} to {k}",
    notes=tuple(notes),
    is_native=True,
  )


def _is_read_swizzled(
  operand: backends.OperandProblem, problem: backends.Problem
) -> bool:
  """Returns whether `Call.as_rows` may leave a scale in its swizzled layout."""
  assert operand.format is not None and problem.k is not None
  tile_k = formats.SCALE_TILE_COLUMNS * operand.format.block_size
  return (
    operand.scale_layout == _SWIZZLED
    and problem.num_contracting == 1
    and problem.k % tile_k == 0
  )


def _padded_k(problem: backends.Problem) -> int:
  """Returns k of the kernel's operands, in rows of 16 bytes."""
  lhs, rhs = problem.lhs.format, problem.rhs.format
  assert lhs is not None and rhs is not None and problem.rows_k is not None
  return plans.padded_k(problem.rows_k, is_packed=lhs.is_fp4 or rhs.is_fp4)


def shape_of(
  problem: backends.Problem, *, has_two_global_scales: bool = False
) -> configs.MatmulShape:
  """Returns the kernel's description of a problem."""
  assert problem.batch is not None and problem.m is not None
  assert problem.n is not None
  k = _padded_k(problem)
  operands = []
  for side, rows in ((problem.lhs, problem.m), (problem.rhs, problem.n)):
    assert side.format is not None
    operands.append(configs.operand(side.format.name, rows, k, swizzled=True))
  return configs.MatmulShape(
    batch=problem.batch,
    m=problem.m,
    n=problem.n,
    k=k,
    lhs=operands[0],
    rhs=operands[1],
    out_dtype=_NAMES[problem.dtype.name],
    has_global_scale=problem.global_scale == "scalar",
    has_global_power=has_two_global_scales,
    has_bias=problem.has_bias,
    activation=problem.activation or "none",
    has_residual=problem.has_residual,
  )


def launch_of(
  problem: backends.Problem,
  target: jp.Target,
  *,
  config: plans.TileConfig | None = None,
  has_two_global_scales: bool = False,
  residual_dtype: str = "float32",
) -> plans.CutileLaunch:
  """Returns the launch of a problem.

  Args:
    problem, target: the problem and the device.
    config: the tiles; None is the default.
    has_two_global_scales: whether the call has two global scales.
    residual_dtype: NumPy's name of the residual's dtype.

  Raises:
    ValueError: If the kernel cannot compute the problem.
  """
  shape = shape_of(problem, has_two_global_scales=has_two_global_scales)
  architecture = _architecture(target)
  assert architecture is not None
  config = config or plans.default_config(shape, architecture)
  return plans.plan(shape, config, architecture, residual_dtype=residual_dtype)


def candidates(problem: backends.Problem, target: jp.Target) -> list[Config]:
  """Returns every config of a supported problem except the default."""
  architecture = _architecture(target)
  if architecture is None:
    return []
  shape = shape_of(problem)
  default = plans.default_config(shape, architecture)
  return [
    dataclasses.asdict(config)
    for config in plans.candidates(shape, architecture)
    if config != default
  ]


def config_of(config: Config) -> plans.TileConfig | None:
  """Returns the tiles that a config names, or None (the default) if empty.

  Raises:
    ValueError: If a field is missing, unknown or no positive int.
  """
  if not config:
    return None
  names = {field.name for field in dataclasses.fields(plans.TileConfig)}
  if config.keys() != names:
    raise ValueError(
      f"a config of the cuTile kernel must have {', '.join(sorted(names))}, got"
      f" {', '.join(config)}"
    )
  for name, value in config.items():
    if type(value) is not int or value < 1:
      raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
  return plans.TileConfig(**config)


def config_error(
  config: Config, problem: backends.Problem, target: jp.Target
) -> str | None:
  """Returns why a config cannot compute a supported problem, or None."""
  try:
    launch_of(problem, target, config=config_of(config))
  except ValueError as error:
    return str(error)
  return None


def source(target: jp.Target) -> backends.Source | None:
  """Returns hash and compiler of the kernel; None without cuda-tile."""
  if _architecture(target) is None or assembler.missing():
    return None
  folder = pathlib.Path(plans.__file__).resolve().parent
  digest = hashlib.sha256()
  for name in _KERNEL_FILES:
    digest.update((folder / name).read_bytes())
  versions = tuple((name, _installed(name)) for name in _TOOLCHAIN)
  return backends.Source(kernels=digest.hexdigest(), toolchain=versions)


def _installed(distribution: str) -> str:
  try:
    return importlib.metadata.version(distribution)
  except importlib.metadata.PackageNotFoundError:
    return "none"


def _lowering_error(target: jp.Target) -> str | None:
  del target
  return assembler.missing() or None


def _emit(call: backends.Call) -> jax.Array:
  return call.fuse(_dot)


def _dot(call: backends.Call) -> jax.Array:
  problem = call.problem
  rows = call.as_rows(k=_padded_k(problem), scale_layout=_SWIZZLED)
  arrays = {}
  for name, operand in (("lhs", rows.lhs), ("rhs", rows.rhs)):
    assert operand.scale is not None
    arrays[name] = operand.packed()
    arrays[f"{name}_scale"] = lax.bitcast_convert_type(operand.scale, jnp.uint8)
  if rows.global_scales:
    arrays["global_scale"] = jnp.stack(rows.global_scales)
  if rows.bias is not None:
    bias = rows.bias.astype(jnp.float32)
    arrays["bias"] = jnp.broadcast_to(bias, (1, 1, rows.shape[2]))
  residual_dtype = "float32"
  if rows.residual is not None:
    arrays["residual"] = jnp.broadcast_to(rows.residual, rows.shape)
    residual_dtype = rows.residual.dtype.name
  launch = launch_of(
    problem,
    call.target,
    config=config_of(call.config),
    has_two_global_scales=len(rows.global_scales) > 1,
    residual_dtype=residual_dtype,
  )
  inputs = [arrays[x.name].reshape(x.shape) for x in launch.inputs]
  try:
    return _call(launch, inputs)
  except assembler.AssemblerError as error:
    raise NotImplementedError(str(error)) from None


def _call(launch: plans.CutileLaunch, inputs: Sequence[jax.Array]) -> jax.Array:
  """Returns the custom call of a launch, with its machine code.

  Raises:
    assembler.AssemblerError: If the kernel does not compile in time.
  """
  assembled = assembler.assemble(launch.specification())
  importlib.import_module("cuda.tile.jax")  # registers the custom call
  positions = {argument.name: i for i, argument in enumerate(launch.inputs)}
  positions[launch.output.name] = len(positions)
  buffers = [positions[argument.name] for argument in launch.arrays]
  result = jax.ShapeDtypeStruct(launch.output.shape, launch.output.dtype)
  return jax.ffi.ffi_call(CALL_TARGET, result)(
    *inputs,
    buffer_ids=np.asarray(buffers, np.int32),
    scalar_packed=np.zeros(0, np.uint64),
    cubin_code=assembled.cubin,
    cubin_id=np.frombuffer(hashlib.sha256(assembled.cubin).digest(), np.uint8),
    function_name=assembled.symbol,
    index_bitwidths=np.full(len(buffers), _INDEX_BITS, np.int32),
    num_inputs=np.int32(len(inputs)),
    num_outputs=np.int32(1),
    grid_x=np.int32(launch.grid),
    grid_y=np.int32(1),
    grid_z=np.int32(1),
  )


BACKEND: Final = jp.Backend(
  name="cutile",
  api_version=1,
  platforms=("cuda",),
  supports=supports,
  emit=_emit,
  summary="a cuTile kernel, compiled by cuda-tile",
  reads=(_SWIZZLED,),
  plan=_plan,
  lowering_error=_lowering_error,
  tuning=backends.Tuning(
    candidates=candidates, config_error=config_error, source=source
  ),
  call_targets=(CALL_TARGET,),
)

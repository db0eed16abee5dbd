# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cutile implementation: a kernel in NVIDIA's tile language, by cuda-tile.

It takes both operands row-major and their scales swizzled: those that are so
already as they are, which is how a static weight should come. It fuses global
scale and epilogue. Used only where it is asked for: its code was compiled and
looked at, and no GPU has run it yet.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.core import decisions
from jaxplugin.core import formats
from jaxplugin.core import striding
from jaxplugin.core import targets
from jaxplugin.dot import calls
from jaxplugin.dot import epilogue
from jaxplugin.dot import problems
from jaxplugin.dot import sides
from jaxplugin.dot.backends import dense
from jaxplugin.kernels.gpu import configs
from jaxplugin.kernels.gpu.cutile import assembler
from jaxplugin.kernels.gpu.cutile import plans
from jaxplugin.runtime import cutile_library
from jaxplugin.tables import fitting

_NAMES: Final = {
  np.dtype(np.float32): "f32",
  formats.BF16: "bf16",
  np.dtype(np.float16): "f16",
}


def _rank(target: targets.Target) -> None:
  del target


def supports(
  problem: problems.DotProblem, target: targets.Target
) -> decisions.Unsupported | None:
  """Serves static sizes and the formats of one matrix instruction."""
  return cutile_library.refusal(target) or _problem_gate(problem, target)


def _problem_gate(
  problem: problems.DotProblem, target: targets.Target
) -> decisions.Unsupported | None:
  for side in (problem.lhs, problem.rhs):
    if side.format is None:
      return decisions.Unsupported("needs both operands quantized")
    if not side.format.is_known:
      return decisions.Unsupported(
        f"supports {formats.known_names()}, got {side.format}"
      )
  if not problem.blocks_pair_up:
    return decisions.Unsupported("needs both sides blocked along the same k")
  if not problem.sizes_are_static:
    return decisions.Unsupported("needs static sizes, some are symbolic")
  if problem.is_empty:
    return decisions.Unsupported("needs sizes of at least 1")
  try:
    launch_of(problem, target)
  except ValueError as error:
    return decisions.Unsupported(str(error))
  return None


def plan(
  problem: problems.DotProblem,
  target: targets.Target,
  config: decisions.Fields = (),
) -> decisions.Plan:
  """A global scale that is one number is fused; the kernel is named."""
  applications: dict[problems.GlobalScale, decisions.Application] = {
    "none": "none",
    "scalar": "fused",
    "array": "separate",
  }
  notes = [
    f"kernel: {launch_of(problem, target, config=config_of(config)).name}",
    "the kernel was compiled for the target and inspected; no GPU has run it"
    " yet",
  ]
  moved = [
    name
    for name, side in (("lhs", problem.lhs), ("rhs", problem.rhs))
    if not _is_read_swizzled(side, problem)
  ]
  if moved:
    notes.append(
      f"scales of {' and '.join(moved)} are swizzled before each call"
    )
  k = _dense_k(problem)
  return decisions.Plan(
    global_scale=applications[problem.global_scale],
    padding="" if k == problem.k else f"k {problem.k} to {k}",
    notes=tuple(notes),
    is_native=True,
  )


def _is_read_swizzled(
  side: problems.OperandProblem, problem: problems.DotProblem
) -> bool:
  """Whether a scale can be read where it lies.

  What pads its columns is not 0 in every array that one may be given.
  """
  assert side.format is not None and problem.k is not None
  tile_k = layouts.SCALE_TILE_COLUMNS * side.format.block_size
  return (
    side.scale_layout == layouts.SWIZZLED
    and problem.num_contracting == 1
    and problem.k % tile_k == 0
  )


def _dense_k(problem: problems.DotProblem) -> int:
  """k as the kernel gets it: `dense.dense_sides`, in rows of 16 bytes."""
  assert problem.k is not None
  lhs, rhs = problem.lhs.format, problem.rhs.format
  assert lhs is not None and rhs is not None
  size = problem.k if problem.blocked_k is None else problem.blocked_k
  padded = striding.padded_size(
    size, (lhs, rhs), num_contracting=problem.num_contracting
  )
  return plans.padded_k(
    problem.k // size * padded, is_packed=lhs.is_fp4 or rhs.is_fp4
  )


def shape_of(problem: problems.DotProblem) -> configs.MatmulShape:
  """The kernel's description of a problem, of operands without gaps."""
  assert problem.batch is not None and problem.m is not None
  assert problem.n is not None
  k = _dense_k(problem)
  operands = []
  for side, rows in ((problem.lhs, problem.m), (problem.rhs, problem.n)):
    assert side.format is not None
    operands.append(configs.operand(side.format.name, rows, k, swizzled=True))
  has_scalar = problem.global_scale == "scalar"
  return configs.MatmulShape(
    batch=problem.batch,
    m=problem.m,
    n=problem.n,
    k=k,
    lhs=operands[0],
    rhs=operands[1],
    out_dtype=_NAMES[problem.out_dtype],
    has_global_scale=has_scalar,
    has_global_power=has_scalar and problem.has_global_power,
    has_bias=problem.has_bias,
    activation=problem.activation or "none",
    has_residual=problem.has_residual,
  )


def launch_of(
  problem: problems.DotProblem,
  target: targets.Target,
  *,
  config: plans.TileConfig | None = None,
  residual_dtype: str = "float32",
) -> plans.Launch:
  """The launch of a problem.

  Args:
    problem, target: what to compute, and where.
    config: how; None is the one by rule. `candidates` has the others.
    residual_dtype: NumPy's name.

  Raises:
    ValueError: the kernel cannot compute it so; says why.
  """
  shape, architecture = (
    shape_of(problem),
    cutile_library.architecture_of(target),
  )
  assert architecture is not None
  config = config or plans.default_config(shape, architecture)
  return plans.plan(shape, config, architecture, residual_dtype=residual_dtype)


def candidates(
  problem: problems.DotProblem, target: targets.Target
) -> list[plans.TileConfig]:
  """Every config of a problem that `supports` lets pass, the rule's first."""
  architecture = cutile_library.architecture_of(target)
  if architecture is None:
    return []
  shape = shape_of(problem)
  rule = plans.default_config(shape, architecture)
  others = plans.candidates(shape, architecture)
  return [rule, *(config for config in others if config != rule)]


# Configs as tables have them.


def fields_of(config: plans.TileConfig) -> decisions.Fields:
  """A config's fields, all of them, sorted."""
  return tuple(sorted(dataclasses.asdict(config).items()))


def config_of(fields: decisions.Fields) -> plans.TileConfig | None:
  """The config that `fields_of` makes these of; None of none, by rule.

  Raises:
    ValueError: it makes them of none; says which field, and what it must be.
  """
  if not fields:
    return None
  given: dict[str, Any] = dict(fields)
  names = {field.name for field in dataclasses.fields(plans.TileConfig)}
  if given.keys() != names:
    raise ValueError(
      f"a config of the cuTile kernel must have {', '.join(sorted(names))}, got"
      f" {', '.join(given)}"
    )
  for name, value in given.items():
    if type(value) is not int or value < 1:
      raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
  return plans.TileConfig(**given)


def config_error(
  config: decisions.Fields,
  problem: problems.DotProblem,
  target: targets.Target,
) -> str | None:
  """Why a config cannot compute a problem; None where it can."""
  refusal = supports(problem, target)
  if refusal is not None:
    return refusal.reason
  try:
    launch_of(problem, target, config=config_of(config))
  except ValueError as error:
    return str(error)
  return None


def source(target: targets.Target) -> decisions.Source | None:
  """The kernel's sources, and what compiles them; None where nothing does."""
  refusal = cutile_library.refusal(target)
  if (refusal or cutile_library.lowering_refusal(target)) is not None:
    return None
  folder = pathlib.Path(plans.__file__).resolve().parent
  digest = hashlib.sha256()
  for name in _SOURCES:
    digest.update((folder / name).read_bytes())
  versions = ((name, fitting.installed(name)) for name in _TOOLCHAIN)
  return decisions.Source(kernels=digest.hexdigest(), toolchain=tuple(versions))


_SOURCES: Final = ("assembler.py", "matmul_kernel.py", "plans.py")
_TOOLCHAIN: Final = (assembler.PACKAGE, "nvidia-cuda-tileiras")


def emit(
  call: calls.Call,
  problem: problems.DotProblem,
  target: targets.Target,
  config: decisions.Fields = (),
) -> jax.Array:
  """The kernel's launch, and whatever of the epilogue it cannot take."""
  dot = functools.partial(_dot, target=target, config=config)
  return epilogue.fused(dot, call, problem)


def _dot(
  call: calls.Call,
  problem: problems.DotProblem,
  *,
  target: targets.Target,
  config: decisions.Fields,
) -> jax.Array:
  shape = call.shape
  arrays = {}
  k = _dense_k(problem)
  for side, of_problem in ((call.lhs, problem.lhs), (call.rhs, problem.rhs)):
    if side.stays_swizzled and _is_read_swizzled(of_problem, problem):
      values, scale = side.merge(side.values), side.scale
    else:
      padded = _dense_side(call, side, k)
      values, scale = padded.values, layouts.swizzle_scale(padded.scale)
    arrays[side.name] = _as_kernel_takes(values, of_problem)
    arrays[f"{side.name}_scale"] = lax.bitcast_convert_type(scale, jnp.uint8)
  global_scale = epilogue.pair(call)
  if global_scale is not None:
    arrays["global_scale"] = global_scale.reshape(-1)
  if call.bias is not None:
    arrays["bias"] = epilogue.bias_row(call)
  residual_dtype = "float32"
  if call.residual is not None:
    residual = jnp.broadcast_to(call.residual, shape)
    if residual.dtype not in _NAMES:
      residual = residual.astype(jnp.float32)
    arrays["residual"] = residual
    residual_dtype = residual.dtype.name
  launch = launch_of(
    problem,
    target,
    config=config_of(config),
    residual_dtype=residual_dtype,
  )
  inputs = [arrays[x.name].reshape(x.shape) for x in launch.inputs]
  return _call(launch, inputs, target).reshape(shape)


def _dense_side(call: calls.Call, side: sides.Side, k: int) -> sides.Side:
  """A side as [batch, rows, k], k padded by zeros; its scale linear."""
  if len(side.contracting) > 1:
    lhs, rhs = dense.dense_sides(call)
    return (lhs if side is call.lhs else rhs).padded(2, k)
  side = side.with_linear_scale()
  return side.padded(side.contracting[0], k).merged(0)


def _as_kernel_takes(
  values: jax.Array, side: problems.OperandProblem
) -> jax.Array:
  """FP4 as bytes along k, on a GPU the same memory; FP8 as what it is."""
  assert side.format is not None
  if values.dtype == formats.E2M1:
    return layouts.pack_fp4(values, axis=-1)
  if values.dtype == formats.PACKED and not side.format.is_fp4:
    return lax.bitcast_convert_type(values, side.format.array_dtype)
  return values


def _call(
  launch: plans.Launch, inputs: Sequence[jax.Array], target: targets.Target
) -> jax.Array:
  """The launch in this process.

  Raises:
    NotImplementedError: it cannot lower it; says why.
  """
  refusal = cutile_library.lowering_refusal(target)
  reason = None if refusal is None else refusal.reason
  if reason is None:
    try:
      return cutile_library.call(launch, inputs)
    except assembler.AssemblerError as error:
      reason = str(error)
  raise NotImplementedError(
    f"{sides.who()}: implementation cutile: {reason}; or leave implementation"
    " out"
  )


def _reads(
  layout: str, problem: problems.DotProblem, target: targets.Target
) -> bool:
  del problem, target
  return layout == layouts.SWIZZLED


def _configured(
  config: decisions.Fields,
) -> decisions.Backend[problems.DotProblem]:
  return dataclasses.replace(
    BACKEND,
    plan=functools.partial(plan, config=config),
    emit=functools.partial(emit, config=config),
  )


BACKEND: Final = decisions.Backend(
  name="cutile",
  summary="a cuTile kernel, compiled by cuda-tile",
  rank=_rank,
  supports=supports,
  plan=plan,
  emit=emit,
  reads=_reads,
  lowering_refusal=cutile_library.lowering_refusal,
  tunable=decisions.Tunable(
    source=source, config_error=config_error, configured=_configured
  ),
)

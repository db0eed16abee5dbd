# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The triton implementation: the kernels of kernels/, through jax-triton.

The kernels read the quantized bytes once, dequantize in registers or in the
matrix instruction, and fuse the global scale and the epilogue. They read
operands with strides. An operand is copied only if dimensions that must merge
are not adjacent.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import interleaving, layouts
from jaxplugin.core import blocking, call_options, decisions, formats, targets
from jaxplugin.dot import calls, epilogue, problems, sides
from jaxplugin.kernels import formats as kernel_formats
from jaxplugin.kernels import launching
from jaxplugin.kernels.gpu import (
  configs,
  constraints,
  matmul_plans,
  quantized_plans,
  tiles_by_rule,
)
from jaxplugin.operation import choice, triton_launches
from jaxplugin.quantization import problems as quantization_problems
from jaxplugin.quantization.backends import triton as quantize_triton
from jaxplugin.quantization.backends import triton_shapes
from jaxplugin.runtime import triton_library
from jaxplugin.tables import resolution

# Values (FP4 packed) and scale of a side, of any rank, and how kernels read
# them.
Readable = tuple[jax.Array, jax.Array | None, configs.OperandKind]

# Square blocks of a multiple of this many rows are read as they are. Tiles of
# kernels whose scales multiply sums have at most as many rows.
_SQUARE_ROWS: Final = 128

_CONFIG_FIELDS: Final = {
  field.name: field for field in dataclasses.fields(configs.MatmulConfig)
}

_READS_M: Final = (
  "m is symbolic: each kernel reads it from an array, and a compiled program"
  " keeps the kernels for its m"
)

PLAIN_NAMES: Final = {
  np.dtype(np.float32): "f32",
  formats.BF16: "bf16",
  np.dtype(np.float16): "f16",
}


def supports(
  problem: problems.DotProblem, target: targets.Target
) -> decisions.Unsupported | None:
  """Supports readable formats for which a config exists. m may be symbolic."""
  return triton_library.refusal(target) or _problem_gate(problem, target)


def _problem_gate(
  problem: problems.DotProblem, target: targets.Target
) -> decisions.Unsupported | None:
  refusal = operands_refusal(problem)
  if refusal is not None:
    return refusal
  if problem.is_empty:
    return decisions.Unsupported("needs sizes of at least 1")
  if problem.m is None and triton_library.uses_descriptors(target):
    return decisions.Unsupported(
      "m is symbolic, and the target requests TMA descriptors, which have a"
      " fixed m"
    )
  try:
    for each in planned(problem):
      _default_config(_dense_shape(each, target), target)
  except ValueError as error:
    return decisions.Unsupported(str(error))
  return None


def planned(problem: problems.DotProblem) -> tuple[problems.DotProblem, ...]:
  """Returns the problems that kernels are planned for.

  It is the problem itself. If m is symbolic, it is a problem for each of
  `configs.PLANNED_M`, whose kernels read m. lhs is then row-major, with
  a linear scale.
  """
  if problem.m is not None:
    return (problem,)
  lhs = dataclasses.replace(
    problem.lhs,
    contracting_is_minor=True,
    scale_layout=layouts.LINEAR,
    has_square_scale=False,
  )
  return tuple(
    dataclasses.replace(problem, m=m, lhs=lhs, reads_m=True)
    for m in configs.PLANNED_M
  )


def operands_refusal(problem: Any) -> decisions.Unsupported | None:
  """Returns why the kernels cannot read a matmul's operands, or None."""
  for format in (problem.lhs.format, problem.rhs.format):
    if format is not None and _readable_format(format) is None:
      return decisions.Unsupported(
        "kernels read FP8, FP6, FP4, INT8, INT4 and MXINT8 values without a"
        " codebook, with E8M0, E4M3, E5M2, f32, bf16 or f16 scales, got"
        f" {format}"
      )
  with_m = dataclasses.replace(problem, m=problem.m or 1)
  if not with_m.sizes_are_static:
    return decisions.Unsupported(
      f"needs static sizes except m, got symbolic ones: {problem}"
    )
  if problem.m is None and getattr(problem, "batch", 1) != 1:
    return decisions.Unsupported(
      f"needs batch 1 if m is symbolic, got {problem.batch}"
    )
  return None


def _readable_format(
  format: formats.BlockFormat, *, repeats: bool = True
) -> tuple[kernel_formats.Format, int] | None:
  """Returns (the format that kernels read, repeats of each scale), or None.

  The fp8 kernels read whole blocks: `repeats` is false.
  """
  if (
    format.values_dtype not in formats.VALUES_DTYPES
    or format.scale_dtype not in formats.SCALE_DTYPES
    or format.codebook is not None
  ):
    return None
  return kernel_formats.readable(
    format.values_encoding,
    format.scale_encoding,
    format.block_size,
    repeats=repeats,
  )


def _repeats(format: formats.BlockFormat | None) -> int:
  """Returns how often each scale repeats, for the blocks of the kernels."""
  found = None if format is None else _readable_format(format)
  return 1 if found is None else found[1]


def reads_swizzled(format: formats.BlockFormat | None) -> bool:
  """Returns whether the kernels read a swizzled scale of a format."""
  found = None if format is None else _readable_format(format)
  return found is not None and found[1] == 1 and not found[0].scales_sums


def _with_readable_format(side: sides.Side, name: str) -> sides.Side:
  """Returns the side in the kernels' format `name`.

  It repeats each scale if the kernels' blocks are smaller.
  """
  if side.format is None or side.format.is_known:
    return side
  facts, axis = kernel_formats.readable_by_name(name), side.axis
  assert facts is not None and axis is not None
  format = dataclasses.replace(
    side.format, name=name, block_size=facts.block_size
  )
  repeats = side.format.block_size // facts.block_size
  if repeats == 1:
    is_read = reads_swizzled(side.format)
    side = side if is_read else side.with_linear_scale()
    return side.replace(format=format)
  scale = lax.bitcast_convert_type(side.linear_scale(), jnp.uint8)
  scale = jnp.repeat(scale, repeats, axis=axis)
  scale = lax.bitcast_convert_type(scale, format.scale_dtype)
  columns = -(-side.shape[axis] // format.block_size)
  scale = lax.slice_in_dim(scale, 0, columns, axis=axis)
  return side.replace(format=format, scale=scale, scale_layout=layouts.LINEAR)


def _lowering_refusal(target: targets.Target) -> decisions.Unsupported | None:
  """Returns why this process cannot lower kernels, or None if it can.

  It needs jax-triton, a GPU, and TMA descriptors if kernels use them.
  """
  refusal = triton_library.lowering_refusal(target)
  if refusal is None and triton_library.uses_descriptors(target):
    return triton_library.descriptors_refusal()
  return refusal


def _reads(
  layout: str, problem: problems.DotProblem, target: targets.Target
) -> bool:
  """Returns whether the kernels read a layout of arrays directly.

  They read swizzled scales, two global scales and, on some GPUs, interleaved
  FP4. They read a layer from its stack unless it must be copied first.
  """
  if layout == layouts.LAYER:
    return (
      _repeats(problem.rhs.format) == 1
      and (
        not problem.rhs.is_interleaved
        or _reads(interleaving.INTERLEAVED, problem, target)
      )
    ) and not problem.is_copied
  if layout != interleaving.INTERLEAVED:
    return layout in (layouts.SWIZZLED, layouts.TWO_GLOBAL_SCALES)
  architecture = triton_library.architecture_of(target)
  return (
    architecture is not None
    and architecture.reads_interleaved
    and problem.num_contracting == 1
    and problem.k is not None
    and problem.k % interleaving.UNIT == 0
  )


def plan(
  problem: problems.DotProblem,
  target: targets.Target,
  config: decisions.Fields = (),
) -> decisions.Plan:
  """Returns the plan: it fuses scalar global scales and names the kernels."""
  if problem.m is None:
    return plan_of_symbolic(
      {each.m: plan(each, target) for each in planned(problem)}
    )
  shape, dense = launches(problem, target, config)
  names = ", ".join(launch.name for launch in dense)
  architecture = triton_library.supported_architecture(target)
  instructions = matmul_plans.instruction_notes(dense[0])
  return decisions.Plan(
    global_scale=problem.fused_application,
    notes=(
      f"kernels: {names}",
      *(instructions or scale_notes(problem.lhs.format, problem.rhs.format)),
      *matmul_plans.conversion_notes(dense[0], architecture),
      *(
        ()
        if config
        else limits_notes(
          target, functools.partial(_default_config, shape), shape
        )
      ),
    ),
    is_native=architecture.has_scaled_dot or bool(instructions),
  )


def plan_of_symbolic(plans: Mapping[Any, decisions.Plan]) -> decisions.Plan:
  """Returns the plan for a symbolic m, from the plan for each planned m.

  It names the kernels for each m.
  """
  *fewer, _ = plans
  rows = (*(f"m <= {m}" for m in fewer), f"m > {fewer[-1]}")
  first, *_ = found = (*plans.values(),)
  notes = (f"{m}: {each.notes[0]}" for m, each in zip(rows, found, strict=True))
  return dataclasses.replace(first, notes=(_READS_M, *notes, *first.notes[1:]))


def launches(
  problem: problems.DotProblem,
  target: targets.Target,
  config: decisions.Fields = (),
) -> tuple[configs.MatmulShape, tuple[launching.Launch, ...]]:
  """Returns the launches for a supported problem of dense operands.

  Args:
    config: fields of a config (`fields_of`). If they are empty,
      a rule chooses the config.
  """
  shape = _dense_shape(problem, target)
  return shape, _launches(shape, target, config)


def _dense_shape(
  problem: problems.DotProblem, target: targets.Target
) -> configs.MatmulShape:
  """Returns the kernels' description of a problem, with dense operands.

  The launched operands may have other strides (`strided`).
  """
  architecture = triton_library.supported_architecture(target)
  whole = _shape_of(problem, target, repeats=False)
  path = tiles_by_rule.default_path(
    whole, architecture, use_descriptors=triton_library.uses_descriptors(target)
  )
  return whole if path == "fp8" else _shape_of(problem, target, repeats=True)


def _shape_of(
  problem: problems.DotProblem, target: targets.Target, *, repeats: bool
) -> configs.MatmulShape:
  """Returns `_dense_shape` with scales that may repeat or with whole blocks."""
  assert problem.batch is not None and problem.m is not None
  assert problem.n is not None and problem.k is not None
  lhs, rhs = problem.lhs, problem.rhs
  if not problem.blocks_pair_up:  # `DotCall.dense_sides` dequantizes lhs
    lhs = problems.SideProblem(format=None, dtype=np.dtype(np.float32))
  k = problem.dense_k
  assert k is not None
  operands = [
    configs.operand(
      kind_name(side.format, side.dtype, repeats=repeats),
      rows,
      k,
      k_is_minor=side.contracting_is_minor,
      swizzled=side.scale_layout == layouts.SWIZZLED
      and reads_swizzled(side.format),
      interleaved=side.is_interleaved
      and _reads(interleaving.INTERLEAVED, problem, target),
      rows_per_scale=_rows_per_scale(side, repeats=repeats),
    )
    for side, rows in ((lhs, problem.m), (rhs, problem.n))
  ]
  return configs.MatmulShape(
    batch=problem.batch,
    m=problem.m,
    n=problem.n,
    k=k,
    lhs=operands[0],
    rhs=operands[1],
    out_dtype=PLAIN_NAMES[problem.out_dtype],
    has_global_scale=problem.global_scale == "scalar",
    has_two_global_scales=problem.global_scale == "scalar"
    and problem.has_global_power,
    has_bias=problem.has_bias,
    activation=problem.activation or "none",
    has_residual=problem.has_residual,
    may_round_sums=problem.fastest_precision,
    reads_m=problem.reads_m,
  )


def kind_name(
  format: formats.BlockFormat | None, dtype: np.dtype, *, repeats: bool = True
) -> str:
  """Returns the kernels' name for a supported format, or for plain floats.

  Args:
    repeats: whether scales of large blocks may repeat, for smaller blocks.
  """
  if format is None:
    return PLAIN_NAMES[dtype]
  found = _readable_format(format, repeats=repeats)
  assert found is not None, format
  return found[0].name


def _rows_per_scale(side: problems.SideProblem, *, repeats: bool) -> int:
  """Returns the `configs.OperandKind.rows_per_scale` of an operand."""
  if not side.has_square_scale:
    return 1
  assert side.format is not None
  found = _readable_format(side.format, repeats=repeats)
  assert found is not None
  rows = side.format.block_size
  return rows if found[0].scales_sums and rows % _SQUARE_ROWS == 0 else 1


def scale_notes(*of: formats.BlockFormat | None) -> tuple[str, ...]:
  """Returns notes on how the kernels apply scales of formats.

  Formats whose scales multiply values of their blocks have no note.
  """
  notes = []
  for format in of:
    if format is None:
      continue
    if (repeats := _repeats(format)) > 1:
      notes.append(
        f"each scale of {format.block_size} values is repeated {repeats}"
        f" times, for blocks of {format.block_size // repeats}"
      )
    elif not reads_swizzled(format):
      notes.append(
        f"values of {format} are decoded to bf16, and each"
        f" {format.scale_dtype.name} scale multiplies f32 sums over its"
        f" {format.block_size} values of k"
      )
  return tuple(dict.fromkeys(notes))


def _default_config(
  shape: configs.MatmulShape, target: targets.Target
) -> configs.MatmulConfig:
  architecture = triton_library.supported_architecture(target)
  config = tiles_by_rule.default_config(
    shape,
    architecture,
    core_count=target.core_count or 1,
    use_descriptors=triton_library.uses_descriptors(target),
  )
  return within_limits(config, shape, target)


def within_limits(
  config: configs.MatmulConfig,
  shape: configs.MatmulShape,
  target: targets.Target,
) -> configs.MatmulConfig:
  """Returns a rule's config with parts of k whose sums fit the workspace."""
  if workspace_error(config, shape, target) is None:
    return config
  limit = target.options.workspace_bytes
  assert limit is not None
  split_k = max(1, limit // _part_bytes(shape))
  return dataclasses.replace(config, split_k=split_k)


def workspace_error(
  config: configs.MatmulConfig,
  shape: configs.MatmulShape,
  target: targets.Target,
) -> str | None:
  """Returns why the partial sums of a config exceed a limit, or None."""
  limit = target.options.workspace_bytes
  needed = config.split_k * _part_bytes(shape) if config.split_k > 1 else 0
  if limit is None or needed <= limit:
    return None
  return (
    f"split_k={config.split_k} needs a workspace of {needed} bytes, more than"
    f" workspace_bytes={limit}"
  )


def _part_bytes(shape: configs.MatmulShape) -> int:
  """Returns the bytes of a part's sums (`matmul_plans.plan`), in f32."""
  return 4 * shape.batch * shape.m * shape.n


def limits_notes(
  target: targets.Target,
  default_config: Callable[[targets.Target], configs.MatmulConfig],
  shape: configs.MatmulShape,
) -> tuple[str, ...]:
  """Returns a note if a limit changes the rule's config."""
  unlimited = default_config(
    dataclasses.replace(target, options=call_options.NONE)
  )
  error = workspace_error(unlimited, shape, target)
  if error is None:
    return ()
  return (f"{error}; split_k={default_config(target).split_k} is used",)


def _launches(
  shape: configs.MatmulShape, target: targets.Target, fields: decisions.Fields
) -> tuple[launching.Launch, ...]:
  architecture = triton_library.supported_architecture(target)
  if not fields:
    config = _default_config(shape, target)
  else:
    # The table's config was checked for dense operands. The operands that are
    # launched may have strides that the config does not support.
    error = shape_config_error(fields, shape, target)
    if error is not None:
      raise NotImplementedError(
        f"{sides.who()}: implementation triton with {dict(fields)}, which a"
        f" tuning table chose: {error}; or use jp.tuning(None)"
      )
    config = config_of(fields)
  found = matmul_plans.plan(shape, config, architecture)
  return limited(found, config, shape, target)


def limited(
  launches: tuple[launching.Launch, ...],
  config: configs.MatmulConfig,
  shape: configs.MatmulShape,
  target: targets.Target,
) -> tuple[launching.Launch, ...]:
  """Returns launches for any m with the programs that run at a time.

  Other launches are unchanged.
  """
  if not shape.is_for_any_m:
    return launches
  most = tiles_by_rule.most_programs(config, shape, target.core_count or 1)
  return tuple(
    dataclasses.replace(each, grid=min(each.grid, most)) for each in launches
  )


# Configs in tuning tables.


def fields_of(config: configs.MatmulConfig) -> decisions.Fields:
  """Returns all fields of a config, sorted."""
  return tuple(sorted(dataclasses.asdict(config).items()))


def config_of(fields: decisions.Fields) -> configs.MatmulConfig:
  """Returns the config whose `fields_of` are `fields`.

  Raises:
    ValueError: If no config has these fields. The message names the field.
  """
  given: dict[str, Any] = dict(fields)
  if given.keys() != _CONFIG_FIELDS.keys():
    raise ValueError(
      "a config of the Triton kernels must have"
      f" {', '.join(sorted(_CONFIG_FIELDS))},"
      f" got {', '.join(given) or 'none'}"
    )
  for name, value in given.items():
    if name == "path":
      allowed, is_right = f"one of {configs.PATHS}", value in configs.PATHS
    elif isinstance(_CONFIG_FIELDS[name].default, bool):
      allowed, is_right = "true or false", isinstance(value, bool)
    else:
      allowed, is_right = "a whole number", type(value) is int
    if not is_right:
      raise ValueError(f"{name} must be {allowed}, got {value!r}")
  return configs.MatmulConfig(**given)


def shape_config_error(
  fields: decisions.Fields, shape: configs.MatmulShape, target: targets.Target
) -> str | None:
  """Returns why fields are not a config for a shape, or None if they are."""
  try:
    config = config_of(fields)
  except ValueError as error:
    return str(error)
  architecture = triton_library.architecture_of(target)
  if architecture is None:
    return f"there are no kernels for {target}"
  if config.path == "small_m" and not config.swap:
    return "swap must be true for small_m"
  if config.use_descriptors:
    refusal = triton_library.descriptors_refusal()
    if refusal is not None:
      return refusal.reason
  return constraints.config_error(
    config, shape, architecture
  ) or workspace_error(config, shape, target)


def config_error(
  config: decisions.Fields, problem: problems.DotProblem, target: targets.Target
) -> str | None:
  """Returns why a config cannot compute a problem, or None if it can."""
  refusal = supports(problem, target)
  if refusal is not None:
    return refusal.reason
  return shape_config_error(config, _dense_shape(problem, target), target)


# Emission.


def emit(
  call: calls.DotCall,
  problem: problems.DotProblem,
  target: targets.Target,
  config: decisions.Fields = (),
  out: quantization_problems.QuantizedOutput | None = None,
) -> Any:
  """Launches the kernels, and emits epilogues they do not fuse as XLA ops."""
  dot = functools.partial(_dot, target=target, config=config, out=out)
  return epilogue.fused(dot, call, problem)


def quantized_refusal(
  problem: problems.DotProblem,
  out: quantization_problems.QuantizationProblem,
  target: targets.Target,
  config: decisions.Fields = (),
) -> str:
  """Returns why no kernel quantizes the result, or ""."""
  if problem.m is None:
    return "m is symbolic"
  if not problem.fuses_epilogue:
    return "XLA operations compute a part of the epilogue"
  shape, planned = launches(problem, target, config)
  return result_refusal(planned, out, shape.n)


def result_refusal(
  planned: Sequence[launching.Launch],
  out: quantization_problems.QuantizationProblem,
  n: int,
) -> str:
  """Returns why launches cannot quantize their result of n columns, or ""."""
  if reason := quantize_triton.kernels_refusal(out):
    return reason
  if n % out.shape[-1]:
    return "rhs has no dimension of the result, which is blocked"
  return quantized_plans.blocks_error(planned, out.format.name) or ""


def _dot(
  call: calls.DotCall,
  problem: problems.DotProblem,
  *,
  target: targets.Target,
  config: decisions.Fields,
  out: quantization_problems.QuantizedOutput | None,
) -> Any:
  """Runs the launches on the call's arrays, copied only if necessary."""
  shape = call.shape
  matmul = _dense_shape(problem, target)
  lhs, rhs = _readable(call, problem, matmul)
  arrays: dict[str, Any] = {}
  arrays["lhs"], arrays["lhs_scale"], lhs_kind = lhs
  arrays["rhs"], arrays["rhs_scale"], rhs_kind = rhs
  matmul = dataclasses.replace(matmul, lhs=lhs_kind, rhs=rhs_kind)
  if call.is_of_layer:
    matmul = dataclasses.replace(matmul, layers=arrays["rhs"].shape[0])
    arrays["layer"] = call.rhs.layer.reshape(1)
  if call.first_global_scale is not None:
    arrays["global_scale"] = call.first_global_scale.reshape(-1)
    arrays["second_global_scale"] = call.second_global_scale.reshape(-1)
  elif (global_scale := epilogue.pair(call)) is not None:
    arrays["global_scale"] = global_scale.reshape(-1)
    matmul = dataclasses.replace(
      matmul,
      has_global_power=matmul.has_two_global_scales,
      has_two_global_scales=False,
    )
  if call.bias is not None:
    arrays["bias"] = epilogue.bias_row(call)
  if call.residual is not None:
    arrays["residual"] = jnp.broadcast_to(call.residual, shape)
  m = math.prod(call.lhs.shape[d] for d in call.lhs.free)
  if problem.reads_m:
    arrays["m"] = jnp.asarray(m, jnp.int32).reshape(1)
  result = run(
    _launches(matmul, target, config),
    arrays,
    target,
    who=sides.WHO,
    num_rows=m,
    sizes=(matmul.batch, matmul.m, matmul.n),
    out=out,
  )
  return result.reshape(shape) if out is None else result


def run(
  planned: Sequence[launching.Launch],
  arrays: dict[str, Any],
  target: targets.Target,
  *,
  who: str,
  num_rows: Any,
  sizes: tuple[int, int, int],
  out: quantization_problems.QuantizedOutput | None,
) -> Any:
  """Runs the launches of a matmul, the last of which may quantize its result.

  Args:
    arrays, target, who, num_rows: as for `triton_launches.run`.
    sizes: (batch, m, n) of the result.
    out: as for every backend.
  """
  if out is not None:
    architecture = triton_library.supported_architecture(target)
    rows = triton_shapes.rows_of_matmul(out.problem, sizes)
    planned = quantized_plans.plan(planned, rows, architecture)
    if out.global_scale is not None:
      arrays["out_global_scale"] = out.global_scale.reshape(1)
  found = triton_launches.run(
    "block_scaled_matmul",
    planned,
    arrays,
    target,
    who=who,
    num_rows=num_rows,
  )
  if out is None:
    return found["out"]
  shape, dtype = out.problem.result_types()[1]
  scale = lax.bitcast_convert_type(found["scale"].reshape(shape), dtype)
  values = quantize_triton.values_of_bytes(found["values"], out.problem)
  amax = [found["amax"].max()] if out.problem.returns_amax else []
  return [values, scale, *amax]


# Strided operands.


def _readable(
  call: calls.DotCall, problem: problems.DotProblem, matmul: configs.MatmulShape
) -> tuple[Readable, Readable]:
  """Returns both sides as arrays in the formats of `matmul`."""
  if problem.is_copied:
    # k merges several dimensions, or has an odd number of FP4 values.
    lhs, rhs = call.dense_sides()
    return (
      _of_dense(lhs, matmul.lhs.format),
      _of_dense(rhs, matmul.rhs.format),
    )
  rhs = call.rhs.whole_stack() if call.is_of_layer else call.rhs
  return strided(call.lhs, matmul.lhs), strided(rhs, matmul.rhs)


def _of_dense(side: sides.Side, name: str) -> Readable:
  side = _with_readable_format(side, name)
  values, scale = _packed(side.values), side.scale
  kind = configs.OperandKind(
    format=name,
    strides=sides.dense_strides(values.shape),
    scale_strides=None if scale is None else sides.dense_strides(scale.shape),
  )
  return values, scale, kind


def _packed(values: jax.Array) -> jax.Array:
  """Packs FP4 and INT4 into bytes along the last axis, as in GPU memory."""
  if values.dtype not in formats.FOUR_BITS:
    return values
  return layouts.pack_fp4(values, axis=-1)


def strided(side: sides.Side, dense: configs.OperandKind) -> Readable:
  """Returns a side with one contracting dimension, and its strides."""
  square_scale = side.square_scale if dense.rows_per_scale > 1 else None
  side = _with_readable_format(side, dense.format)
  scale = scale_strides = None
  if side.format is not None:
    scale, scale_strides = _strided_scale(side, square_scale)
  if side.is_interleaved:
    side = side.replace(values=interleaving.from_bytes(side.values))
  values, strides = side.values, _static(side.strides())
  if strides is None:
    values = side.merge(values)
  values = _packed(values)
  kind = configs.OperandKind(
    format=dense.format,
    strides=sides.dense_strides(values.shape) if strides is None else strides,
    scale_strides=scale_strides,
    is_interleaved=side.is_interleaved,
    rows_per_scale=dense.rows_per_scale,
  )
  return values, scale, kind


def _static(strides: problems.Strides | None) -> problems.Strides | None:
  """Returns strides, or None if one is symbolic, so that a copy is made."""
  return strides if strides and blocking.are_static(strides) else None


def _strided_scale(
  side: sides.Side, square_scale: jax.Array | None = None
) -> tuple[jax.Array, tuple[int, ...]]:
  """Returns a scale and its strides; a swizzled scale has strides of tiles.

  The scale is `square_scale` unless that is None.
  """
  scale, free = side.scale, side.free
  if side.stays_swizzled:
    tile_rows = layouts.SCALE_TILE_ROWS * scale.shape[-1]
    return scale, (math.prod(scale.shape[len(side.batch) :]), tile_rows)
  # Dimensions of a padded scale cannot merge into rows.
  strides_of = functools.partial(
    problems.strides, batch=side.batch, free=free, contracting=side.contracting
  )
  is_linear = side.scale_layout == layouts.LINEAR
  scale = side.scale if square_scale is None else square_scale
  strides = strides_of(scale.shape)
  if square_scale is None and (
    len(free) > 1 or strides is None or not is_linear
  ):
    scale = side.linear_scale()
    strides = strides_of(scale.shape)
  strides = _static(strides)
  if strides is None:
    scale = side.merge(scale)
    strides = sides.dense_strides(scale.shape)
  return scale, strides


BACKEND: Final = choice.triton_backend(
  summary="Triton kernels that read the quantized bytes once",
  supports=supports,
  plan=plan,
  emit=emit,
  quantized_refusal=quantized_refusal,
  reads=_reads,
  lowering_refusal=_lowering_refusal,
  experiments=(("tma", triton_library.with_descriptors),),
  tunable=decisions.Tunable(
    source=resolution.triton_source, config_error=config_error
  ),
)

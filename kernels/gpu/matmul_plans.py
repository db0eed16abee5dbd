# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans the launches of a matmul, and the arrays that they are passed.

`plan` returns the launches of a `MatmulShape` and a `MatmulConfig`. The
lowering and tests in the interpreter and the compiler use them. This module
does not import Triton.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final, TypeVar

from jaxplugin.kernels.gpu import configs

from jaxplugin.kernels import architectures, descriptors, formats, launching

REDUCE_WARPS: Final = 4
_REDUCE_THREADS: Final = 32 * REDUCE_WARPS
_MANY_ELEMENTS: Final = 1 << 20
_LEAST_COPY_BYTES: Final = 4  # smallest cp.async (PTX ISA, "cp.async")

# Names of each kernel's input pointers, in order. Its outputs follow.
_OPERANDS: Final = ("lhs", "lhs_scale", "rhs", "rhs_scale")
_EPILOGUE: Final = ("global_scale", "second_global_scale", "bias", "residual")
_RESULT: Final = ("out_global_scale", "key")
_INPUTS: Final = {
  "matmul": (*_OPERANDS, "layer", "group_sizes", "m", *_EPILOGUE, *_RESULT),
  "reduce": ("workspace", "group_sizes", "m", *_EPILOGUE, *_RESULT),
}
_OUTPUTS: Final = ("out", "scale", "amax")
# Outputs that only a kernel with a quantized result has.
_NOT_QUANTIZED: Final = (("scale", None), ("amax", None))
_TRITON_DTYPES: Final = {
  "f16": "fp16",
  "f32": "fp32",
  "e4m3": "fp8e4nv",
  "uint8": "u8",
  "float32": "fp32",
  "bfloat16": "bf16",
  "float16": "fp16",
}

_Tiling = TypeVar("_Tiling", bound=configs.Tiling)


def plan(
  shape: configs.MatmulShape,
  config: configs.MatmulConfig,
  architecture: architectures.Architecture,
) -> tuple[launching.Launch, ...]:
  """Returns the launches that compute `shape` with `config`, in order.

  Requires that `constraints.config_error` is None.
  """
  tiling = tiling_of(configs.Tiling, shape, config, architecture)
  result = (shape.batch, shape.m, shape.n)
  matmul, *reduce = launches(
    tiling, architecture, out=result, part=result, rows=1
  )
  lhs, rhs = None, None
  if config.use_descriptors:
    lhs, rhs = operand_descriptors(shape, config)
  described = (lhs, None, rhs, *(None for _ in matmul.inputs[3:]))
  return dataclasses.replace(matmul, descriptors=described), *reduce


def launches(
  tiling: configs.Tiling,
  architecture: architectures.Architecture,
  *,
  out: tuple[int, ...],
  part: tuple[int, ...],
  rows: int,
) -> tuple[launching.Launch, ...]:
  """Returns the launch that multiplies, and one that adds parts of a split k.

  Args:
    tiling: constant of both kernels.
    architecture: the GPU.
    out: shape of the result.
    part: shape of the sums of one split.
    rows: number of rows of the result in which the second kernel's blocks lie.
  """
  config = tiling.config
  elements = math.prod(out)
  block = reduce_block(elements)
  if tiling.shape.reads_m:
    out = (*out[:-2], launching.READ, out[-1])
    part = (*part[:-2], launching.READ, part[-1])
  written = launching.Output(
    "out", out, configs.NUMPY_DTYPES[tiling.shape.out_dtype]
  )
  multiply = launching.Launch(
    kernel="matmul",
    name=kernel_name("matmul", tiling),
    inputs=_inputs("matmul", tiling),
    outputs=(written,),
    views=views(tiling.shape, config, architecture),
    ptx_version=ptx_version(tiling, architecture),
    fp_fusion=True,
    constexprs=(*_NOT_QUANTIZED, ("TILING", tiling), ("RESULT", None)),
    grid=tiling.programs,
    num_warps=config.num_warps,
    num_stages=config.num_stages,
  )
  if not tiling.is_split:
    return (multiply,)
  parts = launching.Output("workspace", (config.split_k, *part), "float32")
  add = launching.Launch(
    kernel="reduce",
    name=kernel_name("reduce", tiling),
    inputs=_inputs("reduce", tiling),
    outputs=(written,),
    fp_fusion=True,
    constexprs=(
      *_NOT_QUANTIZED,
      *(("TILING", tiling), ("BLOCK", block), ("RESULT", None)),
    ),
    grid=rows * configs.cdiv(elements // rows, block),
    num_warps=REDUCE_WARPS,
  )
  return dataclasses.replace(multiply, outputs=(parts,)), add


def _inputs(kernel: str, tiling: configs.Tiling) -> tuple[str, ...]:
  """Returns the array of each pointer; another one's for an absent array."""
  shape = tiling.shape
  has_epilogue = kernel == "reduce" or not tiling.is_split
  present = {
    "lhs_scale": shape.lhs.is_quantized,
    "rhs_scale": shape.rhs.is_quantized,
    "layer": shape.layers is not None,
    "group_sizes": tiling.is_ragged,
    "m": shape.reads_m,
    "global_scale": has_epilogue and shape.has_global_scale,
    "second_global_scale": has_epilogue and shape.has_two_global_scales,
    "bias": has_epilogue and shape.has_bias,
    "residual": has_epilogue and shape.has_residual,
    # `quantized_plans.plan` adds them.
    **dict.fromkeys(_RESULT, False),
  }
  names = _INPUTS[kernel]
  return tuple(
    name
    if present.get(name, True)
    else {"rhs_scale": "rhs"}.get(name, names[0])
    for name in names
  )


def tiling_of(
  kind: type[_Tiling],
  shape: configs.MatmulShape,
  config: configs.MatmulConfig,
  architecture: architectures.Architecture,
) -> _Tiling:
  """Returns the constant of the kernels that compute `shape` with `config`."""
  tiling = kind(
    **for_path(converted(shape, config, architecture), config),
    waits=architecture.has_wgmma,
    decoding=configs.Decoding(
      has_ptx=architecture.is_nvidia,
      # Triton 3.9 disables LLVM's vectorizer only for sm_80.
      packs=architecture.name == "sm_80",
      in_f32=not architecture.multiplies_bf16,
      reads_words=config.path == "small_m",
    ),
  )
  if tiling.is_across:
    return tiling
  ahead = scales_ahead(shape, config, architecture)
  return dataclasses.replace(tiling, scales_ahead=ahead)


def for_path(
  shape: configs.MatmulShape, config: configs.MatmulConfig
) -> dict[str, Any]:
  """Returns shape and config of a `Tiling`, adapted to the path's kernel."""
  if config.path != "small_m":
    return {"shape": shape, "config": config}
  rhs = shape.rhs
  if rhs.is_packed and not rhs.is_interleaved:
    batch, row, k = rhs.strides
    rhs = dataclasses.replace(
      rhs,
      in_words=True,
      strides=(batch // configs.WORD_BYTES, row // configs.WORD_BYTES, k),
    )
  return {
    "shape": dataclasses.replace(shape, rhs=rhs),
    "config": dataclasses.replace(config, swap=True),
  }


def converted(
  shape: configs.MatmulShape,
  config: configs.MatmulConfig,
  architecture: architectures.Architecture,
) -> configs.MatmulShape:
  """Returns `shape` with `OperandKind.is_converted` set for both operands."""

  # Only the upcast kernel multiplies in f32.
  converts = architecture.converts_e2m1 or (
    architecture.has_e2m1_conversion_to_f32 and config.path == "upcast"
  )

  def convert(kind: configs.OperandKind) -> configs.OperandKind:
    return dataclasses.replace(
      kind, is_converted=converts and _is_decoded(kind, config)
    )

  return dataclasses.replace(
    shape, lhs=convert(shape.lhs), rhs=convert(shape.rhs)
  )


def _is_decoded(
  kind: configs.OperandKind, config: configs.MatmulConfig
) -> bool:
  """Returns whether a kernel decodes FP4 that is not interleaved."""
  return (
    config.path != "native"
    and kind.is_quantized
    and kind.element == formats.E2M1
    and not kind.is_interleaved
  )


def ptx_version(
  tiling: configs.Tiling, architecture: architectures.Architecture
) -> int:
  """Returns `launching.Launch.ptx_version` of a matmul kernel."""
  shape = tiling.shape
  if architecture.is_nvidia and (
    shape.lhs.is_converted or shape.rhs.is_converted
  ):
    return launching.E2M1_CONVERSION_PTX_VERSION
  return launching.PTX_VERSION


def conversion_notes(
  launch: launching.Launch, architecture: architectures.Architecture
) -> tuple[str, ...]:
  """Returns a note on how a kernel decodes FP4, if the GPU has two ways."""
  tiling = dict(launch.constexprs)["TILING"]
  if not architecture.has_e2m1_conversion or not (
    _is_decoded(tiling.shape.lhs, tiling.config)
    or _is_decoded(tiling.shape.rhs, tiling.config)
  ):
    return ()
  ptxas = architecture.ptxas_version
  version = "" if ptxas is None else ".".join(map(str, ptxas))
  if architecture.converts_e2m1:
    return (f"FP4 is converted by cvt.rn.bf16x2.e2m1x2 (ptxas {version})",)
  oldest = ".".join(map(str, architectures.E2M1_CONVERSION_PTXAS))
  known = (
    f"the target's is {version}"
    if version
    else f"the target's is not known (name it with --ptxas or ptxas={oldest!r})"
  )
  return (
    "FP4 is decoded by integer operations: its conversion needs ptxas"
    f" {oldest}, and {known}",
  )


def instruction_notes(launch: launching.Launch) -> tuple[str, ...]:
  """Returns a note if matrix instructions multiply the values, or none.

  Native kernels have no note.
  """
  tiling = dict(launch.constexprs)["TILING"]
  if tiling.config.path == "int8":
    return (
      "INT8 matrix instructions sum products exactly, and the scales multiply"
      " the sums",
    )
  if tiling.config.path != "fp8":
    return ()
  return (
    'precision="fastest": FP8 matrix instructions sum'
    f" {tiling.config.block_k} products with 14 significant bits",
  )


def operand_descriptors(
  shape: configs.MatmulShape, config: configs.MatmulConfig
) -> tuple[descriptors.Descriptor, descriptors.Descriptor]:
  """Returns descriptors of the values of lhs and rhs, for tiles of `config`."""

  def describe(
    kind: configs.OperandKind, batch: int, rows: int, block_rows: int
  ) -> descriptors.Descriptor:
    return descriptors.describe(
      (batch, rows, configs.cdiv(shape.k, kind.values_per_element)),
      kind.strides,
      (block_rows, config.block_k // kind.values_per_element),
      kind.element_bytes,
    )

  return (
    describe(shape.lhs, shape.batch, shape.m, config.block_m),
    describe(shape.rhs, shape.layers or shape.batch, shape.n, config.block_n),
  )


def views(
  shape: configs.MatmulShape,
  config: configs.MatmulConfig,
  architecture: architectures.Architecture,
) -> tuple[tuple[str, str], ...]:
  """Returns the `launching.Launch.views` of the operands."""
  found = {}
  for name, kind in (("lhs", shape.lhs), ("rhs", shape.rhs)):
    if not kind.is_quantized:
      continue
    found[name] = "u8"
    if kind.element == formats.E4M3 and architecture.converts_e4m3:
      found[name] = "e4m3"
    if kind.is_interleaved or (
      name == "rhs" and kind.is_packed and config.path == "small_m"
    ):
      found[name] = "u32"
    if kind.scale == formats.E4M3 and architecture.converts_e4m3:
      found[f"{name}_scale"] = "e4m3"
    if kind.scale.bits > 8:
      found[f"{name}_scale"] = kind.scale.name
  return tuple(found.items())


def signature(
  launch: launching.Launch,
  shape: configs.MatmulShape,
  *,
  bias_dtype: str = "f32",
  residual_dtype: str = "f32",
) -> dict[str, str]:
  """Returns Triton's type of each array argument of a launch, by name."""
  arrays = {
    "lhs": shape.lhs.format,
    "rhs": shape.rhs.format,
    "lhs_scale": "u8",
    "rhs_scale": "u8",
    "group_sizes": "i32",
    "layer": "i32",
    "m": "i32",
    "global_scale": "f32",
    "second_global_scale": "f32",
    "bias": bias_dtype,
    "residual": residual_dtype,
    "workspace": "f32",
    "out_global_scale": "f32",
    "key": "u32",
    **dict(launch.views),
  }
  names = (*_INPUTS[launch.kernel], *_OUTPUTS[: len(launch.outputs)])
  types = [*(arrays[name] for name in launch.inputs)]
  types += [output.dtype for output in launch.outputs]
  specs = [*launch.descriptors] or [None] * len(launch.inputs)
  specs += [None] * len(launch.outputs)
  return {
    name: _triton_type(_TRITON_DTYPES.get(dtype, dtype), spec)
    for name, dtype, spec in zip(names, types, specs, strict=True)
  }


def _triton_type(dtype: str, descriptor: descriptors.Descriptor | None) -> str:
  if descriptor is None:
    return f"*{dtype}"
  block = ",".join(map(str, descriptor.block_shape))
  return f"tensordesc<{dtype}[{block}]>"


def kernel_name(kernel: str, tiling: configs.Tiling) -> str:
  """Returns the name of a kernel, a C identifier.

  It is `block_scaled_<path>_<formats>_<tile>[_split<n>][_swap][_tma][_layer]`,
  with `_of_m` at its end if the kernel reads m.
  Ragged kernels have "ragged" before the path, and "across" after it if they
  contract across the blocks of rhs.
  """
  shape, config = tiling.shape, tiling.config
  split = f"_split{config.split_k}" if tiling.is_split else ""
  prefix = f"block_scaled_{'ragged_' * tiling.is_ragged}"
  if kernel == "reduce":
    return f"{prefix}reduce{split}{'_of_m' * shape.reads_m}"
  return (
    f"{prefix}{config.path}{'_across' * tiling.is_across}"
    f"_{shape.lhs.name}_{shape.rhs.name}"
    f"_{config.block_m}x{config.block_n}x{config.block_k}{split}"
    # The small_m kernel always swaps.
    f"{'_swap' if config.swap and config.path != 'small_m' else ''}"
    f"{'_tma' if config.use_descriptors else ''}"
    f"{'_layer' if shape.layers is not None else ''}"
    f"{'_of_m' * shape.reads_m}"
  )


def kernel_name_of(kernel: str) -> Callable[[Any], str]:
  """Returns the `repr` argument of `triton.jit` for a kernel."""

  def name(specialization: Any) -> str:
    constants = specialization.constants
    result = constants.get("RESULT")
    suffix = "" if result is None else result.suffix
    return kernel_name(kernel, constants["TILING"]) + suffix

  return name


def reduce_block(elements: int) -> int:
  """Returns the number of elements that a program of the reduction sums.

  With one element a thread, ptxas, which uses 32 registers for such a kernel,
  loads all parts before it adds them and waits for memory once. With eight
  elements of 16 parts it would wait eight times. With many elements, programs
  run in several waves that hide this latency, so each has four a thread.

  Args:
    elements: number of elements of the result.
  """
  return _REDUCE_THREADS * (4 if elements > _MANY_ELEMENTS else 1)


def scales_ahead(
  shape: configs.MatmulShape,
  config: configs.MatmulConfig,
  architecture: architectures.Architecture,
) -> tuple[bool, bool]:
  """Returns `Tiling.scales_ahead`.

  The exceptions follow the model in `jaxplugin/lab/inspection/simulation.py`.
  """
  lhs, rhs = shape.lhs, shape.rhs
  if not architecture.is_nvidia or max(lhs.pieces, rhs.pieces) > 1:
    return False, False
  if config.path == "upcast" and architecture.multiplies_by_warp:
    # Main loops have 1 to 49 % fewer instructions.
    return True, True
  if (
    config.path == "upcast"
    and not (lhs.is_packed or rhs.is_packed)
    and lhs.is_quantized
    and rhs.is_quantized
    and lhs.k_is_minor
    and rhs.k_is_minor
  ):
    # More than 128 registers would leave one block on an SM instead of two.
    return False, False
  threads = config.num_warps * architecture.warp_size
  ahead = (
    _has_short_scales(lhs, config.block_m, config.block_k, threads),
    _has_short_scales(rhs, config.block_n, config.block_k, threads),
  )
  if config.path == "small_m":
    # If the weight's scales are copied asynchronously, loading those of lhs
    # ahead helps only blocks of four warps. A plain lhs of 64 rows leaves no
    # registers for scales of the next step.
    is_slower = config.num_warps > 4 and not ahead[1]
    is_full = not lhs.is_quantized and config.block_m > 32
    if is_slower or is_full:
      return False, False
    # The masks of a last step that overlaps need registers. If scales of
    # one-byte values were loaded ahead too, an SM would run one block of eight
    # warps instead of two.
    is_masked = shape.k % config.block_k > 0 and config.num_warps > 4
    return ahead[0] and (lhs.is_packed or not is_masked), ahead[1]
  if config.path == "native" and config.swap and not ahead[1]:
    # Scales of few rows of lhs arrive early enough without this.
    return False, False
  return ahead


def _has_short_scales(
  kind: configs.OperandKind, rows: int, block_k: int, threads: int
) -> bool:
  """Returns whether a thread's scales of a tile are too short for cp.async."""
  if not kind.scales_values or kind.is_swizzled:
    return False
  assert kind.scale_strides is not None
  columns = block_k // kind.values_per_scale
  in_line = math.gcd(columns, *kind.scale_strides[:-1])
  return min(rows * columns // threads, in_line) < _LEAST_COPY_BYTES

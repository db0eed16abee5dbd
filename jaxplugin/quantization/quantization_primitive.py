# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_p` and `dequantize_p`: where kernels may quantize instead.

Both mean what the functions of `quantization_ops` do, and are lowered to them,
except in a module for one device (`lowering.Module`): for a CPU, to calls of
the C++ kernels of kernels/cpu, where they are; and `quantize_p`, for a GPU, to
the Triton kernels of kernels/gpu/quantize.py (`quantization_triton`). Bits of
`quantize` are the same in all; `dequantize` by the C++ kernels is exact also
below 2^-126. On GPUs XLA fuses the operations of `dequantize` into one pass.

quantize_p: (x[, global_scale]) -> (values, scale[, global_scale]), the latter
  where it is computed. Parameters: format, axis, scale_rounding, packed,
  target.
dequantize_p: (values, scale[, global_scale]) -> floats. Parameters: format,
  axis, dtype, target.

`target` is that of an enclosing `use_target`, or None. What no kernel serves is
never bound: it is traced as operations at once.

Rule for CPUs: along the last axis always kernels; along another, to quantize to
FP4.

Milliseconds by operations / by kernels, f32, medians of interleaved calls (AVX2
kernels built with -fno-trapping-math, 2 cores of an EPYC, load 1.4 to 2.8, jax
0.10.2, 2026-11; `python -m jaxplugin bench --shapes quantize:1536x384,
dequantize:1536x384` measures those along the last axis):

                        128 x 384       1536 x 384      4096 x 4096
  quantize   mxfp8      0.25 / 0.07     1.01 / 0.46     16.8 / 12.7
             mxfp8_e5m2 0.23 / 0.07     0.97 / 0.43     13.9 / 11.3
             mxfp4      0.73 / 0.07     8.0 / 0.66      189 / 12.6
             nvfp4      1.25 / 0.11     12.3 / 1.09     237 / 18.6
  its axis 0 mxfp4      0.54 / 0.10     6.3 / 2.0       158 / 147
             nvfp4      1.27 / 0.15     12.1 / 2.3      430 / 187
  dequantize mxfp8      0.14 / 0.06     0.53 / 0.42     44 / 54
             mxfp8_e5m2 0.14 / 0.06     0.56 / 0.42     43 / 57
             mxfp4      0.18 / 0.06     1.06 / 0.52     62 / 56
             nvfp4      0.12 / 0.05     0.91 / 0.51     61 / 68

Quantizing to FP8 along axis 0 of 2048 x 2048 took 5.8 / 17, dequantizing 5 / 48
(FP4: 15 to 29 / 60). Results of 64 MB are bound by the page faults of their
memory; a consumer that XLA fuses with the operations took 0.5 to 1.2 times as
long after the kernel. (These last: under a load of 3 to 6.) NVFP4's kernel has
become faster since: 0.7 of its times along the last axis.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
from jax.extend import core as extend_core
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir

from jaxplugin.core import decisions
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.quantization import quantization_ops
from jaxplugin.quantization import quantization_triton
from jaxplugin.runtime import cpu_library
from jaxplugin.runtime import lowering
from jaxplugin.runtime import triton_library

_QUANTIZE: Final = "jaxplugin_quantize"
_DEQUANTIZE: Final = "jaxplugin_dequantize"
# Numbers of kernels/cpu/README.md.
_FORMATS: Final = {
  formats.MXFP8: 0,
  formats.MXFP8_E5M2: 1,
  formats.MXFP4: 2,
  formats.NVFP4: 3,
}
_ROUNDINGS: Final = {"up": 0, "floor": 1}
_BEST_ISA: Final = 0

# The dtypes of floats that the kernels read and write.
FLOATS: Final = tuple(
  np.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16)
)

quantize_p = extend_core.Primitive("block_quantize")
quantize_p.multiple_results = True
dequantize_p = extend_core.Primitive("block_dequantize")


def quantize(
  x: jax.Array,
  global_scale: jax.Array | None,
  format: formats.BlockFormat,
  axis: int,
  scale_rounding: quantization_ops.ScaleRounding,
  packed: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """`quantization_ops.quantize` to nearest, by kernels where they serve."""
  params: dict[str, Any] = {
    "format": format,
    "axis": axis,
    "scale_rounding": scale_rounding,
    "packed": packed,
  }
  if not is_served(x, format):
    return quantization_ops.quantize(x, global_scale, None, **params)
  if x.dtype not in FLOATS:
    x = x.astype(jnp.float32)
  given = () if global_scale is None else (global_scale,)
  target = targets.overriding_target()
  values, scale, *computed = quantize_p.bind(x, *given, **params, target=target)
  return values, scale, computed[0] if computed else global_scale


def dequantize(
  values: jax.Array,
  scale: jax.Array,
  global_scale: jax.Array | None,
  format: formats.BlockFormat,
  axis: int,
  dtype: np.dtype,
) -> jax.Array:
  """`quantization_ops.dequantize`, by kernels where they serve."""
  params = {"format": format, "axis": axis, "dtype": dtype}
  # Along another axis a kernel's f32 result would have to be transposed.
  is_last = axis == values.ndim - 1
  if not (is_served(values, format) and is_last and dtype in FLOATS):
    return quantization_ops.dequantize(values, scale, global_scale, **params)
  given: tuple[jax.Array, ...] = ()
  if global_scale is not None:
    # One number stays one for kernels, and under `vmap` where it is not mapped.
    given = (quantization_ops.expand_global_scale(global_scale, values.ndim),)
  target = targets.overriding_target()
  return dequantize_p.bind(values, scale, *given, **params, target=target)


def is_served(x: jax.Array, format: formats.BlockFormat) -> bool:
  """Whether kernels know the format, and there is something to do."""
  return format in _FORMATS and 0 not in x.shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """What quantizes or dequantizes on a target.

  Attributes:
    implementation: "cpu", "triton", or "xla", the operations.
    reason: of "xla", why no kernels.
  """

  implementation: str
  reason: str = ""


def choose(
  problem: quantization_triton.QuantizeProblem, target: targets.Target
) -> Choice:
  """Chooses what quantizes on a target: kernels where they serve. Pure."""
  if target.platform == "cpu":
    refusal = _cpu_refusal(problem, target)
    name = "cpu"
  else:
    refusal = quantization_triton.supports(problem, target)
    name = "triton"
  if refusal is None:
    return Choice(implementation=name)
  return Choice(implementation="xla", reason=f"{name} {refusal.reason}")


def decide(
  problem: quantization_triton.QuantizeProblem,
  module: lowering.Module,
  target: targets.Target,
) -> Choice:
  """What `quantize_p` is lowered to in a module for a target.

  Where jax-triton cannot lower (it does not import, or an AMD GPU is not here),
  that is operations: nobody could ask for them instead of an error, as
  `quantize` takes no implementation, and the bits are the same.
  """
  choice = choose(problem, target)
  refusal = module.kernels_refusal()
  if refusal is None and choice.implementation == "triton":
    refusal = triton_library.lowering_refusal(target)
  if refusal is None:
    return choice
  return Choice(implementation="xla", reason=refusal.reason)


def decide_dequantize(
  module: lowering.Module, target: targets.Target
) -> Choice:
  """What `dequantize_p` is lowered to in a module for a target. Pure."""
  refusal = module.kernels_refusal()
  if refusal is None and target.platform != "cpu":
    refusal = decisions.Unsupported(
      "XLA fuses the operations with what uses the result"
    )
  if refusal is None:
    refusal = _no_cpu_kernels(target)
  if refusal is None:
    return Choice(implementation="cpu")
  return Choice(implementation="xla", reason=refusal.reason)


def _no_cpu_kernels(
  target: targets.Target,
) -> decisions.Unsupported | None:
  if target.cpu_kernels is not None:
    return None
  return decisions.Unsupported(
    target.missing(targets.CPU_KERNELS) or "kernels are not on the target"
  )


def _cpu_refusal(
  problem: quantization_triton.QuantizeProblem, target: targets.Target
) -> decisions.Unsupported | None:
  missing = _no_cpu_kernels(target)
  if missing is not None:
    return missing
  if problem.format not in _FORMATS:
    return decisions.Unsupported(f"kernels do not know {problem.format}")
  # Along another axis a kernel needs x transposed: for FP8 that costs more than
  # is won.
  is_last = problem.axis == len(problem.shape) - 1
  if not (is_last or problem.format.is_fp4):
    return decisions.Unsupported(
      "kernels are slower for FP8 along another axis than the last"
    )
  return None


def _quantize_by_operations(x, global_scale=None, *, target=None, **params):
  """The results of `quantize_p`."""
  del target
  results = quantization_ops.quantize(x, global_scale, None, **params)
  if global_scale is None and params["format"].has_global_scale:
    return results
  return results[:2]


def _dequantize_by_operations(
  values, scale, global_scale=None, *, target=None, **params
):
  del target
  return quantization_ops.dequantize(values, scale, global_scale, **params)


def _quantize_by_kernel(
  x: jax.Array,
  global_scale: jax.Array | None = None,
  *,
  format: formats.BlockFormat,
  axis: int,
  scale_rounding: quantization_ops.ScaleRounding,
  packed: bool,
) -> Sequence[jax.Array]:
  cpu_library.register()
  x = jnp.moveaxis(x, axis, -1)
  *lead, k = x.shape
  rows = x.reshape(-1, k)
  num_blocks = k // format.block_size
  is_computed = global_scale is None and format.has_global_scale
  stored, dtype = k, format.values_dtype
  if packed:
    # The kernel writes the same bytes, and XLA:CPU need not copy them.
    stored, dtype = k // 2, formats.PACKED
  values, scale, computed = jax.ffi.ffi_call(
    _QUANTIZE,
    (
      jax.ShapeDtypeStruct((rows.shape[0], stored), dtype),
      jax.ShapeDtypeStruct((rows.shape[0], num_blocks), format.scale_dtype),
      jax.ShapeDtypeStruct((), jnp.float32),
    ),
  )(
    rows,
    _or_absent(global_scale),
    format=np.int64(_FORMATS[format]),
    rounding=np.int64(_ROUNDINGS[scale_rounding]),
    compute_global=np.int64(is_computed),
    isa=np.int64(_BEST_ISA),
  )
  values = jnp.moveaxis(values.reshape(*lead, stored), -1, axis)
  scale = jnp.moveaxis(scale.reshape(*lead, num_blocks), -1, axis)
  return (values, scale, computed) if is_computed else (values, scale)


def _dequantize_by_kernel(
  values: jax.Array,
  scale: jax.Array,
  global_scale: jax.Array | None = None,
  *,
  format: formats.BlockFormat,
  axis: int,
  dtype: np.dtype,
) -> jax.Array:
  cpu_library.register()
  assert axis == values.ndim - 1
  *lead, stored = values.shape
  k = 2 * stored if values.dtype == formats.PACKED else stored
  factor = None
  if global_scale is not None:
    factor = quantization_ops.expand_global_scale(global_scale, values.ndim)
  # The kernel takes one number; an array of them multiplies its f32 result.
  is_fused = factor is None or factor.ndim == 0
  rows = values.reshape(-1, stored)
  result = jax.ffi.ffi_call(
    _DEQUANTIZE,
    jax.ShapeDtypeStruct(
      (rows.shape[0], k), dtype if is_fused else np.dtype(np.float32)
    ),
  )(
    rows,
    scale.reshape(-1, scale.shape[-1]),
    _or_absent(factor if is_fused else None),
    block_size=np.int64(format.block_size),
    isa=np.int64(_BEST_ISA),
  ).reshape(*lead, k)
  if factor is None or is_fused:
    return result
  return (result * factor).astype(dtype)


def _or_absent(x: jax.Array | None) -> jax.Array:
  return jnp.zeros((0,), jnp.float32) if x is None else x


# Rules.


@functools.partial(jax.jit, static_argnames=("primitive", "params"))
def _bind_jitted(*args, primitive, params):
  return primitive.bind(*args, **dict(params))


def impl(primitive: extend_core.Primitive, *args, **params):
  """Reached under `jax.disable_jit` only: the callers are jitted."""
  with jax.disable_jit(False):
    return _bind_jitted(
      *args, primitive=primitive, params=tuple(params.items())
    )


def _quantize_abstract_eval(x, global_scale=None, *, target, **params):
  """The types that the operations' results have, shardings and all."""
  del target
  traced = quantization_ops.quantize.trace(x, global_scale, None, **params)
  avals = traced.jaxpr.out_avals
  # The operations return a given global scale as well.
  return avals[:2] if global_scale is not None else avals


def _dequantize_abstract_eval(
  values, scale, global_scale=None, *, target, **params
):
  del target
  traced = quantization_ops.dequantize.trace(
    values, scale, global_scale, **params
  )
  return traced.jaxpr.out_avals[0]


def _quantize_jvp(primals, tangents, **params):
  """Codes are made of bits by integer operations: nothing has a derivative."""
  del tangents
  results = quantize_p.bind(*primals, **params)
  return results, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]


def _dequantize_jvp(primals, tangents, **params):
  """The derivative of the operations."""
  active = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

  def function(*args):
    given = dict(zip(active, args, strict=True))
    merged = [given.get(i, x) for i, x in enumerate(primals)]
    return _dequantize_by_operations(*merged, **params)

  _, tangent = jax.jvp(
    function,
    tuple(primals[i] for i in active),
    tuple(tangents[i] for i in active),
  )
  return dequantize_p.bind(*primals, **params), tangent


def _quantize_batch(args, dims, *, axis, **params):
  format = params["format"]
  x, *given = args
  # One global scale an entry, computed or given, is more than a kernel takes.
  if (format.has_global_scale and not given) or any(
    d is not None for d in dims[1:]
  ):
    function = functools.partial(_quantize_by_operations, axis=axis, **params)
    results = jax.vmap(function, in_axes=tuple(dims))(*args)
  else:
    x = jnp.moveaxis(x, dims[0], 0)
    results = quantize_p.bind(x, *given, axis=axis + 1, **params)
  return results, (0,) * len(results)


def _dequantize_batch(args, dims, *, axis, **params):
  if None in dims[:2]:
    function = functools.partial(_dequantize_by_operations, axis=axis, **params)
    return jax.vmap(function, in_axes=tuple(dims))(*args), 0
  size = args[0].shape[dims[0]]
  values, scale = (
    jnp.moveaxis(x, d, 0) for x, d in zip(args[:2], dims[:2], strict=True)
  )
  given = args[2:]
  # One number for all entries stays so; else they get their own leading index.
  if given and not (dims[2] is None and given[0].ndim == 0):
    given = (batching.bdim_at_front(given[0], dims[2], size),)
  return dequantize_p.bind(values, scale, *given, axis=axis + 1, **params), 0


def problem_of(
  avals: Sequence[Any], params: Mapping[str, Any]
) -> quantization_triton.QuantizeProblem:
  """What an equation of `quantize_p` asks for."""
  x = avals[0]
  return quantization_triton.QuantizeProblem(
    shape=tuple(x.shape),
    dtype=np.dtype(x.dtype),
    has_global_scale=len(avals) > 1,
    format=params["format"],
    axis=params["axis"],
    scale_rounding=params["scale_rounding"],
  )


def _lower_quantize(
  ctx: Any, *args: Any, target: targets.Target | None, **params: Any
) -> Any:
  problem = problem_of(ctx.avals_in, params)
  module = lowering.module_of(ctx)
  device = lowering.resolve_target(target, module.platforms[0])
  functions = {
    "cpu": functools.partial(_quantize_by_kernel, **params),
    "triton": functools.partial(
      _quantize_by_triton,
      problem=problem,
      target=device,
      packed=params["packed"],
    ),
    "xla": functools.partial(_quantize_by_operations, **params),
  }
  function = functions[decide(problem, module, device).implementation]
  return mlir.lower_fun(function, multiple_results=True)(ctx, *args)


def _quantize_by_triton(x, global_scale=None, *, problem, target, packed):
  results = quantization_triton.emit(
    x, global_scale, problem, target, packed=packed
  )
  return results if problem.computes_global_scale else results[:2]


def _lower_dequantize(
  ctx: Any, *args: Any, target: targets.Target | None, **params: Any
) -> Any:
  module = lowering.module_of(ctx)
  device = lowering.resolve_target(target, module.platforms[0])
  functions = {"cpu": _dequantize_by_kernel, "xla": _dequantize_by_operations}
  chosen = decide_dequantize(module, device).implementation
  function = functools.partial(functions[chosen], **params)
  return mlir.lower_fun(function, multiple_results=False)(ctx, *args)


quantize_p.def_impl(functools.partial(impl, quantize_p))
quantize_p.def_abstract_eval(_quantize_abstract_eval)
ad.primitive_jvps[quantize_p] = _quantize_jvp
batching.primitive_batchers[quantize_p] = _quantize_batch
mlir.register_lowering(quantize_p, _lower_quantize)

dequantize_p.def_impl(functools.partial(impl, dequantize_p))
dequantize_p.def_abstract_eval(_dequantize_abstract_eval)
ad.primitive_jvps[dequantize_p] = _dequantize_jvp
batching.primitive_batchers[dequantize_p] = _dequantize_batch
mlir.register_lowering(dequantize_p, _lower_dequantize)

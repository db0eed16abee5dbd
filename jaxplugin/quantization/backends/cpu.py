# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cpu implementation: the C++ kernels of kernels/cpu, through XLA's FFI.

Along the last axis always; along another one only to quantize to FP4, where
operations take longest. What dequantizes is exact also below 2^-126.

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

from typing import Any
from typing import Final

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.core import decisions
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.quantization import operations
from jaxplugin.quantization import problems
from jaxplugin.runtime import cpu_library

_QUANTIZE: Final = "jaxplugin_quantize"
_DEQUANTIZE: Final = "jaxplugin_dequantize"
# Numbers of kernels/cpu/README.md.
_ROUNDINGS: Final = {"up": 0, "floor": 1}
_BEST_ISA: Final = 0
# The dtypes of floats that the kernels read and write.
_FLOATS: Final = tuple(
  np.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16)
)


def _rank(target: targets.Target) -> int | None:
  return 10 if target.platform == "cpu" else None


def _always_tried(target: targets.Target) -> int:
  del target
  return 10


def _no_kernels(
  format: formats.BlockFormat, target: targets.Target
) -> decisions.Unsupported | None:
  if target.cpu_kernels is None:
    return decisions.Unsupported(
      target.missing(targets.CPU_KERNELS) or "kernels are not on the target"
    )
  if format not in cpu_library.FORMATS:
    return decisions.Unsupported(f"kernels do not know {format}")
  return None


def supports_quantize(
  problem: problems.QuantizeProblem, target: targets.Target
) -> decisions.Unsupported | None:
  """Serves one blocking, where a kernel is not slower than operations."""
  if target.platform != "cpu":
    return decisions.Unsupported(
      f"needs a CPU, the target's platform is {target.platform}"
    )
  missing = _no_kernels(problem.format, target)
  if missing is not None:
    return missing
  if problem.extras != problems.NO_EXTRAS:
    return decisions.Unsupported(
      f"kernels round to nearest in blocks of one row, got {problem.extras}"
    )
  if len(problem.blockings) != 1:
    return decisions.Unsupported("kernels quantize along one axis at a time")
  (single,) = problem.each()
  # Along another axis a kernel needs x transposed: where operations make a code
  # a byte that costs more than is won.
  is_last = single.blockings[0].axis() == len(single.shape) - 1
  if not (is_last or problem.format.is_fp4):
    return decisions.Unsupported(
      f"kernels are slower for FP{problem.format.value_bits} along another"
      " axis than the last"
    )
  return None


def supports_dequantize(
  problem: problems.DequantizeProblem, target: targets.Target
) -> decisions.Unsupported | None:
  """Serves the last axis, on CPUs."""
  if target.platform != "cpu":
    return decisions.Unsupported(
      "XLA fuses the operations with what uses the result"
    )
  missing = _no_kernels(problem.format, target)
  if missing is not None:
    return missing
  # Along another axis a kernel's f32 result would have to be transposed.
  if problem.axis != len(problem.shape) - 1:
    return decisions.Unsupported(
      "kernels are slower along another axis than the last"
    )
  if problem.out_dtype not in _FLOATS:
    return decisions.Unsupported(
      f"kernels write {', '.join(d.name for d in _FLOATS)}, got"
      f" {problem.out_dtype}"
    )
  return None


def _plan(problem: Any, target: targets.Target) -> decisions.Plan:
  del problem, target
  return decisions.Plan()


def quantize(
  x: jax.Array,
  global_scale: jax.Array | None,
  problem: problems.QuantizeProblem,
  target: targets.Target | None = None,
) -> list[jax.Array]:
  """The results of `quantize_p`."""
  del target
  cpu_library.register()
  ((b,), (single,)) = problem.blockings, problem.each()
  format, axis = problem.format, single.blockings[0].axis()
  x = jnp.moveaxis(b.apply(x), axis, -1)
  *lead, k = x.shape
  rows = x.reshape(-1, k)
  num_blocks = k // format.block_size
  stored, dtype = k, format.array_dtype
  if problem.packed:
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
    format=np.int64(cpu_library.FORMATS[format]),
    rounding=np.int64(_ROUNDINGS[problem.scale_rounding]),
    compute_global=np.int64(problem.computes_global_scale),
    isa=np.int64(_BEST_ISA),
  )
  values = jnp.moveaxis(values.reshape(*lead, stored), -1, axis)
  scale = jnp.moveaxis(scale.reshape(*lead, num_blocks), -1, axis)
  if problem.scale_layout == layouts.SWIZZLED:
    scale = layouts.swizzle_scale(scale)
  return [values, scale, computed][: problem.results_each]


def dequantize(
  values: jax.Array,
  scale: jax.Array,
  global_scale: jax.Array | None,
  problem: problems.DequantizeProblem,
  target: targets.Target | None = None,
) -> jax.Array:
  """The result of `dequantize_p`."""
  del target
  cpu_library.register()
  *lead, k = problem.logical_shape
  factor = None
  if global_scale is not None:
    factor = operations.expand_global_scale(global_scale, values.ndim)
  # The kernel takes one number; an array of them multiplies its f32 result.
  is_fused = factor is None or factor.ndim == 0
  dtype = problem.out_dtype if is_fused else np.dtype(np.float32)
  rows = values.reshape(-1, values.shape[-1])
  attributes = {"block_size": np.int64(problem.format.block_size)}
  if problem.format.values_dtype in cpu_library.ELEMENTS:
    element = cpu_library.ELEMENTS[problem.format.values_dtype]
    attributes["element"] = np.int64(element)
  result = jax.ffi.ffi_call(
    _DEQUANTIZE, jax.ShapeDtypeStruct((rows.shape[0], k), dtype)
  )(
    rows,
    scale.reshape(-1, scale.shape[-1]),
    _or_absent(factor if is_fused else None),
    **attributes,
    isa=np.int64(_BEST_ISA),
  ).reshape(*lead, k)
  if factor is None or is_fused:
    return result
  return (result * factor).astype(problem.out_dtype)


def _or_absent(x: jax.Array | None) -> jax.Array:
  return jnp.zeros((0,), jnp.float32) if x is None else x


QUANTIZE: Final = decisions.Backend(
  name="cpu",
  summary="C++ kernels",
  rank=_rank,
  supports=supports_quantize,
  plan=_plan,
  emit=quantize,
)
# On other platforms its refusal says why there are operations.
DEQUANTIZE: Final = decisions.Backend(
  name="cpu",
  summary="C++ kernels",
  rank=_always_tried,
  supports=supports_dequantize,
  plan=_plan,
  emit=dequantize,
)

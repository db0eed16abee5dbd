# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The triton implementation: the kernels of kernels/gpu/quantization.

The kernels write values and scale from one read of x, also along two axes if
`triton_shapes` finds a launch. They apply recipes' options in the same pass.
Their bits are the same as those of XLA ops. They also compute a prologue in the
same pass, whose f32 result may differ from that of XLA ops in its last bits.
A pass before computes the statistics of a norm's rows unless tiles have whole
rows. XLA ops compute those of a norm's gradient, because XLA fuses them with
what computes the cotangent.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Mapping, Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.core import decisions, formats, targets
from jaxplugin.operation import choice, triton_launches
from jaxplugin.quantization import operations, problems, prologues
from jaxplugin.quantization.backends import triton_shapes
from jaxplugin.runtime import triton_library

# Largest Hadamard groups. With larger groups registers spill.
_MAX_HADAMARD: Final = 64

_run = functools.partial(
  triton_launches.run, "quantization.quantize", who="quantize"
)


def supports(
  problem: problems.QuantizationProblem, target: targets.Target
) -> decisions.Unsupported | None:
  """Supports the package's formats, and f32, bf16 and f16.

  Sizes before a blocked last dimension may be symbolic.
  """
  if refusal := triton_library.refusal(target):
    return refusal
  if reason := kernels_refusal(problem):
    return decisions.Unsupported(reason)
  found = triton_shapes.launches(problem, target)
  return found if isinstance(found, decisions.Unsupported) else None


def kernels_refusal(problem: problems.QuantizationProblem) -> str:
  """Returns why no kernel supports a problem, whatever its shape; or ""."""
  is_single = len(problem.blockings) == 1
  if not problem.format.is_known:
    known = ", ".join(f.name for f in formats.KNOWN)
    return f"supports {known}, got {problem.format}"
  for options in problem.options:
    if reason := options.bits_refusal():
      return reason
    if options.square is not None and not is_single:
      return "computes square blocks along one axis only"
    if options.four_over_six and problem.has_global_scale:
      return (
        "computes the global scale of four_over_six itself, and global_scale"
        " was passed"
      )
    if (options.hadamard or 1) > _MAX_HADAMARD:
      return (
        f"transforms groups of up to {_MAX_HADAMARD} in registers, got"
        f" {options.hadamard}"
      )
  if len({options.four_over_six for options in problem.options}) > 1:
    return "either quantizes every blocking with four_over_six, or none"
  if problem.dtype not in formats.FLOAT_DTYPES:
    known = ", ".join(d.name for d in formats.FLOAT_DTYPES)
    return f"reads {known}, got {problem.dtype}"
  if 0 in problem.shape:
    return "needs sizes of at least 1"
  if problem.scale_layout != layouts.LINEAR and not is_single:
    return "swizzles the scale of one axis"
  return ""


def quantize(
  x: jax.Array,
  global_scale: jax.Array | None,
  problem: problems.QuantizationProblem,
  target: targets.Target,
  keys: Sequence[jax.Array | None] = (),
  more: Mapping[str, jax.Array] = types.MappingProxyType({}),
) -> list[jax.Array]:
  """Computes the results of `quantize_p` for a supported problem.

  Args:
    x: the array, or a device's shard of it.
    global_scale: f32[] for all blockings, f32[n] for each, or maxima,
      uint32[n, num_maxima], if the problem has them; None to compute it.
    keys: key data of each blocking. A shard has `offsets.words` instead.
    more: operands of the prologue by name.
  """
  single = len(problem.blockings) == 1
  order: tuple[int, ...] = (0,)
  if single:
    x = problem.blockings[0].apply(x)
  else:
    positions = triton_shapes.order(problem)
    assert positions is not None
    order = positions
  arrays, size = {"x": x, **more}, math.prod(x.shape[:-1])
  prologue = problem.prologue
  if prologue is not None and prologue.is_norm_gradient:
    arrays["statistics"] = prologues.gradient_statistics(prologue, x, more)
  if problem.num_maxima is not None:
    assert global_scale is not None
    arrays["maxima"] = global_scale
  elif global_scale is not None:
    for i, name in zip(order, ("global_scale", "global_scale_t"), strict=False):
      one = global_scale[i] if global_scale.ndim else global_scale
      arrays[name] = one.reshape(1)
  if not problem.sizes_are_static:
    arrays["m"] = jnp.asarray(size, jnp.int32).reshape(1)
    if problem.computes_global_scale:
      amax = operations.finite_amax(x, *problem.each())
      arrays["global_scale"] = operations.global_scale_of_maxima(
        amax.reshape(1), problem.format, four_over_six=False
      ).reshape(1)
  for i, name in zip(order, ("key", "key_t"), strict=False):
    if keys and (data := keys[i]) is not None:
      arrays[name] = data
  launches = triton_shapes.launches(problem, target)
  assert not isinstance(launches, decisions.Unsupported)
  arrays = _run(launches, arrays, target, num_rows=size)
  written = problem if single else triton_shapes.as_written(problem)
  each = written.each()
  results: dict[int, list[jax.Array]] = {}
  for i, suffix in zip(order, ("", "_t"), strict=False):
    shape, dtype = each[i].result_types()[1]
    scale = arrays[f"scale{suffix}"].reshape(shape)
    results[i] = [
      values_of_bytes(arrays[f"values{suffix}"], each[i]),
      lax.bitcast_convert_type(scale, dtype),
    ]
    if written.blockings[i] != problem.blockings[i]:
      b = written.blockings[i]
      results[i] = [b.unmerged(r, problem.shape) for r in results[i]]
    if problem.computes_global_scale:
      results[i].append(arrays[f"global_scale{suffix}"].reshape(()))
  found = [leaf for i in range(len(each)) for leaf in results[i]]
  if problem.returns_amax:
    found.append(arrays["amax"].max())
  if problem.column_sums is not None:
    shape = problem.shape[: problem.column_sums]
    pieces = arrays["sums"].reshape(*shape, -1, problem.shape[-1])
    found.append(pieces.sum(-2))
  if problem.returns_sum:
    found.append(arrays["total"].reshape(problem.shape))
  return found


def maxima(
  x: jax.Array, problem: problems.QuantizationProblem, target: targets.Target
) -> jax.Array:
  """Returns uint32[blockings, n]: f32 bits of partial amax values of x.

  Each covers the blocks without NaN or Inf of a piece of x. It is 0 if all
  blocks have one. `supports` must accept the problem.
  """
  if len(problem.blockings) == 1:
    x = problem.blockings[0].apply(x)
  launch = triton_shapes.maxima_launch(problem, target)
  return _run([launch], {"x": x}, target)["maxima"]


def num_maxima(
  problem: problems.QuantizationProblem, target: targets.Target
) -> int:
  """Returns the number of `maxima` for each blocking."""
  return triton_shapes.maxima_launch(problem, target).grid


def computes_statistics(
  problem: problems.QuantizationProblem, target: targets.Target
) -> bool:
  """Returns whether a pass before computes the statistics of a norm's rows.

  `supports` must accept the problem.
  """
  if problem.prologue is not None and problem.prologue.is_norm_gradient:
    return True
  launches = triton_shapes.launches(problem, target)
  assert not isinstance(launches, decisions.Unsupported)
  return any(each.kernel == "norm_statistics" for each in launches)


def values_of_bytes(
  values: jax.Array, problem: problems.QuantizationProblem
) -> jax.Array:
  """Converts the bytes of a kernel to the values of a problem.

  Args:
    values: uint8 in the order of `problem.written_shape`. Packed FP4 has the
      blocked axis last unless `problem.packed_in_order`.
  """
  format, shape = problem.format, problem.written_shape
  axis = problem.blockings[0].axis()
  if not format.is_fp4:
    return lax.bitcast_convert_type(values.reshape(shape), format.array_dtype)
  rest = (*shape[:axis], *shape[axis + 1 :])
  if problem.packed_in_order:
    return values.reshape(*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])
  values = values.reshape(*rest, shape[axis] // 2)
  if not problem.packed:
    values = layouts.unpack_fp4(values)
  return jnp.moveaxis(values, -1, axis)


QUANTIZE: Final[decisions.BackendRecord[problems.QuantizationProblem]] = (
  choice.triton_backend(
    summary="Triton kernels",
    folder="gpu/quantization",
    supports=supports,
    emit=quantize,
  )
)

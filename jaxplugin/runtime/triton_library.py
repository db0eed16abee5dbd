# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls Triton kernels through jax-triton, and returns why it cannot.

This module imports Triton and jax-triton only when a call needs them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jaxlib
import numpy as np
from jax.extend import core as extend_core
from jax.interpreters import mlir

from jaxplugin.core import decisions, targets
from jaxplugin.kernels import architectures, descriptors, launching
from jaxplugin.runtime import lowering, triton_calls

PLATFORMS: Final = ("cuda", "rocm")
# Triton's variable. Triton writes source lines if it is false.
_LINES: Final = "TRITON_DISABLE_LINE_INFO"

# The first jax-triton with TMA descriptors, and the last jaxlib that does not
# encode them for it.
_DESCRIPTORS_JAX_TRITON: Final = (0, 4, 0)
_NO_DESCRIPTORS_JAXLIB: Final = (0, 11, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescriptorTarget(targets.Target):
  """A GPU whose matmul kernels must use TMA descriptors.

  Problems that do not support descriptors are refused. Named and detected
  targets never have this type, because the gain is not measured on any GPU yet.
  """

  def __str__(self) -> str:
    return f"{super().__str__()}, with TMA descriptors"


def with_descriptors(target: targets.Target) -> DescriptorTarget:
  """Returns `target` with TMA descriptors for values in the matmul kernels.

  Pass the result to `use_target`, `explain` or `compile_dot`. The kernels'
  configs then have `MatmulConfig.use_descriptors`.
  """
  return DescriptorTarget(**vars(target))


def uses_descriptors(target: targets.Target) -> bool:
  return isinstance(target, DescriptorTarget)


def architecture_of(
  target: targets.Target,
) -> architectures.Architecture | None:
  """Returns the kernels' record of a target; None if it is not supported."""
  if target.compute_capability is not None:
    architecture = architectures.of_compute_capability(
      target.compute_capability
    )
  else:
    architecture = architectures.ARCHITECTURES.get(target.architecture or "")
  if architecture is None:
    return None
  architecture = dataclasses.replace(
    architecture, ptxas_version=target.ptxas_version
  )
  if target.shared_memory_bytes is None:
    return architecture
  return dataclasses.replace(
    architecture, shared_memory_bytes=target.shared_memory_bytes
  )


def supported_architecture(
  target: targets.Target,
) -> architectures.Architecture:
  """Returns `architecture_of` of a target that `refusal` does not refuse."""
  architecture = architecture_of(target)
  assert architecture is not None
  return architecture


def refusal(target: targets.Target) -> decisions.Unsupported | None:
  """Returns why the kernels do not support a target, or None. Pure."""
  refusal = decisions.platform_refusal(target, *PLATFORMS)
  if refusal is not None:
    return refusal
  missing = target.missing(targets.JAX_TRITON)
  if missing:
    return decisions.Unsupported(missing)
  if architecture_of(target) is None:
    known = ", ".join(architectures.ARCHITECTURES)
    return decisions.Unsupported(
      f"has kernels for {known}, the target is {target}"
    )
  return None


def lowering_refusal(
  target: targets.Target,
) -> decisions.Unsupported | None:
  """Returns why this process cannot lower a call for a target, or None.

  Unlike `refusal` it is not pure: it depends on the installed packages.
  """
  error = _import_error()
  if error:
    return decisions.Unsupported(
      f"lowering needs jax-triton, which cannot be imported ({error}); install"
      " jaxplugin[cuda13]"
    )
  if target.platform == "rocm":
    local = targets.detect_target("rocm").architecture
    if local is None or local != target.architecture:
      return decisions.Unsupported(
        f"jax-triton lowers only for the attached AMD GPU ({local or 'none'}),"
        f" and the target is {target}"
      )
  return None


def launched_by(target: targets.Target) -> str:
  """Returns a text that names the custom call of kernels lowered now.

  Raises:
    ValueError: If the environment variable of `triton_calls` is invalid.
  """
  return f"{triton_calls.chosen(target.platform)}"


def descriptors_refusal() -> decisions.Unsupported | None:
  """Returns why this process cannot lower TMA descriptors, or None.

  jax-triton 0.3 accepts only arrays. Kernels cannot make descriptors instead.
  They would write them to the launch's global memory, and neither jax-triton
  nor jaxlib up to 0.11.0 allocates that memory.
  """
  jax_triton = importlib.import_module("jax_triton").__version__
  if _release(jax_triton) >= _DESCRIPTORS_JAX_TRITON and (
    _release(jaxlib.__version__) > _NO_DESCRIPTORS_JAXLIB
  ):
    return None
  return decisions.Unsupported(
    "TMA descriptors need jax-triton 0.4.0 or newer (Python 3.12) with jaxlib"
    f" above 0.11.0, got jax-triton {jax_triton} with jaxlib"
    f" {jaxlib.__version__}; install those, or leave descriptors out of the"
    " target"
  )


def _release(version: str) -> tuple[int, ...]:
  """Returns the three numbers of a version: (0, 4, 1) for "0.4.1.dev3"."""
  numbers = re.match(r"\d+(?:\.\d+)*", version)
  assert numbers is not None
  release = tuple(map(int, numbers[0].split(".")))[:3]
  return release + (0,) * (3 - len(release))


@functools.cache
def _import_error() -> str:
  """Returns the error of importing jax-triton, or an empty string."""
  try:
    importlib.import_module("jax_triton")
  except ImportError as error:
    return str(error)
  return ""


launch_p: Final = extend_core.Primitive("triton_launch")
launch_p.multiple_results = True


def call(
  kernels: Mapping[str, Any],
  launch: launching.Launch,
  inputs: Sequence[jax.Array],
  target: targets.Target,
) -> list[jax.Array]:
  """Makes one `jax_triton.triton_call`, with the signature of 0.3 or 0.4.

  Args:
    kernels: `@triton.jit` functions, by the names that launches use.
    launch: a launch of one of them. It may have descriptors only if
      `descriptors_refusal` returns None.
    inputs: arrays of dtypes that Triton supports: FP4 and E8M0 as bytes.

  Returns:
    The launch's outputs.
  """
  return launch_p.bind(
    *inputs, kernel=kernels[launch.kernel], launch=launch, target=target
  )


def _abstract_eval(
  *avals: Any, kernel: Any, launch: launching.Launch, target: targets.Target
) -> list[Any]:
  del avals, kernel, target
  return [
    jax.core.ShapedArray(shape, np.dtype(dtype))
    for _, shape, dtype in launch.outputs
  ]


def _lower(ctx: Any, *inputs: Any, **params: Any) -> Any:
  def called(*arrays: jax.Array) -> list[jax.Array]:
    return _triton_call(arrays, **params)

  with _without_lines():
    results = mlir.lower_fun(called, multiple_results=True)(ctx, *inputs)
  call_target = triton_calls.chosen(params["target"].platform)
  triton_calls.rewrite(
    results[0].owner, call_target, params["launch"].ptx_version
  )
  return results


launch_p.def_impl(functools.partial(lowering.impl, launch_p))
launch_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(launch_p, _lower)


@contextlib.contextmanager
def _without_lines() -> Iterator[None]:
  """Makes Triton omit source lines, unless the environment sets the option.

  Source lines are most of a kernel's PTX, and contain paths of this
  installation.
  """
  if not importlib.util.find_spec("triton"):
    yield
    return
  compilation = importlib.import_module("triton").knobs.compilation
  with compilation.scope():
    if os.environ.get(_LINES) is None:
      compilation.disable_line_info = True
    yield


def _triton_call(
  inputs: Sequence[jax.Array],
  kernel: Any,
  launch: launching.Launch,
  target: targets.Target,
) -> list[jax.Array]:
  jax_triton = importlib.import_module("jax_triton")
  parameters = inspect.signature(jax_triton.triton_call).parameters
  options: dict[str, Any] = {}
  options["out_type" if "out_type" in parameters else "out_shape"] = [
    jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in launch.outputs
  ]
  backend_options: dict[str, Any] = {"enable_fp_fusion": launch.fp_fusion}
  if target.compute_capability is not None:
    major, minor = target.compute_capability
    options["compute_capability"] = 10 * major + minor
    backend_options["ptx_version"] = launch.ptx_version
  if "backend_options" in parameters:
    options["backend_options"] = backend_options
  else:
    options["enable_fp_fusion"] = launch.fp_fusion
  arguments = [
    _tensor_descriptor(jax_triton, x)
    if isinstance(x, descriptors.Described)
    else x
    for x in launch.described(inputs)
  ]
  return jax_triton.triton_call(
    *arguments,
    kernel=kernel,
    grid=(launch.grid,),
    name=launch.name,
    num_warps=launch.num_warps,
    num_stages=launch.num_stages,
    **options,
    **dict(launch.constexprs),
  )


def _tensor_descriptor(
  jax_triton: Any, described: descriptors.Described
) -> Any:
  """Returns the descriptor in jax-triton's type."""
  array, descriptor = described
  return jax_triton.TensorDescriptor(
    array,
    shape=descriptor.shape,
    strides=descriptor.strides,
    block_shape=descriptor.block_shape,
  )

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels through jax-triton: where they can run, and one call of one.

Nothing here imports Triton or jax-triton before the first call that needs it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import warnings
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax

from jaxplugin import problem as problem_lib
from jaxplugin import target as target_lib
from jaxplugin.kernels import architectures

# The oldest PTX that knows all of `_FAMILIES` (8.8, of CUDA 12.9). By default
# Triton writes that of its own ptxas, which may be newer than the one that XLA
# finds: "Unsupported .version 9.4; current version is '9.0'".
_PTX_VERSION: Final = 88

# Before it ptxas may compile Hopper's kernels wrongly.
_FIXED_PTXAS: Final = (13, 3)
_PTXAS_PACKAGE: Final = "nvidia-cuda-nvcc"  # where XLA looks for ptxas
_HOPPER: Final = (9, 0)

# The architecture whose kernels serve a compute capability.
_FAMILIES: Final = (
  ((8, 0), (8, 8), "sm_80"),
  ((8, 9), (8, 9), "sm_89"),
  ((9, 0), (9, 0), "sm_90"),
  ((10, 0), (10, 2), "sm_100"),
  ((10, 3), (10, 9), "sm_103"),
  ((12, 0), (12, 0), "sm_120"),
  ((12, 1), (12, 9), "sm_121"),
)


def architecture_of(
  target: target_lib.Target,
) -> architectures.Architecture | None:
  """The kernels' description of a target; None where they do not serve it."""
  name = target.architecture
  if target.compute_capability is not None:
    name = next(
      (
        family
        for first, last, family in _FAMILIES
        if first <= target.compute_capability <= last
      ),
      None,
    )
  if name is None or name not in architectures.ARCHITECTURES:
    return None
  architecture = architectures.by_name(name)
  if target.shared_memory_bytes is None:
    return architecture
  return dataclasses.replace(
    architecture, shared_memory_bytes=target.shared_memory_bytes
  )


def refusal(target: target_lib.Target) -> problem_lib.Unsupported | None:
  """Why kernels cannot serve a target; None where they can. Pure."""
  if target.platform not in ("cuda", "rocm"):
    return problem_lib.Unsupported(
      f"needs an NVIDIA or AMD GPU, the target's platform is {target.platform}"
    )
  if target.triton_error:
    return problem_lib.Unsupported(target.triton_error)
  if architecture_of(target) is None:
    known = ", ".join(architectures.ARCHITECTURES)
    return problem_lib.Unsupported(
      f"has kernels for {known}, the target is {target}"
    )
  return None


def lowering_refusal(
  target: target_lib.Target,
) -> problem_lib.Unsupported | None:
  """Why this process cannot lower a call for a target; None where it can.

  Not pure, unlike `refusal`: it is about what is installed here.
  """
  error = _import_error()
  if error:
    return problem_lib.Unsupported(
      f"lowering needs jax-triton, which does not import here ({error});"
      " install jaxplugin[cuda13]"
    )
  is_amd = target.platform == "rocm"
  if is_amd and target_lib.detect_target("rocm").architecture is None:
    return problem_lib.Unsupported(
      "jax-triton lowers for AMD GPUs only where there is one, and the target"
      f" is {target}"
    )
  return None


@functools.cache
def _import_error() -> str:
  """What importing jax-triton says here; empty where it succeeds."""
  try:
    importlib.import_module("jax_triton")
  except ImportError as error:
    return str(error)
  return ""


@functools.cache
def _warn_of_old_ptxas() -> None:
  """Warns where XLA would find an assembler that breaks Hopper's kernels.

  Before CUDA 13.3 ptxas may reuse a register that an asynchronous wgmma has not
  read yet (CUDA 13.3's release notes; triton-lang/triton#11781). Here that is
  where decoded weights are. One that is no package is not known.
  """
  try:
    version = importlib.metadata.version(_PTXAS_PACKAGE)
  except importlib.metadata.PackageNotFoundError:
    return
  if tuple(map(int, version.split(".")[:2])) < _FIXED_PTXAS:
    warnings.warn(
      f"jaxplugin: ptxas of {_PTXAS_PACKAGE} {version} may compile kernels for"
      " Hopper GPUs wrongly (triton-lang/triton#11781); install"
      f" {_PTXAS_PACKAGE}>={'.'.join(map(str, _FIXED_PTXAS))}, or pass"
      ' implementation="xla"',
      stacklevel=2,
    )


def call(
  kernel: Any,
  inputs: Sequence[jax.Array],
  outputs: Sequence[jax.ShapeDtypeStruct],
  constexprs: Mapping[str, Any],
  *,
  name: str,
  grid: int,
  num_warps: int,
  num_stages: int,
  fp_fusion: bool,
  target: target_lib.Target,
) -> list[jax.Array]:
  """One `jax_triton.triton_call`, of either of its signatures.

  Args:
    kernel: a `@triton.jit` function of inputs, outputs and constexprs.
    inputs: of dtypes that Triton knows: FP4 and E8M0 as bytes.
    outputs: their types.
    constexprs: the kernel's, by name.
    name: the call's, in profiles.
    grid: number of programs.
    num_warps, num_stages: Triton's.
    fp_fusion: whether the compiler may contract a * b + c, which rounds once.
    target: what to compile for.
  """
  jax_triton = importlib.import_module("jax_triton")
  parameters = inspect.signature(jax_triton.triton_call).parameters
  options: dict[str, Any] = {}
  options["out_type" if "out_type" in parameters else "out_shape"] = list(
    outputs
  )
  backend_options: dict[str, Any] = {"enable_fp_fusion": fp_fusion}
  if target.compute_capability is not None:
    major, minor = target.compute_capability
    if target.compute_capability == _HOPPER:
      _warn_of_old_ptxas()
    options["compute_capability"] = 10 * major + minor
    backend_options["ptx_version"] = _PTX_VERSION
  if "backend_options" in parameters:
    options["backend_options"] = backend_options
  else:
    options["enable_fp_fusion"] = fp_fusion
  return jax_triton.triton_call(
    *inputs,
    kernel=kernel,
    grid=(grid,),
    name=name,
    num_warps=num_warps,
    num_stages=num_stages,
    **options,
    **constexprs,
  )

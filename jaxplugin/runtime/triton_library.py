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
import re
import warnings
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jaxlib

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.kernels import architectures
from jaxplugin.kernels import descriptors
from jaxplugin.kernels import launching

# The oldest PTX that knows all architectures (8.8, of CUDA 12.9). By default
# Triton writes that of its own ptxas, which may be newer than the one that XLA
# finds: "Unsupported .version 9.4; current version is '9.0'".
_PTX_VERSION: Final = 88

# Before it ptxas may compile Hopper's kernels wrongly.
_FIXED_PTXAS: Final = (13, 3)
_PTXAS_PACKAGE: Final = "nvidia-cuda-nvcc"  # where XLA looks for ptxas

# The first jax-triton with TMA descriptors, and the last jaxlib that encodes
# none for it.
_DESCRIPTORS_JAX_TRITON: Final = (0, 4, 0)
_NO_DESCRIPTORS_JAXLIB: Final = (0, 11, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescriptorTarget(targets.Target):
  """A GPU whose matmul kernels are to use TMA descriptors.

  A problem that they cannot serve so is refused, and one that they can is
  lowered so or not at all. No target that is named or detected is one: no GPU
  has measured yet what descriptors gain.
  """

  def __str__(self) -> str:
    return f"{super().__str__()}, with TMA descriptors"


def with_descriptors(target: targets.Target) -> DescriptorTarget:
  """`target`, with TMA descriptors for values in the matmul kernels.

  For `use_target`, `explain`, `compile_dot`: `MatmulConfig.use_descriptors`.
  """
  return DescriptorTarget(
    **{
      field.name: getattr(target, field.name)
      for field in dataclasses.fields(target)
    }
  )


def uses_descriptors(target: targets.Target) -> bool:
  return isinstance(target, DescriptorTarget)


def architecture_of(
  target: targets.Target,
) -> architectures.Architecture | None:
  """The kernels' description of a target; None where they do not serve it."""
  if target.compute_capability is not None:
    architecture = architectures.of_compute_capability(
      target.compute_capability
    )
  else:
    architecture = architectures.ARCHITECTURES.get(target.architecture or "")
  if architecture is None:
    return None
  if target.shared_memory_bytes is None:
    return architecture
  return dataclasses.replace(
    architecture, shared_memory_bytes=target.shared_memory_bytes
  )


def refusal(target: targets.Target) -> decisions.Unsupported | None:
  """Why kernels cannot serve a target; None where they can. Pure."""
  if target.platform not in ("cuda", "rocm"):
    return decisions.Unsupported(
      f"needs an NVIDIA or AMD GPU, the target's platform is {target.platform}"
    )
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
  """Why this process cannot lower a call for a target; None where it can.

  Not pure, unlike `refusal`: it is about what is installed here.
  """
  error = _import_error()
  if error:
    return decisions.Unsupported(
      f"lowering needs jax-triton, which does not import here ({error});"
      " install jaxplugin[cuda13]"
    )
  if target.platform == "rocm":
    local = targets.detect_target("rocm").architecture
    if local is None or local != target.architecture:
      return decisions.Unsupported(
        f"jax-triton lowers for the AMD GPU that is here ({local or 'none'}),"
        f" and the target is {target}"
      )
  return None


def descriptors_refusal() -> decisions.Unsupported | None:
  """Why this process cannot lower TMA descriptors; None where it can.

  jax-triton 0.3 takes arrays alone. Kernels that make descriptors themselves
  are no way out: they write them to global memory of the launch, which neither
  it nor jaxlib up to 0.11.0 allocates.
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
  """(0, 4, 1) of "0.4.1.dev3"; three numbers."""
  numbers = re.match(r"\d+(?:\.\d+)*", version)
  assert numbers is not None
  release = tuple(map(int, numbers[0].split(".")))[:3]
  return release + (0,) * (3 - len(release))


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
  kernels: Mapping[str, Any],
  launch: launching.Launch,
  inputs: Sequence[jax.Array],
  target: targets.Target,
) -> list[jax.Array]:
  """One `jax_triton.triton_call`, of either of its signatures.

  Args:
    kernels: `@triton.jit` functions, by the names that launches use.
    launch: of one of them; with descriptors not where `descriptors_refusal` has
      a reason.
    inputs: of dtypes that Triton knows: FP4 and E8M0 as bytes.
    target: what to compile for.

  Returns:
    The launch's outputs.
  """
  jax_triton = importlib.import_module("jax_triton")
  parameters = inspect.signature(jax_triton.triton_call).parameters
  options: dict[str, Any] = {}
  options["out_type" if "out_type" in parameters else "out_shape"] = [
    jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in launch.outputs
  ]
  backend_options: dict[str, Any] = {"enable_fp_fusion": launch.fp_fusion}
  if target.compute_capability is not None:
    major, minor = target.compute_capability
    architecture = architecture_of(target)
    if architecture is not None and architecture.has_wgmma:
      _warn_of_old_ptxas()
    options["compute_capability"] = 10 * major + minor
    backend_options["ptx_version"] = _PTX_VERSION
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
    kernel=kernels[launch.kernel],
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
  """jax-triton's own descriptor."""
  array, descriptor = described
  return jax_triton.TensorDescriptor(
    array,
    shape=descriptor.shape,
    strides=descriptor.strides,
    block_shape=descriptor.block_shape,
  )

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""cuTile kernels through cuda-tile: where they can run, and one call of one.

cuda-tile's front end (Apache-2.0) compiles a kernel for an architecture that is
named, by an assembler that is NVIDIA's own. Its `cutile_call` for JAX asks the
local GPU instead. So the kernel is compiled here, in a process with a deadline,
and what is emitted is the custom call of `cutile_call`: the machine code is in
the module. Nothing here imports cuda.tile before the first call.

Source: cuda-tile 1.7, `cuda.tile.jax`.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from typing import Final

import jax
import jax.ffi
import numpy as np

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.kernels import architectures
from jaxplugin.kernels.gpu.cutile import assembler
from jaxplugin.kernels.gpu.cutile import plans

CALL_TARGET: Final = "cutile_launch"
_INDEX_BITS: Final = 32  # of sizes and strides, as `assembler` compiles


def architecture_of(
  target: targets.Target,
) -> architectures.Architecture | None:
  """The architecture whose machine code a target runs, if there is one.

  That of another minor compute capability would not run.
  """
  if target.compute_capability is None:
    return None
  name = "sm_{}{}".format(*target.compute_capability)
  if name not in plans.ARCHITECTURES:
    return None
  return architectures.by_name(name)


def refusal(target: targets.Target) -> decisions.Unsupported | None:
  """Returns why the kernel does not support a target, or None. Pure."""
  if target.platform != "cuda":
    return decisions.Unsupported(
      f"needs an NVIDIA GPU, the target's platform is {target.platform}"
    )
  if architecture_of(target) is None:
    return decisions.Unsupported(
      f"compiles for {', '.join(plans.ARCHITECTURES)}, whose matrix"
      f" instructions take block scales; the target is {target}"
    )
  return None


def lowering_refusal(
  target: targets.Target,
) -> decisions.Unsupported | None:
  """Returns why this process cannot lower a call, or None. Not pure."""
  del target
  missing = assembler.missing()
  return decisions.Unsupported(missing) if missing else None


def call(launch: plans.Launch, inputs: Sequence[jax.Array]) -> jax.Array:
  """The custom call of a launch, with its machine code.

  Args:
    launch: of the kernel.
    inputs: arrays of `launch.inputs`, of these shapes and dtypes.

  Raises:
    assembler.AssemblerError: it does not compile, or not in time.
  """
  assembled = assembler.assemble(launch.specification())
  importlib.import_module("cuda.tile.jax")  # it registers what is called
  places = {argument.name: i for i, argument in enumerate(launch.inputs)}
  places[launch.output.name] = len(places)
  buffers = [places[argument.name] for argument in launch.arrays]
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

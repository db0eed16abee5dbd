# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the launches of Triton kernels that the backends of operations plan."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxplugin.arrays import interleaving
from jaxplugin.core import error_context, formats, targets
from jaxplugin.kernels import launching
from jaxplugin.runtime import triton_library


def run(
  module: str,
  launches: Sequence[launching.Launch],
  arrays: Mapping[str, Any],
  target: targets.Target,
  *,
  who: str,
  num_rows: Any = None,
) -> dict[str, Any]:
  """Returns named arrays, and those that launches compute from them.

  Args:
    module: module of `jaxplugin.kernels.gpu` whose `KERNELS` has the kernels.
    arrays: arrays by the names of the launches' inputs.
    num_rows: number of rows of the results if kernels read it.

  Raises:
    NotImplementedError: If this process cannot lower the kernels.
  """
  arrays = dict(arrays)
  for launch in launches:
    launch = launch.with_size(num_rows)
    views = dict(launch.views)
    inputs = [view(arrays[name], views.get(name)) for name in launch.inputs]
    results = _call(module, launch, inputs, target, who)
    names = [output.name for output in launch.outputs]
    arrays |= dict(zip(names, results, strict=True))
  return arrays


def view(x: jax.Array, name: str | None) -> jax.Array:
  """Returns an array bitcast to the dtype that kernels read.

  Args:
    name: dtype from `launching.Launch.views`. None means bytes for elements of
      one byte, and no change for others.
  """
  if name == "e4m3":
    return lax.bitcast_convert_type(x, formats.E4M3)
  if name == "u32":
    if x.dtype == interleaving.WORDS:
      return x
    # k is the minor dimension, except for dimensions of size 1 after it.
    return interleaving.from_bytes(x.reshape(-1))
  if name == "u8" or x.dtype.itemsize == 1:
    return lax.bitcast_convert_type(x, jnp.uint8)
  return x


def _call(
  module: str,
  launch: launching.Launch,
  inputs: Sequence[jax.Array],
  target: targets.Target,
  who: str,
) -> list[jax.Array]:
  """Runs one launch, with the arguments of `run`."""
  refusal = triton_library.lowering_refusal(target)
  if refusal is None and any(launch.descriptors):
    refusal = triton_library.descriptors_refusal()
  if refusal is not None:
    raise NotImplementedError(
      f"{error_context.who(who)}: implementation triton: {refusal.reason}; or"
      ' pass implementation="xla"'
    )
  kernels = importlib.import_module(f"jaxplugin.kernels.gpu.{module}").KERNELS
  return triton_library.call(kernels, launch, inputs, target)

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles a block or a function for GPUs that are not there, and measures."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
from jax import lax
from jax.sharding import Mesh

from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.lab.compilation import deviceless
from jaxplugin.lab.planning import blocks
from jaxplugin.lab.planning import collectives
from jaxplugin.lab.planning import layouts
from jaxplugin.rewriting import quantized_dots
from jaxplugin.training import api
from jaxplugin.training import quantized_operand
from jaxplugin.training import recipes

# Products as they are written, in what a model's arrays are.
PLAIN: Final = "bf16"
_RECIPE: Final = "-recipe"
_RECIPES: Final = {
  "mxfp8": recipes.MXFP8_RECIPE,
  "nvfp4": recipes.NVFP4_RECIPE,
  "mxfp4": recipes.MXFP4_RECIPE,
}
FORMATS: Final = (
  PLAIN,
  *(format.name for format in formats.KNOWN),
  *(f"{name}{_RECIPE}" for name in _RECIPES),
)
# GPUs of a host, where there are more than one.
_HOST_GPUS: Final = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """What one program costs on one of its devices.

  Attributes:
    name: of the model or function, and what of it.
    layout: of its arrays.
    format: of its products, one of `FORMATS`.
    target: the GPU.
    devices: how many of them.
    collectives: what it moves.
    argument_bytes, output_bytes, temp_bytes: memory.
    seconds: that tracing and compiling took, here.
  """

  name: str
  layout: str
  format: str
  target: str
  devices: int
  collectives: tuple[collectives.Collective, ...]
  argument_bytes: int
  output_bytes: int
  temp_bytes: int
  seconds: float

  @property
  def received(self) -> float:
    """Bytes that one device receives."""
    return collectives.received(self.collectives)

  def to_dict(self) -> dict[str, Any]:
    """The same as numbers, texts and lists alone."""
    return {**dataclasses.asdict(self), "received_bytes": self.received}


def dot_general(format: str) -> Callable[..., jax.Array]:
  """What multiplies with weights in one of `FORMATS`, as `lax.dot_general`.

  Raises:
    ValueError: it is none; lists them.
  """
  if format == PLAIN:
    return lax.dot_general
  recipe = _RECIPES.get(format.removesuffix(_RECIPE))
  if format.endswith(_RECIPE) and recipe is not None:
    made = api.dot_general(recipe=recipe, weight="rhs")
    return functools.partial(made, key=jax.random.key(0))
  if format not in FORMATS:
    raise ValueError(
      f"plan: unknown format {format!r}; known: {', '.join(FORMATS)}"
    )
  return api.dot_general(format, format)


def share(format: str) -> Callable[[jax.Array], Any]:
  """What quantizes once what several products take, in one of `FORMATS`."""
  if format == PLAIN:
    return lambda x: x
  recipe: Any = format
  if format.endswith(_RECIPE):
    recipe = _RECIPES[format.removesuffix(_RECIPE)]
  return functools.partial(
    quantized_operand.quantize_operand, recipe=recipe, role="activation"
  )


def hosts_of(devices: int) -> int:
  """Machines of so many GPUs, eight in each where that is possible."""
  return devices // _HOST_GPUS if devices % _HOST_GPUS == 0 else 1


def make_mesh(layout: layouts.Layout, target: targets.Target) -> Mesh:
  """GPUs that are not there, for a layout.

  Raises:
    ValueError, DevicelessError: as `deviceless.mesh`.
  """
  return deviceless.mesh(
    target, layout.shape, layout.names, hosts=hosts_of(layout.devices)
  )


def of_block(
  name: str,
  block: blocks.Block,
  layout: layouts.Layout,
  format: str,
  target: targets.Target,
  *,
  shares: bool = True,
) -> Plan:
  """Of a block forward and backward.

  Args:
    name: of the model, and what of it.
    block, layout: what and how.
    format: of products, one of `FORMATS`.
    target: the GPU.
    shares: whether what query, key and value take, and gate and up, is
      quantized once, by `jp.quantize_operand`.

  Raises:
    ValueError: a size is no multiple of what splits it; format is unknown; and
      as `deviceless.mesh`.
    jax.errors.JaxRuntimeError: XLA refuses the program.
  """
  mesh = make_mesh(layout, target)
  step, args = blocks.step(
    block,
    layout,
    mesh,
    dot_general(format),
    share(format) if shares else lambda x: x,
  )
  return measure(
    step,
    args,
    name=name,
    layout=layout,
    format=format,
    target=target,
    mesh=mesh,
  )


def of_function(
  name: str,
  fn: Callable[..., Any],
  args: Sequence[Any],
  layout: layouts.Layout,
  format: str,
  target: targets.Target,
  mesh: Mesh,
) -> Plan:
  """Of any function, its products in a format as of `jp.quantize_dots`.

  Args:
    name: of the function.
    fn: its first argument has the parameters.
    args: abstract arrays, with shardings on mesh.
    layout, format, target, mesh: as of `of_block`.

  Raises:
    ValueError: format is unknown, or none that `quantize_dots` takes.
    jax.errors.JaxRuntimeError: XLA refuses the program.
  """
  dot_general(format)  # knows what is known
  if format != PLAIN:
    recipe = _RECIPES.get(format.removesuffix(_RECIPE))
    is_recipe = format.endswith(_RECIPE)
    fn = quantized_dots.quantize_dots(
      fn,
      recipe if is_recipe else format,
      key=jax.random.key(0) if is_recipe else None,
    )
  return measure(
    fn, args, name=name, layout=layout, format=format, target=target, mesh=mesh
  )


def measure(
  fn: Callable[..., Any],
  args: Sequence[Any],
  *,
  name: str,
  layout: layouts.Layout,
  format: str,
  target: targets.Target,
  mesh: Mesh,
) -> Plan:
  """Compiles a function of abstract arrays on a mesh, and counts.

  Raises:
    ValueError: a collective is written in a way that is not known.
    jax.errors.JaxRuntimeError: XLA refuses the program.
  """
  begin = time.perf_counter()
  compiled = deviceless.compile(fn, *args, target=target, mesh=mesh)
  seconds = time.perf_counter() - begin
  memory: Any = compiled.memory_analysis()
  return Plan(
    name=name,
    layout=str(layout),
    format=format,
    target=str(target),
    devices=layout.devices,
    collectives=collectives.of_compiled(compiled, mesh),
    argument_bytes=memory.argument_size_in_bytes,
    output_bytes=memory.output_size_in_bytes,
    temp_bytes=memory.temp_size_in_bytes,
    seconds=seconds,
  )

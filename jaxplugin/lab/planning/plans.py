# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles a block or a function for absent GPUs, and collects its costs."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats, targets
from jaxplugin.dropin import linear
from jaxplugin.lab.compilation import deviceless, traffic
from jaxplugin.lab.planning import blocks, collectives, layouts
from jaxplugin.quantization import api as quantization
from jaxplugin.ragged import api as ragged
from jaxplugin.rewriting import quantized_dots
from jaxplugin.training import api, quantized_operand, recipes

# Unquantized matmuls of bf16 arrays.
PLAIN: Final = "bf16"
RECIPE: Final = "-recipe"
# Ends the format of a plan whose norms and activations quantize.
FUSED: Final = " fused"
FORMATS: Final = (
  PLAIN,
  *(format.name for format in formats.KNOWN),
  *(f"{name}{RECIPE}" for name in recipes.BY_FORMAT),
)
ONE_DEVICE: Final = layouts.MeshLayout(axes=())
# GPUs per host, if there are several hosts.
_HOST_GPUS: Final = 8


class Program(NamedTuple):
  """A function, and abstract arguments with shardings on a mesh."""

  fn: Callable[..., Any]
  args: Sequence[Any]
  mesh: Mesh  # its devices need not be attached


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelPlan:
  """The costs of a program on one of its devices."""

  name: str  # of the model or function
  layout: str  # of the arrays
  format: str  # of the matmuls, one of `FORMATS`
  target: str
  devices: int  # number of GPUs
  collectives: tuple[collectives.Collective, ...]
  argument_bytes: int
  output_bytes: int
  temp_bytes: int
  seconds: float  # to trace and compile
  kernels: tuple[traffic.Kernel, ...] = ()  # () if they are not counted
  bandwidth: float | None = None  # bytes a second of the GPU's memory

  @property
  def received(self) -> float:
    """Bytes that one device receives in one run of the program."""
    return collectives.received(self.collectives)

  @property
  def is_bound(self) -> bool:
    """Whether a count is only a bound, as for a loop without a known count."""
    return any(one.is_bound for one in self.collectives) or any(
      kernel.is_bound for kernel in self.kernels
    )

  def to_dict(self) -> dict[str, Any]:
    """Returns the plan as numbers, strings, lists and dictionaries."""
    return {**dataclasses.asdict(self), "received_bytes": self.received}


def recipe_of(format: str) -> recipes.Recipe | str | None:
  """Returns the recipe, the format's name, or None for bf16.

  Raises:
    ValueError: If `format` is not in `FORMATS`.
  """
  if format not in FORMATS:
    raise ValueError(
      f"plan: unknown format {format!r}; known: {', '.join(FORMATS)}"
    )
  if format == PLAIN:
    return None
  return (
    recipes.BY_FORMAT[format.removesuffix(RECIPE)]
    if RECIPE in format
    else format
  )


def _dot_general(recipe: recipes.Recipe | str | None) -> Callable[..., Any]:
  if recipe is None:
    return lax.dot_general
  if isinstance(recipe, str):
    return api.dot_general(recipe, recipe)
  dot_general = api.dot_general(recipe=recipe, weight="rhs")
  return functools.partial(dot_general, key=jax.random.key(0))


def quantized(
  fn: Callable[..., Any], format: str, **options: Any
) -> Callable[..., Any]:
  """Returns a function whose dots `jp.quantize_dots` quantizes.

  Args:
    fn: a function whose first argument has the parameters.
    format: the format of matmuls, one of `FORMATS`.
    **options: of `jp.quantize_dots`.

  Raises:
    ValueError: If `format` is unknown.
  """
  recipe = recipe_of(format)
  if recipe is None:
    return fn
  key = None if isinstance(recipe, str) else jax.random.key(0)
  return quantized_dots.quantize_dots(fn, recipe, key=key, **options)


def make_mesh(layout: layouts.MeshLayout, target: targets.Target) -> Mesh:
  """Returns a mesh of absent GPUs.

  Each host has eight GPUs. If the number of GPUs is not a multiple of eight,
  there is one host.

  Raises:
    ValueError, DevicelessError: See `deviceless.mesh`.
  """
  hosts, rest = divmod(layout.devices, _HOST_GPUS)
  return deviceless.mesh(
    target, layout.shape, layout.names, hosts=1 if rest else hosts
  )


def of_block(
  block: blocks.TransformerBlock,
  layout: layouts.MeshLayout,
  format: str,
  target: targets.Target,
  *,
  shares: bool = True,
  microbatches: int | None = None,
  is_summed_once: bool = False,
) -> Program:
  """Returns a block, forward and backward.

  Args:
    format, target: see `ModelPlan`.
    block, layout: sizes and shardings that fit (`blocks.check`).
    shares: whether `jp.quantize_operand` quantizes an input once for query, key
      and value, and once for gate and up of a dense MLP.
    microbatches, is_summed_once: as for `ShardedBlock.microbatch_step`; None
      is a step without microbatches.

  Raises:
    ValueError: If `format` is unknown. See also `deviceless.mesh`.
  """
  recipe = recipe_of(format)
  share: Callable[[jax.Array], Any] = lambda x: x
  if shares and recipe is not None:
    share = functools.partial(
      quantized_operand.quantize_operand, recipe=recipe, role="activation"
    )
  mesh = make_mesh(layout, target)
  sharded = blocks.ShardedBlock(
    sizes=block,
    layout=layout,
    mesh=mesh,
    dot_general=_dot_general(recipe),
    share=share,
  )
  step, args = sharded.step()
  if microbatches is not None:
    step, args = sharded.microbatch_step(
      microbatches, is_summed_once=is_summed_once
    )
  return Program(step, args, mesh)


def on_one_device(
  block: blocks.TransformerBlock,
  format: str,
  mesh: Mesh,
  *,
  fuses: bool,
  trains: bool,
) -> Program:
  """Returns a block on one device.

  Args:
    block: sizes.
    format: the format of matmuls, one of `FORMATS`.
    mesh: one device, which need not be attached.
    fuses: whether the norms and activations write quantized results: with
      `out_format`, and in training with fuse_activations=True.
    trains: False is the forward pass, with weights that are quantized already.
      True is the forward and backward pass of bf16 weights, whose matmuls
      `jp.quantize_dots` quantizes.

  Raises:
    ValueError: If `format` is unknown.
  """
  recipe = recipe_of(format)
  sharded = blocks.ShardedBlock(
    sizes=block,
    layout=ONE_DEVICE,
    mesh=mesh,
    dot_general=lax.dot_general,
    share=lambda x: x,
  )
  if trains:
    transform = functools.partial(
      quantized, format=format, fuse_activations=fuses
    )
    return Program(*sharded.step(transform), mesh)
  weights, rows = sharded.arguments()
  if not isinstance(recipe, str):
    return Program(sharded.forward, (weights, rows), mesh)
  quantize = functools.partial(quantization.quantize, format=recipe)
  weights = jax.eval_shape(
    lambda ws: {n: quantize(w.mT) for n, w in ws.items()}, weights
  )
  served = dataclasses.replace(
    sharded,
    dot_general=functools.partial(_served, recipe),
    out_format=recipe if fuses else None,
  )
  return Program(served.forward, (weights, rows), mesh)


def _served(format: str, x: Any, w: Any, numbers: Any) -> jax.Array:
  """Multiplies rows by a quantized weight, or the rows of each expert."""
  del numbers
  shape = *x.shape[:-1], w.shape[-2]
  if not isinstance(x, scaled_array.ScaledArray):
    x = quantization.quantize(x, format)
  if w.ndim == 2:
    return linear.linear(x, w, preferred_element_type=jnp.bfloat16)
  experts, rows, _ = x.shape
  x = blocks.mapped(lambda a: a.reshape(experts * rows, -1), x)
  sizes = jnp.full(experts, rows)
  y = ragged.ragged_dot(x, w, sizes, preferred_element_type=jnp.bfloat16)
  return y.reshape(shape)


def measured(
  program: Program,
  *,
  name: str,
  layout: layouts.MeshLayout,
  format: str,
  target: targets.Target,
  counts_kernels: bool = False,
) -> ModelPlan:
  """Compiles a program, and returns its costs.

  Args:
    name, layout, format: see `ModelPlan`.
    target: an NVIDIA GPU, or the CPU of this machine.
    counts_kernels: whether the plan has the kernels.

  Raises:
    ValueError: If `quantize_dots` does not support the function.
    jax.errors.JaxRuntimeError: If XLA cannot compile the program.
  """
  fn, args, mesh = program
  begin = time.perf_counter()
  if target.platform == "cuda":
    compiled = deviceless.compile(fn, *args, target=target, mesh=mesh)
  else:
    compiled = jax.jit(fn).lower(*args).compile()
  seconds = time.perf_counter() - begin
  memory: Any = compiled.memory_analysis()
  return ModelPlan(
    name=name,
    layout=str(layout) or "one device",
    format=format,
    target=str(target),
    devices=layout.devices,
    collectives=collectives.of_compiled(compiled, mesh),
    argument_bytes=memory.argument_size_in_bytes,
    output_bytes=memory.output_size_in_bytes,
    temp_bytes=memory.temp_size_in_bytes,
    seconds=seconds,
    kernels=traffic.of_compiled(compiled) if counts_kernels else (),
    bandwidth=target.memory_bandwidth,
  )

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`plan`: counts a model's bytes between GPUs, or those of its kernels."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxplugin.cli import arguments, functions
from jaxplugin.core import targets
from jaxplugin.lab.compilation import deviceless
from jaxplugin.lab.planning import blocks, layouts, plans, report
from jaxplugin.printing import console, progress

_DEFAULT_FORMATS: Final = "bf16,mxfp8,nvfp4"
_DEFAULT_SEQUENCE: Final = 2048
_UNSPLIT: Final = "-"


def _add_arguments(command: argparse.ArgumentParser) -> None:
  command.add_argument(
    "source",
    metavar="MODEL_OR_FUNCTION",
    help="one of the models, or package.module:function",
  )
  command.add_argument(
    "--layout",
    action="append",
    default=[],
    metavar="LAYOUT",
    help="sizes of the mesh axes dp, fsdp, ep (experts) and tp, and sp to split"
    " the sequence over tp: fsdp=128,tp=8,sp; may be repeated",
  )
  text = f"formats to compare with the first; default: {_DEFAULT_FORMATS}"
  arguments.add_values(
    command, {"--formats LIST": text}, formats=_DEFAULT_FORMATS
  )
  arguments.add_switches(
    command,
    {
      "--traffic": "instead of collectives, count the kernels of one device and"
      " the bytes that they read and write, with norms and activations that are"
      " separate and that write quantized results (fused); needs a model"
    },
  )
  model = command.add_argument_group("a model")
  arguments.add_values(
    model,
    {
      "--batch N": "sequences on all devices; default: one for each"
      " data-parallel device and microbatch",
      "--sequence N": f"tokens of each sequence; default: {_DEFAULT_SEQUENCE}",
      "--microbatches N": "compare a loop over N microbatches, which sums over"
      " devices in each, with jp.training.accumulate",
    },
    type=arguments.size(1),
  )
  arguments.add_switches(
    model,
    {
      "--remat": "recompute the forward pass in the backward pass",
      "--separate": "quantize inputs for each matmul: for query, key and value,"
      " and for gate and up; default: once",
    },
  )
  function = command.add_argument_group("a function")
  function.add_argument(
    "--arg",
    metavar="ARRAY",
    action="append",
    default=[],
    help="an argument, and the mesh axes of its dimensions:"
    " bfloat16[16,4096]@fsdp,- (+ joins axes, - stands for no axis);"
    " may be repeated",
  )
  arguments.add_switches(
    function,
    {"--gradients": "also compute the gradients with respect to all arguments"},
  )
  arguments.add_values(
    command,
    {
      "--target NAME": "an NVIDIA GPU"
      f" ({', '.join(arguments.gpu_names('cuda'))}), or cpu for --traffic;"
      " default: %(default)s",
      "--cudnn VERSION": "the cuDNN version to assume; default: %(default)s",
    },
    target="b200",
    cudnn="9.13",
  )
  arguments.add_json(command)


def _run(args: argparse.Namespace) -> int:
  if args.traffic == bool(args.layout):
    raise ValueError(
      "plan: --layout or --traffic must be given, got"
      f" {'both' if args.traffic else 'neither'}. Pass one of them"
    )
  if args.traffic and args.target == "cpu":
    target = targets.detect_target("cpu")
  elif targets.named_target(args.target).platform == "cuda":
    target = targets.named_target(args.target, cudnn=args.cudnn)
  else:
    raise ValueError(
      "plan: --target must be an NVIDIA GPU"
      f" ({', '.join(arguments.gpu_names('cuda'))}), got {args.target!r}"
    )
  chosen = [layouts.parse(text) for text in args.layout]
  formats = [item.strip().lower() for item in args.formats.split(",")]
  for format in formats:
    plans.recipe_of(format)  # raises before anything is compiled
  if args.traffic:
    jobs = _of_traffic(args, formats, target)
  elif functions.is_function(args.source):
    jobs = _of_function(args, chosen, formats, target)
  else:
    jobs = _of_model(args, chosen, formats, target)
  found = []
  with progress.shown("compiling", len(jobs), prints=True) as line:
    for job in jobs:
      place = f"{job.layout}, " if job.layout.axes else ""
      line.describe(f"compiling {place}{job.format}")
      plan = plans.measured(
        job.program(),
        name=job.name,
        layout=job.layout,
        format=job.format,
        target=target,
        counts_kernels=args.traffic,
      )
      found.append(plan)
      line.advance()
  if args.json:
    print(report.to_json(found))
  else:
    console.show([report.text(found)])
  return 0


class _Job(NamedTuple):
  """A program to compile, and what its plan says of it."""

  name: str
  layout: layouts.MeshLayout
  format: str
  program: Callable[[], plans.Program]


def _of_traffic(
  args: argparse.Namespace, formats: list[str], target: targets.Target
) -> list[_Job]:
  names = "microbatches", "separate", "arg", "gradients"
  given = [f"--{name}" for name in names if getattr(args, name)]
  if given:
    raise ValueError(
      f"plan: {given[0]} must be left out with --traffic, which counts kernels"
      " of a model on one device. Leave it out"
    )
  block = dataclasses.replace(
    _model(args.source),
    batch=args.batch or 1,
    sequence=args.sequence or _DEFAULT_SEQUENCE,
    remat=args.remat,
  )
  blocks.check(block, plans.ONE_DEVICE)
  mesh = Mesh(jax.devices("cpu")[:1], ("x",))
  if target.platform == "cuda":
    mesh = deviceless.mesh(target)
  jobs: list[_Job] = []
  for trains in (False, True):
    name = f"{args.source}'s layer, {block.batch} x {block.sequence}, forward"
    name += " and backward" if trains else ""
    for format in formats:
      if format.endswith(plans.RECIPE) and not trains:
        continue
      for fuses in (False,) if format == plans.PLAIN else (False, True):
        program = functools.partial(
          plans.on_one_device, block, format, mesh, fuses=fuses, trains=trains
        )
        named = format + plans.FUSED * fuses
        jobs.append(_Job(name, plans.ONE_DEVICE, named, program))
  return jobs


def _model(name: str) -> blocks.TransformerBlock:
  if name not in blocks.MODELS:
    raise ValueError(
      f"plan: unknown model {name!r}; known:"
      f" {', '.join(blocks.MODELS)}, or package.module:function"
    )
  return blocks.MODELS[name]


def _of_model(
  args: argparse.Namespace,
  chosen: list[layouts.MeshLayout],
  formats: list[str],
  target: targets.Target,
) -> list[_Job]:
  model = _model(args.source)
  if args.arg or args.gradients:
    raise ValueError("plan: --arg and --gradients need a function, got a model")
  jobs: list[_Job] = []
  for layout in chosen:
    block = dataclasses.replace(
      model,
      batch=args.batch
      or layout.size("dp", "fsdp", "ep") * (args.microbatches or 1),
      sequence=args.sequence or _DEFAULT_SEQUENCE,
      remat=args.remat,
    )
    blocks.check(block, layout, args.microbatches)
    remat = " with remat" if block.remat else ""
    name = f"{args.source}'s layer, {block.batch} x {block.sequence}{remat}"
    name += ", inputs quantized for each product" if args.separate else ""
    steps = {name: False}
    if args.microbatches:
      name += f", {args.microbatches} microbatches"
      steps = {f"{name}, sums in each": False, f"{name}, sums once": True}
    for name, is_summed_once in steps.items():
      for format in formats:
        program = functools.partial(
          plans.of_block,
          *(block, layout, format, target),
          shares=not args.separate,
          microbatches=args.microbatches,
          is_summed_once=is_summed_once,
        )
        jobs.append(_Job(name, layout, format, program))
  return jobs


def _of_function(
  args: argparse.Namespace,
  chosen: list[layouts.MeshLayout],
  formats: list[str],
  target: targets.Target,
) -> list[_Job]:
  names = "batch", "sequence", "microbatches", "remat", "separate"
  if any(getattr(args, name) for name in names):
    raise ValueError(
      f"plan: {', '.join(f'--{name}' for name in names)} need a model, got a"
      " function; pass the sizes of its arguments with --arg"
    )
  fn = functions.function(args.source)
  if args.gradients:
    fn = _with_gradients(fn)
  jobs: list[_Job] = []
  for layout in chosen:
    mesh = plans.make_mesh(layout, target)
    specs = [_argument(text, mesh) for text in args.arg]
    for format in formats:
      program = functools.partial(
        plans.Program, plans.quantized(fn, format), specs, mesh
      )
      jobs.append(_Job(args.source, layout, format, program))
  return jobs


def _with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
  def both(*args: Any) -> Any:
    result, vjp = jax.vjp(fn, *args)
    # The cotangent is the result, because XLA could fold a constant.
    return result, vjp(result)

  return both


def _argument(text: str, mesh: Mesh) -> jax.ShapeDtypeStruct:
  """Returns an abstract array. "@fsdp+tp,-" after the shape is a sharding."""
  array, _, axes = text.partition("@")
  try:
    spec = functions.argument(array)
  except argparse.ArgumentTypeError as error:
    raise ValueError(f"plan: --arg: {error}") from None
  if not isinstance(spec, jax.ShapeDtypeStruct):
    raise ValueError(f"plan: --arg must be a plain array, got {text!r}")
  split = [
    () if item in ("", _UNSPLIT) else tuple(item.split("+"))
    for item in (axes.split(",") if axes else ())
  ]
  used = [name for names in split for name in names]
  if (
    {*used} - {*mesh.axis_names}
    or len({*used}) < len(used)
    or len(split) > len(spec.shape)
  ):
    raise ValueError(
      f"plan: --arg {text!r} must name for each of its {len(spec.shape)}"
      f" dimensions axes of the layout ({', '.join(mesh.axis_names)}), each"
      " once, or -"
    )
  for dim, names in enumerate(split):
    parts = math.prod(mesh.shape[name] for name in names)
    if spec.shape[dim] % parts:
      raise ValueError(
        f"plan: --arg {text!r}: dimension {dim} must be a multiple of the"
        f" {parts} that split it, got {spec.shape[dim]}"
      )
  return jax.ShapeDtypeStruct(
    spec.shape,
    spec.dtype,
    sharding=NamedSharding(mesh, PartitionSpec(*split)),
  )


COMMAND: Final = arguments.Command(
  help="count what a sharded model sends between GPUs, and its memory",
  description="Compiles a layer of a model, or a function, for up to thousands"
  " of NVIDIA GPUs that need not be attached. Prints the bytes that one GPU"
  " receives, by mesh axis and element type, and its memory, for each format."
  " With --traffic prints what the kernels of one device read and write.",
  epilog=f"""\
This needs jaxplugin[deviceless], but neither a GPU nor cuDNN. A layer is
compiled forward and backward, in seconds; figures of a model are those of a
layer times the number of layers. Bytes assume ring collectives. A format is
that of both operands, as in jp.dot_general(format, format), or a recipe; a
function is transformed by jp.quantize_dots, its first argument is the
parameters.

models: {", ".join(blocks.MODELS)}

formats: {", ".join(plans.FORMATS)}""",
  examples=(
    "llama3-8b --layout fsdp=8",
    "llama3-405b --layout fsdp=128,tp=8,sp --remat",
    "gpt-oss-120b --layout fsdp=2,ep=4,tp=2",
    "llama3-8b --traffic --target h200",
    "my.model:mlp --layout fsdp=4,tp=2 --gradients \\\n"
    "    --arg 'bfloat16[4096,14336]@fsdp,tp' \\\n"
    "    --arg 'bfloat16[2048,4096]@fsdp,-'",
  ),
  add_arguments=_add_arguments,
  run=_run,
)

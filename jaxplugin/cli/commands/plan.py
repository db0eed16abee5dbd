# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`plan`: what a model costs on many GPUs: bytes between them, and memory."""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import Final

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from jaxplugin.cli import arguments
from jaxplugin.cli import files
from jaxplugin.cli import functions
from jaxplugin.core import targets
from jaxplugin.planning import blocks
from jaxplugin.planning import layouts
from jaxplugin.planning import models
from jaxplugin.planning import picture
from jaxplugin.planning import plans
from jaxplugin.planning import report

_DEFAULT_FORMATS: Final = "bf16,mxfp8,nvfp4"
_DEFAULT_SEQUENCE: Final = 2048
_UNSPLIT: Final = "-"

_EPILOG: Final = f"""\
No GPU and no cuDNN are needed, but the wheels of jaxplugin[deviceless]. A layer
is compiled forward and backward, in seconds; what a model moves is that times
its layers. Bytes are what one device receives by rings. Formats are of
operands, as of jp.dot_general(format, format), or of a recipe; a function has
them by jp.quantize_dots, its first argument is the parameters.

models: {", ".join(models.MODELS)}
formats: {", ".join(plans.FORMATS)}

examples:
  python -m jaxplugin plan llama3-8b --layout fsdp=8
  python -m jaxplugin plan llama3-405b --layout fsdp=128,tp=8,sp --remat
  python -m jaxplugin plan gpt-oss-120b --layout fsdp=2,ep=4,tp=2 --svg a.svg
  python -m jaxplugin plan my.model:mlp --layout fsdp=4,tp=2 --gradients \\
    --arg 'bfloat16[4096,14336]@fsdp,tp' --arg 'bfloat16[2048,4096]@fsdp,-'
"""


def _add_arguments(command: argparse.ArgumentParser) -> None:
  command.add_argument(
    "source",
    metavar="MODEL_OR_FUNCTION",
    help="one of the models, or package.module:function",
  )
  command.add_argument(
    "--layout",
    action="append",
    required=True,
    metavar="LAYOUT",
    help="sizes of the mesh's axes, dp, fsdp, ep (experts) and tp, and sp, to"
    " split the sequence over tp: fsdp=128,tp=8,sp; one option each",
  )
  command.add_argument(
    "--formats",
    default=_DEFAULT_FORMATS,
    metavar="LIST",
    help=f"of products, the first is what others are to; default:"
    f" {_DEFAULT_FORMATS}",
  )
  model = command.add_argument_group("of a model")
  model.add_argument(
    "--batch",
    type=arguments.size(1),
    metavar="N",
    help="sequences on all devices; default: one for each that splits them",
  )
  model.add_argument(
    "--sequence",
    type=arguments.size(1),
    metavar="N",
    help=f"tokens of each; default: {_DEFAULT_SEQUENCE}",
  )
  model.add_argument(
    "--remat",
    action="store_true",
    help="the backward pass computes the forward pass again",
  )
  model.add_argument(
    "--separate",
    action="store_true",
    help="quantize what query, key and value take, and gate and up, for each",
  )
  function = command.add_argument_group("of a function")
  function.add_argument(
    "--arg",
    action="append",
    default=[],
    metavar="ARRAY",
    help="an argument, one option each, and what splits its dimensions:"
    " bfloat16[16,4096]@fsdp,- (+ joins axes, - is none)",
  )
  function.add_argument(
    "--gradients",
    action="store_true",
    help="the gradients with respect to all arguments too",
  )
  _add_output(command)


def _add_output(command: argparse.ArgumentParser) -> None:
  command.add_argument(
    "--target",
    default="b200",
    metavar="NAME",
    help=f"an NVIDIA GPU ({', '.join(arguments.gpu_names('cuda'))}); default:"
    " b200",
  )
  command.add_argument(
    "--cudnn",
    default="9.13",
    metavar="VERSION",
    help="the cuDNN version to assume; default: 9.13",
  )
  command.add_argument("--json", action="store_true", help="print JSON")
  command.add_argument(
    "--svg", metavar="FILE", help="where to draw a picture, too"
  )
  command.add_argument(
    "--force", action="store_true", help="overwrite FILE where it exists"
  )


def _run(args: argparse.Namespace) -> int:
  if targets.named_target(args.target).platform != "cuda":
    raise ValueError(
      "plan: --target must be an NVIDIA GPU"
      f" ({', '.join(arguments.gpu_names('cuda'))}), got {args.target!r}"
    )
  target = targets.named_target(args.target, cudnn=args.cudnn)
  chosen = [layouts.parse(text) for text in args.layout]
  formats = [item.strip().lower() for item in args.formats.split(",")]
  for format in formats:
    plans.dot_general(format)  # all are known before the first is compiled
  if args.svg is not None:
    files.check_output("", args.svg, args.force)
  make = _of_function if functions.is_function(args.source) else _of_model
  found = []
  for one in make(args, chosen, formats, target):
    print(f"{one.layout} {one.format}: {one.seconds:.1f} s", file=sys.stderr)
    found.append(one)
  print(report.to_json(found) if args.json else report.text(found))
  if args.svg is not None:
    pathlib.Path(args.svg).write_text(picture.draw(found), encoding="utf-8")
  return 0


def _of_model(
  args: argparse.Namespace,
  chosen: list[layouts.Layout],
  formats: list[str],
  target: targets.Target,
) -> Iterator[plans.Plan]:
  if args.source not in models.MODELS:
    raise ValueError(
      f"plan: unknown model {args.source!r}; known:"
      f" {', '.join(models.MODELS)}, or package.module:function"
    )
  if args.arg or args.gradients:
    raise ValueError("plan: --arg and --gradients are for functions")
  model = models.MODELS[args.source]
  cases = []
  for layout in chosen:
    block = model.block(
      batch=args.batch or layout.size("dp", "fsdp", "ep"),
      sequence=args.sequence or _DEFAULT_SEQUENCE,
      remat=args.remat,
    )
    blocks.check(block, layout)  # all of them before the first is compiled
    cases.append((block, layout))
  for block, layout in cases:
    remat = " with remat" if block.remat else ""
    name = f"{args.source}'s layer, {block.batch} x {block.sequence}{remat}"
    name += ", inputs quantized for each product" if args.separate else ""
    for format in formats:
      yield plans.of_block(
        name, block, layout, format, target, shares=not args.separate
      )


def _of_function(
  args: argparse.Namespace,
  chosen: list[layouts.Layout],
  formats: list[str],
  target: targets.Target,
) -> Iterator[plans.Plan]:
  if args.batch or args.sequence or args.remat or args.separate:
    raise ValueError(
      "plan: --batch, --sequence, --remat and --separate are for models; sizes"
      " of a function's arguments are in --arg"
    )
  fn = functions.function(args.source)
  if args.gradients:
    fn = _with_gradients(fn)
  for layout in chosen:
    mesh = plans.make_mesh(layout, target)
    specs = [_argument(text, mesh) for text in args.arg]
    for format in formats:
      yield plans.of_function(
        args.source, fn, specs, layout, format, target, mesh
      )


def _with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
  def both(*args: Any) -> Any:
    result, vjp = jax.vjp(fn, *args)
    # Any gradient of the result does; this one is not constant.
    return result, vjp(result)

  return both


def _argument(text: str, mesh: Mesh) -> jax.ShapeDtypeStruct:
  """An abstract array, split as "@fsdp+tp,-" says; without it it is whole."""
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
  unknown = {name for names in split for name in names} - {*mesh.axis_names}
  if unknown or len(split) > len(spec.shape):
    raise ValueError(
      f"plan: --arg {text!r} must name for each of its {len(spec.shape)}"
      f" dimensions axes of the layout ({', '.join(mesh.axis_names)}) or -"
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
  name="plan",
  help="what a model moves between many GPUs, and its memory",
  description="Compiles a layer of a model, or a function, for up to thousands"
  " of NVIDIA GPUs that\nneed not be here, and tells what one of them receives,"
  " by mesh axis and element type,\nand its memory, for each format beside the"
  " first.",
  epilog=_EPILOG,
  add_arguments=_add_arguments,
  run=_run,
)

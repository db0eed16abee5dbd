# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line, `python -m jaxplugin`."""

from __future__ import annotations

import argparse
import glob
import os
import sys
from collections.abc import Callable
from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin import dot
from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.bench import command as bench_command
from jaxplugin.cli import command_files
from jaxplugin.cli import command_functions
from jaxplugin.core import decisions
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.dot import call
from jaxplugin.explanation import compilation
from jaxplugin.explanation import deviceless
from jaxplugin.explanation import diagnostics
from jaxplugin.explanation import optimized
from jaxplugin.explanation import report as explanation_lib
from jaxplugin.runtime import triton_library
from jaxplugin.stablehlo import modules
from jaxplugin.stablehlo import rewriter

_BAD_ARGUMENTS: Final = 2
_DEFAULT_BATCH: Final = 1
_DEFAULT_OUT: Final = "bfloat16"

_EXPLAIN_EPILOG: Final = """\
examples:
  python -m jaxplugin explain --lhs mxfp8 --rhs mxfp4 -m 1 -n 4096 -k 4096
  python -m jaxplugin explain model.mlir --target b200 --cudnn 9.12
  python -m jaxplugin explain - --target h100 --json < model.mlir
"""
_REWRITE_EPILOG: Final = """\
One line a call goes to stderr. Without anything to rewrite the module comes out
as it is.

examples:
  python -m jaxplugin rewrite model.mlir --target b200 --cudnn 9.12 -o out.mlir
  python -m jaxplugin rewrite model.mlirbc --target h100 --format text
  python -m jaxplugin rewrite - --target cpu < model.mlir > cpu.mlir
"""
_COMPILE_EPILOG: Final = """\
No GPU and no cuDNN are needed, but the wheels of jaxplugin[deviceless]. A
function is found as Python finds modules, in the current directory first; it is
given abstract arrays, and its block-scaled dots are decided for the target. A
module keeps its own calls for XLA to lower, but with --rewrite.

examples:
  python -m jaxplugin compile model.mlir --target b200 --cudnn 9.13
  python -m jaxplugin compile my.model:mlp --target b200 --cudnn 9.13 \\
    --arg 'bfloat16[16,4096]' --arg 'nvfp4[14336,4096]' -o mlp.hlo
"""
_KERNELS_EPILOG: Final = """\
Neither a GPU nor a toolkit is needed.

example:
  python -m jaxplugin kernels --target h200 --lhs bfloat16 --rhs nvfp4 \\
    -m 16 -n 8192 -k 8192 --write kernels
"""
_FILE_HELP: Final = (
  "a module: StableHLO text, HLO text, MLIR bytecode or a StableHLO portable"
  " artifact; - reads standard input"
)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m jaxplugin",
    description="Block-scaled dot for JAX: what is chosen, where, and why.",
  )
  commands = parser.add_subparsers(dest="command", required=True)
  text = "versions, devices, and what each implementation can do here"
  commands.add_parser("info", help=text, description=f"Tells {text}.")
  _add_explain(commands)
  _add_rewrite(commands)
  _add_compile(commands)
  _add_kernels(commands)
  bench = commands.add_parser(
    "bench",
    help="how fast implementations are here, beside their peers",
    description="Verifies, times and compares implementations and their peers.",
    epilog=bench_command.EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  bench_command.add_arguments(bench)
  return parser


def _add_explain(commands: argparse._SubParsersAction) -> None:
  text = (
    "which implementation each dot of a module, or one of given formats and"
    " sizes, gets, and why"
  )
  explain = commands.add_parser(
    "explain",
    help=text,
    description=f"Tells {text}.",
    epilog=_EXPLAIN_EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  explain.add_argument("file", nargs="?", metavar="FILE", help=_FILE_HELP)
  one = explain.add_argument_group("one dot, instead of FILE")
  _add_dot(one, required=False, least=0)
  _add_target(explain)
  explain.add_argument("--json", action="store_true", help="print JSON")


def _size(least: int) -> Callable[[str], int]:
  """Reads a size of at least `least`."""

  def parse(text: str) -> int:
    try:
      size = int(text)
    except ValueError:
      raise argparse.ArgumentTypeError(
        f"must be a whole number, got {text!r}"
      ) from None
    if size < least:
      raise argparse.ArgumentTypeError(f"must be at least {least}, got {size}")
    return size

  return parse


def _add_dot(
  command: argparse._ActionsContainer, *, required: bool, least: int
) -> None:
  """The arguments that describe one dot, of sizes from `least` on."""
  names = [format.name for format in formats.FORMATS]
  plain = [dtype.name for dtype in call.PLAIN_DTYPES]
  for side in ("lhs", "rhs"):
    command.add_argument(
      f"--{side}",
      choices=names + plain,
      metavar="FORMAT",
      required=required,
      help=f"one of {', '.join(names + plain)}",
    )
  for name, meaning in (
    ("m", "rows of lhs"),
    ("n", "rows of rhs, which are columns of the result"),
    ("k", "size of the contracting dimension"),
  ):
    command.add_argument(
      f"-{name}",
      type=_size(least),
      metavar="SIZE",
      required=required,
      help=meaning,
    )
  command.add_argument(
    "--batch",
    type=_size(least),
    metavar="SIZE",
    help=f"default: {_DEFAULT_BATCH}",
  )
  command.add_argument(
    "--out",
    choices=plain,
    help=f"dtype of the result; default: {_DEFAULT_OUT}",
  )


def _add_compile(commands: argparse._SubParsersAction) -> None:
  compile_ = commands.add_parser(
    "compile",
    help="what XLA's GPU compiler makes of a module or a function",
    description="Compiles a module or a function by XLA's GPU compiler, for an"
    " NVIDIA GPU that\nneed not be here, and tells its custom calls, fusions,"
    " kernels and memory.",
    epilog=_COMPILE_EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  compile_.add_argument(
    "source",
    metavar="MODULE_OR_FUNCTION",
    help="package.module:function, or " + _FILE_HELP,
  )
  gpus = _gpu_names("cuda")
  compile_.add_argument(
    "--target",
    metavar="NAME",
    required=True,
    help=f"an NVIDIA GPU by name ({', '.join(gpus)})",
  )
  compile_.add_argument(
    "--cudnn",
    metavar="VERSION",
    help="the cuDNN version to assume, e.g. 9.13; default: there is none",
  )
  compile_.add_argument(
    "--arg",
    action="append",
    default=[],
    type=command_functions.argument,
    metavar="ARRAY",
    help="an argument of the function, one option each: bfloat16[16,4096], or a"
    " ScaledArray by its format and logical shape, nvfp4[14336,4096]",
  )
  compile_.add_argument(
    "--rewrite",
    action="store_true",
    help="lower the calls of a module for the target first, as rewrite does",
  )
  compile_.add_argument(
    "-o",
    "--output",
    metavar="OUT",
    help="where to write the optimized HLO; - is standard output, the figures"
    " then go to standard error; default: nowhere",
  )
  compile_.add_argument(
    "--elide", action="store_true", help="write no backend_config"
  )
  compile_.add_argument(
    "--force", action="store_true", help="overwrite OUT where it exists"
  )
  compile_.add_argument(
    "--json", action="store_true", help="print the figures as JSON"
  )


def _gpu_names(*platforms: str) -> list[str]:
  return [
    name
    for name in targets.TARGET_NAMES
    if targets.named_target(name).platform in platforms
  ]


def _add_kernels(commands: argparse._SubParsersAction) -> None:
  kernels = commands.add_parser(
    "kernels",
    help="what the Triton kernels of a dot become on a GPU",
    description="Compiles the Triton kernels of a dot for a GPU and tells"
    " registers, spills,\nmemory, the matrix instructions and the main loop.",
    epilog=_KERNELS_EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  _add_dot(kernels, required=True, least=1)
  gpus = _gpu_names("cuda", "rocm")
  kernels.add_argument(
    "--target",
    metavar="NAME",
    required=True,
    help=f"a GPU by name ({', '.join(gpus)})",
  )
  kernels.add_argument(
    "--write",
    metavar="DIRECTORY",
    help="where to write PTX, SASS and cubin (AMDGCN and hsaco)",
  )
  kernels.add_argument(
    "--descriptors",
    action="store_true",
    help="copy values by TMA descriptors (NVIDIA, from sm_90 on), which no"
    " default does",
  )
  kernels.add_argument("--json", action="store_true", help="print JSON")


def _add_rewrite(commands: argparse._SubParsersAction) -> None:
  rewrite = commands.add_parser(
    "rewrite",
    help="lower the block-scaled calls of a StableHLO module for a target",
    description="Lowers each __op$quantize, __op$dequantize,"
    " __op$block_scaled_dot,\n__cudnn$blockScaledDot and xla.scaled_dot of a"
    " module as the target deserves.",
    epilog=_REWRITE_EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  rewrite.add_argument("file", metavar="FILE", help=_FILE_HELP)
  _add_target(rewrite)
  rewrite.add_argument(
    "--scale-rounding",
    choices=quantization.SCALE_ROUNDINGS,
    default="up",
    help="of __op$quantize to MX formats, as in jp.quantize; default: up",
  )
  rewrite.add_argument(
    "-o", "--output", metavar="OUT", help="where to write; default: stdout"
  )
  rewrite.add_argument(
    "--format",
    choices=modules.FORMS,
    help="what to write: text, MLIR bytecode, or a StableHLO portable artifact;"
    " default: what FILE is",
  )
  rewrite.add_argument(
    "--force",
    action="store_true",
    help="overwrite OUT where it exists (never FILE)",
  )
  rewrite.add_argument(
    "--elide",
    action="store_true",
    help="for reading only: text with each long backend_config, such as a"
    " compiled Triton kernel, replaced by its length",
  )


def _add_target(command: argparse.ArgumentParser) -> None:
  command.add_argument(
    "--target",
    metavar="NAME",
    help=f"a device by name ({', '.join(targets.TARGET_NAMES)}); cpu is one"
    " without C++ kernels, which any process can run; default: the local"
    " device",
  )
  command.add_argument(
    "--cudnn",
    metavar="VERSION",
    help="the cuDNN version to assume with --target, e.g. 9.13",
  )
  command.add_argument(
    "--implementation",
    choices=decisions.IMPLEMENTATIONS,
    help="the one that all dots are to use; default: chosen for each",
  )


def _target(args: argparse.Namespace) -> targets.Target | None:
  if args.target is not None:
    return targets.named_target(args.target, cudnn=args.cudnn)
  if args.cudnn is not None:
    raise ValueError("--cudnn needs --target")
  return None


def _operand(
  name: str, batch: int, rows: int, k: int
) -> scaled_array.ScaledArray | jax.ShapeDtypeStruct:
  """An abstract operand of shape (batch, rows, k)."""
  shape = (batch, rows, k)
  if name in [dtype.name for dtype in call.PLAIN_DTYPES]:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(name))
  format = formats.by_name(name)
  if k % format.block_size:
    raise ValueError(
      f"k must be a multiple of {format.block_size} for {format}, got k={k}"
    )
  scale_shape = (batch, rows, k // format.block_size)
  global_scale = jax.ShapeDtypeStruct((), np.float32)
  return scaled_array.ScaledArray(
    jax.ShapeDtypeStruct(shape, format.values_dtype),
    jax.ShapeDtypeStruct(scale_shape, format.scale_dtype),
    global_scale if format.has_global_scale else None,
    format,
  )


def _explain(args: argparse.Namespace) -> None:
  target = _target(args)
  required = {"--lhs": args.lhs, "--rhs": args.rhs}
  required |= {f"-{name}": getattr(args, name) for name in ("m", "n", "k")}
  optional = {"--batch": args.batch, "--out": args.out}
  given = [n for n, x in (required | optional).items() if x is not None]
  missing = [name for name, x in required.items() if x is None]
  if args.file is not None and given:
    raise ValueError(
      "explain takes FILE, or a dot by its formats and sizes, not both: got"
      f" {args.file} and {', '.join(given)}"
    )
  if args.file is None and missing:
    raise ValueError(
      "explain needs FILE, or a dot by --lhs, --rhs, -m, -n and -k: missing"
      f" {', '.join(missing)}"
    )
  if args.file is not None:
    source = command_files.read(args.file)
    explanation = diagnostics.explain_module(
      source, target, args.implementation
    )
  else:
    explanation = _explain_one(args, target)
  print(explanation.to_json() if args.json else explanation)


def _explain_one(
  args: argparse.Namespace, target: targets.Target | None
) -> explanation_lib.Explanation:
  batch = _DEFAULT_BATCH if args.batch is None else args.batch

  def call_dot(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return dot.block_scaled_dot(
      lhs,
      rhs,
      preferred_element_type=jnp.dtype(args.out or _DEFAULT_OUT),
      implementation=args.implementation,
    )

  return diagnostics.explain(
    call_dot,
    _operand(args.lhs, batch, args.m, args.k),
    _operand(args.rhs, batch, args.n, args.k),
    target=target,
  )


def _compile(args: argparse.Namespace) -> None:
  target = targets.named_target(args.target, cudnn=args.cudnn)
  is_function = command_functions.is_function(args.source)
  if is_function and args.rewrite:
    raise ValueError("--rewrite is for modules, got a function")
  if not is_function and args.arg:
    raise ValueError("--arg is for functions, got a module")
  path = "" if is_function else args.source
  command_files.check_output(path, args.output, args.force)
  if is_function:
    function = command_functions.function(args.source)
    compiled = deviceless.compile(function, *args.arg, target=target)
    found = optimized.of_executable(
      args.source, target, compiled.runtime_executable()
    )
  else:
    source = command_files.read(args.source)
    if args.rewrite:
      rewriter.rewrite_source(source, target)
    found = optimized.of_module(source, target)
  if args.output is not None:
    hlo = found.hlo(elide=args.elide)
    command_files.write(hlo, path, args.output, args.force)
  report = found.to_json() if args.json else str(found)
  is_stdout = args.output == command_files.STANDARD
  print(report, file=sys.stderr if is_stdout else sys.stdout)


def _kernels(args: argparse.Namespace) -> None:
  # Whether jax-triton could lower for it does not matter here.
  target = targets.with_triton(targets.named_target(args.target))
  if args.descriptors:
    target = triton_library.with_descriptors(target)
  args.implementation = "triton"
  explanation = _explain_one(args, target)
  compiled = compilation.compile_dot(explanation[0].problem, target)
  print(compiled.to_json() if args.json else compiled)
  if args.write is not None:
    for path in compiled.write(args.write):
      print(path, file=sys.stderr)


def _rewrite(args: argparse.Namespace) -> None:
  target = _target(args) or targets.current_target()
  # Before any work, and again when it is written.
  command_files.check_output(args.file, args.output, args.force)
  source = command_files.read(args.file)
  done = rewriter.rewrite_source(
    source,
    target,
    implementation=args.implementation,
    scale_rounding=args.scale_rounding,
  )
  is_changed = any(item.function for item in done)
  assert source.form is not None  # what is read from a file has one
  form = args.format or (modules.TEXT if args.elide else source.form)
  if args.elide:
    if form != modules.TEXT:
      raise ValueError(f"--elide is for text, got --format {form}")
    source.elide()
    is_changed = True
  if is_changed or form != source.form:
    result = source.serialize(form)
  else:
    result = source.given
  command_files.write(result, args.file, args.output, args.force)
  for item in done:
    print(item, file=sys.stderr)
  changed = sum(bool(item.function) for item in done)
  print(
    f"{source.name}: {changed} of {len(done)} calls rewritten for {target}"
    if done
    else f"{source.name}: no block-scaled call, unchanged",
    file=sys.stderr,
  )


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command; returns the exit status (2 for bad arguments)."""
  args = _parser().parse_args(argv)
  if args.command not in ("info", "bench") or not _has_nvidia_gpu():
    # Without it JAX logs a traceback where its CUDA plugin, but not cuDNN, is
    # installed. Commands but these decide for devices that need not be there.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
  status = 0
  try:
    if args.command == "info":
      print(diagnostics.info())
    elif args.command == "explain":
      _explain(args)
    elif args.command == "rewrite":
      _rewrite(args)
    elif args.command == "compile":
      _compile(args)
    elif args.command == "kernels":
      _kernels(args)
    else:
      status = bench_command.run(args)
    sys.stdout.flush()
  except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  except (ValueError, TypeError, RuntimeError, OSError) as error:
    print(f"error: {_message(error)}", file=sys.stderr)
    return _BAD_ARGUMENTS
  return status


def _has_nvidia_gpu() -> bool:
  """Whether the system has one, as far as Linux (and WSL) tells."""
  return any(glob.glob(path) for path in ("/dev/nvidia[0-9]*", "/dev/dxg"))


def _message(error: Exception) -> str:
  if isinstance(error, OSError) and error.filename is not None:
    return f"{error.filename}: {error.strerror}"
  return str(error)

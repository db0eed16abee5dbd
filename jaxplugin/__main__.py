# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m jaxplugin info | explain`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin import call
from jaxplugin import diagnostics
from jaxplugin import dot
from jaxplugin import formats
from jaxplugin import problem as problem_lib
from jaxplugin import scaled_array
from jaxplugin import target as target_lib


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m jaxplugin",
    description="Block-scaled dot for JAX: what is chosen, where, and why.",
  )
  commands = parser.add_subparsers(dest="command", required=True)
  commands.add_parser(
    "info", help="versions, devices, and what each implementation can do here"
  )
  explain = commands.add_parser(
    "explain",
    help="which implementation a dot of given formats and sizes gets, and why",
  )
  names = [format.name for format in formats.FORMATS]
  plain = [dtype.name for dtype in call.PLAIN_DTYPES]
  for side in ("lhs", "rhs"):
    explain.add_argument(
      f"--{side}",
      required=True,
      choices=names + plain,
      metavar="FORMAT",
      help=f"one of {', '.join(names + plain)}",
    )
  for name in ("m", "n", "k"):
    explain.add_argument(f"-{name}", type=int, required=True)
  explain.add_argument("--batch", type=int, default=1)
  explain.add_argument(
    "--out", choices=plain, default="bfloat16", help="dtype of the result"
  )
  explain.add_argument(
    "--target",
    help=f"a device by name ({', '.join(target_lib.TARGET_NAMES)}); default:"
    " the local one",
  )
  explain.add_argument(
    "--cudnn", help="the cuDNN version to assume with --target, e.g. 9.13"
  )
  explain.add_argument("--implementation", choices=problem_lib.IMPLEMENTATIONS)
  explain.add_argument("--json", action="store_true", help="print JSON")
  return parser


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


def _explain(args: argparse.Namespace) -> str:
  target = None
  if args.target is not None:
    target = target_lib.named_target(args.target, cudnn=args.cudnn)
  elif args.cudnn is not None:
    raise ValueError("--cudnn needs --target")

  def call_dot(lhs, rhs):
    return dot.block_scaled_dot(
      lhs,
      rhs,
      preferred_element_type=jnp.dtype(args.out),
      implementation=args.implementation,
    )

  explanation = diagnostics.explain(
    call_dot,
    _operand(args.lhs, args.batch, args.m, args.k),
    _operand(args.rhs, args.batch, args.n, args.k),
    target=target,
  )
  return explanation.to_json() if args.json else str(explanation)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command; returns the exit status (2 for bad arguments)."""
  args = _parser().parse_args(argv)
  try:
    print(diagnostics.info() if args.command == "info" else _explain(args))
  except (ValueError, TypeError, NotImplementedError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())

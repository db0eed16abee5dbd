# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""One dot, described on the command line by its formats and sizes."""

from __future__ import annotations

import argparse
from typing import Final

import jax
import jax.numpy as jnp

from jaxplugin import dot, quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.cli import arguments
from jaxplugin.core import formats, targets
from jaxplugin.explanation import diagnostics, report

_DEFAULT_BATCH: Final = 1
_DEFAULT_OUT: Final = "bfloat16"
_PRECISIONS: Final = ("highest", "fastest")


def add_arguments(
  command: argparse._ActionsContainer, *, required: bool
) -> None:
  """Adds the arguments that describe one dot."""
  names = [format.name for format in formats.NAMED]
  plain = [dtype.name for dtype in formats.FLOAT_DTYPES]
  for side, help in (
    ("lhs", f"f32, bf16, f16, or a format: {', '.join(names)}"),
    ("rhs", "like --lhs"),
  ):
    command.add_argument(
      f"--{side}",
      type=arguments.long_dtypes,
      choices=names + plain,
      metavar="FORMAT",
      required=required,
      help=help,
    )
  for name, meaning in (
    ("m", "rows of lhs"),
    ("n", "rows of rhs, and columns of the result"),
    ("k", "size of the contracting dimension"),
  ):
    command.add_argument(
      f"-{name}",
      type=arguments.size(1),
      metavar="SIZE",
      required=required,
      help=meaning,
    )
  text = f"default: {_DEFAULT_BATCH}"
  arguments.add_values(command, {"--batch SIZE": text}, type=arguments.size(1))
  command.add_argument(
    "--out",
    type=arguments.long_dtypes,
    choices=plain,
    help=f"dtype of the result; default: {_DEFAULT_OUT}",
  )
  command.add_argument(
    "--precision",
    choices=_PRECISIONS,
    help="precision= of jp.block_scaled_dot: highest keeps global scales in"
    " f32, fastest leaves the numerical contract; default: neither",
  )


def explain(
  args: argparse.Namespace,
  target: targets.Target | None,
  implementation: str | None,
) -> report.Explanation:
  """Returns the decision for the dot of `add_arguments`' arguments.

  Raises:
    ValueError: If k is not a multiple of a block, or `implementation` does not
      support the dot.
    TypeError: If neither side is quantized.
  """
  batch = _DEFAULT_BATCH if args.batch is None else args.batch

  def call_dot(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return dot.block_scaled_dot(
      lhs,
      rhs,
      preferred_element_type=jnp.dtype(args.out or _DEFAULT_OUT),
      precision=args.precision,
      implementation=implementation,
    )

  return diagnostics.explain(
    call_dot,
    _operand(args.lhs, batch, args.m, args.k),
    _operand(args.rhs, batch, args.n, args.k),
    target=target,
  )


def _operand(
  name: str, batch: int, rows: int, k: int
) -> scaled_array.ScaledArray | jax.ShapeDtypeStruct:
  """Returns an abstract operand of shape (batch, rows, k)."""
  shape = (batch, rows, k)
  if name in [dtype.name for dtype in formats.FLOAT_DTYPES]:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(name))
  format = formats.by_name(name)
  if not format.fits(k):
    raise ValueError(
      f"k must be a multiple of {format.block_size} for {format}, got k={k};"
      " choose another -k or format"
    )
  return jax.eval_shape(
    lambda x: quantization.quantize(x, format).unpack(),
    jax.ShapeDtypeStruct(shape, jnp.float32),
  )

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions and their arguments, as the command line names them."""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import inspect
import pathlib
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from jaxplugin import quantization
from jaxplugin.core import formats

_FUNCTION: Final = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)")
_ARGUMENT: Final = re.compile(r"([a-z]\w*)\[(\d+(?:,\d+)*)?\]")
# As HLO writes them.
_SHORT: Final = {
  "pred": "bool",
  "bf16": "bfloat16",
  **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
  **{f"s{bits}": f"int{bits}" for bits in (2, 4, 8, 16, 32, 64)},
  **{f"u{bits}": f"uint{bits}" for bits in (2, 4, 8, 16, 32, 64)},
}
# Folders of installed packages, and of this one.
_LIBRARIES: Final = (
  str(pathlib.Path(jax.__file__).parents[1]),
  str(pathlib.Path(__file__).parents[1]),
)
# HLO's "f8e4m3fn" is "float8_e4m3fn".
_SHORT_FLOAT: Final = re.compile(r"^f(\d)(e\dm\d\w*)$")


def is_function(text: str) -> bool:
  """Returns whether this is written as package.module:function."""
  return _FUNCTION.fullmatch(text) is not None


def function(text: str) -> Callable[..., Any]:
  """Imports the function that "package.module:function" names.

  Python looks for the module in the current directory first. An error of the
  function becomes a ValueError that names the line.

  Raises:
    ValueError: If it does not exist, or its module cannot be imported.
  """
  match = _FUNCTION.fullmatch(text)
  assert match is not None
  if "" not in sys.path:
    sys.path.insert(0, "")
  try:
    found: Any = importlib.import_module(match[1])
  except ModuleNotFoundError as error:
    if error.name is None or not f"{match[1]}.".startswith(f"{error.name}."):
      raise _error(text, error) from error  # the module imports that one
    raise ValueError(
      f"{text}: no module named {error.name}; run in the folder that has it, or"
      " set PYTHONPATH"
    ) from None
  except (Exception, SystemExit) as error:
    raise _error(text, error) from error
  where = match[1]
  for name in match[2].split("."):
    if not hasattr(found, name):
      near = difflib.get_close_matches(name, dir(found))
      hint = f"; it has {', '.join(near)}" if near else ""
      raise ValueError(f"{text}: {where} has no {name}{hint}")
    found, where = getattr(found, name), f"{where}.{name}"
  if not callable(found):
    raise ValueError(
      f"{text} must be a function, got {type(found).__name__}; define a"
      " function that calls it"
    )

  @functools.wraps(found)
  def call(*args: Any) -> Any:
    _check_arguments(text, found, args)
    try:
      return found(*args)
    except Exception as error:
      raise _error(text, error) from error

  return call


def _check_arguments(
  text: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):  # a function of a C++ extension
    return
  try:
    signature.bind(*args)
  except TypeError:
    parameters = signature.parameters.values()
    bare = inspect.Signature(
      [x.replace(annotation=x.empty) for x in parameters]
    )
    raise ValueError(
      f"{text} has the arguments {bare}, got {len(args)}; pass one --arg for"
      " each"
    ) from None


def _error(text: str, error: BaseException) -> ValueError:
  """Returns an error with the type, the words and the line of `error`."""
  if isinstance(error, SyntaxError):
    files = [f"{error.filename}:{error.lineno}"]
    words = error.msg
  else:
    files = [
      f"{frame.filename}:{frame.lineno}"
      for frame in traceback.extract_tb(error.__traceback__)
      if not frame.filename.startswith((*_LIBRARIES, "<"))
    ]
    words = " ".join(str(error).split())  # one line
  where = f" ({files[-1]})" if files else ""
  return ValueError(f"{text}: {type(error).__name__}: {words}{where}")


def add_arguments(command: argparse._ActionsContainer) -> None:
  """Adds --arg, the arguments of a function."""
  command.add_argument(
    "--arg",
    metavar="ARRAY",
    action="append",
    default=[],
    type=argument,
    help="an argument of the function, one option each: bfloat16[16,4096], or a"
    " ScaledArray by its format and logical shape, nvfp4[14336,4096]",
  )


def argument(text: str) -> Any:
  """Returns an abstract array, or a `ScaledArray` for "nvfp4[8,64]".

  A format's shape is the logical one; it is quantized along its last axis.
  """
  match = _ARGUMENT.fullmatch(text)
  name = match[1] if match is not None else ""
  names = [format.name for format in formats.NAMED]
  try:
    if match is None:
      raise TypeError
    shape = tuple(map(int, match[2].split(","))) if match[2] else ()
    if name not in names:
      long = _SHORT_FLOAT.sub(r"float\1_\2", _SHORT.get(name, name))
      dtype = jnp.dtype(long)
      # NumPy has other names and dtypes: its "f4" is f32.
      if dtype.name != long or not hasattr(jnp, long):
        raise TypeError
      known = jax.dtypes.canonicalize_dtype(dtype)
      if known != dtype:
        raise argparse.ArgumentTypeError(
          f"{text!r} must have a dtype that JAX enables, got {dtype} without"
          f" JAX_ENABLE_X64. Set JAX_ENABLE_X64=1, or pass {known}"
        )
      return jax.ShapeDtypeStruct(shape, dtype)
  except TypeError:
    raise argparse.ArgumentTypeError(
      f"{text!r} must be an array; write it as bfloat16[16,4096], or with a"
      f" format ({', '.join(names)}) as nvfp4[14336,4096]"
    ) from None
  try:
    return jax.eval_shape(
      lambda x: quantization.quantize(x, formats.by_name(name)),
      jax.ShapeDtypeStruct(shape, jnp.float32),
    )
  except (TypeError, ValueError) as error:
    raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

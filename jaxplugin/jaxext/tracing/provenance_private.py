# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the source line, scope and package of an operation.

The module uses JAX's private modules, like `jax_private`.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
from typing import Any
from typing import Final
from typing import NamedTuple

import jax
from jax._src import source_info_util

# Layers of these libraries call matmuls. The model's line is reported instead.
_LIBRARIES: Final = ("flax", "haiku", "equinox", "optax")


class Name(NamedTuple):
  """One entry of JAX's name stack.

  Attributes:
    text: name of a `jax.named_scope` or of a transformation, "transpose".
    is_transform: whether it is a transformation.
  """

  text: str
  is_transform: bool


def scopes(source_info: Any = None) -> tuple[Name, ...]:
  """Returns the name stack of an equation in its jaxpr, outermost first.

  Args:
    source_info: source info of an equation; None for the operation that is
      being traced.
  """
  if source_info is None:
    stack = source_info_util.current_name_stack().stack
  else:
    stack = source_info.name_stack.stack
  return tuple(
    Name(entry.name, isinstance(entry, source_info_util.Transform))
    for entry in stack
  )


def user_frame(source_info: Any = None) -> str:
  """Returns file, line and function that called an operation; "" if unknown.

  This is the innermost frame outside of JAX, this package and libraries of
  layers. If no frame is outside of these libraries, it is the innermost frame
  in them.

  Args:
    source_info: source info of an equation; None for the operation that is
      being traced.
  """
  traceback = (source_info or source_info_util.current()).traceback
  frames = [
    frame
    for frame in (traceback.frames if traceback is not None else ())
    if frame.file_name not in _own_files()
    and not frame.file_name.startswith(_jax_directory())
  ]
  libraries = _library_directories()
  for frame in frames:
    if not frame.file_name.startswith(libraries):
      return _describe(frame)
  return _describe(frames[0]) if frames else ""


def _describe(frame: Any) -> str:
  return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"


@functools.cache
def _jax_directory() -> str:
  return f"{pathlib.Path(jax.__file__).parent}{os.sep}"


def _library_directories() -> tuple[str, ...]:
  """Returns the directories of imported libraries."""
  found = (
    getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES
  )
  return tuple(f"{pathlib.Path(file).parent}{os.sep}" for file in found if file)


@functools.cache
def _own_files() -> frozenset[str]:
  directory = pathlib.Path(__file__).parents[2]
  return frozenset(
    str(path)
    for path in directory.rglob("*.py")
    if not path.name.endswith("_test.py")
  )


def is_own(jaxpr: Any) -> bool:
  """Returns whether a closed jaxpr is of a function of this package."""
  filename = jaxpr.jaxpr.debug_info.func_filename
  return filename is not None and filename in _own_files()


def is_of_jax(jaxpr: Any) -> bool:
  """Returns whether a closed jaxpr is of a JAX function like `jnp.matmul`."""
  filename = jaxpr.jaxpr.debug_info.func_filename
  return filename is not None and filename.startswith(_jax_directory())


def is_own_function(fun: Any) -> bool:
  """Returns whether JAX runs a function of this package in an operation."""
  debug_info = getattr(fun, "debug_info", None)
  filename = getattr(debug_info, "func_filename", None)
  return filename is not None and filename in _own_files()


def name_scope() -> str:
  """Returns the enclosing scopes of the current trace, as "outer/inner"."""
  return str(source_info_util.current().name_stack)

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which constants the kernels pass to their functions.

Triton 3.6 accepts only numbers there. For other constants, such as a tuple or
a string, the argument must be a variable annotated `tl.constexpr`. It also
fails to index a constant for a tuple.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

from absl.testing import absltest

FOLDER = pathlib.Path(__file__).parent
NUMBERS = {"int", "bool", "float", "int | None"}


def trees(*, are_kernels: bool) -> list[ast.Module]:
  """Returns the modules with, or without, functions of Triton."""
  texts = [
    path.read_text()
    for path in sorted([*FOLDER.parent.glob("*.py"), *FOLDER.rglob("*.py")])
    if not path.name.endswith("_test.py") and "cutile" not in path.parts
  ]
  return [ast.parse(t) for t in texts if ("@triton.jit" in t) == are_kernels]


def arguments() -> Iterator[tuple[ast.FunctionDef, ast.Call, ast.expr]]:
  """Yields arguments of calls from functions of Triton to such functions."""
  functions = [
    node
    for tree in trees(are_kernels=True)
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef)
    and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
  ]
  names = {function.name for function in functions}
  for function in functions:
    for call in ast.walk(function):
      if (
        isinstance(call, ast.Call)
        and ast.unparse(call.func).rpartition(".")[2] in names
      ):
        for argument in [*call.args, *(k.value for k in call.keywords)]:
          yield function, call, argument


def types_of_attributes() -> dict[str, set[str]]:
  """Returns the annotations of each field and property, by its name."""
  found: dict[str, set[str]] = {}
  for tree in trees(are_kernels=False):
    for cls in ast.walk(tree):
      if not isinstance(cls, ast.ClassDef):
        continue
      for node in cls.body:
        if isinstance(node, ast.AnnAssign):
          found.setdefault(ast.unparse(node.target), set()).add(
            ast.unparse(node.annotation)
          )
        elif isinstance(node, ast.FunctionDef) and node.returns:
          found.setdefault(node.name, set()).add(ast.unparse(node.returns))
  return found


class JitArgumentsTest(absltest.TestCase):
  def test_attributes_that_are_passed_are_numbers(self):
    types = types_of_attributes()
    checked = 0
    for _, call, argument in arguments():
      if isinstance(argument, ast.Attribute):
        checked += 1
        with self.subTest(ast.unparse(call)):
          found = types.get(argument.attr, {"unknown"})
          self.assertLessEqual(found, NUMBERS, argument.attr)
    self.assertGreater(checked, 10)

  def test_items_that_are_named_are_sizes(self):
    # Items of other constants may be tuples.
    checked = 0
    for tree in trees(are_kernels=True):
      for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(
          node.value, ast.Subscript
        ):
          checked += 1
          base = ast.unparse(node.value.value)
          with self.subTest(ast.unparse(node)):
            self.assertRegex(base.lower(), r"(strides|\.shape)$")
    self.assertGreater(checked, 10)

  def test_items_that_are_passed_are_strides(self):
    # Items of other constants may be tuples.
    for function, call, argument in arguments():
      if isinstance(argument, ast.Subscript):
        base = ast.unparse(argument.value)
        constants = {x.arg for x in function.args.args if x.annotation}
        if base.partition(".")[0] in constants:
          with self.subTest(ast.unparse(call)):
            self.assertEndsWith(base.lower(), "strides")

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every source file of the project is in a target of some BUILD.bazel.

The test reads BUILD files without Bazel. They are Python expressions. A rule or
macro uses the files that its arguments name.
"""

from __future__ import annotations

import ast
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any, Final

import pytest
from absl.testing import absltest

pytestmark = pytest.mark.smoke

# Resolved to the checkout's path, because under Bazel this file is a link.
ROOT: Final = pathlib.Path(__file__).resolve().parents[1]
FOLDERS: Final = ("examples", "hlo_tests", "jaxplugin", "kernels", "tools")
SUFFIXES: Final = (
  *(".bzl", ".cc", ".h", ".hlo", ".inl", ".ipynb", ".json", ".mlir", ".py"),
  *(".sh", ".typed"),
)
BUILD: Final = "BUILD.bazel"
# Macros whose source is the rule's name with this suffix.
NAMED_SOURCES: Final = {"isa_library": ".cc", "python_test": ".py"}
TEST_RULES: Final = ("cc_test", "python_test")


class Package:
  """The files that the rules of one BUILD file name."""

  def __init__(self, build: pathlib.Path, root: pathlib.Path):
    self._folder = build.parent
    self._root = root
    self._names: dict[str, Any] = {}
    self.files: set[pathlib.Path] = set()
    self.tests: set[pathlib.Path] = set()
    for statement in ast.parse(build.read_text(), str(build)).body:
      if isinstance(statement, ast.Assign):
        (target,) = statement.targets
        self._names[target.id] = self._value(statement.value)
      else:
        self._value(statement.value)

  def _value(self, node: ast.expr) -> Any:
    match node:
      case ast.Constant():
        return node.value
      case ast.List() | ast.Tuple():
        return [self._value(item) for item in node.elts]
      case ast.Dict():
        return [self._value(value) for value in node.values]
      case ast.Name():
        return self._names.get(node.id, [])  # else loaded, without our files
      case ast.BinOp(op=ast.Add()):
        return self._value(node.left) + self._value(node.right)
      case ast.ListComp(generators=[generator]):
        values = []
        for item in self._value(generator.iter):
          self._names[generator.target.id] = item
          values.append(self._value(node.elt))
        return values
      case ast.Call():
        return self._call(node)
    raise SyntaxError(f"{self._folder}/{BUILD}: {ast.unparse(node)}")

  def _call(self, node: ast.Call) -> list[str]:
    name = ast.unparse(node.func)
    given = [self._value(argument) for argument in node.args]
    named = {word.arg: self._value(word.value) for word in node.keywords}
    if name == "glob":
      found = self._glob(*given[:1])
      return sorted(found - self._glob(named.get("exclude", [])))
    if name in ("load", "package"):
      return []
    for label in _strings([given, named]):
      self._add(label)
    if name in NAMED_SOURCES:
      self._add(named["name"] + NAMED_SOURCES[name])
    if name in TEST_RULES:
      suffix = NAMED_SOURCES.get(name, ".cc")
      self.tests.add(self._folder / (named["name"] + suffix))
    return list(_strings(given))  # for select(), all its values

  def _glob(self, patterns: list[str]) -> set[str]:
    paths = {path for text in patterns for path in self._folder.glob(text)}
    return {
      path.relative_to(self._folder).as_posix()
      for path in paths
      if self._owns(path)
    }

  def _owns(self, path: pathlib.Path) -> bool:
    """Returns whether no other package lies between the file and this one."""
    while (path := path.parent) != self._folder:
      if (path / BUILD).exists():
        return False
    return True

  def _add(self, label: str) -> None:
    package, colon, name = label.rpartition(":")
    folder = self._root / package[2:] if colon and package else self._folder
    path = folder / name
    if not label.startswith("@") and path.is_file():
      self.files.add(path)


def _strings(value: Any) -> Iterator[str]:
  if isinstance(value, str):
    yield value
  elif isinstance(value, list | dict):
    for item in value.values() if isinstance(value, dict) else value:
      yield from _strings(item)


def packages(root: pathlib.Path) -> list[Package]:
  builds = [root / BUILD]
  for folder in FOLDERS:
    builds += sorted((root / folder).rglob(BUILD))
  return [Package(build, root) for build in builds if build.exists()]


def sources(root: pathlib.Path) -> list[pathlib.Path]:
  return [
    path
    for folder in FOLDERS
    for path in sorted((root / folder).rglob("*"))
    if path.suffix in SUFFIXES
    and path.is_file()
    and not any(
      part.startswith((".", "__pycache__"))
      for part in path.relative_to(root).parts
    )
  ]


def untargeted(root: pathlib.Path) -> list[str]:
  """Returns source files in no target, and tests that no target runs."""
  found = packages(root)
  files = {path for package in found for path in package.files}
  tests = {path for package in found for path in package.tests}
  missing = []
  for path in sources(root):
    name = path.relative_to(root).as_posix()
    is_test = path.name.endswith(("_test.cc", "_test.py"))
    if path not in files:
      missing.append(f"{name} is in no target")
    elif is_test and path not in tests:
      missing.append(f"{name} is run by no target")
  return missing


class BazelTargetsTest(absltest.TestCase):
  def test_every_source_file_is_in_a_target(self):
    self.assertEqual(untargeted(ROOT), [])

  def test_the_walk_saw_every_kind_of_source(self):
    found = {path.suffix for path in sources(ROOT)}
    self.assertContainsSubset({".py", ".cc", ".inl", ".mlir", ".sh"}, found)
    self.assertGreater(len(packages(ROOT)), len(FOLDERS))


class PlantedFileTest(absltest.TestCase):
  """The test finds a planted file."""

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

  def write(self, **texts: str):
    """Writes files; `kernels__cpu__a_py="..."` is kernels/cpu/a.py."""
    for name, text in texts.items():
      stem, _, suffix = name.replace("__", "/").rpartition("_")
      path = self.root / f"{stem}.{suffix}"
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text)

  def test_each_way_of_naming_a_file_counts(self):
    self.write(
      kernels__BUILD_bazel=(
        'load("//tools:a.bzl", "staged")\n'
        'NAMES = ["b.py"]\n'
        'py_library(name = "a", srcs = ["a.py"] + NAMES)\n'
        'staged(name = "s", srcs = select({"//x": ["c.cc"], "y": []}))\n'
        'py_library(name = "g", srcs = glob(["g*.py"], exclude = ["gx.py"]))\n'
        '[isa_library(name = "dot_" + isa) for isa in ["avx2", "neon"]]\n'
        'python_test(name = "a_test", data = ["//tools/sub:data.json"])\n'
        'cc_test(name = "c_test", srcs = ["c_test.cc"])\n'
      ),
      **{f"kernels__{name}_py": "" for name in ("a", "b", "g1", "a_test")},
      **{f"kernels__{n}_cc": "" for n in ("c", "dot_avx2", "dot_neon")},
      kernels__c_test_cc="",
      tools__sub__BUILD_bazel="",
      tools__sub__data_json="",
    )
    self.assertEqual(untargeted(self.root), [])
    self.write(kernels__gx_py="", kernels__dot_sse_cc="", tools__data_json="")
    self.assertEqual(
      untargeted(self.root),
      [
        "kernels/dot_sse.cc is in no target",
        "kernels/gx.py is in no target",
        "tools/data.json is in no target",
      ],
    )

  def test_a_glob_ends_where_another_package_starts(self):
    self.write(
      kernels__BUILD_bazel='filegroup(name = "a", srcs = glob(["**/*.h"]))',
      kernels__a__a_h="",
      kernels__b__b_h="",
      kernels__b__BUILD_bazel="",
    )
    self.assertEqual(untargeted(self.root), ["kernels/b/b.h is in no target"])

  def test_a_test_that_is_only_a_source_is_run_by_none(self):
    self.write(
      kernels__BUILD_bazel='py_library(name = "a", srcs = glob(["*"]))',
      kernels__a_test_py="",
      kernels__a_test_json="",
    )
    self.assertEqual(
      untargeted(self.root), ["kernels/a_test.py is run by no target"]
    )

  def test_what_it_does_not_understand_is_an_error(self):
    self.write(kernels__BUILD_bazel="py_library(name = f(1) if 1 else 2)")
    with self.assertRaisesRegex(SyntaxError, r"kernels/BUILD.bazel: f\(1\) if"):
      untargeted(self.root)

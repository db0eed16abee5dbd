# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Packages import only packages below them.

import-linter and grimp would read the imports, but find a package by its import
spec, and that of an editable install lists other folders as well.
"""

import ast
import functools
import pathlib

import pytest
from absl.testing import absltest

from jaxplugin.testing import folders

pytestmark = pytest.mark.smoke

# A package may import those before it. The library is all up to `__init__`, the
# public names.
PACKAGES = (
  *(
    "kernels",
    "jaxext",
    "printing",
    "core",
    "arrays",
    "runtime",
    "tables",
    "plugins",
  ),
  *(
    "operation",
    "quantization",
    "checkpoints",
    "dot",
    "ragged",
    "training",
    "backends",
  ),
  *(
    "dropin",
    "rewriting",
    "params",
    "nn",
    "stablehlo",
    "explanation",
    "exports",
    "repro",
    "cli",
  ),
  *("__init__", "cutile", "lab", "__main__", "testing"),
)
# Backends of one operation do not import each other.
BACKENDS = tuple(
  f"{operation}.backends.{name}"
  for operation in ("quantization", "dot", "ragged")
  for name in ("cpu", "cudnn", "triton", "xla")
)
FORBIDDEN_IN_KERNELS = ("jax", "jaxlib", "jax_triton", "jaxplugin")

PACKAGE = pathlib.Path(__file__).resolve().parent
# A wheel has the kernels inside the package; a checkout has them next to it.
KERNELS = tuple(
  path
  for path in (PACKAGE / "kernels", PACKAGE.parent / "kernels")
  if path.is_dir()
)


def source_files(root):
  for path in sorted(root.rglob("*.py")):
    if not path.name.endswith("_test.py"):
      yield path


@functools.cache
def imported_names(path, package):
  """Returns the dotted names that a file imports, anywhere in it.

  `from a import b` gives "a.b", and "a" if b is not a module. A relative import
  starts from `package`.
  """
  names = set()
  for node in ast.walk(ast.parse(path.read_text(), str(path))):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      parents = package.split(".")
      parents = parents[: len(parents) - node.level + 1] if node.level else []
      base = ".".join([*parents, *([node.module] if node.module else [])])
      names |= {f"{base}.{alias.name}" for alias in node.names}
  return names


def module_name(path, root):
  """Returns "core.formats", or "dot" for dot/__init__.py."""
  parts = path.relative_to(root).with_suffix("").parts
  if len(parts) > 1 and parts[-1] == "__init__":
    parts = parts[:-1]
  return ".".join(parts)


def module_of(name, modules):
  """Returns the module that a dotted name is or lies in, None for others'."""
  parts = name.split(".")
  if parts[0] != "jaxplugin":
    return None
  if parts[1:2] == ["kernels"]:
    return "kernels"
  for length in range(len(parts), 1, -1):
    if ".".join(parts[1:length]) in modules:
      return ".".join(parts[1:length])
  return "__init__"


def imports_of(root):
  """Returns the modules that each module of the package imports."""
  files = {module_name(path, root): path for path in source_files(root)}
  found = {}
  for module, path in files.items():
    if not module.startswith("kernels"):
      package = ".".join(["jaxplugin", *path.relative_to(root).parts[:-1]])
      names = imported_names(path, package)
      found[module] = {module_of(n, files) for n in names} - {None, module}
  return found


def is_allowed(module, other):
  package, imported = module.partition(".")[0], other.partition(".")[0]
  if package == "cutile":  # like a backend of another package
    return imported in ("__init__", "backends", "kernels")
  if {module, other} <= {*BACKENDS} and package == imported:
    return False
  if package == imported:
    return other != package or "." not in module
  return PACKAGES.index(imported) < PACKAGES.index(package)


def is_in_circle(module, imports):
  seen, left = set(), list(imports[module])
  while left:
    other = left.pop()
    if other not in seen:
      seen.add(other)
      left += imports.get(other, ())
  return module in seen


def violations(root):
  """Returns a sentence for each module or import that the rules forbid."""
  imports = imports_of(root)
  found = []
  for module, others in sorted(imports.items()):
    if module.partition(".")[0] not in PACKAGES:
      found.append(f"{module} is not in PACKAGES")
      continue
    found += [
      f"{module} imports {other}"
      for other in sorted(others)
      if other.partition(".")[0] in PACKAGES and not is_allowed(module, other)
    ]
    if is_in_circle(module, imports):
      found.append(f"{module} imports itself")
  return found


def kernel_violations(root):
  """Returns a sentence for each import in `root` that kernels may not have."""
  found = []
  for path in source_files(root):
    if path.stem.endswith("testing"):
      continue  # supports tests
    folder = path.relative_to(root).parts[:-1]
    package = ".".join(["jaxplugin", "kernels", *folder])
    for name in sorted(imported_names(path, package)):
      first, *rest = name.removeprefix("jaxplugin.kernels.").split(".")
      is_kernel = name.startswith("jaxplugin.kernels.")
      for_tests = "testing" in {first, *rest}
      if (first in FORBIDDEN_IN_KERNELS and not is_kernel) or for_tests:
        found.append(f"{path.relative_to(root)} imports {name}")
  return found


class LayeringTest(absltest.TestCase):
  def test_package_imports_point_only_to_earlier_entries(self):
    self.assertEqual(violations(PACKAGE), [])

  def test_walker_saw_the_package(self):
    imports = imports_of(PACKAGE)
    packages = {module.partition(".")[0] for module in imports}
    self.assertEqual({*PACKAGES} - packages, {"kernels"})
    self.assertIn("core.formats", imports["quantization.api"])
    self.assertIn("dot.backends.xla", imports["dot.backends"])

  def test_kernels_import_neither_jax_nor_jaxplugin(self):
    files = [path for root in KERNELS for path in source_files(root)]
    self.assertNotEmpty(files)
    found = [text for root in KERNELS for text in kernel_violations(root)]
    self.assertEqual(found, [])


class PlantedViolationTest(absltest.TestCase):
  """The walker itself can fail."""

  def plant(self, files):
    root = folders.new(self)
    for name, text in files.items():
      path = root / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text)
    return root

  def test_allowed_imports_pass(self):
    root = self.plant(
      {
        "core/formats.py": "import math\n",
        "dot/reference.py": "import jax\nfrom jaxplugin.core import formats\n",
        "dot/backends/xla.py": "from jaxplugin.dot import reference\n",
        "dot/backends/__init__.py": "from jaxplugin.dot.backends import xla\n",
        "lab/bench.py": "import jaxplugin as jp\nfrom jaxplugin.cli import a\n",
        "cli/a.py": "from jaxplugin.kernels.gpu import configs\n",
        "__main__.py": "from jaxplugin.lab import bench\n",
        "core/formats_test.py": "from jaxplugin.dot import api\n",
      }
    )
    self.assertEqual(violations(root), [])

  def test_each_form_of_import_is_found(self):
    for text in (
      "from jaxplugin.dot import api",
      "from jaxplugin.dot.api import block_scaled_dot",
      "import jaxplugin.dot.api",
      "from ..dot import api",
      "from ..dot.api import block_scaled_dot",
      "def f():\n  from jaxplugin.dot import api",
      "if 1:\n  try:\n    import jaxplugin.dot.api as d\n  except E:\n    pass",
    ):
      root = self.plant({"core/formats.py": text, "dot/api.py": ""})
      self.assertEqual(violations(root), ["core.formats imports dot.api"], text)

  def test_forbidden_imports_are_found(self):
    others = {"lab/bench.py": "", "testing/contract.py": "", "core/b.py": ""}
    others |= {"dot/backends/xla.py": "", "nn.py": ""}
    for name, text, expected in (
      ("nn.py", "import jaxplugin as jp", "nn imports __init__"),
      ("nn.py", "from jaxplugin import dot_p", "nn imports __init__"),
      (
        "cli/a.py",
        "from jaxplugin.lab import bench",
        "cli.a imports lab.bench",
      ),
      (
        "__init__.py",
        "from jaxplugin.lab import bench",
        "__init__ imports lab.bench",
      ),
      (
        "cli/a.py",
        "from jaxplugin.testing import contract",
        "cli.a imports testing.contract",
      ),
      (
        "dot/backends/cpu.py",
        "from . import xla",
        "dot.backends.cpu imports dot.backends.xla",
      ),
      ("cutile.py", "from jaxplugin.core import b", "cutile imports core.b"),
      ("core/b.py", "from . import b, c\n", "core.b imports itself"),
      ("helpers.py", "import math", "helpers is not in PACKAGES"),
    ):
      circle = {"core/c.py": "from jaxplugin.core import b\n"}
      root = self.plant({**others, **circle, name: text})
      self.assertIn(expected, violations(root))

  def test_jax_in_a_kernel_is_found_but_not_in_its_test(self):
    root = self.plant(
      {
        "matmul.py": "import triton\nimport jax.numpy as jnp\n",
        "configs.py": "def f():\n  from jaxplugin.core import formats\n",
        "quantize.py": "from . import configs\nimport jaxtyping\n",
        "tiles.py": "from jaxplugin.kernels import configs, testing\n",
        "gpu/a.py": "from jaxplugin.testing.interpreter import interpret\n",
        "matmul_test.py": "import jax\n",
        "quantize_testing.py": "import jax\n",
      }
    )
    self.assertEqual(
      kernel_violations(root),
      [
        "configs.py imports jaxplugin.core.formats",
        "gpu/a.py imports jaxplugin.testing.interpreter.interpret",
        "matmul.py imports jax.numpy",
        "tiles.py imports jaxplugin.kernels.testing",
      ],
    )

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Imports inside the package point only upward in one table."""

import ast
import collections
import pathlib
import re
import tempfile

import pytest
from absl.testing import absltest

pytestmark = pytest.mark.smoke

# A room may import those before it. `testing` supports tests: nothing imports
# it but them.
ROOMS = (
  *("kernels", "jaxext", "printing", "core", "arrays", "runtime", "tables"),
  *(
    "operation",
    "quantization",
    "checkpoints",
    "dot",
    "ragged",
    "training",
    "backends",
    "dropin",
    "params",
    "nn",
    "stablehlo",
    "explanation",
    "planning",
    "exports",
  ),
  *("bench", "tuner", "cli", "__init__", "__main__", "testing"),
)
# Inside these rooms a module may import those of earlier lines; modules of one
# line do not know each other. In other rooms imports only make no circle.
STAGES = {
  "tables": (
    ("errors",),
    ("records",),
    ("fitting", "lookup", "reading", "taking"),
    ("regret", "resolution", "writing"),
    ("ranks",),
    ("__init__",),
  ),
  "checkpoints": (
    ("errors", "fitting", "names"),
    (
      "conversions",
      "json_text",
      "stored",
      "reports.misfits",
      "reports.progress",
    ),
    ("gguf_files", "safetensors_files", "signs.comfyui", "signs.unsupported"),
    ("recognition",),
    ("reports.numbers", "reports.tables"),
    ("loading", "writing.layouts"),
    ("writing.selection", "writing.sources"),
    ("writing.configs", "writing.shards", "writing.sharing", "writing.results"),
    ("writing.staging", "writing.verification"),
    ("writing.quantizing",),
    ("__init__", "reports", "signs", "writing"),
  ),
  "params": (
    ("leaves", "report", "views"),
    ("recognition",),
    ("interception",),
    ("acceptance", "observation"),
    ("conversion", "flax_states"),
    ("__init__",),
  ),
  "quantization": (
    ("codes", "hadamard", "problems", "sharding.places"),
    ("operations", "sharding.assignment"),
    ("arguments", "backends.triton_shapes", "backends.problem_fields"),
    tuple(f"backends.{x}" for x in ("cpu", "triton", "xla")),
    ("backends", "sharding.per_device"),
    ("sharding.partial_scales", "sharding.operation"),
    ("sharding.named_axes",),
    ("sharding.explicit", "sharding.resharding"),
    ("quantize_primitive",),
    ("dequantize_primitive", "operands"),
    ("api", "dequantization"),
    ("__init__",),
  ),
  "dot": (
    ("problems",),
    ("sides",),
    ("calls", "reference"),
    ("epilogue", "rules"),
    (
      *("backends.cpu_configs", "backends.dense", "backends.modelled"),
      *("backends.problem_fields", "backends.triton_configs"),
    ),
    tuple(f"backends.{x}" for x in ("cpu", "cudnn", "cutile", "triton", "xla")),
    ("plugins.views",),
    ("plugins.records",),
    ("plugins.discovery",),
    ("plugins.registry",),
    ("plugins.adapting",),
    ("backends",),
    ("sharding.assignment", "sharding.side_bytes"),
    ("sharding.per_device",),
    ("sharding.explicit",),
    ("autodiff.derivatives",),
    ("guards", "primitive"),
    ("autodiff.straight_through", "traced"),
    ("api",),
    ("__init__",),
  ),
  "ragged": (
    ("problems",),
    ("calls", "groups", "contraction.calls"),
    ("epilogue", "rules", "backends.problem_fields"),
    tuple(f"backends.{x}" for x in ("cpu", "triton", "xla")),
    ("backends", "contraction.xla", "sharding.assignment"),
    ("derivatives", "contraction.backends", "transforms.batching"),
    ("sharding.per_device", "contraction.derivatives"),
    ("sharding.explicit", "contraction.sharding"),
    ("primitive",),
    (
      *("checks", "traced", "contraction.primitive"),
      "transforms.straight_through",
    ),
    ("api",),
    ("contraction.api",),
    ("__init__", "contraction"),
  ),
}

# The most modules that a folder has.
MODULES = 10

# What kernels may not import. jax_triton imports jax.
FORBIDDEN_IN_KERNELS = ("jax", "jaxlib", "jaxplugin", "jax_triton")

PACKAGE = pathlib.Path(__file__).resolve().parent
# A wheel has the kernels inside the package; a checkout has them beside it, and
# inside it only the file that finds them.
KERNELS = tuple(
  path
  for path in (PACKAGE / "kernels", PACKAGE.parent / "kernels")
  if path.is_dir()
)


def source_files(root):
  for path in sorted(root.rglob("*.py")):
    if not path.name.endswith("_test.py") and path.name != "conftest.py":
      yield path


def imported_names(path, package=""):
  """Dotted names that a file imports, anywhere in it, relative ones resolved.

  Of `from a import b` both "a" and "a.b", as b may be a module.
  """
  names = set()
  for node in ast.walk(ast.parse(path.read_text(), str(path))):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        parents = package.split(".")
        parents = parents[: len(parents) - node.level + 1]
        base = ".".join([*parents, *([base] if base else [])])
      names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
  return names


def package_of(path, root):
  """Dotted package that a file's relative imports start from."""
  return ".".join(["jaxplugin", *path.relative_to(root).parts[:-1]])


def module_name(path, root):
  """Name without the package's: "core.formats", "dot" for dot/__init__.py."""
  parts = path.relative_to(root).with_suffix("").parts
  if len(parts) > 1 and parts[-1] == "__init__":
    parts = parts[:-1]
  return ".".join(parts)


def module_of(name, modules):
  """The module that a dotted name lies in; None if it is not of the package."""
  parts = name.split(".")
  if parts[0] != "jaxplugin":
    return None
  if parts[1:2] == ["kernels"]:
    return "kernels"
  for length in range(len(parts), 1, -1):
    if ".".join(parts[1:length]) in modules:
      return ".".join(parts[1:length])
  return "__init__"  # a name that the package itself defines


def imports_of(root):
  """For each module of the package the modules that it imports."""
  files = {module_name(path, root): path for path in source_files(root)}
  found = {}
  for module, path in files.items():
    if module.startswith("kernels"):
      continue  # has a rule of its own
    names = imported_names(path, package_of(path, root))
    # `from jaxplugin.core import formats` imports its parents to get there.
    leaves = {n for n in names if not any(m.startswith(f"{n}.") for m in names)}
    found[module] = {module_of(name, files) for name in leaves} - {None, module}
  return found


def stage_of(room, module):
  """The line of STAGES that names a module; None where none does."""
  name = module.partition(".")[2] or "__init__"
  for i, names in enumerate(STAGES[room]):
    if name in names:
      return i
  return None


def is_allowed(module, other):
  """Whether one module may import another."""
  room, target = module.partition(".")[0], other.partition(".")[0]
  if room != target:
    return ROOMS.index(target) < ROOMS.index(room)
  if room not in STAGES:
    return other != room  # a room's own __init__ comes after its modules
  stage, other_stage = stage_of(room, module), stage_of(room, other)
  return stage is None or other_stage is None or other_stage < stage


def circles(imports):
  """Modules that come back to themselves by imports, in order."""
  found = []
  for module in sorted(imports):
    seen, left = set(), list(imports[module])
    while left:
      other = left.pop()
      if other not in seen:
        seen.add(other)
        left += imports.get(other, ())
    if module in seen:
      found.append(module)
  return found


def violations(root):
  """Sentences, one for each module or import that the rules do not allow."""
  imports = imports_of(root)
  found = []
  for module, others in sorted(imports.items()):
    room = module.partition(".")[0]
    if room not in ROOMS:
      found.append(f"{module} is in no room of the table")
      continue
    if others and room in STAGES and stage_of(room, module) is None:
      found.append(f"{module} is on no line of its room")
    found += [
      f"{module} imports {other}"
      for other in sorted(others)
      if other.partition(".")[0] in ROOMS and not is_allowed(module, other)
    ]
  return found + [f"{module} imports itself" for module in circles(imports)]


def is_support(name):
  """Whether a file or folder of `kernels` supports tests."""
  return name.endswith("testing") or name == "interpreter"


def kernel_violations(root):
  """Sentences, one for each import in `root` that kernels may not have."""
  found = []
  for path in source_files(root):
    if is_support(path.stem):
      continue  # may use JAX
    folder = path.relative_to(root).parts[:-1]
    for name in sorted(imported_names(path, ".".join(["kernels", *folder]))):
      # The one name that the kernels themselves go by.
      name = re.sub(r"^jaxplugin\.kernels\b", "kernels", name)
      first, *rest = name.split(".")
      forbidden = first in FORBIDDEN_IN_KERNELS
      rest = rest if "interpreter" not in folder else ()
      if forbidden or (first == "kernels" and any(map(is_support, rest))):
        found.append(f"{path.relative_to(root)} imports {name}")
  return found


class LayeringTest(absltest.TestCase):
  def test_package_imports_point_only_to_earlier_entries(self):
    self.assertEqual(violations(PACKAGE), [])

  def test_walker_saw_the_package(self):
    imports = imports_of(PACKAGE)
    rooms = {module.partition(".")[0] for module in imports}
    self.assertEqual({*ROOMS} - rooms, {"kernels"})
    self.assertIn("core.formats", imports["quantization.api"])
    self.assertIn("dot.backends.xla", imports["dot.backends"])

  def test_no_room_has_more_than_ten_modules(self):
    folders = collections.Counter(
      path.parent.relative_to(PACKAGE)
      for path in source_files(PACKAGE)
      if not path.name.startswith("__")
    )
    self.assertEqual({f: n for f, n in folders.items() if n > MODULES}, {})

  def test_kernels_import_neither_jax_nor_jaxplugin(self):
    files = [path for root in KERNELS for path in source_files(root)]
    self.assertNotEmpty(files)
    found = [text for root in KERNELS for text in kernel_violations(root)]
    self.assertEqual(found, [])


class PlantedViolationTest(absltest.TestCase):
  """The walker itself can fail."""

  def plant(self, **files):
    """A directory of source files; `a___b="..."` is a/b.py."""
    root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    for name, text in files.items():
      path = root / f"{name.replace('___', '/')}.py"
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text)
    return root

  def test_allowed_imports_pass(self):
    root = self.plant(
      core___formats="import math\n",
      quantization___codes="import jax\nfrom jaxplugin.core import formats\n",
      dot___reference="from jaxplugin.quantization import codes\n",
      dot___backends___xla="from jaxplugin.dot import reference\n",
      dot___backends___triton="from jaxplugin.kernels.gpu import configs\n",
      dot___backends_____init__="from jaxplugin.dot.backends import xla\n",
      dot___autodiff_____init__="",
      __main__="import jaxplugin as jp\n",
      core___formats_test="from jaxplugin.dot import api\n",
    )
    self.assertEqual(violations(root), [])

  def test_each_form_of_import_of_a_later_room_is_caught(self):
    for text in (
      "from jaxplugin.dot import api",
      "from jaxplugin.dot.api import block_scaled_dot",
      "import jaxplugin.dot.api",
      "from ..dot import api",
      "from ..dot.api import block_scaled_dot",
      "def f():\n  from jaxplugin.dot import api",
      "if 1:\n  try:\n    import jaxplugin.dot.api as d\n  except E:\n    pass",
    ):
      root = self.plant(core___formats=text, dot___api="")
      self.assertEqual(violations(root), ["core.formats imports dot.api"], text)

  def test_import_of_the_package_itself_is_caught(self):
    for text in (
      "import jaxplugin as jp",
      "from jaxplugin import block_scaled",
    ):
      root = self.plant(nn=text)
      self.assertEqual(violations(root), ["nn imports __init__"], text)

  def test_backends_do_not_know_each_other(self):
    for text in (
      "from jaxplugin.dot.backends import xla",
      "from . import xla",
      "from .xla import emit",
    ):
      root = self.plant(dot___backends___cpu=text, dot___backends___xla="")
      self.assertEqual(
        violations(root), ["dot.backends.cpu imports dot.backends.xla"], text
      )

  def test_product_that_imports_support_of_tests_is_caught(self):
    root = self.plant(
      cli___main="from jaxplugin.testing import contract",
      testing___contract="",
    )
    self.assertEqual(violations(root), ["cli.main imports testing.contract"])

  def test_module_without_a_place_is_caught(self):
    root = self.plant(
      helpers="import math",
      core___helpers="import math",
      dot___helpers="from jaxplugin.core import helpers",
    )
    self.assertEqual(
      violations(root),
      [
        "dot.helpers is on no line of its room",
        "helpers is in no room of the table",
      ],
    )

  def test_circle_in_a_room_without_lines_is_caught(self):
    root = self.plant(
      core___a="from jaxplugin.core import b",
      core___b="from . import a",
      core___c="from . import a",
    )
    self.assertEqual(
      violations(root),
      ["core.a imports itself", "core.b imports itself"],
    )

  def test_jax_in_a_kernel_is_caught_but_not_in_its_test(self):
    root = self.plant(
      matmul="import triton\nimport jax.numpy as jnp\n",
      configs="def f():\n  from jaxplugin import formats\n",
      quantize="from . import configs\nimport jaxtyping\n",
      compile="from . import testing\n",
      tiles="from jaxplugin.kernels import configs, testing\n",
      gpu___decode="from jaxplugin.kernels.interpreter import interpret\n",
      interpreter___ops="from jaxplugin.kernels.interpreter import interpret\n",
      matmul_test="import jax\n",
      testing="import jax\n",
      quantize_testing="import jax\n",
    )
    self.assertEqual(
      kernel_violations(root),
      [
        "compile.py imports kernels.testing",
        "configs.py imports jaxplugin",
        "configs.py imports jaxplugin.formats",
        "gpu/decode.py imports kernels.interpreter",
        "gpu/decode.py imports kernels.interpreter.interpret",
        "matmul.py imports jax.numpy",
        "tiles.py imports kernels.testing",
      ],
    )


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Imports inside the package point only upward in one table."""

import ast
import pathlib
import re
import tempfile

from absl.testing import absltest

# Each module may import those of earlier lines. Modules of one line do not know
# each other. `kernels` may be imported by every one and imports none.
LAYERS = (
  (
    "jax_private",
    "jax_version",
    "jaxlib_private",
    "kernels",
    "linear_calls",
    "tangents",
    "transposition",
  ),
  ("formats",),
  ("problem",),
  ("target",),
  (
    "blocking",
    "codes",
    "cpu_library",
    "deviceless",
    "indexing",
    "interleaving",
    "lowering",
    "mesh_axes",
    "program",
    "scale_signs",
    "striding",
    "triton_library",
  ),
  ("estimates", "scaled_array"),
  (
    "placement",
    "preparation",
    "quantization_ops",
    "quantization_triton",
    "stacking",
  ),
  ("quantization_both_triton", "quantization_primitive"),
  ("quantization_both",),
  ("quantization",),
  ("call", "command_functions"),
  ("global_scales",),
  ("call_rules", "reference"),
  ("canonical",),
  (
    "backends.cpu",
    "backends.cudnn",
    "backends.size_rules",
    "backends.triton",
    "backends.xla",
  ),
  ("backends",),
  ("derivatives", "partitioning"),
  ("guards", "primitive"),
  ("checkpoint_policies", "straight_through"),
  ("dot",),
  ("gradients",),
  ("nn_operands",),
  ("linear", "matmul", "nn_general"),
  ("nn",),
  ("acceleration", "explanation"),
  ("decisions", "module_parsing"),
  ("module_child",),
  ("module_process",),
  ("modules",),
  ("module_calls", "products"),
  ("module_functions", "module_match"),
  ("command_files", "compilation", "optimized", "rewriter"),
  ("diagnostics",),
  ("bench.device", "bench.rows", "bench.timing", "bench.variant"),
  ("bench.operands", "bench.startup", "bench.verification"),
  ("bench.execution", "bench.torch_peers"),
  ("bench.ceilings", "bench.variants"),
  ("bench.results",),
  ("bench.measurement", "bench.plot", "bench.table"),
  ("bench.command",),
  ("bench",),
  ("__init__",),
  ("__main__",),
  # Support of the tests: it may import everything, and nothing but tests it.
  ("testing",),
  (
    "backends.triton_testing",
    "bench.testing",
    "dot_testing",
    "gradients_testing",
    "malformed_testing",
    "module_testing",
    "nn_testing",
    "primitive_testing",
    "quantization_reference_testing",
    "quantization_testing",
  ),
  (
    "dot_bits_testing",
    "dot_epilogue_testing",
    "dot_shapes_testing",
    "dot_values_testing",
    "malformed_calls_testing",
    "nn_general_testing",
  ),
  ("dot_suite",),
)
LAYER_OF = {name: i for i, names in enumerate(LAYERS) for name in names}

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


def module_name(path, root):
  """Name in the table: "formats", "backends" for its __init__, ..."""
  parts = path.relative_to(root).with_suffix("").parts
  if len(parts) > 1 and parts[-1] == "__init__":
    parts = parts[:-1]
  return ".".join(parts)


def package_of(path, root):
  """Dotted package that a file's relative imports start from."""
  return ".".join(["jaxplugin", *path.relative_to(root).parts[:-1]])


def entry_of(name):
  """The table's name of the module a dotted name lies in; None if not ours."""
  parts = name.split(".")
  if parts[0] != "jaxplugin":
    return None
  if len(parts) == 1:
    return "__init__"
  if parts[1] == "kernels":
    return "kernels"
  for length in (3, 2):
    candidate = ".".join(parts[1:length])
    if candidate in LAYER_OF:
      return candidate
  return "__init__"  # a name that the package itself defines


def violations(root):
  """Sentences, one for each module or import that the table does not allow."""
  found = []
  for path in source_files(root):
    module = module_name(path, root)
    if module.startswith("kernels"):
      continue  # has a rule of its own
    if module not in LAYER_OF:
      found.append(f"{module} is missing from the table")
      continue
    names = imported_names(path, package_of(path, root))
    entries = set()
    for name in names:
      # `from jaxplugin import formats` imports the package only to get there.
      if any(other.startswith(f"{name}.") for other in names):
        continue
      entries.add(entry_of(name))
    for entry in sorted(entries - {None, module}):
      if LAYER_OF[entry] >= LAYER_OF[module]:
        found.append(f"{module} imports {entry}")
  return found


def is_support(name):
  """Whether a file of `kernels` supports tests: it may use JAX."""
  return name.endswith("testing")


def kernel_violations(root):
  """Sentences, one for each import in `root` that kernels may not have."""
  found = []
  for path in source_files(root):
    if is_support(path.stem):
      continue
    for name in sorted(imported_names(path, "kernels")):
      # The one name that the kernels themselves go by.
      name = re.sub(r"^jaxplugin\.kernels\b", "kernels", name)
      first, *rest = name.split(".")
      forbidden = first in FORBIDDEN_IN_KERNELS
      if forbidden or (first == "kernels" and any(map(is_support, rest))):
        found.append(f"{path.relative_to(root)} imports {name}")
  return found


class LayeringTest(absltest.TestCase):
  def test_package_imports_point_only_to_earlier_entries(self):
    self.assertEqual(violations(PACKAGE), [])

  def test_walker_saw_the_package(self):
    modules = {module_name(path, PACKAGE) for path in source_files(PACKAGE)}
    self.assertContainsSubset(
      {"__init__", "formats", "quantization", "backends", "backends.xla"},
      modules,
    )
    names = imported_names(PACKAGE / "quantization.py", "jaxplugin")
    self.assertIn("jaxplugin.formats", names)

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
      path.parent.mkdir(exist_ok=True)
      path.write_text(text)
    return root

  def test_allowed_imports_pass(self):
    root = self.plant(
      quantization="import jax\nfrom jaxplugin import codes, formats\n",
      backends___xla="from jaxplugin import reference\n",
      backends___triton="from jaxplugin.kernels import configs\n",
      backends_____init__="from jaxplugin.backends import xla\n",
      __main__="import jaxplugin as jp\n",
      formats_test="from jaxplugin import dot\n",
    )
    self.assertEqual(violations(root), [])

  def test_each_form_of_import_downward_is_caught(self):
    for text in (
      "from jaxplugin import dot",
      "from jaxplugin import jax_private, dot as d",
      "from jaxplugin.dot import block_scaled_dot",
      "import jaxplugin.dot",
      "from . import dot",
      "from .dot import block_scaled_dot",
      "def f():\n  from jaxplugin import dot",
      "if 1:\n  try:\n    import jaxplugin.dot as d\n  except E:\n    pass",
    ):
      root = self.plant(formats=text)
      self.assertEqual(violations(root), ["formats imports dot"], text)

  def test_import_of_the_package_itself_is_caught(self):
    for text in (
      "import jaxplugin as jp",
      "from jaxplugin import block_scaled",
    ):
      root = self.plant(nn=text)
      self.assertEqual(violations(root), ["nn imports __init__"], text)

  def test_backends_do_not_know_each_other(self):
    for text in (
      "from jaxplugin.backends import xla",
      "from . import xla",
      "from .xla import emit",
    ):
      root = self.plant(backends___cpu=text)
      self.assertEqual(
        violations(root), ["backends.cpu imports backends.xla"], text
      )

  def test_module_missing_from_the_table_is_caught(self):
    root = self.plant(helpers="import math", backends___metal="import math")
    self.assertEqual(
      violations(root),
      [
        "backends.metal is missing from the table",
        "helpers is missing from the table",
      ],
    )

  def test_jax_in_a_kernel_is_caught_but_not_in_its_test(self):
    root = self.plant(
      matmul="import triton\nimport jax.numpy as jnp\n",
      configs="def f():\n  from jaxplugin import formats\n",
      quantize="from . import configs\nimport jaxtyping\n",
      compile="from . import testing\n",
      tiles="from jaxplugin.kernels import configs, testing\n",
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
        "matmul.py imports jax.numpy",
        "tiles.py imports kernels.testing",
      ],
    )


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`import jaxplugin` has no side effects in a fresh interpreter."""

import ast
import importlib
import importlib.metadata
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import numpy as np
import pytest
from absl.testing import absltest

import jaxplugin

pytestmark = pytest.mark.smoke

# Loaded by no import of ours: they are optional, large, or ask the hardware.
FORBIDDEN_PREFIXES = (
  "triton",
  "torch",
  "jax_triton",
  "jax_cuda",
  "jax_rocm",
  "jax_plugins",
)
# All of the environment that a probe gets: what this process or another test
# in it has set must not hide that an import sets it too. jax_triton deletes
# the last one.
INHERITED = ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR")
GIVEN = {"JAX_PLATFORMS": "cpu", "TRITON_CACHE_DIR": "untouched"}
PUBLIC_MODULES = (
  "jaxplugin",
  "jaxplugin.backends",
  "jaxplugin.checkpoints",
  "jaxplugin.repro",
  "jaxplugin.nn",
  "jaxplugin.training",
  "jaxplugin.training.checkpoint_policies",
)
STAND_INS = ("triton", "torch", "jax_triton", "jax_cuda13_plugin")

# What jax has loaded is not ours: jax itself looks for its CUDA plugins.
PROBE = """
import json, os, sys
import jax
import jax.numpy
environment, argv = dict(os.environ), list(sys.argv)
loaded = set(sys.modules)
import {module}
import jax._src.xla_bridge as xla_bridge
print(json.dumps({{
  "loaded": sorted(set(sys.modules) - loaded),
  "file": sys.modules["{module}"].__file__,
  "environment_changed": dict(os.environ) != environment,
  "argv_changed": sys.argv != argv,
  "backend_started": xla_bridge.backends_are_initialized(),
}}))
"""


# As tests of plugins do it, and notebooks that reload.
IMPORT_TWICE = """
import sys
import jax
import jax.export
import jax.numpy as jnp
import jaxplugin as first

x = jnp.ones((4, 32))
old = first.quantize(x, "mxfp8")
for name in [n for n in sys.modules if n.split(".")[0] == "jaxplugin"]:
  del sys.modules[name]
import jaxplugin as second

assert second is not first
new = second.quantize(x, "mxfp8")
assert type(new) is not type(old)
for package, array in ((second, new), (first, old)):
  assert float(package.block_scaled_dot(array, array).sum()) == 512.0
  assert (package.dequantize(array) == x).all()
  assert (jax.jit(lambda x: x)(array).values == array.values).all()
exported = jax.export.export(jax.jit(second.dequantize))(new)
restored = jax.export.deserialize(exported.serialize()).call(new)
assert (restored == x).all()
print(second.detect_target("cpu").cpu_kernels)
print(first.detect_target("cpu").cpu_kernels)
"""


def probe(module, *search_path, **options):
  """Imports `module` in a fresh interpreter; reports what that did."""
  program = PROBE.format(module=module)
  return json.loads(run(program, *search_path, **options)[-1])


def run(program, *search_path):
  """Returns the lines that a program prints in a fresh interpreter.

  Args:
    program: source code.
    *search_path: directories that come first.
  """
  root = str(pathlib.Path(jaxplugin.__file__).resolve().parent.parent)
  path = os.pathsep.join([*map(str, search_path), root])
  result = subprocess.run(
    [sys.executable, "-c", program],
    env={
      **{name: os.environ[name] for name in INHERITED if name in os.environ},
      **GIVEN,
      "PYTHONPATH": path,
    },
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  if result.returncode:
    raise RuntimeError(f"{program}failed:\n{result.stderr}")
  return result.stdout.splitlines()


def forbidden(report):
  names = {name.split(".")[0] for name in report["loaded"]}
  return sorted(name for name in names if name.startswith(FORBIDDEN_PREFIXES))


def packages_beyond_jax(report):
  """Returns the packages outside of JAX and the standard library."""
  names = {name.split(".")[0] for name in report["loaded"]}
  return sorted(names - {"jax", "jaxlib"} - set(sys.stdlib_module_names))


def write_module(directory, name, text):
  (pathlib.Path(directory) / f"{name}.py").write_text(text)


class ImportTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    # Stand-ins, so that an import guarded by `except ImportError` shows too
    # where the real packages are not installed.
    with tempfile.TemporaryDirectory() as directory:
      for name in STAND_INS:
        write_module(directory, name, "")
      cls.report = probe("jaxplugin", directory)

  def test_imports_this_package(self):
    self.assertEqual(
      pathlib.Path(self.report["file"]).resolve(),
      pathlib.Path(jaxplugin.__file__).resolve(),
    )
    self.assertIn("jaxplugin.quantization", self.report["loaded"])

  def test_loads_neither_triton_nor_a_plugin_nor_torch(self):
    self.assertEqual(forbidden(self.report), [])

  def test_starts_no_backend(self):
    self.assertFalse(self.report["backend_started"])

  def test_changes_neither_environment_nor_arguments(self):
    self.assertFalse(self.report["environment_changed"])
    self.assertFalse(self.report["argv_changed"])

  def test_loads_no_package_that_jax_has_not_loaded(self):
    # An import of this package then takes no longer than its own modules do.
    self.assertEqual(packages_beyond_jax(self.report), ["jaxplugin"])


class ImportTwiceTest(absltest.TestCase):
  def test_package_may_be_imported_again(self):
    second, first = run(IMPORT_TWICE)
    self.assertEqual(second, first)


class NamesTest(absltest.TestCase):
  def test_dir_has_the_public_names_and_nothing_else(self):
    for name in PUBLIC_MODULES:
      module = importlib.import_module(name)
      source = pathlib.Path(module.__file__).read_text()
      imported = {
        alias.name
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
      }
      with self.subTest(name):
        version = {"__version__"} if module is jaxplugin else set()
        self.assertEqual(set(dir(module)), {*module.__all__} | version)
        # `checkpoint_policies` defines its names and imports none of them.
        self.assertCountEqual(module.__all__, imported or module.__all__)
        for public in dir(module):
          self.assertTrue(hasattr(module, public), public)

  def test_the_only_modules_among_them_are_those_of_the_contract(self):
    modules = {
      name
      for name in dir(jaxplugin)
      if inspect.ismodule(getattr(jaxplugin, name))
    }
    self.assertEqual(
      modules,
      {
        *("backends", "checkpoint_policies", "checkpoints", "nn"),
        *("repro", "training"),
      },
    )

  def test_docstrings_name_only_public_places(self):
    found = {}
    for name in jaxplugin.__all__:
      value = getattr(jaxplugin, name)
      found[name] = value
      if inspect.ismodule(value):
        found |= {
          f"{name}.{key}": item
          for key, item in vars(value).items()
          if key[0] != "_" and not inspect.ismodule(item)
        }
    for name, value in found.items():
      text = inspect.getdoc(value) or ""
      if inspect.isclass(value):
        members = [m for key, m in vars(value).items() if key[0] != "_"]
        text += "".join(inspect.getdoc(m) or "" for m in members)
      for place in re.findall(r"\b(?:jp|jaxplugin)\.([\w.]*\w)", text):
        owner = jaxplugin
        for part in place.split("."):
          self.assertTrue(
            hasattr(owner, part) and part in dir(owner), f"{name}: {place}"
          )
          owner = getattr(owner, part)

  def test_what_a_user_catches_or_reads_is_public(self):
    values = jaxplugin.quantize(np.ones((4, 32), np.float32), "mxfp8")
    cpu = jaxplugin.named_target("cpu")
    with jaxplugin.use_target(cpu), self.assertRaises(jaxplugin.RefusedError):
      jaxplugin.block_scaled_dot(values, values, implementation="cudnn")
    with self.assertRaises(jaxplugin.ModuleError):
      jaxplugin.rewrite("module {", cpu)
    seen = []
    params = {"w": np.ones((64, 64), np.float32)}
    _, report = jaxplugin.quantize_params(
      params, "mxfp8", where=lambda p: seen.append(p) or 0
    )
    self.assertIsInstance(report, jaxplugin.QuantizationReport)
    self.assertIsInstance(seen[0], jaxplugin.Parameter)
    multiply = lambda p, x: x @ p["w"]
    jax.eval_shape(
      jaxplugin.quantize_dots(
        multiply, "mxfp8", where=lambda site: seen.append(site) or False
      ),
      params,
      np.ones((4, 64), np.float32),
    )
    self.assertIsInstance(seen[-1], jaxplugin.Site)

  def test_submodules_are_importable_still(self):
    for name in ("core.formats", "quantization", "kernels", "dot.backends.xla"):
      module = importlib.import_module(f"jaxplugin.{name}")
      self.assertEqual(module.__name__, f"jaxplugin.{name}")


class GuardTest(absltest.TestCase):
  """The guard itself can fail."""

  def test_a_module_that_does_all_of_it_is_caught(self):
    guilty = """
import os, sys
import jax
import heavy
try:
  import triton.language
except ImportError:
  pass
os.environ["JAXPLUGIN_IMPORT_TEST"] = "1"
sys.argv.append("--flag")
jax.devices("cpu")
"""
    with tempfile.TemporaryDirectory() as directory:
      for name in (*STAND_INS, "heavy"):
        write_module(directory, name, "")
      write_module(directory, "guilty", guilty)
      report = probe("guilty", directory)
    # Starting a backend also makes JAX look for plugins.
    self.assertIn("triton", forbidden(report))
    self.assertTrue(report["environment_changed"])
    self.assertTrue(report["argv_changed"])
    self.assertTrue(report["backend_started"])
    self.assertIn("heavy", packages_beyond_jax(report))


class InstalledFilesTest(absltest.TestCase):
  def test_kernels_are_a_subpackage_and_never_a_top_level_name(self):
    try:
      files = importlib.metadata.files("jaxplugin")
    except importlib.metadata.PackageNotFoundError:
      self.skipTest("jaxplugin runs from a checkout, nothing is installed")
    self.assertNotIn("kernels", {file.parts[0] for file in files})
    library = importlib.import_module("jaxplugin.kernels.cpu.library")
    self.assertEqual(library.__name__, "jaxplugin.kernels.cpu.library")

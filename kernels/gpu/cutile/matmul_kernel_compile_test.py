# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiled code of the cuTile kernel, without a GPU.

The table next to this file names the release of cuda-tile that wrote it. The
tests compare it with the claims and the sources without cuda-tile. If this
release is installed, they compile every kernel again. No GPU has run any of
them. This command writes the table again:

  pip install 'cuda-tile[tileiras]'
  python kernels/gpu/cutile/matmul_kernel_compile_test.py --regenerate
"""

import ast
import collections
import functools
import hashlib
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest
from absl.testing import absltest, parameterized
from jaxplugin.kernels.gpu.cutile import assembler, plans

from jaxplugin.kernels import architectures
from jaxplugin.lab.inspection import machine_code
from jaxplugin.testing.kernels import machine_claims, matmul_shapes

pytestmark = pytest.mark.lab

TABLE = pathlib.Path(__file__).with_suffix(".json")
KERNEL = pathlib.Path(plans.__file__).with_name("matmul_kernel.py")
# Packages that the machine code depends on.
PACKAGES = (assembler.PACKAGE, "nvidia-cuda-tileiras")
# Other SASS of interest: copies of whole tiles, scales to tensor memory, bytes
# loaded by threads, registers that spilled.
OTHERS = ("UTMALDG", "UTMASTG", "UTCCP", "LDG.E.U8", "LDL", "STL")


product = functools.partial(
  matmul_shapes.product,
  m=4096,
  n=4096,
  k=4096,
  swizzled=True,
  out_dtype="bf16",
)
EVERYTHING = {
  "has_global_scale": True,
  "has_global_power": True,
  "has_bias": True,
  "activation": "gelu",
  "has_residual": True,
}
PRODUCTS = {
  "mxfp8": product("mxfp8", "mxfp8"),
  "mxfp8_e5m2": product("mxfp8_e5m2", "mxfp8_e5m2"),
  "mxfp4": product("mxfp4", "mxfp4"),
  "nvfp4": product("nvfp4", "nvfp4"),
  "mxfp8_mxfp4": product("mxfp8", "mxfp4"),
  "nvfp4_everything": product("nvfp4", "nvfp4", **EVERYTHING),
  "mxfp8_decode": product("mxfp8", "mxfp8", m=16),
  "mxfp8_tails": product("mxfp8", "mxfp8", m=1000, n=2001, k=4080, batch=3),
}
CASES = [
  {"testcase_name": f"{name}_{key}", "name": name, "key": key}
  for name in plans.ARCHITECTURES
  for key in PRODUCTS
]


def launch_of(name, key):
  shape, architecture = PRODUCTS[key], architectures.by_name(name)
  config = plans.default_config(shape, architecture)
  return plans.plan(shape, config, architecture, residual_dtype="bfloat16")


def kind_of(name, key):
  """The claim: FP4 beside FP8 is multiplied as FP8, on sm_120 too."""
  shape = PRODUCTS[key]
  rhs = shape.rhs.format
  if shape.rhs.is_packed and not shape.lhs.is_packed:
    rhs = shape.lhs.format
  return machine_claims.kind(name, shape.lhs.format, rhs)


def source_hash():
  """Returns a hash of the kernel's source without comments and docstrings."""
  tree = ast.parse(KERNEL.read_text())
  for node in ast.walk(tree):
    has_docstring = isinstance(node, ast.Module | ast.FunctionDef)
    if has_docstring and ast.get_docstring(node) is not None:
      node.body = node.body[1:]
  return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


@functools.cache
def compiled_entry(name, key):
  """The entry of the table, by the assembler and Triton's disassembler."""
  import triton

  assembled = assembler.assemble(launch_of(name, key).specification())
  with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(assembled.cubin)
    file.flush()
    sass, usage = (
      subprocess.run(
        [tool.path, option, file.name],
        capture_output=True,
        text=True,
        check=True,
      ).stdout
      for tool, option in (
        (triton.knobs.nvidia.nvdisasm, "-c"),
        (triton.knobs.nvidia.cuobjdump, "-res-usage"),
      )
    )
  opcodes = re.findall(r"\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", sass)
  others = collections.Counter(
    name for x in opcodes for name in OTHERS if f"{x}.".startswith(f"{name}.")
  )
  registers, shared = re.findall(r"REG:(\d+) .*SHARED:(\d+)", usage)[0]
  return {
    "launch": launch_of(name, key).specification(),
    "matrix_instructions": machine_code.matrix_instructions(
      machine_code.read_sass(sass)
    ),
    "other_instructions": {x: others[x] for x in OTHERS},
    "registers": int(registers),
    "shared_memory_bytes": int(shared),
  }


def text_of(table):
  """JSON with a line for each kernel."""
  lines = [
    f'"{name}": {{\n  '
    + ",\n  ".join(
      f'"{key}": {json.dumps(entry)}' for key, entry in entries.items()
    )
    + "\n }"
    for name, entries in table["kernels"].items()
  ]
  head = json.dumps({**table, "kernels": None}, indent=1)
  return head.replace("null", "{\n " + ",\n ".join(lines) + "\n }") + "\n"


def regenerate():
  table = {PACKAGE: importlib.metadata.version(PACKAGE) for PACKAGE in PACKAGES}
  table["source"] = source_hash()
  table["kernels"] = {
    name: {key: compiled_entry(name, key) for key in PRODUCTS}
    for name in plans.ARCHITECTURES
  }
  TABLE.write_text(text_of(table))


def cannot_compile():
  """Why this process cannot compile the table's kernels; "" where it can."""
  missing = assembler.missing()
  if missing or not TABLE.exists():
    return missing or "there is no table"
  table = json.loads(TABLE.read_text())
  for package in PACKAGES:
    installed = importlib.metadata.version(package)
    if installed != table[package]:
      return f"the table is of {package} {table[package]}, not {installed}"
  return ""


class TableTest(parameterized.TestCase):
  """Without cuda-tile."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.table = json.loads(TABLE.read_text())

  def test_table_is_of_the_kernels_source(self):
    self.assertEqual(
      self.table["source"], source_hash(), "write it again: --regenerate"
    )

  @parameterized.named_parameters(CASES)
  def test_table_is_of_what_is_planned(self, name, key):
    entry = self.table["kernels"][name][key]
    self.assertEqual(entry["launch"], launch_of(name, key).specification())

  @parameterized.named_parameters(CASES)
  def test_machine_code_is_made_of_what_is_claimed(self, name, key):
    kind, entry = kind_of(name, key), self.table["kernels"][name][key]
    self.assertNotEqual(kind, machine_claims.UPCAST)
    self.assertEqual(
      machine_claims.broken(name, kind, entry["matrix_instructions"]), ""
    )
    architecture = architectures.by_name(name)
    self.assertLessEqual(
      entry["shared_memory_bytes"], architecture.shared_memory_bytes
    )
    pairs = [".2CTA" in x for x in entry["matrix_instructions"]]
    expected = architecture.has_tensor_memory and PRODUCTS[key].m > 128
    self.assertEqual(set(pairs), {expected})

  @parameterized.named_parameters(CASES)
  def test_tiles_are_copied_whole(self, name, key):
    others = self.table["kernels"][name][key]["other_instructions"]
    # Values and scales of both sides.
    self.assertGreaterEqual(others["UTMALDG"], 4)
    self.assertEqual(others["LDG.E.U8"], 0)
    if architectures.by_name(name).has_tensor_memory:
      self.assertGreater(others["UTCCP"], 0)

  def test_spills_are_those_that_are_known(self):
    # Rows of the result that are not multiples of 16 bytes are stored by
    # threads, and mma.sync has its sum in their registers.
    spilling = {
      (name, key)
      for name, entries in self.table["kernels"].items()
      for key, entry in entries.items()
      if entry["other_instructions"]["STL"]
    }
    self.assertEqual(
      spilling,
      {
        ("sm_100", "mxfp8_tails"),
        ("sm_103", "mxfp8_tails"),
        ("sm_120", "mxfp8_tails"),
        ("sm_120", "mxfp8_mxfp4"),
      },
    )


@absltest.skipIf(cannot_compile(), cannot_compile() or "-")
class CompileTest(parameterized.TestCase):
  @parameterized.named_parameters(CASES)
  def test_kernel_compiles_to_what_the_table_has(self, name, key):
    table = json.loads(TABLE.read_text())
    self.assertEqual(compiled_entry(name, key), table["kernels"][name][key])

  def test_hopper_is_refused_by_the_compiler_too(self):
    specification = launch_of("sm_100", "mxfp8").specification()
    with self.assertRaisesRegex(assembler.AssemblerError, "sm_90"):
      assembler.assemble({**specification, "gpu_code": "sm_90"})

  def test_tile_that_is_assembled_without_end_is_given_up(self):
    # `config_error` refuses 256 rows with one CTA.
    specification = launch_of("sm_100", "mxfp8").specification()
    with self.assertRaisesRegex(assembler.AssemblerError, "within 10 seconds"):
      assembler.assemble({**specification, "num_ctas": 1}, deadline_s=10)


if __name__ == "__main__":
  if "--regenerate" in sys.argv:
    regenerate()
  else:
    absltest.main()

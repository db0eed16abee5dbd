# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Editing a constant's code changes the kernel's key in Triton's cache."""

import dataclasses
import importlib
import itertools
import pathlib
import sys
import tempfile
from unittest import mock

import triton
import triton.language as tl
from absl.testing import parameterized
from jaxplugin.kernels.gpu import configs, matmul_plans
from jaxplugin.kernels.gpu.quantization import quantize_config, quantize_plans
from jaxplugin.kernels.gpu.ragged import plans as ragged_plans
from triton.compiler import compiler

from jaxplugin.kernels import constants, formats
from jaxplugin.testing.kernels import matmul_shapes

RECORDS = """
import dataclasses
from edited_package import facts
from jaxplugin.kernels import constants

@dataclasses.dataclass(frozen=True)
class Record(constants.KernelConstant):
  size: int

  @property
  def tiles(self):
    return self.size // facts.TILE
"""


@triton.jit
def _kernel(out, CONSTANT: tl.constexpr):
  tl.store(out, 1)


def compile_key(constant):
  """Returns the key of a kernel with this constant in Triton's disk cache."""
  source = compiler.ASTSource(
    fn=_kernel,
    signature={"out": "*i32", "CONSTANT": "constexpr"},
    constexprs={"CONSTANT": constant},
  )
  return source.hash()


def launches():
  """Yields launches of every planner of Triton kernels."""
  config = dataclasses.replace(matmul_shapes.CONFIG, split_k=2)
  yield from matmul_plans.plan(
    matmul_shapes.product(), config, matmul_shapes.SM_90
  )
  dense = matmul_shapes.product()
  fields = {
    field.name: getattr(dense, field.name)
    for field in dataclasses.fields(dense)
  }
  yield from ragged_plans.plan(
    ragged_plans.RaggedShape(**fields, groups=4), config, matmul_shapes.SM_90
  )
  given = {"batch": 1, "rows": 64, "format": "nvfp4"}
  rows = quantize_config.Rows(
    **given, k=64, k_is_minor=True, global_scale="computed"
  )
  both = quantize_config.Matrices(
    **given,
    columns=64,
    k=64,
    k_t=64,
    is_transposed=True,
    global_scale="computed",
  )
  yield from quantize_plans.plan(rows, matmul_shapes.SM_90)
  yield from quantize_plans.plan(both, matmul_shapes.SM_90)
  yield quantize_plans.plan_maxima(rows, matmul_shapes.SM_90)
  yield quantize_plans.plan_maxima(both, matmul_shapes.SM_90)


class KernelConstantTest(parameterized.TestCase):
  @parameterized.parameters(("records.py", "//", "%"), ("facts.py", "16", "32"))
  def test_edited_source_gives_another_key(self, file, old, new):
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    package = root / "edited_package"
    package.mkdir()
    (package / "facts.py").write_text("TILE = 16\n")
    (package / "records.py").write_text(RECORDS)

    def imported():
      importlib.invalidate_caches()
      for name in [name for name in sys.modules if "edited_package" in name]:
        del sys.modules[name]
      return importlib.import_module("edited_package.records").Record(64)

    with mock.patch.object(sys, "path", [str(root), *sys.path]):
      before = imported()
      again = imported()
      text = (package / file).read_text()
      (package / file).write_text(text.replace(old, new) + "# longer\n")
      edited = imported()
      self.assertNotEqual(before.tiles, edited.tiles)
      self.assertEqual(repr(before), repr(edited))
      self.assertEqual(compile_key(before), compile_key(again))
      self.assertNotEqual(compile_key(before), compile_key(edited))

  def test_other_fields_give_another_key(self):
    a, b = (
      quantize_config.QuantizeConstant(
        format=formats.by_name(name),
        rounds_up=True,
        hardware_cast=False,
        is_swizzled=False,
      )
      for name in ("mxfp8", "mxfp4")
    )
    self.assertNotEqual(compile_key(a), compile_key(b))

  def test_code_of_each_record_is_in_the_digest(self):
    kinds = (configs.Tiling, ragged_plans.RaggedTiling)
    kinds += (quantize_config.QuantizeConstant,)
    digests = {kind.source_digest for kind in kinds}
    self.assertLen(digests, len(kinds))

  def test_every_record_that_a_kernel_takes_is_one(self):
    """Numbers, strings and tuples of them have no source code to digest."""

    def records(value):
      if isinstance(value, (tuple, list)):
        return itertools.chain.from_iterable(map(records, value))
      # None is an absent array.
      is_plain = value is None or isinstance(value, (bool, int, float, str))
      return [] if is_plain else [value]

    found = set()
    for launch in launches():
      for name, value in launch.constexprs:
        for record in records(value):
          with self.subTest(launch.kernel, name=name):
            self.assertIsInstance(record, constants.KernelConstant)
            found.add(type(record))
            before = compile_key(record)
            with mock.patch.object(type(record), "source_digest", "another"):
              self.assertNotEqual(compile_key(record), before)
    self.assertEqual(
      found,
      {
        configs.Tiling,
        ragged_plans.RaggedTiling,
        quantize_config.QuantizeConstant,
        quantize_config.Tile,
      },
    )

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Libraries in separate processes, and how they are timed."""

import importlib.util
import os
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from jaxplugin.core import targets
from jaxplugin.lab.bench import execution
from jaxplugin.lab.bench.libraries import ggml_dot, processes, worker
from jaxplugin.lab.bench.peers import dot_variants, operand_sets
from jaxplugin.testing import bench_results, fake_library, folders

ERROR = 2**-8  # of the made-up library
SHAPE = "3x40x64"


def measuring(test, peers, kinds=fake_library.KINDS):
  """Measures with a made-up library until the test, or its class, ends."""
  is_class = isinstance(test, type)
  clean_up = test.addClassCleanup if is_class else test.addCleanup
  for target, name, value in (
    (processes, "_MODULES", {"fake": fake_library}),
    (processes, "NAMES", ("fake",)),
    (execution, "WARM_UP_SECONDS", 0.0),
    (fake_library, "KINDS", kinds),
  ):
    patch = absltest.mock.patch.object(target, name, value)
    patch.start()
    clean_up(patch.stop)
  found = bench_results.measuring(peers)
  clean_up(found.close)
  return found


def variants(row):
  return {v.name: v for v in row.variants}


class LibrariesTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    """Measures a row in two pairs of formats."""
    super().setUpClass()
    cls.started = []
    start = processes.Process

    def recorded(*arguments):
      cls.started.append(start(*arguments))
      return cls.started[-1]

    cls.enterClassContext(
      absltest.mock.patch.object(processes, "Process", recorded)
    )
    one = measuring(cls, ("f32", "bf16", "fake"))
    cls.one_sided, cls.pair = (
      one.measure(*bench_results.parsed(SHAPE, pair))
      for pair in ("bf16xmxfp4", "mxfp4")
    )

  def test_library_is_timed_in_its_fastest_form_beside_its_error(self):
    good = variants(self.one_sided)["fake good"]
    self.assertEqual((good.status, good.form), ("ok", "fast"))
    self.assertLess(good.time.median, 20)
    self.assertAlmostEqual(good.relative_error, ERROR, delta=1e-6)
    self.assertEqual(good.num_bytes, 40 * 64 * 5 // 8 + (3 * 64 + 3 * 40) * 4)
    others = [r.other for r in self.one_sided.ratios if r.ours != "fake good"]
    self.assertIn("fake good", others)

  def test_errors_of_all_refer_to_unrounded_activations(self):
    # Rounding to bf16 changes a value by 2^-9 at most, and by a third of that
    # in the root of the mean square.
    for name, one in variants(self.one_sided).items():
      if one.role != "ceiling" and not name.startswith("fake"):
        # Some CPUs round to 8 bits: half a step is 2^-7 of the usual value.
        largest = 2**-7 if name.endswith(" fastest") else 2**-9
        self.assertBetween(one.relative_error, 2**-11, largest, name)

  def test_quantized_activations_are_also_timed_with_their_quantization(self):
    found = variants(self.pair)
    (name,) = (n for n in found if n.endswith(" with quantize"))
    plain = found[name.removesuffix(" with quantize")]
    self.assertEqual(found[name].status, "ok", found[name].reason)
    # E2M1 has one bit after the point: errors up to a quarter.
    self.assertBetween(found[name].relative_error, 0.05, 0.25)
    self.assertAlmostEqual(found[name].relative_error, plain.relative_error)
    self.assertFalse(any(" with" in n for n in variants(self.one_sided)))

  def test_variants_in_place_of_a_library_are_right(self):
    for row, suffixes in (
      (self.one_sided, ("prepared", "fastest")),
      (self.pair, ("prepared", "with quantize")),
    ):
      found = variants(row)
      (name,) = (n for n in found if found[n].is_chosen)
      for suffix in suffixes:
        one = found[f"{name} {suffix}"]
        self.assertEqual((one.role, one.status), ("ours", "ok"), one.reason)

  @parameterized.parameters(
    ("wrong", "wrong", "relative error 1"),
    ("broken", "unavailable", "NotImplementedError: no such weights"),
    ("ends", "unavailable", "its process ended: "),
  )
  def test_faults_of_a_library_are_reported(self, name, status, reason):
    one = variants(self.one_sided)[f"fake {name}"]
    self.assertEqual(one.status, status)
    self.assertIn(reason, one.reason)
    self.assertIsNone(one.time)

  def test_process_that_ended_is_started_again(self):
    # "good" was prepared before the process ended, in each of two rows.
    self.assertEqual(variants(self.pair)["fake good"].status, "ok")
    self.assertLen(self.started, 3)

  def test_processes_rest_between_requests(self):
    pid = self.started[-1]._child.process.pid
    state = pathlib.Path(f"/proc/{pid}/stat")
    if not state.exists():
      self.skipTest("needs /proc")
    self.assertEqual(state.read_text().rpartition(")")[2].split()[0], "T")

  def test_weights_have_as_many_bits_as_ours(self):
    made = processes.Processes(1)
    self.addCleanup(made.close)
    for pair, expected in (("f32xmxfp8", ["fake wide"]), ("mxfp6_e2m3", [])):
      row, pair = bench_results.parsed(SHAPE, pair)
      data = operand_sets.DotOperands(row, pair)
      found = made.dots(["fake"], row, pair, data)
      self.assertEqual([forms[0].name for forms in found], expected)


class RowsTest(absltest.TestCase):
  def test_row_is_timed_if_a_library_ends_in_a_timed_call(self):
    kinds = *fake_library.KINDS[:1], fake_library.ENDS_LATER
    one = measuring(self, ("fake",), kinds)
    measured = one.measure(*bench_results.parsed(SHAPE, "bf16xmxfp4"))
    found = variants(measured)
    ended = found.pop("fake ends later")
    self.assertEqual((ended.status, ended.time), ("unavailable", None))
    self.assertIn("its process ended: ", ended.reason)
    self.assertNotEmpty(measured.ratios)
    for name, variant in found.items():
      self.assertEqual(variant.status, "ok", name)
      self.assertIsNotNone(variant.time, name)

  def test_rows_without_libraries_have_no_relative_errors(self):
    one = measuring(self, ())
    found = variants(one.measure(*bench_results.parsed(SHAPE, "mxfp4")))
    self.assertFalse(any("with quantize" in name for name in found))
    for variant in found.values():
      self.assertIsNone(variant.relative_error)

  def test_libraries_are_not_timed_on_a_gpu(self):
    made = dot_variants.DotVariants(
      *bench_results.parsed(SHAPE, "nvfp4"),
      np.dtype(jnp.float32),
      targets.named_target("h100"),
    )
    (found,) = made.peers(["ggml"])
    self.assertEqual(found.reason, "is run on CPUs only")


class MissingTest(parameterized.TestCase):
  @parameterized.parameters(
    ("openvino", "openvino"),
    ("torch", "torch"),
    ("onnxruntime", "onnxruntime onnx"),
  )
  def test_missing_packages_are_named(self, name, packages):
    expected = f"{name} is not installed; pip install {packages}"
    with absltest.mock.patch.object(
      importlib.util, "find_spec", lambda name: None
    ):
      self.assertEqual(processes.missing(name), expected)

  def test_missing_folder_of_ggml_is_named(self):
    with absltest.mock.patch.dict(os.environ):
      os.environ.pop(ggml_dot.DIRECTORY, None)
      self.assertIn("JAXPLUGIN_GGML_DIR must name", processes.missing("ggml"))
      folder = folders.new(self)
      os.environ[ggml_dot.DIRECTORY] = str(folder)
      self.assertIn("unpack the npm package", processes.missing("ggml"))
      (folder / "libggml-cpu-x64.so").touch()
      self.assertEqual(processes.missing("ggml"), "")

  def test_libraries_are_imported_only_by_their_processes(self):
    for name in ("openvino", "onnxruntime", "torch"):
      self.assertNotIn(name, sys.modules)


class QuantizationTest(parameterized.TestCase):
  @parameterized.parameters(4, 8)
  def test_integers_are_within_half_a_step(self, bits):
    rhs = np.random.default_rng(0).normal(size=(5, 96)).astype(np.float32)
    rhs[2, 32:64] = 0
    values, scale = worker.integers(rhs, bits)
    self.assertEqual(np.abs(values).max(), 2 ** (bits - 1) - 1)
    error = np.abs(values * scale - rhs.reshape(5, 3, 32))
    self.assertTrue((error <= scale * 0.5001).all())
    self.assertFalse(values[2, 1].any())

  def test_first_code_is_in_the_low_half(self):
    packed = worker.packed(np.array([[1, 2, 15, 0]], np.float32))
    np.testing.assert_array_equal(packed, [[0x21, 0x0F]])

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cpu implementation: its numbers, its gates, and what it loads."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import pathlib
from unittest import mock

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.core import formats, targets
from jaxplugin.dot import backends
from jaxplugin.dot.backends import cpu
from jaxplugin.kernels.cpu import library
from jaxplugin.tables import resolution
from jaxplugin.testing import contract, dot_problems, folders
from jaxplugin.testing.dot_suite import dot_rows, suite

pytestmark = pytest.mark.smoke

TARGET = jp.detect_target("cpu")
needs_library = absltest.skipIf(
  TARGET.cpu_kernels is None, TARGET.missing(targets.CPU_KERNELS)
)
RULE = cpu.CpuConfig()


def make_problem(lhs=jp.MXFP8, *rhs, **changes):
  return dot_problems.problem(lhs, *rhs, **{"m": 3, "n": 5, "k": 64, **changes})


def chosen(function, *args):
  """The implementations of the custom calls in what jit lowers."""
  text = jax.jit(function).lower(*args).as_text()
  return "cpu" if cpu._DOT in text else "xla"


@needs_library
@pytest.mark.sample(2)
class CpuDotTest(suite.DotSuite):
  implementation = "cpu"
  cases_per_test = 25
  exact_beyond_f32 = True


@needs_library
class CpuRowsTest(dot_rows.DotRowsTestCase):
  implementation = "cpu"
  in_leg = (
    "mxfp8 blocked along k1, mxfp4 along k1",
    "mxfp8 blocked along k1, nvfp4 along k2",
    "nvfp4, short block of 33 in k1",
    "mxfp8, 1 rows by a vector, residual bfloat16",
    *("mapped global scale", "mapped bias", "mapped residual"),
    "mxfp4 by mxfp6_e3m2, 5 rows",
    *(name for name in dot_rows.CHECKPOINTS if name.endswith(" 5 rows")),
  )


@needs_library
class ExtremesTest(parameterized.TestCase):
  def test_global_scale_reaches_f32_subnormals(self):
    x = jnp.ones((1, 32), formats.E4M3)
    scale = jnp.asarray(np.zeros((1, 1), np.uint8).view(formats.E8M0))
    one = jnp.ones((1, 1), formats.E8M0)
    actual = jp.block_scaled_dot(x, x, scale, one, 0.25, implementation="cpu")
    self.assertEqual(np.asarray(actual)[0, 0], np.float32(2.0**-124))


@needs_library
class LayoutTest(absltest.TestCase):
  """The operands of the custom call."""

  def test_vmapped_weight_free_calls_are_one_custom_call(self):
    w = jp.quantize(jnp.ones((5, 64)), jp.NVFP4)
    x = jp.quantize(jnp.ones((7, 3, 64)), jp.MXFP8)
    function = jax.vmap(jp.block_scaled_dot, in_axes=(0, None))
    text = jax.jit(function).lower(x, w).as_text()
    self.assertIn("-> tensor<1x21x5xf32>", text)
    np.testing.assert_array_equal(function(x, w), np.full((7, 3, 5), 64.0))

  def test_row_major_operands_reach_the_call_untouched(self):
    x = jp.quantize(jnp.ones((2, 3, 64)), jp.MXFP8)
    text = jax.jit(jp.block_scaled_dot).lower(x, x).as_text()
    for operation in ("transpose", "convert", "pad", "slice"):
      self.assertNotIn(f"stablehlo.{operation} ", text)
    self.assertIn(cpu._DOT, text)


# The format to which precision="fastest" quantizes rows.
ROWS = contract.block_format("int8_32_f32", np.int8, np.float32, 32)
# The bound of docs/concepts/numerics.md with rows that are already quantized.
FASTEST_BOUND = 18 * 2.0**-24


@absltest.skipIf(
  TARGET.cpu_kernels in (None, "baseline", "baseline_neon"),
  "the baseline quantizes no rows",
)
class FastestPrecisionTest(parameterized.TestCase):
  """precision="fastest" converts rows inside of the call."""

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.x = jax.device_put(rng.standard_normal((4, 9, 96)))
    self.w = jax.device_put(rng.standard_normal((40, 96)))
    self.q = jp.quantize(self.w, jp.NVFP4)

  def dot(self, x, w, **options):
    return jp.block_scaled_dot(
      x, w, precision="fastest", implementation="cpu", **options
    )

  def test_a_table_may_keep_floats(self):
    with resolution.pinned("cpu", (("rows", "floats"),)):
      got = self.dot(self.x, self.q, bias=jnp.arange(40.0))
      (explained,) = jp.explain(self.dot, self.x, self.q)
    exact = jp.block_scaled_dot(self.x, self.q, bias=jnp.arange(40.0))
    np.testing.assert_array_equal(got, exact)
    rounded = self.dot(self.x, self.q, bias=jnp.arange(40.0))
    self.assertGreater(np.abs(rounded - exact).max(), 0)
    self.assertIn("rows stay floats", explained.decision.notes[0])

  def test_rows_are_never_quantized_unasked(self):
    for precision in (None, "highest", "default"):
      function = functools.partial(jp.block_scaled_dot, precision=precision)
      text = jax.jit(function).lower(self.x, self.q).as_text()
      self.assertNotIn("quantize_rows", text)
    text = jax.jit(self.dot).lower(self.x, self.q).as_text()
    self.assertIn("quantize_rows = 1", text)
    rows = jp.quantize(self.x, jp.MXFP8)
    text = jax.jit(self.dot).lower(rows, self.q).as_text()
    self.assertNotIn("quantize_rows", text)

  def test_transformations_keep_the_precision(self):
    rows = jp.dequantize(jp.quantize(self.x, ROWS))
    expected = self.dot(self.x, self.q)
    mapped = jax.vmap(self.dot, in_axes=(0, None))(self.x, self.q)
    np.testing.assert_array_equal(mapped, expected)
    primal, tangent = jax.jvp(
      lambda x: self.dot(x, self.q), (self.x,), (self.x,)
    )
    np.testing.assert_array_equal(primal, expected)
    np.testing.assert_array_equal(tangent, expected)
    scanned = jax.lax.scan(lambda c, x: (c, self.dot(x, self.q)), None, self.x)[
      1
    ]
    np.testing.assert_allclose(scanned, expected, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(
      expected, rows @ jp.dequantize(self.q).T, rtol=1e-4, atol=1e-4
    )
    # The derivative is that of the floats: dequantized weights.
    gradient = jax.grad(lambda x: self.dot(x, self.q).sum())(self.x)
    exact = np.ones((4, 9, 40)) @ np.asarray(jp.dequantize(self.q))
    np.testing.assert_allclose(gradient, exact, rtol=0.02, atol=0.05)

  def test_export_and_epilogue_keep_the_precision(self):
    bias, residual = jnp.ones(40), jnp.ones((4, 9, 40))
    options = {"bias": bias, "activation": "relu", "residual": residual}
    function = jax.jit(functools.partial(self.dot, **options))
    allow = jax.export.DisabledSafetyCheck.custom_call(cpu._DOT)
    exported = jax.export.export(function, disabled_checks=[allow])(
      self.x, self.q
    )
    again = jax.export.deserialize(exported.serialize())
    expected = np.maximum(self.dot(self.x, self.q) + bias, 0) + residual
    np.testing.assert_array_equal(again.call(self.x, self.q), expected)


# Dimension numbers of products with square blocks.
LAST, FIRST = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))
BATCHED, MERGED = (((2,), (2,)), ((0,), (0,))), (((2,), (1,)), ((), ()))


@needs_library
class SquareBlocksTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("of_rhs", (1, 520), (300, 520), LAST, "rhs"),
    ("of_lhs", (300, 520), (2, 520), LAST, "lhs"),
    ("of_a_batch", (2, 5, 130), (2, 256, 130), BATCHED, "rhs"),
    ("along_their_rows", (70, 300), (300, 520), FIRST, "rhs"),
    # The second matrix begins inside of a block of the merged rows.
    ("of_merged_rows", (2, 100, 256), (3, 256), MERGED, "lhs", False),
  )
  def test_scales_are_read_as_they_are(
    self, lhs, rhs, numbers, square, is_read=True
  ):
    rng = np.random.default_rng(0)
    sides = {
      name: jax.device_put(rng.standard_normal(shape))
      for name, shape in (("lhs", lhs), ("rhs", rhs))
    }
    sides[square] = jp.quantize(sides[square], jp.FP8_128X128)
    dot = jax.jit(
      functools.partial(jp.block_scaled_dot, dimension_numbers=numbers)
    )
    text = dot.lower(*sides.values()).as_text()
    self.assertEqual(f"{square}_scale_rows = 128" in text, is_read)
    floats = dict(sides)
    floats[square] = jp.dequantize(sides[square])
    exact = contract.dot(
      *(np.asarray(x, np.float64) for x in floats.values()), numbers
    )
    contract.assert_dot(dot(*sides.values()), *exact)


class GateTest(parameterized.TestCase):
  """`supports` decides by its arguments alone."""

  TARGET = dataclasses.replace(jp.named_target("cpu"), cpu_kernels="avx2")

  def reason(self, problem, target=TARGET):
    refusal = cpu.supports(problem, target)
    return None if refusal is None else refusal.reason

  def test_every_pair_of_formats_is_served_and_chosen(self):
    for lhs, rhs in itertools.product(formats.KNOWN, repeat=2):
      problem = make_problem(lhs, rhs, num_contracting=3)
      self.assertIsNone(self.reason(problem))
      decision = backends.choose(problem, self.TARGET)
      self.assertEqual(decision.implementation, "cpu")

  def test_only_a_symbolic_k_is_refused(self):
    sizes = {"batch": None, "m": None, "n": None}
    self.assertIsNone(self.reason(make_problem(**sizes)))
    self.assertIn("static k", self.reason(make_problem(k=None)))

  def test_own_formats_are_supported_by_their_fields(self):
    for elements, scale, block_size in itertools.product(
      ((formats.E4M3, 0), (formats.E2M1, 0), (formats.INT8, 3)),
      formats.SCALE_DTYPES,
      (16, 48, 64, 128, 1000),
    ):
      own = contract.block_format(
        "own", elements[0], scale, block_size, fraction_bits=elements[1]
      )
      problem = make_problem(own, k=480)
      self.assertIsNone(self.reason(problem), own)
      self.assertIsNone(cpu.config_error(problem, self.TARGET, RULE))
      self.assertIsNone(
        self.reason(make_problem(own, own, k=480 if block_size < 99 else 1000))
      )

  def test_other_formats_are_refused_by_name(self):
    odd = dataclasses.replace(jp.INT8_32, name="odd", block_size=24)
    self.assertRegex(
      self.reason(make_problem(odd, k=48)), "16 values .* got odd with .* 24"
    )
    self.assertIsNone(self.reason(make_problem(odd, k=24)))
    fraction = dataclasses.replace(jp.MXINT8, name="odd", fraction_bits=9)
    self.assertRegex(self.reason(make_problem(fraction)), "got odd with 9")
    floats = formats.UnquantizedFormat(
      name="odd",
      values_dtype=formats.BF16,
      scale_dtype=formats.BF16,
      block_size=32,
    )
    self.assertRegex(self.reason(make_problem(floats)), "BlockFormat, got odd")

  def test_target_without_kernels_is_refused_with_its_own_reason(self):
    target = jp.named_target("cpu").without_library(
      targets.CPU_KERNELS, "not built: no compiler"
    )
    reason = self.reason(make_problem(), target)
    self.assertEqual(reason, "not built: no compiler")
    reason = self.reason(make_problem(), jp.named_target("cpu"))
    self.assertIn("detect_target", reason)

  def test_note_tells_that_lhs_is_dequantized_if_blocks_do_not_pair_up(self):
    x = jnp.ones((3, 32, 32))
    note = (
      "lhs is dequantized to f32 first, because the operands are blocked along"
      " different dimensions; only values in the normal range of f32 are exact"
    )
    f = functools.partial(jp.block_scaled_dot, dimension_numbers=dot_rows.TWO_K)
    sides = {axis: jp.quantize(x, jp.MXFP8, axis=axis) for axis in (1, 2)}
    for lhs, rhs in itertools.product(sides, repeat=2):
      args = sides[lhs], sides[rhs]
      (dot,) = explained = jp.explain(f, *args, target=self.TARGET)
      self.assertEqual(dot.decision.implementation, "cpu")
      self.assertEqual(dot.decision.notes, () if lhs == rhs else (note,))
      self.assertEqual(f"note: {note}" in explained.details(), lhs != rhs)

  @parameterized.parameters(
    ("avx512_bf16", jp.MXFP4, "rows are quantized to int8 in blocks of 32", 9),
    ("avx512_bf16", jp.MXFP4, "rows are rounded to bf16, because", 3),
    ("amx_bf16", jp.INT4_128, "rows are quantized to int8 in blocks of 32", 9),
    ("avx512_bf16", jp.MXFP8, "changes nothing, because avx512_bf16 kernels"),
    ("avx2", jp.MXFP4, "rows are quantized to int8", 1),
    ("baseline", jp.MXFP4, "changes nothing, because baseline kernels do"),
  )
  def test_note_tells_what_fastest_precision_changes(
    self, isa, format, words, rows=3
  ):
    target = dataclasses.replace(self.TARGET, cpu_kernels=isa)
    sizes = {"m": rows, "n": 16}, {"m": 16, "n": rows}
    pairs = (contract.F32, format), (format, contract.F32)
    for pair, size in zip(pairs, sizes, strict=True):
      problem = make_problem(*pair, fastest_precision=True, **size)
      (note,) = backends.choose(problem, target).notes
      self.assertIn(words, note)
      problem = dataclasses.replace(problem, fastest_precision=False)
      self.assertEqual(backends.choose(problem, target).notes, ())
    problem = make_problem(format, format, fastest_precision=True)
    self.assertEqual(backends.choose(problem, target).notes, ())

  def test_one_side_without_blocks_needs_no_note(self):
    for pair in ((contract.F32, jp.MXFP8), (jp.MXFP8, contract.F32)):
      problem = make_problem(*pair, num_contracting=2)
      self.assertEqual(backends.choose(problem, self.TARGET).notes, ())

  def test_text_of_a_target_names_its_kernels(self):
    self.assertEqual(str(self.TARGET), "cpu (cpu, avx2 kernels)")


class LoweringTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.x = jp.quantize(jnp.asarray(rng.normal(size=(3, 64))), jp.MXFP8)
    self.w = jp.quantize(jnp.asarray(rng.normal(size=(5, 64))), jp.MXFP8)

  @needs_library
  def test_cpu_is_chosen_here(self):
    self.assertEqual(chosen(jp.block_scaled_dot, self.x, self.w), "cpu")
    (dot,) = jp.explain(jp.block_scaled_dot, self.x, self.w)
    self.assertEqual(dot.decision.implementation, "cpu")

  def test_named_target_lowers_to_xla(self):
    with jp.use_target(jp.named_target("cpu")):
      self.assertEqual(chosen(jp.block_scaled_dot, self.x, self.w), "xla")

  @parameterized.parameters(("cpu",), ("cpu", "cuda"))
  @pytest.mark.sample(1)
  def test_export_falls_back_to_xla(self, *platforms):
    exported = jax.export.export(
      jax.jit(jp.block_scaled_dot), platforms=platforms
    )(self.x, self.w)
    self.assertNotIn(cpu._DOT, exported.mlir_module())
    again = jax.export.deserialize(exported.serialize())
    expected = jp.block_scaled_dot(self.x, self.w, implementation="xla")
    np.testing.assert_array_equal(again.call(self.x, self.w), expected)

  @needs_library
  def test_forced_implementation_is_kept_in_an_export(self):
    function = jax.jit(
      lambda x, w: jp.block_scaled_dot(x, w, implementation="cpu")
    )
    with self.assertRaisesRegex(ValueError, cpu._DOT):
      jax.export.export(function)(self.x, self.w)
    allow = jax.export.DisabledSafetyCheck.custom_call(cpu._DOT)
    exported = jax.export.export(function, disabled_checks=[allow])(
      self.x, self.w
    )
    self.assertIn(cpu._DOT, exported.mlir_module())


class LibraryTest(parameterized.TestCase):
  """Finding the library, and the check before anything is registered."""

  def setUp(self):
    super().setUp()
    self.directory = folders.new(self)

  def find_error(self):
    with self.assertRaises(library.LibraryError) as caught:
      library.find((self.directory,))
    return str(caught.exception)

  def test_missing_library_is_an_error_that_names_the_places(self):
    error = self.find_error()
    self.assertRegex(
      error, f"^not built: no .* in {self.directory}. Install gcc or clang"
    )

  def test_failed_build_is_an_error_that_quotes_its_first_line(self):
    report = self.directory / library.FAILURE_NAME
    report.write_text("could not compile: error: x\n\nall the rest\n")
    self.assertStartsWith(
      self.find_error(),
      "not built: the CPU kernels did not compile at install: could not"
      f" compile: error: x (all of it in {report}). Install gcc or clang",
    )

  def test_first_directory_that_has_the_library_wins(self):
    second = self.directory / "second"
    second.mkdir()
    for directory in (self.directory, second):
      (directory / library.LIBRARY_NAME).touch()
    (second / library.FAILURE_NAME).touch()
    self.assertEqual(
      library.find((second, self.directory)), second / library.LIBRARY_NAME
    )

  def test_another_library_is_an_error(self):
    with (
      mock.patch.object(library, "_open", return_value=ctypes.CDLL(None)),
      self.assertRaisesRegex(library.LibraryError, "x.so must be a library of"),
    ):
      library.load(jax.ffi.include_dir(), pathlib.Path("x.so"))

  def test_jaxlib_takes_its_own_minor_version_and_older(self):
    for installed in ((0, 3), (0, 5)):
      library.check_version((0, 3), installed, "x.so")
    for built_for, installed in (
      *(((0, 5), (0, 3)), ((0, 3), (1, 3)), ((1, 0), (0, 9))),
    ):
      with self.assertRaisesRegex(
        library.LibraryError,
        "x.so was built for XLA's FFI {}.{}, the installed jaxlib has"
        " {}.{}".format(*built_for, *installed),
      ):
        library.check_version(built_for, installed, "x.so")

  def test_version_of_the_installed_jaxlib_is_known(self):
    major, minor = library.installed_version(jax.ffi.include_dir())
    self.assertEqual(major, 0)
    self.assertGreaterEqual(minor, 3)

  def test_headers_without_version_are_an_error(self):
    with self.assertRaisesRegex(
      library.LibraryError, "cannot read the FFI version.*c_api.h"
    ):
      library.installed_version(self.directory)
    header = self.directory / library.API_HEADER
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 0\n")
    with self.assertRaisesRegex(library.LibraryError, "defines none"):
      library.installed_version(self.directory)

  @needs_library
  @pytest.mark.full
  def test_refused_library_leaves_jax_with_xla_and_a_reason(self):
    header = self.directory / library.API_HEADER
    header.parent.mkdir(parents=True)
    header.write_text(  # older than any header that it was built with
      "#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 2\n"
    )
    program = f"""
      import jax.ffi
      jax.ffi.include_dir = lambda: {str(self.directory)!r}
      registered = []
      jax.ffi.register_ffi_target = lambda *a, **k: registered.append(a)
      import jax.numpy as jnp
      import jaxplugin as jp
      x = jp.quantize(jnp.ones((3, 64)), jp.MXFP8)
      assert (jp.block_scaled_dot(x, x) == 64).all()
      assert not registered
      print(jp.detect_target("cpu").missing("cpu-kernels"))
      try:
        jp.block_scaled_dot(x, x, implementation="cpu")
      except NotImplementedError as error:
        print(error)
    """
    result = contract.run_program(program)
    self.assertEqual(result.returncode, 0, result.stderr)
    reason = r"built for XLA's FFI 0\.\d+, the installed jaxlib has 0\.2"
    self.assertRegex(result.stdout, reason)
    self.assertRegex(result.stdout, r"\n  cpu: .*" + reason)

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Configs of the cpu implementation: what they are, and that all are right."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.core import formats, targets
from jaxplugin.dot import backends
from jaxplugin.dot.backends import cpu
from jaxplugin.runtime import cpu_library
from jaxplugin.tables import records
from jaxplugin.testing import dot_problems

TARGET = jp.detect_target("cpu")
CpuConfig = cpu.CpuConfig
needs_library = absltest.skipIf(
  TARGET.cpu_kernels is None, TARGET.missing(targets.CPU_KERNELS)
)
INSTRUCTION_SETS = (
  *("baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16"),
  *("neon_dotprod", "neon_i8mm"),
)
BLOCKS_OF_48 = dataclasses.replace(jp.INT8_32, name="int8_48", block_size=48)
PLAIN = tuple(np.dtype(x) for x in (np.float32, jnp.bfloat16, np.float16))


def problem(lhs=jp.MXFP8, *rhs, **changes):
  sizes = {"m": 3, "n": 500, "k": 64}
  return dot_problems.problem(lhs, *rhs, **(sizes | changes))


def on(instruction_set: str, core_count: int = 8) -> targets.Target:
  return dataclasses.replace(
    TARGET, cpu_kernels=instruction_set, core_count=core_count
  )


EVERY = dict(engine="few_rows_avx2", panel_rows=2, task_rows=64, threads=1)


class CpuConfigTest(parameterized.TestCase):
  @parameterized.parameters(
    (CpuConfig(), {}),
    (CpuConfig(engine="vnni"), {"engine": "vnni"}),
    (CpuConfig(**EVERY), EVERY),
  )
  def test_fields_there_and_back(self, config, expected):
    fields = cpu.fields_of(config)
    self.assertEqual(fields, records.fields_of("config", expected))
    self.assertEqual(cpu.config_of(fields), config)

  @parameterized.parameters(
    ({"chunk": 3}, "must be among engine, panel_rows, .*, got chunk"),
    ({"engine": "sse"}, "engine must be one of .*'sse'"),
    ({"engine": None}, "engine must be one of .*None"),
    ({"engine": "by_rule"}, "must not repeat the defaults, got .*'by_rule'"),
    ({"threads": 0}, "must not repeat the defaults"),
    ({"threads": True}, "threads must be .*got True"),
    ({"task_rows": -1}, "task_rows must be .*got -1"),
    ({"panel_rows": "2"}, "panel_rows must be .*got '2'"),
  )
  def test_other_fields_are_refused(self, value, message):
    fields = records.fields_of("config", value)
    with self.assertRaisesRegex(ValueError, message):
      cpu.config_of(fields)
    error = cpu.fields_error(fields, problem(), TARGET)
    self.assertRegex(error, message)

  def test_attributes_say_what_is_not_by_rule(self):
    self.assertEqual(CpuConfig().attributes(), {})
    actual = CpuConfig(engine="vnni", threads=2).attributes()
    self.assertEqual(actual, {"engine": 6, "threads": 2})
    self.assertEqual({type(x) for x in actual.values()}, {np.int64})


@needs_library
class ServedTest(parameterized.TestCase):
  def test_engines_have_the_library_s_numbers(self):
    for number, name in enumerate(cpu.ENGINES):
      self.assertEqual(cpu_library.engine_name(number), name)
    self.assertIsNone(cpu_library.engine_name(len(cpu.ENGINES)))

  @parameterized.parameters(
    ("avx2", (), {}, {"engine": "vnni"}, "needs avx512_bf16 kernels, got avx2"),
    ("avx2", (), {}, {"engine": "f32"}, "f32 needs baseline kernels, got avx2"),
    ("avx512_bf16", (), {}, {"engine": "vnni"},
      "sides of int8, int4 or e2m1, got e4m3 and e4"),
    (*("avx512_bf16", (np.float32, jp.MXFP8), {}, {"engine": "bf16"}),
      "needs sides that are quantized, or bf16, got f32 and e4m3"),
    (*("avx512_bf16", (np.float32, BLOCKS_OF_48), {}),
      {"engine": "float_avx512"},
      "needs blocks of 16.*got f32 and int8 with f16 scales per 48"),
    (*("avx512_bf16", (), {"blocks_pair_up": False}, {"engine": "bf16"}),
      "got f32 and e4m3"),
    (*("avx512_bf16", (), {"m": 33}, {"engine": "few_rows_avx512"}),
      "supports up to 32 rows of the other side, got 33"),
    (*("avx2", (), {}, {"engine": "few_rows_avx2", "panel_rows": 5}),
      "to 4, got 5"),
    ("avx2", (), {}, {"task_rows": 1 << 20}, "task_rows must be .*got 1048576"),
    ("avx2", (), {"n": None}, {}, "static sizes"),
    ("riscv", (), {}, {}, "isa must be 1 to 7, got -1"),
    (*("amx_bf16", (), {}, {"engine": "neon_integers"}),
      "neon_integers needs neon_dotprod kernels, got amx_bf16"),
    (*("neon_i8mm", (), {}, {"engine": "float_avx2"}),
      "float_avx2 needs avx2 kernels, got neon_i8mm"),
    (*("neon_i8mm", (), {}, {"engine": "neon_integers"}),
      "neon_integers needs sides of int8, int4 or e2m1, got e4m3 and e4m3"),
    (None, (), {}, {}, "no CPU kernels"),
  )  # fmt: skip
  def test_config_error_says_why(self, isa, kinds, changes, config, message):
    target = dataclasses.replace(TARGET, cpu_kernels=isa)
    asked = problem(*kinds, **changes)
    error = cpu.config_error(asked, target, CpuConfig(**config))
    self.assertRegex(error, message)
    has_none = cpu.candidates(asked, target) == ()
    self.assertEqual(has_none, config == {})

  @parameterized.parameters(
    ("amx_bf16", jp.MXFP8, jp.MXFP8, 4, 4096, "few_rows_avx512"),
    ("amx_bf16", jp.MXFP8, jp.MXFP8, 5, 4096, "amx"),
    ("amx_bf16", jnp.bfloat16, jp.NVFP4, 5, 4096, "amx"),
    ("amx_bf16", jp.NVFP4, jp.NVFP4, 23, 4096, "vnni"),
    ("amx_bf16", jp.NVFP4, jp.NVFP4, 24, 4096, "amx"),
    ("amx_bf16", np.float32, jp.MXFP4, 24, 4096, "float_avx512"),
    ("avx512_bf16", jp.MXFP8, jp.MXFP8, 1, 4096, "few_rows_avx512"),
    ("avx512_bf16", jp.MXFP8, jp.MXFP8, 5, 4096, "few_rows_avx512"),
    ("avx512_bf16", jp.MXFP8, jp.MXFP8, 6, 4096, "bf16_rows"),
    ("avx512_bf16", jp.MXFP8, jp.MXFP8, 64, 4096, "bf16_rows"),
    ("avx512_bf16", jp.MXFP8, jp.MXFP8, 65, 4096, "bf16"),
    ("avx512_bf16", jnp.bfloat16, jp.NVFP4, 16, 8192, "few_rows_avx512"),
    ("avx512_bf16", jnp.bfloat16, jp.NVFP4, 17, 1024, "bf16_rows"),
    ("avx512_bf16", jnp.bfloat16, jp.MXFP4, 13, 1024, "bf16_rows"),
    ("avx512_bf16", jnp.bfloat16, jp.NVFP4, 48, 4096, "bf16_rows"),
    ("avx512_bf16", jnp.bfloat16, jp.NVFP4, 49, 4096, "bf16"),
    ("avx512_bf16", np.float32, jp.MXFP4, 8, 4096, "few_rows_avx512"),
    ("avx512_bf16", np.float32, jp.MXFP4, 9, 4096, "float_avx512"),
    ("avx512_bf16", np.float32, jp.MXFP8, 4, 4096, "few_rows_avx512"),
    ("avx512_bf16", np.float32, jp.MXFP8, 5, 4096, "float_avx512"),
    ("avx512_bf16", np.float32, jp.FP8_1X128, 5, 4096, "float_avx512"),
    ("avx512_bf16", jp.FP8_1X128, jp.FP8_1X128, 4, 4096, "few_rows_avx512"),
    ("avx512_bf16", jp.FP8_1X128, jp.FP8_1X128, 5, 4096, "float_avx512"),
    ("avx512", np.float32, jp.MXFP8, 5, 4096, "float_avx2"),
    ("avx512_bf16", jp.MXFP4, jp.MXFP4, 1, 4096, "few_rows_avx512"),
    ("avx512_bf16", jp.MXFP4, jp.MXFP4, 2, 4096, "few_rows_vnni"),
    ("avx512_bf16", jp.MXFP4, jp.MXFP4, 4, 4096, "few_rows_vnni"),
    ("avx512_bf16", jp.MXFP4, jp.MXFP4, 5, 4096, "vnni"),
    ("avx512_bf16", jp.NVFP4, jp.NVFP4, 4, 4096, "few_rows_avx512"),
    ("avx512_bf16", jp.NVFP4, jp.MXFP4, 5, 4096, "vnni"),
    ("avx512_bf16", jp.INT8_32, jp.INT8_32, 4, 4096, "few_rows_vnni"),
    ("avx512_bf16", jp.INT8_32, jp.NVFP4, 4, 4096, "few_rows_vnni"),
    ("avx512_bf16", jp.MXFP4, jp.INT8_32, 8, 4096, "few_rows_vnni"),
    ("avx512_bf16", jp.MXFP4, jp.INT8_32, 9, 4096, "vnni"),
    ("avx2", jp.INT8_32, jp.INT8_32, 4, 4096, "few_rows_avx2"),
    ("avx512_bf16", jp.INT8_32, jp.INT4_128, 9, 4096, "vnni"),
    ("amx_bf16", jp.INT4_32, jp.INT4_128, 64, 4096, "vnni"),
    ("avx512_bf16", jp.INT8_32, jp.MXFP8, 64, 4096, "float_avx512"),
    ("avx512_bf16", np.float32, BLOCKS_OF_48, 64, 4096, "float_avx2"),
    ("avx512", jp.INT8_32, jp.INT8_32, 64, 4096, "integer_avx2"),
    ("avx2", jp.INT4_32, jp.MXFP4, 5, 4096, "integer_avx2"),
    ("avx512_bf16", jp.MXFP8, jp.FP8_1X128_E8M0, 5, 4096, "few_rows_avx512"),
    ("avx512_bf16", jp.MXFP8, jp.FP8_1X128_E8M0, 6, 4096, "bf16_rows"),
    ("avx512_bf16", jnp.bfloat16, jp.INT8_ROW, 4, 4130, "few_rows_avx512"),
    ("avx512_bf16", jnp.bfloat16, jp.INT4_32, 12, 4096, "few_rows_avx512"),
    ("avx512_bf16", np.float32, jp.INT4_128, 8, 4096, "few_rows_avx512"),
    ("avx512_bf16", np.float32, jp.INT8_32, 1, 4096, "few_rows_avx512"),
    ("amx_bf16", jnp.bfloat16, jp.FP8_1X128_E8M0, 5, 4096, "amx"),
    ("amx_bf16", jnp.bfloat16, jp.FP8_1X128, 64, 4096, "bf16"),
    ("avx512_bf16", jnp.bfloat16, jp.INT8_32, 16, 8192, "few_rows_avx512"),
    ("avx512_bf16", jnp.bfloat16, jp.INT8_32, 17, 4096, "bf16"),
    ("avx512_bf16", jnp.bfloat16, jp.INT4_32, 32, 4096, "few_rows_avx512"),
    ("avx512_bf16", jnp.bfloat16, jp.INT4_32, 33, 4096, "bf16"),
    ("avx512_bf16", jp.FP8_1X128, jp.FP8_1X128, 64, 4096, "float_avx512"),
    ("avx512", jp.MXFP8, jp.MXFP8, 4, 4096, "few_rows_avx2"),
    ("avx2", jp.MXFP8, jp.MXFP8, 5, 4096, "float_avx2"),
    ("avx2", jp.NVFP4, jp.NVFP4, 4, 4096, "few_rows_avx2"),
    ("baseline_neon", jp.NVFP4, jp.NVFP4, 4, 4096, "f32"),
    ("neon_dotprod", jp.NVFP4, jp.NVFP4, 4, 4096, "neon_integers"),
    ("neon_dotprod", jp.MXFP4, jp.INT4_128, 128, 4096, "neon_integers"),
    ("neon_i8mm", jp.INT8_32, jp.INT8_32, 1, 4096, "neon_integers"),
    ("neon_i8mm", jp.MXFP8, jp.MXFP4, 128, 4096, "f32"),
    ("neon_i8mm", jnp.bfloat16, jp.INT8_32, 1, 4096, "f32"),
  )
  def test_engine_by_rule(self, isa, lhs, rhs, m, k, engine):
    asked = problem(lhs, rhs, m=m, k=k)
    self.assertEqual(cpu.engine_by_rule(asked, on(isa)), engine)

  @parameterized.parameters(
    ("avx512_bf16", np.float32, jp.MXFP4, 8, "few_rows_avx512"),
    ("avx512_bf16", np.float32, jp.MXFP4, 9, "vnni"),
    ("avx512_bf16", np.float16, jp.INT8_32, 4, "few_rows_avx512"),
    ("avx512_bf16", np.float16, jp.INT8_32, 8, "few_rows_vnni"),
    ("avx512_bf16", jnp.bfloat16, jp.NVFP4, 8, "few_rows_avx512"),
    ("avx512_bf16", jnp.bfloat16, jp.NVFP4, 9, "vnni"),
    ("amx_bf16", jnp.bfloat16, jp.INT8_32, 4, "few_rows_avx512"),
    ("avx512_bf16", jnp.bfloat16, jp.INT8_32, 5, "few_rows_vnni"),
    ("amx_bf16", jp.INT4_128, np.float32, 64, "vnni"),
    ("avx512_bf16", jnp.bfloat16, jp.MXFP8, 64, "bf16_rows"),
    ("avx512_bf16", jp.MXFP4, jp.MXFP4, 1, "few_rows_avx512"),
    ("avx512", np.float32, jp.MXFP4, 4, "few_rows_avx2"),
    ("avx2", jnp.bfloat16, jp.INT8_32, 5, "integer_avx2"),
    ("avx2", jnp.bfloat16, jp.MXFP8, 5, "float_avx2"),
    ("baseline_neon", np.float32, jp.MXFP4, 4, "f32"),
    ("neon_dotprod", np.float32, jp.MXFP4, 4, "neon_integers"),
    ("neon_i8mm", jnp.bfloat16, jp.MXFP8, 4, "f32"),
  )
  def test_engine_by_rule_of_fastest_precision(self, isa, lhs, rhs, m, engine):
    asked = problem(lhs, rhs, m=m, k=4096, fastest_precision=True)
    self.assertEqual(cpu.engine_by_rule(asked, on(isa)), engine)
    form = cpu.GIVEN
    of_bytes = ("vnni", "few_rows_vnni", "neon_integers", "integer_avx2")
    if isa == "avx512" or engine in of_bytes:
      form = cpu.INT8
    elif engine == "few_rows_avx512" and lhs in (np.float32, np.float16):
      form = cpu.BF16
    self.assertEqual(cpu.rows_form(asked, on(isa)), form)
    exact = dataclasses.replace(asked, fastest_precision=False)
    self.assertEqual(cpu.rows_form(exact, on(isa)), cpu.GIVEN)
    apart = dataclasses.replace(asked, blocks_pair_up=False)
    self.assertEqual(cpu.rows_form(apart, on(isa)), cpu.GIVEN)

  @parameterized.parameters(
    ("avx512_bf16", jp.MXFP4, True, ""),
    ("amx_bf16", jp.INT4_128, True, ""),
    ("avx512_bf16", jp.MXFP4, False, "do not convert rows"),
    ("avx512_bf16", jp.MXFP8, True, "do not convert rows"),
    ("avx2", jp.MXFP4, True, ""),
    ("avx2", jp.MXFP8, True, "do not convert rows"),
    ("baseline", jp.MXFP4, True, "do not convert rows"),
  )
  def test_rows_of_floats_where_they_would_be_quantized(
    self, isa, format, is_fastest, words
  ):
    asked = problem(np.float32, format, fastest_precision=is_fastest)
    config = CpuConfig(rows="floats")
    error = cpu.config_error(asked, on(isa), config)
    self.assertIn(words, error or "")
    found = cpu.candidates(asked, on(isa))
    self.assertEqual(config in found, error is None)
    self.assertEqual(error is None, not words)
    fields = (("rows", "floats"),)
    self.assertEqual(cpu.fields_of(config), fields)
    self.assertEqual(cpu.config_of(fields), config)
    with self.assertRaisesRegex(
      ValueError, "rows must be one of .* got 'int8'"
    ):
      CpuConfig(rows="int8")

  def test_few_rows_are_bf16_by_rule_and_bytes_by_a_named_engine(self):
    target = on("avx512_bf16")
    named = CpuConfig(engine="few_rows_vnni")
    for dtype, by_rule in (
      (jnp.bfloat16, "rows stay in bf16"),
      (np.float32, "rows are rounded to bf16"),
    ):
      asked = problem(dtype, jp.MXFP4, m=4, fastest_precision=True)
      found = cpu.candidates(asked, target)
      is_rounded = dtype == np.float32
      self.assertEqual(CpuConfig(rows="floats") in found, is_rounded)
      self.assertIn(named, found)
      for config, words in (
        (CpuConfig(), by_rule),
        (named, "rows are quantized"),
      ):
        fields = cpu.fields_of(config)
        (note,) = cpu.plan(asked, target, fields).notes
        self.assertIn(words, note)

  def test_a_vector_on_the_right_is_that_of_the_left(self):
    """The kernel gets it turned: one row against 900."""
    asked = problem(jp.MXFP4, np.float32, m=900, n=1)
    self.assertEqual(
      cpu.engine_by_rule(asked, on("avx512_bf16")), "few_rows_avx512"
    )
    config = CpuConfig(engine="few_rows_avx2")
    self.assertIsNone(cpu.config_error(asked, on("avx2"), config))

  @parameterized.product(
    isa=INSTRUCTION_SETS, lhs=(*formats.FORMATS, *PLAIN), rhs=formats.FORMATS
  )
  def test_candidates_are_few_different_and_served(self, isa, lhs, rhs):
    for m, n in itertools.product((1, 4, 6, 11, 40, 600), (1, 32, 2880)):
      asked = problem(lhs, rhs, m=m, n=n)
      found = cpu.candidates(asked, on(isa))
      self.assertEqual(found[0], CpuConfig())
      self.assertLen(set(found), len(found))
      self.assertLessEqual(len(found), 15)
      rule = cpu.engine_by_rule(asked, on(isa))
      self.assertNotIn(CpuConfig(engine=rule), found)
      for config in found:
        self.assertIsNone(cpu.config_error(asked, on(isa), config))
      threads = {config.threads for config in found}
      is_parallel = n == 2880 and m > 4
      self.assertEqual(threads, {0, 1 if is_parallel else 8}, (m, n))
      alone = cpu.candidates(asked, on(isa, core_count=1))
      self.assertEqual({config.threads for config in alone}, {0})


def emit_configured(config: CpuConfig, x: Any, w: Any) -> Any:
  """The dot under a config."""
  backend = cpu.BACKEND.configured(cpu.fields_of(config))
  with mock.patch.dict(backends.BACKENDS, {"cpu": backend}):
    jax.clear_caches()
    try:
      return jax.jit(
        lambda x, w: jp.block_scaled_dot(x, w, implementation="cpu")
      ).lower(x, w)
    finally:
      jax.clear_caches()


@needs_library
class LoweredTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.x, self.w = (
      jp.quantize(
        jax.device_put(np.asarray(rng.integers(-3, 4, (r, 64)), np.float32)), f
      )
      for r, f in ((3, jp.MXFP8), (40, jp.MXFP4))
    )

  def test_by_rule_is_the_program_without_a_config(self):
    plain = jax.jit(
      lambda x, w: jp.block_scaled_dot(x, w, implementation="cpu")
    ).lower(self.x, self.w)
    by_rule = emit_configured(CpuConfig(), self.x, self.w)
    self.assertEqual(by_rule.as_text(), plain.as_text())
    self.assertNotIn("engine", plain.as_text())

  def test_a_config_is_attributes_of_the_call(self):
    if TARGET.cpu_kernels not in ("avx2", "avx512", "avx512_bf16"):
      self.skipTest("no AVX2")
    config = CpuConfig(engine="few_rows_avx2", panel_rows=2)
    lowered = emit_configured(config, self.x, self.w)
    self.assertRegex(lowered.as_text(), "engine = 4 : i64")
    self.assertRegex(lowered.as_text(), "panel_rows = 2 : i64")
    x, w = (np.asarray(a.dequantize()) for a in (self.x, self.w))
    actual = lowered.compile()(self.x, self.w)
    np.testing.assert_array_equal(actual, x @ w.T)

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Any config of a dot gives right results: engines, sizes of tasks, threads."""

from __future__ import annotations

import operator
import os
import pathlib
import sys
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing

BF16 = "avx512_bf16"
NEON = ("neon_dotprod", "neon_i8mm")
# Engine -> its number, and the instruction sets that have it (dot/config.h).
ENGINES = {
  "f32": (1, ("baseline", *NEON)),
  "float_avx2": (2, ("avx2", "avx512", BF16, "amx_bf16")),
  "integer_avx2": (3, ("avx2", "avx512", BF16, "amx_bf16")),
  "few_rows_avx2": (4, ("avx2", "avx512", BF16, "amx_bf16")),
  "bf16": (5, (BF16, "amx_bf16")),
  "vnni": (6, (BF16, "amx_bf16")),
  "few_rows_avx512": (7, (BF16, "amx_bf16")),
  "amx": (8, ("amx_bf16",)),
  "few_rows_vnni": (9, (BF16, "amx_bf16")),
  "bf16_rows": (10, (BF16, "amx_bf16")),
  "float_avx512": (11, (BF16, "amx_bf16")),
  "neon_integers": (12, NEON),
}
BF16_ENGINES = ("bf16", "bf16_rows", "amx")
# Engine of this machine -> an instruction set that has it. It is avx512_bf16 if
# possible, so that the tests of AVX2's engines pass through it.
OWN = {
  engine: BF16 if BF16 in found else found[0]
  for engine, (_, isas) in ENGINES.items()
  if (found := [isa for isa in isas if isa in testing.ISAS])
}
PAIRS = (
  *(("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("mxfp4", "nvfp4")),
  *(("mxfp8", "mxfp8"), ("mxfp6_e2m3", "nvfp4"), ("bf16", "mxfp4")),
  *(("f32", "mxfp4"), ("f16", "mxfp8"), ("mxfp8_e5m2", "bf16")),
  *(("int8_32", "int8_row"), ("int4_128", "int4_32"), ("int8_32", "int4_128")),
  *(("int8_row", "mxfp4"), ("bf16", "int8_row"), ("f32", "int4_128")),
  *(("mxfp8", "int4_32"), ("bf16", "fp8_1x128"), ("f16", "int8_32")),
  *(("mxfp4", "int8_16"), ("nvfp4", "int4_32")),
  *(("f32", "f16"), ("mxfp8", "f32")),
)


def serves(engine: str, lhs: str, rhs: str, m: int) -> bool:
  """Returns whether an engine supports m <= 32 rows of lhs and more of rhs."""
  fp4 = ("mxfp4", "nvfp4")
  wide = ("f32", "f16")
  plain = (*wide, "bf16")
  is_integer = [name.startswith("int") for name in (lhs, rhs)]
  is_bytes = [name in fp4 for name in (lhs, rhs)]
  engines_of_bytes = ("integer_avx2", "vnni", "few_rows_vnni")
  if engine in engines_of_bytes and any(is_integer):
    return all(map(operator.or_, is_integer, is_bytes))
  if engine in engines_of_bytes:
    return lhs in fp4 and rhs in fp4
  if engine in BF16_ENGINES:
    is_scaled = [
      name.startswith("int") or name == "fp8_1x128" for name in (lhs, rhs)
    ]
    return not (is_scaled[0] or lhs in wide or rhs in wide) and (
      not is_scaled[1] or (engine == "bf16" and not rhs.endswith("_16"))
    )
  return not engine.startswith("few_rows_avx") or rhs not in plain


def attributes(engine: str, **sizes: int) -> dict[str, int]:
  return {"engine": ENGINES[engine][0], **sizes}


class DotConfigTest(parameterized.TestCase):
  def check(self, lhs, rhs, isa, config):
    """Checks a dot of integers, which is exact."""
    testing.assert_exact(lhs, rhs, isas=[isa], attributes=config)

  @parameterized.product(pair=PAIRS, engine=tuple(OWN))
  def test_every_engine_of_any_size_is_exact_on_integers(self, pair, engine):
    """Sizes of panels and tasks are random; k has tails; there are batches."""
    isa = OWN[engine]
    rng = np.random.default_rng([PAIRS.index(pair), ENGINES[engine][0]])
    is_few = engine.startswith("few_rows")
    for m, n, k in ((1, 40, 96), (5, 70, 1058), (32, 33, 130)):
      batch = int(rng.integers(1, 3))
      lhs = testing.any_side(pair[0], (batch, m, k), rng, True)
      rhs = testing.any_side(pair[1], (batch, n, k), rng, True)
      config = attributes(
        engine,
        panel_rows=int(rng.integers(0, 5 if is_few else 40)),
        task_rows=int(rng.choice([0, 1, 3, 16, 64, 1000])),
        threads=int(rng.integers(0, 4)),
      )
      if serves(engine, *pair, m):
        self.check(lhs, rhs, isa, config)
        continue
      with self.assertRaisesRegex(
        testing.HandlerError, f"the engine {engine} "
      ):
        testing.call(lhs, rhs, isa=isa, attributes=config)

  @parameterized.product(pair=PAIRS, engine=tuple(OWN))
  def test_panels_of_rhs_are_exact_on_integers(self, pair, engine):
    """rhs has fewer rows, so it is cut into panels."""
    if engine.startswith("few_rows") or not serves(engine, *pair, 9):
      return
    if engine == "bf16" and not serves(engine, *pair[::-1], 9):
      return  # the engine multiplies sums only by scales of the strip side
    rng = np.random.default_rng(0)
    lhs = testing.any_side(pair[0], (2, 40, 96), rng, True)
    rhs = testing.any_side(pair[1], (2, 21, 96), rng, True)
    self.check(lhs, rhs, OWN[engine], attributes(engine, panel_rows=8))

  @parameterized.product(pair=PAIRS, engine=tuple(OWN))
  def test_sizes_of_tasks_and_threads_change_no_bit(self, pair, engine):
    isa = OWN[engine]
    if not serves(engine, *pair, 9):
      return
    rng = np.random.default_rng(0)
    lhs = testing.any_side(pair[0], (1, 9, 1090), rng, False)
    rhs = testing.any_side(pair[1], (1, 300, 1090), rng, False)
    # threads=2 overrides the rule that a small dot uses one thread.
    first = testing.call(
      lhs, rhs, isa=isa, attributes=attributes(engine, threads=2)
    )
    for name, value in (("panel_rows", 2), ("task_rows", 3), ("threads", 1)):
      # few_rows_avx2 has more accumulators per row if a pass has fewer rows.
      if engine == "few_rows_avx2" and name == "panel_rows":
        continue
      config = attributes(engine, **{name: value})
      got = testing.call(lhs, rhs, isa=isa, attributes=config)
      np.testing.assert_array_equal(got, first, f"{name}={value}")

  @parameterized.product(
    pair=(("bf16", "mxfp4"), ("bf16", "mxfp8"), ("f32", "mxfp4")),
    engine=tuple(OWN),
    exponent=(-120, 100),
    m=(3, 11),
  )
  def test_numbers_that_an_engine_cannot_hold_are_exact(
    self, pair, engine, exponent, m
  ):
    if not serves(engine, *pair, m):
      return
    rng = np.random.default_rng(0)
    values = rng.integers(-4, 5, (1, m, 96)).astype(np.float64)
    lhs = testing.Side(pair[0], np.ldexp(values, exponent), None)
    rhs = testing.integers(pair[1], (1, 40, 96), rng)
    self.check(lhs, rhs, OWN[engine], attributes(engine, panel_rows=2))

  @parameterized.product(engine=tuple(OWN), m=(2, 9))
  def test_rows_far_from_1_are_exact_under_each_engine(self, engine, m):
    """The kernel stops and runs again with rebased rows and the same config."""
    isa = OWN[engine]
    rng = np.random.default_rng(0)
    lhs = testing.integers("mxfp4", (1, m, 192), rng)
    code = np.asarray(lhs.scale).view(np.uint8) - 70
    lhs = testing.Side("mxfp4", lhs.values, code)
    rhs = testing.integers("mxfp4", (1, 40, 192), rng)
    self.check(lhs, rhs, isa, attributes(engine))

  @parameterized.product(engine=tuple(OWN))
  def test_epilogue_follows_each_engine(self, engine):
    isa = OWN[engine]
    rng = np.random.default_rng(0)
    lhs = testing.integers("nvfp4", (2, 6, 64), rng)
    rhs = testing.integers("mxfp4", (2, 40, 64), rng)
    bias = rng.integers(-9, 9, 40).astype(np.float32)
    residual = rng.integers(-9, 9, (2, 6, 40)).astype(np.float32)
    got = testing.call(
      lhs,
      rhs,
      np.float32(2),
      bias,
      residual,
      activation=1,
      isa=isa,
      attributes=attributes(engine, panel_rows=3, task_rows=5),
    )
    expected = np.maximum(2 * testing.oracle(lhs, rhs) + bias, 0) + residual
    np.testing.assert_array_equal(got, expected.astype(np.float32))

  @parameterized.parameters(testing.call, testing.call_ragged)
  def test_one_thread_computes_a_limited_call(self, function):
    rng = np.random.default_rng(0)
    rhs = testing.integers("mxfp8", (1, 2048, 1024), rng)
    operands = testing.integers("bf16", (1, 16, 1024), rng), rhs
    if function is testing.call_ragged:
      operands = testing.integers("bf16", (16, 1024), rng), rhs, [16]
    pool = testing.frames._pool
    for limit in (0, 1):
      with mock.patch.object(pool, "submit", wraps=pool.submit) as submit:
        function(*operands, attributes={"max_threads": limit})
      has_cores = len(os.sched_getaffinity(0)) > 1
      self.assertEqual(submit.called, limit == 0 and has_cores)

  def test_one_weight_for_a_batch_counts_all_rows(self):
    """A few_rows engine supports 32 rows but not 33."""
    if "avx2" not in testing.ISAS:
      self.skipTest("the engine needs AVX2")
    isa = "avx2"
    rng = np.random.default_rng(0)
    rhs = testing.integers("mxfp8", (1, 40, 64), rng)
    config = attributes("few_rows_avx2")
    self.check(testing.integers("mxfp8", (4, 8, 64), rng), rhs, isa, config)
    with self.assertRaisesRegex(
      testing.HandlerError, "up to 32 rows of the other.*got 33"
    ):
      testing.call(
        testing.integers("mxfp8", (3, 11, 64), rng),
        rhs,
        isa=isa,
        attributes=config,
      )


class DotConfigErrorTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"engine": -1}, "engine must be 0 .by_rule. to 12, got -1"),
    ({"engine": 13}, "engine must be .*got 13"),
    ({"engine": 1 << 40}, "engine must be .*got 1099511627776"),
    ({"panel_rows": -1}, "panel_rows must be 0 .chosen.* to 4096, got -1"),
    ({"panel_rows": 4097}, "panel_rows must be .*got 4097"),
    ({"engine": 4, "panel_rows": 5}, "panel_rows must be .*to 4, got 5"),
    ({"task_rows": 16385}, "task_rows must be 0 .chosen.* to 16384, got 16385"),
    ({"task_rows": -(1 << 62)}, "task_rows must be"),
    ({"threads": 1025}, "threads must be 0 .chosen.* to 1024, got 1025"),
    ({"engine": np.int32(99)}, "the attribute engine must be i64"),
    ({"chunk": 2}, "no other attributes are known"),
    ({"max_threads": -1}, "max_threads must be 0 .all threads. or positive"),
  )
  def test_a_bad_config_is_an_error(self, config, message):
    rng = np.random.default_rng(0)
    side = testing.integers("mxfp8", (1, 3, 64), rng)
    with self.assertRaisesRegex(testing.HandlerError, message):
      testing.call(side, side, attributes=config)

  @testing.each(engine=tuple(ENGINES))
  def test_an_engine_of_another_instruction_set_is_an_error(self, engine, isa):
    _, isas = ENGINES[engine]
    rng = np.random.default_rng(0)
    side = testing.integers("mxfp4", (1, 3, 64), rng)
    if isa in isas:
      rhs = testing.integers("mxfp4", (1, 3, 64), rng)
      testing.call(side, rhs, isa=isa, attributes=attributes(engine))
      return
    with self.assertRaisesRegex(
      testing.HandlerError,
      f"the engine {engine} needs {isas[0]} kernels, got {isa} ones",
    ):
      testing.call(side, side, isa=isa, attributes=attributes(engine))


if __name__ == "__main__":
  absltest.main()

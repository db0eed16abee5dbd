# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Malformed calls: each a typed error, while tracing, that says what is wrong.

TypeError is for rank, dtype and shape, ValueError for a bad parameter, and
NotImplementedError for what is valid but cannot be served. The last test runs
the others again under `python -O`, where `assert` checks nothing.
"""

from __future__ import annotations

import collections
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.dot import rules
from jaxplugin.testing import malformed_calls

pytestmark = pytest.mark.smoke

CALLS: Final = malformed_calls.CALLS
MODES: Final = malformed_calls.MODES
e4m3, fp4 = malformed_calls.e4m3, malformed_calls.fp4
MIN_MALFORMED_CALLS: Final = 40
_UNDER_O: Final = "JAXPLUGIN_TEST_RUNS_OPTIMIZED"


class MalformedCallTest(parameterized.TestCase):
  @parameterized.named_parameters((name, name) for name in CALLS)
  def test_malformed(self, name):
    malformed = CALLS[name]
    for mode in MODES:
      with self.subTest(mode):
        with self.assertRaises(malformed.error) as caught:
          malformed_calls.run(malformed, mode)
        self.assertIs(type(caught.exception), malformed.error)
        message = str(caught.exception)
        self.assertStartsWith(message, "block_scaled_dot: ")
        for fragment in malformed.fragments:
          self.assertIn(fragment, message)
        # An f-string without its f would show a brace.
        self.assertNotRegex(message, r"[{}]")

  @parameterized.parameters(((6,),), ((1, 2, 6),))
  def test_mapped_global_scale_of_another_rank_is_refused(self, shape):
    # NumPy's broadcasting would take the mapped dimension for rows.
    arrays = {**malformed_calls.WELL_FORMED(), **malformed_calls.mx_lhs(2, 64)}
    function = lambda g: jp.block_scaled_dot(**arrays, global_scale=g)
    with self.assertRaisesRegex(
      TypeError, re.escape(f"global_scale of shape {shape}")
    ):
      jax.vmap(function)(malformed_calls.f32(2, *shape))

  @parameterized.parameters(*MODES)
  def test_well_formed_call_passes(self, mode):
    malformed_calls.run(malformed_calls.Malformed(Exception, ()), mode)

  def test_there_are_enough_kinds(self):
    self.assertGreaterEqual(len(CALLS), MIN_MALFORMED_CALLS)
    kinds = collections.Counter(call.error for call in CALLS.values())
    self.assertGreater(kinds[TypeError], 30)
    self.assertGreater(kinds[ValueError], 8)

  @parameterized.product(implementation=("cudnn", "triton", "cpu"), mode=MODES)
  def test_forced_implementation_that_cannot_serve_is_refused(
    self, implementation, mode
  ):
    # A target that no implementation but xla knows.
    target = jp.Target(name="abacus", platform="abacus")
    error = NotImplementedError
    malformed = malformed_calls.static_error(
      error, implementation=implementation
    )
    with jp.use_target(target), self.assertRaises(error) as caught:
      malformed_calls.run(malformed, mode)
    message = str(caught.exception)
    self.assertStartsWith(
      message, f"block_scaled_dot: implementation={implementation!r}"
    )
    for name in ("cudnn", "triton", "cpu", "xla"):
      self.assertRegex(message, rf"\n  {name}: \w+")
    self.assertIn("\n  xla: supported", message)
    self.assertIn("abacus", message)
    self.assertIn("m=4 n=6 k=64", message)

  @parameterized.parameters("lhs", "rhs")
  def test_negative_nvfp4_scale_is_refused_where_it_is_known(self, side):
    other = "rhs" if side == "lhs" else "lhs"
    scale = np.ones((4, 2), np.float32)
    scale[3, 1] = -1.5
    scale = jnp.asarray(scale.astype(formats.E4M3))
    args = {side: fp4(4, 32), f"{side}_scale": scale}
    args |= {other: fp4(6, 32), f"{other}_scale": e4m3(6, 2)}
    pattern = rf"{side}_scale.*negative.*-1\.5 at \(3, 1\)"
    with self.assertRaisesRegex(ValueError, pattern):
      jp.block_scaled_dot(**args)
    array = jp.ScaledArray(args[side], scale, None, jp.NVFP4)
    pair = {side: array, f"{side}_scale": None}
    with self.assertRaisesRegex(ValueError, pattern):
      jp.block_scaled_dot(**{**args, **pair})
    # Also as a constant of a function that is being traced.
    values = args.pop(side)
    args.pop(f"{side}_scale")
    function = lambda rest: jp.block_scaled_dot(
      **{side: values, f"{side}_scale": scale}, **rest
    )
    with self.assertRaisesRegex(ValueError, pattern):
      jax.jit(function).trace(args)

  def test_negative_zero_and_nan_nvfp4_scales_are_not_refused(self):
    scale = np.array([[0x80, 0xFF], [0x38, 0x7F]], np.uint8).view(formats.E4M3)
    actual = jp.block_scaled_dot(
      fp4(2, 32), fp4(6, 32), jnp.asarray(scale), e4m3(6, 2)
    )
    self.assertTrue(np.isnan(np.asarray(actual)).all())

  def test_precisions_of_jax_are_accepted(self):
    of_jax = jax.lax.Precision
    highest = ("highest", ("highest", "default"), ("default", "highest"))
    for precision in (
      *(None, "fastest", "default", "high", "bfloat16", of_jax.HIGH),
      *((of_jax.DEFAULT, None), *highest),
    ):
      is_highest = precision in highest
      jp.block_scaled_dot(**malformed_calls.WELL_FORMED(), precision=precision)
      self.assertIs(rules.canonical_precision(precision), is_highest)

  def test_error_names_the_remedy(self):
    for name, remedy in (
      ("k_is_no_multiple_of_32", "pad lhs and rhs"),
      ("rhs_scale_too_long", "pass block_size=32"),
      ("both_operands_plain", "jax.lax.dot_general"),
      ("scaled_array_blocked_along_rows", "axis=1"),
      ("quantized_lhs_without_scale", "pass lhs_scale"),
    ):
      with self.assertRaisesRegex(TypeError, re.escape(remedy)):
        malformed_calls.run(CALLS[name], "eager")

  def test_asserts_are_gone_where_they_should_be(self):
    expected = int(os.environ.get(_UNDER_O, sys.flags.optimize))
    self.assertEqual(sys.flags.optimize, expected)


class OptimizedPythonTest(absltest.TestCase):
  @pytest.mark.full
  def test_the_same_errors_under_python_o(self):
    root = pathlib.Path(jp.__file__).parent.parent
    path = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
      [
        *(sys.executable, "-O", "-m", "jaxplugin.dot.rules_errors_test"),
        "MalformedCallTest",
      ],
      env={
        **os.environ,
        _UNDER_O: "1",
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
      },
      cwd=tempfile.gettempdir(),
      capture_output=True,
      text=True,
      timeout=300,
      check=False,
    )
    output = result.stdout + result.stderr
    self.assertEqual(result.returncode, 0, output[-5000:])
    (ran,) = re.findall(r"Ran (\d+) tests", output)
    self.assertGreater(int(ran), len(CALLS))


if __name__ == "__main__":  # the test of python -O runs it
  absltest.main()

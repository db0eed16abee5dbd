# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The fuzzing command finds planted faults and prints how to repeat them."""

import contextlib
import io
import shlex
from unittest import mock

import fuzz
import jax.numpy as jnp
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin import dot


def run(*arguments):
  """Returns the exit status, and the lines printed."""
  with contextlib.redirect_stdout(io.StringIO()) as out:
    status = fuzz.main(arguments)
  return status, out.getvalue().splitlines()


class FuzzTest(parameterized.TestCase):
  @parameterized.parameters(*fuzz.AREAS)
  @pytest.mark.sample(2)
  def test_case_of_each_area_passes(self, area):
    status, lines = run("--seed", "1", "--only", area, "--case", "1")
    self.assertEqual(
      (status, lines),
      (0, ["seed 1", f"seed 1: 0 failures in cases: 1 of {area}"]),
    )

  @pytest.mark.full
  def test_wrong_result_is_found_and_repeated_by_its_command(self):
    right = dot.block_scaled_dot

    def wrong(*args, **kwargs):
      return right(*args, **kwargs) * jnp.float32(1.25)

    with mock.patch.object(jp, "block_scaled_dot", wrong):
      status, lines = run("--seed", "3", "--only", "gradient", "--seconds", "5")
      self.assertEqual(status, 1)
      command = lines[1].removeprefix("FAILED: ")
      self.assertStartsWith(
        command, "python tools/fuzz.py --seed 3 --only gradient --case "
      )
      again = run(*shlex.split(command)[2:])
      self.assertEqual(again[0], 1)
      self.assertEqual(again[1][1:3], lines[1:3])
    self.assertEqual(run(*shlex.split(command)[2:])[0], 0)

  def test_seed_is_fresh_and_printed(self):
    seeds = [run("--seconds", "0")[1][0] for _ in range(2)]
    self.assertNotEqual(*seeds)
    self.assertRegex(seeds[0], r"^seed \d+$")

  def test_case_needs_its_area(self):
    with (
      contextlib.redirect_stderr(io.StringIO()) as err,
      self.assertRaises(SystemExit),
    ):
      run("--case", "3")
    self.assertIn("--case needs one --only", err.getvalue())

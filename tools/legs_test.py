# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What `make check` and `make slow` run is there; a check has part of each."""

import pathlib

from absl.testing import absltest

import conftest

# Resolved: under Bazel this file is a link, and the whole project is meant.
ROOT = pathlib.Path(__file__).resolve().parents[1]


class CheckTest(absltest.TestCase):
  def test_whole_files_are_there(self):
    for name in (*conftest.WHOLE, *conftest.SLOW):
      self.assertTrue((ROOT / name.partition("::")[0]).is_file(), name)

  def test_slow_gpus_are_those_that_others_stand_for(self):
    file = "kernels/gpu/block_scaled_matmul_compile_test.py"
    self.assertTrue((ROOT / file).is_file())
    names = ("test_nothing_is_atomic_sm_{}_mxfp8", "test_reduction_sm_{}_a_b")
    found = {
      gpu
      for gpu in ("80", "89", "90", "100", "103", "120", "121")
      for name in names
      if conftest.SLOW_KERNELS.match(f"{file}::CompileTest::{name.format(gpu)}")
    }
    self.assertEqual(found, {"80", "89", "103", "120", "121"})

  def test_slow_products_are_those_that_others_stand_for(self):
    test = (
      "kernels/gpu/block_scaled_matmul_compile_test.py::CompileTest"
      "::test_figures_of_the_table_have_not_grown_sm_90_"
    )
    slow = ("mxfp8_tma", "bf16_nvfp4_64", "bf16_mxfp6", "nvfp4_swizzled_128")
    for key in slow:
      self.assertTrue(conftest.SLOW_KERNELS.match(test + key), key)
    for key in ("mxfp8", "bf16_nvfp4_16", "mxfp6", "nvfp4_swizzled"):
      self.assertFalse(conftest.SLOW_KERNELS.match(test + key), key)

  def test_slow_seeds_are_those_beyond_ten(self):
    for name in (
      "test_fuzzed_shapes_are_exact_on_integers_and_bounded_otherwise",
      "test_fuzzed_sizes",
    ):
      found = {
        seed
        for seed in range(20)
        if conftest.SLOW_SEEDS.match(f"a/b_test.py::FuzzTest::{name}{seed}")
      }
      self.assertEqual(found, {*range(10, 20)})

  def test_named_files_are_run_whole(self):
    names = [f"{conftest.WHOLE[-1]}::Test::test_{i}" for i in range(50)]
    self.assertEqual(conftest.checked(names), {*names})

  def test_other_files_have_their_part_the_first_test_in_any_case(self):
    every = conftest.EVERY
    long = [f"a_test.py::Test::test_{i}" for i in range(2 * every)]
    short = ["b_test.py::Test::test_0", "b_test.py::Test::test_1"]
    self.assertEqual(
      conftest.checked([*long, *short]), {long[0], long[every], short[0]}
    )


if __name__ == "__main__":
  absltest.main()

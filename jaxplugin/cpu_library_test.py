# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The handlers reach XLA once, or not at all."""

import concurrent.futures
from unittest import mock

import jax
import jax.ffi
from absl.testing import absltest

from jaxplugin import cpu_library
from jaxplugin import target
from jaxplugin.kernels.cpu import library

NUM_THREADS = 8
TARGET = target.detect_target("cpu")


class RegisterTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    cpu_library._register_once.cache_clear()
    self.addCleanup(cpu_library._register_once.cache_clear)
    self.register = self.enter_context(
      mock.patch.object(jax.ffi, "register_ffi_target")
    )

  @absltest.skipIf(TARGET.cpu_kernels is None, TARGET.cpu_kernels_error)
  def test_handlers_are_registered_once_whatever_thread_comes_first(self):
    with concurrent.futures.ThreadPoolExecutor(NUM_THREADS) as pool:
      list(pool.map(lambda _: cpu_library.register(), range(4 * NUM_THREADS)))
    calls = self.register.call_args_list
    self.assertEqual([args[0][0] for args in calls], list(library.HANDLERS))
    self.assertEqual({args[1]["platform"] for args in calls}, {"cpu"})

  def test_nothing_is_registered_without_a_library(self):
    error = library.LibraryError("not built")
    with (
      mock.patch.object(library, "load", side_effect=error),
      self.assertRaisesRegex(library.LibraryError, "not built"),
    ):
      cpu_library.register()
    self.register.assert_not_called()


if __name__ == "__main__":
  absltest.main()

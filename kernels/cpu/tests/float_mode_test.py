# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The handlers restore the float mode of XLA's threads.

XLA:CPU flushes subnormals. The handlers do not, on the same threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import platform
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from absl.testing import absltest, parameterized

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing

# Runs in a new process, so that no handler has run on its threads.
PROGRAM = """
  import sys
  sys.path.insert(0, sys.argv[1])
  import jax
  import jax.numpy as jnp
  import numpy as np
  import testing

  TINY, ROUNDS, SIZE = np.float32(2.0**-100), 20, 1024
  x = np.full((SIZE, SIZE), 2.0**-30, np.float32)
  # 64 products of 2^-36: 2^-30 too.
  values = np.ones((1, SIZE, 64), testing.E4M3)
  scale = np.full((1, SIZE, 2), 127 - 18, np.uint8).view(testing.E8M0)

  @jax.jit
  def multiply(x):
    return x * TINY  # 2^-130: a subnormal

  @jax.jit
  def multiply_after_handlers(values, scale):
    one = testing.dot(values[:, :1], scale[:, :1], values[:, :1], scale[:, :1])
    by_one_thread = jnp.broadcast_to(one[0], x.shape)
    by_dot = testing.dot(values, scale, values, scale)[0]
    codes, scales, _ = testing.quantize(by_dot, format=0)
    by_dequantize = testing.dequantize(
      jax.lax.bitcast_convert_type(codes, testing.E4M3),
      jax.lax.bitcast_convert_type(scales, testing.E8M0),
      k=SIZE,
      block_size=32,
    )
    results = by_one_thread, by_dot, by_dequantize
    return [multiply(y) for y in results], results

  def kept(product):
    return np.count_nonzero(np.asarray(product))

  print(kept(multiply(x)))
  inside, after = set(), set()
  for _ in range(ROUNDS):
    products, results = multiply_after_handlers(values, scale)
    for y in results:
      np.testing.assert_array_equal(y, x)
    inside |= set(map(kept, products))
    after |= {kept(multiply(x)) for _ in range(4)}
  print(*sorted(inside))
  print(*sorted(after))
"""


# The bits for flush-to-zero and denormals-are-zero in x86-64's MXCSR.
FLUSHES = 0x8040


@contextlib.contextmanager
def subnormals_flushed():
  """Gives the calling thread the float mode of XLA:CPU's threads."""
  libm = ctypes.CDLL("libm.so.6")
  saved = (ctypes.c_uint32 * 8)()  # glibc's fenv_t, which ends with MXCSR
  libm.fegetenv(saved)
  changed = type(saved)(*saved)
  changed[7] |= FLUSHES
  libm.fesetenv(changed)
  try:
    yield
  finally:
    libm.fesetenv(saved)


class FloatModeTest(parameterized.TestCase):
  @testing.each()
  def test_a_call_counts_subnormals_and_leaves_the_threads_mode(self, isa):
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
      self.skipTest("sets MXCSR by glibc's fenv_t")
    ones = np.ones((1, 2, 32), np.float32)
    factor = np.float32(2.0**-140)
    tiny = np.full(64, 2.0**-100, np.float32)
    with subnormals_flushed():
      # The calling thread does all of the work.
      got = testing.dot(ones, None, ones, None, factor, isa=isa)
      least = tiny * np.float32(2.0**-30)
    self.assertFalse(least.any())
    np.testing.assert_array_equal(got, np.full((1, 2, 2), 2.0**-135, "f4"))

  @pytest.mark.full
  def test_xla_treats_subnormals_after_a_call_as_it_did_before(self):
    """Checks the calling thread and the pool's, during and after a program.

    The arrays are large, so that every thread gets a part of each operation.
    """
    done = subprocess.run(
      [
        sys.executable,
        "-c",
        textwrap.dedent(PROGRAM),
        str(pathlib.Path(__file__).parent),
      ],
      env=os.environ | {testing.LIBRARY_VARIABLE: testing.library()._name},
      capture_output=True,
      text=True,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    before, inside, after = done.stdout.splitlines()
    # XLA:CPU keeps all subnormals or flushes all of them.
    self.assertIn(before, ("0", str(1024 * 1024)))
    self.assertEqual(inside, before)
    self.assertEqual(after, before)


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the tests of both lowerings of quantize and dequantize share."""

import jax
import numpy as np
from absl.testing import absltest

from jaxplugin import quantization
from jaxplugin import target as target_lib

# A CPU without kernels: operations serve.
OPERATIONS = target_lib.named_target("cpu")
TARGET = target_lib.detect_target("cpu")
needs_library = absltest.skipIf(
  TARGET.cpu_kernels is None, TARGET.cpu_kernels_error
)

X = np.random.default_rng(13).normal(size=(8, 4, 64)).astype(np.float32)


def lowered_text(function, *args, platforms=("cpu",)):
  traced = jax.jit(lambda *args: function(*args)).trace(*args)
  return traced.lower(lowering_platforms=platforms).as_text()


def kernel_calls(text):
  """How often a module calls the kernels: (quantize, dequantize)."""
  return tuple(
    text.count(f"@jaxplugin_{name}(") for name in ("quantize", "dequantize")
  )


def leaves_as_bytes(tree):
  return [
    (x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)
  ]


def by_operations(function):
  def wrapped(*args):
    with target_lib.use_target(OPERATIONS):
      return function(*args)

  return wrapped


def round_trip(format, **kwargs):
  return lambda x: quantization.dequantize(
    quantization.quantize(x, format, **kwargs)
  )

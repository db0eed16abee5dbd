# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of the lowerings of quantize and dequantize."""

import dataclasses
import importlib.util
from unittest import mock

import jax
import numpy as np
from absl.testing import absltest, parameterized

from jaxplugin import quantization
from jaxplugin.core import targets
from jaxplugin.operation import triton_launches
from jaxplugin.runtime import lowering, triton_library
from jaxplugin.testing import contract, interpreted

# A CPU without kernels: operations serve.
OPERATIONS = targets.named_target("cpu")
TARGET = targets.detect_target("cpu")
needs_library = absltest.skipIf(
  TARGET.cpu_kernels is None, TARGET.missing(targets.CPU_KERNELS)
)
needs_triton = absltest.skipIf(
  importlib.util.find_spec("triton") is None, "triton is not installed"
)
needs_jax_triton = absltest.skipIf(
  importlib.util.find_spec("jax_triton") is None, "jax-triton is not installed"
)
needs_compiler = absltest.skipIf(
  importlib.util.find_spec("jax_triton") is None
  or importlib.util.find_spec("jax_cuda13_plugin") is None,
  "jax-triton or jax-cuda13-plugin is not installed",
)
H200 = targets.named_target("h200")

X = np.random.default_rng(13).normal(size=(8, 4, 64)).astype(np.float32)


def calls(function, *args, **kwargs):
  """Returns `kernel_calls` of the module of a call."""
  return kernel_calls(lowered_text(function, *args, **kwargs))


def lowered_text(function, *args, platforms=("cpu",)):
  traced = jax.jit(lambda *args: function(*args)).trace(*args)
  return traced.lower(lowering_platforms=platforms).as_text()


def kernel_calls(text):
  """Returns how often a module calls the kernels: (quantize, dequantize)."""
  quantize, operand, dequantize = (
    text.count(f"@jaxplugin_{name}(")
    for name in ("quantize", "quantize_operand", "dequantize")
  )
  return quantize + operand, dequantize


def by_operations(function):
  return _for_target(function, OPERATIONS)


def by_cpu(function):
  """Returns the function by C++ kernels, or operations if they are not built.

  backends/cpu_test.py compares the kernels with operations. Those compile
  longer.
  """
  return _for_target(function, TARGET)


def _for_target(function, target):
  def wrapped(*args):
    with targets.use_target(target):
      return function(*args)

  return wrapped


def round_trip(format, **kwargs):
  return lambda x: quantization.dequantize(
    quantization.quantize(x, format, **kwargs)
  )


class WithOperations(parameterized.TestCase):
  """Runs the tests of another class with operations instead of kernels."""

  def setUp(self):
    super().setUp()
    self.enter_context(targets.use_target(OPERATIONS))


def numbers(shape, dtype, seed=0):
  """Normal numbers, with a NaN, Infs, large and tiny blocks, and zeros."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=shape)
  flat = x.reshape(-1)
  flat[5], flat[70] = np.nan, -np.inf
  flat[200:232] *= 1e4
  flat[300:330] = 0.0
  flat[301] = -0.0
  flat[400:432] *= 1e-6
  with np.errstate(over="ignore"):
    return jax.device_put(x.astype(dtype))


class InterpretedTestCase(parameterized.TestCase):
  """Runs the very kernels on the very arrays, on the CPU.

  `jax_triton.triton_call` is replaced by a callback into Triton's interpreter;
  `names` has what was launched.
  """

  def setUp(self):
    super().setUp()
    from jaxplugin.testing.interpreter import interpret

    if (reason := interpret.unsupported()) is not None:
      self.skipTest(reason)
    self.names = []

    def recorded(module, launch, *args):
      self.names.append(launch.name)
      return interpreted.interpreted(module, launch, *args)

    self.enter_context(mock.patch.object(triton_launches, "_call", recorded))
    self.enter_context(
      mock.patch.object(
        lowering, "resolve_target", lambda override, _: override or OPERATIONS
      )
    )
    self.enter_context(
      mock.patch.object(triton_library, "lowering_refusal", lambda _: None)
    )

  def assert_same_bits(self, quantize, x, target=H200):
    expected = jax.jit(by_cpu(quantize))(x)
    self.assertEmpty(self.names)
    # JAX must not reuse these traces under another target.
    with targets.use_target(
      dataclasses.replace(target, name=f"interpreted {self.id()}")
    ):
      actual = quantize(x)
    self.assertNotEmpty(self.names)
    contract.assert_same_bits(actual, expected)

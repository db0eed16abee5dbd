# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the triton backend in Triton's interpreter, for its tests.

It needs no GPU: a callback replaces `jax_triton.triton_call`, and runs the same
kernels on the same arrays on the CPU. A GPU differs by the compiled code and by
the hardware's arithmetic.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from jaxplugin.core import formats, targets
from jaxplugin.operation import triton_launches
from jaxplugin.runtime import lowering


def cannot_interpret():
  """Why Triton's interpreter cannot run kernels here; "" where it can."""
  if importlib.util.find_spec("triton") is None:
    return "triton is not installed"
  from jaxplugin.testing.interpreter import interpret

  return interpret.unsupported() or ""


needs_interpreter = absltest.skipIf(
  bool(cannot_interpret()), cannot_interpret()
)
CPU = targets.named_target("cpu")


def products_depend_on_rows():
  """Whether NumPy adds up a row's products otherwise where there are more rows.

  The interpreter's dots are such products, and some of OpenBLAS's kernels do,
  so that two tiles of other sizes need not have the same bits.
  """
  rng = np.random.default_rng(0)
  for rows, columns, k in ((64, 64, 32), (64, 64, 128), (128, 128, 64)):
    lhs = rng.normal(size=(rows, k)).astype(np.float32)
    rhs = rng.normal(size=(k, columns)).astype(np.float32)
    for fewer in (16, 32, 64):
      for narrower in (16, 32, 64):
        part = lhs[:fewer] @ rhs[:, :narrower]
        if not np.array_equal((lhs @ rhs)[:fewer, :narrower], part):
          return True
  return False


# XLA's threads, which callbacks run on, flush f32 subnormals; a thread that
# Python starts before does not.
THREAD = concurrent.futures.ThreadPoolExecutor(1)
THREAD.submit(int).result()


def interpreted(module, launch, inputs, target, who):
  """`triton_launches._call` in Triton's interpreter."""
  del target, who
  from jaxplugin.testing.interpreter import interpret
  from jaxplugin.testing.kernels import gpu_operands

  kernels = importlib.import_module(f"jaxplugin.kernels.gpu.{module}").KERNELS

  # E4M3 has no NumPy layout that a callback may rely on: bytes.
  is_e4m3 = [x.dtype == formats.E4M3 for x in inputs]
  inputs = [
    jax.lax.bitcast_convert_type(x, jnp.uint8) if e4m3 else x
    for x, e4m3 in zip(inputs, is_e4m3, strict=True)
  ]

  def on_host(*inputs):
    inputs = [np.array(x) for x in inputs]
    results = [
      gpu_operands.unwritten(shape, dtype) for _, shape, dtype in launch.outputs
    ]
    interpret.launch(
      kernels[launch.kernel],
      launch.grid,
      *launch.described(
        [
          x.view(formats.E4M3) if e4m3 else x
          for x, e4m3 in zip(inputs, is_e4m3, strict=True)
        ]
      ),
      *results,
      **dict(launch.constexprs),
    )
    return results

  def in_thread(*inputs):
    return THREAD.submit(on_host, *inputs).result()

  types = [jax.ShapeDtypeStruct(s, dtype) for _, s, dtype in launch.outputs]
  return jax.pure_callback(in_thread, types, *inputs)


class RecordedTestCase(parameterized.TestCase):
  """Keeps what is launched, in the interpreter, of the whole lowering."""

  def setUp(self):
    super().setUp()
    self.launched = []

    def recorded(module, launch, inputs, target, who):
      self.launched.append(launch)
      return interpreted(module, launch, inputs, target, who)

    self.enter_context(mock.patch.object(triton_launches, "_call", recorded))
    self.enter_context(
      mock.patch.object(
        lowering, "resolve_target", lambda override, _: override or CPU
      )
    )

  def names(self):
    return " ".join(launch.name for launch in self.launched)

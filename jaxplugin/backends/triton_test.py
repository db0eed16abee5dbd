# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The triton implementation: its numbers, run by Triton's interpreter.

There need be no GPU: `jax_triton.triton_call` is replaced by a callback that
runs the very kernels on the very arrays, on the CPU. What differs on a GPU is
the compiler's work and the hardware's arithmetic.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin import dot_suite
from jaxplugin import formats
from jaxplugin import primitive
from jaxplugin import target as target_lib
from jaxplugin.backends import triton

needs_triton = absltest.skipIf(
  importlib.util.find_spec("triton") is None, "triton is not installed"
)
CPU = target_lib.named_target("cpu")
# XLA's threads, which callbacks run on, flush f32 subnormals; a thread that
# Python starts before does not.
THREAD = concurrent.futures.ThreadPoolExecutor(1)
THREAD.submit(int).result()


def interpreted(launch, inputs, target):
  """`triton._call` in Triton's interpreter."""
  del target
  from jaxplugin.kernels import block_scaled_matmul
  from jaxplugin.kernels import interpret

  dtype = triton._DTYPES[launch.output_dtype]
  # E4M3 has no NumPy layout that a callback may rely on: bytes.
  is_e4m3 = [x.dtype == formats.E4M3 for x in inputs]
  inputs = [
    jax.lax.bitcast_convert_type(x, jnp.uint8) if e4m3 else x
    for x, e4m3 in zip(inputs, is_e4m3, strict=True)
  ]

  def on_host(*inputs):
    inputs = [np.array(x) for x in inputs]
    out = np.full(launch.output_shape, np.nan, dtype)
    interpret.launch(
      block_scaled_matmul.KERNELS[launch.kernel],
      launch.grid,
      *(
        x.view(formats.E4M3) if e4m3 else x
        for x, e4m3 in zip(inputs, is_e4m3, strict=True)
      ),
      out,
      **dict(launch.constexprs),
    )
    return out

  def in_thread(*inputs):
    return THREAD.submit(on_host, *inputs).result()

  result = jax.ShapeDtypeStruct(launch.output_shape, dtype)
  return jax.pure_callback(in_thread, result, *inputs)


class TritonDotSuite(dot_suite.DotSuite):
  """The contract's suite; what triton refuses goes to xla."""

  implementation = "triton"
  cases_per_test = 2
  subnormal_spacing = 2.0**-133  # of bf16
  target = target_lib.named_target("h200")

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(triton, "_call", interpreted))
    self.enter_context(
      mock.patch.object(
        primitive, "resolve_target", lambda override, _: override or CPU
      )
    )

  def dot(self, *args, **kwargs):
    with jp.use_target(self.target):
      try:
        return jp.block_scaled_dot(*args, implementation="triton", **kwargs)
      except NotImplementedError as error:
        if "needs sizes of at least 1" not in str(error):
          raise
    return jp.block_scaled_dot(*args, implementation="xla", **kwargs)


@needs_triton
class HopperDotTest(TritonDotSuite):
  """Dequantizes in registers."""


@needs_triton
class BlackwellDotTest(TritonDotSuite):
  """Leaves it to the matrix instruction where that takes the formats."""

  target = target_lib.named_target("b200")
  kinds = (
    *((a, b) for a in formats.FORMATS[:3] for b in formats.FORMATS[:3]),
    (jp.NVFP4, jp.NVFP4),
  )


del TritonDotSuite


if __name__ == "__main__":
  absltest.main()

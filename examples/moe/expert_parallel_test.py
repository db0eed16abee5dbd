# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts over devices: right results, and bytes on the way."""

import math
import re

import expert_parallel
import jax
import jax.numpy as jnp
import moe
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing.meshes import explicit

NUM_DEVICES = 4
TOKENS = 24
MODEL = moe.SMALL.model


def sent(text):
  """(element type, elements in all) of each exchange in optimized HLO.

  An exchange among devices has a part for each of them.
  """
  found = set()
  for types in re.findall(r"= (.*?) all-to-all(?:-start)?\(", text):
    parts = re.findall(r"(\w+)\[([\d,]*)\]", types)
    sizes = [math.prod(map(int, dims.split(","))) for _, dims in parts]
    (dtype,) = {dtype for dtype, _ in parts}
    found.add((dtype, sum(sizes)))
  return found


class ExpertParallelTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    explicit.need_devices(self, NUM_DEVICES)
    devices = np.array(jax.devices()[:NUM_DEVICES])
    self.mesh = jax.sharding.Mesh(devices, expert_parallel.AXIS)
    rng = np.random.default_rng(0)
    self.x = rng.standard_normal((TOKENS, MODEL), dtype=np.float32)
    self.seen = np.asarray(jp.dequantize(jp.quantize(self.x, jp.MXFP8)))

  def make(self, format):
    """The layer placed, the same in f32, and the tokens placed."""
    layer = moe.quantized(moe.make_layer(moe.SMALL), format)
    sharding = NamedSharding(self.mesh, P(expert_parallel.AXIS))
    return (
      expert_parallel.placed(layer, self.mesh),
      moe.dequantized(layer),
      jax.device_put(self.x, sharding),
    )

  @parameterized.parameters("mxfp4", "nvfp4")
  @pytest.mark.sample(1)
  def test_automatic_layer_agrees_with_numpy_in_f64(self, format):
    layer, plain, x = self.make(format)
    run = jax.jit(expert_parallel.automatic)
    error = moe.relative_error(run(layer, x), moe.oracle(plain, self.x))
    self.assertLess(error, 1e-6)
    # No device ever gets another's experts: the least of them is 12 KiB.
    for kind, size in expert_parallel.collectives(
      run.lower(layer, x).compile()
    ):
      if kind != "all-reduce":
        self.assertLess(size, 12 * 1024, kind)

  @parameterized.parameters(
    ("mxfp4", jnp.float32, 1e-6),
    ("nvfp4", jnp.float32, 1e-6),
    ("mxfp8", jnp.bfloat16, 2.0**-8),
  )
  @pytest.mark.sample(1)
  def test_dispatched_layer_agrees_with_numpy_in_f64(
    self, format, dtype, bound
  ):
    layer, plain, x = self.make(format)
    run = jax.jit(
      lambda layer, x: expert_parallel.dispatched(
        layer, x, self.mesh, combine_dtype=dtype
      )
    )
    result, left_out = run(layer, x)
    exact = moe.oracle(plain, self.x, self.seen)
    self.assertLess(moe.relative_error(result, exact), bound)
    self.assertEqual(int(left_out), 0)

  @parameterized.parameters("mxfp4", "nvfp4")
  @pytest.mark.sample(1)
  def test_what_is_dispatched_are_bytes(self, format):
    layer, _, x = self.make(format)
    run = jax.jit(
      lambda layer, x: expert_parallel.dispatched(layer, x, self.mesh)[0]
    )
    compiled = run.lower(layer, x).compile()
    rows = TOKENS * moe.TOP  # of all devices to one, were all for it
    self.assertCountEqual(
      expert_parallel.collectives(compiled),
      [
        ("all-to-all", rows * 4),  # which expert
        ("all-to-all", rows * MODEL),  # a byte a value
        ("all-to-all", rows * MODEL // 32),  # a byte a block
        ("all-to-all", rows * MODEL * 2),  # results in bf16
      ],
    )
    # Each of them by its element type, and nothing wide on the way there.
    self.assertEqual(
      sent(compiled.as_text()),
      {
        ("s32", rows),
        ("u8", rows * MODEL),
        ("u8", rows * MODEL // 32),
        ("u16", rows * MODEL),  # bf16 as it is
      },
    )

  def test_rows_beyond_the_capacity_are_left_out_and_counted(self):
    layer, plain, x = self.make("mxfp8")
    capacity = 5
    result, left_out = jax.jit(
      lambda layer, x: expert_parallel.dispatched(
        layer, x, self.mesh, capacity=capacity, combine_dtype=jnp.float32
      )
    )(layer, x)
    experts, weights = map(np.asarray, moe.route(plain, self.x))
    f64 = moe.Layer(*(np.asarray(w, np.float64) for w in plain))
    exact, count = np.zeros(self.x.shape), 0
    for i in range(TOKENS):
      if i % (TOKENS // NUM_DEVICES) == 0:
        sent = np.zeros(NUM_DEVICES, int)  # by this device, to each
      for expert, weight in zip(experts[i], weights[i], strict=True):
        to = expert // (moe.SMALL.experts // NUM_DEVICES)
        sent[to] += 1
        if sent[to] > capacity:
          count += 1
        else:
          exact[i] += weight * moe.expert_in_f64(f64, expert, self.seen[i])
    self.assertGreater(count, 0)
    self.assertEqual(int(left_out), count)
    self.assertLess(moe.relative_error(result, exact), 1e-6)

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trees of quantized arrays through files."""

import io
import subprocess
import sys

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest

import jaxplugin as jp

FORMATS = ("mxfp8", "nvfp4", "mxfp4", "mxfp6_e2m3")


def draw(*shape):
  return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def arrays():
  """All classes, and the layouts that devices prefer."""
  found = {name: jp.quantize(draw(128, 64), name) for name in FORMATS}
  fp4 = found["nvfp4"]
  found["unpacked"] = fp4.unpack()
  found["bytes"] = found["mxfp8"].to_bytes()
  for name in ("h100", "b200"):
    found[name] = jp.prepare_weights(fp4, jp.named_target(name))
  found["weight"] = jp.QuantizedWeight(fp4, (64, 128), (0,), jnp.bfloat16)
  found["operand"] = jp.quantize_operand(draw(64, 128), "mxfp8")
  return found


def with_bits(tree):
  leaves, structure = jax.tree.flatten(tree)
  bits = [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in leaves]
  return structure, bits


class FlaxTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    jp.register_flax_serialization()

  def test_state_dict_and_msgpack_keep_all_bits(self):
    tree = arrays()
    state = flax.serialization.to_state_dict(tree)
    data = flax.serialization.msgpack_serialize(state)
    for target in (tree, jax.eval_shape(lambda: tree)):
      for given in (state, flax.serialization.msgpack_restore(data)):
        found = flax.serialization.from_state_dict(target, given)
        self.assertEqual(with_bits(found), with_bits(tree))

  def test_state_of_another_array_is_refused(self):
    tree = arrays()
    state = flax.serialization.to_state_dict(tree)
    other = jp.quantize(draw(128, 64), "mxfp6_e3m2")
    for name, target, text in (
      ("mxfp6_e2m3", other, "the target, 'mxfp6_e3m2, linear', got 'mxfp"),
      (
        "nvfp4",
        tree["b200"],
        "swizzled_128x4', got 'nvfp4, l",
      ),
      (
        "nvfp4",
        tree["unpacked"],
        r"values must .*float4_e2m1fn\[128, 64\], got",
      ),
      ("weight", tree["nvfp4"], "state must be a dict with keys"),
    ):
      with self.subTest(name), self.assertRaisesRegex(TypeError, text):
        flax.serialization.from_state_dict(target, state[name])

  @pytest.mark.full
  def test_import_of_the_package_does_not_import_flax(self):
    code = "import sys, jaxplugin; assert 'flax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class NumpyTest(absltest.TestCase):
  def test_numpy_files_of_bytes_keep_all_bits(self):
    file = io.BytesIO()
    tree = arrays()
    leaves, structure = jax.tree.flatten(tree)
    np.savez(file, *(np.asarray(x).view(np.uint8) for x in leaves))
    file.seek(0)
    with np.load(file) as file:
      read = [
        file[f"arr_{i}"].view(x.dtype).reshape(x.shape)
        for i, x in enumerate(leaves)
      ]
    found = jax.tree.unflatten(structure, read)
    self.assertEqual(with_bits(found), with_bits(tree))

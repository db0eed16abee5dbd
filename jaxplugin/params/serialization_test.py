# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trees of quantized arrays through files, and with cast leaves."""

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
      ("nvfp4", tree["b200"], "swizzled_128x4', got 'nvfp4, l"),
      ("nvfp4", tree["unpacked"],
        r"values must .*float4_e2m1fn\[128, 64\], got"),
      ("weight", tree["nvfp4"], "state must be a dict with keys"),
    ):  # fmt: skip
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


def cast(tree, dtype=jnp.bfloat16):
  is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
  return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, tree)


def calls_of_cast(name):
  """Functions and calls of them with an array whose float leaves were cast."""

  @jax.jit
  def make(x):
    array = jp.quantize(x, name)
    prepared = jp.prepare_weights(array, jp.named_target("b200"))
    others = array.T, jp.stack([array, array]), prepared
    return array, jp.quantize(x[:4], name), cast((array, *others))

  array, lhs, (bad, bad_t, stack, prepared) = make(draw(128, 64))
  x, sizes = jnp.ones((4, 64), jnp.bfloat16), jnp.array([2, 2])
  weight = cast(jp.QuantizedWeight(array, (128, 64), (1,)))
  return (
    ("dequantize", lambda: jp.dequantize(bad)),
    ("dequantize", lambda: jax.jit(jp.dequantize)(bad)),
    ("dequantize", lambda: prepared.dequantize()),
    ("dequantize", lambda: weight.dequantize()),
    ("dequantize", lambda: jp.dequantize(cast(array, jnp.float32))),
    ("accept_quantized", lambda: jp.accept_quantized(jnp.sum)(bad)),
    ("accept_quantized", lambda: jp.accept_quantized(jnp.sum)(weight)),
    ("prepare_weights", lambda: jp.prepare_weights({"a": bad})),
    ("unprepare_weights", lambda: jp.unprepare_weights(prepared)),
    ("concatenate", lambda: jp.concatenate([array, bad])),
    ("stack", lambda: jp.stack([bad, bad])),
    ("ScaledArray", lambda: bad.T),
    ("ScaledArray", lambda: bad[0]),
    ("ScaledArray", lambda: next(iter(bad))),
    ("ScaledArray.to_bytes", lambda: bad.to_bytes()),
    ("block_scaled_dot", lambda: jp.block_scaled_dot(lhs, bad)),
    ("block_scaled_dot", lambda: x @ bad_t),
    ("linear", lambda: jp.linear(x, bad)),
    ("ragged_dot", lambda: jp.ragged_dot(x, stack, sizes)),
    ("QuantizedWeight", lambda: jp.QuantizedWeight(bad, (128, 64), (1,))),
  )


class CastTest(absltest.TestCase):
  def test_cast_scale_is_refused_by_each_function(self):
    scales = ("float8_e8m0fnu", "float8_e4m3fn", *("float8_e8m0fnu",) * 2)
    for name, scale in zip(FORMATS, scales, strict=True):
      for who, call in calls_of_cast(name):
        with (
          self.subTest(f"{name} {who}"),
          self.assertRaisesRegex(
            TypeError,
            rf"^{who}: .*scale of {name} must be {scale}, got \w+\[.*\]\. Cast"
            r" other leaves only: jax\.tree\.map\(.*is_leaf=",
          ),
        ):
          call()

  def test_cast_of_other_leaves_keeps_the_array(self):
    array = jp.quantize(draw(128, 64), "nvfp4")
    tree = {"bias": jnp.ones(4), "kernel": array}
    done = jax.tree.map(
      lambda x: x if isinstance(x, jp.ScaledArray) else x.astype(jnp.bfloat16),
      tree,
      is_leaf=lambda x: isinstance(x, jp.ScaledArray),
    )
    self.assertEqual(done["bias"].dtype, jnp.bfloat16)
    self.assertIs(done["kernel"], array)

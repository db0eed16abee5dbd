# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trees of quantized arrays whose float leaves were cast."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

import jaxplugin as jp

FORMATS = ("mxfp8", "nvfp4", "mxfp4", "mxfp6_e2m3")


def draw(*shape):
  return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def cast(tree, dtype=jnp.bfloat16):
  is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
  return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, tree)


def calls_of_cast(name):
  """Functions and calls of them with an array whose float leaves were cast."""
  array = jp.quantize(draw(128, 64), name)
  x, sizes = jnp.ones((4, 64), jnp.bfloat16), jnp.array([2, 2])
  weight = cast(jp.QuantizedWeight(array, (128, 64), (1,)))
  lhs = jp.quantize(draw(4, 64), name)
  bad, bad_t = cast(array), cast(array.T)
  stack = cast(jp.stack([array, array]))
  prepared = cast(jp.prepare_weights(array, jp.named_target("b200")))
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

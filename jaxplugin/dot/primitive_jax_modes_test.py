# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The public functions in the modes of JAX that a user may switch on."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp

# Those that go together are tried together.
MODES = {
  "strict": {
    "jax_numpy_dtype_promotion": "strict",
    "jax_enable_x64": True,
    "jax_debug_nans": True,
  },
  "disable_jit": {"jax_disable_jit": True},
}
NUMBERS = (((1,), (1,)), ((), ()))


def exact_numbers(format, rows, seed):
  """f32[rows, 64] that `format` holds exactly; so do sums of their products.

  Codes of E2M1, every block along either axis with the largest, 6. For NVFP4
  times 448, so that the global scale is 1 and every block scale 448.
  """
  codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
  x = np.random.default_rng(seed).choice(codes, (rows, 64))
  x[:, ::16] = x[::16] = 6
  x[:, 1::4] *= -1
  return x * np.float32(448 if format.has_global_scale else 1)


def run_format(format):
  """What each function gives, beside what NumPy says in f64."""
  x, w = exact_numbers(format, 32, 0), exact_numbers(format, 8, 1)
  x_q, w_q = jp.quantize(x, format), jp.quantize(w, format)
  yield jp.dequantize(x_q), x
  yield jp.dequantize(jp.quantize(x, format, key=jax.random.key(0))), x
  for blocked in jp.quantize_both(x, format):
    yield jp.dequantize(blocked, jnp.bfloat16), x
  bias, residual = np.ones(8, np.float32), np.ones((32, 8), np.float32)
  product = x.astype(np.float64) @ w.T
  for implementation in (None, "xla"):
    y = jp.block_scaled_dot(
      x_q,
      jp.prepare_weights(w_q),
      bias=bias,
      activation="relu",
      residual=residual,
      implementation=implementation,
    )
    yield y, np.maximum(product + 1, 0) + 1
  with jp.debug_checks():
    yield jp.block_scaled_dot(x_q, w_q), product
  yield jp.dot_general(format, format)(x, w, NUMBERS), product


def run_gradients():
  x, w = exact_numbers(jp.MXFP8, 32, 2), exact_numbers(jp.MXFP8, 32, 3)
  expected = (np.tile(w.sum(0), (32, 1)), np.tile(x.sum(0), (32, 1)))
  recipe = jp.dot_general(jp.MXFP8, jp.MXFP8)
  gradients = jax.grad(lambda x, w: recipe(x, w, NUMBERS).sum(), (0, 1))(x, w)
  yield from zip(gradients, expected, strict=True)
  for mode in jp.nn.MODES:
    configs = [jp.nn.get_scaled_dot_general_config(mode) for _ in range(3)]
    gradients = jax.grad(
      lambda x, w, configs=configs: jp.nn.scaled_dot_general(
        x, w, NUMBERS, configs=configs
      ).sum(),
      (0, 1),
    )(jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16))
    yield from zip(gradients, expected, strict=True)


def run_drop_ins():
  x, w = exact_numbers(jp.MXFP8, 32, 4), exact_numbers(jp.MXFP8, 8, 5)
  x_q, w_q = jp.quantize(x[None], jp.MXFP8), jp.quantize(w[None], jp.MXFP8)
  arrays = (x_q.values, w_q.values, x_q.scale, w_q.scale)
  expected = (x.astype(np.float64) @ w.T)[None]
  yield jp.nn.scaled_matmul(*arrays), expected
  yield jp.accelerate(jax.nn.scaled_matmul)(*arrays), expected
  y = jp.scaled_dot(
    x_q.values,
    w_q.values.swapaxes(1, 2),
    lhs_scale=x_q.scale,
    rhs_scale=w_q.scale.swapaxes(1, 2),
    preferred_element_type=np.float32,
  )
  yield y, expected


class ModesTest(parameterized.TestCase):
  @parameterized.parameters(*MODES)
  def test_every_function_gives_the_exact_result_in_mode(self, mode):
    old = {name: getattr(jax.config, name) for name in MODES[mode]}
    for name, value in MODES[mode].items():
      jax.config.update(name, value)
    try:
      for cases in (
        run_format(jp.MXFP8),
        run_format(jp.NVFP4),
        run_gradients(),
        run_drop_ins(),
      ):
        for actual, expected in cases:
          np.testing.assert_array_equal(
            np.asarray(actual, np.float64),
            np.asarray(expected, actual.dtype).astype(np.float64),
          )
    finally:
      for name, value in old.items():
        jax.config.update(name, value)


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Malformed calls of `scaled_dot_general`."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin import nn
from jaxplugin.testing import nn_cases

NT_3D = nn_cases.NT_3D


def changed(base="mxfp8", **changes):
  """A config of JAX with other fields; its class checks nothing."""
  made = jax.nn.get_scaled_dot_general_config(base)
  for name, value in changes.items():
    setattr(made, name, value)
  return made


MXFP8_CONFIG = changed()
# name, keyword arguments, error, message.
MALFORMED_DOT_GENERALS = (
  ("no_list", {"configs": MXFP8_CONFIG}, ValueError, "list of three"),
  ("one_config", {"configs": [MXFP8_CONFIG]}, ValueError, "list of three"),
  (
    "a_string",
    {"configs": ["mxfp8"] * 3},
    TypeError,
    r"configs\[0\] must be a config, got 'mxfp8', .* no mode, block_size",
  ),
  (
    "mode",
    {"configs": [MXFP8_CONFIG, changed(mode="fp8")]},
    ValueError,
    r"mode of configs\[1\] must be one of mxfp8, mxfp4, nvfp4, got 'fp8'",
  ),
  (
    "block_size",
    {"configs": [changed(block_size=0)] * 3},
    ValueError,
    r"block_size of configs\[0\] must be an integer of at least 2, got 0",
  ),
  (
    "block_size_type",
    {"configs": [changed(block_size=32.0)] * 3},
    ValueError,
    r"block_size of configs\[0\].* got 32.0",
  ),
  (
    "data_type",
    {"configs": [changed(data_type=jnp.int8)] * 3},
    ValueError,
    r"configs\[0\] of mode mxfp8 must have data_type float8_e4m3fn.*int8",
  ),
  (
    "data_type_name",
    {"configs": [changed(data_type="fp8")] * 3},
    ValueError,
    r"configs\[0\] of mode mxfp8 must have data_type .* got 'fp8'",
  ),
  (
    "scale_type",
    {"configs": [changed(scale_type=jnp.float8_e4m3fn)] * 3},
    ValueError,
    "scale_type float8_e8m0fnu, got .*float8_e4m3fn",
  ),
  (
    "global_scale_of_mx",
    {"configs": [MXFP8_CONFIG] * 2 + [changed(global_scale=jnp.ones(1))]},
    ValueError,
    r"configs\[2\] of mode mxfp8 must not have a global_scale",
  ),
  (
    "no_global_scale",
    {"configs": [changed("nvfp4", global_scale=None)] * 3},
    ValueError,
    r"configs\[0\] of mode nvfp4 must have a global_scale, got None",
  ),
  (
    "global_scale_shape",
    {"configs": [changed("nvfp4", global_scale=jnp.ones(2))] * 3},
    TypeError,
    r"one float32, f32\[\] or f32\[1\], got float32\[2\]",
  ),
  (
    "global_scale_dtype",
    {"configs": [changed("nvfp4", global_scale=jnp.ones(1, jnp.bfloat16))] * 3},
    TypeError,
    r"one float32, .* got bfloat16\[1\]",
  ),
  (
    "global_scale_zero",
    {"configs": [changed("nvfp4", global_scale=jnp.zeros(1))] * 3},
    ValueError,
    r"global_scale of configs\[0\] must be positive and finite, got 0.0",
  ),
  (
    "result_dtype",
    {"preferred_element_type": np.int32},
    TypeError,
    "preferred_element_type must be float32, bfloat16 or float16, got .*int32",
  ),
  ("no_result_dtype", {"preferred_element_type": None}, TypeError, "None"),
  ("no_numbers", {"dimension_numbers": None}, TypeError, "must not be None"),
  (
    "k",
    {"rhs": jnp.ones((2, 3, 40))},
    TypeError,
    "contracting sizes must agree, got 64 .* and 40",
  ),
  ("rank", {"rhs": jnp.ones(64)}, TypeError, "rhs, which has rank 1"),
  (
    "complex",
    {"lhs": jnp.ones((2, 3, 64), np.complex64)},
    TypeError,
    "lhs must have a real dtype, got complex64",
  ),
  ("list", {"lhs": [1.0]}, TypeError, "lhs must be an array"),
  (
    "implementation",
    {"implementation": "cuda"},
    ValueError,
    "implementation must be None or one of .*, got 'cuda'",
  ),
)


class MalformedCallTest(parameterized.TestCase):
  @parameterized.named_parameters(*MALFORMED_DOT_GENERALS)
  def test_scaled_dot_general_refuses(self, changes, error, message):
    x = jnp.ones((2, 3, 64))
    args = {
      "lhs": x,
      "rhs": x,
      "dimension_numbers": NT_3D,
      "configs": [MXFP8_CONFIG] * 3,
    }
    args |= changes
    self.check(
      nn.scaled_dot_general, "scaled_dot_general", args, error, message
    )

  def check(self, function, who, args, error, message):
    with self.assertRaisesRegex(error, f"(?s)^{who}: .*{message}"):
      function(**args)


if __name__ == "__main__":
  absltest.main()

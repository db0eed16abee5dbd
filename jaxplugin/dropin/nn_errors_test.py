# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Malformed calls of the functions that replace those of `jax.nn`.

If JAX refuses a call of `scaled_matmul` or `scaled_dot` as well, both raise the
same type of error.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin import nn
from jaxplugin.core import formats
from jaxplugin.testing import contract, nn_cases

E4M3, E2M1, E8M0 = formats.E4M3, formats.E2M1, formats.E8M0
NT_3D = nn_cases.NT_3D


def ones(*shape, dtype=E4M3):
  return np.ones(shape, dtype)


floats = functools.partial(ones, dtype=np.float32)


def scale(*shape):
  return ones(*shape, dtype=E8M0)


def config(base="mxfp8", **changes):
  """Returns a config of JAX with other fields; its class checks nothing."""
  made = jax.nn.get_scaled_dot_general_config(base)
  for name, value in changes.items():
    setattr(made, name, value)
  return made


MXFP8, NVFP4 = config(), "nvfp4"
UNKNOWN_IMPLEMENTATION = (
  "implementation must be None or one of .*'xla'.*, got 'cuda'"
)

MATMUL = {
  "lhs": ones(2, 3, 64),
  "rhs": ones(2, 3, 64),
  "lhs_scales": scale(2, 3, 2),
  "rhs_scales": scale(2, 3, 2),
}
DOT = {
  "lhs": ones(2, 3, 64),
  "rhs": ones(2, 3, 64),
  "lhs_scale": scale(2, 3, 2),
  "rhs_scale": scale(2, 3, 2),
  "dimension_numbers": NT_3D,
}
DOT_GENERAL = {
  "lhs": floats(2, 3, 64),
  "rhs": floats(2, 3, 64),
  "dimension_numbers": NT_3D,
  "configs": [MXFP8] * 3,
}

# Words of the message, and the arguments that differ from a valid call's.
MATMUL_VALUE_ERRORS_OF_JAX = {
  r"rank 3, .* got lhs \(3, 64\), rhs \(2, 3, 64\)": {"lhs": ones(3, 64)},
  r"rank 3, .*rhs_scales \(3, 2\)": {"rhs_scales": scale(3, 2)},
  r"batch and k, .*\(2, 3, 32\)": {"rhs": ones(2, 3, 32)},
  r"batch and k, .*\(1, 3, 64\)": {"rhs": ones(1, 3, 64)},
  r"same number of blocks, .*rhs_scales \(2, 3, 4\).*scaled_dot": {
    "rhs_scales": scale(2, 3, 4)
  },
  r"row sizes of their operand, .*lhs_scales \(2, 4, 2\)": {
    "lhs_scales": scale(2, 4, 2)
  },
  "got None": {"preferred_element_type": None},
}
MATMUL_TYPE_ERRORS = {
  r"multiple of the number of blocks, got lhs \(2, 3, 64\).*\(2, 3, 5\)": {
    "lhs_scales": scale(2, 3, 5), "rhs_scales": scale(2, 3, 5)},
  r"\(2, 3, 0\)": {"lhs_scales": scale(2, 3, 0), "rhs_scales": scale(2, 3, 0)},
  "int32": {"preferred_element_type": np.int32},
  "'f99'": {"preferred_element_type": "f99"},
  "lhs must have a real dtype, got complex64": {
    "lhs": ones(2, 3, 64, dtype=np.complex64)},
  "rhs_scale.* must have a real dtype, got complex64": {
    "rhs_scales": ones(2, 3, 2, dtype=np.complex64)},
  r"lhs must be an array, got \[\[\[1": {"lhs": [[[1.0]]]},
  "rhs must be an array, got None": {"rhs": None},
  "lhs must be an array, got ScaledArray.*block_scaled_dot": {
    "lhs": jp.quantize(floats(2, 3, 64), jp.MXFP8)},
}  # fmt: skip
MATMUL_VALUE_ERRORS = {
  UNKNOWN_IMPLEMENTATION: {"implementation": "cuda"},
  "lhs_scale of nvfp4 must not be negative": {
    "lhs": ones(2, 3, 64, dtype=E2M1),
    "rhs": ones(2, 3, 64, dtype=E2M1),
    "lhs_scales": -ones(2, 3, 4, dtype=contract.F32).astype(E4M3),
    "rhs_scales": ones(2, 3, 4, dtype=E4M3),
  },
}
DOT_TYPE_ERRORS_OF_JAX = {
  r"same rank, got \(2, 3, 64\) and \(3, 64\)": {"rhs": ones(3, 64),
    "rhs_scale": scale(3, 2)},
  r"lhs_scale \(3, 2\) for \(2, 3, 64\)": {"lhs_scale": scale(3, 2)},
  r"as many batch dimensions .* got \(0,\) and \(\)": {
    "dimension_numbers": (((2,), (2,)), ((0,), ()))},
  r"as many contracting dimensions .* got \(2,\) and \(2, 1\)": {
    "dimension_numbers": (((2,), (2, 1)), ((0,), (0,)))},
  "batch sizes must agree, got 2 in dimension 0 of lhs .* and 4": {
    "rhs": ones(4, 3, 64), "rhs_scale": scale(4, 3, 2)},
  "contracting sizes must agree, got 64 .* and 96": {"rhs": ones(2, 3, 96),
    "rhs_scale": scale(2, 3, 3)},
  r"lhs_scale \(2, 1, 2\) for lhs \(2, 3, 64\)": {"lhs_scale": scale(2, 1, 2)},
  r"rhs_scale \(2, 3, 5\) for rhs \(2, 3, 64\)": {"rhs_scale": scale(2, 3, 5)},
  r"divided by 2 or more, got rhs_scale \(2, 3, 64\)": {
    "rhs_scale": scale(2, 3, 64)},
  r"rank 2 or more, .* got \(64,\) and \(64,\)": {
    **dict.fromkeys(("lhs", "rhs"), ones(64)),
    **dict.fromkeys(("lhs_scale", "rhs_scale", "dimension_numbers"))},
  r"dimensions \(-1, 0\) of lhs": {
    "dimension_numbers": (((-1,), (-1,)), ((0,), (0,)))},
}  # fmt: skip
DOT_TYPE_ERRORS = {
  r"dimensions \(3, 0\) of lhs, which has rank 3": {
    "dimension_numbers": (((3,), (2,)), ((0,), (0,)))
  },
  r"a dimension of lhs twice: \(2, 2\)": {
    "dimension_numbers": (((2,), (2,)), ((2,), (2,)))
  },
  r"dimension_numbers must be .*, got \(\(2, 2\), 0\)": {
    "dimension_numbers": ((2, 2), 0)
  },
  "int8": {"preferred_element_type": np.int8},
  r"lhs_scale \(2, 3, 0\)": {"lhs_scale": scale(2, 3, 0)},
  "lhs_scale must be an array": {"lhs_scale": [1.0]},
}
DOT_VALUE_ERRORS = {UNKNOWN_IMPLEMENTATION: {"implementation": "cuda"}}
DOT_GENERAL_VALUE_ERRORS = {
  "list of three, .* got BlockScaleConfig": {"configs": MXFP8},
  r"list of three, .* got \[BlockScaleConfig": {"configs": [MXFP8]},
  r"mode of configs\[1\] must be one of mxfp8, mxfp4, nvfp4, got 'fp8'": {
    "configs": [MXFP8, config(mode="fp8")]},
  r"block_size of configs\[0\] must be an integer of at least 2, got 0": {
    "configs": [config(block_size=0)] * 3},
  r"block_size of configs\[0\].* got 32.0": {
    "configs": [config(block_size=32.0)] * 3},
  r"configs\[0\] of mode mxfp8 must have data_type float8_e4m3fn.*int8": {
    "configs": [config(data_type=jnp.int8)] * 3},
  r"configs\[0\] of mode mxfp8 must have data_type .* got 'fp8'": {
    "configs": [config(data_type="fp8")] * 3},
  "scale_type float8_e8m0fnu, got .*float8_e4m3fn": {
    "configs": [config(scale_type=jnp.float8_e4m3fn)] * 3},
  r"configs\[2\] of mode mxfp8 must not have a global_scale": {
    "configs": [MXFP8] * 2 + [config(global_scale=floats(1))]},
  r"configs\[0\] of mode nvfp4 must have a global_scale, got None": {
    "configs": [config(NVFP4, global_scale=None)] * 3},
  r"global_scale of configs\[0\] must be positive and finite, got 0.0": {
    "configs": [config(NVFP4, global_scale=0 * floats(1))] * 3},
  UNKNOWN_IMPLEMENTATION: {"implementation": "cuda"},
}  # fmt: skip
DOT_GENERAL_TYPE_ERRORS = {
  r"configs\[0\] must be a config, got 'mxfp8', .* no mode, block_size": {
    "configs": ["mxfp8"] * 3},
  r"one float32, f32\[\] or f32\[1\], got float32\[2\]": {
    "configs": [config(NVFP4, global_scale=floats(2))] * 3},
  r"one float32, .* got bfloat16\[1\]": {
    "configs": [config(NVFP4, global_scale=ones(1, dtype=jnp.bfloat16))] * 3},
  "preferred_element_type must be float32, bfloat16 or float16, got .*int32": {
    "preferred_element_type": np.int32},
  "None": {"preferred_element_type": None},
  "must not be None": {"dimension_numbers": None},
  "contracting sizes must agree, got 64 .* and 40": {
    "rhs": floats(2, 3, 40)},
  "rhs, which has rank 1": {"rhs": floats(64)},
  "lhs must have a real dtype, got complex64": {
    "lhs": ones(2, 3, 64, dtype=np.complex64)},
  "lhs must be an array": {"lhs": [1.0]},
}  # fmt: skip

# The function, JAX's if it refuses the calls too, valid arguments, the error.
REFUSALS = (
  (*(nn.scaled_matmul, jax.nn.scaled_matmul, MATMUL),
    *(ValueError, MATMUL_VALUE_ERRORS_OF_JAX)),
  (nn.scaled_matmul, None, MATMUL, TypeError, MATMUL_TYPE_ERRORS),
  (nn.scaled_matmul, None, MATMUL, ValueError, MATMUL_VALUE_ERRORS),
  (*(nn.scaled_dot, jax.lax.scaled_dot, DOT),
    *(TypeError, DOT_TYPE_ERRORS_OF_JAX)),
  (nn.scaled_dot, None, DOT, TypeError, DOT_TYPE_ERRORS),
  (nn.scaled_dot, None, DOT, ValueError, DOT_VALUE_ERRORS),
  (*(nn.scaled_dot_general, None, DOT_GENERAL),
    *(ValueError, DOT_GENERAL_VALUE_ERRORS)),
  (*(nn.scaled_dot_general, None, DOT_GENERAL),
    *(TypeError, DOT_GENERAL_TYPE_ERRORS)),
)  # fmt: skip


class MalformedCallTest(absltest.TestCase):
  def test_message_names_the_function_the_rule_and_the_value(self):
    for function, jaxs, valid, error, rows in REFUSALS:
      name = function.__name__
      for message, changes in rows.items():
        args = valid | changes
        with self.subTest(f"{name}: {message}"):
          call = lambda f=function, args=args: f(**args)
          for run in (call, lambda call=call: jax.eval_shape(call)):
            with self.assertRaisesRegex(error, f"(?s)^{name}: .*{message}"):
              run()
          if jaxs is not None:
            with self.assertRaises(error) as raised:
              jax.eval_shape(lambda f=jaxs, args=args: f(**args))
            self.assertIs(type(raised.exception), error)

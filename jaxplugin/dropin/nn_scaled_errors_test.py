# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Malformed calls of `scaled_matmul` and `scaled_dot`.

Where JAX refuses a call as well, it is with the same type of error.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin import nn
from jaxplugin.core import formats
from jaxplugin.testing import contract
from jaxplugin.testing import nn_cases

F32 = contract.F32
E4M3, E2M1 = formats.E4M3, formats.E2M1
E8M0 = formats.E8M0
NT_3D = nn_cases.NT_3D


def scaled_matmul_args(**changes):
  x, scale = ones(2, 3, 64), ones(2, 3, 2, dtype=E8M0)
  args = {"lhs": x, "rhs": x, "lhs_scales": scale, "rhs_scales": scale}
  return args | changes


def scaled_dot_args(**changes):
  x, scale = ones(2, 3, 64), ones(2, 3, 2, dtype=E8M0)
  args = {
    "lhs": x,
    "rhs": x,
    "lhs_scale": scale,
    "rhs_scale": scale,
    "dimension_numbers": NT_3D,
  }
  return args | changes


def ones(*shape, dtype=E4M3):
  return np.ones(shape, dtype)


# name, changes, error, message; JAX's type of error where JAX refuses as well.
MALFORMED_MATMULS = (
  (
    "rank_2",
    {"lhs": ones(3, 64)},
    ValueError,
    r"rank 3, .* got lhs \(3, 64\), rhs \(2, 3, 64\)",
  ),
  (
    "scale_rank",
    {"rhs_scales": ones(3, 2, dtype=E8M0)},
    ValueError,
    r"rank 3, .*rhs_scales \(3, 2\)",
  ),
  ("k", {"rhs": ones(2, 3, 32)}, ValueError, r"batch and k, .*\(2, 3, 32\)"),
  (
    "batch",
    {"rhs": ones(1, 3, 64)},
    ValueError,
    r"batch and k, .*\(1, 3, 64\)",
  ),
  (
    "num_blocks",
    {"rhs_scales": ones(2, 3, 4, dtype=E8M0)},
    ValueError,
    r"same number of blocks, .*rhs_scales \(2, 3, 4\).*scaled_dot",
  ),
  (
    "scale_rows",
    {"lhs_scales": ones(2, 4, 2, dtype=E8M0)},
    ValueError,
    r"row sizes of their operand, .*lhs_scales \(2, 4, 2\)",
  ),
  ("no_dtype", {"preferred_element_type": None}, ValueError, "got None"),
)
MALFORMED_MATMULS_HERE_ONLY = (
  (
    "k_is_no_multiple",
    {
      "lhs_scales": ones(2, 3, 5, dtype=E8M0),
      "rhs_scales": ones(2, 3, 5, dtype=E8M0),
    },
    TypeError,
    r"multiple of the number of blocks, got lhs \(2, 3, 64\).*\(2, 3, 5\)",
  ),
  (
    "no_blocks",
    {
      "lhs_scales": ones(2, 3, 0, dtype=E8M0),
      "rhs_scales": ones(2, 3, 0, dtype=E8M0),
    },
    TypeError,
    r"\(2, 3, 0\)",
  ),
  ("result_dtype", {"preferred_element_type": np.int32}, TypeError, "int32"),
  ("result_name", {"preferred_element_type": "f99"}, TypeError, "'f99'"),
  (
    "complex",
    {"lhs": ones(2, 3, 64, dtype=np.complex64)},
    TypeError,
    "lhs must have a real dtype, got complex64",
  ),
  (
    "complex_scale",
    {"rhs_scales": ones(2, 3, 2, dtype=np.complex64)},
    TypeError,
    "rhs_scale.* must have a real dtype, got complex64",
  ),
  ("list", {"lhs": [[[1.0]]]}, TypeError, r"lhs must be an array, got \[\[\[1"),
  ("none", {"rhs": None}, TypeError, "rhs must be an array, got None"),
  (
    "scaled_array",
    {"lhs": jp.quantize(jnp.ones((2, 3, 64)), jp.MXFP8)},
    TypeError,
    "lhs must be an array, got ScaledArray.*block_scaled_dot",
  ),
  (
    "unknown_implementation",
    {"implementation": "cuda"},
    ValueError,
    "implementation must be None or one of .*'xla'.*, got 'cuda'",
  ),
  (
    "negative_nvfp4_scale",
    {
      "lhs": ones(2, 3, 64, dtype=E2M1),
      "rhs": ones(2, 3, 64, dtype=E2M1),
      "lhs_scales": -ones(2, 3, 4, dtype=F32).astype(E4M3),
      "rhs_scales": ones(2, 3, 4, dtype=E4M3),
    },
    ValueError,
    "lhs_scale of nvfp4 must not be negative",
  ),
)
MALFORMED_DOTS = (
  (
    "operand_ranks",
    {"rhs": ones(3, 64), "rhs_scale": ones(3, 2, dtype=E8M0)},
    TypeError,
    r"same rank, got \(2, 3, 64\) and \(3, 64\)",
  ),
  (
    "scale_rank",
    {"lhs_scale": ones(3, 2, dtype=E8M0)},
    TypeError,
    r"lhs_scale \(3, 2\) for \(2, 3, 64\)",
  ),
  (
    "num_batch",
    {"dimension_numbers": (((2,), (2,)), ((0,), ()))},
    TypeError,
    r"as many batch dimensions .* got \(0,\) and \(\)",
  ),
  (
    "num_contracting",
    {"dimension_numbers": (((2,), (2, 1)), ((0,), (0,)))},
    TypeError,
    r"as many contracting dimensions .* got \(2,\) and \(2, 1\)",
  ),
  (
    "batch",
    {"rhs": ones(4, 3, 64), "rhs_scale": ones(4, 3, 2, dtype=E8M0)},
    TypeError,
    "batch sizes must agree, got 2 in dimension 0 of lhs .* and 4",
  ),
  (
    "k",
    {"rhs": ones(2, 3, 96), "rhs_scale": ones(2, 3, 3, dtype=E8M0)},
    TypeError,
    "contracting sizes must agree, got 64 .* and 96",
  ),
  (
    "scale_rows",
    {"lhs_scale": ones(2, 1, 2, dtype=E8M0)},
    TypeError,
    r"lhs_scale \(2, 1, 2\) for lhs \(2, 3, 64\)",
  ),
  (
    "k_is_no_multiple",
    {"rhs_scale": ones(2, 3, 5, dtype=E8M0)},
    TypeError,
    r"rhs_scale \(2, 3, 5\) for rhs \(2, 3, 64\)",
  ),
  (
    "blocks_of_1",
    {"rhs_scale": ones(2, 3, 64, dtype=E8M0)},
    TypeError,
    r"divided by 2 or more, got rhs_scale \(2, 3, 64\)",
  ),
  (
    "no_default_for_rank_1",
    {
      "lhs": ones(64),
      "rhs": ones(64),
      "lhs_scale": None,
      "rhs_scale": None,
      "dimension_numbers": None,
    },
    TypeError,
    r"rank 2 or more, .* got \(64,\) and \(64,\)",
  ),
  (
    "negative_dimension",
    {"dimension_numbers": (((-1,), (-1,)), ((0,), (0,)))},
    TypeError,
    r"dimensions \(-1, 0\) of lhs",
  ),
)
MALFORMED_DOTS_HERE_ONLY = (
  (
    "dimension_out_of_range",
    {"dimension_numbers": (((3,), (2,)), ((0,), (0,)))},
    TypeError,
    r"dimensions \(3, 0\) of lhs, which has rank 3",
  ),
  (
    "dimension_twice",
    {"dimension_numbers": (((2,), (2,)), ((2,), (2,)))},
    TypeError,
    r"a dimension of lhs twice: \(2, 2\)",
  ),
  (
    "no_numbers",
    {"dimension_numbers": ((2, 2), 0)},
    TypeError,
    r"dimension_numbers must be .*, got \(\(2, 2\), 0\)",
  ),
  ("result_dtype", {"preferred_element_type": np.int8}, TypeError, "int8"),
  (
    "no_scales",
    {"lhs_scale": ones(2, 3, 0, dtype=E8M0)},
    TypeError,
    r"lhs_scale \(2, 3, 0\)",
  ),
  ("list", {"lhs_scale": [1.0]}, TypeError, "lhs_scale must be an array"),
  (
    "unknown_implementation",
    {"implementation": "cuda"},
    ValueError,
    "implementation must be None or one of .*'xla'.*, got 'cuda'",
  ),
)


class MalformedCallTest(parameterized.TestCase):
  @parameterized.named_parameters(*MALFORMED_MATMULS)
  def test_scaled_matmul_raises_what_jax_raises(self, changes, error, message):
    args = scaled_matmul_args(**changes)
    with self.assertRaises(error) as jaxs:
      jax.eval_shape(lambda: jax.nn.scaled_matmul(**args))
    self.assertIs(type(jaxs.exception), error)
    self.check(nn.scaled_matmul, "scaled_matmul", args, error, message)

  @parameterized.named_parameters(*MALFORMED_MATMULS_HERE_ONLY)
  @pytest.mark.sample(6)
  def test_scaled_matmul_refuses(self, changes, error, message):
    args = scaled_matmul_args(**changes)
    self.check(nn.scaled_matmul, "scaled_matmul", args, error, message)

  @parameterized.named_parameters(*MALFORMED_DOTS)
  def test_scaled_dot_raises_what_jax_raises(self, changes, error, message):
    args = scaled_dot_args(**changes)
    with self.assertRaises(error) as jaxs:
      jax.eval_shape(lambda: jax.lax.scaled_dot(**args))
    self.assertIs(type(jaxs.exception), error)
    self.check(nn.scaled_dot, "scaled_dot", args, error, message)

  @parameterized.named_parameters(*MALFORMED_DOTS_HERE_ONLY)
  def test_scaled_dot_refuses(self, changes, error, message):
    args = scaled_dot_args(**changes)
    self.check(nn.scaled_dot, "scaled_dot", args, error, message)

  def check(self, function, who, args, error, message):
    with self.assertRaisesRegex(error, f"(?s)^{who}: .*{message}"):
      function(**args)


if __name__ == "__main__":
  absltest.main()

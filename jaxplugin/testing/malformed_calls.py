# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Malformed calls of `block_scaled_dot`, by name, and what each must raise."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.testing import malformed

E5M2: Final = formats.E5M2
e4m3 = malformed.e4m3
e8m0 = malformed.e8m0
f32 = malformed.f32
fp4 = malformed.fp4
Malformed = malformed.Malformed
mx = malformed.mx
mxfp8 = malformed.mxfp8
numbers_error = malformed.numbers_error
ones = malformed.ones
static_error = malformed.static_error
swizzled = malformed.swizzled
type_error = malformed.type_error
unchecked = malformed.unchecked


def wrong_ranks() -> dict[str, Malformed]:
  return {
    "lhs_is_a_vector": type_error("lhs", "1", lhs=mx(64), lhs_scale=e8m0(2)),
    "rhs_has_one_more_dimension": type_error(
      "rhs", "2", "3", rhs=mx(1, 6, 64), rhs_scale=e8m0(1, 6, 2)
    ),
    "lhs_is_a_scalar": type_error("lhs", "0", lhs=mx(), lhs_scale=e8m0()),
    "lhs_scale_has_another_rank": type_error(
      "lhs_scale", "(8,)", "(4, 64)", lhs_scale=e8m0(8)
    ),
    "rhs_scale_is_a_scalar": type_error(
      "rhs_scale", "()", "(6, 64)", rhs_scale=e8m0()
    ),
  }


def wrong_dtypes() -> dict[str, Malformed]:
  return {
    "both_operands_plain": type_error(
      "lhs",
      "rhs",
      "float32",
      lhs=f32(4, 64),
      lhs_scale=None,
      rhs=f32(6, 64),
      rhs_scale=None,
    ),
    "quantized_lhs_without_scale": type_error(
      "lhs", "float8_e4m3fn", "lhs_scale", lhs_scale=None
    ),
    "quantized_rhs_without_scale": type_error(
      "rhs", "float8_e4m3fn", "rhs_scale", rhs_scale=None
    ),
    "integer_lhs_with_scale": type_error(
      "lhs", "int8", lhs=ones((4, 64), np.int8)
    ),
    "integer_rhs_without_scale": type_error(
      "rhs", "int32", rhs=ones((6, 64), np.int32), rhs_scale=None
    ),
    "packed_rhs_without_scale": type_error(
      "rhs", "uint8", "rhs_scale", rhs=ones((6, 32), np.uint8), rhs_scale=None
    ),
    "bool_lhs": type_error(
      "lhs", "bool", lhs=ones((4, 64), np.bool_), lhs_scale=None
    ),
    "complex_lhs": type_error(
      "lhs", "complex64", lhs=ones((4, 64), np.complex64), lhs_scale=None
    ),
    "scale_for_plain_lhs": type_error(
      "lhs", "float32", "lhs_scale", "float8_e8m0fnu", lhs=f32(4, 64)
    ),
    "float32_scale": type_error(
      "rhs_scale", "float32", "float8_e4m3fn", rhs_scale=f32(6, 2)
    ),
    "e4m3_values_with_e4m3_scale": type_error(
      "lhs_scale", "float8_e4m3fn", lhs_scale=e4m3(4, 4)
    ),
    "e5m2_scale": type_error(
      "rhs_scale", "float8_e5m2", rhs=fp4(6, 64), rhs_scale=ones((6, 4), E5M2)
    ),
    "uint8_scale": type_error(
      "lhs_scale", "uint8", lhs_scale=ones((4, 2), np.uint8)
    ),
    "lhs_is_a_string": Malformed(
      TypeError, ("lhs", "str"), {"lhs": None}, {"lhs": "weights"}
    ),
    "rhs_is_none": Malformed(
      TypeError, ("rhs", "NoneType"), {"rhs": None}, {"rhs": None}
    ),
  }


def wrong_sizes() -> dict[str, Malformed]:
  return {
    "contracting_sizes_differ": type_error(
      "contracting",
      "lhs",
      "rhs",
      "64",
      "96",
      rhs=mx(6, 96),
      rhs_scale=e8m0(6, 3),
    ),
    "batch_sizes_differ": type_error(
      "batch",
      "lhs",
      "rhs",
      "2",
      "3",
      lhs=mx(2, 4, 64),
      lhs_scale=e8m0(2, 4, 2),
      rhs=mx(3, 6, 64),
      rhs_scale=e8m0(3, 6, 2),
    ),
    "batch_size_one_does_not_broadcast": type_error(
      "batch",
      "(1, 4, 64)",
      "(3, 6, 64)",
      lhs=mx(1, 4, 64),
      lhs_scale=e8m0(1, 4, 2),
      rhs=mx(3, 6, 64),
      rhs_scale=e8m0(3, 6, 2),
    ),
    "k_is_no_multiple_of_32": type_error(
      "lhs",
      "k=100",
      "32",
      lhs=mx(4, 100),
      lhs_scale=e8m0(4, 4),
      rhs=mx(6, 100),
      rhs_scale=e8m0(6, 4),
    ),
    "k_is_no_multiple_of_16": type_error(
      "rhs",
      "k=40",
      "16",
      lhs=f32(4, 40),
      lhs_scale=None,
      rhs=fp4(6, 40),
      rhs_scale=e4m3(6, 3),
    ),
    "lhs_scale_too_short": type_error(
      "lhs_scale", "(4, 1)", "(4, 2)", lhs_scale=e8m0(4, 1)
    ),
    "rhs_scale_too_long": type_error(
      "rhs_scale", "(6, 4)", "(6, 2)", "block_size", rhs_scale=e8m0(6, 4)
    ),
    "rhs_scale_has_too_few_rows": type_error(
      "rhs_scale", "(5, 2)", "(6, 2)", rhs_scale=e8m0(5, 2)
    ),
    "scale_per_16_for_mxfp4": type_error(
      "rhs_scale",
      "(6, 4)",
      "(6, 2)",
      "mxfp4",
      rhs=fp4(6, 64),
      rhs_scale=e8m0(6, 4),
    ),
    "scale_per_32_for_nvfp4": type_error(
      "rhs_scale",
      "(6, 2)",
      "(6, 4)",
      "nvfp4",
      rhs=fp4(6, 64),
      rhs_scale=e4m3(6, 2),
    ),
    "packed_size_taken_for_logical": type_error(
      "64", "128", rhs=ones((6, 64), np.uint8), rhs_scale=e8m0(6, 2)
    ),
    "padded_scale_without_block_size": type_error(
      "lhs_scale", "(128, 4)", "(4, 2)", "block_size=32", lhs_scale=e8m0(128, 4)
    ),
    "padded_scale_too_small": Malformed(
      TypeError,
      ("lhs_scale", "(128, 1)", "(4, 2)"),
      {"lhs_scale": e8m0(128, 1)},
      {"block_size": 32},
    ),
    "padded_scale_has_too_few_rows": Malformed(
      TypeError,
      ("rhs_scale", "(5, 4)", "(6, 2)"),
      {"rhs_scale": e8m0(5, 4)},
      {"block_size": 32},
    ),
    "padded_scale_is_padded_in_batch": Malformed(
      TypeError,
      ("lhs_scale", "(3, 4, 2)", "(2, 4, 2)", "batch"),
      {
        "lhs": mx(2, 4, 64),
        "lhs_scale": e8m0(3, 4, 2),
        "rhs": mx(2, 6, 64),
        "rhs_scale": e8m0(2, 6, 2),
      },
      {"block_size": 32},
    ),
    "padded_scale_fits_two_contracting_dimensions": Malformed(
      TypeError,
      ("rhs_scale", "(2, 4, 6)"),
      {
        "lhs": f32(2, 3, 4),
        "lhs_scale": None,
        "rhs": mx(2, 3, 6),
        "rhs_scale": e8m0(2, 4, 6),
      },
      {"block_size": 32, "dimension_numbers": (((0, 1), (0, 1)), ((), ()))},
    ),
  }


def bad_parameters() -> dict[str, Malformed]:
  return {
    "block_size_of_another_format": static_error(
      ValueError, "block_size", "16", "32", "mxfp8", block_size=16
    ),
    "block_size_64": static_error(
      ValueError, "block_size", "64", block_size=64
    ),
    "block_size_0": static_error(ValueError, "block_size", "0", block_size=0),
    "negative_block_size": static_error(
      ValueError, "block_size", "-32", block_size=-32
    ),
    "block_size_is_a_string": static_error(
      ValueError, "block_size", "'32'", block_size="32"
    ),
    "unknown_implementation": static_error(
      ValueError,
      "implementation",
      "'cublas'",
      "cudnn",
      "triton",
      "cpu",
      "xla",
      implementation="cublas",
    ),
    "implementation_in_capitals": static_error(
      ValueError, "implementation", "'XLA'", implementation="XLA"
    ),
    "unknown_activation": static_error(
      ValueError,
      "activation",
      "'tanh'",
      "relu",
      "gelu",
      "silu",
      activation="tanh",
    ),
    "activation_is_a_function": static_error(
      ValueError, "activation", "relu", activation=jax.nn.relu
    ),
    "unknown_precision": static_error(
      ValueError, "precision", "'exact'", "highest", precision="exact"
    ),
    "precision_is_a_number": static_error(
      ValueError, "precision", "32", precision=32
    ),
    "unknown_precision_in_a_pair": static_error(
      ValueError, "precision", "'best'", precision=("highest", "best")
    ),
    "integer_result": static_error(
      TypeError,
      "preferred_element_type",
      "int32",
      preferred_element_type=jnp.int32,
    ),
    "float8_result": static_error(
      TypeError,
      "preferred_element_type",
      "float8_e4m3fn",
      preferred_element_type=jnp.float8_e4m3fn,
    ),
    "float64_result": static_error(
      TypeError,
      "preferred_element_type",
      "float64",
      preferred_element_type=np.float64,
    ),
    "result_dtype_is_no_dtype": static_error(
      TypeError,
      "preferred_element_type",
      "'bf17'",
      preferred_element_type="bf17",
    ),
    "result_dtype_is_an_array": static_error(
      TypeError, "preferred_element_type", preferred_element_type=np.ones(3)
    ),
  }


def bad_dimension_numbers() -> dict[str, Malformed]:
  return {
    "dimension_numbers_is_a_number": numbers_error(1, "1"),
    "dimension_numbers_is_a_string": numbers_error("mk,nk", "'mk,nk'"),
    "dimension_numbers_without_batch": numbers_error(
      ((1,), (1,)), "((1,), (1,))"
    ),
    "dimension_is_a_float": numbers_error((((1.5,), (1,)), ((), ())), "1.5"),
    "dimension_is_a_digit": numbers_error(((("1",), (1,)), ((), ())), "'1'"),
    "contracting_dimension_out_of_range": numbers_error(
      (((2,), (1,)), ((), ())), "lhs", "2", "(4, 64)"
    ),
    "negative_contracting_dimension": numbers_error(
      (((1,), (-1,)), ((), ())), "rhs", "-1", "(6, 64)"
    ),
    "negative_batch_dimension": numbers_error(
      (((1,), (1,)), ((-2,), (0,))), "lhs", "-2", "(4, 64)"
    ),
    "dimension_twice_in_lhs": numbers_error(
      (((1, 1), (1, 0)), ((), ())), "lhs", "(1, 1)"
    ),
    "dimension_both_contracting_and_batch": numbers_error(
      (((1,), (1,)), ((0,), (1,))), "rhs", "(1, 1)"
    ),
    "unequal_numbers_of_contracting_dimensions": numbers_error(
      (((0, 1), (1,)), ((), ())), "contracting", "(0, 1)", "(1,)"
    ),
    "unequal_numbers_of_batch_dimensions": numbers_error(
      (((1,), (1,)), ((0,), ())), "batch", "(0,)", "()"
    ),
    "no_contracting_dimension": numbers_error(
      (((), ()), ((), ())), "contracting"
    ),
    "rank_2_and_3_without_dimension_numbers": type_error(
      "dimension_numbers",
      "2",
      "3",
      rhs=mx(2, 6, 64),
      rhs_scale=e8m0(2, 6, 2),
    ),
    "contraction_over_rows": Malformed(
      TypeError,
      ("lhs_scale", "(64, 2)"),
      {"lhs": mx(64, 64), "lhs_scale": e8m0(64, 2)},
      {"dimension_numbers": (((0,), (1,)), ((), ()))},
    ),
  }


def bad_scaled_arrays() -> dict[str, Malformed]:
  return {
    "scaled_array_and_scale": type_error(
      "lhs", "ScaledArray", "lhs_scale", lhs=mxfp8(4, 64)
    ),
    "scaled_array_blocked_along_rows": type_error(
      "rhs",
      "dimension 0",
      "(1,)",
      rhs=mxfp8(64, 64, axis=0),
      rhs_scale=None,
    ),
    "swizzled_with_contraction_not_last": Malformed(
      TypeError,
      ("lhs", "dimension 1", "(0,)"),
      {"lhs": swizzled(64, 64), "lhs_scale": None},
      {"dimension_numbers": (((0,), (1,)), ((), ()))},
    ),
    "block_size_of_another_scaled_array": Malformed(
      ValueError,
      ("block_size", "lhs", "16"),
      {"lhs": mxfp8(4, 64), "lhs_scale": None},
      {"block_size": 16},
    ),
    "global_scale_along_the_contraction": type_error(
      "global_scale",
      "lhs",
      "(4, 64)",
      lhs=unchecked(fp4(4, 64), e4m3(4, 4), f32(4, 64), jp.NVFP4),
      lhs_scale=None,
    ),
    "global_scale_of_scaled_array_of_another_size": type_error(
      "global_scale",
      "float32[3]",
      "(4, 64)",
      lhs=unchecked(fp4(4, 64), e4m3(4, 4), f32(3), jp.NVFP4),
      lhs_scale=None,
    ),
  }


def bad_epilogues() -> dict[str, Malformed]:
  return {
    "bfloat16_global_scale": type_error(
      "global_scale", "bfloat16", global_scale=ones((), jnp.bfloat16)
    ),
    "integer_global_scale": type_error(
      "global_scale", "int32", global_scale=ones((), np.int32)
    ),
    "global_scale_does_not_broadcast": type_error(
      "global_scale", "(5,)", "(4, 6)", global_scale=f32(5)
    ),
    "global_scale_of_another_rank": type_error(
      "global_scale", "(1, 4, 6)", "(4, 6)", global_scale=f32(1, 4, 6)
    ),
    "global_scale_is_a_string": static_error(
      TypeError, "global_scale", "str", global_scale="2"
    ),
    "bias_of_rows": type_error("bias", "(4,)", "(6,)", bias=f32(4)),
    "bias_of_rank_2": type_error("bias", "(1, 6)", "(6,)", bias=f32(1, 6)),
    "scalar_bias": type_error("bias", "()", "(6,)", bias=f32()),
    "integer_bias": type_error("bias", "int32", bias=ones((6,), np.int32)),
    "float8_bias": type_error("bias", "float8_e4m3fn", bias=e4m3(6)),
    "transposed_residual": type_error(
      "residual", "(6, 4)", "(4, 6)", residual=f32(6, 4)
    ),
    "residual_does_not_broadcast": type_error(
      "residual", "(1, 6)", "(4, 6)", residual=f32(1, 6)
    ),
    "integer_residual": type_error(
      "residual", "int32", residual=ones((4, 6), np.int32)
    ),
    "scaled_array_as_residual": type_error(
      "residual", "ScaledArray", residual=mxfp8(4, 64)
    ),
    "bias_is_a_string": static_error(TypeError, "bias", "str", bias="none"),
  }


CALLS: Final = {
  **wrong_ranks(),
  **wrong_dtypes(),
  **wrong_sizes(),
  **bad_parameters(),
  **bad_dimension_numbers(),
  **bad_scaled_arrays(),
  **bad_epilogues(),
}

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors name the public function, and print no contents of arrays."""

import dataclasses
import inspect
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin.testing import contract

pytestmark = pytest.mark.smoke

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object, which may have 77
# Every number of it has these digits, and nothing else has.
_DIGITS = "77"
_ARRAY = np.full(2000, 7777.0, np.float32)
_GIVEN = {
  "array": jax.device_put(_ARRAY),
  "numpy": _ARRAY,
  "ints": np.full(2000, 7777, np.int32),
  "tree": {"a": _ARRAY, "b": [jax.device_put(_ARRAY)]},
  "small": jax.device_put(_ARRAY[:3]),
  "none": None,
  "number": np.int64(1),
  "key": jax.random.key(0),
  "objects": np.array([None]),
  "object": object(),
}
# JAX's function computes the call, and raises the errors.
_OF_JAX = {
  (jp.nn.scaled_dot_general, name)
  for name in ("lhs", "rhs", "dimension_numbers", "preferred_element_type")
}

# The start of an error: a function, perhaps with an argument, or a path.
_FUNCTION = re.compile(r"^[\w./-]+( [\w@]+)?: ")

_X, _W = np.ones((4, 64), np.float32), np.ones((2, 64, 64), np.float32)
_Q, _WQ = (contract.quantized(x, jp.MXFP8) for x in (_X, _W))
_SIZES = np.array([1, 3], np.int32)
_DIMS = (((1,), (1,)), ((), ()))
_RECIPE = jp.training.MXFP8_RECIPE


def _dense(x):
  return x @ x.T


# Arguments that each function takes, by name. Those that are not named here
# have defaults.
_CALLS = {
  jp.quantize: {"x": _X, "format": jp.NVFP4},
  jp.quantize_both: {"x": np.ones((64, 64), np.float32), "format": jp.NVFP4},
  jp.dequantize: {"x": _Q},
  jp.block_scaled_dot: {"lhs": _Q, "rhs": _Q},
  jp.linear: {"x": _X, "w_q": _WQ, "layer": 0},
  jp.ragged_dot: {"lhs": _X, "rhs": _WQ, "group_sizes": _SIZES},
  jp.ragged_dot_general: {
    **{"lhs": _X, "rhs": _WQ, "group_sizes": _SIZES},
    "ragged_dot_dimension_numbers": jax.lax.RaggedDotDimensionNumbers(
      (((1,), (2,)), ((), ())), (0,), (0,)
    ),
  },
  jp.align_groups: {"x": _X, "group_sizes": _SIZES, "multiple": 32},
  jp.training.ragged_dot_general: {
    **{"lhs": _X, "rhs": _W, "group_sizes": _SIZES, "recipe": _RECIPE}},
  jp.training.Recipe: {
    **{"activation_format": jp.MXFP8, "weight_format": jp.MXFP8},
    "grad_format": jp.MXFP8},
  jp.dot_general: {"lhs_format": jp.MXFP8, "rhs_format": jp.MXFP8},
  jp.dot_general("mxfp8",
    "mxfp8").__call__: {**{"lhs": _X, "rhs": _X, "dimension_numbers": _DIMS}},
  jp.quantize_operand: {"x": _X, "recipe": _RECIPE},
  jp.quantize_dots: {"fn": _dense, "recipe": _RECIPE},
  jp.training.accumulate: {"loss": _dense, "microbatches": 2},
  jp.training.with_primals: {
    **{"tree": [jp.quantize_operand(_X, _RECIPE)], "primals": [_X]}},
  jp.checkpoint_policies.for_block_scaled_dots: {"policy": _dense},
  jp.OutFormat: {"format": jp.MXFP8},
  jp.options: {},
  jp.checkpoints.activation_scale: {"layout": "modelopt", "scale": 1.0},
  jp.checkpoints.from_mlx: {"weight": _Q.values, "scales": _Q.scale},
  jp.checkpoints.from_deepseek: {"weight": _Q.values, "scale": _Q.scale},
  jp.checkpoints.from_comfyui: {
    **{"weight": _Q.values, "weight_scale": _Q.scale}},
  jp.nn.scaled_dot_general: {
    **{"lhs": _X, "rhs": _X, "dimension_numbers": _DIMS}},
  jp.scaled_dot: {
    **{"lhs": _Q.values, "rhs": _Q.values, "dimension_numbers": _DIMS},
    **{"lhs_scale": _Q.scale, "rhs_scale": _Q.scale}},
  jp.BlockFormat: {
    **{"name": "own", "values_dtype": _Q.values.dtype, "block_size": 32},
    **{"scale_dtype": _Q.scale.dtype, "has_global_scale": False}},
  jp.ScaledArray: {
    **{"values": _Q.values, "scale": _Q.scale, "format": jp.MXFP8},
    "global_scale": None},
  jp.shard: {"tree": _Q, "sharding": None},
  jp.shardings: {"tree": _Q, "sharding": None},
  jp.unswizzle_scale: {
    **{"swizzled": jp.swizzle_scale(_Q.scale), "shape": (4, 2)}},
  jp.rewrite: {"module": "module {}", "target": jp.named_target("b200")},
  jp.detect_target: {},
  jp.unprepare_weights: {"tree": _Q},
  jp.legacy_global_scales: {"tree": _Q},
  jp.checkpoints.from_modelopt: {
    **{"weight": _Q.values, "weight_scale": _Q.scale}},
  jp.checkpoints.from_gguf: {"blocks": _Q.values, "format": "mxfp4"},
  jp.checkpoints.from_gpt_oss: {"blocks": _Q.values, "scales": _Q.scale},
  jp.checkpoints.from_torchao: {"qdata": _Q.values, "scale": _Q.scale},
  jp.checkpoints.from_compressed_tensors: {
    **{"weight_packed": _Q.values, "weight_scale": _Q.scale},
    "weight_global_scale": None},
  jp.checkpoints.from_gptq: {"qweight": _Q.values, "scales": _Q.scale},
  jp.checkpoints.from_awq: {"qweight": _Q.values, "scales": _Q.scale},
  jp.checkpoints.load: {"path": __file__},
  jp.accelerate: {"fn": _dense},
  jp.accept_quantized: {"fn": _dense},
  jp.quantize_params: {"params": {"kernel": _W[0]}, "format": jp.MXFP8},
  jp.prepare_weights: {"tree": {"kernel": _WQ}},
  jp.concatenate: {"arrays": [_Q, _Q]},
  jp.stack: {"arrays": [_Q, _Q]},
  jp.pack_fp4: {"values": np.zeros((4, 4), ml_dtypes.float4_e2m1fn)},
  jp.unpack_fp4: {"packed": np.zeros((4, 4), np.uint8)},
  jp.swizzle_scale: {"scale": _Q.scale},
  jp.QuantizedWeight: {
    **{"array": _WQ, "kernel_shape": (2, 64, 64), "contracting": (2,)}},
  jp.nn.scaled_matmul: {**{"lhs": _X[None], "rhs": _X[None]},
    **{"lhs_scales": _X[None, :, :2], "rhs_scales": _X[None, :, :2]}},
  jp.nn.rms_norm: {"x": _X, "residual": _X},
  jp.nn.layer_norm: {"x": _X},
  jp.nn.silu_and_mul: {"gate": _X, "up": _X},
  jp.nn.gelu_and_mul: {"gate": _X},
  jp.nn.swigluoai: {"gate": _X, "bias": _X[0]},
  jp.nn.silu: {"x": _X, "bias": _X[0]},
  jp.nn.gelu: {"x": _X},
  jp.nn.relu: {"x": _X},
  jp.nn.get_scaled_dot_general_config: {"mode": "mxfp8"},
  jp.named_target: {"name": "b200"},
  jp.use_target: {"target": jp.named_target("b200")},
  jp.export: {"fn": _dense},
  jp.register_backend: {"backend": None},
  jp.debug_checks: {},
}  # fmt: skip


class ErrorWordsTest(absltest.TestCase):
  def test_no_argument_has_its_contents_printed(self):
    refused = 0
    for function, arguments in _CALLS.items():
      for name in inspect.signature(function).parameters:
        for kind, value in _GIVEN.items():
          with self.subTest(function=function, argument=name, given=kind):
            error = self._error(function, {**arguments, name: value})
            refused += error is not None
            self.assertNotIn(_DIGITS, _ADDRESS.sub("", str(error)))
            if error is not None and (function, name) not in _OF_JAX:
              self.assertRegex(str(error), _FUNCTION)
    # Calls that are all accepted would test nothing.
    self.assertGreater(refused, 500)

  def test_numpy_numbers_are_numbers(self):
    one, yes = np.int64(1), np.True_
    zero, size = one - 1, 32 * one
    recipe = dataclasses.replace(
      jp.training.NVFP4_RECIPE, weight_2d=yes, wgrad_hadamard=size
    )
    self.assertEqual(recipe, dataclasses.replace(recipe, wgrad_hadamard=32))
    w = {"kernel": np.ones((64, 64), np.float32)}
    out = jp.OutFormat("mxfp8", returns_amax=yes)
    swizzled = jp.swizzle_scale(_Q.scale)
    for call in (
      lambda: jp.quantize(_W, "nvfp4", batch_dims=one, axis=one + 1),
      lambda: jp.align_groups(_X, _SIZES, size),
      lambda: jp.quantize_params(w, "mxfp8", min_size=size)[0],
      lambda: jp.quantize_operand(_X[:, :32], "mxfp8", contracting=one),
      lambda: jp.quantize_dots(_dense, _RECIPE, params=zero)(_X),
      lambda: jp.block_scaled_dot(_Q, _Q, block_size=size),
      lambda: jp.nn.relu(_X, out_format=out),
      lambda: jp.unswizzle_scale(swizzled, [4 * one, 2 * one]),
      lambda: dataclasses.replace(jp.MXFP8, name="own", block_size=size) and 1,
    ):
      jax.eval_shape(call)

  def test_bools_are_not_numbers(self):
    w = {"kernel": np.ones((64, 64), np.float32)}
    codes = np.zeros((4, 4), ml_dtypes.float4_e2m1fn)
    dims = (((True,), (1,)), ((), ()))
    for number, call in enumerate(
      (
        lambda: jp.quantize(_X, "mxfp8", axis=True),
        lambda: jp.quantize_both(_W[0], "nvfp4", axes=(True, 0)),
        lambda: jp.pack_fp4(codes, axis=True),
        lambda: jp.stack([_Q, _Q], axis=True),
        lambda: _Q.transpose(True, 0),
        lambda: jp.OutFormat("mxfp8", axis=True),
        lambda: jp.quantize_params(w, "mxfp8", where=lambda p: (True,)),
        lambda: jp.align_groups(_X, _SIZES, True),
        lambda: jp.block_scaled_dot(_Q, _Q, dimension_numbers=dims),
        lambda: jp.block_scaled_dot(_Q, _Q, global_scale=True),
        lambda: jp.ScaledArray(_Q.values, _Q.scale, True, "mxfp8"),
        lambda: jp.QuantizedWeight(_Q, (4, 64), (True,)),
        lambda: jp.QuantizedWeight(_Q[:1], (True, 64), (1,)),
        lambda: jp.quantize_operand(_X[:, :32], "mxfp8", contracting=True),
        lambda: jp.training.accumulate(_dense, True),
      )
    ):
      with (
        self.subTest(call=number),
        self.assertRaisesRegex((TypeError, ValueError), "True|bool"),
      ):
        call()

  def _error(self, function, arguments):
    try:
      jax.eval_shape(lambda: (function(**arguments), None)[1])
    except Exception as error:
      return error
    return None

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""OpenVINO's MatMul of constants that it dequantizes or multiplies as they are.

"u4" and "i8" quantize activations to 8 bits in groups of 32
(`DYNAMIC_QUANTIZATION_GROUP_SIZE`), "bf16" and "f32" do not.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from jaxplugin.core import formats
from jaxplugin.lab.bench.libraries import worker
from jaxplugin.repro import oracle

PACKAGES: Final = ("openvino",)
_MXFP4: Final = "mxfp4"
KINDS: Final = (
  worker.Kind(name="u4", value_bits=4, scale_bits=0.625),
  worker.Kind(name="u4 f32", value_bits=4, scale_bits=0.625),
  worker.Kind(name="mxfp4 bf16", value_bits=4, scale_bits=0.25),
  worker.Kind(name="mxfp4 f32", value_bits=4, scale_bits=0.25),
  worker.Kind(name="i8", value_bits=8, scale_bits=0.5),
  worker.Kind(name="i8 f32", value_bits=8, scale_bits=0.5),
)


class OpenVino:
  """A model of one MatMul, compiled for low latency."""

  def __init__(self, threads: int):
    import openvino

    self._threads = threads
    self._ov = openvino
    self._core = openvino.Core()

  def prepare(self, kind: str, form: str, case: worker.Case) -> worker.Prepared:
    type_, _, precision = kind.partition(" ")
    model, weights, constants = self._model(type_, case)
    group = 0 if precision else worker.BLOCK
    options = {
      "INFERENCE_NUM_THREADS": self._threads,
      "PERFORMANCE_HINT": "LATENCY",
      "INFERENCE_PRECISION_HINT": precision or "f32",
      "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(group),
    }
    lhs = self._ov.Tensor(case.lhs, shared_memory=True)
    requests = []
    for _ in range(case.copies):
      compiled = self._core.compile_model(model, "CPU", options)
      request = compiled.create_infer_request()
      request.set_input_tensor(lhs)
      # OpenVINO reads `constants`, so they must live as long as the request.
      requests.append((request, constants))

    def run(i: int) -> None:
      requests[i % len(requests)][0].infer()

    return worker.Prepared(
      run=run,
      result=lambda: requests[0][0].get_output_tensor(0).data,
      weights=weights,
    )

  def _model(
    self, type_: str, case: worker.Case
  ) -> tuple[Any, np.ndarray, list[Any]]:
    """Returns a model, its weights in f32, and the memory of constants."""
    from openvino import opset13

    (m, k), n = case.lhs.shape, len(case.rhs)
    make = _mxfp4 if type_ == _MXFP4 else _integers
    weights, constants, dequantized = make(self._ov, opset13, type_, case.rhs)
    shape = opset13.constant(np.array([n, k], np.int64))
    rhs = opset13.reshape(dequantized, shape, False)
    if type_ != _MXFP4:
      rhs = opset13.convert(rhs, np.float32)
    lhs = opset13.parameter([m, k], np.float32)
    product = opset13.result(opset13.matmul(lhs, rhs, False, True))
    return self._ov.Model([product], [lhs], "dot"), weights, constants


def _mxfp4(ov: Any, opset: Any, type_: str, rhs: np.ndarray) -> Any:
  n, k = rhs.shape
  values, scale = oracle.quantize_rows(rhs, formats.MXFP4, None)
  blocks = values.reshape(n, -1, worker.BLOCK)
  scale = scale[..., None]
  weights = blocks.astype(np.float32) * scale.astype(np.float32)
  codes = worker.packed(blocks.view(np.uint8) & 15)
  shape = ov.Shape(list(blocks.shape))
  value = opset.constant(ov.Tensor(codes, shape, ov.Type.f4e2m1))
  exponents = scale.view(np.uint8)
  step = opset.constant(
    ov.Tensor(exponents, ov.Shape(list(scale.shape)), ov.Type.f8e8m0)
  )
  product = opset.multiply(
    opset.convert(value, np.float32), opset.convert(step, np.float32)
  )
  return weights.reshape(n, k), [codes, exponents], product


def _integers(ov: Any, opset: Any, type_: str, rhs: np.ndarray) -> Any:
  values, scale = worker.integers(rhs, int(type_[1:]))
  scale = scale.astype(np.float16)
  weights = (values * scale.astype(np.float32)).reshape(rhs.shape)
  if type_ == "i8":
    value = opset.convert(opset.constant(values.astype(np.int8)), np.float16)
    return weights, [], opset.multiply(value, opset.constant(scale))
  codes = worker.packed(values + 8)
  zeros = np.full(scale.size // 2, 0x88, np.uint8)
  value, zero = (
    opset.convert(
      opset.constant(ov.Tensor(data, ov.Shape(list(shape)), ov.Type.u4)),
      np.float16,
    )
    for data, shape in ((codes, values.shape), (zeros, scale.shape))
  )
  product = opset.multiply(opset.subtract(value, zero), opset.constant(scale))
  return weights, [codes, zeros], product


LIBRARY: Final = OpenVino

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's MatMulNBits, in blocks of 32.

Its accuracy level 4 quantizes activations to 8 bits. "f32" is level 1, which
does not.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from jaxplugin.lab.bench.libraries import worker

PACKAGES: Final = ("onnxruntime", "onnx")
KINDS: Final = (
  worker.Kind(name="int4", value_bits=4, scale_bits=1),
  worker.Kind(name="int4 f32", value_bits=4, scale_bits=1),
  worker.Kind(name="int8", value_bits=8, scale_bits=1),
  worker.Kind(name="int8 f32", value_bits=8, scale_bits=1),
)
_DOMAIN: Final = "com.microsoft"


class OnnxRuntime:
  """A session of one MatMulNBits for each copy of the weights."""

  def __init__(self, threads: int):
    import onnx
    import onnxruntime

    self._onnx, self._runtime = onnx, onnxruntime
    self._options = onnxruntime.SessionOptions()
    self._options.intra_op_num_threads = threads
    self._options.log_severity_level = 3

  def prepare(self, kind: str, form: str, case: worker.Case) -> worker.Prepared:
    bits, level = int(kind[3]), 1 if kind.endswith(" f32") else 4
    values, scale = worker.integers(case.rhs, bits)
    weights = (values * scale).reshape(case.rhs.shape)
    codes = (values + 2 ** (bits - 1)).astype(np.uint8)
    if bits == 4:
      codes = worker.packed(codes)
    model = self._model(case, codes, scale[..., 0], bits, level)
    shape = [len(case.lhs), len(case.rhs)]
    sessions = []
    for _ in range(case.copies):
      session = self._runtime.InferenceSession(
        model, self._options, providers=["CPUExecutionProvider"]
      )
      binding = session.io_binding()
      binding.bind_cpu_input("lhs", case.lhs)
      out = self._runtime.OrtValue.ortvalue_from_shape_and_type(
        shape, np.float32
      )
      binding.bind_ortvalue_output("out", out)
      sessions.append((session, binding, out))

    def run(i: int) -> None:
      session, binding, _ = sessions[i % len(sessions)]
      session.run_with_iobinding(binding)

    return worker.Prepared(
      run=run, result=lambda: sessions[0][2].numpy(), weights=weights
    )

  def _model(
    self,
    case: worker.Case,
    codes: np.ndarray,
    scale: np.ndarray,
    bits: int,
    level: int,
  ) -> bytes:
    helper, array = self._onnx.helper, self._onnx.numpy_helper.from_array
    float_ = self._onnx.TensorProto.FLOAT
    (m, k), n = case.lhs.shape, len(case.rhs)
    node = helper.make_node(
      "MatMulNBits",
      ["lhs", "rhs", "scale"],
      ["out"],
      domain=_DOMAIN,
      K=k,
      N=n,
      bits=bits,
      block_size=worker.BLOCK,
      accuracy_level=level,
    )
    graph = helper.make_graph(
      [node],
      "dot",
      [helper.make_tensor_value_info("lhs", float_, [m, k])],
      [helper.make_tensor_value_info("out", float_, [m, n])],
      [array(codes, "rhs"), array(scale, "scale")],
    )
    versions = ("", 21), (_DOMAIN, 1)
    model = helper.make_model(
      graph,
      opset_imports=[helper.make_opsetid(*v) for v in versions],
      ir_version=10,
    )
    return model.SerializeToString()


LIBRARY: Final = OnnxRuntime

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""ggml's `ggml_mul_mat`, which quantizes f32 activations to 8 bits.

The shared libraries come from the npm package `@node-llama-cpp/linux-x64`:

  npm pack @node-llama-cpp/linux-x64
  tar xf node-llama-cpp-linux-x64-*.tgz
  export JAXPLUGIN_GGML_DIR=$PWD/package/bins/linux-x64

As in llama.cpp, threads stay in a pool, and weights are repacked if ggml has a
repacked layout of their type.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
from ctypes import c_char_p
from ctypes import c_int
from ctypes import c_int64
from ctypes import c_size_t
from ctypes import c_void_p
from typing import Any
from typing import Final

import numpy as np

from jaxplugin.lab.bench.libraries import worker

DIRECTORY: Final = "JAXPLUGIN_GGML_DIR"
_PLAIN: Final = "plain"
_REPACKED: Final = "repacked"
KINDS: Final = (
  worker.Kind(
    name="mxfp4", value_bits=4, scale_bits=0.25, forms=(_REPACKED, _PLAIN)
  ),
  worker.Kind(name="nvfp4", value_bits=4, scale_bits=0.5),
  worker.Kind(
    name="q4_0", value_bits=4, scale_bits=0.5, forms=(_REPACKED, _PLAIN)
  ),
  worker.Kind(name="q8_0", value_bits=8, scale_bits=0.5),
)
# Values of `enum ggml_type`.
_F32: Final = 0
_TYPES: Final = {"q4_0": 2, "q8_0": 8, "mxfp4": 39, "nvfp4": 40}
_CONTEXT_BYTES: Final = 1 << 20  # of descriptions; the data is elsewhere


def missing() -> str:
  """Returns how to get ggml; "" if it is installed."""
  directory = os.environ.get(DIRECTORY)
  if directory and any(pathlib.Path(directory).glob("libggml-cpu-*.so")):
    return ""
  return (
    f"{DIRECTORY} must name a folder with libggml-cpu-*.so, got {directory};"
    " unpack the npm package @node-llama-cpp/linux-x64"
  )


class _InitParams(ctypes.Structure):
  """`struct ggml_init_params`."""

  _fields_ = (
    ("mem_size", c_size_t),
    ("mem_buffer", c_void_p),
    ("no_alloc", ctypes.c_bool),
  )


class _PoolParams(ctypes.Structure):
  """`struct ggml_threadpool_params`."""

  _fields_ = (
    ("cpumask", ctypes.c_bool * 512),
    ("n_threads", c_int),
    ("prio", c_int),
    ("poll", ctypes.c_uint32),
    ("strict_cpu", ctypes.c_bool),
    ("paused", ctypes.c_bool),
  )


class _Function:
  """A C function whose result and arguments have declared types."""

  def __init__(self, library: ctypes.CDLL, name: str, result: Any, *types: Any):
    self._function = getattr(library, name)
    self._function.restype = result
    self._function.argtypes = types

  def __call__(self, *arguments: Any) -> Any:
    return self._function(*arguments)


class Ggml:
  """ggml's CPU backend, in the fastest build for this machine."""

  def __init__(self, threads: int):
    directory = pathlib.Path(os.environ[DIRECTORY])
    base = ctypes.CDLL(
      str(directory / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL
    )
    (path,) = directory.glob("libggml.*so*")
    registry = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    builds = [str(p) for p in directory.glob("libggml-cpu-*.so")]
    build = max(builds, key=lambda p: ctypes.CDLL(p).ggml_backend_score())
    cpu = ctypes.CDLL(build)

    def function(name: str, result: Any, *types: Any) -> _Function:
      return _Function(base, name, result, *types)

    load = _Function(registry, "ggml_backend_load", c_void_p, c_char_p)
    device_of = function(
      "ggml_backend_reg_dev_get", c_void_p, c_void_p, c_size_t
    )
    init = function("ggml_backend_dev_init", c_void_p, c_void_p, c_char_p)
    loaded = load(build.encode())
    device = device_of(loaded, 0)
    self._backend = init(device, None)
    self._use_threads(base, cpu, threads)
    default = function(
      "ggml_backend_get_default_buffer_type", c_void_p, c_void_p
    )
    find = function(
      "ggml_backend_reg_get_proc_address", c_void_p, c_void_p, c_char_p
    )
    name_of = function("ggml_backend_buft_name", c_char_p, c_void_p)
    extras = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(
      find(loaded, b"ggml_backend_dev_get_extra_bufts")
    )(device)
    self._buffers = {_PLAIN: default(self._backend)}
    i = 0
    while extras[i]:
      if name_of(extras[i]) == b"CPU_REPACK":
        self._buffers[_REPACKED] = extras[i]
      i += 1
    self.context = function("ggml_init", c_void_p, _InitParams)
    self.tensor = function(
      "ggml_new_tensor_2d", c_void_p, c_void_p, c_int, c_int64, c_int64
    )
    self.allocate = function(
      "ggml_backend_alloc_ctx_tensors_from_buft", c_void_p, c_void_p, c_void_p
    )
    self.free_buffer = function("ggml_backend_buffer_free", None, c_void_p)
    self.free_context = function("ggml_free", None, c_void_p)
    data = (c_void_p, c_void_p, c_size_t, c_size_t)
    self.set = function("ggml_backend_tensor_set", None, *data)
    self.get = function("ggml_backend_tensor_get", None, *data)
    self._multiply = function(
      "ggml_mul_mat", c_void_p, c_void_p, c_void_p, c_void_p
    )
    self._graph = function("ggml_new_graph", c_void_p, c_void_p)
    self._expand = function(
      "ggml_build_forward_expand", None, c_void_p, c_void_p
    )
    self._compute = function(
      "ggml_backend_graph_compute", c_int, c_void_p, c_void_p
    )
    self._row_bytes = function("ggml_row_size", c_size_t, c_int, c_int64)
    self._quantize = function(
      "ggml_quantize_chunk", c_size_t, c_int, c_void_p, c_void_p,
      c_int64, c_int64, c_int64, c_void_p,
    )  # fmt: skip
    self._dequantize = {
      name: function(
        f"dequantize_row_{name}", None, c_void_p, c_void_p, c_int64
      )
      for name in _TYPES
    }

  def _use_threads(
    self, base: ctypes.CDLL, cpu: ctypes.CDLL, threads: int
  ) -> None:
    params = _PoolParams()
    pointer = ctypes.POINTER(_PoolParams)
    _Function(base, "ggml_threadpool_params_init", None, pointer, c_int)(
      ctypes.byref(params), threads
    )
    pool = _Function(cpu, "ggml_threadpool_new", c_void_p, pointer)
    use = _Function(
      cpu, "ggml_backend_cpu_set_threadpool", None, c_void_p, c_void_p
    )
    count = _Function(
      cpu, "ggml_backend_cpu_set_n_threads", None, c_void_p, c_int
    )
    count(self._backend, threads)
    use(self._backend, pool(ctypes.byref(params)))

  def prepare(self, kind: str, form: str, case: worker.Case) -> worker.Prepared:
    buffer = self._buffers.get(form or _PLAIN)
    if buffer is None:
      raise NotImplementedError("this build has no repacked layouts")
    number = _TYPES[kind]
    (m, k), n = case.lhs.shape, len(case.rhs)
    rhs = np.ascontiguousarray(case.rhs)
    quantized = np.zeros(self._row_bytes(number, k) * n, np.uint8)
    self._quantize(
      number, rhs.ctypes.data, quantized.ctypes.data, 0, n, k, None
    )
    weights = np.empty((n, k), np.float32)
    self._dequantize[kind](
      quantized.ctypes.data, weights.ctypes.data, weights.size
    )
    plain = self._buffers[_PLAIN]
    lhs = _Tensors(self)
    x = self.tensor(lhs.context, _F32, k, m)
    lhs.allocate(plain, x, np.ascontiguousarray(case.lhs))
    products = []
    for _ in range(case.copies):
      copy, product = _Tensors(self), _Tensors(self)
      w = self.tensor(copy.context, number, k, n)
      copy.allocate(buffer, w, quantized)
      y = self._multiply(product.context, w, x)
      graph = self._graph(product.context)
      self._expand(graph, y)
      product.allocate(plain)
      products.append((graph, y, (lhs, copy, product)))

    def run(i: int) -> None:
      if self._compute(self._backend, products[i % len(products)][0]):
        raise RuntimeError("ggml_backend_graph_compute failed")

    def result() -> np.ndarray:
      y = np.empty((m, n), np.float32)
      self.get(products[0][1], y.ctypes.data, 0, y.nbytes)
      return y

    return worker.Prepared(run=run, result=result, weights=weights)


class _Tensors:
  """A context and the buffer of its tensors, which are freed together."""

  def __init__(self, ggml: Ggml):
    self._ggml = ggml
    self._buffer: Any = None
    self.context = ggml.context(_InitParams(_CONTEXT_BYTES, None, True))

  def allocate(
    self, buffer: Any, tensor: Any = None, data: np.ndarray | None = None
  ) -> None:
    self._buffer = self._ggml.allocate(self.context, buffer)
    if data is not None:
      self._ggml.set(tensor, data.ctypes.data, 0, data.nbytes)

  def __del__(self) -> None:
    if self._buffer is not None:
      self._ggml.free_buffer(self._buffer)
    self._ggml.free_context(self.context)


if __name__ == "__main__":
  worker.serve(Ggml)

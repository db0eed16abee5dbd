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
import types
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_void_p
from typing import Any, Final

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


_POINTERS: Final = (c_void_p, c_void_p)
_COPY: Final = (None, c_void_p, c_void_p, c_size_t, c_size_t)
_DEQUANTIZE: Final = (None, c_void_p, c_void_p, c_int64)
# Result and arguments of each function.
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
  **{f"dequantize_row_{name}": _DEQUANTIZE for name in _TYPES},
  "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, *_POINTERS),
  "ggml_backend_buffer_free": (None, c_void_p),
  "ggml_backend_buft_name": (c_char_p, c_void_p),
  "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
  "ggml_backend_cpu_set_threadpool": (None, *_POINTERS),
  "ggml_backend_dev_init": (c_void_p, c_void_p, c_char_p),
  "ggml_backend_get_default_buffer_type": (c_void_p, c_void_p),
  "ggml_backend_graph_compute": (c_int, *_POINTERS),
  "ggml_backend_load": (c_void_p, c_char_p),
  "ggml_backend_reg_dev_get": (c_void_p, c_void_p, c_size_t),
  "ggml_backend_reg_get_proc_address": (c_void_p, c_void_p, c_char_p),
  "ggml_backend_tensor_get": _COPY,
  "ggml_backend_tensor_set": _COPY,
  "ggml_build_forward_expand": (None, *_POINTERS),
  "ggml_free": (None, c_void_p),
  "ggml_init": (c_void_p, _InitParams),
  "ggml_mul_mat": (c_void_p, c_void_p, *_POINTERS),
  "ggml_new_graph": (c_void_p, c_void_p),
  "ggml_new_tensor_2d": (c_void_p, c_void_p, c_int, c_int64, c_int64),
  "ggml_quantize_chunk": (
    *(c_size_t, c_int, *_POINTERS),
    *(c_int64, c_int64, c_int64, c_void_p),
  ),
  "ggml_row_size": (c_size_t, c_int, c_int64),
  "ggml_threadpool_new": (c_void_p, ctypes.POINTER(_PoolParams)),
  "ggml_threadpool_params_init": (None, ctypes.POINTER(_PoolParams), c_int),
}


def _functions(*libraries: ctypes.CDLL) -> Any:
  """Returns a namespace of the functions of `_SIGNATURES`."""
  found = types.SimpleNamespace()
  for name, (result, *arguments) in _SIGNATURES.items():
    library = next(one for one in libraries if hasattr(one, name))
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    setattr(found, name, function)
  return found


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
    self.c = c = _functions(base, registry, ctypes.CDLL(build))
    loaded = c.ggml_backend_load(build.encode())
    device = c.ggml_backend_reg_dev_get(loaded, 0)
    self._backend = c.ggml_backend_dev_init(device, None)
    params = _PoolParams()
    c.ggml_threadpool_params_init(ctypes.byref(params), threads)
    c.ggml_backend_cpu_set_n_threads(self._backend, threads)
    c.ggml_backend_cpu_set_threadpool(
      self._backend, c.ggml_threadpool_new(ctypes.byref(params))
    )
    extras = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(
      c.ggml_backend_reg_get_proc_address(
        loaded, b"ggml_backend_dev_get_extra_bufts"
      )
    )(device)
    self._buffers = {
      _PLAIN: c.ggml_backend_get_default_buffer_type(self._backend)
    }
    i = 0
    while extras[i]:
      if c.ggml_backend_buft_name(extras[i]) == b"CPU_REPACK":
        self._buffers[_REPACKED] = extras[i]
      i += 1

  def quantize(self, x: np.ndarray, number: int) -> np.ndarray:
    """Quantizes f32[n, k] to blocks of a `ggml_type`, uint8[n, bytes]."""
    n, k = x.shape
    x = np.ascontiguousarray(x)
    found = np.zeros((n, self.c.ggml_row_size(number, k)), np.uint8)
    self.c.ggml_quantize_chunk(
      number, x.ctypes.data, found.ctypes.data, 0, n, k, None
    )
    return found

  def products(
    self,
    x: np.ndarray,
    blocks: np.ndarray,
    number: int,
    *,
    form: str = _PLAIN,
    copies: int = 1,
  ) -> tuple[Callable[[int], None], Callable[[], np.ndarray]]:
    """Returns functions that multiply, and that return the result [m, n].

    Args:
      x: f32[m, k].
      blocks: weights [n, k], from `quantize`.
      number: the `ggml_type` of the weights.
      form: a layout of `KINDS`.
      copies: number of copies of the weights. The first function multiplies
        with copy i, and the second one returns the product with copy 0.
    """
    buffer = self._buffers.get(form)
    if buffer is None:
      raise NotImplementedError("this build has no repacked layouts")
    c, plain = self.c, self._buffers[_PLAIN]
    (m, k), n = x.shape, len(blocks)
    lhs = _Tensors(c)
    rows = c.ggml_new_tensor_2d(lhs.context, _F32, k, m)
    lhs.allocate(plain, rows, np.ascontiguousarray(x))
    made = []
    for _ in range(copies):
      copy, product = _Tensors(c), _Tensors(c)
      w = c.ggml_new_tensor_2d(copy.context, number, k, n)
      copy.allocate(buffer, w, blocks)
      y = c.ggml_mul_mat(product.context, w, rows)
      graph = c.ggml_new_graph(product.context)
      c.ggml_build_forward_expand(graph, y)
      product.allocate(plain)
      made.append((graph, y, (lhs, copy, product)))

    def run(i: int) -> None:
      graph, *_ = made[i % len(made)]
      if c.ggml_backend_graph_compute(self._backend, graph):
        raise RuntimeError("ggml_backend_graph_compute failed")

    def result() -> np.ndarray:
      y = np.empty((m, n), np.float32)
      c.ggml_backend_tensor_get(made[0][1], y.ctypes.data, 0, y.nbytes)
      return y

    return run, result

  def prepare(self, kind: str, form: str, case: worker.Case) -> worker.Prepared:
    number = _TYPES[kind]
    blocks = self.quantize(case.rhs, number)
    weights = np.empty(case.rhs.shape, np.float32)
    getattr(self.c, f"dequantize_row_{kind}")(
      blocks.ctypes.data, weights.ctypes.data, weights.size
    )
    run, result = self.products(
      case.lhs, blocks, number, form=form or _PLAIN, copies=case.copies
    )
    return worker.Prepared(run=run, result=result, weights=weights)


class _Tensors:
  """A context and the buffer of its tensors, which are freed together."""

  def __init__(self, c: Any):
    self._c = c
    self._buffer: Any = None
    self.context = c.ggml_init(_InitParams(_CONTEXT_BYTES, None, True))

  def allocate(
    self, buffer: Any, tensor: Any = None, data: np.ndarray | None = None
  ) -> None:
    self._buffer = self._c.ggml_backend_alloc_ctx_tensors_from_buft(
      self.context, buffer
    )
    if data is not None:
      self._c.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)

  def __del__(self) -> None:
    if self._buffer is not None:
      self._c.ggml_backend_buffer_free(self._buffer)
    self._c.ggml_free(self.context)


LIBRARY: Final = Ggml

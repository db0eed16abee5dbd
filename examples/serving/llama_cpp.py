# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""llama.cpp by its shared libraries, to compare a decoder with it.

The npm package `@node-llama-cpp/linux-x64` has the libraries in
bins/linux-x64. No Python code of llama.cpp is needed: ctypes calls its C API.

Source: include/llama.h of llama.cpp.
"""

from __future__ import annotations

import ctypes
import pathlib
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

# Parameters are structs, passed by value. Each is smaller than this; the first
# fields of a context's are the numbers of slots and of tokens a call.
_PARAMETER_BYTES: Final = 1024


class _Parameters(ctypes.Structure):
  _fields_ = (("data", ctypes.c_uint32 * (_PARAMETER_BYTES // 4)),)


class _Batch(ctypes.Structure):
  """`llama_batch`; null means the next positions of sequence 0."""

  _fields_ = (
    ("count", ctypes.c_int32),
    ("tokens", ctypes.c_void_p),
    ("embeddings", ctypes.c_void_p),
    ("positions", ctypes.c_void_p),
    ("sequence_counts", ctypes.c_void_p),
    ("sequences", ctypes.c_void_p),
    ("has_logits", ctypes.c_void_p),
  )


class LlamaCpp:
  """A model of a GGUF file, and one sequence of tokens."""

  def __init__(
    self,
    library: pathlib.Path,
    cpu: str,
    path: pathlib.Path,
    *,
    threads: int,
    slots: int,
  ):
    """Loads the libraries and a model.

    Args:
      library: folder of libllama and libggml.
      cpu: name of the libggml-cpu-NAME.so to use, such as "zen4".
      path: GGUF file.
      threads: number of threads.
      slots: length of the cache of keys and values.
    """
    by_name = lambda name: next(library.glob(f"{name}.so*"), None) or next(
      library.glob(f"{name}.*so")
    )
    load = lambda file: ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    load(by_name("libggml-base"))
    ggml = load(by_name("libggml"))
    ggml.ggml_backend_load.restype = ctypes.c_void_p
    backend = library / f"libggml-cpu-{cpu}.so"
    if not ggml.ggml_backend_load(str(backend).encode()):
      raise OSError(f"llama_cpp: {backend} cannot be loaded on this CPU")
    self._library = load(by_name("libllama"))
    pointer, i32 = ctypes.c_void_p, ctypes.c_int32
    on_log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, pointer)
    self._ignore = on_log(lambda *_: None)
    self._library.llama_log_set(self._ignore, None)
    self._library.llama_backend_init()
    parameters = self._function("llama_model_default_params", _Parameters)()
    model = self._function(
      "llama_model_load_from_file", pointer, ctypes.c_char_p, _Parameters
    )(str(path).encode(), parameters)
    parameters = self._function("llama_context_default_params", _Parameters)()
    parameters.data[0] = slots
    parameters.data[1] = slots
    self._context = self._function(
      "llama_init_from_model", pointer, pointer, _Parameters
    )(model, parameters)
    if not model or not self._context:
      raise OSError(f"llama_cpp: {path} cannot be loaded")
    self._function("llama_set_n_threads", None, pointer, i32, i32)(
      self._context, threads, threads
    )
    self._vocabulary = self._function(
      "llama_model_get_vocab", pointer, pointer
    )(model)
    self._size = self._function("llama_vocab_n_tokens", i32, pointer)(
      self._vocabulary
    )
    self._decode = self._function("llama_decode", i32, pointer, _Batch)
    self._logits = self._function(
      "llama_get_logits", ctypes.POINTER(ctypes.c_float), pointer
    )
    self._memory = self._function("llama_get_memory", pointer, pointer)(
      self._context
    )
    self._clear = self._function(
      "llama_memory_clear", None, pointer, ctypes.c_bool
    )

  def _function(self, name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(self._library, name)
    function.restype, function.argtypes = result, arguments
    return function

  def tokenize(self, text: str) -> list[int]:
    """Returns the tokens of a text, with control tokens."""
    data = text.encode()
    tokens = (ctypes.c_int32 * (len(data) + 8))()
    tokenize = self._function(
      "llama_tokenize",
      ctypes.c_int32,
      *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32),
      *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool, ctypes.c_bool),
    )
    count = tokenize(
      self._vocabulary, data, len(data), tokens, len(tokens), False, True
    )
    return list(tokens[:count])

  def logits(self, tokens: Sequence[int]) -> np.ndarray:
    """Returns f32[tokens, vocabulary] for a new sequence."""
    self._clear(self._memory, True)
    return self._run(tokens, every=True).copy()

  def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
    """Returns the `count` likeliest tokens after a prompt."""
    self._clear(self._memory, True)
    tokens = [self._likeliest(prompt)]
    while len(tokens) < count:
      tokens.append(self._likeliest(tokens[-1:]))
    return tokens

  def times(self, prompt: Sequence[int], count: int) -> tuple[float, float]:
    """Returns the seconds of a prompt and of a token after it."""
    self._clear(self._memory, True)
    start = time.perf_counter()
    token = self._likeliest(prompt)
    middle = time.perf_counter()
    for _ in range(count):
      token = self._likeliest([token])
    return middle - start, (time.perf_counter() - middle) / count

  def _likeliest(self, tokens: Sequence[int]) -> int:
    return int(self._run(tokens, every=False)[-1].argmax())

  def _run(self, tokens: Sequence[int], *, every: bool) -> np.ndarray:
    """Returns a view of the logits after each token, or after the last."""
    count = len(tokens)
    array = (ctypes.c_int32 * count)(*tokens)
    wanted = (ctypes.c_int8 * count)(*([1] * count))
    batch = _Batch(count=count, tokens=ctypes.addressof(array))
    if every:
      batch.has_logits = ctypes.addressof(wanted)
    if status := self._decode(self._context, batch):
      raise RuntimeError(f"llama_cpp: llama_decode returned {status}")
    shape = (count if every else 1, self._size)
    return np.ctypeslib.as_array(self._logits(self._context), shape)

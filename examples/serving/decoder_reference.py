# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The transformer of `decoder`, in NumPy and f64, from its definition alone.

No cache, no batch, no fused weights: one sequence is read whole, head by head.
Tests compare `decoder` with it, at the sizes `CONFIG`.
"""

from __future__ import annotations

from typing import Any

import decoder
import numpy as np

CONFIG = decoder.Config(
  vocabulary=96,
  width=64,
  layers=2,
  heads=4,
  groups=2,
  head_size=32,
  hidden=96,
)


def logits(config: Any, params: Any, tokens: Any) -> np.ndarray:
  """f64[tokens, vocabulary]: what follows each token of one sequence.

  Args:
    config: a `decoder.Config`.
    params: of stacks, plain arrays: quantized ones dequantized before.
    tokens: integers[tokens].
  """
  params = _as_f64(params)
  layers = params["layers"]
  x = params["embed"][np.asarray(tokens)]
  for i in range(config.layers):
    layer = {name: stack[i] for name, stack in layers.items()}
    y = _norm(config, x, layer["attention_norm"])
    x = x + _attention(config, y @ layer["qkv"].T) @ layer["out"].T
    y = _norm(config, x, layer["mlp_norm"]) @ layer["gate_up"].T
    gate, up = y[:, : config.hidden], y[:, config.hidden :]
    x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["down"].T
  return _norm(config, x, params["last_norm"]) @ params["head"].T


def _attention(config: Any, qkv: np.ndarray) -> np.ndarray:
  """f64[tokens, heads * head_size]: each head by itself, each token too."""
  size, heads, groups = config.head_size, config.heads, config.groups
  head = lambda i: qkv[:, i * size : (i + 1) * size]
  result = np.zeros((len(qkv), heads * size))
  for h in range(heads):
    group = h // (heads // groups)
    query = _rotated(config, head(h))
    keys = _rotated(config, head(heads + group))
    values = head(heads + groups + group)
    for t in range(len(qkv)):
      scores = keys[: t + 1] @ query[t] / np.sqrt(size)
      part = np.exp(scores - scores.max())
      mixed = part / part.sum() @ values[: t + 1]
      result[t, h * size : (h + 1) * size] = mixed
  return result


def _rotated(config: Any, x: np.ndarray) -> np.ndarray:
  """Row t times the rotations by t: as complex numbers."""
  half = config.head_size // 2
  rates = config.rotary_base ** -(np.arange(half) / half)
  turn = np.exp(1j * np.arange(len(x))[:, None] * rates)
  turned = (x[:, :half] + 1j * x[:, half:]) * turn
  return np.concatenate([turned.real, turned.imag], axis=1)


def _norm(config: Any, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
  mean = np.square(x).mean(axis=-1, keepdims=True)
  return x / np.sqrt(mean + config.norm_epsilon) * weight


def _as_f64(tree: Any) -> Any:
  if isinstance(tree, dict):
    return {name: _as_f64(value) for name, value in tree.items()}
  return np.asarray(tree, np.float64)

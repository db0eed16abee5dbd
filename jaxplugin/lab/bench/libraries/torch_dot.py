# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's dots of bf16 activations with int4, int8 and bf16 weights.

int4 has blocks of 32, and int8 has a scale for each row of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from jaxplugin.lab.bench.libraries import worker

PACKAGES: Final = ("torch",)
KINDS: Final = (
  worker.Kind(name="int4", value_bits=4, scale_bits=1),
  worker.Kind(name="int8", value_bits=8),
  worker.Kind(name="bf16", value_bits=16),
)
_INNER_TILES: Final = 1  # the CPU layout has no others


class Torch:
  """PyTorch without gradients."""

  def __init__(self, threads: int):
    import torch

    self._torch = torch
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)

  def prepare(self, kind: str, form: str, case: worker.Case) -> worker.Prepared:
    torch = self._torch
    lhs = torch.tensor(case.lhs).to(torch.bfloat16)
    make = {"int4": self._int4, "int8": self._int8, "bf16": self._bf16}[kind]
    weights, copy, dot = make(case.rhs)
    copies = [copy() for _ in range(case.copies)]

    def run(i: int) -> Any:
      return dot(lhs, copies[i % len(copies)])

    return worker.Prepared(
      run=run, result=lambda: run(0).float().numpy(), weights=weights
    )

  def _int4(self, rhs: np.ndarray) -> tuple[np.ndarray, Callable, Callable]:
    torch = self._torch
    values, scale = worker.integers(rhs, 4)
    codes = (values + 8).astype(np.int32).reshape(rhs.shape)
    steps = scale[..., 0].T
    pairs = torch.tensor(np.stack([steps, np.zeros_like(steps)], axis=-1))
    pairs = pairs.to(torch.bfloat16).contiguous()
    rounded = pairs[..., 0].float().numpy().T[..., None]
    return (
      (values * rounded).reshape(rhs.shape),
      lambda: torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        torch.tensor(codes), _INNER_TILES
      ),
      lambda x, w: torch.ops.aten._weight_int4pack_mm_for_cpu(
        x, w, worker.BLOCK, pairs
      ),
    )

  def _int8(self, rhs: np.ndarray) -> tuple[np.ndarray, Callable, Callable]:
    torch = self._torch
    values, scale = worker.integers(rhs, 8, block=rhs.shape[1])
    values = values[:, 0].astype(np.int8)
    step = torch.tensor(scale[:, 0, 0]).to(torch.bfloat16)
    return (
      values * step.float().numpy()[:, None],
      lambda: torch.tensor(values),
      lambda x, w: torch._weight_int8pack_mm(x, w, step),
    )

  def _bf16(self, rhs: np.ndarray) -> tuple[np.ndarray, Callable, Callable]:
    torch = self._torch
    weights = torch.tensor(rhs).to(torch.bfloat16)
    return weights.float().numpy(), weights.clone, torch.nn.functional.linear


LIBRARY: Final = Torch

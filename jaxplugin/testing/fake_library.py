# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A made-up library for the tests of `bench`, in a separate process."""

from __future__ import annotations

import os
import time
from typing import Final

import numpy as np

from jaxplugin.lab.bench.libraries import worker

PACKAGES: Final = ("numpy",)
KINDS: Final = (
  worker.Kind(name="good", value_bits=4, scale_bits=1, forms=("slow", "fast")),
  worker.Kind(name="wrong", value_bits=4),
  worker.Kind(name="broken", value_bits=4),
  worker.Kind(name="ends", value_bits=4),
  worker.Kind(name="wide", value_bits=8),
)
# In a timed call, this kind ends the process.
ENDS_LATER: Final = worker.Kind(name="ends later", value_bits=4)
# More than the untimed calls and the first timed calls, two of which are made
# for a sample.
_CALLS_BEFORE_END: Final = 8
_SLOW_SECONDS: Final = 0.02


class FakeLibrary:
  """Multiplies by NumPy with an error of 1 in 256."""

  def __init__(self, threads: int):
    print(f"{threads} threads")  # as libraries do

  def prepare(self, kind: str, form: str, case: worker.Case) -> worker.Prepared:
    if kind == "broken":
      raise NotImplementedError("no such weights")
    if kind == "ends":
      os._exit(1)
    values, scale = worker.integers(case.rhs, 4)
    weights = (values * scale).reshape(case.rhs.shape)
    factor = 2 if kind == "wrong" else 1 + 2**-8

    calls = 0

    def run(i: int) -> None:
      nonlocal calls
      calls += 1
      if kind == "ends later" and calls > _CALLS_BEFORE_END:
        os._exit(1)
      if form == "slow" or kind == "ends later":
        time.sleep(_SLOW_SECONDS)

    def result() -> np.ndarray:
      return factor * case.lhs @ weights.T

    return worker.Prepared(run=run, result=result, weights=weights)


LIBRARY: Final = FakeLibrary

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts a process for each library, and times its dots as variants.

A process is stopped (SIGSTOP) unless it answers a request. Threads of a
library that wait for work in a loop therefore take no time from other
variants.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import signal
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from jaxplugin.lab.bench import execution, workloads
from jaxplugin.lab.bench.libraries import (
  ggml_dot,
  onnxruntime_dot,
  openvino_dot,
  torch_dot,
  worker,
)
from jaxplugin.lab.bench.peers import operand_sets, variants, verification
from jaxplugin.runtime import child_process

_MODULES: Final[dict[str, Any]] = {
  "ggml": ggml_dot,
  "openvino": openvino_dot,
  "onnxruntime": onnxruntime_dot,
  "torch": torch_dot,
}
NAMES: Final = tuple(_MODULES)
_SIDES: Final = ("lhs", "rhs")
# A dot with a larger relative error is wrong. 8-bit activations have 6e-3.
_MAX_RELATIVE_ERROR: Final = 0.03
# Threads of XLA that wait for work in a loop sleep after this time.
_PAUSE_SECONDS: Final = 2e-3
_SHOWN_CHARACTERS: Final = 300  # of the messages of a process that ended


def missing(name: str) -> str:
  """Returns how to get a library; "" if it is installed."""
  module = _MODULES[name]
  if name == "ggml":
    return ggml_dot.missing()
  lacking = [p for p in module.PACKAGES if importlib.util.find_spec(p) is None]
  if not lacking:
    return ""
  return f"{lacking[0]} is not installed; pip install {' '.join(lacking)}"


class Process:
  """A library in a separate process."""

  def __init__(self, module: str, threads: int):
    self.has_ended = False
    self._library = {"library": module, "threads": threads}
    # Not a `with` statement, because `close` ends the process.
    self._errors = tempfile.TemporaryFile()  # noqa: SIM115
    self._child = child_process.Child(
      child_process.__name__, str(os.getpid()), errors=self._errors
    )
    self._receive()

  def ask(self, **request: Any) -> dict[str, Any]:
    """Returns the answer to a request.

    Raises:
      RuntimeError: If the library raised an error, or the process ended.
    """
    self._child.process.send_signal(signal.SIGCONT)
    self._child.send(
      {
        "function": f"{worker.__name__}:{worker.answer.__name__}",
        "argument": {**self._library, **request},
        "memory_bytes": 0,
      }
    )
    message = self._receive()
    if "failed" in message:
      raise RuntimeError(message["reason"])
    return message["value"]

  def _receive(self) -> dict[str, Any]:
    try:
      message, _ = self._child.receive()
    except child_process.ChildError:
      self.has_ended = True
      self._errors.seek(0)
      printed = self._errors.read().decode(errors="replace")
      raise RuntimeError(
        f"its process ended: {printed[-_SHOWN_CHARACTERS:].strip()}"
      ) from None
    self._child.process.send_signal(signal.SIGSTOP)
    return message

  def close(self) -> None:
    self._child.stop()
    self._errors.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LibraryVariant(variants.Variant):
  """A dot of a library. `request` names the dot to the process."""

  library: str
  request: dict[str, Any]


class LibraryTimed(execution.Timed):
  """A dot of a library, ready to be timed. Its result is its error."""

  def __init__(
    self,
    processes: Processes,
    variant: LibraryVariant,
    plan: execution.CallPlan,
  ):
    self.variant: LibraryVariant = variant
    self.plan = plan
    self.launch_seconds = self.seconds = 0.0
    self._processes = processes
    self._prepare()

  def _prepare(self) -> None:
    self._process = self._processes.running(self.variant.library)
    request = {**self.variant.request, "copies": self.plan.groups}
    self._error = self._process.ask(**request)["relative_error"]

  def results(self) -> list[tuple[int, Any]]:
    return [(0, self._error)]

  def sample(self) -> float:
    if self._process.has_ended:  # in another dot
      self._prepare()
    time.sleep(_PAUSE_SECONDS)
    names = {name: self.variant.request[name] for name in ("kind", "form")}
    milliseconds = self._process.ask(**names)["milliseconds"]
    self.seconds = milliseconds / 1e3
    return milliseconds


class Processes:
  """The processes of a run, each started at its first dot."""

  def __init__(self, threads: int):
    self._threads = threads
    self._processes: dict[str, Process] = {}
    self._directory = tempfile.TemporaryDirectory()
    self._row = ""

  def close(self) -> None:
    for process in self._processes.values():
      process.close()
    self._directory.cleanup()

  def dots(
    self,
    names: Sequence[str],
    row: workloads.BenchRow,
    pair: workloads.Pair,
    data: operand_sets.DotOperands,
  ) -> list[variants.AnyVariant]:
    """Returns the dots of libraries with weights of as many bits, or bf16."""
    bits = pair.rhs.value_bits if pair.rhs is not None else 0
    found: list[variants.AnyVariant] = []
    for name in names:
      reason = missing(name)
      if reason:
        found.append(variants.Unavailable(name=name, reason=reason))
        continue
      operands = self._files(row, data)
      for kind in _MODULES[name].KINDS:
        if kind.value_bits in (bits, 16):
          forms = (_variant(name, kind, f, row, operands) for f in kind.forms)
          found.append(tuple(forms))
    return found

  def _files(
    self, row: workloads.BenchRow, data: operand_sets.DotOperands
  ) -> dict[str, str]:
    """Writes the operands of a row to files. Returns the paths."""
    directory = pathlib.Path(self._directory.name)
    paths = {side: str(directory / f"{row}_{side}.npy") for side in _SIDES}
    if self._row != str(row):
      for old in directory.iterdir():
        old.unlink()
      for side, array in zip(_SIDES, data.floats(0), strict=True):
        np.save(paths[side], np.asarray(array))
      self._row = str(row)
    return paths

  def running(self, name: str) -> Process:
    """Returns the process of a library. Starts it if it is not running."""
    if name in self._processes and self._processes[name].has_ended:
      self._processes.pop(name).close()
    if name not in self._processes:
      module = _MODULES[name].__name__
      self._processes[name] = Process(module, self._threads)
    return self._processes[name]


def _variant(
  library: str,
  kind: worker.Kind,
  form: str,
  row: workloads.BenchRow,
  operands: dict[str, str],
) -> LibraryVariant:
  weights = row.n * row.k * (kind.value_bits + kind.scale_bits) / 8
  floats = (row.m * row.k + row.m * row.n) * np.dtype(np.float32).itemsize
  return LibraryVariant(
    name=f"{library} {kind.name}",
    role="peer",
    form=form,
    same_as=f"{library} {kind.name}",
    function=lambda: None,  # the process has the function
    operands=lambda i: (),
    check=_check,
    relative_error=lambda i, error: error,
    num_bytes=int(weights) + floats,
    flops=2 * row.m * row.n * row.k,
    arithmetic="int8",
    on_host=True,
    library=library,
    request={"kind": kind.name, "form": form, **operands},
  )


def _check(i: int, error: float) -> None:
  if not error <= _MAX_RELATIVE_ERROR:
    raise verification.WrongResultError(
      f"relative error {error:.3g} above {_MAX_RELATIVE_ERROR}"
    )

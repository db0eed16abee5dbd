# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the errors that a notebook measures with a recorded baseline.

A notebook records its figures in a `Tracker`. Its last cell calls `finish`,
which compares them with numerics_baseline.json. If figures grew by more than
another machine may change, `finish` raises `GrownError` with their names. To
accept new figures:

  python examples/numerics/numerics_notebooks.py --write-baseline
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from typing import Final

BASELINE: Final = pathlib.Path(__file__).parent / "numerics_baseline.json"
# Set by `numerics_notebooks.py --write-baseline`: record, do not compare.
WRITE_VARIABLE: Final = "NUMERICS_WRITE_BASELINE"
COMMAND: Final = (
  "python examples/numerics/numerics_notebooks.py --write-baseline"
)

# Relative differences, in the Euclidean norm, of the data on another machine.
# Seeded data are rounded to f32 from f64 that may differ in its last bit.
SEEDED: Final = 2.0**-24
# Activations come out of six layers of f32 arithmetic: the bound that
# quickstart_test.py derives for the model's output (measured there: 7e-7).
COMPUTED: Final = 1.1e-5
# A model that was trained on the spot: differences of rounding grow from step
# to step. Parameters that begin with a relative change of 1e-6 move the SQNR of
# a layer's gradient by up to 0.5 dB, and a mean over eight layers by 0.16 dB.
# The tolerance of such a mean is 0.4 dB at 8 dB, and 1.3 dB at 19 dB.
TRAINED: Final = 0.02
# A block whose largest value crosses a rounding boundary of the scale changes
# its noise by a factor of up to 4. Of 5000 blocks or more, 5 may.
FLIPPED_BLOCKS_DB: Final = 10 * math.log10(1 + 3 * 5 / 5000)
# Rounding errors of a sum add up like a random walk, so four times fewer
# accumulators (128-bit vectors for 512-bit ones) double it. vdpbf16ps rounds
# twice for a pair of products, which is a factor of sqrt(2).
ACCUMULATION_GROWTH: Final = 2.0 * math.sqrt(2)


class GrownError(Exception):
  """Errors grew, or the baseline does not fit what was measured."""


def sqnr_tolerance_db(sqnr_db: float, perturbation: float) -> float:
  """How far an SQNR may fall because the data differ a little.

  With noise vector e, signal x and a change d of the data, |d| = p |x|, the
  noise |e|^2 changes by at most 2 |e| |d|, relatively 2 p |x| / |e|, and
  |x| / |e| = 10^(SQNR / 20). Rounding errors are continuous in the data, except
  where a scale flips: `FLIPPED_BLOCKS_DB`.
  """
  relative = 2 * perturbation * 10 ** (sqnr_db / 20)
  return 10 * math.log10(1 + relative) + FLIPPED_BLOCKS_DB


class Tracker:
  """Records a notebook's figures and compares them with the baseline.

  Args:
    section: the notebook's name in the baseline.
    path: the baseline.
    write: whether `finish` writes the section and does not compare; None asks
      the environment for `WRITE_VARIABLE`.
  """

  def __init__(
    self,
    section: str,
    *,
    path: pathlib.Path = BASELINE,
    write: bool | None = None,
  ) -> None:
    self._section = section
    self._path = path
    self._write = bool(os.environ.get(WRITE_VARIABLE))
    if write is not None:
      self._write = write
    self._values: dict[str, float] = {}
    self._allowed: dict[str, tuple[str, float]] = {}
    self._absent: dict[str, str] = {}

  def sqnr(
    self, name: str, value_db: float, *, perturbation: float = SEEDED
  ) -> float:
    """Records an SQNR in dB, which must not fall; returns it.

    Args:
      name: unique in the notebook.
      value_db: the SQNR.
      perturbation: by how much the data may differ elsewhere: `SEEDED` or
        `COMPUTED`.
    """
    self._record(name, value_db, "sqnr", perturbation)
    return value_db

  def error(
    self, name: str, value: float, *, growth: float = ACCUMULATION_GROWTH
  ) -> float:
    """Records an error, which must not grow by more than `growth`."""
    self._record(name, value, "error", growth)
    return value

  def absent(self, prefix: str, reason: str) -> None:
    """Says that figures whose names begin with `prefix` cannot be had here."""
    self._absent[prefix] = reason

  def _record(self, name: str, value: float, kind: str, allowed: float) -> None:
    if name in self._values:
      raise ValueError(f"Tracker: {name} is recorded already")
    if not math.isfinite(value):
      raise ValueError(f"Tracker: {name} must be finite, got {value}")
    self._values[name] = float(f"{value:.6g}")
    self._allowed[name] = (kind, allowed)

  def finish(self) -> str:
    """Compares or writes.

    Returns:
      One sentence that says what was done.

    Raises:
      GrownError: a figure is worse than the baseline allows; or it is not in
        the baseline; or one of the baseline's was neither recorded nor said to
        be absent.
    """
    sections = json.loads(self._path.read_text("utf-8"))
    if self._write:
      return self._write_section(sections)
    baseline = sections.get(self._section, {})
    problems = [
      problem
      for name, value in self._values.items()
      if (problem := self._problem(name, value, baseline))
    ]
    problems += [
      f"{name}: in the baseline ({value:g}), but not measured any more"
      for name, value in baseline.items()
      if name not in self._values and not self._is_absent(name)
    ]
    if problems:
      raise GrownError(
        f"{len(problems)} of {len(self._values)} figures of {self._section}:\n"
        + "\n".join(f"  {problem}" for problem in problems)
        + f"\nIf that is meant, run: {COMMAND}"
      )
    absent = "".join(
      f"; {prefix} not measured: {reason}"
      for prefix, reason in self._absent.items()
    )
    return f"{len(self._values)} figures: none worse than the baseline{absent}"

  def _is_absent(self, name: str) -> bool:
    return any(name.startswith(prefix) for prefix in self._absent)

  def _problem(
    self, name: str, value: float, baseline: dict[str, float]
  ) -> str | None:
    if name not in baseline:
      return f"{name}: {value:g}, not in the baseline"
    before = baseline[name]
    kind, allowed = self._allowed[name]
    if kind == "sqnr":
      lowest = before - sqnr_tolerance_db(before, allowed)
      if value < lowest:
        return f"{name}: SQNR {value:.3f} dB, was {before:.3f}"
    elif value > before * allowed:
      return (
        f"{name}: error {value:.3g}, was {before:.3g}, limit x {allowed:.3g}"
      )
    return None

  def _write_section(self, sections: dict[str, dict[str, float]]) -> str:
    if self._absent:
      raise GrownError(
        f"{self._section}: a baseline must be complete, but absent are:"
        f" {self._absent}"
      )
    sections[self._section] = self._values
    text = json.dumps(sections, indent=2, sort_keys=True)
    self._path.write_text(f"{text}\n", "utf-8")
    return f"{len(self._values)} figures written to {self._path.name}"

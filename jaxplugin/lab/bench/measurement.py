# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures rows: checks every variant of a row, then times them in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from jaxplugin.lab.bench import (
  devices,
  execution,
  results,
  roofline,
  timing,
  training_step,
  workloads,
)
from jaxplugin.lab.bench.libraries import processes
from jaxplugin.lab.bench.peers import (
  codec_variants,
  decoder_variants,
  dot_variants,
  expert_variants,
  variants,
  verification,
)
from jaxplugin.printing import progress

# Matmuls with at most this many rows are bound by reading weights. They are
# timed in turns with reading memory. Dots among them are timed in both modes.
_MAX_MEMORY_BOUND_ROWS: Final = 16
_OTHER_MODE_PART: Final = 0.25  # of a row's seconds
# Limits on the trial that finds a peer's fastest form.
_FORM_ROUNDS: Final = 7
_FORM_SECONDS: Final = 1.0
# A form is dropped if its first time is at least this many times the shortest
# first time.
_HOPELESS: Final = 2.0
# A variant of a mixture of experts is slow if it takes longer than this, and
# more than this many times as long as the first variant. A slow variant is
# timed by one call, its second.
_SLOW_SECONDS: Final = 0.05
_SLOW_TIMES: Final = 8.0
# A peer of a mixture of experts is not run if it needs more temporary memory.
_MAX_TEMPORARY_BYTES: Final = 1 << 31
_EXPERTS_ROUNDS: Final = 3  # minimum, for a mixture of experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
  """Options of a measurement."""

  mode: execution.Mode  # of the times that ratios compare
  rounds: int  # limits on timing a row
  seconds: float
  implementations: tuple[str, ...] | None  # None is all that support the row
  peers: tuple[str, ...]
  out_dtype: np.dtype  # of the results of dots
  read_side: int  # of the matrix that is read in turns with memory-bound dots


@dataclasses.dataclass(kw_only=True)
class _Measured:
  """A variant while it is measured."""

  result: results.VariantResult  # so far
  variant: variants.Variant | None = None  # None if it cannot run here
  timed: execution.Timed | None = None  # None if not timed, or by one call
  # Milliseconds by round, or of the only call.
  samples: list[float | None] = dataclasses.field(default_factory=list)
  # `results.VariantResult.launch_fraction` of each sample.
  launches: list[float] = dataclasses.field(default_factory=list)

  @property
  def taken(self) -> list[float]:
    return [s for s in self.samples if s is not None]

  def update(self, **fields: Any) -> None:
    self.result = dataclasses.replace(self.result, **fields)

  def fail(self, error: Exception) -> None:
    """Records an error.

    A peer may raise any error, and the report prints the error. If a variant of
    ours raises, the run fails.
    """
    if isinstance(error, verification.WrongResultError):
      self.update(status="wrong", reason=str(error))
    else:
      is_ours = self.result.role == "ours"
      self.update(
        status="failed" if is_ours else "unavailable",
        reason=f"{type(error).__name__}: {error}",
      )

  def sampler(self, timed: execution.Timed) -> Callable[[], float | None]:
    """Returns a function that returns the milliseconds of a step.

    The function returns None after a call that raised an error.
    """

    def sample() -> float | None:
      if self.result.status != "ok":
        return None
      try:
        milliseconds = timed.sample()
      except Exception as error:
        self.fail(error)
        return None
      if timed is self.timed:
        self.launches.append(timed.launch_seconds / timed.seconds)
      return milliseconds

    return sample


class RowMeasurement:
  """Measures rows on one device, and raises ceilings that a row exceeds."""

  def __init__(
    self,
    device: devices.BenchDevice,
    ceilings: roofline.Ceilings,
    options: BenchOptions,
    describe: Callable[[str], None] = lambda text: None,
  ):
    self.device = device
    self.ceilings = ceilings
    self.options = options
    self._describe = describe
    # By row and `same_as`: the fastest form of a peer; formats and milliseconds
    # of slow variants.
    self._fastest_forms: dict[tuple[str, str], str] = {}
    self._slow: dict[tuple[str, str], tuple[str, float]] = {}
    self._first_milliseconds = 0.0
    self._libraries = processes.Processes(device.target.core_count or 1)

  def close(self) -> None:
    """Ends the processes of libraries."""
    self._libraries.close()

  def measure(
    self, row: workloads.BenchRow, pair: workloads.Pair
  ) -> results.RowResult:
    """Measures all variants of one row in one pair of formats."""
    start = time.perf_counter()
    self._first_milliseconds = 0.0
    entries = [
      self._prepare(row, pair, variant) for variant in self._variants(row, pair)
    ]
    running = [e for e in entries if e.timed is not None]
    self._time(row, running)
    self._raise_ceilings(running)
    self._time_other_mode(row, running)
    timed = [e for e in entries if e.samples and e.result.status == "ok"]
    for entry in timed:
      _finish(entry)
    return results.RowResult(
      row=str(row),
      kind=row.kind,
      m=row.m,
      n=row.n,
      k=row.k,
      layer=row.layer,
      formats=pair.name,
      out=self.options.out_dtype.name if row.kind == "dot" else "float32",
      variants=tuple(entry.result for entry in entries),
      ratios=tuple(_ratios(timed)),
      seconds=time.perf_counter() - start,
    )

  def _variants(
    self, row: workloads.BenchRow, pair: workloads.Pair
  ) -> Sequence[variants.AnyVariant]:
    self._describe(f"{row} {pair}: data")
    options = self.options
    if not row.is_product:
      assert pair.rhs is not None
      codec = codec_variants.make(row, pair.rhs)
      if not self.device.is_gpu:
        warm, _, fresh = roofline.copy_variants(row.m, row.k)
        codec += [warm, fresh]
      return codec
    made: Any
    library_names = self._library_names(row)
    if row.kind == "dot":
      made = dot_variants.DotVariants(
        row,
        pair,
        options.out_dtype,
        self.device.target,
        beside_libraries=bool(library_names),
      )
    elif row.kind == "training":
      made = training_step.TrainingVariants(row, pair, self.device.target)
    elif row.kind == "experts":
      made = expert_variants.ExpertVariants(row, pair, self.device.target)
    else:
      made = decoder_variants.DecoderVariants(
        row, pair, self.device.target, self.device.cache_bytes
      )
    names = [name for name in options.peers if name not in library_names]
    found = [*made.ours(options.implementations), *made.peers(names)]
    if library_names:
      found += self._libraries.dots(library_names, row, pair, made.data)
    if row.m <= _MAX_MEMORY_BOUND_ROWS:
      found += roofline.read_variants(options.read_side, self.device.is_gpu)
    return found

  def _library_names(self, row: workloads.BenchRow) -> list[str]:
    """Returns the peers of a row that run in processes."""
    if self.device.is_gpu or row.kind != "dot":
      return []
    return [name for name in self.options.peers if name in processes.NAMES]

  def _prepare(
    self,
    row: workloads.BenchRow,
    pair: workloads.Pair,
    variant: variants.AnyVariant,
  ) -> _Measured:
    """Prepares a variant, or records why the variant cannot be timed."""
    if isinstance(variant, tuple):
      return self._prepare_fastest(row, pair, variant)
    if isinstance(variant, variants.Unavailable):
      return _Measured(
        result=results.VariantResult(
          name=variant.name,
          role=variant.role,
          status="unavailable",
          reason=variant.reason,
        )
      )
    shared = ("name", "role", "is_chosen", "num_bytes", "flops", "arithmetic")
    fields = {name: getattr(variant, name) for name in (*shared, "form")}
    entry = _Measured(result=results.VariantResult(**fields), variant=variant)
    key = str(row), variant.same_as
    if key in self._slow:
      known, milliseconds = self._slow[key]
      entry.samples = [milliseconds]
      entry.update(form=f"timed with {known}", mode="call")
      return entry
    timed, error = self._ready(row, entry, self.options.mode)
    if timed is not None:
      entry.update(error=error, mode=timed.plan.mode)
    if not entry.samples:
      entry.timed = timed
    elif variant.same_as:
      self._slow[key] = str(pair), entry.taken[0]
    return entry

  def _prepare_fastest(
    self,
    row: workloads.BenchRow,
    pair: workloads.Pair,
    forms: Sequence[variants.Variant],
  ) -> _Measured:
    key = str(row), forms[0].same_as
    known = self._fastest_forms.get(key)
    if known is not None:
      forms = [form for form in forms if form.form == known]
    fastest = self._fastest([self._prepare(row, pair, form) for form in forms])
    if key[1] and fastest.result.status == "ok":
      self._fastest_forms[key] = fastest.result.form
    return fastest

  def _fastest(self, forms: Sequence[_Measured]) -> _Measured:
    """Returns a wrong form of a peer, or the fastest form if none is wrong.

    If no form can run, returns the first form, with its reason.
    """
    for entry in forms:
      if entry.result.status == "wrong":
        return entry
    timed = {
      entry.result.form: entry.sampler(entry.timed)
      for entry in forms
      if entry.timed is not None
    }
    called = {name: sample() for name, sample in timed.items()}
    first = {name: t for name, t in called.items() if t is not None}
    timed = {
      name: timed[name]
      for name in first
      if first[name] < _HOPELESS * min(first.values())
    }
    if len(timed) == 1:
      return next(e for e in forms if e.result.form in timed)
    samples = timing.in_turns(
      timed, rounds=_FORM_ROUNDS, seconds=_FORM_SECONDS, min_rounds=2
    )

    def milliseconds(entry: _Measured) -> float:
      if entry.result.status != "ok":
        return np.inf
      taken = [s for s in samples.get(entry.result.form, ()) if s is not None]
      return float(np.median(taken)) if taken else np.inf

    return min(forms, key=milliseconds)

  def _ready(
    self, row: workloads.BenchRow, entry: _Measured, mode: execution.Mode
  ) -> tuple[execution.Timed | None, float | None]:
    """Compiles, checks and warms up a variant in one mode.

    Returns the variant to time and its largest error, or (None, None) if it
    cannot be timed. `entry.result` then has the reason.
    """
    variant = entry.variant
    assert variant is not None
    self._describe(f"{row}: {variant.name} ({mode})")
    try:
      plan = self._plan(row, variant, mode)
      timed = (
        processes.LibraryTimed(self._libraries, variant, plan)
        if isinstance(variant, processes.LibraryVariant)
        else execution.Timed(variant, plan)
      )
      if row.kind == "experts":
        _compile(timed)
      found = timed.results()
      errors = [variant.check(i, y) for i, y in found]
      if self._library_names(row) and variant.relative_error is not None:
        entry.update(relative_error=variant.relative_error(*found[0]))
      del found
      if row.kind == "experts":
        entry.samples = self._slow_sample(timed)
      if not entry.samples:
        timed.warm_up()
    except Exception as error:
      entry.fail(error)
      return None, None
    return timed, max((e for e in errors if e is not None), default=None)

  def _slow_sample(self, timed: execution.Timed) -> list[float | None]:
    """Returns the only sample of a slow variant; [] if it is not slow."""
    milliseconds = timed.single()
    if not self._first_milliseconds:
      self._first_milliseconds = milliseconds
      return []
    least = max(1e3 * _SLOW_SECONDS, _SLOW_TIMES * self._first_milliseconds)
    return [milliseconds] if milliseconds > least else []

  def _plan(
    self,
    row: workloads.BenchRow,
    variant: variants.Variant,
    mode: execution.Mode,
  ) -> execution.CallPlan:
    is_chained = not (self.device.is_gpu or variant.on_host)
    # Chained steps of other rows would copy a stack of floats.
    is_call = variant.on_host or (is_chained and row.kind != "dot")
    return execution.plan(
      variant.num_bytes,
      self.device.cache_bytes,
      mode="call" if is_call else mode,
      is_chained=is_chained,
      step_seconds=self.ceilings.seconds(variant.num_bytes, variant.flops),
      max_bytes=self.device.max_set_bytes,
    )

  def _time(
    self, row: workloads.BenchRow, running: Sequence[_Measured]
  ) -> None:
    samplers = {
      e.result.name: e.sampler(e.timed) for e in running if e.timed is not None
    }
    self._describe(f"timing {', '.join(samplers)}")
    is_experts = row.kind == "experts"
    samples = timing.in_turns(
      samplers,
      rounds=self.options.rounds,
      seconds=self.options.seconds,
      min_rounds=_EXPERTS_ROUNDS if is_experts else timing.MIN_ROUNDS,
    )
    for entry in running:
      entry.samples = samples[entry.result.name]

  def _time_other_mode(
    self, row: workloads.BenchRow, running: Sequence[_Measured]
  ) -> None:
    """Times dots with few rows in the other mode as well."""
    if row.kind != "dot" or row.m > _MAX_MEMORY_BOUND_ROWS:
      return
    other: execution.Mode = "step" if self.options.mode == "call" else "call"
    samplers = {}
    for entry in running:
      variant = entry.variant
      assert variant is not None
      if entry.result.status != "ok":  # it failed in the first mode
        continue
      if not variant.on_host and variant.role != "ceiling":
        timed, _ = self._ready(row, entry, other)
        if timed is not None:
          samplers[variant.name] = entry.sampler(timed)
    samples = timing.in_turns(
      samplers,
      rounds=self.options.rounds,
      seconds=self.options.seconds * _OTHER_MODE_PART,
    )
    for entry in running:
      if entry.result.name in samples and entry.result.status == "ok":
        taken = [s for s in samples[entry.result.name] if s is not None]
        entry.update(other_time=timing.stats(taken))

  def _raise_ceilings(self, running: Sequence[_Measured]) -> None:
    for entry in running:
      result, name = entry.result, entry.result.name
      if result.role == "ceiling":
        name, count = roofline.ceiling_of(name), result.num_bytes
      elif name in roofline.PRODUCTS:
        count = result.flops
      else:
        continue
      if entry.taken:
        rate = count / (min(entry.taken) / 1e3)
        self.ceilings = self.ceilings.raised(name, rate)


def measure_rows(
  found: results.BenchRun,
  work: Sequence[tuple[workloads.BenchRow, workloads.Pair]],
  device: devices.BenchDevice,
  options: BenchOptions,
  deadline: float,
) -> Iterator[results.BenchRun]:
  """Yields `found` with the results so far, after each row.

  A row is left out if it would end after `deadline`, a time of
  `time.monotonic`, by taking as long as the longest row so far.
  """
  longest = 0.0
  with (
    progress.shown(
      f"measuring {len(work)} rows", len(work), prints=True
    ) as line,
    contextlib.closing(
      RowMeasurement(device, found.ceilings, options, line.detail)
    ) as measuring,
  ):
    for row, pair in work:
      if time.monotonic() + longest > deadline:
        left_out = (*found.left_out, f"{row} {pair}")
        found = dataclasses.replace(found, left_out=left_out)
      else:
        done = measuring.measure(row, pair)
        longest = max(longest, done.seconds)
        rows = [row for row in found.rows if row.key != done.key]
        found = dataclasses.replace(
          found, rows=(*rows, done), ceilings=measuring.ceilings
        )
        found = results.with_fractions(found)
      line.advance()
      yield found


def _finish(entry: _Measured) -> None:
  """Adds the time and rates of a variant, from its samples."""
  stats = timing.stats(entry.taken)
  result, seconds = entry.result, stats.median / 1e3
  launched = np.median(entry.launches) if entry.launches else 0.0
  entry.update(
    time=stats,
    gb_per_s=timing.significant(result.num_bytes / seconds / 1e9),
    gflop_per_s=timing.significant(result.flops / seconds / 1e9),
    launch_fraction=timing.significant(float(launched)),
  )


def _compile(timed: execution.Timed) -> None:
  """Compiles a variant. Raises MemoryError if a peer needs too much memory."""
  needed = timed.compile()
  if timed.variant.role == "peer" and needed > _MAX_TEMPORARY_BYTES:
    raise MemoryError(
      f"needs {needed / 1e9:.1f} GB besides its operands, more than the limit"
      f" of {_MAX_TEMPORARY_BYTES / 1e9:.1f}"
    )


def _ratios(timed: Sequence[_Measured]) -> Iterator[results.VariantRatio]:
  """Yields the ratio of each variant of ours to every other variant."""
  for ours, other in itertools.permutations(timed, 2):
    if ours.result.role != "ours":
      continue
    by_round: Any = other.samples, ours.samples
    if 1 in (len(other.taken), len(ours.taken)):
      # A variant that was timed by one call has no samples by round.
      by_round = ([np.median(e.taken)] for e in (other, ours))
    ratio = timing.ratio(*by_round)
    if ratio is not None:
      names = {"ours": ours.result.name, "other": other.result.name}
      yield results.VariantRatio(**names, ratio=ratio)

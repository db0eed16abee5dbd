# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`replay`: compares each implementation of a file's calls with f64."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxplugin.core import blocking, decisions, error_context, formats, targets
from jaxplugin.dot import arguments, backends, calls, sides
from jaxplugin.dot.backends import cpu
from jaxplugin.jaxext import exports_private
from jaxplugin.operation import (
  alternatives,
  array_statistics,
  repro_files,
)
from jaxplugin.operation import primitive as operation_primitive
from jaxplugin.quantization import backends as quantization_backends
from jaxplugin.quantization import problems, prologues
from jaxplugin.ragged import backends as ragged_backends
from jaxplugin.ragged import calls as ragged
from jaxplugin.repro import oracle, tapping
from jaxplugin.tables import resolution

_CLASSES: Final[dict[str, Any]] = {
  kind.__name__: kind
  for kind in (
    *(calls.DotCall, ragged.RaggedDotCall, ragged.RaggedContraction),
    *(sides.Side, formats.BlockFormat, formats.UnquantizedFormat),
    *(problems.QuantizationProblem, problems.DequantizationProblem),
    *(problems.RecipeOptions, blocking.Blocking, prologues.Prologue),
    alternatives.FusedCall,
  )
} | {repro_files.ARRAY: operation_primitive.Placeholder.ARRAY}
_MAX_TRIPS: Final = 16  # of a call in a loop


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """One implementation of one call, compared with f64.

  Attributes:
    implementation: name of the backend, with its config if it has one.
    ratio: largest error divided by its bound; more than 1 is wrong.
    text: place and numbers of the largest error, or the error that it raised.
    is_wrong: whether the result is wrong, or there is none.

  Example:
    >>> import jaxplugin as jp
    >>> jp.repro.Comparison(implementation="cpu", ratio=0.01).is_wrong
    False
  """

  implementation: str
  ratio: float
  text: str = ""

  @property
  def is_wrong(self) -> bool:
    return not self.ratio <= 1

  def __str__(self) -> str:
    if self.is_wrong:
      return f"{self.implementation}: WRONG, {self.text}"
    return f"{self.implementation}: correct, {self.ratio:.2g} of the bound"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayedCall:
  """One call of a file.

  Attributes:
    description: its operation and problem.
    comparisons: the implementations that support it here.

  Example:
    >>> import jaxplugin as jp
    >>> jp.repro.ReplayedCall(description="dot", comparisons=()).is_wrong
    False
  """

  description: str
  comparisons: tuple[Comparison, ...]

  @property
  def is_wrong(self) -> bool:
    return any(x.is_wrong for x in self.comparisons)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
  """The result of `replay`. `print` shows a report.

  Attributes:
    calls: the calls, in the order of the program.
    seed: seed of the data; None if the file has the data.
    program: a sentence about the results of the whole program.
    environment: versions, target and tuning digest when the file was written.

  Example:
    >>> import jaxplugin as jp
    >>> jp.repro.Replay(calls=(), seed=0, program="").first_wrong
  """

  calls: tuple[ReplayedCall, ...]
  seed: int | None
  program: str
  environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def first_wrong(self) -> int | None:
    """Position of the first call with a wrong result; None if none has."""
    wrong = (i for i, call in enumerate(self.calls) if call.is_wrong)
    return next(wrong, None)

  def __str__(self) -> str:
    return "\n".join(self.lines())

  def to_json(self) -> str:
    """Returns the attributes as JSON. An infinite ratio is null."""
    fields = dataclasses.asdict(self) | {"first_wrong": self.first_wrong}
    for call in fields["calls"]:
      for one in call["comparisons"]:
        one["ratio"] = one["ratio"] if math.isfinite(one["ratio"]) else None
    return json.dumps(fields, indent=2)

  def lines(self) -> Iterator[str]:
    """Yields the lines of the report."""
    saved = self.environment.get("versions", {})
    here = repro_files.environment()["versions"]
    for name, version in saved.items():
      if version != here.get(name):
        yield f"{name} was {version}, and is {here.get(name)} here"
    if self.seed is None:
      yield "data: from the file"
    else:
      yield f"data: generated from statistics, seed {self.seed}"
    for i, call in enumerate(self.calls):
      yield f"call {i}: {call.description}"
      yield from (f"  {comparison}" for comparison in call.comparisons)
    if self.program:
      yield self.program
    if self.first_wrong is None:
      yield f"No call of {len(self.calls)} is wrong."
    else:
      yield f"The first wrong call is {self.first_wrong}."


def replay(path: str | os.PathLike[str], *, seed: int = 0) -> Replay:
  """Compares the calls of a file of `save` with f64, on this machine.

  Each implementation that supports a call here computes it. The operands come
  from the program by XLA's operations, so a wrong call does not change the
  operands of a later one. The first wrong call is therefore the first fault.
  Quantized codes must have the expected bits.

  The program with kernels is compared with the one by XLA's operations, if this
  process has its platform and its number of devices. Data that the file does
  not have are random numbers with the same statistics. A call in a loop is
  compared in up to 16 trips; in a `while` loop in the last one.

  Replaying runs the program in the file. Open only files of people you trust.

  Args:
    path: the file.
    seed: seed of the random numbers.

  Returns:
    A `Replay`.

  Raises:
    TypeError: If an argument has a wrong type.
    ValueError: If a `shard_map` of the program needs more devices.
    jp.repro.ReproError: If the file is damaged or of another version.
    OSError: If the file cannot be read.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> jp.repro.save("codes.zip", jp.quantize, jnp.ones((2, 32)), "mxfp8")
    >>> print(str(jp.repro.replay("codes.zip")).splitlines()[-1])
    No call of 1 is wrong.
  """
  error_context.require_path("replay", "path", path)
  seed = error_context.require_integer("replay", "seed", seed)
  repro, program, reference = _opened(path)
  with repro_files.reading(pathlib.Path(path)):
    arrays = repro.data
    if arrays is None:
      streams = np.random.default_rng(seed).spawn(len(repro.inputs))
      arrays = tuple(
        array_statistics.generate(x.shape, x.dtype, x.statistics, rng)
        for x, rng in zip(repro.inputs, streams, strict=True)
      )
  text = ""
  operands: Sequence[Any] = arrays
  if program is not None and reference is not None:
    results, operands = _run_reference(reference, arrays)
    text = _program_text(program, arrays, results)
  with repro_files.reading(pathlib.Path(path)):
    read = [_read(record, operands) for record in repro.calls]
    replayed = tuple(_replayed(*x) for x in read)
  return Replay(
    calls=replayed,
    seed=seed if repro.data is None else None,
    program=text,
    environment=repro.environment,
  )


def num_devices(path: str | os.PathLike[str]) -> int:
  """Returns the number of devices that the programs of a file need."""
  _, *exported = _opened(path)
  return max([1, *(x.nr_devices for x in exported if x is not None)])


def _opened(path: str | os.PathLike[str]) -> tuple[repro_files.Repro, Any, Any]:
  """Reads a file, its program and its reference program."""
  repro = repro_files.read(pathlib.Path(path))
  inputs = [(x.shape, x.dtype) for x in repro.inputs]
  with repro_files.reading(pathlib.Path(path)):
    exported = _deserialized(repro.program), _deserialized(repro.reference)
    for one in exported:
      if one and inputs != [(x.shape, x.dtype) for x in one.in_avals]:
        raise repro_files.ReproError(
          "the inputs of its manifest differ from those of its program. Save it"
          " again"
        )
  return repro, *exported


def _deserialized(data: bytes | None) -> jax.export.Exported | None:
  if data is None:
    return None
  try:
    return jax.export.deserialize(bytearray(data))
  # The reader of JAX's format raises what a damaged file makes it raise.
  except Exception as error:
    raise repro_files.ReproError(
      f"the program cannot be read ({type(error).__name__}: {error}). Install"
      " the version of JAX that wrote the file"
    ) from None


def _call(
  exported: jax.export.Exported, arrays: Sequence[np.ndarray]
) -> list[Any]:
  """Calls an exported program on as many devices as it was exported for."""
  platform = exported.platforms[0]
  devices = jax.devices("gpu" if platform in ("cuda", "rocm") else platform)
  if len(devices) < exported.nr_devices:
    raise ValueError(
      f"replay: the program needs {exported.nr_devices} {platform} devices, got"
      f" {len(devices)}. Run python -m jaxplugin repro, or on CPUs set"
      f" JAX_NUM_CPU_DEVICES={exported.nr_devices}"
    )
  mesh = exports_private.mesh_of(exported, devices)
  shardings = exported.in_shardings_jax(mesh)
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  placed = [
    jax.device_put(x, sharding or everywhere)
    for x, sharding in zip(arrays, shardings, strict=True)
  ]
  return jax.tree.leaves(jax.jit(exported.call)(*placed))


def _run_reference(
  exported: jax.export.Exported, arrays: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Returns the results of the program, and the taps."""
  results, taps = jax.tree.unflatten(exported.out_tree, _call(exported, arrays))
  return list(map(np.asarray, results)), [
    np.asarray(x) for t in taps for x in t
  ]


def _program_text(
  exported: jax.export.Exported,
  arrays: Sequence[np.ndarray],
  expected: Sequence[np.ndarray],
) -> str:
  """Compares the results of the program with kernels; returns a sentence."""
  platform = exported.platforms[0]
  try:
    got = list(map(np.asarray, _call(exported, arrays)))
  except (RuntimeError, ValueError) as error:
    what = str(error).partition("\n")[0]
    return f"The program with {platform} kernels did not run: {what}"
  worst = 0.0
  for a, b in zip(got, expected, strict=True):
    a, b = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(a)
    if not np.array_equal(
      np.where(finite, 0, a), np.where(np.isfinite(b), 0, b), equal_nan=True
    ):
      return "The program with kernels has NaN or Inf at other places."
    a, b = a[finite], b[finite]
    off, norm = (float(np.linalg.norm(x)) for x in (a - b, b))
    worst = max(worst, off / max(norm, 1e-30))
  return (
    "The results of the program with kernels differ from those by XLA's"
    f" operations by {worst:.2g} of their norm."
  )


_Trips = list[tuple[list[int], list[Any]]]


def _read(
  record: repro_files.CallRecord, arrays: Sequence[Any]
) -> tuple[repro_files.CallRecord, Any, _Trips]:
  """Returns a record, its form, and the operands in some trips."""
  if record.operation not in tapping.PRIMITIVES:
    raise repro_files.ReproError(f"there is no operation {record.operation}")
  form = repro_files.decode(record.form, _CLASSES)
  operands = [arrays[i] for i in record.operands]
  return record, form, [*_trips(operands, record.loops)]


def _replayed(
  record: repro_files.CallRecord, form: Any, trips: _Trips
) -> ReplayedCall:
  """Compares all implementations of one call, in each trip of its loops."""
  primitive = tapping.PRIMITIVES[record.operation]
  worst: dict[str, Comparison] = {}
  for trip, operands in trips:
    checked = _checked(primitive, form, [*map(jnp.asarray, operands)])
    places = [f"trip or shard {trip}"] if trip else []
    if record.is_layer:
      sizes = checked.call.group_sizes
      places.append(f"layer {int(np.argmax(np.asarray(sizes)))}")
    for one in _comparisons(checked, record.decisions):
      before = worst.get(one.implementation)
      if before is None or not one.ratio <= before.ratio:
        text = ", ".join([*places, one.text])
        worst[one.implementation] = dataclasses.replace(one, text=text)
  kind = "one layer of a stack, " if record.is_layer else ""
  name = f" ({record.name})" if record.name else ""
  return ReplayedCall(
    description=f"{record.operation} {kind}{record.description}{name}",
    comparisons=tuple(worst.values()),
  )


def _trips(
  operands: Sequence[Any], loops: Sequence[int]
) -> Iterator[tuple[list[int], list[Any]]]:
  """Yields some trips and their operands, among them the first and the last."""
  loops = loops or (0,) * len(operands)
  operands = [
    np.asarray(x) if n else jnp.asarray(x)
    for x, n in zip(operands, loops, strict=True)
  ]
  depth, deepest = max(zip(loops, operands, strict=True), key=lambda x: x[0])
  shape = deepest.shape[:depth]
  count = math.prod(shape)
  chosen = np.linspace(0, count - 1, min(count, _MAX_TRIPS)).astype(int)
  for i in np.unique(chosen):
    trip = list(map(int, np.unravel_index(i, shape)))
    both = zip(operands, loops, strict=True)
    yield trip, [x[tuple(trip[:n])] if n else x for x, n in both]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Checked:
  """A call with its operands.

  Attributes:
    call: an `OperationCall`, or None.
    problem, operation: its problem and operation.
    check: (results, relative error) -> how much they differ from f64.
    run: (implementation, config) -> the results.
    names: the implementations that may compute it; None for all.
  """

  call: Any = None
  problem: Any
  operation: resolution.MeasuredOperation[Any]
  check: Callable[[list[Any], float], oracle.Difference]
  run: Callable[[str, decisions.Fields], list[Any]]
  names: tuple[str, ...] | None = None


def _comparisons(
  checked: _Checked, decided: Sequence[Any]
) -> Iterator[Comparison]:
  """Yields a comparison for each implementation that supports the call."""
  target = targets.current_target()
  problem, found = checked.problem, checked.operation.backends()
  candidates: dict[tuple[str, decisions.Fields], None] = {
    (name, ()): None
    for name, backend in found.items()
    if backend.supports(problem, target) is None
    and backend.lowering_refusal(target) is None
    and (checked.names is None or name in checked.names)
  }
  for one in decided:
    name, config = one["implementation"], tuple(sorted(one["config"].items()))
    if (name, ()) in candidates and (
      found[name].config_error(config, problem, target) is None
    ):
      candidates[name, config] = None
  for name, config in candidates:
    words = [name, *(f"{field}={value}" for field, value in config)]
    plan = found[name].configured(config).plan(problem, target)
    try:
      ratio, text = checked.check(
        checked.run(name, config), plan.relative_error
      )
    # A kernel may raise any error. The other implementations still run.
    except Exception as error:
      ratio = math.inf
      text = f"{type(error).__name__}: {error}".partition("\n")[0]
    yield Comparison(implementation=" ".join(words), ratio=ratio, text=text)


def _pinned(name: str, config: decisions.Fields) -> resolution.Overlay:
  return resolution.Overlay(is_alone=True, pin=(name, config))


def _checked(primitive: Any, form: Any, arrays: list[Any]) -> _Checked:
  """Returns a call with its operands."""
  if isinstance(form, alternatives.FusedCall):
    offset = arguments.Offset(name="rhs", format=form.format, array=arrays[-1])
    return _checked_call(form.call, arrays[:-1], offset)
  if isinstance(form, operation_primitive.OperationCall):
    return _checked_call(form, arrays)

  def run(name: str, config: decisions.Fields) -> list[Any]:
    overlay = _pinned(name, config)
    results = primitive.bind(
      *arrays, problem=form, target=None, overlay=overlay
    )
    return results if primitive.multiple_results else [results]

  if isinstance(form, problems.DequantizationProblem):
    expected = oracle.dequantized(form, arrays)
    return _Checked(
      problem=form,
      operation=quantization_backends.DEQUANTIZE_OPERATION,
      check=lambda results, relative: expected.check(results[0], relative),
      run=run,
    )
  codes = oracle.quantized(form, arrays) or run("xla", ())
  if form.prologue is None:
    check = lambda results, _: oracle.same_bits(results, codes)
  else:
    check = lambda results, _: oracle.near(results, codes, form)
  return _Checked(
    problem=form,
    operation=quantization_backends.QUANTIZE_OPERATION,
    check=check,
    run=run,
  )


def _checked_call(
  form: Any, arrays: Sequence[Any], offset: arguments.Offset | None = None
) -> _Checked:
  call = form.filled(arrays)
  problem = call.problem()
  if isinstance(call, calls.DotCall):
    operation, expected = backends.OPERATION, oracle.dot(call, offset)
  else:
    operation = ragged_backends.operation_of(problem)
    if isinstance(call, ragged.RaggedContraction):
      expected = oracle.contraction(call)
    else:
      expected = oracle.ragged_dot(call, offset)

  def run(name: str, config: decisions.Fields) -> list[Any]:
    changed = call.replace(implementation=name, overlay=_pinned(name, config))
    if offset is None:
      return [operation_primitive.bind_for(None, changed)]
    given = *changed.flatten(), offset.array
    return [_fused(*given, form=changed.form(), format=offset.format)]

  return _Checked(
    call=call,
    problem=problem,
    operation=operation,
    check=lambda results, relative: expected.check(results[0], relative),
    run=run,
    names=None if offset is None else (cpu.BACKEND.name,),
  )


@functools.partial(jax.jit, static_argnames=("form", "format"))
def _fused(*arrays: Any, form: Any, format: formats.BlockFormat) -> jax.Array:
  """Computes a call and the offset of its rhs by one kernel."""
  call = form.filled(arrays[:-1])
  target = targets.current_target()
  result: jax.Array = tapping.backends_of(call).emit(
    tapping.chosen(call, target),
    call,
    target,
    offset=(arrays[-1], format.code_offset),
  )
  return result

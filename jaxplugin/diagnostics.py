# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`explain` and `info`: what is chosen, where, and why."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import platform as platform_lib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
from jax.extend import core as extend_core

from jaxplugin import backends
from jaxplugin import call
from jaxplugin import formats
from jaxplugin import primitive
from jaxplugin import problem as problem_lib
from jaxplugin import target as target_lib

_PACKAGES: Final = (
  "jax",
  "jaxlib",
  "ml_dtypes",
  "numpy",
  "jax-triton",
  "triton",
  "jax-cuda13-plugin",
  "jax-cuda12-plugin",
  "nvidia-cudnn-cu13",
  "nvidia-cudnn-cu12",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explained:
  """One block-scaled dot of a function.

  Attributes:
    source: file, line and function of the call; empty when not known.
    problem: what it computes.
    target: where it was decided for.
    decision: what was chosen; None when the call's forced implementation
      cannot serve there.
    error: why, when decision is None.
    count: how often the same dot occurs at that place.
  """

  source: str
  problem: problem_lib.DotProblem
  target: target_lib.Target
  decision: problem_lib.Decision | None
  error: str = ""
  count: int = 1


@dataclasses.dataclass(frozen=True)
class Explanation(Sequence):
  """The block-scaled dots of a function, in order; `str` is a report."""

  dots: tuple[Explained, ...]

  def __len__(self) -> int:
    return len(self.dots)

  def __getitem__(self, index):
    return self.dots[index]

  def __repr__(self) -> str:
    return str(self)

  def __str__(self) -> str:
    if not self.dots:
      return "no block-scaled dot"
    targets = list(dict.fromkeys(str(dot.target) for dot in self.dots))
    lines = [f"target: {', '.join(targets)}"]
    for i, dot in enumerate(self.dots):
      times = f" ({dot.count} times)" if dot.count > 1 else ""
      lines.append(f"[{i}] {dot.problem}{times}")
      if dot.source:
        lines.append(f"    at {dot.source}")
      lines += [f"    {line}" for line in _decision_lines(dot)]
    return "\n".join(lines)

  def to_json(self) -> str:
    """The same as JSON: a list of objects, one a dot."""
    return json.dumps(
      [dataclasses.asdict(dot) for dot in self.dots], default=str, indent=2
    )


def _decision_lines(dot: Explained) -> Iterator[str]:
  decision = dot.decision
  if decision is None:
    yield f"error: {dot.error}"
    return
  yield f"{decision.implementation}: {decision.reason}"
  if decision.global_scale != "none":
    yield f"global scale: {decision.global_scale}"
  if decision.padding:
    yield f"padding: {decision.padding}"
  for refusal in decision.refusals:
    yield f"not {refusal.implementation}: {refusal.reason}"


def explain(
  fn: Callable[..., Any],
  *args: Any,
  target: target_lib.Target | None = None,
  **kwargs: Any,
) -> Explanation:
  """Traces `fn` and tells what happens to every block-scaled dot in it.

  For each: the implementation chosen, how the global scale is applied (fused
  into the kernel, by a separate multiply, or none), what is padded, and why
  each other implementation was refused. Nothing is compiled or run. Sizes are
  those of the whole arrays, before any sharding.

  Args:
    fn: a function, jitted or not.
    *args, **kwargs: its arguments; arrays, or `jax.ShapeDtypeStruct`s.
    target: the device to decide for. By default that of an enclosing
      `use_target`, or the local one.

  Returns:
    A sequence of `Explained`; print it for a report, `.to_json()` for JSON.

  Raises:
    TypeError: `target` is not a `Target`; and whatever `fn` raises.
  """
  if target is not None and not isinstance(target, target_lib.Target):
    raise TypeError(
      f"explain: target must be a jp.Target or None, got {target!r}; see"
      " jp.named_target"
    )
  if target is None:
    jaxpr = jax.make_jaxpr(fn)(*args, **kwargs)
  else:
    with target_lib.use_target(target):
      # A forced implementation is judged for this target while tracing.
      jaxpr = jax.make_jaxpr(fn)(*args, **kwargs)
  found: dict[tuple[Any, ...], Explained] = {}
  for eqn in _dots(jaxpr.jaxpr):
    dot = _explain_eqn(eqn, target)
    key = (dot.source, dot.problem, dot.target, dot.decision, dot.error)
    if key in found:
      dot = dataclasses.replace(found[key], count=found[key].count + 1)
    found[key] = dot
  return Explanation(tuple(found.values()))


def _dots(jaxpr: Any) -> Iterator[Any]:
  """Every equation of the primitive, in sub-jaxprs too."""
  for eqn in jaxpr.eqns:
    if eqn.primitive is primitive.block_scaled_dot_p:
      yield eqn
    for value in eqn.params.values():
      for sub in _sub_jaxprs(value):
        yield from _dots(sub)


def _sub_jaxprs(value: Any) -> Iterator[Any]:
  if isinstance(value, extend_core.ClosedJaxpr):
    yield value.jaxpr
  elif isinstance(value, extend_core.Jaxpr):
    yield value
  elif isinstance(value, (tuple, list)):
    for item in value:
      yield from _sub_jaxprs(item)


def _explain_eqn(eqn: Any, target: target_lib.Target | None) -> Explained:
  config = eqn.params["config"]
  operands = call.Operands.unflatten(config, [v.aval for v in eqn.invars])
  problem = call.problem_of(config, operands)
  chosen_for = target or eqn.params["target"] or target_lib.detect_target()
  decision, error = None, ""
  try:
    decision = backends.choose(problem, chosen_for, config.implementation)
  except NotImplementedError as e:
    error = str(e)
  return Explained(
    source=_source(eqn),
    problem=problem,
    target=chosen_for,
    decision=decision,
    error=error,
  )


@functools.cache
def _own_files() -> frozenset[str]:
  directory = pathlib.Path(__file__).parent
  return frozenset(
    str(path)
    for path in directory.rglob("*.py")
    if not path.name.endswith("_test.py")
  )


def _source(eqn: Any) -> str:
  """Where the user's code made the call: the innermost frame outside of us."""
  if eqn.source_info.traceback is None:
    return ""
  jax_directory = str(pathlib.Path(jax.__file__).parent)
  for frame in eqn.source_info.traceback.frames:
    name = frame.file_name
    if name not in _own_files() and not name.startswith(jax_directory):
      return f"{name}:{frame.line_num} ({frame.function_name})"
  return ""


def info() -> str:
  """Versions, devices, the target, and what each implementation can do here."""
  lines = [f"python: {platform_lib.python_version()}"]
  for package in ("jaxplugin", *_PACKAGES):
    lines.append(f"{package}: {_version(package)}")
  devices = [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()]
  lines.append(f"devices: {', '.join(devices)}")
  target = target_lib.current_target()
  lines.append(f"target: {target}")
  lines.append("implementations, for m=128 n=4096 k=4096:")
  for name, backend in backends.BACKENDS.items():
    # Formats that get the same answer share a line.
    answers: dict[str, list[str]] = {}
    for format in formats.FORMATS:
      refusal = backend.supports(_sample_problem(format), target)
      answer = "serves" if refusal is None else f"no: {refusal.reason}"
      answers.setdefault(answer, []).append(format.name)
    for answer, names in answers.items():
      lines.append(f"  {name}: {', '.join(names)}: {answer}")
  return "\n".join(lines)


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return "not installed"


def _sample_problem(format: formats.BlockFormat) -> problem_lib.DotProblem:
  operand = problem_lib.OperandProblem(format=format, dtype=format.values_dtype)
  return problem_lib.DotProblem(
    batch=1,
    m=128,
    n=4096,
    k=4096,
    lhs=operand,
    rhs=operand,
    out_dtype=formats.BF16,
    global_scale="scalar" if format.has_global_scale else "none",
  )

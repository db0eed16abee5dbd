# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`explain` and `info`: what is chosen, where, and why."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform as platform_lib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax

from jaxplugin import backends
from jaxplugin import decisions
from jaxplugin import formats
from jaxplugin import jax_private
from jaxplugin import modules
from jaxplugin import problem as problem_lib
from jaxplugin import rewriter
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
  """One block-scaled dot of a function, or one call of a module.

  Attributes:
    source: file, line and function (or column) of the call; empty when not
      known.
    problem: what the dot computes; None of a call without a dot.
    target: where it was decided for.
    decision: what was chosen; None where there is no dot, or its forced
      implementation cannot serve, or the call cannot be lowered.
    error: why, when it cannot serve or be lowered.
    count: how often the same occurs at that place.
    call: of a module: the call's name, such as "__op$quantize".
    description: of a module: what the call computes, in words.
    function: of a module: what `rewrite` replaces it by a call of; empty where
      it stays as it is.
  """

  source: str
  problem: problem_lib.DotProblem | None
  target: target_lib.Target
  decision: problem_lib.Decision | None
  error: str = ""
  count: int = 1
  call: str = ""
  description: str = ""
  function: str = ""


@dataclasses.dataclass(frozen=True)
class Explanation(Sequence):
  """The block-scaled dots of a function, or calls of a module, in order.

  `str` is a report.
  """

  dots: tuple[Explained, ...]

  def __len__(self) -> int:
    return len(self.dots)

  def __getitem__(self, index: Any) -> Any:
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
      what = f"{dot.call}: {dot.description}" if dot.call else dot.problem
      lines.append(f"[{i}] {what}{times}")
      if dot.source:
        lines.append(f"    at {dot.source}")
      lines += [f"    {line}" for line in _decision_lines(dot)]
    return "\n".join(lines)

  def to_json(self) -> str:
    """The same as JSON: a list of objects, one a dot or a call."""
    return json.dumps(
      [dataclasses.asdict(dot) for dot in self.dots], default=str, indent=2
    )


def _decision_lines(dot: Explained) -> Iterator[str]:
  if dot.error:
    yield f"error: {dot.error}"
    return
  if dot.call:
    becomes = f"becomes a call of @{dot.function}"
    yield becomes if dot.function else "stays as it is"
  decision = dot.decision
  if decision is None:
    return
  yield f"{decision.implementation}: {decision.reason}"
  if decision.global_scale != "none":
    yield f"global scale: {decision.global_scale}"
  if decision.padding:
    yield f"padding: {decision.padding}"
  for note in decision.notes:
    yield f"note: {note}"
  for refusal in decision.refusals:
    yield f"not {refusal.implementation}: {refusal.reason}"


def explain(
  fn: Callable[..., Any] | Any,
  *args: Any,
  target: target_lib.Target | None = None,
  **kwargs: Any,
) -> Explanation:
  """Tells what happens to every block-scaled dot of a function or a module.

  For each: the implementation chosen, how the global scale is applied (fused
  into the kernel, by a separate multiply, or none), what is padded, and why
  each other implementation was refused. Nothing is compiled or run. Sizes are
  those of the whole arrays, before any sharding.

  Args:
    fn: a function, jitted or not, which is traced; or a module in any form that
      `jp.rewrite` takes, of which every call that it rewrites is told.
    *args, **kwargs: the function's arguments; arrays, or
      `jax.ShapeDtypeStruct`s.
    target: the device to decide for. By default that of an enclosing
      `use_target`, or the local one.

  Returns:
    A sequence of `Explained`; print it for a report, `.to_json()` for JSON.

  Raises:
    TypeError: `target` is not a `Target`, or a module is given with arguments;
      and whatever `fn` raises.
    jaxplugin.modules.ModuleError: the module does not parse, or is not valid.
  """
  if target is not None and not isinstance(target, target_lib.Target):
    raise TypeError(
      f"explain: target must be a jp.Target or None, got {target!r}; see"
      " jp.named_target"
    )
  if modules.is_module(fn):
    if args or kwargs:
      raise TypeError(
        "explain: a module is explained without arguments, got"
        f" {len(args) + len(kwargs)}; pass the function for those"
      )
    return explain_module(modules.read(fn), target)
  if target is None:
    jaxpr = jax.make_jaxpr(fn)(*args, **kwargs)
  else:
    with target_lib.use_target(target):
      # A forced implementation is judged for this target while tracing.
      jaxpr = jax.make_jaxpr(fn)(*args, **kwargs)
  return _explanation(
    _explain_eqn(eqn, target) for eqn in decisions.dots(jaxpr.jaxpr)
  )


def explain_module(
  source: modules.Source,
  target: target_lib.Target | None = None,
  implementation: str | None = None,
) -> Explanation:
  """`explain` for a module that was read; consumes it.

  Args:
    source: the module.
    target: the device to decide for; None is the current one.
    implementation: the one that all dots are to use, or None to choose.
  """
  target = target or target_lib.current_target()
  explained = []
  for item in rewriter.examine(source, target, implementation):
    decided = item.decided
    explained.append(
      Explained(
        source=item.source,
        problem=None if decided is None else decided.problem,
        target=target,
        decision=None if decided is None else decided.decision,
        error=item.error,
        call=item.call,
        description=item.description,
        function=item.function,
      )
    )
  return _explanation(explained)


def _explanation(explained: Iterable[Explained]) -> Explanation:
  """Merges those that are the same."""
  found: dict[Explained, Explained] = {}
  for item in explained:
    count = found[item].count + 1 if item in found else 1
    found[item] = dataclasses.replace(item, count=count)
  return Explanation(tuple(found.values()))


def _explain_eqn(eqn: Any, target: target_lib.Target | None) -> Explained:
  decided = decisions.decide(eqn, target)
  return Explained(
    source=jax_private.user_frame(eqn.source_info),
    problem=decided.problem,
    target=decided.target,
    decision=decided.decision,
    error=decided.error,
  )


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

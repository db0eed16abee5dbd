# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Backends of an operation, and the choice between them.

An operation has a table of `BackendRecord`s, and a record that describes a
call: its problem. `BackendRecord.supports`, `BackendRecord.plan` and `choose`
are pure functions of a problem and a target. Lowerings, `explain` and tests all
call them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, Literal, TypeVar

from jaxplugin.core import error_context, targets

Application = Literal["fused", "separate", "none"]
Problem = TypeVar("Problem")


class RefusedError(NotImplementedError):
  """The error of a named backend that does not support a call.

  The message has the reason of every backend.

  Attributes:
    reason: reason of the named backend.
  """

  def __init__(self, message: str, reason: str) -> None:
    super().__init__(message, reason)
    self.reason = reason

  def __str__(self) -> str:
    return str(self.args[0])

  def with_function(self, who: str) -> RefusedError:
    """Returns the error with a message that begins with a function's name."""
    return RefusedError(f"{who}: {self}", self.reason)


Scalar = bool | int | str | None
# An object of JSON whose values are scalars: sorted by names, and hashable.
Fields = tuple[tuple[str, Scalar], ...]

RULE: Final = "rule"  # origin of a choice that no table made
MODEL: Final = "model"
ARGUMENT: Final = "argument"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """The kernels and compilers of a backend, for which measurements hold.

  Attributes:
    kernels: SHA-256 of the sources of its kernels, or None if it has none.
    toolchain: (name, version) of each library that compiles or runs its code.

  Example:
    >>> import jaxplugin as jp
    >>> jp.backends.Source(toolchain=(("acme-compiler", "1.2"),)).kernels
  """

  kernels: str | None = None
  toolchain: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
  """A proposal of a backend and a config for a problem.

  Attributes:
    implementation: name of the backend.
    config: config of the backend. If empty, the backend's rule decides.
    origin: "overlay" or the name of a table if the backend was measured, or
      MODEL.
    why: the figures, in words.
  """

  implementation: str
  config: Fields = ()
  origin: str
  why: str


@dataclasses.dataclass(frozen=True)
class Unsupported:
  """Why a backend is not used.

  Attributes:
    reason: why the backend does not support the problem. In a `Decision` also
      why another backend comes first.
    implementation: the backend's name, in a `Decision`.
  """

  reason: str
  implementation: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """How a backend computes a problem, for `explain`.

  Attributes:
    global_scale: "fused" into the kernel, "separate" if a multiplication
      follows it, or "none" if the call has none.
    padding: the padding in words, or "".
    notes: sentences about the computation.
    relative_error: the relative error beyond the bound of "Numerics" and the
      cast to the result's dtype.
    is_native: whether matrix instructions read the quantized operands.

  Example:
    >>> import jaxplugin as jp
    >>> jp.backends.Plan(padding="k 48 to 64").global_scale
    'none'
  """

  global_scale: Application = "none"
  padding: str = ""
  notes: tuple[str, ...] = ()
  relative_error: float = 0.0
  is_native: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
  """The backend chosen for a problem on a target.

  Attributes:
    implementation: name of the backend.
    reason: why this backend was chosen.
    config: config of the backend; empty if its rule decides.
    implementation_from, config_from: origin of each choice: "argument",
      "overlay", the name of a table, "model" or "rule".
    global_scale, padding, notes: values from the backend's `Plan`.
    refusals: every other backend with its reason, in order.
  """

  implementation: str
  reason: str
  config: Fields = ()
  implementation_from: str = RULE
  config_from: str = RULE
  global_scale: Application = "none"
  padding: str = ""
  notes: tuple[str, ...] = ()
  refusals: tuple[Unsupported, ...] = ()

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


def _has_no_configs(
  config: Fields, problem: Any, target: targets.Target
) -> str | None:
  del problem, target
  return f"it takes no config, got {dict(config)}" if config else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tunable(Generic[Problem]):
  """The configs of a backend that tuning tables choose from.

  Attributes:
    source: target -> the kernels and compilers of this process, or None if they
      are unknown. A table measured with others is refused.
    config_error: (config, problem, target) -> why the config cannot compute the
      problem, or None if it can. It is not called with an empty config.
    candidates: (problem, target) -> the configs that a tuner measures next to
      the empty one; None if the tuner lists them itself.
    configs_travel: whether a config computes a problem wherever a module that
      is exported for the target may be loaded.
  """

  source: Callable[[targets.Target], Source | None]
  config_error: Callable[[Fields, Problem, targets.Target], str | None] = (
    _has_no_configs
  )

  candidates: Callable[[Problem, targets.Target], Iterable[Fields]] | None = (
    None
  )
  configs_travel: bool = True


# Devices of the platforms that kernels are for, in reasons.
_DEVICES: Final = {
  ("cpu",): "a CPU",
  ("cuda",): "an NVIDIA GPU",
  ("cuda", "rocm"): "an NVIDIA or AMD GPU",
}


def platform_refusal(
  target: targets.Target, *platforms: str
) -> Unsupported | None:
  """Returns why kernels for some platforms do not run on a target, or None.

  Without platforms, the kernels run on all.
  """
  if not platforms or target.platform in platforms:
    return None
  return Unsupported(
    f"needs {_DEVICES[platforms]}, the target's platform is {target.platform}"
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackendRecord(Generic[Problem]):
  """One implementation of an operation.

  Attributes:
    name: the name in `implementation=` and in decisions.
    summary: description of the backend for a decision's reason.
    platforms: the platforms of its kernels; () if it runs on all, or if
      `supports` checks the platform. No function is asked about others.
    rank: target -> its place in the order in which backends are tried, smaller
      first, or None if it is used only if requested.
    supports: (problem, target) -> why it does not support the problem, or None.
    plan: (problem, target) -> how it computes a problem that it supports.
    emit: computes the operation. Each operation has other arguments. With the
      keyword argument `out`, a `quantization.problems.QuantizedOutput`, its
      kernel quantizes the f32 result.
    quantized_refusal: (problem, out, target) -> why `emit` does not quantize
      the result, or "" if it does. `out` is the `QuantizationProblem` of the
      f32 result, in the result's shape. It has one blocking, along the last
      dimension, without options. Its global scale is given if the format has
      one. No size is symbolic or 0.
    reads: (layout, problem, target) -> whether it reads operands in a layout
      ("interleaved", "swizzled_128x4") without a conversion. The layout "layer"
      is an rhs that is one layer of a stack.
    lowering_refusal: target -> why this process cannot lower it for a target
      that it supports, or None if it can. Not pure.
    launched_by: target -> the part of XLA that launches its kernels if this
      process lowers for the target, or "" if there is one way. Not pure.
    is_portable: whether it emits only XLA's operations, which other processes,
      other platforms and any partitioner support.
    experiments: (word, function) for each experimental variant. The function
      returns the target that enables it. The benchmark measures them too.
    origin: the distribution of the backend if it is not jaxplugin.
    tunable: its part in tuning tables; None if they cannot name it. If it has
      configs, the functions `plan`, `emit` and `quantized_refusal` have an
      argument `config`.
  """

  name: str
  summary: str
  rank: Callable[[targets.Target], int | None]
  supports: Callable[[Problem, targets.Target], Unsupported | None]
  emit: Callable[..., Any]
  platforms: tuple[str, ...] = ()
  plan: Callable[..., Plan] = lambda problem, target: Plan()
  quantized_refusal: Callable[..., str] = (
    lambda problem, out, target, config=(): "it does not quantize results"
  )
  reads: Callable[[str, Problem, targets.Target], bool] = (
    lambda layout, problem, target: False
  )
  lowering_refusal: Callable[[targets.Target], Unsupported | None] = (
    lambda target: None
  )
  launched_by: Callable[[targets.Target], str] = lambda target: ""
  is_portable: bool = False
  experiments: tuple[
    tuple[str, Callable[[targets.Target], targets.Target]], ...
  ] = ()
  origin: str = ""
  tunable: Tunable[Problem] | None = None

  def configured(self, config: Fields) -> BackendRecord[Problem]:
    """Returns the backend whose functions follow a config, if any."""
    if not config:
      return self
    changes: dict[str, Any] = {
      name: functools.partial(getattr(self, name), config=config)
      for name in ("plan", "emit", "quantized_refusal")
    }
    return dataclasses.replace(self, **changes)

  def config_error(
    self, config: Fields, problem: Problem, target: targets.Target
  ) -> str | None:
    """Returns why a config cannot compute a problem, or None if it can."""
    if not config:
      return None
    if self.tunable is None:
      return _has_no_configs(config, problem, target)
    return self.tunable.config_error(config, problem, target)


def table(
  *backends: BackendRecord[Problem],
) -> dict[str, BackendRecord[Problem]]:
  """Returns the backends of an operation by name.

  Raises:
    ValueError: If two backends have the same name.
  """
  result: dict[str, BackendRecord[Problem]] = {}
  for backend in backends:
    if backend.name in result:
      raise ValueError(f"table: two backends are named {backend.name!r}")
    result[backend.name] = backend
  return result


def order(
  backends: Mapping[str, BackendRecord[Problem]], target: targets.Target
) -> tuple[str, ...]:
  """Returns the names of the backends tried on a target, in order."""
  ranks = {
    name: backend.rank(target)
    for name, backend in backends.items()
    if platform_refusal(target, *backend.platforms) is None
  }
  tried = [(rank, name) for name, rank in ranks.items() if rank is not None]
  # The sort is stable, so backends of equal rank keep the order of the table.
  return tuple(name for _, name in sorted(tried, key=lambda item: item[0]))


def choose(
  backends: Mapping[str, BackendRecord[Problem]],
  problem: Problem,
  target: targets.Target,
  requested: str | None = None,
  *,
  who: str,
  unportable: Unsupported | None = None,
  measured: Sequence[Measured] = (),
) -> Decision:
  """Chooses the backend for `problem` on `target`.

  Args:
    backends: the operation's `table`. For every problem and target it must have
      a backend that supports them.
    requested: name of the backend to use. None uses the first backend in
      `order` that supports the problem.
    unportable: the reason if only portable backends are allowed, else None.
    measured: proposals, the best first. A proposal comes before `order`. If its
      backend is `requested`, its config is used.

  Returns:
    The decision, with a reason for every backend not chosen.

  Raises:
    ValueError: If `requested` is not a backend's name.
    RefusedError: If `requested` does not support the problem. The message lists
      every backend.
  """
  validate_name(backends, requested, who=who)
  tried = order(backends, target)
  names = tried + tuple(name for name in backends if name not in tried)
  answers = {}
  for name in names:
    backend = backends[name]
    refusal = platform_refusal(target, *backend.platforms)
    answers[name] = refusal or backend.supports(problem, target)
    if answers[name] is None and not backend.is_portable:
      answers[name] = unportable
  chosen, chosen_from = requested, ARGUMENT
  proposal = _first_serving(
    [m for m in measured if requested in (None, m.implementation)],
    {n: b for n, b in backends.items() if answers[n] is None},
    problem,
    target,
  )
  if requested is not None:
    why = "requested"
    instead = f"but {chosen} was requested"
  elif proposal is not None:
    chosen, chosen_from = proposal.implementation, proposal.origin
    how = "modelled" if chosen_from == MODEL else "measured"
    instead = f"but {chosen} was {how} to be faster"
    why = f"{proposal.origin}: {proposal.why}"
  else:
    chosen_from = RULE
    chosen = next(name for name in names if answers[name] is None)
    why = f"first of {', '.join(tried)} that supports it"
    instead = f"lower priority than {chosen}"
  assert chosen is not None
  refusal = answers[chosen]
  if refusal is not None:
    lines = ""
    for name, answer in answers.items():
      reason = "supported" if answer is None else answer.reason
      lines += f"\n  {name}: {_with_origin(backends[name], reason)}"
    raise RefusedError(
      f"{who}: implementation={error_context.shown(requested)} does not support"
      f" {problem} on {target}:{lines}\n"
      "Leave implementation out to have one chosen, or use jp.use_target to"
      " lower for another device.",
      refusal.reason,
    )

  def ranked(name: str) -> str:
    if requested is None and name not in tried:
      return "supported, but used only if requested"
    return f"supported, {instead}"

  config = () if proposal is None else proposal.config
  plan = backends[chosen].configured(config).plan(problem, target)
  return Decision(
    implementation=chosen,
    config=config,
    implementation_from=chosen_from,
    config_from=RULE if proposal is None else proposal.origin,
    reason=_with_origin(
      backends[chosen], f"{backends[chosen].summary} ({why})"
    ),
    global_scale=plan.global_scale,
    padding=plan.padding,
    notes=plan.notes,
    refusals=tuple(
      Unsupported(
        _with_origin(backends[name], ranked(name) if a is None else a.reason),
        implementation=name,
      )
      for name, a in answers.items()
      if name != chosen
    ),
  )


def _with_origin(backend: BackendRecord[Any], text: str) -> str:
  """Returns `text` with the package that the backend comes from."""
  return f"{text} [{backend.origin}]" if backend.origin else text


def _first_serving(
  measured: Iterable[Measured],
  serving: Mapping[str, BackendRecord[Problem]],
  problem: Problem,
  target: targets.Target,
) -> Measured | None:
  """Returns the first proposal that can compute the problem."""
  for proposal in measured:
    backend = serving.get(proposal.implementation)
    if backend is not None and (
      backend.config_error(proposal.config, problem, target) is None
    ):
      return proposal
  return None


def validate_name(
  backends: Mapping[str, Any], requested: str | None, *, who: str
) -> None:
  """Raises unless `requested` is a backend's name or None."""
  if not isinstance(requested, str | None):
    raise TypeError(
      f"{who}: implementation must be a name or None, got"
      f" {error_context.shown(requested)}; leave it out to have one chosen"
    )
  if requested is not None and requested not in backends:
    raise ValueError(
      f"{who}: implementation must be None or one of {tuple(backends)}, got"
      f" {error_context.shown(requested)}; leave it out to have one chosen"
    )

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Log lines, events and names of what is lowered.

`logging.getLogger("jaxplugin")` is silent unless the program configures
`logging`, or the environment variable JAXPLUGIN_LOG is "info", "debug" or
"json". INFO has a line for each different decision. WARNING has decisions that
cost time although nobody asked for them. DEBUG also has the reasons of all
backends, and how long each lowering took.

`jax.monitoring` gets "/jaxplugin/decision" for each decision, and
"/jaxplugin/lowering_duration" for each primitive that is lowered.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import logging
import os
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax
import jax.monitoring

from jaxplugin.core import call_options, decisions, targets
from jaxplugin.jaxext import jax_private

VARIABLE: Final = "JAXPLUGIN_LOG"
DECISION: Final = "/jaxplugin/decision"
DURATION: Final = "/jaxplugin/lowering_duration"
_SETTINGS: Final = ("info", "debug", "json")
_LOGGER: Final = logging.getLogger("jaxplugin")
# Without a handler, logging prints warnings to stderr.
_LOGGER.addHandler(logging.NullHandler())
# A program that lowers more different calls logs some of them again.
_REMEMBERED: Final = 1 << 14

# Module and layer of what is being lowered.
_place: contextvars.ContextVar[tuple[str, str]] = contextvars.ContextVar(
  "place", default=("", "")
)


class _JsonFormatter(logging.Formatter):
  """Writes a record as one line of JSON."""

  def format(self, record: logging.LogRecord) -> str:
    fields = getattr(record, "fields", {"message": record.getMessage()})
    return json.dumps({"level": record.levelname, **fields}, default=str)


@functools.cache
def configure() -> None:
  """Configures the logger as JAXPLUGIN_LOG says, once.

  Raises:
    ValueError: If the variable has another value.
  """
  setting = os.environ.get(VARIABLE)
  if not setting:
    return
  if setting not in _SETTINGS:
    raise ValueError(
      f"jaxplugin: {VARIABLE} must be one of {_SETTINGS}, got {setting!r}. Set"
      " another value, or none for no log."
    )
  handler = logging.StreamHandler()
  text = logging.Formatter("%(levelname)s:%(name)s:%(message)s")
  handler.setFormatter(_JsonFormatter() if setting == "json" else text)
  _LOGGER.addHandler(handler)
  _LOGGER.setLevel(logging.DEBUG if setting == "debug" else logging.INFO)
  _LOGGER.propagate = False


@contextlib.contextmanager
def lowering(primitive: str, module: str, layer: str) -> Iterator[None]:
  """Names the place of decisions inside, and records the duration.

  Args:
    layer: names of the scopes around the first equation that is lowered so.
  """
  configure()
  token = _place.set((module, layer))
  start = time.perf_counter()
  try:
    yield
  finally:
    _place.reset(token)
  seconds = time.perf_counter() - start
  jax.monitoring.record_event_duration_secs(
    DURATION, seconds, operation=primitive
  )
  _LOGGER.debug("%s: lowered in %.1f ms", primitive, seconds * 1e3)


def disabled(target: targets.Target) -> None:
  """Warns once about each library of kernels that a local target lacks."""
  for name, reason in target.missing_libraries:
    _disabled_once(name, reason)


@functools.cache
def _disabled_once(library: str, reason: str) -> None:
  _LOGGER.warning("no kernel of %s is used: %s", library, reason)


def place() -> dict[str, str]:
  """Returns the module, the layer and the source line of a lowering.

  JAX lowers equal calls of a module once. Layer and line are those of the first
  one.
  """
  module, layer = _place.get()
  source = jax_private.user_frame()
  return {"module": module, "layer": layer, "source": source}


def place_text() -> str:
  """Returns the place as in " in jit_step, layer_3, model.py:7 (f)"."""
  if _place.get() == ("", ""):
    return ""  # nothing is being lowered
  return f" in {', '.join(filter(None, place().values()))}"


def decided(
  operation: str,
  problem: Any,
  target: targets.Target,
  decision: decisions.Decision,
  *,
  before: Sequence[str],
  is_fallback: bool,
) -> None:
  """Logs a decision that a lowering follows, and records its event.

  Args:
    before: names of the backends that come before the chosen one.
    is_fallback: whether XLA dequantizes the operands of a product, because no
      kernel supports it. The line is then a warning, if the platform has
      kernels or `target.options` asks for a warning.
  """
  jax.monitoring.record_event(
    DECISION, operation=operation, implementation=decision.implementation
  )
  is_wanted = target.options.on_fallback == "warn"
  level = logging.INFO
  if is_fallback and (before or is_wanted):
    level = logging.WARNING
  if is_fallback and is_wanted:
    _warn_once(operation, problem, target, decision)
  if not _LOGGER.isEnabledFor(level):
    return
  call = (operation, _place.get()[0], problem, target, decision)
  if _LOGGER.isEnabledFor(logging.DEBUG):
    before = [refusal.implementation for refusal in decision.refusals]
    _log(level, *call, tuple(before))
  else:
    _log_once(level, *call, tuple(before))


def _log(
  level: int,
  operation: str,
  module: str,
  problem: Any,
  target: targets.Target,
  decision: decisions.Decision,
  before: tuple[str, ...],
) -> None:
  del module  # of `place`; only different modules log equal decisions again
  reasons = {
    refusal.implementation: refusal.reason
    for refusal in decision.refusals
    if refusal.implementation in before
  }
  text = f"{operation}: {problem}{place_text()}"
  text += f" on {target}: {decision.implementation}, {decision.reason}"
  if decision.config:
    words = (f"{name}={value}" for name, value in decision.config)
    text += f", with {' '.join(words)}"
  for name, reason in reasons.items():
    text += f"; not {name}: {reason}"
  if level == logging.WARNING:
    text += ". XLA dequantizes the operands; jp.explain has all reasons"
  fields = {
    "event": "decision",
    "operation": operation,
    **place(),
    "problem": str(problem),
    "target": str(target),
    "implementation": decision.implementation,
    "reason": decision.reason,
    "config": dict(decision.config),
    "refusals": reasons,
    "is_fallback": level == logging.WARNING,
  }
  _LOGGER.log(level, "%s", text, extra={"fields": fields})


@functools.lru_cache(maxsize=_REMEMBERED)
def _warn_once(
  operation: str,
  problem: Any,
  target: targets.Target,
  decision: decisions.Decision,
) -> None:
  reasons = "; ".join(
    f"{x.implementation}: {x.reason}" for x in decision.refusals
  )
  warnings.warn(
    f"{operation}: XLA dequantizes the operands of {problem}{place_text()} on"
    f" {target}, because no kernel supports it. {reasons}",
    call_options.FallbackWarning,
    stacklevel=2,
  )


_log_once = functools.lru_cache(maxsize=_REMEMBERED)(_log)


def scope(problem: Any, implementation: str) -> str:
  """Returns the name of a call in profiles: its formats and its backend.

  A prologue comes first: "rms_norm of bfloat16 to mxfp8 by triton".
  """
  without_sizes = re.sub(r"\[[^]]*\]", "", str(problem))
  name = f"{without_sizes.partition(',')[0]} by {implementation}"
  prologue = getattr(problem, "prologue", None)
  return name if prologue is None else f"{prologue.name} of {name}"

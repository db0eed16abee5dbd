# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`Backend`: the interface of backends in other packages."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from jaxplugin.arrays import layouts
from jaxplugin.core import decisions, error_context, targets

# Version of `Backend` and of the classes that its functions are passed. A
# release that breaks existing backends increases it. Fields with a default and
# attributes of views can be added without a new version.
API_VERSION: Final = 1

OPERATIONS: Final = ("block_scaled_dot", "ragged_dot", "quantize", "dequantize")
NEEDS_STATIC_SIZES: Final = "needs static sizes, some are symbolic"

# The origin of a backend that no distribution provides.
IN_CODE: Final = "registered in code"
# Names with a meaning in environment variables or in the benchmark.
RESERVED_NAMES: Final = ("off", "all", "none", "chosen")

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_WHO: Final = "Backend"

# The arguments are views of problems and calls, which each operation defines.
Supports = Callable[[Any, targets.Target], str | None]
Emit = Callable[[Any], Any]
Config = Mapping[str, decisions.Scalar]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tuning:
  """The configs of a backend, which tuning tables choose from.

  A config is a dict of strings to bools, ints, strings or None. `Call.config`
  has the one that a table chose, and is empty by default.

  Attributes:
    candidates: (problem, target) -> the configs that `python -m jaxplugin tune`
      measures next to the default.
    config_error: (config, problem, target) -> None if the backend can compute
      the problem with the config, else the reason. A table may name any config.
    source: (target) -> the `Source` of the backend's kernels, or None if this
      process cannot build them. A table is used only with the source that was
      measured. By default the source is the version of the distribution.

  Example:
    >>> import jaxplugin as jp
    >>> tuning = jp.backends.Tuning(
    ...   candidates=lambda problem, target: [{"block_m": 64}],
    ...   config_error=lambda config, problem, target: None,
    ... )
    >>> tuning.candidates(None, None)
    [{'block_m': 64}]
  """

  candidates: Callable[[Any, targets.Target], Iterable[Config]]
  config_error: Callable[[Config, Any, targets.Target], str | None]
  source: Callable[[targets.Target], decisions.Source | None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Backend:
  """An implementation of an operation in another package.

  It is used if `implementation=` or a tuning table names it, or if the user
  ranks it first. Its installation does not change a program.

  Attributes:
    name: letters a-z, digits and "_".
    api_version: `jaxplugin.backends.API_VERSION` of its source, as a literal.
    platforms: JAX's lowering platforms, for example ("cpu", "cuda").
    supports: (problem, target) -> None if it supports the problem, else the
      reason, for example "needs k to be a multiple of 128, got k=96". It must
      be pure.
    emit: (call) -> the result, in JAX operations and calls of kernels. It is
      traced, and only for calls that `supports` accepts. The result has
      the shape and dtype of the call, or of its `as_rows`.
    summary: words that `explain` prints.
    is_portable: whether it emits only XLA's operations. `jax.export` accepts
      others only by name.
    takes_symbolic_sizes: whether sizes of problems may be None.
    reads: layouts of scales that `emit` accepts besides "linear": (), or
      ("swizzled_128x4",).
    fuses_global_scale: whether a scalar global scale is free, for `explain`.
    notes: sentences about its results, for `explain`.
    plan: (problem, target, config) -> a `Plan` for `explain`, in place of
      `fuses_global_scale` and `notes`.
    lowering_error: (target) -> None if this process can lower a call, else the
      reason.
    tuning: its configs, or None.
    call_targets: custom calls of `emit`, which `jp.export` accepts.
    operation: "block_scaled_dot", "ragged_dot", "quantize" or "dequantize".

  Raises:
    TypeError: If a field has another type.
    ValueError: If the name or a layout is invalid.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> def emit(call):
    ...   rows = call.as_rows()
    ...   lhs, rhs = rows.lhs.dequantized(), rows.rhs.dequantized()
    ...   return rows.finish(jnp.einsum("bmk,bnk->bmn", lhs, rhs))
    >>> backend = jp.Backend(
    ...   name="example",
    ...   api_version=1,
    ...   platforms=("cpu",),
    ...   supports=lambda problem, target: None,
    ...   emit=emit,
    ... )
    >>> backend = jp.register_backend(backend)
    >>> x_q = jp.quantize(jnp.ones((2, 32)), "mxfp8")
    >>> jp.block_scaled_dot(x_q, x_q, implementation="example")
    Array([[32., 32.],
           [32., 32.]], dtype=float32)
    >>> jp.backends.unregister_backend("example")

  See also:
    The page "Write a backend".
  """

  name: str
  api_version: int
  platforms: tuple[str, ...]
  supports: Supports
  emit: Emit
  summary: str = ""
  is_portable: bool = False
  takes_symbolic_sizes: bool = False
  reads: tuple[str, ...] = ()
  fuses_global_scale: bool = False
  notes: tuple[str, ...] = ()
  plan: Callable[[Any, targets.Target, Config], decisions.Plan] | None = None
  lowering_error: Callable[[targets.Target], str | None] | None = None
  tuning: Tuning | None = None
  call_targets: tuple[str, ...] = ()
  operation: str = "block_scaled_dot"

  def __post_init__(self) -> None:
    if not isinstance(self.name, str):
      raise TypeError(
        f"{_WHO}: name must be a string, got {error_context.shown(self.name)}"
      )
    if not _NAME.fullmatch(self.name) or self.name in RESERVED_NAMES:
      raise ValueError(
        f"{_WHO}: name must be lower-case letters, digits and '_', and not one"
        f" of {RESERVED_NAMES}, got {error_context.shown(self.name)}"
      )
    if self.operation not in OPERATIONS:
      raise ValueError(
        f"{_WHO} {self.name}: operation must be one of {OPERATIONS}, got"
        f" {error_context.shown(self.operation)}"
      )
    self._require("api_version", int, "an integer")
    self._require("summary", str, "a string")
    for field in ("platforms", "reads", "notes", "call_targets"):
      self._require_strings(field)
    for field in ("supports", "emit"):
      if not callable(getattr(self, field)):
        self._refuse(field, "callable")
    for field in ("plan", "lowering_error"):
      value = getattr(self, field)
      if value is not None and not callable(value):
        self._refuse(field, "callable or None")
    if self.tuning is not None:
      self._require("tuning", Tuning, "a jp.backends.Tuning or None")
    for field in ("is_portable", "takes_symbolic_sizes", "fuses_global_scale"):
      self._require(field, bool, "True or False")
    if not self.platforms:
      raise ValueError(
        f"{_WHO} {self.name}: platforms must have at least one name, got none"
      )
    unknown = set(self.reads) - {layouts.SWIZZLED}
    if unknown:
      raise ValueError(
        f"{_WHO} {self.name}: reads must contain only {layouts.SWIZZLED!r},"
        f' got {error_context.shown(self.reads)}; leave "linear" out, which'
        " every backend reads"
      )

  def _require(self, field: str, kind: type, what: str) -> None:
    value = getattr(self, field)
    is_bool = isinstance(value, bool)
    if not isinstance(value, kind) or (is_bool and kind is not bool):
      self._refuse(field, what)

  def _require_strings(self, field: str) -> None:
    value = getattr(self, field)
    if not isinstance(value, tuple) or not all(
      isinstance(item, str) for item in value
    ):
      self._refuse(field, "a tuple of strings")

  def _refuse(self, field: str, what: str) -> None:
    raise TypeError(
      f"{_WHO} {self.name}: {field} must be {what}, got"
      f" {error_context.shown(getattr(self, field))}"
    )


class Refusal(enum.Enum):
  """A reason not to use a backend that was found.

  Example:
    >>> import jaxplugin as jp
    >>> jp.backends.Refusal.IMPORT_FAILED.value
    'its import failed'
  """

  NOT_ALLOWED = "JAXPLUGIN_BACKENDS leaves it out"
  IMPORT_FAILED = "its import failed"
  WRONG_TYPE = "its entry point is not a jp.Backend"
  WRONG_API_VERSION = "it is written for another API version"
  WRONG_NAME = "its entry point has another name"
  NAME_TAKEN = "its name is taken"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
  """A backend of another package, and whether it can be used.

  Attributes:
    name: name of the backend or of its entry point.
    origin: a distribution with its version, "acme-dot 1.2", or
      "registered in code".
    is_first: whether it is tried before jaxplugin's own backends.
    refusal: why it is not used, or None.
    reason: the refusal in words, or "".
    platforms: its platforms, if it is used.
    operation: the operation, if it is used.

  Example:
    >>> import jaxplugin as jp
    >>> status = jp.backends.Status(
    ...   name="acme",
    ...   origin="acme-dot 1.2",
    ...   refusal=jp.backends.Refusal.IMPORT_FAILED,
    ...   reason="its import raised ImportError",
    ... )
    >>> status.refusal.name
    'IMPORT_FAILED'
  """

  name: str
  origin: str
  is_first: bool = False
  refusal: Refusal | None = None
  reason: str = ""
  platforms: tuple[str, ...] = ()
  operation: str = ""

  def __str__(self) -> str:
    place = ", tried first" if self.is_first else ""
    if self.operation not in ("", OPERATIONS[0]):
      place = f", for {self.operation}{place}"
    name = f"{self.name}, {origin_phrase(self.origin)}"
    if self.refusal is None:
      return f"{name}{place}"
    return f"{name}: not used: {self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class UsableBackend:
  """A backend that can be used, and its origin."""

  backend: Backend
  origin: str
  is_first: bool = False

  def status(self) -> Status:
    return Status(
      name=self.backend.name,
      origin=self.origin,
      is_first=self.is_first,
      platforms=self.backend.platforms,
      operation=self.backend.operation,
    )


class BackendWarning(UserWarning):
  """A backend of another package cannot be used, or answers wrongly."""


def origin_phrase(origin: str) -> str:
  """Returns the origin as a phrase that follows the name of a backend."""
  return origin if origin == IN_CODE else f"of {origin}"


def api_version_error(backend: Backend) -> str:
  """Returns why the version of a backend is not supported, or ""."""
  if backend.api_version == API_VERSION:
    return ""
  older = backend.api_version < API_VERSION
  remedy = "update it" if older else "update jaxplugin"
  return (
    f"it is written for version {backend.api_version} of jaxplugin.backends,"
    f" and this jaxplugin has version {API_VERSION}; {remedy}"
  )

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`Backend`: what another package says of an implementation of the dot."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable
from typing import Final

import jax

from jaxplugin.arrays import layouts
from jaxplugin.core import speaking
from jaxplugin.core import targets
from jaxplugin.dot.plugins import views

# Of `Backend` and of what it is given. A release that breaks a backend which is
# written for the former number has the next one; what is only added, fields
# with a default and attributes of views, leaves it.
API_VERSION: Final = 1

# Words of the environment variables and of the benchmark.
RESERVED_NAMES: Final = ("off", "all", "none", "chosen")

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_WHO: Final = "Backend"

Supports = Callable[[views.Problem, targets.Target], str | None]
Emit = Callable[[views.Call], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Backend:
  """An implementation of the block-scaled dot, of another package.

  It is used where `implementation=` names it, where a tuning table does, and
  where the user has it come first; installing it changes no program.

  Attributes:
    name: what `implementation=` calls it: lower-case letters, digits and "_".
      An entry point has the same name.
    api_version: the number of `jaxplugin.backends.API_VERSION` that it was
      written for, as a literal.
    platforms: JAX's lowering platforms that it serves, of "cpu", "cuda",
      "rocm", "tpu" and so on. Elsewhere `supports` is not asked.
    supports: (problem, target) -> None where it serves a problem on a target,
      else the reason, a phrase such as "needs k to be a multiple of 128, got
      k=96". A pure function, as decisions are made by several threads and again
      by each process: it looks at nothing but its arguments.
    emit: (call) -> the result, in JAX operations and calls of its own kernels;
      it is traced. Of the call's shape and dtype, or of those of its `as_rows`.
      It is asked only for calls that `supports` accepts.
    summary: what it is, in a few words; `explain` shows them.
    is_portable: whether what it emits is XLA's operations alone. Other ones are
      not exported but by name, as JAX's export wants.
    takes_symbolic_sizes: whether sizes of problems may be None.
    reads: layouts of scales, beside "linear", that `emit` takes as they are:
      "swizzled_128x4" or none. Others are brought to the linear one.
    fuses_global_scale: whether a global scale that is one number costs nothing;
      for `explain`.
    notes: what else one should know of its results, a sentence each.

  Raises:
    TypeError: a field is not of its type.
    ValueError: a name or a layout is none.
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

  def __post_init__(self) -> None:
    if not isinstance(self.name, str):
      raise TypeError(
        f"{_WHO}: name must be a string, got {speaking.shown(self.name)}"
      )
    if not _NAME.fullmatch(self.name) or self.name in RESERVED_NAMES:
      raise ValueError(
        f"{_WHO}: name must be lower-case letters, digits and '_', and not one"
        f" of {RESERVED_NAMES}, got {speaking.shown(self.name)}"
      )
    self._require("api_version", int, "an integer")
    self._require("summary", str, "a string")
    for field in ("platforms", "reads", "notes"):
      self._require_strings(field)
    for field in ("supports", "emit"):
      if not callable(getattr(self, field)):
        self._refuse(field, "callable")
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
        f' got {speaking.shown(self.reads)}; leave "linear" out, which every'
        " backend reads"
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
      f" {speaking.shown(getattr(self, field))}"
    )


class Refusal(enum.Enum):
  """Why a backend that was found is not used."""

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
    name: its own, or its entry point's.
    origin: where it is from: a distribution with its version, "acme-dot 1.2",
      or "registered in code".
    is_first: whether it is tried before jaxplugin's own.
    refusal: why it is not used; None where it is.
    reason: the same in words; empty where it is used.
    platforms: of one that is used.
  """

  name: str
  origin: str
  is_first: bool = False
  refusal: Refusal | None = None
  reason: str = ""
  platforms: tuple[str, ...] = ()

  def __str__(self) -> str:
    place = ", tried first" if self.is_first else ""
    if self.refusal is None:
      return f"{self.name}, of {self.origin}{place}"
    return f"{self.name}, of {self.origin}: not used: {self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
  """A backend that can be used, and what is known of it."""

  backend: Backend
  origin: str
  is_first: bool = False

  def status(self) -> Status:
    return Status(
      name=self.backend.name,
      origin=self.origin,
      is_first=self.is_first,
      platforms=self.backend.platforms,
    )


class BackendWarning(UserWarning):
  """A backend of another package cannot be used, or answers wrongly."""


def api_version_error(backend: Backend) -> str:
  """Why a backend's version does not do; empty where it does."""
  if backend.api_version == API_VERSION:
    return ""
  older = backend.api_version < API_VERSION
  remedy = "update it" if older else "update jaxplugin"
  return (
    f"it is written for version {backend.api_version} of jaxplugin.backends,"
    f" and this jaxplugin has version {API_VERSION}; {remedy}"
  )

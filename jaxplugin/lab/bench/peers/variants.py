# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Variants: the ways to compute a row, and why some cannot run here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import Literal

CHOSEN: Final = "chosen"  # in the place of a backend's name

Role = Literal["ours", "peer", "ceiling"]
# Which ceiling a matmul has: that of any floats, of f32, or of integers.
Arithmetic = Literal["floats", "f32", "int8"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
  """One way to compute a row.

  Attributes:
    name: the name in tables and files.
    role: "ours"; "peer", to compare with; or "ceiling", a limit of the device.
    function: the function of one set of operands. `jit` traces it, unless it
      runs `on_host`.
    operands: returns set number i.
    check: raises WrongResultError if a result of set i is wrong. Returns the
      error in units of 2^-24 * sum(|a * b|), or None for a comparison of bits.
    num_bytes: the least number of bytes that one call reads and writes.
    flops: floating-point operations of one call; 0 if they do not count.
    arithmetic: the arithmetic whose ceiling applies.
    is_chosen: whether the package chooses it here.
    on_host: whether `function` is called without JAX.
    wait: waits for work that functions on the host have started; None if they
      return when it is done.
    form: the form of the expression, if the peer has several.
    same_as: a word for variants of a row that take the same time in all
      formats. A slow one of a mixture of experts is timed in one format only.
      "" if the time depends on the formats.
  """

  name: str
  role: Role
  function: Callable[..., Any]
  operands: Callable[[int], tuple[Any, ...]]
  check: Callable[[int, Any], float | None]
  num_bytes: int
  flops: int
  arithmetic: Arithmetic = "floats"
  is_chosen: bool = False
  on_host: bool = False
  wait: Callable[[], None] | None = None
  form: str = ""
  same_as: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forms:
  """A peer that its user could write in several ways: the fastest counts.

  Attributes:
    name, role: the name and role of each form.
    forms: the variants to try, each with another `form`.
    of_floats: whether the forms are the same for all formats of a row. The
      fastest is then found once.
  """

  name: str
  role: Role
  forms: tuple[Variant, ...]
  of_floats: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unavailable:
  """A variant that cannot run here, and why."""

  name: str
  role: Role
  reason: str


AnyVariant = Variant | Forms | Unavailable


def missing_peer(name: str, reason: str) -> Unavailable:
  return Unavailable(name=name, role="peer", reason=reason)


def arithmetic_of(role: Role, is_f32: bool, is_fp4: bool) -> Arithmetic:
  """Returns the arithmetic of f32 operands, of pairs of FP4, or of others."""
  if is_f32:
    return "f32"
  return "int8" if role == "ours" and is_fp4 else "floats"


def ours(
  names: Sequence[str] | None,
  chosen: Sequence[str],
  default: Iterable[str],
  refusal: Callable[[str], str],
  make: Callable[[str, bool], Iterable[Variant]],
) -> list[AnyVariant]:
  """Returns the variants of backends, those of the decision first.

  Args:
    names: names of backends, or `CHOSEN`. None is those of `default` that
      support the row.
    chosen: the backends of the decision.
    default: names of backends.
    refusal: returns why a backend does not support the row; "" if it does.
    make: returns the variants of a backend. The second argument is whether the
      decision is this backend.
  """
  wanted = [
    name
    for named in (default if names is None else names)
    for name in (chosen if named == CHOSEN else (named,))
  ]
  found: list[AnyVariant] = []
  for name in sorted(dict.fromkeys(wanted), key=lambda n: n not in chosen):
    reason = refusal(name)
    if not reason:
      found += make(name, name in chosen)
    elif names is not None:
      found.append(Unavailable(name=name, role="ours", reason=reason))
  return found

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""One way to compute a row, and one that cannot be had here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from typing import Literal

Role = Literal["ours", "peer", "ceiling"]
# Whose ceiling products have: any floats', f32's alone, or integers'.
Arithmetic = Literal["floats", "f32", "int8"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
  """One way to compute a row.

  Attributes:
    name: for people and files.
    role: ours; a peer to compare with; or a ceiling, what the device can do.
    function: of one set of operands, traced under `jit`; or, when `on_host`,
      called as it is, and done when it returns.
    operands: set number i.
    check: raises WrongResultError unless a result of set i is right; returns
      the error in units of 2^-24 * sum(|a * b|), or None where results are
      compared bit by bit.
    num_bytes: read and written at least, by one call.
    flops: floating-point operations of one call; 0 where they do not count.
    arithmetic: what it may do them in.
    is_chosen: whether the package would choose it here.
    on_host: whether `function` takes no part in JAX.
    wait: waits for what functions on the host have started; None where they are
      done when they return.
    form: how the product is written, where it could be written in several ways.
    same_as: variants of a row that have the same word here take the same time
      in all formats: a slow one of a mixture of experts is timed in one of them
      only. "" where it depends on the formats.
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
    name, role: of each of `forms`.
    forms: what is tried, each with another `form`.
    of_floats: whether they are the same for all formats of a row, of which the
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

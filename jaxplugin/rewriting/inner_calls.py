# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations that have functions inside, made again with what is known.

A `Walker` knows something of some values: which quantized weight they are, say.
These functions make an operation again so that its inner functions know it too.
Each takes a walker, the operation's arguments and its parameters, and returns
the results; or None if the operation is to stay as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.jaxext.tracing import binding_private


class Walker(Protocol):
  """An interceptor that knows something of values, and can follow it."""

  @property
  def is_rebuilding(self) -> bool:
    """Whether inner functions make known values again, and get none."""

  def known(self, x: Any) -> Any:
    """Returns what is known of a value, or None."""

  def layers(
    self, known: Any
  ) -> tuple[list[Any], Callable[[Any, Sequence[Any]], Any]] | None:
    """Splits what is known of a stack by its first dimension.

    Returns:
      Arrays that a `scan` is to go over besides, and a function of a trip's
      number and its slices of these arrays, which returns what is known of the
      trip's slice. None if nothing is known of slices.
    """

  def leave(self, operation: str, args: Sequence[Any], reason: str) -> None:
    """Notes values of which nothing is known in an operation, and why."""

  def run(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr in the function that is traced."""

  def run_inside(
    self,
    jaxpr: Any,
    args: Sequence[Any],
    known: Sequence[Any],
    dtypes: Sequence[Any],
  ) -> list[Any]:
    """Evaluates a jaxpr in a function of an operation.

    Args:
      jaxpr: which one.
      args: its arguments; None if they are to be made again.
      known: what is known of each.
      dtypes: of each.
    """


def _jit(walker: Walker, args: list[Any], params: dict[str, Any]) -> Any:
  """Evaluated in place, as the function around it is jitted."""

  def placed(xs: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    return [
      x
      if s is binding_private.UNSPECIFIED or walker.known(x) is not None
      else lax.with_sharding_constraint(x, s)
      for x, s in zip(xs, shardings, strict=True)
    ]

  out = walker.run(params["jaxpr"], placed(args, params["in_shardings"]))
  return placed(out, params["out_shardings"])


def _custom_vmap(
  walker: Walker, args: list[Any], params: dict[str, Any]
) -> Any:
  """Evaluated in place: without its rule a `vmap` maps what it computes."""
  return walker.run(params["call"], args)


def _known(walker: Walker, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
  """Returns what is known of arguments, and their dtypes."""
  known = [walker.known(x) for x in args]
  return known, [getattr(x, "dtype", None) for x in args]


def _plain(
  walker: Walker, known: Sequence[Any], args: Sequence[Any]
) -> list[Any]:
  """Returns the arguments that inner functions are given."""
  if not walker.is_rebuilding:
    return list(args)
  return [x for x, fact in zip(args, known, strict=True) if fact is None]


def _merged(
  walker: Walker, known: Sequence[Any], plain: Sequence[Any]
) -> list[Any]:
  """Returns all arguments, None for those that are made again."""
  if not walker.is_rebuilding:
    return list(plain)
  left = iter(plain)
  return [next(left) if fact is None else None for fact in known]


def _checkpoint(walker: Walker, args: list[Any], params: dict[str, Any]) -> Any:
  if params.get("differentiated"):
    return None
  known, dtypes = _known(walker, args)

  def function(*plain: Any) -> list[Any]:
    return walker.run_inside(
      params["jaxpr"], _merged(walker, known, plain), known, dtypes
    )

  prevent_cse = params["prevent_cse"]
  if isinstance(prevent_cse, tuple):
    prevent_cse = any(prevent_cse)
  remat = jax.checkpoint(
    function, policy=params["policy"], prevent_cse=prevent_cse
  )
  return remat(*_plain(walker, known, args))


def _cond(walker: Walker, args: list[Any], params: dict[str, Any]) -> Any:
  index, *operands = args
  known, dtypes = _known(walker, operands)

  def branch(jaxpr: Any, *plain: Any) -> list[Any]:
    return walker.run_inside(
      jaxpr, _merged(walker, known, plain), known, dtypes
    )

  branches = [functools.partial(branch, j) for j in params["branches"]]
  return lax.switch(index, branches, *_plain(walker, known, operands))


def _while(walker: Walker, args: list[Any], params: dict[str, Any]) -> Any:
  num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
  num_consts = num_cond + num_body
  known, dtypes = _known(walker, args[:num_consts])

  def part(jaxpr: Any, start: int, end: int, carry: Sequence[Any]) -> list[Any]:
    none = [None] * len(carry)
    return walker.run_inside(
      jaxpr,
      [*args[start:end], *carry],
      [*known[start:end], *none],
      [*dtypes[start:end], *none],
    )

  return lax.while_loop(
    lambda carry: part(params["cond_jaxpr"], 0, num_cond, carry)[0],
    lambda carry: part(params["body_jaxpr"], num_cond, num_consts, carry),
    args[num_consts:],
  )


def _scan(walker: Walker, args: list[Any], params: dict[str, Any]) -> Any:
  """Also over the numbers of layers, if it is over stacks of weights."""
  num_consts, num_carry = binding_private.scan_sizes(params)
  num_fixed = num_consts + num_carry
  known, dtypes = _known(walker, args)
  consts, xs = args[:num_consts], args[num_fixed:]
  none: list[Any] = [None] * num_carry
  split = [
    None if fact is None else walker.layers(fact) for fact in known[num_fixed:]
  ]
  # Weights that are scanned over otherwise are arrays.
  others = [x for x, parts in zip(xs, split, strict=True) if parts is None]
  walker.leave(
    "scan", others, "a scan iterates over it, and it is not a stack of layers"
  )

  def body(carry: list[Any], step: Any) -> tuple[list[Any], list[Any]]:
    number, plain, more = step
    layers = [
      None if parts is None else parts[1](number, slices)
      for parts, slices in zip(split, more, strict=True)
    ]
    out = walker.run_inside(
      params["jaxpr"],
      [*consts, *carry, *_merged(walker, split, plain)],
      [*known[:num_consts], *none, *layers],
      dtypes,
    )
    return out[:num_carry], out[num_carry:]

  carry, ys = lax.scan(
    body,
    args[num_consts:num_fixed],
    (
      jnp.arange(params["length"], dtype=np.int32),
      _plain(walker, split, xs),
      [[] if parts is None else parts[0] for parts in split],
    ),
    reverse=params["reverse"],
    unroll=params["unroll"],
    _split_transpose=params.get("_split_transpose", False),
  )
  return [*carry, *ys]


CALLS: Final = {
  "jit": _jit,
  "pjit": _jit,
  "checkpoint": _checkpoint,
  "remat2": _checkpoint,
  "cond": _cond,
  "while": _while,
  "scan": _scan,
  "custom_vmap_call": _custom_vmap,
}


# Functions of operations that are given other arguments than the operation: a
# `jvp` has tangents too, and the residuals of a `bwd` may be anything.
_JVP: Final = ("custom_jvp_call", 1)
_BACKWARD: Final = ("custom_vjp_call", 2)


def is_rule_of_tangents(operation: str, index: int) -> bool:
  """Whether a function of an operation is given tangents or cotangents."""
  return (operation, index) in (_JVP, _BACKWARD)


def own_args(
  operation: str, index: int, args: Sequence[Any], count: int
) -> Sequence[Any]:
  """Returns those of a function's arguments that are its operation's.

  Args:
    operation, index: the operation, and which of its functions.
    args: of the function. A `fwd` has after each argument whether it is
      differentiated; a `jvp` has tangents after all.
    count: how many arguments the operation has.
  """
  if (operation, index) == _BACKWARD:
    return ()
  is_forward = len(args) == 2 * count and all(
    isinstance(x, bool) for x in args[1::2]
  )
  return args[::2] if is_forward else args[:count]

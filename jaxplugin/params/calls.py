# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations that have functions inside, made again with quantized weights.

Each function here takes an `interception.Acceptor`, the operation's arguments
and its parameters. It returns the results, or None where the operation is to
stay as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.params import views


def _jit(acceptor: Any, args: list[Any], params: dict[str, Any]) -> Any:
  """Evaluated in place, as the function around it is jitted."""

  def placed(xs: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    return [
      x
      if s is binding_private.UNSPECIFIED or acceptor.view(x) is not None
      else lax.with_sharding_constraint(x, s)
      for x, s in zip(xs, shardings, strict=True)
    ]

  out = acceptor.run(params["jaxpr"], placed(args, params["in_shardings"]))
  return placed(out, params["out_shardings"])


def _known(
  acceptor: Any, args: Sequence[Any]
) -> tuple[list[views.View | None], list[Any]]:
  """Views, and dtypes, of arguments."""
  known = [acceptor.view(x) for x in args]
  return known, [getattr(x, "dtype", None) for x in args]


def _plain(known: Sequence[Any], args: Sequence[Any]) -> list[Any]:
  return [x for x, view in zip(args, known, strict=True) if view is None]


def _merged(known: Sequence[Any], plain: Sequence[Any]) -> list[Any]:
  """Arguments, with None where they are known."""
  left = iter(plain)
  return [next(left) if view is None else None for view in known]


def _checkpoint(acceptor: Any, args: list[Any], params: dict[str, Any]) -> Any:
  if params.get("differentiated"):
    return None
  known, dtypes = _known(acceptor, args)

  def function(*plain: Any) -> list[Any]:
    return acceptor.run_inside(
      params["jaxpr"], _merged(known, plain), known, dtypes
    )

  prevent_cse = params["prevent_cse"]
  if isinstance(prevent_cse, tuple):
    prevent_cse = any(prevent_cse)
  remat = jax.checkpoint(
    function, policy=params["policy"], prevent_cse=prevent_cse
  )
  return remat(*_plain(known, args))


def _cond(acceptor: Any, args: list[Any], params: dict[str, Any]) -> Any:
  index, *operands = args
  known, dtypes = _known(acceptor, operands)

  def branch(jaxpr: Any, *plain: Any) -> list[Any]:
    return acceptor.run_inside(jaxpr, _merged(known, plain), known, dtypes)

  branches = [functools.partial(branch, j) for j in params["branches"]]
  return lax.switch(index, branches, *_plain(known, operands))


def _while(acceptor: Any, args: list[Any], params: dict[str, Any]) -> Any:
  num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
  num_consts = num_cond + num_body
  known, dtypes = _known(acceptor, args[:num_consts])

  def part(jaxpr: Any, start: int, end: int, carry: Sequence[Any]) -> list[Any]:
    none = [None] * len(carry)
    return acceptor.run_inside(
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


def _scan(acceptor: Any, args: list[Any], params: dict[str, Any]) -> Any:
  """Over the numbers of layers, where it is over weights."""
  num_consts, num_carry = binding_private.scan_sizes(params)
  num_fixed = num_consts + num_carry
  known, dtypes = _known(acceptor, args)
  consts, xs = args[:num_consts], args[num_fixed:]
  none: list[Any] = [None] * num_carry
  # Weights that are scanned over otherwise are arrays.
  stacks = [v if v is not None and v.at(0) else None for v in known[num_fixed:]]
  others = [x for x, v in zip(xs, stacks, strict=True) if v is None]
  acceptor.warn("scan", others, "it is scanned over, and has no such layers")

  def body(carry: list[Any], step: Any) -> tuple[list[Any], list[Any]]:
    number, plain = step
    layers = [None if v is None else v.at(number) for v in stacks]
    out = acceptor.run_inside(
      params["jaxpr"],
      [*consts, *carry, *_merged(stacks, plain)],
      [*known[:num_consts], *none, *layers],
      dtypes,
    )
    return out[:num_carry], out[num_carry:]

  carry, ys = lax.scan(
    body,
    args[num_consts:num_fixed],
    (jnp.arange(params["length"], dtype=np.int32), _plain(stacks, xs)),
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
}

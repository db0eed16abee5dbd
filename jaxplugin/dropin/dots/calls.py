# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations that have functions inside, with their products decided about.

Each function here takes a `rewriting.Dots`, the operation's arguments and
parameters, and which arguments are parameters of the model. It returns
arguments, parameters, and what makes the operation's results of the new one's;
or None, where nothing inside is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.jaxext.tracing import binding_private

Call = tuple[list[Any], dict[str, Any], Callable[[Any], Any]]


def _jit(
  dots: Any, args: list[Any], params: dict[str, Any], is_parameter: list[bool]
) -> Call | None:
  new = dots.inside(params["jaxpr"], is_parameter)
  if new.jaxpr is None:
    return None
  key = dots.key_operand(new.count)
  dots.use(new.count)
  more = len(key)
  params = dict(
    params,
    jaxpr=new.jaxpr,
    in_shardings=(binding_private.UNSPECIFIED,) * more + params["in_shardings"],
    in_layouts=(None,) * more + params["in_layouts"],
    donated_invars=(False,) * more + params["donated_invars"],
  )
  return [*key, *args], params, lambda out: out


def _checkpoint(
  dots: Any, args: list[Any], params: dict[str, Any], is_parameter: list[bool]
) -> Call | None:
  new = dots.inside(params["jaxpr"], is_parameter)
  if new.jaxpr is None:
    return None
  more = [*new.consts, *dots.key_operand(new.count)]
  dots.use(new.count)
  params = dict(params, jaxpr=new.jaxpr)
  if isinstance(params["prevent_cse"], tuple):
    params["prevent_cse"] = (False,) * len(more) + params["prevent_cse"]
  return [*more, *args], params, lambda out: out


def _cond(
  dots: Any, args: list[Any], params: dict[str, Any], is_parameter: list[bool]
) -> Call | None:
  index, *operands = args
  # One of them runs, so they have the same numbers of keys.
  branches = [dots.inside(b, is_parameter[1:]) for b in params["branches"]]
  if all(new.jaxpr is None for new in branches):
    return None
  count = max(new.count for new in branches)
  key = dots.key_operand(count)
  dots.use(count)
  jaxprs = tuple(
    (dots.with_unused_key(old) if key else old)
    if new.jaxpr is None
    else new.jaxpr
    for new, old in zip(branches, params["branches"], strict=True)
  )
  params = dict(params, branches=jaxprs)
  return [index, *key, *operands], params, lambda out: out


def _scan(
  dots: Any, args: list[Any], params: dict[str, Any], is_parameter: list[bool]
) -> Call | None:
  num_consts, num_carry = binding_private.scan_sizes(params)
  num_fixed = num_consts + num_carry
  # A carry is another value in every trip.
  flags = list(is_parameter)
  flags[num_consts:num_fixed] = [False] * num_carry
  has_key = dots.key is not None
  new = dots.inside(
    params["jaxpr"], flags, in_loop=num_fixed, has_trip=has_key, number=0
  )
  if new.jaxpr is None:
    return None
  params = dict(params, jaxpr=new.jaxpr)
  if has_key:
    base = _loop_key(dots)
    trips = jnp.arange(params["length"], dtype=np.uint32)
    args = [base, *args[:num_fixed], trips, *args[num_fixed:]]
    params = binding_private.extended_scan(params)
  return args, params, lambda out: out


def _while(
  dots: Any, args: list[Any], params: dict[str, Any], is_parameter: list[bool]
) -> Call | None:
  num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
  num_consts = num_cond + num_body
  num_carry = len(args) - num_consts
  has_key = dots.key is not None
  inside = functools.partial(dots.inside, has_trip=has_key)
  no_carry = [False] * num_carry
  condition = inside(
    params["cond_jaxpr"],
    [*is_parameter[:num_cond], *no_carry],
    in_loop=num_cond,
    number=0,
  )
  body = inside(
    params["body_jaxpr"],
    [*is_parameter[num_cond:num_consts], *no_carry],
    in_loop=num_body,
    number=condition.count,
    results=has_key,
  )
  if condition.jaxpr is None and body.jaxpr is None:
    return None
  if not has_key:
    params = dict(
      params,
      cond_jaxpr=condition.jaxpr or params["cond_jaxpr"],
      body_jaxpr=body.jaxpr or params["body_jaxpr"],
    )
    return args, params, lambda out: out
  base = _loop_key(dots)
  params = dict(
    params,
    cond_jaxpr=condition.jaxpr
    or dots.with_unused_key(params["cond_jaxpr"], num_cond),
    body_jaxpr=body.jaxpr
    or dots.with_unused_key(params["body_jaxpr"], num_body, results=True),
    cond_nconsts=num_cond + 1,
    body_nconsts=num_body + 1,
  )
  args = [
    *(base, *args[:num_cond]),
    *(base, *args[num_cond:num_consts]),
    *(np.uint32(0), *args[num_consts:]),
  ]
  return args, params, lambda out: out[1:]


CALLS: Final = {
  "jit": _jit,
  "checkpoint": _checkpoint,
  "remat2": _checkpoint,
  "cond": _cond,
  "scan": _scan,
  "while": _while,
}


def _loop_key(dots: Any) -> Any:
  (base,) = dots.key_operand(1)
  key = jax.random.fold_in(base, dots.number)
  dots.use(1)
  return key


# Which functions of these operations are given other arguments: a `jvp`, whose
# products of tangents must stay linear, and a `bwd`, whose residuals may be
# anything.
_OTHERS: Final = {"custom_jvp_call": 1, "custom_vjp_call": 2}


def flags_inside(
  operation: str, index: int, is_parameter: list[bool]
) -> list[bool]:
  """Which own arguments of a function of an operation are parameters."""
  return [] if _OTHERS.get(operation) == index else is_parameter


def own_args(args: Sequence[Any], count: int) -> Sequence[Any]:
  """Of a rule's arguments those of the function that it is the rule of.

  A `fwd` has after each of them whether it is differentiated.
  """
  is_forward = len(args) == 2 * count and all(
    isinstance(x, bool) for x in args[1::2]
  )
  return args[::2] if is_forward else args

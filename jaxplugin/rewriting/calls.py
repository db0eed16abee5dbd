# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations that have functions inside, with their products decided about.

Each function here takes a `rewriting.Dots`, the operation's arguments and
parameters, which arguments are parameters of the model, and which are arrays of
operands that are quantized already. It returns arguments, parameters, and what
makes the operation's results of the new one's; or None, where nothing inside is
taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax.numpy as jnp
import numpy as np

from jaxplugin.jaxext import keys
from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.rewriting import operands as operands_lib

Call = tuple[list[Any], dict[str, Any], Callable[[Any], Any]]


def _jit(
  dots: Any,
  args: list[Any],
  params: dict[str, Any],
  is_parameter: list[bool],
  known: operands_lib.Operands,
) -> Call | None:
  passed = known.passed(args)
  new = dots.inside(params["jaxpr"], is_parameter, passed)
  if new.jaxpr is None:
    return None
  before = [*dots.key_operand(new.count), *passed.arrays()]
  dots.use(new.count)
  more = len(before)
  params = dict(
    params,
    jaxpr=new.jaxpr,
    in_shardings=(binding_private.UNSPECIFIED,) * more + params["in_shardings"],
    in_layouts=(None,) * more + params["in_layouts"],
    donated_invars=(False,) * more + params["donated_invars"],
  )
  return [*before, *args], params, lambda out: out


def _checkpoint(
  dots: Any,
  args: list[Any],
  params: dict[str, Any],
  is_parameter: list[bool],
  known: operands_lib.Operands,
) -> Call | None:
  passed = known.passed(args)
  new = dots.inside(params["jaxpr"], is_parameter, passed)
  if new.jaxpr is None:
    return None
  more = [*new.consts, *dots.key_operand(new.count), *passed.arrays()]
  dots.use(new.count)
  params = dict(params, jaxpr=new.jaxpr)
  if isinstance(params["prevent_cse"], tuple):
    params["prevent_cse"] = (False,) * len(more) + params["prevent_cse"]
  return [*more, *args], params, lambda out: out


def _cond(
  dots: Any,
  args: list[Any],
  params: dict[str, Any],
  is_parameter: list[bool],
  known: operands_lib.Operands,
) -> Call | None:
  index, *operands = args
  passed = known.passed(operands)
  # One of them runs, so they have the same numbers of keys.
  branches = [
    dots.inside(b, is_parameter[1:], passed) for b in params["branches"]
  ]
  if all(new.jaxpr is None for new in branches):
    return None
  count = max(new.count for new in branches)
  before = [*dots.key_operand(count), *passed.arrays()]
  dots.use(count)
  jaxprs = tuple(
    dots.with_unused(old, passed) if new.jaxpr is None else new.jaxpr
    for new, old in zip(branches, params["branches"], strict=True)
  )
  params = dict(params, branches=jaxprs)
  return [index, *before, *operands], params, lambda out: out


def _kept(
  body: Any, num_consts: int, is_parameter: Sequence[bool]
) -> list[bool]:
  """Which values of a loop's carry are the same parameter in every trip.

  Args:
    body: the loop's jaxpr, whose first results are the next carry.
    num_consts: how many arguments it has before the carry.
    is_parameter: of each value of the carry, before the loop.
  """
  jaxpr = body.jaxpr
  own = jaxpr.invars[num_consts:]
  return [
    flag and before is after
    for flag, before, after in zip(
      is_parameter, own, jaxpr.outvars, strict=False
    )
  ]


_CARRIED: Final = (
  "it is part of the carry of a loop, which changes in each iteration"
)


def _scan(
  dots: Any,
  args: list[Any],
  params: dict[str, Any],
  is_parameter: list[bool],
  known: operands_lib.Operands,
) -> Call | None:
  num_consts, num_carry = binding_private.scan_sizes(params)
  num_fixed = num_consts + num_carry
  known.leave(args[num_consts:num_fixed], _CARRIED)
  passed = known.passed(args[:num_consts])
  passed += known.sliced(args[num_fixed:], num_fixed, params["length"])
  flags = list(is_parameter)
  carried = flags[num_consts:num_fixed]
  flags[num_consts:num_fixed] = _kept(params["jaxpr"], num_consts, carried)
  has_key = dots.key is not None
  new = dots.inside(
    params["jaxpr"],
    flags,
    passed,
    in_loop=num_fixed,
    has_trip=has_key,
    number=0,
  )
  if new.jaxpr is None:
    return None
  consts, xs = passed.arrays(), passed.arrays(each_trip=True)
  if has_key:
    consts = [_loop_key(dots), *consts]
    xs = [jnp.arange(params["length"], dtype=np.uint32), *xs]
  params = binding_private.extended_scan(
    dict(params, jaxpr=new.jaxpr), consts=len(consts), xs=len(xs)
  )
  args = [*consts, *args[:num_fixed], *xs, *args[num_fixed:]]
  return args, params, lambda out: out


def _while(
  dots: Any,
  args: list[Any],
  params: dict[str, Any],
  is_parameter: list[bool],
  known: operands_lib.Operands,
) -> Call | None:
  num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
  num_consts = num_cond + num_body
  has_key = dots.key is not None
  inside = functools.partial(dots.inside, has_trip=has_key)
  carried = is_parameter[num_consts:]
  carried = _kept(params["body_jaxpr"], num_body, carried)
  known.leave(args[num_consts:], _CARRIED)
  in_condition = known.passed(args[:num_cond])
  in_body = known.passed(args[num_cond:num_consts])
  condition = inside(
    params["cond_jaxpr"],
    [*is_parameter[:num_cond], *carried],
    in_condition,
    in_loop=num_cond,
    number=0,
  )
  body = inside(
    params["body_jaxpr"],
    [*is_parameter[num_cond:num_consts], *carried],
    in_body,
    in_loop=num_body,
    number=condition.count,
    results=has_key,
  )
  if condition.jaxpr is None and body.jaxpr is None:
    return None
  base = [_loop_key(dots)] if has_key else []
  trip = [np.uint32(0)] if has_key else []
  unused = functools.partial(dots.with_unused, has_trip=has_key)
  params = dict(
    params,
    cond_jaxpr=condition.jaxpr
    or unused(params["cond_jaxpr"], in_condition, in_loop=num_cond),
    body_jaxpr=body.jaxpr
    or unused(params["body_jaxpr"], in_body, in_loop=num_body, results=has_key),
  )
  fixed = [*base, *in_condition.arrays(), *args[:num_cond]]
  fixed_in_body = [*base, *in_body.arrays(), *args[num_cond:num_consts]]
  params["cond_nconsts"] = len(fixed)
  params["body_nconsts"] = len(fixed_in_body)
  args = [*fixed, *fixed_in_body, *trip, *args[num_consts:]]
  return args, params, lambda out: out[len(trip) :]


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
  key = keys.fold_in(base, dots.number)
  dots.use(1)
  return key

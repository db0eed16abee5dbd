# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Views of a ragged dot for backends of other packages."""

from __future__ import annotations

import dataclasses
import functools
from typing import Final

import jax
import numpy as np

from jaxplugin.core import decisions, targets
from jaxplugin.dot import problems as dot_problems
from jaxplugin.dot import views
from jaxplugin.plugins import registry
from jaxplugin.ragged import calls, epilogue


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedProblem:
  """The properties of a ragged dot by which `Backend.supports` decides.

  lhs has shape (m, k), rhs (groups, n, k), and the result (m, n).

  Attributes:
    groups, m, n, k: positive sizes. A symbolic size is None.
    lhs, rhs: the operands. At least one has a format.
    dtype: dtype of the result: float32, bfloat16 or float16.
    contracts_blocks: whether rhs is contracted along k, its blocked dimension.
      False in the gradient of lhs: lhs then has shape (m, n), and the result
      (m, k).
    global_scale: "none", "scalar", "group" or "row".
    has_bias: whether a bias of each group is added.
    activation: None, "relu", "gelu", "silu", "swiglu" or "swigluoai".

  Example:
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> side = jp.backends.OperandProblem(
    ...   format=jp.MXFP8, dtype=jp.MXFP8.values_dtype
    ... )
    >>> problem = jp.backends.RaggedProblem(
    ...   groups=4, m=8, n=16, k=32, lhs=side, rhs=side, dtype=np.dtype("f4")
    ... )
    >>> print(problem)
    mxfp8 x mxfp8 -> float32, groups=4 m=8 n=16 k=32
  """

  groups: int | None
  m: int | None
  n: int | None
  k: int | None
  lhs: views.OperandProblem
  rhs: views.OperandProblem
  dtype: np.dtype
  contracts_blocks: bool = True
  global_scale: calls.GlobalScale = "none"
  has_bias: bool = False
  activation: calls.Activation | None = None

  def __str__(self) -> str:
    sizes = ("groups", "m", "n", "k")
    return dot_problems.matmul_text(self, self.dtype, sizes)


class RaggedCall(views.MatmulCall[RaggedProblem]):
  """One ragged dot that `Backend.emit` computes.

  Rows of lhs come in groups, in order. The result is computed in f32 and cast
  once::

    sums[rows of group g] = dot(lhs[rows of group g], rhs[g])
    result = cast(activation(sums * global_scales + bias[g]))

  Rows of no group are zero. Both operands have linear scales. Each global scale
  has shape (), (groups,) or (m, 1), and the bias (groups, columns of the sums).
  A gated activation halves the columns. jaxplugin creates the call.
  """

  @property
  def group_sizes(self) -> jax.Array:
    """i32[groups]: the number of rows of each group."""
    return self._call.group_sizes

  def finish(self, sums: jax.Array) -> jax.Array:
    """Applies scales, bias, activation and cast to f32[m, columns] sums."""
    self._require_sums(sums, (self._call.num_rows, self._call.columns))
    return epilogue.apply(sums, self._call)


def _problem_of(problem: calls.RaggedDotProblem) -> RaggedProblem:
  return RaggedProblem(
    groups=problem.groups,
    m=problem.m,
    n=problem.n,
    k=problem.k,
    lhs=views.operand_problem(problem.lhs),
    rhs=views.operand_problem(problem.rhs),
    dtype=problem.out_dtype,
    contracts_blocks=problem.is_along_blocks,
    global_scale=problem.global_scale,
    has_bias=problem.has_bias,
    activation=problem.activation,
  )


def _emit(
  adapter: registry.Adapter[calls.RaggedDotProblem],
  config: dict[str, decisions.Scalar],
  call: calls.RaggedDotCall,
  problem: calls.RaggedDotProblem,
  target: targets.Target,
) -> jax.Array:
  call = call.in_usual_order()
  call = call.with_sides(functools.partial(views.typed, reads_swizzled=False))
  view = RaggedCall(call, _problem_of(problem), target, config)
  return adapter.emit_array(view, view.dtype, view.shape)


INTERFACE: Final = registry.Interface(
  operation=calls.WHO,
  problem_of=_problem_of,
  emit=_emit,
  refusal=views.refusal,
  is_empty=lambda problem: problem.is_empty,
)

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_dots`: a recipe in the matmuls of existing code."""

from __future__ import annotations

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import leaves, scaled_array
from jaxplugin.core import error_context
from jaxplugin.dot import arguments, backends
from jaxplugin.dot import primitive as dot_primitive
from jaxplugin.jaxext import jax_private
from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.ragged import primitive as ragged_primitive
from jaxplugin.rewriting import calls, operands, patterns, sites, sources
from jaxplugin.rewriting import dots as dots_lib
from jaxplugin.training import quantized_operand, recipes

WHO: Final = sites.WHO

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def quantize_dots(
  fn: Callable[_Parameters, _Result],
  recipe: Any,
  *,
  where: Callable[[sites.Site], Any] | None = None,
  key: jax.Array | None = None,
  params: int | str | Sequence[int | str] = 0,
  fuse_activations: bool = False,
  reduce_dtype: Any = None,
  implementation: str | None = None,
) -> Callable[_Parameters, _Result]:
  """Returns `fn` with the matmuls of its parameters in a recipe's formats.

  Each becomes `jp.dot_general(recipe=recipe, weight=...)` or
  `jp.training.ragged_dot_general`, forward and backward, also inside `jit`,
  `scan` and others. `fn` may be a training step.

  By default, a matmul is quantized if all of these hold:

  * Exactly one operand is a parameter, perhaps in another layout.
  * The weight's contracting size and its other sizes are multiples of the
    recipe's largest block size.
  * No scope around it, and no path of its weight, has the name of a last
    layer, an embedding or a router.
  * Operands and result are f32, bf16 or f16.

  docs/how_to/high_precision_layers.md is the guide.

  Args:
    fn: any callable.
    recipe: a `jp.training.Recipe`; or a format or its name, which rounds all
      operands to nearest.
    where: a function of a `jp.Site` that returns True, False, a recipe or a
      format; None for these rules. Define it once, or `fn` is traced again.
    key: a `jax.random` key for stochastic rounding, a new one in each step.
    params: positions or names of arguments with parameters, perhaps
      `QuantizedOperand`s.
    fuse_activations: whether to quantize norms and activations in f32.
    reduce_dtype: see `dot_general`.
    implementation: see `block_scaled_dot`.

  Returns:
    A function with the signature of `fn`. Call it inside `jit`.

  Raises:
    TypeError: If an argument or an answer of `where` has a wrong type,
      `params` are missing, or a `QuantizedOperand` fits no matmul.
    ValueError: If a name is unknown, or a gradient needs a key.

  Warns:
    jp.NotQuantizedWarning: If no matmul is quantized, or `params` misses one.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> def loss(w, x):
    ...   return jnp.square(x @ w).mean()
    >>> loss_q = jp.quantize_dots(loss, jp.training.MXFP8_RECIPE)
    >>> w, x = jnp.ones((64, 32)), jnp.ones((4, 64))
    >>> jax.jit(jax.grad(loss_q))(w, x).shape
    (64, 32)
    >>> [site.is_taken for site in jp.explain(loss_q, w, x).sites]
    [True]
  """
  error_context.require_function(WHO, fn)
  error_context.require_bool(WHO, "fuse_activations", fuse_activations)
  with error_context.in_function(WHO):
    backends.validate_name(implementation)
    parts_dtype = arguments.parts_dtype(reduce_dtype)
  if where is not None and not callable(where):
    raise TypeError(
      f"{WHO}: where must be a function of a site or None, got"
      f" {error_context.shown(where)}; pass where=lambda site: ..., which"
      " returns True, False or a recipe"
    )
  transform = sites.Transform(
    recipe=recipes.resolve(WHO, "recipe", recipe),
    where=where,
    implementation=implementation,
    key_type=None if key is None else _key_type(key),
    reduce_dtype=parts_dtype,
    fuse_activations=fuse_activations,
  )
  positions = _positions(params)

  @functools.wraps(fn)
  def quantized(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> Any:
    quantized_already = operands.Operands()
    plain_args, plain_kwargs = list(args), dict(kwargs)
    for p in positions:
      into: Any = plain_kwargs if isinstance(p, str) else plain_args
      x = into[p] = _without_numpy(_argument(p, args, kwargs))
      is_operand = quantized_operand.is_operand
      if any(map(is_operand, jax.tree.leaves(x, is_leaf=is_operand))):
        into[p] = quantized_already.arrays(x, f"argument {p!r}")

    seen = sites.Seen(is_default=where is None)

    def watcher(args: Sequence[Any], kwargs: dict[str, Any]) -> _Watcher:
      base = None if key is None else (lambda count: key)
      origins = sources.Origins()
      given: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
      for place, tree in given:
        argument = None if place in positions else place
        for leaf in leaves.of(tree)[0]:
          origin = sources.Origin(path=leaf.path, argument=argument)
          origins.add(leaf.array, origin)
      dots = dots_lib.Dots(transform, key=base, known=quantized_already)
      return _Watcher(dots, origins, seen)

    with _traced_for(transform), error_context.explaining_nnx(WHO, _NNX):
      result = binding_private.call_watched(
        fn, watcher, *plain_args, **plain_kwargs
      )
    quantized_already.require_taken()
    if seen.is_quantized:
      binding_private.note_quantized()
    if text := sites.warning_of(seen):
      warnings.warn(text, error_context.NotQuantizedWarning, stacklevel=2)
    return result

  return quantized


_NNX: Final = (
  "Apply nnx.jit last: nnx.jit(quantize_dots(step, recipe)), not inside step."
)

# JAX's caches of traces have the transform in their keys.
_traced_for: Final = jax.make_user_context(default_value=None)


def _key_type(key: Any) -> Any:
  try:
    return jax.typeof(jax.random.fold_in(key, 0))
  except (TypeError, ValueError) as error:
    raise TypeError(
      f"{WHO}: key must be one key of jax.random, got"
      f" {error_context.shown(key)}; pass jax.random.key(seed)"
    ) from error


def _positions(params: Any) -> tuple[int | str, ...]:
  positions: tuple[Any, ...] = (params,)
  if isinstance(params, Iterable) and not (
    isinstance(params, str) or hasattr(params, "shape")
  ):
    positions = tuple(params)
  for p in positions:
    is_position = error_context.is_integer(p) and p >= 0
    if not is_position and not isinstance(p, str):
      raise TypeError(
        f"{WHO}: params must be positions of arguments from 0, or their names,"
        f" got {error_context.shown(params)}; pass params=0 if the first"
        " argument has the parameters"
      )
  return positions


def _argument(
  position: int | str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
  if not isinstance(position, str):
    if position < len(args):
      return args[position]
  elif position in kwargs:
    return kwargs[position]
  raise TypeError(
    f"{WHO}: params must name arguments of the call, got"
    f" {error_context.shown(position)} for a call with {len(args)} positional"
    f" arguments and keywords {sorted(kwargs)}; change params= to match the"
    " call"
  )


def _without_numpy(params: Any) -> Any:
  """Returns the parameters with NumPy's arrays of floats as JAX arrays.

  Outside of jit, each function of JAX converts a NumPy array to another array,
  which no matmul would recognize as a parameter.
  """

  def is_numpy(x: Any) -> bool:
    return isinstance(x, np.ndarray) and jnp.issubdtype(x.dtype, np.floating)

  if not any(map(is_numpy, jax.tree.leaves(params))):
    return params
  return jax.tree.map(
    lambda x: scaled_array.as_array(WHO, "params", x) if is_numpy(x) else x,
    params,
  )


# Matmuls of this package that code calls.
_OWN: Final = frozenset(
  {dot_primitive.block_scaled_dot_p, ragged_primitive.ragged_dot_p}
)
_OWN_NAMES: Final = frozenset(primitive.name for primitive in _OWN)


class _Watcher:
  """A `binding_private.Watcher` that replaces matmuls."""

  primitives: Final = (
    sites.PRODUCTS
    | sources.LAYOUTS
    | frozenset(calls.FOLLOWED)
    | calls.CUSTOM_RULES
    | {"shard_map"}
    | _OWN
  )

  def __init__(
    self,
    dots: dots_lib.Dots,
    origins: sources.Origins,
    seen: sites.Seen,
    *,
    is_rule: bool = False,
  ):
    """Args:
    dots: decides about matmuls.
    origins: origins of values, also of the functions around this one.
    seen: records all matmuls.
    is_rule: whether no operand counts as a parameter, as in a `bwd`.
    """
    self._dots = dots
    self._is_rule = is_rule
    self._origins = origins
    self._seen = seen
    # For functions inside that differentiate, by their traces.
    self._inner: weakref.WeakKeyDictionary[Any, dots_lib.Dots] = (
      weakref.WeakKeyDictionary()
    )

  def bind(
    self,
    operation: binding_private.BoundOperation,
    position: binding_private.Position,
  ) -> Any:
    args = operation.args
    if operation.name in sources.LAYOUTS:
      out = operation.bind()
      if position.is_outer:
        results = operation.results_of(out)
        self._origins.note(operation, results)
        self._dots.follow(operation, results)
      return out
    patterns.record_own(operation)
    if operation.primitive in _OWN:
      self.note_quantized()
      return operation.bind()
    dots = self._dots_at(position)
    operation = dots.with_streams(operation)
    args = operation.args
    origins: list[sources.Origin | None] = [None] * len(args)
    if not self._is_rule:
      origins = self._origins.of_all(args)
    if not position.is_outer and not any(o and o.is_parameter for o in origins):
      found = sources.parameters_among(args, position.trace)
      origins = [new or old for new, old in zip(found, origins, strict=True)]
    start = len(dots.sites)
    with sites.taking() as taken:
      out = self._bind(operation, dots, origins)
    left = sites.without_taken(dots.sites[start:], taken)
    if len(left) < len(dots.sites[start:]):
      self.note_quantized()
    dots.sites[start:] = left
    sites.note_all_taken(taken)
    results = operation.results_of(out)
    if _has_rule(operation):
      dots.note_rule(results)
    if operation.params.get("name") == "add":  # `jnp.add`, of a bias
      dots.follow(operation, results)
    if operation.params.get("name") == "multiply":  # by the weight of a norm
      dots.note_rows(args)
    decided = dots.sites[start:]
    is_differentiated = binding_private.is_differentiated
    if not position.is_outer or any(map(is_differentiated, args)):
      decided = [site.in_gradient() for site in decided]
    self._seen.sites += decided
    sites.record(decided)
    if calls.any_contains(operation, _OWN_NAMES):
      self.note_quantized()
    if position.is_outer:
      self._origins.note(operation, results)
    return out

  def _bind(
    self,
    operation: binding_private.BoundOperation,
    dots: dots_lib.Dots,
    origins: list[sources.Origin | None],
  ) -> Any:
    functions = operation.params.get("subfuns")
    if functions is None:
      out = dots.replaced(operation, origins)
      return operation.bind() if out is None else out
    self._dots.known.refuse_inside(operation)
    if jax_private.is_own(functions[0]):
      patterns.record_own_function(functions[0], operation.args)
      return operation.bind()
    dots = dots.for_functions(operation.name)
    functions = tuple(
      binding_private.wrapped(
        binding_private.call_watched,
        f,
        self._maker(operation, dots, i, origins),
      )
      for i, f in enumerate(functions)
    )
    params = dict(operation.params, subfuns=functions)
    return dataclasses.replace(operation, params=params).bind()

  def note_quantized(self) -> None:
    self._seen.has_quantized = True

  def _dots_at(self, position: binding_private.Position) -> dots_lib.Dots:
    if position.is_outer:
      return self._dots
    if position.trace not in self._inner:
      self._inner[position.trace] = self._dots.inner()
    return self._inner[position.trace]

  def _maker(
    self,
    operation: binding_private.BoundOperation,
    dots: dots_lib.Dots,
    index: int,
    origins: list[sources.Origin | None],
  ) -> Callable[[Sequence[Any], dict[str, Any]], _Watcher]:
    """Returns a maker of the watcher of a function that an operation calls."""
    is_rule = calls.is_rule_of_tangents(operation, index)
    origins = [] if is_rule else origins
    args = [] if is_rule else operation.args
    outside = patterns.find_outside(operation.name, args)
    scopes, operation = sites.scope_names(), operation.of_types()

    def make(args: Sequence[Any], kwargs: dict[str, Any]) -> _Watcher:
      own = calls.own_args(operation, index, args)
      # A parameter that the function returns is a parameter outside of it.
      for x, origin in zip(own, origins, strict=False):
        self._origins.add(x, origin)
      inside = dots.nested(scopes, operation, index)
      inside.outside.put_all(own, outside)
      return _Watcher(inside, self._origins, self._seen, is_rule=is_rule)

    return make


def _has_rule(operation: binding_private.BoundOperation) -> bool:
  """Returns whether a function of the code has a custom derivative.

  If JAX differentiates the code as it runs, it replaces such a function inside
  of a jitted or checkpointed one by its derivative.
  """
  if operation.name not in calls.CUSTOM_RULES:
    return calls.any_contains(operation, calls.CUSTOM_RULES)
  return not any(
    jax_private.is_own(f) or jax_private.is_relu(f)
    for f in (operation.params.get("subfuns") or ())[:1]
  )

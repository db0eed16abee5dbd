# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_dots`: a recipe's products in code that is not to change."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import ParamSpec
from typing import TypeVar

import jax

from jaxplugin.core import speaking
from jaxplugin.dot import backends
from jaxplugin.dot import rules
from jaxplugin.dropin.dots import flow
from jaxplugin.dropin.dots import operands
from jaxplugin.dropin.dots import rewriting
from jaxplugin.dropin.dots import sites
from jaxplugin.dropin.dots import transforms
from jaxplugin.jaxext import program
from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.jaxext.tracing import calls
from jaxplugin.jaxext.tracing import provenance_private
from jaxplugin.training import recipes

WHO: Final = transforms.WHO

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def quantize_dots(
  fn: Callable[_Parameters, _Result],
  recipe: Any,
  *,
  where: Callable[[sites.Site], Any] | None = None,
  key: jax.Array | None = None,
  params: int | str | Sequence[int | str] = 0,
  reduce_dtype: Any = None,
  implementation: str | None = None,
) -> Callable[_Parameters, _Result]:
  """Trains or runs any model in a recipe's formats, without touching it.

    recipe = jp.training.MXFP8_RECIPE
    step = jax.jit(jax.value_and_grad(jp.quantize_dots(loss, recipe)))
    value, gradients = step(params, batch)

  While the function returned runs, products of a parameter and of activations
  that `fn` comes to (`lax.dot_general`, and what is made of it: `@`, einsum,
  layers of flax and others) are `jp.dot_general(recipe=recipe, weight=...)`,
  forward and backward, however deep inside `jit`, `scan`, `while_loop`, `cond`,
  `checkpoint`, `shard_map`, `vmap`, `custom_jvp` and `custom_vjp` functions.
  It is as if each were written so: a derivative that `fn` takes by itself
  (`fn` may be a whole training step) is that of the recipe, and has the same
  bits as one taken outside. All else is as it was: names, shardings, donation,
  static arguments, effects, lines of source, types of results.

  Which products are taken: all of these must hold, unless `where` decides.

  * One operand is a parameter, and the other one is none. A parameter is a
    JAX array in the arguments that `params` names, also if it was reshaped,
    transposed, converted, sliced, concatenated or gathered from its shards, by
    a `scan` too. Where a jitted function (or the body of a loop) in `fn` takes
    a derivative by itself, a parameter is in there what it differentiates with
    respect to; if no operand is, an argument of that function. So products of
    two activations, as in attention, are left; and where such a function
    differentiates with respect to weights and inputs alike, so are those.
  * The weight's sizes, that which is contracted and that of its remaining
    dimensions, are multiples of the recipe's largest block. (The number of rows
    may be any: it is padded.)
  * No scope around it is named like a last layer. Such a name has one of the
    words `head`, `logit...`, `unembed...`, `classifier` or `predictions`,
    between "_", "." or "/", as in "lm_head"; or it is "output", "output_proj",
    "score" or "LMHead_0", outside of all blocks. The rule is
    `core/parameter_names.py`. Layers without a name are not last layers: say
    so by `where`.

  Products that no recipe can serve are always left: operands or results that
  are not f32, bf16 or f16, results of a weak type, an algorithm of
  multiplication asked for by `precision`. `jp.explain` lists what was taken and
  what was left, and why:

    print(jp.explain(jp.quantize_dots(loss, recipe), params, batch))

  Keys: a recipe that rounds gradients stochastically needs `key` where a
  gradient is taken. Every product folds its number into it, in the order in
  which they are traced (branches of a `cond` begin with the same number); in a
  `scan` or `while_loop` each trip has a key of its own. `vmap` has one key for
  all examples, and a `shard_map` one for all devices, whose parts are rounded
  by equal bits. Equal keys give equal bits, also under `jax.checkpoint`, which
  computes again with the same key. Give every step another one:

    def step(params, batch, i):
      q = jp.quantize_dots(loss, recipe, key=jax.random.fold_in(base, i))
      return jax.value_and_grad(q)(params, batch)

  Functions are traced again for each other `recipe`, `where` and
  `implementation`, by equality: define `where` once, not in each step. Called
  outside of `jit`, `fn` runs one operation at a time, which is slow; and nnx
  modules are not to be changed there: `nnx.jit(jp.quantize_dots(step, ...))`.

  Not entered: what `accelerate` does not enter, and functions that were
  differentiated before (the one from `jax.vjp`, say). Of `custom_vjp` functions
  `fwd` is as the function; in a `bwd`, and in the rule of a `custom_jvp`
  function, nothing counts as a parameter, so that their products are left
  unless `where` takes them (those of tangents must be left: they would not be
  linear). Products in these functions take no key. Under `vmap` inside of a
  jitted function that takes no derivative, a product is seen with its batch
  dimension, over which its scales may then go. Under any other `vmap` each
  example is quantized by itself: of a layer that takes one row (equinox'), a
  weight's gradient is a product for each row. Have the function that maps
  jitted inside: `jp.quantize_dots(eqx.filter_jit(loss), recipe)`.

  A weight may come quantized once, as `jp.quantize_operand` returns it: `fn`
  gets its array, and the product that this comes to, as it is, takes the
  copies: the bits of quantizing anew, and the gradient goes to the array
  (`jp.training.with_primals`). It has to come to one, reshaped by nothing: in
  `fn`, in a derivative that it takes, and inside of `jit`, `scan`, `cond`,
  `checkpoint` and `while_loop`. Weights of all layers, which a `scan` goes over
  by their first dimension, are quantized by
  `jax.lax.map(lambda w: jp.quantize_operand(w, recipe), stack)`. Products in
  functions of `custom_jvp`, `custom_vjp` and `shard_map` cannot take it, those
  of a derivative inside of a jitted function or loop neither, and not what is
  another array in each trip of a loop.

  Args:
    fn: any callable; it gets its arguments as they are given.
    recipe: a `jp.training.Recipe`; or a format or its name, which is then that
      of weights, activations and gradients, rounded to nearest, as in
      `dot_general`: "nvfp4" is not `jp.training.NVFP4_RECIPE`.
    where: None, or a function of a site, with its `name`, shapes, dtypes,
      `dimension_numbers`, `source` and which operand is a parameter
      (`jp.Site`). It returns True, False, or a recipe (or format) for
      this site. `site.is_default` is the answer that it replaces:
      `where=lambda site: site.is_default and "Block_0" not in site.name`.
    key: a `jax.random` key; None where none is needed.
    params: positions of arguments, or names of those given by name, that hold
      parameters. The first one by default: a tree of them, an nnx module, or
      the state of a training step.
    reduce_dtype: of sums over devices, as in `dot_general`; None is the dtype
      of each product, as it is without a recipe.
    implementation: as in `block_scaled_dot`.

  Returns:
    A function with the signature of `fn`.

  Raises:
    TypeError: `fn` cannot be called; `recipe`, `where`, `key` or `params` has
      another type; and from the function returned, `where` returns none of the
      above, an argument that `params` names is not given, or a
      `QuantizedOperand` comes to no product, or to one that takes others.
    ValueError: `implementation` or a format's name is unknown; and from the
      function returned what `jp.dot_general` raises, as of a recipe that needs
      a key and has none.
  """
  speaking.require_function(WHO, fn)
  with speaking.speaking_for(WHO):
    backends.validate_name(implementation)
    parts_dtype = rules.parts_dtype(reduce_dtype)
  transform = transforms.Transform(
    recipe=recipes.resolve(WHO, "recipe", recipe),
    where=_validated_where(where),
    implementation=implementation,
    key_type=None if key is None else _key_type(key),
    reduce_dtype=parts_dtype,
  )
  positions = _positions(params)

  def make(args: Sequence[Any], kwargs: dict[str, Any]) -> _Watcher:
    base = None if key is None else (lambda count: key)
    given = [_argument(p, args, kwargs) for p in positions]
    dots = rewriting.Dots(transform, key=base)
    parameters = flow.Parameters()
    for x in jax.tree.leaves(given):
      parameters.add(x)
    return _Watcher(dots, parameters, sites.Seen())

  @functools.wraps(fn)
  def quantized(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> Any:
    quantized_already = operands.Operands()
    plain_args, plain_kwargs = list(args), dict(kwargs)
    for p in positions:
      x = _argument(p, args, kwargs)
      if any(map(operands.is_operand, _leaves(x))):
        into: Any = plain_kwargs if isinstance(p, str) else plain_args
        into[p] = quantized_already.arrays(x, f"argument {p!r}")

    watchers = []

    def watcher(args: Sequence[Any], kwargs: dict[str, Any]) -> _Watcher:
      made = make(args, kwargs)
      made.operands = quantized_already
      watchers.append(made)
      return made

    with _traced_for(transform), speaking.explaining_nnx(WHO, _NNX):
      result = binding_private.call_watched(
        fn, watcher, *plain_args, **plain_kwargs
      )
    quantized_already.require_taken()
    text = watchers[0].seen.warning()
    if text:
      warnings.warn(
        f"{WHO}: {text}", speaking.NotQuantizedWarning, stacklevel=2
      )
    return result

  return quantized


_NNX: Final = (
  "Apply nnx.jit last: nnx.jit(quantize_dots(step, recipe)), not inside step."
)

# What a function is traced to depends on what is asked for.
_traced_for: Final = jax.make_user_context(default_value=None)


def _validated_where(where: Any) -> Any:
  if where is not None and not callable(where):
    raise TypeError(
      f"{WHO}: where must be a function of a site or None, got"
      f" {speaking.shown(where)}"
    )
  return where


def _key_type(key: Any) -> Any:
  try:
    return jax.typeof(jax.random.fold_in(key, 0))
  except (TypeError, ValueError) as error:
    raise TypeError(
      f"{WHO}: key must be one key of jax.random, got {speaking.shown(key)};"
      " pass jax.random.key(seed)"
    ) from error


def _positions(params: Any) -> tuple[int | str, ...]:
  positions: tuple[Any, ...] = (params,)
  if isinstance(params, Iterable) and not (
    isinstance(params, str) or hasattr(params, "shape")
  ):
    positions = tuple(params)
  for p in positions:
    is_position = isinstance(p, int) and not isinstance(p, bool) and p >= 0
    if not is_position and not isinstance(p, str):
      raise TypeError(
        f"{WHO}: params must be positions of arguments from 0, or their names,"
        f" got {speaking.shown(params)}"
      )
  return positions


def _argument(
  position: int | str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
  if isinstance(position, int):
    if position < len(args):
      return args[position]
  elif position in kwargs:
    return kwargs[position]
  raise TypeError(
    f"{WHO}: params must name arguments of the call, got"
    f" {speaking.shown(position)} for a call with {len(args)} positional"
    f" arguments and keywords {sorted(kwargs)}; change params= to match the"
    " call"
  )


def _leaves(tree: Any) -> list[Any]:
  return jax.tree.leaves(tree, is_leaf=operands.is_operand)


class _Watcher:
  """A `binding_private.Watcher` that replaces products."""

  def __init__(
    self,
    dots: rewriting.Dots,
    parameters: flow.Parameters,
    seen: sites.Seen,
    *,
    is_rule: bool = False,
  ):
    """Args:
    dots: decides.
    parameters: those that are known, in the functions around this one too.
    seen: what is noted of all products.
    is_rule: whether no operand counts as a parameter, as in a `bwd`.
    """
    self._dots = dots
    self._is_rule = is_rule
    self.operands = operands.Operands()
    self._parameters = parameters
    self.seen = seen
    # Of functions inside that take a derivative.
    self._inner: weakref.WeakKeyDictionary[Any, rewriting.Dots] = (
      weakref.WeakKeyDictionary()
    )

  def bind(
    self,
    bind: Callable[..., Any],
    primitive: Any,
    args: Sequence[Any],
    params: dict[str, Any],
    position: binding_private.Position,
  ) -> Any:
    if flow.is_layout(primitive):
      out = bind(*args, **params)
      if position.is_outer:
        self._parameters.note(primitive, args, params, out)
        self.operands.follow(primitive, args, out)
      return out
    dots = self._dots_at(position)
    known = [not self._is_rule and x in self._parameters for x in args]
    if not position.is_outer and not any(known):
      known = flow.parameters_among(args, position.trace)
    start = len(dots.sites)
    out = self._bind(bind, primitive, args, params, dots, known)
    self.seen.sites += dots.sites[start:]
    sites.record(dots.sites[start:])
    if "subfuns" not in params:
      jaxprs = program.jaxprs_of(tuple(params.values()))
      self.seen.is_decided |= any(map(rewriting.was_decided, jaxprs))
    if position.is_outer:
      self._parameters.note(primitive, args, params, out)
    return out

  def _bind(
    self,
    bind: Callable[..., Any],
    primitive: Any,
    args: Sequence[Any],
    params: dict[str, Any],
    dots: rewriting.Dots,
    is_parameter: list[bool],
  ) -> Any:
    if primitive.name in sites.PRODUCTS:
      out = dots.product(primitive, args, params, is_parameter, self.operands)
      return bind(*args, **params) if out is None else out
    if "subfuns" in params:
      self.operands.refuse_inside(primitive, args)
      functions = params["subfuns"]
      if not provenance_private.is_own_function(functions[0]):
        dots = dots.for_functions(primitive.name)
        functions = tuple(
          binding_private.watch_wrapped(
            f, self._maker(primitive, dots, i, is_parameter)
          )
          for i, f in enumerate(functions)
        )
      return bind(*args, **dict(params, subfuns=functions))
    called = dots.call(primitive, args, params, is_parameter, self.operands)
    if called is None:
      return bind(*args, **params)
    new_args, new_params, results = called
    return results(bind(*new_args, **new_params))

  def _dots_at(self, position: binding_private.Position) -> rewriting.Dots:
    if position.is_outer:
      return self._dots
    if position.trace not in self._inner:
      self._inner[position.trace] = self._dots.inner()
    return self._inner[position.trace]

  def _maker(
    self,
    primitive: Any,
    dots: rewriting.Dots,
    index: int,
    is_parameter: list[bool],
  ) -> Callable[[Sequence[Any], dict[str, Any]], _Watcher]:
    """For one of the functions that an operation calls with its operands."""
    is_rule = calls.is_rule_of_tangents(primitive.name, index)
    is_parameter = [] if is_rule else is_parameter
    names = tuple(sites.scope_names())

    def make(args: Sequence[Any], kwargs: dict[str, Any]) -> _Watcher:
      own = calls.own_args(primitive.name, index, args, len(is_parameter))
      # Parameters stay parameters inside, and so do the function's results.
      for x, flag in zip(own, is_parameter, strict=False):
        if flag:
          self._parameters.add(x)
      inside = dots.nested(names, primitive.name)
      return _Watcher(inside, self._parameters, self.seen, is_rule=is_rule)

    return make

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Matmuls that `quantize_dots` traces, and the default decision."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

import jax
import numpy as np
from jax.extend import core as extend_core

from jaxplugin.core import formats, parameter_names
from jaxplugin.dot import arguments, sides
from jaxplugin.jaxext import jax_private, program
from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.rewriting import calls, ragged_dots, sources
from jaxplugin.training import (
  activation_gradients,
  gradients,
  products,
  quantized_operand,
  ragged,
  recipes,
)
from jaxplugin.training import api as training

WHO: Final = "quantize_dots"

DOT: Final = "dot_general"
RAGGED: Final = ragged_dots.NAME
_CONVOLUTION: Final = "conv_general_dilated"
_NEITHER: Final = "neither operand is a parameter"
PRODUCTS: Final = frozenset({DOT, RAGGED, _CONVOLUTION})
# The matmuls that can be quantized, and the parameter with their dimensions.
NUMBERS: Final = {
  DOT: "dimension_numbers",
  RAGGED: "ragged_dot_dimension_numbers",
}

# Begins the note of a `Chain` that is fused unless it is differentiated.
NOT_IN_TRAINING: Final = "not in training, because "


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain(program.Place):
  """A norm or activation that computes the activations of a matmul.

  The place is that of the matmul. Trips of a loop do not count if the body of
  the loop takes a derivative.

  Attributes:
    name: such as "rms_norm with weight".
    dot: dtypes and shapes of the matmul.
    is_fused: whether the matmul quantizes the f32 result, which kernels may
      compute.
    note: why it is not fused; of a fused one, when it is not; or "".
  """

  name: str
  dot: str
  is_fused: bool = False
  note: str = ""

  @property
  def outcome(self) -> str:
    """One line: whether it is fused, and the note."""
    if not self.is_fused:
      return f"separate: {self.note}"
    return f"fused; {self.note}" if self.note else "fused"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedChain:
  """A chain in a function that is being traced.

  Attributes:
    chain: the chain; its place has no control flow yet.
    variable: the variable of the activations in a jaxpr, or None.
    flow: how often the matmul runs.
  """

  chain: Chain
  variable: Any = None
  flow: program.ControlFlow = dataclasses.field(
    default_factory=program.ControlFlow
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
  """One matmul in a function, as `where` of `quantize_dots` receives it.

  Attributes:
    operation: JAX's name of the operation: "dot_general", "ragged_dot_general"
      or "conv_general_dilated", which always stays.
    name: names of the scopes around it, such as "Block_0/Dense_1". linen opens
      a scope for each module, and `jax.named_scope` opens others. Outside of
      all scopes, as in nnx, the same as `parameter`.
    parameter: path of the weight in the argument, such as "lm_head/kernel"; ""
      if not known.
    source: file, line and function of the call; "" if not known.
    lhs_shape, rhs_shape: sizes; without the mapped dimension of a `vmap`.
    lhs_dtype, rhs_dtype, result_dtype: element types.
    dimension_numbers: those of `lax.dot_general`; of a convolution without its
      window. The groups of a ragged dot are a batch dimension of rhs.
    lhs_is_parameter, rhs_is_parameter: whether the operand is a parameter,
      possibly reshaped, transposed, converted, sliced or gathered.
    reason: why the default leaves it unquantized; "" if it does not.
    recipe: the recipe in use, after `where`; None if it stays unquantized.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> sites = []
    >>> f = jp.quantize_dots(
    ...   lambda w, x: x @ w, "mxfp8",
    ...   where=lambda site: sites.append(site) or site.is_default)
    >>> y = f(jnp.ones((64, 32)), jnp.ones((4, 64)))
    >>> print(sites[0].description, sites[0].weight)
    float32[4, 64] x float32[64, 32] -> float32 rhs
  """

  operation: str = "dot_general"
  name: str
  parameter: str = ""
  source: str
  lhs_shape: tuple[Any, ...]
  rhs_shape: tuple[Any, ...]
  lhs_dtype: np.dtype
  rhs_dtype: np.dtype
  result_dtype: np.dtype
  dimension_numbers: sides.DimensionNumbers
  lhs_is_parameter: bool
  rhs_is_parameter: bool
  reason: str = ""
  recipe: Any = None

  @property
  def is_default(self) -> bool:
    """Whether the default quantizes it."""
    return not self.reason

  @property
  def weight(self) -> Literal["lhs", "rhs"] | None:
    """The operand that is a parameter: "lhs", "rhs" or None (both, neither)."""
    if self.lhs_is_parameter == self.rhs_is_parameter:
      return None
    return "lhs" if self.lhs_is_parameter else "rhs"

  @property
  def description(self) -> str:
    """Dtypes and shapes: "bfloat16[8, 64] x float32[64, 32] -> bfloat16"."""
    lhs, rhs = (
      f"{dtype.name}[{', '.join(map(str, shape))}]"
      for dtype, shape in (
        (self.lhs_dtype, self.lhs_shape),
        (self.rhs_dtype, self.rhs_shape),
      )
    )
    text = f"{lhs} x {rhs} -> {self.result_dtype.name}"
    return text if self.operation == DOT else f"{self.operation} {text}"

  def sizes(self) -> tuple[Any, Any]:
    """Returns the weight's contracting size, and its other sizes' product.

    The gradient of the activations contracts the other dimensions.
    """
    i = 0 if self.weight == "lhs" else 1
    shape = (self.lhs_shape, self.rhs_shape)[i]
    contracting, batch = (pair[i] for pair in self.dimension_numbers)
    free = sides.free_dims(len(shape), contracting, batch)
    return (
      math.prod(shape[d] for d in contracting),
      math.prod(shape[d] for d in free),
    )


def make(
  operation: binding_private.BoundOperation,
  result: Any,
  origins: Sequence[sources.Origin | None],
  around: Surroundings,
) -> Site:
  """Returns the site of an operation.

  Args:
    operation: one of `PRODUCTS`.
    result: type of the result.
    origins: the origin of each operand, or None.
    around: of the function that is traced.
  """
  lhs, rhs = (
    x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
    for x in operation.args[:2]
  )
  paths = [o.path for o in origins[:2] if o is not None and o.is_parameter]
  parameter = next(filter(None, paths), "")
  return Site(
    operation=operation.name,
    name="/".join([*around.scopes, *scope_names()]) or parameter,
    parameter=parameter,
    source=around.source or jax_private.user_frame(),
    lhs_shape=tuple(lhs.shape),
    rhs_shape=tuple(rhs.shape),
    lhs_dtype=lhs.dtype,
    rhs_dtype=rhs.dtype,
    result_dtype=result.dtype,
    dimension_numbers=_dimension_numbers(operation, lhs, rhs),
    lhs_is_parameter=origins[0] is not None and origins[0].is_parameter,
    rhs_is_parameter=origins[1] is not None and origins[1].is_parameter,
  )


def input_of(origins: Sequence[sources.Origin | None]) -> sources.Origin | None:
  """Returns the origin of the only operand that `params=` does not name.

  Args:
    origins: the origin of each operand, or None.
  """
  found = [o for o in origins[:2] if o is not None and not o.is_parameter]
  return found[0] if len(found) == 1 else None


def _dimension_numbers(
  operation: binding_private.BoundOperation, lhs: Any, rhs: Any
) -> sides.DimensionNumbers:
  if operation.name == _CONVOLUTION:
    numbers = operation.params["dimension_numbers"]
    return ((numbers.lhs_spec[1],), (numbers.rhs_spec[1],)), ((), ())
  numbers = operation.params[NUMBERS[operation.name]]
  groups: sides.Dims = ()
  if operation.name == RAGGED:
    groups = tuple(map(int, numbers.rhs_group_dimensions))
    numbers = numbers.dot_dimension_numbers
  contracting, (lhs_batch, rhs_batch) = arguments.canonical_dimension_numbers(
    numbers, lhs.ndim, rhs.ndim
  )
  return contracting, (lhs_batch, (*rhs_batch, *groups))


def scope_names() -> list[str]:
  """Returns names of the scopes around the operation, outermost first."""
  found: list[str] = []
  after_transform = False
  for name in jax_private.scopes(None):
    # A transformation repeats the name of the scope around it.
    if not name.is_transform and not (
      after_transform and found[-1:] == [name.text]
    ):
      found.append(name.text)
    after_transform = name.is_transform
  return found


@dataclasses.dataclass(frozen=True)
class Surroundings:
  """The scopes around a function that is traced, and the line of its call.

  Attributes:
    scopes: names of the scopes, outermost first.
    source: the line if the function is JAX's, otherwise "".
  """

  scopes: tuple[str, ...] = ()
  source: str = ""

  def at_call(self, jaxpr: Any) -> Surroundings:
    """Returns these with the line of the operation if it calls JAX's code."""
    is_closed = isinstance(jaxpr, extend_core.ClosedJaxpr)
    if self.source or not is_closed or not jax_private.is_of_jax(jaxpr):
      return self
    return dataclasses.replace(self, source=jax_private.user_frame())

  def inside(self, scopes: Sequence[str]) -> Surroundings:
    """Returns those of a function that an operation in scopes calls.

    JAX traces such a function without the scopes.
    """
    return dataclasses.replace(self, scopes=(*self.scopes, *scopes))

  def unless_open(self, scopes: list[str]) -> Surroundings:
    """Returns `inside(scopes)` unless these scopes are still open."""
    return self if scope_names() == scopes else self.inside(scopes)


def scope_of(site: Site) -> contextlib.AbstractContextManager[None] | None:
  """Returns a scope that names a site's weight; None inside of a scope."""
  is_outside = site.name and site.name == site.parameter
  return jax.named_scope(site.name) if is_outside else None


def impossible(
  site: Site,
  operation: binding_private.BoundOperation,
  result: Any,
  implementation: str | None,
) -> str:
  """Returns why no recipe supports a site; "" if recipes do.

  Args:
    site, operation: the site, and its operation.
    result: type of the result.
    implementation: see `quantize_dots`.
  """
  params = operation.params
  if site.operation == _CONVOLUTION:
    return "it is a convolution, which no recipe supports"
  if site.operation == RAGGED:
    if reason := ragged_dots.refusal(operation, implementation):
      return reason
    if site.weight == "lhs":
      return "lhs is the parameter of a ragged dot, whose weights are rhs"
  for name, dtype in (("lhs", site.lhs_dtype), ("rhs", site.rhs_dtype)):
    if dtype not in formats.FLOAT_DTYPES:
      return f"{name} is {dtype.name}, not float32, bfloat16 or float16"
  reason = calls.unsupported(site.result_dtype, params["precision"])
  if reason:
    return reason
  if result.weak_type:
    return "the result is weakly typed"
  if not all(site.dimension_numbers[0]):
    return "it has no contracting dimension"
  if getattr(getattr(params["out_sharding"], "spec", None), "unreduced", None):
    return "out_sharding has unreduced axes"
  return ""


def left_by_default(
  site: Site,
  origin: sources.Origin | None,
  used: Sequence[formats.BlockFormat],
  unclear: str,
) -> str:
  """Returns why the default leaves a site unquantized; "" if it does not.

  Args:
    site: the site.
    origin: see `input_of`.
    used: the recipe's formats.
    unclear: why it is not clear which operand is a parameter, or "".
  """
  if unclear and site.weight is None:
    return unclear
  if site.weight is None:
    if site.lhs_is_parameter:
      return "both operands are parameters"
    if origin is not None:
      return (
        f"{_NEITHER}, as in attention; one is an array of argument"
        f" {origin.argument!r}: pass params={origin.argument!r} if that is a"
        " parameter"
      )
    return (
      f"{_NEITHER}, as in attention (a value computed from a parameter does not"
      " count, and params= names the arguments that are parameters)"
    )
  for name in (site.name, site.parameter):
    if reason := parameter_names.layer_to_leave(name):
      return reason
  for what, size in zip(("contracted", "other"), site.sizes(), strict=True):
    if not isinstance(size, int):
      return f"the weight's {what} size is symbolic, {size}"
    if size == 0 or not all(format.fits(size) for format in used):
      block_size = max(format.block_size for format in used)
      return (
        f"the weight's {what} size, {size}, is not a multiple of the block"
        f" size, {block_size}"
      )
  return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transform:
  """Arguments of `quantize_dots`, as a key of caches.

  Attributes:
    recipe: the default recipe.
    where: see `quantize_dots`; None is the default.
    implementation, reduce_dtype: see `dot_general`.
    key_type: type of the base key; None if there is no key.
    fuse_activations: see `quantize_dots`.
  """

  recipe: recipes.Recipe
  where: Callable[[Site], Any] | None
  implementation: str | None
  key_type: Any
  reduce_dtype: np.dtype | None = None
  fuse_activations: bool = False

  def decide(
    self, site: Site, origin: sources.Origin | None, unclear: str
  ) -> tuple[Any, str]:
    """Returns the recipe of a supported site, or None and a reason.

    Args:
      site, origin, unclear: see `left_by_default`.
    """
    reason = left_by_default(site, origin, self.recipe.formats, unclear)
    if self.where is None:
      return (None, reason) if reason else (self.recipe, "")
    answer = self.where(dataclasses.replace(site, reason=reason))
    if isinstance(answer, (bool, np.bool_)):
      return (
        (self.recipe, "")
        if answer
        else (None, reason or "where returned False")
      )
    if answer is None:
      raise TypeError(
        f"{WHO}: where must return True, False or a recipe, got None for"
        f" {site.name or 'a site'} at {site.source or 'an unknown line'};"
        " return False to leave a matmul unquantized"
      )
    return recipes.resolve(WHO, "the result of where", answer), ""

  def product(self, site: Site) -> Callable[..., jax.Array]:
    """Returns the function of a site's operation with the site's recipe."""
    options: dict[str, Any] = {
      "recipe": site.recipe,
      "implementation": self.implementation,
      "reduce_dtype": self.reduce_dtype,
    }
    if site.operation == RAGGED:
      return functools.partial(ragged.ragged_dot_general, **options)
    dot = training.dot_general(weight=site.weight, **options)
    scheme = dataclasses.replace(dot.scheme, who=WHO)
    return dataclasses.replace(dot, scheme=scheme)


def prologue_refusals(
  site: Site, operation: binding_private.BoundOperation
) -> tuple[str, str]:
  """Returns those of `quantized_operand` for the recipe of a site.

  Args:
    site: a site with a weight and a recipe.
    operation: its operation.
  """
  lhs, rhs, *_ = operation.args
  if site.operation == RAGGED:
    numbers = operation.params[NUMBERS[RAGGED]]
    return ragged.prologue_refusals(site.recipe, lhs, rhs, numbers)
  return quantized_operand.prologue_refusals(
    _setting(site, lhs.dtype), (lhs, rhs)
  )


def backward_of(
  site: Site, operation: binding_private.BoundOperation
) -> Callable[[], activation_gradients.Backward | None]:
  """Returns a function that calls `gradients.backward_of` for a site."""
  if site.operation == RAGGED:
    return lambda: None
  lhs, rhs, *_ = operation.args
  layer = "/".join(scope_names())
  setting = _setting(site, lhs.dtype)
  return functools.cache(
    lambda: gradients.backward_of(setting, lhs, rhs, layer)
  )


def _setting(site: Site, dtype: Any) -> products.Setting:
  scheme = products.Scheme(recipe=site.recipe, weight=site.weight, who=WHO)
  return products.Setting(
    scheme=scheme,
    numbers=site.dimension_numbers,
    precision=None,
    dtype=dtype,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecidedSite:
  """A matmul after the decision.

  Attributes:
    site: the matmul.
    origin: see `input_of`.
    chain: that of the activations, or None.
    note: why a gradient does not run it; "" if it does.
    flow: how often the matmul runs.
  """

  site: Site
  origin: sources.Origin | None = None
  chain: TracedChain | None = None
  note: str = ""
  flow: program.ControlFlow = dataclasses.field(
    default_factory=program.ControlFlow
  )

  def in_gradient(self) -> DecidedSite:
    """Returns the decision that holds if JAX differentiates the matmul."""
    if not self.note or self.site.recipe is None:
      return self
    left = dataclasses.replace(self.site, recipe=None, reason=self.note)
    return dataclasses.replace(self, site=left)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
  """A matmul that `accept_quantized` or `accelerate` replaced.

  Attributes:
    operation: see `Site`.
    sources: lines that the source of a `Site` may be; empty if none is known.
    shapes: of both operands.
  """

  operation: str
  sources: frozenset[str]
  shapes: tuple[tuple[Any, ...], tuple[Any, ...]]

  def likeness(self, site: Site) -> int:
    """Returns how many shapes are those of a site; -1 if it is another matmul.

    A `vmap` between the transformations changes shapes.
    """
    is_other_line = bool(self.sources) and site.source not in self.sources
    if site.recipe or site.operation != self.operation or is_other_line:
      return -1
    shapes = site.lhs_shape, site.rhs_shape
    return sum(a == b for a, b in zip(shapes, self.shapes, strict=True))


_taken: Final = contextvars.ContextVar[list[Taken] | None](
  "taken", default=None
)


@contextlib.contextmanager
def taking() -> Iterator[list[Taken]]:
  """Returns a list of the matmuls that are replaced inside."""
  found: list[Taken] = []
  token = _taken.set(found)
  try:
    yield found
  finally:
    _taken.reset(token)


def note_taken(
  operation: binding_private.BoundOperation,
  around: Surroundings = Surroundings(),
) -> None:
  """Records that `accept_quantized` or `accelerate` replaced a matmul.

  Those of a backward pass do not count, because no site lists them.
  """
  if any(
    x.is_transform and x.text == "transpose" for x in jax_private.scopes()
  ):
    return
  lhs, rhs, *_ = operation.args
  taken = Taken(
    operation=operation.name,
    sources=frozenset({around.source, jax_private.user_frame()} - {""}),
    shapes=(tuple(lhs.shape), tuple(rhs.shape)),
  )
  note_all_taken([taken])


def note_all_taken(taken: Sequence[Taken]) -> None:
  """Records matmuls of a jaxpr that was replaced before."""
  found = _taken.get()
  if found is not None:
    found += taken


def without_taken(
  sites: Sequence[DecidedSite], taken: list[Taken]
) -> list[DecidedSite]:
  """Returns the sites except those that another transformation replaced.

  Removes the matmuls of these sites from `taken`.
  """
  left = list(sites)
  for one in list(taken):
    best = max(left, key=lambda x: one.likeness(x.site), default=None)
    if best is not None and one.likeness(best.site) >= 0:
      left.remove(best)
      taken.remove(one)
  return left


@dataclasses.dataclass(kw_only=True)
class Seen:
  """The matmuls of one call of a function.

  Attributes:
    is_default: whether the default decides, and not `where=`.
    sites: matmuls that this call decided about.
    has_quantized: whether other matmuls are quantized already: by the
      function's code, by a transformation inside it, or by an earlier trace of
      a jitted function.
  """

  is_default: bool = True
  sites: list[DecidedSite] = dataclasses.field(default_factory=list)
  has_quantized: bool = False

  @property
  def is_quantized(self) -> bool:
    """Whether any matmul is quantized."""
    return self.has_quantized or any(x.site.recipe for x in self.sites)

  def warning(self) -> str:
    """Returns a warning about matmuls that the caller may expect quantized."""
    left = [x.site for x in self.sites if x.site.recipe is None]
    if self.is_quantized:
      left = self._left_with_weights()
      return left_text(f"left {_count(left, 'matmul')}", left)
    if not left:
      return (
        f"{WHO}: found no matmul in fn, so nothing is quantized. It sees the"
        " matmuls that run while fn is called or traced. Pass the function"
        " itself, not a compiled one"
      )
    taken = f"took 0 of {_count(left, 'matmul')}, so nothing is quantized"
    return left_text(taken, left)

  def _left_with_weights(self) -> list[Site]:
    """Returns the unquantized matmuls that probably have a weight."""
    inputs = {x.origin for x in self.sites if x.site.weight}
    found = []
    for decided in self.sites:
      site, origin = decided.site, decided.origin
      is_left = site.recipe is None and not site.weight
      if self.is_default and is_left and origin is not None:
        # An array that also multiplies a parameter is an input of the model. A
        # cache of keys or values has a batch dimension.
        has_batch = any(site.dimension_numbers[1])
        if not has_batch and origin not in inputs:
          found.append(site)
    return found


_unsettled: Final = contextvars.ContextVar[list[Seen] | None](
  "unsettled", default=None
)


def warning_of(seen: Seen) -> str:
  """Returns the warning of a call of `quantize_dots`, or "".

  Inside of `settling` there is none yet.
  """
  unsettled = _unsettled.get()
  if unsettled is None:
    return seen.warning()
  unsettled.append(seen)
  return ""


@contextlib.contextmanager
def settling() -> Iterator[list[str]]:
  """Returns a list that at the end has the warnings of `quantize_dots` inside.

  `accept_quantized` replaces the matmuls of a jitted function after JAX has
  traced it, and with it a `quantize_dots` inside. The outermost call settles.
  """
  warnings: list[str] = []
  if _unsettled.get() is not None:
    yield warnings
    return
  unsettled: list[Seen] = []
  token = _unsettled.set(unsettled)
  try:
    with taking() as taken:
      yield warnings
  finally:
    _unsettled.reset(token)
  note_all_taken(taken)
  for seen in unsettled:
    left = without_taken(seen.sites, taken)
    seen.has_quantized |= len(left) < len(seen.sites)
    seen.sites = left
    warnings += filter(None, [seen.warning()])


def _count(found: Sequence[Any], noun: str) -> str:
  return f"{len(found)} {noun}{'s' if len(found) != 1 else ''}"


# How many different reasons a warning shows.
_MOST_REASONS: Final = 4


def left_text(what: str, left: Sequence[Site]) -> str:
  """Returns a warning, and each reason with the first matmul that has it."""
  if not left:
    return ""
  by_reason: dict[str, list[Site]] = {}
  for site in left:
    by_reason.setdefault(site.reason, []).append(site)
  lines = [f"{WHO}: {what}:"]
  for reason, found in list(by_reason.items())[:_MOST_REASONS]:
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    place = f" at {found[0].source}" if found[0].source else ""
    lines.append(f"  {found[0].description}{place}{more}: {reason}")
  if any(_NEITHER in reason for reason in by_reason):
    lines.append("Pass params= if the parameters are not the first argument.")
  lines.append("jaxplugin.explain lists every matmul; where= decides.")
  return "\n".join(lines)


@dataclasses.dataclass(eq=False)
class Record:
  """Decisions about matmuls. JAX's caches of traces have it as a key.

  Attributes:
    sites: matmuls that `quantize_dots` decided about.
    chains: norms and activations before matmuls of `quantize_dots` and
      `accept_quantized`.
  """

  sites: list[DecidedSite] = dataclasses.field(default_factory=list)
  chains: list[TracedChain] = dataclasses.field(default_factory=list)


_recording: Final = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def recording() -> Iterator[Record]:
  """Records all decisions inside.

  JAX traces functions again that it has traced before.
  """
  with _recording(record := Record()), taking() as taken:
    yield record
  record.sites = without_taken(record.sites, taken)


def record(sites: Sequence[DecidedSite]) -> None:
  if is_recording():
    _recording.value.sites.extend(sites)
    for site in sites:
      if site.chain is not None:
        record_chain(dataclasses.replace(site.chain, flow=site.flow))


def is_recording() -> bool:
  return _recording.value is not None


def record_chain(chain: TracedChain) -> None:
  if is_recording():
    _recording.value.chains.append(chain)


@contextlib.contextmanager
def inside(
  operation: binding_private.BoundOperation, sites: list[DecidedSite]
) -> Iterator[None]:
  """Adds the control flow of an operation to the matmuls that are in it.

  These are the items that are added to `sites`, and to the recorded chains.
  """
  chains: list[TracedChain] = _recording.value.chains if is_recording() else []
  lists: list[list[Any]] = [sites, chains]
  sizes = list(map(len, lists))
  yield
  for items, size in zip(lists, sizes, strict=True):
    items[size:] = [
      dataclasses.replace(
        x, flow=x.flow.inside(operation.name, operation.params)
      )
      for x in items[size:]
    ]

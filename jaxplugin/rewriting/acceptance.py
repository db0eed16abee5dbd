# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`accept_quantized`: runs a model's own code with quantized weights."""

from __future__ import annotations

import contextvars
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import jax
import numpy as np

from jaxplugin.arrays import leaves as leaves_lib
from jaxplugin.arrays import quantized_weight, scaled_array
from jaxplugin.core import error_context, formats
from jaxplugin.dot import backends
from jaxplugin.jaxext.tracing import binding_private, interception_private
from jaxplugin.rewriting import acceptor as acceptor_lib
from jaxplugin.rewriting import facts, sites
from jaxplugin.rewriting import weights as weights_lib

WHO: Final = acceptor_lib.WHO

_Result = TypeVar("_Result")

# Whether the code is inside a call that got quantized weights.
_has_weights: Final = contextvars.ContextVar("has_weights", default=False)


def accept_quantized(
  fn: Callable[..., _Result],
  *,
  activations: formats.BlockFormat | str | None = None,
  dtype: Any = None,
  fuse_activations: bool = False,
  implementation: str | None = None,
) -> Callable[..., _Result]:
  """Returns a function that runs `fn` with quantized weights.

  `fn` is written for plain arrays. It receives each `ScaledArray` and
  `QuantizedWeight` as an array of the weight's shape. A matmul by it
  (`lax.dot_general`, `lax.ragged_dot` and callers) becomes `block_scaled_dot`,
  `linear` or `ragged_dot` of the quantized weight. The weight may be reshaped,
  transposed, converted, sliced, gathered, concatenated, scanned over layers,
  placed on a mesh, and used inside transformations. Rounding by a conversion
  is left out.

  Other operations use the dequantized array, with a warning. Take derivatives
  outside. docs/how_to/quantize_model.md is the guide.

  Args:
    fn: any callable. A module of equinox may hold the weights itself.
    activations: format, or its name, to which the other operand of each matmul
      is quantized; None leaves it unquantized. NVFP4 has one global scale for
      all rows.
    dtype: f32, bf16 or f16, the dtype in which `fn` sees a weight. By default
      the dtype before `quantize_params`. For a `ScaledArray` it is the only
      float dtype of its argument, or f32.
    fuse_activations: see `quantize_dots`.
    implementation: see `block_scaled_dot`.

  Returns:
    A function like `fn`, to call inside `jit`. Weights that `fn` returns
    unchanged stay quantized.

  Raises:
    TypeError: If `fn` is not callable, or dtype is not one of the three.
    ValueError: If a name is unknown, or fuse_activations is True without
      activations.
    NotImplementedError: From the result, if the forced implementation does not
      support a matmul, or `fn` is differentiated by a quantized weight.

  Warns:
    jp.NotQuantizedWarning: If a weight is dequantized, no weight is used, or
      the call is outside of `jit`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> def model(params, x):
    ...   return x @ params["dense"]["kernel"]
    >>> params = {"dense": {"kernel": jnp.ones((64, 128))}}
    >>> params_q, report = jp.quantize_params(params, "nvfp4")
    >>> y = jax.jit(jp.accept_quantized(model))(params_q, jnp.ones((2, 64)))
    >>> print(y.shape, y[0, 0])
    (2, 128) 64.0
  """
  error_context.require_function(WHO, fn)
  error_context.require_bool(WHO, "fuse_activations", fuse_activations)
  with error_context.in_function(WHO):
    backends.validate_name(implementation)
  options = acceptor_lib.AcceptOptions(
    activations=None
    if activations is None
    else formats.resolve(WHO, activations, "activations"),
    implementation=implementation,
    fuse_activations=fuse_activations,
  )
  if fuse_activations and activations is None:
    raise ValueError(
      f"{WHO}: activations must be a format if fuse_activations is True, got"
      " None. Pass activations=, or leave fuse_activations out"
    )
  if dtype is not None:
    dtype = formats.require_float_dtype(WHO, "dtype", dtype)

  @functools.wraps(fn, updated=())
  def accepted(*args: Any, **kwargs: Any) -> Any:
    return _call(options, dtype, fn, args, kwargs)

  return accepted


def _call(
  options: acceptor_lib.AcceptOptions,
  dtype: np.dtype | None,
  fn: Callable[..., Any],
  args: tuple[Any, ...],
  kwargs: dict[str, Any],
) -> Any:
  acceptor = acceptor_lib.Acceptor(options)
  weights = _Weights(acceptor, dtype)
  function, join = _as_tree(fn)
  uses = weights.enter("fn", function)
  of_args = [weights.enter(f"argument {i}", x) for i, x in enumerate(args)]
  of_kwargs = {name: weights.enter(name, x) for name, x in kwargs.items()}
  is_inside = _has_weights.get()
  if not weights.count and not is_inside:
    warnings.warn(
      f"{WHO}: the arguments contain no quantized weight; pass weights as"
      " arguments, because a weight that fn closes over is not seen",
      error_context.NotQuantizedWarning,
      stacklevel=3,
    )

  def run() -> Any:
    own = [use() for use in of_args]
    named = {name: use() for name, use in of_kwargs.items()}
    return weights.quantized_again(join(uses())(*own, **named))

  token = _has_weights.set(is_inside or weights.count > 0)
  try:
    with sites.settling() as texts:
      result = interception_private.intercept(run, lambda _: acceptor)()
  finally:
    _has_weights.reset(token)
  for text in texts:
    warnings.warn(text, error_context.NotQuantizedWarning, stacklevel=3)
  weights.write_back()
  outcome = acceptor.outcome
  if outcome.is_taken:
    binding_private.note_quantized()
  is_silent = not outcome.is_taken and not outcome.warned
  if weights.count and is_silent and not weights.are_returned:
    warnings.warn(
      f"{WHO}: fn multiplied by none of its {weights.count} quantized weights;"
      " call jaxplugin.explain for a list of its matmuls",
      error_context.NotQuantizedWarning,
      stacklevel=3,
    )
  return result


def _as_tree(fn: Any) -> tuple[Any, Callable[[Any], Callable[..., Any]]]:
  """Splits a callable into a tree of its bound arguments and their inverse.

  Returns:
    The tree, and a function that makes the callable from such a tree.
  """
  if isinstance(fn, functools.partial):
    inner, join = _as_tree(fn.func)
    return (inner, fn.args, fn.keywords), lambda tree: functools.partial(
      join(tree[0]), *tree[1], **tree[2]
    )
  if inspect.ismethod(fn):
    return fn.__self__, lambda tree: functools.partial(fn.__func__, tree)
  return fn, lambda tree: tree


class _Weights:
  """The quantized weights among the arguments of one call."""

  def __init__(
    self, acceptor: acceptor_lib.Acceptor, dtype: np.dtype | None
  ) -> None:
    self._acceptor = acceptor
    self._dtype = dtype
    # The quantized weight for each array that code gets.
    self._used = facts.Values[Any]()
    self._variables: list[tuple[Any, Any, list[Any]]] = []
    self.count = 0
    self.are_returned = False  # whether `fn` returns one unchanged

  def enter(self, name: str, tree: Any) -> Callable[[], Any]:
    """Returns a function that makes the argument as code gets it.

    Call it where the acceptor sees operations.
    """
    leaves, structure = leaves_lib.of(tree)
    has_weights = any(leaves_lib.is_quantized(leaf.array) for leaf in leaves)
    # flax lets code change only the variables of its own trace.
    if not has_weights and not _variables(tree):
      return lambda: tree
    beside = _common_dtype([leaf.array for leaf in leaves])
    uses = []
    for leaf in leaves:
      if leaves_lib.is_quantized(leaf.array):
        path = leaf.path or name
        uses.append(self._enter_weight(path, leaf.array, beside))
      else:
        uses.append(functools.partial(lambda x: x, leaf.array))

    def use() -> Any:
      copy = jax.tree.unflatten(structure, [use() for use in uses])
      for ours, theirs in zip(_variables(tree), _variables(copy), strict=True):
        self._variables.append((ours, theirs, jax.tree.leaves(theirs)))
      return copy

    return use

  def _enter_weight(
    self, path: str, weight: Any, beside: np.dtype
  ) -> Callable[[], jax.Array]:
    self.count += 1
    is_stored = isinstance(weight, quantized_weight.QuantizedWeight)
    array = weight.array if is_stored else weight
    own = weight.dtype if is_stored else beside
    scaled_array.require_arrays(WHO, path, array)
    order = None  # matmuls read weights with the blocked dimension last
    if array.axis < array.ndim - 1:
      order = [*range(array.ndim)]
      order[array.axis], order[-1] = order[-1], array.axis
      array = array.transpose(*order)
    value = self._acceptor.enter(
      weights_lib.Weight(
        path=path, array=acceptor_lib.without_derivative(array)
      ),
      own if self._dtype is None else self._dtype,
    )
    if self.count == 1 and not isinstance(value, jax.core.Tracer):
      warnings.warn(
        f"{WHO}: called outside of jit, so each call dequantizes all quantized"
        " weights; apply jit: jax.jit(jaxplugin.accept_quantized(fn))",
        error_context.NotQuantizedWarning,
        stacklevel=5,
      )

    def use() -> jax.Array:
      used = value if order is None else value.transpose(order)
      used = weight.restored(used) if is_stored else used
      self._used.put(used, weight)
      return used

    return use

  def quantized_again(self, tree: Any) -> Any:
    """Returns results with quantized weights that `fn` did not change."""

    def of_leaf(x: Any) -> Any:
      weight = self._used.get(x)
      if weight is None:
        return x
      self.are_returned = True
      return weight

    return jax.tree.map(of_leaf, tree)

  def write_back(self) -> None:
    """Sets variables of nnx to the values that code has set in the copy."""
    for ours, theirs, before in self._variables:
      after = jax.tree.leaves(theirs)
      if [id(x) for x in after] != [id(x) for x in before]:
        ours.set_raw_value(self.quantized_again(theirs.get_raw_value()))


def _variables(tree: Any) -> list[Any]:
  """Returns the variables of nnx in a tree. Without flax there are none."""
  nnx = sys.modules.get("flax.nnx")
  if nnx is None:
    return []
  is_variable = lambda x: isinstance(x, nnx.Variable)
  return list(filter(is_variable, jax.tree.leaves(tree, is_leaf=is_variable)))


def _common_dtype(arrays: Sequence[Any]) -> np.dtype:
  """Returns the one dtype of all plain float arrays, or f32."""
  dtypes = {
    np.dtype(x.dtype)
    for x in arrays
    if isinstance(x, (jax.Array, np.ndarray))
    and x.dtype in formats.FLOAT_DTYPES
  }
  return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)

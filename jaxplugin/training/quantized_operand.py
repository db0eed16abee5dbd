# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_operand`: quantizes an operand of several matmuls once.

Also functions of trees with `QuantizedOperand`s, and flax's `promote_dtype`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import ad_checkpoint, lax

from jaxplugin.arrays import operators, scaled_array
from jaxplugin.core import error_context, formats
from jaxplugin.dot import arguments, sides
from jaxplugin.quantization import operands, prologues
from jaxplugin.training import gradients, products, recipes

WHO: Final = "quantize_operand"

Role = Literal["weight", "activation"]

_ROLES: Final = ("weight", "activation")
_SIDES: Final[dict[str, products.Side]] = {"weight": "rhs", "activation": "lhs"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
  """The matmul that an operand's copies are quantized for.

  Attributes:
    role: "weight" or "activation".
    contracting, batch: dimensions that the forward product contracts, and has
      as batch dimensions.
    forward, backward: how the copies were quantized; None without a copy.
  """

  role: Role
  contracting: sides.Dims
  batch: sides.Dims
  forward: operands.QuantizeSpec | None
  backward: operands.QuantizeSpec | None


@operators.refuse
@jax.tree_util.register_pytree_with_keys_class
class QuantizedOperand:
  """An array with its quantized copies, as `quantize_operand` returns it.

  It is a pytree with `primal` as its first leaf, and passes through `jit`,
  `vmap` and `scan`. The copies are integers, so no optimizer takes them for
  parameters.

  Attributes:
    primal: the array that was quantized; it receives the gradient.
    use: role and dimensions for which the copies were quantized.
    shape, ndim, dtype: properties of `primal`.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> w_q = jp.quantize_operand(jnp.ones((64, 32)), "mxfp8")
    >>> print(w_q.forward.format, w_q.shape)
    mxfp8 (64, 32)
  """

  primal: Any
  use: Use

  def __init__(self, primal: Any, forward: Any, backward: Any, use: Use):
    """Copies are results of `products.bits_of`, or None."""
    self.primal = primal
    self._forward = forward
    self._backward = backward
    self.use = use

  def tree_flatten_with_keys(self) -> tuple[Any, Any]:
    children, use = self.tree_flatten()
    key = jax.tree_util.GetAttrKey
    names = map(key, ("primal", "forward", "backward"))
    return tuple(zip(names, children, strict=True)), use

  def tree_flatten(self) -> tuple[Any, Any]:
    return (self.primal, self._forward, self._backward), self.use

  @classmethod
  def tree_unflatten(cls, use: Any, children: Any) -> QuantizedOperand:
    primal, forward, backward = children
    return cls(primal, forward, backward, use)

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of `primal`."""
    return tuple(self.primal.shape)

  @property
  def ndim(self) -> int:
    """The rank of `primal`."""
    return self.primal.ndim

  @property
  def dtype(self) -> np.dtype:
    """The dtype of `primal`."""
    return self.primal.dtype

  @property
  def forward(self) -> scaled_array.ScaledArray | None:
    """The copy for the forward matmul, or None if it uses another one."""
    return None if self._forward is None else products.of_bits(self._forward)

  @property
  def backward(self) -> scaled_array.ScaledArray | None:
    """The copy for the backward matmul, or None if it uses another one."""
    return None if self._backward is None else products.of_bits(self._backward)

  def held(self) -> products.Held:
    """Returns the copies in the form that matmuls take."""
    return products.Held(self._forward, self._backward)

  def with_primal(self, primal: Any) -> QuantizedOperand:
    """Returns the same copies with another array to receive the gradient.

    Args:
      primal: an array of the same shape and dtype. Its values are not compared
        with the quantized ones.

    Returns:
      A `QuantizedOperand`.

    Raises:
      TypeError: If its shape or dtype differs.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxplugin as jp
      >>> w = jnp.ones((64, 64))
      >>> w_q = jp.quantize_operand(w, "mxfp8")
      >>> jax.grad(lambda w: w_q.with_primal(w).primal.sum())(w).shape
      (64, 64)
    """
    given = getattr(primal, "shape", None), getattr(primal, "dtype", None)
    if given != (self.shape, self.dtype):
      raise TypeError(
        "QuantizedOperand.with_primal: primal must be the array that was"
        f" quantized, {error_context.shown(self.primal)}, got"
        f" {error_context.shown(primal)}; call quantize_operand on that array"
      )
    return QuantizedOperand(primal, self._forward, self._backward, self.use)

  def transposed(self, order: Sequence[int]) -> QuantizedOperand:
    """Returns the operand of the same matmul of the transposed array."""
    places = lambda dims: tuple(map(order.index, dims))

    def copied(x: Any) -> Any:
      if x is None:
        return None
      return products.bits_of(products.of_bits(x).transpose(*order))

    def quantized(spec: operands.QuantizeSpec | None) -> Any:
      if spec is None:
        return None
      along = dataclasses.replace(
        spec.along, dims=places(spec.along.dims), lead=places(spec.along.lead)
      )
      square = spec.options.square and places(spec.options.square)
      options = dataclasses.replace(spec.options, square=square)
      return dataclasses.replace(spec, along=along, options=options)

    use = Use(
      role=self.use.role,
      contracting=places(self.use.contracting),
      batch=places(self.use.batch),
      forward=quantized(self.use.forward),
      backward=quantized(self.use.backward),
    )
    return QuantizedOperand(
      jnp.transpose(self.primal, order),
      copied(self._forward),
      copied(self._backward),
      use,
    )

  def __getitem__(self, index: Any) -> QuantizedOperand:
    """Returns this operand for `[...]`, as layers read a parameter."""
    if index is not Ellipsis:
      raise TypeError(
        "QuantizedOperand: the index must be ..., because the operand is"
        f" blocked, got [{error_context.shown(index)}]; index .primal and"
        " quantize the result, or map over the leaves with jax.lax.scan"
      )
    return self

  def _refuse(self, name: str) -> NoReturn:
    raise TypeError(
      f"QuantizedOperand: {name} needs a plain array, got {self!r}; pass it to"
      " a function that jaxplugin.dot_general returns, or pass its array,"
      " .primal. In flax pass"
      " promote_dtype=jaxplugin.training.promote_dtype to the layer"
    )

  def __repr__(self) -> str:
    use = self.use
    kinds = [
      f"{name} {spec.format}"
      for name, spec in (("forward", use.forward), ("backward", use.backward))
      if spec is not None
    ]
    return (
      f"QuantizedOperand({use.role}, {error_context.shown(self.primal)},"
      f" contracting {list(use.contracting)}, {', '.join(kinds)})"
    )


def quantize_operand(
  x: jax.Array,
  recipe: recipes.Recipe | formats.BlockFormat | str,
  *,
  role: Role = "weight",
  contracting: int | Sequence[int] | None = None,
  batch: int | Sequence[int] = (),
) -> QuantizedOperand:
  """Quantizes an operand once for several matmuls of `dot_general`.

  Weights repeat in the microbatches of a step. Query, key and value share an
  input. The result holds the forward copy, the backward copy, and x. Matmuls
  use the copies and do not read x. Results and gradients have the same bits as
  with x itself, and the gradient goes to x.
  docs/how_to/gradient_accumulation.md is the guide.

  Functions of `dot_general` take the result for lhs or rhs, and
  `jp.training.ragged_dot_general` for rhs. The backward pass saves no other
  copy. `checkpoint_policies.quantized_saveable` saves the copies of
  activations.

  Args:
    x: f32, bf16 or f16, the operand of the matmul.
    recipe: the recipe of the matmul; or a format or its name, for weights,
      activations and gradients.
    role: "weight" or "activation".
    contracting: contracting dimensions of the forward matmul, in its order. By
      default the first dimension of a weight (`x @ w`) after `batch`, and the
      last one of activations.
    batch: batch dimensions of the forward matmul, in its order. Experts
      [groups, n, k] have contracting=2, batch=0.

  Returns:
    A `QuantizedOperand`, a pytree.

  Raises:
    TypeError: If x is not a float array, recipe is not a recipe, or the recipe
      does not quantize this role. Matmuls raise it if their role, dimensions or
      recipe differ.
    ValueError: If role is unknown, or contracting or batch are not dimensions.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> recipe = jp.training.MXFP8_RECIPE
    >>> w_q = jp.quantize_operand(jnp.ones((64, 1)), recipe)
    >>> dot = jp.dot_general(recipe=recipe, weight="rhs")
    >>> print(dot(jnp.ones((2, 64)), w_q, (((1,), (0,)), ((), ()))))
    [[64.]
     [64.]]
  """
  recipe = recipes.resolve(WHO, "recipe", recipe)
  if not error_context.is_one_of(role, _ROLES):
    raise ValueError(
      f"{WHO}: role must be one of {_ROLES}, got {error_context.shown(role)}"
    )
  with error_context.in_function(WHO):
    x = arguments.float_operand("x", x)
  own = _own_dims(x.ndim, role, contracting, batch)
  wanted = _wanted(recipe, role, x, *own)
  forward, backward = _copies(wanted, recipe)
  if forward is None and backward is None:
    raise TypeError(
      f"{WHO}: recipe must quantize {role}s in a matmul, got {recipe!r}; pass"
      " the array itself to dot_general"
    )
  specs = [m for m in (forward, backward) if m is not None]
  # Its derivative goes to the primal, past the copies.
  made = products.quantized(lax.stop_gradient(x), specs, who=WHO)
  copies = dict(zip(specs, map(products.bits_of, made), strict=True))
  kept = forward if wanted.keeps_forward else backward
  if role == "activation" and kept is not None:
    copies[kept] = ad_checkpoint.checkpoint_name(
      copies[kept], gradients.KEPT_NAMES["operand"]
    )
  use = Use(
    role=role,
    contracting=own[0],
    batch=own[1],
    forward=forward,
    backward=backward,
  )
  first, second = (m and copies[m] for m in (forward, backward))
  return QuantizedOperand(x, first, second, use)


def _own_dims(
  ndim: int, role: Role, contracting: Any, batch: Any
) -> tuple[sides.Dims, sides.Dims]:
  """Returns `contracting` and `batch` as dimensions of x, with defaults."""
  given = {"contracting": contracting, "batch": batch}
  found: dict[str, sides.Dims] = {}
  for name, dims in reversed(given.items()):
    if dims is None and name == "contracting":
      free = [d for d in range(ndim) if d not in found["batch"]]
      dims = free[:1] if role == "weight" else free[-1:]
    try:
      is_one = error_context.is_integer(dims)
      dims = (dims,) if is_one else error_context.as_tuple(dims)
      found[name] = tuple(
        range(ndim)[error_context.as_integer(d)] for d in dims
      )
    except (TypeError, IndexError):
      raise ValueError(
        f"{WHO}: {name} must be dimensions of x, from {-ndim} to {ndim - 1},"
        f" got {error_context.shown(given[name])}"
      ) from None
  both = (*found["contracting"], *found["batch"])
  if len(set(both)) != len(both):
    raise ValueError(
      f"{WHO}: contracting and batch must be dimensions of x, each once, got"
      f" contracting={error_context.shown(given['contracting'])} and"
      f" batch={error_context.shown(given['batch'])}"
    )
  return found["contracting"], found["batch"]


def _wanted(
  recipe: recipes.Recipe,
  role: Role,
  x: jax.Array,
  contracting: sides.Dims,
  batch: sides.Dims,
) -> products.TrainingOperand:
  """Returns the operand of a matmul by an array with one other dimension."""
  other = jax.ShapeDtypeStruct(
    (*(x.shape[d] for d in (*batch, *contracting)), 1), x.dtype
  )
  other_batch = tuple(range(len(batch)))
  other_contracting = tuple(len(batch) + i for i in range(len(contracting)))
  both: list[Any] = [(other_contracting, other_batch), (contracting, batch)]
  arrays: list[Any] = [other, x]
  if role == "activation":
    both, arrays = both[::-1], arrays[::-1]
  numbers: Any = tuple(zip(*both, strict=True))
  setting = products.Setting(
    scheme=products.Scheme(recipe=recipe, weight="rhs", who=WHO),
    numbers=numbers,
    precision=None,
    dtype=x.dtype,
  )
  return setting.differentiated(*arrays)[_SIDES[role]]


def _copies(
  wanted: products.TrainingOperand, recipe: recipes.Recipe
) -> tuple[operands.QuantizeSpec | None, operands.QuantizeSpec | None]:
  """Returns how the forward and the backward copy are quantized, if used."""
  is_forward = recipe.quantize_forward or wanted.keeps_forward
  return (
    wanted.forward if is_forward else None,
    None if wanted.keeps_forward else wanted.backward,
  )


class Produced(NamedTuple):
  """An operand of `dot_general`: an array, and the prologue that computes it.

  The matmul quantizes the prologue's f32 result, without a derivative, and the
  gradient goes to the array.
  """

  primal: jax.Array
  call: prologues.PrologueCall


def prologue_refusals(
  setting: products.Setting, arrays: tuple[Any, Any]
) -> tuple[str, str]:
  """Returns why a matmul quantizes activations without their prologue, or "".

  The first reason is for a forward pass, the second one for a forward pass
  before a backward pass.

  Args:
    setting: the matmul, with a weight.
  """
  scheme = setting.scheme
  index = 1 if scheme.weight == "lhs" else 0
  side = products.SIDES[index]
  operand = setting.differentiated(*arrays)[side]
  forward, backward = _copies(operand, scheme.recipe)
  if forward is None or not scheme.recipe.quantize_forward:
    reason = "the recipe does not quantize activations in the forward pass"
    return reason, reason
  shape = arrays[index].shape
  if forward.along.dims != (len(shape) - 1,):
    reason = "the matmul does not contract its last dimension"
    return reason, reason
  refusal = functools.partial(operands.prologue_refusal, shape=shape)
  first = operand.first.prologue_refusal(side) or refusal([forward])
  if backward is None:
    return first, first
  assert operand.product is not None
  second = operand.product.prologue_refusal("rhs")
  return first, first or second or refusal([forward, backward])


def primal_of(x: Any) -> Any:
  """Returns the array of an operand, or any other `x` itself."""
  return x.primal if isinstance(x, (QuantizedOperand, Produced)) else x


def is_operand(x: Any) -> bool:
  return isinstance(x, QuantizedOperand)


def taken(
  given: tuple[Any, Any],
  arrays: tuple[jax.Array, jax.Array],
  setting: products.Setting,
) -> dict[products.Side, products.Held | prologues.PrologueCall]:
  """Returns the copies of `QuantizedOperand`s and the prologues, by side.

  Args:
    arrays: lhs and rhs, with arrays in place of other operands.

  Raises:
    TypeError: If an operand was quantized for another role, contraction or
      recipe.
  """
  held: dict[products.Side, products.Held | prologues.PrologueCall] = {
    side: x.call
    for side, x in zip(products.SIDES, given, strict=True)
    if isinstance(x, Produced)
  }
  if not any(map(is_operand, given)):
    return held
  wanted = setting.differentiated(*arrays)
  for (side, operand), x in zip(wanted.items(), given, strict=True):
    if is_operand(x):
      _validate(side, x, setting, operand)
      held[side] = x.held()
  return held


def _validate(
  side: products.Side,
  x: QuantizedOperand,
  setting: products.Setting,
  wanted: products.TrainingOperand,
) -> None:
  scheme = setting.scheme
  role = "weight" if side == scheme.weight else "activation"
  if scheme.is_weight_given and x.use.role != role:
    raise TypeError(
      f'{scheme.who}: {side} must be quantized with role="{role}", because'
      f' weight={scheme.weight!r}, got {x!r}; pass role="{role}" to'
      " quantize_operand, or swap the operands"
    )
  index = ("lhs", "rhs").index(side)
  contracting, batch = (dims[index] for dims in setting.numbers)
  require_dims(scheme.who, side, x, contracting, batch)
  pairs = zip(
    ("forward", "backward"),
    _copies(wanted, scheme.recipe),
    (x.use.forward, x.use.backward),
    strict=True,
  )
  for name, spec, own in pairs:
    if spec is not None and not _is_same(own, spec, x.shape):
      raise TypeError(
        f"{scheme.who}: the {name} pass needs {side} as {_described(spec)},"
        f" got {_described(own)} in {x!r}; pass the same recipe to"
        " quantize_operand"
      )


def require_dims(
  who: str,
  side: products.Side,
  x: QuantizedOperand,
  contracting: sides.Dims,
  batch: sides.Dims,
) -> None:
  """Raises TypeError if an operand was quantized for other dimensions."""
  if (x.use.contracting, x.use.batch) != (contracting, batch):
    raise TypeError(
      f"{who}: {side} must be quantized for contracting dimensions"
      f" {list(contracting)} and batch dimensions {list(batch)}, got one for"
      f" {list(x.use.contracting)} and {list(x.use.batch)}, {x!r}; pass"
      f" contracting={contracting}, batch={batch} to quantize_operand"
    )


def _is_same(
  own: operands.QuantizeSpec | None,
  wanted: operands.QuantizeSpec,
  shape: sides.Dims,
) -> bool:
  """Whether both quantize an array of this shape to the same copy."""
  if own is None:
    return False

  def effective(spec: operands.QuantizeSpec) -> Any:
    along = spec.along
    # Blocks along one dimension do not move others. `along.shape` is padded.
    lead = along.lead if len(along.dims) != 1 else ()
    bare = dataclasses.replace(along, lead=lead, multiple=1)
    return dataclasses.replace(spec, along=bare), along.shape(shape)

  return bool(effective(own) == effective(wanted))


def _described(spec: operands.QuantizeSpec | None) -> str:
  if spec is None:
    return "nothing"
  along, options = spec.along, str(spec.options)
  return (
    f"{spec.format} along {list(along.dims)} in multiples of {along.multiple}"
    f", scales rounded {spec.scale_rounding}{', ' if options else ''}{options}"
  )


# Trees.


def primals(tree: Any) -> Any:
  """Returns a tree with the array of each `QuantizedOperand` in its place.

  Args:
    tree: a tree of arrays and `QuantizedOperand`s.

  Returns:
    The tree of arrays; other leaves do not change.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> w = jnp.ones((64, 64))
    >>> tree = {"w": jp.quantize_operand(w, "mxfp8"), "b": w[0]}
    >>> jp.training.primals(tree)["w"] is w
    True
  """
  return jax.tree.map(primal_of, tree, is_leaf=is_operand)


def with_primals(tree: Any, primals: Any) -> Any:
  """Returns `tree` with new arrays next to its quantized copies.

  Differentiate by the new arrays, and quantize only once for several
  microbatches. docs/how_to/gradient_accumulation.md is the guide.

  Args:
    tree: a tree of arrays and `QuantizedOperand`s.
    primals: a tree of arrays with one array for each leaf. Values are not
      compared with the quantized ones.

  Returns:
    `tree`, where each `QuantizedOperand` has its array from `primals`, and each
    other leaf is the one of `primals`.

  Raises:
    TypeError: If an array has another shape or dtype than the quantized one.
    ValueError: If the structures differ.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> dot = jp.dot_general(recipe="mxfp8", weight="rhs")
    >>> def loss(params, x):
    ...   return dot(x, params["w"], (((1,), (0,)), ((), ()))).sum()
    >>> params, x = {"w": jnp.ones((64, 64))}, jnp.ones((4, 64))
    >>> params_q = {"w": jp.quantize_operand(params["w"], "mxfp8")}
    >>> gradient = jax.grad(
    ...   lambda p: loss(jp.training.with_primals(params_q, p), x))(params)
    >>> print(gradient["w"][0, 0])
    4.0
  """

  def merged(x: Any, primal: Any) -> Any:
    return x.with_primal(primal) if is_operand(x) else primal

  leaves: Any
  structure: Any
  leaves, structure = jax.tree.flatten(tree, is_leaf=is_operand)
  try:
    given = structure.flatten_up_to(primals)
  except ValueError:
    raise ValueError(
      f"with_primals: primals must have the structure of tree, {structure}, got"
      f" {jax.tree.structure(primals)}. Pass the parameters that were quantized"
    ) from None
  return structure.unflatten(map(merged, leaves, given))


def promote_dtype(
  *args: Any, dtype: Any = None, inexact: bool = True
) -> list[Any] | tuple[Any, ...]:
  """Promotes like flax's `promote_dtype`, and keeps `QuantizedOperand`s.

  Pass it to layers of linen and nnx with quantized parameters: `nnx.Linear(...,
  promote_dtype=jp.training.promote_dtype)`.

  Args:
    args: arrays, `QuantizedOperand`s and None, as linen passes them; or one
      tuple of these, as nnx does.
    dtype: dtype of the results; by default JAX's promotion of all arguments.
    inexact: whether integers become floats.

  Returns:
    A list of arrays of that dtype, or a tuple if one was given. Operands and
    None do not change.

  Raises:
    TypeError: If an operand was quantized from another dtype.
    ValueError: If dtype is not a float and `inexact` is True.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> x, y = jp.training.promote_dtype(jnp.ones(2, jnp.bfloat16), jnp.ones(2))
    >>> print(x.dtype, y.dtype)
    float32 float32
  """
  if len(args) == 1 and isinstance(args[0], tuple):
    return tuple(promote_dtype(*args[0], dtype=dtype, inexact=inexact))
  if dtype is None:
    given = [primal_of(x) for x in args if x is not None]
    dtype = jnp.result_type(*given)
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
      dtype = jnp.promote_types(jnp.float32, dtype)
  if inexact and not jnp.issubdtype(dtype, jnp.inexact):
    raise ValueError(
      f"promote_dtype: dtype must be inexact, got {dtype}; pass inexact=False"
      " for an integer dtype"
    )

  def promoted(x: Any) -> Any:
    if x is None:
      return None
    if not is_operand(x):
      return jnp.asarray(x, dtype)
    if x.dtype != dtype:
      raise TypeError(
        f"promote_dtype: {x!r} must be converted to {jnp.dtype(dtype).name}"
        f" before it is quantized; pass w.astype({jnp.dtype(dtype).name!r}) to"
        " quantize_operand, and to with_primals"
      )
    return x

  return [promoted(x) for x in args]

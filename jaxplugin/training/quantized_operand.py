# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_operand`: an operand of `dot_general` quantized once, for many."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import ad_checkpoint
from jax import lax

from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.core import speaking
from jaxplugin.dot import api
from jaxplugin.dot import sides
from jaxplugin.quantization import operands
from jaxplugin.training import gradients
from jaxplugin.training import products
from jaxplugin.training import recipes
from jaxplugin.training import settings

WHO: Final = "quantize_operand"

Role = Literal["weight", "activation"]

_ROLES: Final = ("weight", "activation")
_SIDES: Final[dict[str, products.Side]] = {"weight": "rhs", "activation": "lhs"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
  """What an operand's copies are for.

  Attributes:
    role: "weight" or "activation".
    contracting, batch: dimensions that the forward product contracts, and has
      as batch dimensions.
    forward, backward: how the copies were quantized; None where there is none.
  """

  role: Role
  contracting: sides.Dims
  batch: sides.Dims
  forward: operands.Manner | None
  backward: operands.Manner | None


@jax.tree_util.register_pytree_with_keys_class
class QuantizedOperand:
  """What `quantize_operand` returns: see there.

  It is a pytree: of `primal`, the first leaf, and of the copies as integers, so
  that it passes through `jit`, `vmap`, `scan` and the like, and so that nothing
  takes the copies for parameters.

  Attributes:
    primal: the array that was quantized, which receives the gradient.
    use: what the copies are for.
    shape, ndim, dtype: of `primal`.
  """

  primal: Any
  use: Use

  def __init__(self, primal: Any, forward: Any, backward: Any, use: Use):
    """Of copies as `_integers` has them, or None."""
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
    return tuple(self.primal.shape)

  @property
  def ndim(self) -> int:
    return self.primal.ndim

  @property
  def dtype(self) -> np.dtype:
    return self.primal.dtype

  @property
  def forward(self) -> scaled_array.ScaledArray | None:
    """The copy that the forward product takes; None where it takes none."""
    return _floats(self._forward)

  @property
  def backward(self) -> scaled_array.ScaledArray | None:
    """The copy of the backward product; None where it takes another."""
    return _floats(self._backward)

  def held(self) -> products.Held:
    """The copies, as products take them."""
    return products.Held(_bits(self._forward), _bits(self._backward))

  def with_primal(self, primal: Any) -> QuantizedOperand:
    """The same copies, with another array to receive the gradient.

    Its numbers are not compared with those that were quantized: it is the same
    array, as a transformation sees it.

      jax.grad(lambda w: loss(w_q.with_primal(w), batch))(w)

    Raises:
      TypeError: its shape or dtype is another one.
    """
    given = getattr(primal, "shape", None), getattr(primal, "dtype", None)
    if given != (self.shape, self.dtype):
      raise TypeError(
        "QuantizedOperand.with_primal: primal must be the array that was"
        f" quantized, {speaking.shown(self.primal)}, got"
        f" {speaking.shown(primal)}; call quantize_operand on that array"
      )
    return QuantizedOperand(primal, self._forward, self._backward, self.use)

  def __getitem__(self, index: Any) -> QuantizedOperand:
    """All of it: what layers that read `parameter[...]` ask for."""
    if index is not Ellipsis:
      raise TypeError(
        "QuantizedOperand: the index must be ..., because the operand is"
        f" blocked, got [{speaking.shown(index)}]; index .primal and quantize"
        " the result, or map over the leaves with jax.lax.scan"
      )
    return self

  def __jax_array__(self) -> Any:
    raise TypeError(
      f"QuantizedOperand: this function needs a plain array, got {self!r};"
      " pass it to a function that jaxplugin.dot_general returns, or pass its"
      " array, .primal. In flax pass"
      " promote_dtype=jaxplugin.training.promote_dtype to the layer"
    )

  def __repr__(self) -> str:
    use = self.use
    kinds = [
      f"{name} {manner.format}"
      for name, manner in (("forward", use.forward), ("backward", use.backward))
      if manner is not None
    ]
    return (
      f"QuantizedOperand({use.role}, {speaking.shown(self.primal)}, contracting"
      f" {list(use.contracting)}, {', '.join(kinds)})"
    )


def quantize_operand(
  x: jax.Array,
  recipe: recipes.Recipe | formats.BlockFormat | str,
  *,
  role: Role = "weight",
  contracting: int | Sequence[int] | None = None,
  batch: int | Sequence[int] = (),
) -> QuantizedOperand:
  """Quantizes an operand of `dot_general` once, for all products that take it.

  A step of several microbatches multiplies by the same weights in each, and
  query, key and value have the same input:

    w_q = jp.quantize_operand(w, recipe)
    x_q = jp.quantize_operand(x, recipe, role="activation")
    dot = jp.dot_general(recipe=recipe, weight="rhs")
    y = dot(x_q, w_q, (((1,), (0,)), ((), ())))

  What is returned has the copy of the forward product, that of the backward
  product, and x. Functions of `dot_general` take it for lhs or rhs, and
  `jp.training.ragged_dot_general` for rhs: results and gradients have the bits
  of those with x itself. The gradient goes to x, through this function, also
  summed over a `scan`, under `jax.checkpoint`, `vmap`, `jit` with shardings and
  `shard_map`; numbers of x are not read by the products. To differentiate by x
  where the copies are made outside, see `with_primal` and
  `jp.training.with_primals`.

  The backward pass keeps nothing but the copies that are here. That of
  activations has the name "jaxplugin_quantized_operand" for policies of
  `jax.checkpoint`, and `checkpoint_policies.quantized_saveable` saves it; that
  of weights has none, as it lives outside of what is computed again.

  Weights of all layers: `jax.lax.map(lambda w: jp.quantize_operand(w, recipe),
  stack)`, and a `scan` over what it returns. `jax.vmap` makes the same, but a
  format with a global scale by operations, as kernels take one such scale.

  Args:
    x: f32, bf16 or f16, what the product would be given.
    recipe: as of the function that takes it; or a format or its name, which is
      then that of weights, activations and gradients. The copies serve any
      recipe that would make the same.
    role: what of the recipe it is: "weight" or "activation".
    contracting: what the forward product contracts of x, in its order. By
      default the first dimension of weights that is no batch dimension, as in
      `x @ w`, and the last one of activations.
    batch: the forward product's batch dimensions of x, in its order; groups of
      `ragged_dot_general` are one: contracting=2, batch=0.

  Returns:
    A `QuantizedOperand`, a pytree.

  Raises:
    TypeError: x is no float array, recipe is none, or it leaves this role as it
      is; from a function that takes the result: its role, contraction or
      recipe is another one.
    ValueError: role is unknown, or contracting or batch are no dimensions of x.
  """
  recipe = recipes.resolve(WHO, "recipe", recipe)
  if role not in _ROLES:
    raise ValueError(
      f"{WHO}: role must be one of {_ROLES}, got {speaking.shown(role)}"
    )
  with speaking.speaking_for(WHO):
    x = api.float_operand("x", x)
  own = _own_dims(x.ndim, role, contracting, batch)
  wanted = _wanted(recipe, role, x, *own)
  forward, backward = _copies(wanted, recipe)
  if forward is None and backward is None:
    raise TypeError(
      f"{WHO}: recipe must quantize {role}s in a matmul, got {recipe!r}; pass"
      " the array itself to dot_general"
    )
  manners = [m for m in (forward, backward) if m is not None]
  # Its derivative goes to the primal, past the copies.
  made = products.quantized(lax.stop_gradient(x), manners, who=WHO)
  copies = dict(zip(manners, map(_integers, made), strict=True))
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
  """The two arguments of `quantize_operand` as dimensions of x."""
  given = {"contracting": contracting, "batch": batch}
  found: dict[str, sides.Dims] = {}
  for name, dims in reversed(given.items()):
    if dims is None:
      free = [d for d in range(ndim) if d not in found["batch"]]
      dims = free[:1] if role == "weight" else free[-1:]
    try:
      dims = (dims,) if isinstance(dims, int) else tuple(dims)
      found[name] = tuple(range(ndim)[operator.index(d)] for d in dims)
    except (TypeError, IndexError):
      raise ValueError(
        f"{WHO}: {name} must be dimensions of x, from {-ndim} to {ndim - 1},"
        f" got {speaking.shown(given[name])}"
      ) from None
  both = (*found["contracting"], *found["batch"])
  if len(set(both)) != len(both):
    raise ValueError(
      f"{WHO}: contracting and batch must be dimensions of x, each once, got"
      f" contracting={speaking.shown(given['contracting'])} and"
      f" batch={speaking.shown(given['batch'])}"
    )
  return found["contracting"], found["batch"]


def _wanted(
  recipe: recipes.Recipe,
  role: Role,
  x: jax.Array,
  contracting: sides.Dims,
  batch: sides.Dims,
) -> products.Operand:
  """The operand of a product with anything that it fits."""
  other = jax.ShapeDtypeStruct(
    (*(x.shape[d] for d in (*batch, *contracting)), 1), x.dtype
  )
  other_batch = tuple(range(len(batch)))
  other_contracting = tuple(len(batch) + i for i in range(len(contracting)))
  own: Any = (contracting, batch)
  both: list[Any] = [(other_contracting, other_batch), own]
  arrays: list[Any] = [other, x]
  if role == "activation":
    both, arrays = both[::-1], arrays[::-1]
  setting = settings.Setting(
    scheme=products.Scheme(recipe=recipe, weight="rhs", who=WHO),
    numbers=((both[0][0], both[1][0]), (both[0][1], both[1][1])),
    precision=None,
    dtype=x.dtype,
  )
  return setting.differentiated(*arrays)[_SIDES[role]]


def _copies(
  wanted: products.Operand, recipe: recipes.Recipe
) -> tuple[operands.Manner | None, operands.Manner | None]:
  """How those copies are quantized that products take, forward and backward."""
  is_forward = recipe.quantize_forward or wanted.keeps_forward
  return (
    wanted.forward if is_forward else None,
    None if wanted.keeps_forward else wanted.backward,
  )


# Taken by a product.


def primal_of(x: Any) -> Any:
  """The array of a `QuantizedOperand`; anything else as it is."""
  return x.primal if isinstance(x, QuantizedOperand) else x


def taken(
  given: tuple[Any, Any],
  arrays: tuple[jax.Array, jax.Array],
  setting: settings.Setting,
) -> dict[products.Side, products.Held]:
  """The copies of those operands that are `QuantizedOperand`s, by side.

  Args:
    given: lhs and rhs.
    arrays: the same as arrays.
    setting: of the call.

  Raises:
    TypeError: one was quantized for another role, contraction or recipe than
      this call's.
  """
  if not any(isinstance(x, QuantizedOperand) for x in given):
    return {}
  held = {}
  wanted = setting.differentiated(*arrays)
  for (side, operand), x in zip(wanted.items(), given, strict=True):
    if isinstance(x, QuantizedOperand):
      _validate(side, x, setting, operand)
      held[side] = x.held()
  return held


def _validate(
  side: products.Side,
  x: QuantizedOperand,
  setting: settings.Setting,
  wanted: products.Operand,
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
  if (x.use.contracting, x.use.batch) != (contracting, batch):
    raise TypeError(
      f"{scheme.who}: {side} must be quantized for contracting dimensions"
      f" {list(contracting)} and batch dimensions {list(batch)}, got one for"
      f" {list(x.use.contracting)} and {list(x.use.batch)}, {x!r}; pass"
      f" contracting={contracting}, batch={batch} to quantize_operand"
    )
  pairs = zip(
    ("forward", "backward"),
    _copies(wanted, scheme.recipe),
    (x.use.forward, x.use.backward),
    strict=True,
  )
  for name, manner, own in pairs:
    if manner is not None and not _is_same(own, manner, x.shape):
      raise TypeError(
        f"{scheme.who}: the {name} pass needs {side} as {_described(manner)},"
        f" got {_described(own)} in {x!r}; pass the same recipe to"
        " quantize_operand"
      )


def _is_same(
  own: operands.Manner | None, wanted: operands.Manner, shape: sides.Dims
) -> bool:
  """Whether both make one copy of an array of a shape."""
  if own is None:
    return False

  def effective(manner: operands.Manner) -> Any:
    along = manner.along
    # Of one dimension others do not move; padding is what its size becomes.
    lead = along.lead if len(along.dims) != 1 else ()
    bare = dataclasses.replace(along, lead=lead, multiple=1)
    return dataclasses.replace(manner, along=bare), along.shape(shape)

  return bool(effective(own) == effective(wanted))


def _described(manner: operands.Manner | None) -> str:
  if manner is None:
    return "nothing"
  along, extras = manner.along, str(manner.extras)
  return (
    f"{manner.format} along {list(along.dims)} in multiples of {along.multiple}"
    f", scales rounded {manner.scale_rounding}{', ' if extras else ''}{extras}"
  )


# Copies as integers: no parameters, and what XLA:CPU slices as it is.


def _integers(x: scaled_array.ScaledArray) -> scaled_array.ScaledArray:
  (values, scale, global_scale), aux = products.bits_of(x).tree_flatten()
  if global_scale is not None:
    global_scale = lax.bitcast_convert_type(global_scale, jnp.uint32)
  return x.tree_unflatten(aux, (values, scale, global_scale))


def _bits(x: Any) -> Any:
  """As `products.bits_of` has it."""
  if x is None:
    return None
  (values, scale, global_scale), aux = x.tree_flatten()
  if global_scale is not None:
    global_scale = lax.bitcast_convert_type(global_scale, jnp.float32)
  return x.tree_unflatten(aux, (values, scale, global_scale))


def _floats(x: Any) -> Any:
  return None if x is None else products.of_bits(_bits(x))

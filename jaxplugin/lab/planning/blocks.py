# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A transformer's block forward and backward, with its shardings.

Root mean square norm, causal attention, norm, and an MLP with SiLU's gate, or
one for each expert. What moves nothing is left out: rotary embeddings, and the
weights of norms. So is a router: a device sends each expert equally many rows,
which what they hold does not change.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from jaxplugin.lab.planning import layouts

_EPSILON: Final = 1e-5
# [batch, sequence, k] x [k, n]; [experts, rows, k] x [experts, k, n].
_NUMBERS: Final = (((2,), (0,)), ((), ()))
_EXPERTS_NUMBERS: Final = (((2,), (1,)), ((0,), (0,)))

DotGeneral = Callable[..., jax.Array]
# Of what several products take, what they are given.
Share = Callable[[jax.Array], Any]
Weights = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
  """Sizes of one block, and of what is given to it.

  Attributes:
    channels: of the residual stream.
    hidden: channels inside the MLP.
    heads, kv_heads, head_size: of attention.
    batch: sequences, on all devices.
    sequence: tokens of each.
    remat: whether the backward pass computes all of the forward pass again.
    experts: how many MLPs; 0 is one that all tokens have.
    top: experts that a token is sent to.
  """

  channels: int
  hidden: int
  heads: int
  kv_heads: int
  head_size: int
  batch: int
  sequence: int
  remat: bool = False
  experts: int = 0
  top: int = 0

  @property
  def weights(self) -> dict[str, tuple[int, ...]]:
    """[k, n] of each weight; those of experts are [experts, k, n]."""
    experts = (self.experts,) if self.experts else ()
    inner = self.heads * self.head_size
    keys = self.kv_heads * self.head_size
    return {
      "query": (self.channels, inner),
      "key": (self.channels, keys),
      "value": (self.channels, keys),
      "out": (inner, self.channels),
      "gate": (*experts, self.channels, self.hidden),
      "up": (*experts, self.channels, self.hidden),
      "down": (*experts, self.hidden, self.channels),
    }

  @property
  def rows(self) -> tuple[int, int, int]:
    """[batch, sequence, channels]."""
    return self.batch, self.sequence, self.channels


# What the tests measure: small, and every size a multiple of what shardings
# over 8 devices and blocks of 32 need.
SMALL: Final = Block(
  channels=1024,
  hidden=4096,
  heads=8,
  kv_heads=8,
  head_size=128,
  batch=8,
  sequence=256,
)


def check(block: Block, layout: layouts.Layout) -> None:
  """Raises ValueError where a size is no multiple of what splits it."""
  tp, fsdp = layout.size("tp"), layout.size("fsdp")
  if "ep" in layout.names and not block.experts:
    raise ValueError(
      "plan: layout must not have ep for a model without experts, got"
      f" {layout}; use dp or fsdp instead"
    )
  split = {
    "batch": (block.batch, layout.size("dp", "fsdp", "ep")),
    "sequence": (block.sequence, tp if layout.splits_sequence else 1),
    "heads": (block.heads, tp),
    "kv_heads": (block.kv_heads, tp),
    "hidden": (block.hidden, tp),
    "channels": (block.channels, fsdp),
    "experts": (block.experts, layout.size("ep")),
  }
  for name, (size, parts) in split.items():
    if size % parts:
      raise ValueError(
        f"plan: {name} must be a multiple of the {parts} devices that"
        f" {layout} splits it over, got {size}"
      )
  rows = block.batch * block.sequence * block.top
  senders = layout.size("dp", "fsdp", "ep") * max(block.experts, 1)
  if rows % senders:
    raise ValueError(
      "plan: batch x sequence x top must be a multiple of the devices that send"
      f" and the experts, {senders}, got {rows}"
    )


def forward(
  block: Block,
  layout: layouts.Layout,
  mesh: Mesh,
  dot_general: DotGeneral,
  share: Share,
  weights: Weights,
  x: jax.Array,
) -> jax.Array:
  """The block.

  Args:
    block, layout: what and how.
    mesh: of the layout's axes.
    dot_general: of the products with weights, as `lax.dot_general`.
    share: makes of x that several products take what they take.
    weights: bf16[k, n] each, as `Block.weights` has them.
    x: bf16[batch, sequence, channels].

  Returns:
    bf16[batch, sequence, channels].
  """

  def split(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

  def split_inside(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    return x if layout.is_free else split(x, spec)

  def linear(x: Any, name: str) -> jax.Array:
    return dot_general(x, weights[name], _NUMBERS)

  x = split(x, layout.tokens())
  shared = share(_norm(x))
  size = block.head_size
  query, key, value = (
    split_inside(
      linear(shared, name).reshape(*x.shape[:2], -1, size), layout.heads()
    )
    for name in ("query", "key", "value")
  )
  y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
  y = split(y.reshape(*x.shape[:2], -1), layout.hidden())
  x = split(x + linear(y, "out"), layout.tokens())
  y = _norm(x)
  if block.experts:
    return split(
      x + _experts(block, layout, split, dot_general, weights, y),
      layout.tokens(),
    )
  shared = share(y)
  y = jax.nn.silu(linear(shared, "gate")) * linear(shared, "up")
  y = split_inside(y, layout.hidden())
  return split(x + linear(y, "down"), layout.tokens())


def _experts(
  block: Block,
  layout: layouts.Layout,
  split: Callable[[jax.Array, PartitionSpec], jax.Array],
  dot_general: DotGeneral,
  weights: Weights,
  x: jax.Array,
) -> jax.Array:
  """The MLPs of experts, and the sum of what they make of each token.

  Rows of a device are sent to the devices of their experts and back. A token's
  experts are not chosen: row i of top times the tokens is expert i's, modulo
  their number.
  """
  devices = layout.size("dp", "fsdp", "ep")
  channels = x.shape[-1]
  y = jnp.repeat(x.reshape(devices, -1, channels), block.top, axis=1)
  y = y.reshape(devices, -1, block.experts, channels)
  y = split(y, layout.sent(None))
  y = split(y.transpose(2, 0, 1, 3), layout.sent("experts"))
  shape = y.shape
  y = y.reshape(block.experts, -1, channels)
  gate, up = (
    dot_general(y, weights[name], _EXPERTS_NUMBERS) for name in ("gate", "up")
  )
  y = dot_general(jax.nn.silu(gate) * up, weights["down"], _EXPERTS_NUMBERS)
  y = split(y.reshape(shape), layout.sent("experts"))
  y = split(y.transpose(1, 2, 0, 3), layout.sent(None))
  y = y.reshape(*x.shape[:2], block.top, channels)
  return y.astype(jnp.float32).sum(2).astype(x.dtype)


def _norm(x: jax.Array) -> jax.Array:
  wide = x.astype(jnp.float32)
  mean = jnp.square(wide).mean(-1, keepdims=True)
  return (wide * lax.rsqrt(mean + _EPSILON)).astype(x.dtype)


def step(
  block: Block,
  layout: layouts.Layout,
  mesh: Mesh,
  dot_general: DotGeneral = lax.dot_general,
  share: Share = lambda x: x,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """A function of a block's result and gradients, and its arguments.

  Args:
    block, layout: what and how.
    mesh: of the layout's axes, of devices that need not be there.
    dot_general: of the products with weights, as `lax.dot_general`.
    share: of what several products take: query, key and value, gate and up.

  Returns:
    step(weights, x, g), which returns the block's result and the gradients with
    respect to weights and x, each split as what it is a gradient of; and
    abstract arguments with shardings, all of them bf16.

  Raises:
    ValueError: a size is no multiple of the devices that it is split over.
  """
  check(block, layout)
  tokens = NamedSharding(mesh, layout.tokens())
  weight_shardings = {
    name: NamedSharding(
      mesh,
      layout.weight(
        into_channels=name in ("out", "down"), of_experts=len(shape) == 3
      ),
    )
    for name, shape in block.weights.items()
  }
  function: Any = functools.partial(
    forward, block, layout, mesh, dot_general, share
  )
  if block.remat:
    function = jax.checkpoint(function)

  def run(weights: Weights, x: jax.Array, g: jax.Array) -> Any:
    y, vjp = jax.vjp(function, weights, x)
    weights, x = vjp(g)
    # Else the compiler may leave a gradient on every device whole.
    weights = lax.with_sharding_constraint(weights, weight_shardings)
    return y, weights, lax.with_sharding_constraint(x, tokens)

  weights = {
    name: jax.ShapeDtypeStruct(
      size, jnp.bfloat16, sharding=weight_shardings[name]
    )
    for name, size in block.weights.items()
  }
  rows = jax.ShapeDtypeStruct(block.rows, jnp.bfloat16, sharding=tokens)
  return run, (weights, rows, rows)

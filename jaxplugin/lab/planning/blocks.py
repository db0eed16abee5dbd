# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a sharded transformer block forward and backward.

The block has RMSNorm, causal attention, RMSNorm, and a gated MLP or one such
MLP for each expert. The block omits rotary embeddings and the weights of
RMSNorm, because they move almost no bytes between devices. The block has no
router: each device sends the same number of rows to each expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxplugin.arrays import scaled_array
from jaxplugin.dropin import producers
from jaxplugin.lab.planning import layouts
from jaxplugin.training import accumulation

_EPSILON: Final = 1e-5
_ALPHA: Final = 1.702  # of gpt-oss's activation, and its limit
_LIMIT: Final = 7.0
# [batch, sequence, k] x [k, n], and [experts, rows, k] x [experts, k, n].
_NUMBERS: Final = (((2,), (0,)), ((), ()))
_EXPERTS_NUMBERS: Final = (((2,), (1,)), ((0,), (0,)))

DotGeneral = Callable[..., jax.Array]
# Quantizes an array once for several matmuls: for query, key and value, or for
# gate and up.
Share = Callable[[jax.Array], Any]
Weights = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerBlock:
  """Sizes of one block and its input."""

  channels: int  # of the residual stream
  hidden: int  # channels of the MLP
  heads: int
  kv_heads: int
  head_size: int
  layers: int = 1  # number of blocks in the model
  experts: int = 0  # 0 for a dense model
  top: int = 0  # number of experts per token
  activation: Literal["silu", "swigluoai"] = "silu"
  batch: int = 1  # number of sequences on all devices together
  sequence: int = 1  # number of tokens in a sequence
  remat: bool = False  # whether the backward pass recomputes the forward pass

  @property
  def weights(self) -> dict[str, tuple[int, ...]]:
    """Shape [k, n] of each weight; [experts, k, n] for experts."""
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
    """Shape [batch, sequence, channels] of the input."""
    return self.batch, self.sequence, self.channels


def _model(
  layers: int,
  channels: int,
  hidden: int,
  heads: tuple[int, int, int],
  **more: Any,
) -> TransformerBlock:
  count, kv_count, size = heads
  return TransformerBlock(
    layers=layers,
    channels=channels,
    hidden=hidden,
    heads=count,
    kv_heads=kv_count,
    head_size=size,
    **more,
  )


# "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3; "gpt-oss-120b &
# gpt-oss-20b Model Card" (arXiv:2508.10925), table 1. "small" is for tests: 8
# devices divide its sizes.
MODELS: Final = {
  "small": _model(1, 1024, 4096, (8, 8, 128)),
  "llama3-8b": _model(32, 4096, 14336, (32, 8, 128)),
  "llama3-70b": _model(80, 8192, 28672, (64, 8, 128)),
  "llama3-405b": _model(126, 16384, 53248, (128, 8, 128)),
  "gpt-oss-120b": _model(
    *(36, 2880, 2880, (64, 8, 64)),
    experts=128,
    top=4,
    activation="swigluoai",
  ),
}


def check(
  block: TransformerBlock,
  layout: layouts.MeshLayout,
  microbatches: int | None = None,
) -> None:
  """Raises ValueError unless the layout and microbatches fit the block."""
  if microbatches is not None:
    parts = microbatches * layout.size("dp", "fsdp")
    if "ep" in layout.names or block.batch % parts:
      raise ValueError(
        "plan: --microbatches needs a layout without ep and a batch that is a"
        f" multiple of {parts}, got {layout} and batch {block.batch}. Change"
        " --layout or --batch."
      )
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedBlock:
  """A block whose arrays are sharded.

  Attributes:
    sizes, layout: sizes and shardings that fit (`check`).
    mesh: a mesh with the layout's axes. The devices may be absent.
    dot_general: multiplies activations by weights, as `lax.dot_general` does.
    share: see `Share`.
    out_format: format that norms and activations return (`out_format=`); None
      for bf16, which `dot_general` quantizes.
  """

  sizes: TransformerBlock
  layout: layouts.MeshLayout
  mesh: Mesh
  dot_general: DotGeneral
  share: Share
  out_format: str | None = None

  def _split(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    if not self.layout.axes:
      return x
    return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

  def forward(self, weights: Weights, x: jax.Array) -> jax.Array:
    """Returns the block's output, bf16[batch, sequence, channels]."""
    layout, split = self.layout, self._split

    def linear(x: Any, name: str) -> jax.Array:
      return self.dot_general(x, weights[name], _NUMBERS)

    x = split(x, layout.tokens())
    shared = self.share(self._norm(x))
    size = self.sizes.head_size
    query, key, value = (
      split(
        linear(shared, name).reshape(*x.shape[:2], -1, size), layout.hidden()
      )
      for name in ("query", "key", "value")
    )
    y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    y = split(y.reshape(*x.shape[:2], -1), layout.hidden())
    if self.out_format is None:
      x = split(x + linear(y, "out"), layout.tokens())
      y = self._norm(x)
    else:
      y, x = self._norm(x, linear(y, "out"))
    if self.sizes.experts:
      return split(x + self._experts(weights, y), layout.tokens())
    y = self.share(y)
    y = self._activation(linear(y, "gate"), linear(y, "up"))
    if self.out_format is None:
      y = split(y, layout.hidden())
    return split(x + linear(y, "down"), layout.tokens())

  def _norm(self, x: jax.Array, residual: jax.Array | None = None) -> Any:
    """Returns the norm, and x + residual if there is one."""
    if self.out_format is not None:
      return producers.rms_norm(
        x, residual=residual, epsilon=_EPSILON, out_format=self.out_format
      )
    with jax.named_scope("norm"):
      return _norm(x)

  def _activation(self, gate: jax.Array, up: jax.Array) -> Any:
    is_silu = self.sizes.activation == "silu"
    if self.out_format is not None:
      function = producers.silu_and_mul if is_silu else producers.swigluoai
      return function(gate, up, out_format=self.out_format)
    with jax.named_scope(self.sizes.activation):
      if is_silu:
        return jax.nn.silu(gate) * up
      gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
      return gate * jax.nn.sigmoid(_ALPHA * gate) * (up + 1)

  def _experts(self, weights: Weights, x: Any) -> jax.Array:
    """Returns the sum of the outputs of each token's experts.

    Each device repeats its tokens `top` times and sends the rows to the devices
    of their experts, which send the results back. There is no router: row i of
    a device belongs to expert i modulo the number of experts.
    """
    layout, split = self.layout, self._split
    experts, top = self.sizes.experts, self.sizes.top
    devices = layout.size("dp", "fsdp", "ep")

    def send(x: jax.Array) -> jax.Array:
      size = x.shape[-1]
      y = jnp.repeat(x.reshape(devices, -1, size), top, axis=1)
      y = split(y.reshape(devices, -1, experts, size), layout.rows())
      y = split(y.transpose(2, 0, 1, 3), layout.sent_rows())
      return y.reshape(experts, -1, size)

    y = mapped(send, x)
    linear = lambda y, name: self.dot_general(
      y, weights[name], _EXPERTS_NUMBERS
    )
    y = linear(self._activation(linear(y, "gate"), linear(y, "up")), "down")
    y = y.reshape(experts, devices, -1, x.shape[-1])
    y = split(y, layout.sent_rows())
    y = split(y.transpose(1, 2, 0, 3), layout.rows())
    y = y.reshape(*x.shape[:2], top, x.shape[-1])
    return y.astype(jnp.float32).sum(2).astype(y.dtype)

  def _function(self) -> Callable[..., Any]:
    return jax.checkpoint(self.forward) if self.sizes.remat else self.forward

  def arguments(self) -> tuple[Weights, jax.ShapeDtypeStruct]:
    """Returns weights and rows as abstract bf16 arrays with shardings."""

    def array(shape: tuple[int, ...], spec: PartitionSpec) -> Any:
      sharding = NamedSharding(self.mesh, spec)
      return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    weights = {
      name: array(
        shape,
        self.layout.weight(
          into_channels=name in ("out", "down"), of_experts=len(shape) == 3
        ),
      )
      for name, shape in self.sizes.weights.items()
    }
    return weights, array(self.sizes.rows, self.layout.tokens())

  def step(
    self, transform: Callable[..., Any] = lambda forward: forward
  ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a training step and its abstract arguments.

    The function step(weights, x, g) returns the output and the gradients with
    respect to weights and x, where g is the output's cotangent. A gradient has
    the sharding of its array. `transform` transforms the forward pass.
    """
    weights, rows = self.arguments()
    shardings = jax.tree.map(lambda x: x.sharding, (weights, rows))

    def run(weights: Weights, x: jax.Array, g: jax.Array) -> Any:
      y, vjp = jax.vjp(transform(self._function()), weights, x)
      # Without a constraint, XLA may replicate a gradient on every device.
      return y, *lax.with_sharding_constraint(vjp(g), shardings)

    return run, (weights, rows, rows)

  def microbatch_step(
    self, count: int, *, is_summed_once: bool
  ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a training step that sums f32 gradients of microbatches.

    The function has the arguments of `step`. It returns a loss and the
    gradients with respect to the weights and to a vector that is added to each
    row. So the gradient with respect to the rows is computed, too.

    Args:
      count: number of microbatches. Each has rows of every device.
      is_summed_once: whether `jp.training.accumulate` sums over dp and fsdp
        once. Otherwise a loop constrains the gradients of each microbatch.
    """
    weights, rows = self.arguments()
    shardings = jax.tree.map(lambda w: w.sharding, weights)
    axes = tuple(n for n in self.layout.names if n in ("dp", "fsdp"))
    block = self
    if is_summed_once:
      rest = tuple(axis for axis in self.layout.axes if axis[0] not in axes)
      layout = dataclasses.replace(self.layout, axes=rest)
      block = dataclasses.replace(self, layout=layout)
    function = block._function()

    def loss(params: Any, x: jax.Array, g: jax.Array) -> jax.Array:
      weights, vector = params
      y = function(weights, x + vector)
      return (y.astype(jnp.float32) * g.astype(jnp.float32)).sum()

    def keep(params: Any) -> Any:
      weights, vector = params
      return lax.with_sharding_constraint(weights, shardings), vector

    def loop(params: Any, *batch: jax.Array) -> Any:
      def part(total: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        added = value, keep(gradient)
        add = lambda a, b: a + b.astype(a.dtype)
        return jax.tree.map(add, total, added), ()

      def split(x: jax.Array) -> jax.Array:
        x = x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)
        return self._split(x, PartitionSpec(None, *self.layout.tokens()))

      zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
      total = jnp.zeros(()), keep(zeros)
      return lax.scan(part, total, jax.tree.map(split, batch))[0]

    accumulated: Callable[..., Any] = loop
    if is_summed_once:
      accumulated = accumulation.accumulate(
        loss,
        count,
        axes=axes,
        mesh=self.mesh,
        batch_argnums=(1, 2),
        reduction="sum",
      )

    def run(weights: Weights, x: jax.Array, g: jax.Array) -> Any:
      vector = jnp.zeros(self.sizes.channels, x.dtype)
      value, gradient = accumulated((weights, vector), x, g)
      return value, keep(gradient)

    return run, (weights, rows, rows)


def mapped(move: Callable[[jax.Array], jax.Array], x: Any) -> Any:
  """Moves the rows of an array, or those of values and scales."""
  if not isinstance(x, scaled_array.ScaledArray):
    return move(x)
  values, scale = move(x.values), move(x.scale)
  global_scale = x.global_scale
  if global_scale is not None:
    global_scale = global_scale.reshape(())
  return scaled_array.ScaledArray(values, scale, global_scale, x.format)


def _norm(x: jax.Array) -> jax.Array:
  wide = x.astype(jnp.float32)
  mean = jnp.square(wide).mean(-1, keepdims=True)
  return (wide * lax.rsqrt(mean + _EPSILON)).astype(x.dtype)

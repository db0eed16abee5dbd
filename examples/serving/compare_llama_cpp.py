# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares SmolLM2-135M-Instruct in jaxplugin and in llama.cpp.

  npm pack @node-llama-cpp/linux-x64     # and unpack the file
  python examples/serving/compare_llama_cpp.py \\
    --library package/bins/linux-x64 --cpu zen4

Both read the same GGUF file. Each runs in a process with --threads cores, and
the processes take turns. The report has these columns:

  equal   number of 10 greedy answers whose 64 tokens are those of llama.cpp
  agree   part of the tokens of llama.cpp's answers that the model predicts
          after the same text
  logits  norm of the difference to llama.cpp's logits, relative to these
  to f32  the same, relative to the stored weights with f32 rows
  ppl     perplexity of the text
  ms      milliseconds for the whole prompt
  tok/s   tokens a second after the prompt
  x       speedup over llama.cpp, the median of the rounds

"stored, fastest" has f32 rows and precision="fastest": a matmul rounds many
rows to 8-bit integers with a scale factor for 32 values, as llama.cpp does, and
with AVX-512 BF16 a few rows to bf16. The text is the chapter "Objects, values
and types" of Python's language reference, from the standard library's
`pydoc_data`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

QUESTIONS: Final = (
  "What is the capital of France?",
  "Explain in two sentences why the sky is blue.",
  "Write a short poem about the sea.",
  "List three uses of copper.",
  "How do plants make their food?",
  "Tell me a story about a dog that finds a key.",
  "What is the difference between weather and climate?",
  "How do I boil an egg?",
  "Who wrote Romeo and Juliet, and what is it about?",
  "Give me advice for a job interview.",
)
TOKENS: Final = 64
TOPIC: Final = "objects"  # of pydoc_data
BF16: Final = "stored, bf16 rows"
F32: Final = "stored, f32 rows"
FASTEST: Final = "stored, fastest"
FORMATS: Final = ("mxfp8", "nvfp4", "mxfp4")
LLAMA_CPP: Final = "llama.cpp"
_STEPS: Final = 16  # tokens that one call decodes


class Ours:
  """The decoder, with the interface of `llama_cpp.LlamaCpp`."""

  def __init__(self, name: str, path: pathlib.Path | None, slots: int):
    import decoder
    import decoder_weights
    import jax
    import smollm

    checkpoint = smollm.load(path)
    if name in decoder_weights.NAMES:
      model = decoder_weights.model(
        name, checkpoint.config, checkpoint.dequantized()
      )
    else:
      how = decoder.Decoder(
        config=checkpoint.config,
        given="bfloat16" if name == BF16 else "float32",
        precision="fastest" if name == FASTEST else None,
      )
      model = decoder_weights.Model(
        name=name,
        decoder=how,
        params=checkpoint.params,
      )
    self._decoder, self._params = model.decoder, model.params
    self._new_cache = lambda: model.new_cache([0], slots)
    self._tokenizer = checkpoint.tokenizer
    self._encode = checkpoint.encode
    self._module = decoder
    self._cache = self._new_cache()

    def logits(how: Any, params: Any, tokens: Any, cache: Any) -> jax.Array:
      x, _ = decoder.forward(how, params, tokens, cache)
      return decoder.logits(how, params, x[0])

    self._logits = jax.jit(logits, static_argnums=0)

  def encode(self, question: str) -> list[int]:
    return self._encode(question)

  def tokenize(self, text: str) -> list[int]:
    return self._tokenizer.encode(text).ids

  def logits(self, tokens: Sequence[int]) -> np.ndarray:
    result = self._logits(
      self._decoder, self._params, _padded(tokens), self._new_cache()
    )
    return np.asarray(result[: len(tokens)])

  def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
    tokens = [self._prefill(_padded(prompt), len(prompt))]
    while _STEPS * (len(tokens) - 1) + 1 < count:
      tokens.append(self._decode(tokens[-1][-1:]))
    return np.concatenate(tokens)[:count].tolist()

  def times(self, prompt: Sequence[int], count: int) -> tuple[float, float]:
    start = time.perf_counter()
    token = self._prefill(np.array([prompt], np.int32), len(prompt))
    middle = time.perf_counter()
    for _ in range(0, count, _STEPS):
      token = self._decode(token[-1:])
    return middle - start, (time.perf_counter() - middle) / count

  def environment(self) -> dict[str, Any]:
    from jaxplugin.lab.bench import devices

    return devices.environment(devices.find("cpu"))

  def _prefill(self, tokens: np.ndarray, count: int) -> np.ndarray:
    token, self._cache = self._module.prefill(
      self._decoder,
      self._params,
      tokens,
      cache=self._cache._replace(length=np.int32(0)),
      count=np.int32(count),
    )
    return np.asarray(token)

  def _decode(self, token: np.ndarray) -> np.ndarray:
    tokens, self._cache = self._module.decode(
      self._decoder, self._params, token, steps=_STEPS, cache=self._cache
    )
    return np.asarray(tokens[:, 0])


def _padded(tokens: Sequence[int]) -> np.ndarray:
  """Returns i32[1, multiple of 128]: programs of few sizes are compiled."""
  return np.pad(np.array(tokens, np.int32), (0, -len(tokens) % 128))[None]


class Process:
  """A model in a separate process, with some cores."""

  def __init__(self, args: argparse.Namespace, name: str, threads: int):
    context = multiprocessing.get_context("spawn")
    self._connection, other = context.Pipe()
    self._process = context.Process(
      target=_answer_calls, args=(other, args, name, threads), daemon=True
    )
    self._process.start()

  def __getattr__(self, name: str) -> Any:
    def call(*args: Any) -> Any:
      self._connection.send((name, args))
      result = self._connection.recv()
      if isinstance(result, BaseException):
        raise result
      return result

    return call

  def close(self) -> None:
    self._connection.send(None)
    self._process.join()


def _answer_calls(
  connection: Any, args: argparse.Namespace, name: str, threads: int
) -> None:
  cores = sorted(os.sched_getaffinity(0))[:threads]
  os.sched_setaffinity(0, cores)
  model: Any = None
  while (call := connection.recv()) is not None:
    try:
      if model is None:
        model = _model(args, name, threads)
      method, arguments = call
      connection.send(getattr(model, method)(*arguments))
    except Exception as error:
      connection.send(error)


def _model(args: argparse.Namespace, name: str, threads: int) -> Any:
  if name != LLAMA_CPP:
    return Ours(name, args.file, args.slots)
  import llama_cpp
  import smollm

  return llama_cpp.LlamaCpp(
    args.library,
    args.cpu,
    args.file or smollm.find(),
    threads=threads,
    slots=args.slots,
  )


def text_of(name: str) -> str:
  """Returns a text of the language's reference, in Python's own package."""
  from pydoc_data import topics

  return topics.topics[name]


def perplexity(logits: np.ndarray, tokens: Sequence[int]) -> float:
  """Returns exp of the mean of -log(probability) of each next token."""
  x = logits[:-1].astype(np.float64)
  x -= x.max(axis=-1, keepdims=True)
  log_sums = np.log(np.exp(x).sum(axis=-1))
  chosen = np.take_along_axis(x, np.asarray(tokens)[1:, None], -1)[:, 0]
  return float(np.exp((log_sums - chosen).mean()))


def compare_texts(processes: dict[str, Any], size: int) -> list[dict[str, Any]]:
  """Returns a row for each model: its answers, logits and perplexity."""
  theirs, *_ = processes.values()
  ours = next(x for name, x in processes.items() if name != LLAMA_CPP)
  text = text_of(TOPIC)
  tokens = ours.tokenize(text)[:size]
  if theirs.tokenize(text)[:size] != tokens:
    raise ValueError("compare_texts: tokens of the two models differ")
  prompts = [ours.encode(question) for question in QUESTIONS]
  answers = [theirs.greedy(prompt, TOKENS) for prompt in prompts]
  references = {
    name: processes[name].logits(tokens)
    for name in (LLAMA_CPP, F32)
    if name in processes
  }
  rows = []
  for name, process in processes.items():
    logits = process.logits(tokens)
    equal, agree = [], 0
    for prompt, answer in zip(prompts, answers, strict=True):
      own = process.greedy(prompt, TOKENS)
      differs = np.flatnonzero(np.not_equal(own, answer))
      equal.append(int(differs[0]) if len(differs) else TOKENS)
      said = process.logits([*prompt, *answer]).argmax(axis=-1)
      agree += int((said[len(prompt) - 1 : -1] == answer).sum())
    rows.append(
      {
        "name": name,
        "equal_tokens": equal,
        "agreement": agree / (TOKENS * len(prompts)),
        "logits_errors": {
          reference: float(np.linalg.norm(logits - x) / np.linalg.norm(x))
          for reference, x in references.items()
        },
        "perplexity": perplexity(logits, tokens),
      }
    )
  return rows


def compare_speed(
  processes: dict[str, Any],
  settings: Sequence[tuple[int, int]],
  rounds: int,
) -> list[dict[str, Any]]:
  """Returns seconds of each round for (prompt, decoded tokens) and model."""
  *_, ours = processes.values()
  tokens = ours.tokenize(text_of(TOPIC))
  rows = []
  for prompt, count in settings:
    times: dict[str, Any] = {name: [] for name in processes}
    for process in processes.values():
      process.times(tokens[:prompt], _STEPS)
    for turn in range(rounds):
      for i in np.roll(np.arange(len(processes)), turn):
        name = list(processes)[i]
        times[name].append(processes[name].times(tokens[:prompt], count))
    rows += [
      {
        "name": name,
        "prompt_tokens": prompt,
        "decoded_tokens": count,
        "prompt_seconds": [x for x, _ in pairs],
        "token_seconds": [x for _, x in pairs],
      }
      for name, pairs in times.items()
    ]
  return rows


def text_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
  """Returns lines for a reader."""
  lines = [
    f"{'':20}{'equal':>8}{'agree':>8}{'logits':>10}{'to f32':>10}{'ppl':>9}"
  ]
  for row in rows:
    equal = sum(x == TOKENS for x in row["equal_tokens"])
    lines.append(
      f"{row['name']:20}{f'{equal} of 10':>8}{row['agreement']:8.1%}"
      f"{row['logits_errors'][LLAMA_CPP]:10.2e}"
      f"{row['logits_errors'].get(F32, np.nan):10.2e}"
      f"{row['perplexity']:9.3f}"
    )
  return lines


def speed_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
  """Returns lines for a reader; ratios are medians of those of a round."""
  lines = [
    f"{'':20}{'prompt':>8}{'ms':>9}{'x':>6}{'decode':>8}{'tok/s':>8}{'x':>6}"
  ]
  for row in rows:
    (theirs,) = (
      x
      for x in rows
      if x["name"] == LLAMA_CPP
      and all(x[y] == row[y] for y in ("prompt_tokens", "decoded_tokens"))
    )
    prompt, token = (
      float(np.median(np.divide(theirs[x], row[x])))
      for x in ("prompt_seconds", "token_seconds")
    )
    lines.append(
      f"{row['name']:20}{row['prompt_tokens']:8}"
      f"{1e3 * np.median(row['prompt_seconds']):9.1f}{prompt:6.2f}"
      f"{row['decoded_tokens']:8}"
      f"{1 / np.median(row['token_seconds']):8.1f}{token:6.2f}"
    )
  return lines


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--library",
    type=pathlib.Path,
    required=True,
    help="folder of llama.cpp's shared libraries",
  )
  parser.add_argument("--cpu", default="haswell", help="libggml-cpu-CPU.so")
  parser.add_argument(
    "--file", type=pathlib.Path, help="another GGUF file of SmolLM2"
  )
  parser.add_argument("--threads", type=int, default=2, help="default: 2")
  parser.add_argument(
    "--what", choices=("text", "speed"), default="text", help="default: text"
  )
  parser.add_argument(
    "--models",
    nargs="+",
    default=[BF16, F32, FASTEST, *FORMATS, "f32"],
    metavar="NAME",
    help="default: %(default)s",
  )
  parser.add_argument(
    "--size", type=int, default=1024, help="tokens of the text; default: 1024"
  )
  parser.add_argument(
    "--settings",
    nargs="+",
    default=["140:128", "512:128"],
    help="PROMPT:DECODED numbers of tokens",
  )
  parser.add_argument(
    "--slots",
    type=int,
    default=1088,
    help="size of the cache in tokens; default: 1088",
  )
  parser.add_argument("--rounds", type=int, default=5, help="default: 5")
  parser.add_argument("--json", type=pathlib.Path, help="file to append to")
  args = parser.parse_args()
  with contextlib.ExitStack() as stack:
    processes = {}
    for name in (LLAMA_CPP, *args.models):
      processes[name] = Process(args, name, args.threads)
      stack.callback(processes[name].close)
    if args.what == "text":
      rows = compare_texts(processes, args.size)
      lines = text_lines(rows)
    else:
      settings = [tuple(map(int, x.split(":"))) for x in args.settings]
      rows = compare_speed(processes, settings, args.rounds)
      lines = speed_lines(rows)
    environment = processes[args.models[0]].environment()
  print("\n".join(lines))
  if args.json:
    result = {"environment": environment, "runs": []}
    if args.json.exists():
      result = json.loads(args.json.read_text())
    result["runs"].append(
      {
        "what": args.what,
        "threads": args.threads,
        "llama_cpp": _build(args.library),
        "cpu": args.cpu,
        "rows": rows,
      }
    )
    args.json.write_text(json.dumps(result, indent=1) + "\n")


def _build(library: pathlib.Path) -> Any:
  """Returns the description of the npm package's libraries."""
  path = library / "_nlcBuildMetadata.json"
  return json.loads(path.read_text()) if path.exists() else None


if __name__ == "__main__":
  main()

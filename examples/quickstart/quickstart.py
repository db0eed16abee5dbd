# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a real model in block-scaled formats: all-MiniLM-L6-v2.

The program embeds sentences in f32, and then with the weights and activations
of all linear layers in MXFP8, MXFP4 and NVFP4. It prints the memory, the
accuracy and the time of a batch for each format, and the backend that
`jaxplugin.block_scaled_dot` chose on this machine, with the reason.

  cd examples/quickstart
  python quickstart.py
  python quickstart.py --formats nvfp4 --query "Is it going to rain?"
  python quickstart.py --sentences my_sentences.txt --explain
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import importlib.util
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

if importlib.util.find_spec("jaxplugin") is None:
  sys.exit(
    "quickstart: not installed: jaxplugin; in the root of its source tree"
    f" run:\n  {sys.executable} -m pip install -e ."
  )

import jax
import minilm
import numpy as np

import jaxplugin as jp

SENTENCES: Final = pathlib.Path(__file__).parent / "sentences.txt"
QUERIES: Final = (
  "Will it be wet outside tonight?",
  "How is pneumonia treated?",
  "making programs run faster",
  "a world that circles another sun",
)
FORMATS: Final = {
  format.name: format
  for format in (jp.MXFP8, jp.MXFP8_E5M2, jp.MXFP4, jp.NVFP4)
}
DEFAULT_FORMATS: Final = ("mxfp8", "mxfp4", "nvfp4")
BASELINE: Final = "f32"
# More sentences than this are embedded in several batches of it.
MAX_BATCH: Final = 64
MEGABYTE: Final = 10**6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
  """The model with its linear layers in one format.

  Attributes:
    name: the format's name, or `BASELINE`.
    params: the model's parameters.
    embed: `minilm.encode` under `jit`, of (params, token_ids, mask).
  """

  name: str
  params: minilm.Params
  embed: Callable[[minilm.Params, np.ndarray, np.ndarray], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
  """How well embeddings keep the neighbours that the f32 ones have.

  A sentence's ranking is all the other sentences by falling cosine similarity.

  Attributes:
    sentences: number of sentences ranked.
    top_1: how many keep their nearest sentence.
    top_k: how many keep their k nearest sentences in the same order.
    lost_margin: the f32 similarity of the nearest sentence less that of the one
      now taken for it, the largest over all sentences; 0 when none changed. A
      small one means that only near-ties were swapped.
  """

  sentences: int
  top_1: int
  top_k: int
  lost_margin: float


def read_sentences(path: pathlib.Path) -> list[str]:
  """Returns the lines of `path` that are neither blank nor comments."""
  lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
  return [line for line in lines if line and not line.startswith("#")]


def rank(embeddings: np.ndarray) -> np.ndarray:
  """Returns i64[count, count - 1]: the other sentences, nearest first.

  Args:
    embeddings: f32[count, hidden], rows of norm 1.
  """
  similarity = embeddings @ embeddings.T
  np.fill_diagonal(similarity, -np.inf)
  return np.argsort(-similarity, axis=1, kind="stable")[:, :-1]


def compare_rankings(
  baseline: np.ndarray, embeddings: np.ndarray, k: int
) -> Agreement:
  """Compares the rankings of two f32[count, hidden], rows of norm 1."""
  expected, actual = rank(baseline), rank(embeddings)
  similarity = baseline @ baseline.T
  rows = np.arange(len(baseline))
  margin = similarity[rows, expected[:, 0]] - similarity[rows, actual[:, 0]]
  return Agreement(
    sentences=len(baseline),
    top_1=int((expected[:, 0] == actual[:, 0]).sum()),
    top_k=int((expected[:, :k] == actual[:, :k]).all(axis=1).sum()),
    lost_margin=float(margin.max()),
  )


def cosine(lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
  """Returns f32[count], of two f32[count, hidden] with rows of norm 1."""
  return np.sum(lhs * rhs, axis=1)


def make_variants(
  config: minilm.Config,
  params: minilm.Params,
  formats: Sequence[str],
  implementation: str | None,
) -> Iterator[Variant]:
  """Yields the baseline, then one variant a format."""
  embed = functools.partial(
    minilm.encode, config=config, implementation=implementation
  )
  for name in (BASELINE, *formats):
    own = params
    if name != BASELINE:
      own = minilm.quantize_linears(params, FORMATS[name])
    yield Variant(name=name, params=own, embed=jax.jit(embed))


def batches(
  token_ids: np.ndarray, mask: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Splits sentences into batches of one size; the last may overlap."""
  size = min(MAX_BATCH, len(token_ids))
  for start in range(0, len(token_ids), size):
    start = min(start, len(token_ids) - size)
    rows = slice(start, start + size)
    yield token_ids[rows], mask[rows]


def embed_all(
  variant: Variant, token_ids: np.ndarray, mask: np.ndarray
) -> np.ndarray:
  """Returns f32[count, hidden] for i32, bool[count, length]."""
  count = len(token_ids)
  results = [
    np.asarray(variant.embed(variant.params, *batch))
    for batch in batches(token_ids, mask)
  ]
  last = count - len(results[0]) * (len(results) - 1)
  return np.concatenate([*results[:-1], results[-1][-last:]])


def time_once_ms(
  variant: Variant, token_ids: np.ndarray, mask: np.ndarray
) -> float:
  """Returns the wall time of one call whose shapes are compiled already."""
  start = time.perf_counter()
  jax.block_until_ready(variant.embed(variant.params, token_ids, mask))
  return 1e3 * (time.perf_counter() - start)


def time_all_ms(
  variants: Sequence[Variant],
  inputs: dict[str, tuple[np.ndarray, np.ndarray]],
  repeats: int,
  progress: Any,
) -> dict[tuple[str, str], float]:
  """Returns the median time of each (variant's name, input's name).

  The variants take turns, so that a disturbance of the machine hits all alike.
  """
  samples = {(v.name, name): [] for v in variants for name in inputs}
  for _ in range(repeats):
    for variant in variants:
      for name, batch in inputs.items():
        samples[variant.name, name].append(time_once_ms(variant, *batch))
    progress.update()
  return {key: statistics.median(times) for key, times in samples.items()}


def table(rows: Sequence[Sequence[str]]) -> str:
  """Aligns rows of cells: the first column left, the others right."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = [
    "  ".join(
      cell.rjust(width) if index else cell.ljust(width)
      for index, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    for row in rows
  ]
  return "\n".join(line.rstrip() for line in lines)


def results_table(
  variants: Sequence[Variant],
  embeddings: dict[str, np.ndarray],
  times_ms: dict[tuple[str, str], float],
  k: int,
) -> str:
  """One row a variant; `embeddings` are those of the sentences ranked."""
  rows = [
    (
      *("linears", "MB of", "MB in", "cosine", "to f32"),
      *("same", f"same top {k}", "ms a", "ms for"),
    ),
    (
      *("in", "linears", "all", "min", "mean"),
      *("nearest", "in order", "batch", "one"),
    ),
  ]
  baseline = embeddings[BASELINE]
  for variant in variants:
    own = embeddings[variant.name]
    agreement = compare_rankings(baseline, own, k)
    similarity = cosine(own, baseline)
    rows.append(
      [
        variant.name,
        *(
          f"{size / MEGABYTE:.1f}"
          for size in minilm.weight_bytes(variant.params)
        ),
        f"{similarity.min():.4f}",
        f"{similarity.mean():.4f}",
        f"{agreement.top_1}/{agreement.sentences}",
        f"{agreement.top_k}/{agreement.sentences}",
        f"{times_ms[variant.name, 'batch']:.1f}",
        f"{times_ms[variant.name, 'one']:.1f}",
      ]
    )
  return table(rows)


def neighbours_table(
  sentences: Sequence[str],
  query: str,
  query_embeddings: dict[str, np.ndarray],
  embeddings: dict[str, np.ndarray],
  k: int,
) -> str:
  """The k sentences nearest to a query, with their rank in each format.

  Args:
    sentences: the texts.
    query: the query's text.
    query_embeddings: f32[hidden] by variant.
    embeddings: f32[len(sentences), hidden] by variant.
    k: how many; those nearest in f32 are listed.
  """
  order = {
    name: np.argsort(-own @ query_embeddings[name], kind="stable").tolist()
    for name, own in embeddings.items()
  }
  lines = [f'"{query}"']
  for index in order[BASELINE][:k]:
    ranks = " ".join(
      f"{name} #{order[name].index(index) + 1}" for name in order
    )
    similarity = embeddings[BASELINE][index] @ query_embeddings[BASELINE]
    lines.append(f"  {similarity:.2f}  {sentences[index]}")
    lines.append(f"        {ranks}")
  return "\n".join(lines)


def implementation_report(name: str, explanation: jp.Explanation) -> str:
  """Returns a summary of the backends of a variant's linear layers."""
  counts = collections.Counter()
  for dot in explanation:
    counts[dot.decision] += dot.count
  lines = []
  for decision, count in counts.items():
    lines.append(f"{name}: {count} by {decision.implementation}")
    lines.append(f"  {decision.implementation}: {decision.reason}")
    if decision.global_scale != "none":
      lines.append(f"  global scale: {decision.global_scale}")
    if decision.padding:
      lines.append(f"  padding: {decision.padding}")
    lines += [
      f"  not {refusal.implementation}: {refusal.reason}"
      for refusal in decision.refusals
    ]
  return "\n".join(lines)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "--sentences",
    type=pathlib.Path,
    default=SENTENCES,
    metavar="FILE",
    help="text with one sentence a line (default: %(default)s)",
  )
  parser.add_argument(
    "--query",
    action="append",
    metavar="TEXT",
    help="show the sentences nearest to TEXT; may be repeated",
  )
  parser.add_argument(
    "--formats",
    nargs="+",
    choices=FORMATS,
    default=DEFAULT_FORMATS,
    help="formats of the linear layers (default: mxfp8 mxfp4 nvfp4)",
  )
  parser.add_argument(
    "--implementation",
    choices=("xla", "cudnn", "triton", "cpu"),
    help="backend of all matmuls; default: chosen for each matmul",
  )
  parser.add_argument(
    "--repeats",
    type=int,
    default=7,
    help="timed calls of each kind (default: %(default)s)",
  )
  parser.add_argument(
    "--top-k",
    type=int,
    default=3,
    help="neighbours compared and shown (default: %(default)s)",
  )
  parser.add_argument(
    "--explain",
    action="store_true",
    help="print the choice for every linear layer, not only a summary",
  )
  options = parser.parse_args(arguments)
  options.formats = list(dict.fromkeys(options.formats))  # each once
  for name in ("repeats", "top_k"):
    if getattr(options, name) < 1:
      parser.error(f"--{name.replace('_', '-')} must be at least 1")
  if not options.sentences.is_file():
    parser.error(f"--sentences: no such file: {options.sentences}")
  return options


def run(options: argparse.Namespace) -> None:
  """Embeds, times and prints."""
  minilm.check_packages(minilm.REQUIREMENTS | {"tqdm": "tqdm"})
  import tqdm  # after `check_packages`, whose error names the command

  sentences = read_sentences(options.sentences)
  k = min(options.top_k, len(sentences) - 1)
  if k < 1:
    raise ValueError(f"--sentences: {options.sentences} needs two or more")
  queries = list(options.query or QUERIES)
  path = minilm.find_model()
  config, params = minilm.load(path)
  tokenizer = minilm.load_tokenizer(path, config)
  token_ids, mask = minilm.tokenize(tokenizer, sentences + queries)
  inputs = {
    "batch": next(batches(token_ids, mask)),
    "one": minilm.tokenize(tokenizer, sentences[:1]),
  }
  size, length = inputs["batch"][0].shape
  print(
    f"all-MiniLM-L6-v2: {config.linears} linear layers; sentences:"
    f" {len(sentences)}, queries: {len(queries)}\n"
    f"jax {jax.__version__}, {jp.detect_target()}"
  )

  variants, embeddings = [], {}
  steps = (len(options.formats) + 1) + options.repeats
  # Nothing is drawn unless stderr is a terminal.
  with tqdm.tqdm(total=steps, disable=None, leave=False) as progress:
    for variant in make_variants(
      config, params, options.formats, options.implementation
    ):
      progress.set_description(f"compile and embed, {variant.name}")
      variants.append(variant)
      embeddings[variant.name] = embed_all(variant, token_ids, mask)
      time_once_ms(variant, *inputs["one"])  # compiles
      progress.update()
    progress.set_description("time")
    times_ms = time_all_ms(variants, inputs, options.repeats, progress)

  corpus = {name: own[: len(sentences)] for name, own in embeddings.items()}
  print(f"\n{results_table(variants, corpus, times_ms, k)}")
  print(
    f"batch: {size} x {length} tokens; one: 1 x {inputs['one'][0].shape[1]};"
    f" median of {options.repeats} calls"
  )
  for variant in variants[1:]:
    print(ranking_remark(variant.name, corpus, k))

  print("\nNearest sentences (similarity in f32, rank in each format)")
  for index, query in enumerate(queries, start=len(sentences)):
    own = {name: rows[index] for name, rows in embeddings.items()}
    print(f"\n{neighbours_table(sentences, query, own, corpus, k)}")

  print("\nImplementations of the linear layers")
  for variant in variants[1:]:
    explanation = jp.explain(variant.embed, variant.params, *inputs["batch"])
    if options.explain:
      report = f"{variant.name}: {explanation}"
    else:
      report = implementation_report(variant.name, explanation)
    print(f"\n{report}")


def ranking_remark(name: str, embeddings: dict[str, np.ndarray], k: int) -> str:
  """Says in words which neighbours a format changed."""
  agreement = compare_rankings(embeddings[BASELINE], embeddings[name], k)
  changed = agreement.sentences - agreement.top_1
  if not changed:
    return f"{name}: every sentence keeps its nearest one"
  return (
    f"{name}: {changed} of {agreement.sentences} get another nearest one, at"
    f" most {agreement.lost_margin:.4f} less similar in {BASELINE}"
  )


def main(arguments: Sequence[str] | None = None) -> None:
  try:
    run(parse_arguments(arguments))
  except (minilm.MissingPackageError, NotImplementedError, ValueError) as error:
    # The user can correct these: a package, --implementation, --sentences.
    sys.exit(f"quickstart: {error}")


if __name__ == "__main__":
  main()

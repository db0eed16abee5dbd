# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Real data that need no download: Python's own documentation, and digits.

The seed determines the batches and their order. So all runs of one seed have
the same batches.
"""

from __future__ import annotations

import functools
import hashlib
import pydoc_data.topics
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

# Code 0 is a newline, code i > 0 the printable ASCII character 31 + i.
NUM_CHARACTERS: Final = 96
_OTHER: Final = ord("?")
VALIDATION_SHARE: Final = 0.1
NUM_CLASSES: Final = 10
# Streams of one seed that must not be the same numbers.
_BATCH_STREAM: Final = 1
_SPLIT_SEED: Final = 0


class Batch(NamedTuple):
  """Inputs of a model, and its targets.

  Attributes:
    inputs: i32[rows, context] of characters, or f32[rows, 64] of digits.
    targets: i32[rows, context], the characters after each, or i32[rows].
  """

  inputs: np.ndarray
  targets: np.ndarray


class Split(NamedTuple):
  training: Any
  validation: Any


def encode(text: str) -> np.ndarray:
  """i32[characters] below `NUM_CHARACTERS`; what is not ASCII becomes "?"."""
  codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
  printable = (codes >= 32) & (codes < 127)
  codes = np.where(printable | (codes == ord("\n")), codes, _OTHER)
  return np.where(codes == ord("\n"), 0, codes - 31).astype(np.int32)


@functools.cache
def text() -> Split:
  """All topics of `help()` in the order of their names.

  The last tenth validates models; it begins inside of a topic. Each version of
  Python has its own text, with its own `fingerprint`.
  """
  topics = pydoc_data.topics.topics
  codes = encode("\n".join(topics[name] for name in sorted(topics)))
  border = int(len(codes) * (1 - VALIDATION_SHARE))
  return Split(training=codes[:border], validation=codes[border:])


def fingerprint(split: Split) -> str:
  """Eight hexadecimal digits that differ where the data do."""
  digest = hashlib.sha256()
  for part in split:
    for array in part if isinstance(part, Batch) else (part,):
      digest.update(np.ascontiguousarray(array))
  return digest.hexdigest()[:8]


def _windows(codes: np.ndarray, starts: np.ndarray, context: int) -> Batch:
  index = starts[:, None] + np.arange(context + 1)
  return Batch(inputs=codes[index[:, :-1]], targets=codes[index[:, 1:]])


def _random(seed: int) -> np.random.Generator:
  return np.random.default_rng([seed, _BATCH_STREAM])


def text_batches(
  seed: int,
  *,
  steps: int,
  rows: int,
  context: int,
  codes: np.ndarray | None = None,
) -> Iterator[Batch]:
  """`steps` batches of windows that begin anywhere in the training text.

  Args:
    seed: decides where.
    steps, rows, context: how many, of how many windows, of how many characters.
    codes: another text, of `encode`.
  """
  codes, random = text().training if codes is None else codes, _random(seed)
  for _ in range(steps):
    starts = random.integers(len(codes) - context, size=rows)
    yield _windows(codes, starts, context)


def text_validation(*, rows: int, context: int) -> Batch:
  """Returns evenly spaced windows of the validation text."""
  codes = text().validation
  starts = np.linspace(0, len(codes) - context - 1, rows).astype(np.int64)
  return _windows(codes, starts, context)


@functools.cache
def digits() -> Split:
  """scikit-learn's 1797 handwritten digits of 8 x 8 pixels, one split for all.

  Each pixel less its mean, divided by the deviation of all (of the training
  part: 1438 digits; 359 are what models are validated on).

  Raises:
    ModuleNotFoundError: scikit-learn is not installed.
  """
  # Here, as the text needs nothing of it.
  import sklearn.datasets  # type: ignore[import-untyped]

  images, labels = sklearn.datasets.load_digits(return_X_y=True)
  order = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
  images, labels = images[order], labels[order].astype(np.int32)
  border = round(len(labels) * 0.8)
  mean, deviation = images[:border].mean(axis=0), images[:border].std()
  images = ((images - mean) / deviation).astype(np.float32)
  return Split(
    training=Batch(images[:border], labels[:border]),
    validation=Batch(images[border:], labels[border:]),
  )


def digit_batches(seed: int, *, steps: int, rows: int) -> Iterator[Batch]:
  """Yields `steps` batches; each epoch has all training digits in a new order.

  The digits that do not fill the last batch of an epoch are not used.
  """
  (images, labels), random = digits().training, _random(seed)
  batches = len(labels) // rows
  for step in range(steps):
    if step % batches == 0:
      order = random.permutation(len(labels))
    chosen = order[step % batches * rows :][:rows]
    yield Batch(images[chosen], labels[chosen])

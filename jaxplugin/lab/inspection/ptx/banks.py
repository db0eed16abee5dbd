# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How many passes an access of shared memory takes (its "wavefronts").

Shared memory has 32 banks of 4 bytes (CUDA programming guide, "Shared memory").
Lanes of a warp that want different words of one bank take turns; the same word
is given to all at once. Wide accesses go by half or quarter warps.
"""

from __future__ import annotations

from typing import Final

import numpy as np

_BANKS: Final = 32
_WORD: Final = 4
_LANES: Final = 32


def wavefronts(
  addresses: np.ndarray, size: int, warps: np.ndarray
) -> tuple[int, int]:
  """(passes taken, passes that as many words need at least).

  Args:
    addresses: int64[threads], in the order of lanes.
    size: bytes of each thread.
    warps: int[threads], ascending.
  """
  words = max(size // _WORD, 1)
  in_turn = _LANES // words  # lanes that go together
  first = np.searchsorted(warps, warps, side="left")
  turn = warps * _LANES + (np.arange(len(warps)) - first) // in_turn
  word = (addresses // _WORD)[:, None] + np.arange(words)
  span = int(word.max()) + 1
  wanted = np.unique(turn[:, None] * span + word)
  turn, word = wanted // span, wanted % span
  turns, turn = np.unique(turn, return_inverse=True)
  counts = np.zeros((len(turns), _BANKS), np.int64)
  np.add.at(counts, (turn, word % _BANKS), 1)
  least = -(-counts.sum(axis=1) // _BANKS)
  return int(counts.max(axis=1).sum()), int(least.sum())

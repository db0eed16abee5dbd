# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Collectives of a compiled program, from its HLO."""

import math
import re

_COLLECTIVE = re.compile(
  r"= \(*(\w+)\[([\d,]*)\].*? (all-gather|all-reduce|reduce-scatter|all-to-all"
  r"|collective-permute)(?:-start)?\("
)


def collectives(text):
  """Returns (kind, element type, elements) of each collective."""
  return [
    (kind, dtype, math.prod(int(size) for size in sizes.split(",") if size))
    for dtype, sizes, kind in _COLLECTIVE.findall(text)
  ]

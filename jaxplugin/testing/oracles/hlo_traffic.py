# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes that a compiled program's kernels read and write, from its HLO."""

import math
import re

from jaxplugin.lab.compilation import hlo_text

_NAME = re.compile(r"^ +(?:ROOT )?%?(\S+) = ")
_OPERAND = re.compile(r"%([\w.-]+)")
_ARRAY = re.compile(r"([a-z]+\d+\w*)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")
_COLLECTIVE = re.compile(
  r"= \(*(\w+)\[([\d,]*)\].*? (all-gather|all-reduce|reduce-scatter|all-to-all"
  r"|collective-permute)(?:-start)?\("
)
# What runs nothing, and what other devices take part in.
_FREE = re.compile(
  r"parameter|bitcast|get-tuple-element|tuple|constant|after-all|partition-id"
  r"|(all|collective|reduce-scatter|async|send|recv|copy)-\S*"
)


def collectives(text):
  """Returns (kind, element type, elements) of each collective."""
  return [
    (kind, dtype, math.prod(int(size) for size in sizes.split(",") if size))
    for dtype, sizes, kind in _COLLECTIVE.findall(text)
  ]


def bytes_of(shape):
  """Returns the bytes of an array or a tuple of arrays, from its HLO type."""
  return sum(
    math.prod(int(size) for size in sizes.split(",") if size)
    * int(_BITS.search(dtype)[0])
    // 8
    for dtype, sizes in _ARRAY.findall(shape)
  )


def kernels(text):
  """[(opcode, bytes read and written)] of what the entry computation runs.

  An operand that is given twice is read once.
  """
  program = hlo_text.parse(text)
  (entry,) = program.entries
  sizes, found = {}, []
  for instruction in program.computations[entry]:
    line = instruction.line
    sizes[_NAME.match(line)[1]] = bytes_of(instruction.shape)
    if _FREE.fullmatch(instruction.opcode):
      continue
    start = line.index(f" {instruction.opcode}(") + len(instruction.opcode) + 2
    operands = set(_OPERAND.findall(line[start : line.index(")", start)]))
    moved = bytes_of(instruction.shape) + sum(sizes[name] for name in operands)
    found.append((instruction.opcode, moved))
  return found

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/reference/compatibility.md.

  python tools/compatibility_table.py

A cell is the backend that is chosen for a matmul of 128 x 128 x 4096 on a named
target. The tables depend on the rules, so a test compares the page.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
from typing import Final

# No device is needed, so JAX does not look for one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import decision_picture

import jaxplugin as jp
from jaxplugin.core import targets

PAGE: Final = (
  pathlib.Path(__file__).resolve().parents[1]
  / "docs/reference/compatibility.md"
)
_TABLE: Final = re.compile(
  r"(<!-- backends -->\n)(.*?)(<!-- end -->)", re.DOTALL
)
# cuDNN versions at, and just below, those where the answer changes.
CUDNN: Final = ("9.13", "9.12", "9.9")
CALLS: Final = (
  decision_picture.Call(title="MXFP8", lhs=jp.MXFP8, rhs=jp.MXFP8),
  decision_picture.Call(title="MXFP4", lhs=jp.MXFP4, rhs=jp.MXFP4),
  decision_picture.Call(title="NVFP4", lhs=jp.NVFP4, rhs=jp.NVFP4),
  decision_picture.Call(title="MXFP6", lhs=jp.MXFP6_E2M3, rhs=jp.MXFP6_E2M3),
  decision_picture.Call(title="MXFP8 x MXFP4", lhs=jp.MXFP8, rhs=jp.MXFP4),
  decision_picture.Call(title="bf16 x NVFP4", lhs=None, rhs=jp.NVFP4),
)


def rows() -> list[tuple[str, targets.Target]]:
  """Returns (label, target) of each row."""
  found = []
  for name in targets.TARGET_NAMES:
    target = targets.named_target(name)
    if target.platform == "cpu":
      continue  # added below, with and without its kernels
    if target.platform == "cuda" and target.compute_capability[0] >= 10:
      found += [
        (f"{name}, cuDNN {version}", targets.named_target(name, cudnn=version))
        for version in CUDNN
      ]
    else:
      found.append((name, target))
  for name in ("mi300x", "mi355x"):
    attached = targets.named_target(name).with_library(targets.JAX_TRITON)
    found.append((f"{name}, attached", attached))
  _, built = decision_picture.devices()[-1]
  cpu = targets.Target(name="cpu", platform="cpu")
  found += [
    ("CPU", built),
    (
      "CPU, kernels not built",
      cpu.without_library(targets.CPU_KERNELS, "no C++ compiler was found"),
    ),
    ("TPU", targets.Target(name="tpu", platform="tpu")),
  ]
  return found


@functools.cache
def table() -> str:
  """Returns the table in Markdown."""
  lines = [
    f"| target | {' | '.join(call.title for call in CALLS)} |",
    "|---" * (len(CALLS) + 1) + "|",
  ]
  for label, target in rows():
    cells = []
    for call in CALLS:
      decision = decision_picture.decide(call, target)
      words = decision.implementation
      if decision.global_scale == "separate":
        words += ", global scale separate"
      cells.append(words)
    lines.append(f"| {label} | {' | '.join(cells)} |")
  return "\n".join(lines) + "\n"


def written(page: str) -> str:
  """Returns the page with its table replaced."""
  return _TABLE.sub(lambda m: f"{m[1]}\n{table()}\n{m[3]}", page)


if __name__ == "__main__":
  PAGE.write_text(written(PAGE.read_text()))
  print(f"wrote {PAGE}")

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws the choice of a backend: docs/figures/dispatch.svg.

  python tools/decision_picture.py

Each cell is the answer of `jp.explain` for that call on that device. The
picture depends on the rules, so a test compares the two.
"""

import dataclasses
import os
import pathlib
import textwrap

# No device is needed, so JAX does not look for one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import drawing
import jax
import jax.numpy as jnp

import jaxplugin as jp
from jaxplugin.core import decisions, targets
from jaxplugin.dot import backends

ROOT = pathlib.Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "figures" / "dispatch.svg"

WIDTH = 920
MARGIN = 24
LABEL_WIDTH = 200
ROW_HEIGHT = 66
HEADER_TOP = 168
ROWS_TOP = 196
# The name of the backend is in the box too.
COLORS = {
  "cudnn": drawing.BLUE,
  "triton": drawing.VERMILION,
  "cpu": drawing.GREEN,
  "xla": drawing.GREY,
}
STEPS = (
  ("block_scaled_dot(...)", "under jit, vmap, grad, shard_map"),
  ("problem and target", "an attached or a named device"),
  ("choose", "the first backend that supports it"),
  ("decision", "explain prints it with each reason"),
)
TITLE = "How a backend is chosen"
NOT_RUN = "compiled, has not run on a GPU"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """One column: a call and its title."""

  title: str
  lhs: jp.BlockFormat | None
  rhs: jp.BlockFormat


CALLS = (
  Call(title="MXFP8 x MXFP8", lhs=jp.MXFP8, rhs=jp.MXFP8),
  Call(title="NVFP4 x NVFP4", lhs=jp.NVFP4, rhs=jp.NVFP4),
  Call(title="bf16 x MXFP4 (weight-only)", lhs=None, rhs=jp.MXFP4),
)


def devices():
  """Returns (label, target) of each row."""
  named = jp.named_target
  cpu = targets.Target(name="cpu", platform="cpu")
  return (
    ("b200, cuDNN 9.13", named("b200", cudnn="9.13")),
    ("h200", named("h200")),
    ("mi355x", named("mi355x")),
    ("CPU, kernels built", dataclasses.replace(cpu, cpu_kernels="avx2")),
  )


def decide(call, target):
  """Returns the `Decision` of `jp.explain` for one call on one target."""
  spec = jax.ShapeDtypeStruct((128, 4096), jnp.bfloat16)

  def operand(format):
    if format is None:
      return spec
    return jax.eval_shape(lambda x: jp.quantize(x, format), spec)

  def dot(lhs, rhs):
    return jp.block_scaled_dot(lhs, rhs, preferred_element_type=jnp.bfloat16)

  (explained,) = jp.explain(
    dot, operand(call.lhs), operand(call.rhs), target=target
  )
  return explained.decision


def steps():
  """Returns the four steps of a call, left to right."""
  parts = []
  width, gap, top = 203, 20, 66
  for i, (title, below) in enumerate(STEPS):
    x = MARGIN + i * (width + gap)
    parts.append(
      drawing.box(
        x, top, width, 56, fill=drawing.PALE, stroke=drawing.LINE, radius=6
      )
    )
    middle = x + width / 2
    parts.append(
      drawing.text(middle, top + 24, title, weight="bold", anchor="middle")
    )
    parts.append(
      drawing.text(
        middle, top + 43, below, size=11, color=drawing.FAINT, anchor="middle"
      )
    )
    if i:
      parts.append(drawing.arrow(x - gap + 2, top + 28, x - 2, top + 28))
  return parts


def remark_lines(decision, order):
  """Returns the note of a cell: the global scale, or the first refusal."""
  remark = ""
  if decision.global_scale != "none":
    remark = f"global scale {decision.global_scale}"
  for refusal in decision.refusals:
    if refusal.implementation == order[0]:
      remark = f"not {order[0]}: {refusal.reason}"
  return textwrap.wrap(remark, 35)


def cell(x, y, decision, order):
  name = decision.implementation
  parts = [
    drawing.box(x, y, 62, 22, fill=COLORS[name], radius=6),
    drawing.text(
      x + 31,
      y + 15,
      name,
      color=drawing.PAPER,
      weight="bold",
      anchor="middle",
    ),
  ]
  for i, line in enumerate(remark_lines(decision, order)):
    parts.append(
      drawing.text(x, y + 35 + 12 * i, line, size=10, color=drawing.FAINT)
    )
  return parts


def table():
  """Returns the table with a row for each device and a column for each call."""
  column = (WIDTH - 2 * MARGIN - LABEL_WIDTH) / len(CALLS)
  parts = []
  for i, call in enumerate(CALLS):
    x = MARGIN + LABEL_WIDTH + i * column
    parts.append(drawing.text(x, HEADER_TOP, call.title, weight="bold"))
  for row, (label, target) in enumerate(devices()):
    y = ROWS_TOP + row * ROW_HEIGHT
    order = decisions.order(backends.BACKENDS, target)
    parts.append(drawing.line(MARGIN, y - 12, WIDTH - MARGIN, y - 12))
    parts.append(drawing.text(MARGIN, y + 15, label, weight="bold"))
    tried = "tries " + ", ".join(order)
    parts.append(
      drawing.text(MARGIN, y + 31, tried, size=10, color=drawing.FAINT)
    )
    if target.platform != "cpu":
      parts.append(
        drawing.text(MARGIN, y + 45, NOT_RUN, size=10, color=drawing.FAINT)
      )
    for i, call in enumerate(CALLS):
      x = MARGIN + LABEL_WIDTH + i * column
      parts += cell(x, y, decide(call, target), order)
  return parts


def description():
  """Returns the answers of the table in words."""
  rows = [
    f"{label}: "
    + ", ".join(
      f"{call.title} {decide(call, target).implementation}" for call in CALLS
    )
    for label, target in devices()
  ]
  return "The backend of three calls on four devices. " + "; ".join(rows) + "."


def draw():
  """Returns the picture as SVG text."""
  parts = [
    drawing.text(MARGIN, 40, TITLE, size=20, weight="bold"),
    *steps(),
    *table(),
  ]
  height = ROWS_TOP + len(devices()) * ROW_HEIGHT + 4
  return drawing.document(TITLE, description(), WIDTH, height, parts)


if __name__ == "__main__":
  PICTURE.write_text(draw())
  print(f"wrote {PICTURE}")

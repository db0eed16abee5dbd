# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws how a call is decided: decision_picture.svg, beside this file.

  python tools/decision_picture.py

Each cell is what the package itself answers for that call on that device, so
the picture is drawn again when a gate moves; a test compares the two.
"""

import dataclasses
import html
import os
import pathlib
import textwrap

# No device is needed, so none is looked for.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import jaxplugin as jp
from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.dot import backends

PICTURE = pathlib.Path(__file__).with_suffix(".svg")

WIDTH = 920
MARGIN = 24
LABEL_WIDTH = 172
ROW_HEIGHT = 62
HEADER_TOP = 168
ROWS_TOP = 196
FONT = "font-family='Helvetica,Arial,sans-serif'"
INK, FAINT, LINE, PAPER = "#1f2933", "#616e7c", "#cbd2d9", "#ffffff"
# Okabe and Ito's palette, which colour-blind readers tell apart; each
# implementation also says its name.
COLORS = {
  "cudnn": "#0072b2",
  "triton": "#d55e00",
  "cpu": "#00765a",
  "xla": "#7f8c8d",
}
STEPS = (
  ("block_scaled_dot(...)", "under jit, vmap, grad, shard_map"),
  ("DotProblem + Target", "the device found, or any by name"),
  ("choose(problem, target)", "the first in order that serves"),
  ("Decision", "and every other's reason: explain"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """One column: a call and its title."""

  title: str
  lhs: jp.BlockFormat | None
  rhs: jp.BlockFormat


CALLS = (
  Call(title="MXFP8 x MXFP8", lhs=jp.MXFP8, rhs=jp.MXFP8),
  Call(title="NVFP4 x NVFP4", lhs=jp.NVFP4, rhs=jp.NVFP4),
  Call(title="bf16 x MXFP4 (weights only)", lhs=None, rhs=jp.MXFP4),
)


def devices():
  """(label, target) of each row."""
  named = jp.named_target
  cpu = targets.Target(name="cpu", platform="cpu")
  return (
    ("b200, cuDNN 9.13", named("b200", cudnn="9.13")),
    ("b200, cuDNN 9.12", named("b200", cudnn="9.12")),
    ("b200, cuDNN 9.9", named("b200", cudnn="9.9")),
    ("h200", named("h200")),
    ("a100", named("a100")),
    ("mi355x, by name", named("mi355x")),
    (
      "mi355x, attached",
      named("mi355x").with_library(targets.JAX_TRITON),
    ),
    (
      "CPU, kernels built",
      dataclasses.replace(cpu, cpu_kernels="avx2"),
    ),
    (
      "CPU, none built",
      cpu.without_library(targets.CPU_KERNELS, "no C++ compiler was found"),
    ),
    ("TPU", targets.Target(name="tpu", platform="tpu")),
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


def text(x, y, words, *, size=13, color=INK, weight="normal", anchor="start"):
  return (
    f"<text x='{x}' y='{y}' {FONT} font-size='{size}' fill='{color}'"
    f" font-weight='{weight}' text-anchor='{anchor}'>"
    f"{html.escape(words)}</text>"
  )


def box(x, y, width, height, *, fill, stroke="none"):
  return (
    f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='6'"
    f" fill='{fill}' stroke='{stroke}'/>"
  )


def steps():
  """The four stations of a call, left to right."""
  parts = []
  width, gap, top = 203, 20, 66
  for i, (title, below) in enumerate(STEPS):
    x = MARGIN + i * (width + gap)
    parts.append(box(x, top, width, 56, fill="#f0f4f8", stroke=LINE))
    middle = x + width / 2
    parts.append(text(middle, top + 24, title, weight="bold", anchor="middle"))
    parts.append(
      text(middle, top + 43, below, size=11, color=FAINT, anchor="middle")
    )
    if i:
      parts.append(
        f"<path d='M {x - gap + 3} {top + 28} h 10' stroke='{INK}'"
        " stroke-width='2' marker-end='url(#arrow)'/>"
      )
  return parts


def remark_lines(decision, order):
  """What one should know of a decision: how it scales, or who came first."""
  remark = ""
  if decision.global_scale != "none":
    remark = f"global scale {decision.global_scale}"
  for refusal in decision.refusals:
    if refusal.implementation == order[0]:
      remark = f"not {order[0]}: {refusal.reason}"
  return textwrap.wrap(remark, 38)


def cell(x, y, decision, order):
  name = decision.implementation
  parts = [
    box(x, y, 62, 22, fill=COLORS[name]),
    text(x + 31, y + 15, name, color=PAPER, weight="bold", anchor="middle"),
  ]
  for i, line in enumerate(remark_lines(decision, order)):
    parts.append(text(x, y + 35 + 12 * i, line, size=10, color=FAINT))
  return parts


def table():
  """A row a device, a column a call."""
  column = (WIDTH - 2 * MARGIN - LABEL_WIDTH) / len(CALLS)
  parts = []
  for i, call in enumerate(CALLS):
    x = MARGIN + LABEL_WIDTH + i * column
    parts.append(text(x, HEADER_TOP, call.title, weight="bold"))
  for row, (label, target) in enumerate(devices()):
    y = ROWS_TOP + row * ROW_HEIGHT
    order = decisions.order(backends.BACKENDS, target)
    parts.append(
      f"<path d='M {MARGIN} {y - 12} H {WIDTH - MARGIN}' stroke='{LINE}'/>"
    )
    parts.append(text(MARGIN, y + 15, label, weight="bold"))
    tried = "tries " + ", ".join(order)
    parts.append(text(MARGIN, y + 33, tried, size=10, color=FAINT))
    for i, call in enumerate(CALLS):
      x = MARGIN + LABEL_WIDTH + i * column
      parts += cell(x, y, decide(call, target), order)
  return parts


def draw():
  """Returns the picture as SVG text."""
  height = ROWS_TOP + len(devices()) * ROW_HEIGHT + 4
  marker = (
    "<defs><marker id='arrow' markerWidth='8' markerHeight='8' refX='1'"
    f" refY='3' orient='auto'><path d='M0,0 L4,3 L0,6 z' fill='{INK}'/>"
    "</marker></defs>"
  )
  title = "How a call is decided, here and for devices that are not here"
  parts = [
    "<svg xmlns='http://www.w3.org/2000/svg' role='img'"
    f" aria-label='{title}' viewBox='0 0 {WIDTH} {height}'>",
    marker,
    f"<rect width='{WIDTH}' height='{height}' fill='{PAPER}'/>",
    text(MARGIN, 40, title, size=20, weight="bold"),
    *steps(),
    *table(),
    "</svg>",
  ]
  return "\n".join(parts) + "\n"


if __name__ == "__main__":
  PICTURE.write_text(draw())
  print(f"wrote {PICTURE}")

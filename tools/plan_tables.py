# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of two guides from runs of `plan`.

  python tools/plan_tables.py                  # compiles everything: minutes
  python tools/plan_tables.py --only 405b      # only commands with this text
  python tools/plan_tables.py --written        # compiles nothing

Plans are stored in docs/how_to/scale_plans.json.

In a guide a table stands between `<!-- plan ... -->`, which has its command,
and `<!-- end -->`. The table after `<!-- traffic -->` has a row for each pass
of each command with --traffic, those in code blocks too. `PICTURE` shows the
plans of the command `DRAWN`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import pathlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

import drawing

from jaxplugin import __main__ as command_line
from jaxplugin.lab.compilation import traffic
from jaxplugin.lab.planning import collectives, plans, report

ROOT: Final = pathlib.Path(__file__).resolve().parents[1]
HOW_TO: Final = ROOT / "docs" / "how_to"
GUIDES: Final = (
  HOW_TO / "plan_collectives.md",
  HOW_TO / "quantized_activations.md",
)
KEPT: Final = HOW_TO / "scale_plans.json"
_TABLE: Final = re.compile(
  r"(<!-- (plan [^\n]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL
)
_TRAFFIC: Final = re.compile(
  r"^    python -m jaxplugin (plan [^\n]*--traffic[^\n]*)$", re.MULTILINE
)
_SUMMARY: Final = re.compile(
  r"(<!-- traffic -->\n)(.*?)(<!-- end -->)", re.DOTALL
)
PICTURE: Final = HOW_TO / "scale_405b.svg"
DRAWN: Final = "plan llama3-405b --layout fsdp=128,tp=8,sp --remat"
_COLORS: Final = (
  drawing.BLUE,
  drawing.ORANGE,
  drawing.GREEN,
  drawing.VERMILION,
  drawing.SKY,
  drawing.PURPLE,
  drawing.GREY,
)
_WIDTH: Final = 920
_BAR: Final = 500  # length of the longest bar
_LEFT: Final = 120  # of the bars
_ROW: Final = 26
_LEAST: Final = 1e-3  # of the longest bar; shorter parts are not drawn


def read() -> dict[pathlib.Path, str]:
  """Returns the text of each guide."""
  return {path: path.read_text() for path in GUIDES}


def commands(texts: Iterable[str]) -> list[str]:
  """Returns the commands of the guides' tables, in order."""
  found = [
    command
    for text in texts
    for command in (
      *(match[2] for match in _TABLE.finditer(text)),
      *_TRAFFIC.findall(text),
    )
  ]
  return list(dict.fromkeys(found))


def kept() -> dict[str, list[plans.ModelPlan]]:
  """Returns the stored plans of each command."""
  found: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
  return {
    command: report.from_json(json.dumps(fields))
    for command, fields in found.items()
  }


def keep(found: dict[str, list[plans.ModelPlan]], order: Sequence[str]) -> None:
  """Writes the plans of commands, in the order of the guide."""
  data = {
    command: [plan.to_dict() for plan in found[command]]
    for command in order
    if command in found
  }
  KEPT.write_text(json.dumps(data, indent=1) + "\n")


def summed(plan: plans.ModelPlan) -> plans.ModelPlan:
  """Returns a plan with one collective and one kernel of each kind."""
  found: dict[Any, collectives.Collective] = {}
  for one in plan.collectives:
    key = (report.key_of(one), one.is_bound)
    before = found[key].num_bytes if key in found else 0
    found[key] = dataclasses.replace(
      one, num_bytes=before + one.total, times=1, source=""
    )
  kernels: dict[traffic.Kind, list[traffic.Kernel]] = {}
  for kernel in plan.kernels:
    kernels.setdefault(kernel.kind, []).append(kernel)
  return dataclasses.replace(
    plan,
    collectives=tuple(found.values()),
    kernels=tuple(_mean(kind, every) for kind, every in kernels.items()),
  )


def _mean(kind: traffic.Kind, every: list[traffic.Kernel]) -> traffic.Kernel:
  """Returns a kernel that runs as often as these, with their mean bytes."""
  times = sum(kernel.times for kernel in every)
  fields = ("read", "written", "quantizing")
  return traffic.Kernel(
    name="mean",
    kind=kind,
    times=times,
    is_bound=any(kernel.is_bound for kernel in every),
    **{
      field: sum(getattr(k, field) * k.times for k in every) / times
      for field in fields
    },
  )


def run(command: str) -> list[plans.ModelPlan]:
  """Runs a command, and returns its plans."""
  output = io.StringIO()
  with contextlib.redirect_stdout(output):
    status = command_line.main([*command.split(), "--json"])
  if status:
    raise SystemExit(status)
  return [summed(plan) for plan in report.from_json(output.getvalue())]


def tables(found: Sequence[plans.ModelPlan]) -> str:
  """Returns the text between a command and its end."""
  return f"\n{report.text(found, times=False)}\n\n"


def written(text: str, found: dict[str, list[plans.ModelPlan]]) -> str:
  """Returns the guide's text with the tables of these plans."""
  text = _TABLE.sub(
    lambda match: f"{match[1]}{tables(found[match[2]])}{match[4]}", text
  )
  return _SUMMARY.sub(
    lambda match: f"{match[1]}\n{summary(found)}\n\n{match[3]}", text
  )


def summary(found: dict[str, list[plans.ModelPlan]]) -> str:
  """Returns the table of quantize traffic of each pass."""
  lines = [
    "| layer | device | separate, MB | fused, MB | fused to separate |",
    "|---|---|--:|--:|--:|",
  ]
  for command, every in found.items():
    device = re.search(r"--target (\w+)", command)
    sizes = {(p.name, p.format): traffic.quantizing(p.kernels) for p in every}
    for (name, format), size in sizes.items():
      fused = sizes.get((name, format + plans.FUSED), 0.0)
      if device is not None and fused:
        lines.append(
          f"| {name} | {device[1]} | {size / 1e6:.1f} | {fused / 1e6:.1f}"
          f" | {fused / size:.2f} |"
        )
  return "\n".join(lines)


def picture(found: Sequence[plans.ModelPlan]) -> str:
  """Returns an SVG with a bar for each plan of one layout.

  A bar has a part for each combination of mesh axes and element type.
  """
  bars = []
  for plan in found:
    bar: dict[tuple[str, str], float] = {}
    for (axes, _, dtype), size in report.by_key(plan).items():
      bar[axes, dtype] = bar.get((axes, dtype), 0) + size
    bars.append(bar)
  longest = max(sum(bar.values()) for bar in bars)
  parts = sorted(
    {p for bar in bars for p, size in bar.items() if size > _LEAST * longest}
  )
  colors = dict(zip(parts, _COLORS, strict=False))
  first = found[0]
  top = 2 * _ROW
  drawn = [drawing.text(16, 34, report.title_of(first), weight="bold")]
  for plan, bar in zip(found, bars, strict=True):
    drawn.append(drawing.text(16, top + 14, plan.format))
    left = float(_LEFT)
    for part, color in colors.items():
      width = bar.get(part, 0) * _BAR / longest
      drawn.append(drawing.box(left, top, width, 20, fill=color))
      left += width
    figures = (
      f"{plan.received / 1e6:.1f} MB ({plan.received / first.received:.2f}x),"
      f" {plan.temp_bytes / 1e9:.3g} GB"
    )
    drawn.append(drawing.text(left + 8, top + 14, figures, color=drawing.FAINT))
    top += _ROW
  for (axes, dtype), color in colors.items():
    top += _ROW
    drawn.append(drawing.box(16, top, 20, 20, fill=color))
    drawn.append(drawing.text(42, top + 14, f"{dtype} over {axes}"))
  what = "Bytes that a device receives, and its temporary memory"
  return drawing.document(what, what, _WIDTH, top + 2 * _ROW, drawn)


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--only", default="", metavar="TEXT")
  parser.add_argument("--written", action="store_true")
  arguments = parser.parse_args(argv)
  texts, found = read(), kept()
  order = commands(texts.values())
  found = {command: found[command] for command in order if command in found}
  for command in order:
    if arguments.only in command and not arguments.written:
      print(command, file=sys.stderr)
      found[command] = run(command)
      keep(found, order)
  keep(found, order)
  missing = [c for c in order if c not in found]
  if missing:
    raise SystemExit(f"not run yet: {missing}; the pages are as they were")
  for path, text in texts.items():
    path.write_text(written(text, found))
  PICTURE.write_text(picture(found[DRAWN]))


if __name__ == "__main__":
  main()

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of two guides from runs of `plan`.

  python tools/plan_tables.py                  # compiles everything: minutes
  python tools/plan_tables.py --only 405b      # only commands with this text
  python tools/plan_tables.py --written        # compiles nothing

Plans are stored in docs/how_to/scale_plans.json.

In a guide a table stands between `<!-- plan ... -->`, which has its command,
and `<!-- end -->`. If a command has --svg, its picture is written too. The
table after `<!-- traffic -->` has a row for each pass of each command with
--traffic, those in code blocks too.
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
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import Final

from jaxplugin import __main__ as command_line
from jaxplugin.lab.compilation import traffic
from jaxplugin.lab.planning import collectives
from jaxplugin.lab.planning import plans
from jaxplugin.lab.planning import report

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
_SVG: Final = re.compile(r" --svg (\S+)")


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
  """Runs a command, without its picture."""
  output = io.StringIO()
  with contextlib.redirect_stdout(output):
    status = command_line.main([*_SVG.sub("", command).split(), "--json"])
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


def pictures(
  found: dict[str, list[plans.ModelPlan]],
) -> dict[pathlib.Path, str]:
  """Returns the picture of each command that has one."""
  return {
    HOW_TO / match[1]: report.draw(plans_)
    for command, plans_ in found.items()
    if (match := _SVG.search(command)) is not None
  }


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
  for path, drawn in pictures(found).items():
    path.write_text(drawn)


if __name__ == "__main__":
  main()

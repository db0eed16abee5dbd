# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/how_to/plan_collectives.md from runs of `plan`.

  python tools/plan_tables.py                  # compiles everything: minutes
  python tools/plan_tables.py --only 405b      # only commands with this text
  python tools/plan_tables.py --written        # compiles nothing

Plans are stored in docs/how_to/scale_plans.json.

In the guide a table stands between `<!-- plan ... -->`, which has its command,
and `<!-- end -->`. If a command has --svg, its picture is written too.
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
from collections.abc import Sequence
from typing import Any
from typing import Final

from jaxplugin import __main__ as command_line
from jaxplugin.lab.planning import collectives
from jaxplugin.lab.planning import plans
from jaxplugin.lab.planning import report

ROOT: Final = pathlib.Path(__file__).resolve().parents[1]
GUIDE: Final = ROOT / "docs" / "how_to" / "plan_collectives.md"
KEPT: Final = ROOT / "docs" / "how_to" / "scale_plans.json"
_TABLE: Final = re.compile(
  r"(<!-- (plan [^\n]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL
)
_SVG: Final = re.compile(r" --svg (\S+)")


def commands(text: str) -> list[str]:
  """Returns the commands of a guide's tables, in order."""
  return [match[2] for match in _TABLE.finditer(text)]


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
  """Returns a plan with one collective of each kind, as in the tables."""
  found: dict[Any, collectives.Collective] = {}
  for one in plan.collectives:
    key = (report.key_of(one), one.is_bound)
    before = found[key].num_bytes if key in found else 0
    found[key] = dataclasses.replace(
      one, num_bytes=before + one.total, times=1, source=""
    )
  return dataclasses.replace(plan, collectives=tuple(found.values()))


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
  return _TABLE.sub(
    lambda match: f"{match[1]}{tables(found[match[2]])}{match[4]}", text
  )


def pictures(
  found: dict[str, list[plans.ModelPlan]],
) -> dict[pathlib.Path, str]:
  """Returns the picture of each command that has one."""
  return {
    GUIDE.parent / match[1]: report.draw(plans_)
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
  text, found = GUIDE.read_text(), kept()
  found = {
    command: found[command] for command in commands(text) if command in found
  }
  for command in commands(text):
    if arguments.only in command and not arguments.written:
      print(command, file=sys.stderr)
      found[command] = run(command)
      keep(found, commands(text))
  keep(found, commands(text))
  missing = [c for c in commands(text) if c not in found]
  if missing:
    raise SystemExit(f"not run yet: {missing}; the page is as it was")
  GUIDE.write_text(written(text, found))
  for path, drawn in pictures(found).items():
    path.write_text(drawn)


if __name__ == "__main__":
  main()

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Golden files, whose RUN lines run in this process.

A golden file is a text file of comments: a sentence with its claim, then

  // DEFINE: %{dot} = --lhs 128x512xnvfp4 --rhs 256x512xnvfp4
  // RUN: %tool emit --target b200 --cudnn 9.12 %{dot} | filecheck %s
  // CHECK: ...

and, if a command reads the file itself, its input. RUN lines are shell
commands, so lit's own runner can run them (`lit --param shell=1 hlo_tests`).
Each command would then start JAX again. This module runs them in one process.

PyPI's filecheck differs from LLVM's in one point: a CHECK-NOT extends to the
end of the text that the next check matches, not to the beginning.

If line 1 of a file says GENERATED, the CHECK lines are the whole output.
`tool.py regenerate` writes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pathlib
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from filecheck import finput, matcher, options, parser

ROOT: Final = pathlib.Path(__file__).parent
FOLDERS: Final = ("emitted", "rewritten", "optimized")
SUFFIXES: Final = (".mlir", ".hlo")
GENERATED: Final = "// GENERATED"

Main = Callable[[Sequence[str]], int]  # the type of main in tool.py

_DIRECTIVE: Final = re.compile(r"//\s*(RUN|DEFINE):\s*(.*)")
_DEFINITION: Final = re.compile(r"(%\{[\w:]+\})\s*=\s*(.*)")


class GoldenError(Exception):
  """A golden file fails, or its RUN lines are malformed."""


@dataclasses.dataclass(frozen=True)
class Run:
  """One RUN line: arguments of the tool, and of filecheck."""

  tool: tuple[str, ...]
  filecheck: tuple[str, ...]

  @property
  def needs_compiler(self) -> bool:
    return self.tool[0] == "optimize"

  @property
  def prefixes(self) -> list[str]:
    """Prefixes of its CHECK lines."""
    chosen = options.parse_argv_options(["filecheck", *self.filecheck])
    return chosen.check_prefixes

  def __str__(self) -> str:
    return shlex.join(("tool.py", *self.tool))


def paths() -> list[pathlib.Path]:
  """Returns every golden file."""
  return sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).iterdir()
    if path.suffix in SUFFIXES
  )


def runs(path: pathlib.Path) -> list[Run]:
  """Returns the RUN lines of a golden file.

  Raises:
    GoldenError: If the file has no RUN line, or a RUN line does not have the
      form `%tool ... | filecheck %s ...`.
  """
  found = [_parse(path, command) for command in _commands(path)]
  if not found:
    raise GoldenError(f"{path} has no RUN line")
  return found


def _commands(path: pathlib.Path) -> Iterator[str]:
  """Yields RUN lines, with continuations joined and definitions replaced."""
  definitions: dict[str, str] = {}
  start = ""
  for line in path.read_text().splitlines():
    match = _DIRECTIVE.match(line)
    if match is None:
      continue
    kind, text = match.groups()
    text = start + text
    start = ""
    if text.endswith("\\"):
      start = text[:-1]
      continue
    for name, value in definitions.items():
      text = text.replace(name, value)
    if kind == "RUN":
      yield text
      continue
    definition = _DEFINITION.fullmatch(text)
    if definition is None:
      raise GoldenError(f"{path}: a definition is %{{name}} = ..., got {text}")
    definitions[definition[1]] = definition[2]


def _parse(path: pathlib.Path, command: str) -> Run:
  words = shlex.split(command.replace("%s", str(path)))
  if words.count("|") == 1:
    bar = words.index("|")
    tool, check = words[:bar], words[bar + 1 :]
    if tool[0] == "%tool" and check[:2] == ["filecheck", str(path)]:
      return Run(tuple(tool[1:]), tuple(check[1:]))
  raise GoldenError(
    f"{path}: a RUN line is '%tool ... | filecheck %s ...', got {command}"
  )


def output(main: Main, run: Run) -> str:
  """Returns the output of the tool; raises GoldenError if it fails."""
  printed, errors = io.StringIO(), io.StringIO()
  with (
    contextlib.redirect_stdout(printed),
    contextlib.redirect_stderr(errors),
  ):
    try:
      status = main(list(run.tool))
    except SystemExit as stopped:  # raised by argparse
      status = stopped.code
  if status:
    raise GoldenError(f"{run}: exit status {status}\n{errors.getvalue()}")
  return printed.getvalue()


def check(main: Main, path: pathlib.Path) -> None:
  """Runs a golden file; raises GoldenError if a check fails."""
  for run in runs(path):
    text = output(main, run)
    message = match(path, run.filecheck, text)
    if message:
      raise GoldenError(f"{run}\n{message}\n{text}")


def match(path: pathlib.Path, arguments: Sequence[str], text: str) -> str:
  """Returns filecheck's errors for `text`, or ""."""
  chosen = options.parse_argv_options(["filecheck", *arguments])
  patterns = parser.pattern_for_opts(chosen)
  errors = io.StringIO()
  with (
    path.open() as checks,
    contextlib.redirect_stderr(errors),
    contextlib.redirect_stdout(errors),
  ):
    operations = parser.Parser(chosen, checks, *patterns)
    given = finput.FInput("<stdin>", text)
    status = matcher.Matcher(chosen, given, operations).run()
  return errors.getvalue() or f"exit status {status}" if status else ""


def regenerate(
  main: Main, files: Iterable[pathlib.Path] = ()
) -> list[pathlib.Path]:
  """Writes the CHECK lines of generated files.

  Args:
    main: the function main of tool.py.
    files: the files; by default every golden file whose line 1 says GENERATED.

  Returns:
    The files that have changed.

  Raises:
    GoldenError: If a given file is not a generated one, or a command fails.
  """
  chosen = list(files) or [path for path in paths() if is_generated(path)]
  changed = []
  for path in chosen:
    if not is_generated(path):
      raise GoldenError(
        f"{path} is written by hand: its line 1 is not GENERATED"
      )
    before = path.read_text()
    after = regenerated(main, path)
    if after != before:
      path.write_text(after)
      changed.append(path)
  return changed


def is_generated(path: pathlib.Path) -> bool:
  return path.read_text().startswith(GENERATED)


def regenerated(main: Main, path: pathlib.Path) -> str:
  """Returns a generated file's text with new CHECK lines for each prefix."""
  prefixes: dict[str, Run] = {}
  for run in runs(path):
    prefixes.setdefault(run.prefixes[0], run)
  is_check = re.compile(rf"// ({'|'.join(prefixes)})(-\w+)?:")
  lines = path.read_text().splitlines()
  kept = [line for line in lines if not is_check.match(line)]
  last = max(i for i, line in enumerate(kept) if _DIRECTIVE.match(line))
  checks = [
    line
    for prefix, run in prefixes.items()
    for line in _check_lines(prefix, output(main, run))
  ]
  return "\n".join([*kept[: last + 1], *checks, *kept[last + 1 :]]) + "\n"


def _check_lines(prefix: str, text: str) -> Iterator[str]:
  """Yields CHECK lines that match exactly `text`."""
  suffix = ""
  for line in text.splitlines():
    if not line.strip():
      continue
    # Escapes text that FileCheck would read as a regular expression or capture.
    line = re.sub(r"\{\{|\[\[", lambda m: f"{{{{{re.escape(m[0])}}}}}", line)
    yield f"// {prefix}{suffix}: {line}".rstrip()
    suffix = "-NEXT"

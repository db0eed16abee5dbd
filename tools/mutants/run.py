# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests on the library with one planted fault at a time.

  run.py                        every mutant, tests of `make test`
  run.py --leg all NAME...      these mutants, every test
  run.py --coverage DIRECTORY   only tests that run a mutated line
  run.py --matrix               all failing tests, not the first

A mutant is an entry of tools/mutants/*.toml: a file, the text that it replaces
and one sentence that says what goes wrong. Each run takes place in a copy of
the commit that is checked out, with a copy of the environment. DIRECTORY is
what tools/mutants/line_coverage.py writes; with it the quickest tests of the
mutant's own folder come first; if no test runs the lines, those of the folder
run. A C++ mutant rebuilds the library.

The report, a JSON object, has for each mutant the tests that fail. The exit
status is 1 if no test finds some mutant.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from typing import Final

ROOT: Final = pathlib.Path(__file__).resolve().parents[2]
CPP_SUFFIXES: Final = (".cc", ".h", ".inl")
CPP_TESTS: Final = (
  *("kernels/cpu", "jaxplugin/dot/backends/cpu_test.py"),
  *("jaxplugin/quantization/backends/cpu_test.py", "jaxplugin/ragged"),
  "jaxplugin/runtime/cpu_library_test.py",
)
FIND_LIBRARY: Final = """
from jaxplugin.kernels.cpu import library
print(library.find())
"""
LOAD_LIBRARY: Final = """
import jax.ffi
from jaxplugin.kernels.cpu import library
library.load(jax.ffi.include_dir())
"""
TIMEOUT_SECONDS: Final = 900
USAGE_ERROR: Final = 4  # exit statuses of pytest
NO_TESTS: Final = 5
MAX_TESTS: Final = 400  # with --coverage: the nearest and quickest
FAILURE: Final = re.compile(
  r"^(?:FAILED|ERROR|SUBFAILED.*?) (\S+_test\.py\S*)", re.MULTILINE
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
  """One planted fault.

  Attributes:
    name: unique, a claim about the fault.
    file: path from the root of the checkout.
    fault: what goes wrong, in one sentence.
    old: text that occurs once in the file.
    new: its replacement.
    equivalent: why no test can find it, if none can.
    isa: the CPU instruction set that its code needs, if it is C++.
  """

  name: str
  file: str
  fault: str
  old: str
  new: str
  equivalent: str | None = None
  isa: str | None = None

  @property
  def is_cpp(self) -> bool:
    return self.file.endswith(CPP_SUFFIXES)

  def lines(self, text: str) -> range:
    """Returns the lines of `text`, the file's, that the mutant replaces."""
    start = text.index(self.old)
    start += len(self.old) - len(self.old.lstrip("\n"))
    first = text[:start].count("\n") + 1
    return range(first, first + self.old.strip("\n").count("\n") + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """The tests' result for one mutant."""

  mutant: str
  failures: tuple[str, ...]
  status: str  # "found", "missed" or "not built"
  tests: int  # how many were named to pytest; 0 if it chose them
  seconds: float


def read(directory: pathlib.Path = ROOT / "tools/mutants") -> list[Mutant]:
  """Returns all mutants, in the order of their files."""
  return [
    Mutant(**entry)
    for path in sorted(directory.glob("*.toml"))
    for entry in tomllib.loads(path.read_text())["mutant"]
  ]


class Coverage:
  """Which tests run which lines (tools/mutants/line_coverage.py)."""

  def __init__(self, directory: pathlib.Path):
    self._tests: dict[tuple[str, int], set[str]] = collections.defaultdict(set)
    self._seconds: dict[str, float] = {}
    for path in directory.glob("*.jsonl"):
      for line in path.open():
        record = json.loads(line)
        self._seconds[record["test"]] = record["seconds"]
        for file, lines in record["lines"].items():
          for number in lines:
            self._tests[file, number].add(record["test"])

  def tests(self, mutant: Mutant, collected: set[str]) -> list[str]:
    """Returns the tests that run a line of `mutant`, the likeliest first.

    The record may name tests that are gone by now, or that the leg leaves out:
    only those of `collected` count.
    """
    text = (ROOT / mutant.file).read_text()
    found = set().union(
      *(self._tests[mutant.file, line] for line in mutant.lines(text))
    )
    found &= collected
    folder = mutant.file.rpartition("/")[0]
    near = lambda test: len(os.path.commonprefix([test, folder + "/"]))
    order = sorted(found, key=lambda t: (-near(t), self._seconds[t]))
    return order[:MAX_TESTS]


class Checkout:
  """A copy of the commit that is checked out, with its environment."""

  def __init__(self, directory: pathlib.Path, venv: pathlib.Path):
    self.directory = directory
    _run("git", "worktree", "add", "--quiet", "--detach", str(directory))
    copy = directory / ".venv"
    _run("cp", "--archive", "--link", str(venv), str(copy))
    # An editable install names the folder that it was made from.
    for path in copy.glob("lib/python*/site-packages/*jaxplugin*"):
      paths = path.iterdir() if path.is_dir() else (path,)
      for file in paths:
        if file.suffix in (".py", ".pth", ".json"):
          text = file.read_text().replace(f"{ROOT}/", f"{directory}/")
          text = text.replace(f'{ROOT}"', f'{directory}"')
          file.unlink()
          file.write_text(text)
    self.python = copy / "bin/python"
    self._copy_library(venv / "bin/python")
    self._sound: dict[str, bool] = {}
    self._collected: set[str] | None = None

  def _copy_library(self, python: pathlib.Path) -> None:
    """Copies the library of CPU kernels that tests in ROOT use.

    The environment may have none, or that of another checkout, and tests that
    expect the kernels would fail without a fault.
    """
    command = [str(python), "-c", FIND_LIBRARY]
    found = subprocess.check_output(command, cwd=ROOT, text=True).strip()
    built = self.directory / "build/cpu"
    built.mkdir(parents=True)
    shutil.copy2(found, built)
    # It is an error if the library was built from other sources.
    command = [str(self.python), "-c", LOAD_LIBRARY]
    subprocess.check_call(command, cwd=self.directory)

  def collected(self, leg: str) -> set[str]:
    """Returns the names of the tests of `leg`."""
    if self._collected is None:
      command = [str(self.python), "-m", "pytest", "--collect-only", "-q"]
      result = subprocess.run(
        [*command, f"--leg={leg}"],
        cwd=self.directory,
        capture_output=True,
        text=True,
        check=True,
      )
      lines = result.stdout.splitlines()
      self._collected = {line for line in lines if "::" in line}
    return self._collected

  def remove(self) -> None:
    _run("git", "worktree", "remove", "--force", str(self.directory))

  def build(self) -> bool:
    """Builds the library of CPU kernels; returns whether it compiles."""
    commands = (
      ("cmake", "-S", "kernels/cpu", "-B", "build/cpu"),
      ("cmake", "--build", "build/cpu"),
    )
    return all(
      subprocess.run(
        command, cwd=self.directory, capture_output=True, check=False
      ).returncode
      == 0
      for command in commands
    )

  def run(
    self, mutant: Mutant, leg: str, coverage: Coverage | None, matrix: bool
  ) -> Outcome:
    """Runs the tests on `mutant`."""
    start = time.monotonic()
    tests = coverage.tests(mutant, self.collected(leg)) if coverage else []
    if mutant.is_cpp:
      tests = list(CPP_TESTS)
    elif coverage and not tests:  # another process runs the line
      tests = [mutant.file.rpartition("/")[0]]
    if mutant.is_cpp and not self._is_built():
      self.build()  # the rest of the library, once
    path = self.directory / mutant.file
    text = path.read_text()
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
      if mutant.is_cpp and not self.build():
        return self._outcome(mutant, "not built", (), 0, start)
      failures = self._test(tests, leg, matrix)
    finally:
      path.write_text(text)
    if mutant.is_cpp and failures:
      self.build()  # the next line must not test the mutant's library
    for test in failures:
      if not self._passes(test, leg):
        raise RuntimeError(f"{test} fails without a fault. Mend it first.")
    status = "found" if failures else "missed"
    return self._outcome(mutant, status, failures, len(tests), start)

  def _is_built(self) -> bool:
    return (self.directory / "build/cpu/CMakeCache.txt").is_file()

  def _outcome(self, mutant, status, failures, tests, start) -> Outcome:
    return Outcome(
      mutant=mutant.name,
      failures=tuple(failures),
      status=status,
      tests=tests,
      seconds=round(time.monotonic() - start, 1),
    )

  def _passes(self, test: str, leg: str) -> bool:
    """Whether a test passes without a fault."""
    if "::" in test and test not in self._sound:
      self._sound[test] = not self._test([test], leg, matrix=False)
    return self._sound.get(test, True)

  def _test(self, tests: list[str], leg: str, matrix: bool) -> list[str]:
    command = [str(self.python), "-m", "pytest", "-q", f"--leg={leg}"]
    command += [] if matrix else ["-x"]
    # Programs that the fault does not change are read, not compiled.
    command += ["-o", f"cache_dir={ROOT}/.pytest_cache"]
    if tests:
      names = self.directory / "build/tests.txt"
      names.parent.mkdir(exist_ok=True)
      names.write_text("\n".join(tests) + "\n")
      command.append(f"@{names}")
    try:
      result = subprocess.run(
        command,
        cwd=self.directory,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
      )
    except subprocess.TimeoutExpired:
      return [f"no end within {TIMEOUT_SECONDS} s"]
    if result.returncode == USAGE_ERROR:
      raise RuntimeError(f"pytest cannot run {command}: {result.stdout}")
    failures = FAILURE.findall(result.stdout)
    if result.returncode not in (0, NO_TESTS) and not failures:
      failures = [f"pytest ended with {result.returncode}"]
    return failures


def _run(*command: str) -> None:
  subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def outcomes(arguments: argparse.Namespace) -> Iterator[Outcome]:
  """Runs the chosen mutants, `arguments.jobs` at a time."""
  chosen = [
    mutant
    for mutant in read()
    if not mutant.equivalent
    and (not arguments.name or mutant.name in arguments.name)
  ]
  coverage = Coverage(arguments.coverage) if arguments.coverage else None
  with tempfile.TemporaryDirectory() as parent:
    venv = arguments.venv.resolve()
    free: list[Checkout] = []

    def work(mutant: Mutant) -> Outcome:
      checkout = free.pop()
      try:
        return checkout.run(mutant, arguments.leg, coverage, arguments.matrix)
      finally:
        free.append(checkout)

    try:
      for number in range(arguments.jobs):
        free.append(Checkout(pathlib.Path(parent) / str(number), venv))
      with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        yield from pool.map(work, chosen)
    finally:
      for checkout in free:
        checkout.remove()


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("name", nargs="*", help="mutants (default: all)")
  parser.add_argument(
    "--leg", default="test", help="tests of conftest.py's leg"
  )
  parser.add_argument("--coverage", type=pathlib.Path, metavar="DIRECTORY")
  parser.add_argument("--matrix", action="store_true")
  parser.add_argument("--jobs", type=int, default=2)
  parser.add_argument("--venv", type=pathlib.Path, default=ROOT / ".venv")
  parser.add_argument("--report", type=pathlib.Path, metavar="OUT.json")
  arguments = parser.parse_args()
  found = []
  for outcome in outcomes(arguments):
    found.append(outcome)
    first = outcome.failures[0] if outcome.failures else ""
    print(f"{outcome.status:9} {outcome.mutant}  {first}", flush=True)
    if arguments.report:
      report = [dataclasses.asdict(outcome) for outcome in found]
      arguments.report.write_text(json.dumps(report, indent=1) + "\n")
  missed = [outcome for outcome in found if outcome.status != "found"]
  print(f"{len(found) - len(missed)} of {len(found)} mutants found")
  return int(bool(missed))


if __name__ == "__main__":
  sys.exit(main())

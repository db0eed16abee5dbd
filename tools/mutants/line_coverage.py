# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: records which lines of the library each test runs.

  PYTHONPATH=tools/mutants python3.12 -m pytest -p line_coverage \
    --line-coverage=DIRECTORY -n 2

Each process appends to one file in DIRECTORY. A test is a JSON object on one
line, `{"test": id, "seconds": s, "lines": {file: [line, ...]}}`. The plugin
does not see lines that other processes run (commands, examples).

`sys.monitoring` (Python 3.12) reports each line once a test, so that a test
takes little longer than without the plugin.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import pathlib
import sys
import time
import types

import pytest

ROOT = f"{pathlib.Path(__file__).resolve().parents[2]}/"
FOLDERS = (f"{ROOT}jaxplugin/", f"{ROOT}kernels/")

_monitoring = sys.monitoring
_TOOL = _monitoring.COVERAGE_ID
_lines: set[tuple[str, int]] = set()


def _is_product(path: str) -> bool:
  support = ("/testing/", "/tests/")
  return (
    path.startswith(FOLDERS)
    and not path.endswith("_test.py")
    and not any(folder in path.removeprefix(ROOT) for folder in support)
  )


def _record(code: types.CodeType, line: int) -> object:
  _lines.add((code.co_filename, line))
  return _monitoring.DISABLE


def _observe(code: types.CodeType) -> None:
  _monitoring.set_local_events(_TOOL, code, _monitoring.events.LINE)
  for constant in code.co_consts:
    if isinstance(constant, types.CodeType):
      _observe(constant)


def _install() -> None:
  _monitoring.use_tool_id(_TOOL, "line_coverage")
  _monitoring.register_callback(_TOOL, _monitoring.events.LINE, _record)
  original = importlib.machinery.SourceFileLoader.get_code

  def get_code(self, name):
    code = original(self, name)
    if code is not None and _is_product(code.co_filename):
      _observe(code)
    return code

  importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore


_install()


def pytest_addoption(parser):
  parser.addoption("--line-coverage", type=pathlib.Path, required=True)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
  _lines.clear()
  _monitoring.restart_events()
  start = time.perf_counter()
  yield
  seconds = time.perf_counter() - start
  lines: dict[str, list[int]] = {}
  for path, line in sorted(_lines):
    lines.setdefault(path.removeprefix(ROOT), []).append(line)
  record = {"test": item.nodeid, "seconds": seconds, "lines": lines}
  worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
  directory = item.config.getoption("--line-coverage")
  directory.mkdir(parents=True, exist_ok=True)
  with (directory / f"{worker}.jsonl").open("a") as file:
    file.write(json.dumps(record) + "\n")

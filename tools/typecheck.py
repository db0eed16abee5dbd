# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs mypy over the package in a wheel's layout: `typecheck.py [OPTIONS]`.

A checkout has jaxplugin.kernels in kernels/, where a type checker does not look
(jaxplugin/kernels/__init__.py finds it). This program therefore links the files
into one folder. OPTIONS are mypy's. pyproject.toml has mypy's configuration.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
from typing import Final

ROOT: Final = pathlib.Path(__file__).resolve().parents[1]
# Each Python has a folder, because CI checks with two of them at once.
STAGE: Final = ROOT / "build" / f"types-{sys.implementation.cache_tag}"
KERNELS: Final = "jaxplugin/kernels/"
SUPPORT: Final = ("_test.py", "testing.py")


def link(folder: pathlib.Path, destination: pathlib.Path) -> None:
  """Links the files of `folder` that a wheel has to `destination`."""
  destination.mkdir(parents=True, exist_ok=True)
  for path in sorted(folder.iterdir()):
    place = destination / path.name
    if path.is_dir():
      if not path.name.startswith(("__pycache__", ".", "testing")):
        link(path, place)
    elif path.suffix == ".py" and not path.name.endswith(SUPPORT):
      place.symlink_to(path)


def in_checkout(line: str, root: pathlib.Path = ROOT) -> str:
  """Returns a line of mypy's output with the file's name in the checkout."""
  is_there = (root / line.partition(":")[0]).exists()
  return line if is_there else line.replace(KERNELS, "kernels/", 1)


def main() -> int:
  shutil.rmtree(STAGE, ignore_errors=True)
  link(ROOT / "jaxplugin", STAGE / "jaxplugin")
  link(ROOT / "kernels", STAGE / KERNELS)
  command = [sys.executable, "-m", "mypy", "--package", "jaxplugin"]
  command += ["--config-file", str(ROOT / "pyproject.toml")]
  command += ["--cache-dir", str(ROOT / ".mypy_cache"), *sys.argv[1:]]
  done = subprocess.run(
    command, cwd=STAGE, stdout=subprocess.PIPE, text=True, check=False
  )
  for line in done.stdout.splitlines():
    print(in_checkout(line))
  return done.returncode


if __name__ == "__main__":
  sys.exit(main())

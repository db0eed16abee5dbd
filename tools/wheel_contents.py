# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks what built wheels and an sdist hold: `wheel_contents.py DIRECTORY`.

Prints a sentence for each fault and exits with status 1 if there is one. The
directory must have one sdist and a wheel for each platform of `MACHINES`. All
have the same version. CHANGELOG.md must list this version.
"""

from __future__ import annotations

import pathlib
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from typing import Final

ROOT: Final = pathlib.Path(__file__).resolve().parents[1]
LIBRARY: Final = re.compile(
  r"jaxplugin/kernels/cpu/libjaxplugin_cpu\.(so|dylib)"
)
# The machine in the header of a wheel's library, by the platform in the wheel's
# name (System V ABI, "ELF Header"). A wheel of platform "any" has no library.
MACHINES: Final = {
  "manylinux_2_28_x86_64": 62,
  "manylinux_2_28_aarch64": 183,
  "any": None,
}
_E_MACHINE: Final = slice(18, 20)
BUILD_FAILED: Final = "jaxplugin/kernels/cpu/BUILD_FAILED.txt"
# Files of the checkout that a wheel must not have: tests and their helpers.
SUPPORT: Final = re.compile(
  r"(^|/)[^/]*(_test|testing)\.py$|^jaxplugin/testing/|^kernels/cpu/tests/"
)
# Except the test suites for backends of other packages.
SUITE: Final = (
  *(
    f"jaxplugin/testing/{name}.py"
    for name in ("__init__", "contract", "operation_suites")
  ),
  *(
    f"jaxplugin/testing/dot_suite/{name}.py"
    for name in (
      *("__init__", "backend_suite", "dot_cases", "epilogue"),
      *("ragged_suite", "suite"),
    )
  ),
)
SDIST_ONLY: Final = (
  *("CHANGELOG.md", "CMakeLists.txt", "CONTRIBUTING.md", "LICENSE", "Makefile"),
  *("README.md", "conftest.py", "pyproject.toml", "kernels/cpu/CMakeLists.txt"),
  *(
    "kernels/cpu/ffi.cc",
    "kernels/cpu/kernels.h",
    "kernels/cpu/simd/codec.inl",
  ),
  *("examples/quickstart/quickstart.py", "examples/quickstart/sentences.txt"),
  *("hlo_tests/tool.py", "tools/release.sh"),
  *("jaxplugin/dot/api_test.py", "jaxplugin/testing/contract.py"),
)


def modules(root: pathlib.Path) -> dict[str, str]:
  """Returns the Python files of a wheel: {name in it: name in the checkout}."""
  names = {}
  for folder, prefix in (("jaxplugin", ""), ("kernels", "jaxplugin/")):
    for path in (root / folder).rglob("*.py"):
      name = path.relative_to(root).as_posix()
      if name in SUITE or not SUPPORT.search(name):
        names[prefix + name] = name
  return names


def wheel_faults(
  names: Iterable[str], expected: Iterable[str], *, has_library: bool = True
) -> list[str]:
  """Returns faults of a wheel with files `names`; it needs `expected`."""
  found = {name for name in names if not name.endswith("/")}
  info = {
    name for name in found if ".dist-info/" in name.partition("/")[0] + "/"
  }
  libraries = {name for name in found if LIBRARY.fullmatch(name)}
  wanted = {*expected, "jaxplugin/py.typed"}
  faults = [f"the wheel lacks {name}" for name in sorted(wanted - found)]
  if BUILD_FAILED in found:
    faults.append("the wheel's CPU kernels did not compile")
  elif has_library and not libraries:
    faults.append("the wheel lacks the library of CPU kernels")
  if not any(name.endswith("/licenses/LICENSE") for name in info):
    faults.append("the wheel lacks the licence")
  allowed = libraries if has_library else set()
  others = found - wanted - info - allowed - {BUILD_FAILED}
  faults += [f"the wheel has {name}" for name in sorted(others)]
  return faults


def library_faults(wheel: zipfile.ZipFile, machine: int) -> list[str]:
  """Returns faults of the libraries in a wheel; `machine` is ELF's number."""
  faults = []
  for name in filter(LIBRARY.fullmatch, wheel.namelist()):
    got = int.from_bytes(wheel.read(name)[_E_MACHINE], "little")
    if got != machine:
      faults.append(f"{name} is for ELF machine {got}, not {machine}")
  return faults


def sdist_faults(names: Iterable[str], expected: Iterable[str]) -> list[str]:
  """Returns faults of an sdist; names begin with its top folder."""
  found = {name.partition("/")[2] for name in names}
  wanted = {*SDIST_ONLY, *expected, "jaxplugin/py.typed"}
  faults = [f"the sdist lacks {name}" for name in sorted(wanted - found)]
  unwanted = re.compile(r"(^|/)(\.git|\.ci|\.venv[^/]*|__pycache__|build)/")
  extra = sorted(name for name in found if unwanted.search(name))
  return faults + [f"the sdist has {name}" for name in extra]


def version_faults(
  wheel: str, sdist: str, changelog: str, package: str
) -> list[str]:
  """Returns faults of versions in file names, CHANGELOG.md and __init__.py."""
  versions = {
    "the wheel": wheel.split("-")[1],
    "the sdist": sdist.removesuffix(".tar.gz").rpartition("-")[2],
  }
  faults = [
    f"{what} is of version {version}, __init__.py says {package}"
    for what, version in versions.items()
    if version != package
  ]
  if not re.search(rf"^## \[{re.escape(package)}\]", changelog, re.M):
    faults.append(f"CHANGELOG.md has no chapter of {package}")
  return faults


def faults(directory: pathlib.Path, root: pathlib.Path = ROOT) -> list[str]:
  """Returns faults of the wheel and the sdist in `directory`."""
  wheels = {
    path.stem.rpartition("-")[2]: path for path in directory.glob("*.whl")
  }
  sdists = sorted(directory.glob("*.tar.gz"))
  count = len([*directory.glob("*.whl")])
  if set(wheels) != set(MACHINES) or count != len(wheels) or len(sdists) != 1:
    return [
      f"{directory} must have one sdist and a wheel for each of"
      f" {', '.join(MACHINES)}; got {len(sdists)} and {count}:"
      f" {', '.join(sorted(wheels))}. Empty it first"
    ]
  (sdist,) = sdists
  expected = modules(root)
  init = (root / "jaxplugin" / "__init__.py").read_text()
  version = re.search(r'^__version__ = "(.+)"$', init, re.M)
  if version is None:
    return ["jaxplugin/__init__.py has no __version__"]
  changelog = (root / "CHANGELOG.md").read_text()
  found = []
  for platform, machine in MACHINES.items():
    wheel = wheels[platform]
    with zipfile.ZipFile(wheel) as archive:
      one = wheel_faults(
        archive.namelist(), expected, has_library=machine is not None
      )
      if machine is not None:
        one += library_faults(archive, machine)
    one += version_faults(wheel.name, sdist.name, changelog, version[1])
    found += [f"{platform}: {fault}" for fault in one]
  with tarfile.open(sdist) as archive:
    found += sdist_faults(archive.getnames(), expected.values())
  return found


def main() -> int:
  if len(sys.argv) != 2:
    print(__doc__, file=sys.stderr)
    return 2
  found = faults(pathlib.Path(sys.argv[1]))
  for fault in found:
    print(f"wheel_contents: {fault}", file=sys.stderr)
  return int(bool(found))


if __name__ == "__main__":
  sys.exit(main())

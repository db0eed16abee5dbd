# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`info`: versions, devices, and the formats that each backend supports."""

from __future__ import annotations

import dataclasses
import json
import platform
import re
from collections.abc import Iterator
from typing import Final

import jax

from jaxplugin.core import formats, targets
from jaxplugin.dot import backends, problems
from jaxplugin.plugins import registry
from jaxplugin.printing import console
from jaxplugin.quantization import backends as quantization_backends
from jaxplugin.ragged import backends as ragged_backends
from jaxplugin.runtime import fingerprints
from jaxplugin.tables import resolution

PACKAGES: Final = (
  "jaxplugin",
  "jax",
  "jaxlib",
  "ml_dtypes",
  "numpy",
  "jax-triton",
  "triton",
  "cuda-tile",
  "jax-cuda13-plugin",
  "jax-cuda12-plugin",
  "nvidia-cudnn-cu13",
  "nvidia-cudnn-cu12",
)
# Operations that may have a tuning table.
_OPERATIONS: Final = (
  backends.OPERATION,
  quantization_backends.QUANTIZE_OPERATION,
  quantization_backends.DEQUANTIZE_OPERATION,
  ragged_backends.OPERATION,
  ragged_backends.CONTRACTION,
)
_ANY_FORMAT: Final = "|".join(format.name for format in formats.NAMED)
# The end of a reason that names the formats of one problem.
_GOT_FORMATS: Final = re.compile(f", got ({_ANY_FORMAT})( x ({_ANY_FORMAT}))?$")
_SIZES: Final = {"m": 128, "n": 4096, "k": 4096}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Information:
  """Versions, devices, and the formats that each backend supports.

  Attributes:
    versions: by package; "not installed" if it is not.
    devices: JAX's devices.
    target: the device that dots are decided for.
    tuning: lines about tuning tables.
    refusals: by backend and format, why the backend does not support a dot of
      that format; "" if it does.
    plugins: lines about backends of other packages.
  """

  versions: dict[str, str]
  devices: tuple[str, ...]
  target: str
  tuning: tuple[str, ...]
  refusals: dict[str, dict[str, str]]
  plugins: tuple[str, ...]

  def parts(self) -> Iterator[console.Part]:
    """Yields the parts of the report that `info` prints."""
    for name, number in self.versions.items():
      yield f"{name}: {number}"
    yield f"devices: {', '.join(self.devices)}"
    yield f"target: {self.target}"
    yield from self.tuning
    sizes = " ".join(f"{name}={size}" for name, size in _SIZES.items())
    yield f"backends, for a dot of {sizes}:"
    names = [format.name for format in formats.NAMED]
    yes, no = ("yes", "green"), ("no", "dim")
    yield console.table(
      ["format", *self.refusals],
      [
        [name, *(no if each[name] else yes for each in self.refusals.values())]
        for name in names
      ],
      indent=2,
    )
    for backend, refusals in self.refusals.items():
      reasons = {n: _GOT_FORMATS.sub("", r) for n, r in refusals.items()}
      for reason in dict.fromkeys(filter(None, reasons.values())):
        refused = [name for name in names if reasons[name] == reason]
        only = "" if len(refused) == len(names) else f" {', '.join(refused)}"
        yield f"  not {backend}{only}: {reason}"
    yield "backends of other packages:"
    yield from (f"  {line}" for line in self.plugins or ("none",))

  def to_json(self) -> str:
    """Returns the attributes as JSON."""
    return json.dumps(dataclasses.asdict(self), indent=2)


def information() -> Information:
  """Returns the facts that `info` prints."""
  target = targets.current_target()
  refusals: dict[str, dict[str, str]] = {}
  for name, backend in backends.table().items():
    refusals[name] = {}
    for format in formats.NAMED:
      refusal = backend.supports(_sample_problem(format), target)
      refusals[name][format.name] = "" if refusal is None else refusal.reason
  return Information(
    versions={
      "python": platform.python_version(),
      **{
        package: fingerprints.version(package) or "not installed"
        for package in PACKAGES
      },
    },
    devices=tuple(
      f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()
    ),
    target=str(target),
    tuning=tuple(resolution.describe(_OPERATIONS, target)),
    refusals=refusals,
    plugins=tuple(str(status) for status in registry.statuses()),
  )


def info() -> str:
  """Returns versions, devices, and the formats that each backend supports.

  `python -m jaxplugin info` prints it. The text also has the target, the tuning
  tables in use, and backends of other packages.

  Returns:
    Lines of text. Its form may change; `python -m jaxplugin info --json` is for
    programs.

  Example:
    >>> import jaxplugin as jp
    >>> lines = jp.info().splitlines()
    >>> [line for line in lines if line.startswith("jaxplugin:")]
    ['jaxplugin: 0.1.0']
  """
  return console.text(information().parts())


def _sample_problem(format: formats.BlockFormat) -> problems.DotProblem:
  blocked = format.without_offset().along(_SIZES["k"]).of_rows()
  operand = problems.SideProblem(format=blocked, dtype=format.array_dtype)
  return problems.DotProblem(
    batch=1,
    m=_SIZES["m"],
    n=_SIZES["n"],
    k=_SIZES["k"],
    lhs=operand,
    rhs=operand,
    out_dtype=formats.BF16,
    global_scale="scalar" if format.has_global_scale else "none",
  )

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Files that reproduce block-scaled calls.

A file is a zip archive. `manifest.json` has the versions, the target, the
shapes, dtypes and statistics of the inputs, and a record of each call.
`program` and `reference` are results of `jax.export`, if the file is of a whole
program. `data.npz` has the bytes of the inputs, if the user asked for them.

The records of calls hold no names, source lines or paths, unless the user asked
for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import json
import pathlib
import platform
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from jaxplugin.core import (
  atomic_files,
  decisions,
  strict_json,
  targets,
)
from jaxplugin.operation import array_statistics
from jaxplugin.runtime import fingerprints
from jaxplugin.tables import resolution

FORMAT: Final = "jaxplugin repro"
VERSION: Final = 2
ARRAY: Final = "array"
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)  # the first time that zip can represent
_ENCRYPTED: Final = 1  # a flag of a member
_MANIFEST: Final = "manifest.json"
_DATA: Final = "data.npz"
_MAX_MANIFEST: Final = 1 << 26
# Fields of calls that hold objects of a process. Replays do not need them.
_NOT_SAVED: Final = ("overlay", "out_sharding")


class ReproError(ValueError):
  """A file is not one of `jp.repro.save`, or is damaged.

  The message has the path and the reason.

  Example:
    >>> import jaxplugin as jp
    >>> issubclass(jp.repro.ReproError, ValueError)
    True
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input:
  """An array that a program or a call reads.

  Attributes:
    shape, dtype: of the array.
    sharding: its PartitionSpec and mesh, in words; "" if it has none.
    statistics: see `array_statistics.describe`; None if unknown.
    name: its path in the arguments, if the user asked for names.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  sharding: str = ""
  statistics: array_statistics.Statistics | None = None
  name: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallRecord:
  """One block-scaled call.

  Attributes:
    operation: name of the primitive.
    form: the primitive's parameter `call` or `problem`, see `encode`.
    description: its problem, in words.
    operands: positions of its operands among the file's inputs, or among the
      taps of the reference program if the file has one.
    loops: number of dimensions of each tap in front of the operand's; () if no
      call of the file is in a loop.
    decisions: implementation and config of each decision, at the time of
      saving.
    name: source line and scope, if the user asked for names.
    is_layer: whether its only group with rows is a layer of a stack.
  """

  operation: str
  form: Any
  description: str
  operands: tuple[int, ...]
  loops: tuple[int, ...] = ()
  decisions: tuple[dict[str, Any], ...] = ()
  name: str = ""
  is_layer: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repro:
  """The content of a file.

  Attributes:
    reason: event that wrote the file, such as "debug_checks"; "" for `save`.
    inputs: the arrays.
    calls: the calls, in the order of the program.
    data: the inputs as arrays; None if the file has only statistics.
    program: `jax.export` of the program with its kernels; None if the file is
      of calls.
    reference: `jax.export` of the program by XLA's operations. Its results are
      those of the program, then the taps: the operands of each call.
    environment: versions, target and digest of the tuning tables.
  """

  reason: str = ""
  inputs: tuple[Input, ...]
  calls: tuple[CallRecord, ...]
  data: tuple[np.ndarray, ...] | None = None
  program: bytes | None = None
  reference: bytes | None = None
  environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def environment(target: targets.Target | None = None) -> dict[str, Any]:
  """Returns versions, target and digest of the tuning tables, as JSON."""
  described = dataclasses.asdict(target or targets.current_target())
  # The reasons may have paths.
  described["missing_libraries"] = [
    x for x, _ in described["missing_libraries"]
  ]
  return {
    "versions": {
      "python": platform.python_version(),
      "machine": platform.machine(),
      **fingerprints.versions(),
    },
    "target": described,
    "tuning_digest": resolution.tuning_digest(),
  }


def input_of(x: Any, **fields: Any) -> Input:
  """Describes an array; a `jax.ShapeDtypeStruct` has no statistics."""
  has_data = hasattr(x, "__array__")
  return Input(
    shape=tuple(x.shape),
    dtype=np.dtype(x.dtype),
    statistics=array_statistics.describe(np.asarray(x)) if has_data else None,
    **fields,
  )


# Records of calls.


def record(
  operation: str,
  form: Any,
  operands: Sequence[int],
  decided: Sequence[decisions.Decision] = (),
  **fields: Any,
) -> CallRecord:
  """Returns the record of a call.

  Args:
    operands: see `CallRecord`.
  """
  return CallRecord(
    operation=operation,
    form=encode(form),
    operands=tuple(operands),
    decisions=tuple(
      {"implementation": x.implementation, "config": dict(x.config)}
      for x in decided
    ),
    **fields,
  )


def encode(value: Any) -> Any:
  """Returns JSON for plain data, dtypes, and dataclasses of them."""
  if value is None or isinstance(value, (bool, int, float, str)):
    return value
  if isinstance(value, enum.Enum):  # in place of an array
    return {"class": ARRAY}
  if isinstance(value, np.dtype):
    return {"dtype": value.name}
  if isinstance(value, (tuple, list)):
    return [encode(item) for item in value]
  if not dataclasses.is_dataclass(value):
    raise TypeError(f"encode: value must be plain data, got {value!r}")
  fields = {
    field.name: encode(getattr(value, field.name))
    for field in dataclasses.fields(value)
    if field.init and field.name not in _NOT_SAVED
  }
  return {"class": type(value).__name__, **fields}


def decode(value: Any, classes: Mapping[str, Any]) -> Any:
  """Undoes `encode`; lists become tuples.

  Args:
    value: the JSON.
    classes: the dataclasses that it may contain, by name. `ARRAY` has the
      object that stands in place of an array.

  Raises:
    ReproError: If the value has another class or other fields.
  """
  if isinstance(value, list):
    return tuple(decode(item, classes) for item in value)
  if not isinstance(value, dict):
    return value
  try:
    if "class" not in value:
      return jnp.dtype(value["dtype"])
    kind = classes[value["class"]]
    if value["class"] == ARRAY:
      return kind
    fields = {k: decode(x, classes) for k, x in value.items() if k != "class"}
    return kind(**fields)
  except (KeyError, TypeError) as error:
    raise ReproError(
      f"the record of a call cannot be read ({error}). Install the version of"
      " jaxplugin that wrote the file"
    ) from None


# Files.


def write(path: pathlib.Path, repro: Repro) -> None:
  """Writes a file in one step. Equal content gives equal bytes."""
  manifest = {
    "format": FORMAT,
    "version": VERSION,
    "reason": repro.reason,
    "environment": repro.environment,
    "inputs": [
      {**vars(x), "shape": list(x.shape), "dtype": x.dtype.name}
      for x in repro.inputs
    ],
    "calls": [{**vars(call)} for call in repro.calls],
  }
  text = json.dumps(manifest, indent=1, sort_keys=True)
  members = {_MANIFEST: text.encode()}
  for name in ("program", "reference"):
    if (data := getattr(repro, name)) is not None:
      members[name] = data
  if repro.data is not None:
    # NumPy cannot load the dtypes of ml_dtypes.
    stored = [np.frombuffer(x.tobytes(), np.uint8) for x in repro.data]
    members[_DATA] = _zipped(
      {f"{i}.npy": _npy(x) for i, x in enumerate(stored)}
    )
  with atomic_files.replacing(path) as file:
    file.write(_zipped(members))


def _npy(x: np.ndarray) -> bytes:
  file = io.BytesIO()
  np.save(file, x, allow_pickle=False)
  return file.getvalue()


def _zipped(members: Mapping[str, bytes]) -> bytes:
  file = io.BytesIO()
  with zipfile.ZipFile(file, "w") as archive:
    for name, data in members.items():
      info = zipfile.ZipInfo(name, _EPOCH)
      archive.writestr(info, data, zipfile.ZIP_DEFLATED, 1)
  return file.getvalue()


@contextlib.contextmanager
def reading(path: pathlib.Path) -> Iterator[None]:
  """Raises a ReproError with the path if the content of a file is damaged."""
  try:
    yield
  except (
    *(zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError),
    *(AttributeError, LookupError, TypeError, ValueError),
  ) as error:
    is_typed = isinstance(error, ReproError)
    why = str(error) if is_typed else f"it is damaged ({error!r})"
    raise ReproError(f"{path}: {why}") from None


def read(path: pathlib.Path) -> Repro:
  """Reads a file.

  Raises:
    OSError: If it cannot be read.
    ReproError: If it is damaged, or has another version.
  """
  # A pipe may never end.
  if path.exists() and not (path.is_file() or path.is_dir()):
    raise ReproError(f"{path}: it must be a regular file")
  with reading(path), zipfile.ZipFile(path) as archive:
    if any(info.flag_bits & _ENCRYPTED for info in archive.infolist()):
      raise ReproError("it is encrypted. Decrypt it, or save it again")
    if archive.getinfo(_MANIFEST).file_size > _MAX_MANIFEST:
      raise ReproError(f"the manifest has more than {_MAX_MANIFEST} bytes")
    manifest = strict_json.loads(archive.read(_MANIFEST))
    members = {
      name: archive.read(name)
      for name in archive.namelist()
      if name != _MANIFEST
    }
    return _parse(manifest, members)


def _parse(manifest: Any, members: dict[str, bytes]) -> Repro:
  if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
    raise ReproError("it is not a file of jp.repro.save")
  if manifest["version"] != VERSION:
    raise ReproError(
      f"it has version {manifest['version']}, and this jaxplugin reads"
      f" {VERSION}. Install the version of jaxplugin that wrote the file:"
      f" {manifest.get('environment', {}).get('versions', {})}"
    )
  inputs = tuple(
    Input(**{**x, "shape": tuple(x["shape"]), "dtype": jnp.dtype(x["dtype"])})
    for x in manifest["inputs"]
  )
  calls = tuple(
    CallRecord(
      **{**x, "operands": tuple(x["operands"]), "loops": tuple(x["loops"])}
    )
    for x in manifest["calls"]
  )
  data = None
  if _DATA in members:
    with np.load(io.BytesIO(members[_DATA])) as arrays:
      data = tuple(
        arrays[str(i)].view(x.dtype).reshape(x.shape)
        for i, x in enumerate(inputs)
      )
  return Repro(
    reason=manifest["reason"],
    environment=manifest["environment"],
    inputs=inputs,
    calls=calls,
    data=data,
    program=members.get("program"),
    reference=members.get("reference"),
  )

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The custom call that launches a Triton kernel.

jaxlib's plugin has two custom calls with the same payload:

* `triton_kernel_call_ffi` is a handler of XLA's FFI with two stages. The first
  stage loads the kernel once for each program. The second stage launches it,
  and declares that a CUDA graph may record it (XLA's command buffers).
* `triton_kernel_call` is older. XLA ends a CUDA graph before it. Each launch
  looks its kernel up by a hash of the whole payload, about 20 kB.

jax-triton 0.3 writes the older call, jax-triton 0.4 the newer one. This module
chooses the call for both versions.

The payload is a compressed `TritonAnyKernelCall` (jaxlib's `gpu/triton.proto`).
jax-triton writes the machine code and the kernel's TTIR into it, and jaxlib
launches only the code. The TTIR is more than half of the bytes, and its
locations depend on the folder of the kernel's source, so `rewrite` removes it.

On NVIDIA the code is PTX. jax-triton 0.3 writes the newest PTX version that
Triton's ptxas supports. jaxlib may find an older ptxas, so `rewrite` also
changes the version. Before a launch jaxlib assembles the PTX for one
architecture.
"""

from __future__ import annotations

import dataclasses
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from jaxlib.mlir import ir

from jaxplugin.jaxext import jaxlib_private

# Environment variable: LEGACY or empty. It is read when a call is lowered.
VARIABLE: Final = "JAXPLUGIN_TRITON_CALL"
LEGACY: Final = "legacy"

_NAME: Final = "call_target_name"
_VERSION: Final = "api_version"
_CONFIG: Final = "backend_config"
_TYPED_CONFIG: Final = "mhlo.backend_config"
_OPAQUE: Final = "opaque"

# Field numbers. _KERNEL is the path TritonAnyKernelCall.kernel_call,
# TritonKernelCall.kernel; _CODE and _TTIR are fields of TritonKernel.
_KERNEL: Final = (1, 1)
_CODE: Final = 4
_TTIR: Final = 5
_VARINT: Final = 0
_SIZES: Final = {1: 8, 5: 4}  # bytes of fixed-size fields, by wire type
_DELIMITED: Final = 2
_PTX_TARGET: Final = re.compile(
  rb"^\.target sm_(\d{2,3})([af]?)\b", re.MULTILINE
)
# A payload starts with the kernel, and PTX with its target.
_HEADER_BYTES: Final = 1 << 16
_PTX_VERSION: Final = re.compile(rb"^\.version \d+\.\d+$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallTarget:
  """A custom call that launches Triton kernels.

  Attributes:
    name: name of the call target in XLA.
    api_version: attribute of the StableHLO operation. Version 2 returns a
      status, and its `backend_config` is the payload. Version 1 is XLA's typed
      FFI in JAX's form: the payload is the entry `opaque` of a dictionary
      `mhlo.backend_config`.
    is_captured: whether CUDA graphs record it.
  """

  name: str
  api_version: int
  is_captured: bool

  def __str__(self) -> str:
    graphs = "record it" if self.is_captured else "end before it"
    return f"{self.name} (CUDA graphs {graphs})"


FFI_CALL: Final = CallTarget(
  name="triton_kernel_call_ffi", api_version=1, is_captured=True
)
LEGACY_CALL: Final = CallTarget(
  name="triton_kernel_call", api_version=2, is_captured=False
)
NAMES: Final = (LEGACY_CALL.name, FFI_CALL.name)


def chosen(
  platform: str, environment: Mapping[str, str] | None = None
) -> CallTarget:
  """Returns the call that launches kernels of a program that is lowered now.

  It is `FFI_CALL`, unless the environment asks for the older call, or jaxlib's
  plugin has only the older one. Without a plugin it is `FFI_CALL` too.

  Args:
    environment: environment variables; None for those of the process.

  Raises:
    ValueError: If the environment variable has another value.
  """
  environment = os.environ if environment is None else environment
  asked = environment.get(VARIABLE, "")
  if asked not in ("", LEGACY):
    raise ValueError(
      f"{VARIABLE} must be {LEGACY!r}, for {LEGACY_CALL.name}, or not be set,"
      f" got {asked!r}"
    )
  if asked == LEGACY:
    return LEGACY_CALL
  handlers = jaxlib_private.triton_handlers(platform)
  if handlers is not None and FFI_CALL.name not in handlers:
    return LEGACY_CALL
  return FFI_CALL


def rewrite(operation: Any, target: CallTarget, ptx_version: int) -> None:
  """Changes a call that jax-triton lowered into a call of `target`.

  Args:
    operation: an `ir.Operation`. It is unchanged unless it launches a kernel.
    target: the custom call to use.
    ptx_version: the version of the `launching.Launch`.
  """
  attributes = operation.attributes
  if _NAME not in attributes or attributes[_NAME].value not in NAMES:
    return
  with operation.context:
    fields = {}
    if _TYPED_CONFIG in attributes:
      fields = {item.name: item.attr for item in attributes[_TYPED_CONFIG]}
      payload = fields[_OPAQUE].value_bytes
      del attributes[_TYPED_CONFIG]
    else:
      payload = attributes[_CONFIG].value_bytes
    payload = ir.StringAttr.get(edited_payload(payload, ptx_version))
    if target == FFI_CALL:
      fields[_OPAQUE] = payload
      attributes[_TYPED_CONFIG] = ir.DictAttr.get(fields)
      payload = ir.StringAttr.get("")
    attributes[_CONFIG] = payload
    attributes[_NAME] = ir.StringAttr.get(target.name)
    kind = ir.IntegerType.get_signless(32)
    attributes[_VERSION] = ir.IntegerAttr.get(kind, target.api_version)


def architecture(operation: Any) -> str | None:
  """Returns the architecture of a call's kernel, such as "sm_90a".

  It is None if the payload has no PTX: jax-triton's payload for an AMD GPU is
  the path of a file.
  """
  config = None
  for name in (_CONFIG, _TYPED_CONFIG):
    if name in operation.attributes:
      config = operation.attributes[name]
  if isinstance(config, ir.DictAttr):
    config = {item.name: item.attr for item in config}.get(_OPAQUE)
  if not isinstance(config, ir.StringAttr):
    return None
  try:
    # The size is limited because the module may be malicious.
    header = zlib.decompressobj().decompress(config.value_bytes, _HEADER_BYTES)
  except zlib.error:
    return None
  found = _PTX_TARGET.search(header)
  return None if found is None else f"sm_{(found[1] + found[2]).decode()}"


def runs_on(
  architecture: str, compute_capability: tuple[int, int] | None
) -> bool:
  """Returns whether a GPU runs a kernel of an `architecture`.

  jaxlib assembles PTX for the architecture of the kernel. The result runs on
  later GPUs of the same major version, unless it has architecture-specific
  features ("sm_90a").
  """
  number = int(re.sub(r"\D", "", architecture))
  major, minor = divmod(number, 10)
  if compute_capability is None or major != compute_capability[0]:
    return False
  is_specific = not architecture[-1].isdigit()
  return minor == compute_capability[1] or (
    not is_specific and minor < compute_capability[1]
  )


def edited_payload(payload: bytes, ptx_version: int) -> bytes:
  """Returns a compressed payload without TTIR, and with another PTX version.

  ptxas rejects an instruction that the PTX version does not have, by its name.
  The code of an AMD GPU stays as it is.

  Args:
    ptx_version: the version of the payload's `launching.Launch`.
  """
  major, minor = divmod(ptx_version, 10)

  def edit(field: int, content: bytes) -> bytes | None:
    if field == _TTIR:
      return None
    if field != _CODE:
      return content
    return _PTX_VERSION.sub(
      b".version %d.%d" % (major, minor), content, count=1
    )

  return zlib.compress(_edited(zlib.decompress(payload), _KERNEL, edit))


def _edited(
  message: bytes,
  path: tuple[int, ...],
  edit: Callable[[int, bytes], bytes | None],
) -> bytes:
  """Edits the fields of a submessage of a serialized protobuf message.

  Args:
    path: field numbers from the message to the submessage.
    edit: (number, content) of a field -> its new content; None removes it.
  """
  result = b""
  for field, key, content in _fields(message):
    if content is None:
      result += key
      continue
    edited: bytes | None = content
    if not path:
      edited = edit(field, content)
    elif field == path[0]:
      edited = _edited(content, path[1:], edit)
    if edited is not None:
      result += key + _varint(len(edited)) + edited
  return result


def _fields(message: bytes) -> Iterator[tuple[int, bytes, bytes | None]]:
  """Yields the number, key and content of each field of a message.

  For a field without a length, the content is None and the key is all of it.
  """
  position = 0
  while position < len(message):
    start = position
    tag, position = _read_varint(message, position)
    kind = tag & 7
    if kind == _DELIMITED:
      key = message[start:position]
      size, position = _read_varint(message, position)
      yield tag >> 3, key, message[position : position + size]
      position += size
      continue
    if kind == _VARINT:
      _, position = _read_varint(message, position)
    else:
      position += _SIZES[kind]
    yield tag >> 3, message[start:position], None


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
  value = shift = 0
  while True:
    byte = message[position]
    position += 1
    value |= (byte & 0x7F) << shift
    shift += 7
    if byte < 0x80:
      return value, position


def _varint(value: int) -> bytes:
  result = b""
  while value >= 0x80:
    result += bytes([value & 0x7F | 0x80])
    value >>= 7
  return result + bytes([value])

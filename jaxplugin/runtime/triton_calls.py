# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which custom call launches a Triton kernel, and how a module says it.

jaxlib's plugin has two for the same payload. `triton_kernel_call_ffi` is a
handler of XLA's FFI, of two stages: the first one, once a program, loads the
kernel; the second one only launches it, and says of itself that a CUDA graph
may record it (XLA's command buffers). `triton_kernel_call` is older: XLA ends a
graph before it, and each launch looks its kernel up by a hash of all of the
payload, some 20 kB. jax-triton writes the older one until 0.3 and the newer one
since 0.4; here the choice is the same with both.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import Final

from jaxlib.mlir import ir

from jaxplugin.jaxext import jaxlib_private

# In the environment: LEGACY, or empty. Read when a call is lowered.
VARIABLE: Final = "JAXPLUGIN_TRITON_CALL"
LEGACY: Final = "legacy"

_NAME: Final = "call_target_name"
_VERSION: Final = "api_version"
_CONFIG: Final = "backend_config"
_TYPED_CONFIG: Final = "mhlo.backend_config"
_OPAQUE: Final = "opaque"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallTarget:
  """A custom call that launches Triton kernels.

  Attributes:
    name: what XLA knows it by.
    api_version: the attribute of that name in StableHLO. 2 returns a status,
      and the payload is its `backend_config`. 1 is what JAX writes for XLA's
      FFI, beside a dictionary `mhlo.backend_config`, in which the payload is
      `opaque`; in HLO it becomes `API_VERSION_TYPED_FFI`.
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
  """What launches the kernels of a program that is lowered now.

  `FFI_CALL`, but where the environment asks for the older one or where jaxlib's
  plugin has no other. Where there is no plugin, nothing speaks against it.

  Args:
    platform: "cuda" or "rocm".
    environment: by default the process's own.

  Raises:
    ValueError: the environment's variable has another value.
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


def rewrite(
  operation: Any, target: CallTarget, change: Callable[[bytes], bytes]
) -> None:
  """Makes a call that jax-triton lowered one of `target`.

  Args:
    operation: an `ir.Operation`; one that launches no kernel is left.
    target: what it is to call.
    change: its payload -> the one that it is to have.
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
    payload = ir.StringAttr.get(change(payload))
    if target == FFI_CALL:
      fields[_OPAQUE] = payload
      attributes[_TYPED_CONFIG] = ir.DictAttr.get(fields)
      payload = ir.StringAttr.get("")
    attributes[_CONFIG] = payload
    attributes[_NAME] = ir.StringAttr.get(target.name)
    kind = ir.IntegerType.get_signless(32)
    attributes[_VERSION] = ir.IntegerAttr.get(kind, target.api_version)

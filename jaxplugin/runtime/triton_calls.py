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

# Environment variable: LEGACY or empty. It is read when a call is lowered.
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
    platform: "cuda" or "rocm".
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


def rewrite(
  operation: Any, target: CallTarget, change: Callable[[bytes], bytes]
) -> None:
  """Changes a call that jax-triton lowered into a call of `target`.

  Args:
    operation: an `ir.Operation`. It is unchanged unless it launches a kernel.
    target: the custom call to use.
    change: function from the old payload to the new one.
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

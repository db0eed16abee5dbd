# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Modules written by hand for the tests of the rewriter, and how to run them.

Their texts are put together from strings here, and run by XLA:CPU, without the
code under test.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final

import jax
import ml_dtypes
import numpy as np

from jaxplugin.jaxext import jax_private

# Also written in module_calls, which is under test.
_ELEMENT_TYPES: Final = {
  "float32": "f32",
  "bfloat16": "bf16",
  "float16": "f16",
  "float8_e4m3fn": "f8E4M3FN",
  "float8_e5m2": "f8E5M2",
  "float8_e8m0fnu": "f8E8M0FNU",
  "float4_e2m1fn": "f4E2M1FN",
  "uint8": "ui8",
  "int8": "i8",
}


def array(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))


def tensor_type(x: Any) -> str:
  """E.g. tensor<8x64xf8E4M3FN>."""
  element = _ELEMENT_TYPES[np.dtype(x.dtype).name]
  return f"tensor<{'x'.join([*map(str, x.shape), element])}>"


def custom_call(
  name: str,
  arguments: Sequence[str],
  operands: Sequence[Any],
  results: Sequence[Any],
  attributes: str = "",
) -> str:
  """The text of a custom call, without what it is assigned to."""
  types = ", ".join(map(tensor_type, operands))
  out = ", ".join(map(tensor_type, results))
  out = out if len(results) == 1 else f"({out})"
  braces = f" {{{attributes}}}" if attributes else ""
  return (
    f"stablehlo.custom_call @{name}({', '.join(arguments)}){braces} :"
    f" ({types}) -> {out}"
  )


def call_module(
  name: str,
  operands: Sequence[Any],
  results: Sequence[Any],
  attributes: str = "",
  module_attributes: str = "",
) -> str:
  """A module whose @main does nothing but one custom call."""
  names = [f"%arg{i}" for i in range(len(operands))]
  call = custom_call(name, names, operands, results, attributes)
  parameters = ", ".join(
    f"{argument}: {tensor_type(x)}"
    for argument, x in zip(names, operands, strict=True)
  )
  out = ", ".join(map(tensor_type, results))
  values = ", ".join(
    f"%0#{i}" if len(results) > 1 else "%0" for i in range(len(results))
  )
  count = f":{len(results)}" if len(results) > 1 else ""
  with_attributes = ""
  if module_attributes:
    with_attributes = f" attributes {{{module_attributes}}}"
  return f"""module @made{with_attributes} {{
  func.func public @main({parameters}) -> ({out}) {{
    %0{count} = {call}
    return {values} : {out}
  }}
}}
"""


def cpu_module() -> str:
  """A module with a call of the CPU kernels."""
  operands = [array((8, 64), "float8_e4m3fn"), array((8, 2), "float8_e8m0fnu")]
  result = array((8, 64), np.float32)
  return call_module("jaxplugin_dequantize", operands, [result])


def triton_module(code: bytes) -> str:
  """A module with a call of a Triton kernel, whose machine code is `code`."""
  payload = "".join(f"\\{byte:02X}" for byte in zlib.compress(code))
  x = array((8, 64), np.float32)
  return call_module(
    "triton_kernel_call_ffi",
    [x],
    [x],
    f'mhlo.backend_config = {{opaque = "{payload}"}}, api_version = 1 : i32',
  )


def run(module: str | bytes, *arrays: Any) -> list[np.ndarray]:
  """Compiles a module's text (or bytecode) for this CPU, and runs it."""
  compiled = jax_private.compile_module(module, "cpu")
  return [np.asarray(x) for x in compiled(*arrays)]


def e4m3_scale(x: np.ndarray) -> np.ndarray:
  """Rounds f64 to E4M3 by ml_dtypes, saturating."""
  return np.minimum(x, 448.0).astype(ml_dtypes.float8_e4m3fn)


def mx_operands(
  m: int = 8,
  n: int = 16,
  k: int = 64,
  *,
  rows: int | None = None,
  columns: int | None = None,
) -> list[jax.ShapeDtypeStruct]:
  """Returns lhs, rhs and their scales in MXFP8; scales may be padded."""
  columns = columns or k // 32
  return [
    array((m, k), ml_dtypes.float8_e4m3fn),
    array((n, k), ml_dtypes.float8_e4m3fn),
    array((rows or m, columns), ml_dtypes.float8_e8m0fnu),
    array((rows or n, columns), ml_dtypes.float8_e8m0fnu),
  ]


def dot_module(
  operands: Sequence[Any] | None = None,
  dtype: Any = np.float32,
  attributes: str = "",
  *,
  m: int = 8,
  n: int = 16,
  k: int = 64,
  module_attributes: str = "",
) -> str:
  """A module with one `__op$block_scaled_dot`, by default of MXFP8."""
  operands = operands or mx_operands(m, n, k)
  result = array((operands[0].shape[0], operands[1].shape[0]), dtype)
  return call_module(
    "__op$block_scaled_dot", operands, [result], attributes, module_attributes
  )


def quantize_module(
  values: str = "float8_e4m3fn",
  scale: str = "float8_e8m0fnu",
  attributes: str = "",
) -> str:
  """A module with one `__op$quantize` of f32[8, 64] in blocks of 32."""
  results = [array((8, 64), values), array((8, 2), scale)]
  return call_module(
    "__op$quantize", [array((8, 64), np.float32)], results, attributes
  )


def block_size(size: int | str) -> str:
  """The attribute that gives a dot's block size."""
  return (
    'backend_config = "{\\22block_scaled_dot_backend_config\\22:'
    f'{{\\22block_size\\22:{size}}}}}"'
  )

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Custom calls that launch Triton kernels, and how XLA compiles each."""

import importlib.util
import os
import pathlib
import re
import tempfile
import zlib
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from jaxlib.mlir import ir

import jaxplugin as jp
from jaxplugin.jaxext import jaxlib_private
from jaxplugin.lab.compilation import deviceless
from jaxplugin.runtime import triton_calls
from jaxplugin.runtime import triton_library

FFI, LEGACY = triton_calls.FFI_CALL, triton_calls.LEGACY_CALL
H200 = jp.named_target("h200")
X = jax.ShapeDtypeStruct((16, 512), jnp.bfloat16)
# XLA's names of the versions in `custom_call.proto`.
HLO_VERSIONS = {
  FFI: "API_VERSION_TYPED_FFI",
  LEGACY: "API_VERSION_STATUS_RETURNING",
}

needs_jax_triton = absltest.skipIf(
  bool(triton_library._import_error()), "jax-triton cannot be imported"
)
needs_compiler = absltest.skipIf(
  importlib.util.find_spec("jax_cuda13_plugin") is None,
  "jax-cuda13-plugin is not installed",
)


def function(x):
  return jnp.tanh(jp.dequantize(jp.quantize(x, "mxfp8"), dtype=jnp.bfloat16))


def environment(target):
  """Patches the process's environment to ask for a custom call."""
  value = triton_calls.LEGACY if target == LEGACY else ""
  return mock.patch.dict(os.environ, {triton_calls.VARIABLE: value})


class ChosenTest(parameterized.TestCase):
  @parameterized.parameters(
    ({FFI.name}, FFI),
    ({FFI.name, "another"}, FFI),
    ({"another"}, LEGACY),
    (set(), LEGACY),
    (None, FFI),
  )
  def test_newer_one_wherever_the_plugin_has_it(self, handlers, expected):
    found = None if handlers is None else frozenset(handlers)
    with mock.patch.object(
      jaxlib_private, "triton_handlers", lambda platform: found
    ):
      self.assertEqual(triton_calls.chosen("cuda", {}), expected)
      asked = {triton_calls.VARIABLE: "legacy"}
      self.assertEqual(triton_calls.chosen("cuda", asked), LEGACY)

  @parameterized.parameters("ffi", "Legacy", "1")
  def test_other_values_are_refused(self, value):
    with self.assertRaisesRegex(
      ValueError,
      f"JAXPLUGIN_TRITON_CALL must be 'legacy', .*or not be set, got '{value}'",
    ):
      triton_calls.chosen("cuda", {triton_calls.VARIABLE: value})

  @needs_compiler
  def test_plugin_that_is_here_has_it(self):
    self.assertIn(FFI.name, jaxlib_private.triton_handlers("cuda"))
    self.assertEqual(triton_calls.chosen("cuda", {}), FFI)

  def test_platform_without_a_plugin_has_none(self):
    if importlib.util.find_spec("jax_rocm7_plugin") is not None:
      self.skipTest("there is one")
    self.assertIsNone(jaxlib_private.triton_handlers("rocm"))


@needs_jax_triton
class ModuleTest(parameterized.TestCase):
  def lowered(self, target):
    with environment(target), jp.use_target(H200):
      traced = jax.jit(lambda x: jp.quantize(x, "mxfp8")).trace(X)
      module = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    (call,) = (
      operation
      for each in module.body.operations
      for operation in each.regions[0].blocks[0].operations
      if operation.name == "stablehlo.custom_call"
    )
    attributes = call.attributes
    fields = attributes["mhlo.backend_config"] if target == FFI else []
    return {
      "name": attributes["call_target_name"].value,
      "typed": "mhlo.backend_config" in attributes,
      "bytes": attributes["backend_config"].value_bytes,
      "fields": {x.name: x.attr.value_bytes for x in fields},
      "types": [str(x.type) for x in (*call.operands, *call.results)],
    }

  @pytest.mark.full
  def test_both_calls_have_one_payload_and_nothing_of_each_other(self):
    ffi, legacy = (self.lowered(target) for target in (FFI, LEGACY))
    self.assertEqual(
      (ffi["name"], ffi["typed"], ffi["bytes"]), (FFI.name, True, b"")
    )
    self.assertEqual((legacy["name"], legacy["typed"]), (LEGACY.name, False))
    self.assertEqual(ffi["fields"], {"opaque": legacy["bytes"]})
    self.assertIn(b".entry quantize(", zlib.decompress(legacy["bytes"]))
    self.assertEqual(ffi["types"], legacy["types"])

  @parameterized.parameters(
    (FFI, "triton_kernel_call_ffi (CUDA graphs record it)"),
    (LEGACY, "triton_kernel_call (CUDA graphs end before it)"),
  )
  def test_explain_says_which(self, target, expected):
    x = jnp.ones((4, 64))
    with environment(target):
      told = jp.explain(jp.block_scaled_dot, x, jp.quantize(x, "mxfp8"))
      on_gpu = jp.explain(
        jp.block_scaled_dot, x, jp.quantize(x, "mxfp8"), target=H200
      )
    self.assertEqual(told[0].launched_by, "")
    self.assertEqual(on_gpu[0].launched_by, expected)
    self.assertIn(f"    launched by {expected}\n", on_gpu.details())

  def test_calls_of_others_are_left(self):
    text = """func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
      %y = stablehlo.custom_call @another(%x) {backend_config = "theirs"}
        : (tensor<4xf32>) -> tensor<4xf32>
      %z = stablehlo.tanh %y : tensor<4xf32>
      return %z : tensor<4xf32>
    }"""
    with jaxlib_private.make_ir_context():
      module = ir.Module.parse(text)
    before = str(module)
    (function,) = module.body.operations
    for operation in function.regions[0].blocks[0].operations:
      triton_calls.rewrite(operation.operation, FFI, 88)
    self.assertEqual(str(module), before)


@needs_jax_triton
@needs_compiler
class OptimizedTest(parameterized.TestCase):
  """XLA's compiler compiles each custom call without a GPU."""

  def compiled(self, target):
    """Returns optimized HLO, and the order of launches from XLA's dump."""
    folder = self.enter_context(tempfile.TemporaryDirectory())
    mesh = deviceless.mesh(H200)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)
    with environment(target), jp.use_target(H200):
      compiled = (
        jax.jit(function)
        .lower(x)
        .compile(
          compiler_options={
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
            "xla_gpu_graph_min_graph_size": 1,
          }
        )
      )
    (path,) = pathlib.Path(folder).glob("*thunk_sequence_after_thunk_passes*")
    return compiled.as_text(), path.read_text()

  @parameterized.parameters(FFI, LEGACY)
  @pytest.mark.sample(1)
  def test_graphs_record_the_ffi_call_and_not_the_older_one(self, target):
    hlo, launches = self.compiled(target)
    (call,) = re.findall(r".* custom-call\(.*", hlo)
    self.assertIn(f'custom_call_target="{target.name}"', call)
    self.assertIn(f"api_version={HLO_VERSIONS[target]}", call)
    # The commands of a command buffer are listed below it, indented.
    (indent,) = re.findall(r"^( *)\d+: kCustomCall\b", launches, re.MULTILINE)
    self.assertRegex(launches, r"(?m)^\d+: kCommandBuffer\b")
    self.assertEqual(bool(indent), target.is_captured)


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Custom calls that launch Triton kernels, and how XLA compiles each.

Payloads have everything except TTIR and paths, and the right PTX version.
"""

import importlib.util
import os
import re
import zlib
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest, parameterized
from jaxlib.mlir import ir

import jaxplugin as jp
from jaxplugin.jaxext import jaxlib_private
from jaxplugin.lab.compilation import deviceless
from jaxplugin.runtime import triton_calls, triton_library
from jaxplugin.stablehlo import modules
from jaxplugin.testing import folders, installed, written_modules

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
needs_compiler = installed.needs("jax_cuda13_plugin")


def quantize(x):
  return jp.quantize(x, "mxfp8")


def function(x):
  return jnp.tanh(jp.dequantize(jp.quantize(x, "mxfp8"), dtype=jnp.bfloat16))


def environment(target):
  """Patches the process's environment to ask for a custom call."""
  value = triton_calls.LEGACY if target == LEGACY else ""
  return mock.patch.dict(os.environ, {triton_calls.VARIABLE: value})


def delimited(tag, content):
  """Returns a protobuf field of less than 2^14 bytes."""
  size = len(content)
  sizes = [size] if size < 128 else [size & 127 | 128, size >> 7]
  return bytes([tag, *sizes]) + content


def for_launch(message, *, ptx_version=88):
  return triton_calls.edited_payload(zlib.compress(message), ptx_version)


class PayloadTest(parameterized.TestCase):
  @parameterized.parameters(0, 1, 127, 128, 300, 10_000)
  def test_all_but_ttir_is_kept(self, size):
    # A tag is number << 3 | type. Types are 0 (varint), 1 (8 bytes), 5 (4
    # bytes) and 2 (delimited).
    name, ptx = delimited(0x0A, b"kernel"), delimited(0x22, b"p" * size)
    ttir, last = delimited(0x2A, b"t" * 300), b"\x30\x80\x01"
    fixed = b"\x39" + bytes(8) + b"\x45" + bytes(4)
    grid = b"\x10\x80\x08" + delimited(0x2A, b"\x0a\x02\x10\x10")  # no TTIR
    metadata = delimited(0x12, b"metadata")

    def whole(kernel):
      return delimited(0x0A, delimited(0x0A, kernel) + grid) + metadata

    given = whole(name + ptx + ttir + last + fixed)
    found = for_launch(given)
    self.assertEqual(zlib.decompress(found), whole(name + ptx + last + fixed))

  def test_without_ttir_it_is_as_it_was(self):
    message = delimited(0x0A, delimited(0x0A, delimited(0x22, b"ptx")))
    found = for_launch(message)
    self.assertEqual(zlib.decompress(found), message)

  @parameterized.parameters((88, b"8.8"), (92, b"9.2"))
  def test_ptx_has_the_version_of_the_launch(self, number, version):
    comment = b"// .version 9.4\n"
    for code, expected in (
      (b"//\n.version 9.4\n.target a\n", b"//\n.version %s\n" % version),
      (comment + b".version 10.12\n", comment + b".version %s\n" % version),
      (b"/tmp/kernel .version 9.4.hsaco", b"/tmp/kernel .version 9.4.hsaco"),
    ):
      message = delimited(0x0A, delimited(0x0A, delimited(0x22, code)))
      found = for_launch(message, ptx_version=number)
      self.assertIn(expected, zlib.decompress(found))

  def test_names_are_no_ptx(self):
    name = delimited(0x0A, b"\n.version 9.4\n")
    message = delimited(0x0A, delimited(0x0A, name))
    found = for_launch(message)
    self.assertEqual(zlib.decompress(found), message)


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


class ArchitectureTest(parameterized.TestCase):
  def architecture(self, code, **changes):
    module = written_modules.triton_module(code)
    for name, value in changes.items():
      module = module.replace(name, value)
    (call,) = (
      operation
      for operation in modules.walk(modules.read(module).module.operation)
      if operation.name == "stablehlo.custom_call"
    )
    return triton_calls.architecture(call)

  @parameterized.parameters(
    (b"name\n.version 8.8\n.target sm_90a\n", "sm_90a"),
    (b".version 8.8\n.target sm_80\n.address_size 64", "sm_80"),
    (b"// .target sm_80\n", None),
    (b"/tmp/kernel.hsaco", None),
    (bytes(1 << 26) + b"\n.target sm_90a", None),
  )
  def test_it_is_read_from_ptx(self, code, expected):
    self.assertEqual(self.architecture(code), expected)

  def test_it_is_read_from_both_calls(self):
    code = b".version 8.8\n.target sm_90a\n"
    found = self.architecture(
      code,
      **{
        "mhlo.backend_config = {opaque =": "backend_config =",
        "}, api_version = 1": ", api_version = 2",
      },
    )
    self.assertEqual(found, "sm_90a")

  def test_a_payload_that_is_missing_or_elided_has_none(self):
    for name in ("opaque", "mhlo.backend_config"):
      found = self.architecture(b".target sm_90a", **{name: "other"})
      self.assertIsNone(found)
    source = modules.read(written_modules.triton_module(bytes(range(256))))
    source.elide()
    with self.assertWarnsRegex(jp.RewriteWarning, "no PTX"):
      jp.rewrite(str(source.module), H200)

  # CUDA C++ Programming Guide, "Binary Compatibility" and "Feature set".
  @parameterized.parameters(
    ("sm_80", (8, 0), True),
    ("sm_80", (8, 9), True),
    ("sm_89", (8, 0), False),
    ("sm_80", (9, 0), False),
    ("sm_90a", (9, 0), True),
    ("sm_90a", (10, 0), False),
    ("sm_100a", (10, 0), True),
    ("sm_100a", (10, 3), False),
    ("sm_120a", (12, 1), False),
    ("sm_121a", (12, 1), True),
    ("sm_90a", None, False),
  )
  def test_a_gpu_runs_code_of_its_major_version(self, name, gpu, expected):
    self.assertEqual(triton_calls.runs_on(name, gpu), expected)


@needs_jax_triton
class ModuleTest(parameterized.TestCase):
  def lowered(self, function, *args, target=H200, call=FFI):
    """Returns the first launch of a module."""
    with environment(call), jp.use_target(target):
      # A new function, because JAX keeps the module of the other call.
      traced = jax.jit(lambda *args: function(*args)).trace(*args)
      module = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    launch, *_ = (
      operation
      for each in module.body.operations
      for operation in each.regions[0].blocks[0].operations
      if "triton_kernel_call"
      in str(operation.attributes.get("call_target_name", ""))
    )
    attributes = launch.attributes
    fields = attributes["mhlo.backend_config"] if call == FFI else []
    fields = {x.name: x.attr.value_bytes for x in fields}
    payload = attributes["backend_config"].value_bytes
    return {
      "name": attributes["call_target_name"].value,
      "typed": "mhlo.backend_config" in attributes,
      "bytes": payload,
      "fields": fields,
      "types": [str(x.type) for x in (*launch.operands, *launch.results)],
      "payload": zlib.decompress(fields.get("opaque", payload)),
    }

  @pytest.mark.full
  def test_both_calls_have_one_payload_and_nothing_of_each_other(self):
    ffi, legacy = (self.lowered(quantize, X, call=c) for c in (FFI, LEGACY))
    self.assertEqual(
      (ffi["name"], ffi["typed"], ffi["bytes"]), (FFI.name, True, b"")
    )
    self.assertEqual((legacy["name"], legacy["typed"]), (LEGACY.name, False))
    self.assertEqual(ffi["fields"], {"opaque": legacy["bytes"]})
    self.assertEqual(ffi["types"], legacy["types"])
    self.assertIn(b".entry quantize(", ffi["payload"])
    for absent in (b"#loc", b"tt.func", b".loc", b".file", b".py"):
      self.assertNotIn(absent, ffi["payload"])

  def test_a_module_is_assembled_by_a_ptxas_of_cuda_12_9(self):
    for ptxas in (None, "13.2"):
      target = jp.named_target("b200", cudnn="9.13", ptxas=ptxas)
      payload = self.lowered(quantize, X, target=target)["payload"]
      self.assertRegex(payload, rb"\n\.version 8\.8\n\.target sm_100a\n")

  @parameterized.parameters(
    (None, rb"8\.8"), ("13.1.999", rb"8\.8"), ("13.2", rb"9\.2")
  )
  @pytest.mark.full
  def test_fp4_is_converted_where_ptxas_is_named_that_can(self, ptxas, version):
    w = jax.ShapeDtypeStruct((256, 512), jnp.float32)
    w = jax.eval_shape(lambda x: jp.quantize(x, "nvfp4"), w)
    x = jax.ShapeDtypeStruct((1, 512), jnp.bfloat16)
    target = jp.named_target("b200", cudnn="9.13", ptxas=ptxas)
    payload = self.lowered(jp.block_scaled_dot, x, w, target=target)["payload"]
    self.assertRegex(payload, rb"\n\.version %s\n\.target sm_100a\n" % version)
    is_converted = b"cvt.rn.bf16x2.e2m1x2" in payload
    self.assertEqual(is_converted, ptxas == "13.2")

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
    folder = folders.new(self)
    mesh = deviceless.mesh(H200)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)
    with environment(target), jp.use_target(H200):
      compiled = (
        jax.jit(function)
        .lower(x)
        .compile(
          compiler_options={
            "xla_dump_to": str(folder),
            "xla_dump_hlo_as_text": True,
            "xla_gpu_graph_min_graph_size": 1,
          }
        )
      )
    (path,) = folder.glob("*thunk_sequence_after_thunk_passes*")
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

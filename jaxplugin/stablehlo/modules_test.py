# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading and writing modules."""

import io
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jaxplugin.jaxext import jax_private
from jaxplugin.stablehlo import modules

TEXT = """module @m {
  func.func public @main(%arg0: tensor<3xf32>) -> tensor<3xf32> {
    %0 = stablehlo.sine %arg0 : tensor<3xf32>
    return %0 : tensor<3xf32>
  }
}
"""
# The same module with locations.
LOCATED = """#loc1 = loc("x")
module @m {
  func.func public @main(%arg0: tensor<3xf32> loc("x")) -> tensor<3xf32> {
    %0 = stablehlo.sine %arg0 : tensor<3xf32> loc(#loc4)
    return %0 : tensor<3xf32> loc(#loc)
  } loc(#loc)
} loc(#loc)
#loc = loc(unknown)
#loc2 = loc("model.py":7:3)
#loc3 = loc(callsite(#loc2 at #loc))
#loc4 = loc("jit(f)/sin"(#loc3))
"""


def sine(source):
  """Returns the operation in the middle of the module."""
  (found,) = (
    operation
    for operation in modules.walk(source.module.operation)
    if operation.name == "stablehlo.sine"
  )
  return found


def bytecode():
  """Returns bytecode that MLIR writes."""
  module = ir.Module.parse(TEXT, jax_private.make_ir_context())
  buffer = io.BytesIO()
  module.operation.write_bytecode(buffer)
  return buffer.getvalue()


def artifact(version=None):
  """Returns a portable artifact that StableHLO writes."""
  module = ir.Module.parse(TEXT, jax_private.make_ir_context())
  version = version or stablehlo.get_current_version()
  return stablehlo.serialize_portable_artifact(module, version)


class ReadTest(parameterized.TestCase):
  def test_each_form_is_told_apart(self):
    hlo = jax.jit(jnp.sin).lower(1.0).compiler_ir("hlo").as_hlo_text()
    lowered = jax.jit(jnp.sin).lower(1.0)
    exported = jax.export.export(jax.jit(jnp.sin))(1.0)
    for given, form in (
      (TEXT, "text"),
      (TEXT.encode(), "text"),
      (bytearray(TEXT.encode()), "text"),
      (hlo, "text"),
      (f"// made by hand\n\n{hlo}", "text"),
      (bytecode(), "bytecode"),
      (memoryview(bytecode()), "bytecode"),
      (artifact(), "portable"),
      (exported, "portable"),
      (lowered, None),
      (lowered.compiler_ir("stablehlo"), None),
    ):
      source = modules.read(given)
      self.assertEqual(source.form, form)
      self.assertIs(source.given, given)
      self.assertTrue(modules.is_module(given))
      self.assertIn("stablehlo.sine", str(source.module))

  def test_what_is_no_module_is_refused(self):
    for given in (3, None, jnp.sin, ["module {}"]):
      self.assertFalse(modules.is_module(given))
      with self.assertRaisesRegex(
        TypeError, f"module must be .*got.*{type(given).__name__}"
      ):
        modules.read(given)

  @parameterized.parameters("model.mlir", "/tmp/a.hlo", "b/c-1.mlirbc")
  def test_path_is_refused_with_its_remedy(self, path):
    with self.assertRaisesRegex(
      TypeError, f"got the path '{path}'. Pass .*read_bytes"
    ):
      modules.read(path)

  def test_copy_is_free_to_be_changed(self):
    given = jax.jit(jnp.sin).lower(1.0).compiler_ir("stablehlo")
    before = str(given)
    source = modules.read(given)
    operation = sine(source)
    operation.results[0].replace_all_uses_with(operation.operands[0])
    operation.erase()
    self.assertNotIn("sine", str(source.module))
    self.assertEqual(str(given), before)

  @parameterized.parameters(
    ("", "f.mlir: the module is empty"),
    (b" \n", "f.mlir: the module is empty"),
    ("module {", r"f\.mlir:1:\d+: "),
    (TEXT.replace("sine", "sign_of"), r"f\.mlir:3:\d+: .*stablehlo\.sign_of"),
    (
      TEXT.replace("-> tensor<3xf32>", "-> tensor<4xf32>"),
      r"f\.mlir:4:5: type of return operand 0",
    ),
    (
      TEXT.replace(
        "return %0 : tensor<3xf32>",
        'return %0 : tensor<3xf32> loc("there.py":8:9)',
      ).replace("-> tensor<3xf32>", "-> tensor<4xf32>"),
      r"f\.mlir: type of return operand 0.* \(at there\.py:8\)",
    ),
    ("HloModule m\n\nENTRY e {\n  x = f32[2] parameter()\n}", r"f\.mlir:4:"),
    ("HloModule m", "f.mlir"),
    (b"ML", "f.mlir: the bytecode is truncated after 2 B"),
    (b"\x00\xff", r"f\.mlir: neither MLIR bytecode.*starts with b'\\x00\\xff'"),
  )
  def test_error_names_file_line_and_column(self, given, pattern):
    with self.assertRaisesRegex(modules.ModuleError, pattern) as caught:
      modules.read(given, "f.mlir")
    self.assertNotIn("\n", str(caught.exception))

  def test_bytecode_of_another_format_is_refused(self):
    for data in (bytecode(), artifact()):
      version = bytes([data[4] + 100])  # the byte after the magic
      with self.assertRaisesRegex(modules.ModuleError, "^f.mlir: .*version"):
        modules.read(data[:4] + version + data[5:], "f.mlir")


class LocationTest(parameterized.TestCase):
  def test_innermost_file_is_named(self):
    for location, expected in (
      ('"jit(f)/sin"(#loc3)', "model.py:7:3"),
      ('fused<"cse">["a", "b.py":1:2]', "b.py:1:2"),
      ('"only a name"', "only a name"),
      ("unknown", ""),
      ('"c.py":5:0', "c.py:5"),
      ('callsite("inner.py":1:2 at "outer.py":3:4)', "inner.py:1:2"),
    ):
      text = LOCATED.replace('loc("jit(f)/sin"(#loc3))', f"loc({location})")
      source = modules.read(text, "f.mlir")
      self.assertEqual(source.location(sine(source)), expected)

  def test_text_without_places_is_the_place(self):
    source = modules.read(TEXT, "f.mlir")
    self.assertEqual(source.location(sine(source)), "f.mlir:3:10")


class WriteTest(parameterized.TestCase):
  def test_module_is_written_as_it_was_read(self):
    versions = ("1.10.0", stablehlo.get_current_version())
    artifacts = map(artifact, versions)
    for data in (TEXT, TEXT.encode(), bytecode(), *artifacts):
      self.assertEqual(modules.read(data).write(), data)
    for version in versions:
      self.assertEqual(modules.read(artifact(version)).version, version)

  def test_text_keeps_places(self):
    written = modules.read(LOCATED).write()
    for place in ('loc("x")', 'loc("model.py":7:3)', 'loc("jit(f)/sin"('):
      self.assertIn(place, written)
    self.assertEqual(modules.read(written).write(), written)

  def test_places_of_hlo_are_its_metadata_or_names(self):
    hlo = """HloModule h

ENTRY main {
  x = f32[3]{0} parameter(0)
  ROOT y = f32[3]{0} sine(x)METADATA
}
"""
    metadata = (
      ', metadata={op_name="f/sin" source_file="model.py" source_line=7}'
    )
    for text, place in (("", "y"), (metadata, "model.py:7")):
      source = modules.read(hlo.replace("METADATA", text))
      self.assertEqual(source.location(sine(source)), place)
    self.assertIn('loc("model.py":7:0)', source.write())

  def test_version_that_lacks_an_operation_is_named(self):
    source = modules.read(artifact("1.0.0"))
    text = TEXT.replace("tensor<3xf32>", "tensor<3xf8E8M0FNU>")
    text = text.replace("stablehlo.sine %arg0", "stablehlo.negate %arg0")
    text = text.replace(
      "stablehlo.negate %arg0 :", "stablehlo.reverse %arg0, dims = [0] :"
    )
    source.module = modules.read(text).module
    with self.assertRaisesRegex(
      modules.ModuleError, r"cannot be written as StableHLO 1\.0\.0: "
    ):
      source.write()

  def test_exported_gets_the_module(self):
    exported = jax.export.export(jax.jit(jnp.sin))(jnp.zeros(3))
    source = modules.read(exported)
    operation = sine(source)
    operation.results[0].replace_all_uses_with(operation.operands[0])
    operation.erase()
    result = source.write()
    np.testing.assert_array_equal(result.call(jnp.ones(3)), np.ones(3))
    np.testing.assert_allclose(
      exported.call(jnp.ones(3)), np.sin(np.ones(3)), rtol=1e-6
    )

  def test_other_dialects_are_written_in_an_artifact(self):
    text = TEXT.replace(
      "module @m {", 'module @m {\n  sdy.mesh @mesh = <["x"=2]>'
    )
    data = modules.read(text).serialize("portable")
    self.assertIn("sdy.mesh", str(modules.read(data).module))


class InlineTest(parameterized.TestCase):
  def test_helpers_of_helpers_and_in_regions_are_inlined(self):
    text = """module {
  func.func public @main(%x: tensor<f32>, %p: tensor<i1>) -> tensor<f32> {
    %0 = call @twice(%x) : (tensor<f32>) -> tensor<f32>
    %1 = "stablehlo.if"(%p) ({
      %2 = func.call @twice(%0) : (tensor<f32>) -> tensor<f32>
      stablehlo.return %2 : tensor<f32>
    }, {
      stablehlo.return %0 : tensor<f32>
    }) : (tensor<i1>) -> tensor<f32>
    return %1 : tensor<f32>
  }
  func.func private @twice(%x: tensor<f32>) -> tensor<f32> {
    %true = stablehlo.constant dense<true> : tensor<i1>
    %0 = "stablehlo.if"(%true) ({
      %1 = func.call @sum(%x, %x) : (tensor<f32>, tensor<f32>) -> tensor<f32>
      stablehlo.return %1 : tensor<f32>
    }, {
      stablehlo.return %x : tensor<f32>
    }) : (tensor<i1>) -> tensor<f32>
    return %0 : tensor<f32>
  }
  func.func private @sum(%x: tensor<f32>, %y: tensor<f32>) -> tensor<f32> {
    %0 = stablehlo.add %x, %y : tensor<f32>
    return %0 : tensor<f32>
  }
  func.func private @kept(%x: tensor<f32>) -> tensor<f32> {
    return %x : tensor<f32>
  }
}
"""
    source = modules.read(text)
    with source.module.context:
      modules.inline_calls(source.module)
    modules.verify(source.module, "inlined")
    result = str(source.module)
    self.assertNotIn("call @", result)
    self.assertEqual(
      re.findall(r"func\.func \w+ @(\w+)", result), ["main", "kept"]
    )
    run = jax_private.compile_module(result, "cpu")
    x = np.float32(3)
    for flag, expected in ((True, 12), (False, 6)):
      (value,) = run(x, np.bool_(flag))
      self.assertEqual(value, expected)

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Payloads have everything except TTIR and paths, and the right PTX version."""

import zlib

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.runtime import triton_calls
from jaxplugin.runtime import triton_library

quantize = lambda x: jp.quantize(x, "mxfp8")
X = jax.ShapeDtypeStruct((256, 512), jnp.float32)


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


@absltest.skipIf(
  bool(triton_library._import_error()), "jax-triton cannot be imported"
)
class ModuleTest(parameterized.TestCase):
  def payload(self, function=quantize, *args, ptxas=None):
    """Returns the decompressed payload of a module's first launch."""
    with jp.use_target(jp.named_target("b200", cudnn="9.13", ptxas=ptxas)):
      traced = jax.jit(function).trace(*(args or (X,)))
      lowered = traced.lower(lowering_platforms=("cuda",))
    operations = lowered.compiler_ir().body.operations
    call, *_ = (
      operation
      for function in operations
      for operation in function.regions[0].blocks[0].operations
      if "triton_kernel_call"
      in str(operation.attributes.get("call_target_name", ""))
    )
    attributes = call.attributes
    if "mhlo.backend_config" in attributes:
      fields = {a.name: a.attr for a in attributes["mhlo.backend_config"]}
      return zlib.decompress(fields["opaque"].value_bytes)
    return zlib.decompress(attributes["backend_config"].value_bytes)

  @pytest.mark.full
  def test_a_module_has_the_code_and_no_paths(self):
    payload = self.payload()
    self.assertIn(b".entry quantize(", payload)
    for absent in (b"#loc", b"tt.func", b".loc", b".file", b".py"):
      self.assertNotIn(absent, payload)

  def test_a_module_is_assembled_by_a_ptxas_of_cuda_12_9(self):
    for ptxas in (None, "13.2"):
      payload = self.payload(ptxas=ptxas)
      self.assertRegex(payload, rb"\n\.version 8\.8\n\.target sm_100a\n")

  @parameterized.parameters(
    (None, rb"8\.8"), ("13.1.999", rb"8\.8"), ("13.2", rb"9\.2")
  )
  @pytest.mark.full
  def test_fp4_is_converted_where_ptxas_is_named_that_can(self, ptxas, version):
    weight = jax.eval_shape(lambda x: jp.quantize(x, "nvfp4"), X)
    x = jax.ShapeDtypeStruct((1, 512), jnp.bfloat16)
    payload = self.payload(jp.block_scaled_dot, x, weight, ptxas=ptxas)
    self.assertRegex(payload, rb"\n\.version %s\n\.target sm_100a\n" % version)
    is_converted = b"cvt.rn.bf16x2.e2m1x2" in payload
    self.assertEqual(is_converted, ptxas == "13.2")


if __name__ == "__main__":
  absltest.main()

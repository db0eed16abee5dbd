# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (modules in the text)
"""Finding, reading and refusing the calls of a module."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax

from jaxplugin.stablehlo import module_calls, modules
from jaxplugin.testing import written_modules

array = written_modules.array
DOT = "__op$block_scaled_dot"


def read(text):
  """Reads the only call of a module."""
  source = modules.read(text, "f.mlir")
  (operation,) = module_calls.find(source)
  return module_calls.read(operation)


def mx(lhs=(8, 2), rhs=(16, 2), k=64):
  (*values, _, _), scale = written_modules.mx_operands(k=k), "float8_e8m0fnu"
  return [*values, array(lhs, scale), array(rhs, scale)]


def dot(operands=None, result=None, attributes=""):
  result = result or array((8, 16), "float32")
  return written_modules.call_module(
    DOT, operands or mx(), [result], attributes
  )


def quantize(x, values, scale):
  return written_modules.call_module("__op$quantize", [x], [values, scale])


class FindTest(parameterized.TestCase):
  def test_other_calls_and_names_are_not_found(self):
    for name in ("__op$block_scaled_dots", "__op$quantize2", "xla.scaled_dot"):
      text = dot().replace(DOT, name)
      self.assertEmpty(module_calls.find(modules.read(text)))

  def test_title_names_the_call_its_types_and_its_place(self):
    source = modules.read(dot(), "f.mlir")
    (operation,) = module_calls.find(source)
    self.assertEqual(
      module_calls.title(operation, source),
      "__op$block_scaled_dot(tensor<8x64xf8E4M3FN>, tensor<16x64xf8E4M3FN>,"
      " tensor<8x2xf8E8M0FNU>, tensor<16x2xf8E8M0FNU>) at f.mlir:3:10",
    )


class BlockSizeTest(parameterized.TestCase):
  def test_it_is_k_divided_by_the_columns_of_each_side(self):
    operands = mx(lhs=(8, 4), rhs=(16, 2))
    self.assertEqual(read(dot(operands)).block_sizes, (16, 32))

  @parameterized.parameters(
    '"{\\22block_scaled_dot_backend_config\\22:{\\22block_size\\22:32}}"',
    '"{\\22block_scaled_dot_backend_config\\22:{\\22block_size\\22:\\2232\\22}}"',
    '"{\\22blockScaledDotBackendConfig\\22: {\\22blockSize\\22: \\2232\\22},'
    ' \\22operation_queue_id\\22: \\220\\22}"',
    # Text that only protobuf's JSON parser accepts.
    '"{\\22block_scaled_dot_backend_config\\22:{block_size:32}}"',
    '"{block_scaled_dot_backend_config : {block_size :\\2232\\22}}"',
    "\"{'blockScaledDotBackendConfig':{'blockSize':'32'}}\"",
    '"{\\22note\\22: \\22a:b, \\\\\\22c: {d:\\22,'
    ' block_scaled_dot_backend_config:{block_size:32}}"',
  )
  def test_it_is_given_in_json(self, config):
    operands = mx(lhs=(128, 4), rhs=(128, 4))
    text = dot(operands, attributes=f"backend_config = {config}")
    self.assertEqual(read(text).block_sizes, (32, 32))

  @parameterized.parameters(
    "backend_config = {}, api_version = 4 : i32",
    "mhlo.backend_config = {}",
  )
  def test_it_is_given_in_a_dictionary(self, attribute):
    config = "{block_scaled_dot_backend_config = {block_size = 32 : i64}}"
    operands = mx(lhs=(128, 4), rhs=(128, 4))
    text = dot(operands, attributes=attribute.replace("{}", config))
    self.assertEqual(read(text).block_sizes, (32, 32))

  def test_another_or_an_empty_config_gives_none(self):
    for config in ('""', '"{}"', '"{\\22operation_queue_id\\22:\\220\\22}"'):
      text = dot(attributes=f"backend_config = {config}")
      self.assertEqual(read(text).block_sizes, (32, 32))

  @parameterized.parameters(
    ('"block_size: 32"', "must be JSON, got 'block_size: 32'"),
    ('"[32]"', "must be an object"),
    (
      '"{\\22block_scaled_dot_backend_config\\22:{\\22block_size\\22:0}}"',
      "positive block_size.*got {'block_size': 0}",
    ),
    (
      '"{\\22block_scaled_dot_backend_config\\22:{\\22block_size\\22:true}}"',
      "positive block_size",
    ),
    ('"{\\22block_scaled_dot_backend_config\\22:{}}"', "positive block_size"),
    ('"{\\22block_scaled_dot_backend_config\\22:3}"', "positive block_size"),
  )
  def test_malformed_config_is_refused(self, config, pattern):
    with self.assertRaisesRegex(ValueError, pattern):
      read(dot(attributes=f"backend_config = {config}"))


class RefusalTest(parameterized.TestCase):
  @parameterized.parameters(
    (mx(rhs=(16, 3)), "multiple of the columns of rhs_scale.*64.*3"),
    (mx(lhs=(7, 2)),
      r"lhs_scale must have the dimensions.*\(8, 64\).*\(7, 2\)"),
    (mx()[:3] + [array((16,), "float8_e8m0fnu")], "must have the same rank"),
    (mx(k=0, lhs=(8, 0), rhs=(16, 0)), "positive multiple"),
    (mx()[:2], "have 3 or 4 or 5 operands and 1 results, got 2 and 1"),
    (mx()[:1] + [array((16, 32), "float8_e4m3fn")] + mx()[2:],
      r"must agree in the last dimension.*\(8, 64\).*\(16, 32\)"),
    ([array((2, *x.shape), x.dtype) for x in mx()[:1]] + mx()[1:],
      "must have rank 2 or 3, the same"),
    (mx() + [array((1,), "float32")], r"scalar.*float32, got float32\[1\]"),
    (mx() + [array((), "bfloat16")], r"scalar.*float32, got bfloat16\[\]"),
  )  # fmt: skip
  def test_operands_of_a_dot(self, operands, pattern):
    with self.assertRaisesRegex(TypeError, pattern):
      read(dot(operands))

  def test_result_of_a_dot(self):
    with self.assertRaisesRegex(
      TypeError, r"result must have shape \(8, 16\), got \(16, 8\)"
    ):
      read(dot(result=array((16, 8), "float32")))

  def test_padded_scale_that_is_too_small(self):
    with self.assertRaisesRegex(TypeError, "column for every 16 values"):
      read(dot(attributes=written_modules.block_size(16)))

  def test_shapes_of_quantize(self):
    x = array((8, 64), "float32")
    scale = array((8, 2), "float8_e8m0fnu")
    with self.assertRaisesRegex(TypeError, r"same shape.*\(8, 32\).*\(8, 64\)"):
      read(quantize(x, array((8, 32), "float8_e4m3fn"), scale))
    values = array((8, 64), "float8_e4m3fn")
    with self.assertRaisesRegex(
      TypeError, r"dimensions of values but the last"
    ):
      read(quantize(x, values, array((16, 2), "float8_e8m0fnu")))

  def test_types(self):
    for new, error, pattern in (
      (
        "tensor<?x64xf8E4M3FN>",
        NotImplementedError,
        r"static, got tensor<\?x64",
      ),
      ("tensor<8x64xcomplex<f32>>", TypeError, "element type among .*complex"),
      ("tensor<8x64xf64>", TypeError, "element type among .*f64"),
      ("!stablehlo.token", TypeError, "must be arrays, got !stablehlo.token"),
    ):
      with self.assertRaisesRegex(error, pattern):
        read(dot().replace("tensor<8x64xf8E4M3FN>", new))

  @parameterized.parameters(
    "called_computations = [@main]",
    "output_operand_aliases = [#stablehlo.output_operand_alias<"
    "output_tuple_indices = [], operand_index = 4, operand_tuple_indices = []>]",
  )
  def test_attributes_that_mean_more_than_values(self, attribute):
    operands = [*mx(), array((8, 16), "float32")]
    name = attribute.split(" ")[0]
    with self.assertRaisesRegex(
      NotImplementedError, f"must have no {name}, got "
    ):
      read(dot(operands, attributes=attribute))


class CompositeTest(parameterized.TestCase):
  def text(self, rhs_dtype="float8_e4m3fn", scale=True):
    def function(lhs, rhs, lhs_scale, rhs_scale):
      return lax.scaled_dot(
        lhs, rhs, lhs_scale=lhs_scale, rhs_scale=rhs_scale if scale else None
      )

    operands = [
      array((8, 64), "float8_e4m3fn"),
      array((64, 16), rhs_dtype),
      array((8, 2), "float8_e8m0fnu"),
      array((2, 16), "float8_e8m0fnu"),
    ]
    return jax.jit(function).lower(*operands).as_text()

  def test_dimension_numbers_are_read(self):
    call = read(self.text())
    self.assertEqual(call.dimension_numbers, (((1,), (0,)), ((), ())))
    self.assertEqual(call.has_scale, (True, True))
    self.assertEqual(call.results, (array((8, 16), jnp.bfloat16),))

  def test_ones_are_no_scale_of_a_plain_operand(self):
    call = read(self.text("bfloat16", scale=False))
    self.assertEqual(call.has_scale, (True, False))

  def test_other_constants_are_a_scale(self):
    text = self.text("bfloat16", scale=False)
    for one in ("2.000000e+00", "1.000000e+01", "5.000000e-01"):
      other = text.replace("dense<1.000000e+00>", f"dense<{one}>")
      self.assertEqual(read(other).has_scale, (True, True))

  def test_ones_are_a_scale_of_fp8_values(self):
    self.assertEqual(read(self.text(scale=False)).has_scale, (True, True))

  def test_malformed_attributes_are_refused(self):
    text = self.text()
    numbers = "[[[1], [0]], [[], []]]"
    for bad in ("[[[1], [0]]]", '"none"', "[[1, 0], [2, 3]]"):
      with self.assertRaisesRegex(ValueError, "must have dimension_numbers"):
        read(text.replace(numbers, bad))
    with self.assertRaisesRegex(ValueError, "must have dimension_numbers"):
      read(text.replace("dimension_numbers =", "numbers ="))
    missing = re.sub(r"composite_attributes = {.*?}, ", "", text)
    with self.assertRaisesRegex(ValueError, "must have dimension_numbers"):
      read(missing)

  def test_versions(self):
    text = self.text()

    def of_version(version):
      return text.replace(
        "{composite_attributes",
        f"{{version = {version} : i32, composite_attributes",
      )

    self.assertEqual(read(of_version(1)), read(text))
    with self.assertRaisesRegex(
      NotImplementedError, "version must be 0 or 1, got 2"
    ):
      read(of_version(2))


class TupleTest(absltest.TestCase):
  def test_parts_are_the_results(self):
    kind = "tuple<tensor<8x64xf8E4M3FN>, tensor<8x2xf8E8M0FNU>>"
    call = read(f"""module {{
  func.func @main(%x: tensor<8x64xf32>) -> {kind} {{
    %0 = stablehlo.custom_call @__op$quantize(%x) : (tensor<8x64xf32>) -> {kind}
    return %0 : {kind}
  }}
}}""")
    self.assertEqual(call.results[1], array((8, 2), "float8_e8m0fnu"))
    self.assertEqual(call.block_sizes, (32,))
    self.assertEqual(call.operands, (array((8, 64), np.float32),))

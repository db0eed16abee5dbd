# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (modules in the text)
"""The parts of a module that a rewrite changes, and the parts that stay."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax import lax
from jaxlib.mlir import ir

import jaxplugin as jp
from jaxplugin.jaxext import jax_private
from jaxplugin.stablehlo import modules, rewriter
from jaxplugin.testing import contract, written_modules

DOT = "__op$block_scaled_dot"
SWIZZLED_DOT = "__cudnn$blockScaledDot"
CPU = jp.named_target("cpu")
# Neither cudnn nor triton supports it.
TPU = jp.Target(name="tpu", platform="tpu")
B200_9_12 = jp.named_target("b200", cudnn="9.12")
B200_9_13 = jp.named_target("b200", cudnn="9.13")
TARGETS = (CPU, TPU, B200_9_12, B200_9_13)

PADDED = written_modules.block_size(32)
dot_module = written_modules.dot_module
mx_operands = written_modules.mx_operands


def nv_operands(m=8, n=16, k=64, *, dtype=None):
  array = written_modules.array
  operands = [
    array((m, k), jnp.float4_e2m1fn),
    array((n, k), jnp.float4_e2m1fn),
    array((m, k // 16), jnp.float8_e4m3fn),
    array((n, k // 16), jnp.float8_e4m3fn),
  ]
  return operands + ([array((), dtype)] if dtype else [])


def swizzled_module(operands, dtype="float32", **options):
  results = [
    written_modules.array((operands[0].shape[0], operands[1].shape[0]), dtype),
    written_modules.array((0,), "uint8"),
  ]
  return written_modules.call_module(SWIZZLED_DOT, operands, results, **options)


def calls(text):
  """Returns the names of a module's custom calls, in order."""
  return re.findall(r"custom_call @([\w$]+)\(", text)


class IdempotenceTest(parameterized.TestCase):
  def modules(self):
    swizzled = mx_operands(128, 128, 96, rows=128, columns=4)
    return {
      "four": dot_module(),
      "four, batch": written_modules.call_module(
        DOT,
        [written_modules.array((3, *x.shape), x.dtype) for x in mx_operands()],
        [written_modules.array((3, 8, 16), "float32")],
      ),
      "five, f32": dot_module(nv_operands(dtype="float32")),
      "five, bf16": dot_module(nv_operands(dtype="bfloat16"), "bfloat16"),
      "five, f16": dot_module(nv_operands(dtype="float16"), "float16"),
      "padded": dot_module(mx_operands(rows=128, columns=4), attributes=PADDED),
      "padded beyond the tile": dot_module(
        mx_operands(rows=200, columns=9), attributes=PADDED
      ),
      "swizzled": swizzled_module(swizzled),
      "swizzled, few rows": swizzled_module(
        [
          *mx_operands(5, 7, 96)[:2],
          *mx_operands(k=96, rows=128, columns=4)[2:],
        ]
      ),
      "quantize": written_modules.quantize_module(),
      "composite": CompositeTest.lowered(self),
    }

  @parameterized.parameters(*TARGETS, jp.detect_target("cpu"))
  @pytest.mark.sample(1)
  def test_second_rewriting_changes_nothing(self, target):
    for name, module in self.modules().items():
      with self.subTest(name):
        once = jp.rewrite(module, target)
        self.assertEqual(jp.rewrite(once, target), once)

  @parameterized.parameters(B200_9_12, B200_9_13)
  def test_what_the_plugin_lowers_is_wrapped_once_at_most(self, target):
    # A separate function masks the columns after k / 32.
    lhs, rhs, lhs_scale, rhs_scale = mx_operands(
      128, 128, 96, rows=128, columns=4
    )
    swizzled = lambda values, scale: jp.ScaledArray(
      values, scale, None, jp.MXFP8, scale_layout="swizzled_128x4"
    )
    with jp.use_target(target):
      module = (
        jax.jit(jp.block_scaled_dot)
        .trace(swizzled(lhs, lhs_scale), swizzled(rhs, rhs_scale))
        .lower(lowering_platforms=("cuda",))
        .as_text()
      )
    self.assertEqual(calls(module), [SWIZZLED_DOT])
    once = jp.rewrite(module, target)
    self.assertEqual(calls(once), [SWIZZLED_DOT])
    self.assertEqual(jp.rewrite(once, target), once)


class CudnnTest(parameterized.TestCase):
  def test_forced_implementation_is_used(self):
    module = dot_module()
    rewritten = jp.rewrite(module, B200_9_12, implementation="xla")
    self.assertEqual(calls(rewritten), [])
    self.assertIn("@block_scaled_dot.mxfp8_xla", rewritten)


class PlaceTest(parameterized.TestCase):
  """Calls in functions and regions."""

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    sides = [
      contract.operand(rng, jp.MXFP8, (8, 32), storage="raw") for _ in range(2)
    ]
    self.arrays = [sides[0].operand, sides[1].operand]
    self.arrays += [sides[0].scale, sides[1].scale]
    self.exact, _ = contract.dot(sides[0].exact, sides[1].exact)
    types = [written_modules.tensor_type(x) for x in self.arrays]
    self.types = ", ".join(types)
    self.parameters = ", ".join(
      f"%{n}: {t}" for n, t in zip("abcd", types, strict=True)
    )

  def dot(self, *arguments):
    result = written_modules.array((8, 8), "float32")
    return written_modules.custom_call(DOT, arguments, self.arrays, [result])

  def module(self, body, *, functions=""):
    return f"""module {{
  func.func public @main({self.parameters}) -> tensor<8x8xf32> {{
    {body}
  }}
  {functions}
}}"""

  def check(self, module, factor=1):
    rewritten = jp.rewrite(module, CPU)
    self.assertNotIn(DOT, rewritten)
    (result,) = written_modules.run(rewritten, *self.arrays)
    contract.assert_exact(result, factor * self.exact, np.dtype(np.float32))
    return rewritten

  def test_called_function(self):
    helper = f"""func.func private @helper({self.parameters}) -> tensor<8x8xf32> {{
    %0 = {self.dot("%a", "%b", "%c", "%d")}
    return %0 : tensor<8x8xf32>
  }}"""
    body = f"""%0 = call @helper(%a, %b, %c, %d) : ({self.types}) -> tensor<8x8xf32>
    %1 = call @helper(%a, %b, %c, %d) : ({self.types}) -> tensor<8x8xf32>
    %2 = stablehlo.add %0, %1 : tensor<8x8xf32>
    return %2 : tensor<8x8xf32>"""
    rewritten = self.check(self.module(body, functions=helper), factor=2)
    self.assertEqual(rewritten.count("call @helper"), 2)

  def test_while_body(self):
    body = f"""%zero = stablehlo.constant dense<0.0> : tensor<8x8xf32>
    %i0 = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %three = stablehlo.constant dense<3> : tensor<i32>
    %r:2 = stablehlo.while(%i = %i0, %sum = %zero) : tensor<i32>, tensor<8x8xf32>
     cond {{
      %go = stablehlo.compare LT, %i, %three, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %go : tensor<i1>
    }} do {{
      %0 = {self.dot("%a", "%b", "%c", "%d")}
      %next = stablehlo.add %i, %one : tensor<i32>
      %more = stablehlo.add %sum, %0 : tensor<8x8xf32>
      stablehlo.return %next, %more : tensor<i32>, tensor<8x8xf32>
    }}
    return %r#1 : tensor<8x8xf32>"""
    self.check(self.module(body), factor=3)

  @parameterized.parameters((0, 2), (1, 1))
  @pytest.mark.sample(1)
  def test_branches(self, index, factor):
    body = f"""%i = stablehlo.constant dense<{index}> : tensor<i32>
    %r = "stablehlo.case"(%i) ({{
      %0 = {self.dot("%a", "%b", "%c", "%d")}
      %1 = stablehlo.add %0, %0 : tensor<8x8xf32>
      stablehlo.return %1 : tensor<8x8xf32>
    }}, {{
      %true = stablehlo.constant dense<true> : tensor<i1>
      %2 = "stablehlo.if"(%true) ({{
        %0 = {self.dot("%a", "%b", "%c", "%d")}
        stablehlo.return %0 : tensor<8x8xf32>
      }}, {{
        %z = stablehlo.constant dense<0.0> : tensor<8x8xf32>
        stablehlo.return %z : tensor<8x8xf32>
      }}) : (tensor<i1>) -> tensor<8x8xf32>
      stablehlo.return %2 : tensor<8x8xf32>
    }}) : (tensor<i32>) -> tensor<8x8xf32>
    return %r : tensor<8x8xf32>"""
    rewritten = self.check(self.module(body), factor=factor)
    self.assertLen(re.findall(r"func\.func private", rewritten), 1)

  def test_decomposition_of_another_composite(self):
    inner = f"""func.func private @inner({self.parameters}) -> tensor<8x8xf32> {{
    %0 = {self.dot("%a", "%b", "%c", "%d")}
    return %0 : tensor<8x8xf32>
  }}"""
    body = f"""%0 = stablehlo.composite "my.op" %a, %b, %c, %d {{decomposition = @inner}} : ({self.types}) -> tensor<8x8xf32>
    return %0 : tensor<8x8xf32>"""
    rewritten = self.check(self.module(body, functions=inner))
    self.assertIn('stablehlo.composite "my.op"', rewritten)

  def test_name_that_is_taken_is_not_taken_again(self):
    body = f"""%0 = {self.dot("%a", "%b", "%c", "%d")}
    %1 = call @block_scaled_dot.mxfp8_xla(%0) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    return %1 : tensor<8x8xf32>"""
    theirs = """func.func private @block_scaled_dot.mxfp8_xla(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
    %0 = stablehlo.add %x, %x : tensor<8x8xf32>
    return %0 : tensor<8x8xf32>
  }"""
    rewritten = self.check(self.module(body, functions=theirs), factor=2)
    self.assertIn("@block_scaled_dot.mxfp8_xla_0(", rewritten)

  def test_calls_of_other_shapes_have_functions_of_their_own(self):
    module = dot_module().replace("@main", "@one", 1)
    other = dot_module(mx_operands(m=9)).replace("@main", "@two", 1)
    other = other.split("\n", 1)[1].rsplit("}", 1)[0]
    module = module.rsplit("}", 1)[0] + other + "}"
    rewritten = jp.rewrite(module, CPU)
    self.assertIn("func private @block_scaled_dot.mxfp8_xla(", rewritten)
    self.assertIn("func private @block_scaled_dot.mxfp8_xla_0(", rewritten)

  def test_nested_module_gets_its_own_function(self):
    inner = dot_module().replace("@made", "@inner", 1)
    rewritten = jp.rewrite(f"module @outer {{\n{inner}}}", CPU)
    context = jax_private.make_ir_context()
    outer = ir.Module.parse(rewritten, context)
    (nested,) = outer.body
    names = [
      str(op.attributes["sym_name"]) for op in nested.regions[0].blocks[0]
    ]
    self.assertEqual(names, ['"main"', '"block_scaled_dot.mxfp8_xla"'])


class CompositeTest(parameterized.TestCase):
  def lowered(self, *specs, function=None):
    function = function or (
      lambda *x: lax.scaled_dot(x[0], x[1].T, lhs_scale=x[2], rhs_scale=x[3].T)
    )
    traced = jax.jit(function).trace(*(specs or mx_operands()))
    return traced.lower(lowering_platforms=("cuda",)).as_text()

  def test_decomposition_that_others_use_stays(self):
    module = self.lowered()
    (composite,) = (x for x in module.splitlines() if "composite" in x)
    _, call = composite.split(" = ", 1)
    twin = f"%twin = {call.replace('xla.scaled_dot', 'my.op', 1)}"
    module = module.replace(composite, f"{twin}\n{composite}")
    rewritten = jp.rewrite(module, TPU)
    self.assertIn("func.func private @xla.scaled_dot(", rewritten)
    self.assertIn('composite "my.op"', rewritten)


class KeptTest(parameterized.TestCase):
  def test_module_without_calls_is_returned_as_it_is(self):
    module = "module { // a comment\n}\n"
    self.assertIs(jp.rewrite(module, CPU), module)
    hlo = jax.jit(jnp.sin).lower(1.0).compiler_ir("hlo").as_hlo_text()
    self.assertIs(jp.rewrite(hlo, CPU), hlo)

  def test_module_attributes_stay(self):
    attributes = (
      "mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32,"
      ' mhlo.spmd_output_sharding = "{replicated}"'
    )
    module = dot_module(mx_operands(), module_attributes=attributes)
    rewritten = jp.rewrite(module, CPU)
    for attribute in attributes.split(", "):
      self.assertIn(attribute.strip(), rewritten.splitlines()[0])

  def test_frontend_attributes_go_to_the_call(self):
    attributes = 'mhlo.frontend_attributes = {_xla_kind = "mine"}'
    module = dot_module(attributes=attributes)
    rewritten = jp.rewrite(module, CPU)
    (line,) = (x for x in rewritten.splitlines() if " call @" in x)
    self.assertIn(attributes, line)

  def test_source_locations_stay(self):
    module = dot_module().replace(
      "-> tensor<8x16xf32>\n",
      '-> tensor<8x16xf32> loc("dot"("m.py":12:3))\n',
      1,
    )
    rewritten = jp.rewrite(module, CPU)
    (line,) = (x for x in rewritten.splitlines() if " call @" in x)
    name = re.search(r"loc\((#\w+)\)$", line)[1]
    self.assertRegex(rewritten, rf'{name} = loc\("dot"\(#\w+\)\)')
    self.assertIn('loc("m.py":12:3)', rewritten)
    self.assertNotIn("jaxplugin/", rewritten)

  def test_text_without_locations_gets_none(self):
    self.assertNotIn("loc(", jp.rewrite(dot_module(), CPU))

  def test_sharding_of_a_result_becomes_a_constraint(self):
    sharding = 'mhlo.sharding = "{devices=[2,1]<=[2]}"'
    module = dot_module(attributes=sharding)
    rewritten = jp.rewrite(module, CPU)
    self.assertEqual(calls(rewritten), ["Sharding"])
    lines = rewritten.splitlines()
    (line,) = (x for x in lines if "@Sharding" in x)
    value = re.search(r"(%\w+) = stablehlo.custom_call @Sharding", line)[1]
    self.assertIn(sharding, line)
    self.assertIn(f"    return {value} : tensor<8x16xf32>", lines)

  @parameterized.parameters(
    (
      "{{devices=[2,1]<=[2]}, {replicated}}",
      ["{devices=[2,1]<=[2]}", "{replicated}"],
    ),
    (
      "{{devices=[1,2]<=[2] metadata={op_name=f}}, {replicated}}",
      ["{devices=[1,2]<=[2] metadata={op_name=f}}", "{replicated}"],
    ),
    ("{replicated}", ["{replicated}", "{replicated}"]),
    ("{maximal device=1}", ["{maximal device=1}", "{maximal device=1}"]),
  )
  def test_each_result_keeps_its_part_of_a_sharding(self, sharding, parts):
    module = written_modules.quantize_module(
      attributes=f'mhlo.sharding = "{sharding}"'
    )
    rewritten = jp.rewrite(module, CPU)
    found = re.findall(r'@Sharding.*mhlo.sharding = "(.*?)"}', rewritten)
    self.assertEqual(found, parts)

  def test_sharding_that_fits_no_result_is_refused(self):
    sharding = "{{replicated}, {replicated}, {replicated}}"
    module = written_modules.quantize_module(
      attributes=f'mhlo.sharding = "{sharding}"'
    )
    with self.assertRaisesRegex(
      ValueError, "quantize.*sharding must have a part for each of 2 results"
    ):
      jp.rewrite(module, CPU, strict=True)

  def test_shardy_sharding_of_a_result_becomes_a_constraint(self):
    sharding = '<@mesh, [{"x"}, {}]>'
    module = dot_module(
      mx_operands(),
      attributes=f"sdy.sharding = #sdy.sharding_per_value<[{sharding}]>",
    )
    mesh = 'sdy.mesh @mesh = <["x"=2]>'
    module = module.replace("{\n", f"{{\n  {mesh}\n", 1)
    rewritten = jp.rewrite(module, CPU)
    self.assertIn(mesh, rewritten)
    self.assertRegex(
      rewritten, r"sdy.sharding_constraint %\w+ " + re.escape(sharding)
    )

  def test_result_in_one_tuple_stays_one_where_it_is_used_whole(self):
    module = """module {
  func.func @main(%x: tensor<8x64xf32>) -> (tuple<tensor<8x64xf8E4M3FN>, tensor<8x2xf8E8M0FNU>>, tensor<8x2xf8E8M0FNU>) {
    %0 = stablehlo.custom_call @__op$quantize(%x) : (tensor<8x64xf32>) -> tuple<tensor<8x64xf8E4M3FN>, tensor<8x2xf8E8M0FNU>>
    %1 = stablehlo.get_tuple_element %0[1] : (tuple<tensor<8x64xf8E4M3FN>, tensor<8x2xf8E8M0FNU>>) -> tensor<8x2xf8E8M0FNU>
    return %0, %1 : tuple<tensor<8x64xf8E4M3FN>, tensor<8x2xf8E8M0FNU>>, tensor<8x2xf8E8M0FNU>
  }
}"""
    lines = jp.rewrite(module, CPU).splitlines()
    body = "\n".join(lines[2:5])
    self.assertRegex(body, r"%0:2 = call @quantize.mxfp8\(%arg0\)")
    self.assertRegex(body, r"%1 = stablehlo.tuple %0#0, %0#1")
    self.assertRegex(body, r"return %1, %0#1")


class ErrorTest(parameterized.TestCase):
  def check(self, module, error, *patterns, target=CPU, **options):
    with self.assertRaises(error) as caught:
      jp.rewrite(module, target, strict=True, **options)
    for pattern in patterns:
      self.assertRegex(str(caught.exception), pattern)

  def test_call_place_and_shapes_are_named(self):
    module = dot_module().replace(
      "-> tensor<8x16xf32>\n", '-> tensor<8x16xf32> loc("m.py":12:3)\n', 1
    )
    for text, place in (
      (module, r"at m\.py:12:3"),
      (dot_module(), r"at <str>:3:10"),
    ):
      self.check(
        text,
        NotImplementedError,
        r"rewrite: __op\$block_scaled_dot\(tensor<8x64xf8E4M3FN>,"
        r" tensor<16x64xf8E4M3FN>, tensor<8x2xf8E8M0FNU>,"
        r" tensor<16x2xf8E8M0FNU>\)",
        place,
        "implementation='cudnn' does not support.*tpu",
        target=TPU,
        implementation="cudnn",
      )

  def test_module_is_left_as_it_was_by_an_error(self):
    context = jax_private.make_ir_context()
    text = dot_module()
    module = ir.Module.parse(text, context)
    before = str(module)
    with self.assertRaises(NotImplementedError):
      jp.rewrite(module, TPU, implementation="cudnn", strict=True)
    self.assertEqual(str(module), before)


class OtherWritersTest(absltest.TestCase):
  """Calls that JAX does not write are rewritten, or stay with a reason."""

  def module(self, call, operands):
    """Returns a module with `call` on %a0, ..., and a valid call on %b0, ..."""
    operands = list(operands)
    named = {f"%a{i}": x for i, x in enumerate(operands)}
    named |= {f"%b{i}": x for i, x in enumerate(mx_operands())}
    arguments = [
      f"{name}: {written_modules.tensor_type(x)}" for name, x in named.items()
    ]
    result = written_modules.array((8, 16), "float32")
    out = written_modules.tensor_type(result)
    good = written_modules.custom_call(
      DOT, [f"%b{i}" for i in range(4)], mx_operands(), [result]
    )
    return f"""module {{
  func.func public @main({", ".join(arguments)}) -> ({out}, {out}) {{
    %0 = {call}
    %1 = {good}
    return %0, %1 : {out}, {out}
  }}
  func.func private @plain({", ".join(arguments[: len(operands)])}) -> {out} {{
    %0 = stablehlo.constant dense<0.0> : {out}
    return %0 : {out}
  }}
}}
"""

  def custom_call(self, operands, attributes=""):
    return written_modules.custom_call(
      DOT,
      [f"%a{i}" for i in range(len(operands))],
      operands,
      [written_modules.array((8, 16), "float32")],
      attributes,
    )

  def composite(self, operands, more=""):
    names = ", ".join(f"%a{i}" for i in range(len(operands)))
    types = ", ".join(map(written_modules.tensor_type, operands))
    return (
      f'stablehlo.composite "xla.scaled_dot" {names} {{composite_attributes ='
      f" {{dimension_numbers = [[[1], [1]], [[], []]]}}{more}, decomposition ="
      f" @plain}} : ({types}) -> tensor<8x16xf32>"
    )

  def cases(self):
    """Returns (operands, text of a call, reason of its refusal)."""
    mx = mx_operands()
    with_scale = lambda *shape: [
      *mx[:2],
      written_modules.array(shape, "float8_e8m0fnu"),
      mx[3],
    ]
    for operands, more, why in (
      (with_scale(2, 2), "", "lhs_scale must have the dimensions of lhs"),
      (with_scale(8, 3), "", "multiple of the columns of lhs_scale"),
      (with_scale(16), "", "lhs_scale must have the same rank"),
      (mx[:2], "", "must have 3 or 4 or 5 operands"),
      (mx, 'backend_config = "size 32"', "backend_config must be JSON"),
      (mx, "called_computations = [@plain]", "no called_computations"),
    ):
      yield operands, self.custom_call(operands, more), why
    for operands, more, why in (
      (mx, ", version = 2 : i32", "version must be 0 or 1, got 2"),
      (with_scale(3, 2), "", "lhs_scale must have the shape of lhs"),
      (with_scale(2), "", "lhs_scale must have the rank of its operand"),
    ):
      yield operands, self.composite(operands, more), why

  def test_it_stays_and_one_line_says_why(self):
    for operands, call, why in self.cases():
      with self.subTest(why):
        text = self.module(call, operands)
        source = modules.read(text, "f.mlir", trusted=True)
        before = str(source.module).splitlines()
        left, done = rewriter.rewrite_source(source, CPU)
        after = str(source.module).splitlines()
        self.assertEqual(after[2], before[2])  # the call
        self.assertIn("call @block_scaled_dot.mxfp8_xla(%arg", after[3])
        self.assertRegex(left.error, why)
        self.assertEqual(done.error, "")
        line = str(left)
        self.assertNotIn("\n", line)
        self.assertRegex(line, r"f\.mlir:3:10: .*: not changed: ")

  def test_rewrite_warns_and_strict_raises(self):
    operands, call, why = next(self.cases())
    text = self.module(call, operands)
    with self.assertWarnsRegex(jp.RewriteWarning, why) as caught:
      written = jp.rewrite(text, CPU)
    self.assertEqual(caught.filename, __file__)
    self.assertIn("call @block_scaled_dot.mxfp8_xla(%arg", written)
    with self.assertRaisesRegex(TypeError, f"^rewrite: .* at .*: .*{why}"):
      jp.rewrite(text, CPU, strict=True)

  def test_forced_implementation_that_cannot_serve_leaves_the_module(self):
    text = dot_module()
    with self.assertWarnsRegex(
      jp.RewriteWarning, "implementation='cudnn' does not support"
    ) as caught:
      self.assertEqual(jp.rewrite(text, TPU, implementation="cudnn"), text)
    self.assertNotIn("\n", str(caught.warning))

  def test_scale_of_a_composite_may_cover_several_rows(self):
    lhs = np.arange(8 * 64).reshape(8, 64) % 7 - 3
    rhs = np.arange(16 * 64).reshape(16, 64) % 5 - 2
    for dtype, scale_dtype, shapes in (
      ("float8_e4m3fn", "float8_e8m0fnu", ((2, 2), (16, 2))),
      ("float8_e4m3fn", "float8_e8m0fnu", ((8, 2), (4, 1))),
      ("float8_e4m3fn", "bfloat16", ((1, 1), (16, 4))),
      ("bfloat16", "bfloat16", ((1, 1), (1, 1))),
      ("bfloat16", "bfloat16", ((8, 1), (2, 1))),
    ):
      with self.subTest(dtype=dtype, scale_dtype=scale_dtype, shapes=shapes):
        scales = [2.0 ** (np.arange(np.prod(s)).reshape(s) % 4) for s in shapes]
        arrays = [
          lhs.astype(dtype),
          rhs.astype(dtype),
          *(scale.astype(scale_dtype) for scale in scales),
        ]
        text = self.module(self.composite(arrays), arrays)
        others = [np.zeros(x.shape, x.dtype) for x in mx_operands()]
        written = jp.rewrite(text, CPU, strict=True)
        result, _ = written_modules.run(written, *arrays, *others)
        full = [
          x * np.kron(s, np.ones(np.array(x.shape) // s.shape))
          for x, s in zip((lhs, rhs), scales, strict=True)
        ]
        np.testing.assert_array_equal(result, full[0] @ full[1].T)

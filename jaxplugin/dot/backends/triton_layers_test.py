# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A layer of stacked weights on a GPU: what is chosen, emitted and compiled."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.dot import primitive
from jaxplugin.lab.compilation import deviceless
from jaxplugin.testing import installed, interpreted

H200 = targets.named_target("h200")
B200 = targets.named_target("b200", cudnn="9.13")
LAYERS, M, N, K = 3, 16, 704, 1664
IN_PLACE = "rhs: a layer of a stack, read from the stack"
COPIED = "rhs: a layer of a stack, copied before every call"


def each_layer(x, stack, **options):
  """The products with all layers, one after the other."""

  def step(x, i):
    y = jp.linear(x, stack[i], **options)
    return x + y.sum().astype(x.dtype), y

  return jax.lax.scan(step, x, jnp.arange(stack.shape[0]))


def types(format, m=M, *, target=None):
  """Types of x and of a stack."""

  def make(weights):
    stack = jp.quantize(weights, format, batch_dims=1)
    return stack if target is None else jp.prepare_weights(stack, target)

  x = jax.ShapeDtypeStruct((m, K), jnp.bfloat16)
  weights = jax.ShapeDtypeStruct((LAYERS, N, K), jnp.bfloat16)
  return x, jax.eval_shape(make, weights)


def notes(function, *args, target):
  (dot,) = jp.explain(function, *args, target=target).dots
  return dot.decision.implementation, dot.decision.notes


class ChoiceTest(parameterized.TestCase):
  @parameterized.parameters("a100", "h200", "b200", "rtx5090")
  def test_few_rows_read_the_layer_in_its_stack(self, name):
    target = targets.named_target(name)
    implementation, told = notes(each_layer, *types(jp.MXFP8), target=target)
    self.assertEqual(implementation, "triton")
    self.assertIn(IN_PLACE, told)

  def test_many_rows_are_cudnns_and_the_layer_is_copied(self):
    function = lambda x, w: jax.lax.scan(
      lambda c, i: (c, jp.linear(jp.quantize(x, jp.MXFP8), w[i])),
      0,
      jnp.arange(LAYERS),
    )
    for m, expected in ((64, ("triton", IN_PLACE)), (65, ("cudnn", COPIED))):
      found, told = notes(function, *types(jp.MXFP8, m), target=B200)
      self.assertEqual(found, expected[0])
      self.assertIn(expected[1], told)

  def test_implementation_that_is_asked_for_is_taken(self):
    function = lambda x, w: jp.block_scaled_dot(
      jp.quantize(x, jp.MXFP8), w[1], implementation="cudnn"
    )
    taken, told = notes(function, *types(jp.MXFP8), target=B200)
    self.assertEqual((taken, COPIED in told), ("cudnn", True))

  def test_weights_of_no_stack_say_nothing_of_one(self):
    x, stack = types(jp.MXFP8)
    alone = jax.eval_shape(lambda w: w[0], stack)
    _, told = notes(jp.linear, x, alone, target=H200)
    self.assertNotIn("stack", " ".join(told))

  def test_estimate_counts_one_layer(self):
    x, stack = types(jp.NVFP4)
    function = lambda x, w: jp.linear(x, w[1])
    (of_stack,) = jp.explain(function, x, stack, target=H200).dots
    alone = jax.eval_shape(lambda w: w[0], stack)
    (of_alone,) = jp.explain(jp.linear, x, alone, target=H200).dots
    self.assertEqual(of_stack.estimate, of_alone.estimate)


@installed.needs_gpu_compilers
class CompiledTest(parameterized.TestCase):
  """By XLA's GPU compiler, without a GPU."""

  def large_steps(self, text):
    """Instructions of the loop's body that write as much as half a layer."""
    body = re.search(r"body=%?([\w.-]+)", text)[1]
    lines = text.split(f"\n%{body} (")[1].split("\n}")[0].splitlines()
    found = []
    for line in lines:
      shape = re.match(r"\s+(?:ROOT )?%\S+ = \w+\[([\d,]+)\]\S* (\S+)\(", line)
      if shape is None or shape[2] in ("bitcast", "get-tuple-element"):
        continue
      # Of FP4 in words an element is eight values.
      if math.prod(map(int, shape[1].split(","))) >= N * K // 16:
        found.append(line.strip())
    return found

  @parameterized.parameters(
    ("h200", jp.MXFP8, False),
    ("h200", jp.NVFP4, True),  # interleaved
    ("b200", jp.NVFP4, False),
    ("b200", jp.MXFP8, True),  # with swizzled scales
  )
  @pytest.mark.full
  def test_no_layer_is_copied(self, name, format, prepared):
    target = targets.named_target(name)
    x, stack = types(format, target=target if prepared else None)
    text = deviceless.compile(each_layer, x, stack, target=target).as_text()
    self.assertIn("triton_kernel_call", text)
    self.assertRegex(text, r"known_trip_count.{1,9}n.{1,5}3")
    self.assertEqual(self.large_steps(text), [])

  @pytest.mark.full
  def test_a_scan_over_the_layers_copies_them_unless_xla_leaves_them(self):
    sharding = jax.NamedSharding(deviceless.mesh(H200), PartitionSpec())
    args = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
      types(jp.MXFP8),
    )

    def scanned(x, stack):
      return jax.lax.scan(lambda c, w: (c, jp.linear(x, w)), 0, stack)

    with jp.use_target(H200):
      lowered = jax.jit(scanned).lower(*args)
    # Newer versions of XLA do so by themselves.
    option = "xla_gpu_enable_dynamic_slice_fusion"
    compiled = (
      lowered.compile(compiler_options={option: given})
      for given in (False, True)
    )
    copied, left = (self.large_steps(each.as_text()) for each in compiled)
    self.assertRegex(copied[0], "f8e4m3fn.1,704,1664.*fusion")
    self.assertEqual(left, [])

  @parameterized.parameters("in_shard_map", "partitioned")
  @pytest.mark.full
  def test_columns_over_devices(self, how):
    mesh = deviceless.mesh(H200, (2,), ("d",))
    x, stack = types(jp.MXFP8)
    columns = PartitionSpec(None, "d")

    def placed(x, spec):
      sharding = jax.NamedSharding(mesh, spec)
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    stack = jax.tree.map(lambda w: placed(w, columns), stack)
    args = placed(x, PartitionSpec()), stack
    last = lambda x, stack: each_layer(x, stack)[1]
    if how == "in_shard_map":
      last = jax.shard_map(
        lambda x, w: jax.lax.map(lambda i: jp.linear(x, w[i]), jnp.arange(3)),
        mesh=mesh,
        in_specs=(PartitionSpec(), columns),
        out_specs=PartitionSpec(None, None, "d"),
      )
    with jp.use_target(H200):
      text = jax.jit(last).lower(*args).compile().as_text()
    self.assertIn("triton_kernel_call", text)
    slice_of_layer = rf"f8e4m3fn\[1,{N // 2},{K}\]"
    if how == "in_shard_map":
      self.assertNotRegex(text, slice_of_layer)
    else:
      self.assertRegex(text, slice_of_layer)

  def test_static_numbers_read_the_stack_too(self):
    function = lambda x, w: jp.linear(x, w[0]) + jp.linear(x, w[2])
    text = deviceless.compile(function, *types(jp.MXFP8), target=H200).as_text()
    self.assertNotRegex(text, rf"\[(1,)?{N},{K}\]")


@interpreted.needs_interpreter
class InterpretedTest(interpreted.RecordedTestCase):
  """The kernels, run by Triton's interpreter through the whole lowering."""

  def operands(self, format, target, lhs=None):
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(LAYERS, 35, 96)).astype(np.float32)
    weights *= 10.0 ** np.arange(LAYERS)[:, None, None]
    stack = jp.quantize(weights, format, batch_dims=1)
    if target is not None:
      stack = jp.prepare_weights(stack, target)
    x = rng.normal(size=(3, 96)).astype(np.float32)
    x = jnp.asarray(x, jnp.bfloat16) if lhs is None else jp.quantize(x, lhs)
    return x, stack

  def run_both(self, name, function, *args):
    """Results where the stack is read, and where the layer is sliced before."""
    target = targets.named_target(name).with_library(targets.JAX_TRITON)
    with jp.use_target(target):
      of_stack = jax.jit(functools.partial(function, jp.linear))(*args)
      self.assertIn("_layer", self.names())
      self.launched.clear()
      sliced = jax.jit(functools.partial(function, jax.jit(jp.linear)))(*args)
      self.assertNotIn("_layer", self.names())
    return of_stack, sliced

  @parameterized.parameters(
    ("a100", None, jp.MXFP8, False),
    ("h200", None, jp.MXFP4, True),
    ("h200", jp.NVFP4, jp.NVFP4, False),
    ("b200", jp.MXFP8, jp.MXFP8, True),
  )
  def test_bits_are_those_of_the_slice(self, name, lhs, rhs, prepared):
    target = targets.named_target(name).with_library(targets.JAX_TRITON)
    x, stack = self.operands(rhs, target if prepared else None, lhs)

    def each(linear, x, stack):
      step = lambda c, i: (c, linear(x, stack[i]))
      return jax.lax.scan(step, 0, jnp.arange(LAYERS))[1]

    of_stack, sliced = self.run_both(name, each, x, stack)
    self.assertGreater(np.abs(of_stack).min(axis=(1, 2)).max(), 0)
    np.testing.assert_array_equal(of_stack, sliced)

  @pytest.mark.full
  def test_number_is_taken_as_indices_are(self):
    x, stack = self.operands(jp.MXFP8, None)
    some = lambda linear, x, stack, i: linear(x, stack[i])
    for i in (-9, -1, 0, 2, 7):
      results = self.run_both("h200", some, x, stack, i)
      np.testing.assert_array_equal(*results, err_msg=str(i))

  def test_rows_that_are_mapped_read_one_stack(self):
    x, stack = self.operands(jp.MXFP8, None)
    mapped = lambda linear, x, stack, i: jax.vmap(
      lambda row: linear(row, stack[i])
    )(x)
    np.testing.assert_array_equal(*self.run_both("h200", mapped, x, stack, 1))

  def test_numbers_that_are_mapped_are_slices(self):
    x, stack = self.operands(jp.MXFP8, None)
    mapped = jax.vmap(lambda x, i: jp.linear(x, stack[i]), (None, 0))
    target = H200.with_library(targets.JAX_TRITON)
    with jp.use_target(target):
      result = jax.jit(mapped)(x, jnp.array([2, 0]))
      self.assertNotIn("_layer", self.names())
      expected = jnp.stack([jp.linear(x, stack[i]) for i in (2, 0)])
    np.testing.assert_array_equal(result, expected)


class TracedTest(absltest.TestCase):
  def lowered(self, function, *args):
    with jp.use_target(H200):
      traced = jax.jit(function).trace(*args)
      return traced.lower(lowering_platforms=("cuda",)).as_text()

  @installed.needs_triton
  @pytest.mark.full
  def test_derivative_keeps_no_stack(self):
    x, stack = types(jp.MXFP8)

    def loss(x, stack):
      _, y = each_layer(x, stack, preferred_element_type=jnp.float32)
      return (y * y).sum()

    def tangent(x, stack):
      return jax.jvp(lambda x: jp.linear(x, stack[1]), (x,), (x,))

    dots = primitive.equations(jax.make_jaxpr(tangent)(x, stack).jaxpr)
    of_layers = [eqn.params["call"].is_of_layer for eqn in dots]
    self.assertEqual(of_layers, [True, False])
    text = self.lowered(jax.grad(loss), x, stack)
    # Forward it is read from the stack.
    self.assertRegex(
      text, rf"triton_kernel_call.*tensor<{LAYERS}x{N}x{K}xf8E4M3FN>"
    )

  @installed.needs_triton
  def test_an_exported_module_reads_the_stack(self):
    exported = jp.export(each_layer, ["cuda"], target=H200)(*types(jp.MXFP8))
    stack = rf"tensor<{LAYERS}x{N}x{K}xf8E4M3FN>"
    self.assertRegex(exported.mlir_module(), f"triton_kernel_call.*{stack}")

  def test_it_is_forgotten_beyond_jit(self):
    x, stack = types(jp.MXFP8)
    product = jax.jit(jp.linear)
    function = lambda x, w: product(x, w[1])
    _, told = notes(function, x, stack, target=H200)
    self.assertNotIn(IN_PLACE, told)

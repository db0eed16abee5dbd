# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0

import warnings

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from flax import nnx

import jaxplugin as jp
from jaxplugin.testing import contract
from jaxplugin.testing.models import normal


def spec(*shape):
  """Returns the type of an array, for tests that only read the report."""
  return jax.ShapeDtypeStruct(shape, np.float32)


def types(module, *args):
  """Returns the types of the parameters of a module of linen."""
  return jax.eval_shape(module.init, jax.random.key(0), *args)


def filled(tree):
  """Returns a tree of types with numbers. Initializers compile long."""
  return jax.tree.map(lambda x: normal(*x.shape), tree)


def init(module, *args):
  """Returns parameters of a module of linen."""
  return filled(types(module, *args))


def entries(report):
  """Path -> contracted dimensions, or the reason."""
  return {
    e.path: e.reason if e.format is None else e.contracting
    for e in report.entries
  }


class LinenTest(parameterized.TestCase):
  @parameterized.parameters("mxfp8", "nvfp4")
  @pytest.mark.sample(1)
  def test_kernels_have_the_bits_of_their_transposed(self, format):
    params = init(nn.Dense(96), jnp.ones((2, 64)))
    params_q, report = jp.quantize_params(params, format)
    kernel, kernel_q = (p["params"]["kernel"] for p in (params, params_q))
    self.assertEqual(kernel_q.shape, (64, 96))
    contract.assert_same_bits(kernel_q.array, jp.quantize(kernel.T, format))
    np.testing.assert_array_equal(
      kernel_q.dequantize(), jp.quantize(kernel.T, format).dequantize().T
    )
    self.assertEqual(
      report.bytes_before - report.bytes_after,
      kernel.nbytes - kernel_q.nbytes,
    )
    contract.assert_same_bits(
      params_q["params"]["bias"], params["params"]["bias"]
    )

  def test_attention_contracts_what_it_contracts(self):
    module = nn.MultiHeadDotProductAttention(num_heads=4)
    params = init(module, jnp.ones((1, 3, 64)))
    params_q, report = jp.quantize_params(params, "mxfp8")
    found = entries(report)
    self.assertEqual(found["params/query/kernel"], (0,))
    self.assertEqual(found["params/out/kernel"], (0, 1))
    for name, order in (("query", (1, 2, 0)), ("out", (2, 0, 1))):
      kernel = params["params"][name]["kernel"]
      rows = kernel.transpose(order).reshape(64, 64)
      kernel_q = params_q["params"][name]["kernel"]
      self.assertEqual(kernel_q.shape, kernel.shape)
      contract.assert_same_bits(kernel_q.array, jp.quantize(rows, "mxfp8"))
      back = kernel_q.dequantize().transpose(order).reshape(64, 64)
      np.testing.assert_array_equal(back, kernel_q.array.dequantize())

  def test_layers_of_a_scan_have_a_global_scale_each(self):
    class Block(nn.Module):
      @nn.compact
      def __call__(self, x, _):
        y = nn.Dense(128, use_bias=False, name="up")(nn.LayerNorm()(x))
        return nn.Dense(64, name="down")(y), None

    class Model(nn.Module):
      @nn.compact
      def __call__(self, x):
        scanned = nn.scan(
          Block,
          variable_axes={"params": 0},
          split_rngs={"params": True},
          length=3,
        )
        return scanned(name="middle")(x, None)[0]

    params = init(Model(), jnp.ones((2, 64)))
    params_q, report = jp.quantize_params(params, "nvfp4")
    found = entries(report)
    self.assertEqual(found["params/middle/up/kernel"], (1,))
    self.assertEqual(found["params/middle/down/kernel"], (1,))
    kernel = params["params"]["middle"]["up"]["kernel"]
    array = params_q["params"]["middle"]["up"]["kernel"].array
    self.assertEqual(array.global_scale.shape, (3, 1, 1))
    for i in range(3):
      contract.assert_same_bits(array[i], jp.quantize(kernel[i].T, "nvfp4"))

  def test_stacks_of_stacks_contract_what_their_matmuls_contract(self):
    class Block(nn.Module):
      @nn.compact
      def __call__(self, x, _):
        experts = nn.vmap(
          nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}
        )
        y = experts(64, use_bias=False, name="VmapDense_0")(x[None])
        y = nn.RMSNorm()(y.sum(0))
        return nn.Dense(64, use_bias=False, name="out")(y), None

    module = nn.scan(
      Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )()
    x = jnp.ones((1, 64))
    inside = types(module, x, None)["params"]
    params = {"ScanBlock_0": inside}
    _, by_name = jp.quantize_params(params, "mxfp8", min_size=0)
    _, seen = jp.quantize_params(
      params,
      "mxfp8",
      call=lambda p: module.apply({"params": p["ScanBlock_0"]}, x, None),
      min_size=0,
    )
    self.assertEqual(by_name.quantized, seen.quantized)
    self.assertLen(seen.quantized, 2)
    # Without the name, the norm says that its neighbor is a stack.
    _, report = jp.quantize_params(inside, "mxfp8")
    found = entries(report)
    self.assertEqual(found["out/kernel"], (1,))
    self.assertIn("cannot be inferred", found["VmapDense_0/kernel"])

  def test_norms_and_biases_say_how_many_dimensions_are_layers(self):
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
    unknown = "cannot be inferred from its name"
    for scale, kernel, expected in (
      ((2, 64), (2, 64, 96), (1,)),
      ((2, 3, 64), (2, 3, 64, 96), (2,)),
      ((2, 64), (2, 3, 64, 96), unknown),  # it may be a convolution
      ((64,), (3, 64, 96), unknown),
      ((4, 64), (2, 64, 96), unknown),
    ):
      stack = {"up": {"kernel": leaf(*kernel)}, "norm": {"scale": leaf(*scale)}}
      for tree in (stack, {"block": stack}, {**stack["up"], **stack["norm"]}):
        with self.subTest(f"{scale} {kernel} {list(tree)}"):
          _, report = jp.quantize_params(
            {"taken": {"kernel": leaf(64, 64)}, **tree}, "mxfp8"
          )
          (found,) = (e for e in report.entries if e.shape == kernel)
          self.assertIn(str(expected), f"{found.contracting} {found.reason}")

  def test_metadata_around_an_array_stays(self):
    initializer = nn.with_partitioning(nn.initializers.normal(), ("a", "b"))
    module = nn.Dense(64, kernel_init=initializer)
    params = types(module, jnp.ones((1, 64)))
    params_q, report = jp.quantize_params(params, "mxfp8")
    self.assertEqual(entries(report)["params/kernel"], (0,))
    box = params_q["params"]["kernel"]
    self.assertEqual(box.names, ("a", "b"))
    self.assertIsInstance(box.value, jp.QuantizedWeight)


class TreesTest(parameterized.TestCase):
  def test_state_of_nnx_merges_to_a_model(self):
    make = lambda: nnx.Sequential(
      nnx.Linear(64, 128, rngs=nnx.Rngs(0)), nnx.Embed(64, 64, rngs=nnx.Rngs(1))
    )
    graph, state = nnx.split(nnx.eval_shape(make))
    state = filled(state)
    state_q, report = jp.quantize_params(state, "mxfp4")
    found = entries(report)
    self.assertEqual(found["layers/0/kernel"], (0,))
    self.assertIn("embedding", found["layers/1/embedding"])
    merged = nnx.merge(graph, state_q)
    kernel = nnx.merge(graph, state).layers[0].kernel[...]
    contract.assert_same_bits(
      merged.layers[0].kernel.get_value().array, jp.quantize(kernel.T, "mxfp4")
    )

  def test_equinox_knows_its_layers_by_their_types(self):
    def make(key):
      return {
        "a": eqx.nn.Linear(64, 96, key=key),
        "b": eqx.nn.Embedding(64, 96, key=key),
        "c": eqx.nn.Conv1d(64, 32, 3, key=key),
        "d": eqx.nn.LayerNorm((64, 64)),
        "e": eqx.nn.GRUCell(64, 64, key=key),
      }

    model = filled(jax.eval_shape(make, jax.random.key(0)))
    model_q, report = jp.quantize_params(model, "nvfp4")
    found = entries(report)
    self.assertEqual(found["a/weight"], (1,))
    self.assertEqual(found["e/weight_hh"], (1,))
    for name, kind in (("b", "Embedding"), ("c", "Conv1d"), ("d", "LayerNorm")):
      self.assertIn(f"equinox.nn.{kind}", found[f"{name}/weight"])
    contract.assert_same_bits(
      model_q["a"].weight, jp.quantize(model["a"].weight, "nvfp4")
    )

  def test_bias_of_a_checkpoint_says_which_way_a_weight_lies(self):
    params = {
      "h.0.attn.c_attn.weight": spec(64, 192),
      "h.0.attn.c_attn.bias": spec(192),
      "h.0.mlp.up.weight": spec(192, 64),
      "h.0.mlp.up.bias": spec(192),
      "h.0.attn.q.weight": spec(64, 64),
      "h.0.attn.q.bias": spec(64),
      "h.0.mlp.experts.weight": spec(4, 96, 64),
      "mlp/~/linear_0": {"w": spec(64, 160), "b": spec(160)},
      "mlp/~/linear_1": {"w": spec(160, 64), "b": spec(160)},
      "mlp/~/linear_2": {"w": spec(64, 64), "b": spec(32)},
    }
    _, report = jp.quantize_params(params, "mxfp8")
    found = entries(report)
    self.assertEqual(found["h.0.attn.c_attn.weight"], (0,))
    self.assertEqual(found["h.0.mlp.up.weight"], (1,))
    self.assertEqual(found["h.0.attn.q.weight"], (1,))
    self.assertEqual(found["h.0.mlp.experts.weight"], (2,))
    self.assertEqual(found["mlp/~/linear_0/w"], (0,))
    self.assertEqual(found["mlp/~/linear_1/w"], (1,))
    self.assertIn("from the bias shape [32]", found["mlp/~/linear_2/w"])

  def test_square_weights_of_haiku_contract_their_first_dimension(self):
    def net(x):
      initial = hk.initializers.VarianceScaling()
      return hk.MultiHeadAttention(4, 16, w_init=initial)(x, x, x)

    model = hk.without_apply_rng(hk.transform(net))
    x = normal(5, 64)
    params = filled(jax.eval_shape(model.init, jax.random.key(0), x))
    params_q, report = jp.quantize_params(params, "mxfp8")
    layers = ("query", "key", "value", "linear")
    expected = {f"multi_head_attention/{name}/w": (0,) for name in layers}
    self.assertEqual(
      {e.path: e.contracting for e in report.quantized}, expected
    )
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      y = jax.jit(jp.accept_quantized(model.apply))(params_q, x)
    dequantized = jax.tree.map(
      lambda w: w.dequantize() if isinstance(w, jp.QuantizedWeight) else w,
      params_q,
      is_leaf=lambda w: isinstance(w, jp.QuantizedWeight),
    )
    expected = jax.jit(model.apply)(dequantized, x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)

  def test_what_is_not_known_is_left_and_said(self):
    params = {
      "mixed": spec(64, 64),
      "kernel": spec(4, 64, 64),
      "dense": {"kernel": spec(60, 64)},
      "small": {"kernel": spec(32, 32)},
      "codes": {"kernel": jax.ShapeDtypeStruct((64, 64), np.int8)},
      "taken": {"kernel": spec(64, 64)},
      "wide": {"kernel": spec(3, 3, 32, 64), "bias": spec(64)},
      "other": {"kernel": spec(4, 64, 64), "bias": spec(32)},
      "linear_1": {"w": spec(64, 96)},  # of haiku
      "mixer": {"w": spec(64, 96)},
    }
    params_q, report = jp.quantize_params(params, "mxfp8")
    found = entries(report)
    self.assertEqual(found["taken/kernel"], (0,))
    self.assertEqual(found["linear_1/w"], (0,))
    for path, reason in (
      ("mixed", "cannot be inferred from its name; pass call="),
      ("mixer/w", "cannot be inferred from its name"),
      ("wide/kernel", "may be a convolution kernel, because its bias would"),
      ("other/kernel", "cannot be inferred from the bias shape [32]"),
      ("kernel", "cannot be inferred from its name"),
      (
        "dense/kernel",
        "the contracting size, 60, is not a multiple of mxfp8's",
      ),
      ("small/kernel", "1024 values, fewer than min_size=4096"),
      ("codes/kernel", "not an array of floats"),
    ):
      self.assertIn(reason, found[path])
      self.assertIn(reason, str(report))
    self.assertIs(params_q["mixed"], params["mixed"])

  def test_table_has_one_line_for_layers_that_are_alike(self):
    shapes = {"up_0": (64, 96), "up_1": (64, 96), "up_2": (96, 64)}
    params = {name: {"kernel": spec(*s)} for name, s in shapes.items()}
    _, report = jp.quantize_params(params, "mxfp8")
    lines = [line.split() for line in str(report).splitlines()]
    names = [line[:3] for line in lines if "contracts" in line]
    self.assertEqual(
      names, [["up_*/kernel", "x", "2"], ["up_2/kernel", "float32[96,", "64]"]]
    )

  def test_tied_weight_is_left_wherever_it_is(self):
    table = spec(128, 64)
    params = {
      "embed": {"embedding": table},
      "out": {"kernel": table},
      "own": {"kernel": spec(128, 64)},
    }
    params_q, report = jp.quantize_params(params, "mxfp8")
    self.assertIn(
      "same array as embed/embedding", entries(report)["out/kernel"]
    )
    self.assertIs(params_q["out"]["kernel"], table)

  def test_types_alone_become_types(self):
    params = {"kernel": normal(64, 128), "bias": normal(128)}
    types = jax.eval_shape(lambda: params)
    expected = jax.eval_shape(
      lambda p: jp.quantize_params(p, "nvfp4")[0], params
    )
    actual, report = jp.quantize_params(types, "nvfp4")
    self.assertEqual(jax.tree.structure(actual), jax.tree.structure(expected))
    self.assertEqual(jax.tree.leaves(actual), jax.tree.leaves(expected))
    self.assertEqual(
      report.bytes_after, jp.quantize_params(params, "nvfp4")[1].bytes_after
    )

  def test_quantized_arrays_are_left_as_they_are(self):
    params = {
      "kernel": normal(64, 64),
      "w": jp.quantize(normal(64, 64), "nvfp4"),
    }
    params_q, report = jp.quantize_params(params, "nvfp4")
    self.assertIs(params_q["w"], params["w"])
    self.assertEqual(entries(report)["w"], "it is quantized already")


class LayersTest(absltest.TestCase):
  def test_leading_dimensions_of_a_weight_are_indexed(self):
    params = {"w": normal(3, 2, 64, 4, 8)}
    params_q, _ = jp.quantize_params(params, "nvfp4", where=lambda p: 2)
    stack, values = params_q["w"], np.asarray(params_q["w"].dequantize())
    self.assertLen(stack, 3)
    np.testing.assert_array_equal(jp.dequantize(stack), values)
    np.testing.assert_array_equal(stack[1].dequantize(), values[1])
    items = 0, -1, jnp.int32(2), slice(1, None), (1, 0), (slice(2), 1)

    @jax.jit
    def run(stack):
      parts = [stack[item] for item in items] + list(stack)
      return [(part.dequantize(), jnp.zeros(part.shape)) for part in parts]

    expected = [values[item] for item in items] + list(values)
    for (part, shape), value in zip(run(stack), expected, strict=True):
      self.assertEqual(shape.shape, value.shape)
      np.testing.assert_array_equal(part, value)
    for index in ((0, 0, 1), (slice(None), slice(None), 0)):
      with self.assertRaisesRegex(TypeError, "taken whole.*of the kernel"):
        stack[index]
    with self.assertRaisesRegex(IndexError, "index 3 is out of bounds"):
      stack[3]
    with self.assertRaisesRegex(TypeError, "QuantizedWeight; pass its array"):
      jp.stack([stack, stack])


class CallTest(parameterized.TestCase):
  """What products contract is seen in the code that makes them."""

  def test_names_need_say_nothing(self):
    params = {
      "a": spec(64, 96),
      "b": spec(32, 96),
      "c": spec(3, 32, 64),
      "d": spec(64, 4, 16),
      "e": spec(4, 16, 64),
      "f": spec(5, 64, 64),
      "in_turn": spec(2, 64, 64),
      "unused": spec(64, 64),
      "tied": spec(96, 64),
      "looked_up": spec(64, 64),
      "layers_second": spec(32, 1, 64),
      "layers_in_the_middle": spec(64, 3, 64),
      "both_ways": spec(64, 64),
    }

    def call(p):
      x = jnp.tanh(p["looked_up"][jnp.arange(7)] @ p["a"])
      x += p["tied"][jnp.arange(7)] @ p["tied"].T
      x = jax.jit(lambda x, b: x @ b.T)(x, p["b"].astype(jnp.float32))
      x += p["b"][0, 0]
      x, _ = jax.lax.scan(lambda x, c: ((x @ c)[:, :32], None), x, p["c"])
      q = jnp.einsum("td,dhs->ths", jnp.tile(x, (1, 2)), p["d"])
      y = jnp.einsum("ths,hsd->td", q, p["e"])
      sizes = jnp.array([1, 2, 0, 4, 0], jnp.int32)
      y = jax.lax.ragged_dot(y, p["f"], sizes)
      for layer in p["in_turn"]:
        y = y @ layer
      x = jnp.einsum("ltk,kln->ltn", x[None], p["layers_second"])
      x = jnp.einsum(
        "ltk,kln->ltn", jnp.tile(x, (3, 1, 1)), p["layers_in_the_middle"]
      )
      return y @ p["both_ways"] @ p["both_ways"].T, x

    params_q, report = jp.quantize_params(
      params, "mxfp8", call=call, min_size=0
    )
    self.assertEqual(params_q["f"].kernel_shape, (64, 64))  # of each expert
    found = entries(report)
    for path, contracting in (
      ("a", (0,)),
      ("c", (1,)),
      ("d", (0,)),
      ("e", (0, 1)),
      ("f", (1,)),
      ("in_turn", (1,)),
    ):
      with self.subTest(path):
        self.assertEqual(found[path], contracting)
    for path, reason in (
      ("b", "call also uses it in slice"),
      ("unused", "do not use it"),
      ("tied", "call also uses it in "),
      ("looked_up", "call also uses it in "),
      (
        "layers_in_the_middle",
        "its dimension 1 counts layers or experts, and is not a leading one;"
        " store the array with that dimension first",
      ),
      ("both_ways", "contract different dimensions"),
    ):
      with self.subTest(path):
        self.assertIn(reason, found[path])

  def test_it_knows_what_conventions_know(self):
    module = nn.MultiHeadDotProductAttention(num_heads=4)
    x = jnp.ones((2, 3, 64))
    params = types(module, x)
    _, by_name = jp.quantize_params(params, "mxfp8")
    _, seen = jp.quantize_params(
      params, "mxfp8", call=lambda p: module.apply(p, x)
    )
    self.assertLen(seen.quantized, 4)
    self.assertEqual(seen.quantized, by_name.quantized)
    make = lambda key: eqx.nn.MLP(64, 64, 64, 1, key=key)
    model = eqx.filter_eval_shape(make, jax.random.key(0))
    _, seen = jp.quantize_params(model, "mxfp8", call=lambda m: m(x[0, 0]))
    self.assertEqual(entries(seen)["layers/1/weight"], (1,))

  def test_it_must_be_a_function(self):
    with self.assertRaisesRegex(TypeError, "call must be a function"):
      jp.quantize_params({}, "mxfp8", call="model")


class WhereTest(parameterized.TestCase):
  def quantize(self, where, **params):
    return jp.quantize_params(params, "mxfp8", where=where)

  def test_an_axis_is_taken_and_dimensions_before_it_are_layers(self):
    for shape, axis, lead, contracting in (
      ((64, 96), 0, 0, (0,)),
      ((64, 96), -1, 0, (1,)),
      ((3, 64, 96), 1, 1, (1,)),
      ((3, 64, 96), 2, 1, (2,)),
      ((64, 4, 8), 0, 0, (0,)),
      ((4, 16, 96), (0, 1), 0, (0, 1)),
      ((64, 96), np.int64(0), 0, (0,)),
      ((3, 64, 96), (np.int32(1),), 1, (1,)),
    ):
      with self.subTest(shape=shape, axis=axis):
        params_q, report = jp.quantize_params(
          {"odd": spec(*shape)}, "nvfp4", where=lambda p, axis=axis: axis
        )
        self.assertEqual(report.entries[0].contracting, contracting)
        self.assertEqual(params_q["odd"].shape, shape)
        array = getattr(params_q["odd"], "array", params_q["odd"])
        self.assertEqual(
          array.global_scale.size, np.prod(shape[:lead], initial=1)
        )

  def test_an_axis_must_be_an_integer(self):
    for axis in ((0.5,), ("a",), (None,)):
      with (
        self.subTest(axis=axis),
        self.assertRaisesRegex(
          TypeError, "quantize_params: where must return integers as axes of up"
        ),
      ):
        self.quantize(lambda p, axis=axis: axis, up=spec(64, 96))

  def test_it_is_told_what_is_known(self):
    seen = {}

    def where(p):
      seen[p.path] = (p.contracting, p.is_default, p.shape, p.reason)
      return p.is_default or "head" in p.path

    _, report = self.quantize(
      where,
      lm_head={"kernel": spec(64, 64)},
      up={"kernel": spec(64, 96), "bias": spec(96)},
    )
    self.assertEqual(seen["up/kernel"], ((0,), True, (64, 96), ""))
    self.assertEqual(seen["lm_head/kernel"][:2], ((0,), False))
    self.assertIn("last layer", seen["lm_head/kernel"][3])
    self.assertEqual(seen["up/bias"][0], None)
    self.assertLen(report.quantized, 2)

  def test_a_format_is_that_of_the_array(self):
    params_q, _ = self.quantize(
      lambda p: "nvfp4" if "down" in p.path else p.is_default,
      down={"kernel": spec(64, 64)},
      up={"kernel": spec(64, 64)},
    )
    self.assertEqual(params_q["down"]["kernel"].format, jp.NVFP4)
    self.assertEqual(params_q["up"]["kernel"].format, jp.MXFP8)

  def test_what_cannot_be_is_an_error(self):
    for answer, shape, error, message in (
      (None, (64, 64), TypeError, "got None for odd"),
      (
        True,
        (64, 64),
        ValueError,
        r"of odd of shape \(64, 64\), got True "
        r"\(the contracting axis cannot be inferred from its name\); return",
      ),
      (2, (64, 64), ValueError, r"axes of odd of shape \(64, 64\).*got 2"),
      ((0, 1), (64, 64), ValueError, "not all of them"),
      (0, (40, 64), ValueError, "contracting size, 40, is not a multiple"),
    ):
      with (
        self.subTest(answer=answer),
        self.assertRaisesRegex(error, message),
      ):
        self.quantize(lambda p, answer=answer: answer, odd=spec(*shape))
    with self.assertRaisesRegex(TypeError, "where must be a function"):
      self.quantize("kernel", odd=spec(64, 64))
    for size in ("a", -1, 0.5):
      with self.assertRaisesRegex(
        TypeError, f"min_size must be .*got {size!r}"
      ):
        jp.quantize_params({"w": spec(64, 64)}, "mxfp8", min_size=size)

  def test_a_tree_of_which_nothing_is_quantized_warns(self):
    with self.assertWarnsRegex(UserWarning, "none of 1 arrays was quantized"):
      self.quantize(None, odd=spec(64, 64))
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      self.quantize(None, kernel=spec(64, 64))

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`accept_quantized` and models of linen, nnx and equinox, also on meshes."""

import pickle
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl.testing import parameterized
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing import contract, folders
from jaxplugin.testing.meshes import explicit
from jaxplugin.testing.models import dequantized, normal


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    y = nn.LayerNorm()(x)
    y = nn.MultiHeadDotProductAttention(num_heads=4, name="attention")(y, y)
    y = nn.gelu(nn.Dense(128, name="up")(x + y))
    return x + nn.Dense(64, name="down", use_bias=False)(y), None


class Decoder(nn.Module):
  """Tied embeddings, layers in a scan that are computed again backward."""

  @nn.compact
  def __call__(self, tokens):
    embed = nn.Embed(32, 64)
    scanned = nn.scan(
      nn.remat(Block),
      variable_axes={"params": 0},
      split_rngs={"params": True},
      length=2,
      in_axes=nn.broadcast,
    )
    x, _ = scanned(name="middle")(embed(tokens), None)
    return embed.attend(x)


def decoder():
  tokens = jax.device_put(np.arange(6, dtype=np.int32).reshape(2, 3))
  types = jax.eval_shape(Decoder().init, jax.random.key(0), tokens)
  params = jax.tree.map(lambda x: np.asarray(normal(*x.shape)) / 8, types)
  return jax.device_put(params), tokens


class FrameworksTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("error", ".*quantize.*", UserWarning)

  def assert_close(self, actual, expected):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * scale)

  @pytest.mark.full
  def test_decoder_of_linen(self):
    params, tokens = decoder()
    params_q, report = jp.quantize_params(params, "nvfp4")
    self.assertLen(report.quantized, 6)
    call = jax.jit(jp.accept_quantized(Decoder().apply))
    self.assert_close(
      call(params_q, tokens), Decoder().apply(dequantized(params_q), tokens)
    )
    hlo = call.lower(params_q, tokens).compile().as_text()
    self.assertEqual(hlo.count('custom_call_target="jaxplugin_ragged_dot'), 6)
    self.assertNotIn("jaxplugin_dequantize", hlo)
    for shape in ("64,128", "128,64", "64,64"):
      self.assertNotIn(f"f32[{shape}]", hlo)
      self.assertNotIn(f"f32[2,{shape}]", hlo)

  def test_model_of_nnx_is_an_argument_and_its_state_changes(self):
    class Model(nnx.Module):
      def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(
          num_heads=4, in_features=64, decode=False, rngs=rngs
        )
        self.out = nnx.Linear(64, 96, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

      def __call__(self, x):
        self.calls[...] += 1
        return self.out(x + self.attention(x))

    model, x = Model(nnx.Rngs(0)), normal(2, 3, 64)
    model_q, report = jp.quantize_params(model, "mxfp8")
    self.assertLen(report.quantized, 5)
    expected = nnx.jit(Model.__call__)(dequantized(model_q), x)
    call = nnx.jit(jp.accept_quantized(lambda model, x: model(x)))
    self.assert_close(call(model_q, x), expected)
    self.assertEqual(model_q.calls[...], 1)
    self.assertIsInstance(model_q.out.kernel.get_value(), jp.QuantizedWeight)
    graph, state = nnx.split(model_q)
    merged = jax.jit(
      jp.accept_quantized(lambda state, x: nnx.merge(graph, state)(x))
    )
    self.assert_close(merged(state, x), expected)
    # An argument without quantized weights may change too.
    graph, weights, rest = nnx.split(model_q, nnx.Param, ...)

    @jax.jit
    @jp.accept_quantized
    def split(weights, rest, x):
      model = nnx.merge(graph, weights, rest)
      return model(x), model.calls[...]

    y, calls = split(weights, rest, x)
    self.assert_close(y, expected)
    self.assertEqual(calls, 2)

  def test_module_of_equinox_is_the_function_or_an_argument(self):
    model = eqx.nn.MLP(64, 32, 96, 2, key=jax.random.key(0))
    model_q, report = jp.quantize_params(model, "nvfp4", min_size=0)
    self.assertLen(report.quantized, 3)
    x = normal(5, 64)
    plain = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
    expected = plain(dequantized(model_q), x)

    @eqx.filter_jit
    def as_function(model, x):
      return jax.vmap(jp.accept_quantized(model))(x)

    as_argument = eqx.filter_jit(
      jp.accept_quantized(lambda model, x: jax.vmap(model)(x))
    )
    for call in (as_function, as_argument):
      self.assert_close(call(model_q, x), expected)
      found = jp.explain(call, model_q, x)
      self.assertLen(found.dots, 3)
      self.assertEmpty(found.quantizations)

  @pytest.mark.full
  def test_metadata_of_linen_is_unboxed(self):
    kernel = nn.with_partitioning(nn.initializers.normal(), (None, "b"))
    module = nn.Dense(96, kernel_init=kernel)
    x = normal(5, 64)
    params_q, _ = jp.quantize_params(module.init(jax.random.key(0), x), "mxfp8")
    call = jax.jit(jp.accept_quantized(module.apply))
    self.assert_close(call(params_q, x), module.apply(dequantized(params_q), x))


class PlacedTest(parameterized.TestCase):
  """On several devices, on disk, and in exported functions."""

  def setUp(self):
    super().setUp()
    self.mesh = explicit.mesh(self, kind=AxisType.Auto, sizes=(2, 2))

  def sharding(self, *spec):
    return NamedSharding(self.mesh, P(*spec))

  def shardings(self, params):
    """Columns of what goes up, rows of what comes down, as heads do."""
    specs = {
      "up": (None, None, "b"),
      "down": (None, "b"),
      "query": (None, None, "b"),
      "out": (None, "b"),
    }

    def of(path, x):
      names = [getattr(key, "key", "") for key in path]
      found = [spec for name, spec in specs.items() if name in names]
      is_kernel = names[-1] == "kernel"
      return self.sharding(*(found[0] if found and is_kernel else ()))

    return jax.tree_util.tree_map_with_path(of, params)

  @pytest.mark.full
  def test_sharded_weights_have_their_bits_and_products(self):
    params, tokens = decoder()
    whole, _ = jp.quantize_params(params, "nvfp4")
    shardings = self.shardings(params)
    placed = jax.device_put(params, shardings)
    params_q, report = jp.quantize_params(placed, "nvfp4")
    self.assertLen(report.quantized, 6)
    contract.assert_same_bits(params_q, whole)
    by_shard = jp.shard(whole, shardings)
    contract.assert_same_bits(by_shard, whole)
    for a, b in zip(*map(jax.tree.leaves, (params_q, by_shard)), strict=True):
      self.assertTrue(a.sharding.is_equivalent_to(b.sharding, a.ndim))
    up = params_q["params"]["middle"]["up"]["kernel"].array
    self.assertEqual(up.values.sharding.shard_shape(up.shape), (2, 64, 64))
    out = params_q["params"]["middle"]["attention"]["out"]["kernel"].array
    self.assertEqual(out.scale.sharding.spec[2], "b")

    call = jp.accept_quantized(Decoder().apply)
    expected = Decoder().apply(dequantized(whole), tokens)
    sharded = jax.jit(
      call,
      in_shardings=(jp.shardings(whole, shardings), self.sharding("a")),
      out_shardings=self.sharding("a"),
    )
    actual = sharded(params_q, jax.device_put(tokens, self.sharding("a")))
    np.testing.assert_allclose(
      actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max()
    )

  def test_sharding_that_cuts_blocks_is_said(self):
    params = {"kernel": jax.device_put(normal(96, 64), self.sharding("b"))}
    with self.assertWarnsRegex(UserWarning, "arrays was quantized"):
      params_q, report = jp.quantize_params(params, "mxfp8")
    self.assertIn("whole blocks of 32", report.entries[0].reason)
    self.assertIs(params_q["kernel"], params["kernel"])

  def test_dimensions_stored_as_one_are_split_at_the_first(self):
    tree, _ = jp.quantize_params(
      {"w": normal(64, 4, 16)}, "mxfp8", where=lambda p: 0
    )
    spec = lambda *s: jp.shardings(tree, self.sharding(*s))["w"].array.values
    self.assertEqual(spec("a", "b").spec, P("b", "a"))
    with self.assertRaisesRegex(
      TypeError, "only dimension 1 of .*may be split"
    ):
      spec(None, None, "b")
    with self.assertRaisesRegex(TypeError, "at most 3 dimensions"):
      spec(None, None, None, "b")

  def test_checkpoints_are_restored_bitwise_to_another_sharding(self):
    params, _ = decoder()
    params_q, _ = jp.quantize_params(params, "nvfp4")
    path = folders.new(self) / "state"
    with ocp.StandardCheckpointer() as saver:
      saver.save(path, params_q)
    shardings = jp.shardings(params_q, self.shardings(params))
    target = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      params_q,
      shardings,
    )
    with ocp.StandardCheckpointer() as saver:
      restored = saver.restore(path, target)
    self.assertEqual(jax.tree.structure(restored), jax.tree.structure(params_q))
    contract.assert_same_bits(restored, params_q)
    up = restored["params"]["middle"]["up"]["kernel"].array
    self.assertEqual(up.values.sharding.spec[1], "b")

  def test_pickled_and_exported_weights_are_the_same(self):
    x, w = normal(5, 64), normal(64, 96)
    tree, _ = jp.quantize_params({"kernel": w}, "nvfp4")
    contract.assert_same_bits(pickle.loads(pickle.dumps(tree)), tree)
    call = jax.jit(jp.accept_quantized(lambda p, x: x @ p["kernel"]))
    exported = jax.export.export(call)(tree, x)
    again = jax.export.deserialize(bytearray(exported.serialize()))
    # The exported module has XLA's operations, which sum in another order.
    expected = call(tree, x)
    np.testing.assert_allclose(
      again.call(tree, x), expected, rtol=0, atol=1e-5 * np.abs(expected).max()
    )

  @pytest.mark.full
  def test_trees_are_mapped_stacked_and_sliced_by_layers(self):
    layers = [
      jp.quantize_params({"kernel": normal(64, 96) * i}, "nvfp4")[0]
      for i in (1, 2, 3)
    ]
    stack = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    self.assertEqual(stack["kernel"].shape, (3, 64, 96))
    again = jax.tree.map(lambda x: x[1], stack)
    contract.assert_same_bits(again, layers[1])
    np.testing.assert_array_equal(
      stack["kernel"].dequantize()[1], layers[1]["kernel"].dequantize()
    )

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_dots` finds a parameter however it is laid out, or warns."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from flax import nnx
from jax import lax

import jaxplugin as jp
from jaxplugin.jaxext import program
from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.rewriting import calls, sites, sources

RECIPE = jp.training.MXFP8_RECIPE
W = jax.device_put(np.ones((64, 64), np.float32))
X = jax.device_put(np.ones((8, 64), np.float32))
P = jax.sharding.PartitionSpec
MESH = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))


def dot(x, w):
  """As layers of flax call it: JAX adds a `pvary` here, and not in `@`."""
  return lax.dot_general(x, w, (((1,), (0,)), ((), ())))


def sharded(of_weight, spec=P(), check_vma=True):
  """A product in a `shard_map`, x sharded."""
  return jax.shard_map(
    lambda w, x: dot(x, of_weight(w)),
    mesh=MESH,
    in_specs=(spec, P("a")),
    out_specs=P("a"),
    check_vma=check_vma,
  )


@jax.custom_vjp
def cast(w):
  return w.astype(jnp.bfloat16)


cast.defvjp(lambda w: (cast(w), None), lambda _, g: (g.astype(jnp.float32),))


@jax.custom_jvp
def transposed(w):
  return w.T


transposed.defjvp(lambda primals, tangents: (primals[0].T, tangents[0].T))


@jax.custom_batching.custom_vmap
def mapped(w):
  return w.T


mapped.def_vmap(lambda size, batched, w: (w.swapaxes(1, 2), True))


TWICE = np.zeros(2, np.int32)


def products(x, w):
  return jnp.einsum("mk,gkn->gmn", x, w)


ROTATION = [(0, 1), (1, 0)]
# Each has one product, with a parameter that an operation laid out.
LAYOUTS = {
  "pvary": sharded(lambda w: w),
  "no_vma": sharded(lambda w: w, check_vma=False),
  "pcast": sharded(lambda w: lax.pcast(w, "a", to="varying")),
  "reduced": sharded(
    lambda w: lax.pcast(lax.pcast(w, "a", to="reduced"), "a", to="varying")
  ),
  "all_gather": sharded(
    lambda w: lax.all_gather(w, "a", tiled=True), P("a"), False
  ),
  "ppermute": sharded(lambda w: lax.ppermute(w, "a", ROTATION)),
  "all_to_all": sharded(
    lambda w: lax.all_to_all(w, "a", 1, 0, tiled=True), P("a"), False
  ),
  "result_of_shard_map": lambda w, x: dot(
    x,
    jax.shard_map(
      lambda w: lax.all_gather(w, "a", tiled=True),
      mesh=MESH,
      in_specs=P("a"),
      out_specs=P(),
      check_vma=False,
    )(w),
  ),
  "stack": lambda w, x: dot(x, jnp.stack([w, w])[1]),
  "concatenate": lambda w, x: dot(x, jnp.concatenate([w[:32], w[32:]])),
  "unstack": lambda w, x: dot(x, jnp.unstack(w[None])[0]),
  "tile": lambda w, x: dot(x, jnp.tile(w, (1, 2))),
  "pad": lambda w, x: dot(x, jnp.pad(w, ((0, 0), (0, 64)))),
  "roll": lambda w, x: dot(x, jnp.roll(w, 3, 0)),
  "take": lambda w, x: dot(x, jnp.take(w[None], 0, axis=0)),
  "index": lambda w, x: dot(x, w[None][x[0, 0].astype(int)]),
  "take_several": lambda w, x: products(x, jnp.take(w[None], TWICE, axis=0)),
  "index_several": lambda w, x: products(x, w[None][TWICE]),
  "device_put": lambda w, x: dot(x, jax.device_put(w)),
  "barrier": lambda w, x: dot(x, lax.optimization_barrier((x, w))[1]),
  "stop_gradient": lambda w, x: dot(x, lax.stop_gradient(w)),
  "name": lambda w, x: dot(x, jax.ad_checkpoint.checkpoint_name(w, "w")),
  "reduce_precision": lambda w, x: dot(x, lax.reduce_precision(w, 8, 7)),
  "copy": lambda w, x: dot(x, jnp.copy(w)),
  "reshape": lambda w, x: dot(x, w.reshape(4, 16, 64).reshape(64, 64)),
  "convert": lambda w, x: dot(x, w.astype(jnp.bfloat16).astype(jnp.float32)),
  "broadcast": lambda w, x: lax.dot_general(
    jnp.stack([x, x]),
    jnp.broadcast_to(w, (2, 64, 64)),
    (((2,), (1,)), ((0,), (0,))),
  ),
  "custom_vjp": lambda w, x: dot(x.astype(jnp.bfloat16), cast(w)),
  "custom_jvp": lambda w, x: dot(x, transposed(w)),
  "custom_vmap": lambda w, x: dot(x, mapped(w)),
  "jit": lambda w, x: dot(x, jax.jit(lambda w: w.T)(w)),
  "checkpoint": lambda w, x: dot(x, jax.checkpoint(lambda w: w.T)(w)),
  "constraint": lambda w, x: dot(
    x, lax.with_sharding_constraint(w, jax.NamedSharding(MESH, P()))
  ),
  "carry_of_fori_loop": lambda w, x: lax.fori_loop(
    0, 2, lambda i, c: (dot(c[0], c[1]), c[1]), (x, w)
  )[0],
  "carry_of_while_loop": lambda w, x: lax.while_loop(
    lambda c: c[0].sum() < 0, lambda c: (dot(c[0], c[1]), c[1]), (x, w)
  )[0],
  "closure": lambda w, x: jax.jit(lambda x: dot(x, w))(x),
}
# Those that a derivative in a jitted function goes through, and that have one.
NOT_DIFFERENTIATED = ("stop_gradient", "custom_vmap", "carry_of_while_loop")
# Names in some of the supported versions of JAX.
NOT_IN_ALL_VERSIONS = {
  *("closed_call", "reduced_vary_cast", "reduced_vary_cast_p"),
  *("vary_unreduced_cast", "vary_unreduced_cast_p"),
}
# Those whose operations are seen one by one, without a trace that keeps them.
EAGER = ("pvary", "stack", "custom_vjp", "take", "device_put")


def all_of(rows):
  return lambda w, x: [LAYOUTS[name](w, x).sum() for name in rows]


def not_taken(rows, seen):
  """Names of rows whose product was left."""
  assert len(seen) == len(rows), (len(seen), len(rows))
  return [
    (name, site.reason)
    for name, site in zip(rows, seen, strict=True)
    if site.recipe is None
  ]


class LayoutsTest(absltest.TestCase):
  def test_parameter_is_found_in_any_layout(self):
    rows = list(LAYOUTS)
    with sites.recording() as record:
      jax.make_jaxpr(jp.quantize_dots(all_of(rows), RECIPE))(W, X)
    self.assertEqual(not_taken(rows, [x.site for x in record.sites]), [])

  def test_parameter_is_found_in_an_inner_derivative(self):
    rows = [name for name in LAYOUTS if name not in NOT_DIFFERENTIATED]
    f = all_of(rows)
    step = jax.jit(jax.grad(lambda w, x: sum(map(jnp.float32, f(w, x)))))
    with sites.recording() as record:
      jax.make_jaxpr(jp.quantize_dots(step, RECIPE))(W, X)
    self.assertEqual(not_taken(rows, [x.site for x in record.sites]), [])

  def test_parameter_is_found_outside_of_jit(self):
    rows = [name for name in LAYOUTS if name in EAGER]
    for w in W, np.asarray(W):
      with sites.recording() as record:
        jp.quantize_dots(all_of(rows), RECIPE)(w, X)
      self.assertEqual(not_taken(rows, [x.site for x in record.sites]), [])

  def test_operations_have_the_names_that_jax_gives_them(self):
    names = sources.LAYOUTS | program.CALLS | calls.FOLLOWED
    found = {p.name for p in binding_private._primitives(names)}
    self.assertContainsSubset(names - found, NOT_IN_ALL_VERSIONS)

  def test_a_row_of_an_embedding_is_no_parameter(self):
    def look_up(w, x):
      two = jnp.take(w, jnp.array([1, 2]), axis=0)
      matrices = jnp.einsum("gmk,kn->gmn", w[None][TWICE], w)
      return dot(two, w), jnp.take(w, 1, axis=0) @ w, matrices

    with sites.recording() as record:
      jax.make_jaxpr(jp.quantize_dots(look_up, RECIPE))(W, X)
    self.assertEqual([x.site.weight for x in record.sites], ["rhs"] * 3)


def ragged(w, x):
  numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
  return lax.ragged_dot_general(x, w[:8], jnp.array([3, 5]), numbers)


def convolution(w, x):
  return lax.conv_general_dilated(
    x.reshape(1, 8, 8, 8), w.reshape(8, 8, 8, 8), (1, 1), "SAME"
  )


@jax.custom_batching.custom_vmap
def mapped_dot(w, x):
  return dot(x, w)


mapped_dot.def_vmap(lambda size, batched, w, x: (x @ w, True))


@jax.custom_jvp
def squared(w, x):
  return dot(x, w) ** 2


@squared.defjvp
def _(primals, tangents):
  (w, x), (dw, dx) = primals, tangents
  return squared(w, x), 2 * dot(x, w) * (dot(x, dw) + dot(dx, w))


def quantized(f):
  return jp.quantize_dots(f, RECIPE)


class WarningsTest(parameterized.TestCase):
  def warned(self, f, *args, **kwargs):
    """The text of the one warning of a trace, empty without one."""
    with warnings.catch_warnings(record=True) as found:
      warnings.simplefilter("always")
      jax.make_jaxpr(jp.quantize_dots(f, RECIPE, **kwargs))(*args)
    self.assertLessEqual(len(found), 1)
    for warning in found:
      self.assertIs(warning.category, jp.NotQuantizedWarning)
    return "".join(str(warning.message) for warning in found)

  @parameterized.named_parameters(
    ("k", lambda w, x: dot(x[:, :60], w[:60]), "size, 60, is not a multiple"),
    ("ragged", ragged, "it contracts the ragged dimension"),
    ("convolution", convolution, "it is a convolution"),
    ("argument", lambda x, w: dot(w, x * 2), "Pass params="),
    ("dtype", lambda w, x: dot(x.astype(int), w.astype(int)), "lhs is int32"),
    ("custom_vmap", mapped_dot, "inside custom_vmap_call"),
    ("nothing", lambda w, x: w.sum(), "found no matmul"),
    ("jit", jax.jit(lambda w, x: dot(x, w * 2)), "took 0 of 1 matmul"),
  )
  def test_a_function_of_which_nothing_is_taken_warns(self, f, reason):
    self.assertIn(reason, self.warned(f, W, X))

  def test_products_of_one_reason_are_one_line(self):
    f = lambda w, x: [dot(x[:, :60], w[:60]) for _ in range(3)]
    text = self.warned(f, W, X)
    self.assertIn("took 0 of 3 matmuls", text)
    self.assertIn(", and 2 more: ", text)
    self.assertEqual(text.count("\n"), 2)

  @parameterized.named_parameters(
    ("taken", lambda w, x: dot(x, w), 0),
    ("attention_beside", lambda w, x: dot(x, w) @ x.T, 0),
    ("second_argument", lambda x, w: dot(x, w), 1),
  )
  def test_a_function_of_which_something_is_taken_does_not(self, f, position):
    args = (X, W) if position else (W, X)
    self.assertEqual(self.warned(f, *args, params=position), "")

  def test_a_jitted_derivative_warns_neither_at_its_second_call(self):
    step = jax.jit(
      lambda w, x: (jax.grad(lambda w: dot(x, w).sum())(w), x @ x.T)
    )
    self.assertEqual(self.warned(step, W, X), "")
    self.assertEqual(self.warned(step, W, X), "")

  @parameterized.named_parameters(
    ("twice", lambda q: q(lambda w, x: dot(x, w))),
    ("in_jit", lambda q: jax.jit(q(lambda w, x: dot(x, w)))),
    ("in_grad", lambda q: jax.grad(q(lambda w, x: dot(x, w).sum()))),
    ("in_remat", lambda q: jax.checkpoint(q(lambda w, x: dot(x, w)))),
    ("next_to_attention", lambda q: q(lambda w, x: dot(x, w) @ x.T)),
    ("linear", lambda q: lambda w, x: jp.linear(x, jp.quantize(w, "mxfp8"))),
    (
      "jitted_linear",
      lambda q: jax.jit(lambda w, x: jp.linear(x, jp.quantize(w, "mxfp8"))),
    ),
    (
      "ragged",
      lambda q: (
        lambda w, x: jp.ragged_dot(
          x, jp.quantize(w[None], "mxfp8"), jnp.array([8])
        )
      ),
    ),
  )
  def test_a_function_whose_matmuls_are_quantized_already_does_not(self, f):
    self.assertEqual(self.warned(f(quantized), W, X), "")

  def test_quantized_weights_of_an_inner_transformation_count(self):
    f = jp.accept_quantized(lambda w, x: dot(x, w) + x)
    weight = jp.quantize(W, "mxfp8", axis=0)
    self.assertNotIn("nothing is quantized", self.warned(f, weight, X))

  def test_matmuls_that_a_rule_replaces_in_a_gradient_are_named(self):
    loss = lambda w, x: squared(w, x).sum()
    quantize = lambda f: jp.quantize_dots(f, RECIPE)
    (site,) = jp.explain(quantize(loss), W, X).sites
    self.assertTrue(site.is_taken)
    self.assertIn("a gradient runs the function's rule", site.outcome)
    reason = "inside a custom_jvp function|in the rule of a custom derivative"
    for gradient in (
      jax.grad(quantize(loss)),
      jax.grad(quantize(jax.jit(loss))),
      quantize(jax.grad(loss)),
      quantize(jax.jit(jax.grad(jax.jit(loss)))),
    ):
      with self.assertWarnsRegex(jp.NotQuantizedWarning, reason):
        found = jp.explain(gradient, W, X)
      self.assertEmpty(found.dots)
      self.assertFalse(any(site.is_taken for site in found.sites))

  @parameterized.named_parameters(
    ("jit", lambda f: jax.jit(f)),
    (
      "scan",
      lambda f: (
        lambda w, x: lax.scan(lambda x, _: (f(w, x), None), x, length=2)[0]
      ),
    ),
  )
  def test_matmuls_that_fwd_differentiates_when_traced_are_named(self, traced):
    function = lambda w, x: dot(x, w)
    derived = jax.custom_vjp(function)
    derived.defvjp(
      lambda *args: jax.vjp(function, *args), lambda vjp, g: vjp(g)
    )
    loss = lambda w, x: traced(derived)(w, x).sum()
    gradient = jax.value_and_grad(jp.quantize_dots(loss, RECIPE), (0, 1))
    with self.assertWarnsRegex(jp.NotQuantizedWarning, "fwd of its custom_vjp"):
      found = jp.explain(gradient, W, X)
    self.assertEmpty(found.dots)
    (reason,) = (site.reason for site in found.sites if not site.is_taken)
    self.assertIn("call quantize_dots inside of fwd", reason)

    function = jp.quantize_dots(function, RECIPE)
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      found = jp.explain(gradient, W, X)
    self.assertLen(found.dots, 3)

  @parameterized.named_parameters(
    ("grad", lambda f: jax.grad(f, (0, 1))),
    ("jvp", lambda f: lambda *args: jax.jvp(f, args, args)),
  )
  def test_a_jitted_derivative_by_both_operands_names_the_remedy(self, derive):
    derived = derive(lambda w, x: dot(x, w).sum())
    text = self.warned(jax.jit(derived), W, X)
    self.assertIn("call quantize_dots inside of jax.jit instead", text)
    self.assertEqual(self.warned(derived, W, X), "")

  def test_explain_lists_products_that_are_never_taken(self):
    f = lambda w, x: (dot(x, w), ragged(w, x))
    text = jp.explain(jp.quantize_dots(f, RECIPE), W, X).details()
    self.assertIn("took 1 of 2 matmuls", text)
    self.assertIn("left: it contracts the ragged dimension", text)


def layer_of_nnx():
  return nnx.Linear(64, 64, rngs=nnx.Rngs(0))


def loss_of(model, x):
  return (model(x) ** 2).mean()


def step_of(loss):
  def step(model, x):
    gradients = nnx.state(nnx.grad(loss)(model, x))
    new = jax.tree.map(lambda w, g: w - g, nnx.state(model), gradients)
    nnx.update(model, new)

  return step


class Decoder(nnx.Module):
  """Two equal layers that one line calls, and a last layer."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(2)])
    self.lm_head = nnx.Linear(64, 64, rngs=rngs)

  def __call__(self, x):
    for layer in self.layers:
      x = jax.jit(lambda layer, x: layer(x))(layer, x)
    return self.lm_head(x)


class PathsTest(parameterized.TestCase):
  """Outside of all scopes, the path of the weight is the name of a matmul."""

  def sites(self, f, *args, **options):
    return jp.explain(jp.quantize_dots(f, RECIPE, **options), *args).sites

  @parameterized.parameters(
    (lambda model, x: loss_of(model, x),),
    (lambda model, x: nnx.value_and_grad(loss_of)(model, x),),
    (lambda model, x: jax.checkpoint(loss_of)(model, x),),
  )
  def test_layers_of_nnx_have_names_and_its_last_layer_stays(self, f):
    found = {
      (site.layer, site.is_taken)
      for site in self.sites(f, Decoder(), X)
      if site.layer
    }
    self.assertEqual(
      found,
      {
        ("layers/0/kernel", True),
        ("layers/1/kernel", True),
        ("lm_head/kernel", False),
      },
    )

  def test_rows_of_explain_have_the_path(self):
    found = jp.explain(jp.quantize_dots(loss_of, RECIPE), Decoder(), X)
    self.assertEqual(
      [dot.layer for dot in found], ["layers/0/kernel", "layers/1/kernel"]
    )
    self.assertEqual([x.layer for x in found.others], ["lm_head/kernel"])

  def test_a_scan_over_stacked_weights_keeps_the_path(self):
    def stack(tree, x):
      return lax.scan(lambda x, w: (dot(x, w.T), None), x, tree["up"]["w"])[0]

    (site,) = self.sites(stack, {"up": {"w": jnp.ones((3, 64, 64))}}, X)
    self.assertEqual((site.layer, site.is_taken), ("up/w", True))

  def test_a_last_layer_inside_another_scope_stays(self):
    def f(tree, x):
      with jax.named_scope("model"):
        return dot(x, tree["lm_head"])

    (site,) = self.sites(f, {"lm_head": W}, X)
    self.assertEqual((site.layer, site.is_taken), ("model", False))
    self.assertEqual(site.parameter, "lm_head")
    self.assertIn("its name contains 'head'", site.reason)

  def test_where_gets_the_path(self):
    found = []
    where = lambda site: found.append((site.name, site.parameter)) or True
    f = lambda tree, x: dot(dot(x, tree["a"]), tree["b"][0])
    self.sites(f, {"a": W, "b": [W]}, X, where=where)
    self.assertEqual(found, [("a", "a"), ("b/0", "b/0")])


class OtherArgumentsTest(parameterized.TestCase):
  """A weight in an argument that params= does not name is a warning."""

  @parameterized.parameters(
    (lambda f: f, "argument 1: pass params=1 if"),
    (jax.jit, "argument 1: pass params=1 if"),
    (lambda f: lambda x, w: f(x, w=w), "argument 'w': pass params='w' if"),
  )
  def test_model_after_the_batch_is_a_warning(self, wrap, expected):
    def model(x, w):
      for matrix in w["layers"]:
        x = jax.jit(dot)(x, matrix)
      return x

    f = wrap(jp.quantize_dots(model, RECIPE))
    with self.assertWarnsRegex(
      jp.NotQuantizedWarning,
      rf"left 2 matmuls:\n.*and 1 more: .*{expected}",
    ):
      jax.eval_shape(f, W, {"layers": [W, W, W]})

  def assert_silent(self, f, *args, **options):
    with warnings.catch_warnings():
      warnings.simplefilter("error", jp.NotQuantizedWarning)
      jax.eval_shape(jp.quantize_dots(f, RECIPE, **options), *args)

  def test_a_cache_of_keys_is_silent(self):
    def cached(w, x, keys):
      queries = jnp.broadcast_to(dot(x, w), (2, 8, 64))
      return jnp.einsum("nqd,nkd->nqk", queries, keys)

    self.assert_silent(cached, W, X, jnp.ones((2, 16, 64)))

  def test_where_decides_silently(self):
    f = lambda x, w: dot(dot(x, w[0]), w[1])
    where = lambda site: site.is_default
    self.assert_silent(f, W, [W, W], where=where)


class VariablesOfNnxTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (
      "quantize_dots",
      lambda f: jp.quantize_dots(f, RECIPE),
      r"nnx\.jit\(quantize_dots\(step, recipe\)\)",
    ),
    ("accelerate", jp.accelerate, r"nnx\.grad\(accelerate\(loss\)\)"),
  )
  @pytest.mark.sample(1)
  def test_a_transform_of_nnx_inside_is_explained(self, transform, remedy):
    inside = transform(nnx.jit(step_of(loss_of)))
    with self.assertRaisesRegex(TypeError, remedy):
      inside(layer_of_nnx(), X)

  @pytest.mark.full
  def test_the_orders_that_errors_name_work(self):
    for name, step in {
      "quantize_dots": jp.quantize_dots(step_of(loss_of), RECIPE),
      "accelerate": step_of(jp.accelerate(loss_of)),
    }.items():
      with self.subTest(name):
        model, before = layer_of_nnx(), layer_of_nnx().kernel.get_value()
        nnx.jit(step)(model, X)
        self.assertFalse((model.kernel.get_value() == before).all())

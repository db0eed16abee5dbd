# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations of a program have their layer, source and number of runs."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.jaxext import program

P = jax.sharding.PartitionSpec
X = jnp.ones((8, 8), jnp.float32)


def dots(function, *args):
  jaxpr = jax.make_jaxpr(function)(*(args or (X,)))
  return [
    operation
    for operation in program.operations(jaxpr.jaxpr)
    if operation.eqn.primitive.name == "dot_general"
  ]


def square(x):
  with jax.named_scope("square"):
    return x @ x


class TripsTest(parameterized.TestCase):
  def scanned(self, body, length):
    def function(x):
      return jax.lax.scan(lambda x, _: (body(x), None), x, length=length)[0]

    return function

  @parameterized.parameters((1,), (7,))
  def test_scan_multiplies_the_trips(self, length):
    (dot,) = dots(self.scanned(square, length))
    self.assertEqual(dot.trips, length)
    (dot,) = dots(self.scanned(jax.jit(self.scanned(square, length)), 3))
    self.assertEqual(dot.trips, 3 * length)

  def test_trips_of_while_are_not_known_not_even_around_a_scan(self):
    def loop(body):
      return lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, body, x)

    for function in (
      loop(square),
      loop(self.scanned(square, 3)),
      self.scanned(loop(square), 3),
    ):
      (dot,) = dots(function)
      self.assertIsNone(dot.trips)

  def test_branches_are_conditional(self):
    function = lambda x: square(jax.lax.cond(x[0, 0] > 0, square, square, x))
    self.assertEqual(
      [(dot.is_conditional, dot.trips) for dot in dots(function)],
      [(True, 1), (True, 1), (False, 1)],
    )

  def test_gradient_of_a_scan_runs_as_often(self):
    function = self.scanned(square, 5)
    found = dots(jax.grad(lambda x: function(x).sum()))
    self.assertEqual([dot.trips for dot in found], [5, 5, 5])
    self.assertEqual(
      [dot.phase for dot in found], ["forward", "backward", "backward"]
    )


class PlaceTest(parameterized.TestCase):
  def test_scopes_around_functions_and_inside_are_one_path(self):
    def function(x):
      with jax.named_scope("Block_0"):
        return jax.jit(square)(x)

    (dot,) = dots(function)
    self.assertEqual(dot.layer, "Block_0/square")
    self.assertRegex(dot.source, r"program_test\.py:\d+ \(square\)$")

  @parameterized.parameters("outer", "square")
  def test_transformations_are_no_part_of_the_path(self, name):
    def function(x):
      with jax.named_scope(name):
        return jax.jit(jax.vmap(jnp.sin))(jax.checkpoint(square)(x)).sum()

    found = dots(jax.grad(function))
    # A layer inside a layer of the same name is a different layer.
    self.assertEqual({dot.layer for dot in found}, {f"{name}/square"})

  def test_what_checkpoint_repeats_is_recomputed(self):
    function = lambda x: jnp.sin(square(jnp.sin(square(x)))).sum()
    phases = [dot.phase for dot in dots(jax.grad(jax.checkpoint(function)))]
    self.assertEqual(phases.count("recomputed"), 2)
    self.assertEqual(phases.count("backward"), 4)

  def test_own_name_of_a_pass_is_no_layer(self):
    def function(x):
      with jax.named_scope("layer"), jax.named_scope("wgrad"):
        return x @ x

    (dot,) = dots(function)
    self.assertEqual((dot.layer, dot.phase), ("layer", "wgrad"))

  def test_line_is_the_models_and_not_its_librarys(self):
    from flax import linen

    def model(x):
      return linen.Dense(4).init_with_output(jax.random.key(0), x)[0]

    (dot,) = dots(model)
    self.assertRegex(dot.source, r"program_test\.py:\d+ \(.*model\)")
    self.assertEqual(dot.layer, "Dense")

  def test_line_is_that_of_each_call_of_the_package(self):
    def function(x):
      y = jp.quantize(x, jp.MXFP8)
      return y, jp.quantize(x, jp.MXFP8)

    jaxpr = jax.make_jaxpr(function)(jnp.ones((4, 32)))
    found = [
      operation.source
      for operation in program.operations(jaxpr.jaxpr)
      if operation.eqn.primitive.name == "block_quantize"
    ]
    first = function.__code__.co_firstlineno
    self.assertLen(found, 2)
    for source, line in zip(found, (first + 1, first + 2), strict=True):
      self.assertRegex(source, rf"program_test\.py:{line} \(.*function\)")

  def test_line_of_what_a_function_of_the_package_or_of_jax_makes(self):
    dot = jp.dot_general(recipe=jp.training.MXFP8_RECIPE, weight="rhs")
    numbers = (((1,), (0,)), ((), ()))

    def function(x, w):
      y = dot(x, w, numbers)
      z = dot(y, w, numbers)
      return jnp.matmul(z, w)

    args = jnp.ones((4, 32)), jnp.ones((32, 32))
    first = function.__code__.co_firstlineno
    # JAX traces the derivative's function separately, without these lines.
    for transformed in (function, jax.jit(function), jax.checkpoint(function)):
      jaxpr = jax.make_jaxpr(transformed)(*args)
      found = [
        operation.source
        for operation in program.operations(jaxpr.jaxpr)
        if operation.eqn.primitive.name in ("block_scaled_dot", "dot_general")
      ]
      self.assertLen(found, 3)
      for i, source in enumerate(found, 1):
        line = rf"program_test\.py:{first + i} \(.*function\)"
        self.assertRegex(source, line)


class DevicesTest(parameterized.TestCase):
  def mesh(self, shape=(4, 2)):
    types = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(shape, ("x", "y"), axis_types=types)

  def test_one_device_without_shardings(self):
    (dot,) = dots(jax.jit(square))
    self.assertEqual((dot.num_devices, dot.is_local), (1, False))

  def test_shardings_of_functions_and_constraints_count(self):
    sharding = jax.sharding.NamedSharding(self.mesh(), P("x"))
    constrained = lambda x: square(
      jax.lax.with_sharding_constraint(x, sharding)
    )
    for function in (
      jax.jit(square, in_shardings=sharding),
      constrained,
      lambda x: square(x) + jax.jit(jnp.sin, out_shardings=sharding)(x),
    ):
      (dot,) = dots(function)
      self.assertEqual(dot.num_devices, 8)

  def test_explicit_axes_count(self):
    types = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=types)
    with jax.set_mesh(mesh):
      x = jax.reshard(X, P("x", None))
      (dot,) = dots(lambda x, y: x @ y, x, X)
    self.assertEqual(dot.num_devices, 8)

  @parameterized.parameters((("x", "y"), True, 1), (("x",), False, 8))
  def test_shard_map_over_all_axes_is_local(self, names, is_local, number):
    function = jax.shard_map(
      lambda x: x @ x.T,
      mesh=self.mesh(),
      in_specs=P("x"),
      out_specs=P("x"),
      axis_names=set(names),
      check_vma=False,
    )
    (dot,) = dots(function)
    self.assertEqual((dot.is_local, dot.num_devices), (is_local, number))

  def test_kernels_are_not_looked_into(self):
    from jax.experimental import pallas

    def kernel(x_ref, y_ref):
      y_ref[...] = jnp.dot(x_ref[...], x_ref[...])

    shape = jax.ShapeDtypeStruct(X.shape, np.float32)
    function = pallas.pallas_call(kernel, out_shape=shape, interpret=True)
    self.assertEmpty(dots(function))

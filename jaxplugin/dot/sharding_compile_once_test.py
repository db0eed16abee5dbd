# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Partitioned programs: equal calls are compiled once, by any process."""

import contextlib
import json
import os
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.jaxext import partitioner_private
from jaxplugin.plugins import records, registry
from jaxplugin.runtime import fingerprints
from jaxplugin.testing import acme_backend, contract, folders
from jaxplugin.testing.measured import measured_tables

DEVICES = 4
SIZE = 64
# This package's own may be younger than the test's process.
SOURCES = mock.patch.object(fingerprints, "_sources", lambda: "digest")
OTHER_VERSION = (fingerprints, "_versions", lambda: ("0",))
OTHER_TARGET = jp.Target(name="other", platform="cpu", core_count=3)
NAMES = re.compile(r'@jaxplugin_partitioned\(.*backend_config = "([^"]*)"')

# A process that compiles a training step with JAX's compilation cache.
PROCESS = """
  import json, os, sys, time
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["JAX_COMPILATION_CACHE_DIR"] = sys.argv[1]
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
  import jax
  jax.config.update("jax_num_cpu_devices", 4)
  import numpy as np
  from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
  from jaxplugin import jaxext
  # A file that was just written is not known to be what runs.
  jaxext.IMPORTED_NS = time.time_ns() + 10**12
  import jaxplugin as jp
  from jaxplugin.jaxext import partitioner_private

  mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
  split = NamedSharding(mesh, P("x"))
  rng = np.random.default_rng(0)
  x, w = (
    jax.device_put(rng.normal(size=(64, 64)).astype(np.float32), split)
    for _ in range(2)
  )
  dot = jp.dot_general("mxfp8", "mxfp8")
  numbers = (((1,), (0,)), ((), ()))
  step = jax.jit(jax.grad(lambda w: (dot(x, w, numbers) ** 2).sum()))
  events = []
  jax.monitoring.register_event_listener(
    lambda name, **_: events.append(name.rsplit("/", 1)[-1])
  )
  compiled = step.lower(w).compile()
  print(json.dumps({
    "hits": events.count("cache_hits"),
    "misses": events.count("cache_misses"),
    "shares": len(partitioner_private._shares),
    "sum": float(np.asarray(compiled(w), np.float64).sum()).hex(),
  }))
"""


def sharded_spec(rows=SIZE, dtype=jnp.float32):
  """The type of an array [rows, SIZE] whose rows are split over the CPUs."""
  devices = jax.devices()[:DEVICES]
  mesh = jax.make_mesh((DEVICES,), ("x",), (AxisType.Auto,), devices=devices)
  split = NamedSharding(mesh, P("x"))
  return jax.ShapeDtypeStruct((rows, SIZE), dtype, sharding=split)


def loss_of(dot):
  def loss(ws, x):
    for w in ws:
      x = dot(x, w, (((1,), (0,)), ((), ())))
    return jnp.sum(x**2)

  return jax.jit(jax.grad(loss, (0, 1)))


def lower(dot, count=1):
  """The gradients of `count` products, one after the other."""
  spec = sharded_spec()
  return loss_of(dot).lower([spec] * count, spec)


def names_in(lowered):
  return NAMES.findall(lowered.as_text())


def num_operations(lowered):
  return lowered.as_text().count(" = ")


class CompileOnceTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(SOURCES)

  @parameterized.parameters(("mxfp8", 10), ("nvfp4", 20))
  def test_more_products_are_few_operations_and_no_more_shares(
    self, name, limit
  ):
    own = jp.dot_general(name, name)
    few, many = lower(own, 2), lower(own, 12)
    self.assertEqual(set(names_in(few)), set(names_in(many)))
    self.assertGreater(len(names_in(many)), 12 * 3)
    plain = num_operations(lower(jax.lax.dot_general, 12))
    plain -= num_operations(lower(jax.lax.dot_general, 2))
    more = num_operations(many) - num_operations(few)
    self.assertLessEqual(more, limit * plain)


def dot(x, w):
  return jp.block_scaled_dot(jp.quantize(x, "mxfp8"), jp.quantize(w, "mxfp8"))


class NamesTest(parameterized.TestCase):
  """Whatever decides what a device computes is in the name of the call."""

  def setUp(self):
    super().setUp()
    self.enter_context(SOURCES)

  def names(self, fn=dot, dtype=jnp.float32, size=SIZE):
    spec = sharded_spec(size, dtype)
    # What quantizes lhs quantizes rhs, and is a function of the module.
    found = set(names_in(jax.jit(lambda *args: fn(*args)).lower(spec, spec)))
    self.assertLen(found, 2)
    return found

  def test_equal_calls_have_equal_names(self):
    self.assertEqual(self.names(), self.names())

  def test_shapes_types_and_options_decide(self):
    self.assertTrue(self.names().isdisjoint(self.names(size=128)))
    self.assertNotEqual(self.names(), self.names(dtype=jnp.bfloat16))
    xla = lambda x, w: jp.block_scaled_dot(
      jp.quantize(x, "mxfp8"), jp.quantize(w, "mxfp8"), implementation="xla"
    )
    self.assertNotEqual(self.names(), self.names(xla))

  @parameterized.named_parameters(
    ("an_option_of_jax", lambda: jax.numpy_rank_promotion("warn")),
    ("x64", lambda: jax.enable_x64(True)),
    ("a_table", lambda: jp.tuning(measured_tables.table())),
    ("no_table", lambda: jp.tuning(None)),
    ("a_target", lambda: jp.use_target(OTHER_TARGET)),
    ("a_variable", lambda: mock.patch.dict(os.environ, JAXPLUGIN_OTHER="1")),
    ("the_version", lambda: mock.patch.object(*OTHER_VERSION)),
  )
  @pytest.mark.sample(1)
  def test_what_it_is_lowered_under_decides(self, context):
    before = self.names()
    with context():
      inside = self.names()
    self.assertTrue(before.isdisjoint(inside))
    self.assertEqual(self.names(), before)

  def test_tables_of_the_trace_decide(self):
    spec = sharded_spec()
    names = []
    for tables in ((), (measured_tables.table(),)):
      with jp.tuning(*tables or (None,)):
        traced = jax.jit(lambda x, w: dot(x, w)).trace(spec, spec)
      names.append(set(names_in(traced.lower())))
    self.assertTrue(names[0].isdisjoint(names[1]))

  def test_backends_of_others_have_no_names_that_last(self):
    supports = lambda problem, target: "supports no call"
    backend = acme_backend.create(lambda call: None, supports=supports)
    found = records.UsableBackend(backend=backend, origin="acme 1.0")
    usable = lambda operation=None: () if operation else (found,)
    with mock.patch.object(registry, "usable", usable):
      first, second = self.names(), self.names()
    self.assertLen(first & second, 1)  # what quantizes

  def test_a_share_is_traced_under_what_its_call_was_lowered_under(self):
    seen = []
    share = partitioner_private._share

    def noted(*args):
      seen.append(jax.config.jax_numpy_rank_promotion)
      return share(*args)

    spec = sharded_spec()
    # A number that no compilation cache has met, because a hit traces nothing.
    new = float(np.random.default_rng().random())
    with jax.numpy_rank_promotion("raise"):
      lowered = jax.jit(lambda x, w: dot(x, w) + new).lower(spec, spec)
    partitioner_private.forget_shares()
    with mock.patch.object(partitioner_private, "_share", noted):
      lowered.compile()
    self.assertNotEmpty(seen)
    self.assertEqual(set(seen), {"raise"})
    self.assertEqual(jax.config.jax_numpy_rank_promotion, "allow")


class TwoProcessesTest(absltest.TestCase):
  @pytest.mark.full
  def test_the_second_one_finds_what_the_first_one_compiled(self):
    folder = folders.new(self)
    found = []
    for _ in range(2):
      with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))
        os.environ.pop("XLA_FLAGS", None)
        done = contract.run_program(PROCESS, folder)
      self.assertEqual(done.returncode, 0, done.stderr)
      found.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = found
    self.assertEqual((first["hits"], first["misses"]), (0, 1))
    self.assertGreater(first["shares"], 0)
    self.assertEqual((second["hits"], second["misses"]), (1, 0))
    self.assertEqual(second["shares"], 0)
    self.assertEqual(second["sum"], first["sum"])
    self.assertTrue(np.isfinite(float.fromhex(first["sum"])))

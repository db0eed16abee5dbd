# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Facts about a module that a lowering rule reads."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.extend import core as extend_core
from jax.interpreters import mlir

from jaxplugin.core import formats, targets
from jaxplugin.quantization import backends, problems
from jaxplugin.runtime import lowering

P = jax.sharding.PartitionSpec
WITHOUT = targets.named_target("cpu")
WITH = dataclasses.replace(WITHOUT, cpu_kernels="avx2")
X = jax.ShapeDtypeStruct((8, 64), jnp.float32)
PROBLEM = problems.DequantizationProblem(
  shape=X.shape,
  dtype=formats.E4M3,
  format=formats.MXFP8,
  axis=1,
  out_dtype=np.dtype(np.float32),
)

# An identity whose lowering rule appends its arguments to `noted`.
noted = []
probe_p = extend_core.Primitive("lowering_test_probe")
probe_p.def_abstract_eval(lambda x, *, target: x)


def _lower_probe(ctx, x, *, target):
  module = lowering.module_of(ctx)
  device = lowering.resolve_target(target, module.platforms[0])
  told = backends.explained(PROBLEM, module, device)
  serve = told.implementation == "cpu"
  assert serve != bool(told.reason)
  noted.append((serve, lowering.is_partitioned(ctx)))
  return [x]


mlir.register_lowering(probe_p, _lower_probe)


def probe(x):
  return probe_p.bind(x, target=targets.overriding_target())


def mesh(shape=(8,), names=("x",)):
  return jax.make_mesh(
    shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names)
  )


def sharded(mesh, spec=P("x")):
  sharding = jax.sharding.NamedSharding(mesh, spec)
  return jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)


class LoweringTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    noted.clear()
    self.enter_context(targets.use_target(WITH))

  def lower(self, function, x, platforms=("cpu",)):
    """Returns whether kernels serve the module, and if it is partitioned."""
    noted.clear()
    traced = jax.jit(lambda x: function(x)).trace(x)
    traced.lower(lowering_platforms=platforms)
    (told,) = noted
    return told

  def test_ptxas_that_is_here_is_not_assumed_of_what_is_exported(self):
    h100 = targets.named_target("h100")
    here = dataclasses.replace(h100, ptxas_version=(13, 4, 59))
    named = targets.named_target("h100", ptxas="13.5")
    detect = mock.patch.object(targets, "detect_target", lambda _: here)
    resolve = functools.partial(lowering.resolve_target, platform="cuda")
    self.enter_context(detect)
    self.assertEqual(resolve(None), here)
    with lowering.exporting(lowering.Export(targets={})):
      self.assertEqual(resolve(None), h100)
      self.assertEqual(resolve(named), named)
    with lowering.exporting(lowering.Export(targets={"cuda": named})):
      self.assertEqual(resolve(None), named)

  def test_kernels_serve_a_module_for_one_cpu_that_nothing_partitions(self):
    two = mesh((4, 2), ("x", "y"))
    of_all, of_some = (
      jax.shard_map(probe, mesh=two, in_specs=s, out_specs=s, axis_names=axes)
      for s, axes in ((P("x", "y"), {"x", "y"}), (P("x"), {"x"}))
    )
    abstract = jax.sharding.AbstractMesh((8,), ("x",))
    for name, function, x, platforms, expected in (
      ("one cpu", probe, X, ("cpu",), (True, False)),
      ("cuda", probe, X, ("cuda",), (False, False)),
      ("rocm", probe, X, ("rocm",), (False, False)),
      ("tpu", probe, X, ("tpu",), (False, False)),
      ("a choice", probe, X, ("cpu", "cuda"), (False, False)),
      ("8 devices", probe, sharded(mesh()), ("cpu",), (False, True)),
      ("no devices", probe, sharded(abstract), ("cpu",), (False, True)),
      ("1 device", probe, sharded(mesh((1,))), ("cpu",), (True, False)),
      ("shard_map of all axes", of_all, sharded(two), ("cpu",), (True, False)),
      ("shard_map of some", of_some, sharded(two), ("cpu",), (False, True)),
    ):
      with self.subTest(name):
        self.assertEqual(self.lower(function, x, platforms), expected)

  def test_kernels_do_not_serve_a_target_without_them(self):
    with targets.use_target(WITHOUT):
      self.assertEqual(self.lower(probe, X), (False, False))

  def test_target_of_another_platform_leaves_the_detected_cpu(self):
    with targets.use_target(targets.named_target("b200")):
      serve, _ = self.lower(probe, X)
    detected = targets.detect_target("cpu").cpu_kernels is not None
    self.assertEqual(serve, detected)

  @parameterized.parameters(
    (X,),
    (jax.ShapeDtypeStruct(jax.export.symbolic_shape("a, 64"), jnp.float32),),
  )
  def test_kernels_do_not_serve_an_exported_module(self, x):
    jax.export.export(jax.jit(probe), platforms=("cpu",))(x)
    self.assertEqual([serve for serve, _ in noted], [False])


class ResolveTargetTest(absltest.TestCase):
  def test_override_holds_for_its_own_platform_only(self):
    b200 = targets.named_target("b200")
    self.assertIs(lowering.resolve_target(b200, "cuda"), b200)
    self.assertIs(lowering.resolve_target(WITH, "cpu"), WITH)
    for override in (None, b200):
      self.assertEqual(
        lowering.resolve_target(override, "cpu"),
        targets.detect_target("cpu"),
      )


class ExportTest(absltest.TestCase):
  def test_platforms_of_an_export_share_the_number_of_a_call(self):
    export = lowering.Export(targets={}, num_platforms=2)
    numbers = lambda: [export.next_number() for _ in range(4)]
    export.begin("listening")  # compiles for one platform
    self.assertEqual(numbers(), [0, 1, 2, 3])
    export.begin("exporting")
    self.assertEqual(numbers(), [0, 0, 1, 1])

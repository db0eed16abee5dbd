# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""XLA's GPU compiler runs without a GPU, for the given target."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import NamedSharding, PartitionSpec

import jaxplugin as jp
from jaxplugin.lab.compilation import deviceless
from jaxplugin.testing import installed

B200 = jp.named_target("b200", cudnn="9.13")
needs_compiler = installed.needs("jax_cuda13_plugin")


def spec(shape, dtype=jnp.bfloat16, sharding=None):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@needs_compiler
class CompileTest(parameterized.TestCase):
  @parameterized.parameters("a100", "l40s", "h200", "b200", "rtx5090", "gb10")
  def test_devices_are_those_of_the_target(self, name):
    target = jp.named_target(name)
    (device,) = deviceless.mesh(target).devices
    major, minor = target.compute_capability
    self.assertEqual(device.compute_capability, f"{major}.{minor}")
    self.assertEqual(device.core_count, target.core_count)
    self.assertEqual(
      device.shared_memory_per_block_optin, target.shared_memory_bytes
    )

  def test_shardings_of_the_mesh_are_kept_and_others_replicated(self):
    mesh = deviceless.mesh(B200, (2, 2), ("x", "y"))
    columns = NamedSharding(mesh, PartitionSpec(None, "y"))
    local = jnp.ones((256, 64))

    def f(x, w):
      return x @ w

    compiled = deviceless.compile(
      f, spec((64, 256), sharding=columns), local, target=B200, mesh=mesh
    )
    text = compiled.as_text()
    self.assertIn("num_partitions=4", text)
    self.assertIn("[64,128]", text)  # the share of x
    self.assertRegex(text, "all-(gather|reduce)|reduce-scatter")

  def test_gpus_of_many_hosts_are_one_mesh(self):
    mesh = deviceless.mesh(B200, (4, 8), ("x", "y"), hosts=4)
    self.assertEqual(mesh.devices.shape, (4, 8))
    hosts = [{d.process_index for d in row} for row in mesh.devices]
    self.assertEqual(hosts, [{0}, {1}, {2}, {3}])

  def test_pytrees_are_taken(self):
    def f(tree):
      return tree["a"] + tree["b"][0]

    tree = {"a": spec((8,)), "b": [1.0]}
    text = deviceless.compile(f, tree, target=B200).as_text()
    self.assertIn("bf16[8]", text)


@needs_compiler
class CompilationCacheTest(absltest.TestCase):
  def test_programs_are_not_read_from_it(self):
    x = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    new = float(np.random.default_rng().random())  # not in any cache
    with warnings.catch_warnings(action="error"):
      for _ in range(2):
        deviceless.compile(lambda x: x * new, x, target=B200)


class ErrorTest(parameterized.TestCase):
  @parameterized.parameters("cpu", "mi300x")
  def test_other_platforms_are_refused(self, name):
    with self.assertRaisesRegex(ValueError, f"NVIDIA GPU, got {name}"):
      deviceless.mesh(jp.named_target(name))

  @parameterized.parameters(
    "compute_capability",
    "core_count",
    "shared_memory_bytes",
    "l2_bytes",
    "memory_bandwidth",
  )
  def test_missing_figure_is_named(self, field):
    with self.assertRaisesRegex(ValueError, f"must have {field}"):
      deviceless.gpu_target_config(dataclasses.replace(B200, **{field: None}))

  @parameterized.parameters(("a100", False), ("h100", True), ("b200", True))
  def test_accelerated_features_start_with_hopper(self, name, has_them):
    text = deviceless.gpu_target_config(jp.named_target(name))
    self.assertEqual("ACCELERATED_FEATURES" in text, has_them)

  @parameterized.parameters(0, 3)
  def test_hosts_divide_the_gpus(self, hosts):
    with self.assertRaisesRegex(ValueError, rf"\(2, 4\), got {hosts}"):
      deviceless.mesh(B200, (2, 4), ("x", "y"), hosts=hosts)

  @parameterized.parameters(
    lambda target: deviceless.compile(jnp.tanh, spec((8,)), target=target),
    lambda target: deviceless.compile_module(None, target=target),
    deviceless.gpu_target_config,
    deviceless.mesh,
  )
  def test_name_of_a_target_is_refused(self, function):
    with self.assertRaisesRegex(TypeError, r"pass jp.named_target\('h200'\)"):
      function("h200")

  @pytest.mark.full
  def test_missing_compiler_says_what_to_install(self):
    # A process in which JAX finds no CUDA plugin.
    code = """
import sys
sys.modules["jax_plugins.xla_cuda13"] = None
import jaxplugin as jp
from jaxplugin.lab.compilation import deviceless
try:
  deviceless.mesh(jp.named_target("b200"))
except deviceless.DevicelessError as error:
  print(error)
"""
    out = subprocess.run(
      [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    self.assertIn("jaxplugin[deviceless]", out)
    self.assertIn("JAX_PLATFORMS=cpu", out)

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Two explicit mesh axes over eight devices, and arrays on them."""

from __future__ import annotations

import math
import unittest
from typing import Any, Final

import jax
import numpy as np
from absl.testing import parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

SIZES: Final = (2, 4)
NUM_DEVICES: Final = 8


def need_devices(test: unittest.TestCase, count: int = NUM_DEVICES) -> None:
  """Skips the test if there are fewer than `count` devices."""
  if jax.device_count() < count:
    test.skipTest(f"needs {count} devices, has {jax.device_count()}")


def mesh(
  test: unittest.TestCase,
  axes: tuple[str, str] = ("a", "b"),
  kind: AxisType = AxisType.Explicit,
  sizes: tuple[int, int] = SIZES,
) -> Any:
  """Returns a mesh; skips the test if there are fewer devices."""
  need_devices(test, math.prod(sizes))
  return jax.make_mesh(sizes, axes, axis_types=(kind,) * 2)


def put(mesh: Any, tree: Any, spec: P) -> Any:
  """Places arrays, each split by `spec` along dimensions larger than 1.

  One spec fits the values, scale and global scale of a `ScaledArray`: entries
  beyond an array's rank are ignored. The arrays pass through NumPy, because JAX
  compiles a program for each array that it cuts on a device.
  """

  def one(x: Any) -> jax.Array:
    own = P(
      *(a if n > 1 else None for a, n in zip(spec, x.shape, strict=False))
    )
    return jax.device_put(np.asarray(x), NamedSharding(mesh, own))

  return jax.tree.map(one, tree)


class ExplicitTestCase(parameterized.TestCase):
  """Has `self.mesh`, of axes "a" (2) and "b" (4), and puts arrays on it."""

  kind: AxisType = AxisType.Explicit
  mesh: Any

  def setUp(self) -> None:
    super().setUp()
    self.mesh = mesh(self, kind=self.kind)

  def put(self, tree: Any, spec: P) -> Any:
    return put(self.mesh, tree, spec)


class AutoTestCase(ExplicitTestCase):
  """The same of automatic axes."""

  kind = AxisType.Auto


class InsideTestCase(ExplicitTestCase):
  """Its tests run inside of `jax.set_mesh(self.mesh)`."""

  def setUp(self) -> None:
    super().setUp()
    self.enterContext(jax.set_mesh(self.mesh))

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares decoded tilings with the positions of devices, counted in NumPy."""

import math

import jax
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import NamedSharding

from jaxplugin.jaxext import jax_private, mesh_axes
from jaxplugin.testing.meshes import explicit

NUM_DEVICES = explicit.NUM_DEVICES
MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2), (6,), (3, 2), (12,), (2, 6), (24,))


def random_tiling(rng, sizes):
  """Returns (counts, device numbers) for parts of mesh axes.

  Each dimension gets some of the prime factors of the axes, in any order.
  """
  primes = []
  for size in sizes:
    for prime in (2, 3):
      while size % prime == 0:
        size //= prime
        primes.append(prime)
  dims = [[], [], []]
  for part in rng.permutation(len(primes)):
    dims[rng.integers(3)].append(part)
  numbers = np.arange(math.prod(primes)).reshape(primes)
  numbers = numbers.transpose([part for dim in dims for part in dim])
  counts = [math.prod(primes[part] for part in dim) for dim in dims]
  return tuple(counts[:2]), numbers.reshape(-1)  # the last part is replicated


def tile_of(device, digits):
  tile = 0
  for digit in digits:
    tile = tile * digit.size + device // digit.stride % digit.size
  return tile


class DigitsTest(parameterized.TestCase):
  @parameterized.parameters(*MESHES)
  def test_digits_lead_each_device_to_its_tile(self, *sizes):
    rng = np.random.default_rng(math.prod(sizes))
    for _ in range(50):
      counts, numbers = random_tiling(rng, sizes)
      digits = mesh_axes.digits_of_tiles(counts, numbers)
      copies = len(numbers) // math.prod(counts)
      for place, device in enumerate(numbers):
        tile = np.unravel_index(place // copies, counts)
        self.assertEqual(tuple(tile_of(device, d) for d in digits), tile)

  def test_an_order_that_no_digits_count_in_has_none(self):
    for numbers in ([0, 1, 3, 2], [1, 0, 2, 3], [0, 2, 1, 4, 3, 5]):
      numbers = np.array(numbers)
      digits = mesh_axes.digits_of_tiles((len(numbers),), numbers)
      self.assertEqual(digits, ())


class RefineTest(absltest.TestCase):
  def test_axes_are_cut_where_digits_end_and_no_finer(self):
    digits = mesh_axes.digits_of_tiles((2,), np.arange(8))  # the major half
    self.assertEqual(mesh_axes.refine((8,), [digits[0]]), (8, 4, 1))
    self.assertEqual(mesh_axes.refine((2, 4), [digits[0]]), (8, 4, 1))
    self.assertEqual(mesh_axes.refine((4, 2), [digits[0]]), (8, 4, 2, 1))

  def test_what_does_not_go_together_is_left_out(self):
    by_two = mesh_axes.digits_of_tiles((2,), np.arange(6))[0]
    by_three = mesh_axes.digits_of_tiles((3,), np.arange(6))[0]
    self.assertEqual(mesh_axes.refine((6,), [by_two, by_three]), (6, 3, 1))
    self.assertEqual(mesh_axes.refine((6,), [by_three, by_two]), (6, 2, 1))


class DecodeTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    explicit.need_devices(self)
    self.devices = tuple(jax.devices()[:NUM_DEVICES])

  def tiling(self, counts, numbers):
    return jax_private.DeviceTiling(
      counts=counts,
      device_numbers=numbers,
      devices=self.devices[: len(numbers)],
    )

  def rows_of_devices(self, mesh, spec):
    """Returns the slices of a 64 x 64 array on each device."""
    sharding = NamedSharding(mesh, mesh_axes.partition_spec(spec))
    return sharding.devices_indices_map((64, 64))

  @parameterized.parameters((8,), (2, 4), (4, 2), (2, 2, 2))
  def test_one_mesh_serves_all_arrays(self, *sizes):
    rng = np.random.default_rng(0)
    mesh = jax.sharding.Mesh(
      np.array(self.devices).reshape(sizes), tuple("abc"[: len(sizes)])
    )
    for _ in range(20):
      tilings = [random_tiling(rng, sizes) for _ in range(3)]
      fine, specs = mesh_axes.decode(
        mesh, [self.tiling(*t) for t in tilings], (2, 2, 2)
      )
      self.assertEqual(tuple(fine.devices.flat), self.devices)
      for (counts, numbers), spec in zip(tilings, specs, strict=True):
        held = self.rows_of_devices(fine, spec)
        copies = NUM_DEVICES // math.prod(counts)
        for place, number in enumerate(numbers):
          tile = np.unravel_index(place // copies, counts)
          starts = [i * (64 // n) for i, n in zip(tile, counts, strict=True)]
          slices = held[self.devices[number]]
          self.assertEqual([s.start or 0 for s in slices], starts)

  def test_without_a_mesh_the_devices_are_one(self):
    empty = jax.sharding.Mesh(np.empty((), dtype=object), ())
    tiling = self.tiling((4, 1), np.arange(NUM_DEVICES))
    fine, (spec, unknown) = mesh_axes.decode(empty, [tiling, None], (2, 1))
    self.assertEqual(fine.devices.shape, (4, 2))
    self.assertEqual(spec, (fine.axis_names[:1], ()))
    self.assertEqual(unknown, ((),))

  def test_axes_of_the_mesh_stay_apart(self):
    mesh = jax.sharding.Mesh(np.array(self.devices).reshape(2, 4), ("a", "b"))
    tiling = self.tiling((8, 1), np.arange(NUM_DEVICES))
    fine, (spec,) = mesh_axes.decode(mesh, [tiling], (2,))
    self.assertEqual(fine.devices.shape, (2, 4))
    self.assertEqual(spec, (fine.axis_names, ()))

  def test_of_tilings_that_no_mesh_suits_the_first_ones_count(self):
    mesh = jax.sharding.Mesh(np.array(self.devices[:6]), ("x",))
    tilings = [self.tiling((n, 1), np.arange(6)) for n in (2, 3, 6)]
    fine, specs = mesh_axes.decode(mesh, tilings, (2, 2, 2))
    self.assertEqual(fine.devices.shape, (2, 3))
    first, second = fine.axis_names
    self.assertEqual(specs, [((first,), ()), ((), ()), ((first, second), ())])

  def test_nothing_known_is_nothing_sharded(self):
    mesh = jax.sharding.Mesh(np.array(self.devices), ("x",))
    self.assertEqual(
      mesh_axes.decode(mesh, [None, None], (1, 2)), (mesh, [((),), ((), ())])
    )

  def test_tiles_in_an_order_of_no_mesh_are_not_sharded(self):
    mesh = jax.sharding.Mesh(np.array(self.devices), ("x",))
    numbers = np.array([0, 2, 1, 3, 4, 6, 7, 5])
    _, specs = mesh_axes.decode(mesh, [self.tiling((8, 1), numbers)], (2,))
    self.assertEqual(specs, [((), ())])


class GroupTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    explicit.need_devices(self)
    devices = np.array(jax.devices()[:NUM_DEVICES]).reshape(2, 1, 2, 2)
    kinds = jax.sharding.AxisType
    self.mesh = jax.sharding.Mesh(
      devices,
      ("a", "one", "m", "b"),
      axis_types=(kinds.Auto, kinds.Auto, kinds.Manual, kinds.Auto),
    )

  def order(self, numbers, counts=(2, 2), mesh=None):
    mesh = mesh or self.mesh
    return mesh_axes.group_of(
      mesh,
      jax_private.DeviceTiling(
        counts=counts,
        device_numbers=np.array(numbers),
        devices=tuple(mesh.devices.flat),
      ),
    )

  @parameterized.parameters(
    ((0, 1, 2, 3), ("a", "b")),
    ((0, 2, 1, 3), ("b", "a")),
  )
  def test_order_of_an_array_that_is_split_by_each_axis(self, numbers, names):
    group = self.order(numbers)
    self.assertEqual(group.mesh.axis_names, names)
    # The devices along "b" are neighbours in the program, in either order.
    collective = group.collective_mesh(group.mesh)
    self.assertEqual(collective.axis_names[-1], "b")
    self.assertEqual(collective.devices.shape, (2, 1, 2, 2))
    self.assertEqual(
      list(collective.devices.flat), list(self.mesh.devices.flat)
    )

  def test_an_axis_whose_parts_are_apart(self):
    kinds = jax.sharding.AxisType
    mesh = jax.sharding.Mesh(
      self.mesh.devices.reshape(4, 2),
      ("a", "m"),
      axis_types=(kinds.Auto, kinds.Manual),
    )
    # Positions 0, 1, 2, 3 along "a" have the device numbers 0, 2, 1, 3.
    group = self.order((0, 2, 1, 3), (4,), mesh)
    self.assertEqual(group.mesh.devices.shape, (2, 2))
    minor, major = group.mesh.axis_names
    self.assertEqual(group.parts, {"a": (major, minor)})
    tiling = jax_private.DeviceTiling(
      counts=(2, 1),
      device_numbers=np.arange(4),
      devices=tuple(mesh.devices.flat),
    )
    fine, (spec,) = mesh_axes.decode(group.mesh, [tiling], (2,))
    self.assertEqual(spec, ((minor,), ()))
    collective = group.collective_mesh(fine)
    self.assertEqual(collective.axis_names[:2], (major, minor))

  @parameterized.parameters(
    ((0, 1, 3, 2), (2, 2)),
    ((0, 1, 2, 3), (1, 1)),
    ((0, 1, 2, 3), (2,)),
  )
  def test_an_order_that_says_nothing_is_an_error(self, numbers, counts):
    with self.assertRaisesRegex(RuntimeError, r"\('a', 'b'\) of sizes \(2, 2"):
      self.order(numbers, counts)

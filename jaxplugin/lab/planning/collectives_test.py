# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes of collectives, against sums by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest, parameterized
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxplugin as jp
from jaxplugin.lab.compilation import deviceless
from jaxplugin.lab.planning import collectives
from jaxplugin.testing import installed

MESH = {"fsdp": 2, "tp": 4}
needs_compiler = installed.needs("jax_cuda13_plugin")


def of_lines(*lines, more="", mesh=MESH, partitions=8):
  body = "\n".join(f"  {line}" for line in lines)
  return collectives.of_text(
    f"HloModule m, is_scheduled=true, num_partitions={partitions}\n\n{more}\n"
    f"ENTRY main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n",
    mesh,
  )


class FormTest(parameterized.TestCase):
  @parameterized.parameters(
    # The result of a gather is whole, that of a scatter a share.
    ("f32[8,64]", "all-gather(p)", 8 * 64 * 4 * 3 / 4),
    ("(f32[2,64], f32[8,64])", "all-gather-start(p)", 8 * 64 * 4 * 3 / 4),
    (
      "((f32[2,64], /*index=1*/bf16[4]), (f32[8,64], bf16[16]))",
      "all-gather-start(p, q)",
      (8 * 64 * 4 + 16 * 2) * 3 / 4,
    ),
    ("f32[2,64]", "reduce-scatter(p)", 2 * 64 * 4 * 3),
    ("((f32[8,64]), f32[2,64])", "reduce-scatter-start(p)", 2 * 64 * 4 * 3),
    ("f32[8,64]", "all-reduce(p)", 8 * 64 * 4 * 2 * 3 / 4),
    ("f32[8,64]{1,0}", "all-reduce-start(p)", 8 * 64 * 4 * 2 * 3 / 4),
    ("(f32[8], pred[])", "all-reduce-start(p, q)", (8 * 4 + 1) * 2 * 3 / 4),
    ("(u8[8], u8[8], u8[8], u8[8])", "all-to-all(p, p, p, p)", 32 * 3 / 4),
    ("((u8[32]), u8[32])", "all-to-all-start(p)", 32 * 3 / 4),
    ("f4e2m1fn[32]", "all-gather(p)", 16 * 3 / 4),
    ("f8e4m3fn[32]", "all-gather(p)", 32 * 3 / 4),
    ("f32[8]", "collective-broadcast(p)", 32),
    ("f32[8]", "ragged-all-to-all(p)", 32),
  )
  def test_a_device_receives(self, shape, call, expected):
    found = of_lines(f"a = {shape} {call}, replica_groups=[2,4]<=[8]")
    self.assertEqual(collectives.received(found), expected)
    self.assertEqual({one.axes for one in found}, {("tp",)})
    self.assertEqual({one.group for one in found}, {4})

  @parameterized.parameters(
    ("f32[8]", "collective-permute(p)"),
    ("(f32[8], f32[8], u32[], u32[])", "collective-permute-start(p)"),
    ("((f32[8]), (f32[8]))", "collective-permute-start(p)"),
  )
  def test_what_is_permuted_is_received_once(self, shape, call):
    pairs = "{{0,4},{4,0},{1,5},{5,1}}"
    found = of_lines(f"a = {shape} {call}, source_target_pairs={pairs}")
    self.assertEqual(collectives.received(found), 32)
    self.assertEqual(found[0].axes, ("fsdp",))

  @parameterized.parameters(
    ("{{0,1,2,3},{4,5,6,7}}", ("tp",)),
    ("{{0,4},{1,5},{2,6},{3,7}}", ("fsdp",)),
    ("{}", ("fsdp", "tp")),
    ("[2,4]<=[8]", ("tp",)),
    ("[4,2]<=[2,4]T(1,0)", ("fsdp",)),
    ("[1,8]<=[8]", ("fsdp", "tp")),
    ("mesh['a'=2,'b'=4] {'b'}", ("tp",)),
    ("mesh['a'=2,'b'=4] {'a'}", ("fsdp",)),
    ("mesh['a'=8] {'a':(1)2}", ("fsdp",)),
    ("mesh['a'=8] {'a':(2)4}", ("tp",)),
    ("mesh[a=4,b=2, device_ids=([4,2]<=[2,4]T(1,0))] {b}", ("fsdp",)),
    ("mesh['a'=4,'b'=2, device_ids=(0,4,1,5,2,6,3,7)] {'a'}", ("tp",)),
    ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("fsdp",)),
    ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", ("tp",)),
    ("mesh['a'=2,'b'=4] {'b','a'}", ("fsdp", "tp")),
  )
  def test_axes_are_those_of_the_groups(self, groups, axes):
    found = of_lines(f"a = f32[8] all-gather(p), replica_groups={groups}")
    self.assertEqual(found[0].axes, axes)
    sizes = {("tp",): 4, ("fsdp",): 2, ("fsdp", "tp"): 8}
    self.assertEqual(found[0].group, sizes[axes])

  def test_groups_over_the_second_of_three_axes(self):
    groups = "[8,3]<=[2,3,4]T(2,0,1)"
    (found,) = of_lines(
      f"a = f32[8] all-gather(p), replica_groups={groups}",
      mesh={"dp": 2, "fsdp": 3, "tp": 4},
      partitions=24,
    )
    self.assertEqual(found.axes, ("fsdp",))

  def test_part_of_an_axis_has_its_name_and_its_own_size(self):
    line = "a = f32[8] all-gather(p), replica_groups=mesh['a'=8] {'a':(4)2}"
    (found,) = of_lines(line)
    self.assertEqual((found.axes, found.group), (("tp",), 2))
    self.assertEqual(found.num_bytes, 16)

  def test_groups_of_one_move_nothing(self):
    line = "a = f32[8] all-gather(p), replica_groups=[8,1]<=[8]"
    self.assertEqual(of_lines(line), ())

  def test_only_what_was_asked_for_is_summed(self):
    found = of_lines(
      "a = f32[8] all-gather(p), replica_groups=[2,4]<=[8]",
      "b = u8[8] all-gather(p), replica_groups=[4,2]<=[2,4]T(1,0)",
      "c = u8[8] all-reduce(p), replica_groups=[1,8]<=[8]",
    )
    self.assertEqual(collectives.received(found, dtype="f32"), 24)
    self.assertEqual(collectives.received(found, axis="fsdp"), 4 + 14)
    self.assertEqual(collectives.received(found, kind="all-gather"), 24 + 4)


class FlowTest(parameterized.TestCase):
  BODY = """
%inner (q: f32[8]) -> f32[8] {
  a = f32[8] all-gather(q), replica_groups=[2,4]<=[8]
}
%outer (q: f32[8]) -> f32[8] {
  w = f32[8] while(q), condition=%none, body=%inner, \
backend_config={"known_trip_count":{"n":"5"},"x":"1"}
}
%more (q: f32[8]) -> f32[8] {
  a = (f32[8], f32[16]) all-gather-start(q), replica_groups=[2,4]<=[8]
  b = f32[16] all-gather-done(a)
}
"""

  @parameterized.parameters(
    # Loops count as often as they run, or once if that is unknown.
    (
      'w = f32[8] while(p), body=%outer, backend_config={"known_trip_count":'
      '{"n":"3"}}',
      *(24 * 5 * 3, False),
    ),
    ("w = f32[8] while(p), condition=%none, body=%inner", 24, True),
    # The branch that moves most counts.
    (
      "c = f32[8] conditional(p), branch_computations={%inner, %more}",
      *(48, False),
    ),
    ("c = f32[8] call(p), to_apply=%inner", 24, False),
    ("c = f32[8] fusion(p), kind=kLoop, calls=%inner", 24, False),
    # What begins and ends counts once.
    (
      "c = ((f32[8]), f32[16], u32[]) async-start(p), calls=%more",
      *(48, False),
    ),
  )
  def test_what_runs_counts(self, line, received, is_bound):
    found = of_lines(line, more=self.BODY)
    self.assertEqual(collectives.received(found), received)
    self.assertEqual(any(one.is_bound for one in found), is_bound)


class ErrorTest(parameterized.TestCase):
  def test_another_mesh_is_refused(self):
    with self.assertRaisesRegex(ValueError, "partitions, 8, got {'a': 4}"):
      of_lines("a = f32[8] add(p, p)", mesh={"a": 4})

  def test_groups_that_are_not_known_are_refused(self):
    for groups in ("what", "{{0,1},{2,3,4}}"):
      with self.assertRaisesRegex(ValueError, "groups"):
        of_lines(f"a = f32[8] all-gather(p), replica_groups={groups}")


@needs_compiler
class CompiledTest(absltest.TestCase):
  @pytest.mark.lab
  def test_products_in_known_layouts(self):
    target = jp.named_target("b200", cudnn="9.13")
    mesh = deviceless.mesh(target, (2, 4), ("fsdp", "tp"))

    def spec(shape, *axes):
      sharding = NamedSharding(mesh, PartitionSpec(*axes))
      return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def keep(x, *axes):
      sharding = NamedSharding(mesh, PartitionSpec(*axes))
      return lax.with_sharding_constraint(x, sharding)

    def f(x, gathered, summed):
      """Thrice a weight is gathered over fsdp and x over tp; a sum over tp."""

      def body(x, w):
        y = jnp.tanh(keep(x, "fsdp", None) @ keep(w, None, None))
        return keep(y, "fsdp", "tp"), None

      x, _ = lax.scan(body, x, gathered)
      return x @ summed

    args = [
      spec((1024, 256), "fsdp", "tp"),
      spec((3, 256, 256), None, "fsdp", None),
      spec((256, 64), "tp", None),
    ]
    compiled = deviceless.compile(f, *args, target=target, mesh=mesh)
    found = collectives.of_compiled(compiled, mesh)
    self.assertEqual({one.dtype for one in found}, {"f32"})
    self.assertEqual({one.is_bound for one in found}, {False})
    expected = {
      ("fsdp", "all-gather"): 3 * 256 * 256 * 4 / 2,
      ("tp", "all-gather"): 3 * (1024 // 2) * 256 * 4 * 3 / 4,
      ("tp", "all-reduce"): (1024 // 2) * 64 * 4 * 2 * 3 / 4,
    }
    for (axis, kind), num_bytes in expected.items():
      self.assertEqual(
        collectives.received(found, axis=axis, kind=kind), num_bytes
      )
    self.assertEqual(collectives.received(found), sum(expected.values()))
    self.assertIn("dot_general", found[-1].source)

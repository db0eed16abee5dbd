# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules that the primitives of all operations share. Nothing is compiled."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized
from jax.extend import core as extend_core

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.operation import primitive
from jaxplugin.testing.meshes import explicit

# An identity whose lowering appends (platform, platforms of the module).
LOWERED = []
probe_p = extend_core.Primitive("operation_test_probe")


def _lower(context, *, target):
  del target
  LOWERED.append((context.target.platform, context.module.platforms))
  return lambda x: x


primitive.register(
  probe_p,
  who="probe",
  abstract_eval=lambda x, *, target: x,
  batch=lambda args, dims, *, target: (probe_p.bind(*args, target=None), dims),
  lower=_lower,
)

X = jax.ShapeDtypeStruct((32, 64), jnp.float32)
CPU = targets.Target(name="cpu", platform="cpu", cpu_kernels="avx2")


CUSTOM_CALL = re.compile(r"custom_call @(jaxplugin\w*)")


def weight(*batch):
  values = jnp.ones((*batch, 16, 64), jnp.float8_e4m3fn)
  scale = jnp.ones((*batch, 16, 2), jnp.float8_e8m0fnu)
  return jp.ScaledArray(values, scale, None, jp.MXFP8)


CALLS = {
  "quantize": lambda x: jp.quantize(x, jp.MXFP8).values,
  "block_scaled_dot": lambda x: jp.block_scaled_dot(x, weight()),
  "ragged_dot": lambda x: jp.ragged_dot(x, weight(2), jnp.array([16, 16])),
}


class PlatformsTest(parameterized.TestCase):
  def lower(self, function, *platforms):
    traced = jax.jit(function).trace(X)
    return traced.lower(lowering_platforms=platforms).as_text()

  def test_rule_of_each_platform_decides_for_its_target(self):
    LOWERED.clear()
    self.lower(lambda x: probe_p.bind(x, target=None), "cpu", "cuda")
    self.assertCountEqual(LOWERED, [("cpu", ("cpu",)), ("cuda", ("cuda",))])

  @parameterized.parameters(*CALLS)
  def test_module_for_two_platforms_has_kernels_of_each(self, name):
    with jp.use_target(CPU):
      text = self.lower(CALLS[name], "cpu", "cuda")
    self.assertIn("custom_call @jaxplugin", text)


class PartitionedTest(parameterized.TestCase):
  def lower(self, function, k):
    explicit.need_devices(self, 2)
    auto = (jax.sharding.AxisType.Auto,)
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("x",), axis_types=auto, devices=devices)
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))
    x = jax.ShapeDtypeStruct((32, k), jnp.float32, sharding=sharding)
    with jp.use_target(CPU):
      return jax.jit(function).lower(x).as_text()

  @parameterized.parameters("block_scaled_dot", "ragged_dot")
  def test_operation_that_devices_share_is_lowered_by_a_callback(self, name):
    text = self.lower(CALLS[name], 64)
    self.assertEqual(CUSTOM_CALL.findall(text), ["jaxplugin_partitioned"])


class ErrorTest(parameterized.TestCase):
  @parameterized.parameters("block_scaled_dot", "linear")
  def test_error_names_the_function_that_the_user_called(self, name):
    call, x = getattr(jp, name), jnp.ones((4, 64))
    w = weight()
    product = lambda values: call(
      x, jp.ScaledArray(values, w.scale, None, jp.MXFP8)
    )
    with self.assertRaisesRegex(
      NotImplementedError, f"^{name}: quantized values and block scales have no"
    ):
      jax.eval_shape(lambda values: jax.vjp(product, values), w.values)


@dataclasses.dataclass(frozen=True)
class _Side:
  name: str
  values: Any = None
  scale: Any = None

  def replace(self, **changes):
    return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call(primitive.OperationCall):
  ARRAYS = primitive.paths_of_two_sides("bias", "sizes")

  lhs: _Side
  rhs: _Side
  bias: Any = None
  sizes: Any = None
  activation: str | None = None


_CALL = _Call(
  lhs=_Side("lhs", [1]), rhs=_Side("rhs", [2], [3]), sizes=[4], activation="a"
)


class CallTest(absltest.TestCase):
  def test_arrays_are_those_that_are_not_none_in_order(self):
    self.assertEqual(
      list(_CALL.arrays().items()),
      [("lhs", [1]), ("rhs", [2]), ("rhs_scale", [3]), ("sizes", [4])],
    )

  def test_form_is_hashable_and_equal_whatever_the_arrays_are(self):
    other = _CALL.with_arrays(lhs=[9], rhs=[8], rhs_scale=[7], sizes=[6])
    self.assertEqual(hash(_CALL.form()), hash(other.form()))
    self.assertEqual(_CALL.form(), other.form())
    self.assertNotEqual(_CALL.form(), _CALL.replace(activation=None).form())
    self.assertNotEqual(_CALL.form(), _CALL.with_arrays(bias=[1]).form())
    self.assertNotEqual(_CALL.form(), _CALL.with_arrays(rhs_scale=None).form())

  def test_form_filled_with_its_arrays_is_the_call(self):
    self.assertEqual(_CALL.form().filled(_CALL.flatten()), _CALL)
    with self.assertRaises(ValueError):
      _CALL.form().filled([1, 2])

  def test_both_fields_of_a_side_change_at_once(self):
    changed = _CALL.with_arrays(lhs=[5], lhs_scale=[6], bias=[7])
    self.assertEqual(changed.lhs, _Side("lhs", [5], [6]))
    self.assertEqual(changed.rhs, _CALL.rhs)
    self.assertEqual(changed.bias, [7])
    with self.assertRaises(KeyError):
      _CALL.with_arrays(activation="b")

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A backend of another package, wherever implementations have names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.peers import dot_variants
from jaxplugin.lab.bench.peers import variants
from jaxplugin.testing import command_lines

ARGUMENTS = "--lhs mxfp8 --rhs mxfp4 -m 4 -n 64 -k 64"


class EntrancesTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.traced = []

    def emit(call):
      self.traced.append(call.problem)
      rows = call.as_rows()
      sums = jnp.einsum(
        "bmk,bnk->bmn",
        rows.lhs.dequantized().astype(jnp.float32),
        rows.rhs.dequantized().astype(jnp.float32),
        precision="highest",
      )
      return rows.finish(sums)

    jp.register_backend(
      jp.Backend(
        name="acme",
        api_version=1,
        platforms=("cpu",),
        supports=lambda problem, target: (
          f"is for m below 8, got m={problem.m}" if problem.m >= 8 else None
        ),
        emit=emit,
        summary="made for tests",
        notes=("it is slow",),
      )
    )
    self.addCleanup(jp.backends.unregister_backend, "acme")

  def operands(self, rows=4):
    rng = np.random.default_rng(0)
    x = rng.integers(-6, 7, (rows, 64)).astype(np.float32)
    w = rng.integers(-4, 5, (64, 64)).astype(np.float32)
    return x, w


def linear(x, w, name):
  return jp.linear(x, jp.quantize(w, "mxfp8"), implementation=name)


def scaled_dot(x, w, name, function=jp.scaled_dot):
  x, w = jp.quantize(x, "mxfp8"), jp.quantize(w, "mxfp8")
  options = {} if name is None else {"implementation": name}
  return function(
    *(x.values, w.values.T),
    lhs_scale=x.scale,
    rhs_scale=w.scale.T,
    preferred_element_type=jnp.float32,
    **options,
  )


def scaled_matmul(x, w, name):
  x, w = jp.quantize(x[None], "mxfp8"), jp.quantize(w[None], "mxfp8")
  return jp.nn.scaled_matmul(
    x.values, w.values, x.scale, w.scale, implementation=name
  )[0]


def dot_general(x, w, name):
  dot = jp.dot_general("mxfp8", "mxfp8", implementation=name)
  return dot(x, w, (((1,), (1,)), ((), ())))


def accelerated(x, w, name):
  function = lambda x, w: scaled_dot(x, w, None, jax.lax.scaled_dot)
  return jp.accelerate(function, implementation=name)(x, w)


class FunctionsTest(EntrancesTestCase):
  @parameterized.parameters(
    linear, scaled_dot, scaled_matmul, dot_general, accelerated
  )
  @pytest.mark.sample(1)
  def test_it_is_what_multiplies(self, function):
    x, w = self.operands()
    actual = jax.jit(function, static_argnums=2)(x, w, "acme")
    expected = function(x, w, "xla")
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_allclose(expected, x @ w.T, rtol=0.2, atol=20)
    self.assertLen(self.traced, 1)

  def test_ragged_dots_know_only_their_own(self):
    x, w = self.operands()
    with self.assertRaisesRegex(ValueError, "implementation .* got 'acme'"):
      jp.ragged_dot(
        x,
        jp.quantize(w[None], "mxfp8"),
        jnp.array([4]),
        implementation="acme",
      )


class CommandsTest(EntrancesTestCase, command_lines.CommandLineTestCase):
  def test_info_lists_it(self):
    status, out, _ = self.run_command("info")
    self.assertEqual(status, 0)
    out = " ".join(out.split())
    self.assertIn("acme no no no no no no", out)
    self.assertIn("not acme: is for m below 8, got m=128", out)
    self.assertTrue(
      out.endswith("backends of other packages: acme, of registered in code")
    )

  def test_explain_names_it_and_takes_its_name(self):
    explain = ("explain", "--verbose", *ARGUMENTS.split())
    status, out, _ = self.run_command(*explain)
    self.assertEqual(status, 0)
    self.assertIn(
      "not acme: supported, but used only if requested [registered in code]",
      " ".join(out.split()),
    )
    status, out, _ = self.run_command(*explain, "--implementation", "acme")
    self.assertEqual(status, 0)
    out = " ".join(out.split())
    self.assertIn("acme: made for tests (requested) [registered in code]", out)
    self.assertIn("it is slow", out)

  def test_unknown_name_is_told_with_all_known_ones(self):
    status, _, error = self.run_command(
      "explain", *ARGUMENTS.split(), "--implementation", "acne"
    )
    self.assertEqual(status, 2)
    self.assertIn(
      "'acne' (choose from cudnn, triton, cpu, xla, cutile, acme)", error
    )

  @pytest.mark.full
  def test_benchmark_has_it_among_ours_where_it_serves(self):
    (pair,) = workloads.parse_pairs("mxfp8")
    target = jp.detect_target("cpu")
    every = dot_variants.DotVariants(
      workloads.parse_rows("5x96x256")[0], pair, np.dtype(jnp.float32), target
    )
    (one,) = every.ours(["acme"])
    self.assertIsInstance(one, variants.Variant)
    refusing = dot_variants.DotVariants(
      workloads.parse_rows("9x96x256")[0], pair, np.dtype(jnp.float32), target
    )
    (one,) = refusing.ours(["acme"])
    self.assertIsInstance(one, variants.Unavailable)
    self.assertEqual(one.reason, "is for m below 8, got m=9")


if __name__ == "__main__":
  absltest.main()

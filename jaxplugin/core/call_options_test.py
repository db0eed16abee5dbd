# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Options limit the calls that are traced under them, and no others."""

import math
import os
import re
import threading
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.core import call_options
from jaxplugin.dot.backends import triton
from jaxplugin.operation import logs
from jaxplugin.ragged.backends import triton as ragged
from jaxplugin.tables import resolution
from jaxplugin.testing import interpreted

M, N, K = 4, 32, 64
X = jax.device_put(np.ones((M, K), np.float32))
SIZES = jax.device_put(np.full(2, 2, np.int32))
H200 = jp.named_target("h200")
CPU = jp.named_target("cpu")  # without kernels
NO_KERNELS = "the target has no CPU kernels"
NEEDS_KERNELS = absltest.skipIf(
  jp.detect_target("cpu").cpu_kernels is None, "there are no CPU kernels"
)


def ones(*shape, format="mxfp8", **quantized):
  return jp.quantize(np.ones(shape, "f4"), format, **quantized)


def with_offsets(format=jp.UINT4_128):
  blocks = K // min(K, format.block_size)
  zeros = jnp.zeros((N, blocks), format.offset_dtype)
  return jp.ScaledArray(
    jnp.ones((N, K), jnp.int4),
    jnp.ones((N, blocks), format.scale_dtype),
    None,
    format,
    offset=zeros,
  )


def limits(text):
  """Returns the limit of threads of each kernel in a module; 0 if none."""
  calls = re.findall(r"@jaxplugin_\w+\(.*", text)
  found = [re.search(r"max_threads = (\d+)", call) for call in calls]
  return [0 if x is None else int(x[1]) for x in found]


def lowered(function, *args):
  return limits(jax.jit(function).lower(*args).as_text())


@NEEDS_KERNELS
class ThreadsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("dot", jp.block_scaled_dot, lambda: (X, ones(N, K))),
    ("dot of zero points", jp.linear, lambda: (X, with_offsets())),
    ("ragged", jp.ragged_dot, lambda: (X, ones(2, N, K), SIZES)),
    ("rows", lambda x: jp.quantize(x, "mxfp4"), lambda: (X,)),
    ("columns", lambda x: jp.quantize(x.T, "mxfp4", axis=0), lambda: (X,)),
    ("dequantize", jp.dequantize, lambda: (ones(N, K),)),
    (
      "grad",
      jax.grad(lambda x, w: jp.linear(x, w).sum()),
      lambda: (X, ones(N, K)),
    ),
    ("vmap", jax.vmap(jp.linear, (0, None)), lambda: (X[None], ones(N, K))),
    (
      "layer",
      lambda x, w: jax.lax.scan(
        lambda x, i: (x, jp.linear(x, w[i])), x, jnp.arange(2)
      ),
      lambda: (X, ones(2, N, K, batch_dims=1)),
    ),
  )
  def test_each_kernel_has_the_limit(self, function, make):
    args = make()
    with jp.options(threads=3):
      found = lowered(function, *args)
    self.assertEqual(set(found), {3})
    self.assertEqual(set(lowered(function, *args)), {0})

  def test_a_limit_beyond_64_bits_is_the_largest(self):
    with jp.options(threads=2**70):
      found = lowered(jp.linear, X, ones(N, K))
    self.assertEqual(found, [2**63 - 1])

  def test_a_jitted_function_is_lowered_for_each_context(self):
    w = ones(N, K)
    f = jax.jit(jp.linear)
    lower = lambda: limits(f.lower(X, w).as_text())
    found = [lower()]
    with jp.options(threads=1):
      found.append(lower())
      with jp.options(threads=2):
        found.append(lower())
        with jp.options(workspace_bytes=1), jp.options(threads=None):
          found.append(lower())
      traced = f.trace(X, w)
      found.append(lower())
    found += [lower(), limits(traced.lower().as_text())]
    self.assertEqual(found, [[0], [1], [2], [0], [1], [0], [1]])
    self.assertEqual(call_options.current(), call_options.NONE)

  def test_a_context_inside_a_function_limits_its_calls(self):
    def function(x, w):
      with jp.options(threads=1):
        first = jp.linear(x, w)
      return first, jp.linear(x, w)

    self.assertCountEqual(lowered(function, X, ones(N, K)), [0, 1])

  def test_other_threads_have_other_options(self):
    found, both = {}, threading.Barrier(2)

    def run(n):
      with jp.options(threads=n):
        both.wait()
        found[n] = lowered(jp.linear, X, ones(N, K))

    threads = [threading.Thread(target=run, args=(n,)) for n in (1, 2)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertEqual(found, {1: [1], 2: [2]})

  def test_exports_and_shards_keep_the_limit(self):
    w = ones(N, K)
    with jp.options(threads=1):
      exported = jp.export(jax.jit(jp.linear))(X, w)
      if jax.device_count() > 1:
        mesh = jax.make_mesh((2,), ("x",))
        x = jax.device_put(X, jax.NamedSharding(mesh, P("x")))
        compiled = jax.jit(jp.linear).lower(x, w).compile().as_text()
        self.assertRegex(compiled, r"max_threads = 1\b")
    self.assertEqual(limits(exported.mlir_module()), [1])

  def test_results_do_not_depend_on_it(self):
    rng = np.random.default_rng(0)
    x, w = (jnp.array(rng.normal(size=s)) for s in ((64, 512), (512, 512)))
    w = jp.quantize(w, "mxfp4")
    with jp.options(threads=1):
      limited = jax.jit(jp.linear)(x, w)
    np.testing.assert_array_equal(limited, jax.jit(jp.linear)(x, w))


class FallbackTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    logs._warn_once.cache_clear()
    logs._log_once.cache_clear()
    jax.clear_caches()

  def test_raise_names_the_operands_the_place_and_all_reasons(self):
    w = ones(N, K)

    def model(x):
      with jax.named_scope("layer_3"):
        return jp.linear(x, w)

    f = jax.jit(model)
    with jp.use_target(CPU):
      f(X)  # a cached program does not hide the error
      with jp.options(on_fallback="raise"):
        with self.assertRaises(jp.FallbackError) as caught:
          f(X)
        (dot,) = jp.explain(model, X)
    for words in (
      'with on_fallback="raise", got float32 x mxfp8 -> float32',
      "in jit_model, layer_3, ",
      "options_test.py:",
      f"\n  cpu: {NO_KERNELS}",
      "\n  triton: needs an NVIDIA or AMD GPU",
      'pass implementation="xla"',
    ):
      self.assertIn(words, str(caught.exception))
    self.assertIsNone(dot.decision)
    self.assertIn(NO_KERNELS, dot.error)

  @parameterized.named_parameters(
    (
      "requested",
      lambda w: jp.block_scaled_dot(X, w(N, K), implementation="xla"),
    ),
    ("quantization", lambda w: jp.dequantize(w(N, K))),
    ("empty", lambda w: jp.block_scaled_dot(X[:0], w(N, K))),
  )
  def test_these_are_no_fallbacks(self, function):
    with jp.use_target(CPU), jp.options(on_fallback="raise"):
      function(ones)

  @NEEDS_KERNELS
  @parameterized.parameters(jp.UINT4_128, jp.UINT4_32_MIN)
  def test_offsets_are_no_fallbacks(self, format):
    w = jax.tree.map(lambda a: jnp.stack([a, a]), with_offsets(format))
    with jp.options(on_fallback="raise"):
      jp.ragged_dot(X, w, SIZES)

  def test_warn_warns_once_for_each_decision(self):
    w, wide = ones(N, K), ones(2 * N, K)
    with (
      jp.use_target(CPU),
      jp.options(on_fallback="warn"),
      warnings.catch_warnings(record=True) as caught,
      self.assertLogs("jaxplugin", "WARNING") as logged,
    ):
      warnings.simplefilter("always")
      for weights in (w, w, wide):
        jax.clear_caches()
        jax.jit(jp.linear)(X, weights)
    found = [str(x.message) for x in caught if x.category is jp.FallbackWarning]
    self.assertLen(found, 2)
    self.assertLen(logged.records, 2)
    self.assertIn(f"cpu: {NO_KERNELS}", found[0])

  def test_warn_also_names_platforms_without_kernels(self):
    tpu = jp.Target(name="tpu", platform="tpu")
    for word in ("allow", "warn"):
      with (
        self.subTest(word),
        jp.use_target(tpu),
        jp.options(on_fallback=word),
        warnings.catch_warnings(record=True) as caught,
      ):
        warnings.simplefilter("always")
        traced = jax.jit(jp.linear).trace(X, ones(N, K))
        traced.lower(lowering_platforms=("tpu",))
        found = [x for x in caught if x.category is jp.FallbackWarning]
        self.assertLen(found, 1 if word == "warn" else 0)


class WorkspaceTest(interpreted.RecordedTestCase):
  @parameterized.named_parameters(
    ("dot", jp.linear, triton, (1024, 8192), ()),
    ("ragged", jp.ragged_dot, ragged, (4, 256, 8192), ((4,),)),
  )
  def test_partial_sums_fit_the_limit(self, function, module, shape, sizes):
    x = jax.ShapeDtypeStruct((M, 8192), jnp.bfloat16)
    w = jax.eval_shape(lambda: ones(*shape, format="mxfp4"))
    args = (x, w, *(jax.ShapeDtypeStruct(s, jnp.int32) for s in sizes))

    def decide(limit):
      with jp.options(workspace_bytes=limit):
        (dot,) = jp.explain(function, *args, target=H200)
      _, launches = module.launches(dot.problem, dot.target)
      outputs = [o for launch in launches for o in launch.outputs]
      sums = [4 * math.prod(o.shape) for o in outputs if o.name == "workspace"]
      return sum(sums), "; ".join(dot.decision.notes)

    whole, _ = decide(None)
    self.assertGreater(whole, 0)
    for limit in (whole, whole - 1, whole // 3, 1):
      with self.subTest(f"{limit}"):
        used, notes = decide(limit)
        self.assertLessEqual(used, limit)
        self.assertEqual(limit == whole, used == whole)
        needs = f"needs a workspace of {whole} bytes, more than"
        words = f"{needs} workspace_bytes={limit}"
        self.assertEqual(words in notes, limit < whole)

  def test_a_config_of_a_table_is_refused_with_both_numbers(self):
    x = jax.ShapeDtypeStruct((M, 8192), jnp.bfloat16)
    w = jax.eval_shape(lambda: ones(1024, 8192, format="mxfp4"))
    (dot,) = jp.explain(jp.linear, x, w, target=H200)
    fields = triton.fields_of(
      triton._default_config(triton._dense_shape(dot.problem, H200), H200)
    )
    for limit, origin in ((1 << 18, "pin"), (1000, "rule")):
      with (
        resolution.pinned("triton", fields),
        jp.options(workspace_bytes=limit),
      ):
        (dot,) = jp.explain(jp.linear, x, w, target=H200)
      self.assertEqual(dot.decision.config_from, origin)
      note = "pin: triton: split_k=16 needs a workspace of 262144 bytes"
      self.assertEqual(note in "".join(dot.decision.notes), origin == "rule")

  @interpreted.needs_interpreter
  def test_results_stay_right(self):
    rng = np.random.default_rng(0)
    x = jax.device_put(
      np.asarray(rng.integers(-4, 5, size=(2, 4096)), jnp.bfloat16)
    )
    w = jp.quantize(
      jax.device_put(
        np.asarray(rng.integers(-4, 5, size=(16, 4096)), np.float32)
      ),
      "mxfp8",
    )
    expected = np.asarray(x, np.float64) @ np.asarray(jp.dequantize(w)).T
    for limit, is_split in ((None, True), (0, False)):
      self.launched.clear()
      with jp.use_target(H200), jp.options(workspace_bytes=limit):
        y = jax.jit(jp.block_scaled_dot)(x, w)
      self.assertEqual("split" in self.names(), is_split)
      np.testing.assert_array_equal(y, expected)

  def test_cudnn_has_another_workspace(self):
    x = jax.eval_shape(lambda: ones(128, K))
    b200 = jp.named_target("b200", cudnn="9.13")
    with jp.options(workspace_bytes=1):
      (dot,) = jp.explain(jp.block_scaled_dot, x, x, target=b200)
    self.assertEqual(dot.decision.implementation, "cudnn")
    self.assertIn("workspace of cuDNN", "".join(dot.decision.notes))


class ValuesTest(parameterized.TestCase):
  @parameterized.parameters(
    (TypeError, "threads must be a whole number, got '2'",
      {"threads": "2"}),
    (TypeError, "threads must be a whole number, got True",
      {"threads": True}),
    (ValueError, "threads must be 1 or more, got 0", {"threads": 0}),
    (ValueError, "workspace_bytes must be 0 or more, got -1",
      {"workspace_bytes": -1}),
    (ValueError, "on_fallback must be one of .*, got 'error'",
      {"on_fallback": "error"}),
    (ValueError, "on_fallback must be one of .*, got None",
      {"on_fallback": None}),
  )  # fmt: skip
  def test_wrong_values_are_refused(self, error, rule, arguments):
    with self.assertRaisesRegex(error, f"options: {rule}"):
      jp.options(**arguments).__enter__()

  @parameterized.parameters(
    ({}, call_options.NONE),
    ({"JAXPLUGIN_THREADS": "2"}, call_options.Options(threads=2)),
    (
      {"JAXPLUGIN_WORKSPACE_BYTES": "0", "JAXPLUGIN_ON_FALLBACK": "warn"},
      call_options.Options(workspace_bytes=0, on_fallback="warn"),
    ),
    ({"JAXPLUGIN_THREADS": ""}, call_options.NONE),
    (
      {"JAXPLUGIN_THREADS": "all"},
      "JAXPLUGIN_THREADS must be a whole number, got 'all'. Unset the variable",
    ),
    (
      {"JAXPLUGIN_THREADS": "0"},
      "JAXPLUGIN_THREADS must be 1 or more, got 0. Unset the variable",
    ),
    (
      {"JAXPLUGIN_ON_FALLBACK": "no"},
      "JAXPLUGIN_ON_FALLBACK must be one of .* got 'no'. Unset the variable",
    ),
  )
  def test_environment_variables_set_them(self, environment, expected):
    call_options._of_environment.cache_clear()
    self.addCleanup(call_options._of_environment.cache_clear)
    with mock.patch.dict(os.environ, environment):
      if isinstance(expected, str):
        with self.assertRaisesRegex((TypeError, ValueError), expected):
          call_options.current()
        return
      self.assertEqual(call_options.current(), expected)
      with jp.options(threads=5) as inner:
        self.assertEqual(inner.on_fallback, expected.on_fallback)
        self.assertEqual(inner.threads, 5)
      with jp.options(threads=None) as inner:
        self.assertIsNone(inner.threads)

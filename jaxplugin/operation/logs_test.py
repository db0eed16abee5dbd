# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Logs, events and profile names of decisions that lowerings follow."""

import json
import logging
import os
import re
import subprocess
import sys
from unittest import mock

import jax
import jax.monitoring
import jax.numpy as jnp
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin.operation import logs
from jaxplugin.runtime import lowering

PROGRAM = """
import jax, jax.numpy as jnp, jaxplugin as jp
w = jp.ScaledArray(
  jnp.ones((32, 64), jnp.float8_e4m3fn),
  jnp.ones((32, 2), jnp.float8_e8m0fnu),
  None,
  jp.MXFP8,
)
jax.jit(jp.block_scaled_dot).lower(jnp.ones((4, 64)), w)
"""
X = jax.ShapeDtypeStruct((4, 64), jnp.float32)


def weights(n=32):
  return jax.eval_shape(
    lambda w: jp.quantize(w, "mxfp8"), jax.ShapeDtypeStruct((n, 64), X.dtype)
  )


def run(setting):
  environment = {"JAXPLUGIN_LOG": setting} if setting else {}
  return subprocess.run(
    [sys.executable, "-W", "ignore", "-c", PROGRAM],
    env={"JAX_PLATFORMS": "cpu", "PATH": "", **environment},
    capture_output=True,
    text=True,
  )


class LogsTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    logs._log_once.cache_clear()
    jax.clear_caches()

  def lines(self, function, *args, level=logging.INFO):
    """Returns the lines that a lowering logs from a level on."""
    with self.assertLogs("jaxplugin", level) as found:
      jax.jit(function).lower(*args)
      logging.getLogger("jaxplugin").log(level, "end")
    return [record.getMessage() for record in found.records[:-1]]

  def test_each_different_decision_is_one_line(self):
    def model(x, narrow, wide):
      dots = [jp.block_scaled_dot(x, w) for w in (narrow, narrow, wide)]
      return dots, jp.dequantize(narrow), jp.quantize(x, "nvfp4")

    lines = self.lines(model, X, weights(), weights(40))
    chosen = "cpu" if jp.detect_target("cpu").cpu_kernels else "xla"
    self.assertLen(lines, 4)
    for operation, words in (
      ("block_scaled_dot", "float32 x mxfp8 -> float32, batch=1 m=4 n=32 k=64"),
      ("block_scaled_dot", "float32 x mxfp8 -> float32, batch=1 m=4 n=40 k=64"),
      ("dequantize", "mxfp8 to float32[32, 64], axis 1"),
      ("quantize", "float32[4, 64] to nvfp4, axis 1"),
    ):
      start = f"{operation}: {words} in jit_model"
      (line,) = (line for line in lines if line.startswith(start))
      self.assertRegex(line, f" on local cpu .*: {chosen}, ")

  def test_equal_decisions_of_a_module_are_one_line(self):
    self.assertLen(self.lines(jp.block_scaled_dot, X, weights()), 1)
    jax.clear_caches()
    self.assertEmpty(self.lines(jp.block_scaled_dot, X, weights()))

  def test_a_line_has_the_first_layer_and_source_line(self):
    def layer(x, w):
      with jax.named_scope("dense"):
        return jp.block_scaled_dot(x, w)

    def model(x, w):
      with jax.named_scope("layer_0"):
        x = layer(x, w)
      with jax.named_scope("layer_1"):
        return layer(x, w)

    square = jax.eval_shape(
      lambda w: jp.quantize(w, "mxfp8"), jax.ShapeDtypeStruct((64, 64), X.dtype)
    )
    (line,) = self.lines(model, X, square)
    self.assertRegex(line, r"jit_model, layer_0/dense, .*logs_test.py:\d+ \(")
    jax.clear_caches()
    logs._log_once.cache_clear()
    backward = lambda x, w: jax.grad(lambda x: model(x, w).sum())(x)
    lines = self.lines(backward, X, square)
    self.assertTrue(any("layer_1/dense, " in line for line in lines), lines)

  def test_dequantization_that_nobody_asked_for_is_a_warning(self):
    with jp.use_target(jp.named_target("cpu")):
      (line,) = self.lines(
        jp.block_scaled_dot, X, weights(), level=logging.WARNING
      )
    self.assertRegex(line, ": xla, .*; not cpu: the target has no CPU kernels")
    asked = lambda x, w: jp.block_scaled_dot(x, w, implementation="xla")
    self.assertEmpty(self.lines(asked, X, weights(), level=logging.WARNING))
    with jp.use_target(jp.named_target("cpu")):
      quantize = lambda x: jp.quantize(x, "mxfp8")
      self.assertEmpty(self.lines(quantize, X, level=logging.WARNING))

  def test_kernels_that_an_error_disables_are_a_warning(self):
    logs._disabled_once.cache_clear()
    broken = jp.named_target("cpu").without_library("cpu-kernels", "truncated")
    patch = mock.patch.object(lowering, "resolve_target", lambda *_: broken)
    quantize = lambda x: jp.quantize(x, "mxfp8")
    for expected in (["no kernel of cpu-kernels is used: truncated"], []):
      jax.clear_caches()
      with patch:
        found = self.lines(quantize, X, level=logging.WARNING)
      self.assertEqual(found, expected)

  def test_debug_has_all_reasons_and_durations(self):
    lines = self.lines(jp.block_scaled_dot, X, weights(), level=logging.DEBUG)
    self.assertIn("not cudnn: needs an NVIDIA GPU", lines[0])
    self.assertRegex(lines[1], r"block_scaled_dot: lowered in [0-9.]+ ms")

  def test_ragged_dots_are_logged(self):
    w = jax.eval_shape(
      lambda w: jp.quantize(w, "mxfp4"),
      jax.ShapeDtypeStruct((2, 32, 64), X.dtype),
    )
    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
    (line,) = self.lines(jp.ragged_dot, X, w, sizes)
    self.assertStartsWith(line, "ragged_dot: float32 x mxfp4 -> float32")

  def test_monitoring_gets_decisions_and_durations(self):
    events, durations = [], []
    listen = lambda name, **words: events.append((name, words))
    time = lambda name, seconds, **words: durations.append((name, words))
    jax.monitoring.register_event_listener(listen)
    jax.monitoring.register_event_duration_secs_listener(time)
    try:
      jax.jit(jp.block_scaled_dot).lower(X, weights())
    finally:
      jax.monitoring.unregister_event_listener(listen)
      jax.monitoring.unregister_event_duration_listener(time)
    ours = [words for name, words in events if name == logs.DECISION]
    self.assertEqual([x["operation"] for x in ours], ["block_scaled_dot"])
    self.assertIn((logs.DURATION, {"operation": "block_scaled_dot"}), durations)

  def test_profiles_show_layer_formats_and_backend(self):
    def model(x, w):
      with jax.named_scope("layer_3"):
        return jp.block_scaled_dot(x, w)

    # The compilation cache would return an equal program with other names.
    option = "jax_compilation_cache_include_metadata_in_key"
    self.addCleanup(jax.config.update, option, getattr(jax.config, option))
    jax.config.update(option, True)
    text = jax.jit(model).lower(X, weights()).compile().as_text()
    chosen = "cpu" if jp.detect_target("cpu").cpu_kernels else "xla"
    scope = f"layer_3/float32 x mxfp8 -> float32 by {chosen}/"
    self.assertRegex(text, f'op_name="[^"]*{re.escape(scope)}')


class VariableTest(absltest.TestCase):
  def test_nothing_is_printed_by_default(self):
    done = run("")
    self.assertEqual((done.returncode, done.stdout), (0, ""))
    self.assertNotIn("block_scaled_dot", done.stderr)

  def test_json_is_a_line_for_each_decision(self):
    done = run("json")
    lines = [json.loads(x) for x in done.stderr.splitlines() if x[:1] == "{"]
    (line,) = (x for x in lines if x["operation"] == "block_scaled_dot")
    self.assertEqual(
      (line["event"], line["module"]), ("decision", "jit_block_scaled_dot")
    )
    self.assertContainsSubset({"layer", "source"}, line)
    level = "WARNING" if line["is_fallback"] else "INFO"
    self.assertEqual(line["level"], level)

  def test_other_value_is_an_error(self):
    message = "JAXPLUGIN_LOG must be one of .* got 'verbose'"
    with (
      mock.patch.dict(os.environ, {"JAXPLUGIN_LOG": "verbose"}),
      self.assertRaisesRegex(ValueError, f"^jaxplugin: {message}"),
    ):
      logs.configure.__wrapped__()

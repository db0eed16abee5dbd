# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables by context and by file: what is asked, where, and what is told."""

import contextlib
import pathlib
import tempfile
import threading
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.dot.backends import triton_configs
from jaxplugin.runtime import triton_library
from jaxplugin.tables import errors
from jaxplugin.tables import records
from jaxplugin.tables import resolution
from jaxplugin.testing.measured import dot_tables


class UserFilesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(folder)
    self.path = self.folder / "mine.json"

  def decide(self, setting=None):
    """The decision, and what was warned of meanwhile."""
    with (
      dot_tables.environment(
        **{resolution.VARIABLE: str(setting or self.path)}
      ),
      warnings.catch_warnings(record=True) as caught,
    ):
      warnings.simplefilter("always")
      decision = backends.choose(dot_tables.problem(), dot_tables.H200)
      self.assertEqual(
        backends.choose(dot_tables.problem(), dot_tables.H200), decision
      )
    found = [w for w in caught if w.category is errors.TableWarning]
    return decision, [str(w.message) for w in found]

  @parameterized.named_parameters(
    ("cut_short", lambda path: path.write_text("{}"), "truncated"),
    ("no_text", lambda path: path.write_bytes(b"\xff"), "must be UTF-8"),
    ("gone", lambda path: None, "No such file"),
    ("link_to_itself", lambda path: path.symlink_to(path), "symbolic links"),
    (
      "broken_in_a_folder",
      lambda path: (path.mkdir(), (path / "a.json").write_text("x")),
      "a.json: it is truncated",
    ),
  )
  def test_a_broken_file_is_warned_of_once_and_told_by_every_decision(
    self, make, message
  ):
    make(self.path)
    decision, warned = self.decide()
    self.assertEqual(decision.implementation_from, "rule")
    self.assertLen(warned, 1)
    self.assertRegex(warned[0], f"user's table .*{message}.*it is not used")
    self.assertIn(warned[0], decision.notes)

  def test_a_table_of_older_kernels_is_warned_of_once(self):
    made = dot_tables.table(dot_tables.faster())
    self.path.write_text(
      dot_tables.table(
        dot_tables.faster(),
        **dot_tables.source_of(made, "triton", kernels="0" * 64),
      ).to_text()
    )
    decision, warned = self.decide()
    self.assertEqual(decision.implementation_from, "rule")
    self.assertLen(warned, 1)
    self.assertRegex(warned[0], "user's table .*mine.json is not used: impl")
    self.assertIn(warned[0], decision.notes)

  def test_tables_of_other_devices_in_a_folder_are_no_news(self):
    self.path.mkdir()
    (self.path / "a.json").write_text(
      dot_tables.table(
        dot_tables.row(dot_tables.problem(), ("triton", 20.0, ())),
        target=targets.named_target("h100"),
      ).to_text()
    )
    (self.path / "b.json").write_text(
      dot_tables.table(dot_tables.faster()).to_text()
    )
    decision, warned = self.decide()
    self.assertEqual(decision.config, dot_tables.tiles())
    self.assertEqual(warned, [])
    self.assertLen(decision.notes, 1)  # the kernels'

  def test_a_folder_of_too_many_files_is_not_used(self):
    self.path.mkdir()
    for i in range(101):
      (self.path / f"{i}.json").write_text("x")
    _, warned = self.decide()
    self.assertLen(warned, 1)
    self.assertIn("must have at most 100, got 101; none is used", warned[0])

  def test_files_are_read_once(self):
    self.path.write_text(dot_tables.table(dot_tables.faster()).to_text())
    with dot_tables.environment(**{resolution.VARIABLE: str(self.path)}):
      before = backends.choose(dot_tables.problem(), dot_tables.H200)
      self.path.write_text(dot_tables.table(dot_tables.XLA_FASTER).to_text())
      self.assertEqual(
        backends.choose(dot_tables.problem(), dot_tables.H200), before
      )

  def test_nothing_by_default_is_no_trouble(self):
    with dot_tables.environment(XDG_CONFIG_HOME=str(self.folder)):
      self.assertEqual(resolution.standing().troubles, ())
    with dot_tables.environment(
      XDG_CONFIG_HOME="relative", HOME=str(self.folder)
    ):
      self.assertEqual(
        resolution.user_folder(),
        self.folder / ".config" / "jaxplugin" / "tuning",
      )


def operands(m=3):
  x = jp.quantize(np.ones((m, 64), np.float32), jp.MXFP8)
  return x, jp.quantize(np.ones((32, 64), np.float32), jp.MXFP8)


def cpu_table(implementation, m=3):
  """On this machine one implementation is faster than the rule's."""
  target = targets.detect_target("cpu")
  (dot,) = jp.explain(jp.block_scaled_dot, *operands(m), target=target)
  default = dot.decision.implementation
  ways = [(default, 20.0, ()), (implementation, 10.0, ())]
  return dot_tables.table(dot_tables.row(dot.problem, *ways), target=target)


@absltest.skipIf(
  targets.detect_target("cpu").cpu_kernels is None, "has no CPU kernels"
)
class TuningContextTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    off = dot_tables.environment(**dot_tables.OFF)
    self.enter_context(off)

  def chosen(self, *args):
    (dot,) = jp.explain(jp.block_scaled_dot, *args)
    return dot.decision.implementation

  def test_a_context_decides_inside_and_nothing_outside(self):
    args = operands()
    self.assertEqual(self.chosen(*args), "cpu")
    with jp.tuning(cpu_table("xla")):
      self.assertEqual(self.chosen(*args), "xla")
      with jp.tuning(None):
        self.assertEqual(self.chosen(*args), "cpu")
    self.assertEqual(self.chosen(*args), "cpu")

  def test_two_tables_are_two_traces_and_two_programs(self):
    args = operands()
    traces = 0

    @jax.jit
    def f(x, w):
      nonlocal traces
      traces += 1
      return jp.block_scaled_dot(x, w)

    texts = []
    xla = cpu_table("xla")
    same = records.table_of(xla.header, xla.rows)
    for context in (
      contextlib.nullcontext(),
      jp.tuning(xla),
      contextlib.nullcontext(),
      jp.tuning(same),
      jp.tuning(None),
    ):
      with context:
        np.testing.assert_array_equal(f(*args), np.full((3, 32), 64.0))
        texts.append(f.lower(*args).as_text())
    self.assertEqual(traces, 3)  # none, the table, None
    has_kernel = ["jaxplugin_block_scaled_dot" in text for text in texts]
    self.assertEqual(has_kernel, [True, False, True, False, True])

  def test_a_jaxpr_names_its_tables_in_a_line(self):
    with jp.tuning(cpu_table("xla")):
      text = str(jax.make_jaxpr(jp.block_scaled_dot)(*operands()))
    self.assertRegex(
      text, r"Table\(block_scaled_dot on cpu .*, 1 rows, [0-9a-f]"
    )
    self.assertNotIn("Candidate", text)

  def test_what_was_traced_inside_is_lowered_so_outside(self):
    with jp.tuning(cpu_table("xla")):
      traced = jax.jit(jp.block_scaled_dot).trace(*operands())
    self.assertNotIn("jaxplugin_block_scaled_dot", traced.lower().as_text())

  def test_a_derivative_asks_the_tables_of_its_dot(self):
    x = jnp.ones((3, 64), jnp.float32)
    w = operands()[1]
    f = lambda x: jp.block_scaled_dot(x, w)
    target = targets.detect_target("cpu")
    (dot,) = jp.explain(f, x, target=target)
    ways = [(dot.decision.implementation, 20.0, ()), ("xla", 10.0, ())]
    with jp.tuning(
      dot_tables.table(dot_tables.row(dot.problem, *ways), target=target)
    ):
      _, tangent = jax.linearize(f, x)
    (dot,) = jp.explain(tangent, x)
    self.assertEqual(dot.decision.implementation_from, "overlay")
    self.assertEqual(dot.decision.implementation, "xla")

  def test_threads_have_their_own(self):
    args = operands()
    found = {}
    inside = threading.Event()
    looked = threading.Event()

    def other():
      inside.wait(10)
      found["other"] = self.chosen(*args)
      looked.set()

    thread = threading.Thread(target=other)
    thread.start()
    with jp.tuning(cpu_table("xla")):
      inside.set()
      looked.wait(10)
      found["this"] = self.chosen(*args)
    thread.join()
    self.assertEqual(found, {"this": "xla", "other": "cpu"})

  def test_a_partitioned_dot_asks_for_each_device_s_share(self):
    if jax.device_count() < 2:
      self.skipTest("needs two devices")
    mesh = jax.make_mesh((2,), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    x, w = operands(6)
    x = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
    f = jax.jit(jp.block_scaled_dot)
    with jp.tuning(cpu_table("xla", m=3)):
      text = f.lower(x, w).compile().as_text()
      np.testing.assert_array_equal(f(x, w), np.full((6, 32), 64.0))
    self.assertNotIn("jaxplugin_block_scaled_dot", text)
    text = f.lower(x, w).compile().as_text()
    self.assertIn("jaxplugin_block_scaled_dot", text)

  def test_path_of_a_file_is_read_and_a_broken_one_raises(self):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "mine.json"
      path.write_text(cpu_table("xla").to_text())
      with jp.tuning(str(path)):
        self.assertEqual(self.chosen(*operands()), "xla")
      with jp.tuning(path):
        self.assertEqual(self.chosen(*operands()), "xla")
      path.write_text("{}")
      with (
        self.assertRaisesRegex(jp.TableError, "mine.json: it is truncated"),
        jp.tuning(path),
      ):
        pass

  @parameterized.parameters(
    ((), "must have at least one table"),
    ((3,), "must be tables or paths of table files, or one None, got 3"),
    ((None, None), "or one None, got None"),
  )
  def test_what_is_no_table_is_a_type_error(self, given, message):
    with self.assertRaisesRegex(TypeError, message), jp.tuning(*given):
      pass

  def test_explain_and_info_tell_the_source_of_each_choice(self):
    args = operands()
    with jp.tuning(cpu_table("xla")):
      explanation = jp.explain(jp.block_scaled_dot, *args)
      self.assertIn(
        "xla: dequantize and dot_general in XLA operations (overlay: 10 us,"
        " the rule's cpu 20 us)",
        explanation.details(),
      )
      self.assertIn('"implementation_from": "overlay"', explanation.to_json())
      told = jp.info()
      self.assertIn("measured choices: 1 tables, digest ", told)
      self.assertIn(jp.tuning_digest()[:16], told)
      self.assertRegex(told, "overlay: 1 rows of block_scaled_dot, .*: used")
    with jp.tuning(dot_tables.table(dot_tables.faster())):
      self.assertRegex(jp.info(), "not used: it was measured on NVIDIA")
    (dot,) = jp.explain(jp.block_scaled_dot, *args, target=None)
    self.assertEqual(dot.decision.implementation_from, "rule")

  def test_config_of_cpu_is_explained_and_lowered(self):
    args = operands()
    target = targets.detect_target("cpu")
    (dot,) = jp.explain(jp.block_scaled_dot, *args)
    config = records.fields_of("config", {"threads": 1})
    made = dot_tables.table(
      dot_tables.row(dot.problem, ("cpu", 20.0, ()), ("cpu", 10.0, config)),
      target=target,
    )
    with jp.tuning(made):
      explanation = jp.explain(jp.block_scaled_dot, *args)
      self.assertIn("config (overlay): threads=1", explanation.details())
      f = jax.jit(jp.block_scaled_dot)
      text = f.lower(*args).as_text()
      np.testing.assert_array_equal(f(*args), np.full((3, 32), 64.0))
    self.assertIn("threads = 1 : i64", text)
    self.assertNotIn("threads", f.lower(*args).as_text())

  @parameterized.parameters(
    ({"engine": "warp"}, "engine must be one of"),
    ({"threads": -1}, "threads must be a whole number"),
    ({"threads": "1"}, "threads must be a whole number"),
    ({"tiles": 1}, "must be among engine, .*, got tiles"),
  )
  @pytest.mark.sample(3)
  def test_a_config_that_cpu_kernels_do_not_allow(self, config, message):
    target = targets.detect_target("cpu")
    (dot,) = jp.explain(jp.block_scaled_dot, *operands())
    fields = records.fields_of("config", config)
    made = dot_tables.table(
      dot_tables.row(dot.problem, ("cpu", 20.0, ()), ("cpu", 10.0, fields)),
      target=target,
    )
    with jp.tuning(made):
      (dot,) = jp.explain(jp.block_scaled_dot, *operands())
    self.assertEqual(dot.decision.config_from, "rule")
    self.assertRegex(
      dot.decision.notes[-1], f"overlay is not used: row 1: .*{message}"
    )

  def test_config_of_triton_is_explained_and_lowered(self):
    """What is decided is what is compiled: the tiles are in kernels' names."""
    x = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)
    w = jax.eval_shape(
      lambda: jp.quantize(jnp.ones((4096, 4096), jnp.float32), jp.MXFP4)
    )
    f = lambda x, w: jp.block_scaled_dot(
      x, w, preferred_element_type=jnp.bfloat16
    )
    with jp.use_target(dot_tables.H200):
      (dot,) = jp.explain(f, x, w)
    made = dot_tables.table(
      dot_tables.row(
        dot.problem, ("triton", 20.0, ()), ("triton", 10.0, dot_tables.tiles())
      )
    )
    with jp.use_target(dot_tables.H200), jp.tuning(made):
      explanation = jp.explain(f, x, w)
      self.assertIn(
        "config (overlay): block_k=64 block_m=64", explanation.details()
      )
      if (
        backends.BACKENDS["triton"].lowering_refusal(dot_tables.H200)
        is not None
      ):
        self.skipTest("jax-triton cannot be imported")
      traced = jax.jit(f).trace(x, w)
    launched = []

    def call(kernels, launch, inputs, target):
      del kernels, inputs, target
      launched.append(launch.name)
      (out,) = launch.outputs
      return [jnp.zeros(out.shape, out.dtype)]

    with mock.patch.object(triton_library, "call", call):
      traced.lower(lowering_platforms=("cuda",))
    (note,) = explanation[0].decision.notes
    self.assertEqual(note, f"kernels: {', '.join(launched)}")
    self.assertIn("64x64x64", note)

  def test_a_config_that_cannot_read_operands_as_they_lie_is_an_error(self):
    """Never another config than the one that was decided."""
    x, w = (jnp.ones((64, 64), jnp.bfloat16) for _ in range(2))
    f = lambda x, w: jp.block_scaled_dot(x, jp.quantize(w, jp.MXFP8))
    with (
      jp.use_target(dot_tables.H200),
      resolution.pinned("triton", dot_tables.tiles()),
      mock.patch.object(
        triton_configs, "config_error", side_effect=[None, None, "no way"]
      ),
    ):
      traced = jax.jit(f).trace(x, w)
      with self.assertRaisesRegex(
        NotImplementedError,
        r"tuning table chose: no way; or use jp.tuning\(None\)",
      ):
        traced.lower(lowering_platforms=("cuda",))


class DigestTest(absltest.TestCase):
  def test_digest_is_of_what_tables_say(self):
    with dot_tables.environment(**dot_tables.OFF):
      none = jp.tuning_digest()
      with jp.tuning(dot_tables.table(dot_tables.faster())):
        one = jp.tuning_digest()
      with jp.tuning(dot_tables.table(dot_tables.faster())):
        self.assertEqual(jp.tuning_digest(), one)
      with jp.tuning(dot_tables.table(dot_tables.XLA_FASTER)):
        other = jp.tuning_digest()
    self.assertLen({none, one, other}, 3)

  def test_digest_is_the_same_wherever_a_file_lies(self):
    digests = set()
    for _ in range(2):
      with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "mine.json"
        path.write_text(dot_tables.table(dot_tables.faster()).to_text())
        with dot_tables.environment(**{resolution.VARIABLE: str(path)}):
          digests.add(jp.tuning_digest())
    self.assertLen(digests, 1)


if __name__ == "__main__":
  absltest.main()

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of measured choices decide about dots where they fit, and say so.

Tables come from a context and from the user's files.
"""

import contextlib
import dataclasses
import functools
import threading
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.core import formats, targets
from jaxplugin.dot import backends, problems
from jaxplugin.dot.backends import triton
from jaxplugin.runtime import triton_library
from jaxplugin.tables import records, resolution
from jaxplugin.testing import folders
from jaxplugin.testing.measured import dot_tables
from jaxplugin.testing.meshes import explicit

H200 = dot_tables.H200
KERNEL = "jaxplugin_block_scaled_dot"

environment = dot_tables.environment
faster, problem, row = dot_tables.faster, dot_tables.problem, dot_tables.row
table, tiles = dot_tables.table, dot_tables.tiles
XLA_FASTER = dot_tables.XLA_FASTER


def user_table(path):
  return environment(**{resolution.VARIABLE: str(path)})


def choose(*tables, m=64, target=H200, requested=None, **changes):
  """Returns the decision under tables of a context."""
  overlay = dot_tables.over(*tables)
  asked = problem(m=m, **changes)
  return backends.choose(asked, target, requested, overlay=overlay)


class FolderTestCase(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = folders.new(self)
    self.path = self.folder / "mine.json"

  def write(self, name, *rows, **changes):
    path = self.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table(*rows, **changes).to_text())
    return path


class ChooseTest(FolderTestCase):
  def assert_from(self, origin, decision=None):
    decision = decision or backends.choose(problem(), H200)
    self.assertEqual(decision.implementation_from, origin)

  def test_a_row_decides_the_implementation_and_its_config(self):
    decision = choose(table(faster()))
    self.assertEqual(decision.implementation, "triton")
    self.assertEqual(decision.config, tiles())
    self.assertEqual(decision.config_from, "overlay")
    self.assert_from("overlay", decision)
    self.assertIn("overlay: 10 us, the rule's triton 20 us", decision.reason)
    self.assertRegex(decision.notes[0], "^kernels: .*64x64x64")
    self.assertNotIn("64x64x64", " ".join(choose(table(XLA_FASTER)).notes))

  def test_the_rule_decides_without_a_row(self):
    for changes in ({"n": 4160}, {"k": 8192}, {"has_bias": True}):
      decision = choose(table(XLA_FASTER), **changes)
      self.assertEqual(decision.implementation, "triton")
      self.assert_from("rule", decision)

  def test_a_row_decides_up_to_two_buckets_away(self):
    for m in (1, 8, 16, 33, 64, 65, 128, 256, 257):
      decision = choose(table(XLA_FASTER), m=m)
      self.assert_from("overlay" if 16 <= m <= 256 else "rule", decision)
      if m in (16, 65, 128, 256):
        self.assertIn("measured at m=64", decision.reason)

  def test_the_nearest_row_decides_and_of_two_that_of_more_rows(self):
    wide = tiles(num_warps=8)
    both = table(faster(m=16), faster(wide, m=256))
    for m, expected in ((16, tiles()), (32, tiles()), (64, wide), (128, wide)):
      self.assertEqual(choose(both, m=m).config, expected, m)

  def test_a_config_that_cannot_compute_a_neighbour_is_not_followed(self):
    nvfp4 = {"lhs": jp.NVFP4, "rhs": jp.NVFP4}
    ways = ("triton", 20.0, ()), ("triton", 10.0, tiles())
    made = table(row(problem(m=64, **nvfp4), *ways))
    self.assertEqual(choose(made, m=128, **nvfp4).config, tiles())
    # Here kernels refuse it for more than 64 rows.
    original = triton.shape_config_error

    def config_error(fields, shape, target):
      if shape.m > 64 and dict(fields)["block_m"] == 64:
        return "it is too small"
      return original(fields, shape, target)

    with mock.patch.object(triton, "shape_config_error", config_error):
      self.assertEqual(choose(made, m=128, **nvfp4).config, ())

  def test_inner_overlay_comes_before_the_outer_and_that_before_the_user(self):
    by_warps = {w: faster(tiles(num_warps=w)) for w in (1, 2, 8)}
    one, two = table(by_warps[1]), table(by_warps[2])
    path = self.write("mine.json", by_warps[8])
    with user_table(path):
      for tables, warps, origin in (
        ((one, two), 1, "overlay"),
        ((two,), 2, "overlay"),
        ((), 8, f"user's table {path}"),
      ):
        decision = choose(*tables)
        self.assertEqual(dict(decision.config)["num_warps"], warps)
        self.assertEqual(decision.config_from, origin)
      alone = resolution.Overlay(is_alone=True)
      decision = backends.choose(problem(), H200, overlay=alone)
      self.assertEqual(decision.config_from, "rule")

  def test_tables_of_the_user_s_folder_are_read_by_name(self):
    place = self.write("jaxplugin/tuning/b.json", XLA_FASTER).parent
    path = self.write("jaxplugin/tuning/a.json", faster())
    (place / ".a.json.lock").write_text("")
    (place / "notes.txt").write_text("no table")
    with environment(XDG_CONFIG_HOME=str(self.folder)):
      self.assert_from(f"user's table {path}")

  def test_a_pin_is_followed_and_no_table_is(self):
    for pin in (("triton", tiles()), ("xla", ())):
      with resolution.pinned(*pin):
        overlay = resolution.overlay()
      decision = backends.choose(problem(), H200, overlay=overlay)
      self.assertEqual((decision.implementation, decision.config), pin)


def both(**changes):
  return table(faster(), faster(m=1024), **changes)


def with_source(name="triton", **changes):
  return both(**dot_tables.source_of(both(), name, **changes))


def with_toolchain(*toolchain):
  return with_source(toolchain=toolchain)


def with_device(**changes):
  device = resolution.device_of(H200)
  return both(device=dataclasses.replace(device, **changes))


def with_config(changes, without=()):
  """A table whose second row, of another problem, has another config."""
  config = dict(tiles()) | changes
  fields = records.fields_of(
    "config", {k: v for k, v in config.items() if k not in without}
  )
  return table(faster(), faster(fields, m=1024))


def with_problem(**changes):
  good = faster()
  fields = records.fields_of("problem", dict(good.problem) | changes)
  return table(faster(m=1024), dataclasses.replace(good, problem=fields))


def b200(cudnn):
  return targets.named_target("b200", cudnn=cudnn)


def of_cudnn():
  way = ("cudnn", 20.0, ()), ("xla", 10.0, ())
  of_mxfp8 = problem(lhs=jp.MXFP8, rhs=jp.MXFP8)
  return table(row(of_mxfp8, *way), target=b200("9.13"))


OTHER_DEVICE = "it was measured on .*, the target is NVIDIA H200"
UNKNOWN = targets.Target(name="unknown cuda device", platform="cuda")
# Whole tables about something else: (claim, table, words of the reason,
# target).
MISFITS = (
  ("other sources", lambda: with_source(kernels="0" * 64),
   "implementation triton: its kernels changed .*000000000000, now"
   ".*rules choose until you run python -m jaxplugin tune"),
  ("no sources", lambda: with_source(kernels=None), "sources none, now"),
  ("another jax-triton",
   lambda: with_toolchain(("jax-triton", "0.0.1"), ("triton", "9.9.9")),
   "with jax-triton 0.0.1"),
  ("no toolchain", with_toolchain,
   "with jax-triton unknown, and .* is installed"),
  ("an absent library", lambda: with_toolchain(("cutlass", "4.2")),
   "with cutlass 4.2, and none is installed"),
  ("another kind", lambda: with_device(kind="other"), OTHER_DEVICE),
  ("another architecture", lambda: with_device(architecture="other"),
   OTHER_DEVICE),
  ("other cores", lambda: with_device(core_count=133), OTHER_DEVICE),
  ("unknown target", both, "whose architecture is unknown", UNKNOWN),
  ("unknown implementation",
   lambda: both(sources=(("acme", records.Source()), *both().header.sources)),
   "implementation acme: this process has no such backend"),
  ("another cuDNN", of_cudnn, "cudnn 9.13.0, and 9.14.0 is installed",
   b200("9.14")),
  ("no cuDNN", of_cudnn, "its sources in this process are unknown", b200(None)),
  ("a config without a field",
   lambda: with_config({}, without=("num_warps",)),
   "row 2: .*must have block_k"),
  ("a config of xla", lambda: table(row(
    problem(),
    ("triton", 20.0, ()), ("xla", 10.0, (("fast", True),)),
  )), "xla cannot compute .*it takes no config"),
)  # fmt: skip
# Configs of the second row, and words of the reason.
WRONG_CONFIGS = (
  ({"block_n": 96}, "must be powers of two"),
  ({"block_m": 8}, "at least 16"),
  ({"block_k": -64}, "powers of two"),
  ({"block_m": 4096, "block_n": 4096}, "may need"),
  ({"num_warps": 64}, "num_warps must be 1 to 16"),
  ({"num_stages": 0}, "must be positive"),
  ({"block_m": "64"}, "block_m must be a whole number"),
  ({"block_m": True}, "block_m must be a whole number"),
  ({"swap": 1}, "swap must be true or false, got 1"),
  ({"path": "tensor"}, "path must be one of"),
  ({"path": None}, "path must be one of"),
  ({"path": "native", "block_k": 128}, "both operands must"),
  ({"block_q": 1}, "must have block_k.*got .*block_q"),
  ({"path": "small_m", "block_k": 128}, "swap must"),
)
# FieldsTest has every other field.
WRONG_PROBLEMS = (
  ({"lhs": "int4"}, "lhs must be one of"),
  # The default is left out.
  ({"batch": 1}, "its fields are not in the standard"),
)
# Tables that no decision mentions.
SILENT_MISFITS = (
  ("another platform", lambda: with_device(platform="other"), OTHER_DEVICE),
  ("another operation", lambda: both(operation="ragged_dot"),
   "its operation is ragged_dot, not block_scaled_dot"),
)  # fmt: skip


class MisfitTest(absltest.TestCase):
  """Tables that are whole and about something else are refused whole."""

  def check(self, claim, make, message, target=H200, is_told=True):
    with self.subTest(claim):
      made = make()
      fit = resolution.misfit(made, backends.OPERATION, target)
      self.assertRegex(fit, message)
      decision = choose(made, target=target)
      self.assertEqual(decision.implementation_from, "rule")
      self.assertEqual(decision.config_from, "rule")
      words = "overlay is not used: "
      notes = [n for n in decision.notes if n.startswith(words)]
      self.assertLen(notes, int(is_told), decision.notes)
      if is_told:
        self.assertRegex(notes[0], message)

  def test_the_same_table_fits(self):
    for made, target in ((both(), H200), (of_cudnn(), b200("9.13"))):
      self.assertEqual(resolution.misfit(made, backends.OPERATION, target), "")

  def test_a_named_table_of_older_kernels_is_warned_of(self):
    resolution._warn_once.cache_clear()
    with self.assertWarnsRegex(records.TableWarning, "overlay is not used"):
      choose(with_source(kernels="0" * 64))

  def test_a_table_of_something_else_is_refused_with_the_reason(self):
    for misfit in MISFITS:
      self.check(*misfit)
    for changes, words in WRONG_CONFIGS:
      message = f"row 2: triton cannot compute .* with .*{words}"
      self.check(str(changes), lambda c=changes: with_config(c), message)
    for changes, words in WRONG_PROBLEMS:
      make = lambda changes=changes: with_problem(**changes)
      self.check(str(changes), make, f"row [12]: {words}")

  def test_a_table_of_another_platform_or_operation_is_refused_silently(self):
    for misfit in SILENT_MISFITS:
      self.check(*misfit, is_told=False)

  def test_ptxas_counts_where_kernels_depend_on_it(self):
    def told(name, ptxas):
      target = targets.named_target(name, ptxas=ptxas)
      return dict(resolution.triton_source(target).toolchain).get("ptxas")

    for name in ("b200", "b300", "rtx5090", "gb10"):
      for old in (None, "12.9", "13.1.80"):
        self.assertEqual(told(name, old), "before 13.2")
      self.assertEqual(told(name, "13.2"), "from 13.2 on")
    for name in ("a100", "h200"):
      self.assertEqual({told(name, None), told(name, "13.2")}, {None})

  def test_named_gpus_are_the_devices_that_jax_names_by_their_driver(self):
    """So a table that was measured on one fits the target of that name."""
    for name in targets.TARGET_NAMES:
      named = targets.named_target(name)
      if named.platform == "cpu":
        continue
      device = resolution.device_of(named)
      self.assertRegex(device.kind, r"^(NVIDIA|AMD Instinct) \S+", name)
      real = dataclasses.replace(named, name=device.kind)
      self.assertEqual(resolution.device_of(real), device)


class UserFilesTest(FolderTestCase):
  def decide(self):
    """The decision, and what was warned of meanwhile."""
    record = warnings.catch_warnings(record=True)
    with user_table(self.path), record as caught:
      warnings.simplefilter("always")
      decision = backends.choose(problem(), H200)
      self.assertEqual(backends.choose(problem(), H200), decision)
    found = [w for w in caught if w.category is records.TableWarning]
    return decision, [str(w.message) for w in found]

  def assert_warned_once(self, words):
    decision, warned = self.decide()
    self.assertEqual(decision.implementation_from, "rule")
    self.assertLen(warned, 1)
    self.assertRegex(warned[0], words)
    self.assertIn(warned[0], decision.notes)

  def test_a_broken_file_is_warned_of_once_and_told_by_every_decision(self):
    folder = lambda path: path.parent.mkdir() or path.write_text("x")
    for i, (make, message) in enumerate(
      (
        (lambda path: path.write_text("{}"), "truncated"),
        (lambda path: path.write_bytes(b"\xff"), "must be UTF-8"),
        (lambda path: None, "No such file"),
        (lambda path: path.symlink_to(path), "symbolic links"),
        (lambda path: folder(path / "a.json"), "a.json: it is truncated"),
      )
    ):
      with self.subTest(message):
        self.path = self.folder / f"{i}.json"
        make(self.path)
        self.assert_warned_once(f"user's table .*{message}.*it is not used")

  def test_a_table_of_older_kernels_is_warned_of_once(self):
    changes = dot_tables.source_of(table(faster()), "triton", kernels="0" * 64)
    self.write("mine.json", faster(), **changes)
    self.assert_warned_once("user's table .*mine.json is not used: impl")

  def test_tables_of_other_devices_in_a_folder_are_no_news(self):
    ways = row(problem(), ("triton", 20.0, ()))
    self.write("x/a.json", ways, target=targets.named_target("h100"))
    self.write("x/b.json", faster())
    self.path = self.folder / "x"
    decision, warned = self.decide()
    self.assertEqual(decision.config, tiles())
    self.assertEqual(warned, [])
    self.assertLen(decision.notes, 1)  # the kernels'

  def test_a_folder_of_too_many_files_is_not_used(self):
    for i in range(101):
      (self.folder / f"{i}.json").write_text("x")
    self.path = self.folder
    _, warned = self.decide()
    self.assertLen(warned, 1)
    self.assertIn("must have at most 100, got 101; none is used", warned[0])

  def test_files_are_read_once(self):
    with user_table(self.write("mine.json", faster())):
      before = backends.choose(problem(), H200)
      self.write("mine.json", XLA_FASTER)
      self.assertEqual(backends.choose(problem(), H200), before)

  def test_nothing_by_default_is_no_trouble(self):
    home = str(self.folder)
    with environment(XDG_CONFIG_HOME=home):
      self.assertEqual(resolution.standing().troubles, ())
    with environment(XDG_CONFIG_HOME="relative", HOME=home):
      self.assertEqual(
        resolution.user_folder(),
        self.folder / ".config" / "jaxplugin" / "tuning",
      )

  def test_digest_is_of_what_tables_say(self):
    with environment(**dot_tables.OFF):
      digests = [jp.tuning_digest()]
      for each in (faster(), faster(), XLA_FASTER):
        with jp.tuning(table(each)):
          digests.append(jp.tuning_digest())
    self.assertEqual(digests[1], digests[2])
    self.assertLen({*digests}, 3)

  def test_digest_is_the_same_wherever_a_file_lies(self):
    digests = set()
    for name in ("a/mine.json", "b/other.json"):
      with user_table(self.write(name, faster())):
        digests.add(jp.tuning_digest())
    self.assertLen(digests, 1)


def operands(m=3):
  x = jp.quantize(np.ones((m, 64), np.float32), jp.MXFP8)
  return x, jp.quantize(np.ones((32, 64), np.float32), jp.MXFP8)


def lowered(*args):
  return jax.jit(lambda x, w: jp.block_scaled_dot(x, w)).lower(*args).as_text()


def faster_here(function, *args, way):
  """A table of this machine by which `way` is faster than the rule."""
  target = targets.detect_target("cpu")
  (dot,) = jp.explain(function, *args, target=target)
  default = (dot.decision.implementation, 20.0, ())
  return table(row(dot.problem, default, way), target=target)


def xla_faster_here(m=3):
  way = ("xla", 10.0, ())
  return faster_here(jp.block_scaled_dot, *operands(m), way=way)


def configured_here(**config):
  way = ("cpu", 10.0, records.fields_of("config", config))
  return faster_here(jp.block_scaled_dot, *operands(), way=way)


@absltest.skipIf(
  targets.detect_target("cpu").cpu_kernels is None, "has no CPU kernels"
)
class TuningContextTest(FolderTestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(environment(**dot_tables.OFF))

  def decision(self, *args):
    (dot,) = jp.explain(jp.block_scaled_dot, *(args or operands()))
    return dot.decision

  def assert_chosen(self, name):
    self.assertEqual(self.decision().implementation, name)

  def test_a_context_decides_inside_and_nothing_outside(self):
    self.assert_chosen("cpu")
    with jp.tuning(xla_faster_here()):
      self.assert_chosen("xla")
      with jp.tuning(None):
        self.assert_chosen("cpu")
    self.assert_chosen("cpu")

  def test_two_tables_are_two_traces_and_two_programs(self):
    args = operands()
    traces = 0

    @jax.jit
    def f(x, w):
      nonlocal traces
      traces += 1
      return jp.block_scaled_dot(x, w)

    xla = xla_faster_here()
    same = records.table_of(xla.header, xla.rows)
    has_kernel = []
    none = contextlib.nullcontext()
    contexts = none, jp.tuning(xla), none, jp.tuning(same), jp.tuning(None)
    for context in contexts:
      with context:
        np.testing.assert_array_equal(f(*args), np.full((3, 32), 64.0))
        has_kernel.append(KERNEL in f.lower(*args).as_text())
    self.assertEqual(traces, 3)  # none, the table, None
    self.assertEqual(has_kernel, [True, False, True, False, True])

  def test_a_jaxpr_names_its_tables_in_a_line(self):
    with jp.tuning(xla_faster_here()):
      text = str(jax.make_jaxpr(jp.block_scaled_dot)(*operands()))
    self.assertRegex(
      text, r"Table\(block_scaled_dot on cpu .*, 1 rows, [0-9a-f]"
    )
    self.assertNotIn("Candidate", text)

  def test_what_was_traced_inside_is_lowered_so_outside(self):
    with jp.tuning(xla_faster_here()):
      traced = jax.jit(jp.block_scaled_dot).trace(*operands())
    self.assertNotIn(KERNEL, traced.lower().as_text())

  def test_a_derivative_asks_the_tables_of_its_dot(self):
    x, w = jnp.ones((3, 64), jnp.float32), operands()[1]
    f = lambda x: jp.block_scaled_dot(x, w)
    with jp.tuning(faster_here(f, x, way=("xla", 10.0, ()))):
      _, tangent = jax.linearize(f, x)
    (dot,) = jp.explain(tangent, x)
    self.assertEqual(dot.decision.implementation_from, "overlay")
    self.assertEqual(dot.decision.implementation, "xla")

  def test_threads_have_their_own(self):
    args = operands()
    found = {}
    inside, looked = threading.Event(), threading.Event()

    def other():
      inside.wait(10)
      found["other"] = self.decision(*args).implementation
      looked.set()

    thread = threading.Thread(target=other)
    thread.start()
    with jp.tuning(xla_faster_here()):
      inside.set()
      looked.wait(10)
      found["this"] = self.decision(*args).implementation
    thread.join()
    self.assertEqual(found, {"this": "xla", "other": "cpu"})

  def test_a_partitioned_dot_asks_for_each_device_s_share(self):
    explicit.need_devices(self, 2)
    mesh = jax.make_mesh((2,), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    x, w = operands(6)
    x = jax.device_put(
      jax.tree.map(np.asarray, x), jax.sharding.NamedSharding(mesh, spec)
    )
    f = jax.jit(jp.block_scaled_dot)
    with jp.tuning(xla_faster_here(m=3)):
      text = f.lower(x, w).compile().as_text()
      np.testing.assert_array_equal(f(x, w), np.full((6, 32), 64.0))
    self.assertNotIn(KERNEL, text)
    self.assertIn(KERNEL, f.lower(x, w).compile().as_text())

  def test_path_of_a_file_is_read_and_a_broken_one_raises(self):
    self.path.write_text(xla_faster_here().to_text())
    for path in (str(self.path), self.path):
      with jp.tuning(path):
        self.assert_chosen("xla")
    self.path.write_text("{}")
    broken = self.assertRaisesRegex(jp.TableError, "mine.json: it is truncated")
    with broken, jp.tuning(self.path):
      pass

  def test_what_is_no_table_is_a_type_error(self):
    for given, message in (
      ((), "must have at least one table"),
      ((3,), "must be tables or paths of table files, or one None, got 3"),
      ((None, None), "or one None, got None"),
    ):
      with self.assertRaisesRegex(TypeError, message), jp.tuning(*given):
        pass

  def test_explain_and_info_tell_the_source_of_each_choice(self):
    args = operands()
    with jp.tuning(xla_faster_here()):
      explanation = jp.explain(jp.block_scaled_dot, *args)
      reason = "(overlay: 10 us, the rule's cpu 20 us)"
      self.assertIn(
        f"xla: dequantize and dot_general in XLA operations {reason}",
        explanation.details(),
      )
      self.assertIn('"implementation_from": "overlay"', explanation.to_json())
      told = jp.info()
      self.assertIn("measured choices: 1 tables, digest ", told)
      self.assertIn(jp.tuning_digest()[:16], told)
      self.assertRegex(told, "overlay: 1 rows of block_scaled_dot, .*: used")
    with jp.tuning(table(faster())):
      self.assertRegex(jp.info(), "not used: it was measured on NVIDIA")
    self.assertEqual(self.decision().implementation_from, "rule")

  def test_config_of_cpu_is_explained_and_lowered(self):
    args = operands()
    with jp.tuning(configured_here(threads=1)):
      details = jp.explain(jp.block_scaled_dot, *args).details()
      self.assertIn("config (overlay): threads=1", details)
      f = jax.jit(jp.block_scaled_dot)
      np.testing.assert_array_equal(f(*args), np.full((3, 32), 64.0))
      self.assertIn("threads = 1 : i64", lowered(*args))
    self.assertNotIn("threads", lowered(*args))

  def test_an_export_has_no_config_of_this_machine(self):
    (dot,) = jp.explain(jp.block_scaled_dot, *operands())
    choose = functools.partial(
      *(backends.choose, dot.problem, targets.detect_target("cpu")),
      overlay=dot_tables.over(configured_here(threads=1)),
    )
    for requested in (None, "cpu"):
      for for_export, config in ((False, (("threads", 1),)), (True, ())):
        decision = choose(requested=requested, for_export=for_export)
        self.assertEqual(decision.implementation, "cpu")
        self.assertEqual(decision.config, config)

  def test_a_config_that_cpu_kernels_do_not_allow(self):
    """`cpu_configs_test` has every field."""
    with jp.tuning(configured_here(engine="warp")):
      decision = self.decision()
    self.assertEqual(decision.config_from, "rule")
    note = "overlay is not used: row 1: .*engine must be one of"
    self.assertRegex(decision.notes[-1], note)

  def test_config_of_triton_is_explained_and_lowered(self):
    """The compiled kernels' names have the tiles of the decision."""
    x = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)
    w = jax.eval_shape(
      lambda: jp.quantize(jnp.ones((4096, 4096), jnp.float32), jp.MXFP4)
    )
    f = lambda x, w: jp.block_scaled_dot(
      x, w, preferred_element_type=jnp.bfloat16
    )
    with jp.use_target(H200):
      (dot,) = jp.explain(f, x, w)
    ways = ("triton", 20.0, ()), ("triton", 10.0, tiles())
    with jp.use_target(H200), jp.tuning(table(row(dot.problem, *ways))):
      explanation = jp.explain(f, x, w)
      self.assertIn(
        "config (overlay): block_k=64 block_m=64", explanation.details()
      )
      if backends.BACKENDS["triton"].lowering_refusal(H200) is not None:
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
      jp.use_target(H200),
      resolution.pinned("triton", tiles()),
      mock.patch.object(
        triton, "shape_config_error", side_effect=[None, None, "no way"]
      ),
    ):
      traced = jax.jit(f).trace(x, w)
      with self.assertRaisesRegex(
        NotImplementedError,
        r"tuning table chose: no way; or use jp.tuning\(None\)",
      ):
        traced.lower(lowering_platforms=("cuda",))


class FieldsTest(parameterized.TestCase):
  def problems(self):
    swizzled = problems.SideProblem(
      format=jp.NVFP4,
      dtype=formats.PACKED,
      contracting_is_minor=False,
      scale_layout="swizzled_128x4",
      scale_is_padded=True,
      is_interleaved=True,
    )
    blocked = [
      format.along(96).of_rows()
      for format in formats.NAMED
      if format.codebook is None
    ]
    for changes in (
      {},
      dict(lhs=jp.NVFP4, rhs=jp.NVFP4, batch=7, global_scale="scalar"),
      dict(global_scale="array", has_global_power=True),
      dict(has_bias=True, activation="silu", has_residual=True),
      dict(highest_precision=True, out_dtype=np.dtype(np.float16)),
      dict(num_contracting=2, blocked_k=64, blocks_pair_up=False),
      dict(lhs=jp.MXFP6_E2M3, rhs=jp.MXFP6_E3M2),
      *(dict(lhs=format, rhs=format) for format in blocked),
    ):
      yield problem(**changes)
    for side in ("lhs", "rhs"):
      yield dataclasses.replace(problem(), **{side: swizzled})

  def test_a_problem_comes_back_from_its_fields(self):
    for each in self.problems():
      fields = backends.OPERATION.fields_of(each)
      self.assertEqual(backends.OPERATION.problem_of(fields), each)

  def test_rows_of_signed_codes_hold_for_codes_with_an_offset(self):
    for format, row in (
      ("uint4_128", "int4_128"),
      ("uint4_32_min", "int4_32"),
      ("uint4_128_bf16", "int4_128_bf16"),
    ):
      stored = formats.by_name(format).without_offset()
      fields = dict(backends.OPERATION.fields_of(problem(rhs=stored)))
      self.assertEqual(fields["rhs"], row)

  def test_problems_that_differ_have_other_fields(self):
    """Each field of a problem is compared, those of its operands too."""
    changes = {
      "batch": 2, "m": 65, "n": 8, "k": 32, "out_dtype": np.dtype(np.float32),
      "global_scale": "array", "has_global_power": True,
      "highest_precision": True, "fastest_precision": True, "has_bias": True,
      "activation": "relu", "has_residual": True, "has_array_bias": True,
      "num_contracting": 2, "blocked_k": 32, "blocks_pair_up": False,
      "reads_m": True,
    }  # fmt: skip
    of_side = {
      "format": jp.NVFP4, "dtype": formats.PACKED,
      "contracting_is_minor": False, "scale_layout": "swizzled_128x4",
      "scale_is_padded": True, "is_interleaved": True,
        "has_square_scale": True,
    }  # fmt: skip
    names = {field.name for field in dataclasses.fields(problems.DotProblem)}
    self.assertEqual({*changes, "lhs", "rhs"}, names)
    names = {f.name for f in dataclasses.fields(problems.SideProblem)}
    self.assertEqual({*of_side}, names)
    base = problem(lhs=jp.MXFP4)
    found = [base]
    found += [dataclasses.replace(base, **{n: v}) for n, v in changes.items()]
    for side in ("lhs", "rhs"):
      for name, value in of_side.items():
        other = dataclasses.replace(getattr(base, side), **{name: value})
        found.append(dataclasses.replace(base, **{side: other}))
    fields = [backends.OPERATION.fields_of(each) for each in found]
    self.assertLen({*fields}, len(found))

  @parameterized.parameters(
    ({"m": None},),
    ({"k": 0},),
    ({"out_dtype": np.dtype(np.int32)},),
    ({"rhs": dataclasses.replace(jp.MXFP4, block_size=64)},),
    ({"rhs": dataclasses.replace(jp.MXFP4, name="own")},),
  )
  def test_no_row_is_about_what_has_no_size_or_name(self, changes):
    self.assertIsNone(backends.OPERATION.fields_of(problem(**changes)))

  def test_a_row_with_a_scale_for_each_row_names_its_block_size(self):
    row = problem(rhs=jp.INT8_ROW.along(96))
    fields = dict(backends.OPERATION.fields_of(row))
    self.assertEqual(fields.pop("rhs_block_size"), 96)
    with self.assertRaisesRegex(ValueError, "must have rhs_block_size"):
      backends.OPERATION.problem_of(records.fields_of("problem", fields))

  @parameterized.parameters(
    ({"m": 0}, "m must be a positive number, got 0"),
    ({"m": "64"}, "m must be a positive number, got '64'"),
    ({"k": True}, "k must be a positive number, got True"),
    ({"lhs": "int4"}, "lhs must be one of .*mxfp4.*got 'int4'"),
    ({"lhs": 4}, "lhs must be one of .*got 4"),
    ({"rhs_dtype": "float32"}, "rhs_dtype must be one of .*uint8.*"),
    ({"lhs_dtype": "uint8"}, "a problem of the dot has no lhs_dtype"),
    ({"out": "int8"}, "out must be one of"),
    ({"has_bias": 1}, "has_bias must be true or false, got 1"),
    ({"activation": "tanh"}, "activation must be one of"),
    ({"global_scale": None}, "global_scale must be one of"),
    ({"rhs_scale_layout": "tiled"}, "rhs_scale_layout must be one of"),
    ({"warp": 8}, "a problem of the dot has no warp"),
  )
  def test_fields_of_no_problem_say_what_is_wrong(self, changes, message):
    fields = dict(backends.OPERATION.fields_of(problem())) | changes
    with self.assertRaisesRegex(ValueError, message):
      backends.OPERATION.problem_of(records.fields_of("problem", fields))

  def test_missing_size_is_said(self):
    with self.assertRaisesRegex(ValueError, "must have n, out"):
      backends.OPERATION.problem_of(
        (("k", 32), ("lhs", "bfloat16"), ("m", 1), ("rhs", "mxfp4"))
      )

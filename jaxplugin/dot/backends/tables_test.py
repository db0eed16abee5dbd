# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of measured choices decide about dots where they fit, and say so."""

import dataclasses
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.dot.backends import triton_configs
from jaxplugin.tables import fitting
from jaxplugin.tables import records
from jaxplugin.tables import resolution
from jaxplugin.testing.measured import dot_tables


def choose(
  table_, problem_=None, target=dot_tables.H200, requested=None, **options
):
  return backends.choose(
    problem_ or dot_tables.problem(),
    target,
    requested,
    overlay=dot_tables.over(table_),
    **options,
  )


class ChooseTest(parameterized.TestCase):
  def test_a_row_decides_the_implementation_and_its_config(self):
    decision = choose(dot_tables.table(dot_tables.faster()))
    self.assertEqual(decision.implementation, "triton")
    self.assertEqual(decision.config, dot_tables.tiles())
    self.assertEqual(decision.implementation_from, "overlay")
    self.assertEqual(decision.config_from, "overlay")
    self.assertIn("overlay: 10 us, the rule's triton 20 us", decision.reason)
    self.assertStartsWith(decision.notes[0], "kernels: ")
    self.assertIn("64x64x64", decision.notes[0])
    self.assertNotIn(
      "64x64x64", choose(dot_tables.table(dot_tables.XLA_FASTER)).notes
    )

  def test_another_implementation_is_chosen_where_it_was_faster(self):
    decision = choose(dot_tables.table(dot_tables.XLA_FASTER))
    self.assertEqual(decision.implementation, "xla")
    reasons = {r.implementation: r.reason for r in decision.refusals}
    self.assertEqual(
      reasons["triton"], "serves, but xla was measured to be faster"
    )

  def test_the_rule_decides_without_a_row(self):
    for other in (
      dot_tables.problem(n=4160),
      dot_tables.problem(k=8192),
      dot_tables.problem(has_bias=True),
    ):
      decision = choose(dot_tables.table(dot_tables.XLA_FASTER), other)
      self.assertEqual(decision.implementation, "triton")
      self.assertEqual(decision.implementation_from, "rule")

  @parameterized.parameters(
    (33, "overlay"), (64, "overlay"), (65, "overlay"), (128, "overlay"),
    (16, "overlay"), (256, "overlay"), (8, "rule"), (257, "rule"), (1, "rule"),
  )  # fmt: skip
  def test_a_row_decides_up_to_two_buckets_away(self, m, origin):
    decision = choose(
      dot_tables.table(dot_tables.XLA_FASTER), dot_tables.problem(m=m)
    )
    self.assertEqual(decision.implementation_from, origin)
    if origin == "overlay" and records.bucket(m) != 64:
      self.assertIn("measured at m=64", decision.reason)

  def test_the_nearest_row_decides_and_of_two_that_of_more_rows(self):
    wide = dot_tables.tiles(num_warps=8)
    both = dot_tables.table(
      dot_tables.faster(m=16), dot_tables.faster(wide, m=256)
    )
    for m, expected in (
      (16, dot_tables.tiles()),
      (32, dot_tables.tiles()),
      (64, wide),
      (128, wide),
    ):
      self.assertEqual(
        choose(both, dot_tables.problem(m=m)).config, expected, m
      )

  def test_a_config_that_cannot_compute_a_neighbour_is_not_followed(self):
    small = dot_tables.row(
      dot_tables.problem(m=64, lhs=jp.NVFP4, rhs=jp.NVFP4),
      ("triton", 20.0, ()),
      ("triton", 10.0, dot_tables.tiles()),
    )
    near = dot_tables.problem(m=128, lhs=jp.NVFP4, rhs=jp.NVFP4)
    made = dot_tables.table(small)
    self.assertEqual(choose(made, near).config, dot_tables.tiles())
    # Here kernels refuse it for more than 64 rows.
    original = triton_configs.config_error

    def config_error(fields, shape, target):
      if shape.m > 64 and dict(fields)["block_m"] == 64:
        return "it is too small"
      return original(fields, shape, target)

    with mock.patch.object(triton_configs, "config_error", config_error):
      decision = choose(made, near)
    self.assertEqual(decision.config, ())

  def test_argument_comes_first_and_a_table_says_how(self):
    decision = choose(
      dot_tables.table(dot_tables.faster(), target=dot_tables.H200),
      requested="triton",
    )
    self.assertEqual(decision.implementation_from, "argument")
    self.assertEqual(decision.config_from, "overlay")
    self.assertEqual(decision.config, dot_tables.tiles())
    decision = choose(
      dot_tables.table(dot_tables.XLA_FASTER), requested="triton"
    )
    self.assertEqual(decision.config, ())

  def test_inner_overlay_comes_before_the_outer_and_that_before_the_user(self):
    one, two, three = (
      dot_tables.table(dot_tables.faster(dot_tables.tiles(num_warps=w)))
      for w in (1, 2, 8)
    )
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "mine.json"
      path.write_text(three.to_text())
      with dot_tables.environment(**{resolution.VARIABLE: str(path)}):
        for tables, warps, origin in (
          ((one, two), 1, "overlay"),
          ((two,), 2, "overlay"),
          ((), 8, f"user's table {path}"),
        ):
          decision = backends.choose(
            dot_tables.problem(),
            dot_tables.H200,
            overlay=dot_tables.over(*tables),
          )
          self.assertEqual(dict(decision.config)["num_warps"], warps)
          self.assertEqual(decision.config_from, origin)
        alone = resolution.Overlay(is_alone=True)
        decision = backends.choose(
          dot_tables.problem(), dot_tables.H200, overlay=alone
        )
        self.assertEqual(decision.config_from, "rule")

  def test_user_s_table_comes_before_the_packaged_one(self):
    with tempfile.TemporaryDirectory() as folder:
      data = pathlib.Path(folder) / "data"
      data.mkdir()
      (data / "h200.json").write_text(
        dot_tables.table(dot_tables.XLA_FASTER).to_text()
      )
      mine = pathlib.Path(folder) / "mine.json"
      self.enter_context(mock.patch.object(resolution, "DATA", data))
      with dot_tables.environment(XDG_CONFIG_HOME=folder):
        decision = backends.choose(dot_tables.problem(), dot_tables.H200)
        self.assertEqual(decision.implementation, "xla")
        self.assertEqual(
          decision.implementation_from, "packaged table h200.json"
        )
      mine.write_text(dot_tables.table(dot_tables.faster()).to_text())
      with dot_tables.environment(**{resolution.VARIABLE: str(mine)}):
        decision = backends.choose(dot_tables.problem(), dot_tables.H200)
        self.assertEqual(decision.implementation_from, f"user's table {mine}")
      with dot_tables.environment(**dot_tables.OFF):
        decision = backends.choose(dot_tables.problem(), dot_tables.H200)
        self.assertEqual(decision.implementation_from, "rule")

  def test_tables_of_the_user_s_folder_are_read_by_name(self):
    with tempfile.TemporaryDirectory() as folder:
      place = pathlib.Path(folder) / "jaxplugin" / "tuning"
      place.mkdir(parents=True)
      (place / "b.json").write_text(
        dot_tables.table(dot_tables.XLA_FASTER).to_text()
      )
      (place / "a.json").write_text(
        dot_tables.table(dot_tables.faster()).to_text()
      )
      (place / ".a.json.lock").write_text("")
      (place / "notes.txt").write_text("no table")
      with dot_tables.environment(XDG_CONFIG_HOME=folder):
        decision = backends.choose(dot_tables.problem(), dot_tables.H200)
    self.assertEqual(decision.config_from, f"user's table {place / 'a.json'}")

  def test_a_pin_is_followed_and_no_table_is(self):
    with resolution.pinned("triton", dot_tables.tiles()):
      overlay = resolution.overlay()
    decision = backends.choose(
      dot_tables.problem(), dot_tables.H200, overlay=overlay
    )
    self.assertEqual(decision.config, dot_tables.tiles())
    with resolution.pinned("xla", ()):
      overlay = resolution.overlay()
    decision = backends.choose(
      dot_tables.problem(), dot_tables.H200, overlay=overlay
    )
    self.assertEqual(decision.implementation, "xla")


def both(**changes):
  return dot_tables.table(
    dot_tables.faster(), dot_tables.faster(m=1024), **changes
  )


def with_source(name="triton", **changes):
  return both(**dot_tables.source_of(both(), name, **changes))


def with_toolchain(*toolchain):
  return with_source(toolchain=toolchain)


def with_device(**changes):
  device = fitting.device_of(dot_tables.H200)
  return both(device=dataclasses.replace(device, **changes))


def with_config(changes, without=()):
  """A table whose second row has another config."""
  config = dict(dot_tables.tiles()) | changes
  fields = records.fields_of(
    "config", {k: v for k, v in config.items() if k not in without}
  )
  return dot_tables.table(
    dot_tables.faster(), dot_tables.faster(fields, m=1024)
  )


def with_problem(**changes):
  good = dot_tables.faster()
  fields = records.fields_of("problem", dict(good.problem) | changes)
  return dot_tables.table(
    dot_tables.faster(m=1024), dataclasses.replace(good, problem=fields)
  )


def b200(cudnn):
  return targets.named_target("b200", cudnn=cudnn)


def of_cudnn():
  way = ("cudnn", 20.0, ()), ("xla", 10.0, ())
  problem = dot_tables.problem(lhs=jp.MXFP8, rhs=jp.MXFP8)
  return dot_tables.table(dot_tables.row(problem, *way), target=b200("9.13"))


OTHER_DEVICE = "it was measured on .*, the target is NVIDIA H200"
UNKNOWN = targets.Target(name="unknown cuda device", platform="cuda")
# Whole tables about something else: (claim, table, words of the reason,
# target).
MISFITS = (
  ("other sources", lambda: with_source(kernels="0" * 64),
   "implementation triton: its kernels are others .*000000000000, here"
   ".*measure again, by python -m jaxplugin tune"),
  ("no sources", lambda: with_source(kernels=None), "sources none, here"),
  ("another jax-triton",
   lambda: with_toolchain(("jax-triton", "0.0.1"), ("triton", "9.9.9")),
   "with jax-triton 0.0.1"),
  ("no toolchain", with_toolchain, "with jax-triton unknown, here is"),
  ("a library that is not here", lambda: with_toolchain(("cutlass", "4.2")),
   "with cutlass 4.2, here is none"),
  ("another kind", lambda: with_device(kind="other"), OTHER_DEVICE),
  ("another architecture", lambda: with_device(architecture="other"),
   OTHER_DEVICE),
  ("other cores", lambda: with_device(core_count=133), OTHER_DEVICE),
  ("unknown target", both, "of which too little is known", UNKNOWN),
  ("other buckets", lambda: both(bucketed="n"), "its buckets are of n"),
  ("unknown implementation",
   lambda: both(sources=(("acme", records.Source()), *both().header.sources)),
   "implementation acme: there is no such backend here"),
  ("another cuDNN", of_cudnn, "cudnn 9.13.0, here is 9.14.0", b200("9.14")),
  ("no cuDNN", of_cudnn, "made of here is not known", b200(None)),
  ("a config without a field",
   lambda: with_config({}, without=("num_warps",)),
   "row 2: .*must have block_k"),
  ("a config of xla", lambda: dot_tables.table(dot_tables.row(
    dot_tables.problem(),
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
WRONG_PROBLEMS = (
  ({"lhs": "int4"}, "lhs must be one of"),
  ({"batch": 1}, "it is not how .* is written"),  # the default is left out
  ({"color": "red"}, "a problem of the dot has no color"),
  ({"k": None}, "k must be a positive number"),
)
# Tables that no decision mentions.
SILENT_MISFITS = (
  ("another platform", lambda: with_device(platform="other"), OTHER_DEVICE),
  ("another operation", lambda: both(operation="ragged_dot"),
   "it is about ragged_dot, not block_scaled_dot"),
)  # fmt: skip


class MisfitTest(absltest.TestCase):
  """Tables that are whole and about something else are refused whole."""

  def check(self, claim, make, message, target=dot_tables.H200, is_told=True):
    with self.subTest(claim):
      table = make()
      fit = fitting.misfit(table, backends.OPERATION, target)
      self.assertRegex(fit, message)
      decision = choose(table, target=target)
      self.assertEqual(decision.implementation_from, "rule")
      self.assertEqual(decision.config_from, "rule")
      words = "overlay is not used: "
      notes = [n for n in decision.notes if n.startswith(words)]
      self.assertLen(notes, int(is_told), decision.notes)
      if is_told:
        self.assertRegex(notes[0], message)

  def test_the_same_table_fits(self):
    for made, target in ((both(), dot_tables.H200), (of_cudnn(), b200("9.13"))):
      self.assertEqual(fitting.misfit(made, backends.OPERATION, target), "")

  def test_a_table_of_something_else_is_refused_with_the_reason(self):
    for row in MISFITS:
      self.check(*row)
    for changes, words in WRONG_CONFIGS:
      message = f"row 2: triton cannot compute .* with .*{words}"
      self.check(str(changes), lambda c=changes: with_config(c), message)
    for changes, words in WRONG_PROBLEMS:
      make = lambda changes=changes: with_problem(**changes)
      self.check(str(changes), make, f"row [12]: {words}")

  def test_a_table_of_another_platform_or_operation_is_refused_silently(self):
    for row in SILENT_MISFITS:
      self.check(*row, is_told=False)

  def test_ptxas_counts_where_kernels_depend_on_it(self):
    def told(name, ptxas):
      target = targets.named_target(name, ptxas=ptxas)
      return dict(fitting.triton_source(target).toolchain).get("ptxas")

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
      device = fitting.device_of(named)
      self.assertRegex(device.kind, r"^(NVIDIA|AMD Instinct) \S+", name)
      real = dataclasses.replace(named, name=device.kind)
      self.assertEqual(fitting.device_of(real), device)

  def test_no_row_of_a_refused_table_is_used(self):
    """The broken row is about another problem than the one that is asked."""
    config = records.fields_of(
      "config", dict(dot_tables.tiles()) | {"block_m": 8}
    )
    broken = dot_tables.faster(config, m=1024)
    table = dot_tables.table(dot_tables.XLA_FASTER, broken)
    self.check("broken second row", lambda: table, "row 2")


if __name__ == "__main__":
  absltest.main()

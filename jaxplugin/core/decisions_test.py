# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The choice between backends, for a made-up operation on numbers."""

import dataclasses
import functools

import pytest
from absl.testing import absltest, parameterized

from jaxplugin.core import decisions, targets

pytestmark = pytest.mark.smoke

CPU = targets.Target(name="x", platform="cpu")
GPU = targets.Target(name="y", platform="cuda")


def backend(name, *, rank=10, platform=None, below=None, plan=None, **fields):
  """Returns a backend for numbers below `below`, tried on one platform only."""

  def is_there(target):
    return platform in (None, target.platform)

  def supports(problem, target):
    if not is_there(target):
      return decisions.Unsupported(f"is for {platform}")
    if below is not None and problem >= below:
      return decisions.Unsupported(f"needs less than {below}, got {problem}")
    return None

  return decisions.BackendRecord(
    name=name,
    summary=f"what {name} does",
    rank=lambda target: rank if is_there(target) else None,
    supports=supports,
    plan=plan
    or (lambda problem, target: decisions.Plan(notes=(f"{name}: {problem}",))),
    emit=lambda problem: problem,
    **fields,
  )


BACKENDS = decisions.table(
  backend("plain", rank=100, is_portable=True),
  backend("small", below=5),
  backend("gpu", platform="cuda", rank=0),
)


def proposal(name, *, config=(), origin="overlay"):
  return decisions.Measured(
    implementation=name, config=config, origin=origin, why=f"1 us of {name}"
  )


def adder():
  """Returns a backend whose config has its largest number."""

  def config_error(config, problem, target):
    del target
    return None if problem <= dict(config)["most"] else "it is too large"

  def plan(problem, target, config=()):
    del target
    return decisions.Plan(notes=(f"adder: {dict(config) or problem}",))

  tunable = decisions.Tunable(
    source=lambda target: decisions.Source(), config_error=config_error
  )
  return backend("adder", rank=200, plan=plan, tunable=tunable)


def choose(problem, target, requested=None, **options):
  return decisions.choose(
    BACKENDS, problem, target, requested, who="add", **options
  )


def reasons(decision):
  return {r.implementation: r.reason for r in decision.refusals}


class ChooseTest(parameterized.TestCase):
  def test_backends_of_other_platforms_are_not_asked(self):
    def fail(*_):
      raise AssertionError("a backend of another platform was asked")

    gpu = dataclasses.replace(
      BACKENDS["gpu"], platforms=("cuda",), rank=fail, supports=fail
    )
    found = decisions.choose({**BACKENDS, "gpu": gpu}, 3, CPU, who="add")
    self.assertEqual(found.implementation, "small")
    self.assertEqual(
      reasons(found)["gpu"],
      "needs an NVIDIA GPU, the target's platform is cpu",
    )

  def test_order_is_that_of_ranks_on_the_target(self):
    order = decisions.order(BACKENDS, GPU)
    self.assertEqual(order, ("gpu", "small", "plain"))
    self.assertEqual(decisions.order(BACKENDS, CPU), ("small", "plain"))

  def test_equal_ranks_keep_the_order_of_the_table(self):
    for names in (("a", "b"), ("b", "a")):
      table = decisions.table(*map(backend, names))
      self.assertEqual(decisions.order(table, CPU), names)

  def test_first_that_serves_is_chosen_and_the_others_say_why_not(self):
    decision = choose(7, CPU)
    self.assertEqual(decision.implementation, "plain")
    self.assertEqual(
      decision.reason,
      "what plain does (first of small, plain that supports it)",
    )
    self.assertEqual(decision.notes, ("plain: 7",))
    self.assertEqual(
      reasons(decision),
      {"small": "needs less than 5, got 7", "gpu": "is for cuda"},
    )

  def test_one_that_comes_later_says_what_comes_before_it(self):
    self.assertEqual(
      reasons(choose(3, GPU)),
      {
        "small": "supported, lower priority than gpu",
        "plain": "supported, lower priority than gpu",
      },
    )

  def test_where_only_portable_ones_serve_the_others_are_told_so(self):
    why = decisions.Unsupported("is exported")
    decision = choose(7, GPU, unportable=why)
    self.assertEqual(decision.implementation, "plain")
    # The reason of the backend comes before the general reason.
    self.assertEqual(
      reasons(decision),
      {"gpu": "is exported", "small": "needs less than 5, got 7"},
    )
    with self.assertRaisesRegex(NotImplementedError, "gpu: is exported"):
      choose(3, GPU, "gpu", unportable=why)

  def test_measurement_comes_before_ranks_where_it_serves(self):
    measured = [proposal("small")]
    decision = choose(3, GPU, measured=measured)
    self.assertEqual(decision.implementation, "small")
    self.assertEqual(
      decision.reason, "what small does (overlay: 1 us of small)"
    )
    self.assertEqual(decision.implementation_from, "overlay")
    self.assertEqual(
      reasons(decision)["gpu"], "supported, but small was measured to be faster"
    )
    decision = choose(7, GPU, measured=measured)
    self.assertEqual(decision.implementation, "gpu")
    self.assertEqual(decision.implementation_from, "rule")
    self.assertEqual(decision.config_from, "rule")

  def test_the_first_proposal_that_can_compute_the_problem_is_followed(self):
    table = BACKENDS | decisions.table(adder())
    function = functools.partial(decisions.choose, table, who="add")
    measured = [
      proposal("small", origin="overlay"),
      proposal("adder", config=(("most", 6),), origin="the user's"),
      proposal("adder", config=(("most", 9),), origin="mine"),
    ]
    for number, implementation, config, origin in (
      (3, "small", (), "overlay"),
      (5, "adder", (("most", 6),), "the user's"),
      (7, "adder", (("most", 9),), "mine"),
      (11, "plain", (), "rule"),
    ):
      decision = function(number, CPU, measured=measured)
      self.assertEqual(decision.implementation, implementation)
      self.assertEqual(decision.config, config)
      self.assertEqual(decision.implementation_from, origin)
      self.assertEqual(decision.config_from, origin)
      if implementation == "adder":  # its plan follows its config
        self.assertEqual(decision.notes, (f"adder: {dict(config)}",))

  def test_argument_decides_and_a_measurement_only_how(self):
    table = BACKENDS | decisions.table(adder())
    function = functools.partial(decisions.choose, table, who="add")
    measured = [
      proposal("small"),
      proposal("adder", config=(("most", 6),), origin="the user's"),
    ]
    decision = function(3, CPU, "adder", measured=measured)
    self.assertEqual(decision.implementation, "adder")
    self.assertEqual(decision.implementation_from, "argument")
    self.assertEqual(decision.config, (("most", 6),))
    self.assertEqual(decision.config_from, "the user's")
    decision = function(3, CPU, "plain", measured=measured)
    self.assertEqual(decision.implementation, "plain")
    self.assertEqual((decision.config, decision.config_from), ((), "rule"))

  def test_what_is_not_portable_is_not_followed_where_it_must_be(self):
    why = decisions.Unsupported("is exported")
    measured = [proposal("gpu"), proposal("plain")]
    decision = choose(7, GPU, unportable=why, measured=measured)
    self.assertEqual(decision.implementation, "plain")
    self.assertEqual(decision.implementation_from, "overlay")

  def test_a_config_of_a_backend_that_takes_none_is_not_followed(self):
    measured = [proposal("small", config=(("most", 6),))]
    self.assertEqual(choose(3, GPU, measured=measured).implementation, "gpu")

  def test_one_asked_for_that_cannot_serve_lists_all(self):
    with self.assertRaises(NotImplementedError) as caught:
      choose(7, CPU, "small")
    self.assertEqual(
      str(caught.exception).splitlines()[:4],
      [
        "add: implementation='small' does not support 7 on x (cpu):",
        "  small: needs less than 5, got 7",
        "  plain: supported",
        "  gpu: is for cuda",
      ],
    )

  def test_one_without_a_rank_serves_only_where_it_is_asked_for(self):
    table = BACKENDS | decisions.table(backend("odd", rank=None))
    function = functools.partial(decisions.choose, table, 3, CPU, who="add")
    self.assertEqual(function().implementation, "small")
    self.assertEqual(
      reasons(function())["odd"], "supported, but used only if requested"
    )
    decision = function("odd")
    self.assertEqual(decision.implementation, "odd")
    self.assertEqual(
      reasons(decision)["small"], "supported, but odd was requested"
    )
    measured = function(measured=[proposal("odd")])
    self.assertEqual(measured.implementation, "odd")

  def test_origin_of_what_is_not_of_jaxplugin_is_told_everywhere(self):
    guest = backend("guest", below=5, rank=0, origin="acme-dot 1.2")
    table = BACKENDS | decisions.table(guest)
    function = functools.partial(decisions.choose, table, who="add")
    self.assertEqual(
      function(3, CPU).reason,
      "what guest does (first of guest, small, plain that supports it)"
      " [acme-dot 1.2]",
    )
    self.assertEqual(
      reasons(function(7, CPU))["guest"],
      "needs less than 5, got 7 [acme-dot 1.2]",
    )
    with self.assertRaisesRegex(
      decisions.RefusedError, r"\n  guest: needs less than 5, got 7 \[acme-dot"
    ):
      function(7, CPU, "guest")

  def test_unknown_name_lists_the_known_ones(self):
    with self.assertRaisesRegex(
      ValueError,
      r"add: implementation must be None or one of \('plain', 'small', 'gpu'\),"
      " got 'fast'",
    ):
      choose(1, CPU, "fast")


class TableTest(absltest.TestCase):
  def test_name_that_is_there_already_is_refused(self):
    with self.assertRaisesRegex(ValueError, "two backends are named 'a'"):
      decisions.table(backend("a"), backend("b"), backend("a"))

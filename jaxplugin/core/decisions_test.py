# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The choice between backends of any operation, here one on numbers."""

from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin.core import decisions
from jaxplugin.core import targets

CPU = targets.Target(name="x", platform="cpu")
GPU = targets.Target(name="y", platform="cuda")


def backend(name, *, rank=10, platform=None, below=None, **fields):
  """Serves numbers below `below`, on one platform; tried there alone."""

  def is_there(target):
    return platform in (None, target.platform)

  def supports(problem, target):
    if not is_there(target):
      return decisions.Unsupported(f"is for {platform}")
    if below is not None and problem >= below:
      return decisions.Unsupported(f"needs less than {below}, got {problem}")
    return None

  return decisions.Backend(
    name=name,
    summary=f"what {name} does",
    rank=lambda target: rank if is_there(target) else None,
    supports=supports,
    plan=lambda problem, target: decisions.Plan(notes=(f"{name}: {problem}",)),
    emit=lambda problem: problem,
    **fields,
  )


BACKENDS = decisions.table(
  backend("plain", rank=100, is_portable=True),
  backend("small", below=5),
  backend("gpu", platform="cuda", rank=0),
)


def choose(problem, target, requested=None, **options):
  return decisions.choose(
    BACKENDS, problem, target, requested, who="add", **options
  )


def reasons(decision):
  return {r.implementation: r.reason for r in decision.refusals}


class ChooseTest(parameterized.TestCase):
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
      decision.reason, "what plain does (first of small, plain that serves)"
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
        "small": "serves, but gpu comes before it",
        "plain": "serves, but gpu comes before it",
      },
    )

  def test_where_only_portable_ones_serve_the_others_are_told_so(self):
    why = decisions.Unsupported("is exported")
    decision = choose(7, GPU, unportable=why)
    self.assertEqual(decision.implementation, "plain")
    # A reason of its own comes first.
    self.assertEqual(
      reasons(decision),
      {"gpu": "is exported", "small": "needs less than 5, got 7"},
    )
    with self.assertRaisesRegex(NotImplementedError, "gpu: is exported"):
      choose(3, GPU, "gpu", unportable=why)

  def test_measurement_comes_before_ranks_where_it_serves(self):
    measured = ("small", "small is faster")
    decision = choose(3, GPU, measured=measured)
    self.assertEqual(decision.implementation, "small")
    self.assertEqual(reasons(decision)["gpu"], "serves, but small is faster")
    decision = choose(7, GPU, measured=measured)
    self.assertEqual(decision.implementation, "gpu")

  def test_one_asked_for_that_cannot_serve_lists_all(self):
    with self.assertRaises(NotImplementedError) as caught:
      choose(7, CPU, "small")
    self.assertEqual(
      str(caught.exception).splitlines()[:4],
      [
        "add: implementation='small' cannot serve 7 on x (cpu):",
        "  small: needs less than 5, got 7",
        "  plain: serves",
        "  gpu: is for cuda",
      ],
    )

  def test_unknown_name_lists_the_known_ones(self):
    with self.assertRaisesRegex(
      ValueError,
      r"add: implementation must be None or one of \('plain', 'small', 'gpu'\),"
      " got 'fast'",
    ):
      choose(1, CPU, "fast")


class TableTest(absltest.TestCase):
  def test_name_that_is_there_already_is_refused(self):
    with self.assertRaisesRegex(ValueError, "'a' is there already"):
      decisions.table(backend("a"), backend("b"), backend("a"))

  def test_backend_of_another_version_is_refused(self):
    with self.assertRaisesRegex(ValueError, "for version 0 .* is version 1"):
      decisions.table(backend("a", api_version=0))


if __name__ == "__main__":
  absltest.main()

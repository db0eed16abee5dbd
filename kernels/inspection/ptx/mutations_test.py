# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Planted bugs in compiled kernels are caught when the PTX is executed."""

import functools
import re

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from jaxplugin.kernels.inspection.ptx import faults

from jaxplugin.testing import contract
from jaxplugin.testing.kernels import executed
from jaxplugin.testing.kernels import gpu_operands

MOST_INSTRUCTIONS = 100_000  # of a block; a mutated loop may not end
SMALL = (5, 72, 544)
WIDE = (5, 200, 544)
MIDDLE = (70, 72, 320)
PRODUCTS = {
  "sm_80_mxfp8": ("sm_80", "mxfp8", "mxfp8", SMALL),
  "sm_90_mxfp8": ("sm_90", "mxfp8", "mxfp8", MIDDLE),
  "sm_120_mxfp8": ("sm_120", "mxfp8", "mxfp8", MIDDLE),
  "sm_80_bf16_nvfp4": ("sm_80", "bf16", "nvfp4", SMALL),
  "sm_90_small_m": ("sm_90", "bf16", "nvfp4", WIDE),
  "sm_90_swapped": ("sm_90", "bf16", "nvfp4", (130, 130, 320)),
  "sm_120_nvfp4": ("sm_120", "nvfp4", "nvfp4", (70, 72, 1056)),
}
# Of whole tiles: all that is loaded there has an effect.
WHOLE = {
  "sm_80_mxfp8_whole": ("sm_80", "mxfp8", "mxfp8", (16, 128, 512)),
  "sm_90_mxfp8_whole": ("sm_90", "mxfp8", "mxfp8", (128, 128, 320)),
  "sm_120_mxfp8_whole": ("sm_120", "mxfp8", "mxfp8", (128, 128, 512)),
}
FEW = ("sm_80_mxfp8", "sm_90_mxfp8", "sm_120_mxfp8")
MANY = tuple(name for name in PRODUCTS if name not in FEW)
WRONG = "wrong values"
MOST_PLACES = 8  # of one kind in one kernel
FEW_PLACES = 3  # where the whole kernel is run to see the values
SWIZZLE_MODES = 3 << 62  # of a matrix descriptor


def one_more(found):
  return f"{found[1]}{int(found[2]) + 1};"


def other_swizzle(found):
  return f"{found[1]}{int(found[2]) ^ SWIZZLE_MODES};"


# What is looked for, and put in its place; what it must be caught as; how many
# places may be without effect. Such are a barrier between steps that another
# follows, and a wait for copies that have all been waited for.
SYNCHRONIZATION = {
  "barrier": (r"\bbar\.sync\s+0;", "", {"Race"}, 1),
  "barrier_of_a_warp": (r"\bbar\.warp\.sync\s+-1;", "", {"Race"}, 0),
  "proxy_fence": (r"\bfence\.proxy\.async\S*;", "", {"MissingFence"}, 0),
  "wgmma_fence": (r"\bwgmma\.fence\S*;", "", {"MissingFence"}, 0),
  "wgmma_wait": (
    r"(wgmma\.wait_group\S*\s+)(\d+);", one_more, {"InFlight"}, 0,
  ),
  "copies_wait": (
    r"(cp\.async\.wait_group\s+)(\d+);", one_more, {"InFlight"}, 1,
  ),
}  # fmt: skip
# A tile's first rows are there, whatever the mask; not the last.
MASKS = {
  "mask_of_a_load": (
    r"@%p\d+(\s+ld\.global)", r"\1", {"OutOfBounds"}, MOST_PLACES - 1,
  ),
  "mask_of_a_store": (
    r"@%p\d+(\s+st\.global)", r"\1", {"OutOfBounds", "Race"},
    MOST_PLACES - 1,
  ),
}  # fmt: skip
VALUES = {
  "source_of_a_copy": (
    r"(cp\.async\.c.*\[ %rd\d+ \+) 0", r"\1 16", {WRONG, "OutOfBounds"}, 0,
  ),
  "offset_of_a_matrix": (
    r"(ldmatrix.*\[%r\d+)\]", r"\1+128]",
    {WRONG, "Race", "Undefined", "InFlight"}, 0,
  ),
  "transposed_matrix": (
    r"(ldmatrix\.sync\.aligned\.m8n8\.x4)", r"\1.trans", {WRONG}, 0,
  ),
  "descriptor": (
    r"(or\.b64\s+%rd\d+, %rd\d+, )(46116862\d+);", other_swizzle,
    {WRONG, "Undefined", "OutOfBounds", "Race", "InFlight"}, 0,
  ),
  "scale_of_another_block": (
    r"(block_scale.*)\{ 0, 0 \};", r"\1{ 1, 0 };", {WRONG, "Undefined"}, 0,
  ),
}  # fmt: skip
MUTATIONS = {**SYNCHRONIZATION, **MASKS, **VALUES}
OF_TAILS = (*SYNCHRONIZATION, *MASKS)


@functools.cache
def planned(name):
  """A product, its launch's PTX, and what it must compute."""
  architecture, lhs_format, rhs_format, (m, n, k) = {**PRODUCTS, **WHOLE}[name]
  rng = np.random.default_rng(3)
  lhs = executed.dense(gpu_operands.make_operand(rng, lhs_format, (1, m, k)))
  rhs = executed.dense(gpu_operands.make_operand(rng, rhs_format, (1, n, k)))
  product = executed.product(architecture, lhs, rhs)
  (launch,) = product.launches
  ptx = product.compiled(launch).assembly
  # Comments hold no instruction.
  ptx = re.sub(r"//[^\n]*", "", ptx)
  exact, magnitude = contract.dot(lhs.exact, rhs.exact)
  return product, launch.kernel, ptx, exact, contract.DOT_BOUND * magnitude


def outcome(name, ptx):
  """The kind of fault; or what the values are."""
  product, kernel, _, exact, bound = planned(name)
  try:
    result, _ = product.run(
      ptx={kernel: ptx}, most_instructions=MOST_INSTRUCTIONS
    )
  except faults.Fault as fault:
    return type(fault).__name__
  try:
    contract.assert_within(result, exact, bound, result.dtype)
  except AssertionError:
    return WRONG
  return "nothing"


def spread(items, count):
  """At most `count` of them, the first and the last among them."""
  places = np.linspace(0, len(items) - 1, min(count, len(items)))
  return [items[int(place)] for place in places]


class Case(parameterized.TestCase):
  def check(self, product, mutation):
    pattern, into, kinds, without_effect = MUTATIONS[mutation]
    ptx = planned(product)[2]
    places = list(re.finditer(pattern, ptx))
    if not places:
      return
    found = []
    count = MOST_PLACES if mutation in OF_TAILS else FEW_PLACES
    for place in spread(places, count):
      text = into(place) if callable(into) else place.expand(into)
      mutated = ptx[: place.start()] + text + ptx[place.end() :]
      found.append(outcome(product, mutated))
    caught = [kind for kind in found if kind != "nothing"]
    self.assertContainsSubset(caught, kinds, found)
    self.assertLessEqual(len(found) - len(caught), without_effect, found)
    self.assertNotEmpty(caught)


class FewMutationsTest(Case):
  @parameterized.product(product=FEW, mutation=OF_TAILS)
  def test_is_caught(self, product, mutation):
    self.check(product, mutation)

  @parameterized.product(product=(*WHOLE,), mutation=(*VALUES,))
  def test_of_whole_tiles_is_caught(self, product, mutation):
    self.check(product, mutation)

  @parameterized.parameters(*FEW, *WHOLE)
  def test_none_is_seen_where_none_is_planted(self, product):
    self.assertEqual(outcome(product, planned(product)[2]), "nothing")

  def test_every_kind_has_a_place(self):
    for name, (pattern, *_) in MUTATIONS.items():
      with self.subTest(name):
        self.assertTrue(
          any(re.search(pattern, planned(product)[2]) for product in FEW)
        )


class ManyMutationsTest(Case):
  @parameterized.product(product=MANY, mutation=OF_TAILS)
  def test_is_caught(self, product, mutation):
    self.check(product, mutation)


if __name__ == "__main__":
  absltest.main()

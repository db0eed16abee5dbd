# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Planted bugs in compiled kernels are caught when the PTX is executed."""

import dataclasses
import re

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin.testing.kernels import mutated

pytestmark = pytest.mark.lab

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
# Sizes of whole tiles, so that all loaded values have an effect.
WHOLE = {
  "sm_80_mxfp8_whole": ("sm_80", "mxfp8", "mxfp8", (16, 128, 512)),
  "sm_90_mxfp8_whole": ("sm_90", "mxfp8", "mxfp8", (128, 128, 320)),
  "sm_120_mxfp8_whole": ("sm_120", "mxfp8", "mxfp8", (128, 128, 512)),
}
FEW = ("sm_80_mxfp8", "sm_90_mxfp8", "sm_120_mxfp8")
MANY = tuple(name for name in PRODUCTS if name not in FEW)
WRONG = mutated.WRONG
MOST_PLACES = 8  # of one kind in one kernel
FEW_PLACES = 3  # where the whole kernel is run to see the values
SWIZZLE_MODES = 3 << 62  # of a matrix descriptor


def one_more(found):
  return f"{found[1]}{int(found[2]) + 1};"


def other_swizzle(found):
  return f"{found[1]}{int(found[2]) ^ SWIZZLE_MODES};"


# A pattern, its replacement, the expected faults, and the number of places that
# may have no effect, such as a barrier before another one, or a wait for copies
# without any in flight.
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
# A tile's first rows exist with any mask, but its last rows do not.
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
# A thread reads what it copied of the weight itself: the barrier before is
# followed by that of the decoded weight, as is the one after products.
MORE_WITHOUT_EFFECT = {("sm_90_swapped", "barrier"): 1}
OF_TAILS = (*SYNCHRONIZATION, *MASKS)


def original(name):
  return mutated.Original(*{**PRODUCTS, **WHOLE}[name])


class Case(mutated.Case):
  def check_kind(self, product, mutation):
    kind = mutated.Mutation(*MUTATIONS[mutation])
    more = MORE_WITHOUT_EFFECT.get((product, mutation), 0)
    self.check(
      original(product),
      dataclasses.replace(kind, without_effect=kind.without_effect + more),
      MOST_PLACES if mutation in OF_TAILS else FEW_PLACES,
    )


class FewMutationsTest(Case):
  @parameterized.product(product=FEW, mutation=OF_TAILS)
  def test_is_caught(self, product, mutation):
    self.check_kind(product, mutation)

  @parameterized.product(product=(*WHOLE,), mutation=(*VALUES,))
  def test_of_whole_tiles_is_caught(self, product, mutation):
    self.check_kind(product, mutation)

  @parameterized.parameters(*FEW, *WHOLE)
  def test_none_is_seen_where_none_is_planted(self, product):
    self.check_original(original(product))

  def test_every_kind_has_a_place(self):
    for name, (pattern, *_) in MUTATIONS.items():
      with self.subTest(name):
        self.assertTrue(
          any(
            re.search(pattern, mutated.ptx(original(product)))
            for product in FEW
          )
        )


@pytest.mark.full
class ManyMutationsTest(Case):
  @parameterized.product(product=MANY, mutation=OF_TAILS)
  def test_is_caught(self, product, mutation):
    self.check_kind(product, mutation)


if __name__ == "__main__":
  absltest.main()

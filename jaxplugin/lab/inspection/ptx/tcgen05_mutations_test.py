# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in Blackwell's compiled kernels are caught."""

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin.testing.kernels import mutated

pytestmark = pytest.mark.lab

ORIGINALS = {
  "mxfp8": ("mxfp8", "mxfp8", (5, 72, 416)),
  "bf16_nvfp4": ("bf16", "nvfp4", (5, 72, 544)),
  "nvfp4": ("nvfp4", "nvfp4", (70, 72, 544)),
  "mxfp8_mxfp4": ("mxfp8", "mxfp4", (70, 72, 288)),
  "bf16_mxfp4": ("bf16", "mxfp4", (70, 136, 160)),
  "f16_nvfp4": ("f16", "nvfp4", (5, 72, 416)),
}
FEW = ("mxfp8",)
MANY = tuple(name for name in ORIGINALS if name not in FEW)
FEW_PLACES = 3
MOST_PLACES = 5
WRONG = mutated.WRONG


def one_more(found):
  return f"{found[1]}{int(found[2]) + 1};"


def other_parity(found):
  return (
    f"{{ .reg .b32 other; xor.b32 other, {found[2]}, 1; {found[1]}other; }}"
  )


# A pattern, its replacement, the expected faults, and the number of places that
# may have no effect. Examples of such places:
#   a barrier before a wait for an mbarrier, where all threads meet anyway;
#   the wait for the store of zeros to the sums, because another one follows;
#   an mbarrier that stays in memory that nothing else uses;
#   the last wait for copies, when none is in flight;
#   sums that are kept when they are zero.
SYNCHRONIZATION = {
  "barrier": (r"\bbar\.sync\s+0;", "", {"Race"}, 3),
  "proxy_fence": (r"\bfence\.proxy\.async\S*;", "", {"MissingFence"}, 0),
  "wait_for_stores": (r"tcgen05\.wait::st\S*;", "", {"InFlight"}, 1),
  "wait_for_loads": (r"tcgen05\.wait::ld\S*;", "", {"InFlight"}, 0),
  "commit": (r"@%p\d+ tcgen05\.commit[^;]*;", "", {"Endless"}, 0),
  "wait_for_products": (
    r"mbarrier\.try_wait[^;]*;\s*(\.loc[^\n]*\n\s*)?@!complete[^;]*;",
    "", {"InFlight"}, 0,
  ),
  "parity": (
    r"(mbarrier\.try_wait\S* complete, \[%r\d+\], )(%r\d+);", other_parity,
    {"InFlight", "Endless"}, 0,
  ),
  "begin_of_an_mbarrier": (
    r"@%p\d+ mbarrier\.init[^;]*;", "", {"Barrier"}, 0,
  ),
  "end_of_an_mbarrier": (r"@%p\d+ mbarrier\.inval[^;]*;", "", {"Barrier"}, 4),
  "deallocation": (
    r"@%p\d+ tcgen05\.dealloc[^;]*;", "", {"TensorMemory"}, 0,
  ),
  "copies_wait": (
    r"(cp\.async\.wait_group\s+)(\d+);", one_more, {"InFlight"}, 2,
  ),
}  # fmt: skip
VALUES = {
  "product": (r"@%p\d+ tcgen05\.mma[^;]*;", "", {WRONG}, 0),
  "store": (
    r"@%p\d+ tcgen05\.st[^;]*;", "", {WRONG, "Undefined"}, 1,
  ),
  "sums_not_kept": (r"(tcgen05\.mma[^;]*, )%p\d+;", r"\g<1>0;", {WRONG}, 1),
  "scale_of_other_rows": (
    r"(tcgen05\.mma[^;]*\[ %r\d+ \+ )0( \], \[ %r\d+ \+ 0 \], %p\d+;)",
    r"\g<1>1\2", {WRONG, "Undefined"}, 0,
  ),
  "operand_of_other_columns": (
    r"(tcgen05\.mma\S* \[ %r\d+ \+ 0 \], \[ %r\d+ \+ )0( \])", r"\g<1>8\2",
    {WRONG}, 0,
  ),
}  # fmt: skip
KINDS = {**SYNCHRONIZATION, **VALUES}
# Most kernels end their mbarriers last, where nothing can follow.
OF_LOOPS = ("end_of_an_mbarrier",)


def original(name):
  return mutated.Original("sm_100", *ORIGINALS[name])


class Case(mutated.Case):
  def check_kind(self, product, kind, most_places):
    mutation = mutated.Mutation(*KINDS[kind])
    self.check(original(product), mutation, most_places)


class FewMutationsTest(Case):
  @parameterized.product(product=FEW, kind=(*KINDS,))
  def test_is_caught(self, product, kind):
    self.check_kind(product, kind, FEW_PLACES)

  def test_none_is_seen_where_none_is_planted(self):
    for product in FEW:
      self.check_original(original(product))

  def test_every_kind_has_a_place(self):
    for name, (pattern, *_) in KINDS.items():
      with self.subTest(name):
        self.assertRegex(mutated.ptx(original("mxfp8")), pattern)


@pytest.mark.full
class ManyMutationsTest(Case):
  @parameterized.product(
    product=MANY, kind=tuple(kind for kind in KINDS if kind not in OF_LOOPS)
  )
  def test_is_caught(self, product, kind):
    self.check_kind(product, kind, MOST_PLACES)

  @parameterized.parameters(*MANY)
  def test_none_is_seen_where_none_is_planted(self, product):
    self.check_original(original(product))


if __name__ == "__main__":
  absltest.main()

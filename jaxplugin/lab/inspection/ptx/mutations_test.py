# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Planted bugs in compiled kernels are caught when the PTX is executed."""

import functools
import re

import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin.lab.inspection.ptx import faults
from jaxplugin.testing import contract
from jaxplugin.testing.kernels import executed, gpu_operands

pytestmark = pytest.mark.lab

WRONG = "wrong values"
NOTHING = "nothing"
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
BLACKWELL = {
  "sm_100_mxfp8": ("sm_100", "mxfp8", "mxfp8", (5, 72, 416)),
  "sm_100_bf16_nvfp4": ("sm_100", "bf16", "nvfp4", (5, 72, 544)),
  "sm_100_nvfp4": ("sm_100", "nvfp4", "nvfp4", (70, 72, 544)),
  "sm_100_mxfp8_mxfp4": ("sm_100", "mxfp8", "mxfp4", (70, 72, 288)),
  "sm_100_bf16_mxfp4": ("sm_100", "bf16", "mxfp4", (70, 136, 160)),
  "sm_100_f16_nvfp4": ("sm_100", "f16", "nvfp4", (5, 72, 416)),
}
# Sizes of whole tiles, so that all loaded values have an effect.
WHOLE = {
  "sm_80_mxfp8_whole": ("sm_80", "mxfp8", "mxfp8", (16, 128, 512)),
  "sm_90_mxfp8_whole": ("sm_90", "mxfp8", "mxfp8", (128, 128, 320)),
  "sm_120_mxfp8_whole": ("sm_120", "mxfp8", "mxfp8", (128, 128, 512)),
}
ORIGINALS = {**PRODUCTS, **WHOLE, **BLACKWELL}
FEW = ("sm_80_mxfp8", "sm_90_mxfp8", "sm_120_mxfp8")
MANY = tuple(name for name in PRODUCTS if name not in FEW)
# The most places of one kind in one kernel. A wrong value costs a run of the
# whole kernel.
MOST_PLACES = 8
WRONG_PLACES = 3
BLACKWELL_PLACES = 5
SWIZZLE_MODES = 3 << 62  # of a matrix descriptor


@functools.cache
def planned(name):
  """Returns a product, its launch's kernel, PTX, exact result and magnitude."""
  architecture, *formats, (m, n, k) = ORIGINALS[name]
  rng = np.random.default_rng(3)
  lhs, rhs = (
    executed.dense(gpu_operands.make_operand(rng, format, (1, rows, k)))
    for format, rows in zip(formats, (m, n), strict=True)
  )
  product = executed.product(architecture, lhs, rhs)
  (launch,) = product.launches
  # Comments hold no instruction.
  ptx = re.sub(r"//[^\n]*", "", product.compiled(launch).assembly)
  return product, launch.kernel, ptx, *contract.dot(lhs.exact, rhs.exact)


def ptx(name):
  return planned(name)[2]


def outcome(name, text):
  """Returns the kind of fault of a mutated kernel, `WRONG` or `NOTHING`."""
  product, kernel, _, exact, magnitude = planned(name)
  try:
    result, _ = product.run(
      ptx={kernel: text}, most_instructions=MOST_INSTRUCTIONS
    )
  except (faults.Fault, faults.NotModelled) as fault:
    return type(fault).__name__
  k = ORIGINALS[name][-1][-1]
  bound = contract.truncated_bound(k) * magnitude
  try:
    contract.assert_within(result, exact, bound, result.dtype)
  except AssertionError:
    return WRONG
  return NOTHING


def one_more(found):
  return f"{found[1]}{int(found[2]) + 1};"


def other_swizzle(found):
  return f"{found[1]}{int(found[2]) ^ SWIZZLE_MODES};"


def other_parity(found):
  return (
    f"{{ .reg .b32 other; xor.b32 other, {found[2]}, 1; {found[1]}other; }}"
  )


# A pattern, its replacement, the expected faults, and the number of places that
# may have no effect, such as a barrier before another one, or a wait for copies
# without any in flight.
SYNCHRONIZATION = {
  "barrier": (r"\bbar\.sync\s+0;", "", {"DataRace"}, 1),
  "barrier_of_a_warp": (r"\bbar\.warp\.sync\s+-1;", "", {"DataRace"}, 0),
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
    r"@%p\d+(\s+st\.global)", r"\1", {"OutOfBounds", "DataRace"},
    MOST_PLACES - 1,
  ),
}  # fmt: skip
VALUES = {
  "source_of_a_copy": (r"(cp\.async\.c.*\[ %rd\d+ \+) 0", r"\1 16",
    {WRONG, "OutOfBounds"}, 0),
  "offset_of_a_matrix": (r"(ldmatrix.*\[%r\d+)\]", r"\1+128]",
    {WRONG, "DataRace", "Undefined", "InFlight"}, 0),
  "transposed_matrix": (r"(ldmatrix\.sync\.aligned\.m8n8\.x4)", r"\1.trans",
    {WRONG}, 0),
  "descriptor": (r"(or\.b64\s+%rd\d+, %rd\d+, )(46116862\d+);", other_swizzle,
    {WRONG, "Undefined", "OutOfBounds", "DataRace", "InFlight"}, 0),
  "scale_of_another_block": (r"(block_scale.*)\{ 0, 0 \};", r"\1{ 1, 0 };",
    {WRONG, "Undefined"}, 0),
}  # fmt: skip
# Examples of places without an effect:
#   a barrier before a wait for an mbarrier, where all threads meet anyway;
#   the wait for the store of zeros to the sums, because another one follows;
#   an mbarrier that stays in memory that nothing else uses;
#   the last wait for copies, when none is in flight;
#   sums that are kept when they are zero.
TCGEN05 = {
  "tcgen05_barrier": (r"\bbar\.sync\s+0;", "", {"DataRace"}, 3),
  "tcgen05_proxy_fence": (r"\bfence\.proxy\.async\S*;", "", {"MissingFence"},
    0),
  "tcgen05_wait_for_stores": (r"tcgen05\.wait::st\S*;", "", {"InFlight"}, 1),
  "tcgen05_wait_for_loads": (r"tcgen05\.wait::ld\S*;", "", {"InFlight"}, 0),
  "tcgen05_commit": (r"@%p\d+ tcgen05\.commit[^;]*;", "", {"Endless"}, 0),
  "tcgen05_wait_for_products": (
    r"mbarrier\.try_wait[^;]*;\s*(\.loc[^\n]*\n\s*)?@!complete[^;]*;", "",
    {"InFlight"}, 0),
  "tcgen05_parity": (r"(mbarrier\.try_wait\S* complete, \[%r\d+\], )(%r\d+);",
    other_parity, {"InFlight", "Endless"}, 0),
  "tcgen05_begin_of_an_mbarrier": (r"@%p\d+ mbarrier\.init[^;]*;", "",
    {"Barrier"}, 0),
  "tcgen05_end_of_an_mbarrier": (r"@%p\d+ mbarrier\.inval[^;]*;", "",
    {"Barrier"}, 4),
  "tcgen05_deallocation": (r"@%p\d+ tcgen05\.dealloc[^;]*;", "",
    {"TensorMemory"}, 0),
  "tcgen05_copies_wait": (r"(cp\.async\.wait_group\s+)(\d+);", one_more,
    {"InFlight"}, 2),
  "tcgen05_product": (r"@%p\d+ tcgen05\.mma[^;]*;", "",
    {WRONG, "Undefined"}, 0),
  "tcgen05_store": (r"@%p\d+ tcgen05\.st[^;]*;", "", {WRONG, "Undefined"}, 1),
  "tcgen05_sums_not_kept": (r"(tcgen05\.mma[^;]*, )%p\d+;", r"\g<1>0;", {WRONG},
    1),
  "tcgen05_scale_of_other_rows": (
    r"(tcgen05\.mma[^;]*\[ %r\d+ \+ )0( \], \[ %r\d+ \+ 0 \], %p\d+;)",
    r"\g<1>1\2", {WRONG, "Undefined"}, 0),
  "tcgen05_operand_of_other_columns": (
    r"(tcgen05\.mma\S* \[ %r\d+ \+ 0 \], \[ %r\d+ \+ )0( \])", r"\g<1>8\2",
    {WRONG}, 0),
}  # fmt: skip
MUTATIONS = {**SYNCHRONIZATION, **MASKS, **VALUES, **TCGEN05}
# A thread reads what it copied of the weight itself: the barrier before is
# followed by that of the decoded weight, as is the one after products.
MORE_WITHOUT_EFFECT = {("sm_90_swapped", "barrier"): 1}
OF_TAILS = (*SYNCHRONIZATION, *MASKS)
# Most kernels end their mbarriers last, where nothing can follow.
OF_MANY = tuple(k for k in TCGEN05 if k != "tcgen05_end_of_an_mbarrier")
FIRST, *OTHERS = BLACKWELL


def rows(products, mutations, places):
  return [(p, m, places) for p in products for m in mutations]


class MutationsTest(parameterized.TestCase):
  def check_kind(self, product, mutation, most_places):
    """Mutates evenly spaced places of a kernel, one at a time."""
    pattern, into, caught_as, without_effect = MUTATIONS[mutation]
    without_effect += MORE_WITHOUT_EFFECT.get((product, mutation), 0)
    text = ptx(product)
    places = list(re.finditer(pattern, text))
    if not places:
      return
    found = []
    for i in np.linspace(0, len(places) - 1, min(most_places, len(places))):
      place = places[int(i)]
      new = into(place) if callable(into) else place.expand(into)
      mutated = text[: place.start()] + new + text[place.end() :]
      found.append(outcome(product, mutated))
    caught = [kind for kind in found if kind != NOTHING]
    self.assertContainsSubset(caught, caught_as, found)
    self.assertLessEqual(len(found) - len(caught), without_effect, found)
    self.assertNotEmpty(caught)

  def check_original(self, product):
    self.assertEqual(outcome(product, ptx(product)), NOTHING)

  @parameterized.parameters(
    *rows(FEW, OF_TAILS, MOST_PLACES),
    *rows(WHOLE, VALUES, WRONG_PLACES),
    *rows([FIRST], TCGEN05, WRONG_PLACES),
  )
  def test_is_caught(self, *row):
    self.check_kind(*row)

  @parameterized.parameters(
    *rows(MANY, OF_TAILS, MOST_PLACES),
    *rows(OTHERS, OF_MANY, BLACKWELL_PLACES),
  )
  @pytest.mark.full
  def test_of_more_kernels_is_caught(self, *row):
    self.check_kind(*row)

  @parameterized.parameters(*FEW, *WHOLE, FIRST)
  def test_none_is_seen_where_none_is_planted(self, product):
    self.check_original(product)

  @parameterized.parameters(*OTHERS)
  @pytest.mark.full
  def test_none_is_seen_in_more_kernels(self, product):
    self.check_original(product)

  def test_every_kind_has_a_place(self):
    for name, (pattern, *_) in MUTATIONS.items():
      products = [FIRST] if name in TCGEN05 else FEW
      texts = [ptx(product) for product in products]
      with self.subTest(name):
        self.assertTrue(any(re.search(pattern, text) for text in texts))

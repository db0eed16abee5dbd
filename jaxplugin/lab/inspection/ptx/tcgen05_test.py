# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""tcgen05 and mbarriers: values by the ISA's tables, and what is a fault."""

import ml_dtypes
import numpy as np
from absl.testing import parameterized

from jaxplugin.lab.inspection.ptx import descriptors, faults
from jaxplugin.testing.kernels import ptx_programs

THREADS = 128
WORDS = 16  # that each thread has in the array
SHARED = 8256
BARRIER, ADDRESS = 8192, 8200  # of the mbarrier, and of the allocation
ALLOCATE = "@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32"
# %rd0: a thread's words; %r2: the allocation; %r3: its lanes of this warp;
# %p1: thread 0; %p2: the first warp; %r4 to %r19: the words.
START = f"""
  ld.param.b64 %rd0, [p0];
  mov.u32 %r0, %tid.x;
  mad.wide.u32 %rd0, %r0, {4 * WORDS}, %rd0;
  setp.eq.u32 %p1, %r0, 0;
  setp.lt.u32 %p2, %r0, 32;
  mov.u32 %r1, {ADDRESS};
  {ALLOCATE} [%r1], 64;
  bar.sync 0;
  ld.shared.b32 %r2, [%r1];
  and.b32 %r3, %r0, 96;
  shl.b32 %r3, %r3, 16;
  add.u32 %r3, %r3, %r2;
""" + "".join(
  f"ld.global.b32 %r{4 + i}, [%rd0+{4 * i}];\n" for i in range(WORDS)
)
END = "@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 64;"
MEET = "bar.sync 0;"
REGISTERS = ", ".join(f"%r{4 + i}" for i in range(WORDS))
LOADED = ", ".join(f"%r{40 + i}" for i in range(WORDS))
STORE = f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%r3], {{{REGISTERS}}};"
STORED = "tcgen05.wait::st.sync.aligned;"
LOAD = f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{LOADED}}}, [%r3];"
IS_LOADED = "tcgen05.wait::ld.sync.aligned;"
KEEP = "".join(
  f"st.global.b32 [%rd0+{4 * i}], %r{40 + i};\n" for i in range(WORDS)
)
HALVES = f"""
  tcgen05.st.sync.aligned.16x32bx2.x8.b32 [%r3], 8,
    {{{", ".join(f"%r{4 + i}" for i in range(8))}}};
"""
INIT = f"@%p1 mbarrier.init.shared::cta.b64 [{BARRIER}], 1;"
COMMIT = (
  "@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"
  f" [{BARRIER}];"
)
INVAL = f"@%p1 mbarrier.inval.shared::cta.b64 [{BARRIER}];"
FENCE = "fence.proxy.async.shared::cta;"


def wait(parity=0):
  return (
    f"mov.u32 %r60, {parity}; {{ .reg .pred done; again:"
    " mbarrier.try_wait.parity.shared::cta.b64 done,"
    f" [{BARRIER}], %r60; @!done bra.uni again; }}"
  )


# Each thread stores its words, 64 bytes, side by side.
TO_SHARED = "shl.b32 %r61, %r0, 6;" + "".join(
  f"st.shared.b32 [%r61+{4 * i}], %r{4 + i};" for i in range(WORDS)
)
K_MINOR_DESCRIPTOR = 1 << 46 | 128 >> 4 << 16 | 256 >> 4 << 32


def plain(m=128, n=16, types=(1, 1), more=0):
  """An instruction descriptor of .kind::f16, bf16, with sums in f32."""
  return (
    1 << 4
    | types[0] << 7
    | types[1] << 10
    | n >> 3 << 17
    | (m >> 4 << 24)
    | more
  )


def multiply(descriptor=K_MINOR_DESCRIPTOR, instruction=None, keeps=0):
  """bf16[128, 16] in columns 32 to 39, by bf16[16, 16] in shared memory."""
  instruction = plain() if instruction is None else instruction
  return f"""
    mov.u64 %rd1, {descriptor}; mov.u32 %r62, {instruction};
    @%p1 tcgen05.mma.cta_group::1.kind::f16 [%r2], [%r2+32], %rd1, %r62,
      {keeps};
  """


STORE_LHS = STORE.replace("[%r3]", "[%r3+32]")
PRODUCT = (TO_SHARED, STORE_LHS, STORED, FENCE, INIT, MEET, multiply(), COMMIT)


def run(*body, words=None):
  """The words that threads keep."""
  if words is None:
    words = np.arange(THREADS * WORDS, dtype=np.uint32).reshape(THREADS, WORDS)
  text = START + "\n".join(body)
  return ptx_programs.run(
    text, words, threads=THREADS, shared_memory_bytes=SHARED,
    most_instructions=2000,
  ).arrays[0]  # fmt: skip


class TensorMemoryTest(parameterized.TestCase):
  def test_loads_what_is_stored(self):
    words = np.random.default_rng(0).integers(
      0, 2**32, (THREADS, WORDS), np.uint32
    )
    found = run(STORE, STORED, LOAD, IS_LOADED, KEEP, MEET, END, words=words)
    np.testing.assert_array_equal(found, words)

  def test_halves_of_a_warp_store_to_the_same_lanes(self):
    # Lanes 0 to 15 have columns 0 to 7, and lanes 16 to 31 columns 8 to 15.
    words = np.arange(THREADS * WORDS, dtype=np.uint32).reshape(THREADS, WORDS)
    found = run(STORE, STORED, HALVES, STORED, LOAD, IS_LOADED, KEEP, MEET, END)
    of_warps = words.reshape(4, 2, 16, WORDS)
    expected = of_warps.copy()
    expected[:, 0, :, 8:] = of_warps[:, 1, :, :8]
    np.testing.assert_array_equal(found.reshape(expected.shape), expected)

  def test_columns_are_given_back_and_allocated_again(self):
    run(MEET, END, f"{ALLOCATE} [%r1], 512;", MEET, "ld.shared.b32 %r2, [%r1];",
        END.replace("64", "512"))  # fmt: skip


def swizzled(width, byte):
  """Rows of `width` bytes: 16-byte units change places in 128-byte lines."""

  def place(n, k):
    return byte(n, k) ^ byte(n, k) // 128 % (width // 16) * 16

  return place


# A descriptor, whether k is minor, and the byte of row n and k.
PLACES = {
  "core matrices": (
    K_MINOR_DESCRIPTOR, True,
    lambda n, k: n // 8 * 256 + k // 8 * 128 + n % 8 * 16 + k % 8 * 2,
  ),
  **{
    f"swizzled rows of {width} bytes": (
      1 << 46 | mode << 61 | 8 * width >> 4 << 32, True,
      swizzled(width, lambda n, k, width=width: n * width + 2 * k),
    )
    for mode, width in ((6, 32), (4, 64), (2, 128))
  },
  # 32-byte lines of 16 rows, 8 k one after another, then the next 8.
  "rows that are minor": (1 << 46 | 6 << 61 | 256 >> 4 << 32, False,
    swizzled(32, lambda n, k: 32 * k + 2 * n)),
  # Core matrices of 8 k, each 8 rows: 128 bytes to the next rows, 512 to the
  # next k.
  "rows that are minor without swizzling": (
    1 << 46 | 512 >> 4 << 16 | 128 >> 4 << 32, False,
    lambda n, k: n // 8 * 128 + k // 8 * 512 + k % 8 * 16 + n % 8 * 2,
  ),
}  # fmt: skip


class ProductTest(parameterized.TestCase):
  """bf16 products whose right operand is in shared memory."""

  def product(self, m=128, descriptor=K_MINOR_DESCRIPTOR, more=0, places=None):
    """The sums, and the operands: bf16[m, 16] and, as bytes lie, bf16[...]."""
    words = np.random.default_rng(1).normal(size=(THREADS, 2 * WORDS))
    words = words.astype(ml_dtypes.bfloat16).view(np.uint32)
    instruction = plain(m=m, more=more)
    found = run(
      TO_SHARED, STORE_LHS, STORED, FENCE, INIT, MEET,
      multiply(descriptor, instruction), COMMIT, wait(),
      LOAD if m == 128 else LOAD.replace("32x32b.x16", "16x32bx2.x16").replace(
        "[%r3]", "[%r3], 0"
      ),
      IS_LOADED, KEEP, MEET, END, words=words,
    )  # fmt: skip
    values = words.view(ml_dtypes.bfloat16).astype(np.float64)
    return found.view(np.float32), values[:, :16], values.reshape(-1)

  def rhs(self, flat, place):
    """bf16[16, 16] by a function from row and k to a byte."""
    return np.array(
      [[flat[place(n, k) // 2] for k in range(16)] for n in range(16)]
    )

  @parameterized.parameters(*PLACES)
  def test_operand_lies_at(self, name):
    descriptor, k_is_minor, place = PLACES[name]
    more = 0 if k_is_minor else 1 << 16
    found, lhs, flat = self.product(descriptor=descriptor, more=more)
    np.testing.assert_allclose(
      found, lhs @ self.rhs(flat, place).T, rtol=1e-6, atol=1e-5
    )

  def test_half_of_the_lanes(self):
    # m = 64: 16 rows in the first 16 of each 32 lanes.
    found, lhs, flat = self.product(m=64)
    *_, place = PLACES["core matrices"]
    rows = np.arange(THREADS) % 32 < 16
    expected = lhs @ self.rhs(flat, place).T
    np.testing.assert_allclose(
      found[rows], expected[rows], rtol=1e-6, atol=1e-5
    )
    np.testing.assert_array_equal(found[~rows], found[rows])


class DescriptorTest(parameterized.TestCase):
  @parameterized.parameters(
    ("sparsity", plain(more=1 << 2), "f16", None),
    ("saturation", plain(more=1 << 3), "f16", None),
    ("negated", plain(more=1 << 13), "f16", None),
    ("bit 23", plain(more=1 << 23), "f16", None),
    ("shift", plain(more=1 << 30), "f16", None),
    ("type 3", plain(types=(3, 1)), "f16", None),
    ("m = 32", plain(m=32), "f16", None),
    ("n = 0", plain(n=0), "f16", None),
    ("not f32", plain() ^ 1 << 4, "f16", None),
    ("kind tf32", plain(), "tf32", None),
    ("kind mxf8f6f4 with block16", 1 << 27, "mxf8f6f4", "block16"),
    ("bits 24-26", 1 << 27 | 1 << 24, "mxf8f6f4", "block32"),
    ("scales of type 0", 1 << 27, "mxf8f6f4", "block32"),
    ("type 3", 1 << 27 | 1 << 23 | 3 << 7, "mxf8f6f4", "block32"),
    ("bit 31", 1 << 31 | 1 << 27, "mxf4", "block32"),
    ("m = 0 with block scales", 1 << 23, "mxf4", "block32"),
    ("2 scales of a word from byte", 1 << 27 | 1 << 23 | 1 << 4, "mxf4",
     "block32"),
  )  # fmt: skip
  def test_refuses_instruction(self, message, descriptor, kind, blocks):
    with self.assertRaisesRegex(faults.NotModelled, message):
      descriptors.product(descriptor, kind, blocks)

  @parameterized.parameters(
    ("46-48", 0),
    ("base offset", 1 << 46 | 1 << 49),
    ("absolute", 1 << 46 | 1 << 52),
    ("53-60", 1 << 46 | 1 << 55),
    ("mode 1", 1 << 46 | 1 << 61),
    ("14-15", 1 << 46 | 1 << 14),
  )
  def test_refuses_matrix(self, message, descriptor):
    with self.assertRaisesRegex(faults.NotModelled, message):
      descriptors.tcgen05_places(descriptor, 8, 32)

  def test_scales(self):
    found = descriptors.product(
      2 << 4 | 5 << 10 | 64 >> 3 << 17 | 1 << 23 | 1 << 27 | 3 << 29,
      "mxf8f6f4",
      "block32",
    )
    sides = [
      descriptors.SideShape(
        rows=rows, type=type, k_is_minor=True, scale_byte=scale_byte
      )
      for rows, type, scale_byte in ((128, "e4m3", 3), (64, "e2m1", 2))
    ]
    self.assertEqual([found.lhs, found.rhs], sides)
    self.assertEqual(
      (found.k, found.scales, found.scale_type), (32, 1, "ue8m0")
    )


FAULTS = {
  "loading what nothing has stored": (faults.Undefined, "nothing has written",
    (LOAD, END)),
  "loading before the store is waited for": (faults.InFlight,
    "tcgen05.st not waited for", (STORE, LOAD, END)),
  "storing before the load is waited for": (faults.InFlight,
    "st or ld not waited for", (STORE, STORED, LOAD, STORE, END)),
  "columns that are not allocated": (faults.TensorMemory,
    "columns 60 to 75 of tensor memory, which are not",
    (STORE.replace("[%r3]", "[%r3+60]"), STORED, END)),
  "lanes of another warp": (faults.TensorMemory,
    "warp 1 has lanes from 32, not 0",
    (STORE.replace("[%r3]", "[%r2]"), STORED, END)),
  "no deallocation": (faults.TensorMemory, "without tcgen05.dealloc", ()),
  "deallocation of fewer columns": (faults.TensorMemory,
    "are not an allocation", (END.replace("64", "32"),)),
  "deallocation while another warp loads": (faults.InFlight, "dealloc of",
    (STORE, STORED, LOAD, END)),
  "deallocation without a barrier after another warp's load": (faults.DataRace,
    "another warp has used", (STORE, STORED, LOAD, IS_LOADED, END)),
  "use after deallocation": (faults.TensorMemory, "not allocated",
    (END, MEET, STORE, STORED)),
  "allocation of no power of two": (faults.TensorMemory, "not a power of two",
    (f"{ALLOCATE} [%r1], 96;",)),
  "allocation of more than there is": (faults.Endless, "never become free",
    (f"{ALLOCATE} [%r1], 512;",)),
  "allocation after giving up": (
    faults.TensorMemory, "after relinquish",
    ("@%p2 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
     f"{ALLOCATE} [%r1], 32;"),
  ),
  "sums before they are waited for": (faults.InFlight,
    "mma not waited for writes", (*PRODUCT, LOAD, IS_LOADED, MEET, END)),
  "an operand overwritten before it is waited for": (faults.InFlight,
    "mma not waited for reads", (*PRODUCT, STORE_LHS)),
  "shared memory overwritten before it is waited for": (faults.InFlight,
    "matrix product in flight reads", (*PRODUCT, "st.shared.b32 [%r61], %r4;")),
  "deallocation before products are waited for": (faults.InFlight,
    "mma not waited for writes", (*PRODUCT, END)),
  "a phase before": (faults.InFlight, "mma not waited for writes",
    (*PRODUCT, wait(1), LOAD)),
  "a phase that nothing completes": (faults.Endless, "parity 0 that nothing",
    (INIT, MEET, wait(), END)),
  "a second phase that nothing completes": (faults.Endless,
    "parity 1 that nothing", (*PRODUCT, wait(), wait(1))),
  "waiting where there is no mbarrier": (faults.Barrier,
    "no mbarrier is at byte 8192", (wait(),)),
  "an mbarrier without a barrier": (faults.DataRace, "written since",
    (INIT, wait())),
  "an mbarrier overwritten": (faults.Barrier, "where an mbarrier is",
    (INIT, MEET, f"st.shared.b32 [{BARRIER}], %r0;")),
  "an mbarrier made twice": (faults.Barrier, "where an mbarrier is",
    (INIT, MEET, INIT)),
  "an mbarrier by all threads": (faults.Barrier, "by 128 threads",
    (INIT.replace("@%p1 ", ""),)),
  "the end of an mbarrier that others wait for": (faults.DataRace, "read since",
    (*PRODUCT, wait(), INVAL)),
  "the end of an mbarrier before an arrival": (faults.InFlight,
    "before all arrivals", (*PRODUCT, INVAL)),
  "no fence between stores and a product": (faults.MissingFence,
    "tcgen05.mma reads what threads wrote",
    tuple(x for x in PRODUCT if x != FENCE)),
  "no barrier between stores and a product": (faults.DataRace,
    "tcgen05.mma reads",
    (*PRODUCT[:4], "@%p1 bra $L1; $L1:", multiply())),
  "a product of what another warp has not waited for": (faults.InFlight,
    "tcgen05.st not waited for", tuple(x for x in PRODUCT if x != STORED)),
  "a product of an operand that it overwrites": (faults.InFlight,
    "which it writes",
    (*PRODUCT[:6], multiply().replace("[%r2],", "[%r2+32],"))),
  "a product of another shape with sums in flight": (faults.InFlight,
    "another kind or place",
    (*PRODUCT[:6], multiply(), multiply(instruction=plain(n=8)))),
  "sums that nothing has written": (faults.Undefined, "nothing has written",
    (*PRODUCT[:6], multiply(keeps=1))),
}  # fmt: skip


class FaultsTest(parameterized.TestCase):
  def test_allows_the_product(self):
    run(*PRODUCT, wait(), LOAD, IS_LOADED, MEET, INVAL, END)

  @parameterized.parameters(*FAULTS)
  def test_finds(self, name):
    fault, message, body = FAULTS[name]
    with self.assertRaisesRegex(fault, message) as caught:
      run(*body)
    self.assertIs(type(caught.exception), fault)

  @parameterized.parameters(
    "tcgen05.cp.cta_group::1.128x256b [%r2], %rd1;",
    "tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r40}, [%r3];",
    "tcgen05.fence::before_thread_sync;",
    f"mbarrier.arrive.shared::cta.b64 _, [{BARRIER}];",
    f"@%p1 mbarrier.try_wait.parity.shared::cta.b64 %p3, [{BARRIER}], %r0;",
  )
  def test_refuses(self, instruction):
    with self.assertRaises(faults.NotModelled):
      run(instruction)

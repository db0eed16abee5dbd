# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What PTX leaves undefined is found, and what it allows is not."""

import numpy as np
from absl.testing import parameterized

from jaxplugin.lab.inspection.ptx import faults, shared_memory
from jaxplugin.testing.kernels import ptx_programs

THREADS = 64
# %rd0: a thread's place in the array; %r1: its shared address; %r2: that of a
# thread of the other warp, %r3: of its neighbour. %r4 is the thread.
START = """
  ld.param.b64 %rd0, [p0];
  mov.u32 %r4, %tid.x;
  mad.wide.u32 %rd0, %r4, 4, %rd0;
  shl.b32 %r1, %r4, 2;
  xor.b32 %r2, %r1, 128;
  xor.b32 %r3, %r1, 4;
"""
WRITE = "st.shared.b32 [%r1], %r4;"
BARRIER = "bar.sync 0;"
COPY = "cp.async.ca.shared.global [%r1], [%rd0], 4; cp.async.commit_group;"


def run(*body, threads=THREADS, **options):
  array = np.arange(THREADS, dtype=np.uint32) * 3
  launched = ptx_programs.run(
    START + "\n".join(body), array, threads=threads, **options
  )
  return launched


def stored(*body, **options):
  """Returns the array after each thread has stored %r5."""
  return run(*body, "st.global.b32 [%rd0], %r5;", **options).arrays[0]


THREAD = np.arange(THREADS)
ALLOWED = {
  "own bytes": ((WRITE, "ld.shared.b32 %r5, [%r1];"), THREAD),
  "another warp's after a barrier": (
    (WRITE, BARRIER, "ld.shared.b32 %r5, [%r2];"), THREAD ^ 32),
  "a lane's after the warp's barrier": (
    (WRITE, "bar.warp.sync -1;", "ld.shared.b32 %r5, [%r3];"), THREAD ^ 1),
  "the bytes of a lane's own copy": (
    (COPY, "cp.async.wait_group 0;", "ld.shared.b32 %r5, [%r1];"), THREAD * 3),
  "another's copy after a barrier": (
    (COPY, "cp.async.wait_all;", BARRIER, "ld.shared.b32 %r5, [%r2];"),
    (THREAD ^ 32) * 3),
  "zeros that are copied": (
    ("mov.u32 %r6, 0;",
     "cp.async.ca.shared.global [%r1], [%rd0], 4, %r6;",
     "cp.async.commit_group; cp.async.wait_group 0;",
     "ld.shared.b32 %r5, [%r1];"), THREAD * 0,
  ),
  "one value by all threads": (
    ("mov.u32 %r6, 64; st.shared.b32 [0], %r6;", BARRIER,
     "ld.shared.b32 %r5, [0];"), THREAD * 0 + 64,
  ),
  "writing again after a barrier": (
    (WRITE, BARRIER, "ld.shared.b32 %r5, [%r2];", BARRIER, WRITE), THREAD ^ 32),
  "threads that part and meet": (
    ("setp.lt.u32 %p1, %r4, 7; mov.u32 %r5, 1; @%p1 bra $L1;",
     "mov.u32 %r5, 2;", "$L1:", BARRIER), np.where(THREAD < 7, 1, 2),
  ),
  "loops of different lengths": (
    ("mov.u32 %r5, 0;", "$L1:", "add.u32 %r5, %r5, 3;",
     "setp.lt.u32 %p1, %r5, %r4; @%p1 bra $L1;"),
    np.maximum(-(-THREAD // 3), 1) * 3,
  ),
  "labels of one name in two scopes": (
    ("mov.u32 %r5, 0;", "{ again: add.u32 %r5, %r5, 1;",
     "setp.lt.u32 %p1, %r5, 5; @%p1 bra again; }",
     "{ again: add.u32 %r5, %r5, 100;",
     "setp.lt.u32 %p1, %r5, 300; @%p1 bra again; }"),
    THREAD * 0 + 305,
  ),
  "unwritten bits that are cut off": (
    ("and.b32 %r5, %r77, 0; prmt.b32 %r6, %r4, %r77, 0x5410;",
     "shl.b32 %r6, %r6, 16; shr.u32 %r6, %r6, 16; or.b32 %r5, %r5, %r6;"),
    THREAD,
  ),
  "the written half of a pair": (
    ("mov.b64 %rd5, {%r4, %r77}; mov.b64 %rd6, {0f3F800000, %r4};",
     "mul.f32x2 %rd5, %rd5, %rd6; neg.f32x2 %rd5, %rd5; abs.f32x2 %rd5, %rd5;",
     "mov.b64 {%r5, _}, %rd5;"), THREAD,
  ),
}  # fmt: skip
FORBIDDEN = {
  "another warp's without a barrier": (faults.DataRace,
    "written since the last barrier", (WRITE, "ld.shared.b32 %r5, [%r2];")),
  "another warp's with a warp's barrier": (faults.DataRace, "written since",
    (WRITE, "bar.warp.sync -1; ld.shared.b32 %r5, [%r2];")),
  "a lane's without the warp's barrier": (faults.DataRace, "written since",
    (WRITE, "ld.shared.b32 %r5, [%r3];")),
  "writing over what another reads": (faults.DataRace, "read since",
    (WRITE, BARRIER, "ld.shared.b32 %r5, [%r2];", WRITE)),
  "writing over what another has written": (faults.DataRace, "written since",
    (WRITE, "st.shared.b32 [%r2], %r4;")),
  "different values at one byte": (faults.DataRace, "different values",
    ("st.shared.b32 [0], %r4;",)),
  "different values at one global byte": (faults.DataRace, "different values",
    ("ld.param.b64 %rd1, [p0]; st.global.b32 [%rd1], %r4;",)),
  "a copy that nobody waits for": (faults.InFlight, "cp.async still writes",
    (COPY, "ld.shared.b32 %r5, [%r1];")),
  "waiting for an older copy": (
    faults.InFlight, "cp.async still writes",
    ("cp.async.commit_group;", COPY, "cp.async.wait_group 1;",
     "ld.shared.b32 %r5, [%r1];"),
  ),
  "another's copy without a barrier": (faults.DataRace, "written since",
    (COPY, "cp.async.wait_group 0; ld.shared.b32 %r5, [%r2];")),
  "a copy over what another reads": (faults.DataRace, "read since",
    (WRITE, BARRIER, "ld.shared.b32 %r5, [%r2];", COPY)),
  "shared bytes never written": (faults.Undefined, "nothing has written",
    ("ld.shared.b32 %r5, [%r1];",)),
  "beyond shared memory": (faults.OutOfBounds, "which has 1024",
    ("st.shared.b32 [%r1+1000], %r4;",)),
  "beyond an array": (faults.OutOfBounds,
    "byte 256 of argument 0, which has 256", ("ld.global.b32 %r5, [%rd0+4];",)),
  "before an array": (faults.OutOfBounds, "byte -4 of argument 0",
    ("ld.global.b32 %r5, [%rd0+-4];",)),
  "near no array": (faults.OutOfBounds, "near no array",
    ("mov.u64 %rd1, 64; ld.global.b32 %r5, [%rd1];",)),
  "a global address that is not aligned": (faults.Misaligned, "8 bytes",
    ("ld.global.b64 %rd1, [%rd0];",)),
  "a shared address that is not aligned": (faults.Misaligned, "4 bytes",
    ("st.shared.b32 [%r1+2], %r4;",)),
  "an unwritten register that is stored": (faults.Undefined, "%r5",
    ("mov.b32 %r5, %r77;",)),
  "an unwritten address": (faults.Undefined, "%rd7",
    ("ld.global.b32 %r5, [%rd7];",)),
  "an unwritten condition": (faults.Undefined, "%p7",
    ("@%p7 mov.b32 %r5, %r4;",)),
  "a register that some threads wrote": (faults.Undefined, "%r5",
    ("setp.lt.u32 %p1, %r4, 9; @%p1 mov.b32 %r5, %r4;",)),
  "a sum with unwritten bits": (faults.Undefined, "%r5",
    ("add.u32 %r5, %r77, %r4; and.b32 %r5, %r5, 1;",)),
  "the unwritten half of a pair": (faults.Undefined, "%r5",
    ("mov.b64 %rd5, {%r77, %r4}; add.f32x2 %rd5, %rd5, %rd5;",
     "mov.b64 {%r5, _}, %rd5;")),
  "a field at an unwritten place": (faults.Undefined, "%r5",
    ("bfe.u32 %r5, %r4, %r77, 4;",)),
  "a barrier that some reach": (
    faults.Divergence, "not all threads",
    ("mov.u32 %r5, %r4; setp.lt.u32 %p1, %r4, 32; @%p1 bra $L1;", BARRIER,
     "$L1:"),
  ),
  "a collective instruction of a part of a warp": (faults.Divergence,
    "not all lanes",
    ("setp.lt.u32 %p1, %r4, 9; @%p1 redux.sync.add.u32 %r5, %r4, -1;",)),
  "a loop without end": (faults.Endless, "1000", ("$L1: bra $L1;",)),
}  # fmt: skip


class FaultsTest(parameterized.TestCase):
  @parameterized.parameters(*ALLOWED)
  def test_allows(self, name):
    body, expected = ALLOWED[name]
    np.testing.assert_array_equal(stored(*body), expected.astype(np.uint32))

  @parameterized.parameters(*FORBIDDEN)
  def test_finds(self, name):
    fault, message, body = FORBIDDEN[name]
    with self.assertRaisesRegex(fault, f"{message}.*; block 0, line") as caught:
      stored(*body, most_instructions=1000)
    self.assertIs(type(caught.exception), fault)

  def test_blocks_do_not_write_the_same(self):
    with self.assertRaisesRegex(faults.DataRace, "another block wrote"):
      stored("mov.u32 %r5, %r4;", grid=2)

  def test_blocks_have_numbers(self):
    left = run(
      "mov.u32 %r5, %ctaid.x; setp.eq.u32 %p1, %r4, %r5;",
      "mov.u32 %r6, %nctaid.x; @%p1 st.global.b32 [%rd0], %r6;",
      grid=3,
    ).arrays[0]
    np.testing.assert_array_equal(left[:4], [3, 3, 3, 9])

  @parameterized.parameters(
    ("mov.b32 %r10, %r4;", "descriptor"),  # what is read next
    ("add.u32 %r9, %r4, 1; mov.b32 %r10, %r9;", "%r10 is written, then used"),
    ("add.u32 %r10, %r4, 1;", "%r10 is written, then used"),
  )
  def test_accumulators_may_be_copied_after_a_fence(self, body, message):
    with self.assertRaisesRegex(faults.Fault, message):
      run(
        "wgmma.fence.sync.aligned;",
        body,
        "setp.lt.u32 %p1, %r4, 999;"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16",
        "{%r10, %r11, %r12, %r13}, %rd0, %rd0, %p1, 1, 1, 0, 0;",
        threads=128,
      )

  def test_lanes_of_a_warp_must_agree_whether_wgmma_keeps_sums(self):
    with self.assertRaisesRegex(faults.Divergence, "scale-d differs"):
      run(
        "setp.lt.u32 %p1, %r4, 5; wgmma.fence.sync.aligned;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16",
        "{%r10, %r11, %r12, %r13}, %rd0, %rd0, %p1, 1, 1, 0, 0;",
        threads=128,
      )

  def test_bytes_between_rows_are_out_of_bounds(self):
    array = np.zeros((4, 5), np.uint32)[:, :4]
    body = "ld.param.b64 %rd0, [p0]; ld.global.b32 %r1, [%rd0+{}];"
    ptx_programs.run(body.format(20), array)
    with self.assertRaisesRegex(faults.OutOfBounds, "between rows"):
      ptx_programs.run(body.format(16), array)


class BanksTest(parameterized.TestCase):
  @parameterized.parameters(
    # Bytes a lane, bytes between lanes; passes of two warps, and the least.
    (4, 4, 2, 2),
    (4, 8, 4, 2),
    (4, 128, 64, 2),
    (4, 0, 2, 2),  # one word, given to all
    (1, 1, 2, 2),
    (2, 4, 2, 2),
    (8, 8, 4, 4),
    (16, 16, 8, 8),
    (16, 32, 16, 8),
    (16, 128, 64, 8),
    (16, 144, 8, 8),  # padded rows
  )
  def test_passes(self, size, stride, taken, least):
    lane = np.arange(64)
    addresses = (lane % 32 * stride).astype(np.int64)
    self.assertEqual(
      shared_memory.wavefronts(addresses, size, lane // 32), (taken, least)
    )

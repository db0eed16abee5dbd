# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Instructions, loops and load widths are read from text."""

import re

from absl.testing import absltest

from jaxplugin.lab.inspection import machine_code

# Written by hand after the forms that the tools print.
SASS = """
.text.kernel:
        /*0000*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0010*/              @!P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0020*/                   LDG.E R4, desc[UR4][R2.64] ;
.L_x_2:
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0040*/                   HMMA.16816.F32.BF16 R4, R8, R14, R4 ;
        /*0050*/               @P1 BRA `(.L_x_3) ;
.L_x_4:
        /*0060*/                   BRA.U UP0, `(.L_x_2) ;
        /*0070*/               @P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0080*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/               @P2 BRA `(.L_x_3) ;
        /*00b0*/                   BRA `(.L_x_4) ;
.L_x_5:
        /*00c0*/                   BRA `(.L_x_5);
"""
AMDGCN = """
kernel:
\ts_cbranch_scc1 .LBB0_3
.LBB0_1:                                ; %loop
\tglobal_load_dwordx4 v[0:3], v[4:5], off
\tv_mfma_f32_32x32x16_bf16 v[0:15], v[16:19], v[20:23], v[0:15]
\ts_cbranch_scc0 .LBB0_1
.LBB0_3:
\tv_mfma_f32_32x32x16_bf16 v[0:15], v[16:19], v[20:23], v[0:15]
\ts_endpgm
"""


class MachineCodeTest(absltest.TestCase):
  def test_main_loop_is_the_innermost_and_keeps_blocks_moved_out_of_line(self):
    # The loop from .L_x_2, with the wait .L_x_3 that jumps back into it: its
    # blocks are .L_x_2 (3), .L_x_4 (1) and .L_x_3 (2). The outer loop has no
    # more products; neither those before and after it nor the trap count.
    loop = machine_code.main_loop([*machine_code.read_sass(SASS)])
    self.assertEqual(loop.matrix_instructions, {"HMMA.16816.F32.BF16": 2})
    self.assertEqual(loop.instructions, 6)

  def test_products_outside_of_loops_make_no_main_loop(self):
    straight = re.sub(r".*BRA.*\n", "", SASS)
    items = [*machine_code.read_sass(straight)]
    self.assertIsNone(machine_code.main_loop(items))

  def test_main_loop_of_amdgcn(self):
    items = [*machine_code.read_amdgcn(AMDGCN)]
    loop = machine_code.main_loop(items)
    self.assertEqual(loop.matrix_instructions, {"v_mfma_f32_32x32x16_bf16": 1})
    self.assertEqual(loop.instructions, 3)
    self.assertEqual(
      machine_code.matrix_instructions(items),
      {"v_mfma_f32_32x32x16_bf16": 2},
    )

  def test_load_widths_of_ptx(self):
    text = """
      ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
      @%p1 ld.global.L1::evict_last.L2::cache_hint.v2.b64 { %rd3, %rd4 }, [%rd1];
      ld.global.nc.b8 %rs1, [%rd1];
      ld.shared.v4.b32 { %r1, %r2, %r3, %r4 }, [ %r1 ];
      cp.async.cg.shared.global [ %r9 + 0 ], [ %rd2 + 0 ], 0x10, %r10;
      cp.async.ca.shared.global.L2::128B [ %r9 ], [ %rd2 ], 4;
      cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];
      @%p2 cp.async.bulk.tensor.3d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3, %r5}], [%r4];
    """  # noqa: E501
    self.assertEqual(
      machine_code.global_load_bits_of_ptx(text), {8: 1, 32: 1, 128: 3}
    )
    self.assertEqual(machine_code.tensor_copies_of_ptx(text), 2)

  def test_load_widths_of_amdgcn(self):
    text = """
      global_load_dwordx4 v[0:3], v[4:5], off
      buffer_load_dwordx2 v[0:1], v4, s[0:3], 0 offen
      global_load_lds_dwordx4 v[0:1], off
      global_load_async_to_lds_b128 v0, v1, s[0:1]
      buffer_load_dword v0, v1, s[0:3], 0 offen
      global_load_ushort v0, v[4:5], off
      global_load_ubyte v0, v[4:5], off
      global_load_u8 v0, v[4:5], off
      global_load_b64 v[0:1], v[4:5], off
      ds_load_b128 v[0:3], v4
    """
    self.assertEqual(
      machine_code.global_load_bits_of_amdgcn(text),
      {8: 2, 16: 1, 32: 1, 64: 2, 128: 3},
    )

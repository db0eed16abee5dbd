# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes of kernels are those that a reader counts in the HLO."""

from absl.testing import absltest

from jaxplugin.testing.oracles import hlo_traffic

TEXT = """HloModule m

%inner (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %negate.1 = f32[8]{0} negate(%p)
}

ENTRY %main (x: bf16[4,8], y: f32[8]) -> (u8[32], f32[8]) {
  %x = bf16[4,8]{1,0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %bitcast.2 = bf16[32]{0} bitcast(%x)
  %call.1 = (u8[32]{0}, f8e4m3fn[2]{0}) custom-call(%bitcast.2, %y, %bitcast.2), custom_call_target="f"
  %first = u8[32]{0} get-tuple-element(%call.1), index=0
  %all-reduce-start = f32[8]{0} all-reduce-start(%y), to_apply=%inner
  %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)
  %fusion.3 = f32[8]{0} fusion(%all-reduce-done), kind=kLoop, calls=%inner
  ROOT %tuple = (u8[32]{0}, f32[8]{0}) tuple(%first, %fusion.3)
}
"""  # noqa: E501


class HloTrafficTest(absltest.TestCase):
  def test_operands_count_once_and_what_runs_nothing_does_not(self):
    self.assertEqual(
      hlo_traffic.kernels(TEXT),
      [("custom-call", 2 * 32 + 4 * 8 + 32 + 2), ("fusion", 32 + 32)],
    )

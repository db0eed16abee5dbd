# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes PTX that was compiled for a GPU on a CPU, and checks what it does.

All threads of a block take each instruction at once, as NumPy arrays. What PTX
leaves undefined is a fault: races in shared memory, copies that nobody waited
for, missing fences, bytes outside of an array, registers that nothing wrote.
`docs/developer/ptx_emulator.md` lists the modelled instructions, by section of
the PTX ISA.
"""

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes PTX on a CPU, and checks that its behavior is defined.

All active threads of a block execute an instruction at once, as NumPy arrays.
Undefined behavior raises a fault (`faults`). Examples are races in shared
memory, reads of a copy before the wait for it, missing fences, accesses outside
of an array, and reads of registers that no instruction has written.
`docs/developer/ptx_emulator.md` lists the modelled instructions, by section of
the PTX ISA.
"""

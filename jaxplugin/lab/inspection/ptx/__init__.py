# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes PTX on a CPU, and checks that its behavior is defined.

All threads of a block execute an instruction at once, as NumPy arrays.
Undefined behavior is a fault: races in shared memory, copies that no thread
waited for, missing fences, bytes outside of an array, registers without a
value.
`docs/developer/ptx_emulator.md` lists the modelled instructions, by section of
the PTX ISA.
"""

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The parts that all operations share.

`primitive` defines a call, which is arrays and hashable options, and registers
a primitive's rules for lowering, batching, derivatives and partitioning.
`choice` chooses between the backends of an operation, and `logs` reports what a
lowered program runs. `triton_launches` runs the launches of Triton kernels.

`alternatives` leaves the choice between a kernel and operations to the
lowering.

`split` splits an operation over devices. `notation` names its dimensions
("mk, nk -> mn"), and `assignment` assigns mesh axes to them. A call on several
devices requires Shardy. An operation's `sharding` contains its assignment, the
computation of each device and the types on explicit axes.
"""

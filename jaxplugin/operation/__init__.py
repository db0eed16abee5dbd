# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The parts that all operations share.

`static_call` has the base of a call: arrays, and options that can be hashed.
`primitive` registers the rules of a primitive: lowering, batching, derivatives,
partitioning. `choice` chooses between the backends of an operation.

`split` splits an operation over devices. For that, `notation` names dimensions
("mk, nk -> mn"), `assignment` gives each dimension its mesh axes, and
`byte_arrays` has the bytes of quantized arrays that devices exchange. Without
Shardy, a call on several devices is refused. The folder `sharding` of an
operation has its assignment, the computation of one device (`per_device`) and
its types on explicit axes (`explicit`).
"""

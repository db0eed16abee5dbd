# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`jp.export`: exported modules that keep their kernels.

If a program is partitioned, the export first compiles it and records the
partitioner's callbacks. It then lowers each call as a `shard_map` with the
recorded shardings. `runtime/lowering` has the state of an export, which
lowering rules read. `api_test` loads modules of earlier releases.
"""

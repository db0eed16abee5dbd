# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`jp.export`: exported modules that keep their kernels.

Lowering rules ask `runtime/exporting` whether an export is in progress. If a
program is partitioned, the export first compiles it and records the callbacks
of the partitioner. It then lowers each call as a `shard_map` with the recorded
shardings. `compatibility_test` loads modules of earlier releases.
"""

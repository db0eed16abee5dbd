# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands, one a file, each of which ends in its `COMMAND`."""

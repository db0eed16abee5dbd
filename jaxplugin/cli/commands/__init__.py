# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands that need no laboratory, each an `arguments.Command`."""

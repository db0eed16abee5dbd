# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What every implementation of the dot must do, as one suite of tests."""

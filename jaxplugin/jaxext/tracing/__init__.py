# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations as they are traced: seen, replaced, and traced back to a line."""

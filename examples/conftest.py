# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Lets the examples' tests import the examples, as running a script does."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

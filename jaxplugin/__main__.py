# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxplugin`: the command line, `jaxplugin.cli`."""

import sys

from jaxplugin.cli import main

if __name__ == "__main__":
  sys.exit(main.main())

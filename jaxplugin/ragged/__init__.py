# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ragged_dot`: a matmul of groups of rows, one weight for each group.

A mixture of experts sorts its tokens by expert and multiplies each group of
rows by the weight of its expert. `api` checks the arguments and makes a
`calls.RaggedDotCall`. `primitive` binds it, and `backends` chooses a backend
and emits it. `general` also contracts the rows of each group
(`calls.RaggedContraction`), which computes the gradient of the experts.
"""

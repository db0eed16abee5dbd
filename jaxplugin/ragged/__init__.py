# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ragged_dot`: rows in groups, each with a block-scaled weight of its own.

A mixture of experts sorts its tokens by expert; this multiplies each group of
rows with its expert. It is built as `dot` is: `api` takes the arguments and
makes a `calls.Call`, `primitive` binds it, `backends` chooses and emits.
`contraction` sums over each group's rows, as gradients of weights do.
"""

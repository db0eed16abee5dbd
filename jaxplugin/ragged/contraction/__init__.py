# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The ragged contraction: each group's rows are summed over.

    result[g] = sum over the rows i of group g of outer(lhs[i], rhs[i])

It is what the gradient of a mixture's weights is made of, and what
`ragged_dot_general` computes where the ragged dimension is contracted.
"""

# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_params` quantizes the weights of a model.

`conversion` traces a function to see which matmuls use a weight, and quantizes.
`recognition` says which dimension the matmuls contract.
"""

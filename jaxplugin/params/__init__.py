# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_params` quantizes the weights of a model.

`observation` traces a function to see which matmuls use a weight, and
`recognition` says which dimension they contract. `conversion` quantizes.
"""

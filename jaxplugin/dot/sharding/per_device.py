# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The part of a block-scaled dot that each device computes.

Sides are converted to bytes, so that collectives move quantized data.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping

import jax
import numpy as np

from jaxplugin.dot import calls
from jaxplugin.dot import epilogue
from jaxplugin.dot.sharding import assignment as dot_assignment
from jaxplugin.operation import assignment as assignment_lib

Dot = Callable[[calls.DotCall], jax.Array]


def can_partition(call: calls.DotCall) -> bool:
  """Returns whether a call can be split: no byte of two blocks, no size 0."""
  call = call.without_origins_of_sides()
  if any(0 in x.shape for x in call.flatten()):
    return False
  if not (call.lhs.has_whole_pairs and call.rhs.has_whole_pairs):
    return False
  notation = dot_assignment.notation(call)
  sizes = (notation.sizes[name] for name in notation.reductions)
  return all(size % granule == 0 for size, granule in sizes)


def prepared(call: calls.DotCall) -> calls.DotCall:
  """Converts a call's sides to bytes, with linear scales without padding.

  Two global scales stay separate, so that a backend may read both. A side loses
  its origin: a shard of a layer is not a slice of the device's shard of the
  stack, and quantizing a shard to NVFP4 would compute another global scale.
  """
  call = call.without_origins_of_sides().with_bytes()
  call = call.with_linear_scales().with_scales_alone()
  return call.replace(lhs=call.lhs.as_bytes(), rhs=call.rhs.as_bytes())


def restored(call: calls.DotCall) -> calls.DotCall:
  """Undoes `prepared`: views bytes as values and scales of their dtypes."""
  return call.replace(lhs=call.lhs.as_elements(), rhs=call.rhs.as_elements())


def compute(
  local: Dot,
  call: calls.DotCall,
  assignment: assignment_lib.Assignment,
  axis_sizes: Mapping[str, int],
) -> jax.Array:
  """Computes a device's dot, the sum over devices, and the epilogue.

  Args:
    local: computes a call on one device.
    call: `prepared` call of the device's shards.
    assignment: assignment of mesh axes for the whole call.
    axis_sizes: size of each mesh axis.
  """
  del axis_sizes
  call = restored(call)
  if not assignment.reduce:
    return local(call)
  part, after = dot_assignment.steps(call)
  total = assignment_lib.reduced(local(part), assignment)
  if not after.has_epilogue:
    # The result is the bare sum, so that XLA can merge nested all-reduces.
    return total.astype(call.preferred_element_type)
  return epilogue.apply(total.astype(np.float32), epilogue.with_product(after))

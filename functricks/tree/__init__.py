"""Pytrees: walk them, name their leaves, and do arithmetic on them.

A tree is any nesting of dict, NamedTuple, tuple and list with tensors as leaves. Leaves are matched by name, and dicts
keep their insertion order, so that sums run in the order of ``named_parameters()`` and agree with PyTorch's to the bit.

All arithmetic on trees goes through one seam, ``_seam.py``, which picks the faster of two ways of doing the same
thing:

- plain tensors, and the lanes of a single ``vmap`` level (the stacked tensors underneath, coefficients broadcast,
  which is what the batching rules do at a multiple of the cost): PyTorch's ``torch._foreach_*`` kernels, one call for
  all leaves;
- anything else (nested transforms, differentiation, ``torch.compile``): ordinary operations, a leaf at a time.

Coefficients are Python numbers or 0-d tensors. A tensor coefficient is cast to the leaf's compute dtype (float32 for
half) before it meets the leaf, because under ``vmap`` a 0-d tensor is no longer 0-d and would promote it.
"""

from functricks.tree._adam import adam
from functricks.tree._arithmetic import (
    add,
    add_scaled,
    add_to_total,
    as_real,
    cast,
    clamp,
    ema,
    ema_of_squares,
    holds_everywhere,
    maximum,
    mul,
    or_one,
    pointwise,
    root_ratio,
    scale,
    scaled_sum,
    sqrt,
    sub,
    where,
    wide,
    zeros_like,
)
from functricks.tree._lanes import (
    above_lanes,
    below_lanes,
    compute_dtype,
    is_transformed,
    lanes,
    map_lanes,
    outside_lanes,
)
from functricks.tree._norms import all_finite, norm, norm_parts
from functricks.tree._selecting import Where, label, select
from functricks.tree._walking import (
    check_like,
    flatten,
    from_named,
    leaves,
    map,
    named_leaves,
    path_number,
    paths,
    pick,
    structure_error,
    unflatten,
)

__all__ = [
    "Where",
    "above_lanes",
    "adam",
    "add",
    "add_scaled",
    "add_to_total",
    "all_finite",
    "as_real",
    "below_lanes",
    "cast",
    "check_like",
    "clamp",
    "compute_dtype",
    "ema",
    "ema_of_squares",
    "flatten",
    "from_named",
    "holds_everywhere",
    "is_transformed",
    "label",
    "lanes",
    "leaves",
    "map",
    "map_lanes",
    "maximum",
    "mul",
    "named_leaves",
    "norm",
    "norm_parts",
    "or_one",
    "outside_lanes",
    "path_number",
    "paths",
    "pick",
    "pointwise",
    "root_ratio",
    "scale",
    "scaled_sum",
    "select",
    "sqrt",
    "structure_error",
    "sub",
    "unflatten",
    "where",
    "wide",
    "zeros_like",
]

"""Learning-rate schedules: a step in, a number out, and no memory.

A schedule is a frozen value. ``f(step)`` is a 0-d float64 tensor (or one in the shape of the step), for any step, in
any order: to resume a run is to remember one integer.

``step`` is the number of updates applied so far: 0 for the first update. It does not count micro-batches (1000 of them,
accumulated by 4, are 250 steps), it is the same on every rank, and an update that was skipped does not move it. Another
clock is an explicit division: ``f(samples_seen // batch_size)``.

What is data and what is structure: numbers may be tensors, and then they may differ from lane to lane under ``vmap``,
change without recompilation, and be differentiated; strings, bools and the number of milestones are structure. Build a
schedule inside the batched function, from its arguments::

    def loss_after(warmup, params):
        schedule = linear_schedule_with_warmup(1e-3, warmup, 1000)
        ...
    torch.func.vmap(loss_after)(torch.tensor([0, 100, 500]), params)

Rules that all of them share: a negative step is step 0; past its last step a schedule holds its last value, unless its
docstring says that it goes on (cosines rise again, cycles repeat); Python numbers are checked when the schedule is
made, tensors never. ``*`` multiplies schedules, :class:`join` runs one after the other, :func:`reduce_on_plateau` is
the one that has a state.
"""

import torch  # noqa: F401  # with tensor, what repr writes: eval(repr(schedule), vars(functricks.schedules))
from torch import tensor  # noqa: F401

from functricks.schedules.base import Curve, product
from functricks.schedules.compose import join, lambda_schedule
from functricks.schedules.cycles import cosine_restarts, cyclic, one_cycle
from functricks.schedules.decay import (
    constant,
    cosine_annealing,
    exponential_decay,
    inverse_sigmoid,
    linear,
    multistep,
    polynomial,
    step_decay,
)
from functricks.schedules.drawing import horizon, plot, sample
from functricks.schedules.plateau import Plateau, PlateauState, reduce_on_plateau
from functricks.schedules.warmup import (
    constant_schedule,
    constant_schedule_with_warmup,
    cosine_schedule_with_warmup,
    cosine_with_hard_restarts_schedule_with_warmup,
    inverse_sqrt,
    inverse_sqrt_schedule,
    linear_schedule_with_warmup,
    linear_warmup,
    polynomial_decay_schedule_with_warmup,
    wsd,
    wsd_schedule,
)

__all__ = [
    "Curve",
    "Plateau",
    "PlateauState",
    "constant",
    "constant_schedule",
    "constant_schedule_with_warmup",
    "cosine_annealing",
    "cosine_restarts",
    "cosine_schedule_with_warmup",
    "cosine_with_hard_restarts_schedule_with_warmup",
    "cyclic",
    "exponential_decay",
    "horizon",
    "inverse_sigmoid",
    "inverse_sqrt",
    "inverse_sqrt_schedule",
    "join",
    "lambda_schedule",
    "linear",
    "linear_schedule_with_warmup",
    "linear_warmup",
    "multistep",
    "one_cycle",
    "plot",
    "polynomial",
    "polynomial_decay_schedule_with_warmup",
    "product",
    "reduce_on_plateau",
    "sample",
    "step_decay",
    "wsd",
    "wsd_schedule",
]

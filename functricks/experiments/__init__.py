"""Batched experiments: many configurations of one training run, trained as one program.

An :class:`Experiment` is three pure functions. :func:`run` stacks the numbers of the configurations (learning rates,
strengths, seeds) along a leading axis and maps the functions over it with ``vmap``, so that a step of all lanes costs
little more than a step of one. What is not a number (strings, bools, None, callables) is structure: configurations
that share it form one batched program.

    configs = grid(lr=[1e-3, 1e-2], label_smoothing=[0.0, 0.1], seed=range(8))
    results = run(experiment, configs, minibatches((x, y), 32, epochs=10), key=random.key(0), eval_data=(x_val, y_val))
    results.compare(to={"lr": 1e-3, "label_smoothing": 0.0}, by="seed")
"""

from functricks.experiments.batches import Minibatches, minibatches
from functricks.experiments.configs import grid, zipped
from functricks.experiments.results import Results, t_interval
from functricks.experiments.running import Experiment, run

__all__ = ["Experiment", "Minibatches", "Results", "grid", "minibatches", "run", "t_interval", "zipped"]

"""What every test session shares: one thread, fixed seeds, hypothesis profiles, and a clean compiler between tests.

The top of this file holds for the doctests in functricks/ too; the fixtures hold for the tests in tests/ only, so a
doctest seeds what it draws.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

os.environ.setdefault("MPLBACKEND", "Agg")  # before anything imports matplotlib: no display needed

import hypothesis
import numpy
import pytest
import torch

# Tensors in tests are small: a second thread costs more than it gives, and one thread sums in one order.
torch.set_num_threads(1)

# No deadline: the first example of a test may compile. In CI every run draws the same examples.
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def _reproducible() -> Iterator[None]:
    """Seed the global generators, which oracles draw from, and put torch's global settings back afterwards."""
    random.seed(0)
    numpy.random.seed(0)  # scikit-learn draws from it
    torch.manual_seed(0)
    dtype, grad, deterministic = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    torch.use_deterministic_algorithms(deterministic)
    if "torch._dynamo" in sys.modules:  # closures made by one maker share their code object, and its recompile limit
        torch._dynamo.reset()

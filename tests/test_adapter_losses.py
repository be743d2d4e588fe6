"""Losses as modules, and ScheduledSampler: the pure functions with PyTorch's manners."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_same
from torch import Tensor, nn

import functricks as ft
from functricks import losses, random, schedules, sequences
from functricks.adapter import FocalLoss, InfoNCE, LabelSmoothingCrossEntropy, Loop, LossModule, ScheduledSampler

LOGITS = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.randint(4, (6, 3), generator=torch.Generator().manual_seed(1))
TARGETS[0, 0] = TARGETS[3] = -100
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)

Reduction = Any


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
def test_label_smoothing_is_pytorchs(weight: Tensor | None, reduction: Reduction) -> None:
    """E2: ignored rows neither count nor leak; E4: the target becomes 1 - e + e / C."""
    ours = LabelSmoothingCrossEntropy(0.1, weight=weight, reduction=reduction)
    classic = nn.CrossEntropyLoss(weight, label_smoothing=0.1, reduction=reduction)
    assert_close(ours(LOGITS, TARGETS), classic(LOGITS, TARGETS))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_focal_loss_of_gamma_zero_is_cross_entropy(reduction: Reduction) -> None:
    ours = FocalLoss(0.0, weight=WEIGHT, reduction=reduction)
    assert_close(ours(LOGITS, TARGETS), F.cross_entropy(LOGITS, TARGETS, WEIGHT, reduction=reduction))


def test_focal_loss_by_hand() -> None:
    """C12: the mean is over the valid rows."""
    logits = torch.tensor([[2.0, 0, 0], [0, 1, 0], [0, 0, 0]])
    assert FocalLoss()(logits, torch.tensor([0, 1, -100])).item() == pytest.approx(0.0549756, abs=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_focal_loss_of_saturated_logits_has_a_finite_gradient(gamma: float) -> None:
    """C11, E10: in the usual recipe NaN for gamma < 1."""
    logits = torch.tensor([[100.0, -100.0], [-100.0, 100.0]], requires_grad=True)
    FocalLoss(gamma)(logits, torch.tensor([0, 0])).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_info_nce_is_its_classic_line() -> None:
    queries, keys = LOGITS[:, :, 0], LOGITS[:, :, 1]
    scores = F.normalize(queries) @ F.normalize(keys).T / 0.2
    assert_close(InfoNCE(0.2)(queries, keys), F.cross_entropy(scores, torch.arange(6)))
    labels = torch.tensor([1, 0, 3, 2, 5, 4])
    assert_close(InfoNCE(0.2)(queries, keys, labels=labels), F.cross_entropy(scores, labels))


def test_a_learned_temperature() -> None:
    criterion = InfoNCE(nn.Parameter(torch.tensor(0.1, dtype=torch.float64)))
    assert [name for name, _ in criterion.named_parameters()] == ["temperature"]
    criterion(LOGITS[:, :, 0], LOGITS[:, :, 1]).backward()
    assert criterion.temperature.grad.abs() > 0


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "binary_cross_entropy_with_logits", "kl_divergence"])
def test_any_loss_may_be_a_module(name: str) -> None:
    function = getattr(losses, name)
    pair = LOGITS, LOGITS.flip(0).sigmoid()
    for reduction in ("mean", "sum", "none"):
        loss = function(*pair)
        want = {"mean": loss.mean(), "sum": loss.sum(), "none": loss.values}[reduction]
        assert_same(LossModule(function, reduction)(*pair), want)
    assert_same(LossModule(function).loss(*pair), loss)


def test_buffers_move_and_are_saved() -> None:
    criterion = FocalLoss(weight=WEIGHT)
    assert criterion.float().weight.dtype == torch.float32
    assert criterion.to("meta").weight.device.type == "meta"
    saved = FocalLoss(weight=WEIGHT).state_dict()
    assert list(saved) == ["weight"]
    other = FocalLoss(weight=torch.ones(4, dtype=torch.float64))
    other.load_state_dict(saved)
    assert_same(other(LOGITS, TARGETS), FocalLoss(weight=WEIGHT)(LOGITS, TARGETS))


@pytest.mark.parametrize(
    "criterion",
    [
        LabelSmoothingCrossEntropy(0.2, weight=WEIGHT),
        FocalLoss(1.5),
        LossModule(losses.cross_entropy, "sum", label_smoothing=0.3),
    ],
)
def test_pickles_and_copies(criterion: nn.Module) -> None:
    want = criterion(LOGITS, TARGETS)
    file = io.BytesIO()
    torch.save(criterion, file)
    file.seek(0)
    for other in (
        pickle.loads(pickle.dumps(criterion)),
        copy.deepcopy(criterion),
        torch.load(file, weights_only=False),
    ):
        assert repr(other) == repr(criterion)
        assert_same(other(LOGITS, TARGETS), want)


def test_reprs() -> None:
    assert repr(FocalLoss()) == ("FocalLoss(gamma=2.0, ignore_index=-100, label_smoothing=0.0, reduction='mean')")
    assert repr(LabelSmoothingCrossEntropy(weight=WEIGHT)) == (
        "LabelSmoothingCrossEntropy(label_smoothing=0.1, weight=tensor of shape (4,), ignore_index=-100, "
        "temperature=1.0, reduction='mean')"
    )
    assert repr(InfoNCE()) == "InfoNCE(temperature=0.1, normalize=True, reduction='mean')"


def test_attributes_may_be_changed() -> None:
    criterion = FocalLoss(2.0)
    criterion.gamma = 0.0
    assert_close(criterion(LOGITS, TARGETS), F.cross_entropy(LOGITS, TARGETS))


def test_errors() -> None:
    with pytest.raises(ValueError, match="FocalLoss: reduction must be 'mean', 'sum' or 'none', got 'batchmean'"):
        FocalLoss(reduction="batchmean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LossModule: a module already has the attribute 'training'"):
        LossModule(losses.mse_loss, training=True)
    with pytest.raises(TypeError, match=r"LossModule: fn must return a functricks.Loss, got Tensor"):
        LossModule(F.mse_loss)(LOGITS, LOGITS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"focal_loss: gamma must lie in \[0, inf\], got -1.0"):
        FocalLoss(-1.0)(LOGITS, TARGETS)


def test_inside_a_loop() -> None:
    """`criterion.loss` has the weights by which micro-batches add up."""
    found = []
    for accumulate in (1, 3):
        torch.manual_seed(0)
        model, criterion = nn.Linear(4, 4, dtype=torch.float64), FocalLoss(weight=WEIGHT)

        def loss_fn(model: Any, batch: Any, criterion: FocalLoss = criterion) -> ft.Loss:
            return criterion.loss(model(batch[0]), batch[1])

        loop = Loop(model, loss_fn, torch.optim.SGD(model.parameters(), 1.0), accumulate=accumulate)
        rows, classes = LOGITS[:, :, 0], TARGETS[:, 1]
        for part in torch.arange(6).split([6] if accumulate == 1 else [1, 3, 2]):
            loop.step((rows[part], classes[part]))
        assert loop.updates == 1
        found.append(model.weight.detach())
    assert_close(found[1], found[0])


# --- scheduled sampling ----------------------------------------------------------------------------------------------

TABLE = torch.randn(7, 7, generator=torch.Generator().manual_seed(2))
WORDS = torch.randint(7, (5, 6), generator=torch.Generator().manual_seed(3))


def decode_step(state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    return TABLE[token] + state, state + TABLE[:, token].T


def test_the_sampler_is_the_pure_function() -> None:
    state = torch.zeros(5, 7)
    sampler = ScheduledSampler(schedules.linear(1.0, 1.0, 0.0, 4), 3)
    for step in range(6):
        p = float(schedules.linear(1.0, 1.0, 0.0, 4)(step))
        assert sampler.teacher_probability == p
        for call in range(2):
            key = random.fold_in(random.key(3), 2 * step + call)
            want = sequences.scheduled_sampling(decode_step, state, WORDS, p, key, start=1)
            assert_same(sampler(decode_step, state, WORDS, start=1), want)
        sampler.step()
    assert sampler.teacher_probability == 0.0  # E24: past the end it stays


def test_coins_differ_between_calls_and_come_back_after_a_checkpoint() -> None:
    """E26: the coins belong to the run, and its checkpoint holds them."""
    state = torch.zeros(5, 7)
    sampler = ScheduledSampler(0.5, coin="sequence")
    first = sampler(decode_step, state, WORDS)
    saved = sampler.state_dict()
    second = sampler(decode_step, state, WORDS)
    assert not torch.equal(first, second)
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    other = ScheduledSampler(0.5, 9, coin="sequence")
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_same(other(decode_step, state, WORDS), second)
    assert repr(other) == "ScheduledSampler(0.5, coin='sequence', steps=0)"
    assert repr(pickle.loads(pickle.dumps(other))) == repr(other)


def test_errors_of_the_sampler() -> None:
    with pytest.raises(ValueError, match=r"ScheduledSampler: teacher_probability must be in \[0, 1\], got 1.5"):
        ScheduledSampler(1.5)
    with pytest.raises(
        ValueError, match=r"ScheduledSampler: the state must have steps, calls and key, got \['steps'\]"
    ):
        ScheduledSampler(1.0).load_state_dict({"steps": 1})

"""adapter.Loop: a hand-written loop's numbers to the bit, train_step's to rounding, and the faults of usual loops."""

from __future__ import annotations

import copy
import io
import math
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_nonzero, assert_run_close, assert_same
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import functricks as ft
from functricks import losses
from functricks.adapter import FGM, PGD, Loop

IGNORED = -100
Batch = Any


class Tagger(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 5, dtype=dtype)
        self.hidden = nn.Linear(5, 6, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 3, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.dropout(torch.tanh(self.hidden(self.embedding(tokens))))).transpose(1, 2)


def token_loss(model: nn.Module, batch: Batch) -> ft.Loss:
    return losses.cross_entropy(model(batch[0]), batch[1])


def batches(count: int, rows: int = 4, ignored: float = 0.3) -> list[Batch]:
    g = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        labels = torch.randint(3, (rows, 3), generator=g)
        labels[torch.rand(rows, 3, generator=g) < ignored] = IGNORED
        found.append((torch.randint(9, (rows, 3), generator=g), labels))
    return found


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Weight(nn.Module):
    """One number, and what is done with it: the field cases."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))


def times(model: Any, x: Tensor) -> Tensor:
    return model.w * x.mean()


def each(model: Any, x: Tensor) -> ft.Loss:
    return ft.Loss(model.w * x, torch.ones_like(x))


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- the numbers of other loops --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_plain_loop_to_the_bit(dtype: torch.dtype) -> None:
    data = batches(20)
    hand = Tagger(dtype)
    optimizer = AdamW(hand.parameters(), 1e-2)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    norms, seen = [], []
    for tokens, labels in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(hand(tokens), labels)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(hand.parameters(), 0.3))
        optimizer.step()
        scheduler.step()
        seen.append(loss.detach())

    model = Tagger(dtype)
    optimizer = AdamW(model.parameters(), 1e-2)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    loop = Loop(model, token_loss, optimizer, scheduler=scheduler, clip=0.3)
    infos = [loop.step(batch) for batch in data]
    assert_same(values(model), values(hand))
    assert_same([info.grad_norm for info in infos], norms)
    assert_close([info.loss for info in infos], seen)
    assert all(bool(info.applied) for info in infos)
    assert loop.updates == 20
    assert_nonzero(norms)


def hand_written(
    model: nn.Module, data: list[Batch], accumulate: int, epsilon: float, max_norm: float, decay: float
) -> AveragedModel:
    """Everything at once, written as the careful write it."""
    optimizer = AdamW(model.parameters(), 1e-2)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    emb = model.get_parameter("embedding.weight")
    for start in range(0, len(data), accumulate):
        window = data[start : start + accumulate]
        tokens_in_window = sum(int((labels != IGNORED).sum()) for _, labels in window)
        total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for tokens, labels in window:
            model.zero_grad()
            (F.cross_entropy(model(tokens), labels, reduction="sum") / tokens_in_window).backward()
            backup = emb.detach().clone()
            norm = emb.grad.norm()
            if norm > 0:
                emb.data.add_(epsilon * emb.grad / norm)
            (F.cross_entropy(model(tokens), labels, reduction="sum") / tokens_in_window).backward()
            emb.data.copy_(backup)
            for name, p in model.named_parameters():
                total[name] += p.grad
        for name, p in model.named_parameters():
            p.grad = total[name]
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
    return average


def test_every_trick_at_once_is_the_hand_written_loop_and_the_functional_step() -> None:
    data = batches(18)  # windows of 4, and one of 2
    data[5] = (data[5][0], torch.full_like(data[5][1], IGNORED))
    hand, model = Tagger(), Tagger()
    start = values(model)
    average = hand_written(hand, data, 4, 0.4, 0.3, 0.9)

    optimizer = AdamW(model.parameters(), 1e-2)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    attack = FGM(model, 0.4, "embedding.*")
    loop = Loop(model, token_loss, optimizer, scheduler=scheduler, accumulate=4, clip=0.3, adversarial=attack, ema=0.9)
    infos = list(loop.epoch(data))
    assert len(infos) == 5
    assert_run_close(values(model), values(hand), start)
    assert loop.ema is not None
    assert_run_close(values(loop.ema.module), values(average.module), start)

    # the same as values
    def loss_fn(params: Any, batch: Batch) -> ft.Loss:
        return losses.cross_entropy(torch.func.functional_call(hand, params, (batch[0],)), batch[1])

    grad_fn = ft.accumulate(ft.fgm(ft.gradient(loss_fn), 0.4, where="embedding.*"), micro_batch_size=4)
    warm_up = ft.schedules.lambda_schedule(1e-2, lambda step: ((step + 1) / 5).clamp(max=1.0))
    step = ft.train_step(grad_fn, ft.chain(ft.clip_by_global_norm(0.3, classic=True), ft.adamw(warm_up), ft.ema(0.9)))
    state = step.init(start)
    for index in range(0, 18, 4):
        parts = data[index : index + 4]
        whole = tuple(torch.cat(leaves) for leaves in zip(*parts, strict=True))
        state, info = step.update(state, whole)
        ours = infos[index // 4]
        assert_close(ours.loss, info.loss)
        assert_close(ours.weight.double(), info.weight.double())
        assert_close(ours.grad_norm, info.grad_norm)
        assert_close(ours.metrics["adversarial_loss"], info.metrics["adversarial_loss"])
    assert_run_close(values(model), state.params, start)
    assert_run_close(values(loop.ema.module), ft.averaged(state.optimizer, state.params), start)


def test_pgd_over_micro_batches_is_the_functional_one() -> None:
    data = batches(6)
    model = Tagger()
    start = values(model)
    attack = PGD(model, 0.5, ["embedding.*", "head.bias"], steps=3)
    loop = Loop(model, token_loss, SGD(model.parameters(), 0.5), accumulate=3, adversarial=attack)
    for batch in data:
        loop.step(batch)

    def loss_fn(params: Any, batch: Batch) -> ft.Loss:
        return losses.cross_entropy(torch.func.functional_call(model, params, (batch[0],)), batch[1])

    grad_fn = ft.pgd(ft.gradient(loss_fn), 0.5, 0.3, 3, where=["embedding.*", "head.bias"])
    step = ft.train_step(ft.accumulate(grad_fn, 3), ft.sgd(0.5))
    state = step.init(start)
    for index in (0, 3):
        state, _ = step.update(state, tuple(torch.cat(leaves) for leaves in zip(*data[index : index + 3], strict=True)))
    assert_run_close(values(model), state.params, start)


def test_order_and_split_of_micro_batches_do_not_matter() -> None:
    data = batches(4)
    whole = tuple(torch.cat(leaves) for leaves in zip(*data, strict=True))
    found = []
    for accumulate, parts in ((1, [whole]), (4, data), (4, data[::-1])):
        model = Tagger()
        loop = Loop(model, token_loss, SGD(model.parameters(), 1.0), accumulate=accumulate)
        for batch in parts:
            info = loop.step(batch)
        assert bool(info.applied)
        found.append((values(model), info.loss))
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


# --- the field cases -------------------------------------------------------------------------------------------------


def test_c01_tokens_weigh_alike() -> None:
    model = Weight()
    loop = Loop(model, each, SGD(model.parameters(), 1.0), accumulate=2)
    first = loop.step(numbers(1))
    assert not bool(first.applied)
    assert math.isnan(first.grad_norm.item())
    assert (first.loss.item(), first.weight.item(), loop.pending) == (1.0, 1.0, 1)
    info = loop.step(numbers(4, 4, 4))
    assert (info.loss.item(), info.weight.item(), info.grad_norm.item(), loop.pending) == (3.25, 4.0, 3.25, 0)
    assert model.w.item() == 1 - 3.25


def test_weights_of_a_lower_precision_cost_none() -> None:
    model = Weight(0.0)
    loop = Loop(
        model,
        lambda model, x: ft.Loss(model.w * x, torch.ones(len(x))),
        SGD(model.parameters(), 1.0),
        accumulate=2,
    )
    loop.step(numbers(*range(7)))
    loop.step(numbers(1, 3, 4))
    assert abs(model.w.item() + 2.9) < 1e-15


def test_c04_class_weights() -> None:
    logits, targets = torch.tensor([[0.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1])
    model = nn.Linear(2, 2, bias=False)
    nn.init.eye_(model.weight)
    weight = torch.tensor([1.0, 3.0])
    loop = Loop(
        model,
        lambda model, batch: losses.cross_entropy(model(batch[0]), batch[1], weight=weight),
        SGD(model.parameters(), 0.0),
        accumulate=2,
    )
    loop.step((logits[:1], targets[:1]))
    info = loop.step((logits[1:], targets[1:]))
    assert info.loss.item() == pytest.approx(0.2684828, abs=1e-6)
    want = torch.autograd.grad(F.cross_entropy(logits @ model.weight.T, targets, weight), model.weight)[0]
    assert_close(model.weight.grad, want)


def test_c05_left_over_micro_batches() -> None:
    model = Weight(0.0)
    loop = Loop(model, times, SGD(model.parameters(), 0.1), accumulate=4)
    infos = list(loop.epoch([numbers(1)] * 7))
    assert [info.grad_norm.item() for info in infos] == [1.0, 1.0]
    assert model.w.item() == pytest.approx(-0.2)
    assert loop.flush() is None
    loop.step(numbers(1))
    loop.step(numbers(3))
    loop.reset()  # or drop them
    assert loop.pending == 0
    assert model.w.grad is None


@pytest.mark.parametrize(("leftover", "w"), [("flush", -0.2), ("drop", -0.1), ("carry", -0.1)])
def test_left_overs_have_a_policy(leftover: Any, w: float) -> None:
    model = Weight(0.0)
    loop = Loop(model, times, SGD(model.parameters(), 0.1), accumulate=4)
    list(loop.epoch([numbers(1)] * 7, leftover=leftover))
    assert model.w.item() == pytest.approx(w)
    assert loop.pending == (3 if leftover == "carry" else 0)
    list(loop.epoch([numbers(1)], leftover=leftover))
    assert model.w.item() == pytest.approx({"flush": -0.3, "drop": -0.1, "carry": -0.2}[leftover])
    with pytest.raises(ValueError, match="epoch: leftover must be 'flush', 'drop' or 'carry', got 'leak'"):
        list(loop.epoch([], leftover="leak"))  # type: ignore[arg-type]


def test_c24_the_schedule_counts_updates() -> None:
    model = Weight()
    optimizer = SGD(model.parameters(), 1.0)
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    loop = Loop(model, times, optimizer, scheduler=StepLR(optimizer, 2, 0.5), accumulate=2)
    for _ in range(8):
        loop.step(numbers(1))
    assert rates == [1, 1, 0.5, 0.5]


def test_c25_a_skipped_step_moves_nothing_but_the_scale() -> None:
    model = Weight()
    optimizer = SGD(model.parameters(), 1.0)
    scheduler = StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loop = Loop(model, times, optimizer, scheduler=scheduler, scaler=scaler, ema=0.5)
    infos = [loop.step(numbers(x)) for x in (math.inf, math.inf, 0.1)]
    assert [bool(info.applied) for info in infos] == [False, False, True]
    assert model.w.item() == pytest.approx(0.9)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert scaler.get_scale() == 1.0
    assert loop.updates == 1
    assert loop.ema is not None
    assert int(loop.ema.n_averaged) == 1


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_skipped_without_a_scaler_too(bad: float) -> None:
    model = Weight()
    optimizer = AdamW(model.parameters(), 1.0)
    loop = Loop(model, times, optimizer, clip=1.0, scheduler=StepLR(optimizer, 1, 0.5))
    info = loop.step(numbers(bad))
    assert not bool(info.applied)
    assert not math.isfinite(info.grad_norm.item())
    assert (model.w.item(), optimizer.param_groups[0]["lr"], optimizer.state) == (1.0, 1.0, {})
    assert bool(loop.step(numbers(1)).applied)
    classic = Loop(model, times, optimizer, skip_nonfinite=False)
    assert bool(classic.step(numbers(bad)).applied)
    assert math.isnan(model.w.item())


def test_c26_clipping_sees_unscaled_gradients() -> None:
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = SGD(model.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loop = Loop(model, lambda model, x: model(x).mean(), optimizer, clip=1.0, scaler=scaler)
    info = loop.step(numbers(0.3, 0.4)[None])
    assert info.grad_norm.item() == pytest.approx(0.5)
    assert_close(model.weight.grad, numbers(0.3, 0.4)[None])


def test_c26_no_gradient_at_all_is_no_step() -> None:
    model = nn.ModuleDict({"used": Weight(), "unused": Weight()})
    optimizer = SGD(model["unused"].parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loop = Loop(model, lambda model, x: model["used"].w * x.mean(), optimizer, scaler=scaler)
    info = loop.step(numbers(2))
    assert (info.loss.item(), bool(info.applied), loop.updates) == (2.0, False, 0)


def test_c27_the_scale_goes_up_and_down_and_survives_a_checkpoint() -> None:
    def make() -> Loop:
        model = Weight()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        return Loop(model, times, SGD(model.parameters(), 1.0), scaler=scaler)

    loop = make()
    scales, seen = [], []
    for number, x in enumerate((0.5, 0.25, math.inf, 0.5)):
        if number == 3:
            saved, loop = loop.state_dict(), make()
            loop.load_state_dict(saved)
        loop.step(numbers(x))
        assert loop.scaler is not None
        scales.append(loop.scaler.get_scale())
        seen.append(next(loop.model.parameters()).item())
    assert scales == [4, 8, 4, 4]
    assert seen == [0.5, 0.25, 0.25, -0.25]
    assert loop.scaler is not None
    assert loop.scaler.state_dict()["_growth_tracker"] == 1


def test_a_window_without_a_valid_target_contributes_nothing() -> None:
    model = Tagger()
    before = values(model)
    optimizer = SGD(model.parameters(), 1.0)
    loop = Loop(model, token_loss, optimizer, accumulate=2)
    tokens, labels = batches(1)[0]
    for _ in range(2):
        info = loop.step((tokens, torch.full_like(labels, IGNORED)))
    assert (info.loss.item(), info.weight.item(), info.grad_norm.item()) == (0.0, 0.0, 0.0)
    assert_same(values(model), before)
    # a first micro-batch without weight, then one with
    other = Tagger()
    Loop(other, token_loss, SGD(other.parameters(), 1.0)).step((tokens, labels))
    loop.step((tokens, torch.full_like(labels, IGNORED)))
    loop.step((tokens, labels))
    assert_close(values(model), values(other))


def test_gradients_left_by_others_do_not_leak_in() -> None:
    """E38: what is in .grad before a window, also of parameters that the optimizer does not know."""
    model = Tagger()
    for p in model.parameters():
        p.grad = torch.full_like(p, 100.0)
    other = Tagger()
    batch = batches(1)[0]
    for one in (model, other):
        attack = FGM(one, 0.5, "embedding.*")
        Loop(one, token_loss, SGD(one.head.parameters(), 1.0), adversarial=attack).step(batch)
    assert_same(values(model), values(other))


# --- mixed precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_bfloat16_autocast_on_the_cpu(accumulate: int) -> None:
    data = batches(6, ignored=0.0)
    hand = Tagger(torch.float32)
    optimizer = SGD(hand.parameters(), 0.5)
    for start in range(0, 6, accumulate):
        optimizer.zero_grad()
        for tokens, labels in data[start : start + accumulate]:
            with torch.autocast("cpu", torch.bfloat16):
                logits = hand(tokens)
                loss = F.cross_entropy(logits, labels)
            (loss / accumulate).backward()
        optimizer.step()
    assert logits.dtype == torch.bfloat16
    model = Tagger(torch.float32)
    seen: list[torch.dtype] = []

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch[0])
        seen.append(logits.dtype)
        return F.cross_entropy(logits, batch[1])

    loop = Loop(model, loss_fn, SGD(model.parameters(), 0.5), autocast=torch.bfloat16, accumulate=accumulate)
    list(loop.epoch(data))
    assert set(seen) == {torch.bfloat16}
    if accumulate == 1:
        assert_same(values(model), values(hand))
    # gradients of bfloat16 activations: half the size in, half the size out, exactly; sums in float32
    assert_close(values(model), values(hand))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_on_cuda(dtype: torch.dtype) -> None:
    data = [tuple(x.cuda() for x in batch) for batch in batches(40)]
    model = Tagger(torch.float32).cuda()
    optimizer = AdamW(model.parameters(), 1e-2)
    scheduler = StepLR(optimizer, 10, 0.5)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24) if dtype == torch.float16 else None
    loop = Loop(
        model,
        token_loss,
        optimizer,
        scheduler=scheduler,
        autocast=dtype,
        scaler=scaler,
        clip=1.0,
        accumulate=2,
        adversarial=PGD(model, 0.5, "embedding.*"),
        ema=0.9,
    )
    before = loop.evaluate(data)["loss"]
    infos = list(loop.epoch(data))
    assert len(infos) == 20
    assert loop.updates == sum(bool(info.applied) for info in infos) > 0
    assert scheduler.last_epoch == loop.updates
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert loop.evaluate(data)["loss"] < before


# --- what the loop reports and remembers -----------------------------------------------------------------------------


def test_evaluate_weighs_by_tokens_and_puts_the_modes_back() -> None:
    model = Tagger(dropout=0.5)
    model.hidden.eval()  # a frozen part stays in evaluation mode
    loop = Loop(model, token_loss, SGD(model.parameters(), 0.1), ema=0.5)
    data = batches(3)
    found = loop.evaluate(data)
    tokens, labels = (torch.cat(leaves) for leaves in zip(*data, strict=True))
    with torch.no_grad():
        assert found["loss"] == pytest.approx(F.cross_entropy(copy.deepcopy(model).eval()(tokens), labels).item())
    assert (model.training, model.hidden.training, model.dropout.training) == (True, False, True)
    assert loop.evaluate(data) == found
    assert math.isnan(loop.evaluate([])["loss"])
    loop.step(data[0])
    loop.step(data[1])
    assert loop.evaluate(data, averaged=True)["loss"] != loop.evaluate(data)["loss"]
    plain = Loop(model, token_loss, SGD(model.parameters(), 0.1))
    with pytest.raises(ValueError, match="evaluate: averaged=True needs a loop with ema="):
        plain.evaluate(data, averaged=True)


def test_metrics_are_averaged_like_the_loss() -> None:
    def loss_fn(model: nn.Module, batch: Batch) -> Any:
        logits, valid = model(batch[0]), batch[1] != IGNORED
        right = ((logits.argmax(1) == batch[1]) & valid).sum() / valid.sum()
        return losses.cross_entropy(logits, batch[1]), {"accuracy": right}

    data = batches(3)
    data[1] = (data[1][0], torch.full_like(data[1][1], IGNORED))  # its accuracy is NaN
    model = Tagger()
    loop = Loop(model, loss_fn, SGD(model.parameters(), 0.1), accumulate=3, has_metrics=True)
    before = loop.evaluate(data)
    for batch in data:
        info = loop.step(batch)
    tokens, labels = (torch.cat(leaves) for leaves in zip(*data, strict=True))
    want = (Tagger()(tokens).argmax(1) == labels)[labels != IGNORED].double().mean().item()
    assert info.metrics["accuracy"].item() == pytest.approx(want)
    assert before["accuracy"] == pytest.approx(want)


def make_loop(seed: int = 0, **options: Any) -> Loop:
    model = Tagger()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(seed)
    optimizer = AdamW(model.parameters(), 1e-2)
    scheduler = StepLR(optimizer, 3, 0.5)
    given: dict[str, Any] = {"accumulate": 3, "ema": 0.9, "clip": 0.3, **options}
    return Loop(model, token_loss, optimizer, scheduler=scheduler, **given)


@pytest.mark.parametrize("stop", [3, 7, 8])
@pytest.mark.parametrize("clip", [0.3, ft.clip_by_global_norm(0.3, error_if_nonfinite=True)])
def test_a_saved_loop_goes_on_to_the_bit(stop: int, clip: Any) -> None:
    """Also in the middle of a window, and through a file that is loaded without executing code."""
    data = batches(16)
    whole, first, second = make_loop(clip=clip), make_loop(clip=clip), make_loop(1, clip=clip)
    for batch in data:
        whole.step(batch)
    for batch in data[:stop]:
        first.step(batch)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    for batch in data[stop:]:
        second.step(batch)
    left, ours = whole.flush(), second.flush()
    assert left is not None
    assert ours is not None
    assert_same(values(second.model), values(whole.model))
    assert_same(second.state_dict()["ema"], whole.state_dict()["ema"])
    assert_same(ours, left)
    assert second.updates == whole.updates == 6


def test_a_state_of_another_loop_changes_nothing() -> None:
    loop = make_loop()
    loop.step(batches(1)[0])
    before = copy.deepcopy(loop.state_dict())
    with pytest.raises(ValueError, match=r"Loop: the state is from another loop; missing: \['ema'\], unexpected: \[\]"):
        loop.load_state_dict(make_loop(ema=None).state_dict())
    other = make_loop(1).state_dict()
    other["model"]["head.weight"] = torch.zeros(4, 6, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"Loop: the model: trees differ.*head.weight \(3, 6\) != \(4, 6\)"):
        loop.load_state_dict(other)
    other = make_loop(1).state_dict()
    other["optimizer"]["param_groups"][0]["params"] = [0, 1]
    with pytest.raises(ValueError, match="loaded state dict contains a parameter group"):
        loop.load_state_dict(other)
    other = make_loop(1).state_dict()
    other["ema"]["module.head.bias"] = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"Loop: the average: trees differ.*module.head.bias \(3,\) != \(4,\)"):
        loop.load_state_dict(other)
    other = make_loop(1).state_dict()
    other["window"]["grads"] = {"tail.weight": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"Loop: the gradients: trees differ.*tail.weight"):
        loop.load_state_dict(other)
    del other["window"]["weight"]
    with pytest.raises(ValueError, match=r"Loop: the window is from another loop; missing: \['weight'\]"):
        loop.load_state_dict(other)
    for part in ("model", "ema", "window"):
        assert_same(loop.state_dict()[part], before[part])


def test_a_scaler_or_a_clip_of_another_kind_changes_nothing() -> None:
    def loop(enabled: bool, clip: Any, seed: int) -> Loop:
        made = make_loop(seed, clip=clip, scaler=torch.amp.GradScaler("cpu", enabled=enabled))
        for batch in batches(3):
            made.step(batch)
        return made

    ours = loop(True, ft.trace(0.9), 0)
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(ValueError, match=r"Loop: the scaler's state is from another loop; missing: \['_growth"):
        ours.load_state_dict(loop(False, ft.trace(0.9), 1).state_dict())
    with pytest.raises(ValueError, match="Loop: the state of clip: trees differ"):
        ours.load_state_dict(loop(True, ft.scale_by_adam(), 1).state_dict())
    assert_same(ours.state_dict()["model"], before["model"])
    assert_same(ours.state_dict()["optimizer"]["state"], before["optimizer"]["state"])
    disabled = loop(False, ft.trace(0.9), 1)
    disabled.load_state_dict(before)  # as PyTorch: a scaler that is off has nothing to load
    assert_same(disabled.state_dict()["model"], before["model"])


@pytest.mark.parametrize(("dtype", "slope"), [(torch.float16, 1e3), (torch.float32, 1e25)])
def test_a_norm_out_of_range_of_finite_gradients_is_no_reason_to_skip(dtype: torch.dtype, slope: float) -> None:
    model = nn.Linear(10_000, 1, bias=False).to(dtype)
    loop = Loop(model, lambda model, x: model(x).float().sum(), SGD(model.parameters(), 1.0), clip=1.0)
    before = model.weight.detach().clone()
    info = loop.step(torch.full((1, 10_000), slope, dtype=dtype))
    assert info.applied
    assert info.grad_norm.item() == pytest.approx(100 * slope, rel=1e-3)
    assert (before - model.weight).float().norm().item() == pytest.approx(1, rel=0.01)


def test_a_loss_that_raises_takes_its_window_with_it() -> None:
    model = Tagger()
    before = values(model)
    fails = False

    def loss_fn(model: nn.Module, batch: Batch) -> ft.Loss:
        if fails and not torch.equal(model.get_parameter("embedding.weight"), before["embedding.weight"]):
            raise RuntimeError("out of memory")  # under attack
        return token_loss(model, batch)

    attack = PGD(model, 0.5, "embedding.*")
    loop = Loop(model, loss_fn, SGD(model.parameters(), 0.1), accumulate=2, adversarial=attack)
    data = batches(2)
    loop.step(data[0])
    fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        loop.step(data[1])
    assert_same(values(model), before)
    assert loop.pending == 0
    assert all(p.grad is None for p in model.parameters())
    fails = False
    loop.step(data[0])
    assert bool(loop.step(data[1]).applied)


# --- odds and ends ---------------------------------------------------------------------------------------------------


def test_parameters_of_the_loss_are_clipped_checked_and_saved_too() -> None:
    model, scale = Tagger(), nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def loss_fn(model: nn.Module, batch: Batch) -> ft.Loss:
        return losses.cross_entropy(model(batch[0]) * scale, batch[1])

    loop = Loop(model, loss_fn, SGD([*model.parameters(), scale], 0.1), accumulate=2, clip=1e-3)
    data = batches(2)
    loop.step(data[0])
    assert "optimizer.0" in loop.state_dict()["window"]["grads"]
    loop.step(data[1])
    norm = nn.utils.get_total_norm([p.grad for p in (*model.parameters(), scale)])
    assert norm.item() == pytest.approx(1e-3, rel=1e-2)  # clip_grad_norm_ adds 1e-6 to the norm
    assert scale.item() != 1.0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameters_of_the_loss_see_the_last_round_of_an_attack_alone(accumulate: int) -> None:
    model, scale = Tagger(), nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    start = {"model": values(model), "scale": scale.detach().clone()}
    attack = PGD(model, 0.5, "embedding.*", steps=3)
    loop = Loop(
        model,
        lambda model, batch: losses.cross_entropy(model(batch[0]) * scale, batch[1]),
        SGD([*model.parameters(), scale], 0.1),
        accumulate=accumulate,
        adversarial=attack,
    )
    data = batches(2)
    for batch in data:
        loop.step(batch)

    def loss_fn(params: Any, batch: Batch) -> ft.Loss:
        logits = torch.func.functional_call(model, params["model"], (batch[0],))
        return losses.cross_entropy(logits * params["scale"], batch[1])

    grad_fn = ft.pgd(ft.gradient(loss_fn), 0.5, 0.3, 3, where="model.embedding.*")
    step = ft.train_step(ft.accumulate(grad_fn, micro_batch_size=4), ft.sgd(0.1))
    state = step.init(start)
    whole = tuple(torch.cat(leaves) for leaves in zip(*data, strict=True))
    for batch in data if accumulate == 1 else [whole]:
        state, _ = step.update(state, batch)
    assert_run_close({"model": values(model), "scale": scale.detach()}, state.params, start)


def test_an_attack_needs_no_unscaling() -> None:
    found = []
    for scale in (None, 2.0**10, 2.0**40):  # powers of two: exact
        model = Tagger()
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        attack = PGD(model, 0.5, "*.weight", steps=2, norm="global")
        loop = Loop(model, token_loss, SGD(model.parameters(), 0.1), adversarial=attack, scaler=scaler, clip=0.1)
        for batch in batches(3):
            assert bool(loop.step(batch).applied)
        found.append(values(model))
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


def test_sparse_gradients_and_transforms_as_clips() -> None:
    model = nn.Sequential(nn.Embedding(9, 3, sparse=True))
    loop = Loop(model, lambda model, x: model(x).square().mean(), SGD(model.parameters(), 0.1), accumulate=2)
    tokens = torch.tensor([0, 3, 3])
    before = values(model)
    loop.step(tokens)
    assert bool(loop.step(tokens).applied)
    other = nn.Sequential(nn.Embedding.from_pretrained(before["0.weight"].clone(), freeze=False))
    optimizer = SGD(other.parameters(), 0.1)
    other(tokens).square().mean().backward()
    optimizer.step()
    assert_close(values(model), values(other))

    dense = Tagger()
    loop = Loop(dense, token_loss, SGD(dense.parameters(), 0.1), clip=ft.clip_by_value(1e-3))
    loop.step(batches(1)[0])
    assert max(p.grad.abs().max().item() for p in dense.parameters()) == pytest.approx(1e-3)


def test_an_average_of_ones_own() -> None:
    model = Tagger()
    average = AveragedModel(model)
    loop = Loop(model, token_loss, SGD(model.parameters(), 0.1), ema=average)
    seen = []
    for batch in batches(3):
        loop.step(batch)
        seen.append(values(model)["head.bias"])
    assert loop.ema is average
    assert_close(average.module.head.bias.detach(), torch.stack(seen).mean(0))


def test_batches_may_be_mappings_and_hold_other_things() -> None:
    class Encoding(UserDict[str, Any]):  # as transformers' BatchEncoding
        pass

    model = nn.Linear(2, 1)
    loop = Loop(model, lambda model, batch: model(batch["x"]).mean(), SGD(model.parameters(), 0.1))
    info = loop.step(Encoding(x=torch.ones(5, 2), text=["a"] * 5, scale=torch.tensor(1.0), none=None))
    assert info.weight.item() == 5
    with pytest.raises(ValueError, match=r"Loop: a 0-d loss counts .* tensors differ: .*return a Loss"):
        loop.step({"x": torch.ones(5, 2), "y": torch.ones(4)})


def test_data_parallel_and_compiled_models() -> None:
    batch = batches(1)[0]
    found = []
    for wrap in (lambda model: model, nn.DataParallel):
        model = Tagger()
        loop = Loop(wrap(model), token_loss, SGD(model.parameters(), 0.1), adversarial=FGM(model, 0.5, "embedding.*"))
        loop.step(batch)
        found.append(values(model))
        assert list(loop.state_dict()["model"]) == list(model.state_dict())
    assert_same(found[1], found[0])


def test_a_step_that_raises_leaves_the_scaler_ready() -> None:
    model = Weight()
    loop = Loop(model, times, SGD(model.parameters(), 0.1), scaler=torch.amp.GradScaler("cpu", init_scale=4.0))

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = loop.optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.step(numbers(1))
    hook.remove()
    before = model.w.item()
    assert loop.step(numbers(1)).applied
    assert model.w.item() == pytest.approx(before - 0.1)
    assert loop.scaler is not None
    assert loop.scaler.get_scale() == 4.0


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    def stream() -> Iterator[Tensor]:
        yield from [numbers(1)] * 3

    model = Weight()
    loop = Loop(model, times, SGD(model.parameters(), 0.1))
    assert len(list(loop.epoch([numbers(1)] * 3, progress=True))) == 3
    assert len(list(loop.epoch(stream(), progress=True))) == 3
    assert "training" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"accumulate": 0}, ValueError, "Loop: accumulate must be"),
        ({"accumulate": 1.5}, ValueError, "Loop: accumulate must be"),
        ({"clip": -1.0}, ValueError, "Loop: clip must be >= 0"),
        ({"clip": "1"}, TypeError, "Loop: clip must be a number"),
        ({"clip": ft.clip_by_value}, TypeError, "Loop: clip must be a number or a transform, as of clip_by_value"),
        ({"ema": 1.5}, ValueError, "Loop: ema must be <= 1"),
        ({"adversarial": 0.5}, TypeError, r"Loop: adversarial must be an adapter.FGM or adapter.PGD, got 0.5"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], match: str) -> None:
    model = Weight()
    with pytest.raises(error, match=match):
        Loop(model, times, SGD(model.parameters(), 0.1), **options)


def test_arguments_that_do_not_fit_together() -> None:
    model = Weight()
    optimizer = SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError, match="Loop: a plateau scheduler needs a metric; step it yourself"):
        Loop(model, times, optimizer, scheduler=ReduceLROnPlateau(optimizer))
    with pytest.raises(ValueError, match="Loop: adversarial attacks another model"):
        Loop(model, times, optimizer, adversarial=FGM(Weight(), 1.0, "w"))
    bad: list[Callable[..., Any]] = [lambda model, x: model.w * x, lambda model, x: 1.0]
    for loss_fn, got in zip(bad, (r"a tensor of shape \(2,\)", "float"), strict=True):
        with pytest.raises(ValueError, match=f"Loop: loss_fn must return a Loss or a 0-d tensor, got {got}"):
            Loop(model, loss_fn, optimizer).step(numbers(1, 2))
    wrong: list[tuple[Callable[..., Any], str]] = [
        (times, "must return \\(loss, dict\\), got a"),
        (lambda model, x: (model.w * x.sum(), {"a": 3.0}), "the metric 'a' must be a 0-d tensor, got 3.0"),
        (lambda model, x: (model.w * x.sum(), {"a": x}), r"the metric 'a' must be a 0-d tensor, got .* \(2,\)"),
    ]
    for loss_fn, match in wrong:
        with pytest.raises(TypeError, match=match):
            Loop(model, loss_fn, optimizer, has_metrics=True).step(numbers(1, 2))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_without_rows_weighs_nothing(accumulate: int) -> None:
    """The mean over no rows is NaN, and would take the window with it."""
    model = nn.Linear(3, 1)
    before = copy.deepcopy(model.state_dict())
    loop = Loop(model, lambda model, x: model(x).square().mean(), SGD(model.parameters(), 0.1), accumulate=accumulate)
    info = loop.step(torch.zeros(0, 3))
    assert (info.loss, info.weight) == (0, 0)
    if accumulate == 1:
        assert info.applied
        assert_same(model.state_dict(), before)
        return
    rows = torch.ones(2, 3)
    expected = copy.deepcopy(model)
    expected(rows).square().mean().backward()
    info = loop.step(rows)
    assert (info.applied, info.weight) == (True, 2)
    assert_close(model.weight.detach(), (expected.weight - 0.1 * expected.weight.grad).detach())

"""adapter.FGM and adapter.PGD: the numbers of the pure functions, and parameters put back bit for bit, in place."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_nonzero, assert_same
from torch import Tensor, nn
from torch.func import functional_call

from functricks import accumulate, fgm, gradient, pgd
from functricks.adapter import FGM, PGD

Attack = Callable[[nn.Module], Any]


class Product(nn.Module):
    """loss = (head * emb)**2: field cases C31 and C32."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.tensor(1.0))
        self.emb = nn.Parameter(torch.tensor(2.0))
        if unused:
            self.pooler = nn.Parameter(torch.tensor(3.0))

    def forward(self) -> Tensor:
        return (self.head * self.emb).square()


class Tagger(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64, tied: bool = False, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 4, dtype=dtype, sparse=sparse)
        self.head = nn.Linear(4, 9 if tied else 3, dtype=dtype)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens))).transpose(1, 2)


TOKENS = torch.tensor([[0, 1, 2], [2, 3, 4], [5, 1, 8], [7, 7, 2]])
LABELS = torch.tensor([[0, 1, 2], [1, 1, 0], [2, 0, 2], [0, 2, 1]])


def loss_of(model: nn.Module, rows: slice = slice(None)) -> Tensor:
    return F.cross_entropy(model(TOKENS[rows]), LABELS[rows])


def grads(model: nn.Module) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters()}


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def pure(model: nn.Module, wrap: Callable[[Any], Any], rows: slice = slice(None)) -> dict[str, Tensor]:
    def loss_fn(params: dict[str, Tensor], batch: Any) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (batch[0],)), batch[1])

    found: dict[str, Tensor] = wrap(gradient(loss_fn))(values(model), (TOKENS[rows], LABELS[rows])).grads
    return found


# --- the numbers -----------------------------------------------------------------------------------------------------


def test_fgm_by_hand() -> None:
    """C32: the head comes first, and is not matched."""
    model = Product()
    attack = FGM(model, 1.0, "emb")
    model().backward()
    storage = model.emb.data_ptr()
    attack.attack()
    assert (model.head.item(), model.emb.item()) == (1.0, 3.0)
    model().backward()
    attack.restore()
    assert (model.emb.item(), model.emb.data_ptr()) == (2.0, storage)
    assert (model.head.grad.item(), model.emb.grad.item()) == (26.0, 10.0)


@pytest.mark.parametrize(("steps", "head"), [(2, 20.5), (3, 20.5)])
def test_pgd_by_hand(steps: int, head: float) -> None:
    """C31: moves to 2.3, then 2.6, which is projected to 2.5; a pooler that nobody uses has no gradient."""
    model = Product(unused=True)
    attack = PGD(model, 0.5, ["emb", "pooler"], step_size=0.3, steps=steps)
    model().backward()
    attack.backup_grad()
    seen = []
    for number in range(steps):
        attack.attack()
        seen.append(round(model.emb.item(), 6))
        if number < steps - 1:
            model.zero_grad()
        else:
            attack.restore_grad()
        model().backward()
    attack.restore()
    assert seen == [2.3, 2.5, 2.5][:steps]
    assert (model.head.grad.item(), model.emb.grad.item(), model.emb.item()) == (head, 9.0, 2.0)
    assert model.pooler.grad is None
    assert model.pooler.item() == 3.0


@pytest.mark.parametrize("norm", ["leaf", "global"])
@pytest.mark.parametrize("where", ["embedding.*", ["embedding.weight", "head.weight"]])
def test_fgm_is_the_pure_one(where: Any, norm: Any) -> None:
    model = Tagger()
    before = values(model)
    loss_of(model).backward()
    attack = FGM(model, 0.7, where, norm)
    with attack.attacked():
        loss_of(model).backward()
    want = pure(model, lambda grad_fn: fgm(grad_fn, 0.7, where=where, norm=norm))
    assert_nonzero(want)
    assert_close(grads(model), want)
    assert_same(values(model), before)


@pytest.mark.parametrize("norm", ["leaf", "global"])
@pytest.mark.parametrize(("epsilon", "steps"), [(1.0, 3), (0.5, 4), (0.5, 1)])
def test_pgd_is_the_pure_one(epsilon: float, steps: int, norm: Any) -> None:
    model = Tagger()
    before = values(model)
    where = ["embedding.*", "head.bias"]
    attack = PGD(model, epsilon, where, steps=steps, norm=norm)
    loss_of(model).backward()
    count = 0
    with attack.attacked() as rounds:
        for _ in rounds:
            loss_of(model).backward()
            count += 1
    assert count == steps
    want = pure(model, lambda grad_fn: pgd(grad_fn, epsilon, 0.3, steps, where=where, norm=norm))
    assert_nonzero(want)
    assert_close(grads(model), want)
    assert_same(values(model), before)


def test_default_pgd_is_never_projected() -> None:
    """E20: three steps of 0.3 stay inside the ball of 1."""
    model = Product()
    attack = PGD(model, 1.0, "emb")
    model().backward()
    for _ in range(3):
        attack.attack()
    assert model.emb.item() == pytest.approx(2.9)


# --- put back, bit for bit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_restore_is_exact_where_subtracting_would_not_be(dtype: torch.dtype) -> None:
    model = nn.Embedding(50, 8, dtype=dtype)
    before = model.weight.detach().clone()
    storage, version = model.weight.data_ptr(), model.weight._version
    model.weight.grad = torch.randn(50, 8, dtype=dtype)
    attack = FGM(model, 1e3, "weight")
    attack.attack()
    moved = model.weight.detach().clone()
    assert not torch.equal(moved, before)
    attack.restore()
    assert torch.equal(model.weight, before)
    assert model.weight.data_ptr() == storage
    assert model.weight._version > version  # autograd is told
    attack.restore()  # again: nothing happens
    assert torch.equal(model.weight, before)


def test_flat_parameters_stay_flat() -> None:
    """E12: parameters that are views into one buffer are views into it afterwards."""
    model = Tagger()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    offset = 0
    for p in model.parameters():
        p.data = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    before = flat.clone()
    loss_of(model).backward()
    attack = PGD(model, 1.0, "embedding.*")
    attack.backup_grad()
    attack.attack()
    assert not torch.equal(flat, before)
    attack.restore()
    assert torch.equal(flat, before)


def test_gradients_stay_views_of_their_buckets() -> None:
    model = Tagger()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    offset = 0
    for p in model.parameters():
        p.grad = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    loss_of(model).backward()
    with PGD(model, 0.5, "embedding.*").attacked() as rounds:
        for _ in rounds:
            loss_of(model).backward()
    gathered = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    assert torch.equal(gathered, flat)
    want = pure(model, lambda grad_fn: pgd(grad_fn, 0.5, where="embedding.*"))
    assert_close(grads(model), want)


@pytest.mark.parametrize("make", [lambda m: FGM(m, 1.0, "embedding.*"), lambda m: PGD(m, 1.0, "embedding.*")])
def test_a_loop_that_raises_leaves_the_parameters_as_they_were(make: Attack) -> None:
    model = Tagger()
    before = values(model)
    loss_of(model).backward()
    clean = copy.deepcopy(grads(model))
    attack = make(model)
    with pytest.raises(KeyboardInterrupt), attack.attacked() as rounds:  # noqa: PT012  it raises in the second round
        if isinstance(attack, PGD):
            next(rounds)
            loss_of(model).backward()
            next(rounds)
        raise KeyboardInterrupt
    assert_same(values(model), before)
    assert_same(grads(model), clean)
    attack.attack()  # and can be used again
    attack.restore()


def test_rounds_left_early_give_the_clean_gradients_back() -> None:
    model = Tagger()
    loss_of(model).backward()
    clean = copy.deepcopy(grads(model))
    with PGD(model, 1.0, "embedding.*").attacked() as rounds:
        for _ in rounds:
            loss_of(model).backward()
            break
    assert_same(grads(model), clean)


def test_attacking_twice_needs_a_restore() -> None:
    model = Product()
    model().backward()
    attack = FGM(model, 1.0, "emb")
    attack.attack()
    with pytest.raises(RuntimeError, match=r"FGM: attack\(\) again without restore"):
        attack.attack()
    attack.restore()
    assert model.emb.item() == 2.0


# --- odd gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, 0.0, float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("make", [lambda m: FGM(m, 1.0, "*"), lambda m: PGD(m, 1.0, "*")])
def test_odd_gradients_move_nothing(make: Attack, bad: float | None) -> None:
    """E14: an infinite norm would write NaN into the weights."""
    model = Tagger()
    before = values(model)
    if bad is not None:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
            p.grad.view(-1)[0] = bad
            if bad == 0:
                p.grad.zero_()
    attack = make(model)
    attack.attack()
    assert_same(values(model), before)
    attack.restore()
    assert_same(values(model), before)


def test_one_odd_leaf_does_not_stop_the_others() -> None:
    model = Tagger()
    loss_of(model).backward()
    model.head.weight.grad[0, 0] = float("inf")
    attack = FGM(model, 0.5, "*.weight")
    attack.attack()
    assert torch.equal(model.head.weight, Tagger().head.weight)
    assert (model.embedding.weight - Tagger().embedding.weight).norm().item() == pytest.approx(0.5)
    attack.restore()


@pytest.mark.parametrize(("scale", "dtype"), [(1e-30, torch.float32), (3e38, torch.float32), (65504.0, torch.float16)])
def test_norms_neither_overflow_nor_underflow(scale: float, dtype: torch.dtype) -> None:
    model = nn.Embedding(6, 4, dtype=dtype)
    before = model.weight.detach().clone()
    model.weight.grad = torch.full((6, 4), scale, dtype=dtype)
    attack = FGM(model, 1.0, "weight")
    attack.attack()
    moved = (model.weight - before).detach().double()
    assert moved.norm().item() == pytest.approx(1.0, rel=2e-2 if dtype == torch.float16 else 1e-5)
    attack.restore()


def test_scaled_gradients_attack_alike() -> None:
    """A GradScaler's gradients need no unscaling first: the direction is free of scale."""
    shifts = []
    for scale in (1.0, 65536.0):
        model = Tagger()
        (loss_of(model) * scale).backward()
        attack = FGM(model, 0.3, "embedding.*")
        attack.attack()
        shifts.append(model.embedding.weight.detach().clone())
        attack.restore()
    assert_close(shifts[1], shifts[0])


def test_sparse_gradients() -> None:
    found = []
    for sparse in (False, True):
        model = Tagger(sparse=sparse)
        loss_of(model).backward()
        assert model.embedding.weight.grad.is_sparse == sparse
        with FGM(model, 0.5, "embedding.*").attacked():
            loss_of(model).backward()
        found.append(model.embedding.weight.grad.to_dense())
    assert_close(found[1], found[0])


def test_clean_gradients_of_layers_that_the_attack_skips_survive() -> None:
    """E19: since PyTorch 2.0 zero_grad sets None, and a restore that skips None would lose the clean gradient."""
    model = Product(unused=True)
    (model() + model.pooler.square()).backward()
    with PGD(model, 0.5, "emb", steps=3).attacked() as rounds:
        for number, _ in enumerate(rounds):
            model.zero_grad(set_to_none=True)  # what a careful user adds out of habit, but for the last round
            (model() + (model.pooler.square() if number == 0 else 0)).backward()
            if number == 1:
                break
    assert model.pooler.grad.item() == 6.0

    model = Product(unused=True)
    (model() + model.pooler.square()).backward()
    with PGD(model, 0.5, "emb", steps=3).attacked() as rounds:
        for _ in rounds:
            model().backward()  # the pooler is dropped in all of them
    assert model.pooler.grad.item() == 6.0


def test_gradients_that_appear_only_under_attack_count_in_the_last_round_alone() -> None:
    model = Product(unused=True)
    model().backward()
    with PGD(model, 0.5, "emb", steps=3).attacked() as rounds:
        for _ in rounds:
            (model() + model.pooler.square()).backward()
    assert model.pooler.grad.item() == 6.0  # not 18


# --- which parameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda m, w: FGM(m, 1.0, w), lambda m, w: PGD(m, 1.0, w)])
def test_a_name_that_matches_nothing_raises(make: Callable[..., Any]) -> None:
    """E15: the usual default, "word_embeddings", silently attacks nothing in other models."""
    with pytest.raises(ValueError, match=r"where='word_embeddings' matches no parameter; have: embedding.weight, head"):
        make(Tagger(), "word_embeddings")


def test_tied_embeddings_are_perturbed_once_by_either_name() -> None:
    for where in ("embedding.weight", "head.weight", "*.weight"):
        model = Tagger(tied=True)
        start = model.embedding.weight.detach().clone()
        attack = FGM(model, 0.5, where)
        assert len(attack.names) == 1
        loss_of(model).backward()
        attack.attack()
        assert model.head.weight is model.embedding.weight
        assert (model.embedding.weight - start).norm().item() == pytest.approx(0.5)
        attack.restore()
        assert torch.equal(model.head.weight, start)


def test_parameters_are_found_anew_when_they_are_replaced() -> None:
    model = Tagger()
    attack = FGM(model, 0.5, "embedding.*")
    model.embedding = nn.Embedding(9, 4, dtype=torch.float64)  # as resize_token_embeddings does
    before = model.embedding.weight.detach().clone()
    loss_of(model).backward()
    attack.attack()
    assert not torch.equal(model.embedding.weight, before)
    attack.restore()
    assert torch.equal(model.embedding.weight, before)


def test_selectors_and_wrappers() -> None:
    model = Tagger()
    assert FGM(model, 1.0, lambda name, p: p.ndim == 2).names == ["embedding.weight", "head.weight"]
    bools = {name: name == "head.bias" for name, _ in model.named_parameters()}
    assert FGM(model, 1.0, bools).names == ["head.bias"]
    assert FGM(nn.DataParallel(model), 1.0, "embedding.*").names == ["embedding.weight"]
    assert FGM(torch.compile(model), 1.0, "embedding.*").names == ["embedding.weight"]


def test_frozen_parameters_stay() -> None:
    model = Tagger()
    model.embedding.requires_grad_(False)
    before = values(model)
    loss_of(model).backward()
    with FGM(model, 1.0, "*.weight").attacked():
        assert torch.equal(model.embedding.weight, before["embedding.weight"])
        assert not torch.equal(model.head.weight, before["head.weight"])


def test_bad_numbers_raise() -> None:
    model = Tagger()
    with pytest.raises(ValueError, match="FGM: epsilon must be >= 0"):
        FGM(model, -1.0, "*")
    with pytest.raises(ValueError, match="FGM: norm must be 'leaf' or 'global', got 'example'"):
        FGM(model, 1.0, "*", "example")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="PGD: step_size must be >= 0"):
        PGD(model, 1.0, "*", step_size=-1.0)
    with pytest.raises(ValueError, match="PGD: steps must be an integer >= 1, got 0"):
        PGD(model, 1.0, "*", steps=0)
    with pytest.raises(TypeError, match="PGD: epsilon must be a number"):
        PGD(model, "1", "*")  # type: ignore[arg-type]


def test_repr_and_pickle() -> None:
    attack = PGD(Tagger(), 1.0, "embedding.*")
    assert repr(attack) == "PGD(epsilon=1.0, step_size=0.3, steps=3, names=['embedding.weight'], norm='leaf')"
    assert repr(FGM(Tagger(), 0.5, "head.bias")) == "FGM(epsilon=0.5, names=['head.bias'], norm='leaf')"
    assert repr(pickle.loads(pickle.dumps(attack))) == repr(attack)


# --- with the rest of a loop -----------------------------------------------------------------------------------------


def test_accumulation_adds_up_micro_batches() -> None:
    """Attacks of micro-batches, each by its own gradient; earlier ones wait outside, as the loop of the pure form."""
    model = Tagger()
    attack = FGM(model, 0.5, "embedding.*")
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for rows in (slice(0, 2), slice(2, 4)):
        model.zero_grad()
        loss_of(model, rows).backward()
        with attack.attacked():
            loss_of(model, rows).backward()
        for name, p in model.named_parameters():
            total[name] += p.grad / 2
    assert_close(total, pure(model, lambda grad_fn: accumulate(fgm(grad_fn, 0.5, where="embedding.*"), 2)))


def test_accumulated_gradients_are_what_the_classic_attack_follows() -> None:
    """E16: without care the direction is that of the sum; the clean gradients add up all the same."""
    model = Tagger()
    for rows in (slice(0, 2), slice(2, 4)):
        (loss_of(model, rows) / 2).backward()
    clean = copy.deepcopy(grads(model))
    assert_close(clean, pure(model, lambda grad_fn: grad_fn))
    with FGM(model, 0.5, "embedding.*").attacked():
        for rows in (slice(0, 2), slice(2, 4)):
            (loss_of(model, rows) / 2).backward()
    assert_close(grads(model), pure(model, lambda grad_fn: fgm(grad_fn, 0.5, where="embedding.*")))


def test_an_autocast_region_around_it_all_sees_the_moved_weights() -> None:
    """Autocast keeps its bfloat16 copies of the weights until the region ends."""

    def total(outside: bool) -> Tensor:
        model = Tagger(torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=outside):

            def loss() -> Tensor:
                with torch.autocast("cpu", torch.bfloat16):
                    return loss_of(model)

            loss().backward()
            with FGM(model, 2.0, "head.weight").attacked():
                return loss().detach()

    assert torch.equal(total(True), total(False))


@pytest.mark.cuda
def test_on_cuda_with_a_grad_scaler() -> None:
    model = Tagger(torch.float32).cuda()
    before = values(model)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens, labels = TOKENS.cuda(), LABELS.cuda()

    def backward() -> None:
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(tokens), labels)
        scaler.scale(loss).backward()

    applied = 0
    attack = FGM(model, 0.5, "embedding.*")
    for _ in range(30):
        optimizer.zero_grad()
        backward()
        with attack.attacked():
            backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        applied += scaler.get_scale() >= scale
    assert 0 < applied < 30  # the first scales overflow
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not torch.equal(model.embedding.weight, before["embedding.weight"])

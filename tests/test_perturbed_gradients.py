"""fgm, pgd, free_lb, sam, awp, vat, r_drop: against classic loops, and the geometry under odd gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_nonzero, assert_same, assert_untouched, lane, stack
from torch import Tensor

from functricks import (
    Loss,
    accumulate,
    awp,
    fgm,
    free_lb,
    functional,
    gradient,
    losses,
    pgd,
    r_drop,
    random,
    sam,
    tree,
    vat,
)

VOCABULARY, WIDTH, CLASSES, ROWS, LENGTH = 7, 3, 4, 5, 6


def make_params(dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (VOCABULARY, WIDTH), "head": (WIDTH, CLASSES), "bias": (CLASSES,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def make_batch(seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.tensor([6, 2, 4, 1, 5])[:, None]
    return {"ids": ids, "mask": mask, "labels": torch.randint(CLASSES, (ROWS,), generator=generator)}


def logits_of(params: Any, batch: Any, shift: Any = 0.0) -> Tensor:
    x = torch.tanh(params["embedding"][batch["ids"]] + shift)
    x = torch.where(batch["mask"][..., None], x, 0.0).sum(1)
    return x @ params["head"] + params["bias"]


def plain(params: Any, batch: Any) -> Loss:
    return losses.cross_entropy(logits_of(params, batch), batch["labels"])


def probed(pair: Any, batch: Any) -> Loss:
    params, shift = pair
    return losses.cross_entropy(logits_of(params, batch, shift), batch["labels"])


def zeros(params: Any, batch: Any) -> Tensor:
    return torch.zeros(*batch["ids"].shape, WIDTH, dtype=params["embedding"].dtype)


# --- the classic loops -----------------------------------------------------------------------------------------------


def backward(params: dict[str, Tensor], batch: Any) -> Tensor:
    loss = F.cross_entropy(logits_of(params, batch), batch["labels"])
    loss.backward()
    return loss.detach()


def leaves(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf.clone().requires_grad_() for name, leaf in params.items()}


def units(params: dict[str, Tensor], names: list[str], together: bool) -> dict[str, Tensor]:
    slopes = {name: params[name].grad for name in names}
    whole = math.sqrt(sum(slope.square().sum() for slope in slopes.values()))
    return {name: slope / (whole if together else slope.norm()) for name, slope in slopes.items()}


def classic_pgd(
    params: Any, batch: Any, names: list[str], epsilon: float, step: float, steps: int, together: bool
) -> Any:
    params = leaves(params)
    backward(params, batch)
    clean = {name: leaf.grad.clone() for name, leaf in params.items()}
    backup = {name: params[name].detach().clone() for name in names}
    shift = {name: torch.zeros_like(leaf) for name, leaf in backup.items()}
    for turn in range(steps):
        for name, unit in units(params, names, together).items():
            shift[name] = shift[name] + step * unit
        sizes = {name: shift[name].norm() for name in names}
        if together:
            sizes = dict.fromkeys(names, torch.sqrt(sum(s.square().sum() for s in shift.values())))
        for name in names:
            if sizes[name] > epsilon:
                shift[name] = shift[name] * (epsilon / sizes[name])
            params[name].data.copy_(backup[name] + shift[name])
        for name, leaf in params.items():
            leaf.grad = clean[name].clone() if turn == steps - 1 else None
        backward(params, batch)
    return {name: leaf.grad for name, leaf in params.items()}


@pytest.mark.parametrize("norm", ["leaf", "global"])
@pytest.mark.parametrize("names", [["embedding"], ["embedding", "head"]])
@pytest.mark.parametrize(("epsilon", "step", "steps"), [(1.0, 0.3, 3), (0.4, 0.3, 3), (0.5, 0.5, 1), (0.2, 0.9, 2)])
def test_pgd_is_the_classic_loop(norm: Any, names: list[str], epsilon: float, step: float, steps: int) -> None:
    params, batch = make_params(), make_batch()
    with assert_untouched(params, batch):
        found = pgd(gradient(plain), epsilon, step, steps, where=names, norm=norm)(params, batch)
    expected = classic_pgd(params, batch, names, epsilon, step, steps, norm == "global")
    assert_nonzero(expected)
    for name in expected:
        assert (found.grads[name] - expected[name]).abs().max() <= 1e-12 * expected[name].abs().max()
    if steps == 1 and step <= epsilon:
        assert_close(fgm(gradient(plain), step, where=names, norm=norm)(params, batch).grads, found.grads)


def test_sam_is_the_classic_loop() -> None:
    params, batch = make_params(), make_batch()
    moved = leaves(params)
    clean = backward(moved, batch)
    for name, unit in units(moved, list(moved), True).items():
        moved[name].data.add_(0.2 * unit)
    for leaf in moved.values():
        leaf.grad = None
    other = backward(moved, batch)
    found = sam(gradient(plain), 0.2)(params, batch)
    assert_close(found.grads, {name: leaf.grad for name, leaf in moved.items()}, 64)  # a norm summed in another order
    assert_close((found.loss, found.metrics["adversarial_loss"]), (clean, other))
    only = sam(gradient(plain), 0.2, where="head")(params, batch)
    assert not torch.allclose(only.grads["head"], found.grads["head"])


def test_awp_is_the_classic_loop() -> None:
    """Matrices move by gamma times their own length; vectors (the bias) do not move."""
    params, batch = make_params(), make_batch()
    moved = leaves(params)
    backward(moved, batch)
    for name in ("embedding", "head"):
        slope = moved[name].grad
        moved[name].data.add_(0.1 * moved[name].data.norm() * slope / slope.norm())
    for leaf in moved.values():
        leaf.grad = None
    backward(moved, batch)
    found = awp(gradient(plain), 0.1)(params, batch)
    assert_close(found.grads, {name: leaf.grad for name, leaf in moved.items()}, 64)  # a norm summed in another order


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_free_lb_is_the_classic_loop(steps: int) -> None:
    """On looked-up embeddings, per example; the classic one divides the loss by K and lets gradients add up."""
    params, batch, epsilon, step = make_params(), make_batch(), 0.5, 0.3
    mine, delta, seen = leaves(params), torch.zeros(ROWS, LENGTH, WIDTH, dtype=torch.float64), []
    for _ in range(steps):
        delta.requires_grad_()
        loss = F.cross_entropy(logits_of(mine, batch, delta), batch["labels"])
        (loss / steps).backward()
        slope = torch.where(batch["mask"][..., None], delta.grad, 0.0)
        delta = delta.detach() + step * slope / slope.flatten(1).norm(dim=1)[:, None, None]
        size = delta.flatten(1).norm(dim=1)[:, None, None]
        delta = torch.where(size > epsilon, delta * epsilon / size, delta)
        seen.append(loss.detach())
    grad_fn = free_lb(
        gradient(probed), epsilon, step, steps, probe=zeros, norm="example", mask=lambda batch: batch["mask"]
    )
    found = grad_fn(params, batch)
    assert_close(found.grads, {name: leaf.grad for name, leaf in mine.items()}, 64)  # norms summed in another order
    assert_close((found.loss, found.metrics["adversarial_loss"]), (sum(seen) / steps, seen[-1]))


# --- field cases -----------------------------------------------------------------------------------------------------


def squared(params: Any, batch: Any) -> Tensor:
    return (params["head"] * params["emb"]).square()


def case_params(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"head": torch.tensor(1.0, dtype=dtype), "emb": torch.tensor(2.0, dtype=dtype)}


@pytest.mark.parametrize("steps", [2, 3])
def test_c31_pgd(steps: int) -> None:
    params = {**case_params(), "unused": torch.ones(3)}
    with assert_untouched(params):
        found = pgd(gradient(squared), 0.5, 0.3, steps, where="emb")(params, ())
    assert (found.grads["head"].item(), found.grads["emb"].item()) == (20.5, 9.0)
    assert_same(found.grads["unused"], torch.zeros(3))
    assert (found.loss.item(), found.metrics["adversarial_loss"].item()) == (4.0, 6.25)


def test_c32_fgm() -> None:
    found = fgm(gradient(squared), 1.0, where="emb")(case_params(), ())
    assert (found.grads["head"].item(), found.grads["emb"].item()) == (26.0, 10.0)


@pytest.mark.parametrize("make", [fgm, pgd, free_lb, sam, awp])
def test_a_selector_that_matches_nothing_raises(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=rf"{make.__name__}: where='word_emb\*' matches no parameter; have: head, emb"):
        make(gradient(squared), where="word_emb*")(case_params(), ())


TABLE = {"table": torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)}
IDS = torch.tensor([[0, 1], [0, 2]])


def c33(params: Any, ids: Tensor, shift: Any = 0.0) -> Tensor:
    x = params["table"][ids] + shift
    return (x @ torch.tensor([1.0, 2.0], dtype=torch.float64)).square().sum(1).mean()


def c33_zeros(params: Any, ids: Tensor) -> Tensor:
    return torch.zeros(*ids.shape, 2, dtype=torch.float64)


def test_c33_which_norm() -> None:
    on_table = fgm(gradient(c33), 1.0, where="table")(TABLE, IDS)
    assert on_table.loss.item() == 7.5
    assert on_table.metrics["adversarial_loss"].item() == pytest.approx(19.8077812, abs=2e-6)
    grad_fn = gradient(lambda pair, ids: c33(pair[0], ids, pair[1]))
    for norm, expected in (("example", 24.5710678), ("leaf", 18.6602535), ("global", 18.6602535)):
        found = fgm(grad_fn, 1.0, probe=c33_zeros, norm=norm)(TABLE, IDS)
        assert found.metrics["adversarial_loss"].item() == pytest.approx(expected, abs=1e-6)
        assert found.grads.keys() == TABLE.keys()


# --- examples and tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["example", "token"])
@pytest.mark.parametrize("make", [fgm, partial(pgd, step_size=0.2, steps=3), partial(free_lb, step_size=0.2, steps=3)])
def test_batch_size_does_not_matter(norm: Any, make: Any) -> None:
    """The gradient of a batch is the mean over its examples, each attacked alone."""
    params, batch = make_params(), make_batch()
    grad_fn = make(gradient(probed), epsilon=0.5, probe=zeros, norm=norm, mask=lambda batch: batch["mask"])
    whole, alone = grad_fn(params, batch), accumulate(grad_fn, micro_batch_size=1)(params, batch)
    assert_nonzero(whole.grads)
    assert_close(whole.grads, alone.grads, 32)  # sums in another order, then divided by norms
    weaker = make(gradient(plain), epsilon=0.5, where="embedding")
    assert not torch.allclose(
        weaker(params, batch).grads["head"], accumulate(weaker, ROWS)(params, batch).grads["head"]
    )


@pytest.mark.parametrize(("norm", "dims"), [("example", (1, 2)), ("token", (2,))])
def test_lengths_and_padding(norm: Any, dims: tuple[int, ...]) -> None:
    params, batch, seen = make_params(), make_batch(), []

    def spy(pair: Any, batch: Any) -> Loss:
        seen.append(pair[1].detach())
        # without the model's own mask: only the attack's mask keeps padding still
        x = torch.tanh(pair[0]["embedding"][batch["ids"]] + pair[1]).sum(1) @ pair[0]["head"]
        return losses.cross_entropy(x, batch["labels"])

    grad_fn = gradient(spy, backend="autograd")
    fgm(grad_fn, 0.5, probe=zeros, norm=norm, mask=lambda batch: batch["mask"])(params, batch)
    shift = seen[-1]
    assert not shift[~batch["mask"]].any()
    lengths = shift.square().sum(dims).sqrt()
    expected = torch.full_like(lengths, 0.5) if norm == "example" else 0.5 * batch["mask"].double()
    assert_close(lengths, expected)
    pgd(grad_fn, 0.5, 0.4, 3, probe=zeros, norm=norm, mask=lambda b: b["mask"], key=random.key(1))(params, batch)
    for shift in seen[-4:]:
        assert not shift[~batch["mask"]].any()
        assert (shift.square().sum(dims).sqrt() <= 0.5 * (1 + 1e-12)).all()


def test_padding_contents_do_not_matter() -> None:
    params, batch = make_params(), make_batch()
    other = {**batch, "ids": torch.where(batch["mask"], batch["ids"], 0)}
    assert not torch.equal(other["ids"], batch["ids"])
    for norm in ("example", "token"):
        grad_fn = pgd(gradient(probed), 0.5, 0.3, 2, probe=zeros, norm=norm, mask=lambda batch: batch["mask"])
        assert_same(grad_fn(params, batch).grads["head"], grad_fn(params, other).grads["head"])


def test_tied_embedding_is_perturbed_once() -> None:
    """One leaf, used as table and as output layer: both see the same perturbation, and the gradient is one."""
    seen = []

    def tied(params: Any, ids: Tensor) -> Tensor:
        seen.append(params["embedding"].detach())
        return F.cross_entropy(params["embedding"][ids] @ params["embedding"].T, ids)

    params = {"embedding": make_params()["embedding"]}
    fgm(gradient(tied, backend="autograd"), 0.5, where="embedding")(params, torch.tensor([1, 2, 5]))
    assert_close((seen[1] - seen[0]).norm(), torch.tensor(0.5, dtype=torch.float64))


# --- odd gradients ---------------------------------------------------------------------------------------------------

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ODD = {
    "zero": 0.0,
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
}


def slope_of(slope: Tensor) -> Any:
    """A gradient function whose gradient is given, and whose loss is not asked for."""

    def grad_fn(params: Any, batch: Any, carry: Any = (), *, scale: Any = None) -> Any:
        found = gradient(lambda params, batch: params["w"].float().sum() * 0)(params, batch, carry)
        return found._replace(grads={"w": slope}, carry=[*carry, params["w"]])

    return grad_fn


WRAPPERS = {
    "fgm": lambda g: fgm(g, 0.5, where="w"),
    "pgd": lambda g: pgd(g, 0.5, 0.3, 3, where="w"),
    "free_lb": lambda g: free_lb(g, 0.5, 0.3, 3, where="w"),
    "sam": lambda g: sam(g, 0.5),
    "awp": lambda g: awp(g, 0.5, where="w"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("odd", ODD)
def test_odd_gradients_move_nothing(dtype: torch.dtype, name: str, odd: str) -> None:
    slope = torch.full((4,), 0.0 if odd == "zero" else 1.0, dtype=dtype)
    slope[1] = ODD[odd]
    params = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype)}
    for at in WRAPPERS[name](slope_of(slope))(params, (), []).carry:
        assert_same(at, params["w"])


EXTREME = {  # one step from 0, as long as the strength, which awp counts in lengths of the weights
    **WRAPPERS,
    "pgd": lambda g: pgd(g, 0.5, 0.5, 1, where="w"),
    "pgd, projected": lambda g: pgd(g, 0.5, 0.3, 3, where="w", norm="global"),
    "free_lb": lambda g: free_lb(g, 0.5, 0.5, 2, where="w"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXTREME)
@pytest.mark.parametrize("extreme", ["huge", "tiny"])
def test_extreme_gradients_keep_their_direction(dtype: torch.dtype, name: str, extreme: str) -> None:
    """The sum of squares leaves the dtype, the perturbation is as long as ever."""
    info = torch.finfo(dtype)
    size = info.max / 4 if extreme == "huge" else info.tiny
    slope = torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.float64).mul(size).to(dtype)
    start = torch.full((4,), 0.5 if name == "awp" else 0.0, dtype=dtype)
    moved = EXTREME[name](slope_of(slope))({"w": start}, (), []).carry[-1]
    assert_close(moved - start, torch.tensor([0.25, -0.25, 0.25, 0.25], dtype=dtype), 2)


@pytest.mark.parametrize("norm", ["example", "token"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_rows_stay_and_others_move(norm: Any, dtype: torch.dtype) -> None:
    slope = torch.ones(5, 1, 4, dtype=dtype)
    slope[0], slope[1, 0, 2], slope[2, 0, 1], slope[3] = 0.0, math.nan, math.inf, torch.finfo(dtype).max
    probe = torch.zeros(5, 1, 4, dtype=dtype)
    seen = []

    def grad_fn(params: Any, batch: Any, carry: Any = (), *, scale: Any = None) -> Any:
        seen.append(params[1])
        found = gradient(lambda params, batch: params["w"].sum())(params[0], batch)
        return found._replace(grads=(found.grads, slope))

    fgm(grad_fn, 0.5, probe=lambda params, batch: probe, norm=norm)({"w": torch.ones(2)}, ())
    lengths = torch.tensor([0, 0, 0, 0.25, 0.25], dtype=dtype)
    assert_close(seen[-1][:, 0], lengths[:, None].expand(5, 4), 1)


def test_mixed_dtypes_share_a_global_norm() -> None:
    params = {"a": torch.tensor([3.0], dtype=torch.float16), "b": torch.tensor([4.0], dtype=torch.float64)}
    grad_fn = gradient(lambda params, _: (params["a"].double().square() + params["b"].square()).sum() / 2)
    found = sam(grad_fn, 5.0)(params, ())
    assert found.grads["a"].item() == 6
    assert found.grads["b"].item() == pytest.approx(8)


# --- keys ------------------------------------------------------------------------------------------------------------


def starts(make: Any, carry: Any, **options: Any) -> list[Tensor]:
    seen: list[Tensor] = []

    def spy(params: Any, batch: Any, carry: Any) -> Any:
        seen.append(params["w"].detach())
        return params["w"].square().sum(), carry

    make(gradient(spy, has_carry=True, backend="autograd"), where="w", **options)({"w": torch.zeros(8)}, (), carry)
    return seen


def test_random_start() -> None:
    key = random.key(0)
    fixed = [starts(pgd, (), epsilon=0.5, steps=2, key=key) for _ in range(2)]
    assert len(fixed[0]) == 4  # clean, random start, two steps
    assert_same(fixed[0], fixed[1])
    assert 0 < fixed[0][1].norm() <= 0.5
    assert len(starts(free_lb, (), epsilon=0.5, steps=2, key=key)) == 2
    drawn = starts(pgd, key, epsilon=0.5, steps=2, key=lambda carry: tuple(random.split(carry).unbind()))
    assert not torch.equal(drawn[1], fixed[0][1])


@pytest.mark.parametrize("make", [pgd, free_lb])
def test_key_from_the_carry_moves_on(make: Any) -> None:
    key = random.key(0)
    grad_fn = make(gradient(squared), where="emb", key=lambda carry: tuple(random.split(carry).unbind()))
    found = grad_fn(case_params(), (), key)
    assert_same(found.carry, random.split(key)[1])
    assert not torch.equal(grad_fn(case_params(), (), found.carry).grads["emb"], found.grads["emb"])


def test_random_points_fill_the_ball() -> None:
    points = torch.stack([starts(pgd, (), epsilon=2.0, steps=1, key=random.key(i))[1] for i in range(200)])
    radius = points.norm(dim=1) / 2
    assert radius.max() <= 1 + 1e-6
    assert abs(radius.mean() - 0.5) < 0.08  # uniform: 0.5 +- 0.02
    assert (points.mean(0).abs() < 0.2).all()


# --- vat and r_drop --------------------------------------------------------------------------------------------------


def predict(pair: Any, batch: Any, carry: Any) -> Tensor:
    return logits_of(pair[0], batch, pair[1])


def test_vat_is_the_classic_loop() -> None:
    params, batch, key, epsilon, xi = make_params(), make_batch(), random.key(5), 0.7, 1e-3
    mine = leaves(params)
    backward(mine, batch)
    with torch.no_grad():
        target = logits_of(params, batch).softmax(-1)
    d = random.normal(random.fold_in(random.split(key)[1], 0), (ROWS, LENGTH, WIDTH)).double()
    d = torch.where(batch["mask"][..., None], d, 0.0)
    for _ in range(2):
        r = (xi * d / d.flatten(1).norm(dim=1)[:, None, None]).requires_grad_()
        F.kl_div(logits_of(params, batch, r).log_softmax(-1), target, reduction="sum").backward()
        d = r.grad
    r = epsilon * d / d.flatten(1).norm(dim=1)[:, None, None]
    extra = F.kl_div(logits_of(mine, batch, r).log_softmax(-1), target, reduction="batchmean")
    (0.5 * extra).backward()
    grad_fn = vat(
        gradient(plain), predict, epsilon, probe=zeros, key=key, weight=0.5, xi=xi, steps=2, mask=lambda b: b["mask"]
    )
    found = grad_fn(params, batch)
    # KL is differentiated at a distance of 1e-3, where its slope is a difference of near equals
    for name, leaf in mine.items():
        assert_nonzero(leaf.grad)
        assert torch.allclose(found.grads[name], leaf.grad, rtol=1e-9, atol=1e-11)
    assert found.metrics["vat_loss"].item() == pytest.approx(extra.item(), rel=1e-9)
    assert_close(found.loss, gradient(plain)(params, batch).loss)


def test_vat_finds_a_worse_direction_than_chance() -> None:
    params, batch = make_params(), make_batch()

    def loss(steps: int, xi: float = 1e-3) -> float:
        grad_fn = vat(gradient(plain), predict, 0.5, probe=zeros, key=random.key(1), xi=xi, steps=steps)
        return grad_fn(params, batch).metrics["vat_loss"].item()

    shift = random.normal(random.key(1), (ROWS, LENGTH, WIDTH)).double()
    shift = 0.5 * shift / shift.flatten(1).norm(dim=1)[:, None, None]
    p = logits_of(params, batch).softmax(-1)
    chance = F.kl_div(logits_of(params, batch, shift).log_softmax(-1), p, reduction="batchmean").item()
    assert loss(1) > 1.5 * chance
    assert loss(4) >= 0.99 * loss(1)


def dropped(params: Any, batch: Any, key: Tensor) -> tuple[Tensor, Tensor]:
    now, key = random.split(key).unbind()
    x = random.dropout(now, torch.tanh(params["embedding"][batch["ids"]]).sum(1), 0.3)
    return x @ params["head"] + params["bias"], key


def test_r_drop_is_the_classic_loss() -> None:
    params, batch, key, alpha = make_params(), make_batch(), random.key(2), 0.8
    mine = leaves(params)
    z1, middle = dropped(mine, batch, key)
    z2, last = dropped(mine, batch, middle)
    p1, p2 = z1.log_softmax(-1), z2.log_softmax(-1)
    kl = sum(F.kl_div(a, b, reduction="batchmean", log_target=True) for a, b in ((p1, p2), (p2, p1))) / 2
    loss = F.cross_entropy(z1, batch["labels"]) + F.cross_entropy(z2, batch["labels"]) + alpha * kl
    loss.backward()
    for backend in ("func", "autograd"):
        grad_fn = r_drop(dropped, lambda z, batch: losses.cross_entropy(z, batch["labels"]), alpha, backend=backend)
        found = grad_fn(params, batch, key)
        assert kl > 0
        assert_close(found.grads, {name: leaf.grad for name, leaf in mine.items()}, 32)  # sums in another order
        assert_close((found.loss, found.metrics["divergence"]), (loss.detach(), kl.detach()), 32)  # as above
        assert_same(found.carry, last)


def test_r_drop_ignores_what_the_loss_ignores() -> None:
    params, batch, key = make_params(), make_batch(), random.key(2)
    grad_fn = r_drop(lambda p, b, key: dropped_rows(p, b, key), lambda z, b: losses.cross_entropy(z, b["labels"]))
    ignored = {**batch, "labels": batch["labels"].index_fill(0, torch.tensor([1, 3]), -100)}
    kept = tree.map(lambda leaf: leaf[torch.tensor([0, 2, 4])], {**batch, "row": torch.arange(ROWS)})
    found, expected = (grad_fn(params, b, key) for b in ({**ignored, "row": torch.arange(ROWS)}, kept))
    assert_close(found.grads, expected.grads, 32)  # sums in another order
    assert_close(found.metrics["divergence"], expected.metrics["divergence"])


def test_r_drop_is_not_poisoned_by_what_the_loss_ignores() -> None:
    params, labels = torch.ones(2, 3, dtype=torch.float64), torch.tensor([0, -100, 2])
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [-1.0, 0.5]], dtype=torch.float64)

    def run(bad: float) -> Any:
        def predict(params: Tensor, rows: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
            logits = rows @ params * torch.tensor([1.0, 0.5, 2.0]) * (1 + carry)
            return logits + torch.tensor([0.0, bad, 0.0])[:, None], carry + 1

        grad_fn = r_drop(predict, lambda logits, rows: losses.cross_entropy(logits, labels))
        return grad_fn(params, rows, torch.tensor(0.0, dtype=torch.float64))

    well = run(0.0)
    assert_nonzero(well.grads)
    assert well.metrics["divergence"] > 0
    for bad in (math.nan, math.inf):
        assert_same(tuple(run(bad)), tuple(well))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("odd", ["zero", "nan", "inf"])
def test_vat_moves_nothing_along_an_odd_gradient(dtype: torch.dtype, odd: str) -> None:
    """A row whose divergence has no gradient, or one that is not finite, is predicted where it is."""
    seen = []

    def predict(pair: Any, x: Tensor, carry: Any) -> Tensor:
        seen.append(pair[1].detach())
        slope = torch.tensor([[1.0], [ODD[odd]]], dtype=dtype)
        return (x + pair[1] * slope) @ pair[0]

    x, params = torch.ones(2, 3, dtype=dtype), torch.eye(3, dtype=dtype)
    grad_fn = vat(
        gradient(lambda p, x: p.float().sum()), predict, 0.5, probe=lambda p, x: x * 0, key=random.key(0), xi=0.1
    )
    grad_fn(params, x)
    assert_same(seen[-1][1], torch.zeros(3, dtype=dtype))
    assert_close(seen[-1][0].double().norm(), torch.tensor(0.5, dtype=torch.float64), 2 * eps_ratio(dtype))


def eps_ratio(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / torch.finfo(torch.float64).eps


def test_a_tied_embedding_of_a_module_is_perturbed_once() -> None:
    """Two names of one parameter in a real module: one leaf, one step, the gradient of the classic loop."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Tanh(), torch.nn.Linear(4, 7, bias=False)).double()
    net[2].weight = net[0].weight
    model = functional(net)
    assert len(model.params) == 1
    ids, labels = torch.tensor([1, 2, 5]), torch.tensor([2, 5, 0])

    def loss_fn(params: Any, batch: Any) -> Loss:
        return losses.cross_entropy(model.apply(params, model.buffers, batch[0])[0], batch[1])

    found = fgm(gradient(loss_fn), 0.5, where="0.weight")(model.params, (ids, labels))
    weight, start = net[0].weight, net[0].weight.detach().clone()
    F.cross_entropy(net(ids), labels).backward()
    with torch.no_grad():
        weight.add_(0.5 * weight.grad / weight.grad.norm())
    F.cross_entropy(net(ids), labels).backward()
    assert_close((weight.detach() - start).norm(), torch.tensor(0.5, dtype=torch.float64))
    assert_close(found.grads, {"0.weight": weight.grad}, 32)  # a norm summed in another order


def dropped_rows(params: Any, batch: Any, key: Tensor) -> tuple[Tensor, Tensor]:
    """Dropout whose mask follows the row, so that rows can be left out."""
    now, key = random.split(key).unbind()
    x = torch.tanh(params["embedding"][batch["ids"]]).sum(1) * random.uniform(now, (ROWS, WIDTH))[batch["row"]]
    return x @ params["head"] + params["bias"], key


# --- the laws --------------------------------------------------------------------------------------------------------

HYPER: dict[str, Callable[[Any], Any]] = {
    "fgm": lambda e: fgm(gradient(plain), e, where="embedding"),
    "fgm, example": lambda e: fgm(gradient(probed), e, probe=zeros, norm="example", mask=lambda b: b["mask"]),
    "pgd": lambda e: pgd(gradient(plain), e, 0.6 * e, 3, where=["embedding", "head"], norm="global"),
    "pgd, token, random": lambda e: pgd(gradient(probed), e, 0.6 * e, 2, probe=zeros, norm="token", key=random.key(0)),
    "free_lb": lambda e: free_lb(gradient(plain), e, 0.6 * e, 3, where="embedding", key=random.key(0)),
    "sam": lambda e: sam(gradient(plain), e),
    "awp": lambda e: awp(gradient(plain), e),
    "vat": lambda e: vat(gradient(plain), predict, e, probe=zeros, key=random.key(0), weight=e, xi=0.1),
    "r_drop": lambda e: r_drop(dropped, lambda z, b: losses.cross_entropy(z, b["labels"]), e),
}


@pytest.mark.parametrize("name", HYPER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grad_mode", [False, True])
def test_vmap_equals_the_loop(name: str, dtype: torch.dtype, grad_mode: bool) -> None:
    lanes = [make_params(dtype, seed) for seed in range(3)]
    batch, epsilons = make_batch(), torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    keys = torch.stack([random.key(i) for i in range(3)])

    def run(params: Any, epsilon: Tensor, key: Tensor) -> Any:
        return tuple(HYPER[name](epsilon)(params, batch, key))

    with torch.set_grad_enabled(grad_mode):
        found = torch.vmap(run)(stack(lanes), epsilons, keys)
        for index, params in enumerate(lanes):
            expected = run(params, epsilons[index], keys[index])
            if name == "vat":  # see test_vat_is_the_classic_loop: rounding is enlarged by 1 / xi
                assert_close(lane(found, index), expected, 1e4)
            else:
                assert_close(lane(found, index), expected, 64)  # batched matrix products sum in another order


@pytest.mark.parametrize("name", HYPER)
def test_zero_strength_is_the_clean_gradient(name: str) -> None:
    params, batch, key = make_params(), make_batch(), random.key(0)
    if name == "r_drop":
        return
    clean = gradient(plain)(params, batch, key).grads
    twice = name.split(",")[0] in ("fgm", "pgd")
    assert_close(HYPER[name](0.0)(params, batch, key).grads, tree.scale(clean, 2.0 if twice else 1.0), 32)  # as above


@pytest.mark.parametrize("name", HYPER)
def test_hyper_gradient(name: str) -> None:
    params, batch, key = make_params(), make_batch(), random.key(0)

    def size(epsilon: Tensor) -> Tensor:
        return tree.norm(HYPER[name](epsilon)(params, batch, key).grads)

    at, h = torch.tensor(0.3, dtype=torch.float64), 1e-5
    slope = torch.func.grad(size)(at)
    assert slope.item() == pytest.approx(((size(at + h) - size(at - h)) / (2 * h)).item(), rel=1e-5)
    assert slope != 0


@pytest.mark.parametrize("name", HYPER)
def test_hyper_gradient_at_a_zero_gradient_is_finite(name: str) -> None:
    """A head of zeros: the embedding's gradient is zero, so is the perturbation, and nothing becomes NaN."""
    params = {**make_params(), "head": torch.zeros(WIDTH, CLASSES, dtype=torch.float64)}
    slope = torch.func.grad(lambda e: tree.norm(HYPER[name](e)(params, make_batch(), random.key(0)).grads))
    assert torch.isfinite(slope(torch.tensor(0.3, dtype=torch.float64)))


@pytest.mark.slow
@pytest.mark.parametrize("name", HYPER)
def test_compiles(name: str) -> None:
    params, batch, key = make_params(torch.float32), make_batch(), random.key(0)

    def run(params: Any, epsilon: Tensor) -> Any:
        return tuple(HYPER[name](epsilon)(params, batch, key))

    epsilon = torch.tensor(0.3)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_close(compiled(params, epsilon), run(params, epsilon), 1e4 if name == "vat" else 64)  # as above


def test_compile_time_does_not_grow_with_the_steps() -> None:
    params, batch = make_params(torch.float32), make_batch()

    def operations(steps: int, **options: Any) -> int:
        count = 0

        def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
            nonlocal count
            count += sum(len(list(m.graph.nodes)) for m in module.modules() if isinstance(m, torch.fx.GraphModule))
            return module.forward

        torch._dynamo.reset()
        grad_fn = pgd(gradient(plain), 0.4, 0.3, steps, where="embedding", **options)
        found = torch.compile(grad_fn, fullgraph=True, backend=backend)(params, batch)
        assert_close(found.grads, grad_fn(params, batch).grads, 64)  # as above
        return count

    assert operations(20) < operations(5) + 100
    assert operations(8, unroll=True) > operations(5, unroll=True) + 100


# --- errors ----------------------------------------------------------------------------------------------------------


def test_errors() -> None:
    grad_fn = gradient(squared)
    for make in (fgm, pgd, free_lb):
        name = make.__name__
        with pytest.raises(ValueError, match=f"{name}: give exactly one of where .* and probe"):
            make(grad_fn)
        with pytest.raises(ValueError, match=f"{name}: give exactly one of where .* and probe"):
            make(grad_fn, where="emb", probe=zeros)
        with pytest.raises(ValueError, match=f"{name}: mask needs probe"):
            make(grad_fn, where="emb", mask=lambda batch: batch)
        with pytest.raises(ValueError, match=f"{name}: norm must be 'leaf' or 'global', got 'example'"):
            make(grad_fn, where="emb", norm="example")
        with pytest.raises(ValueError, match=f"{name}: epsilon must be >= 0, got -1"):
            make(grad_fn, -1.0, where="emb")
    for make in (pgd, free_lb):
        with pytest.raises(ValueError, match="steps must be an integer >= 1, got 0"):
            make(grad_fn, steps=0, where="emb")
        with pytest.raises(ValueError, match="step_size must be >= 0, got -1"):
            make(grad_fn, step_size=-1.0, where="emb")
    with pytest.raises(ValueError, match="sam: rho must be >= 0"):
        sam(grad_fn, -1.0)
    with pytest.raises(ValueError, match="awp: gamma must be >= 0"):
        awp(grad_fn, -1.0)
    with pytest.raises(ValueError, match=r"awp: where=.* matches no parameter"):
        awp(grad_fn)(case_params(), ())
    with pytest.raises(ValueError, match="vat: norm must be"):
        vat(grad_fn, predict, probe=zeros, key=random.key(0), norm="row")
    with pytest.raises(ValueError, match="vat: xi must be > 0, got 0"):
        vat(grad_fn, predict, probe=zeros, key=random.key(0), xi=0)
    with pytest.raises(ValueError, match=r"r_drop: the loss must have the shape .* \(5,\), got \(\)"):
        r_drop(dropped, lambda z, b: Loss(z.sum(), torch.ones(())))(make_params(), make_batch(), random.key(0))


@pytest.mark.parametrize("size", [1.0, 1e-30])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_move_as_their_two_parts(dtype: torch.dtype, size: float) -> None:
    """Spectral layers have them."""

    def whole(params: Any, _: Any) -> Tensor:
        return size * (params["z"] - (1 + 2j)).abs().square().sum()

    def parts(params: Any, _: Any) -> Tensor:
        return size * ((params["z"] - torch.tensor([1.0, 2.0])) ** 2).sum()

    z = torch.tensor([0.3 + 0.1j, 2.0 - 1.0j], dtype=dtype)
    for wrap in (partial(fgm, epsilon=0.5, where="z"), partial(pgd, epsilon=0.5, where="z"), partial(sam, rho=0.5)):
        found = wrap(gradient(whole))({"z": z}, ()).grads["z"]
        expected = wrap(gradient(parts))({"z": torch.view_as_real(z)}, ()).grads["z"]
        assert_nonzero(expected)
        assert found.dtype == dtype
        assert_close(torch.view_as_real(found), expected)

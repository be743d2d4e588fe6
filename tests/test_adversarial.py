"""fgm and pgd against the classic attack / backup / restore loop, and what odd gradients do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    FLOAT16_EPS,
    assert_close,
    assert_half_close,
    assert_nonzero,
    assert_same,
    assert_untouched,
    lane,
    stack,
)
from torch import Tensor, nn
from torch.func import functional_call

import functricks as F
from functricks import Gradient, attack, fgm, gradient, pgd

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


# --- the classic loop, as people write it ----------------------------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)  # before the embedding, as in C32
        self.emb = nn.Embedding(11, 6)
        self.positions = nn.Embedding(5, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.positions(torch.arange(tokens.shape[1]))
        return self.head((self.emb(tokens) + positions).tanh().mean(1))


def make() -> tuple[Classifier, Tensor, Tensor]:
    torch.manual_seed(3)
    model = Classifier().double()
    return model, torch.randint(0, 11, (4, 5)), torch.randint(0, 3, (4,))


def chosen_parameters(model: nn.Module, names: list[str]) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if name in names}


def length_of(gradients: dict[str, Tensor], norm: str) -> dict[str, Tensor]:
    if norm == "leaf":
        return {name: g.norm() for name, g in gradients.items()}
    return dict.fromkeys(gradients, torch.stack([g.norm() for g in gradients.values()]).norm())


def classic_fgm(model: nn.Module, loss: Callable[[], Tensor], names: list[str], epsilon: float, norm: str) -> None:
    loss().backward()
    attacked = chosen_parameters(model, names)
    lengths = length_of({name: p.grad for name, p in attacked.items()}, norm)
    backup = {}
    for name, p in attacked.items():
        backup[name] = p.data.clone()
        if lengths[name] != 0 and torch.isfinite(lengths[name]):
            p.data.add_(epsilon * p.grad / lengths[name])
    loss().backward()  # gradients add up
    for name, p in attacked.items():
        p.data = backup[name]


def classic_pgd(
    model: nn.Module, loss: Callable[[], Tensor], names: list[str], epsilon: float, alpha: float, steps: int, norm: str
) -> None:
    loss().backward()
    attacked = chosen_parameters(model, names)
    backup = {name: p.data.clone() for name, p in attacked.items()}
    clean = {name: p.grad.clone() for name, p in model.named_parameters()}
    for step in range(steps):
        lengths = length_of({name: p.grad for name, p in attacked.items()}, norm)
        for name, p in attacked.items():
            if lengths[name] != 0 and torch.isfinite(lengths[name]):
                p.data.add_(alpha * p.grad / lengths[name])
        shifts = {name: p.data - backup[name] for name, p in attacked.items()}
        lengths = length_of(shifts, norm)
        for name, p in attacked.items():
            if lengths[name] > epsilon:
                p.data = backup[name] + epsilon * shifts[name] / lengths[name]
        if step < steps - 1:
            model.zero_grad()
        else:
            for name, p in model.named_parameters():
                p.grad = clean[name].clone()
        loss().backward()
    for name, p in attacked.items():
        p.data = backup[name]


def functional_loss(model: nn.Module) -> Any:
    def loss(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, params, (batch[0],)), batch[1])

    return loss


SELECTIONS = {
    "one": ("emb.weight", ["emb.weight"]),
    "two": (["emb.*", "positions.*"], ["emb.weight", "positions.weight"]),
}


@pytest.mark.parametrize("norm", ["leaf", "global"])
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("technique", ["fgm", "pgd", "pgd that is projected"])
def test_the_classic_loop(technique: str, selection: str, norm: Any) -> None:
    """Over three SGD steps, gradients of all parameters, to 1e-12."""
    where, names = SELECTIONS[selection]
    model, tokens, targets = make()
    mine, _, _ = make()
    params = {name: p.detach() for name, p in mine.named_parameters()}
    epsilon, alpha, steps = (0.4, 0.3, 3) if technique.endswith("projected") else (2.0, 0.3, 3)
    grad_fn = gradient(functional_loss(mine))
    if technique == "fgm":
        adversarial = fgm(grad_fn, epsilon, where=where, norm=norm)
    else:
        adversarial = pgd(grad_fn, epsilon, alpha, steps, where=where, norm=norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()

        def loss() -> Tensor:
            return nn.functional.cross_entropy(model(tokens), targets)

        if technique == "fgm":
            classic_fgm(model, loss, names, epsilon, norm)
        else:
            classic_pgd(model, loss, names, epsilon, alpha, steps, norm)
        with assert_untouched(params):
            found = adversarial(params, (tokens, targets))
        expected = {name: p.grad for name, p in model.named_parameters()}
        assert_nonzero(expected)
        assert_close(found.grads, expected, eps=1e-12 / torch.finfo(F64).eps)
        assert found.metrics["adversarial_loss"] > found.loss
        optimizer.step()
        params = {name: params[name] - 0.5 * found.grads[name] for name in params}


# --- field cases -----------------------------------------------------------------------------------------------------


def product(params: dict[str, Tensor], batch: Any) -> Tensor:
    return (params["head"] * params["emb"]).square()


PARAMS = {"head": torch.tensor(1.0), "emb": torch.tensor(2.0)}


@pytest.mark.parametrize("steps", [2, 3])
def test_c31_pgd(steps: int) -> None:
    """The head has the clean and the last adversarial gradient; nothing of the steps between (23.08)."""
    params = {**PARAMS, "unused": torch.ones(2)}
    found = pgd(gradient(product), 0.5, 0.3, steps, where="emb")(params, ())
    assert_close(found.grads, {"head": torch.tensor(20.5), "emb": torch.tensor(9.0), "unused": torch.zeros(2)})
    assert found.loss == 4
    assert found.metrics["adversarial_loss"] == 6.25
    assert params["emb"] == 2


def test_c32_fgm() -> None:
    found = fgm(gradient(product), 1.0, where="emb")(PARAMS, ())
    assert_same(found.grads, {"head": torch.tensor(26.0), "emb": torch.tensor(10.0)})
    assert found.loss == 4
    assert found.metrics["adversarial_loss"] == 9


@pytest.mark.parametrize("wrap", [fgm, pgd])
def test_a_selector_that_matches_nothing_raises(wrap: Any) -> None:
    with pytest.raises(ValueError, match=r"where='word_embeddings\*' matches no parameter; have: head, emb"):
        wrap(gradient(product), where="word_embeddings*")(PARAMS, ())


def test_a_tied_embedding_is_perturbed_once() -> None:
    """One leaf read by two names of a model: both uses see the moved value."""

    def tied(params: dict[str, Tensor], batch: Any) -> Tensor:
        return params["emb"] * params["emb"]

    found = fgm(gradient(tied), 1.0, where="emb")({"emb": torch.tensor(2.0)}, ())
    assert found.grads["emb"] == 4 + 6


def test_c33_the_strength_on_a_table_and_on_activations() -> None:
    table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    ids, v = torch.tensor([[0, 1], [0, 2]]), torch.tensor([1.0, 2.0])

    def of_activations(x: Tensor) -> Tensor:
        return (x @ v).square().sum(1).mean()

    found = fgm(gradient(lambda params, ids: of_activations(params["table"][ids])), 1.0, where="table")(
        {"table": table}, ids
    )
    assert found.loss == 7.5
    assert found.metrics["adversarial_loss"].item() == pytest.approx(19.8077812, rel=1e-6)
    per_example = attack(of_activations, table[ids], norm="l2", epsilon=1.0)
    assert of_activations(per_example).item() == pytest.approx(24.5710678, rel=1e-6)
    globally = attack(of_activations, table[ids], norm="l2", per="leaf", epsilon=1.0)
    assert of_activations(globally).item() == pytest.approx(18.6602535, rel=1e-6)


# --- odd gradients ---------------------------------------------------------------------------------------------------


def evaluations(wrap: Callable[[Any], Any], params: Any, slope: Any) -> list[Any]:
    """The parameters at which a wrapper asks for the gradient, when the gradient is always ``slope``."""
    seen = []

    def grad_fn(params: Any, batch: Any, carry: Any = (), *, scale: Any = None) -> Gradient:
        seen.append(params)
        return Gradient(slope, torch.tensor(1.0), torch.tensor(1.0), carry, {})

    wrap(grad_fn)(params, ())
    return seen


WRAPS: dict[str, Callable[[Any], Any]] = {
    f"{name}-{norm}": lambda grad_fn, make=make, norm=norm: make(grad_fn, 1.0, where="a*", norm=norm)
    for name, make in {"fgm": fgm, "pgd": lambda *args, **kwargs: pgd(*args, 1.0, 2, **kwargs)}.items()
    for norm in ("leaf", "global")
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, -math.inf])
def test_zero_and_nonfinite_gradients_do_not_perturb(bad: float, dtype: torch.dtype, wrap: str) -> None:
    params = {"a": torch.tensor([1.0, 2.0], dtype=dtype), "b": torch.ones(1, dtype=dtype)}
    slope = {"a": torch.tensor([bad, 0.0], dtype=dtype), "b": torch.ones(1, dtype=dtype)}
    for seen in evaluations(WRAPS[wrap], params, slope):
        assert_same(seen, params)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("end", ["largest", "smallest"])
def test_gradients_of_any_size_perturb_by_epsilon(end: str, dtype: torch.dtype, wrap: str) -> None:
    """Their squares overflow, or underflow, in their own dtype: the perturbation is epsilon long all the same."""
    info = torch.finfo(dtype)
    size = info.max / 4 if end == "largest" else info.smallest_normal
    params = {"a": torch.zeros(2, dtype=dtype), "b": torch.ones(1, dtype=dtype)}
    slope = {"a": torch.tensor([3.0, -4.0], dtype=F64).mul(size).div(4).to(dtype), "b": torch.ones(1, dtype=dtype)}
    _, *moved = evaluations(WRAPS[wrap], params, slope)
    for seen in moved:
        assert_half_close(seen["a"], torch.tensor([0.6, -0.8], dtype=F64), 2 * FLOAT16_EPS)
        assert_same(seen["b"], params["b"])


def test_global_norm_measures_the_chosen_leaves_together() -> None:
    params = {"a1": torch.zeros(1), "a2": torch.zeros(1), "b": torch.zeros(1)}
    slope = {"a1": torch.tensor([3.0]), "a2": torch.tensor([4.0]), "b": torch.tensor([100.0])}
    seen = evaluations(WRAPS["fgm-global"], params, slope)[1]
    assert_close(seen, {"a1": torch.tensor([0.6]), "a2": torch.tensor([0.8]), "b": torch.zeros(1)})
    seen = evaluations(WRAPS["fgm-leaf"], params, slope)[1]
    assert_same(seen, {"a1": torch.ones(1), "a2": torch.ones(1), "b": torch.zeros(1)})


def test_pgd_stays_in_the_ball() -> None:
    params, slope = {"a": torch.zeros(2)}, {"a": torch.tensor([3.0, 4.0])}
    seen = evaluations(lambda grad_fn: pgd(grad_fn, 0.5, 0.3, 4, where="a"), params, slope)
    lengths = [one["a"].norm().item() for one in seen]
    assert lengths == pytest.approx([0.0, 0.3, 0.5, 0.5, 0.5])


def test_epsilon_zero_is_twice_the_clean_gradient() -> None:
    for wrapped in (fgm(gradient(product), 0.0, where="*"), pgd(gradient(product), 0.0, where="*")):
        assert_same(wrapped(PARAMS, ()).grads, {"head": torch.tensor(16.0), "emb": torch.tensor(8.0)})


# --- carry, scale, lanes, derivatives --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrap", "calls"), [(lambda g: fgm(g, 0.1, where="w"), 2), (lambda g: pgd(g, 0.1, 0.05, 3, where="w"), 4)]
)
def test_the_carry_goes_through_every_evaluation(wrap: Any, calls: int) -> None:
    def loss(params: Any, x: Tensor, carry: Tensor) -> Any:
        return (params["w"] * x).square().mean(), carry + 1, {"calls": carry.float()}

    grad_fn = wrap(gradient(loss, has_carry=True, has_metrics=True))
    found = grad_fn({"w": torch.tensor(1.0)}, torch.ones(2), torch.tensor(0))
    assert found.carry == calls
    assert found.metrics["calls"] == 0  # the metrics are the clean ones
    assert found.weight == 2


def test_scale_is_invisible() -> None:
    for wrapped in (fgm(gradient(product), 0.7, where="*"), pgd(gradient(product), 0.7, 0.3, 3, where="*")):
        assert_same(wrapped(PARAMS, (), scale=2.0**12), wrapped(PARAMS, ()))


def test_strengths_differ_by_lane() -> None:
    epsilon, alpha = torch.tensor([0.0, 0.5, 2.0]), torch.tensor([0.1, 0.3, 5.0])

    def run(epsilon: Tensor, alpha: Tensor) -> Any:
        found = pgd(gradient(product), epsilon, alpha, 2, where="emb")(PARAMS, ())
        return found.grads, fgm(gradient(product), epsilon, where="emb")(PARAMS, ()).grads

    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            found = torch.vmap(run)(epsilon, alpha)
        for i in range(3):
            assert_close(lane(found, i), run(epsilon[i], alpha[i]))


def test_the_derivative_for_epsilon() -> None:
    """d/de of w * (emb + e)^2 * 2 at emb=2: 4 w (emb + e)."""
    slope = torch.func.grad(lambda e: fgm(gradient(product), e, where="emb")(PARAMS, ()).grads["head"])(
        torch.tensor(1.0)
    )
    assert slope.item() == pytest.approx(4 * (2 + 1))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: fgm(gradient(product), -1.0, where="*"), ValueError, "fgm: epsilon must be >= 0, got -1.0"),
        (lambda: fgm(gradient(product), "1", where="*"), TypeError, "fgm: epsilon must be a number"),
        (lambda: fgm(gradient(product), where="*", norm="l2"), ValueError, "fgm: norm must be 'leaf' or 'global'"),
        (lambda: pgd(gradient(product), math.nan, where="*"), ValueError, "pgd: epsilon must be >= 0, got nan"),
        (lambda: pgd(gradient(product), 1.0, -0.1, where="*"), ValueError, "pgd: step_size must be >= 0, got -0.1"),
        (lambda: pgd(gradient(product), steps=0, where="*"), ValueError, "pgd: steps must be an integer >= 1, got 0"),
        (lambda: pgd(gradient(product), where="*", norm="x"), ValueError, "pgd: norm must be 'leaf' or 'global'"),
        (lambda: attack(torch.sum, torch.ones(1, 1), epsilon=-1), ValueError, "attack: epsilon must be >= 0"),
        (
            lambda: attack(torch.sum, torch.ones(1, 1), epsilon=1, steps=0),
            ValueError,
            "attack: steps must be an integer",
        ),
        (lambda: attack(torch.sum, torch.ones(1, 1), epsilon=1, norm="l1"), ValueError, "attack: norm must be 'l2' or"),
    ],
)
def test_bad_arguments(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


# --- attacks on inputs -----------------------------------------------------------------------------------------------


def bowl(x: Tensor) -> Tensor:
    return (x * torch.tensor([1.0, -2.0], dtype=x.dtype)).sin().sum()


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_attack_against_a_written_out_loop(norm: Any) -> None:
    start = torch.tensor([[0.1, 0.2], [0.3, -0.4], [1.0, 0.7]], dtype=F64)
    epsilon, alpha, steps = 0.3, 0.13, 4
    x = start.clone()
    for _ in range(steps):
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(bowl(leaf), leaf)
        step = slope.sign() if norm == "linf" else slope / slope.norm(dim=1, keepdim=True)
        shift = x + alpha * step - start
        if norm == "linf":
            shift = shift.clamp(-epsilon, epsilon)
        else:
            length = shift.norm(dim=1, keepdim=True)
            shift = torch.where(length > epsilon, shift * epsilon / length, shift)
        x = start + shift
    found = attack(bowl, start, norm=norm, epsilon=epsilon, step_size=alpha, steps=steps)
    assert_close(found, x, eps=4 * 8)  # four steps
    assert bowl(found) > bowl(start)
    with torch.no_grad():
        lanes = torch.vmap(lambda x, e: attack(bowl, x, norm=norm, epsilon=e, step_size=alpha, steps=steps))(
            torch.stack([start, start]), torch.tensor([0.1, epsilon], dtype=F64)
        )
    assert_close(lanes[1], x, eps=4 * 8)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_attack_with_odd_gradients(norm: Any, dtype: torch.dtype) -> None:
    x = torch.ones(3, 2, dtype=dtype)
    for bad in (0.0, math.nan):
        slope = torch.tensor([[bad, bad], [1.0, 1.0], [1.0, -1.0]], dtype=dtype)
        found = attack(lambda x, slope=slope: (x * slope).sum(), x, norm=norm, epsilon=0.5)
        assert found.dtype == dtype
        assert torch.isfinite(found).all()
        assert_same(found[0], x[0])
        assert (found[1] > x[1]).all()
    huge = torch.full((3, 2), torch.finfo(dtype).max / 2, dtype=dtype)
    found = attack(lambda x: (x * huge).sum(), x, norm=norm, epsilon=0.5)
    length = 0.5 if norm == "linf" else 0.5 / math.sqrt(2)
    assert_half_close(found, x.double() + length, FLOAT16_EPS)


def test_examples_of_one_number_have_balls_of_their_own() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    for norm in ("l2", "linf"):
        assert_close(attack(lambda x: x.square().sum(), x, norm=norm, epsilon=0.5), x + 0.5)
    whole = attack(lambda x: x.sum(), x, norm="l2", per="leaf", epsilon=math.sqrt(3))
    assert_close(whole, x + 1)
    assert attack(lambda x: x.square().sum(), torch.zeros(0, 2), norm="l2", epsilon=0.5).shape == (0, 2)


def test_attack_keeps_to_the_valid_range() -> None:
    found = attack(lambda x: x.sum(), torch.tensor([[0.0, 0.95]]), epsilon=0.1, steps=3, clamp=(0.0, 1.0))
    assert_close(found, torch.tensor([[0.1, 1.0]]))


def test_attack_under_a_batch_of_models() -> None:
    """In lanes whose parameters differ, with grad mode off as experiments have it."""
    weights = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    x = torch.zeros(3, 2)
    with torch.no_grad():
        found = torch.vmap(lambda w: attack(lambda x: (x @ w).sum(), x, epsilon=0.5))(weights)
    assert_same(found, 0.5 * weights[:, None].expand(2, 3, 2))


def test_fgm_in_a_train_step_in_lanes() -> None:
    """Lanes of epsilon in one program are the runs by themselves."""
    model, tokens, targets = make()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def train(epsilon: Tensor) -> Any:
        step = F.train_step(fgm(gradient(functional_loss(model)), epsilon, where="emb.*"), F.sgd(0.5))
        state = step.init(params)
        for _ in range(2):
            state, info = step.update(state, (tokens, targets))
        return state.params, info.loss

    epsilons = torch.tensor([0.0, 0.5, 2.0], dtype=F64)
    expected = stack([train(e) for e in epsilons])
    with torch.no_grad():
        assert_close(torch.vmap(train)(epsilons), expected, eps=4 * 8)  # two steps of two gradients
    assert_nonzero(expected)


COMPLEX: dict[str, Callable[[Any], Any]] = {
    "fgm": lambda g: fgm(g, 0.5, where="*"),
    "fgm, global": lambda g: fgm(g, 0.5, where="*", norm="global"),
    "pgd, projected": lambda g: pgd(g, 0.5, 0.3, 3, where="*"),
    "pgd, random start": lambda g: pgd(g, 0.5, 0.3, 1, where="*", norm="global", key=F.random.key(0)),
    "free_lb": lambda g: F.free_lb(g, 0.5, 0.3, 2, where="*"),
    "sam": lambda g: F.sam(g, 0.5),
    "awp": lambda g: F.awp(g, 0.5),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_a_complex_leaf_moves_as_its_two_parts(name: str) -> None:
    torch.manual_seed(0)
    z, w = torch.randn(3, 2, dtype=torch.complex128), torch.randn(2, 2, dtype=F64)
    whole, parts = {"z": z.mH.mH, "w": w}, {"z": torch.view_as_real(z), "w": w}

    def loss(params: Any, batch: Any) -> Tensor:
        z = params["z"] if params["z"].is_complex() else torch.view_as_complex(params["z"])
        return (z.abs() ** 4).sum() + (params["w"].square() * z.real[:2]).sum()

    make = COMPLEX[name]
    found, expected = make(gradient(loss))(whole, ()).grads, make(gradient(loss))(parts, ()).grads
    clean = gradient(loss)(whole, ()).grads
    assert (found["z"] - clean["z"]).imag.abs().min() > 1e-3
    assert_close(torch.view_as_real(found["z"]), expected["z"], eps=64)
    assert_close(found["w"], expected["w"], eps=64)
    lanes = torch.func.vmap(make(gradient(loss)), (0, None))(stack([whole, whole]), ()).grads
    for name, leaf in found.items():
        one, alone = (torch.view_as_real(x) if x.is_complex() else x for x in (lanes[name][1], leaf))
        assert_close(one, alone, eps=64)

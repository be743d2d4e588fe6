"""Accumulation: the numbers of the whole batch, whatever the split, and what happens to the carry on the way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import LiveBytes, assert_close, assert_nonzero, assert_same, assert_untouched, lane, stack
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functricks import Gradient, Loss, accumulate, bn_momentum_for, fgm, gradient, losses, pgd, tree

ROWS, FEATURES, CLASSES, LENGTH = 13, 5, 4, 3


def make_params(dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (FEATURES, CLASSES), "bias": (CLASSES,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def logits_of(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x) @ params["weight"] + params["bias"]


def make_batch(dtype: torch.dtype, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (ROWS, LENGTH), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[4:7] = -100  # with parts of three rows or fewer, one part weighs nothing
    scores = torch.randn(ROWS, LENGTH, CLASSES, generator=generator, dtype=torch.float64)
    return {
        "x": torch.randn(ROWS, LENGTH, FEATURES, generator=generator).to(dtype),
        "labels": labels,
        "scores": scores.to(dtype),
        "answers": (scores > 0.3).to(dtype),
        "weights": torch.rand(ROWS, LENGTH, CLASSES, generator=generator).to(dtype) + 0.5,
    }


CLASS_WEIGHT = torch.tensor([0.3, 1.0, 2.0, 0.0], dtype=torch.float64)


def classes(loss: Callable[..., Loss], smooth: float = 0.0, weighted: bool = False, **options: Any) -> Any:
    def score(logits: Tensor, batch: Any) -> Loss:
        own = {**options, "weight": CLASS_WEIGHT.to(logits.dtype)} if weighted else options
        own = {**own, "label_smoothing": smooth} if smooth else own
        return loss(logits.movedim(-1, 1), batch["labels"], **own)

    return score


def answers(batch: Any) -> Tensor:
    """Yes or no for every class; those of an ignored token are ignored."""
    return torch.where(batch["labels"][..., None] == -100, -100, batch["answers"])


def rowwise(queries: Tensor, batch: Any) -> Loss:
    """Queries against keys that are the same for every part."""
    keys = torch.linspace(-1, 1, 4 * CLASSES, dtype=queries.dtype).reshape(4, CLASSES).cos()
    loss = losses.info_nce(queries.reshape(-1, CLASSES), keys, labels=batch["labels"].reshape(-1), normalize=False)
    return Loss(*(leaf.reshape(batch["labels"].shape) for leaf in loss))


LOSSES: dict[str, Callable[[Tensor, Any], Loss]] = {
    "cross_entropy": classes(losses.cross_entropy),
    "cross_entropy, weighted": classes(losses.cross_entropy, weighted=True),
    "cross_entropy, smoothed": classes(losses.cross_entropy, 0.1),
    "cross_entropy, smoothed and weighted": classes(losses.cross_entropy, 0.1, True),
    "cross_entropy, smoothed and weighted by row": classes(losses.cross_entropy, 0.1, True, weight_mode="row"),
    "cross_entropy, probabilities": lambda logits, batch: losses.cross_entropy(
        logits.movedim(-1, 1), batch["scores"].softmax(-1).movedim(-1, 1)
    ),
    "cross_entropy, probabilities, smoothed and weighted": lambda logits, batch: losses.cross_entropy(
        logits.movedim(-1, 1),
        batch["scores"].softmax(-1).movedim(-1, 1),
        weight=CLASS_WEIGHT.to(logits.dtype),
        label_smoothing=0.1,
    ),
    "cross_entropy, temperature": classes(losses.cross_entropy, temperature=0.5),
    "focal_loss": classes(losses.focal_loss, gamma=1.5),
    "focal_loss, weighted": classes(losses.focal_loss, weighted=True),
    "focal_loss, smoothed and weighted": classes(losses.focal_loss, 0.1, True, gamma=0.5),
    "nll_loss": lambda logits, batch: losses.nll_loss(logits.log_softmax(-1).movedim(-1, 1), batch["labels"]),
    "nll_loss, weighted": lambda logits, batch: losses.nll_loss(
        logits.log_softmax(-1).movedim(-1, 1), batch["labels"], weight=CLASS_WEIGHT.to(logits.dtype)
    ),
    "binary_cross_entropy": lambda logits, batch: losses.binary_cross_entropy(logits.sigmoid(), batch["answers"]),
    "binary_cross_entropy, weighted and ignored": lambda logits, batch: losses.binary_cross_entropy(
        logits.sigmoid(), answers(batch), weight=batch["weights"]
    ),
    "binary_cross_entropy_with_logits": lambda logits, batch: losses.binary_cross_entropy_with_logits(
        logits, batch["answers"]
    ),
    "binary_cross_entropy_with_logits, weighted and ignored": lambda logits, batch: (
        losses.binary_cross_entropy_with_logits(
            logits, answers(batch), weight=batch["weights"], pos_weight=CLASS_WEIGHT.to(logits.dtype)
        )
    ),
    "sigmoid_focal_loss": lambda logits, batch: losses.sigmoid_focal_loss(logits, batch["answers"]),
    "sigmoid_focal_loss, ignored": lambda logits, batch: losses.sigmoid_focal_loss(
        logits, answers(batch), gamma=0.5, alpha=None
    ),
    "l1_loss": lambda logits, batch: losses.l1_loss(logits, batch["scores"]),
    "l1_loss, weighted": lambda logits, batch: losses.l1_loss(logits, batch["scores"], weight=batch["weights"]),
    "mse_loss": lambda logits, batch: losses.mse_loss(logits, batch["scores"]),
    "mse_loss, weighted": lambda logits, batch: losses.mse_loss(logits, batch["scores"], weight=batch["weights"]),
    "kl_divergence": lambda logits, batch: losses.kl_divergence(logits.log_softmax(-1), batch["scores"].softmax(-1)),
    "kl_divergence, log_target": lambda logits, batch: losses.kl_divergence(
        logits.log_softmax(-1), batch["scores"].log_softmax(-1), log_target=True
    ),
    "info_nce, keys of its own": rowwise,
}
COMPARES_ROWS = {"ntxent", "supervised_contrastive"}  # what a row costs depends on what is beside it
NO_LOSSES = {"softmax", "log_softmax"}


def loss_fn(score: Callable[[Tensor, Any], Loss], params: Any, batch: Any) -> tuple[Loss, dict[str, Tensor]]:
    logits = logits_of(params, batch["x"])
    loss = score(logits, batch)
    size = logits.square().mean(-1) if loss.values.ndim == 2 else logits.square()
    return loss, {"size": Loss(size * loss.weights, loss.weights).mean()}


def with_metric(score: Callable[[Tensor, Any], Loss]) -> Any:
    """A metric that is a weighted mean like the loss, so that parts of it add up too; NaN over nothing."""
    return gradient(partial(loss_fn, score), has_metrics=True)


SPLITS = [{"micro_batches": k} for k in (1, 2, 4, ROWS, ROWS + 5)] + [{"micro_batch_size": k} for k in (1, 3, 12, 50)]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_full_batch(name: str, dtype: torch.dtype) -> None:
    params, batch, grad_fn = make_params(dtype), make_batch(dtype), with_metric(LOSSES[name])
    whole = grad_fn(params, batch)
    assert_nonzero(whole.grads)
    for split in SPLITS:
        with assert_untouched(params, batch):
            parts = accumulate(grad_fn, **split)(params, batch)
        assert_close(parts.grads, whole.grads)
        assert_close((parts.loss, parts.weight, parts.metrics), (whole.loss, whole.weight, whole.metrics))


def test_every_loss_of_the_library_is_here() -> None:
    assert {name.split(",")[0] for name in LOSSES} == {*losses.__all__} - COMPARES_ROWS - NO_LOSSES


def test_losses_that_compare_rows_are_those_of_the_parts() -> None:
    """As documented: not the whole batch's, but the weighted mean over the parts, each by itself."""
    z, labels = torch.randn(8, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 2, 2, 2, 3])
    grad_fn = gradient(lambda w, batch: losses.supervised_contrastive(batch[0] * w, batch[1]))
    w = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    found, whole = accumulate(grad_fn, 2)(w, (z, labels)), grad_fn(w, (z, labels))
    first, second = (grad_fn(w, (z[rows], labels[rows])) for rows in (slice(0, 4), slice(4, 8)))
    assert (first.weight, second.weight, whole.weight) == (4, 3, 7)
    assert_close(found.grads, (4 * first.grads + 3 * second.grads) / 7)
    assert not torch.allclose(found.grads, whole.grads)


@given(st.integers(1, 20), st.integers(1, 20), st.booleans())
def test_any_split_of_any_batch(rows: int, size: int, by_size: bool) -> None:
    params = make_params(torch.float64)
    batch = tree.map(lambda leaf: leaf[:rows], make_batch(torch.float64))
    grad_fn = with_metric(LOSSES["cross_entropy, smoothed and weighted"])
    split = {"micro_batch_size": size} if by_size else {"micro_batches": size}
    whole, parts = grad_fn(params, batch), accumulate(grad_fn, **split)(params, batch)
    assert_close(parts.grads, whole.grads, 16)  # a few leaves are small beside the terms that they sum
    assert_close(parts.loss, whole.loss)


def test_half_precision_sums_in_float32() -> None:
    """100 gradients of about 1 whose sum in bfloat16 would stop growing at 256 / 2."""
    grad_fn = gradient(lambda params, x: (params["w"].float() * x).mean())
    params, x = {"w": torch.ones((), dtype=torch.bfloat16)}, torch.full((1000,), 1.0078125)
    parts = accumulate(grad_fn, micro_batch_size=1)(params, x)
    assert parts.grads["w"].dtype == torch.bfloat16
    assert parts.grads["w"].item() == 1.0078125


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("split", [{"micro_batches": 1}, {"micro_batches": 5}])
def test_rows_are_counted_in_float32(split: Any, dtype: torch.dtype) -> None:
    """4097 is odd and beyond the digits of half precision."""
    grad_fn = gradient(lambda w, x: Loss(w * x, torch.ones_like(x).to(dtype)))
    found = accumulate(grad_fn, **split)(torch.tensor(1.0), torch.arange(4097.0))
    assert (found.weight.dtype, found.weight) == (torch.float32, 4097)
    assert found.grads.item() == pytest.approx(2048, rel=1e-6)


def test_weights_of_a_gradient_function_of_one_s_own_are_counted_in_float32() -> None:
    def own(params: Any, batch: Tensor, carry: Any = (), *, scale: Any = None) -> Gradient:
        return Gradient(batch.mean(), batch.mean(), torch.tensor(2.0, dtype=torch.bfloat16), carry, {"m": batch.mean()})

    found = accumulate(own, micro_batch_size=1)(torch.tensor(1.0), torch.ones(300))
    assert (found.weight, found.grads, found.loss, found.metrics["m"]) == (600, 1, 1, 1)


@pytest.mark.parametrize("split", [{"micro_batches": 3}, {"micro_batch_size": 3}])
def test_an_empty_batch_weighs_nothing(split: Any) -> None:
    params = make_params(torch.float64)
    batch = tree.map(lambda leaf: leaf[:0], make_batch(torch.float64))
    for name in ("cross_entropy, smoothed and weighted", "mse_loss"):
        found = accumulate(with_metric(LOSSES[name]), **split)(params, batch)
        assert_same(found.grads, tree.zeros_like(params))
        assert (found.loss, found.weight, found.metrics["size"]) == (0, 0, 0)
    mean = accumulate(gradient(lambda params, x: params["bias"].sum() * x["x"].mean()), **split)(params, batch)
    assert_same(mean.grads, tree.zeros_like(params))
    assert (mean.loss, mean.weight) == (0, 0)


# --- field cases -----------------------------------------------------------------------------------------------------


def test_c01_tokens_weigh_the_same_whichever_part_they_are_in() -> None:
    """3.25; the mean of means is 2.5, the sum of means 5."""
    grad_fn = gradient(lambda w, x: Loss(w * x.nan_to_num(), (~x.isnan()).float()))
    nan = float("nan")
    for rows in ([[1.0, nan, nan], [4.0, 4.0, 4.0]], [[4.0, 4.0, 4.0], [1.0, nan, nan]]):
        found = accumulate(grad_fn, 2)(torch.tensor(1.0), torch.tensor(rows))
        assert found.grads.item() == 3.25
        assert found.weight.item() == 4
        assert found.loss.item() == 3.25


def test_c02_a_rank_is_a_part() -> None:
    """Pure part: what two ranks would return adds up by their weights; a rank without tokens adds nothing."""
    grad_fn = gradient(lambda w, x: (w * x).mean())
    ranks = [grad_fn(torch.tensor(1.0), x) for x in (torch.tensor([1.0]), torch.full((3,), 4.0))]
    total = sum(rank.weight for rank in ranks)
    assert (sum(rank.grads * rank.weight for rank in ranks) / total).item() == 3.25
    empty = gradient(lambda w, x: Loss(w * x, torch.zeros_like(x)))(torch.tensor(1.0), torch.zeros(3))
    assert (empty.grads.item(), empty.weight.item(), empty.loss.item()) == (0, 0, 0)


def test_c04_class_weights() -> None:
    logits, targets = torch.tensor([[0.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1])

    def score(shift: Tensor, batch: Any) -> Loss:
        return losses.cross_entropy(batch[0] + shift, batch[1], weight=torch.tensor([1.0, 3.0]))

    found = accumulate(gradient(score), micro_batch_size=1)(torch.zeros(2), (logits, targets))
    assert found.loss.item() == pytest.approx(0.2684828, abs=1e-6)
    assert found.weight.item() == 4
    whole = torch.func.grad(
        lambda shift: torch.nn.functional.cross_entropy(logits + shift, targets, weight=torch.tensor([1.0, 3.0]))
    )(torch.zeros(2))
    assert_close(found.grads, whole)


def test_c05_leftover_rows_are_divided_by_what_is_there() -> None:
    """Seven rows, k = 4: the parts are 4 and 3 rows, and the gradient is the mean of seven."""
    grad_fn = accumulate(gradient(lambda w, x: (w * x).mean()), micro_batch_size=4)
    assert grad_fn(torch.tensor(0.0), torch.ones(7)).grads.item() == 1
    assert grad_fn(torch.tensor(0.0), torch.arange(7.0)).grads.item() == pytest.approx(3, abs=1e-6)


# --- one bad part ----------------------------------------------------------------------------------------------------


def counting(params: Tensor, batch: Tensor, carry: Tensor) -> tuple[Loss, Tensor]:
    return Loss(params * batch, torch.ones_like(batch)), carry + batch.sum()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_drop_leaves_a_bad_part_out(bad: float) -> None:
    batch = torch.tensor([1.0, 2.0, bad, 4.0, 5.0, 9.0])
    good = torch.tensor([1.0, 2.0, 5.0, 9.0])
    grad_fn = gradient(counting, has_carry=True)
    found = accumulate(grad_fn, 3, nonfinite="drop")(torch.tensor(2.0), batch, torch.tensor(0.0))
    assert_same(tuple(found), tuple(accumulate(grad_fn, 2)(torch.tensor(2.0), good, torch.tensor(0.0))))
    assert found.weight.item() == 4
    assert found.carry.item() == 17
    kept = accumulate(grad_fn, 3)(torch.tensor(2.0), batch, torch.tensor(0.0))
    assert not torch.isfinite(kept.grads)
    assert not torch.isfinite(kept.carry)


def test_drop_first_last_and_all() -> None:
    nan = float("nan")
    grad_fn = accumulate(gradient(counting, has_carry=True), 3, nonfinite="drop")
    for batch, mean in (([nan, 1.0, 3.0], 2.0), ([1.0, 3.0, nan], 2.0), ([nan, nan, nan], 0.0)):
        found = grad_fn(torch.tensor(2.0), torch.tensor(batch), torch.tensor(7.0))
        assert found.grads.item() == mean
        assert found.carry.item() == 7 + 2 * mean


def test_drop_of_all_weighs_nothing() -> None:
    grad_fn = accumulate(gradient(counting, has_carry=True), 2, nonfinite="drop")
    found = grad_fn(torch.tensor(2.0), torch.full((4,), float("nan")), torch.tensor(7.0))
    assert (found.grads, found.loss, found.weight, found.carry) == (0, 0, 0, 7)


def test_drop_under_a_scale_keeps_what_overflowed() -> None:
    """Without a scale such a gradient is left out; with one it is the scale that has to fall."""
    grad_fn = accumulate(gradient(lambda w, x: (w * x).mean()), 2, nonfinite="drop")
    params, batch = torch.tensor(1.0), torch.tensor([1.0, 3.0])
    assert not torch.isfinite(grad_fn(params, batch, scale=torch.tensor(3e38)).grads)
    assert grad_fn(params, batch, scale=torch.tensor(2.0)).grads == 2
    assert grad_fn(params, torch.tensor([1.0, float("nan")]), scale=torch.tensor(2.0)).grads == 1
    root = accumulate(gradient(lambda w, x: (w * x).sqrt().mean()), 2, nonfinite="drop")  # infinite slope at 0
    assert root(torch.tensor(0.25), torch.tensor([0.0, 1.0])).grads == 1


def test_drop_per_lane() -> None:
    grad_fn = accumulate(gradient(counting, has_carry=True), 2, nonfinite="drop")
    batches = torch.tensor([[1.0, 2.0], [float("nan"), 2.0]])
    found = torch.vmap(lambda x: tuple(grad_fn(torch.tensor(1.0), x, torch.tensor(0.0))))(batches)
    assert_same(found[0], torch.tensor([1.5, 2.0]))
    assert_same(found[3], torch.tensor([3.0, 2.0]))


# --- the carry -------------------------------------------------------------------------------------------------------


def test_carry_goes_from_part_to_part_in_order() -> None:
    def order(params: Tensor, batch: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        return params * batch.mean(), carry * 10 + batch.mean()

    found = accumulate(gradient(order, has_carry=True), 4)(torch.tensor(1.0), torch.arange(1.0, 5.0), torch.tensor(0.0))
    assert found.carry.item() == 1234


# --- BatchNorm -------------------------------------------------------------------------------------------------------


def batch_norm(buffers: dict[str, Tensor], x: Tensor, path: str = "bn.", momentum: float = 0.1) -> Any:
    """BatchNorm that keeps the contract of ``pool``, written out: an oracle beside functricks.functional."""
    mean, var, count = x.mean(0), x.var(0, correction=0), x.shape[0]
    new = dict(buffers)
    if f"{path}pooled_count" in buffers:
        n, m, m2 = (buffers[f"{path}pooled_{name}"] for name in ("count", "mean", "m2"))
        total = n + count
        new[f"{path}pooled_count"] = total
        new[f"{path}pooled_mean"] = m + (mean - m) * count / total
        new[f"{path}pooled_m2"] = m2 + var * count + (mean - m).square() * n * count / total
        start = (buffers[f"{path}pooled_start_{name}"] for name in ("mean", "var", "batches"))
        stats = new[f"{path}pooled_mean"], new[f"{path}pooled_m2"] / (total - 1)
    else:
        start = (buffers[f"{path}{name}"] for name in ("running_mean", "running_var", "num_batches_tracked"))
        stats = mean, var * count / (count - 1)
    old_mean, old_var, batches = start
    new[f"{path}running_mean"] = (1 - momentum) * old_mean + momentum * stats[0]
    new[f"{path}running_var"] = (1 - momentum) * old_var + momentum * stats[1]
    new[f"{path}num_batches_tracked"] = batches + 1
    return (x - mean) / torch.sqrt(var + 1e-5), new


def bn_buffers(size: int = FEATURES) -> dict[str, Tensor]:
    return {
        "bn.running_mean": torch.full((size,), 0.3, dtype=torch.float64),
        "bn.running_var": torch.full((size,), 2.0, dtype=torch.float64),
        "bn.num_batches_tracked": torch.tensor(5),
    }


def bn_input(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x[:, 0] * params["scale"])  # without tanh, BatchNorm would undo the scale


def bn_loss(params: Any, batch: Any, carry: Any) -> tuple[Loss, Any]:
    x, buffers = batch_norm(carry["buffers"], bn_input(params, batch["x"]))
    return losses.mse_loss(logits_of(params, x), batch["scores"][:, 0]), {**carry, "buffers": buffers}


def bn_problem() -> tuple[Any, Any, Any]:
    params = {**make_params(torch.float64), "scale": torch.full((FEATURES,), 1.5, dtype=torch.float64)}
    return params, make_batch(torch.float64), {"buffers": bn_buffers(), "other": torch.tensor(1)}


def torch_batch_norm(inputs: list[Tensor], momentum: float = 0.1) -> dict[str, Tensor]:
    module = torch.nn.BatchNorm1d(FEATURES, momentum=momentum, dtype=torch.float64)
    module.load_state_dict({name.removeprefix("bn."): x for name, x in bn_buffers().items()}, strict=False)
    for x in inputs:
        module(x)
    return {f"bn.{name}": x for name, x in module.named_buffers()}


def test_sequential_batch_norm_is_the_classic_loop() -> None:
    params, batch, carry = bn_problem()
    found = accumulate(gradient(bn_loss, has_carry=True), micro_batch_size=5)(params, batch, carry)
    expected = torch_batch_norm(list((bn_input(params, batch["x"])).split(5)))
    assert_close(found.carry["buffers"], expected)


@pytest.mark.parametrize("split", [{"micro_batches": 3}, {"micro_batch_size": 5}, {"micro_batch_size": ROWS}])
def test_pooled_batch_norm_is_one_full_batch(split: Any) -> None:
    params, batch, carry = bn_problem()
    with assert_untouched(carry):
        found = accumulate(gradient(bn_loss, has_carry=True), **split, batch_norm="pooled")(params, batch, carry)
    assert_close(found.carry, {"buffers": torch_batch_norm([bn_input(params, batch["x"])]), "other": carry["other"]})


def test_pooled_batch_norm_sees_adversarial_evaluations_too() -> None:
    params, batch, carry = bn_problem()
    seen: list[Tensor] = []

    def spying(params: Any, batch: Any, carry: Any) -> Any:
        seen.append(bn_input(params, batch["x"]).detach())
        return bn_loss(params, batch, carry)

    grad_fn = pgd(gradient(spying, has_carry=True, backend="autograd"), 0.5, 0.2, 2, where="scale")
    found = accumulate(grad_fn, 3, batch_norm="pooled")(params, batch, carry)
    assert len(seen) == 9
    assert_close(found.carry["buffers"], torch_batch_norm([torch.cat(seen)]))


def test_pooled_inside_pooled_is_one_window() -> None:
    params, batch, carry = bn_problem()
    inner = accumulate(gradient(bn_loss, has_carry=True), micro_batch_size=2, batch_norm="pooled")
    batch = tree.map(lambda leaf: leaf[:12], batch)
    found = accumulate(inner, micro_batch_size=6, batch_norm="pooled")(params, batch, carry)
    assert_close(found.carry["buffers"], torch_batch_norm([bn_input(params, batch["x"])]))


def test_pooled_leaves_a_dropped_part_out() -> None:
    params, batch, carry = bn_problem()
    grad_fn = accumulate(gradient(bn_loss, has_carry=True), micro_batch_size=6, batch_norm="pooled", nonfinite="drop")
    bad = {**batch, "x": batch["x"].index_fill(0, torch.tensor([2]), float("nan"))}
    found = grad_fn(params, tree.map(lambda leaf: leaf[:12], bad), carry)
    assert_close(found.carry["buffers"], torch_batch_norm([bn_input(params, batch["x"][6:12])]))


def test_pooled_needs_batch_norm() -> None:
    grad_fn = accumulate(gradient(counting, has_carry=True), 2, batch_norm="pooled")
    with pytest.raises(ValueError, match=r"accumulate: batch_norm='pooled' needs a carry .* 'running_mean'"):
        grad_fn(torch.tensor(1.0), torch.ones(4), {"key": torch.tensor(1.0)})


def test_bn_momentum_for() -> None:
    """N equal batches move the statistics as far as one did; the recipe's "lower" is now a number."""
    momentum = bn_momentum_for(4, 0.1)
    assert momentum == pytest.approx(1 - 0.9**0.25)
    x = torch.randn(6, FEATURES, dtype=torch.float64)
    assert_close(
        {k: v for k, v in torch_batch_norm([x] * 4, momentum).items() if "running" in k},
        {k: v for k, v in torch_batch_norm([x]).items() if "running" in k},
    )
    assert_close(
        bn_momentum_for(4, torch.tensor(0.1, dtype=torch.float64)), torch.tensor(momentum, dtype=torch.float64)
    )
    assert bn_momentum_for(1, 0.3) == pytest.approx(0.3)
    for steps in (0, 2.5, True):
        with pytest.raises(ValueError, match="accumulation_steps must be an integer >= 1, got"):
            bn_momentum_for(steps)
    with pytest.raises(ValueError, match=r"momentum must be <= 1, got 1\.5"):
        bn_momentum_for(2, 1.5)


# --- memory and compile time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["func", "autograd"])
def test_memory_grows_with_the_part_not_with_the_batch(backend: Any) -> None:
    def deep(params: Tensor, x: Tensor) -> Tensor:
        for _ in range(10):
            x = torch.tanh(x * params)
        return x.square().mean()

    def peak(grad_fn: Any, rows: int) -> int:
        x, params = torch.randn(rows, 64), torch.ones(64)
        with LiveBytes() as live:
            live.known.update(leaf.untyped_storage().data_ptr() for leaf in (x, params))  # views of it cost nothing
            grad_fn(params, x)
        return live.peak

    grad_fn = gradient(deep, backend=backend)
    whole, parts = peak(grad_fn, 4096), peak(accumulate(grad_fn, micro_batch_size=256), 4096)
    one = peak(grad_fn, 256)
    assert whole > 12 * one  # the measure sees the activations
    assert parts < 1.3 * one


@pytest.mark.slow
def test_compile_time_does_not_grow_with_the_number_of_parts() -> None:
    """Counted in traced operations, which do not depend on what else the machine is doing."""
    params, grad_fn = make_params(torch.float32), with_metric(LOSSES["cross_entropy"])

    def operations(parts: int) -> int:
        count = 0

        def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
            nonlocal count
            count += sum(len(list(m.graph.nodes)) for m in module.modules() if isinstance(m, torch.fx.GraphModule))
            return module.forward

        torch._dynamo.reset()
        batch = tree.map(lambda leaf: leaf.repeat(6, *[1] * (leaf.ndim - 1))[:64], make_batch(torch.float32))
        compiled = torch.compile(accumulate(grad_fn, parts), fullgraph=True, backend=backend)
        found = compiled(params, batch)
        assert_close(found.grads, grad_fn(params, batch).grads)
        return count

    assert operations(32) < operations(8) + 10 * 32  # splitting the batch adds a few operations a part


@pytest.mark.slow
@pytest.mark.parametrize(
    "split", [{"micro_batches": 5}, {"micro_batch_size": 3}, {"micro_batch_size": 3, "unroll": True}]
)
def test_compiles_to_the_same_numbers(split: Any) -> None:
    params, batch = make_params(torch.float32), make_batch(torch.float32)
    grad_fn = accumulate(with_metric(LOSSES["cross_entropy, smoothed and weighted"]), nonfinite="drop", **split)
    found = torch.compile(grad_fn, fullgraph=True)(params, batch)
    assert_close(tuple(found), tuple(grad_fn(params, batch)))


@pytest.mark.slow
def test_compiles_under_vmap_with_batch_norm() -> None:
    params, batch, carry = bn_problem()
    lanes = stack([params, tree.scale(params, 0.5), tree.scale(params, 2.0)])
    grad_fn = accumulate(gradient(bn_loss, has_carry=True), 4, batch_norm="pooled")
    run = torch.vmap(lambda params: tuple(grad_fn(params, batch, carry)))
    compiled = torch.compile(run, fullgraph=True)(lanes)
    for index in range(3):
        # 32: the statistics are divided by, so that rounding of another order is enlarged
        assert_close(lane(compiled, index), tuple(grad_fn(lane(lanes, index), batch, carry)), 32)


def test_vmap_equals_the_loop() -> None:
    batch = make_batch(torch.float64)
    lanes = [make_params(torch.float64, seed) for seed in range(3)]
    grad_fn = accumulate(with_metric(LOSSES["focal_loss, weighted"]), 4)
    with torch.no_grad():
        found = torch.vmap(lambda params: tuple(grad_fn(params, batch)))(stack(lanes))
    for index, params in enumerate(lanes):
        assert_close(lane(found, index), tuple(grad_fn(params, batch)))


def test_differentiates_through_the_loop() -> None:
    """d/dparams of the squared norm of the accumulated gradient, against that of the full batch."""
    params, batch = make_params(torch.float64), make_batch(torch.float64)
    whole = with_metric(LOSSES["cross_entropy"])

    def squared(grad_fn: Any) -> Any:
        return torch.func.grad(lambda params: tree.norm(grad_fn(params, batch).grads).square())(params)

    expected = squared(whole)
    assert_nonzero(expected)
    assert_close(squared(accumulate(whole, 4)), expected, 32)  # second derivatives of another order of sums


# --- errors ----------------------------------------------------------------------------------------------------------


def test_errors() -> None:
    grad_fn = gradient(lambda params, x: (params * x).mean())
    for options in ({}, {"micro_batches": 2, "micro_batch_size": 2}):
        with pytest.raises(ValueError, match="give exactly one of micro_batches and micro_batch_size"):
            accumulate(grad_fn, **options)
    for options in ({"micro_batches": 0}, {"micro_batch_size": -1}, {"micro_batches": True}, {"micro_batches": 2.5}):
        with pytest.raises(ValueError, match="must be integers >= 1"):
            accumulate(grad_fn, **options)
    with pytest.raises(ValueError, match="nonfinite must be 'keep' or 'drop', got 'skip'"):
        accumulate(grad_fn, 2, nonfinite="skip")
    with pytest.raises(ValueError, match="batch_norm must be 'sequential' or 'pooled', got 'sync'"):
        accumulate(grad_fn, 2, batch_norm="sync")
    with pytest.raises(ValueError, match="must share one leading axis, got lengths"):
        accumulate(grad_fn, 2)(torch.tensor(1.0), {"a": torch.ones(3), "b": torch.ones(4)})
    with pytest.raises(
        TypeError, match=r"must be tensors, got \{'n.0': 'int', 'n.1': 'int', 'n.2': 'int'\} and 1 more"
    ):
        accumulate(grad_fn, 2)(torch.tensor(1.0), {"x": torch.ones(4), "n": [1, 2, 3, 4]})


@pytest.mark.parametrize(
    ("metrics", "got"),
    [
        (lambda x: {"each": x}, r"\{'each': \(2,\)\} and \{'each': \(1,\)\}"),
        (lambda x: {"some": x.mean()} if len(x) > 1 else {}, r"\{'some': \(\)\} and \{\}"),
    ],
)
def test_metrics_must_be_those_of_the_other_parts(metrics: Any, got: str) -> None:
    grad_fn = gradient(lambda params, x: ((params * x).mean(), metrics(x)), has_metrics=True)
    with pytest.raises(ValueError, match=f"every micro-batch must have the same metrics, .* got {got}"):
        accumulate(grad_fn, 2)(torch.tensor(1.0), torch.ones(3))


def test_adversarial_outside_and_inside_agree_where_they_should() -> None:
    """Around one micro-batch, the order of the wrappers makes no difference."""
    params, batch = make_params(torch.float64), make_batch(torch.float64)
    grad_fn = with_metric(LOSSES["cross_entropy"])
    outside = fgm(accumulate(grad_fn, 1), 0.3, where="weight")(params, batch)
    inside = accumulate(fgm(grad_fn, 0.3, where="weight"), 1)(params, batch)
    assert_close(outside.grads, inside.grads)
    assert outside.metrics.keys() == inside.metrics.keys()

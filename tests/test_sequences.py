"""Scheduled sampling against slow loops, its lanes, its coins, its gradient; decoding; tied logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_nonzero, assert_same, assert_untouched, lane, stack
from torch import Tensor, nn

from functricks import random, sequences
from functricks.schedules import exponential_decay, inverse_sigmoid, linear
from functricks.sequences import greedy, scheduled_sampling, tied_logits, two_pass

BATCH, LENGTH, VOCABULARY, WIDTH = 3, 6, 5, 4
END, PAD = 1, 2
KEY = random.key(3)
Params = dict[str, Tensor]


def make_params(seed: int = 0, dtype: torch.dtype = torch.float64) -> Params:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (VOCABULARY, WIDTH), "w": (WIDTH, WIDTH), "memory": (BATCH, 7, WIDTH)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()
    }


def recurrent(params: Params) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A recurrent decoder with attention and a tied output."""

    def step(state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(state @ params["w"] + params["embedding"][token])
        share = (params["memory"] * state[:, None]).sum(-1).softmax(-1)
        state = state + (share[..., None] * params["memory"]).sum(1)
        return tied_logits(state, params["embedding"]), state

    return step


def first_state(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.full((BATCH, WIDTH), 0.5, dtype=dtype)


def make_targets(seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def coins_of(coin: str, p: Any, key: Tensor) -> Tensor:
    """The coins as the documentation gives them, [B, T]."""
    if coin == "token":
        return random.bernoulli(key, p, (BATCH, LENGTH))
    if coin == "sequence":
        return random.bernoulli(key, p, (BATCH,))[:, None].expand(BATCH, LENGTH)
    return random.bernoulli(key, p).expand(BATCH, LENGTH)


def slow(
    params: Params, targets: Tensor, coins: Tensor, start: list[int], end: int | None = None, pad: int = PAD
) -> tuple[Tensor, list[list[int]]]:
    """One example and one token at a time, with Python numbers; return the logits and the inputs."""
    rows, fed = [], []
    for b in range(BATCH):
        step = recurrent({**params, "memory": params["memory"][b : b + 1]})
        state, token, over, logits, inputs = first_state()[b : b + 1], start[b], False, [], []
        for t in range(LENGTH):
            if t and coins[b, t]:
                token = int(targets[b, t - 1])
                token = pad if token < 0 else token
                over = token in (end, pad) and end is not None
            elif t:
                token = pad if over else int(logits[-1].argmax())
                over = over or (token == end and end is not None)
            inputs.append(token)
            out, state = step(state, torch.tensor([token]))
            logits.append(out[0])
        rows.append(torch.stack(logits))
        fed.append(inputs)
    return torch.stack(rows), fed


@pytest.mark.parametrize("end", [None, END])
@pytest.mark.parametrize("coin", ["token", "sequence", "batch"])
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_equals_a_slow_loop(p: float, coin: Any, end: int | None) -> None:
    params, targets = make_params(), make_targets()
    for seed in range(4):
        key = random.key(seed)
        expected, _ = slow(params, targets, coins_of(coin, p, key), [0, 3, 4], end)
        start = torch.tensor([0, 3, 4])
        with assert_untouched(params, targets, start, key):
            actual = scheduled_sampling(
                recurrent(params), first_state(), targets, p, key, start=start, coin=coin, end=end, pad=PAD
            )
        assert_nonzero(expected)
        assert_close(actual, expected)


def test_one_is_teacher_forcing_and_zero_is_free_running_to_the_bit() -> None:
    params, targets = make_params(), make_targets()
    run = partial(scheduled_sampling, recurrent(params), first_state(), start=4)
    state, rows = first_state(), []
    for token in torch.cat((torch.full((BATCH, 1), 4), targets[:, :-1]), 1).unbind(1):
        logits, state = recurrent(params)(state, token)
        rows.append(logits)
    for one in (1.0, 1, torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)):
        assert_same(run(targets, one, KEY), torch.stack(rows, 1))
    state, rows, token = first_state(), [], torch.full((BATCH,), 4)
    for _ in range(LENGTH):
        logits, state = recurrent(params)(state, token)
        token = logits.argmax(-1)
        rows.append(logits)
    for zero in (0.0, 0, torch.tensor(0.0)):
        assert_same(run(targets, zero, KEY), torch.stack(rows, 1))
        assert_same(run(make_targets(9), zero, KEY), torch.stack(rows, 1))


def inputs_of(targets: Tensor, p: Any, key: Tensor, coin: Any = "token", **options: Any) -> Tensor:
    """What a decoder is fed that always guesses 0: its inputs, [B, T]."""

    def step(state: tuple[()], token: Tensor) -> tuple[Tensor, tuple[()]]:
        guess = torch.tensor([0.0, -1e9]).expand(len(token), 2)
        return torch.cat((guess, -token[:, None].float() - 1), 1), state

    return -scheduled_sampling(step, (), targets, p, key, start=9, coin=coin, **options)[..., 2] - 1


def test_c16_a_coin_for_every_example_and_step() -> None:
    count = 2000
    keys = random.split(random.key(0), count)
    true = torch.full((2, 4), 7)
    fed = {
        coin: torch.vmap(lambda key, c=coin: inputs_of(true, 0.5, key, c))(keys)
        for coin in ("token", "sequence", "batch")
    }
    for inputs in fed.values():
        assert (inputs[..., 0] == 9).all()
        assert ((inputs[..., 1:] == 7) | (inputs[..., 1:] == 0)).all()
    taught = {coin: inputs[..., 1:] == 7 for coin, inputs in fed.items()}
    all_three = {coin: found.all(-1)[:, 0].float().mean().item() for coin, found in taught.items()}
    deviation = 4 * (0.25 / count) ** 0.5
    assert all_three["token"] == pytest.approx(0.125, abs=deviation)
    assert all_three["sequence"] == pytest.approx(0.5, abs=deviation)
    assert all_three["batch"] == pytest.approx(0.5, abs=deviation)
    differ = {coin: (found[:, 0] != found[:, 1]).any(-1).float().mean().item() for coin, found in taught.items()}
    assert differ["token"] == pytest.approx(0.875, abs=deviation)
    assert differ["sequence"] == pytest.approx(0.5, abs=deviation)
    assert differ["batch"] == 0.0


def test_a_probability_of_each_example_and_step() -> None:
    true = torch.full((2, 3), 7)
    assert inputs_of(true, torch.tensor([[0.0], [1.0]]), KEY).tolist() == [[9, 0, 0], [9, 7, 7]]
    assert inputs_of(true, torch.tensor([0.0, 0.0, 1.0]), KEY).tolist() == [[9, 0, 7], [9, 0, 7]]
    assert inputs_of(true, torch.tensor([0.0, 1.0]), KEY, "sequence").tolist() == [[9, 0, 0], [9, 7, 7]]


def test_padding_follows_the_end() -> None:
    true = torch.tensor([[0, 5, 6, 7, 8]])
    never = {"p": 0.0, "key": KEY}
    assert inputs_of(true, **never).tolist() == [[9, 0, 0, 0, 0]]  # guesses go on and on
    assert inputs_of(true, **never, end=0, pad=4).tolist() == [[9, 0, 4, 4, 4]]
    assert inputs_of(true, **never, end=0).tolist() == [[9, 0, 0, 0, 0]]  # padding is the end token
    assert inputs_of(true, **never, end=9, pad=4).tolist() == [[9, 0, 0, 0, 0]]  # the start token ends nothing
    # a true token resumes the sequence, a true end or padding is followed by padding
    coins = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
    assert inputs_of(true, coins, KEY, end=0, pad=4).tolist() == [[9, 0, 5, 0, 4]]
    ended = torch.tensor([[5, 3, 4, 4, 4]])
    for last in (2, 3):
        coins = (torch.arange(5) <= last).float()
        assert inputs_of(ended, coins, KEY, end=3, pad=4).tolist() == [[9, 5, 3, 4, 4]]


def test_negative_targets_are_padding_as_inputs() -> None:
    true = torch.tensor([[5, -100, -100, -100]])
    assert inputs_of(true, 1.0, KEY, pad=4).tolist() == [[9, 5, 4, 4]]
    assert inputs_of(true, 1.0, KEY, end=3).tolist() == [[9, 5, 3, 3]]
    assert inputs_of(true, 1.0, KEY).tolist() == [[9, 5, -100, -100]]


def loss_of(logits: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 1.5, logits.numel(), dtype=logits.dtype).view_as(logits)
    return (logits.square() * weights).sum()


def test_the_gradient_goes_through_the_state_and_not_through_the_argmax() -> None:
    params, targets = make_params(), make_targets()

    def loss(params: Params) -> Tensor:
        return loss_of(scheduled_sampling(recurrent(params), first_state(), targets, 0.5, KEY, end=END, pad=PAD))

    _, fed = slow(params, targets, coins_of("token", 0.5, KEY), [0] * BATCH, END)
    inputs = torch.tensor(fed)

    def with_known_inputs(params: Params) -> Tensor:
        state, rows = first_state(), []
        for token in inputs.unbind(1):
            logits, state = recurrent(params)(state, token)
            rows.append(logits)
        return loss_of(torch.stack(rows, 1))

    expected = torch.func.grad(with_known_inputs)(params)
    assert_nonzero(expected)
    assert_close(torch.func.grad(loss)(params), expected)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    assert_close(dict(zip(leaves, torch.autograd.grad(loss(leaves), list(leaves.values())), strict=True)), expected)


def test_lanes_are_the_runs_alone() -> None:
    lanes = [make_params(seed) for seed in range(3)]
    keys, rates, targets = random.split(KEY, 3), torch.tensor([0.0, 0.5, 1.0]), make_targets()

    def loss(params: Params, key: Tensor, p: Tensor) -> Tensor:
        return loss_of(scheduled_sampling(recurrent(params), first_state(), targets, p, key, end=END, pad=PAD))

    for function in (loss, torch.func.grad(loss)):
        together = torch.vmap(function)(stack(lanes), keys, rates)
        for i in range(3):
            # batched products sum in another order, six steps long
            assert_close(lane(together, i), function(lanes[i], keys[i], rates[i]), eps=64)
    only_coins = torch.vmap(partial(loss, lanes[0]))(keys, rates)
    for i in range(3):
        assert_close(only_coins[i], loss(lanes[0], keys[i], rates[i]))


def test_coins_come_from_the_key_alone() -> None:
    before = torch.random.get_rng_state()
    run = partial(inputs_of, torch.full((2, 20), 7), 0.5)
    torch.manual_seed(0)
    first = run(KEY)
    torch.manual_seed(1)
    assert_same(run(KEY), first)
    assert not torch.equal(run(random.key(4)), first)
    state = torch.random.get_rng_state()
    run(KEY)
    assert_same(torch.random.get_rng_state(), state)
    torch.random.set_rng_state(before)


# --- decoders that see all positions ---------------------------------------------------------------------------------


def transformer() -> tuple[Callable[[Tensor], Tensor], Callable[[Any, Tensor], Any], Any]:
    """A Transformer decoder as ``decode``, as ``decode_step``, and the latter's first state."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        embedding, place = nn.Embedding(VOCABULARY, WIDTH), torch.randn(LENGTH, WIDTH, dtype=torch.float64)
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        model, memory = nn.ModuleList([embedding, layer]).double(), torch.randn(BATCH, 3, WIDTH, dtype=torch.float64)

    def decode(inputs: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], dtype=torch.float64)
        hidden = model[1](model[0](inputs) + place[: inputs.shape[1]], memory, tgt_mask=mask)
        return tied_logits(hidden, model[0].weight)

    def decode_step(state: tuple[Tensor, Tensor], token: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        tokens, count = state
        here = torch.arange(LENGTH) == count
        tokens = torch.where(here, token[:, None], tokens)
        return (decode(tokens) * here[:, None]).sum(1), (tokens, count + 1)

    return decode, decode_step, (torch.zeros(BATCH, LENGTH, dtype=torch.int64), torch.tensor(0))


def test_two_passes_of_a_transformer() -> None:
    decode, _, _ = transformer()
    targets = make_targets()
    true = torch.cat((torch.full((BATCH, 1), 4), targets[:, :-1]), 1)
    assert_same(two_pass(decode, targets, 1.0, KEY, start=4), decode(true))
    guesses = decode(true).argmax(-1)
    for p in (0.0, 0.5):
        coins = coins_of("token", p, KEY)
        expected = true.clone()
        for b in range(BATCH):
            for t in range(1, LENGTH):
                expected[b, t] = true[b, t] if coins[b, t] else guesses[b, t - 1]
        assert_same(two_pass(decode, targets, p, KEY, start=4), decode(expected))
    assert not torch.equal(expected, true)


def test_two_passes_pad_after_the_end() -> None:
    seen = []

    def decode(inputs: Tensor) -> Tensor:
        seen.append(inputs)
        return F.one_hot(inputs * 0 + END, VOCABULARY).double()

    two_pass(decode, torch.tensor([[3, 4, -100, -100]]), 0.0, KEY, start=0, end=END, pad=PAD)
    assert [inputs.tolist() for inputs in seen] == [[[0, 3, 4, PAD]], [[0, END, PAD, PAD]]]


def test_the_first_pass_has_no_gradient() -> None:
    params, targets = make_params(), make_targets()
    calls = []

    def decode(params: Params, inputs: Tensor) -> Tensor:
        calls.append(inputs)
        hidden = params["embedding"][inputs].cumsum(1) @ params["w"]
        return tied_logits(hidden, params["embedding"])

    def loss(params: Params) -> Tensor:
        return loss_of(two_pass(partial(decode, params), targets, 0.5, KEY))

    found = torch.func.grad(loss)(params)
    inputs = calls[-1]
    expected = torch.func.grad(lambda params: loss_of(decode(params, inputs)))(params)
    assert_close(found, expected)
    together = torch.vmap(lambda p, key: two_pass(partial(decode, params), targets, p, key))(
        torch.tensor([0.0, 0.5]), random.split(KEY)
    )
    for i, p in enumerate((0.0, 0.5)):
        assert_close(together[i], two_pass(partial(decode, params), targets, p, random.split(KEY)[i]))


def test_a_transformer_step_by_step() -> None:
    decode, decode_step, state = transformer()
    targets = make_targets()
    true = torch.cat((torch.full((BATCH, 1), 4), targets[:, :-1]), 1)
    assert_close(scheduled_sampling(decode_step, state, targets, 1.0, KEY, start=4), decode(true))
    tokens = greedy(decode_step, state, torch.full((BATCH,), 4), LENGTH)
    expected = torch.full((BATCH, 1), 4)
    for _ in range(LENGTH):
        expected = torch.cat((expected, decode(expected)[:, -1:].argmax(-1)), 1)
    assert_same(tokens, expected[:, 1:])


def test_greedy_is_free_running_and_pads() -> None:
    params, targets = make_params(), make_targets()
    free = scheduled_sampling(recurrent(params), first_state(), targets, 0.0, KEY).argmax(-1)
    assert_same(greedy(recurrent(params), first_state(), torch.zeros(BATCH, dtype=torch.int64), LENGTH), free)
    end = int(free[0, 2])
    ended = greedy(recurrent(params), first_state(), torch.zeros(BATCH, dtype=torch.int64), LENGTH, end=end, pad=0)
    for row, whole in zip(ended.tolist(), free.tolist(), strict=True):
        stop = whole.index(end) + 1 if end in whole else LENGTH
        assert row == whole[:stop] + [0] * (LENGTH - stop)


# --- compiled --------------------------------------------------------------------------------------------------------


def run_recurrent(params: Params, key: Tensor, p: Tensor, targets: Tensor) -> Tensor:
    return scheduled_sampling(recurrent(params), first_state(), targets, p, key, end=END, pad=PAD)


def test_the_program_does_not_grow_with_the_length() -> None:
    """The graph has as many operations for 8 steps as for 40, one of them a scan."""
    sizes = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        sizes.append(sum(len(part.graph.nodes) for part in graph.modules() if isinstance(part, torch.fx.GraphModule)))
        return graph.forward

    for length in (8, 40):
        torch.compiler.reset()
        targets = torch.zeros(BATCH, length, dtype=torch.int64)
        with torch.no_grad():
            torch.compile(run_recurrent, fullgraph=True, backend=count)(make_params(), KEY, torch.tensor(0.5), targets)
    torch.compiler.reset()
    assert len(sizes) == 2
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("lanes", ["none", "coins", "all"])
def test_compiled_without_a_gradient(lanes: str) -> None:
    """A scan, also where the lanes of the coins only arrive with the second step."""
    params = make_params()
    arguments: Any = (params, KEY, torch.tensor(0.5))
    function: Any = partial(run_recurrent, targets=make_targets())
    if lanes != "none":
        together = [params, make_params(1), make_params(2)]
        arguments = (stack(together) if lanes == "all" else params, random.split(KEY, 3), torch.tensor([0.0, 0.5, 1.0]))
        function = torch.vmap(function, in_dims=(0 if lanes == "all" else None, 0, 0))
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*arguments)
        assert_close(compiled, function(*arguments))


def test_compiled_with_a_gradient() -> None:
    """Written out step by step, without being asked: inside of the compiled function, in lanes, and outside of it."""
    params, targets = make_params(), make_targets()[:, :4]  # a scan would begin with four steps

    def loss(params: Params, p: Tensor) -> Tensor:
        return loss_of(run_recurrent(params, KEY, p, targets))

    half = torch.tensor(0.5)
    expected = torch.func.grad(loss)(params, half)
    torch.compiler.reset()
    compiled = partial(torch.compile, fullgraph=True, backend="aot_eager")
    with torch.no_grad():  # as run does
        lanes = compiled(torch.vmap(torch.func.grad(loss), in_dims=(None, 0)))(params, torch.stack((half, half)))
    assert_close(lane(lanes, 1), expected)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    compiled(loss)(leaves, half).backward()
    assert_close({name: leaf.grad for name, leaf in leaves.items()}, expected)
    torch.compiler.reset()


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    torch.compiler.reset()
    function = partial(run_recurrent, targets=make_targets())
    with torch.no_grad():
        compiled = torch.compile(function, fullgraph=True)(make_params(), KEY, torch.tensor(0.5))
        assert_close(compiled, function(make_params(), KEY, torch.tensor(0.5)))


# --- probabilities, tied logits, errors ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (linear(1.0, 1.0, 0.25, total_iters=100), lambda i: max(0.25, 1 - 0.0075 * i)),
        (exponential_decay(1.0, gamma=0.99), lambda i: 0.99**i),
        (inverse_sigmoid(1.0, k=10.0), lambda i: 10 / (10 + torch.tensor(i / 10, dtype=torch.float64).exp().item())),
    ],
    ids=["linear", "exponential", "inverse sigmoid"],
)
def test_the_decays_of_the_paper(schedule: Any, expected: Callable[[int], float]) -> None:
    for step in (0, 1, 50, 100, 200):
        assert float(schedule(step)) == pytest.approx(expected(step), rel=1e-12)
        assert inputs_of(torch.full((2, 4), 7), schedule(step), KEY).shape == (2, 4)


def test_tied_logits_use_the_embedding_twice() -> None:
    params = make_params()
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)).double()
    model[1].weight = model[0].weight
    with torch.no_grad():
        model[0].weight.copy_(params["embedding"])
    tokens, bias = make_targets(), model[1].bias.detach()
    loss_of(model(tokens)).backward()

    def loss(embedding: Tensor) -> Tensor:
        return loss_of(tied_logits(embedding[tokens], embedding, bias=bias))

    assert_close(torch.func.grad(loss)(params["embedding"]), model[0].weight.grad)
    wide, projection = torch.randn(2, 3, 7), torch.randn(7, WIDTH)
    expected = wide @ projection @ params["embedding"].float().T
    assert_close(tied_logits(wide, params["embedding"].float(), projection=projection), expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run(targets=torch.zeros(2, 3)), "scheduled_sampling: targets must be integers, got torch.float32"),
        (lambda run: run(targets=torch.zeros(3, dtype=torch.int64)), r"must be \[B, T\] .* got shape \[3\]"),
        (lambda run: run(targets=torch.zeros(3, 0, dtype=torch.int64)), "with at least one step"),
        (lambda run: run(p=1.5), r"teacher_probability must be in \[0, 1\], got 1.5"),
        (lambda run: run(coin="step"), "coin must be one of 'token', 'sequence', 'batch', got 'step'"),
        (lambda run: run(p=torch.zeros(7)), r"p of shape \[7\] does not broadcast"),
        (
            lambda run: run(start=torch.zeros(2, dtype=torch.int64)),
            r"start must be an int or an integer tensor \[B\] with B = 3",
        ),
        (lambda run: run(start=torch.zeros(3)), "start must be an int or an integer tensor"),
        (lambda run: run(end=-1), "end must be a token, an int >= 0, got -1"),
        (lambda run: run(pad=True), "pad must be a token, an int >= 0, got True"),
        (lambda run: run(key=3), "a key is an int64 tensor"),
        (
            lambda run: run(step=lambda state, token: (token, state)),
            r"decode_step must return logits \[B, V\] for 3 tokens",
        ),
        (
            lambda run: two_pass(lambda x: x, make_targets(), 0.5, KEY),
            r"two_pass: decode must return logits \[B, T, V\]",
        ),
        (
            lambda run: greedy(recurrent(make_params()), first_state(), torch.zeros(3), 4),
            "greedy: start must be integers",
        ),
        (
            lambda run: greedy(recurrent(make_params()), first_state(), torch.zeros(3).long(), 0),
            "length must be an integer >= 1",
        ),
        (
            lambda run: tied_logits(torch.ones(2, 3), torch.ones(5, 4)),
            r"3 wide and the embedding 4; pass a projection of shape \[3, 4\]",
        ),
        (
            lambda run: tied_logits(torch.ones(2, 3), torch.ones(5, 4), projection=torch.ones(4, 3)),
            r"projection must have shape \[3, 4\].*got \[4, 3\]",
        ),
    ],
)
def test_errors(call: Callable[[Any], Any], message: str) -> None:
    def run(step: Any = None, targets: Any = None, p: Any = 0.5, key: Any = KEY, **options: Any) -> Tensor:
        step = recurrent(make_params()) if step is None else step
        return scheduled_sampling(
            step, first_state(), make_targets() if targets is None else targets, p, key, **options
        )

    with pytest.raises((ValueError, TypeError), match=message):
        call(run)


def test_public_names() -> None:
    assert sequences.__all__ == ["greedy", "scheduled_sampling", "tied_logits", "two_pass"]

"""Decoders that hear their own words: scheduled sampling, decoding, and an output layer tied to the embedding.

A decoder trained on the true previous tokens (teacher forcing) meets its own mistakes for the first time when it is
used. Scheduled sampling shows it some of them before: for every input, a coin decides between the true token and the
decoder's own best guess. How often the coin says "true" is a schedule, which falls from 1:

    linear(1.0, 1.0, 0.25, total_iters=N)    exponential_decay(1.0, gamma=0.9999)    inverse_sigmoid(1.0, k=500.0)

of :mod:`functricks.schedules`. The coins come from a key, so that a run is a function of its seed, and a lane of a
``vmap``, with its own probability and key, is the run alone.

A decoder is a function here: ``decode_step(state, token) -> (logits, state)`` for one that goes step by step, and
``decode(inputs) -> logits`` for one that sees all positions at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from functricks import random, tree
from functricks.gradients._loop import UNROLLED, collect
from functricks.types import Number, State

__all__ = ["greedy", "scheduled_sampling", "tied_logits", "two_pass"]

Coin: TypeAlias = Literal["token", "sequence", "batch"]
DecodeStep: TypeAlias = Callable[[Any, Tensor], tuple[Tensor, Any]]
Decode: TypeAlias = Callable[[Tensor], Tensor]
Stop: TypeAlias = tuple[int, int] | None  # the token that ends a sequence, and the one that follows


def scheduled_sampling(
    decode_step: DecodeStep,
    state: State,
    targets: Tensor,
    teacher_probability: Number,
    key: Tensor,
    *,
    start: int | Tensor = 0,
    coin: Coin = "token",
    end: int | None = None,
    pad: int | None = None,
    unroll: bool = False,
) -> Tensor:
    r"""Decode with inputs that are the true previous token with some probability, and the decoder's own guess else.

    .. math::
        x_0 = \mathrm{start}, \qquad
        x_t = \begin{cases} y_{t-1} & u_t < p \\ \arg\max_v z_{t-1,v} & \text{otherwise} \end{cases}, \qquad
        (z_t, s_{t+1}) = f(s_t, x_t)

    Probability 1 is teacher forcing exactly, 0 is free running exactly. No gradient goes through the argmax.

    Classic: a loop over the time steps with ``if random.random() < p`` in it. Where that is outside of the loop, or one
    for the whole batch, sequences are all true or all guessed and never mix.
    Reference: Bengio, Vinyals, Jaitly, Shazeer 2015, arXiv:1506.03099.

    Args:
        decode_step: ``(state, token) -> (logits, state)``, tokens int64 [B], logits [B, V]; the state keeps structure,
            shapes and dtypes. What does not change, such as the encoder's output, is better closed over than put into
            the state.
        state: the decoder's state before the first step.
        targets: integers [B, T].
        teacher_probability: *p* in [0, 1]: a number, a tensor that may be batched by ``vmap``, or a schedule's value;
            one that broadcasts to the coins differs between examples or steps.
        key: int64 [2], from :mod:`functricks.random`.
        start: the first input, an int or int64 [B].
        coin: ``"token"``, one for every example and step, entry ``[b, t]`` of ``bernoulli(key, p, [B, T])`` deciding
            about the input of step *t* (the first step needs none); ``"sequence"``, ``bernoulli(key, p, [B])``;
            ``"batch"``, ``bernoulli(key, p)``.
        end: the end-of-sequence token: from the step after it was an input, guesses are ``pad``. A true token is fed
            whatever came before it. The start token may be the same token, and does not end anything.
        pad: the padding token, which also stands for negative targets (the ``ignore_index`` of a loss) as inputs; the
            same as ``end`` if only that is given.
        unroll: compile a loop without a scan, also under ``torch.no_grad``.

    Returns the logits [B, T, V], those of step *t* for target *t*; leave padding to the loss.

    Compiled under :func:`torch.no_grad`, the steps are a scan, and compile time does not grow with their number. Where
    gradients are on they are written out, since torch cannot differentiate through such a scan: compile time then grows
    with *T*, and :func:`two_pass` is the form without a loop.

    Raises ValueError for shapes that do not fit, a number outside [0, 1] or an unknown ``coin``, TypeError for targets
    that are no integers.

    >>> from functricks import random
    >>> def step(state, token):  # counts on from its input
    ...     return torch.nn.functional.one_hot((token + 1) % 5, 5), state
    >>> targets = torch.tensor([[3, 3, 3]])
    >>> [scheduled_sampling(step, (), targets, p, random.key(0)).argmax(-1).tolist() for p in (1.0, 0.0)]
    [[[1, 4, 4]], [[1, 2, 3]]]
    """
    name = "scheduled_sampling"
    _check_targets(name, targets)
    teacher = _coins(name, targets, teacher_probability, key, coin)
    stop, true = _stop(name, end, pad), _fed(targets, end if pad is None else pad)
    return _decode(decode_step, state, _first(name, start, targets), true, teacher, stop, unroll)


def two_pass(
    decode: Decode,
    targets: Tensor,
    teacher_probability: Number,
    key: Tensor,
    *,
    start: int | Tensor = 0,
    coin: Coin = "token",
    end: int | None = None,
    pad: int | None = None,
) -> Tensor:
    r"""Schedule sampling for a decoder that sees all positions at once: guess in one pass, learn in a second.

    .. math::
        \hat y = \arg\max_v f(x), \qquad x = (\mathrm{start}, y_0, \ldots, y_{T-2}), \qquad
        \text{result } f(x'), \quad x'_t = \begin{cases} y_{t-1} & u_t < p \\ \hat y_{t-1} & \text{otherwise}
        \end{cases}

    The guesses are those after the true tokens, so that probability 0 is close to free running but not the same;
    probability 1 is teacher forcing exactly. No gradient goes through the first pass.

    Classic: two calls of the decoder, the first under ``torch.no_grad()``, and ``torch.where``.
    Reference: Mihaylova and Martins 2019, arXiv:1906.07651; of its variants the one with the argmax.

    Args:
        decode: ``inputs -> logits``, int64 [B, T] to [B, T, V], causal: position *t* sees the inputs up to *t*. It is
            called twice; close over the encoder's output, and over a key for dropout.
        targets: see :func:`scheduled_sampling`; like all others. After the end token, guesses are ``pad``.
        teacher_probability: see there.
        key: see there.
        start: see there.
        coin: see there.
        end: see there.
        pad: see there.

    Returns the logits [B, T, V] of the second pass.

    >>> from functricks import random
    >>> decode = lambda inputs: torch.nn.functional.one_hot((inputs + 1) % 5, 5)
    >>> targets = torch.tensor([[3, 3, 3]])
    >>> [two_pass(decode, targets, p, random.key(0)).argmax(-1).tolist() for p in (1.0, 0.0)]
    [[[1, 4, 4]], [[1, 2, 0]]]
    """
    name = "two_pass"
    _check_targets(name, targets)
    teacher = _coins(name, targets, teacher_probability, key, coin)
    stop, true = _stop(name, end, pad), _fed(targets, end if pad is None else pad)[:, :-1]
    first = _first(name, start, targets)[:, None]
    with torch.no_grad():
        logits = decode(torch.cat((first, true), 1))
    if tuple(logits.shape[:-1]) != tuple(targets.shape):
        raise ValueError(
            f"two_pass: decode must return logits [B, T, V] for inputs {list(targets.shape)}, got {list(logits.shape)}"
        )
    guesses = logits.detach()[:, :-1].argmax(-1)
    inputs, ended = [first[:, 0]], torch.zeros_like(first[:, 0], dtype=torch.bool)
    for guess, token, coins in zip(guesses.unbind(1), true.unbind(1), teacher[:, 1:].unbind(1), strict=True):
        chosen, ended = _choose(guess, token, coins, ended, stop)
        inputs.append(chosen)
    return decode(torch.stack(inputs, 1))


def greedy(
    decode_step: DecodeStep,
    state: State,
    start: Tensor,
    length: int,
    *,
    end: int | None = None,
    pad: int | None = None,
) -> Tensor:
    """Decode on its own: feed the best token of every step to the next.

    Classic: a loop with ``argmax``, stopped when all sequences have ended; here the number of steps is fixed, since it
    must not depend on values under ``vmap`` and ``torch.compile``.

    Args:
        decode_step: see :func:`scheduled_sampling`.
        state: the decoder's state before the first step.
        start: the first input of every sequence, int64 [B].
        length: how many tokens, >= 1.
        end: the end-of-sequence token; what comes after it is ``pad``.
        pad: the padding token; the same as ``end`` if only that is given.

    Returns int64 [B, length], the tokens after the start token.

    >>> def step(state, token):
    ...     return torch.nn.functional.one_hot((token + 1) % 5, 5), state
    >>> greedy(step, (), torch.tensor([0, 3]), 5, end=3, pad=0)
    tensor([[1, 2, 3, 0, 0],
            [4, 0, 1, 2, 3]])
    """
    if not _is_int(length, 1):
        raise ValueError(f"greedy: length must be an integer >= 1, got {length!r}")
    if start.dim() != 1 or not _is_integer(start):
        raise ValueError(
            f"greedy: start must be integers [B], one token a sequence, got {start.dtype} of shape {list(start.shape)}"
        )
    stop = _stop("greedy", end, pad)
    unused = start[:, None].expand(-1, length)
    with torch.no_grad():
        logits = _decode(decode_step, state, start, unused, torch.zeros_like(unused, dtype=torch.bool), stop)
        guesses = logits.argmax(-1)
    if stop is None:
        return guesses
    is_end = (guesses == stop[0]).long()
    return torch.where(is_end.cumsum(1) > is_end, stop[1], guesses)  # an end came before


def tied_logits(
    hidden: Tensor, embedding: Tensor, *, projection: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    r"""Score the vocabulary with the matrix that embeds it: the output layer of tied weights.

    .. math:: z = (h P) E^\top + b

    Classic: ``decoder.out.weight = decoder.embedding.weight``, which needs both of one shape. Tying saves the
    parameters of an output layer and regularises; it is no cure for exposure bias. These are logits: a softmax here and
    the cross entropy's own would make two.
    Reference: Press and Wolf 2017, arXiv:1608.05859; Inan, Khosravi, Socher 2017, arXiv:1611.01462.

    Args:
        hidden: [..., D].
        embedding: *E*, [V, W], as in :class:`torch.nn.Embedding`; it gets gradients from both of its uses.
        projection: *P*, [D, W], where the widths differ.
        bias: *b*, [V].

    Returns [..., V]. Raises ValueError for widths that do not fit.

    >>> tied_logits(torch.ones(2, 3), torch.ones(4, 3)).shape
    torch.Size([2, 4])
    """
    if projection is not None:
        if tuple(projection.shape) != (hidden.shape[-1], embedding.shape[-1]):
            raise ValueError(
                f"tied_logits: projection must have shape {[hidden.shape[-1], embedding.shape[-1]]}, hidden width by "
                f"embedding width, got {list(projection.shape)}"
            )
        hidden = hidden @ projection
    if hidden.shape[-1] != embedding.shape[-1]:
        raise ValueError(
            f"tied_logits: hidden is {hidden.shape[-1]} wide and the embedding {embedding.shape[-1]}; pass a "
            f"projection of shape {[hidden.shape[-1], embedding.shape[-1]]}"
        )
    return torch.nn.functional.linear(hidden, embedding, bias)


# --- the loop --------------------------------------------------------------------------------------------------------


def _decode(
    decode_step: DecodeStep,
    state: State,
    first: Tensor,
    true: Tensor,
    teacher: Tensor,
    stop: Stop,
    unroll: bool = False,
) -> Tensor:
    """Return the logits [B, T, V]; step t > 0 is fed ``true[:, t - 1]`` where ``teacher[:, t]``, else its own guess."""

    def one(state: Any, token: Tensor, ended: Tensor) -> tuple[tuple[Any, Tensor, Tensor], Tensor]:
        logits, state = decode_step(state, token)
        if logits.dim() != 2 or logits.shape[0] != first.shape[0]:
            raise ValueError(
                f"decode_step must return logits [B, V] for {first.shape[0]} tokens, got shape {list(logits.shape)}"
            )
        return (state, logits.detach().argmax(-1), ended), logits

    def body(carry: tuple[Any, Tensor, Tensor], item: tuple[Tensor, Tensor]) -> Any:
        state, guess, ended = carry
        return one(state, *_choose(guess, *item, ended, stop))

    carry, logits = one(state, first, torch.zeros_like(first, dtype=torch.bool))
    items = true[:, :-1], teacher[:, 1:]
    length = items[0].shape[1]
    # torch's scan refuses torch.func.grad, and, with integers in its state, a backward pass
    scans = torch.compiler.is_compiling() and not torch.is_grad_enabled() and not unroll
    if not scans or length <= UNROLLED:
        rows = [logits]
        for item in zip(items[0].unbind(1), items[1].unbind(1), strict=True):
            carry, logits = body(carry, item)
            rows.append(logits)
        return torch.stack(rows, 1)

    def scanned(carry: Any, t: Tensor) -> tuple[Any, Tensor]:
        # taken by its index, since torch has no batching rule for a scan's own rows
        item = items[0].index_select(1, t[None]).squeeze(1), items[1].index_select(1, t[None]).squeeze(1)
        carry, logits = body(carry, item)
        return _with_lanes(carry, logits, item), logits

    start = _with_lanes(carry, logits, (items[0][:, 0], items[1][:, 0]))
    rest = collect(scanned, start, torch.arange(length, device=first.device))[1]
    return torch.cat((logits[:, None], rest.movedim(0, 1)), 1)


def _with_lanes(carry: Any, logits: Tensor, item: tuple[Tensor, Tensor]) -> Any:
    """Return the carry with all the lanes that it will ever have under ``vmap``, stored lanes first: a scan wants that.

    Later on everything may depend on the coins, the targets and the logits, so everything gets their lanes.
    """
    some = (item[0][0] == item[0][0]) | item[1][0] | (logits[0, 0] > 0)
    return tree.map(lambda leaf: torch.where(some, leaf, leaf).contiguous(), carry)


def _choose(guess: Tensor, true: Tensor, teacher: Tensor, ended: Tensor, stop: Stop) -> tuple[Tensor, Tensor]:
    """Return the next input, and whether the sequence is over with it."""
    if stop is None:
        return torch.where(teacher, true, guess), ended
    end, pad = stop
    token = torch.where(teacher, true, torch.where(ended, pad, guess))
    return token, (token == end) | torch.where(teacher, true == pad, ended)


# --- arguments -------------------------------------------------------------------------------------------------------


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_targets(name: str, targets: Tensor) -> None:
    if not _is_integer(targets):
        raise TypeError(f"{name}: targets must be integers, got {targets.dtype}")
    if targets.dim() != 2 or 0 in targets.shape:
        raise ValueError(f"{name}: targets must be [B, T] with at least one step, got shape {list(targets.shape)}")


def _coins(name: str, targets: Tensor, probability: Number, key: Tensor, coin: str) -> Tensor:
    """Return where the true token is the input, bool [B, T]."""
    shapes = {"token": tuple(targets.shape), "sequence": (targets.shape[0],), "batch": ()}
    if coin not in shapes:
        raise ValueError(f"{name}: coin must be one of {', '.join(map(repr, shapes))}, got {coin!r}")
    if not isinstance(probability, Tensor) and not 0 <= probability <= 1:
        raise ValueError(f"{name}: teacher_probability must be in [0, 1], got {probability!r}")
    thrown = random.bernoulli(key, probability, shapes[coin])
    return (thrown[:, None] if coin == "sequence" else thrown).expand(targets.shape)


def _stop(name: str, end: int | None, pad: int | None) -> Stop:
    for what, token in (("end", end), ("pad", pad)):
        if token is not None and not _is_int(token, 0):
            raise ValueError(f"{name}: {what} must be a token, an int >= 0, got {token!r}")
    return None if end is None else (end, end if pad is None else pad)


def _first(name: str, start: int | Tensor, targets: Tensor) -> Tensor:
    """Return the first inputs, int64 [B]."""
    if not isinstance(start, Tensor):
        return torch.full_like(targets[:, 0], start, dtype=torch.int64)
    if start.dim() > 1 or (start.dim() == 1 and start.shape[0] != targets.shape[0]) or not _is_integer(start):
        raise ValueError(
            f"{name}: start must be an int or an integer tensor [B] with B = {targets.shape[0]}, got {start.dtype} of "
            f"shape {list(start.shape)}"
        )
    return start.long().expand(targets.shape[0])


def _fed(targets: Tensor, pad: int | None) -> Tensor:
    """Return the targets as inputs: an embedding has no row for a negative one."""
    targets = targets.long()
    return targets if pad is None else torch.where(targets < 0, pad, targets)

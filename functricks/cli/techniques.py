"""The techniques that ``functricks ablate`` compares: each is one setting of a configuration, moved from neutral.

The settings that are numbers share one batched program with the baseline, since their neutral values change nothing, to
the last bit. Only ``gradient`` is structure: how the gradient is computed.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, NamedTuple

from functricks.cli.errors import CommandError

__all__ = ["BASELINE", "NEUTRAL", "TECHNIQUES", "Arm", "Technique", "parse_arms"]

NEUTRAL: dict[str, Any] = {
    "label_smoothing": 0.0,
    "temperature": 1.0,
    "focal_gamma": 0.0,
    "class_weight_power": 0.0,
    "warmup": 0.0,
    "cosine_depth": 0.0,
    "step_factor": 1.0,
    "max_norm": float("inf"),
    "weight_decay": 0.0,
    "dropout": 0.0,
    "epsilon": 0.0,
    "gradient": "plain",
}
"""The baseline: every technique off."""


class Technique(NamedTuple):
    """One technique: the setting that it moves, to what by default, within which range, and what that means."""

    name: str
    setting: str
    strength: float
    low: float
    high: float
    about: str
    gradient: str = "plain"


INF = float("inf")
TECHNIQUES = {
    technique.name: technique
    for technique in (
        Technique("label-smoothing", "label_smoothing", 0.1, 0, 1, "share of the target spread over all classes"),
        Technique("temperature", "temperature", 2.0, 1e-3, INF, "logits are divided by it, in training and testing"),
        Technique("focal-loss", "focal_gamma", 2.0, 0, INF, "gamma: how much less easy rows count"),
        Technique(
            "class-weights", "class_weight_power", 1.0, 0, INF, "rows weigh (1 / frequency of their class) ** it"
        ),
        Technique("warmup", "warmup", 0.1, 0, 1, "share of the steps in which the learning rate rises from 0"),
        Technique("cosine", "cosine_depth", 1.0, 0, 1, "share of the learning rate that falls along a half cosine"),
        Technique("step-decay", "step_factor", 0.3, 0, 1, "factor on the learning rate at each third of the steps"),
        Technique("fgm", "epsilon", 0.5, 0, INF, "length by which the first layer is moved against us", "fgm"),
        Technique("pgd", "epsilon", 0.5, 0, INF, "the same in three steps", "pgd"),
        Technique("clipping", "max_norm", 0.5, 0, INF, "largest norm of the gradient"),
        Technique("accumulation", "gradient", 2, 1, INF, "micro-batches a batch is split into; the same numbers"),
        Technique("weight-decay", "weight_decay", 0.1, 0, INF, "decoupled weight decay of the weight matrices"),
        Technique("dropout", "dropout", 0.2, 0, 1, "rate after every hidden layer"),
    )
}


class Arm(NamedTuple):
    """One row of the table: a technique at a strength, or the baseline."""

    name: str
    settings: dict[str, Any]


BASELINE = Arm("baseline", {})


def parse_arms(text: str | None) -> list[Arm]:
    """Return the arms that ``--techniques`` asks for, the baseline first.

    ``text`` is a list ``name,name=strength,...``; None means every technique at its default strength.

    >>> [arm.name for arm in parse_arms("dropout,label-smoothing=0.05")]
    ['baseline', 'dropout 0.2', 'label-smoothing 0.05']
    """
    items = list(TECHNIQUES) if text is None else [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise CommandError(f"--techniques names none; give at least one of: {', '.join(TECHNIQUES)}")
    arms = [BASELINE]
    for item in items:
        arm = _arm(item)
        if any(other.name == arm.name for other in arms):
            raise CommandError(f"--techniques names {arm.name!r} twice; leave one out or give it another strength")
        arms.append(arm)
    return arms


def _arm(item: str) -> Arm:
    name, _, value = item.partition("=")
    technique = _find(name.strip())
    strength = technique.strength if "=" not in item else _strength(technique, value.strip())
    if technique.setting == "gradient":
        parts = int(strength)
        return Arm(f"{technique.name} {parts}", {"gradient": f"accumulate {parts}"})
    return Arm(f"{technique.name} {strength:g}", {technique.setting: strength, "gradient": technique.gradient})


def _find(name: str) -> Technique:
    plain = name.lower().replace("_", "-").replace(" ", "-")
    if plain in TECHNIQUES:
        return TECHNIQUES[plain]
    near = get_close_matches(plain, TECHNIQUES, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise CommandError(f"unknown technique {name!r}; {hint}known: {', '.join(TECHNIQUES)}")


def _strength(technique: Technique, value: str) -> float:
    low, high = f"{technique.low:g}", f"{technique.high:g}"
    wanted = f"at least {low}" if technique.high == INF else f"from {low} to {high}"
    whole = technique.setting == "gradient"
    try:
        strength = float(value)
    except ValueError:
        strength = float("nan")
    fits = technique.low <= strength <= technique.high and (not whole or strength.is_integer())
    if not fits or (technique.name == "accumulation" and strength == INF):
        kind = "a whole number" if whole else "a number"
        raise CommandError(f"{technique.name}={value}: the strength must be {kind} {wanted} ({technique.about})")
    return strength

r"""Different transforms, or different rates, for different leaves.

Leaves are told apart by their dotted path, and every function here accounts for every leaf: one that no label, glob or
layer covers raises and is named, and so does one that two of them cover.

To train a head alone, do not differentiate the body at all; then nothing is computed, stored or written for it::

    head = tree.pick(params, tree.select("head.*", params))
    step = train_step(gradient(lambda head, batch: loss_fn(tree.from_named(params, head), batch)), adamw(1e-3))

``partition({"head": adamw(1e-3), "body": freeze()}, labels)`` keeps the body in the parameters and pays for its
gradient only: it has no state, and its updates are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from functricks import tree
from functricks.transforms.base import check_number, stateless
from functricks.types import Grads, Number, Params, State, Transform, Updates

__all__ = ["freeze", "layer_decay", "masked", "partition"]


def partition(transforms: dict[str, Transform], labels: Any) -> Transform:
    """Give every leaf to the transform of its label.

    Classic: ``torch.optim`` parameter groups.

    Args:
        transforms: ``{label: transform}``. Each sees its leaves as a flat ``{path: leaf}``.
        labels: a callable ``(path, leaf) -> label``, or a tree of strings with the structure of the parameters.

    Raises ``ValueError`` that names every leaf whose label is missing or unknown: nothing is silently left out.

    >>> import torch
    >>> from functricks import scale
    >>> rates = {"slow": scale(-0.1), "fast": scale(-1.0)}
    >>> slow_fast = partition(rates, lambda path, leaf: "fast" if path == "b" else "slow")
    >>> params = {"a": torch.tensor(1.0), "b": torch.tensor(1.0)}
    >>> slow_fast.update(params, slow_fast.init(params), params)[0]
    {'a': tensor(-0.1000), 'b': tensor(-1.)}
    """

    def parts(params: Params) -> dict[str, dict[str, bool]]:
        found = tree.label(labels, params, name="partition: labels")
        unknown = {path: label for path, label in found.items() if label not in transforms}
        if unknown:
            raise ValueError(f"partition: labels without a transform: {unknown}; have: {', '.join(transforms)}")
        return {label: {path: one == label for path, one in found.items()} for label in transforms}

    def init(params: Params) -> State:
        return {label: transforms[label].init(tree.pick(params, part)) for label, part in parts(params).items()}

    def update(grads: Grads, state: State, params: Params) -> tuple[Updates, State]:
        if state.keys() != transforms.keys():
            raise ValueError(f"partition: the state has {list(state)}, the labels are {list(transforms)}")
        updates, states = {}, {}
        for label, part in parts(params).items():
            own, states[label] = transforms[label].update(tree.pick(grads, part), state[label], tree.pick(params, part))
            updates.update(own)
        return tree.from_named(grads, updates), states

    return Transform(init, update)


def masked(transform: Transform, where: tree.Where) -> Transform:
    """Apply ``transform`` to the chosen leaves only; the others pass unchanged and have no state.

    They pass as *gradients*. To leave parameters alone, use :func:`freeze`.

    Args:
        transform: sees the chosen leaves as a flat ``{path: leaf}``, so that masks nest.
        where: a selector; one that matches nothing raises.

    >>> import torch
    >>> from functricks import scale
    >>> half = masked(scale(0.5), "a")
    >>> params = {"a": torch.tensor(1.0), "b": torch.tensor(1.0)}
    >>> half.update(params, half.init(params), params)[0]
    {'a': tensor(0.5000), 'b': tensor(1.)}
    """

    def init(params: Params) -> State:
        return transform.init(tree.pick(params, tree.select(where, params, name="masked")))

    def update(grads: Grads, state: State, params: Params) -> tuple[Updates, State]:
        chosen = tree.select(where, params, name="masked")
        updates, state = transform.update(tree.pick(grads, chosen), state, tree.pick(params, chosen))
        return tree.from_named(grads, updates), state

    return Transform(init, update)


def freeze(where: tree.Where | None = None) -> Transform:
    """Make the updates of the chosen leaves zero, NaN included.

    Classic: ``requires_grad_(False)``. Last in a chain it overrules weight decay and momentum too. As the transform of
    a label of :func:`partition` it saves the state of the others as well.

    Args:
        where: a selector; all leaves by default.

    >>> import torch
    >>> from functricks import chain, sgd
    >>> params = {"body": torch.tensor(1.0), "head": torch.tensor(1.0)}
    >>> optimizer = chain(sgd(0.1), freeze("body"))
    >>> optimizer.update(params, optimizer.init(params), params)[0]
    {'body': tensor(0.), 'head': tensor(-0.1000)}
    """

    def update(grads: Grads, params: Params) -> Updates:
        if where is None:
            return tree.zeros_like(grads)
        frozen = tree.pick(grads, tree.select(where, params, name="freeze"))
        return tree.from_named(grads, tree.zeros_like(frozen))

    return stateless(update)


def scale_by_path(factors: dict[str, Number], *, name: str) -> Callable[[Grads], Updates]:
    """Return the function that multiplies the leaves that match a glob by its number; the other leaves pass.

    ``name`` is the caller's, for errors: a glob that matches nothing, and a leaf that two globs match.
    """
    for glob, factor in factors.items():
        check_number(f"{name}[{glob!r}]", factor, minimum=0.0)

    def update(grads: Grads) -> Updates:
        matches = {glob: tree.select(glob, grads, name=name) for glob in factors}
        _check_once(matches, name)
        updates: dict[str, Any] = {}
        for glob, factor in factors.items():
            updates.update(tree.scale(tree.pick(grads, matches[glob]), factor))
        return tree.from_named(grads, updates)

    return update


def _check_once(matches: dict[str, dict[str, bool]], name: str) -> None:
    owners: dict[str, list[str]] = {}
    for glob, chosen in matches.items():
        for path, hit in chosen.items():
            owners.setdefault(path, []).extend([glob] * hit)
    twice = {path: globs for path, globs in owners.items() if len(globs) > 1}
    if twice:
        raise ValueError(f"{name}: parameters that more than one glob matches: {twice}")


# --- layer-wise decay ------------------------------------------------------------------------------------------------

Layers = Sequence[str | Sequence[str]] | Callable[[str], int]

# Components of paths, in the layouts of timm and HuggingFace.
_BELOW = (
    "embed", "cls_token", "mask_token", "dist_token", "register_token", "reg_token", "wte", "wpe", "stem",
    "norm_pre", "ln_pre", "pre_layrnorm", "pre_layernorm",
)  # fmt: skip
_FINAL_NORMS = ("norm", "layernorm", "layer_norm", "ln_f", "final_layernorm", "final_layer_norm")


def layer_decay(rate: Number, layers: Layers | None = None) -> Transform:
    r"""Multiply the updates by ``rate`` once for every layer between a leaf and the head.

    .. math:: u \mapsto \gamma^{L - l}\, u

    with layer 0 the embeddings, layer :math:`i + 1` the i-th block, and the last layer :math:`L` the head. Put it after
    an optimizer, whose learning rate it scales layer by layer: ``chain(adamw(1e-3), layer_decay(0.8))``.

    Classic: timm's ``param_groups_layer_decay``, the "layer-wise learning rate decay" of ELECTRA and BEiT recipes.
    Reference: Clark et al. 2020, arXiv:2003.10555; Howard and Ruder 2018, arXiv:1801.06146.

    Args:
        rate: :math:`\gamma`, usually in [0.5, 1].
        layers: the layers from the bottom up, each a glob or a sequence of globs; or a callable ``path -> layer``. By
            default they are read from the paths, which must have numbered blocks: ``blocks.3.attn.qkv.weight`` (timm),
            ``bert.encoder.layer.3.output.dense.weight`` (HuggingFace), ``h.3.attn`` (GPT-2). Embeddings, tokens and
            stems, with a norm before the blocks, are layer 0, a norm that follows the blocks belongs to the last of
            them, as in timm, and what is left is the head.

    Raises ``ValueError`` for a leaf that is in no layer or in two, and names it; and where the paths have several
    stacks of blocks (encoder and decoder, two towers, the stages of a ResNet), whose order they do not tell.

    >>> import torch
    >>> decay = layer_decay(0.5, layers=["embed.*", "block.*", "head.*"])
    >>> ones = {"embed.w": torch.tensor(1.0), "block.w": torch.tensor(1.0), "head.w": torch.tensor(1.0)}
    >>> decay.update(ones, decay.init(ones), ones)[0]
    {'embed.w': tensor(0.2500), 'block.w': tensor(0.5000), 'head.w': tensor(1.)}
    """
    check_number("layer_decay: rate", rate, minimum=0.0)

    def update(grads: Grads, params: Params) -> Updates:
        depths = _depths(layers, params)
        top = max([0, *depths.values()])
        updates: dict[str, Any] = {}
        for depth in sorted(set(depths.values())):
            chosen = {path: own == depth for path, own in depths.items()}
            factor: Number = rate.double() ** (top - depth) if isinstance(rate, Tensor) else rate ** (top - depth)
            updates.update(tree.scale(tree.pick(grads, chosen), factor))
        return tree.from_named(grads, updates)

    return stateless(update)


def _depths(layers: Layers | None, params: Params) -> dict[str, int]:
    """Return ``{path: layer}`` for every leaf."""
    paths = tree.paths(params)
    if layers is None:
        return dict(zip(paths, _standard_depths(tuple(paths)), strict=True))
    if callable(layers):
        return {path: layers(path) for path in paths}
    matches = (
        {str(i): tree.select(globs, params, name="layer_decay") for i, globs in enumerate(layers)} if paths else {}
    )
    _check_once(matches, "layer_decay: layers")
    depths = {path: int(layer) for layer, chosen in matches.items() for path, hit in chosen.items() if hit}
    left_out = [path for path in paths if path not in depths]
    if left_out:
        raise ValueError(f"layer_decay: parameters in no layer: {', '.join(left_out)}")
    return depths


def _standard_depths(paths: tuple[str, ...]) -> tuple[int, ...]:
    """Read the layers from the numbered blocks: the numbered list that holds the most leaves."""
    lists: dict[str, list[int]] = {}
    inside: dict[str, set[str]] = {}
    for path in paths:
        parts = path.split(".")
        for i, part in enumerate(parts):
            if part.isdigit() and i:
                prefix = ".".join(parts[:i]) + "."
                lists.setdefault(prefix, []).append(int(part))
                inside.setdefault(prefix, set()).add(".".join(parts[i + 1 :]))
                break  # lists inside a block are parts of it
    if paths and not lists:
        raise ValueError(f"layer_decay: no numbered blocks in the paths, pass layers=; have: {', '.join(paths)}")
    blocks = max(lists, key=lambda prefix: len(lists[prefix]), default="")
    # A head or a stem may be a numbered list of layers too, but not of blocks made alike.
    stacks = [prefix for prefix in lists if any("." in name for name in inside[prefix] & inside[blocks])]
    if len(stacks) > 1:
        raise ValueError(f"layer_decay: several stacks of numbered blocks, pass layers=; have: {', '.join(stacks)}")
    numbers = {number: i for i, number in enumerate(sorted(set(lists.get(blocks, []))))}
    return tuple(_standard_depth(path, blocks, numbers) for path in paths)


_standard_depths.__dict__["_dynamo_marked_constant"] = True  # paths are constants: nothing to trace


def _standard_depth(path: str, blocks: str, numbers: dict[int, int]) -> int:
    number = path[len(blocks) :].split(".")[0]
    if path.startswith(blocks) and number.isdigit():
        return numbers[int(number)] + 1
    parts = path.lower().split(".")
    if any(word in part for part in parts for word in _BELOW) or parts[-2:] == ["shared", "weight"]:  # T5's embedding
        return 0
    beside_blocks = blocks.lower().startswith("".join(f"{part}." for part in parts[:-2]))
    is_final_norm = len(parts) > 1 and parts[-2] in _FINAL_NORMS and beside_blocks
    return len(numbers) if is_final_norm else len(numbers) + 1

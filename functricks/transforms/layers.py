"""Layer-wise decay of the learning rate, by the depth that a leaf's path tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from functricks import tree
from functricks.transforms.base import check_number, stateless
from functricks.transforms.groups import check_once
from functricks.types import Grads, Number, Params, Transform, Updates

__all__ = ["layer_decay"]

Layers = Sequence[str | Sequence[str]] | Callable[[str], int]


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
            stems are layer 0, a norm that follows the blocks belongs to the last of them, as in timm, and what is left
            is the head. A list within a block is part of it: a stage of a Swin is one layer.

    It counts from the highest layer that it sees. Put it around a ``partition``, not into one, where it would see the
    leaves of one label only.

    Raises ``ValueError`` for a leaf that is in no layer or in two, and names it; and, without ``layers``, where there
    is more than one stack of blocks (encoder and decoder, ``layer1`` to ``layer4`` of a ResNet), since their order is
    not in the paths.

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
        depths = {path: layers(path) for path in paths}
        given: dict[str, Any] = depths
        bad = {path: depth for path, depth in given.items() if not isinstance(depth, int) or depth < 0}
        if bad:
            raise ValueError(f"layer_decay: layers must give every path an integer >= 0, got {bad!r}")
        return depths
    matches = (
        {str(i): tree.select(globs, params, name="layer_decay") for i, globs in enumerate(layers)} if paths else {}
    )
    check_once(matches, "layer_decay: layers")
    depths = {path: int(layer) for layer, chosen in matches.items() for path, hit in chosen.items() if hit}
    left_out = [path for path in paths if path not in depths]
    if left_out:
        raise ValueError(f"layer_decay: parameters in no layer: {', '.join(left_out)}")
    return depths


# --- reading the layers from paths -----------------------------------------------------------------------------------

# Components of paths, in the layouts of timm and HuggingFace: any part of a component, a whole word, a whole component.
_BELOW = ("embed", "cls_token", "class_token", "mask_token", "dist_token", "reg_token", "register_token",
          "rel_pos_bias", "relative_position_bias", "positional", "pos_enc")  # fmt: skip
_BELOW_WORDS = ("stem", "emb", "wte", "wpe")
_FIRST = ("norm_pre", "ln_pre", "pre_layernorm", "pre_layrnorm")
_FIRST_BESIDE = ("conv1", "conv2", "bn1")  # beside the blocks only: a head may have some of its own
_OUTPUTS = ("embed_out", "unembed")  # contain "embed", and are heads
_HEADS = ("head", "classifier")
_FINAL_NORMS = ("norm", "layernorm", "layer_norm", "ln_f", "norm_f", "final_norm", "final_layernorm",
                "final_layer_norm", "post_layernorm", "ln_post")  # fmt: skip


def _standard_depths(paths: tuple[str, ...]) -> tuple[int, ...]:
    """Read the layers from the numbered blocks."""
    blocks, indices = _blocks(paths)
    numbers = {number: i for i, number in enumerate(sorted(indices))}
    return tuple(_standard_depth(path, blocks, numbers) for path in paths)


_standard_depths.__dict__["_dynamo_marked_constant"] = True  # paths are constants: nothing to trace


def _blocks(paths: tuple[str, ...]) -> tuple[str, set[int]]:
    """Return the path of the stack of blocks, and the numbers in it.

    That is the numbered list whose entries are modules of modules; the layers of an ``nn.Sequential`` head are not.
    Only where there is none, the one list of plain layers.
    """
    lists: dict[str, list[int]] = {}
    deep: dict[str, bool] = {}
    for path in paths:
        parts = path.split(".")
        for i, part in enumerate(parts):
            if part.isdigit() and i:
                prefix = ".".join(parts[:i]) + "."
                lists.setdefault(prefix, []).append(int(part))
                deep[prefix] = deep.get(prefix, False) or len(parts) > i + 2
                break  # lists inside a block are parts of it
    if paths and not lists:
        raise ValueError(f"layer_decay: no numbered blocks in the paths, pass layers=; have: {', '.join(paths)}")
    stacks = [prefix for prefix in lists if deep[prefix]] or list(lists)
    around = min((_shared(stacks[0], prefix) for prefix in stacks), default=0)
    stacks = [prefix for prefix in stacks if not _is_beside(prefix.split(".")[around:])] or stacks
    if len(stacks) > 1:
        raise ValueError(f"layer_decay: more than one stack of blocks, pass layers=; have: {', '.join(stacks)}")
    chosen = stacks[0] if stacks else ""
    return chosen, set(lists.get(chosen, []))


def _shared(path: str, other: str) -> int:
    """Return how many components two paths begin with alike: what is around a whole model tells no layer."""
    pairs = zip(path.split("."), other.split("."), strict=False)
    return next((i for i, (one, two) in enumerate(pairs) if one != two), path.count("."))


def _is_beside(parts: list[str]) -> bool:
    """Is a numbered list with these components of embeddings, or of heads?"""
    return any(_is_below(part.lower()) or any(word in part.lower() for word in _HEADS) for part in parts)


def _is_below(part: str) -> bool:
    if any(word in part for word in _OUTPUTS):
        return False
    whole = part in _FIRST or any(word in _BELOW_WORDS for word in part.split("_"))
    return whole or any(word in part for word in _BELOW)


def _standard_depth(path: str, blocks: str, numbers: dict[int, int]) -> int:
    number = path[len(blocks) :].split(".")[0]
    if path.startswith(blocks) and number.isdigit():  # and not a norm beside the numbers
        return numbers[int(number)] + 1
    parts, shared = path.lower().split("."), _shared(path, blocks)
    if any(_is_below(part) for part in parts[shared:]) or parts[-2:] == ["shared", "weight"]:  # T5's embedding
        return 0
    if shared < len(parts) - 1 and parts[shared] in _FIRST_BESIDE:
        return 0
    is_final_norm = len(parts) > 1 and parts[-2] in _FINAL_NORMS and len(parts) - 2 <= shared
    return len(numbers) if is_final_norm else len(numbers) + 1

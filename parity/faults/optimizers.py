"""Weight decay and parameter groups: what goes wrong in the usual recipes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from functricks import (
    adam,
    adamw,
    apply_updates,
    no_decay,
    partition,
    sgd,
)
from functricks.types import Transform
from parity.faults.registry import fault, show


def one_update(transform: Transform, weight: float, slope: float) -> Tensor:
    params = torch.tensor(weight)
    updates, _ = transform.update(torch.tensor(slope), transform.init(params), params)
    moved: Tensor = apply_updates(params, updates)
    return moved


@fault(
    "weight decay in Adam",
    "`Adam(weight_decay=)` in the belief that it decays the weights",
    "the term enters the gradient and is normalised away with it: hardly any decay where gradients are large",
    "both, by their PyTorch names: `adam` and `adamw`",
)
def adam_decay() -> str:
    moved = []
    for optimizer in (Adam, AdamW):
        for decay in (0.0, 0.5):
            weight = nn.Parameter(torch.tensor(1.0))
            weight.grad = torch.tensor(10.0)
            optimizer([weight], lr=0.1, weight_decay=decay).step()
            moved.append(float(weight.detach()))
    ours = [one_update(maker(0.1, weight_decay=0.5), 1.0, 10.0) for maker in (adam, adamw)]
    adam_moves, adamw_moves = f"{show(moved[0])} and {show(moved[1])}", f"{show(moved[2])} and {show(moved[3])}"
    return (
        f"1 becomes, without and with a decay of 0.5, {adam_moves} in Adam, {adamw_moves} in AdamW; here {show(*ours)}"
    )


@fault(
    "no-decay groups",
    'exclude what is called "bias" or "LayerNorm.weight"',
    "other models call it `norm1.weight`, and it decays",
    "`no_decay(model)` goes by kind, not by name; a glob in `decay_where` that matches nothing raises",
)
def no_decay_by_name() -> str:
    layer = nn.TransformerEncoderLayer(8, 2, 8)
    norms = {f"{name}.weight" for name, module in layer.named_modules() if isinstance(module, nn.LayerNorm)}
    caught = [name for name in norms if "bias" in name or "LayerNorm.weight" in name]
    left_out = no_decay(layer)
    return f"{len(caught)} of {len(norms)} found by name, {sum(left_out[name] for name in norms)} by kind"


@fault(
    "parameter groups",
    "list the parameters of each group by name",
    "a parameter that is in no list never trains, silently",
    "`partition` gives every leaf one label; a leaf without one raises and is named",
)
def missing_from_groups() -> str:
    model = nn.ModuleDict({"encoder": nn.Linear(1, 1), "crf": nn.Linear(1, 1)})
    optimizer = SGD([{"params": [p for n, p in model.named_parameters() if "encoder" in n]}], lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = model["crf"].weight.detach().clone()
    optimizer.step()
    groups = partition({"encoder": sgd(0.1)}, lambda path, leaf: "encoder" if path.startswith("encoder") else "crf")
    try:
        groups.init({name: parameter.detach() for name, parameter in model.named_parameters()})
    except ValueError as error:
        raised = type(error).__name__
    return f"the CRF moved by {show(model['crf'].weight - before)}; here {raised}"

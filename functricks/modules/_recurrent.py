"""LSTM, GRU and RNN step by step, where torch's kernels cannot go: under ``vmap``, compiled, and with keyed dropout.

The kernels have no batching rule, do not trace, and draw from the global generator between layers. Here the dropout is
outside of the kernels, so that a layer may still be one; under ``vmap`` and in a trace it is a loop over the cell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from functricks import random
from functricks.gradients._loop import UNROLLED, collect
from functricks.modules._keyed import Keyed, have_lanes, under_transform

State: TypeAlias = tuple[Tensor, ...]  # (h,), or (h, c) for an LSTM
Cell: TypeAlias = Callable[[Tensor, State], State]


class KeyedRNN(Keyed, nn.RNNBase):
    """An RNN whose dropout draws from a key, and which runs under ``vmap`` and ``torch.compile``.

    torch.compile refuses every ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``, so that in the copy that is traced one is this
    and no more: there ``isinstance(module, nn.LSTM)`` is False.
    """

    def drops(self) -> bool:
        return self.num_layers > 1  # between the layers

    def forward(self, input: Any, hx: Any = None) -> Any:
        draw = self.next_draw() if self.drops() else None
        stepwise = torch.compiler.is_compiling() or self._has_lanes(input, hx, draw or ())
        if draw is None and not stepwise:
            return super().forward(input, hx)
        if isinstance(input, PackedSequence):
            raise ValueError(
                f"apply: {self.keyed_path!r} got a PackedSequence, which it takes only in eager mode, without vmap and "
                f"without dropout; pad the sequences and mask what follows their ends"
            )
        if input.dim() not in (2, 3) or input.shape[-1] != self.input_size:
            raise ValueError(
                f"apply: {self.keyed_path!r} takes [time, {self.input_size}] or three axes with batch, got "
                f"{list(input.shape)}"
            )
        batched = input.dim() == 3
        axis = 0 if batched and self.batch_first else 1  # of the batch
        x = input if batched else input.unsqueeze(1)
        x = x.transpose(0, 1) if axis == 0 else x
        starts = self._starts(x, hx, batched)
        directions = 2 if self.bidirectional else 1
        finals: list[State] = []
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(directions):
                number = layer * directions + direction
                y, final = self._layer(x, tuple(s[number] for s in starts), number, stepwise)
                outputs.append(y)
                finals.append(final)
            x = torch.cat(outputs, -1) if directions == 2 else outputs[0]
            if draw is not None and layer < self.num_layers - 1:
                x = random.dropout(random.fold_in(draw.key, layer), x, draw.rate)
        ends = tuple(torch.stack(states) for states in zip(*finals, strict=True))
        if not batched:
            x, ends = x.squeeze(1), tuple(end.squeeze(1) for end in ends)
        return x.transpose(0, 1) if axis == 0 else x, ends if self.mode == "LSTM" else ends[0]

    def _has_lanes(self, *given: Any) -> bool:
        return under_transform() and have_lanes([*given, *(getattr(self, name) for name in self._flat_weights_names)])

    def _starts(self, x: Tensor, hx: Any, batched: bool) -> State:
        """Return the first states, each [layers * directions, batch, width]."""
        count = self.num_layers * (2 if self.bidirectional else 1)
        widths = [self.proj_size or self.hidden_size, self.hidden_size][: 2 if self.mode == "LSTM" else 1]
        if hx is None:
            return tuple(x.new_zeros(count, x.shape[1], width) for width in widths)
        states = tuple(hx) if self.mode == "LSTM" else (hx,)
        states = states if batched else tuple(s.unsqueeze(1) for s in states)
        for state, width in zip(states, widths, strict=True):
            if tuple(state.shape) != (count, x.shape[1], width):
                raise ValueError(
                    f"apply: {self.keyed_path!r} takes a first state of shape {[count, x.shape[1], width]}, got "
                    f"{list(state.shape)}"
                )
        return states

    def _layer(self, x: Tensor, start: State, number: int, stepwise: bool) -> tuple[Tensor, State]:
        """Return the outputs [time, batch, width] and the last state of one layer in one direction."""
        weights = [getattr(self, name) for name in self._all_weights[number]]
        reverse = self.bidirectional and number % 2 == 1
        if not stepwise:
            return self._kernel(x.flip(0) if reverse else x, start, weights, reverse)
        inner, outer, *rest = weights
        biases = rest[:2] if self.bias else (None, None)
        items = F.linear(x, inner, biases[0])  # for all steps at once: the inputs do not wait for the states
        cell = _cell(self.mode, outer, biases[1], rest[-1] if self.proj_size else None)
        return _roll(cell, start, items, reverse)

    def _kernel(self, x: Tensor, start: State, weights: list[Tensor], reverse: bool) -> tuple[Tensor, State]:
        own: Any = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}
        states: Any = tuple(s.unsqueeze(0) for s in start)
        states = states if self.mode == "LSTM" else states[0]
        y, *ends = own[self.mode](x, states, weights, self.bias, 1, 0.0, self.training, False, False)
        return y.flip(0) if reverse else y, tuple(end.squeeze(0) for end in ends)


def _cell(mode: str, weight: Tensor, bias: Tensor | None, projection: Tensor | None) -> Cell:
    """Return the step ``(input part of the gates, state) -> state`` of one kind of network."""

    def lstm(gates: Tensor, state: State) -> State:
        h, c = state
        i, f, g, o = (gates + F.linear(h, weight, bias)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (h if projection is None else F.linear(h, projection)), c

    def gru(gates: Tensor, state: State) -> State:
        (h,) = state
        (rx, zx, nx), (rh, zh, nh) = gates.chunk(3, -1), F.linear(h, weight, bias).chunk(3, -1)
        z = (zx + zh).sigmoid()
        n = (nx + (rx + rh).sigmoid() * nh).tanh()
        return ((h - n) * z + n,)

    def plain(gates: Tensor, state: State) -> State:
        gates = gates + F.linear(state[0], weight, bias)
        return (gates.relu() if mode == "RNN_RELU" else gates.tanh(),)

    return {"LSTM": lstm, "GRU": gru}.get(mode, plain)


def _roll(cell: Cell, state: State, items: Tensor, reverse: bool) -> tuple[Tensor, State]:
    """Return the outputs of all steps, stacked in the order of the items, and the last state.

    A trace that somebody differentiates is unrolled, since ``torch.func.grad`` does not go through a scan.
    """
    items = items.flip(0) if reverse else items
    state = cell(items[0], state)  # outside of the scan: under vmap the first state may have no lanes yet
    outputs = [state[0]]
    differentiated = state[0].requires_grad  # in a trace only what was computed tells, not the leaves
    if torch.compiler.is_compiling() and not differentiated and len(items) > UNROLLED:
        state, rest = _scan(cell, state, items)
        stacked = torch.cat((outputs[0][None], rest))
    else:
        for item in items[1:].unbind():
            state = cell(item, state)
            outputs.append(state[0])
        stacked = torch.stack(outputs)
    return stacked.flip(0) if reverse else stacked, state


def _scan(cell: Cell, state: State, items: Tensor) -> tuple[State, Tensor]:
    """Return the last state and the outputs of all steps but the first."""

    def step(state: State, index: Tensor) -> tuple[State, Tensor]:
        new = cell(items.index_select(0, index[None]).squeeze(0), state)
        return new, new[0]

    # over indices: vmap has no rule for how a scan takes its items apart
    found: tuple[State, Tensor] = collect(step, state, torch.arange(1, len(items), device=items.device))
    return found

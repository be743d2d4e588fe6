"""Contrastive losses: each row is a classification, "which of these is your partner?".

A ``mask`` is bool and True where a pair takes part. What takes part nowhere (padding) is overwritten before anything is
computed from it, and masked similarities are set to ``-inf`` after the division by the temperature: so neither a NaN in
the padding nor ``inf * 0`` reaches a gradient, that of a learned temperature included. Rows without a partner weigh 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from functricks import tree
from functricks.losses._boundary import (
    MINUS_INF,
    check_broadcasts,
    check_floating,
    check_tensor,
    check_within,
    finish,
    positive,
)
from functricks.types import Loss, Number

_NO_PARTNER = -100  # the label of a row that weighs 0, as ignore_index elsewhere


def info_nce(
    queries: Tensor,
    keys: Tensor,
    *,
    temperature: Number = 0.1,
    labels: Tensor | None = None,
    mask: Tensor | None = None,
    normalize: bool = True,
) -> Loss:
    r"""Pull each query towards its key and away from all others.

    .. math:: v_i = -\log \frac{\exp(q_i \cdot k_{y_i} / T)}{\sum_j m_{ij} \exp(q_i \cdot k_j / T)},
        \qquad \text{weight}_i = m_{i y_i}

    Classic: ``F.cross_entropy(F.normalize(q) @ F.normalize(k).T / T, arange(N))``.
    Reference: van den Oord et al. 2018, arXiv:1807.03748.

    Args:
        queries: ``(N, D)``.
        keys: ``(M, D)``; keys beyond the positives are negatives only.
        temperature: :math:`T > 0`; lower looks harder at the most similar negatives. May be learned.
        labels: :math:`y`, ``(N,)``: which key belongs to which query; -100 where none does. None is the diagonal.
        mask: :math:`m`, bool, broadcast to ``(N, M)``: True where a pair takes part; a mask of shape ``(M,)`` leaves
            keys out. A row whose own key is masked weighs 0.
        normalize: divide queries and keys by their length first, so that the product is the cosine. The zero vector
            stays zero.

    One direction; for both (CLIP) add the loss with queries and keys exchanged. Raises ``ValueError`` for shapes that
    do not fit, rows without numbers, fewer keys than queries without labels, labels without any key, and a concrete
    label out of range.

    >>> import torch
    >>> info_nce(torch.eye(3), torch.eye(3), temperature=1.0).values
    tensor([0.5514, 0.5514, 0.5514])
    """
    name = "info_nce"
    _check_vectors(name, "queries", queries, "keys", keys)
    n, m = len(queries), len(keys)
    if labels is None:
        if m < n:
            raise ValueError(f"{name}: {n} queries but only {m} keys; say which belong together with labels")
        index, missing = torch.arange(n, device=queries.device), None
    else:
        _check_labels(name, labels, n)
        if m == 0 and n > 0:
            raise ValueError(f"{name}: keys must hold at least one row, got shape {tuple(keys.shape)}")
        labels = labels.long()  # before comparing: -100 would wrap around in uint8
        check_within(name, "labels", labels, 0, m - 1, _NO_PARTNER)
        missing = labels == _NO_PARTNER
        index = labels.masked_fill(missing, 0)
    if mask is not None:
        mask = _full_mask(name, mask, (n, m), queries)
    return _partner_loss(name, queries, keys, index, missing, mask, temperature, normalize)


def ntxent(
    z1: Tensor,
    z2: Tensor,
    *,
    temperature: Number = 0.5,
    mask: Tensor | None = None,
    normalize: bool = True,
) -> Loss:
    r"""Pull two views of an example together, away from both views of all other examples (SimCLR).

    With :math:`z` the :math:`2N` rows of both views and :math:`i'` the other view of :math:`i`,

    .. math:: v_i = -\log \frac{\exp(z_i \cdot z_{i'} / T)}{\sum_{j \ne i} m_{ij} \exp(z_i \cdot z_j / T)},
        \qquad \text{weight}_i = m_{i i'}

    Classic: ``F.cross_entropy`` on the :math:`2N \times 2N` similarities with the diagonal filled with a large negative
    number. Reference: Sohn 2016; Chen et al. 2020, arXiv:2002.05709.

    Args:
        z1, z2: ``(N, D)``; row i of both is the pair.
        temperature: :math:`T > 0`; may be learned.
        mask: bool, True where it takes part: ``(N,)`` for examples, or broadcast to ``(2N, 2N)`` for pairs of rows.
        normalize: as in :func:`info_nce`.

    Values and weights have shape ``(2N,)``, the rows of ``z1`` first. The pair of a row with itself is not in the
    denominator. Raises ``ValueError`` for shapes that do not fit.

    >>> import torch
    >>> ntxent(torch.eye(2), torch.eye(2), temperature=1.0).mean()
    tensor(0.5514)
    """
    name = "ntxent"
    _check_vectors(name, "z1", z1, "z2", z2)
    if z1.shape != z2.shape:
        raise ValueError(f"{name}: z1 and z2 must have the same shape, got {tuple(z1.shape)} and {tuple(z2.shape)}")
    n = len(z1)
    z = torch.cat([z1, z2])
    rows = torch.arange(2 * n, device=z.device)
    taking_part = rows.unsqueeze(1) != rows
    if mask is not None:
        check_tensor(name, "mask", mask)
        both = mask.repeat(2) if mask.shape == (n,) else mask
        taking_part = taking_part & _full_mask(name, both, (2 * n, 2 * n), z)
    return _partner_loss(name, z, z, rows.roll(n), None, taking_part, temperature, normalize)


def supervised_contrastive(
    z: Tensor,
    labels: Tensor,
    *,
    temperature: Number = 0.1,
    normalize: bool = True,
    ignore_index: int | None = _NO_PARTNER,
) -> Loss:
    r"""Pull examples of one class together, away from all other classes.

    With :math:`P_i` the other rows of the class of row :math:`i`,

    .. math:: v_i = -\frac{1}{|P_i|} \sum_{p \in P_i} \log \frac{\exp(z_i \cdot z_p / T)}
        {\sum_{j \ne i} \exp(z_i \cdot z_j / T)}, \qquad \text{weight}_i = [P_i \ne \emptyset]

    Classic: none in PyTorch. This is :math:`\mathcal{L}^{sup}_{out}` without the paper's factor
    :math:`T / T_{base}`.
    Reference: Khosla et al. 2020, arXiv:2004.11362.

    Args:
        z: ``(N, D)``; several views of an example are several rows with its label.
        labels: ``(N,)``, integers; any numbers do.
        temperature: :math:`T > 0`; may be learned.
        normalize: as in :func:`info_nce`.
        ignore_index: rows with this label weigh 0 and are nobody's negative.

    A row that is alone in its class weighs 0, but is a negative for the others. Raises ``ValueError`` for shapes that
    do not fit.

    >>> import torch
    >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> supervised_contrastive(z, torch.tensor([7, 7, 8]), temperature=1.0)
    Loss(values=tensor([0.3133, 0.3133, 0.0000]), weights=tensor([1., 1., 0.]))
    """
    name = "supervised_contrastive"
    _check_vectors(name, "z", z, "z", z)
    _check_labels(name, labels, len(z))
    labels = labels.long()
    rows = torch.arange(len(z), device=z.device)
    others = rows.unsqueeze(1) != rows
    x = z.to(tree.compute_dtype(z.dtype))
    if ignore_index is not None:
        ignored = labels == ignore_index
        others = others & ~ignored
        x = x.masked_fill(ignored.unsqueeze(1), 0)
    partners = others & (labels.unsqueeze(1) == labels)
    if ignore_index is not None:
        partners = partners & ~ignored.unsqueeze(1)
    count = partners.sum(1)
    missing = count == 0
    log_p = _log_shares(name, x, x, others, missing, temperature, normalize)
    values = -log_p.masked_fill(~partners, 0).sum(1) / count.clamp(min=1)
    return _without(values, missing, z.dtype)


# --- shared ----------------------------------------------------------------------------------------------------------


def _partner_loss(
    name: str,
    queries: Tensor,
    keys: Tensor,
    index: Tensor,
    missing: Tensor | None,
    mask: Tensor | None,
    temperature: Number,
    normalize: bool,
) -> Loss:
    """Return the cross entropy of finding row ``index[i]`` of the keys among those that ``mask[i]`` lets take part."""
    dtype = tree.compute_dtype(torch.promote_types(queries.dtype, keys.dtype))
    q, k = queries.to(dtype), keys.to(dtype)
    column = index.unsqueeze(1)
    if mask is not None:
        alone = ~mask.gather(1, column).squeeze(1)
        missing = alone if missing is None else missing | alone
        used = (mask & ~missing.unsqueeze(1)).any(0)
        k = k.masked_fill(~used.unsqueeze(1), 0)
    if missing is not None:
        q = q.masked_fill(missing.unsqueeze(1), 0)
    log_p = _log_shares(name, q, k, mask, missing, temperature, normalize)
    return _without(-log_p.gather(1, column).squeeze(1), missing, torch.promote_types(queries.dtype, keys.dtype))


def _log_shares(
    name: str,
    queries: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    missing: Tensor | None,
    temperature: Number,
    normalize: bool,
) -> Tensor:
    """Return the log of each key's share among those that take part; any finite numbers in rows that are missing."""
    if normalize:
        queries, keys = _unit(queries), _unit(keys)
    product = queries @ keys.T  # in half precision under autocast, as PyTorch's; the softmax is not
    similarity = product.to(queries.dtype) / positive(name, "temperature", temperature, queries.dtype)
    if mask is not None:
        kept = mask if missing is None else mask | missing.unsqueeze(1)  # a row of -inf alone would be NaN
        similarity = similarity.masked_fill(~kept, MINUS_INF)
    return F.log_softmax(similarity, 1)


def _unit(z: Tensor) -> Tensor:
    """Divide each row by its length; exact for rows of any size, and zero stays zero with a finite derivative."""
    largest = z.detach().abs().amax(1, keepdim=True)
    z = z / largest.masked_fill(largest == 0, 1)
    square = (z * z).sum(1, keepdim=True)
    return z * square.masked_fill(square == 0, 1).rsqrt()


def _without(values: Tensor, missing: Tensor | None, dtype: torch.dtype) -> Loss:
    weights = torch.ones_like(values)
    if missing is not None:
        values, weights = values.masked_fill(missing, 0), weights.masked_fill(missing, 0)
    return finish(values, weights, dtype)


def _check_vectors(name: str, a: str, first: Tensor, b: str, second: Tensor) -> None:
    check_floating(name, a, first)
    check_floating(name, b, second)
    if first.ndim != 2 or second.ndim != 2 or first.shape[1] != second.shape[1]:
        shapes = f"{tuple(first.shape)}" if first is second else f"{tuple(first.shape)} and {tuple(second.shape)}"
        raise ValueError(f"{name}: {a} and {b} must be matrices with rows of one length, got {shapes}")
    if first.shape[1] == 0:
        raise ValueError(f"{name}: rows of {a} must hold at least one number, got shape {tuple(first.shape)}")


def _check_labels(name: str, labels: Tensor, rows: int) -> None:
    check_tensor(name, "labels", labels)
    if labels.is_floating_point() or labels.dtype == torch.bool or tuple(labels.shape) != (rows,):
        raise ValueError(f"{name}: labels must be {rows} integers, got {labels.dtype} of shape {tuple(labels.shape)}")


def _full_mask(name: str, mask: Tensor, shape: tuple[int, int], like: Tensor) -> Tensor:
    check_tensor(name, "mask", mask)
    if mask.dtype != torch.bool:
        raise ValueError(f"{name}: mask must be bool, True where a pair takes part, got {mask.dtype}")
    check_broadcasts(name, "mask", mask, like.new_empty(()).expand(shape))
    return mask.expand(shape)

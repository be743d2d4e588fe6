"""Losses of one number against one number: absolute and squared error, Kullback-Leibler divergence."""

from __future__ import annotations

import torch
from torch import Tensor

from functricks import tree
from functricks.losses._boundary import MINUS_INF, check_floating, check_same_shape, finish, warn_if_probabilities
from functricks.types import Loss


def l1_loss(input: Tensor, target: Tensor, *, weight: Tensor | None = None) -> Loss:
    r"""Penalise every error by its size, so that a few outliers do not dominate.

    .. math:: v_i = w_i \, |x_i - y_i|, \qquad \text{weight}_i = w_i

    Classic: :func:`torch.nn.functional.l1_loss`, whose weighted mean divides by the sum of the weights, as here.
    Reference: Bishop 2006, Pattern Recognition and Machine Learning, section 1.5.5.

    Args:
        input: predictions of any shape.
        target: the same shape.
        weight: the same shape, or None for 1.

    The derivative at an error of zero is zero. Raises ``ValueError`` where the shapes differ: ``[B, 1]`` against
    ``[B]`` would broadcast to ``[B, B]``.

    >>> import torch
    >>> l1_loss(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 2.0])).mean()
    tensor(2.)
    """
    return _error("l1_loss", input, target, weight, squared=False)


def mse_loss(input: Tensor, target: Tensor, *, weight: Tensor | None = None) -> Loss:
    r"""Penalise every error by its square; the minimiser is the mean of the targets.

    .. math:: v_i = w_i \, (x_i - y_i)^2, \qquad \text{weight}_i = w_i

    Classic: :func:`torch.nn.functional.mse_loss`, whose weighted mean divides by the sum of the weights, as here.
    Reference: Bishop 2006, Pattern Recognition and Machine Learning, section 1.5.5.

    Arguments and errors as :func:`l1_loss`. There is no factor 1/2: the derivative is twice the error.

    >>> import torch
    >>> mse_loss(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 2.0])).mean()
    tensor(5.)
    """
    return _error("mse_loss", input, target, weight, squared=True)


def _error(name: str, input: Tensor, target: Tensor, weight: Tensor | None, *, squared: bool) -> Loss:
    check_floating(name, "input", input)
    check_same_shape(name, "input", input, "target", target)
    out = torch.promote_types(input.dtype, target.dtype)
    dtype = tree.compute_dtype(out)
    error = input.to(dtype) - target.to(dtype)
    # not F.mse_loss, whose kernel fails under vmap in vmap where one level batches the input and another the target
    values = error.square() if squared else error.abs()
    if weight is None:
        return finish(values, torch.ones_like(values), out)
    check_same_shape(name, "input", input, "weight", weight)
    weight = weight.to(dtype)
    return finish(values * weight, weight, out)


def kl_divergence(input: Tensor, target: Tensor, *, log_target: bool = False) -> Loss:
    r"""Measure how far a predicted distribution is from a target distribution, as in distillation.

    .. math:: v_i = t_i \, (\log t_i - x_i), \qquad \text{weight}_i = 1

    Classic: :func:`torch.nn.functional.kl_div`. ``.mean()`` is its ``"mean"``, over all elements; its ``"batchmean"``,
    the divergence in the mathematical sense, is ``.sum() / len(input)``.
    Reference: Kullback and Leibler 1951; for distillation Hinton et al. 2015, arXiv:1503.02531.

    Args:
        input: log-probabilities :math:`x` of any shape, such as :func:`log_softmax` returns.
        target: probabilities :math:`t` of the same shape; with ``log_target`` their logarithms.
        log_target: whether ``target`` holds logarithms.

    A target of zero costs nothing and sends no gradient, whatever the input. PyTorch gives NaN where the input is
    ``-inf`` there, NaN as the derivative by such a target, and NaN for a ``log_target`` of ``-inf``.

    Raises ``ValueError`` where the shapes differ; warns where ``input`` holds probabilities.

    >>> import torch
    >>> prediction, target = torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
    >>> kl_divergence(prediction.log(), target).sum()
    tensor(0.6931)
    """
    check_floating("kl_divergence", "input", input)
    check_same_shape("kl_divergence", "input", input, "target", target)
    check_floating("kl_divergence", "target", target)
    warn_if_probabilities("kl_divergence", input, "give their logarithms")
    dtype = tree.compute_dtype(torch.promote_types(input.dtype, target.dtype))
    x, t = input.to(dtype), target.to(dtype)
    impossible = t == (MINUS_INF if log_target else 0)
    x = x.masked_fill(impossible, 0)
    if log_target:
        values = t.exp() * (t.masked_fill(impossible, 0) - x)
    else:
        values = t * t.masked_fill(impossible, 1).log() - t * x  # in PyTorch's order, which rounds alike
    return finish(values, torch.ones_like(values), torch.promote_types(input.dtype, target.dtype))

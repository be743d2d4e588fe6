"""Random numbers from explicit keys: what is drawn depends on the key and on the element's index, and on nothing else.

A key is a value, so a mask or a shuffle is a pure function of it: the same alone, in one lane of a ``vmap``, compiled,
and on any rank. Nothing is ever "consumed"; to draw again, derive another key with :func:`split` or :func:`fold_in`.

The generator is Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as
1, 2, 3"), laid out as ``jax.random`` does by default (``jax_threefry_partitionable``): element ``i`` is the encryption
of the counter ``i``. :func:`key`, :func:`split`, :func:`fold_in`, :func:`bits`, :func:`uniform` and :func:`bernoulli`
give the same bits as ``jax.random``; the others are reproducible, but draw in their own way.

All arithmetic is on int32, which wraps around: half the bytes of int64 and no masks. The same expressions run on torch
tensors and on numpy arrays, because a hash is some hundred tiny operations: for small draws on the CPU numpy, below the
``vmap`` levels, needs a fraction of the time that it takes to dispatch them in torch. Both give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import torch._C._functorch as functorch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as below_all_levels

__all__ = ["bernoulli", "bits", "dropout", "fold_in", "key", "normal", "permutation", "randint", "split", "uniform"]

Words: TypeAlias = Any  # an int32 torch.Tensor or numpy array
Finish: TypeAlias = Callable[[Words, Words], Words]  # the two words of every block -> values, along the last axis

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_MASK32 = 0xFFFFFFFF
_NUMPY_LIMIT = 2**16  # draws of more blocks than this go to torch, which has threads
_NUMPY_CHUNK = 2**15  # blocks at a time: the working set stays in cache


# --- the generator ---------------------------------------------------------------------------------------------------


def _threefry(k0: Words, k1: Words, low: Words) -> tuple[Words, Words]:
    """Encrypt the 64-bit counters whose high word is 0 and whose low word is ``low``; all int32."""
    schedule = (k0, k1, k0 ^ k1 ^ 0x1BD11BDA)
    x0, x1 = k0, low + k1
    compiling = torch.compiler.is_compiling()
    for group in range(5):
        for r in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            # int32 shifts right arithmetically: the mask makes it logical
            x1 = ((x1 << r) | ((x1 >> (32 - r)) & ((1 << r) - 1))) ^ x0
            if compiling:
                # Each round uses x1 three times, and inductor would write it out that often, round within round: half
                # a minute to compile. Of a view by strides it makes a value with a name: two seconds, the same code.
                x1 = x1.as_strided(x1.shape, x1.stride())
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + (schedule[(group + 2) % 3] + (group + 1))
    return x0, x1


def _draw(finish: Finish, key: Tensor, low: range | Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``finish`` of the blocks at the 1-D counters ``low``, as ``shape``."""
    if not torch.compiler.is_compiling():
        drawn = _draw_numpy(finish, key, low, tuple(shape))
        if drawn is not None:
            return drawn
    k0, k1 = key.to(torch.int32).unbind()
    if not isinstance(low, Tensor):
        dtype = torch.int32 if low.stop < 2**31 else torch.int64
        low = torch.arange(low.start, low.stop, dtype=dtype, device=key.device)
    values: Tensor = finish(*_threefry(k0, k1, low.to(torch.int32)))
    return values.reshape(shape)


def _draw_numpy(finish: Finish, key: Tensor, low: range | Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Return what :func:`_draw` returns, computed below all functorch levels; None where torch has to do it."""
    if torch._C._len_torch_dispatch_stack():  # fake tensors, make_fx: the operations themselves are wanted
        return None
    peeled = [_peel(key)] if isinstance(low, range) else [_peel(key), _peel(low)]
    plain = [p for p in peeled if p is not None]
    if len(plain) < len(peeled):
        return None
    levels = sorted({level for _, axes in plain for level in axes})
    with below_all_levels():  # in a grad level even .numpy() would be wrapped
        k, *rest = (_lanes_first(tensor, axes, levels) for tensor, axes in plain)
        counters = np.arange(low.start, low.stop).astype(np.int32) if isinstance(low, range) else rest[0]
        lanes = np.broadcast_shapes(k.shape[:-1], counters.shape[:-1])
        rows = math.prod(lanes)
        threads = torch.get_num_threads() > 1 and finish is not _shuffle  # torch's sort is fifty times slower
        if threads and rows * counters.shape[-1] > _NUMPY_LIMIT:
            return None
        k = np.broadcast_to(k, (*lanes, 2)).reshape(rows, 2)
        counters = np.broadcast_to(counters, (*lanes, counters.shape[-1])).reshape(rows, -1)
        drawn = torch.from_numpy(_in_chunks(finish, k, counters).reshape(lanes + shape))
    for level in levels:
        drawn = functorch._add_batch_dim(drawn, 0, level)
    return drawn


def _peel(tensor: Tensor) -> tuple[Tensor, dict[int, int]] | None:
    """Return the CPU tensor below all functorch levels and ``{level: batch axis}``; None if it is not one."""
    axes = {}
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            axes[functorch.maybe_get_level(tensor)] = functorch.maybe_get_bdim(tensor)
        elif not functorch.is_gradtrackingtensor(tensor):  # integers carry no gradient: dropping the wrapper is exact
            return None
        tensor = functorch.get_unwrapped(tensor)
    return (tensor, axes) if type(tensor) is Tensor and tensor.device.type == "cpu" else None


def _lanes_first(tensor: Tensor, axes: dict[int, int], levels: Sequence[int]) -> Words:
    """Return the int32 array with one leading axis for every level, of length 1 where it has no lanes."""
    array = tensor.numpy().astype(np.int32)
    for front, level in enumerate(levels):  # an axis counts from behind those already moved to the front
        axis = axes.get(level)
        array = np.expand_dims(array, front) if axis is None else np.moveaxis(array, front + axis, front)
    return array


def _in_chunks(finish: Finish, keys: Words, counters: Words) -> Words:
    """Return ``finish`` of the blocks of ``keys`` [rows, 2] at ``counters`` [rows, n], a few rows at a time."""
    step = max(1, _NUMPY_CHUNK // max(1, counters.shape[1]))
    parts = [
        finish(*_threefry(keys[i : i + step, :1], keys[i : i + step, 1:], counters[i : i + step]))
        for i in range(0, max(1, len(keys)), step)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


# --- from words to values: written once, for torch and for numpy -----------------------------------------------------


def _cast(x: Words, dtype: str) -> Words:
    return x.to(getattr(torch, dtype)) if isinstance(x, Tensor) else x.astype(dtype)


def _stack(*parts: Words) -> Words:
    return torch.stack(parts, -1) if isinstance(parts[0], Tensor) else np.stack(parts, -1)


def _wide(x: Words) -> Words:
    """Return the unsigned value of int32 words, as int64."""
    return _cast(x, "int64") & _MASK32


def _pairs(x0: Words, x1: Words) -> Words:
    return _wide(_stack(x0, x1))


def _bits(x0: Words, x1: Words) -> Words:
    return _wide(x0 ^ x1)


def _unit(x0: Words, x1: Words) -> Words:
    """Return float32 in [0, 1): the upper 23 bits, so the multiples of 2**-23, each exactly."""
    return _cast(((x0 ^ x1) >> 9) & 0x7FFFFF, "float32") * 2.0**-23


def _quarters(x0: Words, x1: Words) -> Words:
    """Return four numbers of 16 bits a block, signed, in element order; int16 or int32."""
    words = _stack(x0, x1)
    if isinstance(words, Tensor):
        return torch.stack((words << 16 >> 16, words >> 16), -1).flatten(-3)
    return words.astype("<i4", copy=False).view("<i2").reshape(len(words), -1)


def _shuffle(x0: Words, x1: Words) -> Words:
    """Return the indices 0 .. n - 1 in the order of random 64-bit numbers whose lowest bits are the index itself."""
    n = x0.shape[-1]
    low = (1 << max(1, (n - 1).bit_length())) - 1
    index = torch.arange(n, device=x0.device) if isinstance(x0, Tensor) else np.arange(n)
    numbers = (((_cast(x0, "int64") << 32) | _wide(x1)) & ~low) | index
    return (numbers.sort().values if isinstance(numbers, Tensor) else np.sort(numbers)) & low


# --- checks ----------------------------------------------------------------------------------------------------------


def _check_key(name: str, key: object) -> None:
    if not isinstance(key, Tensor) or key.dtype != torch.int64 or tuple(key.shape) != (2,):
        got = f"{key.dtype} of shape {list(key.shape)}" if isinstance(key, Tensor) else f"{key!r}"
        raise ValueError(
            f"{name}: a key is an int64 tensor of shape [2], got {got}; make one with functricks.random.key(seed), "
            f"index one of several (keys[i]), or map over them with torch.func.vmap"
        )


def _check_word(name: str, what: str, value: int) -> None:
    if not isinstance(value, int | np.integer):
        raise TypeError(f"{name}: {what} must be an int or an integer tensor, got {value!r}")
    if not 0 <= value < 2**32:
        raise ValueError(f"{name}: {what} must be in [0, 2**32), got {value}")


def _check_integers(name: str, what: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name}: {what} must be an int or an integer tensor, got {tensor.dtype}")


def _check_fits(name: str, what: str, value: object, shape: Sequence[int]) -> None:
    """Raise unless ``value`` broadcasts to ``shape``: a larger one would reuse each draw silently."""
    if isinstance(value, Tensor) and not _broadcasts(value.shape, shape):
        raise ValueError(f"{name}: {what} of shape {list(value.shape)} does not broadcast to shape {list(shape)}")


def _broadcasts(small: Sequence[int], large: Sequence[int]) -> bool:
    ahead = len(large) - len(small)
    return ahead >= 0 and all(a in (1, b) for a, b in zip(small, large[ahead:], strict=True))


def _count(name: str, shape: Sequence[int]) -> int:
    if any(size < 0 for size in shape):
        raise ValueError(f"{name}: sizes must not be negative, got {list(shape)}")
    count = math.prod(shape)
    if count > 2**32:
        raise ValueError(
            f"{name}: a key gives at most 2**32 elements, got {list(shape)}; split the key and draw in parts"
        )
    return count


# --- public ----------------------------------------------------------------------------------------------------------


def key(seed: int | Tensor) -> Tensor:
    """Make the key of a seed: the int64 tensor ``[0, seed]``.

    Classic: :func:`torch.manual_seed`, without the global state. The bits are those of ``jax.random.key(seed)``.

    Args:
        seed: an int in [0, 2**32), or a 0-d integer tensor (taken modulo 2**32; may be batched by ``vmap``), whose
        device
            the key lives on. Values drawn from a key live on the key's device.

    A ValueError is raised for an int outside the range, a TypeError for anything that is not an integer.

    >>> key(7)
    tensor([0, 7])
    """
    if isinstance(seed, Tensor):
        _check_integers("key", "seed", seed)
        if seed.dim():
            raise ValueError(
                f"key: seed must be 0-d, got shape {list(seed.shape)}; map over seeds with torch.func.vmap"
            )
        word = seed.to(torch.int64) & _MASK32
        return torch.stack((torch.zeros_like(word), word))
    _check_word("key", "seed", seed)
    return torch.tensor([0, int(seed)])


def split(key: Tensor, num: int = 2) -> Tensor:
    """Derive ``num`` independent keys from one.

    ``split(key, n)[i]`` is ``fold_in(key, i)``: the first keys do not depend on how many are asked for.

    Classic: a new :class:`torch.Generator` for every consumer. The bits are those of ``jax.random.split``.

    Args:
        key: int64 [2].
        num: how many, at least 0.

    Returns int64 [num, 2].

    >>> split(key(0))
    tensor([[1797259609, 2579123966],
            [ 928981903, 3453687069]])
    """
    _check_key("split", key)
    return _draw(_pairs, key, range(_count("split", (num,))), (num, 2))


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """Derive the key that belongs to a number: a step, an epoch, the hash of a name.

    Classic: seeding a generator with ``seed + step``, which collides; this does not. The bits are those of
    ``jax.random.fold_in``.

    Args:
        key: int64 [2].
        data: an int in [0, 2**32), or an integer tensor of any shape (taken modulo 2**32; may be batched by ``vmap``),
            which gives one key for every element.

    Returns int64 [*data.shape, 2]. A ValueError is raised for an int outside the range.

    >>> fold_in(key(0), 1)
    tensor([ 928981903, 3453687069])
    >>> fold_in(key(0), torch.arange(3)).shape
    torch.Size([3, 2])
    """
    _check_key("fold_in", key)
    if isinstance(data, Tensor):
        _check_integers("fold_in", "data", data)
        return _draw(_pairs, key, data.reshape(-1), (*data.shape, 2))
    _check_word("fold_in", "data", data)
    return _draw(_pairs, key, range(data, data + 1), (2,))


def bits(key: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Draw 32 random bits for every element.

    Classic: ``torch.randint(2**32, shape)``. The bits are those of ``jax.random.bits``.

    Args:
        key: int64 [2].
        shape: at most 2**32 elements in all.

    Returns int64 with values in [0, 2**32).

    >>> bits(key(0), (2,))
    tensor([4070199207, 4202968722])
    """
    _check_key("bits", key)
    return _draw(_bits, key, range(_count("bits", shape)), shape)


def uniform(
    key: Tensor, shape: Sequence[int] = (), minval: float | Tensor = 0.0, maxval: float | Tensor = 1.0
) -> Tensor:
    r"""Draw from the uniform distribution on ``[minval, maxval)``, in float32 whatever the default dtype.

    .. math:: u = a + (b - a) \lfloor \mathrm{bits} / 2^9 \rfloor 2^{-23}

    Classic: :func:`torch.rand`. The bits are those of ``jax.random.uniform``.

    Args:
        key: int64 [2].
        shape: at most 2**32 elements in all.
        minval, maxval: floats or tensors that broadcast to ``shape``; differentiable, and may be batched by ``vmap``.

    With bounds other than 0 and 1 a value may round up to ``maxval``.

    >>> uniform(key(0), (2,))
    tensor([0.9477, 0.9786])
    """
    _check_key("uniform", key)
    unit = _draw(_unit, key, range(_count("uniform", shape)), shape)
    if not isinstance(minval, Tensor) and not isinstance(maxval, Tensor) and (minval, maxval) == (0.0, 1.0):
        return unit
    low, high = _float32("minval", minval, unit), _float32("maxval", maxval, unit)
    return torch.maximum(unit * (high - low) + low, low)


def _float32(what: str, value: float | Tensor, like: Tensor) -> Tensor:
    """Return a bound of :func:`uniform` rounded to float32 before any arithmetic, as jax does."""
    _check_fits("uniform", what, value, like.shape)
    if isinstance(value, Tensor):
        return value.to(torch.float32)
    return torch.full((), value, dtype=torch.float32, device=like.device)


def normal(key: Tensor, shape: Sequence[int] = ()) -> Tensor:
    r"""Draw from the standard normal distribution, in float32 whatever the default dtype.

    .. math:: z = \sqrt{2} \, \mathrm{erf}^{-1}(u), \quad u \text{ uniform on } (-1, 1)

    Classic: :func:`torch.randn`. Equal to ``jax.random.normal`` up to a few units in the last place, since the two
    libraries compute :math:`\mathrm{erf}^{-1}` differently; always finite, at most 5.42 in magnitude.

    Args:
        key: int64 [2].
        shape: at most 2**32 elements in all.

    >>> normal(key(0), (2,))
    tensor([1.6226, 2.0253])
    """
    _check_key("normal", key)
    unit = _draw(_unit, key, range(_count("normal", shape)), shape)
    return torch.erfinv(unit * 2.0 + (2.0**-24 - 1.0)) * math.sqrt(2.0)  # the float32 after -1 is the smallest value


def bernoulli(key: Tensor, p: float | Tensor = 0.5, shape: Sequence[int] = ()) -> Tensor:
    """Draw booleans that are true with probability ``p``.

    True where ``uniform(key, shape) < p``, so 0 is never, 1 is always, and a larger ``p`` only adds trues.

    Classic: :func:`torch.bernoulli`. The bits are those of ``jax.random.bernoulli``.

    Args:
        key: int64 [2].
        p: a float in [0, 1], or a tensor that broadcasts to ``shape`` and may be batched by ``vmap``.
        shape: at most 2**32 elements in all.

    A ValueError is raised for a float outside [0, 1] and for a ``p`` that does not broadcast to ``shape``.

    >>> bernoulli(key(0), 0.5, (4,))
    tensor([False, False,  True,  True])
    """
    _check_key("bernoulli", key)
    _check_rate("bernoulli", "p", p)
    _check_fits("bernoulli", "p", p, shape)
    unit = _draw(_unit, key, range(_count("bernoulli", shape)), shape)
    return unit < (p.to(torch.float32) if isinstance(p, Tensor) else p)


def _check_rate(name: str, what: str, value: float | Tensor) -> None:
    if not isinstance(value, Tensor) and not 0 <= value <= 1:
        raise ValueError(f"{name}: {what} must be in [0, 1], got {value!r}")


def randint(key: Tensor, shape: Sequence[int], minval: int | Tensor, maxval: int | Tensor) -> Tensor:
    r"""Draw integers from ``minval`` (included) to ``maxval`` (excluded).

    .. math:: a + \lfloor (b - a) v / 2^{64} \rfloor, \quad v \text{ of 64 random bits}

    No value's probability is off by more than :math:`2^{-64}`.

    Classic: :func:`torch.randint`. Not the values of ``jax.random.randint``.

    Args:
        key: int64 [2].
        shape: at most 2**32 elements in all.
        minval, maxval: ints, or integer tensors that broadcast to ``shape`` and may be batched by ``vmap``; at most
            2**31 apart.

    Returns int64. For ints an empty range or one that is too wide raises ValueError; an empty range of tensors gives
    ``minval``.

    >>> randint(key(0), (4,), 0, 10)
    tensor([6, 8, 6, 8])
    """
    _check_key("randint", key)
    for what, value in (("minval", minval), ("maxval", maxval)):
        _check_fits("randint", what, value, shape)
        if isinstance(value, Tensor):
            _check_integers("randint", what, value)
    span: int | Tensor
    if isinstance(minval, Tensor) or isinstance(maxval, Tensor):
        span = torch.as_tensor(maxval - minval).to(torch.int64).clamp(min=1)
    else:
        span = maxval - minval
        if not 0 < span <= 2**31:
            raise ValueError(f"randint: maxval - minval must be in [1, 2**31], got {minval} and {maxval}")
    low, high = _draw(_pairs, key, range(_count("randint", shape)), (*shape, 2)).unbind(-1)
    return minval + ((high * span + ((low * span) >> 32)) >> 32)  # the upper word of a 64-bit product, within int64


def permutation(key: Tensor, x: int | Tensor) -> Tensor:
    """Shuffle the integers ``0 .. x - 1``, or the rows of a tensor.

    The indices are sorted by random 64-bit numbers whose lowest bits, as many as an index needs, are the index itself:
    no two are equal, so every index appears exactly once and the order depends on no detail of the sorting. Where the
    random parts of two numbers collide, the smaller index comes first; among a thousand rows that happens in one
    shuffle of 10**11, among a million in one of 10**2, and it then decides the order of a single pair.

    Classic: :func:`torch.randperm`. Not the values of ``jax.random.permutation``.

    Args:
        key: int64 [2].
        x: the length, at least 0; or a tensor, whose first axis is shuffled.

    Returns int64 [x], or a tensor like ``x``.

    >>> permutation(key(0), 5)
    tensor([4, 3, 2, 1, 0])
    """
    _check_key("permutation", key)
    if isinstance(x, Tensor):
        if not x.dim():
            raise ValueError("permutation: x is a 0-d tensor; give the length as an int")
        return x[permutation(key, x.shape[0])]
    return _draw(_shuffle, key, range(_count("permutation", (x,))), (x,))


def dropout(key: Tensor, x: Tensor, rate: float | Tensor, *, mask_shape: Sequence[int] | None = None) -> Tensor:
    r"""Set each element to zero with probability ``rate`` and scale the others up, so that the mean stays.

    .. math:: y_i = x_i \, m_i / (1 - r), \quad m_i \sim \mathrm{Bernoulli}(1 - r)

    Classic: :func:`torch.nn.functional.dropout`. Reference: Srivastava, Hinton, Krizhevsky, Sutskever, Salakhutdinov
    2014, JMLR 15.

    Args:
        key: int64 [2], on the device of ``x``.
        x: a floating-point tensor.
        rate: :math:`r` in [0, 1], a float or a 0-d tensor that may be batched by ``vmap``. The probability is resolved
        to
            multiples of 2**-16: four elements share one block of random bits, which costs a quarter of
            :func:`bernoulli`. A higher rate under the same key only drops more.
        mask_shape: the shape of the mask where whole slices are dropped together; it must broadcast to ``x``. The
        default
            is the shape of ``x``.

    Rate 0 returns ``x`` exactly; rate 1 returns zeros, and its gradient is zero. The dtype of ``x`` is kept. As in
    PyTorch, a dropped NaN or infinity becomes NaN.

    >>> dropout(key(0), torch.ones(6), 0.5)
    tensor([0., 0., 0., 2., 0., 0.])
    """
    _check_key("dropout", key)
    _check_rate("dropout", "rate", rate)
    if not x.is_floating_point() and not x.is_complex():
        raise TypeError(f"dropout: x must be a floating-point tensor, got {x.dtype}")
    if not isinstance(rate, Tensor) and rate == 0:
        return x
    shape = tuple(x.shape if mask_shape is None else mask_shape)
    if not _broadcasts(shape, x.shape):
        raise ValueError(f"dropout: mask_shape {list(shape)} does not broadcast to x of shape {list(x.shape)}")
    count = _count("dropout", shape)
    words = _draw(lambda x0, x1: _quarters(x0, x1)[..., :count], key, range(-(-count // 4)), shape)
    limit, scale = _keep(rate, x)
    return x * ((words <= limit) * scale)


def _keep(rate: float | Tensor, x: Tensor) -> tuple[int | Tensor, Tensor]:
    """Return up to which signed 16-bit number an element stays, and what it is multiplied by, 0-d in the dtype of x."""
    if not isinstance(rate, Tensor):
        keep = 1.0 - rate
        scale = torch.full((), 1.0 / keep if keep else 0.0, dtype=x.dtype, device=x.device)
        return max(round(keep * 2**16) - 2**15 - 1, -(2**15)), scale
    if rate.dim():
        raise ValueError(
            f"dropout: rate must be 0-d, got shape {list(rate.shape)}; map over rates with torch.func.vmap"
        )
    wide = 1.0 - rate.to(torch.float64)
    some = wide > 0
    # at rate 1 one number in 2**16 stays, because limits are 16-bit too; the scale of 0 takes it out
    limit = ((wide * 2**16).round().to(torch.int32) - 2**15 - 1).clamp(min=-(2**15))
    return limit, (some / torch.where(some, wide, 1.0)).to(x.dtype)

"""Checkpoints: a whole run in one file that appears whole or not at all, and that holds no code.

A checkpoint is a `safetensors <https://github.com/huggingface/safetensors>`_ file. Its tensors have the dotted paths of
the tree as their names, so that other programs read the parameters (``params.encoder.weight``, ...) without this
package. What is no tensor (containers, numbers, strings) is JSON in the file's metadata. Nothing is pickled, neither
written nor read: what ``torch.load(weights_only=True)`` guards against has no place to be in.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from functricks.experiments.configs import is_integer

__all__ = ["load_checkpoint", "save_checkpoint"]

_SUFFIX = ".safetensors"
_STEP = re.compile(r"step-(\d+)\.safetensors")
_FORMAT = "functricks-checkpoint"
_VERSION = "1"
_DICTS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


def save_checkpoint(
    directory_or_path: str | os.PathLike[str], state: Any, *, step: int | Tensor | None = None, keep: int | None = 3
) -> Path:
    """Save a run so that it resumes bit for bit; a kill at any instant leaves the last good checkpoint.

    The file is written under another name, forced to disk, and renamed, which replaces the old one in one move.

    Classic: ``torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), ...}, path)``, which leaves
    half a file when it is interrupted, and a pickle that runs code when it is loaded without ``weights_only``.
    Reference: https://github.com/Lightning-AI/pytorch-lightning/issues/688.

    Args:
        directory_or_path: a name that ends in ``.safetensors`` is one file, replaced by every save. Anything else is a
            directory, made when it is not there, with a file ``step-<step>.safetensors`` for each save.
        state: a :class:`~functricks.TrainState`, or any tree of dicts, lists, tuples and NamedTuples of tensors,
            numbers, strings, bools and None: ``{"model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "scheduler": ..., "scaler": ..., "key": key, "epoch": 3}``. A tensor that is there twice is stored once.
        step: the number of a file in a directory; by default ``state.step`` or ``state["step"]``.
        keep: how many files the directory keeps: this one, and those of the highest steps; None keeps all.

    One process writes one directory: under ``torchrun``, save on rank 0. Returns the path of the file.

    Raises ``TypeError`` for a leaf that cannot be stored, ``ValueError`` for a ``step`` that is missing or negative and
    a ``keep`` below 1, ``ImportError`` without safetensors; before anything is written.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> save_checkpoint(folder, {"w": torch.tensor([1.0, 2.0]), "epoch": 3}, step=7).name
    'step-00000007.safetensors'
    >>> load_checkpoint(folder)
    {'w': tensor([1., 2.]), 'epoch': 3}
    """
    if keep is not None and (not is_integer(keep) or keep < 1):
        raise ValueError(f"save_checkpoint: keep must be an integer >= 1, or None for all, got {keep!r}")
    given = Path(directory_or_path)
    into_directory = given.suffix != _SUFFIX
    path = given / f"step-{_step_of(state, step):08d}{_SUFFIX}" if into_directory else given
    library = _safetensors("save_checkpoint")
    writer = _Writer()
    metadata = {"format": _FORMAT, "version": _VERSION, "tree": json.dumps(writer.encode(state, ""))}
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path.parent)
    with _replacing(path) as temporary:
        library.save_file(writer.tensors, temporary, metadata)
    if into_directory and keep is not None:
        others = [other for other in _files(given) if other != path]
        for old in others[: max(0, len(others) - (keep - 1))]:
            old.unlink(missing_ok=True)
    return path


def load_checkpoint(directory_or_path: str | os.PathLike[str], like: Any = None) -> Any:
    """Load what :func:`save_checkpoint` wrote: new tensors, nothing that exists is touched.

    Args:
        directory_or_path: a ``.safetensors`` file, or a directory, of which the file with the highest step is read.
        like: a state of the expected structure, e.g. the ``step.init(params)`` of a new run, or ``{"model":
            model.state_dict(), "optimizer": None}``. Structure, dtypes and shapes must agree; the result has its
            containers, and its tensors are on its devices and in its memory formats. A None in it takes whatever
            the file has at that place. Without it, tensors are on the CPU, and NamedTuples come back as dicts.

    Tensors that shared their storage when they were saved come back as one tensor, so ties survive. A module keeps its
    own ties as long as ``load_state_dict`` copies, which is its default (``assign=True`` unties).

    No code in the file is executed, whatever the file is. Raises ``FileNotFoundError`` when there is no checkpoint, and
    ``ValueError`` for a file that is truncated or no checkpoint, or that does not fit ``like``: the text names the
    file, and each path that differs with both shapes.

    >>> import tempfile
    >>> path = save_checkpoint(tempfile.mkdtemp() + "/run.safetensors", {"w": torch.zeros(2)})
    >>> load_checkpoint(path, like={"w": torch.ones(3)})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: load_checkpoint: .../run.safetensors does not fit: w is a tensor [2] of float32 in the file, and a
    tensor [3] of float32 in like
    """
    path = _newest(Path(directory_or_path))
    library = _safetensors("load_checkpoint")
    try:
        with library.safe_open(path, framework="pt", device="cpu") as file:
            reader = _Reader(file, file.metadata() or {})
            found = reader.decode(reader.root, like, "")
    except FileNotFoundError:
        raise FileNotFoundError(f"load_checkpoint: there is no file {path}") from None
    except (library.SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f"load_checkpoint: {path} is no whole checkpoint of functricks: {error}") from error
    if reader.problems:
        more = f"; and {len(reader.problems) - 10} more" if len(reader.problems) > 10 else ""
        raise ValueError(f"load_checkpoint: {path} does not fit: {'; '.join(reader.problems[:10])}{more}")
    return found


# --- files -----------------------------------------------------------------------------------------------------------


class _Safetensors:
    """The three names of safetensors that are used here."""

    def __init__(self, base: ModuleType, for_torch: ModuleType) -> None:
        self.safe_open: Any = base.safe_open
        self.SafetensorError: type[Exception] = base.SafetensorError
        self.save_file: Any = for_torch.save_file


def _safetensors(what: str) -> _Safetensors:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"{what} needs safetensors: pip install 'functricks-torch[adapter]'") from error
    return _Safetensors(safetensors, safetensors.torch)


def _step_of(state: Any, step: int | Tensor | None) -> int:
    if step is None:
        step = state.get("step") if isinstance(state, dict) else getattr(state, "step", None)
    if step is None:
        raise ValueError("save_checkpoint: the state has no step to name the file by; give step=, or a path to a file")
    if (isinstance(step, Tensor) and step.numel() != 1) or int(step) < 0:
        raise ValueError(f"save_checkpoint: step must be one integer >= 0, got {step!r}")
    return int(step)


def _files(directory: Path) -> list[Path]:
    """Return the checkpoints of a directory by rising step."""
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _newest(path: Path) -> Path:
    if not path.is_dir():
        return path
    files = _files(path)
    if not files:
        raise FileNotFoundError(f"load_checkpoint: there is no checkpoint (step-*.safetensors) in {path}")
    return files[-1]


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Write to a file in a temporary folder beside ``path``; then it takes the old file's place, on disk, at once."""
    folder = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    folder.mkdir()
    try:
        temporary = folder / path.name
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # safetensors makes a file of its own, which only its owner may read
        _force(temporary)
        temporary.replace(path)
        if os.name == "posix":
            _force(path.parent)  # the name too
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _force(path: Path) -> None:
    """Return when a file, or a directory's names, are on disk."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_leftovers(directory: Path) -> None:
    """Remove what processes of this machine wrote that were killed while they saved."""
    if os.name != "posix":
        return  # elsewhere, os.kill(pid, 0) is no question
    for path in directory.glob(f".*{_SUFFIX}.{socket.gethostname()}.*.tmp"):
        pid = path.name.split(".")[-3]
        if pid.isdecimal() and not _is_alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


# --- trees -----------------------------------------------------------------------------------------------------------
# A node of the JSON is a pair [kind, content]:
#   ["tensor", name], ["complex", name]     name of the tensor in the file; a complex one is stored as pairs
#   ["value", number | string | bool | null]
#   ["list" | "tuple", [node, ...]]
#   ["dict" | "OrderedDict" | "Counter" | "fields", [[key, node], ...]]    "fields" is a NamedTuple

_Node = list[Any]


def _under(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


class _Writer:
    """Turns a tree into JSON and named tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[Any, _Node] = {}
        self._storages: set[int] = set()

    def encode(self, value: Any, path: str) -> _Node:
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if value is None or isinstance(value, (bool, str)):
            return ["value", value]
        if isinstance(value, Integral):
            return ["value", int(value)]
        if isinstance(value, Real):
            return ["value", float(value)]
        if isinstance(value, dict) and type(value).__name__ in _DICTS:
            return [type(value).__name__, [[self._key(key, path), self._child(value[key], path, key)] for key in value]]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            pairs = zip(value._fields, value, strict=True)
            return ["fields", [[name, self._child(child, path, name)] for name, child in pairs]]
        if type(value) in (list, tuple):
            return [type(value).__name__, [self._child(child, path, i) for i, child in enumerate(value)]]
        raise TypeError(
            f"save_checkpoint: {path or 'the state'} is a {type(value).__name__}; a checkpoint holds tensors, numbers, "
            "strings, None, dicts, lists, tuples and NamedTuples"
        )

    def _child(self, value: Any, path: str, key: Any) -> _Node:
        return self.encode(value, _under(path, key))

    def _key(self, key: Any, path: str) -> str | int:
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            raise TypeError(f"save_checkpoint: {path or 'the state'} has the key {key!r}; keys are strings or integers")
        return key

    def _tensor(self, tensor: Tensor, path: str) -> _Node:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or hasattr(tensor, "full_tensor"):
            raise TypeError(
                f"save_checkpoint: {path or 'the state'} is a {type(tensor).__name__} ({tensor.layout}, "
                f"{tensor.device}); a checkpoint holds dense tensors, torch.distributed.checkpoint holds sharded ones"
            )
        tensor = tensor.detach()
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in self._known:
            return self._known[place]
        name = path or "state"
        while name in self.tensors:  # {"a.b": ...} beside {"a": {"b": ...}}
            name += "'"
        plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
        plain = plain.cpu().contiguous()
        if plain.untyped_storage().data_ptr() in self._storages:  # overlaps another one, without being the same
            plain = plain.clone()
        self._storages.add(plain.untyped_storage().data_ptr())
        self.tensors[name] = plain
        node: _Node = ["complex" if tensor.is_complex() else "tensor", name]
        self._known[place] = node
        return node


class _Reader:
    """Turns the JSON back into a tree, and collects where it differs from ``like``."""

    def __init__(self, file: Any, metadata: dict[str, str]) -> None:
        if metadata.get("format") != _FORMAT:
            raise ValueError("another program wrote it")
        if metadata.get("version") != _VERSION:
            raise ValueError(f"its format has version {metadata.get('version')}, this functricks reads {_VERSION}")
        self.root: _Node = json.loads(metadata["tree"])
        self.problems: list[str] = []
        self._file = file
        self._loaded: dict[str, Tensor] = {}

    def decode(self, node: _Node, like: Any, path: str) -> Any:
        kind, content = node
        if kind in ("tensor", "complex"):
            return self._tensor(content, kind == "complex", like, path)
        if kind == "value":
            if like is not None and not (content is None or isinstance(like, (bool, str, Integral, Real))):
                self._differ(path, f"is {content!r}", like)
            return content
        if kind in ("list", "tuple"):
            return self._row(kind, content, like, path)
        return self._named(kind, content, like, path)

    def _tensor(self, name: str, is_complex: bool, like: Any, path: str) -> Any:
        if name not in self._loaded:
            found = self._file.get_tensor(name)
            self._loaded[name] = self._placed(torch.view_as_complex(found) if is_complex else found, like)
        tensor = self._loaded[name]
        fits = isinstance(like, Tensor) and like.shape == tensor.shape and like.dtype == tensor.dtype
        if like is not None and not fits:
            self._differ(path, f"is {_described(tensor)}", like)
        return tensor

    def _placed(self, tensor: Tensor, like: Any) -> Tensor:
        """Copy out of the mapped file, to the device and into the memory format of ``like``."""
        if not isinstance(like, Tensor) or like.shape != tensor.shape or like.dtype != tensor.dtype:
            return tensor.clone()
        with torch.no_grad():
            return torch.empty_like(like, requires_grad=False).copy_(tensor)

    def _row(self, kind: str, content: list[_Node], like: Any, path: str) -> Any:
        children: Iterable[Any] = [None] * len(content)
        if like is not None:
            if type(like) is not (list if kind == "list" else tuple):
                self._differ(path, f"is a {kind}", like)
            elif len(like) != len(content):
                self._differ(path, f"is a {kind} of {len(content)}", like)
            else:
                children = like
        row = [
            self.decode(node, child, _under(path, i))
            for i, (node, child) in enumerate(zip(content, children, strict=True))
        ]
        return row if kind == "list" else tuple(row)

    def _named(self, kind: str, content: list[_Node], like: Any, path: str) -> Any:
        found = dict(map(tuple, content))
        make = _DICTS.get(kind, dict)
        if like is None:
            return make({key: self.decode(node, None, _under(path, key)) for key, node in found.items()})
        wanted = like._asdict() if kind == "fields" and hasattr(like, "_asdict") else like
        if not isinstance(wanted, dict) or hasattr(like, "_asdict") != (kind == "fields"):
            self._differ(path, f"is a {'NamedTuple' if kind == 'fields' else kind}", like)
            return None
        self.problems += [f"{_under(path, key)} is not in the file" for key in wanted if key not in found]
        self.problems += [f"{_under(path, key)} is in the file, not in like" for key in found if key not in wanted]
        both = {key: self.decode(found[key], wanted[key], _under(path, key)) for key in wanted if key in found}
        if kind != "fields":
            return make(both)
        return type(like)(**both) if len(both) == len(wanted) else None

    def _differ(self, path: str, file: str, like: Any) -> None:
        self.problems.append(f"{path or 'the state'} {file} in the file, and {_described(like)} in like")


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value) if isinstance(value, (bool, str, Integral, Real)) else f"a {type(value).__name__}"

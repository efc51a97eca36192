"""The files with the weights of a model folder, by the rules of ``from_pretrained``. No torch.

``transformers_weights`` of ``config.json`` comes first, then ``model.safetensors``, then the shards
that ``model.safetensors.index.json`` names. Files with other names are ignored.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.host.errors import ConfigError, StateError
from penstock.host.files import DAMAGED, is_file, parse_json, write_atomically
from penstock.protocol.run.bases.base_identity import WEIGHT_FILES, weight_files

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SUFFIX, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_WEIGHTS = (
    *("*.safetensors", "*.safetensors.index.json", "*.gguf", "*.pth"),
    *("pytorch_model*.bin", "pytorch_model*.bin.index.json"),
)
"""Patterns of files that hold weights of a model, or list files that do."""
_RANDOM = "rng_state"
"""Start of the names of random states in checkpoints of transformers' Trainer."""
_RANKS = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_FEW = 4


def chosen_files(directory: Path, hf_config: Any) -> tuple[str, ...]:
    """Returns the names of the files that transformers takes, in its order.

    Raises:
        ConfigError: there are none, or not where ``transformers_weights`` says.
        StateError: the index is damaged, or a file that it names is missing.
    """
    ranks = sorted(path.name for path in directory.iterdir() if _RANKS.fullmatch(path.name))
    if ranks:
        raise ConfigError(
            f"{_at(directory)}: {ranks[0]} is one rank's part of a distributed checkpoint, which"
            " Penstock does not read; load the folder with transformers and save it whole"
        )
    named = getattr(hf_config, "transformers_weights", None)
    if named is not None:
        files = _named_files(directory, named)
    elif is_file(directory / _SINGLE):
        files = (_SINGLE,)
    elif is_file(directory / _INDEX):
        files = _shards(directory, _INDEX)
    else:
        raise _without_weights(directory)
    extra = (name for name in getattr(type(hf_config), "extra_files", ()) if name not in files)
    return (*files, *(name for name in extra if is_file(directory / name)))


def files_before(directory: Path) -> tuple[str, ...]:
    """Returns the files that a run without a record of them has read: those that an index names,
    else all ``*.safetensors``.

    Raises:
        ConfigError: there are none. StateError: as :func:`chosen_files`.
    """
    if is_file(directory / _INDEX):
        return _shards(directory, _INDEX)
    files = tuple(sorted(path.name for path in directory.glob(f"*{_SUFFIX}")))
    if not files:
        raise _without_weights(directory)
    return files


def write_record(run_dir: Path, files: Sequence[str]) -> None:
    """Adds the files that hold a run's initial weights to ``RUN_DIR/model/meta.json``."""
    path = run_dir / "model" / "meta.json"
    fields = parse_json(path.read_bytes())
    write_atomically(path, json.dumps({**fields, WEIGHT_FILES: list(files)}))


def recorded_files(run_dir: Path, directory: Path) -> tuple[str, ...]:
    """Returns the files that hold the initial weights of a run.

    Raises:
        ConfigError, StateError: see :func:`files_before`.
    """
    recorded = weight_files(run_dir)
    return files_before(directory) if recorded is None else recorded


def files_beside(directory: Path, chosen: Sequence[str]) -> list[str]:
    """Returns the names of other files in a folder that hold weights, or list files that do."""
    candidates = _named_as_weights(directory)
    if _SINGLE not in chosen:
        candidates.discard(_INDEX)
    return sorted(candidates - set(chosen))


def has_weights(directory: Path) -> bool:
    """Returns whether a folder has files with the names of weights."""
    return bool(_named_as_weights(directory))


def _named_as_weights(directory: Path) -> set[str]:
    names = {path.name for pattern in _WEIGHTS for path in directory.glob(pattern)}
    return {name for name in names if not name.startswith(_RANDOM)}


def few(names: Iterable[str], limit: int = _FEW) -> str:
    """Returns the first names, with a note that there are more."""
    listed = list(names)
    return ", ".join(listed[:limit]) + (", …" if len(listed) > limit else "")


def _at(directory: Path) -> str:
    return f"model.path = {str(directory)!r}"


def _named_files(directory: Path, named: Any) -> tuple[str, ...]:
    key = f"transformers_weights of {directory / 'config.json'} = {named!r}"
    if not isinstance(named, str) or not named.endswith((_SUFFIX, _INDEX_SUFFIX)):
        raise ConfigError(f"{key}: give the name of a {_SUFFIX} or {_INDEX_SUFFIX} file")
    if not _lies_in(directory, named):
        raise ConfigError(f"{key}: leads out of the folder; name a file in it")
    if not is_file(directory / named):
        raise ConfigError(f"{key}: there is no such file")
    return _shards(directory, named) if named.endswith(_INDEX_SUFFIX) else (named,)


def _lies_in(directory: Path, name: str) -> bool:
    """Returns whether the path ``name`` leads to a place in a folder; links are not followed."""
    return os.path.abspath(directory / name).startswith(f"{os.path.abspath(directory)}{os.sep}")


def _shards(directory: Path, index_name: str) -> tuple[str, ...]:
    """Returns the files that an index names, relative to the folder of the model."""
    index = directory / index_name
    try:
        weight_map = parse_json(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, *DAMAGED) as error:
        raise StateError(f"{index}: not an index of safetensors files: {error!r}") from error
    if not names:
        raise StateError(f"{index}: names no files")
    for name in names:
        if not name.endswith(_SUFFIX):
            raise StateError(f"{index} names {name}, which is no {_SUFFIX} file")
        if not _lies_in(directory, name):
            raise StateError(f"{index} names {name}, which lies outside of the folder")
        if not is_file(directory / name):
            raise StateError(f"{index} names {name}, which is missing")
    return tuple(names)


def _without_weights(directory: Path) -> ConfigError:
    for name in (_SINGLE, _INDEX):
        if (directory / name).is_symlink():
            return ConfigError(f"{_at(directory)}: {name} is a link that leads to no file")
    others = files_beside(directory, ())
    message = f"{_at(directory)}: has no {_SINGLE} and no {_INDEX}"
    if not others:
        return ConfigError(f"{message}; no other file of weights is read")
    if any(name.endswith(_SUFFIX) for name in others):
        remedy = f"rename it to {_SINGLE}, or name it as transformers_weights in config.json"
    else:
        remedy = "load the folder with transformers and save it (save_pretrained)"
    return ConfigError(f"{message}, and {few(others)} is not read; {remedy}")

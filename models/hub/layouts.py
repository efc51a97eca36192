"""Files of a repository that a run takes. Pure: a listing goes in, names come out.

A model has ``config.json``, the files of its tokenizer, and the weights that transformers would
take, in safetensors. A data set has the files of one split, which the header of ``README.md``
(``configs``) or the names of the files tell.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from penstock.config.hub_names import HubName
from penstock.config.splits import Split
from penstock.host.errors import ConfigError
from penstock.models.data.reading.split_names import files_of_split, splits_of
from penstock.models.data.sources import format_of

SETTINGS = (".json", ".model", ".txt", ".jinja")
"""Endings of a model's files without weights: settings and tokenizer."""

WEIGHTS = ".safetensors"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_OTHER_INDEX = ".index.json"
_PICKLES = (".bin", ".pth", ".pt", ".ckpt")
RECORDS = (".parquet", ".jsonl", ".json", ".csv")
"""Formats of data sets that are fetched."""

_DESCRIPTIONS = frozenset(
    ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
)
_MAGIC = frozenset("*?[")
_SHOWN = 8


def check_names(names: Collection[str]) -> None:
    """Refuses names of files that lead out of their folder.

    Raises:
        ConfigError: shows the name.
    """
    for name in names:
        parts = name.split("/")
        if any(part in ("", ".", "..") or part != part.strip("\0") for part in parts):
            raise ConfigError(f"the Hub lists a file {name!r}, which leads out of its folder")
        if "\\" in name or not name.isprintable():
            raise ConfigError(f"the Hub lists a file {name!r}, which is no plain name")


def settings_of(names: Collection[str]) -> list[str]:
    """Returns settings and tokenizer of a model, and the index of its shards."""
    return sorted(
        name
        for name in names
        if "/" not in name
        and PurePosixPath(name).suffix in SETTINGS
        and (name == INDEX or not name.endswith(_OTHER_INDEX))
    )


def weights_of(names: Collection[str], settings: Mapping[str, Any], index: bytes) -> list[str]:
    """Returns the files with the weights of a model, as transformers takes them.

    ``settings``: ``config.json``. ``index``: the content of the index of shards; empty without one.

    Raises:
        ConfigError: there are none, or the index names files that the repository lacks.
    """
    named = settings.get("transformers_weights")
    if isinstance(named, str) and named.endswith(WEIGHTS) and named in names:
        return [named]
    if SINGLE in names:
        return [SINGLE]
    if index:
        try:
            shards = sorted(set(json.loads(index)["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{INDEX} is damaged ({type(error).__name__})") from error
        lacking = [name for name in shards if name not in names or "/" in name]
        if lacking or not all(name.endswith(WEIGHTS) for name in shards):
            raise ConfigError(f"{INDEX} names {lacking or shards}, which are no files of weights")
        return shards
    pickles = sorted(name for name in names if PurePosixPath(name).suffix in _PICKLES)
    seen = f"only pickles such as {pickles[0]}, which are programs" if pickles else "no weights"
    raise ConfigError(
        f"has {seen}; weights are read from {SINGLE} and its shards. Give a revision that has"
        " them, such as NAME@refs/pr/1, or save the model with transformers' save_pretrained"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFiles:
    """Files of a data set. ``place`` names exactly these files: one file, or a glob. ``split`` is
    the part of them to read, such as ``[:90%]``.
    """

    names: tuple[str, ...]
    place: str
    split: str | None


def data_files(name: HubName, names: Collection[str], readme: str, split: str | None) -> DataFiles:
    """Returns the files that a name and a split stand for.

    ``readme`` is the text of ``README.md``; ``split`` is a split with or without a part.

    Raises:
        ConfigError: the repository has no such files, or several choices; lists the choices.
    """
    chosen_split = Split() if split is None else Split.parse(split)
    part = None if split is None else split.removeprefix(chosen_split.name or "") or None
    known = sorted(each for each in names if _is_data(each))
    if not known:
        raise ConfigError(
            "has no files of Parquet, JSON lines or CSV; no code of a data set is run. For many"
            f" data sets the Hub itself has Parquet: {name.repository}@refs/convert/parquet"
        )
    if name.inside is not None:
        splits = _inside(name, known)
    else:
        splits = _configured(name, known, readme) or _by_names(name, known)
    files = _of_split(name, splits, chosen_split.name)
    if name.inside is None:
        _refuse_several_folders(name, files)
    return DataFiles(names=tuple(files), place=_glob(name, files, names), split=part)


def _is_data(name: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and path.name not in _DESCRIPTIONS and format_of(Path(name)) in RECORDS


def _inside(name: HubName, known: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Returns the splits of the files in a folder, of a file, or of the files of a glob."""
    inside = str(PurePosixPath(name.inside or ""))
    files = [each for each in known if each == inside or _matches(each, inside)]
    if files:
        # The user names the files, so names of splits do not choose among them.
        return {"": files}
    files = [each for each in known if each.startswith(f"{inside}/")]
    if not files:
        folders = {str(PurePosixPath(each).parent) for each in known} - {"."}
        raise ConfigError(f"has no data {inside!r}; folders with data are {_some(folders)}")
    return _by_names(name, files, Path(inside))


def _by_names(
    name: HubName, known: Sequence[str], top: Path = Path()
) -> Mapping[str, Sequence[str]]:
    splits = splits_of([Path(each) for each in known], top)
    if not splits:
        raise ConfigError(f"the names of {name}'s files tell no split: {_some(known)}")
    return {split: [path.as_posix() for path in paths] for split, paths in splits.items()}


def _configured(
    name: HubName, known: Sequence[str], readme: str
) -> Mapping[str, Sequence[str]] | None:
    """Returns the splits of the header of ``README.md``; None if it lists no files.

    Raises:
        ConfigError: the header has several subsets, and none is the default.
    """
    listed = _header(readme).get("configs")
    configs = [each for each in listed if _has_files(each)] if isinstance(listed, list) else []
    if not configs:
        return None
    default = [each for each in configs if each.get("default") is True]
    default = default or [each for each in configs if each.get("config_name") == "default"]
    if len(configs) > 1 and len(default) != 1:
        revision = name.revision or "main"
        lines = [
            f"{name.repository}@{revision}/{pattern} ({each.get('config_name')})"
            for each in configs
            for pattern in [next(_patterns(each))[1]]
        ]
        raise ConfigError(f"has several subsets; name one in path: {_some(lines)}")
    config = default[0] if default else configs[0]
    splits: dict[str, list[str]] = {}
    for split, pattern in _patterns(config):
        files = [each for each in known if _matches(each, pattern)]
        splits.setdefault(split, []).extend(each for each in files if each not in splits[split])
    return {split: sorted(files) for split, files in splits.items() if files} or None


def _header(readme: str) -> Mapping[str, Any]:
    """Returns the YAML header of a page of the Hub; empty without one that can be read."""
    lines = readme.splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    text = "\n".join(takewhile(lambda line: line.strip() != "---", lines[1:]))
    try:
        header = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


def _has_files(config: Any) -> bool:
    return isinstance(config, dict) and next(_patterns(config), None) is not None


def _patterns(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the splits and patterns of one entry of ``configs``."""
    folder = config.get("data_dir")
    prefix = f"{folder.strip('/')}/" if isinstance(folder, str) and folder.strip("/.") else ""
    entries = config.get("data_files")
    for entry in entries if isinstance(entries, list) else [entries]:
        split, paths = "train", entry
        if isinstance(entry, dict):
            split, paths = str(entry.get("split", "train")), entry.get("path")
        for pattern in paths if isinstance(paths, list) else [paths]:
            if isinstance(pattern, str):
                yield split, f"{prefix}{pattern.removeprefix('./')}"


def _of_split(
    name: HubName, splits: Mapping[str, Sequence[str]], wanted: str | None
) -> Sequence[str]:
    if wanted is None or list(splits) == [""]:
        if len(splits) > 1:
            start = f"{name.repository}@{name.revision or 'main'}"
            globs = [f"{start}/{_pattern(files)}" for _, files in sorted(splits.items())]
            raise ConfigError(
                f"has several splits, {_some(splits)}; give split in data.sources or eval.sets, or"
                f" name the files: {', '.join(globs[:_SHOWN])}"
            )
        return next(iter(splits.values()))
    if wanted in splits:
        return splits[wanted]
    paths = [Path(each) for listed in splits.values() for each in listed]
    try:
        names = [path.as_posix() for path in files_of_split(paths, Path(), wanted, str(name))]
    except ConfigError:
        names = []
    if names not in [list(each) for each in splits.values()]:
        raise ConfigError(f"has no split {wanted!r}; its splits are {_some(splits)}")
    return names


def _refuse_several_folders(name: HubName, files: Sequence[str]) -> None:
    """Refuses files of several folders: each may be a subset of its own."""
    folders = sorted({str(PurePosixPath(each).parent) for each in files})
    if len(folders) > 1:
        revision = name.revision or "main"
        choices = [f"{name.repository}@{revision}/{folder}" for folder in folders]
        raise ConfigError(
            f"has these data in several folders; name one in path: {_some(choices)}; or name all"
            " files by a glob"
        )


def _glob(name: HubName, files: Sequence[str], names: Collection[str]) -> str:
    """Returns the file, or a glob that names exactly ``files`` among ``names``."""
    if len(files) == 1:
        return files[0]
    pattern = _pattern(files)
    named = [each for each in sorted(names) if _matches(each, pattern) and _is_read(each)]
    if named == sorted(files) and not any(_MAGIC & set(each) for each in files):
        return pattern
    raise ConfigError(
        f"no glob names these files alone: {_some(files)}; name them in path, as in"
        f" {name.repository}@{name.revision or 'main'}/FILE, each as a source"
    )


def _pattern(files: Sequence[str]) -> str:
    """Returns a glob of files, part by part of their paths; ``**`` for paths of several lengths."""
    if len({each.count("/") for each in files}) > 1:
        return "**"
    parts = zip(*(each.split("/") for each in files), strict=True)
    return "/".join(_common(set(part)) for part in parts)


def _is_read(name: str) -> bool:
    """Returns whether a glob takes a file: hidden files and other formats are left out."""
    return not PurePosixPath(name).name.startswith(".") and bool(format_of(Path(name)))


def _common(parts: set[str]) -> str:
    """Returns a pattern of names: their common start, a star, and their common end."""
    if len(parts) == 1:
        return parts.pop()
    first, last = min(parts), max(parts)
    start = _shared(first, last)
    ends = [part[len(start) :][::-1] for part in parts]
    return f"{start}*{_shared(min(ends), max(ends))[::-1]}"


def _shared(first: str, last: str) -> str:
    """Returns the common start of two texts."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(pair[0] for pair in pairs)


def _matches(name: str, pattern: str) -> bool:
    """Returns whether a glob names a file; ``**`` stands for any folders."""
    return _match(name.split("/"), pattern.split("/"))


def _match(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        rest = pattern[1:] or ["*"]
        return any(_match(parts[skipped:], rest) for skipped in range(len(parts)))
    if not parts or not fnmatch.fnmatchcase(parts[0], pattern[0]):
        return False
    return _match(parts[1:], pattern[1:])


def _some(names: Collection[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:_SHOWN]) + (", …" if len(listed) > _SHOWN else "")

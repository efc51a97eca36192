"""Fetches files of the Hub: ``python -m penstock.models.hub.fetch REQUEST``.

``REQUEST`` is JSON: ``key`` (of the configuration, for errors), ``use``, ``name``, ``split``, and
``commit`` of an earlier fetch. The process writes lines about its progress. The last line is the
answer, an object: ``commit``, ``folder``, ``place``, ``split``, and ``files`` with their bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from penstock.config.hub_names import HubName, fetch_data, from_hub
from penstock.host.errors import ConfigError
from penstock.host.files import DAMAGED, parse_json
from penstock.models.hub.layouts import ADAPTER, INDEX, data_files, settings_of, weights_of
from penstock.models.hub.repository import DATASET, MODEL, Repository, Unreachable
from penstock.protocol.run.process import tool_main

Say = Callable[[str], None]
_README, _CONFIG = "README.md", "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Fetched files. ``place``: the value of the key, below the folder of the commit; empty for the
    folder. ``split``: the part of the files that ``split`` still asks for.
    """

    names: Sequence[str]
    place: str = ""
    split: str | None = None


def fetch(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Fetches the files of a request that the cache lacks; returns the answer.

    Raises:
        ConfigError: the files do not exist, cannot be used, or cannot be fetched.
        CapacityError: the disk is too small.
    """
    name, use = HubName.parse(request["name"]), request["use"]
    assert name is not None
    kind = DATASET if use == "data" else MODEL
    place = f"{request['key']} = {request['name']!r}"
    try:
        repository = Repository.read(name, kind, request["commit"])
        taken = _USES[use](repository, request, say)
    except Unreachable as error:
        raise ConfigError(f"{place}: {_offline(name, kind)}; {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{place}: no such path here; the Hub: {error}") from error
    return {
        "commit": repository.commit,
        "folder": str(repository.folder),
        "place": taken.place,
        "split": taken.split,
        "files": {each: repository.files[each].num_bytes for each in taken.names},
    }


def _offline(name: HubName, kind: str) -> str:
    """Returns the sentence about a missing folder of a model, or about missing data."""
    if kind == DATASET:
        command = fetch_data(name.repository)
        return f"no such file or folder; to get this data set from the Hub: {command}"
    remedy = from_hub(name.repository)
    repository = repo_folder_name(repo_id=name.repository, repo_type=MODEL)
    cached = Path(constants.HF_HUB_CACHE, repository).glob(f"snapshots/*/{_CONFIG}")
    folders = sorted((path.parent for path in cached), key=lambda path: path.stat().st_mtime)
    if folders:
        remedy = f"huggingface_hub's cache has one: {folders[-1]}"
    return f"no such folder; give a local folder in the Hugging Face layout ({remedy})"


def _model(repository: Repository, request: Mapping[str, Any], say: Say) -> Taken:
    """Fetches settings and tokenizer, then the weights of a model that can be trained."""
    settings = _settings(repository, say)
    if not request["imports"]:
        # Here: data sets need none of the slow imports.
        from penstock.models.surgery.hf import read_hf_config

        read_hf_config(repository.folder)  # refuses types of model that need code of the folder
    index = repository.folder / INDEX
    content = index.read_bytes() if INDEX in settings else b""
    weights = weights_of(repository.files, _fields(repository.folder / _CONFIG), content)
    repository.fetch(weights, say)
    return Taken(names=[*settings, *weights])


def _config(repository: Repository, request: Mapping[str, Any], say: Say) -> Taken:
    """Fetches ``config.json`` alone."""
    del request
    if _CONFIG not in repository.files:
        raise ConfigError(f"has no {_CONFIG}, so it is no model in the Hugging Face layout")
    repository.fetch([_CONFIG], say)
    return Taken(names=[_CONFIG])


def _tokenizer(repository: Repository, request: Mapping[str, Any], say: Say) -> Taken:
    """Fetches the files of a tokenizer, with the settings of its model."""
    del request
    return Taken(names=_settings(repository, say))


def _adapter(repository: Repository, request: Mapping[str, Any], say: Say) -> Taken:
    """Fetches an adapter in the files of PEFT."""
    del request
    lacking = [name for name in ADAPTER if name not in repository.files]
    if lacking:
        raise ConfigError(f"has no {lacking[0]}, so it is no adapter in PEFT's files")
    repository.fetch(ADAPTER, say)
    return Taken(names=ADAPTER)


def _data(repository: Repository, request: Mapping[str, Any], say: Say) -> Taken:
    """Fetches the files of a split."""
    readme = ""
    if _README in repository.files:
        repository.fetch([_README], say)
        readme = (repository.folder / _README).read_text(encoding="utf-8", errors="replace")
    files = data_files(repository.name, repository.files, readme, request["split"])
    repository.fetch(files.names, say)
    return Taken(names=files.names, place=files.place, split=files.split)


_USES: Mapping[str, Callable[[Repository, Mapping[str, Any], Say], Taken]] = {
    "model": _model,
    "config": _config,
    "tokenizer": _tokenizer,
    "adapter": _adapter,
    "data": _data,
}
"""Functions by the use that a key has for the files."""


def _settings(repository: Repository, say: Say) -> list[str]:
    if _CONFIG not in repository.files:
        raise ConfigError(f"has no {_CONFIG}, so it is no model in the Hugging Face layout")
    names = settings_of(repository.files)
    repository.fetch(names, say)
    return names


def _fields(path: Path) -> Mapping[str, Any]:
    try:
        fields = parse_json(path.read_bytes())
    except DAMAGED as error:
        raise ConfigError(f"its {path.name} is damaged ({type(error).__name__})") from error
    return fields if isinstance(fields, dict) else {}


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Answers a request; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock.models.hub.fetch", description=__doc__)
    parser.add_argument("request")
    parser.add_argument("--parent-pid", type=int)
    options = parser.parse_args(arguments)
    request = json.loads(options.request)
    # No list of other programs is asked for, and no request names this machine's software.
    constants.HF_HUB_DISABLE_TELEMETRY = True

    def work() -> None:
        _say(json.dumps({"answer": fetch(request, _say)}))

    return tool_main(work, Path(constants.HF_HUB_CACHE), options.parent_pid)


if __name__ == "__main__":
    sys.exit(main())

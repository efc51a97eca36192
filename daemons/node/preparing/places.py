"""Places of a run's inputs: paths that may change where the content is the same.

``RUN_DIR/places.json`` has a digest of the content at each place, from the time when the inputs
were made. A project that was moved or copied to another path or machine has the same content at
other places, and its run goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.config.schema import Config
from penstock.config.values import BYTE
from penstock.daemons.node.run_lock import former_home
from penstock.host.errors import ConfigError
from penstock.host.files import DAMAGED, holds_text, parse_json, write_atomically
from penstock.protocol.run.rundir import RunDirectory

FORMAT = 1
RECORD = "places.json"
PLACES = (
    *("model.path", "adapter.path", "data.path", "data.tokens", "data.tokenizer"),
    "data.eval_path",
)
"""Keys of inputs, which a run that has started must not change, but for data.eval_path."""
FILES = ("model.import_path", "schedule.file", "schedule.profile", "cluster.keys")
"""Keys of other files of a project."""
_OF_MODELS = frozenset((".json", ".safetensors", ".model", ".txt", ".jinja"))
"""Suffixes of the files that a run takes from a model folder."""
_WHOLE_BYTES = 16 << 20
"""Larger files are compared by samples: weights and texts may have terabytes."""
_SAMPLES, _SAMPLE_BYTES = 64, 256 << 10


def with_absolute_paths(config: Config) -> Config:
    """Returns the configuration with absolute paths, which mean the same in every process's working
    directory.

    Raises:
        ConfigError: the machine knows no home of a user that a path names with ``~``.
    """
    for key in (*PLACES, *FILES):
        path = _path_of(config, key)
        if path is not None:
            config = _with_path(config, key, _absolute(path))
    device, parameter = config.cluster.device, config.cluster.device_parameter
    if parameter is not None and parameter.endswith(".json"):
        device = f"{config.cluster.platform.name}:{_absolute(Path(parameter))}"
    return config.model_copy(
        update={"cluster": config.cluster.model_copy(update={"device": device})}
    )


def follow_move(config: Config, run_dir: Path) -> Config:
    """Returns the configuration with missing paths replaced, where the file moved together with the
    run directory.
    """
    before = former_home(run_dir)
    if before is None:
        return config
    for key in (*PLACES, *FILES):
        path = _path_of(config, key)
        if path is None or path.exists():
            continue
        moved = _moved(path, before, run_dir)
        if moved.exists():
            config = _with_path(config, key, moved)
    return config


def with_places(
    previous: Config, config: Config, run_dir: Path, progress: Callable[[str], None]
) -> Config:
    """Returns the configuration that the run had, with the paths of ``config`` where these lead to
    the same content.
    """
    record, before = _recorded(run_dir), former_home(run_dir)
    moved = []
    for key in PLACES:
        old, new = _path_of(previous, key), _path_of(config, key)
        if old is None or new is None or old == new:
            continue
        digest, current = record.get(key) or digest_of(key, old), digest_of(key, new)
        if digest is None or current is None:
            # No content is left to compare: the place must have moved together with the run.
            matches = before is not None and new == _moved(old, before, run_dir)
        else:
            matches = digest == current
        if matches:
            if key == "model.path" and previous.data.tokenizer == str(old):
                previous = _with_path(previous, "data.tokenizer", new)
            previous = _with_path(previous, key, new)
            moved.append(f"{key} = {str(new)!r}")
    if moved:
        progress(f"the run continues with the same content at other paths: {', '.join(moved)}")
    import_path = config.model.import_path
    model = previous.model.model_copy(update={"import_path": import_path})
    return previous.model_copy(update={"model": model})


def record_places(config: Config, run_dir: Path, *, anew: bool) -> None:
    """Writes the digests of the inputs that have none yet; of all inputs if they were made
    ``anew``.
    """
    record = {} if anew else dict(_recorded(run_dir))
    for key in PLACES:
        path = _path_of(config, key)
        if path is not None and key not in record and (digest := digest_of(key, path)) is not None:
            record[key] = digest
    text = json.dumps({"format": FORMAT, "digests": record}, indent=1)
    if not holds_text(run_dir / RECORD, text):
        write_atomically(run_dir / RECORD, text)


def move_tokens(directory: RunDirectory, tokens: Path) -> None:
    """Writes the place of ``data.tokens`` into ``data/meta.json``, where another one is named.
    Workers compare what they read there with the checksums of the tokens.
    """
    path = directory.path / "data" / "meta.json"
    fields = parse_json(path.read_bytes())
    splits = [fields[name] for name in ("train", "eval") if name in fields]
    if any(split["path"] != str(tokens) for split in splits):
        for split in splits:
            split["path"] = str(tokens)
        directory.remove_checksums()
        write_atomically(path, json.dumps(fields, indent=1))


def digest_of(key: str, path: Path) -> str | None:
    """Returns a digest of the file at a place, or of the files below a folder; None where nothing
    can be read. Hidden files are left out, and files of a model folder that no run takes. Of a file
    beyond 16 MiB the digest has size and samples.
    """
    suffixes = None if key.startswith("data.") and key != "data.tokenizer" else _OF_MODELS
    total = hashlib.sha256()
    empty = True
    try:
        for name, file in _files(path, suffixes):
            total.update(json.dumps([name, _file_digest(file)]).encode())
            empty = False
    except OSError:
        return None
    return None if empty else total.hexdigest()


def _files(path: Path, suffixes: frozenset[str] | None) -> Iterator[tuple[str, Path]]:
    """Yields the regular files at a path, and their names below it, in order."""
    if not path.is_dir():
        yield "", path
        return
    for folder, folders, names in os.walk(path, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder) / name
            taken = suffixes is None or file.suffix in suffixes
            if taken and not name.startswith(".") and file.is_file():
                yield str(file.relative_to(path)), file


def _file_digest(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _WHOLE_BYTES:
            return hashlib.sha256(file.read()).hexdigest()
        total.update(str(size).encode())
        for index in range(_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            total.update(file.read(_SAMPLE_BYTES))
    return total.hexdigest()


def _recorded(run_dir: Path) -> Mapping[str, str]:
    """Returns the digests that the run has; none for runs that older versions prepared."""
    with suppress(OSError, *DAMAGED):
        fields = parse_json((run_dir / RECORD).read_bytes())
        if fields["format"] == FORMAT:
            return {str(key): str(value) for key, value in fields["digests"].items()}
    return {}


def _moved(path: Path, before: Path, run_dir: Path) -> Path:
    """Returns the path with the same position relative to ``run_dir`` as ``path`` has to
    ``before``.
    """
    return Path(os.path.normpath(run_dir / os.path.relpath(path, before)))


def _path_of(config: Config, key: str) -> Path | None:
    section, _, name = key.partition(".")
    value = getattr(getattr(config, section), name, None)
    if value is None or value == BYTE or str(value).startswith("@"):
        return None
    return Path(value)


def _with_path(config: Config, key: str, path: Path) -> Config:
    section, _, name = key.partition(".")
    old: Any = getattr(config, section)
    value = type(getattr(old, name))(str(path))
    return config.model_copy(update={section: old.model_copy(update={name: value})})


def _absolute(path: Path) -> Path:
    """Returns an absolute path; ``~`` stands for the home of a user, as in a shell.

    Raises:
        ConfigError: the machine knows no home of that user.
    """
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"{path}: this user has no known home; give an absolute path") from error

"""The sharing of a run's model: recorded in the run, kept for other runs, or measured. No torch
until a measurement.

``RUN_DIR/model/sharing.json`` has the result for this run. ``$XDG_CACHE_HOME/penstock-sharing`` has
results by the content of the model's configuration, the rows' length, and the code that computes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from penstock.config.schema import Config
from penstock.host.errors import CapacityError, ConfigError
from penstock.host.files import DAMAGED, holds_text, parse_json, write_atomically
from penstock.host.trust import UntrustedError
from penstock.models.data.rows.sharing import Sharing
from penstock.models.data.token_sources import fingerprint_of
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.token_cache import check_private, token_cache_folder

RECORD = "model/sharing.json"
FOLDER_SUFFIX = "-sharing"

_MOST_ENTRIES = 256
_PACKAGES = ("torch", "transformers", "numpy")


def sharing_of(config: Config, run_dir: Path) -> Sharing:
    """Returns how samples of a prepared run's model can share rows. Measures for about a second
    where no result is known. A run that has started keeps its result.

    Raises:
        ConfigError: the model cannot be built.
    """
    if config.cluster.platform.builtin_model:
        return Sharing()
    path = run_dir / RECORD
    fields = _fields(path)
    if RunDirectory(run_dir).has_started:
        # Without a record an older Penstock prepared the run, which keeps its rows.
        return Sharing() if fields is None else Sharing.of(fields["sharing"])
    key = _key(config, run_dir)
    if fields is not None and key == fields["key"]:
        return Sharing.of(fields["sharing"])
    kept = None if config.model.imports else _kept(key)
    sharing = kept or _measured(config, run_dir)
    text = json.dumps({"key": key, "sharing": sharing.to_json()}, indent=1)
    if not holds_text(path, text):
        write_atomically(path, text)
    if kept is None and not config.model.imports:
        _keep(key, text)
    return sharing


def _measured(config: Config, run_dir: Path) -> Sharing:
    # Imported here: seconds, which runs with a known result need not take.
    from penstock.models.apart.measure import measure
    from penstock.models.surgery.hf import import_modules, read_hf_config
    from penstock.models.surgery.skeleton import build_skeleton

    import_modules(config)
    hf_config = read_hf_config(run_dir / "model")
    return measure(hf_config, build_skeleton(hf_config), config.data.sequence_length)


def _key(config: Config, run_dir: Path) -> str:
    """Returns a checksum of all that decides the result: model, length of rows, and code. The code
    of ``model.imports`` is unknown, so its results stay in their runs.
    """
    return fingerprint_of(
        (run_dir / "model" / "config.json").read_text(encoding="utf-8"),
        config.data.sequence_length,
        list(config.model.imports),
        [version(package) for package in _PACKAGES],
        _code(),
    )


@cache
def _code() -> str:
    """Returns a checksum of Penstock's code of models."""
    total = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        total.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def _folder() -> Path | None:
    tokens = token_cache_folder()
    return None if tokens is None else tokens.with_name(tokens.name + FOLDER_SUFFIX)


def _kept(key: str) -> Sharing | None:
    """Returns a kept result; None without a usable one."""
    folder = _folder()
    if folder is None:
        return None
    with suppress(OSError, UntrustedError):
        check_private(folder.resolve())
        fields = _fields(folder / f"{key}.json")
        if fields is not None and fields["key"] == key:
            return Sharing.of(fields["sharing"])
    return None


def _keep(key: str, text: str) -> None:
    """Keeps a result, and removes the oldest of too many. Without a usable folder does nothing."""
    folder = _folder()
    if folder is None:
        return
    with suppress(OSError, UntrustedError, CapacityError, ConfigError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(folder.resolve())
        write_atomically(folder / f"{key}.json", text)
        entries = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in entries[:-_MOST_ENTRIES]:
            path.unlink(missing_ok=True)


def _fields(path: Path) -> Mapping[str, Any] | None:
    """Returns the fields of a record; None where it is missing or damaged."""
    with suppress(OSError, *DAMAGED):
        fields = parse_json(path.read_bytes())
        Sharing.of(fields["sharing"])
        if isinstance(fields["key"], str):
            return dict(fields)
    return None

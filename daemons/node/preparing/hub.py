"""Names of the Hugging Face Hub in a configuration: fetched, pinned to a commit, made local paths.

A process of its own fetches the files into huggingface_hub's cache
(:mod:`penstock.models.hub.fetch`). ``RUN_DIR/hub.json`` has the commits and files of a run, so a
resume reads the same files without a request. A configuration without such names starts no process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from penstock.config.data import RecordsConfig
from penstock.config.hub_names import HubName, remote_name
from penstock.config.schema import Config
from penstock.daemons.node.preparing.tool import run_tool
from penstock.daemons.preload.starting import Spawning
from penstock.host.errors import PenstockError
from penstock.host.files import DAMAGED, holds_text, parse_json, write_atomically

RECORD = "hub.json"
FORMAT = 1
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_ON = ("1", "ON", "YES", "TRUE")
"""Values of a variable that is switched on, as huggingface_hub reads them."""

WHOLE, CONFIG, TOKENIZER, ADAPTER, DATA = "model", "config", "tokenizer", "adapter", "data"
"""Uses of files: a model with weights, ``config.json``, settings and tokenizer, and others."""

Progress = Callable[[str], None]
Records = TypeVar("Records", bound=RecordsConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Files of one key. ``folder``: the folder of the commit. ``place``: the value of the key below
    it. ``part``: the part of the files that the key's split still names.
    """

    use: str
    name: str
    split: str | None
    commit: str
    folder: str
    place: str
    part: str | None
    files: Mapping[str, int]

    @property
    def path(self) -> Path:
        """The local path that stands for the name."""
        return Path(self.folder) / self.place

    @property
    def is_present(self) -> bool:
        """True if all files are in the cache, with the sizes that the Hub listed."""
        with suppress(OSError):
            return all(
                (Path(self.folder) / name).stat().st_size == size
                for name, size in self.files.items()
            )
        return False


@dataclass(slots=True, kw_only=True)
class HubFiles:
    """Files that a run, or one command, has fetched."""

    progress: Progress
    imports: bool = False
    fetched: list[Fetched] = field(default_factory=list)
    earlier: tuple[Fetched, ...] = ()

    @classmethod
    def of_run(cls, config: Config, run_dir: Path, progress: Progress) -> HubFiles:
        """Returns the files of a run, which its record pins."""
        imports = bool(config.model.imports)
        return cls(progress=progress, imports=imports, earlier=tuple(_recorded(run_dir)))

    def local(
        self, key: str, value: str | Path, use: str, split: str | None = None
    ) -> Fetched | None:
        """Returns the files that the value of a key names; None for a local path, and for all names
        where requests are switched off.

        Raises:
            ConfigError: the name does not exist, or cannot be read or fetched.
            CapacityError: the disk is too small.
        """
        name = remote_name(value, inside=use == DATA)
        if name is None:
            return None
        fetched = self._known(str(name), use, split) or self._fetch(key, name, use, split)
        if fetched is not None:
            if fetched not in self.fetched:
                self.fetched.append(fetched)
            self.progress(f"{key}: {name} of the Hub, at commit {fetched.commit}")
        return fetched

    def write(self, run_dir: Path) -> None:
        """Writes the record of a run that has names of the Hub, or had some."""
        if not self.fetched and not self.earlier:
            return
        kept = [each for each in self.earlier if each not in self.fetched]
        entries = [_fields(each) for each in (*self.fetched, *kept)]
        text = json.dumps({"format": FORMAT, "fetched": entries}, indent=1)
        if not holds_text(run_dir / RECORD, text):
            write_atomically(run_dir / RECORD, text)

    def _known(self, name: str, use: str, split: str | None) -> Fetched | None:
        for each in (*self.fetched, *self.earlier):
            if (each.name, each.use, each.split) == (name, use, split) and each.is_present:
                return each
        return None

    def _fetch(self, key: str, name: HubName, use: str, split: str | None) -> Fetched | None:
        if any(os.environ.get(variable, "").upper() in _ON for variable in _OFFLINE):
            return None  # the check of the path names the mistake
        request = {
            **{"key": key, "use": use, "name": str(name), "split": split},
            **{"commit": self._commit(name, use), "imports": self.imports},
        }
        answers: list[Mapping[str, Any]] = []

        def take(line: str) -> None:
            fields = None
            with suppress(*DAMAGED):
                fields = parse_json(line)
            if isinstance(fields, dict) and "answer" in fields:
                answers.append(fields["answer"])
            else:
                self.progress(line)

        run_tool(
            "penstock.models.hub.fetch", json.dumps(request), progress=take, starter=Spawning()
        )
        if not answers:
            raise PenstockError(f"{key} = {str(name)!r}: the fetch ended without a result")
        answer = answers[-1]
        return Fetched(
            use=use,
            name=str(name),
            split=split,
            commit=answer["commit"],
            folder=answer["folder"],
            place=answer["place"],
            part=answer["split"],
            files=answer["files"],
        )

    def _commit(self, name: HubName, use: str) -> str | None:
        """Returns the commit of an earlier fetch of the same revision."""
        for each in (*self.fetched, *self.earlier):
            other = HubName.parse(each.name)
            assert other is not None
            same = (other.repository, other.revision) == (name.repository, name.revision)
            if same and (each.use == DATA) == (use == DATA):
                return each.commit
        return None


def fetched_config(config: Config, progress: Progress, *, model: str = WHOLE) -> Config:
    """Returns the configuration of a command without a run, with local paths in place of names of
    the Hub. ``model`` is the use of ``model.path``.

    Raises:
        ConfigError: see :meth:`HubFiles.local`.
        CapacityError: the disk is too small.
    """
    hub = HubFiles(progress=progress, imports=bool(config.model.imports))
    return with_hub_files(config, hub, model=model)


def with_hub_files(config: Config, hub: HubFiles, *, model: str = WHOLE) -> Config:
    """Returns the configuration with local paths in place of names of the Hub, which are fetched.
    ``model`` is the use of ``model.path``.

    Raises:
        ConfigError: see :meth:`HubFiles.local`.
        CapacityError: the disk is too small.
    """
    uses = {"path": model} if not config.cluster.platform.builtin_model else {}
    config = _with_section(config, "model", uses, hub)
    if config.adapter is not None:
        config = _with_section(config, "adapter", {"path": ADAPTER}, hub)
    keys = {"path": DATA, "eval_path": DATA, "tokenizer": TOKENIZER}
    config = _with_section(config, "data", keys, hub)
    sources = tuple(_with_records("data.sources", each, hub) for each in config.data.sources)
    sets = tuple(_with_records("eval.sets", each, hub) for each in config.eval.sets)
    if sources != config.data.sources:
        data = config.data.model_copy(update={"sources": sources})
        config = config.model_copy(update={"data": data})
    if sets != config.eval.sets:
        evaluation = config.eval.model_copy(update={"sets": sets})
        config = config.model_copy(update={"eval": evaluation})
    return config


def with_hub_model(config: Config, progress: Progress) -> Config:
    """Returns the configuration with a local model, adapter and tokenizer, without the model's
    weights and data.
    """
    hub = HubFiles(progress=progress, imports=bool(config.model.imports))
    config = _with_section(config, "model", {"path": TOKENIZER}, hub)
    if config.adapter is not None:
        config = _with_section(config, "adapter", {"path": ADAPTER}, hub)
    return _with_section(config, "data", {"tokenizer": TOKENIZER}, hub)


def local_folder(option: str, path: Path, use: str, progress: Progress) -> Path:
    """Returns a local path for the value of a command's option: the path itself, or the folder of a
    name of the Hub.

    Raises:
        ConfigError: see :meth:`HubFiles.local`.
        CapacityError: the disk is too small.
    """
    fetched = HubFiles(progress=progress).local(option, path, use)
    return path if fetched is None else fetched.path


def _with_section(config: Config, section: str, uses: Mapping[str, str], hub: HubFiles) -> Config:
    """Returns the configuration with local paths in the keys of a section."""
    old: Any = getattr(config, section)
    changed: dict[str, Any] = {}
    for key, use in uses.items():
        value = getattr(old, key)
        fetched = None if value is None else hub.local(f"{section}.{key}", value, use)
        if fetched is not None:
            changed[key] = type(value)(str(fetched.path))
    return (
        config.model_copy(update={section: old.model_copy(update=changed)}) if changed else config
    )


def _with_records(key: str, source: Records, hub: HubFiles) -> Records:
    """Returns a source of records with a local path, and with the part that its split names."""
    if source.path is None:
        return source
    fetched = hub.local(key, source.path, DATA, source.split)
    if fetched is None:
        return source
    return source.model_copy(update={"path": str(fetched.path), "split": fetched.part})


def _fields(fetched: Fetched) -> dict[str, Any]:
    return {name: getattr(fetched, name) for name in Fetched.__slots__}


def _recorded(run_dir: Path) -> Sequence[Fetched]:
    """Returns the files of a run's record; none without one."""
    with suppress(OSError, *DAMAGED):
        fields = parse_json((run_dir / RECORD).read_bytes())
        if fields["format"] == FORMAT:
            return [Fetched(**each) for each in fields["fetched"]]
    return []

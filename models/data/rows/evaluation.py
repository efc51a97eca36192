"""The data of evaluation sets. Each set has a folder ``eval-NAME`` in the run's ``data`` folder.

Readers, tokenizer and chat template are those of the training data.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config.data import SourceConfig
from penstock.config.evaluation import EVAL, EvalConfig, EvaluationSetConfig
from penstock.config.schema import Config
from penstock.config.values import NEXT_TOKEN, WEIGHTED
from penstock.host.errors import ConfigError
from penstock.host.files import DAMAGED
from penstock.models.data.chunks import Progress
from penstock.models.data.marks import Marks
from penstock.models.data.rows.packing import Packing
from penstock.models.data.rows.references import has_references
from penstock.models.data.rows.registry import registered
from penstock.models.data.rows.row_file import RowLayout
from penstock.models.data.rows.sharing import Measured
from penstock.models.data.rows.sources import RunSources, makes_rows, sources_of
from penstock.models.data.tokenizer import Tokenizer

_OWN_PLACE = {"path": "", "split": None, "limit": None, "weight": 1.0}
"""Keys of a source that do not say how its files are read."""

_KEYS_OF_TRAINING = re.compile(
    r"\bdata\.(path|tokens|sources\[0\](\.(?P<key>path|split))?)(?![\w.\[])"
)


def with_training_data(config: Config, source: SourceConfig) -> Config:
    """Returns a configuration with ``source`` as its training data, and without evaluations.

    Without keys about its reading, the source is read as the configuration's own sources, if all
    of these are read in the same way. Its records need no weights: evaluations do not weigh.

    Raises:
        ConfigError: the source is an entry of a registry that cannot be read.
    """
    data = config.data
    pairs = data.has_pairs
    if source.registry is not None:
        source = registered("data.sources[0]", source, pairs=pairs)
    silent = source.model_copy(update=_OWN_PLACE) == SourceConfig(path="")
    part = {"split": source.split, "limit": source.limit}
    is_whole_place = silent and set(part.values()) == {None}
    changes: dict[str, Any] = {"path": source.path, "sources": (), "eval_path": None}
    if data.tokens is not None:
        if not is_whole_place:
            raise ConfigError(
                "data.path: the run trains on numbers of data.tokens, and takes files of such"
                " numbers alone; give path without other keys"
            )
        changes = {"tokens": Path(str(source.path)), "eval_path": None}
    elif data.sources or not is_whole_place:
        read = [
            registered("data.sources", s, pairs=pairs) if s.registry else s for s in data.sources
        ]
        forms = [each.model_copy(update=_OWN_PLACE) for each in read]
        if silent and forms and all(form == forms[0] for form in forms):
            source = forms[0].model_copy(update={"path": source.path, **part})
        changes |= {"path": None, "sources": (source,)}
    if data.objective == WEIGHTED:
        changes["objective"] = NEXT_TOKEN
    train = config.train.model_copy(update={"eval_every": 0})
    return config.model_copy(
        update={"data": data.model_copy(update=changes), "train": train, "eval": EvalConfig()}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPreparation:
    """The preparation of a run's sets. ``packs``: rows of the training data hold several samples,
    so the model keeps samples apart. ``keeps``: the run has started, and keeps its data.
    ``measured`` returns how samples of the model can share rows.
    """

    config: Config
    tokenizer: Tokenizer | None
    marks: Marks | None
    run_dir: Path
    packs: bool
    keeps: bool
    progress: Progress
    measured: Measured

    def needed(self, entries: Mapping[str, Any]) -> dict[str, EvaluationSetConfig]:
        """Returns the sets without usable files, by split. ``entries``: those of ``meta.json``.

        Raises:
            ConfigError: the files of a set cannot be found or read.
        """
        sets = {each.key: each for each in self.config.eval.sets if each.has_files}
        return {split: each for split, each in sets.items() if not self._has(entries, each)}

    def remove_others(self) -> None:
        """Removes the folders of sets that the configuration no longer has."""
        folders = {_folder(each) for each in self.config.eval.sets}
        for path in (self.run_dir / "data").glob(f"{EVAL}-*"):
            if path.name not in folders:
                shutil.rmtree(path, ignore_errors=True)

    def make(self, each: EvaluationSetConfig) -> dict[str, Any]:
        """Makes the files of a set; returns its entry in ``meta.json``.

        Raises:
            ConfigError: a record cannot be read, or no token of the set counts.
        """
        folder = _folder(each)
        directory = self.run_dir / "data" / folder
        directory.mkdir(exist_ok=True)
        with SetNaming(each.name) as naming:
            sources = self._sources(each, naming.line(self.progress))
            made = sources.write(directory)["train"]
            self._check(made, each)
            entry = {**made, "path": str(Path(folder) / made["path"])}
            entry["sums"] = {**made["sums"], "path": str(Path(folder) / made["sums"]["path"])}
            entry["fingerprint"] = sources.fingerprint
        self.progress(self._line(each, made))
        return entry

    def _has(self, entries: Mapping[str, Any], each: EvaluationSetConfig) -> bool:
        entry = entries.get(each.key)
        try:
            if entry is None or not is_whole(self.run_dir / "data", entry):
                return False
        except DAMAGED:
            return False
        if self.keeps:
            return True
        with SetNaming(each.name) as naming:
            sources = self._sources(each, naming.line(self.progress))
            return bool(sources.fingerprint == entry.get("fingerprint"))

    def _sources(self, each: EvaluationSetConfig, progress: Progress) -> RunSources:
        assert each.source is not None
        config = with_training_data(self.config, each.source)
        if config.data.packing == Packing.WRAPPED.value:
            config = _packed(config, "auto")
        rows = self.tokenizer is not None and makes_rows(config)
        if rows and not self.packs:
            # Not each type of model keeps samples of a row apart, and this run does not need it.
            config = _packed(config, Packing.NONE.value)
        return sources_of(
            config,
            self.tokenizer,
            self.marks,
            self.run_dir,
            progress,
            self.measured,
            makes_rows=rows,
        )

    def _check(self, made: Mapping[str, Any], each: EvaluationSetConfig) -> None:
        length = self.config.data.sequence_length
        if RowLayout.of(dict(made)) is None and made["num_tokens"] <= length:
            raise ConfigError(
                f"data.path = {each.path!r}: has {made['num_tokens']} tokens, of which none counts:"
                f" one sequence of data.sequence_length = {length} takes {length + 1}; give a"
                " larger file"
            )

    def _line(self, each: EvaluationSetConfig, made: Mapping[str, Any]) -> str:
        layout = RowLayout.of(dict(made))
        if layout is None:
            rows = (made["num_tokens"] - 1) // self.config.data.sequence_length
            return f"eval.sets: set {each.name}: {made['num_tokens']:,} tokens, {rows:,} rows"
        return (
            f"eval.sets: set {each.name}: {made['tally']['records']:,} records, {layout.samples:,}"
            f" samples in {layout.rows:,} rows; {layout.counted:,} of {layout.tokens:,} tokens"
            " count"
        )


def is_whole(directory: Path, entry: Mapping[str, Any]) -> bool:
    """Returns whether the file of a split is there in full.

    Raises:
        KeyError, TypeError, ValueError: the entry is damaged.
    """
    path = directory / entry["path"]
    layout = RowLayout.of(dict(entry))
    if layout is not None:
        whole = path.is_file() and path.stat().st_size == layout.num_bytes
        return bool(whole and has_references(directory, entry, layout))
    end = entry["first_token"] + entry["num_tokens"]
    size = end * np.dtype(entry["token_dtype"]).itemsize
    return path.is_file() and bool(path.stat().st_size >= size)


def _folder(each: EvaluationSetConfig) -> str:
    return f"{EVAL}-{each.name}"


def _packed(config: Config, packing: str) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"packing": packing})})


class SetNaming:
    """Names a set in errors inside the block, which name keys of the training data otherwise."""

    def __init__(self, name: str) -> None:
        self._name = name

    def line(self, progress: Progress) -> Progress:
        """Returns a receiver of lines that names the set, too."""
        return lambda text: progress(self._named(text))

    def __enter__(self) -> SetNaming:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConfigError):
            raise ConfigError(self._named(str(error))) from error

    def _named(self, text: str) -> str:
        plain = _KEYS_OF_TRAINING.sub(lambda match: match["key"] or "path", text).removeprefix(
            "data: "
        )
        return f"eval.sets: set {self._name}: {plain}"

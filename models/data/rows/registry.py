"""LLaMA-Factory's registry of data sets (``dataset_info.json``) as sources. No torch.

An entry names a file, a form of records (``alpaca``, ``sharegpt`` or ``openai``), columns and tags
of roles. Once an entry has ``columns``, names without an entry there have no column. Tags that are
left out keep their defaults, and roles without a tag stay known.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.data import SourceConfig
from penstock.config.splits import Split
from penstock.host.errors import ConfigError, reason
from penstock.host.inputs import read_text
from penstock.models.data.chat.requests import ASSISTANT, SYSTEM, TOOL, USER, names, shown
from penstock.models.data.reading.saved_datasets import SPLIT

MAX_BYTES = 16 << 20
"""Most bytes of a registry."""

_STATE = "state.json"
_ALPACA: Mapping[str, str] = {"prompt": "instruction", "query": "input", "response": "output"}
"""Columns of alpaca records without ``columns``."""

_CHAT: Mapping[str, str] = {"messages": "conversations"}
_TAGS: Mapping[str, tuple[str, str]] = {
    "user_tag": ("human", USER),
    "assistant_tag": ("gpt", ASSISTANT),
    "observation_tag": ("observation", TOOL),
    "function_tag": ("function_call", "function_call"),
    "system_tag": ("system", SYSTEM),
}
"""Default tags of roles, and the roles of :class:`RecordForm`."""

_FORMS = ("alpaca", "sharegpt", "openai")
_UNREAD = ("images", "videos", "audios", "kto_tag")
_HUBS: Mapping[str, str] = {
    "hf_hub_url": "hf download {id} --repo-type dataset --local-dir {folder}",
    "ms_hub_url": "modelscope download --dataset {id} --local_dir {folder}",
}
"""Keys of an entry that name a data set of a hub, and commands that fetch the data set."""


def registered(key: str, source: SourceConfig, *, pairs: bool = False) -> SourceConfig:
    """Returns a source of a registry with path, format, columns and roles. ``key`` names the source
    in errors. ``pairs``: the run trains on pairs of answers, which entries with ``ranking`` are.

    Raises:
        ConfigError: the file is no registry, has no such entry, or the entry cannot be read.
    """
    path, name = Path(str(source.registry)), str(source.name)
    entry = _Entry(
        place=f"{key}: {path}: {name}", fields=_entry(key, path, name), folder=path.parent
    )
    limits = [limit for limit in (source.limit, entry.limit()) if limit is not None]
    return source.model_copy(
        update={
            **entry.form(pairs=pairs),
            "path": entry.path(),
            "split": entry.split(),
            "limit": min(limits, default=None),
            "registry": None,
            "name": None,
        }
    )


def _entry(key: str, path: Path, name: str) -> Mapping[str, Any]:
    """Returns an entry of a registry.

    Raises:
        ConfigError: the file is no registry, or has no such entry.
    """
    place = f"{key}.registry = {str(path)!r}"
    if (path.parent / _STATE).is_file():
        raise ConfigError(
            f"{place}: {_STATE} in its folder marks a dataset that save_to_disk wrote; set"
            f" path: {path.parent}"
        )
    try:
        value = json.loads(read_text(path, MAX_BYTES))
    except OSError as error:
        raise ConfigError(f"{place}: cannot read it: {reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: holds {shown(value)}; needs an object: name -> data set")
    if name not in value:
        raise ConfigError(f"{key}.name = {name!r}: {path} has {names(list(value))}")
    if not isinstance(value[name], dict):
        raise ConfigError(f"{key}: {path}: {name} = {shown(value[name])}: needs an object")
    return {key: field for key, field in value[name].items() if field is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """An entry of a registry in ``folder``; ``place`` names the entry in errors."""

    place: str
    fields: Mapping[str, Any]
    folder: Path

    def path(self) -> str:
        """Returns the file or folder of the records.

        Raises:
            ConfigError: the records are not on this machine.
        """
        for key, command in _HUBS.items():
            if key in self.fields:
                repository = self._text(self.fields, key, "")
                folder = self.folder / repository.rpartition("/")[2]
                fetch = command.format(id=repository, folder=folder)
                raise self._refused(
                    key,
                    repository,
                    f"the data set is on a hub; run `{fetch}`, and put file_name in place of {key}",
                )
        for key in ("script_url", "cloud_file_name"):
            if key in self.fields:
                raise self._refused(
                    key, self.fields[key], "is not read; export the records, and give file_name"
                )
        if "file_name" not in self.fields:
            raise ConfigError(f"{self.place}: has no file_name; name the file of the records")
        # The records' own limit: LLaMA-Factory joins the names, so an absolute one replaces it.
        return os.path.join(self.folder, self._text(self.fields, "file_name", ""))

    def split(self) -> str | None:
        """Returns the part of the records to take; None for all.

        Raises:
            ConfigError: the split is another one than train, or has an unknown form.
        """
        text = self._text(self.fields, "split", SPLIT)
        try:
            split = Split.parse(text)
        except ValueError as error:
            raise self._refused("split", text, str(error)) from error
        if split.name != SPLIT:
            raise self._refused(
                "split", text, f"a file has the split {SPLIT} alone; take a part of it"
            )
        return text.removeprefix(SPLIT) or None

    def limit(self) -> int | None:
        """Returns the number of records to take; None for all.

        Raises:
            ConfigError: the number is no positive integer.
        """
        count = self.fields.get("num_samples")
        if count is None:
            return None
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise self._refused("num_samples", count, "needs an integer of at least 1")
        return count

    def form(self, *, pairs: bool) -> dict[str, Any]:
        """Returns format, columns and roles.

        Raises:
            ConfigError: the form is unknown, or its records do not train a language model alone.
        """
        form = self._text(self.fields, "formatting", "alpaca")
        if form not in _FORMS:
            raise self._refused("formatting", form, f"accepted are {names(_FORMS)}")
        ranking = self.fields.get("ranking", False)
        if not isinstance(ranking, bool) or ranking != pairs:
            remedy = (
                "data.objective dpo, orpo and simpo read pairs of answers; set ranking: true, and"
                " columns chosen and rejected"
                if pairs
                else "pairs of answers train with data.objective dpo, orpo or simpo; set one, or"
                " map the chosen answer to a response without ranking"
            )
            raise self._refused("ranking", ranking, remedy)
        columns = self._mapping("columns")
        for name in _UNREAD:
            if columns is not None and columns.get(name) is not None:
                raise self._refused(f"columns.{name}", columns[name], "only texts are read")
        if form != "alpaca":
            made = self._chat(columns)
        elif pairs:
            names_ = ("prompt", "query", "system", "history")
            made = {"columns": {**self._columns(names_, _ALPACA), **self._tools()}, "roles": {}}
            made["format"] = "alpaca"
        else:
            made = self._alpaca(columns)
        return {**made, "columns": {**made["columns"], **self._answers()}} if pairs else made

    def _answers(self) -> dict[str, str | None]:
        """Returns the columns of two answers.

        Raises:
            ConfigError: the entry names none.
        """
        columns = self._columns(("chosen", "rejected"), {})
        missing = [name for name, column in columns.items() if column is None]
        if missing:
            raise ConfigError(
                f"{self.place}: ranking = True: columns has no {missing[0]}; name the columns of"
                " both answers, such as chosen and rejected"
            )
        return columns

    def _alpaca(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        columns = self._columns(("prompt", "query", "response", "system", "history"), _ALPACA)
        if given is None or columns["response"] is not None:
            return {"format": "alpaca", "columns": {**columns, **self._tools()}, "roles": {}}
        if columns["prompt"] is None:
            raise ConfigError(
                f"{self.place}: columns has neither prompt nor response; name the columns of both,"
                " or prompt alone for plain text"
            )
        rest = [name for name in ("query", "system", "history") if columns[name] is not None]
        if rest:
            raise self._refused(
                f"columns.{rest[0]}", columns[rest[0]], "needs a column for response, too"
            )
        # Text to continue: LLaMA-Factory's pretraining has the prompt alone.
        return {"format": "text", "columns": {"text": columns["prompt"]}, "roles": {}}

    def _chat(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        columns = self._columns(("messages", "system"), _CHAT)
        if columns["messages"] is None:
            raise ConfigError(
                f"{self.place}: columns has no messages; name the column with the messages"
            )
        tags = self._mapping("tags") or {}
        keys = {
            "role": self._text(tags, "role_tag", "from"),
            "content": self._text(tags, "content_tag", "value"),
        }
        roles = {self._text(tags, tag, default): role for tag, (default, role) in _TAGS.items()}
        return {
            "format": "chat",
            "columns": {**columns, "conversations": None, **self._tools(), **keys},
            "roles": roles,
        }

    def _columns(
        self, wanted: tuple[str, ...], defaults: Mapping[str, str]
    ) -> dict[str, str | None]:
        """Returns the columns of names; None for a name without a column."""
        given = self._mapping("columns")
        if given is None:
            return {name: defaults.get(name) for name in wanted}
        return {name: self._text(given, name, "", "columns.") or None for name in wanted}

    def _tools(self) -> dict[str, str | None]:
        """Returns the columns that a conversation's template reads in addition to messages."""
        return {**self._columns(("tools",), {}), "chat_template_kwargs": None}

    def _mapping(self, key: str) -> Mapping[str, Any] | None:
        value = self.fields.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._refused(key, value, "needs an object: name -> text")
        return value

    def _text(self, fields: Mapping[str, Any], key: str, default: str, before: str = "") -> str:
        value = fields.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or not value:
            raise self._refused(before + key, value, "needs a text")
        return value

    def _refused(self, key: str, value: Any, remedy: str) -> ConfigError:
        return ConfigError(f"{self.place}: {key} = {shown(value)}: {remedy}")

"""Entries of Axolotl's ``datasets``, ``test_datasets`` and ``pretraining_dataset`` as sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.client.convert.hugging_face import hub_data, split_key
from penstock.client.convert.keys import Effect, ValueKind
from penstock.client.convert.reading import KeyReading
from penstock.config.hub_names import hub_name
from penstock.config.values import ORPO

_PROPERTIES: Mapping[str, tuple[str, ...]] = {
    "message_field_role": ("role",),
    "message_field_content": ("content",),
}
_ROLES: Mapping[str, tuple[str, ...]] = {
    "user": ("human", "user"),
    "assistant": ("gpt", "assistant"),
    "system": ("system",),
    "tool": ("tool",),
}


_ANSWERS = ("chosen", "rejected")
_TALKS = ("messages", "conversations")


class AxolotlEntry:
    """An entry of ``datasets``. Each key is removed when it is read."""

    def __init__(self, reading: KeyReading, place: str, fields: dict[str, Any]) -> None:
        self._reading, self._place, self._fields = reading, place, fields

    @classmethod
    def of(cls, reading: KeyReading, number: int, item: Any, key: str = "datasets") -> AxolotlEntry:
        """Returns an entry of the list ``key``.

        Raises:
            ConfigError: the entry is no mapping.
        """
        place = f"{key}[{number}]"
        fields = reading.typed(place, ValueKind.MAPPING, item)
        return cls(reading, place, {k: v for k, v in fields.items() if v is not None})

    def source(self, default_split: str = "train") -> dict[str, Any]:
        """Returns the source, and drops the keys that have no place.

        Raises:
            ConfigError: the entry has no path, or a value has another type.
        """
        split = self._take("split", ValueKind.TEXT) or default_split
        source: dict[str, Any] = {"path": self._path()}
        source |= split_key(self._reading, f"{self._place}.split", source["path"], split)
        kind = self._fields.pop("type", None)
        if self._reading.get("rl"):
            return self._finished(source | self._pair(kind))
        match kind:
            case "chat_template":
                source |= {"format": "chat", **self._chat()}
            case "alpaca":
                source["format"] = "stanford"
            case "completion":
                source["format"] = "text"
                self._drop("type", kind, "Axolotl splits long texts; set data.too_long: split")
                if (column := self._take("field", ValueKind.TEXT)) is not None:
                    source["columns"] = {"text": column}
            case None:
                source["format"] = "tokens"
            case "input_output":
                self._drop(
                    "type",
                    kind,
                    "no format encodes each of segments alone and adds no tokens; write records of"
                    " input_ids and labels (-100 where label is false), and set format: tokens",
                )
            case _:
                self._drop(
                    "type",
                    kind,
                    "only chat_template, alpaca, completion and prepared tokens (no type) are"
                    " converted",
                )
        return self._finished(source)

    def texts(self) -> dict[str, Any]:
        """Returns the source of texts, and drops the keys that have no place.

        Raises:
            ConfigError: the entry has no path, or a value has another type.
        """
        source: dict[str, Any] = {"path": self._path(), "format": "text"}
        if (column := self._take("text_column", ValueKind.TEXT)) not in (None, "text"):
            source["columns"] = {"text": column}
        if self._fields.get("type") in ("pretrain", "completion"):
            self._fields.pop("type")
        return self._finished(source)

    def _pair(self, kind: Any) -> dict[str, Any]:
        """Returns format, columns and roles of pairs of answers.

        Raises:
            ConfigError: the type has a text of its own, or a value has another type.
        """
        orpo = self._reading.get("rl") == ORPO
        if isinstance(kind, dict) and not orpo:
            return {"format": "preference", "columns": self._user_defined(kind)}
        if kind not in (None, "chat_template.argilla") and orpo:
            raise self._reading.refused(
                f"{self._place}.type",
                kind,
                "rl: orpo has chat_template.argilla and records of prompt, chosen and rejected (no"
                " type); use one of them",
            )
        form = "chat_template.argilla_chat" if orpo and kind else kind
        match form:
            case None | "passthrough" | "passthrough.default":
                return {"format": "preference"}
            case "chat_template" | "chat_template.default" | "chat_template.argilla_chat":
                made = self._chat()
                for name in _ANSWERS:
                    made["columns"][name] = self._take(f"field_{name}", ValueKind.TEXT) or name
                self._drop(
                    "type",
                    kind,
                    "Axolotl cuts the template's text behind an answer and adds the end token, and"
                    " Penstock takes the template's text; compare by penstock data",
                )
                if form != "chat_template.argilla_chat":
                    return {"format": "chat", **made}
                made["columns"] = {k: v for k, v in made["columns"].items() if k not in _TALKS}
                return {"format": "preference", **made}
        raise self._reading.refused(
            f"{self._place}.type",
            kind,
            "only chat_template, user-defined fields and records of prompt, chosen and rejected (no"
            " type) are converted; write such records, as texts or messages",
        )

    def _user_defined(self, kind: dict[str, Any]) -> dict[str, str]:
        """Returns the columns of a mapping of fields.

        Raises:
            ConfigError: a field has a form of its own, or a value has another type.
        """
        columns = {}
        for name in ("prompt", *_ANSWERS):
            place = f"{self._place}.type.field_{name}"
            column = self._reading.typed(place, ValueKind.TEXT, kind.get(f"field_{name}")) or name
            form = kind.get(f"{name}_format")
            if form and form not in (f"{{{name}}}", f"{{{column}}}"):
                raise self._reading.refused(
                    f"{self._place}.type.{name}_format",
                    form,
                    "no format has such a text; write the texts as prompt, chosen and rejected",
                )
            columns[name] = column
        known = {f"field_{name}" for name in (*columns, "system")}
        known |= {f"{name}_format" for name in columns}
        for key, value in kind.items():
            if key not in known and value is not None:
                self._drop(f"type.{key}", value, "the key has no place in data.sources")
        return columns

    def _finished(self, source: dict[str, Any]) -> dict[str, Any]:
        """Returns the source, and drops the keys that are left."""
        for key, value in self._fields.items():
            self._drop(key, value, "the key has no place in data.sources")
        return source

    def _path(self) -> str:
        path: str = self._take("path", ValueKind.TEXT) or ""
        files = self._fields.pop("data_files", None)
        self._take("ds_type", ValueKind.TEXT)
        if isinstance(files, list) and len(files) == 1:
            files = files[0]
        if not path:
            raise self._reading.refused(self._place, self._fields, "needs a path")
        if isinstance(files, str) and path in ("json", "csv", "parquet", "text", "arrow"):
            return files
        if files is not None:
            self._drop("data_files", files, "list each file as a source")
        elif hub_name(path):
            hub_data(self._reading, f"{self._place}.path", path)
        return path

    def _chat(self) -> dict[str, Any]:
        """Returns columns and roles of a conversation."""
        columns: dict[str, str | None] = {"conversations": None}
        columns["messages"] = self._take("field_messages", ValueKind.TEXT) or "messages"
        if (tools := self._take("field_tools", ValueKind.TEXT)) is not None:
            columns["tools"] = tools
        keys = {"role": "role", "content": "content"}
        for name, targets in _PROPERTIES.items():
            keys |= dict.fromkeys(targets, self._take(name, ValueKind.TEXT) or keys[targets[0]])
        mapping = self._take("message_property_mappings", ValueKind.MAPPING) or {}
        others = {name: key for name, key in mapping.items() if name not in keys and name != key}
        if others:
            self._drop("message_property_mappings", others, "only role and content are renamed")
        keys |= {
            name: self._reading.typed(f"{self._place}.{name}", ValueKind.TEXT, mapping[name])
            for name in keys
            if name in mapping
        }
        self._counted()
        if self._fields.get("chat_template") == "tokenizer_default" and (
            self._reading.get("chat_template") in (None, "tokenizer_default")
        ):
            self._fields.pop("chat_template")
        elif self._fields.get("chat_template") == self._reading.get("chat_template"):
            self._fields.pop("chat_template", None)
        return {"columns": {**columns, **keys}, "roles": self._roles()}

    def _roles(self) -> dict[str, str]:
        given = self._take("roles", ValueKind.MAPPING)
        roles: dict[str, str] = {}
        for target, names in (_ROLES if given is None else given).items():
            place = f"{self._place}.roles.{target}"
            listed = [names] if isinstance(names, str) else names
            if not isinstance(listed, list | tuple):
                raise self._reading.refused(place, names, "needs a list of roles")
            roles |= {
                self._reading.typed(place, ValueKind.TEXT, name): str(target) for name in listed
            }
        return roles

    def _counted(self) -> None:
        """Takes keys of the tokens that count, where they have Axolotl's defaults."""
        defaults: Mapping[str, tuple[Any, ...]] = {
            "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]),
            "train_on_eos": ("turn",),
            "message_field_training": ("train", "weight"),
        }
        for key, values in defaults.items():
            if self._fields.get(key) in values:
                self._fields.pop(key)

    def _take(self, key: str, kind: ValueKind) -> Any:
        value = self._fields.pop(key, None)
        return None if value is None else self._reading.typed(f"{self._place}.{key}", kind, value)

    def _drop(self, key: str, value: Any, why: str) -> None:
        effect = Effect.NONE if key == "trust_remote_code" and value is False else Effect.RESULT
        self._reading.drop(f"{self._place}.{key}", why, effect, value=value)

"""``penstock config`` shows the configuration keys as text, a Markdown page or a JSON schema.

The source are the fields of :mod:`penstock.config`.
:mod:`penstock.daemons.node.preparing.changes` knows the keys that a resume may change.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from penstock.client.convert.aliases import TRAINERS
from penstock.config.schema import Config
from penstock.config.words import Form, listed_fields, section_in, unknown_key
from penstock.daemons.node.preparing.changes import resume_rule
from penstock.host.errors import ConfigError

_WIDTH = 100
"""Columns of the page's lines."""

_PAGE_HEAD = """\
# The configuration

All keys, generated from the configuration's types by `make docs`. `penstock config` prints the same
text, `penstock config SECTION` and `penstock config KEY` print a part of it.

* A configuration is a YAML file of sections; `penstock train FILE --set section.key=value`
  overrides a key.
* `model` and `data` are required; all other sections may be left out, or be empty. A key without
  a value, also `adapter:` alone, is refused: write a value, null too, or leave the key out.
* Choices have the usual spellings, too: `1F1B`, `bfloat16`, `float32`.
* Unknown keys and impossible values are refused with line, name and accepted values; a key that is
  given twice is refused with both lines. Merges (`<<: *other`) are accepted, tags such as
  `!!binary` are refused, and dates are texts.
* A run keeps its full configuration in `RUN_DIR/resolved.yaml`.

Editors with a YAML language server complete, explain and check keys with
[penstock.schema.json](penstock.schema.json). Write the schema next to your configuration with
`penstock config --json-schema > penstock.schema.json`, and begin the configuration with this line:

```yaml
# yaml-language-server: $schema=penstock.schema.json
```

## What a resume may change

The same command resumes a run, also with other values. The command lists the changed keys and
their consequences; without a change no file is rewritten. Below, *Resume* says for each key whether
the key may change; changes apply from the next step on. A run that was killed keeps the old
`betas`, `momentum`, `eps`, `weight_decay` and `groups` until it has saved: its memory holds a step
that was decided with these values.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key and its explanation. ``default`` is YAML, or None for a required key."""

    name: str
    accepts: str
    unit: str | None
    default: str | None
    explanation: str

    @property
    def facts(self) -> str:
        """Returns a text such as ``a whole number, 1 or more (steps); default 200``."""
        unit = f" ({self.unit})" if self.unit else ""
        default = "must be given" if self.default is None else f"default {self.default}"
        return f"{self.accepts}{unit}; {default}"


def keys_in(section: str) -> tuple[Key, ...]:
    """Returns the keys of a section; the keys of a mapping in a list follow the list."""
    return tuple(_keys(_section(section), section))


def describe(name: str | None, width: int) -> str:
    """Returns the text of ``penstock config [NAME]``: all sections, one section, or the keys of a
    name.

    Raises:
        ConfigError: the name is no section and no key; suggests similar names.
    """
    if name is None:
        return "\n\n".join(_section_text(section, width) for section in Config.model_fields)
    if name in Config.model_fields:
        return _section_text(name, width)
    keys = [key for section in Config.model_fields for key in keys_in(section)]
    plain = name.replace("[]", "")
    named = [key for key in keys if plain in (key.name.replace("[]", ""), key.name.split(".")[-1])]
    if not named:
        raise ConfigError(unknown_key(name.split("."), Config, TRAINERS))
    return "\n\n".join(_key_text(key, width, full=True) for key in named)


def page() -> str:
    """Returns ``docs/CONFIGURATION.md``, in lines of at most 100 columns."""
    parts = [_PAGE_HEAD]
    for section in Config.model_fields:
        intro = _paragraph(_section_doc(section))
        parts.append(f"## {section}\n\n{intro}\n")
        for key in keys_in(section):
            default = "must be given" if key.default is None else f"default `{key.default}`"
            unit = f" ({key.unit})" if key.unit else ""
            facts = _paragraph(f"*{key.accepts}*{unit}; {default}")
            resume = _paragraph(f"{key.explanation} *Resume:* {resume_rule(key.name)}.")
            parts.append(f"### `{key.name}`\n\n{facts}\n\n{resume}\n")
    return "\n".join(parts)


def json_schema() -> str:
    """Returns the configuration as a JSON schema (draft 2020-12), for editors.

    The schema has types, limits, choices and explanations. Only loading checks rules between keys.
    """
    schema = Config.model_json_schema()
    definitions = schema["$defs"]
    schema = _plain(schema, definitions)
    for name, field in Config.model_fields.items():
        for old in _section(name).model_fields.keys() - listed_fields(_section(name)).keys():
            del schema["properties"][name]["properties"][old]
        forms = [schema["properties"][name]]
        if not field.is_required() and "anyOf" not in forms[0]:
            forms.append({"type": "null"})
        if name == "schedule":
            forms.append(definitions["ScheduleConfig"]["properties"]["scheme"])
        schema["properties"][name] = forms[0] if len(forms) == 1 else {"anyOf": forms}
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of Penstock",
    }
    return json.dumps({**head, **schema}, indent=1, ensure_ascii=False)


def _plain(node: Any, definitions: dict[str, Any]) -> Any:
    """Returns a schema with resolved references, without pydantic's titles, and without defaults of
    sections.
    """
    if isinstance(node, list):
        return [_plain(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        node = {**target, **{name: value for name, value in node.items() if name != "$ref"}}
    kept = {name: _plain(value, definitions) for name, value in node.items() if name != "$defs"}
    if isinstance(kept.get("title"), str):
        del kept["title"]
    if isinstance(kept.get("default"), dict) and kept["default"]:
        del kept["default"]
    return kept


def _section(name: str) -> type[BaseModel]:
    section = section_in(Config.model_fields[name].annotation)
    assert section is not None, "all are"
    return section


def _section_doc(name: str) -> str:
    described = Config.model_fields[name].description or ""
    return " ".join(f"{_section(name).__doc__} {described}".split())


def _keys(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in listed_fields(section).items():
        form = Form.of(field)
        yield Key(
            name=f"{prefix}.{name}",
            accepts=str(form),
            unit=form.unit,
            default=_default(field),
            explanation=field.description or "",
        )
        mark = "[]" if get_origin(form.annotation) is tuple else ""
        for inner in get_args(form.annotation):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _keys(inner, f"{prefix}.{name}{mark}")


def _default(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    text = yaml.safe_dump(
        to_jsonable_python(field.get_default()), default_flow_style=True, width=1000
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _section_text(section: str, width: int) -> str:
    keys = [_key_text(key, width, full=False) for key in keys_in(section)]
    return "\n".join([_wrapped(f"{section}: {_section_doc(section)}", "", width), *keys])


def _key_text(key: Key, width: int, *, full: bool) -> str:
    lines = [key.name, key.facts, key.explanation]
    if full:
        lines.append(f"On a resume: {resume_rule(key.name)}.")
        return "\n".join([lines[0], *(_wrapped(line, "  ", width) for line in lines[1:])])
    text = f"{key.explanation} [{key.facts}]"
    return f"  {key.name}\n{_wrapped(text, '      ', width)}"


def _paragraph(text: str) -> str:
    return _wrapped(text, "", _WIDTH)


def _wrapped(text: str, indent: str, width: int) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )

"""Names and defaults on which users rely: golden/names.json, one name a line.

The names are keys of the configuration, commands and options, exit codes, metrics, alerts, messages
of the scheduler and environment variables. Explanations are no part of the file.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.pins.comparing import Comparison, read, write

GOLDEN = Path(__file__).parent / "golden" / "names.json"
ROOT = Path(__file__).parents[2]
WORDS_OF_SCHEMA = ("title", "description", "default", "properties", "required", "$schema")
VARIABLE = re.compile(
    r"(SLURMD?|PET|PENSTOCK|JOBSET|JOB|GROUP|MASTER|LOCAL|NODE|KUBERNETES|WATCHDOG|XDG|LC|NIXL|MLFLOW"
    r"|TORCH\w*?|TRITON|CUBLAS|GRPC|REPLICATED|OPENBLAS)_[A-Z0-9_]+"
    r"|NNODES|WORLD_SIZE|INVOCATION_ID|NOTIFY_SOCKET|MAINPID|HOME|TERM|LANG"
)
"""Environment variables, by the programs that set them."""
NO_VARIABLES = frozenset({"JOB_QUEUE", "GROUP_POLICY"})
"""Words of templates that look like environment variables."""

Names = dict[str, str]


def compare(seeds: int) -> Comparison:
    """Compares current names with the stored ones."""
    return compared_names(read(GOLDEN), current())


def rewrite(seeds: int) -> None:
    """Stores the current names."""
    write(GOLDEN, current())


def current() -> Names:
    """Returns every name with its default, type or number."""
    return {
        **dict(_keys(_schema(), "key ")),
        **dict(_options()),
        **_exit_codes(),
        **dict(_metrics()),
        **_alerts(),
        **dict(_messages()),
        **{f"variable {name}": "read" for name in variables()},
    }


def compared_names(stored: Mapping[str, str], names: Mapping[str, str]) -> Comparison:
    """Returns removed names and changed defaults; added names are notes. A key that left the schema
    is no difference if a configuration may still have it, with the same value.
    """
    differences, notes = [], []
    for name, text in sorted(stored.items()):
        if name not in names:
            if is_accepted(name, stored, names):
                notes.append(f"no longer listed, and accepted with the same value: {name}")
            else:
                differences.append(f"{name}: {text} -> absent")
        elif names[name] != text:
            differences.append(f"{name}: {text} -> {names[name]}")
    if added := sorted(names.keys() - stored.keys()):
        shown = ", ".join(added[:10]) + (f" and {len(added) - 10} more" if added[10:] else "")
        notes.append(f"added: {shown}; python -m tests.pins --only names --rewrite")
    return Comparison(differences=differences, notes=notes)


# ---- configuration ----


def is_accepted(name: str, stored: Mapping[str, str], names: Mapping[str, str]) -> bool:
    """Returns whether the configuration takes a key or word that its schema lists no more. The
    default of such a key has to leave the configuration as it is without the key.
    """
    found = re.fullmatch(r"key (\w+)\.(\w+)(?: = (.+)| takes .+)?", name)
    if found is None:
        return False
    section, key, word = found.groups()
    if word is not None:
        return _parsed({section: {key: json.loads(word)}}) is not None
    path = f"key {section}.{key}"
    default = re.fullmatch(r"default (.+)", stored.get(path, ""))
    if path in names or default is None:
        return False
    return _parsed({section: {key: json.loads(default[1])}}) == _parsed({})


def _parsed(sections: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Returns the resolved text of a small configuration with ``sections``; None if refused."""
    from penstock.config.schema import parse_config
    from penstock.host.errors import ConfigError

    base: dict[str, dict[str, Any]] = {
        "model": {"hf": {"model_type": "llama"}},
        "data": {"path": "@stdlib", "sequence_length": 8},
    }
    names = base.keys() | sections.keys()
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in names}
    try:
        return str(parse_config(merged).to_yaml())
    except ConfigError:
        return None


def _schema() -> dict[str, Any]:
    from penstock.client.configuration import json_schema

    content: dict[str, Any] = json.loads(json_schema())
    return content


def _keys(node: Mapping[str, Any], name: str) -> Iterator[tuple[str, str]]:
    """Yields the keys below a node of the schema, and a line for each accepted word or type."""
    for key, inner in node.get("properties", {}).items():
        needed = key in node.get("required", ())
        default = "must be given" if needed else f"default {_text(inner.get('default'))}"
        path = f"{name}{'' if name.endswith(' ') else '.'}{key}"
        yield path, default
        yield from _keys(inner, path)
    for alternative in node.get("anyOf", () if "properties" in node else (node,)):
        if "properties" in alternative:
            yield from _keys(alternative, name)
            continue
        for word in alternative.get("enum", ()):
            yield f"{name} = {_text(word)}", "accepted"
        rest = _without_words(alternative)
        items = rest.pop("items", {})
        if "properties" in items:
            yield from _keys(items, f"{name}[]")
        elif items:
            rest["items"] = _without_words(items)
        if "enum" not in alternative:
            yield f"{name} takes {rest.get('type', 'a value')}", _text(rest)


def _without_words(node: Mapping[str, Any]) -> dict[str, Any]:
    return {word: value for word, value in node.items() if word not in WORDS_OF_SCHEMA}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


# ---- command line ----


def _options() -> Iterator[tuple[str, str]]:
    """Yields commands, their arguments by place, and each spelling of each option."""
    import typer

    from penstock.client.main import app

    pending: list[tuple[str, Any]] = [("penstock", typer.main.get_command(app))]
    while pending:
        path, command = pending.pop()
        yield f"command {path}", "hidden" if command.hidden else "listed"
        place = 0
        for parameter in command.params:
            text = _of_parameter(parameter)
            if parameter.param_type_name == "argument":
                place += 1
                yield f"option {path} argument {place}", text
                continue
            for spelling in parameter.opts:
                yield f"option {path} {spelling}", text
            for spelling in parameter.secondary_opts:
                yield f"option {path} {spelling}", f"opposite of {parameter.opts[0]}"
        pending += [
            (f"{path} {name}", one) for name, one in getattr(command, "commands", {}).items()
        ]


def _of_parameter(parameter: Any) -> str:
    """Returns default, number of values, limits and words of an option or argument."""
    annotation = parameter.type_descriptor.annotation
    kind = getattr(annotation, "__name__", str(annotation))
    words = [f"default {_text(parameter.default)}", kind]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        words[1] = " | ".join(str(choice.value) for choice in annotation)
    words += ["a flag"] if getattr(parameter, "is_flag", False) else []
    words += ["must be given"] if parameter.required else []
    words += ["several"] if parameter.multiple or parameter.nargs != 1 else []
    limits = {"at least": parameter.min, "at most": parameter.max}
    words += [f"{side} {limit}" for side, limit in limits.items() if limit is not None]
    words += [f"from {parameter.envvar}"] if parameter.envvar else []
    return ", ".join(words)


def _exit_codes() -> Names:
    from penstock.host.errors import ExitCode

    return {f"exit code {int(code)}": code.name for code in ExitCode}


# ---- metrics, alerts, messages, environment ----


def _metrics() -> Iterator[tuple[str, str]]:
    """Yields metrics by process with their type, and each label with its values."""
    from penstock.protocol.metrics.reference import PROCESSES

    for process, metrics in PROCESSES.items():
        for metric in metrics:
            path = f"metric {process} {metric.full_name}"
            buckets = f", buckets {list(metric.buckets)}" if metric.buckets else ""
            yield path, f"{metric.kind.name.lower()}{buckets}"
            for label, values in metric.labels.items():
                if isinstance(values, str):
                    yield f"{path} {label}", "values depend on the run"
                    continue
                for value in values:
                    yield f'{path} {label}="{value}"', "possible"


def _alerts() -> Names:
    """Returns alerts and recorded series of all rules of Prometheus."""
    names: Names = {}
    for file in sorted((ROOT / "grafana").rglob("*.rules.yml")):
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                name = f"alert {rule['alert']}" if "alert" in rule else f"series {rule['record']}"
                labels = _text(rule.get("labels", {}))
                names[name] = f"for {rule.get('for', '0s')}, labels {labels}"
    return names


def _messages() -> Iterator[tuple[str, str]]:
    """Yields calls of the scheduler's services, and the fields of their messages by number."""
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

    from penstock.protocol.generated.scheduler_pb2 import DESCRIPTOR

    file = FileDescriptorProto()
    DESCRIPTOR.CopyToProto(file)
    for service in file.service:
        for call in service.method:
            streams = f"{call.client_streaming} {call.server_streaming}"
            path = f"call {file.package}.{service.name}/{call.name}"
            yield path, f"{call.input_type} -> {call.output_type}, streams {streams}"
    pending = [(f"message {message.name}", message) for message in file.message_type]
    while pending:
        path, message = pending.pop()
        for field in message.field:
            kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
            label = FieldDescriptorProto.Label.Name(field.label).removeprefix("LABEL_").lower()
            text = f"{field.name} {label} {field.type_name or kind}"
            yield f"{path} {field.number:3d}", text
        pending += [(f"{path}.{inner.name}", inner) for inner in message.nested_type]


@cache
def variables() -> tuple[str, ...]:
    """Returns names of environment variables among the texts of the product's code."""
    names: set[str] = set()
    for folder in sorted((ROOT / "src" / "penstock").iterdir()):
        for file in sorted(folder.resolve().rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names |= {node.value} if VARIABLE.fullmatch(node.value) else set()
    return tuple(sorted(names - NO_VARIABLES))

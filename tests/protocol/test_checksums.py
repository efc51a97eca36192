"""Checksums of JSON objects and of a run directory's files: what they notice, and what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.host.errors import StateError
from penstock.host.files import write_atomically
from penstock.protocol.run.checksums import (
    CHECKSUMS,
    check_checksum,
    check_object,
    read_checked,
    recorded_values,
    with_checksum,
)
from penstock.protocol.run.rundir import RunDirectory


def test_an_object_carries_its_checksum_through_json() -> None:
    fields = {"b": 2.0**136, "a": [1, "ä", None], "c": {"z": True, "y": 1e-320}}
    read = json.loads(json.dumps(with_checksum(fields), indent=1))
    assert check_object(read, "x")
    assert check_object(dict(reversed(read.items())), "x"), "the order of keys means nothing"
    assert not check_object(fields, "x")
    for key, value in (("b", 2.0**137), ("a", [1, "ä"]), ("new", 0)):
        with pytest.raises(StateError, match=r"x\.json: its checksum does not match"):
            check_object({**read, key: value}, "x.json")


@pytest.fixture
def recorded(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("table.json", "model/config.json", "plan.json", "resolved.yaml"):
        (tmp_path / name).write_text(f"this is {name}")
    directory.record_checksums({"run.seed": 7})
    return directory


def test_recorded_files_are_noticed_when_they_change(recorded: RunDirectory) -> None:
    assert recorded_values(recorded.path) == {"run.seed": 7}
    assert read_checked(recorded.path, "table.json") == b"this is table.json"
    remedies = {
        "table.json": "Restore it; or delete it and start again",
        "model/config.json": "Restore it; or delete it and start again",
        "plan.json": "The next penstock train writes a new one",
        "resolved.yaml": "make changes in your own configuration or with --set",
    }
    for name, remedy in remedies.items():
        (recorded.path / name).write_text("this is another")
        with pytest.raises(StateError, match=f"{name}: is not what it was .* {remedy}"):
            read_checked(recorded.path, name)
    for attribute, name in (("table", "table.json"), ("plan", "plan.json"), ("config", "resolved")):
        with pytest.raises(StateError, match=rf"{name}.* is not what it was"):
            getattr(recorded, attribute)
    check_checksum(recorded.path, "data/meta.json", b"was not there")
    recorded.record_checksums({})
    assert read_checked(recorded.path, "plan.json") == b"this is another"


def test_without_checksums_files_are_taken_as_they_are(recorded: RunDirectory) -> None:
    (recorded.path / "plan.json").write_text("this is another")
    recorded.remove_checksums()
    assert recorded_values(recorded.path) is None
    assert read_checked(recorded.path, "plan.json") == b"this is another"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ('{"format": 2}', "format 2, this Penstock reads 1"),
        ('{"format": 1, "files": {}}', "has no checksum"),
        ('{"format": 1, "files": {}, "checksum": "00"}', "its checksum does not match"),
    ],
)
def test_a_damaged_list_is_an_error(recorded: RunDirectory, content: str, message: str) -> None:
    write_atomically(recorded.path / CHECKSUMS, content)
    with pytest.raises(StateError, match=rf"inputs\.json: .*{message}"):
        read_checked(recorded.path, "table.json")

"""The cheap pins hold, and each comparison fails on a planted change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.pins import __main__ as command
from tests.pins import names, seeds, trainings
from tests.pins.comparing import Comparison, Part, compared
from tests.pins.existing import flattened

ROOT = Path(__file__).parents[2]


def test_names_and_defaults_are_the_stored_ones() -> None:
    assert names.compare(0).differences == []


def test_twenty_seeds_leave_the_stored_rows_and_bytes() -> None:
    """Takes half a minute; ``make pins`` simulates more seeds."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.pins", "--only", "seeds", "--seeds", "20"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500.0,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr[-2000:]
    assert process.stdout.startswith("20 seeds: equal")


STORED = {
    "exit code 5": "STOPPED",
    "key train.steps": "default 200",
    'key schedule.scheme = "1F1B"': "accepted",
    "key train.old": "default 3",
    "option penstock train --strict": "default false, bool, a flag",
}
CURRENT = {name: text for name, text in STORED.items() if not name.startswith("key ")} | {
    "key train.steps": "default 200"
}


def test_a_removed_name_and_a_changed_default_are_differences() -> None:
    changed = {**CURRENT, "key train.steps": "default 100"}
    del changed["exit code 5"]
    assert names.compared_names(STORED, changed).differences == [
        "exit code 5: STOPPED -> absent",
        "key train.old: default 3 -> absent",
        "key train.steps: default 200 -> default 100",
    ]


def test_an_added_name_is_a_note() -> None:
    comparison = names.compared_names(CURRENT, {**CURRENT, "key train.epochs": "default null"})
    assert comparison.holds
    assert comparison.notes == [
        "added: key train.epochs; python -m tests.pins --only names --rewrite"
    ]


def test_an_old_word_that_the_configuration_takes_is_a_note() -> None:
    name = 'key schedule.scheme = "1F1B"'
    comparison = names.compared_names({name: "accepted"}, {})
    assert comparison.holds and name in comparison.notes[0]
    assert not names.compared_names({'key schedule.scheme = "2F2B"': "accepted"}, {}).holds


def test_an_old_key_has_to_keep_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replaced parser takes ``train.old``, stored as ``train.new``; its default is 3."""

    def parsed(sections: dict[str, dict[str, Any]]) -> str:
        return f"new: {sections.get('train', {}).get('old', 3)}"

    monkeypatch.setattr(names, "_parsed", parsed)
    new = {"key train.new": "default 3"}
    assert names.compared_names({"key train.old": "default 3"}, new).holds
    assert not names.compared_names({"key train.old": "default 4"}, new).holds


def test_each_key_word_and_limit_of_a_schema_has_a_line() -> None:
    number = {"type": "integer", "minimum": 1, "default": 2, "description": "Number of steps."}
    choice = {"enum": ["a", "b"], "type": "string", "description": "A choice."}
    section = {"properties": {"steps": number, "choice": choice}, "required": ["choice"]}
    schema = {"properties": {"train": {"anyOf": [section, {"type": "null"}]}}}
    assert dict(names._keys(schema, "key ")) == {
        "key train": "default null",
        "key train takes null": '{"type": "null"}',
        "key train.steps": "default 2",
        "key train.steps takes integer": '{"minimum": 1, "type": "integer"}',
        "key train.choice": "must be given",
        'key train.choice = "a"': "accepted",
        'key train.choice = "b"': "accepted",
    }


def test_a_seed_differs_by_a_digit_a_violation_or_without_a_stored_digest() -> None:
    stored = {"0": "00000000", "1": "11111111", "2": "22222222"}
    current = {**stored, "1": "11111112", "2": "violation: memory was left"}
    assert seeds.compared_seeds(stored, stored).holds
    assert seeds.compared_seeds(stored, current).differences == [
        "seed 1: 11111111 -> 11111112",
        "seed 2: 22222222 -> violation: memory was left",
    ]
    (unpinned,) = seeds.compared_seeds({"0": "00000000"}, stored).differences
    assert unpinned.startswith("2 seeds from 1 on: not pinned")
    broken = {"3": "violation: memory was left"}
    assert "seed 3: not pinned -> violation: memory was left" in (
        seeds.compared_seeds(stored, broken).differences
    )


def test_a_seed_that_is_left_out_is_named_and_not_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated: list[int] = []

    def record(chosen: list[int]) -> dict[str, str]:
        simulated.extend(chosen)
        return {str(seed): f"{seed:08x}" for seed in chosen}

    monkeypatch.setattr(seeds, "GOLDEN", tmp_path / "seeds.txt")
    monkeypatch.setattr(seeds, "LEFT_OUT", {1: "does not end", 9: "does not end"})
    monkeypatch.setattr(seeds, "simulated", record)
    seeds.rewrite(3)
    assert seeds.GOLDEN.read_text() == "00000000 -------- 00000002\n"
    comparison = seeds.compare(3)
    assert comparison.holds and comparison.notes == ["seed 1 is left out: does not end"]
    assert simulated == [0, 2, 0, 2]


def outcome(run_id: str, version: int, state: Any) -> SimpleNamespace:
    rows = {"meta": [("run_id", run_id), ("format", "1")], "decisions": [(1, version, 0.5)]}
    result = SimpleNamespace(states={"step-1": state})
    return SimpleNamespace(violations=[], rows=rows, result=result)


def test_a_digest_of_a_seed_has_rows_and_bytes_but_no_run_id() -> None:
    zeros, one = np.zeros(4, np.float32), np.eye(1, 4, dtype=np.float32)[0]
    digest = seeds.digest_of(outcome("a", 1, "checksum"))
    assert len(digest) == 8
    assert digest == seeds.digest_of(outcome("b", 1, "checksum"))
    assert digest != seeds.digest_of(outcome("a", 2, "checksum"))
    assert digest != seeds.digest_of(outcome("a", 1, "other checksum"))
    assert seeds.digest_of(outcome("a", 1, {"x": zeros})) != (
        seeds.digest_of(outcome("a", 1, {"x": one}))
    )


def test_a_machine_without_digests_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "GOLDEN", tmp_path / "trainings.json")
    line = trainings.compare(0).line("saved-bytes")
    assert line.startswith("saved-bytes: not compared; not pinned on this machine (torch ")


def test_a_saved_state_differs_in_the_array_that_changed(tmp_path: Path) -> None:
    arrays = {name: np.ones(3, np.float32) for name in ("w", "exp_avg.w", "exp_avg_sq.w")}
    state = tmp_path / "state" / "step-00000003"
    state.mkdir(parents=True)
    save_file(arrays, state / "block-0000.safetensors")
    before = trainings._of_state(tmp_path)
    assert before.keys() == {"weights", "exp_avg", "exp_avg_sq"}
    save_file({**arrays, "exp_avg.w": -arrays["w"]}, state / "block-0000.safetensors")
    (difference,) = compared(before, trainings._of_state(tmp_path)).differences
    assert difference.startswith("exp_avg: ")


def test_nested_outcomes_differ_by_their_path() -> None:
    stored = {"schemes": {"1f1b": {"no passes": {"2 devices": "aa"}}}}
    current = {"schemes": {"1f1b": {"no passes": {"2 devices": "ab", "3 devices": "cc"}}}}
    assert compared(flattened(stored), flattened(current)).differences == [
        "schemes, 1f1b, no passes, 2 devices: aa -> ab",
        "schemes, 1f1b, no passes, 3 devices: absent -> cc",
    ]


def test_the_command_fails_if_a_part_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored: list[int] = []
    same = Part(name="same", compare=lambda seeds: Comparison(), rewrite=stored.append)
    other = Part(
        name="other",
        compare=lambda seeds: Comparison(differences=[f"{seeds} seeds"]),
        rewrite=stored.append,
    )
    monkeypatch.setattr(command, "PARTS", (other, same))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert command.main(["--seeds", "7"]) == 1
    assert command.main(["--only", "same"]) == 0
    assert not stored
    assert command.main(["--only", "other", "--rewrite", "--seeds", "7"]) == 0
    assert stored == [7]
    printed = capsys.readouterr().out
    assert "other: 1 differs" in printed and "  7 seeds" in printed and "same: equal" in printed

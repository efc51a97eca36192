"""``penstock data``: its rows are those that training reads, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from penstock.client.main import app
from penstock.client.views.output import KEPT
from penstock.config.schema import Config, load_config
from penstock.daemons.node.preparing.tool import run_tool
from penstock.host.files import write_atomically
from penstock.host.trust import printable
from penstock.models.data.batch import IGNORED_LABEL
from penstock.protocol.run.rundir import RunDirectory
from penstock.workers.data import open_dataset
from tests.data.chat.make import runs
from tests.models.test_chat_labels import DATA, END, TEXTS
from tests.models.test_chat_labels import rows as trl_rows
from tests.models.test_prepare import LLAMA
from tests.models.test_rows import chat, written

FIELDS = (
    "records samples rows tokens counted_tokens padding_share truncated split dropped skipped"
    " duplicates lengths rows_per_epoch steps sources"
)
HANG_S = 600.0


@pytest.fixture(name="temporary", autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files of the command."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


def configured(folder: Path, data: dict[str, Any]) -> Path:
    """A configuration file of a small model."""
    fields = {
        "model": {"hf": {**LLAMA, "max_position_embeddings": 2048, "vocab_size": 1024}},
        "data": {"tokenizer": "byte", "chat_template": "chatml", "sequence_length": 64, **data},
        "train": {"global_batch": 1},
        "run": {"dir": str(folder / "runs")},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return path


def shown(config: Path, *options: str) -> str:
    """The output of the command, which leaves no temporary files and no run."""
    result = CliRunner().invoke(app, ["data", str(config), *options])
    assert result.exit_code == 0, result.stderr
    folder = Path(os.environ["TMPDIR"])
    assert not list(folder.glob("penstock*")) and not (config.parent / "runs").exists()
    return result.stdout


def lines(config: Path, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Summary and rows."""
    summary, *rows = map(json.loads, shown(config, "--json", *options).splitlines())
    assert set(FIELDS.split()) <= set(summary)
    return summary, rows


def prepared(config: Path, folder: Path) -> Config:
    """The configuration of data that are prepared in ``folder`` as a run's."""
    loaded = load_config(config)
    write_atomically(RunDirectory.create(folder).path / "resolved.yaml", loaded.to_yaml())
    run_tool("penstock.models.prepare", str(folder))
    return loaded


def test_rows_are_those_that_training_reads(tmp_path: Path) -> None:
    records = [chat(f"question {n}", "word " * (n % 9)) for n in range(40)]
    other = written(tmp_path, [{"prompt": "2+2=", "completion": "4"}], "other.jsonl")
    sources = [{"path": str(written(tmp_path, records))}, {"path": str(other), "weight": 3}]
    config = configured(tmp_path, {"sources": sources, "sequence_length": 256})
    summary, rows = lines(config)
    dataset = open_dataset(tmp_path / "run/data", "train", prepared(config, tmp_path / "run"))
    batches = dataset.read(0, dataset.num_sequences, 1)
    assert [row["row"] for row in rows] == list(range(len(batches)))
    for row, batch in zip(rows, batches, strict=True):
        size = len(row["input_ids"])
        assert size == sum(sample["tokens"] for sample in row["samples"])
        assert batch.input_ids[0, :size].tolist() == row["input_ids"]
        assert batch.labels[0, : size - 1].tolist() == row["labels"][1:]
        if batch.position_ids is not None and batch.document_ids is not None:
            assert batch.position_ids[0, :size].tolist() == row["position_ids"]
            assert batch.document_ids[0, :size].tolist() == row["document_ids"]
        else:
            assert row["position_ids"] == list(range(size)) and set(row["document_ids"]) == {0}
    listed = sorted((s["source"], s["record"]) for row in rows for s in row["samples"])
    assert listed == [*((0, n) for n in range(40)), *[(1, 0)] * 3]
    tokens = sum(len(row["input_ids"]) for row in rows)
    counted = sum(label != IGNORED_LABEL for row in rows for label in row["labels"])
    assert (summary["tokens"], summary["counted_tokens"]) == (tokens, counted)
    assert summary["padding_share"] == pytest.approx(1 - tokens / (256 * len(rows)))
    assert (summary["records"], summary["samples"]) == (41, 43)
    assert summary["rows"] == summary["rows_per_epoch"] == len(rows)
    assert [source["samples"] for source in summary["sources"]] == [40, 3]
    _, few = lines(config, "--rows", "2:4", "--set", "train.steps=1")
    assert few == rows[2:4]


@pytest.mark.parametrize("packing", ["none", "best-fit"])
def test_ids_and_labels_are_those_of_trl(tmp_path: Path, packing: str) -> None:
    name, folder = "qwen3" if "qwen3" in TEXTS else next(iter(TEXTS)), tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((DATA / "tokenizer.json").read_bytes())
    special = {"eos_token": END, "bos_token": "<s>", "pad_token": "<s>"}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEXTS[name]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, **kind}))
    modes = ("assistant", "completion")
    kept = [(r, row) for r, row in trl_rows(name) if r["mode"] in modes and "error" not in row]
    records = [{k: v for k, v in record.items() if k != "mode"} for record, _ in kept]
    data = {"path": str(written(tmp_path, records)), "tokenizer": str(folder)}
    more = {"chat_template": "model", "sequence_length": 2048, "packing": packing}
    # TRL trains records with a text that the template leaves out, or with another header.
    summary, rows = lines(configured(tmp_path, {**data, **more, "bad_records": "skip"}))
    listed = {}
    for row in rows:
        start = 0
        for sample in row["samples"]:
            part = slice(start, start := start + sample["tokens"])
            labels = row["labels"][part]
            listed[sample["record"]] = (row["input_ids"][part], runs(labels))
            pairs = zip(row["input_ids"][part], labels, strict=True)
            assert all(label in (token, IGNORED_LABEL) for token, label in pairs)
    expected = {n: (row["ids"], row["counts"]) for n, (_, row) in enumerate(kept)}
    assert listed == {n: row for n, row in expected.items() if n in listed}
    assert len(expected) - len(listed) == summary["skipped"] < len(expected) // 5


def test_a_text_has_rows_of_its_sequences(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox. " * 20)
    config = configured(tmp_path, {"path": str(text)})
    summary, rows = lines(config)
    assert summary["rows"] == len(rows) == 6 and summary["records"] is None
    assert summary["tokens"] == summary["counted_tokens"] == 6 * 64
    dataset = open_dataset(tmp_path / "run/data", "train", prepared(config, tmp_path / "run"))
    batches = dataset.read(0, 6, 1)
    for row, batch in zip(rows, batches, strict=True):
        assert row["input_ids"] == row["labels"] == batch.input_ids[0].tolist()
        assert row["position_ids"] == list(range(64)) and row["document_ids"] == [0] * 64
    assert {bytes(row["input_ids"]) for row in rows} == {
        text.read_bytes()[n : n + 64] for n in range(0, 6 * 64, 64)
    }


def test_a_token_file_keeps_its_documents_apart(tmp_path: Path) -> None:
    tokens = np.arange(1, 200, dtype="<u2")
    tokens[::10] = 0
    (tmp_path / "tokens.bin").write_bytes(tokens.tobytes())
    fields = {"tokens": str(tmp_path / "tokens.bin"), "tokenizer": None, "shuffle": False}
    config = configured(tmp_path, {**fields, "document_masks": True, "eos": 0})
    summary, rows = lines(config)
    row = rows[0]
    assert row["input_ids"] == tokens[:64].tolist()
    assert row["position_ids"][:13] == [0, *range(10), 0, 1]
    assert row["document_ids"][:13] == [0, *[1] * 10, 2, 2]
    apart = [t if n == 0 or n % 10 != 1 else IGNORED_LABEL for n, t in enumerate(tokens[:64])]
    assert row["labels"] == apart
    assert summary["counted_tokens"] == 3 * 64 - len([n for n in range(192) if n % 10 == 0])
    assert f"{tokens[2]} {tokens[3]}" in shown(config), "numbers, where no tokenizer is known"


def test_people_see_text_with_counted_tokens_marked(tmp_path: Path) -> None:
    path = written(tmp_path, [chat("Hi", "there\x1b[31m"), chat("Once", "upon", "a", "x" * 400)])
    config = configured(tmp_path, {"path": str(path), "sequence_length": 128})
    text = shown(config)
    assert "samples  2; samples truncated: 1" in text and "padding" in text
    assert "assistant\n⟦there\\x1b[31m<|im_end|>\n⟧" in text and "\x1b" not in text
    assert f"{path}, record 0" in text
    assert "row 1:" in text and "row 0:" not in shown(config, "--rows", "1:2")
    assert printable("é\t\n\x9b\u202e", KEPT) == "é\t\n\\x9b\\u202e"


def test_a_bad_record_and_bad_rows_are_refused(tmp_path: Path, temporary: Path) -> None:
    config = configured(
        tmp_path, {"path": str(written(tmp_path, [chat("a", "b"), {"messages": 3}]))}
    )
    wrong = {
        "": "chat.jsonl, line 2: messages = 3",
        "--rows=4": "--rows '4': give rows as A:B",
        "--rows=4:4": "B must be greater than A",
        "--set=data.bad_records=skip --rows=9:": "--rows 9:: the first pass has 1 rows",
    }
    for options, words in wrong.items():
        result = CliRunner().invoke(app, ["data", str(config), *options.split()])
        assert result.exit_code == 2 and words in result.stderr
        assert not list(temporary.glob("penstock*"))


def test_an_interrupt_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    path = written(tmp_path, [chat(f"{n}", "word " * 9) for n in range(200)])
    config = configured(tmp_path, {"path": str(path)})
    command = [sys.executable, "-m", "penstock.client.main", "data", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        give_up_s = time.monotonic() + HANG_S
        while not list(temporary.glob("penstock-data.*/resolved.yaml")):
            assert process.poll() is None and time.monotonic() < give_up_s
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, errors
    assert not list(temporary.glob("penstock*"))


def test_a_reader_that_ends_early_is_no_error(tmp_path: Path, temporary: Path) -> None:
    path = written(tmp_path, [chat(f"{n}", "word " * 9) for n in range(200)])
    config = configured(tmp_path, {"path": str(path)})
    command = [sys.executable, "-m", "penstock.client.main", "data", str(config), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 0 and b"rror" not in errors, errors
    assert not list(temporary.glob("penstock*"))


def test_help_teaches() -> None:
    text = CliRunner().invoke(app, ["data", "--help"], env={"COLUMNS": "100"}).stdout
    for words in ("--rows A:B", "position_ids", "penstock data chat.yaml --json > rows.jsonl"):
        assert words in text

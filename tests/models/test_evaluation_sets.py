"""Evaluation sets: files of their own, by the readers and masks of the training data."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config.evaluation import EvaluationSet
from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.models.data.batch import IGNORED_LABEL
from penstock.models.prepare import prepare
from penstock.protocol.run.rundir import RunDirectory
from penstock.workers.data import HeldOutData, TokenDataset
from tests.models.test_formats import as_stream, saved
from tests.models.test_prepare import LLAMA
from tests.models.test_rows import TALK, chat, made, samples, written

TEXT = "Penstocks carry water to turbines. " * 40


def with_sets(folder: Path, *sets: dict[str, Any], **data: Any) -> Config:
    """A prepared run with evaluation sets, on text unless ``data`` says otherwise."""
    text = folder / "text.txt"
    text.write_text(TEXT)
    data = data or {"path": str(text)}
    model = {"hf": {**LLAMA, **({"vocab_size": 300} if "tokens" in data else {})}}
    sections = {"model": model, "eval": {"sets": [{"every": 2, **each} for each in sets]}}
    return made(folder, data, **sections)


def held_out(folder: Path, config: Config, name: str) -> HeldOutData:
    """The data of a set as a worker opens it."""
    each = next(one for one in config.evaluation_sets if one.name == name)
    return HeldOutData.open(folder / "data", each, config)


def labels(data: HeldOutData) -> list[int]:
    """All counted labels of an evaluation, in order."""
    batches = [batch for index in range(data.num_batches) for batch in data.batches(index)[0]]
    rows = np.concatenate([batch.labels for batch in batches]).reshape(-1)
    return [int(label) for label in rows if label != IGNORED_LABEL]


def meta(folder: Path) -> dict[str, Any]:
    """The description of the data."""
    fields: dict[str, Any] = json.loads((folder / "data/meta.json").read_text())
    return fields


def test_sets_of_text_chats_and_completions_beside_training_on_text(tmp_path: Path) -> None:
    chats = written(tmp_path, [chat("Hi", "a" * n) for n in range(1, 6)], "held.jsonl")
    tasks = [{"prompt": "one ", "completion": "two"}, {"prompt": "three ", "completion": "four"}]
    other = tmp_path / "other.txt"
    other.write_text("0123456789" * 20)
    config = with_sets(
        tmp_path,
        {"name": "chats", "path": str(chats)},
        {"name": "tasks", "path": str(written(tmp_path, tasks, "tasks.jsonl"))},
        {"name": "text", "path": str(other), "batches": 2},
    )
    assert list(meta(tmp_path)) == [
        "fingerprint",
        "train",
        "eval.chats",
        "eval.tasks",
        "eval.text",
    ], "nothing of the training text is held out"
    assert meta(tmp_path)["eval.chats"]["rows"]["packing"] == "none", "any model computes that"
    assert len(samples(tmp_path, "eval.chats")) == 5
    answers = bytes(label for label in labels(held_out(tmp_path, config, "chats")) if label < 256)
    assert answers.count(b"a") == 15 and b"Hi" not in answers, "the answers alone count"
    completions = labels(held_out(tmp_path, config, "tasks"))
    assert bytes(label for label in completions if label < 256) == b"twofour"
    text = held_out(tmp_path, config, "text")
    assert text.num_batches == 2 and bytes(labels(text)[:9]) == b"123456789"


def test_sets_of_a_run_on_conversations_are_read_as_its_sources(tmp_path: Path) -> None:
    records = [{"dialog": TALK} for _ in range(4)]
    source = {"path": str(written(tmp_path, records)), "columns": {"messages": "dialog"}}
    held = written(tmp_path, records[:3], "held.jsonl")
    sharegpt = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
    written(tmp_path, sharegpt, "shared.json.jsonl")
    registry = tmp_path / "dataset_info.json"
    entry = {"file_name": "shared.json.jsonl", "formatting": "sharegpt"}
    registry.write_text(json.dumps({"shared": entry}))
    with_sets(
        tmp_path,
        {"name": "held", "path": str(held)},
        {"name": "first", "path": str(held), "limit": 1},
        {"name": "registered", "registry": str(registry), "entry": "shared"},
        sources=[source],
    )
    assert [len(samples(tmp_path, f"eval.{n}")) for n in ("held", "first", "registered")] == [
        3,
        1,
        1,
    ]
    assert meta(tmp_path)["eval.held"]["rows"]["packing"] == "best-fit", "as the training data"


def test_each_row_counts_once(tmp_path: Path) -> None:
    chats = written(tmp_path, [chat("Hi", letter * 3) for letter in "abcde"], "held.jsonl")
    config = with_sets(tmp_path, {"name": "chats", "path": str(chats)})
    once = labels(held_out(tmp_path, config, "chats"))
    size = {"global_batch": 4, "micro_batch": 2}
    larger = config.model_copy(update={"train": config.train.model_copy(update=size)})
    data = held_out(tmp_path, larger, "chats")
    assert data.num_batches == 2 and labels(data) == once
    batches, counted = data.batches(1)
    assert [batch.counted_tokens > 0 for batch in batches] == [True, False]
    assert counted == batches[0].counted_tokens and batches[1].shape == (2, 64)
    old = EvaluationSet(name="old", split="eval.chats", every=1, batches=2, repeats=True)
    again = HeldOutData.open(tmp_path / "data", old, larger)
    assert len(labels(again)) > len(once), "the old keys read a short set again from its start"


def test_a_set_takes_a_split_or_a_part_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "data-files"
    folder.mkdir()
    train = written(folder, [chat("Hi", f"t{n:02}") for n in range(40)], "train.jsonl")
    written(folder, [chat("Hi", f"d{n:02}") for n in range(3)], "dev.jsonl")
    saved(folder / "dict" / "test_sft", [as_stream([{"text": "a saved text"}])])
    (folder / "dict" / "dataset_dict.json").write_text('{"splits": ["test_sft"]}')
    config = with_sets(
        tmp_path,
        {"name": "dev", "path": f"{folder}/*.jsonl", "split": "validation"},
        {"name": "seen", "path": f"{folder}/*.jsonl", "split": "train[:5%]"},
        {"name": "part", "path": f"{folder}/*.jsonl", "split": "train[10:20]", "limit": 3},
        {"name": "saved", "path": str(folder / "dict"), "split": "test_sft"},
        sources=[{"path": str(train), "split": "[5%:]"}],
    )

    def answers(name: str) -> str:
        text = bytes(label for label in labels(held_out(tmp_path, config, name)) if label < 256)
        return " ".join(sorted(re.findall(r"[td]\d\d|saved", text.decode())))

    assert answers("dev") == "d00 d01 d02"
    assert answers("seen") == "t00 t01"
    assert answers("part") == "t10 t11 t12"
    assert answers("saved") == "saved"
    trained = {record for _, record, _, _ in samples(tmp_path)}
    assert trained == set(range(2, 40)), "the training keeps its own part"


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("test", "eval.sets: set held: path = '.*', split = 'test': no file belongs to this split"),
        ("train[2:]", "eval.sets: set held: split = 'train.2:.': takes none of the 2 records"),
    ],
)
def test_a_split_without_records_names_the_set(tmp_path: Path, split: str, message: str) -> None:
    path = written(tmp_path, [chat("Hi", "a"), chat("Hi", "b")], "train.jsonl")
    with pytest.raises(ConfigError, match=message):
        with_sets(tmp_path, {"name": "held", "path": str(path), "split": split})


def test_token_files_of_numbers(tmp_path: Path) -> None:
    for name, first in (("train", 0), ("held", 100)):
        np.arange(first, first + 129, dtype="<u2").tofile(tmp_path / f"{name}.bin")
    sets = {"name": "held", "path": str(tmp_path / "held.bin")}
    config = with_sets(tmp_path, sets, tokens=str(tmp_path / "train.bin"), tokenizer=None)
    assert labels(held_out(tmp_path, config, "held")) == list(range(101, 229))
    assert TokenDataset.open(tmp_path / "data", "train", config).num_sequences == 2


def test_a_run_that_has_started_keeps_its_sets_and_takes_new_ones(tmp_path: Path) -> None:
    chats = written(tmp_path, [chat("Hi", "abc")], "held.jsonl")
    more = written(tmp_path, [chat("Hi", "xyz"), chat("Hi", "xyz")], "more.jsonl")
    first, second = {"name": "one", "path": str(chats)}, {"name": "two", "path": str(more)}
    with_sets(tmp_path, first)
    made_at = (tmp_path / "data/eval-one/train.bin").stat().st_mtime_ns
    with_sets(tmp_path, first)
    assert (tmp_path / "data/eval-one/train.bin").stat().st_mtime_ns == made_at, "unchanged"
    written(tmp_path, [chat("Hi", "other")], "held.jsonl")
    with_sets(tmp_path, first)
    assert bytes(n for n in samples(tmp_path, "eval.one")[0][2] if n < 256).count(b"other") == 1
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "0123456789ab"}))
    (tmp_path / "journal.sqlite").touch()
    assert RunDirectory(tmp_path).has_started
    chats.unlink()
    config = with_sets(tmp_path, first, second)
    assert len(samples(tmp_path, "eval.one")) == 1 and len(samples(tmp_path, "eval.two")) == 2
    with_sets(tmp_path, second)
    assert "eval.one" not in meta(tmp_path) and not (tmp_path / "data/eval-one").exists()
    shutil.rmtree(tmp_path / "data/eval-two")
    prepare(
        config.model_copy(
            update={"eval": config.eval.model_copy(update={"sets": config.eval.sets[1:]})}
        ),
        tmp_path,
    )
    assert len(samples(tmp_path, "eval.two")) == 2, "lost files are made again"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "eval.sets: set held: path = '.*held.jsonl': no such file"),
        ("{}\n", "eval.sets: set held: .*held.jsonl, line 1"),
        ('{"text": "few"}\n', "eval.sets: set held: path = .* none counts.*give a larger file"),
        (
            json.dumps({"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}),
            "eval.sets: set held: no token of 1 records counts; raise .* or remove labels of -100",
        ),
    ],
)
def test_data_that_cannot_be_used_name_the_set(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "held.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        with_sets(tmp_path, {"name": "held", "path": str(path)})

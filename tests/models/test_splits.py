"""Splits of a source: the files and records that datasets 5.2 takes for the same words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.schema import parse_config
from penstock.config.splits import Split
from penstock.host.errors import ConfigError
from penstock.models.data.sources import find_source
from tests.models.test_formats import as_stream, saved
from tests.models.test_rows import chat, made, samples, written

KEY = "data.sources[0].path"


def files(path: Path | str, split: str | None) -> list[str]:
    """Names of the files of a split."""
    source = find_source(str(path), key=KEY, any_records=True, split=split)
    return sorted(file.name for file in source.files)


def refusal(path: Path | str, split: str) -> str:
    """The error for a split."""
    with pytest.raises(ConfigError) as caught:
        files(path, split)
    return str(caught.value)


def test_a_split_takes_the_files_with_its_word(tmp_path: Path) -> None:
    for name in ("train.jsonl", "my-test_2.jsonl", "Dev.jsonl", "notes.jsonl", "trainer.jsonl"):
        written(tmp_path, [chat("a", "b")], name)
    assert files(tmp_path, "train") == ["train.jsonl"]
    assert files(tmp_path, "test") == ["my-test_2.jsonl"]
    for word in ("validation", "valid", "dev", "val"):
        assert files(tmp_path, word) == ["Dev.jsonl"]
    assert len(files(tmp_path, None)) == 5
    assert files(f"{tmp_path}/t*.jsonl", "train") == ["train.jsonl"]
    source = find_source(str(tmp_path), key=KEY, any_records=True, split="train")
    assert source.omissions == "4 in splits other than train"
    assert refusal(tmp_path, "train_sft") == (
        f"{KEY} = {str(tmp_path)!r}, split = 'train_sft': no file belongs to this split; the splits"
        " of the files are test, train, validation. Leave the name out for all files, as in split:"
        " '[:90%]', or name the files in path"
    )


def test_shards_come_before_folders_and_folders_before_files(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    for name in ("test/train.jsonl", "train-notes.jsonl"):
        written(tmp_path, [chat("a", "b")], name)
    assert files(tmp_path, "test") == ["train.jsonl"]
    assert "are test." in refusal(tmp_path, "train")
    (tmp_path / "data").mkdir()
    shards = [f"train_sft-0000{n}-of-00002.jsonl" for n in range(2)]
    for name in (*shards, "test_sft-00000-of-00001-0a1b.jsonl"):
        written(tmp_path / "data", [chat("a", "b")], name)
    assert files(tmp_path, "train_sft") == shards
    assert files(tmp_path, "test_sft") == ["test_sft-00000-of-00001-0a1b.jsonl"]
    assert "are test_sft, train_sft." in refusal(tmp_path, "train")


def test_files_without_a_word_are_the_split_train(tmp_path: Path) -> None:
    path = written(tmp_path, [chat("a", "b")], "chats.jsonl")
    assert files(path, "train") == files(tmp_path, "train") == ["chats.jsonl"]
    assert "are train." in refusal(path, "test")
    (tmp_path / "Test").mkdir()
    written(tmp_path / "Test", [chat("a", "b")], "chats.jsonl")
    assert "are test." in refusal(tmp_path / "Test", "train")
    other = written(tmp_path, [chat("a", "b")], "test.jsonl")
    assert files(other, "test") == ["test.jsonl"]
    assert "are test." in refusal(other, "train")
    both = written(tmp_path, [chat("a", "b")], "test-train.jsonl")
    assert refusal(both, "train") == (
        f"{both}: the name has the words of the splits test and train; rename it, or name the files"
        " in path in place of a split"
    )


def test_a_saved_dictionary_gives_the_named_split(tmp_path: Path) -> None:
    splits = tmp_path / "splits"
    splits.mkdir()
    (splits / "dataset_dict.json").write_text('{"splits": ["train", "test_sft"]}')
    saved(splits / "train", [as_stream([{"text": "train"}])])
    saved(splits / "test_sft", [as_stream([{"text": text}]) for text in "ab"])
    assert len(files(splits, "test_sft")) == 2 and len(files(tmp_path, "test_sft")) == 2
    assert len(files(splits, "train")) == len(files(splits, None)) == 1
    assert "are test_sft, train." in refusal(splits, "validation")
    (splits / "test_sft" / "data-00001-of-00002.arrow").unlink()
    assert len(files(splits, "train")) == 1
    assert "has 1 of the 2 files of its dataset" in refusal(splits, "test_sft")


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [  # ReadInstruction.from_spec(text).to_absolute({"train": count}) of datasets 5.2
        ("train", 7, (0, 7)),
        ("train[:90%]", 7, (0, 6)),
        ("train[90%:]", 7, (6, 7)),
        ("train[:50%]", 5, (0, 2)),
        ("train[:50%]", 7, (0, 4)),
        ("train[10:20%]", 99, (10, 20)),
        ("train[-30%:]", 7, (5, 7)),
        ("train[2:-1]", 7, (2, 6)),
        ("train[:1_0]", 7, (0, 7)),
        ("train[-9:3]", 7, (0, 3)),
    ],
)
def test_parts_are_rounded_as_datasets_does(
    text: str, count: int, expected: tuple[int, int]
) -> None:
    part = Split.parse(text).records(count)
    assert (part.start, part.stop) == expected


@given(st.integers(0, 100), st.integers(0, 500))
def test_two_parts_are_the_whole(percent: int, count: int) -> None:
    parts = (f"[:{percent}%]", f"[{percent}%:]")
    front, back = (Split.parse(text).records(count) for text in parts)
    assert [*front, *back] == list(range(count))


@pytest.mark.parametrize(
    ("split", "error"),
    [
        ("train+test", "give each part a source of its own"),
        ("train[:101%]", "a share is between -100% and 100%"),
        (
            "train[5]",
            "accepted are a split, a part of it or a part of all: train, test, train[:90%]",
        ),
        ("", "accepted are a split"),
        ("a b", "accepted are a split"),
    ],
)
def test_other_forms_are_refused(split: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"data": {"sources": [{"path": "a.jsonl", "split": split}]}})
    assert f"data.sources.0.split = {split!r}" in str(caught.value)
    assert error in str(caught.value)


def test_a_part_keeps_the_numbers_of_its_records(tmp_path: Path) -> None:
    path = written(tmp_path, [chat(f"{n:02}", "x") for n in range(40)], "train.jsonl")

    def numbers(**keys: Any) -> list[int]:
        made(tmp_path, {"sources": [{"path": str(path), **keys}]})
        return sorted(record for _, record, _, _ in samples(tmp_path))

    assert numbers(split="train[:10%]") == list(range(4))
    assert numbers(split="[-4:]") == list(range(36, 40))
    assert numbers(split="[10:30]", limit=5) == list(range(10, 15))
    with pytest.raises(ConfigError) as caught:
        numbers(split="[40:]")
    assert "data.sources[0].split = '[40:]': takes none of the 40 records" in str(caught.value)


def test_splits_that_are_read_together_are_named(tmp_path: Path) -> None:
    for name in ("train", "test"):
        written(tmp_path, [chat(name, "x")], f"{name}.jsonl")
    lines: list[str] = []
    made(tmp_path, {"sources": [{"path": f"{tmp_path}/*.jsonl"}]}, progress=lines.append)
    assert any("reads the splits test, train together; split: train would" in s for s in lines)
    lines.clear()
    source = {"path": f"{tmp_path}/*.jsonl", "split": "train"}
    made(tmp_path, {"sources": [source]}, progress=lines.append)
    assert not any("together" in line for line in lines)
    listed = json.loads((tmp_path / "data/meta.json").read_text())["train"]["tally"]["records"]
    assert listed == 1

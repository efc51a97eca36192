"""Records become rows: the same samples as TRL's, packed whole, in an order that no division of the
work changes.
"""

from __future__ import annotations

import gzip
import itertools
import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from penstock.config.schema import Config, parse_config
from penstock.host.errors import ConfigError, StateError
from penstock.models.data.batch import IGNORED_LABEL, MicroBatch
from penstock.models.data.chunks import Progress
from penstock.models.data.rows.packing import alone, best_fit
from penstock.models.data.rows.row_file import COUNTS, ID, RowFile, RowLayout, count_counted
from penstock.models.prepare import prepare
from penstock.workers.data import open_dataset
from tests.data.chat.make import runs
from tests.models.test_chat_labels import DATA, END, TEXTS, is_left_out
from tests.models.test_chat_labels import rows as trl_rows
from tests.models.test_prepare import LLAMA

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]


def chat(*contents: str) -> dict[str, Any]:
    """A record of user and assistant in turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": c} for n, c in enumerate(contents)]}


def written(folder: Path, records: list[dict[str, Any]], name: str = "chat.jsonl") -> Path:
    """A file of JSON lines."""
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def made(
    folder: Path,
    data: dict[str, Any],
    progress: Progress = lambda message: None,
    **sections: Any,
) -> Config:
    """A configuration of a run in ``folder`` that is prepared."""
    config = parse_config(
        {
            "model": sections.pop("model", {"hf": LLAMA}),
            "data": {"tokenizer": "byte", "chat_template": "chatml", "sequence_length": 64, **data},
            "train": {"global_batch": 1, **sections.pop("train", {})},
            **sections,
        }
    )
    prepare(config, folder, progress=progress)
    return config


def opened(folder: Path, split: str = "train") -> tuple[RowFile, dict[str, Any]]:
    """A split's file of rows, and its entry of ``meta.json``."""
    entry = json.loads((folder / "data/meta.json").read_text())[split]
    layout = RowLayout.of(entry)
    assert layout is not None
    return RowFile(folder / "data" / entry["path"], layout), entry


def samples(folder: Path, split: str = "train") -> list[tuple[int, int, list[int], list[int]]]:
    """Source, record, ids and unshifted labels of all samples, by row."""
    file, _ = opened(folder, split)
    listed = []
    for number in range(file.layout.rows):
        tokens, start = file.row(number), 0
        for source, record, length in file.places(number):
            part = tokens[start : start + length].astype(np.int64)
            labels = np.where(part & COUNTS, part & ID, IGNORED_LABEL)
            listed.append((source, record, (part & ID).tolist(), labels.tolist()))
            start += length
        assert start == len(tokens) <= file.layout.length
    return listed


@given(
    st.lists(st.integers(1, 40), max_size=60),
    st.integers(40, 60),
    st.one_of(st.none(), st.integers(1, 20)),
)
def test_best_fit_takes_the_least_space_that_is_enough(
    lengths: list[int], capacity: int, window: int | None
) -> None:
    rows = best_fit(np.array(lengths, dtype=np.int64), capacity, window)
    expected: list[list[int]] = []
    for first in range(0, len(lengths), window or max(1, len(lengths))):
        numbers = range(first, min(len(lengths), first + (window or len(lengths))))
        spaces: list[tuple[int, int, list[int]]] = []  # space, time of its last change, row
        packed: list[list[int]] = []
        for time, number in enumerate(sorted(numbers, key=lambda n: -lengths[n])):
            fitting = [entry for entry in spaces if entry[0] >= lengths[number]]
            if fitting:
                chosen = min(fitting, key=lambda entry: (entry[0], entry[1]))
                spaces.remove(chosen)
                space, _, row = chosen
            else:
                space, row = capacity, []
                packed.append(row)
            row.append(number)
            if left := space - lengths[number]:
                spaces.append((left, time, row))
        expected += packed
    starts = rows.starts.tolist()
    listed = [rows.order[a:b].tolist() for a, b in itertools.pairwise(starts)]
    assert listed == expected
    assert sorted(rows.order.tolist()) == list(range(len(lengths)))


def test_memory_for_rows_does_not_grow_with_their_tokens() -> None:
    """Two gigabytes of messages are two million samples, and two thousand million tokens."""
    lengths = np.random.default_rng(4).integers(1, 1000, 50_000)
    tokens = np.full(16 << 20, COUNTS, dtype=np.uint32)
    tracemalloc.start()
    try:
        best_fit(lengths, 2048)
        packing = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        assert count_counted(tokens) == len(tokens)
        counting = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert packing <= 60 * len(lengths), "a few numbers for each sample"
    assert counting <= tokens.nbytes / 8


def test_padding_of_public_lengths_is_below_two_percent() -> None:
    """Log-normal lengths, as those of public sets of chats: a median of 350 tokens."""
    drawn = np.random.default_rng(3).lognormal(np.log(350), 0.9, 20_000)
    lengths = np.clip(drawn, 8, 2048).astype(np.int64)
    for window in (None, 1000):
        rows = best_fit(lengths, 2048, window)
        assert lengths.sum() / (2048 * len(rows)) >= 0.98
    assert lengths.sum() / (2048 * len(alone(lengths))) < 0.3


def test_special_tokens_in_texts_of_messages_are_text_unless_asked(tmp_path: Path) -> None:
    """Plain texts and completions have special tokens in any case, as in TRL."""
    library = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    special = library.token_to_id(END)
    records = [
        chat("a", f"b{END}c"),
        {"text": f"a{END}c"},
        {"prompt": "a", "completion": f"{END}c"},
    ]
    path = written(tmp_path, records)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((DATA / "tokenizer.json").read_bytes())
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))

    def counts(**keys: Any) -> list[int]:
        data = {"sources": [{"path": str(path)}], "tokenizer": str(folder), "packing": "none"}
        made(tmp_path, {**data, **keys}, model={"hf": {**LLAMA, "vocab_size": 1000}})
        listed = sorted((record, ids) for _, record, ids, _ in samples(tmp_path))
        return [ids.count(special) for _, ids in listed]

    plain = [2, 2]  # one of the text, and the end
    assert counts() == [0, *plain]
    assert counts(special_in_text=True) == [1, *plain]
    assert counts() == [0, *plain], "the key has rows of its own"


@pytest.mark.parametrize("name", list(TEXTS))
@pytest.mark.parametrize("packing", ["none", "best-fit"])
def test_prepared_samples_equal_those_of_trl(tmp_path: Path, name: str, packing: str) -> None:
    """The template is that of the tokenizer's folder; each mode has a file."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((DATA / "tokenizer.json").read_bytes())
    special = {"eos_token": END, "bos_token": "<s>", "pad_token": "<s>"}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEXTS[name]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, **kind}))
    train_on = {"assistant": "auto", "all": "all", "completion": "auto", "both": "assistant"}
    for mode, key in train_on.items():
        kept = [
            (record, row)
            for record, row in trl_rows(name)
            if record["mode"] == mode and "error" not in row and not is_left_out(name, record)
        ]
        fields = [{k: v for k, v in record.items() if k != "mode"} for record, _ in kept]
        path = written(tmp_path, fields, f"{mode}.jsonl")
        run_dir = tmp_path / mode
        run_dir.mkdir()
        made(
            run_dir,
            {
                "sources": [{"path": str(path)}],
                "tokenizer": str(folder),
                "chat_template": "model",
                "train_on": key,
                "packing": packing,
                "sequence_length": 2048,
            },
            model={"hf": {**LLAMA, "max_position_embeddings": 2048}},
        )
        listed = {record: (ids, runs(labels)) for _, record, ids, labels in samples(run_dir)}
        assert listed == {n: (row["ids"], row["counts"]) for n, (_, row) in enumerate(kept)}


def test_a_row_predicts_inside_its_samples_alone(tmp_path: Path) -> None:
    path = written(tmp_path, [chat("a", "bc"), chat("d", "efg")])
    config = made(tmp_path, {"path": str(path), "sequence_length": 256, "shuffle": False})
    (batch,) = open_dataset(tmp_path / "data", "train", config).read(0, 1, 1)
    assert batch.position_ids is not None and batch.document_ids is not None
    first, second = samples(tmp_path)
    size = len(first[2])
    assert batch.input_ids[0, : size + len(second[2])].tolist() == first[2] + second[2]
    assert batch.position_ids[0, size - 1 : size + 2].tolist() == [size - 1, 0, 1]
    assert batch.document_ids[0, size - 1 : size + 1].tolist() == [0, 1]
    shifted = [*first[3][1:], IGNORED_LABEL, *second[3][1:]]
    assert batch.labels[0, : len(shifted)].tolist() == shifted
    assert set(batch.labels[0, len(shifted) :].tolist()) == {IGNORED_LABEL}
    text = bytes(i for i in batch.labels[0].tolist() if 0 <= i < 256).decode()
    assert text == "efg<|im_end|>\nbc<|im_end|>\n", "the longer sample comes first"


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 500),
    st.integers(1, 30),
    st.integers(1, 6),
    st.integers(1, 6),
)
def test_the_order_is_the_same_for_any_division(
    rows_dataset: Any, position: int, steps: int, one: int, other: int
) -> None:
    def rows(micro_batch: int) -> list[bytes]:
        count = steps * one * other
        batches: list[MicroBatch] = rows_dataset.read(position, count, micro_batch)
        return [row.tobytes() for batch in batches for row in batch.input_ids]

    assert rows(one) == rows(other) == rows(1)


@pytest.fixture(scope="module")
def rows_dataset(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Forty rows of different samples."""
    folder = tmp_path_factory.mktemp("rows")
    records = [chat(f"question {n}", "word " * (n % 17)) for n in range(80)]
    path = written(folder, records)
    config = made(folder, {"path": str(path), "sequence_length": 256})
    dataset = open_dataset(folder / "data", "train", config)
    whole = dataset.read(0, dataset.num_sequences, 1)
    again = dataset.read(dataset.num_sequences, dataset.num_sequences, 1)
    keys = [[b.input_ids.tobytes() for b in each] for each in (whole, again)]
    assert Counter(keys[0]) == Counter(keys[1]) and keys[0] != keys[1]
    return dataset


@pytest.mark.parametrize(
    ("too_long", "numbers"),
    [("truncate", [0, 1]), ("split", [0, 0, 0, 0, 0, 1]), ("drop", [1])],
)
def test_samples_longer_than_a_row(tmp_path: Path, too_long: str, numbers: list[int]) -> None:
    path = written(tmp_path, [chat("a", "b" * 200), chat("c", "d")])
    made(tmp_path, {"path": str(path), "too_long": too_long, "packing": "none"})
    assert [record for _, record, _, _ in samples(tmp_path)] == numbers
    tally = opened(tmp_path)[1]["tally"]
    counted = {"truncate": "truncated", "split": "split", "drop": "dropped"}[too_long]
    assert tally[counted] == 1 and tally["records"] == 2 and tally["lengths"]["max"] > 200


def test_a_sample_too_long_and_a_bad_record_are_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path, [chat("a", "b" * 200), {"messages": "no list"}])
    with pytest.raises(ConfigError, match=r"chat.jsonl, line 1: has \d+ tokens, and data.seq"):
        made(tmp_path, {"path": str(path), "too_long": "refuse", "bad_records": "skip"})
    with pytest.raises(ConfigError, match=r"chat.jsonl, line 2"):
        made(tmp_path, {"path": str(path)})
    made(tmp_path, {"path": str(path), "bad_records": "skip"})
    assert opened(tmp_path)[1]["tally"]["skipped"] == 1
    assert not list((tmp_path / "data").glob(".*")), "nothing temporary is left"


def test_weights_and_limits(tmp_path: Path) -> None:
    paths = [
        written(tmp_path, [chat(f"{s}{n}", "x") for n in range(40)], s + ".jsonl") for s in "ab"
    ]
    sources = [{"path": str(paths[0]), "weight": 2.5}, {"path": str(paths[1]), "limit": 7}]
    made(tmp_path, {"sources": sources})
    listed = Counter((source, record) for source, record, _, _ in samples(tmp_path))
    of_first = [listed[0, n] for n in range(40)]
    assert set(of_first) == {2, 3} and 10 < of_first.count(3) < 30
    assert [listed[1, n] for n in range(8)] == [1] * 7 + [0]
    assert opened(tmp_path)[1]["tally"]["sources"]["data.sources[1]"] == 7


def test_the_last_samples_are_held_out(tmp_path: Path) -> None:
    path = written(tmp_path, [chat(f"{n:02}", "x") for n in range(50)])
    train = {"eval_every": 5}
    config = made(tmp_path, {"path": str(path), "eval_fraction": 0.1}, train=train)
    assert [record for _, record, _, _ in samples(tmp_path, "eval")] == list(range(45, 50))
    assert sorted(record for _, record, _, _ in samples(tmp_path)) == list(range(45))
    other = written(tmp_path, [chat("held", "out")], "other.jsonl")
    made(tmp_path, {"path": str(path), "eval_path": str(other)}, train=train)
    assert len(samples(tmp_path, "eval")) == 1 and len(samples(tmp_path)) == 50
    assert open_dataset(tmp_path / "data", "eval", config).num_sequences == 1


@pytest.mark.parametrize("kind", ["parquet", "json", "jsonl.gz", "arrow"])
def test_files_of_other_formats_have_the_same_samples(tmp_path: Path, kind: str) -> None:
    records = [chat(f"q {n}", "é" * n) for n in range(30)]
    plain = written(tmp_path, records)
    made(tmp_path, {"path": str(plain)})
    expected = samples(tmp_path)
    path, table = tmp_path / f"other.{kind}", pyarrow.Table.from_pylist(records)
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    elif kind == "arrow":
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    elif kind == "json":
        path.write_text(json.dumps(records))
    else:
        path.write_bytes(gzip.compress(plain.read_bytes()))
    made(tmp_path, {"path": str(path)})
    assert samples(tmp_path) == expected


def test_rows_come_from_the_cache_and_damage_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, [chat(f"{n}", "x") for n in range(50)])
    runs_ = [tmp_path / name for name in ("one", "two")]
    for folder in runs_:
        folder.mkdir()
        config = made(folder, {"path": str(path)})
    files = [folder / "data/train.bin" for folder in runs_]
    assert files[0].samefile(files[1]), "a hard link to the kept file"
    content = bytearray(files[1].read_bytes())
    content[8] ^= 1
    files[1].unlink()
    files[1].write_bytes(content)
    with pytest.raises(StateError, match="checksum differs"):
        open_dataset(runs_[1] / "data", "train", config).read(0, 1, 1)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, [{"input_ids": [1, 256]}, {"input_ids": [1, 257]}])
    with pytest.raises(
        ConfigError, match=r"line 2: has the token 257, and the model has a vocabulary of 257$"
    ):
        made(tmp_path, {"path": str(path)})


def test_plain_records_of_data_path_stay_one_text(tmp_path: Path) -> None:
    path = written(tmp_path, [{"text": "word " * 40, "prompt": "?"}])
    made(tmp_path, {"path": str(path)})
    assert "rows" not in json.loads((tmp_path / "data/meta.json").read_text())["train"]
    made(tmp_path, {"sources": [{"path": str(path)}]})
    assert samples(tmp_path)[0][2][:5] == list(b"word ")
    with pytest.raises(ConfigError, match=r"data\.packing = 'wrapped'"):
        made(tmp_path, {"path": str(written(tmp_path, [chat("a", "b")])), "packing": "wrapped"})


def test_places_of_any_row_are_those_of_a_walk(tmp_path: Path) -> None:
    """Numbers of records stand in the text of each sample."""
    records = [chat("q", f"{n:03}" + "x" * (n * 7 % 40)) for n in range(60)]
    made(tmp_path, {"path": str(written(tmp_path, records)), "sequence_length": 256})
    file, _ = opened(tmp_path)
    for row in reversed(range(file.layout.rows)):
        text, start = bytes((file.row(row) & ID).tolist()).decode(), 0
        for source, record, length in file.places(row):
            assert source == 0 and f"assistant\n{record:03}" in text[start : start + length]
            start += length
    content = bytearray((tmp_path / "data/train.bin").read_bytes())
    content[3] ^= 0x40  # the first sample begins nowhere
    (tmp_path / "data/other.bin").write_bytes(content)
    damaged = RowFile(tmp_path / "data/other.bin", file.layout)
    with pytest.raises(StateError, match="has 59 samples, and its description 60"):
        damaged.places(0)


def test_samples_that_predict_nothing(tmp_path: Path) -> None:
    """TRL leaves them out of rows of one sample."""
    silent = {"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}
    path = written(tmp_path, [silent, {"input_ids": [1, 2]}])
    made(tmp_path, {"path": str(path), "packing": "none"})
    assert [record for _, record, _, _ in samples(tmp_path)] == [1]
    assert opened(tmp_path)[1]["tally"]["uncounted"] == 1
    made(tmp_path, {"path": str(path)})
    assert [record for _, record, _, _ in samples(tmp_path)] == [0, 1]
    path = written(tmp_path, [silent, silent])
    with pytest.raises(ConfigError, match="no token of 2 samples counts"):
        made(tmp_path, {"path": str(path)})


def test_a_run_that_has_started_keeps_its_rows_without_records_and_template(tmp_path: Path) -> None:
    path = written(tmp_path, [chat("a", "b"), chat("c", "d")])
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    data = {"path": str(path), "chat_template": str(template), "train_on": "all"}
    made(tmp_path, data)
    (tmp_path / "journal.sqlite").touch()
    expected = samples(tmp_path)
    path.unlink()
    template.unlink()
    made(tmp_path, data)
    assert samples(tmp_path) == expected

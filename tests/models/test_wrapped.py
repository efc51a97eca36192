"""Records of sources as one text: the tokens of ``data.path``, and ready ids between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config.schema import Config, parse_config
from penstock.host.errors import ConfigError
from penstock.workers.data import open_dataset
from tests.models.test_prepare import LLAMA
from tests.models.test_rows import chat, made, written

END = 256
TEXTS = [{"text": "pumps lift water"}, {"text": ""}, {"text": "é 水"}]
IDS = [{"input_ids": [1, 2, 3]}, {"input_ids": []}, {"input_ids": [4, END], "labels": [4, END]}]


def wrapped(folder: Path, *sources: dict[str, Any], **data: Any) -> Config:
    """A prepared run of sources as one text."""
    keys = {"packing": "wrapped", "sequence_length": 4, "sources": list(sources), **data}
    return made(folder, keys)


def tokens(folder: Path, split: str = "train") -> list[int]:
    """The tokens of a file, which is no file of rows."""
    entry = json.loads((folder / "data/meta.json").read_text())[split]
    assert "rows" not in entry and entry["token_dtype"] == "uint16"
    return np.fromfile(folder / "data" / entry["path"], dtype="<u2").tolist()


def text_ids(*texts: str) -> list[int]:
    """The bytes of texts, each with the end token behind it."""
    return [token for text in texts for token in (*text.encode(), END)]


def test_texts_and_ids_are_one_text_in_order(tmp_path: Path) -> None:
    texts = written(tmp_path, TEXTS, "texts.jsonl")
    ids = written(tmp_path, IDS, "ids.jsonl")
    plain = tmp_path / "a.txt"
    plain.write_text("dams")
    sources = [{"path": str(path)} for path in (texts, ids, plain)]
    config = wrapped(tmp_path, sources[0], sources[1] | {"weight": 2}, sources[2] | {"weight": 2})
    ready = [1, 2, 3, 1, 2, 3, 4, END, 4, END]
    expected = [*text_ids("pumps lift water", "é 水"), *ready, *text_ids("dams", "dams")]
    assert tokens(tmp_path) == expected
    batch = open_dataset(tmp_path / "data", "train", config).read(0, 1, 1)[0]
    assert batch.labels.shape == (1, 4) and (batch.labels >= 0).all()


def test_a_source_of_texts_has_the_tokens_of_its_path(tmp_path: Path) -> None:
    path = written(tmp_path, TEXTS * 3, "texts.jsonl")
    held = written(tmp_path, TEXTS[:1], "held.jsonl")
    keys = {"sequence_length": 4, "eval_path": str(held)}
    folders = [tmp_path / "path", tmp_path / "sources"]
    made(folders[0], {"path": str(path), **keys}, train={"eval_every": 1})
    source = {"path": str(path), "columns": {"text": "text"}}
    made(folders[1], {"sources": [source], "packing": "wrapped", **keys}, train={"eval_every": 1})
    for name in ("train.bin", "train.sums", "eval.bin", "eval.sums"):
        first, second = ((folder / "data" / name).read_bytes() for folder in folders)
        assert first == second and first


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (chat("a", "b"), "and the prompts of this record do not count; use best-fit or none"),
        ({"prompt": "a", "completion": "b"}, "and the prompts of this record do not count"),
        (
            {"input_ids": [5, 6], "labels": [-100, 6]},
            "and labels or masks leave out 1 of 2 tokens",
        ),
        ({"input_ids": [257]}, "has the token 257, and the vocabulary has 257 tokens"),
        ({"input_ids": ["x"]}, "input_ids[0] = 'x': needs an integer"),
    ],
)
def test_records_that_are_no_text_are_refused(
    tmp_path: Path, record: dict[str, Any], error: str
) -> None:
    path = written(tmp_path, [{"text": "a"}, record])
    with pytest.raises(ConfigError) as caught:
        wrapped(tmp_path, {"path": str(path)})
    assert f"{path}, line 2: " in str(caught.value) and error in str(caught.value)
    assert not list((tmp_path / "data").glob(".*")), "nothing temporary is left"


def test_bad_records_are_left_out_on_request(tmp_path: Path) -> None:
    path = written(tmp_path, [{"input_ids": ["x"]}, {"text": "abcdefgh"}])
    lines: list[str] = []
    keys = {"packing": "wrapped", "sequence_length": 4, "bad_records": "skip"}
    made(tmp_path, {"sources": [{"path": str(path)}], **keys}, progress=lines.append)
    assert tokens(tmp_path) == text_ids("abcdefgh")
    assert "data: left out 1 records that cannot be read" in lines


def test_only_all_tokens_can_count() -> None:
    data = {"sources": [{"path": "a"}], "packing": "wrapped", "train_on": "assistant"}
    with pytest.raises(ConfigError, match=r"data\.train_on assistant: data\.packing wrapped"):
        parse_config({"model": {"hf": LLAMA}, "data": data})

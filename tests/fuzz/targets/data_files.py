"""Files of training data in every format: what comes out are documents, or an error of ours."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from penstock.client.convert.adapters import fields_of
from penstock.client.convert.passes import counted_records, entries_of
from penstock.client.convert.trl import first_columns
from penstock.config.data import SourceConfig
from penstock.models.data.chat.conversation import request_of
from penstock.models.data.reading.records import documents
from penstock.models.data.rows.registry import registered
from penstock.models.data.sources import Source
from tests.fuzz.target import Form, Target, from_file, plainly
from tests.fuzz.targets.run_files import dumped

LINES = dumped({"text": "a b"}, {"text": ""}, {"text": "c"})


def read_texts(name: str, folder: Path) -> list[str]:
    """Returns the documents of the file ``name`` in a folder."""
    source = Source(files=(folder / name,))
    return ["".join(document.parts) for document in documents(source)]


def read_conversation(data: bytes) -> object:
    """Returns the request of a record, which is a JSON object."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return request_of("a.jsonl, line 1", fields) if isinstance(fields, dict) else None


def read_registry(folder: Path) -> SourceConfig:
    """Returns the source of the entry ``it`` of the registry in a folder."""
    source = SourceConfig(registry=str(folder / "dataset_info.json"), name="it")
    return registered("data.sources[0]", source)


CONVERSATION = {
    "conversations": [
        {"from": "human", "value": "a", "weight": 0},
        {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {}})},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}], "train": True},
    ],
    "tools": json.dumps([{"name": "f"}]),
    "chat_template_kwargs": {"a": 1},
}


def _tables() -> list[pyarrow.Table]:
    texts = ["pumps lift", "", "water 水"]
    plain = pyarrow.table({"id": [1, 2, 3], "text": texts})
    return [plain, pyarrow.table({"text": pyarrow.array(texts).dictionary_encode()})]


def _parquet(table: pyarrow.Table) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink, row_group_size=2)
    return sink.getvalue()


def _arrow(table: pyarrow.Table, writer: Callable[..., pyarrow.RecordBatchStreamWriter]) -> bytes:
    sink = io.BytesIO()
    with writer(sink, table.schema) as file:
        file.write_table(table)
    return sink.getvalue()


def _target(name: str, file: str, covers: str, seeds: list[bytes], form: Form = Form.RAW) -> Target:
    return Target(
        name=name,
        open=from_file(file, partial(read_texts, file)),
        covers=(f"models.data.reading.{covers}",),
        seeds=lambda: seeds,
        form=form,
    )


DATA_FILES = (
    _target("text-lines", "a.jsonl", "json_files.json_lines", [b"\n".join(LINES)], Form.LINES),
    _target(
        "text-objects",
        "a.json",
        "json_files._Window.take_object",
        [b"[" + b",\n".join(LINES) + b"]", b"\n".join(LINES)],
        Form.TEXT,
    ),
    _target("text-csv", "a.csv", "csv_files._rows", [b'id,text\n1,"a\n""b"""\n2,\n'], Form.TEXT),
    _target("text-parquet", "a.parquet", "columns.parquet_rows", [*map(_parquet, _tables())]),
    _target(
        "text-arrow",
        "a.arrow",
        "columns._reader",
        [
            _arrow(table, writer)
            for table in _tables()
            for writer in (pyarrow.ipc.new_stream, pyarrow.ipc.new_file)
        ],
    ),
    _target("text-gzip", "a.txt.gz", "opening._gzip", [gzip.compress(b"a b" * 99, mtime=0)]),
    _target(
        "text-zstd",
        "a.txt.zst",
        "opening._zstd",
        [pyarrow.Codec("zstd").compress(b"a b" * 99, asbytes=True)],
    ),
    Target(
        name="chat-records",
        open=plainly(read_conversation),
        covers=("models.data.chat.messages._parsed",),
        seeds=lambda: [
            json.dumps(CONVERSATION).encode(),
            json.dumps({"instruction": "a", "output": "b", "history": [["c", "d"]]}).encode(),
            json.dumps({"input_ids": [1, 2], "labels": [-100, 2]}).encode(),
        ],
        form=Form.JSON,
    ),
    Target(
        name="registry",
        open=from_file("dataset_info.json", read_registry),
        covers=("models.data.rows.registry._entry", "config.splits.Split.parse"),
        seeds=lambda: [
            json.dumps({"it": {"file_name": "a.json", "num_samples": 2}}).encode(),
            json.dumps({"it": {"file_name": "a.json", "split": "train[-1_0:90%]"}}).encode(),
            json.dumps(
                {
                    "it": {
                        "file_name": "a.json",
                        "formatting": "sharegpt",
                        "columns": {"messages": "dialog"},
                        "tags": {"user_tag": "me"},
                    }
                }
            ).encode(),
        ],
        form=Form.JSON,
    ),
    Target(
        name="drawn-samples",
        open=from_file("dataset_info.json", lambda path: entries_of(path, ["it"])),
        covers=("client.convert.passes.entries_of",),
        seeds=lambda: [json.dumps({"it": {"file_name": "a.json", "num_samples": 2}}).encode()],
        form=Form.JSON,
    ),
    Target(
        name="counted-records",
        open=from_file("a.json", counted_records),
        covers=("client.convert.passes.counted_records",),
        seeds=lambda: [b"\n".join(LINES), b"[" + b",\n".join(LINES) + b"]"],
        form=Form.TEXT,
    ),
    Target(
        name="first-columns",
        open=from_file("a.jsonl", first_columns),
        covers=("client.convert.trl.first_columns",),
        seeds=lambda: [b"\n".join(LINES), b"[" + b",\n".join(LINES) + b"]"],
        form=Form.TEXT,
    ),
    Target(
        name="adapter-fields",
        open=from_file("adapter_config.json", fields_of),
        covers=("client.convert.adapters.fields_of",),
        seeds=lambda: [json.dumps({"r": 8, "lora_alpha": 16, "target_modules": ["q"]}).encode()],
        form=Form.JSON,
    ),
    _target("text-encoded", "a.txt", "decoding.decoded", ["水 lifts".encode()], Form.TEXT),
)

"""Files as people publish them, made small: each gives the right records, or an error that names
file, line or row, and field.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from penstock.host.errors import ConfigError
from penstock.models.data.chat.conversation import request_of
from penstock.models.data.chat.requests import (
    ChatRequest,
    CompletionRequest,
    IdsRequest,
    RecordForm,
    Request,
)
from penstock.models.data.reading.records import records
from penstock.models.data.sources import find_source

ASK, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
TALK = [("user", "a"), ("assistant", "b")]
LINE = json.dumps({"messages": [ASK, ANSWER]}).encode() + b"\n"
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def zstd(content: bytes) -> bytes:
    """The content, compressed."""
    return pyarrow.Codec("zstd").compress(content, asbytes=True)


def parquet(columns: Mapping[str, Any], **how: Any) -> bytes:
    """A Parquet file with these columns."""
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(dict(columns)), out, **how)
    return out.getvalue()


def stream(columns: Mapping[str, Any]) -> bytes:
    """An Arrow stream with these columns, as ``save_to_disk`` writes it."""
    out = io.BytesIO()
    table = pyarrow.table(dict(columns))
    with pyarrow.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def lines(*rows: Any) -> bytes:
    """JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


TWICE = (
    '{place}: expected a JSON object such as {{"text": "…"}} (an object has the key {key} twice;'
    " keep one)"
)
MESSAGE = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
WIDE = pyarrow.struct(
    [
        ("role", pyarrow.dictionary(pyarrow.int8(), pyarrow.string())),
        ("content", pyarrow.large_string()),
        ("tool_calls", pyarrow.list_(pyarrow.struct([("id", pyarrow.string())]))),
    ]
)


def talks(kind: Any, *rows: Any) -> Any:
    """A column of conversations."""
    return pyarrow.array(list(rows), pyarrow.list_(kind))


@dataclass(frozen=True, kw_only=True)
class Folder:
    """Files of a folder by name, instead of one file."""

    files: Mapping[str, bytes]


def shards(*parts: bytes) -> Folder:
    """A folder that ``save_to_disk`` wrote in several files."""
    names = [f"data-{n:05}-of-{len(parts):05}.arrow" for n in range(len(parts))]
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    texts = {"state.json": json.dumps(state), "dataset_info.json": '{"features": {}}'}
    return Folder(
        files={
            **dict(zip(names, parts, strict=True)),
            **{name: text.encode() for name, text in texts.items()},
        }
    )


CASES: dict[str, tuple[Callable[[], bytes | Folder], Sequence[Any] | str]] = {
    # JSON lines and JSON
    "bom.jsonl": (lambda: b"\xef\xbb\xbf" + LINE, [TALK]),
    "crlf.jsonl": (lambda: LINE.replace(b"\n", b"\r\n") * 2, [TALK, TALK]),
    "blank.jsonl": (lambda: b"\n" + LINE + b"  \n\n" + LINE + b"\n", [TALK, TALK]),
    "no_end.jsonl": (lambda: LINE.rstrip(), [TALK]),
    "utf16.jsonl": (
        lambda: LINE.decode().encode("utf-16"),
        ": begins with the byte order mark of utf-16 (ff fe at offset 0), and data.encoding is"
        " utf-8: set data.encoding to utf-16, or convert the file",
    ),
    "latin1.jsonl": (
        lambda: LINE.replace(b'"a"', b'"caf\xe9"'),
        ": byte 0xe9 at offset 46 is no utf-8",
    ),
    "nul.jsonl": (
        lambda: LINE + b"\0\0\0\0",
        ": byte 0x00 at offset 88 is a character that no text in utf-8 has",
    ),
    "comma.jsonl": (
        lambda: LINE.rstrip()[:-1] + b",}\n",
        ", line 1: expected a JSON object such as",
    ),
    "commas_between.jsonl": (lambda: LINE.rstrip() + b",\n" + LINE, ", line 1: expected a JSON"),
    "array.jsonl": (lambda: b"[" + LINE.rstrip() + b"]\n", ", line 1: expected a JSON object"),
    "pretty.jsonl": (lambda: json.dumps({"text": "a"}, indent=1).encode(), ", line 1: expected a"),
    "pretty.json": (lambda: json.dumps({"text": "a"}, indent=1).encode() * 2, ["a", "a"]),
    "array.json": (lambda: b"[\n" + LINE + b",\n" + LINE + b"]", [TALK, TALK]),
    "trailing_comma.json": (lambda: b"[" + LINE + b",\n]", ", line 3, record 2: expected a JSON"),
    "nested.json": (lambda: b"[[" + LINE + b"]]", ", line 1, record 1: expected a JSON object"),
    "under_a_key.json": (
        lambda: json.dumps({"version": 1, "data": [{"text": "a"}]}).encode(),
        ", line 1: its columns with values (version, data) are of no known format",
    ),
    "by_column.json": (
        lambda: b'{"text": ["a", "b"], "id": [1, 2]}',
        ", line 1: text = ['a', 'b']: needs a text",
    ),
    "lines.json": (lambda: LINE * 2, [TALK, TALK]),
    "twice.jsonl": (
        lambda: b'{"text": "a", "text": "b"}\n',
        TWICE.format(place=", line 1", key="text"),
    ),
    "twice_inside.json": (
        lambda: b'[{"messages": [{"role": "user", "content": "a", "content": "b"}]}]',
        TWICE.format(place=", line 1, record 1", key="content"),
    ),
    "nan.jsonl": (lambda: b'{"text": "a", "score": NaN}\n', ["a"]),
    "huge.jsonl": (lambda: lines({"text": "x" * 3_000_000}), ["x" * 3_000_000]),
    "lone_surrogate.jsonl": (lambda: b'{"text": "a\\ud83d"}\n', ["a\ud83d"]),
    # Conversations
    "human_gpt.json": (
        lambda: json.dumps(
            [
                {
                    "id": "identity_0",
                    "conversations": [
                        {"from": "human", "value": "a"},
                        {"from": "gpt", "value": "b"},
                    ],
                }
            ]
        ).encode(),
        [TALK],
    ),
    "two_answers.jsonl": (
        lambda: lines(
            {
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "gpt", "value": "b"},
                    {"from": "gpt", "value": "c"},
                ]
            }
        ),
        [[*TALK, ("assistant", "c")]],
    ),
    "weights.jsonl": (
        lambda: lines({"messages": [ASK, ANSWER | {"weight": 0}, ASK, ANSWER | {"weight": 1}]}),
        [[("user", "a"), ("assistant", "b", False), ("user", "a"), ("assistant", "b", True)]],
    ),
    "half_weight.jsonl": (
        lambda: LINE + lines({"messages": [ASK, ANSWER | {"weight": 0.5}]}),
        ", line 2: messages[1].weight = 0.5: needs 0, 1, false or true",
    ),
    "tools.jsonl": (
        lambda: lines(
            {
                "messages": [
                    ASK,
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "1", "name": "f", "content": "2"},
                    ANSWER,
                ],
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "parallel_tool_calls": False,
            }
        ),
        [[("user", "a"), ("assistant", None), ("tool", "2"), ("assistant", "b")]],
    ),
    "image.jsonl": (
        lambda: lines({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}),
        ", line 1: messages[0].content[0] = {'type': 'image_url'}: only texts are read",
    ),
    "role_number.jsonl": (
        lambda: lines({"messages": [{"role": 0, "content": "a"}]}),
        ", line 1: messages[0].role = 0: is no known role",
    ),
    "messages_as_text.jsonl": (
        lambda: lines({"messages": json.dumps([ASK, ANSWER])}),
        ", line 1: messages = ",
    ),
    "null_message.jsonl": (
        lambda: lines({"messages": [ASK, None]}),
        ", line 1: messages[1] = None: needs an object",
    ),
    "empty_talk.jsonl": (lambda: LINE + lines({"messages": []}), ", line 2: messages = []: needs"),
    # Prompts, completions, instructions, ids
    "empty_completion.jsonl": (
        lambda: lines({"prompt": "a", "completion": ""}),
        [("a", "")],
    ),
    "numbers.jsonl": (
        lambda: lines({"prompt": "2 + 2", "completion": 4}),
        ", line 1: completion = 4: needs a text",
    ),
    "ids_as_texts.jsonl": (
        lambda: lines({"input_ids": ["1", "2"]}),
        ", line 1: input_ids[0] = '1': needs an integer of at least 0",
    ),
    "ids.parquet": (
        lambda: parquet(
            {
                "input_ids": pyarrow.array([[1, 2]], pyarrow.list_(pyarrow.int32())),
                "attention_mask": pyarrow.array([[1, 1]], pyarrow.list_(pyarrow.int8())),
                "labels": pyarrow.array([[-100, 2]], pyarrow.large_list(pyarrow.int64())),
            }
        ),
        [((1, 2), (-100, 2))],
    ),
    "null_output.jsonl": (
        lambda: lines({"instruction": "a", "input": "", "output": None}),
        ", line 1: its columns with values (instruction, input) are of no known format",
    ),
    "alpaca.json": (
        lambda: json.dumps([{"instruction": "a", "input": "x", "output": "b"}]).encode(),
        [[("user", "a\nx"), ("assistant", "b")]],
    ),
    # CSV
    "quoted.csv": (
        lambda: b'prompt,completion\r\n"a\nof ""two"", lines",b\r\n',
        [('a\nof "two", lines', "b")],
    ),
    "bom.csv": (lambda: b"\xef\xbb\xbfprompt,completion\na,b\n", [("a", "b")]),
    "semicolons.csv": (
        lambda: b"prompt;completion\na;b\n",
        ", line 1: the header has one column, prompt;completion: fields need commas between them",
    ),
    "tabs.csv": (
        lambda: b"prompt\tcompletion\na\tb\n",
        ", line 1: the header has one column, 'prompt\\tcompletion': fields need commas",
    ),
    "index.csv": (lambda: b",prompt,completion\n0,a,b\n", [("a", "b")]),
    "ragged.csv": (
        lambda: b"prompt,completion\na,b\na,b,c\n",
        ", line 3: has 3 fields, and the header has 2",
    ),
    "no_header.csv": (
        lambda: b"a,b\nc,d\n",
        ", line 2: its columns with values (a, b) are of no known format",
    ),
    # Parquet and Arrow
    "structs.parquet": (
        lambda: parquet({"messages": talks(MESSAGE, [ASK, ANSWER], [ASK, ANSWER])}),
        [TALK, TALK],
    ),
    "wide.parquet": (
        lambda: parquet(
            {
                "messages": talks(WIDE, [ASK, ANSWER]),
                "source": pyarrow.array(["web"]).dictionary_encode(),
                "score": pyarrow.array([0.5]),
                "__index_level_0__": pyarrow.array([7]),
            }
        ),
        [TALK],
    ),
    "null_talk.parquet": (
        lambda: parquet({"messages": talks(MESSAGE, *[[ASK, ANSWER]] * 2, None)}, row_group_size=2),
        ", row group 2, row 1: its columns with values (none) are of no known format",
    ),
    "null_content.parquet": (
        lambda: parquet(
            {"messages": talks(MESSAGE, [ASK, ANSWER], [ASK, ANSWER | {"content": None}])}
        ),
        ", row group 1, row 2: messages[1] = ",
    ),
    "mixed.parquet": (
        lambda: parquet(
            {
                "prompt": pyarrow.array(["a", None]),
                "completion": pyarrow.array(["b", None], pyarrow.large_string()),
                "text": pyarrow.array([None, "t"], pyarrow.string()),
            }
        ),
        [("a", "b"), "t"],
    ),
    "bytes.parquet": (
        lambda: parquet({"text": pyarrow.array([b"a"], pyarrow.binary())}),
        ", row group 1, row 1: text = b'a': needs a text",
    ),
    "map.parquet": (
        lambda: parquet(
            {
                "messages": pyarrow.array(
                    [[list(ASK.items()), list(ANSWER.items())]],
                    pyarrow.list_(pyarrow.map_(pyarrow.string(), pyarrow.string())),
                )
            }
        ),
        ", row group 1, row 1: messages[0] = [('role', 'user'), ('content', 'a')]: needs",
    ),
    "cut.parquet": (
        lambda: parquet({"text": pyarrow.array(["a"])})[:-20],
        ": cannot be read as Parquet (",
    ),
    "html.parquet": (
        lambda: b"<!DOCTYPE html><html></html>",
        ": cannot be read as Parquet (",
    ),
    "shards": (
        lambda: shards(
            stream({"messages": talks(MESSAGE, [ASK, ANSWER])}),
            stream({"messages": talks(MESSAGE, [ASK])}),
        ),
        [TALK, TALK[:1]],
    ),
    # Compressed
    "talk.jsonl.gz": (lambda: gzip.compress(LINE) + gzip.compress(LINE), [TALK, TALK]),
    "talk.jsonl.zst": (lambda: zstd(LINE) + zstd(LINE), [TALK, TALK]),
    "talk.json.gz": (lambda: gzip.compress(b"[" + LINE + b"]"), [TALK]),
    "pairs.csv.zst": (lambda: zstd(b"prompt,completion\na,b\n"), [("a", "b")]),
    "bad_line.jsonl.gz": (
        lambda: gzip.compress(LINE + b"{\n"),
        ", line 2: expected a JSON object such as",
    ),
    "plain.jsonl.gz": (lambda: LINE, ": cannot be decompressed (Not a gzipped file"),
    "talk.parquet.gz": (lambda: gzip.compress(b"PAR1"), "': the name does not end in .txt, .md"),
}


def shown(request: Request) -> Any:
    """A request in short: turns, prompt and completion, ids and labels, or the text."""
    match request:
        case ChatRequest(turns=turns):
            parts = [(t.role, t.fields.get("content"), t.counts) for t in turns]
            return [part if part[2] is not None else part[:2] for part in parts]
        case CompletionRequest():
            return request.prompt, request.completion
        case IdsRequest():
            return request.ids, request.labels
    return request.text


def read(path: Path, encoding: str = "utf-8", form: RecordForm | None = None) -> list[Any]:
    """All records of a file or folder in short."""
    source = find_source(str(path), encoding=encoding, any_records=True)
    with closing(records(source)) as listed:  # an error keeps the file of an open generator open
        return [shown(request_of(r.place, r.fields, form)) for r in listed]


def written(path: Path, content: bytes | Folder) -> Path:
    """The file or folder with the content."""
    if isinstance(content, Folder):
        path.mkdir()
        for name, part in content.files.items():
            (path / name).write_bytes(part)
    else:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", CASES)
def test_a_file_as_people_publish_it(tmp_path: Path, name: str) -> None:
    make, expected = CASES[name]
    path = written(tmp_path / name, make())
    if not isinstance(expected, str):
        assert read(path) == list(expected)
        return
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert f"{path}{expected}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1", "utf-8-sig"])
def test_an_encoding_that_the_user_names(tmp_path: Path, encoding: str) -> None:
    line = LINE.decode().replace('"a"', '"é"')
    path = written(tmp_path / "a.jsonl", line.encode(encoding))
    assert read(path, encoding) == [[("user", "é"), ("assistant", "b")]]

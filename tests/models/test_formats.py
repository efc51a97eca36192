"""Text from every format: the same records give the same tokens, and odd files one sentence."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from penstock.host.errors import ConfigError
from penstock.models.data.cache import key_of
from penstock.models.data.chunks import ChunkHasher
from penstock.models.data.corpus import write_tokens
from penstock.models.data.marks import Marks
from penstock.models.data.reading import csv_files, json_files, opening
from penstock.models.data.reading.opening import PIECE_BYTES
from penstock.models.data.reading.records import documents
from penstock.models.data.sources import Source, find_source
from penstock.models.data.tokenizer import ByteTokenizer
from tests.hostile import columns, compressed, many_keys

TEXTS = [
    "Ädä lifts water; ночь, 水, 😀.\n",
    "",
    'say "no", twice\r\n\r\n',
    "\ufeffa\u2028b\x85",
    " \t ",
]
RECORDS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]


def as_lines(records: Sequence[Mapping[str, object]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def as_array(records: Sequence[Mapping[str, object]]) -> bytes:
    return json.dumps(records, ensure_ascii=False, indent=1).encode()


def as_csv(records: Sequence[Mapping[str, object]]) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]))
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue().encode()


def as_parquet(records: Sequence[Mapping[str, object]]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), out, row_group_size=2)
    return out.getvalue()


def as_stream(records: Sequence[Mapping[str, object]]) -> bytes:
    return _as_arrow(records, pyarrow.ipc.new_stream)


def as_arrow_file(records: Sequence[Mapping[str, object]]) -> bytes:
    return _as_arrow(records, pyarrow.ipc.new_file)


def _as_arrow(records, writer) -> bytes:
    table, out = pyarrow.Table.from_pylist(records), io.BytesIO()
    with writer(out, table.schema) as file:
        file.write_table(table, max_chunksize=2)
    return out.getvalue()


def zstd(content: bytes) -> bytes:
    return pyarrow.Codec("zstd").compress(content, asbytes=True)


FORMATS: dict[str, Callable[[], bytes]] = {
    "a.json": lambda: as_array(RECORDS),
    "lines.json": lambda: as_lines(RECORDS),
    "a.csv": lambda: as_csv(RECORDS),
    "a.parquet": lambda: as_parquet(RECORDS),
    "a.arrow": lambda: as_stream(RECORDS),
    "file.arrow": lambda: as_arrow_file(RECORDS),
    "a.jsonl.gz": lambda: b"".join(gzip.compress(as_lines([record])) for record in RECORDS),
    "a.json.gz": lambda: gzip.compress(as_array(RECORDS)),
    "a.csv.gz": lambda: gzip.compress(as_csv(RECORDS)),
    "a.jsonl.zst": lambda: b"".join(zstd(as_lines([record])) for record in RECORDS),
    "a.json.zst": lambda: zstd(as_array(RECORDS)),
    "a.csv.zst": lambda: zstd(as_csv(RECORDS)),
}  # fmt: skip


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(path: Path, encoding: str = "utf-8") -> list[str]:
    source = find_source(str(path), encoding=encoding)
    return ["".join(document.parts) for document in documents(source)]


def tokens(path: Path) -> bytes:
    out = path.with_name("out.bin")
    read: list[int] = []
    source = find_source(str(path))
    write_tokens(
        documents(source, read.append),
        ByteTokenizer(),
        out,
        ChunkHasher(),
        Marks(after=(256,)),
        vocab_size=257,
    )
    assert sum(read) == path.stat().st_size and min(read) >= 0
    return out.read_bytes()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_tokens_of_json_lines(tmp_path: Path, name: str) -> None:
    expected = tokens(written(tmp_path / "lines/a.jsonl", as_lines(RECORDS)))
    assert tokens(written(tmp_path / name, FORMATS[name]())) == expected


@pytest.mark.parametrize("suffix", [".txt", ".md", ".py"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "shift_jis"])
def test_compressed_text_is_the_text(tmp_path: Path, suffix: str, encoding: str) -> None:
    text = "水 lifts\r\n" * (PIECE_BYTES // 8)
    content = text.encode(encoding)
    for ending, compress in ((".gz", gzip.compress), (".zst", zstd)):
        assert texts(written(tmp_path / f"a{suffix}{ending}", compress(content)), encoding) == [
            text
        ]
    for name in ("a.csv", "a.json"):
        record = FORMATS[name]().decode().encode(encoding, "ignore")
        assert len(texts(written(tmp_path / name, record), encoding)) == 4


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_types_of_strings_are_text(tmp_path: Path, kind: str) -> None:
    values = pyarrow.array(["a", "b", "a"])
    column = (
        values.dictionary_encode()
        if kind == "dictionary"
        else values.cast(getattr(pyarrow, kind)())
    )
    table, out = pyarrow.table({"n": [1, 2, 3], "text": column}), io.BytesIO()
    with pyarrow.ipc.new_stream(out, table.schema) as file:
        file.write_table(table)
    assert texts(written(tmp_path / "a.arrow", out.getvalue())) == ["a", "b", "a"]
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    assert texts(tmp_path / "a.parquet") == ["a", "b", "a"]


def saved(folder: Path, parts: Sequence[bytes]) -> None:
    """Makes a folder as ``Dataset.save_to_disk`` does."""
    written(folder / "state.json", '{"_data_files": []}')
    written(folder / "dataset_info.json", "{}")
    for number, content in enumerate(parts):
        written(folder / f"data-{number:05}-of-{len(parts):05}.arrow", content)


def test_saved_datasets(tmp_path: Path) -> None:
    one = tmp_path / "one"
    saved(one, [as_stream(RECORDS[:2]), as_stream(RECORDS[2:])])
    written(one / "cache-0123456789abcdef.arrow", as_stream([{"text": "cached"}]))
    source = find_source(str(one))
    assert texts(one) == [text for text in TEXTS if text]
    assert source.omissions == "2 descriptions of datasets, 1 result kept by datasets"
    (one / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ConfigError) as caught:
        find_source(str(one))
    assert str(caught.value) == (
        f"data.path = {str(one)!r}: {one} has 1 of the 2 files of its dataset; copy the whole"
        " folder"
    )
    assert len(find_source(f"{one}/data*").files) == 1


def test_folders_of_splits_give_their_training_split(tmp_path: Path) -> None:
    splits = tmp_path / "splits"
    written(splits / "dataset_dict.json", '{"splits": ["train", "test"]}')
    saved(splits / "train", [as_stream([{"text": "train"}])])
    saved(splits / "test", [as_stream([{"text": "test"}])])
    assert texts(splits) == ["train"]
    assert texts(tmp_path) == ["train"]
    assert texts(splits / "test") == ["test"]
    assert find_source(str(splits)).omissions == (
        "5 descriptions of datasets, 1 in splits other than train"
    )


CHAT = "has no column text, which training on plain text needs; its columns are id, messages"
MESSAGES = [{"id": 1, "messages": [{"role": "user", "content": "hi"}]}]
NULLS = [{"text": "one"}, {"text": None}, {"text": "three"}]

REFUSED = {
    "chat.jsonl": (as_lines(MESSAGES), ", line 1: " + CHAT),
    "chat.json": (as_array(MESSAGES), ", line 2, record 1: " + CHAT),
    "chat.csv": (b"id,messages\n1,hi\n", ", line 1: " + CHAT),
    "chat.parquet": (as_parquet(MESSAGES), ": " + CHAT),
    "chat.arrow": (as_stream(MESSAGES), ": " + CHAT),
    "null.json": (
        as_array(NULLS),
        ", line 5, record 2: the column text holds null, and a record needs a text in it",
    ),
    "null.parquet": (
        as_parquet([*RECORDS, {"id": 9, "text": None}]),
        ", row group 3, row 2: the column text holds null, and a record needs a text in it",
    ),
    "null.arrow": (
        as_arrow_file(NULLS),
        ", batch 1, row 2: the column text holds null, and a record needs a text in it",
    ),
    "numbers.parquet": (
        as_parquet([{"text": 5}]),
        ": the column text holds values of type int64, and a record needs a text in it",
    ),
    "list.json": (
        b'[{"text": ["a"]}]',
        ", line 1, record 1: the column text holds a list, and a record needs a text in it",
    ),
    "other.json": (
        b'{"data": [{"text": "a"}]}',
        ", line 1: has no column text, which training on plain text needs; its columns are data",
    ),
    "strings.json": (
        b'["a"]',
        ', line 1, record 1: expected a JSON object such as {"text": "\u2026"}',
    ),
    "number.json": (b"5", ', line 1: expected a JSON object such as {"text": "\u2026"}'),
    "comma.json": (
        b'[{"text": "a"} {"text": "b"}]',
        ", line 1, record 1: expected , or ] and found '{'",
    ),
    "after.json": (b'[{"text": "a"}]\n5', ", line 2: text follows the end of the JSON array"),
    "cut.json": (
        b'[{"text": "a"}, {"text": "b',
        ", line 1, record 2: the file ends within this record",
    ),
    "open.json": (
        b'[{"text": "a"}',
        ", line 1, record 1: expected , or ] and found the end of the file",
    ),
    "deep.json": (
        b'[{"text": "a", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]",
        ', line 1, record 1: expected a JSON object such as {"text": "\u2026"} (nested too deeply)',
    ),
    "other.csv": (
        b"id;text\n1;a\n",
        ", line 1: has no column text, which training on plain text needs; its columns are id;text",
    ),
    "twice.csv": (b"text,text\na,b\n", ", line 1: has the column text 2 times"),
    "ragged.csv": (
        b'id,text\n1,"a\nb"\n\n2,c,d\n',
        ", line 5: has 3 fields, and the header has 2",
    ),
    "open.csv": (
        b'id,text\n1,a\n2,"b\n3,c\n',
        ", line 3: this row is no CSV (unexpected end of data)",
    ),
    "cut.txt.gz": (
        gzip.compress(b"water" * 99)[:-9],
        ": cannot be decompressed (Compressed file ended before the end-of-stream marker was"
        " reached); the file is damaged or cut short",
    ),
    "no.txt.gz": (
        b"water",
        ": cannot be decompressed (Not a gzipped file (b'wa')); the file is damaged or cut short",
    ),
    "cut.txt.zst": (
        zstd(b"water" * 99)[:-5],
        ": cannot be decompressed (Truncated compressed stream); the file is damaged or cut short",
    ),
    "latin.txt.gz": (
        gzip.compress(b"plain, then \xc4"),
        " (decompressed): byte 0xc4 at offset 12 is no utf-8 (unexpected end of data); convert the"
        " file to utf-8, or set data.encoding to the encoding of all text files, such as latin-1 or"
        " utf-16",
    ),
    "cut.arrow": (
        as_stream(RECORDS)[:-8],
        ": is an Arrow stream without its end; it was cut short, or never closed",
    ),
    "utf8.arrow": (
        as_stream([{"text": "water"}]).replace(b"water", b"wat\xffr"),
        ", batch 1, rows from 1: the column text is damaged (In column 0: Invalid: Invalid UTF8"
        " sequence at string index 0)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_odd_files_are_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    content, words = REFUSED[name]
    path = written(tmp_path / name, content)
    with pytest.raises(ConfigError) as caught:
        texts(path)
    assert str(caught.value) == f"{path}{words}"
    assert path not in {link.resolve() for link in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "file.arrow"])
def test_damaged_tables_are_refused(tmp_path: Path, name: str) -> None:
    content = FORMATS[name]()
    kind = "Parquet" if name == "a.parquet" else "Arrow"
    for damaged in (b"", b"x", content[: len(content) // 2], content[:30] + b"\xff" * 99):
        path = written(tmp_path / name, damaged)
        with pytest.raises(ConfigError, match=rf"{name}: cannot be read as {kind} \(.*cut short"):
            texts(path)


def test_files_without_records_have_no_documents(tmp_path: Path) -> None:
    empty = {
        "a.json": b"[]", "b.json": b" \n", "c.json": b"", "a.csv": b"", "b.csv": b"text\n",
        "a.parquet": as_parquet([{"text": ""}]), "a.txt.gz": gzip.compress(b""),
        "a.jsonl.zst": zstd(b""),
    }  # fmt: skip
    for name, content in empty.items():
        assert texts(written(tmp_path / name, content)) == []


def test_columns_of_any_name_are_named(tmp_path: Path) -> None:
    names = ["a\nb", "\ud83d", "x" * 50, "", *"abcdef"]
    path = written(tmp_path / "a.jsonl", as_lines([dict.fromkeys(names, 1)]))
    shown = r"""'a\nb', '\ud83d', """ + "x" * 40 + "…, '', a, b, c, d and 2 more"
    with pytest.raises(ConfigError) as caught:
        texts(path)
    assert str(caught.value).endswith(f"its columns are {shown}")


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [
        written(tmp_path / name, FORMATS[name]()) for name in ("a.parquet", "a.arrow", "a.csv.zst")
    ]
    for name in ("pyarrow", "pyarrow.parquet", "pyarrow.ipc"):
        monkeypatch.setitem(sys.modules, name, None)
    for path in paths:
        with pytest.raises(ConfigError) as caught:
            texts(path)
        assert str(caught.value) == (
            f"{path}: needs pyarrow, which is not installed (pip install 'penstock[data]')"
        )


def test_a_pointer_in_the_place_of_a_table_is_refused(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4120\n"
    path = written(tmp_path / "a.parquet", pointer)
    with pytest.raises(ConfigError, match=r"a\.parquet is a Git LFS pointer"):
        texts(path)


def test_a_folder_of_many_formats(tmp_path: Path) -> None:
    for name, make in FORMATS.items():
        written(tmp_path / name, make())
    written(tmp_path / "a.tar.gz", b"x")
    written(tmp_path / "a.parquet.zst", b"x")
    source = find_source(str(tmp_path))
    assert [path.name for path in source.files] == sorted(FORMATS)
    assert source.left_out == {".gz": 1, ".zst": 1}
    assert texts(tmp_path) == [text for text in TEXTS if text] * len(FORMATS)


def test_other_data_of_a_folder_is_left_out_and_a_glob_reads_it(tmp_path: Path) -> None:
    contents = {
        "a.txt": "plain",
        "b.json": '[{"text": "array"}]',
        "c.csv": "text,n\nrow,1\n",
        "package.json": '{"name": "left out", "version": 1}',
        "list.json": "[1, 2]",
        "chat.json": '[{"messages": []}]',
        "prices.csv": "day,price\nmonday,3\n",
        "no.json": "{not json",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    source = find_source(str(tmp_path))
    assert [path.name for path in source.files] == ["a.txt", "b.json", "c.csv"]
    assert source.omissions == "4 .json without text, 1 .csv without text"
    with pytest.raises(ConfigError, match=r"chat\.json, line 1, record 1: has no column text"):
        list(documents(find_source(str(tmp_path / "c*.*"))))


def test_the_key_of_kept_tokens_has_the_whole_ending(tmp_path: Path) -> None:
    content = gzip.compress(b'{"text": "a"}')
    names = ("a.txt.gz", "a.jsonl.gz", "b.jsonl.gz")
    files = [written(tmp_path / name, content) for name in names]
    keys = [key_of(Source(files=(path,)), []) for path in files]
    assert keys[0] != keys[1] == keys[2]


@pytest.mark.parametrize("shift", range(3))
def test_objects_over_the_ends_of_pieces(tmp_path: Path, shift: int) -> None:
    """Windows end within every kind of token, and records are longer than pieces."""
    records = [
        {"text": '水\\"\n' * (number * 7 % 50), "n": [-1.5e300, True, None, {"a": "\ud83d\ude00"}]}
        for number in range(4_000)
    ]
    records.insert(99, {"text": "long " * (PIECE_BYTES // 2)})
    content = " " * shift + json.dumps(records)
    path = written(tmp_path / "a.json", content)
    assert texts(path) == [record["text"] for record in records if record["text"]]


def test_a_record_without_an_end_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_files, "_MAX_CHARACTERS", PIECE_BYTES)
    path = written(tmp_path / "a.json", '[{"text": "' + "a" * (4 * PIECE_BYTES))
    with pytest.raises(ConfigError) as caught:
        texts(path)
    assert str(caught.value) == (
        f"{path}, line 1, record 1: is longer than 1,048,576 characters, or a string in it has no"
        " end; give each record a line or an object of its own"
    )


def _peak_bytes(path: Path) -> tuple[int, int]:
    """Returns the peak of memory of Python's and of pyarrow's allocators while a file is read."""
    pool = pyarrow.system_memory_pool()
    before = pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(pool)
    tracemalloc.start()
    try:
        for document in documents(find_source(str(path))):
            for _ in document.parts:
                pass
        return tracemalloc.get_traced_memory()[1], pool.max_memory() or 0
    finally:
        tracemalloc.stop()
        pyarrow.set_memory_pool(before)


def test_memory_stays_flat_for_one_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    record = json.dumps({"text": "water " * 5000})
    with path.open("w") as file:
        file.write("[" + ", ".join([record] * 600) + "]")
    assert path.stat().st_size > 16 * PIECE_BYTES
    assert _peak_bytes(path)[0] < 8 * PIECE_BYTES


def test_memory_stays_flat_for_one_row_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"{n} " + "water " * 5000 for n in range(600)]})
    pyarrow.parquet.write_table(table, path, compression="none", write_batch_size=16)
    del table
    assert path.stat().st_size > 16 * PIECE_BYTES
    python, arrow = _peak_bytes(path)
    assert python < 8 * PIECE_BYTES and arrow < 12 * PIECE_BYTES


def test_a_line_without_an_end_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "_MAX_CHARACTERS", PIECE_BYTES)
    monkeypatch.setattr(csv_files, "_MAX_CHARACTERS", PIECE_BYTES)
    line = '{"text": "' + "a" * (4 * PIECE_BYTES)
    path = written(tmp_path / "a.jsonl", '{"text": "b"}\n' + line)
    complaint = r"a\.jsonl, line 2: is longer than 1,048,576 characters, or a string in it has"
    with pytest.raises(ConfigError, match=complaint):
        texts(path)
    path = written(tmp_path / "a.csv", "text\n" + "a" * (4 * PIECE_BYTES))
    with pytest.raises(ConfigError, match=r"a\.csv, line 2: is longer than 1,048,576 characters"):
        texts(path)


def test_lines_have_their_numbers_also_across_parts() -> None:
    parts = ["\na\nb", "c\n", "\n\n d", "\n", "\n", "e"]
    lines = json_files._lines(Path("a.jsonl"), parts)
    assert [*lines] == [(2, "a"), (3, "bc"), (6, " d"), (8, "e")]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_small_file_with_a_long_content_is_refused(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_FREE_BYTES", 1 << 22)
    config = compressed(tmp_path, 1 << 25, suffix)
    path = config.with_name(f"blank.jsonl{suffix}")
    complaint = (
        rf"blank\.jsonl{suffix}: has [\d,]+ bytes, and a content of at least [\d,]+, over 100 times"
        " as many; if you trust its source, convert it to JSON lines without compression"
    )
    with pytest.raises(ConfigError, match=complaint):
        texts(path)


def test_a_value_that_any_number_of_rows_name_is_counted_in_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_FREE_BYTES", 1 << 24)
    path = columns(tmp_path, 1000).with_name("rows.parquet")
    with pytest.raises(ConfigError, match=r"rows\.parquet: has [\d,]+ bytes, and a content of at"):
        texts(path)
    path = columns(tmp_path, 100).with_name("rows.parquet")
    assert len(texts(path)) == 100


def test_a_key_twice_among_many_is_found_in_linear_time(tmp_path: Path) -> None:
    path = many_keys(tmp_path, 200_000).with_name("keys.jsonl")
    with pytest.raises(ConfigError, match="an object has the key 199999 twice"):
        texts(path)

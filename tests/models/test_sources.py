"""The files of a text source, and their text: what is read is what was meant, or it is refused."""

from __future__ import annotations

import gzip
import json
import os
import socket
from pathlib import Path

import pytest

from penstock.config.schema import parse_config
from penstock.host.errors import ConfigError
from penstock.models.data.chunks import ChunkHasher
from penstock.models.data.corpus import write_tokens
from penstock.models.data.marks import Marks
from penstock.models.data.reading.opening import PIECE_BYTES
from penstock.models.data.reading.records import documents, records
from penstock.models.data.sources import MAX_STDLIB_BYTES, Source, find_source
from penstock.models.data.tokenizer import ByteTokenizer

TEXT = "Ädä lifts water; ночь, 水, 😀.\n"


def texts(path: Path, encoding: str = "utf-8") -> list[str]:
    """The documents of a file."""
    return contents(find_source(str(path), encoding=encoding))


def contents(source: Source) -> list[str]:
    """The documents of a source."""
    return ["".join(document.parts) for document in documents(source)]


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def names(source: Source, root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in source.files]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with links, hidden files and files of other kinds."""
    root = tmp_path / "tree"
    for name in ("a.txt", "sub/b.md", "sub/deep/c.jsonl", "sub/d.py", ".hidden.txt", "c.TXT"):
        written(root / name, "text")
    for name in (".ipynb_checkpoints/a.txt", "sub/.git/x.txt", "e.JSON", "f.docx", "README"):
        written(root / name, "text")
    written(root / "d.tar.gz", gzip.compress(b"text"))
    written(root / "empty.txt", b"")
    written(tmp_path / "elsewhere/one.txt", "text")
    written(tmp_path / "elsewhere/.two.txt", "text")
    (root / "linked").symlink_to("../elsewhere")
    (root / "sub/again").symlink_to("../../elsewhere")
    (root / "sub/up").symlink_to("..")
    (root / "itself.txt").symlink_to("itself.txt")
    (root / "gone.txt").symlink_to("nowhere.txt")
    (root / "Z.txt").symlink_to("a.txt")
    os.mkfifo(root / "pipe.txt")
    return root


def test_a_folder_and_its_glob_mean_the_same(tree: Path) -> None:
    folder = find_source(str(tree))
    assert names(folder, tree) == [
        "a.txt",
        "linked/one.txt",
        "sub/b.md",
        "sub/d.py",
        "sub/deep/c.jsonl",
    ]
    assert folder.left_out == {
        "hidden": 4,
        "reached twice": 3,
        "broken link": 2,
        ".TXT": 1,
        ".JSON": 1,
        ".docx": 1,
        ".gz": 1,
        "device or pipe": 1,
        "empty": 1,
        "without an ending": 1,
    }
    assert folder.omissions == (
        "4 hidden, 3 reached twice, 2 broken links, 1 .JSON, 1 .TXT, 1 .docx, 1 .gz,"
        " 1 device or pipe, 2 of other kinds"
    )
    for glob in ("**", "**/*", "**/**/*"):
        assert find_source(f"{tree}/{glob}") == folder


@pytest.mark.parametrize(
    ("glob", "found", "left_out"),
    [
        ("*.txt", ["a.txt"], {"hidden": 1, "reached twice": 1, "broken link": 2, "empty": 1,
                              "device or pipe": 1}),
        ("**/*.md", ["sub/b.md"], {"hidden": 2, "reached twice": 2}),
        ("sub/*", ["sub/b.md", "sub/d.py"], {"hidden": 1, "folder": 3}),
        ("*/*.txt", ["linked/one.txt"], {"hidden": 2}),
        ("**/deep/*", ["sub/deep/c.jsonl"], {"hidden": 2, "reached twice": 2}),
        (".hidden.txt", [".hidden.txt"], {}),
        (".*.txt", [".hidden.txt"], {}),
        ("**/.git/*", ["sub/.git/x.txt"], {"hidden": 1, "reached twice": 2}),
        (".ipynb_checkpoints", [".ipynb_checkpoints/a.txt"], {}),
        ("[a]*", ["a.txt"], {}),
    ],
)  # fmt: skip
def test_globs(tree: Path, glob: str, found: list[str], left_out: dict[str, int]) -> None:
    source = find_source(f"{tree}/{glob}")
    assert names(source, tree) == found
    assert source.left_out == left_out


def test_cycles_of_links_end(tmp_path: Path) -> None:
    """Without a memory of folders there are 8! ways through them."""
    for number in range(8):
        written(tmp_path / f"f{number}/{number}.txt", "text")
        for other in range(8):
            (tmp_path / f"f{number}/to{other}").symlink_to(f"../f{other}")
    source = find_source(str(tmp_path))
    assert names(source, tmp_path) == [f"f{n}/{n}.txt" for n in range(8)]
    assert source.left_out == {"reached twice": 64}


@pytest.mark.parametrize("place", ["", "/*", "/**", "/**/*.tar.gz"])
def test_nothing_to_read_is_said_the_same_way(tmp_path: Path, place: str) -> None:
    written(tmp_path / "some/a.tar.gz", gzip.compress(b"text"))
    expected = r"data.path = .*: matches no file of text \(left out: 1 .gz\); give a file or folder"
    with pytest.raises(ConfigError, match=expected):
        find_source(f"{tmp_path}/some{place}")


def test_sources_without_files(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in ("empty", "empty/*", "*.txt", "nowhere/**"):
        with pytest.raises(ConfigError, match=r"matches no file of text"):
            find_source(f"{tmp_path}/{place}")
    with pytest.raises(ConfigError, match=r"data.eval_path = .*: no such file or folder"):
        find_source(f"{tmp_path}/nowhere", key="data.eval_path")
    with pytest.raises(ConfigError, match=r"no such file or folder"):
        find_source(f"{tmp_path}/a\0b")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s.txt"))
        with pytest.raises(ConfigError, match=r"left out: 1 device or pipe"):
            find_source(f"{tmp_path}/*.txt")
    for name in ("a.tar.gz", "a.parquet.gz", "a.TXT", "tokens.bin"):
        with pytest.raises(ConfigError, match=rf"{name}': the name does not end in .txt, .md"):
            find_source(str(written(tmp_path / name, "text")))


def test_names_of_any_kind_are_listed(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path)
    for name in (
        b"\xff.\xff",
        b"a.line\nend",
        b"b.longer-than-any-ending",
        b"[1].txt",
        b"\xfe.txt",
    ):
        Path(os.fsdecode(folder + b"/" + name)).write_text("text")
    source = find_source(str(tmp_path))
    assert source.left_out == {"of other kinds": 3} and len(source.files) == 2
    assert names(find_source(f"{tmp_path}/[1].txt"), tmp_path) == ["[1].txt"]
    assert contents(source) == ["text"] * 2


def test_deep_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(300):
        os.mkdir("d")
        os.chdir("d")
    Path("a.txt").write_text("text")
    os.chdir(tmp_path)
    assert len(find_source(".").files) == 1


def test_standard_library_is_a_corpus_of_reasonable_size() -> None:
    files = find_source("@stdlib", encoding="latin-1").files
    size = sum(path.stat().st_size for path in files)
    assert 5 * 10**6 < size <= MAX_STDLIB_BYTES
    assert list(files) == sorted(files) and find_source("@stdlib").files == files
    assert not any("test" in path.parts or "site-packages" in path.parts for path in files)
    assert find_source("@stdlib", encoding="latin-1").encoding == "utf-8"
    content = contents(find_source("@stdlib"))
    assert content == [text.decode() for path in files if (text := path.read_bytes())]


def test_documents_of_all_kinds(tmp_path: Path) -> None:
    written(tmp_path / "b.txt", "grün")
    written(tmp_path / "a.jsonl", '{"text": "one"}\n\n{"text": ""}\n{"text": "two"}\n')
    written(tmp_path / "c.md", "\ufeff")
    source = find_source(str(tmp_path / "*"))
    assert contents(source) == ["one", "two", "grün"]
    a, b = tmp_path / "a.jsonl", tmp_path / "b.txt"
    places = [document.place for document in documents(source)]
    assert places == [f"{a}, line 1", f"{a}, line 4", str(b)]
    marks = Marks(after=(256,))
    out = tmp_path / "out.bin"
    count = write_tokens(
        documents(source), ByteTokenizer(), out, ChunkHasher(), marks, vocab_size=257
    )
    assert count == 3 + 1 + 3 + 1 + 5 + 1


def test_records_know_their_file_and_line(tmp_path: Path) -> None:
    lines = ['{"messages": [1]}', "", '{"text": "two", "more": {"a": 1}}']
    chat = written(tmp_path / "a.jsonl", "\n".join(lines))
    text = written(tmp_path / "b.txt", "text")
    read: list[int] = []
    found = [(r.path, r.where, r.fields, "".join(r.parts)) for r in records(
        find_source(str(tmp_path)), read.append
    )]  # fmt: skip
    assert found == [
        (chat, "line 1", {"messages": [1]}, ""),
        (chat, "line 3", {"text": "two", "more": {"a": 1}}, ""),
        (text, "", {}, "text"),
    ]
    assert sum(read) == sum(path.stat().st_size for path in (chat, text))


MARKED = ["utf-8-sig", "utf-16", "utf-32"]
MARKLESS = ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_mark_is_no_text_and_ends_of_lines_stay(tmp_path: Path, ending: str) -> None:
    text = ending.join(["one", "\ufefftwo", ""])
    assert texts(written(tmp_path / "a.txt", text.encode("utf-8-sig"))) == [text]
    lines = ending.join(['{"text": "one\\r\\n"}', '\ufeff{"text": "\\ufefftwo"}', ""])
    path = written(tmp_path / "a.jsonl", lines.encode("utf-8-sig"))
    assert texts(path) == ["one\r\n", "\ufefftwo"]


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    line = json.dumps({"text": "a\u2028b\u0085c"}, ensure_ascii=False)
    assert texts(written(tmp_path / "a.jsonl", f"{line}\n{line}")) == ["a\u2028b\u0085c"] * 2


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
@pytest.mark.parametrize(
    ("encoding", "complaint"),
    [
        ("utf-16", r"begins with the byte order mark of utf-16 \(ff fe at offset 0\)"),
        ("utf-32", r"begins with the byte order mark of utf-32 \(ff fe 00 00 at offset 0\)"),
        ("utf-16-le", r"byte 0x00 at offset 1 .* those of utf-16-le: set data.encoding"),
        ("utf-16-be", r"byte 0x00 at offset 0 .* those of utf-16-be: set data.encoding"),
        ("utf-32-le", r"byte 0x00 at offset 1 .* set data.encoding to utf-32-le"),
        ("utf-32-be", r"byte 0x00 at offset 0 .* set data.encoding to utf-32-be"),
    ],
)  # fmt: skip
def test_wide_encodings_are_refused_unless_named(
    tmp_path: Path, suffix: str, encoding: str, complaint: str
) -> None:
    text = json.dumps({"text": "plain text"}) + "\n"
    path = written(tmp_path / f"a{suffix}", text.encode(encoding))
    with pytest.raises(ConfigError, match=rf"a{suffix}: {complaint}"):
        texts(path)
    assert texts(path, encoding) == ["plain text" if suffix == ".jsonl" else text]


@pytest.mark.parametrize(
    ("encoding", "text", "complaint"),
    [
        ("latin-1", "plain, then Ä", r"byte 0xc4 at offset 12 is no utf-8"),
        ("cp1252", "costs 5 €", r"byte 0x80 at offset 8 is no utf-8"),
        ("shift_jis", "ab水", r"byte 0x90 at offset 2 is no utf-8"),
        ("gb18030", "ab你好", r"byte 0xc4 at offset 2 is no utf-8"),
        ("koi8-r", "ab ночь", r"byte 0xce at offset 3 is no utf-8"),
    ],
)
def test_other_encodings_are_refused_unless_named(
    tmp_path: Path, encoding: str, text: str, complaint: str
) -> None:
    path = written(tmp_path / "a.txt", text.encode(encoding))
    with pytest.raises(ConfigError, match=complaint):
        texts(path)
    assert texts(path, encoding) == [text]
    lines = written(tmp_path / "a.jsonl", f'{{"text": "{text}"}}\n'.encode(encoding))
    assert texts(lines, encoding) == [text]


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
@pytest.mark.parametrize("offset", [0, 5, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 12345])
@pytest.mark.parametrize("byte", [b"\xff", b"\x80", b"\xed\xa0\x80", b"\0"])
def test_one_bad_byte_is_named_with_its_offset(
    tmp_path: Path, suffix: str, offset: int, byte: bytes
) -> None:
    content = b"x" * offset + byte + b"y" * 10
    path = written(tmp_path / f"deep{suffix}", content)
    with pytest.raises(
        ConfigError, match=rf"deep{suffix}: byte 0x{byte[:1].hex()} at offset {offset:,} "
    ):
        texts(path)


@pytest.mark.parametrize("shift", range(5))
@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "shift_jis", "gb18030"]
)
def test_characters_over_the_ends_of_pieces(tmp_path: Path, encoding: str, shift: int) -> None:
    """Text is decoded by the piece: characters of several bytes lie across the ends of pieces."""
    text = "x" * shift + "水ab" * (PIECE_BYTES // 3)
    assert texts(written(tmp_path / "a.txt", text.encode(encoding)), encoding) == [text]
    bad = f"{text}\0end"
    path = written(tmp_path / "b.txt", bad.encode(encoding))
    # The byte of the character 0 that is named is its first one.
    with pytest.raises(ConfigError, match=rf"byte 0x00 at offset {len(text.encode(encoding)):,} "):
        texts(path, encoding)


def test_a_cut_off_character_at_the_end(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", b"x" * PIECE_BYTES + "水".encode()[:2])
    with pytest.raises(ConfigError, match=rf"0xe6 at offset {PIECE_BYTES:,} .*unexpected end"):
        texts(path)


def test_the_named_encoding_must_fit(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", TEXT.encode())
    with pytest.raises(ConfigError, match=r"offset 0.* is no ascii"):
        texts(path, "ascii")
    for named, content, complaint in [
        ("iso8859-1", TEXT.encode("utf-8-sig"), r"mark of utf-8 .*data.encoding is iso8859-1"),
        ("cp1252", TEXT.encode("utf-16"), r"mark of utf-16 .*data.encoding is cp1252"),
        ("iso8859-1", b"ab\0c", r"byte 0x00 at offset 2 .* it may be binary"),
        ("iso8859-1", bytes(range(256)) * 9, r"byte 0x00 at offset 0 .* it may be binary"),
        ("utf-8", bytes(range(1, 256)) * 9, r"byte 0x80 at offset 127 is no utf-8"),
        ("utf-16", b"a\0b\0", r"no byte order mark.*set data.encoding to utf-16-le or utf-16-be"),
        ("utf-16-le", b"\0a\0b" * 9, r"zeros .* are those of utf-16-be, .*set data.encoding to"),
        ("utf-16-le", b"\xfe\xff\0a", r"mark of utf-16 .*data.encoding is utf-16-le"),
        ("cp1252", b"abc\x81", r"byte 0x81 at offset 3 is no cp1252"),
    ]:
        with pytest.raises(ConfigError, match=complaint):
            texts(written(tmp_path / "a.txt", content), named)
    for encoding in MARKED + MARKLESS:
        assert texts(written(tmp_path / "a.txt", TEXT.encode(encoding)), encoding) == [TEXT]
        marked = ("\ufeff" + TEXT).encode(encoding.removesuffix("-sig"))
        if encoding in MARKLESS:
            assert texts(written(tmp_path / "a.txt", marked), encoding) == [TEXT]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (
            '{"txt": "two"}',
            "has no column text, which training on plain text needs; its columns are txt$",
        ),
        ("{}", "has no column text, which training on plain text needs; it has no columns$"),
        ('{"text": 5}', "the column text holds a number, and a record needs a text in it$"),
        ('{"text": null}', "the column text holds null, and a record needs a text in it$"),
        ("[1]", "expected a JSON object such as"),
        ('"text"', "expected a JSON object such as"),
        ("[" * 100_000, r"expected a JSON object such as .* \(nested too deeply\)"),
        ('{"text": ' + "1" * 5000 + "}", r"expected .* \(a number is too long\)"),
        (
            '{"text": "ab\\ud83d"}',
            r"character 2 of the text is '\\ud83d', half of a surrogate pair",
        ),
    ],
)
def test_lines_without_text_are_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = written(tmp_path / "a.jsonl", f'{{"text": "one"}}\n \n{line}\n')
    with pytest.raises(ConfigError, match=rf"a.jsonl, line 3: {complaint}"):
        texts(path)


def encoding_of(**data: object) -> str:
    model = {"hf": {"model_type": "llama", "vocab_size": 300}}
    return parse_config({"model": model, "data": {"path": "text.txt", **data}}).data.encoding


def test_encodings_are_those_of_python() -> None:
    assert encoding_of() == "utf-8"
    for spelling in ("UTF8", "utf_8", "U8"):
        assert encoding_of(encoding=spelling) == "utf-8"
    assert encoding_of(encoding="latin-1") == encoding_of(encoding="ISO-8859-1") == "iso8859-1"
    assert encoding_of(encoding="utf-16") == "utf-16"
    for wrong in ("utf8mb4", "hex", "rot13", "zip", "undefined", "", "a\0b", "auto"):
        with pytest.raises(ConfigError, match=r"data.encoding.*no encoding of text named"):
            encoding_of(encoding=wrong)
    with pytest.raises(ConfigError, match=r"encoding of host names"):
        encoding_of(encoding="idna")
    with pytest.raises(ConfigError, match=r"data.encoding goes with data.path"):
        encoding_of(path=None, tokens="t.bin", encoding="latin-1")


def test_a_pointer_in_the_place_of_a_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Pumps push water up the hill.")
    assert len(find_source(str(tmp_path)).files) == 1
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4120\n"
    (tmp_path / "b.txt").write_text(pointer)
    for source in (tmp_path, tmp_path / "b.txt", tmp_path / "*.txt"):
        with pytest.raises(ConfigError, match=r"b\.txt is a Git LFS pointer"):
            find_source(str(source))

"""Token files that users bring: numbers of another width, order or format are refused by name."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from penstock.config.schema import Config, parse_config
from penstock.host.errors import ConfigError, StateError
from penstock.models.data.chunks import write_sums
from penstock.models.data.token_file import TokenFile
from penstock.models.prepare import prepare
from penstock.workers.data import TokenDataset

SLAB = 1 << 24
RANDOM = np.random.default_rng(0)


def checked(path: Path, dtype: str, vocab_size: int) -> int:
    """Number of tokens of a file that passes all checks."""
    file = TokenFile(path, dtype, vocab_size)
    write_sums(path, path.with_suffix(".sums"), lambda line: None, file.check)
    return file.num_tokens


def zipf(vocab_size: int, count: int) -> np.ndarray[Any, Any]:
    """Ids as texts have them: small ones often."""
    return (RANDOM.zipf(1.2, count * 2) % (1 << 40) - 1)[:count] % vocab_size


def saved(tmp_path: Path, ids: np.ndarray[Any, Any], dtype: str) -> Path:
    ids.astype(dtype).tofile(tmp_path / "t.bin")
    return tmp_path / "t.bin"


WIDER = "set data.token_dtype to uint32$"
REWRITE = r"numpy.fromfile\(FILE, '{}'\).astype\('{}'\).tofile\(NEW\)\), and set data.token_dtype"


@pytest.mark.parametrize("draw", ["zipf", "uniform"])
@pytest.mark.parametrize(
    ("vocab_size", "written", "read", "complaint"),
    [
        (300, "<i4", "uint16", rf"of every two numbers the second is 0 .*{WIDER}"),
        (32_000, "<u4", "uint16", rf"of every two numbers the second is 0 .*{WIDER}"),
        (65_536, "<u4", "uint16", rf"of every two numbers the second is 0 .*{WIDER}"),
        (70_000, "<i4", "uint16", rf"a vocabulary of 70,000, and uint16 .*{WIDER}"),
        (300, "<i8", "uint16", "four numbers only the first.*" + REWRITE.format("<i8", "<u2")),
        (32_000, "<i8", "uint32", "the second is 0 .*" + REWRITE.format("<i8", "<u2")),
        (128_256, "<i8", "uint32", "the second is 0 .*" + REWRITE.format("<i8", "<u4")),
        (128_256, "<i8", "uint16", "vocabulary of 128,256.*" + REWRITE.format("<i8", "<u4")),
        (300, "<u2", "uint32", r"holds token \d+ at .* set data.token_dtype to uint16$"),
        (65_536, "<u2", "uint32", r"holds token \d+ at .* set data.token_dtype to uint16$"),
        (32_000, ">u2", "uint16", "holds token .*" + REWRITE.format(">u2", "<u2")),
        (60_000, ">u2", "uint16", "holds token .*" + REWRITE.format(">u2", "<u2")),
        (32_000, ">u4", "uint16", "the first is 0 .*" + REWRITE.format(">u4", "<u2")),
        (70_000, ">u4", "uint32", "holds token .*" + REWRITE.format(">u4", "<u4")),
        (70_000, ">i8", "uint32", "holds token|the first is 0"),
        (32_000, "<f4", "uint16", r"holds token|numbers"),
        (70_000, "<f8", "uint32", r"holds token|numbers"),
    ],
)  # fmt: skip
def test_other_widths_and_orders(
    tmp_path: Path, vocab_size: int, written: str, read: str, complaint: str, draw: str
) -> None:
    count = 4_000
    ids = zipf(vocab_size, count) if draw == "zipf" else RANDOM.integers(0, vocab_size, count)
    path = saved(tmp_path, ids, written)
    with pytest.raises(ConfigError, match=rf"data.tokens = .*t.bin': .*{complaint}"):
        checked(path, read, vocab_size)


@pytest.mark.parametrize("vocab_size", [65_536, 65_500])
def test_byte_order_where_every_number_is_a_token(tmp_path: Path, vocab_size: int) -> None:
    ids = zipf(50_000, 100_000)
    with pytest.raises(ConfigError, match=r"big-endian|holds token"):
        checked(saved(tmp_path, ids, ">u2"), "uint16", vocab_size)
    assert checked(saved(tmp_path, ids, "<u2"), "uint16", vocab_size) == 100_000


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize(
    "ids",
    [
        np.zeros(5000),
        np.arange(5000) % 7 == 0,
        np.tile([5, 0, 6], 1000),
        np.tile([3, 9, 0, 1], 1000),
        np.arange(1, 18),
        np.full(9000, 299),
        RANDOM.integers(0, 300, 100_001),
        RANDOM.integers(0, 2, 100_001),
        np.where(RANDOM.random(100_000) < 0.02, 7, 0),
        np.repeat([0, 8], [90_000, 1000]),
        np.empty(0),
    ],
)
def test_true_files_pass(tmp_path: Path, ids: np.ndarray[Any, Any], dtype: str) -> None:
    assert checked(saved(tmp_path, ids, dtype), dtype, 300) == len(ids)


@pytest.mark.parametrize("place", [0, SLAB // 2 - 1, SLAB // 2, SLAB + 17, 2 * SLAB + 6])
def test_a_token_beyond_the_vocabulary_anywhere(tmp_path: Path, place: int) -> None:
    ids = RANDOM.integers(0, 32_000, 2 * SLAB + 7, dtype=np.uint16)
    ids[place] = 32_000
    message = (
        rf"holds token 32000 at offset {2 * place:,}, the model has a vocabulary of 32000; check"
    )
    with pytest.raises(ConfigError, match=message):
        checked(saved(tmp_path, ids, "<u2"), "uint16", 32_000)
    ids[place] = 31_999
    assert checked(saved(tmp_path, ids, "<u2"), "uint16", 32_000) == len(ids)


def test_another_width_in_a_later_part(tmp_path: Path) -> None:
    """Files that were put together of parts of two widths."""
    ids = RANDOM.integers(1, 300, SLAB, dtype=np.uint16)
    path = saved(tmp_path, ids, "<u2")
    with path.open("ab") as file:
        file.write(ids.astype("<u4").tobytes())
    with pytest.raises(
        ConfigError, match=rf"the second is 0 \(from offset {2 * SLAB:,} on\); check"
    ):
        checked(path, "uint16", 300)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_odd_sizes(tmp_path: Path, cut: int) -> None:
    path = saved(tmp_path, RANDOM.integers(0, 300, 1000), "<u4")
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ConfigError, match=rf"{4000 - cut:,} bytes are no whole number of uint32"):
        checked(path, "uint32", 300)


def _zipped() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, tokens=np.arange(100, dtype="<u2"))
    return buffer.getvalue()


def _numpy(dtype: str, version: tuple[int, int] = (1, 0)) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.arange(2000, dtype=dtype) % 300, version)
    return buffer.getvalue()


def _torch(**options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(torch.arange(1000), buffer, **options)
    return buffer.getvalue()


IDS = (np.arange(2000, dtype="<u2") % 300).tobytes()
FORMATS = {
    "npy": (_numpy("<u2"), "a NumPy .npy file"),
    "npy 2": (_numpy("<i8", (2, 0)), "a NumPy .npy file"),
    "npz": (_zipped(), "a zip archive"),
    "pt": (_torch(), "a zip archive"),
    "old pt": (_torch(_use_new_zipfile_serialization=False), "a file of torch.save"),
    "pickle": (pickle.dumps(list(range(1000))), "a Python pickle"),
    "pickle 2": (pickle.dumps(list(range(1000)), protocol=2), "a Python pickle"),
    "gzip": (gzip.compress(IDS), "compressed with gzip"),
    "bz2": (bz2.compress(IDS), "compressed with bzip2"),
    "xz": (lzma.compress(IDS), "compressed with xz"),
    "zstd": (b"(\xb5/\xfd" + IDS, "compressed with zstd"),
    "parquet": (b"PAR1" + IDS + b"PAR1", "a Parquet file"),
    "safetensors": (
        safetensors.numpy.save({"tokens": np.arange(100, dtype="<u2")}),
        "a safetensors file",
    ),
    "megatron": (b"MMIDIDX\0\0" + struct.pack("<QB", 1, 8) + IDS, "an index of Megatron"),
    "llm.c": (struct.pack("<3i", 20240520, 1, 2000) + bytes(1012) + IDS, "a file of llm.c"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "a Git LFS pointer"),
    "json": (json.dumps(list(range(2000))).encode(), "text; text to train on goes to data.path"),
    "text": (b"The pump lifts water.\n" * 99, "text; text to train on goes to data.path"),
}


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("name", FORMATS)
def test_files_of_other_formats(tmp_path: Path, name: str, dtype: str) -> None:
    content, words = FORMATS[name]
    (tmp_path / "t.bin").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"t.bin': is {words}.*; give a file of {dtype} numbers"):
        TokenFile(tmp_path / "t.bin", dtype, 60_000)


def test_tokens_that_begin_like_a_format_pass(tmp_path: Path) -> None:
    for start in (b"PK\x03\x04", b"\x1f\x8b\x08\x00", b"PAR1", b"BZh9", b"\x80\x04\x95\x00"):
        path = tmp_path / "t.bin"
        path.write_bytes(start + IDS)
        assert checked(path, "uint16", 65_536) == 2002


def config(**data: Any) -> Config:
    llama = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 300,
    }
    train = {"eval_every": 0, **data.pop("train", {})}
    data = {"sequence_length": 16, "shuffle": False, **data}
    return parse_config({"model": {"hf": llama}, "train": train, "data": data})


def started(run_dir: Path) -> None:
    (run_dir / "journal.sqlite").touch()


def tokens(run_dir: Path, split: str, config: Config) -> list[int]:
    return TokenDataset.open(run_dir / "data", split, config).batch(0, 1)[0].tolist()


def test_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    for path, complaint in [("none.bin", "no such file"), ("given", "is no file")]:
        with pytest.raises(ConfigError, match=rf"data.tokens = .*{path}': {complaint}"):
            prepare(config(tokens=str(tmp_path / path)), tmp_path)
    saved(tmp_path, RANDOM.integers(0, 300, 4000), "<i4")
    with pytest.raises(ConfigError, match="the second is 0"):
        prepare(config(tokens=str(tmp_path / "t.bin")), tmp_path)
    assert not (tmp_path / "data" / "meta.json").exists()


def test_a_run_that_has_started_keeps_its_tokens(tmp_path: Path) -> None:
    """Whatever became of its text, and of how it is read; evaluations may have another text."""
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(name * 400)
    path = {"path": str(tmp_path / "a.txt")}
    held = {**path, "eval_path": str(tmp_path / "b.txt"), "train": {"eval_every": 5}}
    lines: list[str] = []
    prepare(config(**held), tmp_path, progress=lines.append)
    started(tmp_path)
    meta = (tmp_path / "data/meta.json").read_text()
    prepare(config(**held, passes=3.0), tmp_path, progress=lines.append)
    assert lines == ["data: the run keeps the tokens that it was prepared with"]
    assert (tmp_path / "data/meta.json").read_text() == meta
    (tmp_path / "a.txt").write_text("z" * 900)
    prepare(config(**held), tmp_path, progress=lines.append)
    assert lines.pop().endswith(
        "a new run would take others: the text, or how it is read, has changed"
    )
    (tmp_path / "a.txt").unlink()
    other = config(**{**held, "eval_path": str(tmp_path / "c.txt")})
    prepare(other, tmp_path, progress=lines.append)
    assert tokens(tmp_path, "train", other) == [ord("a")] * 17
    assert tokens(tmp_path, "eval", other) == [ord("c")] * 17
    prepare(config(**path), tmp_path)
    assert "eval" not in json.loads((tmp_path / "data/meta.json").read_text())
    assert tokens(tmp_path, "train", config(**path)) == [ord("a")] * 17


def test_what_an_older_penstock_prepared_goes_on(tmp_path: Path) -> None:
    """An int32 file was taken as uint16; a run that has trained on it goes on with it."""
    ids = RANDOM.integers(0, 300, 4000)
    given = config(tokens=str(saved(tmp_path, ids, "<u2")))
    prepare(given, tmp_path)
    meta = tmp_path / "data/meta.json"
    fields = json.loads(meta.read_text())
    del fields["train"]["source"]
    saved(tmp_path, ids, "<i4")
    fields["train"]["num_tokens"] = 8000
    sums = write_sums(tmp_path / "t.bin", tmp_path / "data/train.sums", lambda line: None)
    meta.write_text(
        json.dumps({"fingerprint": "of old", "train": {**fields["train"], "sums": sums}})
    )
    started(tmp_path)
    prepare(given, tmp_path)
    assert tokens(tmp_path, "train", given)[1::2] == [0] * 8
    assert json.loads(meta.read_text())["fingerprint"] == "of old"


def test_lost_tokens_of_a_run_are_made_again_from_the_same_text_only(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 400)
    given = config(path=str(tmp_path / "a.txt"))
    prepare(given, tmp_path)
    started(tmp_path)
    (tmp_path / "data/train.bin").unlink()
    prepare(given, tmp_path)
    assert tokens(tmp_path, "train", given) == [ord("a")] * 17
    (tmp_path / "data/train.bin").unlink()
    (tmp_path / "a.txt").write_text("b" * 400)
    for _ in range(2):
        with pytest.raises(StateError, match=r"data: the run's tokens are lost, and its text"):
            prepare(given, tmp_path)
        (tmp_path / "data/train.bin").unlink(missing_ok=True)


def test_left_out_files_and_encodings_are_said_once(tmp_path: Path) -> None:
    for name in ("text/a.txt", "eval/b.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("Ä" * 400, encoding="latin-1")
        (tmp_path / name).with_suffix(".docx").touch()
    data = {
        "path": str(tmp_path / "text"),
        "eval_path": str(tmp_path / "eval"),
        "encoding": "latin-1",
    }
    given = config(**data, train={"eval_every": 5})
    lines: list[str] = []
    prepare(given, tmp_path, progress=lines.append)
    prepare(given, tmp_path, progress=lines.append)
    assert [line.partition("': ")[2] for line in lines] == ["reads 1 file; left out: 1 .docx"] * 2
    assert lines[1].startswith("data.eval_path = ")
    assert (
        tokens(tmp_path, "train", given)[:2] == tokens(tmp_path, "eval", given)[:2] == [0xC3, 0x84]
    )

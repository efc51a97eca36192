"""Checksums of token files: every change of what is read is noticed, with file and place."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config.schema import Config, parse_config
from penstock.host.errors import StateError
from penstock.models.data.chunks import CHUNK_BYTES, Checksums, ChunkHasher, write_sums
from penstock.models.prepare import prepare
from penstock.workers.data import TokenDataset

SIZE = 5 * CHUNK_BYTES // 2
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 60_000,
}


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.bin"
    path.write_bytes(np.random.default_rng(1).bytes(SIZE))
    return path


def opened(tokens: Path, **changes: Any) -> Checksums:
    entry = write_sums(tokens, tokens.with_suffix(".sums"), print)
    return Checksums.open(tokens, tokens.parent, {**entry, **changes})


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, SIZE])
def test_hashing_while_writing_gives_the_bytes_of_hashing_the_file(
    tmp_path: Path, size: int
) -> None:
    content = np.random.default_rng(2).bytes(size)
    (tmp_path / "tokens.bin").write_bytes(content)
    hasher, start = ChunkHasher(), 0
    for piece in (1, CHUNK_BYTES - 1, 7, 0, 2 * CHUNK_BYTES + 3, SIZE):
        hasher.update(content[start : start + piece])
        start += piece
    whole = write_sums(tmp_path / "tokens.bin", tmp_path / "read.sums", print)
    assert hasher.write(tmp_path / "written.sums") == {**whole, "path": "written.sums"}
    sums = (tmp_path / "read.sums").read_bytes()
    assert (tmp_path / "written.sums").read_bytes() == sums
    starts = range(0, size, CHUNK_BYTES)
    wanted = [hashlib.sha256(content[at : at + CHUNK_BYTES]).digest()[:16] for at in starts]
    assert sums == b"".join(wanted)


def test_a_changed_chunk_is_found_when_it_is_read_and_no_other(tokens: Path) -> None:
    checksums = opened(tokens)
    flip(tokens, CHUNK_BYTES + 5)
    flip(tokens, SIZE - 1)
    checksums.check(0, CHUNK_BYTES)
    message = rf"tokens\.bin: the {CHUNK_BYTES} bytes from offset {CHUNK_BYTES} are not those"
    with pytest.raises(StateError, match=message):
        checksums.check(CHUNK_BYTES - 1, CHUNK_BYTES + 1)
    last = rf"the {SIZE - 2 * CHUNK_BYTES} bytes from offset {2 * CHUNK_BYTES} are not"
    with pytest.raises(StateError, match=last):
        checksums.check(SIZE - 2, SIZE)


def test_each_chunk_is_checked_once(tokens: Path) -> None:
    checksums = opened(tokens)
    checksums.check(0, SIZE)
    flip(tokens, 5)
    checksums.check(0, SIZE)


def test_damaged_or_foreign_checksums_and_short_files(tokens: Path) -> None:
    entry = write_sums(tokens, tokens.with_suffix(".sums"), print)
    with tokens.open("ab") as file:
        file.write(b"appended")
    Checksums.open(tokens, tokens.parent, entry).check(SIZE - 1, SIZE)
    tokens.write_bytes(tokens.read_bytes()[: SIZE - 2])
    with pytest.raises(StateError, match=rf"has {SIZE - 2} bytes, {SIZE} when .* prepared"):
        Checksums.open(tokens, tokens.parent, entry)
    flip(tokens.with_suffix(".sums"), 40)
    with pytest.raises(StateError, match=r"tokens\.sums: is damaged or was edited"):
        Checksums.open(tokens, tokens.parent, entry)


def config(**data: Any) -> Config:
    return parse_config(
        {"model": {"hf": LLAMA}, "data": {"sequence_length": 16, "shuffle": False, **data}}
    )


@pytest.mark.parametrize("own", [True, False], ids=["train.bin", "data.tokens"])
def test_what_was_prepared_is_what_is_read(tmp_path: Path, own: bool) -> None:
    """Held-out sequences lie in the same file; the remedy depends on who made it."""
    if own:
        (tmp_path / "text.txt").write_bytes(b"abc" * CHUNK_BYTES)
        given = config(path=str(tmp_path / "text.txt"), tokenizer="byte")
        path = tmp_path / "data" / "train.bin"
    else:
        path = tmp_path / "given.bin"
        np.arange(2 * CHUNK_BYTES, dtype="<u2").clip(0, 59_999).tofile(path)
        given = config(tokens=str(path), token_dtype="uint16")
    prepare(given, tmp_path)
    size = path.stat().st_size
    flip(path, size // 2)
    data = TokenDataset.open(tmp_path / "data", "train", given)
    data.batch(0, 4)
    with pytest.raises(StateError, match=rf"{path.name}: the .* bytes from offset") as caught:
        data.batch(size // 2 // 32 - 1, 3)
    assert ("delete" in str(caught.value)) is own
    with pytest.raises(StateError, match="bytes from offset"):
        data.batch(size // 2 // 32 - 1, 3)


def test_data_of_an_older_penstock_stay_readable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    np.arange(2000, dtype="<u2").tofile(tmp_path / "given.bin")
    given = config(tokens=str(tmp_path / "given.bin"), token_dtype="uint16")
    prepare(given, tmp_path)
    meta = tmp_path / "data" / "meta.json"
    fields = json.loads(meta.read_text())
    assert fields["train"].pop("sums")["file_bytes"] == 4000
    meta.write_text(json.dumps(fields))
    data = TokenDataset.open(tmp_path / "data", "train", given)
    assert "has no checksums" in caplog.text
    assert data.batch(0, 1)[0, :3].tolist() == [0, 1, 2]

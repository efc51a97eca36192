"""Tokens kept for other runs: the same bytes, and nothing that is damaged or another user's."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.client.doctor import machine_facts
from penstock.config.schema import parse_config
from penstock.models.prepare import prepare
from penstock.protocol.run.token_cache import kept_tokens, token_cache_folder
from tests.folders import TEXT, save_model

TAKEN = "takes tokens that were made from the same text before"


@pytest.fixture(name="cache")
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; beside it a model with its tokenizer, and a text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    save_model(tmp_path / "m", "gpt2", n_embd=16, n_layer=1, n_head=2, n_positions=64)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "xdg/penstock"


def prepared(cache: Path, name: str, *, text: str = "text.txt", **data: Any) -> tuple[bytes, bool]:
    """Prepare a run; returns its tokens, and whether they are kept ones."""
    folder = cache.parent.parent
    config = parse_config(
        {
            "model": {"path": str(folder / "m")},
            "data": {"path": str(folder / text), "sequence_length": 16, **data},
            "train": {"global_batch": 1},
        }
    )
    (folder / name).mkdir()
    lines: list[str] = []
    prepare(config, folder / name, progress=lines.append)
    return (folder / name / "data/train.bin").read_bytes(), any(TAKEN in line for line in lines)


def entry_of(cache: Path) -> Path:
    (entry,) = kept_tokens(cache)
    return entry.folder


def test_a_second_run_takes_the_tokens_of_the_first(cache: Path) -> None:
    first, taken = prepared(cache, "a")
    assert not taken and (cache.stat().st_mode & 0o777) == 0o700
    folder = cache.parent.parent
    (folder / "copy.txt").write_text(TEXT)
    second, taken = prepared(cache, "b", text="copy.txt", shuffle=False, objective="next-token")
    assert taken and second == first
    files = [folder / name / "data/train.bin" for name in "ab"]
    assert len({file.stat().st_ino for file in (*files, entry_of(cache) / "tokens.bin")}) == 1
    metas = [json.loads((folder / name / "data/meta.json").read_text())["train"] for name in "ab"]
    assert metas[0]["sums"] == metas[1]["sums"]
    assert files[0].with_suffix(".sums").read_bytes() == files[1].with_suffix(".sums").read_bytes()
    assert machine_facts()["kept tokens"].endswith(f"of 1 texts in {cache} (data.cache_limit)")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "text.txt").write_text(f"{TEXT}."),
        lambda folder: (folder / "text.txt").rename(folder / "text.md"),
        lambda folder: {"eos": "<|im_end|>"},
        lambda folder: {"bos": True},
        lambda folder: {"encoding": "latin-1"},
        lambda folder: (folder / "m/special_tokens_map.json").write_text("{}"),
    ],
    ids=["text", "ending", "eos", "bos", "encoding", "tokenizer"],
)
def test_what_decides_the_tokens_is_in_the_key(cache: Path, change: Any) -> None:
    folder = cache.parent.parent
    settings = json.loads((folder / "m/tokenizer_config.json").read_text())
    settings["bos_token"] = "<|im_start|>"
    (folder / "m/tokenizer_config.json").write_text(json.dumps(settings))
    prepared(cache, "a")
    keys = change(folder)
    text = "text.md" if (folder / "text.md").exists() else "text.txt"
    assert not prepared(cache, "b", text=text, **(keys if isinstance(keys, dict) else {}))[1]
    assert len(kept_tokens(cache)) == 2


def cut(entry: Path) -> None:
    with (entry / "tokens.bin").open("r+b") as file:
        file.truncate(10)


def flip(entry: Path) -> None:
    with (entry / "tokens.bin").open("r+b") as file:
        file.write(b"\xff")


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        flip,
        lambda entry: (entry / "tokens.sums").write_bytes(b"x" * 16),
        lambda entry: (entry / "tokens.sums").write_bytes(b""),
        lambda entry: (entry / "entry.json").write_text("{"),
        lambda entry: (entry / "entry.json").write_text("[]"),
        lambda entry: (entry / "entry.json").write_text('{"sums": {"file_bytes": -1}}'),
        lambda entry: (entry / "tokens.bin").unlink(),
    ],
    ids=["cut", "flipped", "sums", "no-sums", "json", "list", "negative", "gone"],
)
def test_damage_is_noticed_and_the_entry_made_anew(cache: Path, damage: Any) -> None:
    first, _ = prepared(cache, "a")
    damage(entry_of(cache))
    assert prepared(cache, "b") == (first, False)
    entry = entry_of(cache)
    shutil.rmtree(cache.parent.parent / "a")
    if (entry / "tokens.bin").read_bytes() == first:
        assert prepared(cache, "c") == (first, True)
    else:
        pytest.fail("the entry was not made anew")


def test_what_others_could_have_written_is_not_taken(cache: Path) -> None:
    first, _ = prepared(cache, "a")
    entry = entry_of(cache)
    outside = cache.parent / "other"
    for path, mode in ((cache, 0o770), (entry, 0o701), (entry / "entry.json", 0o644)):
        kept = path.stat().st_mode
        path.chmod(mode)
        assert prepared(cache, f"mode-{path.name[:8]}") == (first, False)
        path.chmod(kept)
    (entry / "tokens.bin").rename(outside)
    (entry / "tokens.bin").symlink_to(outside)
    assert prepared(cache, "link") == (first, False)
    shutil.rmtree(cache)
    cache.symlink_to(outside.parent / "nowhere")
    assert prepared(cache, "folder") == (first, False)


def test_tokens_are_copied_where_no_links_are(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **options: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refused)
    first, _ = prepared(cache, "a")
    assert prepared(cache, "b") == (first, True)
    assert (entry_of(cache) / "tokens.bin").stat().st_nlink == 1


def test_entries_used_longest_ago_are_removed(cache: Path) -> None:
    folder = cache.parent.parent
    for number in range(3):
        (folder / f"{number}.txt").write_text(TEXT + str(number))
        prepared(cache, f"run-{number}", text=f"{number}.txt")
    for used_s, entry in enumerate(kept_tokens(cache)):
        os.utime(entry.folder / "entry.json", (used_s, used_s))
    oldest, middle, newest = kept_tokens(cache)
    limit = oldest.num_bytes * 5 // 2
    assert prepared(cache, "again", text="0.txt")[1], "which is then the newest"
    prepared(cache, "more", cache_limit=limit)
    left = [entry.folder for entry in kept_tokens(cache)]
    assert left[0] == oldest.folder and len(left) == 2
    assert middle.folder not in left and newest.folder not in left
    prepared(cache, "none", text="1.txt", cache_limit=0)
    assert [entry.folder for entry in kept_tokens(cache)] == left


def test_bytes_are_not_kept(cache: Path) -> None:
    prepared(cache, "a", tokenizer="byte")
    assert not cache.exists() and machine_facts()["kept tokens"] == "none"


def test_the_folder_is_that_of_the_specification() -> None:
    assert token_cache_folder({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/penstock")
    assert token_cache_folder({"XDG_CACHE_HOME": "x", "HOME": "/h"}) == Path("/h/.cache/penstock")
    assert token_cache_folder({"HOME": "/h"}) == Path("/h/.cache/penstock")
    assert token_cache_folder({}) is None

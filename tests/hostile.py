"""Files of strangers that would take all time or memory, and their sentences.

``python -m tests.hostile [NAME ...]`` makes each in a temporary folder, and runs the user's
command. It prints exit code, seconds and the last line. The tests make smaller files.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import torch
import yaml

from tests.folders import save_model

PRIMES = (11400714785074694791, 14029467366897019727, 2870177450012600261)
"""Constants of Python's hash of a tuple (xxHash)."""
WORD = 1 << 64
MODEL = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def colliding_pairs(count: int) -> Iterator[tuple[int, int]]:
    """Yields pairs of integers with the same hash."""
    first, second, fifth = PRIMES
    back_1, back_2 = pow(first, -1, WORD), pow(second, -1, WORD)
    target = hash((1, 2))
    end = (target - (2 ^ (fifth ^ 3527539))) % WORD
    made = number = 0
    while made < count:
        number += 1
        acc = (fifth + number * second) % WORD
        acc = ((acc << 31) | (acc >> 33)) * first % WORD
        before = end * back_1 % WORD
        before = ((before >> 31) | (before << 33)) % WORD
        lane = (before - acc) * back_2 % WORD
        lane = lane - WORD if lane >> 63 else lane
        if abs(lane) < 2**61 - 1 and lane != -1:
            made += 1
            yield number, lane


def with_pickle(path: Path, data: bytes) -> None:
    """Writes a file of ``torch.save`` with another pickle."""
    content = io.BytesIO()
    torch.save({}, content)
    with zipfile.ZipFile(content) as archive:
        entries = {each.filename: archive.read(each) for each in archive.infolist()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in entries.items():
            archive.writestr(name, data if name.endswith("data.pkl") else value)


def pairs_as_keys(folder: Path, count: int) -> None:
    """A model's weights with colliding keys; Python would take hours to make the dictionary."""
    items = [
        pickle.dumps(pair, 2)[2:-3] + b"K\x00"  # without the memo
        for pair in colliding_pairs(count)
    ]
    with_pickle(folder / "pytorch_model.bin", b"\x80\x02}(" + b"".join(items) + b"u.")


def repeated_numbers(folder: Path, count: int) -> None:
    """An optimizer with each parameter twice."""
    numbers = [*range(count), *range(count)]
    fields = {"state": {}, "param_groups": [{"params": numbers, "lr": 1.0}]}
    with_pickle(folder / "optimizer.pt", pickle.dumps(fields, 2))
    with_pickle(folder / "pytorch_model.bin", pickle.dumps({}, 2))


def long_names(folder: Path, count: int) -> None:
    """Classes with a name of megabytes, which a few bytes repeat."""
    text = b"X" + struct.pack("<I", 100 * count) + b"a" * (100 * count)
    data = b"\x80\x04]q\x00(" + text + b"q\x01h\x01\x93" + b"h\x01h\x01\x93" * count + b"e."
    with_pickle(folder / "pytorch_model.bin", data)


def repeated_state(folder: Path, count: int) -> None:
    """The state of an object: one dictionary, named again and again."""
    names = {f"key {number}": 0 for number in range(count)}
    inner = pickle.dumps(names, 2)[2:-1]
    data = b"\x80\x02ca\nb\n)R" + b"(" + inner + b"r\x00\x00\x10\x00" + b"j\x00\x00\x10\x00" * count
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".metadata").write_bytes(data + b"tb.")


class _Object:
    """An object of torch's checkpoints, as its pickle names it."""

    def __init__(self, name: str, **fields: Any) -> None:
        self.name, self.fields = name, fields


class _Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Writes the objects under their names of torch, which are not imported."""

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        if not isinstance(value, _Object):
            super().save(value, save_persistent_id)
            return
        module, _, name = value.name.rpartition(".")
        self.write(b"c" + f"{module}\n{name}\n".encode() + b")\x81")
        super().save(value.fields)
        self.write(b"b")


_DCP = "torch.distributed.checkpoint.metadata."


def side_by_side(folder: Path, count: int, *, last: int | None = None) -> None:
    """A tensor of one row, in chunks of one column; the last begins at column ``last``."""
    places = [*range(count - 1), count - 1 if last is None else last]
    chunks = [
        _Object(f"{_DCP}ChunkStorageMetadata", offsets=(0, place), sizes=(1, 1)) for place in places
    ]
    properties = _Object(f"{_DCP}TensorProperties", dtype=torch.float32)
    tensor = _Object(
        f"{_DCP}TensorStorageMetadata", properties=properties, size=(1, count), chunks=chunks
    )
    info = _Object("a.Info", relative_path="0.distcp", offset=0, length=4)
    stored = {_Object(f"{_DCP}MetadataIndex", fqn="w", offset=(0, place)): info for place in places}
    metadata = _Object(
        f"{_DCP}Metadata",
        state_dict_metadata={"w": tensor},
        storage_data=stored,
        planner_data={"w": ("w",)},
    )
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".metadata").open("wb") as file:
        _Pickler(file, 2).dump(metadata)
    (folder / "0.distcp").write_bytes(b"\0" * 4)


def configuration(folder: Path, path: Path, **keys: Any) -> Path:
    """Writes a configuration over the data at ``path``; returns its path."""
    data = {"path": str(path), "sequence_length": 32, **keys.pop("data", {})}
    fields = {
        "run": {"dir": str(folder / "run")},
        "model": {"hf": {"model_type": "gpt2", **MODEL}},
        "data": {"tokenizer": "byte", **data},
        "train": {"steps": 1, "global_batch": 1},
        "cluster": {"device": "cpu"},
        **keys,
    }
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(fields))
    return config


def one_line(folder: Path, count: int) -> Path:
    """A line of JSON without an end."""
    path = folder / "line.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(b'{"text": "')
        for start in range(0, count, 1 << 20):
            file.write(b"a" * min(1 << 20, count - start))
        file.write(b'"}\n')
    return configuration(folder, path)


def compressed(folder: Path, count: int, suffix: str = ".gz") -> Path:
    """Blank lines that a thousandth of the bytes stand for."""
    path = folder / f"blank.jsonl{suffix}"
    folder.mkdir(parents=True, exist_ok=True)
    line = b'{"text": "some text"}\n'
    opened: Any = gzip.open(path, "wb", compresslevel=1)
    if suffix == ".zst":
        opened = arrow.CompressedOutputStream(str(path), "zstd")
    with opened as file:
        file.write(line * 100)
        for start in range(0, count, 1 << 20):
            file.write(b"\n" * min(1 << 20, count - start))
    return configuration(folder, path)


def columns(folder: Path, count: int) -> Path:
    """A Parquet file that names one long text in each of ``count`` rows."""
    path = folder / "rows.parquet"
    folder.mkdir(parents=True, exist_ok=True)
    text = arrow.array(["word " * 20_000])
    column = arrow.DictionaryArray.from_arrays(arrow.array([0] * count, arrow.int32()), text)
    parquet.write_table(arrow.table({"text": column}), path, compression="zstd")
    return configuration(folder, path)


def many_keys(folder: Path, count: int) -> Path:
    """An object with ``count`` keys, of which the last is there twice."""
    path = folder / "keys.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    keys = [*range(count), count - 1]
    path.write_text("{" + ", ".join(f'"{key}": 1' for key in keys) + "}\n")
    return configuration(folder, path)


def record(folder: Path, text: str, **data: Any) -> Path:
    """A file with one record."""
    path = folder / "record.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    return configuration(folder, path, data=data)


def template(folder: Path, text: str, chat: Mapping[str, Any] = CHAT) -> Path:
    """A chat template over a conversation."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "template.jinja").write_text(text)
    return record(folder, json.dumps(chat), chat_template=str(folder / "template.jinja"))


def adapter(folder: Path, **fields: Any) -> Path:
    """An adapter of PEFT with the settings ``fields``."""
    save_model(folder / "model", "gpt2", **MODEL)
    kept = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["c_attn"], **fields}
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(kept))
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (folder / "text.txt").write_text("some text " * 100)
    return configuration(
        folder,
        folder / "text.txt",
        model={"path": str(folder / "model")},
        data={"tokenizer": None},
        adapter={"path": str(folder / "adapter")},
    )


LOOPS = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
TURNS = [{"role": ("user", "assistant")[n % 2], "content": "a"} for n in range(20_000)]
BACKTRACKING = r"(([a-z_0-9.]+)+)+!"


def _inspect(make: Callable[..., None], *sizes: int) -> Callable[[Path], list[str]]:
    def made(folder: Path) -> list[str]:
        make(folder / "checkpoint", *sizes)
        return ["inspect", str(folder / "checkpoint")]

    return made


def _data(make: Callable[..., Path], *args: Any, **keys: Any) -> Callable[[Path], list[str]]:
    return lambda folder: ["data", str(make(folder, *args, **keys))]


def _convert(tool: str, text: str) -> Callable[[Path], list[str]]:
    def made(folder: Path) -> list[str]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "given.yaml").write_text(text)
        return ["convert", tool, str(folder / "given.yaml")]

    return made


FILES: Mapping[str, Callable[[Path], list[str]]] = {
    "pickle: keys that collide": _inspect(pairs_as_keys, 300_000),
    "pickle: parameters twice": _inspect(repeated_numbers, 100_000),
    "pickle: long names": _inspect(long_names, 200_000),
    "pickle: a state again and again": _inspect(repeated_state, 100_000),
    "DCP: 100,000 chunks": _inspect(side_by_side, 100_000),
    "JSON: a line of 1 GB": _data(one_line, 10**9),
    "JSON: a key twice among 300,000": _data(many_keys, 300_000),
    "JSON: a number of 5,000 digits": _data(record, '{"text": "a", "n": 1' + "0" * 5000 + "}"),
    "JSON: half of a surrogate pair": _data(record, '{"text": "a\\ud800"}'),
    "JSON: half of a pair in a message": _data(
        record, json.dumps(CHAT).replace('"a"', '"\\udc80"'), chat_template="chatml"
    ),
    "gzip: 8 GB of lines": _data(compressed, 8 * 10**9),
    "zstd: 8 GB of lines": _data(compressed, 8 * 10**9, ".zst"),
    "Parquet: a text in 20 million rows": _data(columns, 20_000_000),
    "template: four loops": _data(template, LOOPS),
    "template: 10 GB of text": _data(template, "{{ 'a' * 10**10 }}"),
    "template: a product at a time": _data(template, "{% set a = messages[0].role * 10**10 %}"),
    "conversation: 20,000 turns": _data(
        record, json.dumps({"messages": TURNS}), chat_template="chatml", turns="each"
    ),
    "adapter: targets": _data(adapter, target_modules=BACKTRACKING),
    "adapter: rank_pattern": _data(adapter, rank_pattern={BACKTRACKING: 4}),
    "adapter: layers_pattern": _data(adapter, layers_to_transform=[0], layers_pattern=BACKTRACKING),
    "convert: 9,000 keys": _convert(
        "trl",
        "model_name_or_path: a\ndataset_name: b\n"
        + "".join(f"key_{n}: {n}\n" for n in range(9000)),
    ),
    "convert: a number of 5,000 digits": _convert("trl", f"learning_rate: 1{'0' * 5000}\n"),
}
"""Names of hostile files, and functions that make each in a folder and return the command."""


def main() -> None:
    """Prints a line for each file."""
    chosen = sys.argv[1:] or FILES
    for name in (each for each in FILES if any(word in each for word in chosen)):
        with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
            words = FILES[name](Path(folder) / "files")
            start_s = time.monotonic()
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "penstock.client.main", *words],
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=float(os.environ.get("HOSTILE_S", "600")),
                    check=False,
                )
                code, lines = str(done.returncode), (done.stderr or done.stdout).splitlines()
            except subprocess.TimeoutExpired:
                code, lines = "-", ["still running"]
            seconds = time.monotonic() - start_s
            last = (lines or [""])[-1].replace(folder, "…")
            print(f"| {name} | {code} | {seconds:.0f} | {last[:400]} |", flush=True)


if __name__ == "__main__":
    main()

"""Pickles of strangers give values, or an error with the file's name; none of their code runs."""

from __future__ import annotations

import argparse
import io
import math
import pickle
import resource
import struct
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.host.errors import StateError
from penstock.models.exchange import pickles, unpickler
from penstock.models.exchange.pickles import (
    PickledTensor,
    expect,
    expect_items,
    load_pickle,
    load_torch,
)
from penstock.models.exchange.trainer import TrainerCheckpoint
from tests.hostile import long_names, pairs_as_keys, repeated_numbers, repeated_state

MARKS: list[str] = []
"""Grows if a pickle's code runs."""


def mark(text: str = "called") -> str:
    """Records that a pickle ran it."""
    MARKS.append(text)
    return text


class Reduced:
    """An object that calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


class Stateful:
    """An object that runs code when its state is set."""

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}

    def __setstate__(self, state: dict[str, int]) -> None:
        mark("state")


class Grown(list[int]):
    """A list that runs code when it grows."""

    def append(self, value: int) -> None:
        mark("append")

    def extend(self, values: Any) -> None:
        mark("extend")


MODULE = __name__.encode()
GLOBAL = b"c" + MODULE + b"\nmark\n"
CODE = f"__import__({__name__!r}, fromlist=['a']).mark()"
CHAIN = b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(V" + MODULE + b"\nNN(lVmark\natRVmark\ntR)R."
"""``getattr(__import__(MODULE, None, None, ["mark"]), "mark")()``."""
HOSTILE = {
    "reduce": pickle.dumps(Reduced(mark)),
    "protocol 0": pickle.dumps(Reduced(mark), 0),
    "eval": pickle.dumps(Reduced(eval, CODE)),
    "exec": pickle.dumps(Reduced(exec, CODE), 2),
    "getattr": CHAIN,
    "partial": b"cfunctools\npartial\n(" + GLOBAL + b"tR)R.",
    "instance": b"(Va\ni" + MODULE + b"\nmark\n.",
    "object": b"(" + GLOBAL + b"Va\no.",
    "state": pickle.dumps(Stateful()),
    "list": pickle.dumps(Grown([1, 2]), 2),
    "inside": pickle.dumps({"param": [1.0, Reduced(mark)]}),
}


def saved(path: Path, value: Any) -> Path:
    """Writes a file of ``torch.save``; returns its path."""
    torch.save(value, path)
    return path


def with_pickle(path: Path, data: bytes, **entries: bytes) -> Path:
    """Writes a file of ``torch.save`` with another pickle and its other entries replaced."""
    saved(path, {"a": torch.arange(6.0)})
    with zipfile.ZipFile(path) as archive:
        contents = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            entry = name.partition("/")[2]
            archive.writestr(name, data if entry == "data.pkl" else entries.get(entry, content))
    return path


@pytest.mark.parametrize("name", HOSTILE)
def test_code_of_a_pickle_never_runs(name: str, tmp_path: Path) -> None:
    raw = tmp_path / "raw.pkl"
    raw.write_bytes(HOSTILE[name])
    MARKS.clear()
    pickle.loads(HOSTILE[name])
    assert MARKS, "the pickle must be dangerous"
    MARKS.clear()
    value = load_pickle(raw)
    zipped = load_torch(with_pickle(tmp_path / "a.pt", HOSTILE[name]))
    assert not MARKS
    assert repr(value) == repr(zipped)
    if name != "inside":
        with pytest.raises(StateError, match=r"a\.pt: lr is (an object of the class|of type)"):
            expect(zipped, float, tmp_path / "a.pt", "lr")


def test_only_a_needed_stand_in_is_refused(tmp_path: Path) -> None:
    value = {"scaler": Reduced(mark), "namespace": argparse.Namespace(lr=1.0), "step": 3}
    path = saved(tmp_path / "a.pt", value)
    MARKS.clear()
    items = load_torch(path)
    assert not MARKS
    assert items["namespace"].name == "argparse.Namespace"
    assert items["namespace"].attributes == {"lr": 1.0}
    assert items["scaler"].args == ()
    assert expect(items["step"], int, path, "step") == 3
    with pytest.raises(StateError, match=rf"step is an object of the class {__name__}.mark"):
        expect(items["scaler"], int, path, "step")
    with pytest.raises(StateError, match=r"groups\['scaler'\] is an object"):
        expect_items(items, int, path, "groups")


TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn)


def test_values_of_torch_come_back_as_they_were(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    value = OrderedDict(
        dense=base,
        part=base[1:3, ::2],
        turned=base.t(),
        empty=torch.empty(0, 3),
        scalar=torch.tensor(2.5),
        parameter=torch.nn.Parameter(torch.ones(2)),
        **{str(dtype): torch.arange(5).to(dtype) for dtype in TYPES},
    )
    value["attributes"] = torch.ones(3)
    value["attributes"].ds_id = 4
    others: dict[str, Any] = {
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "bytes": b"ab\xff",
        "numbers": (1, -2.5, 2**70, None, True),
        "set": {"a"},
        "counts": defaultdict(int, a=1),
        ("a", 1): [],
    }
    state = torch.nn.Linear(2, 2).state_dict()
    path = saved(tmp_path / "a.pt", {"tensors": value, "others": others, "state": state})
    items = load_torch(path)
    others |= {"size": (2, 3), "set": ["a"], "('a', 1)": others.pop(("a", 1))}
    assert items["others"] == others
    assert items["tensors"].keys() == value.keys()
    for name, tensor in {**value, **state}.items():
        read = {**items["tensors"], **items["state"]}[name]
        assert isinstance(read, PickledTensor)
        assert (read.dtype, read.shape) == (tensor.dtype, tuple(tensor.shape))
        loaded, plain = read.load(), tensor.detach()
        if tensor.dtype is torch.float8_e4m3fn:
            loaded, plain = loaded.float(), plain.float()
        assert torch.equal(loaded, plain), name


def test_a_part_of_a_file_is_read_where_it_lies(tmp_path: Path) -> None:
    inner = io.BytesIO()
    torch.save(torch.arange(5.0), inner)
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(b"before" + inner.getvalue() + b"after" * 99)
    tensor = load_torch(path, offset=6, length=len(inner.getvalue()))
    assert torch.equal(tensor.load(), torch.arange(5.0))
    with pytest.raises(StateError, match=r"__0_0\.distcp: it is truncated"):
        load_torch(path, offset=6, length=10**9)


def test_tensors_take_no_memory_of_this_process(tmp_path: Path) -> None:
    count = 24 << 20
    path = saved(tmp_path / "a.pt", {"a": torch.ones(count)})
    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) << 10
    tensor = load_torch(path)["a"]
    resource.setrlimit(resource.RLIMIT_DATA, (used + (16 << 20), before[1]))
    try:
        loaded = tensor.load()
        assert loaded[-1] == 1
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert loaded.shape == (count,)


def long_int() -> bytes:
    return b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"\x01."


BROKEN = {
    "empty": b"",
    "no stop": pickle.dumps({"a": 1})[:-1],
    "stack": b"\x80\x02R.",
    "nothing": b".",
    "mark": b"((\x86.",
    "memo index": b"\x80\x02j\xff\xff\xff\xff.",
    "long bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"a.",
    "long array": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"a.",
    "long text": b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"a.",
    "long int": long_int(),
    "digits": b"I" + b"9" * 10_000 + b"\n.",
    "extension": b"\x80\x02\x82\x01.",
    "buffer": b"\x80\x05\x97.",
    "identifier": b"\x80\x02K\x01Q.",
    "called number": b"\x80\x02K\x01)R.",
    "state of a class": b"\x80\x02" + GLOBAL + b"}b.",
    "state of a list": b"\x80\x02]}b.",
    "key": b"\x80\x02}]K\x01s.",
    "nested key": b"\x80\x02})" + b"2\x86" * 60 + b"K\x01s.",
    "text": b"\x80\x02X\x01\x00\x00\x00\xff.",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_pickles_are_errors_with_the_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "raw.pkl"
    path.write_bytes(BROKEN[name])
    with pytest.raises(StateError, match=r"raw\.pkl: "):
        load_pickle(path)
    with pytest.raises(StateError, match=r"a\.pt: "):
        load_torch(with_pickle(tmp_path / "a.pt", BROKEN[name]))


def test_depth_and_copies_stay_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "raw.pkl"
    path.write_bytes(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".")
    assert isinstance(load_pickle(path), list)
    monkeypatch.setattr(unpickler, "MAX_OBJECTS", 50_000)
    copied = b"(" + b"N" * 1000 + b"lq\x01" + b"cbuiltins\nlist\nh\x01\x85R" * 100 + b"."
    path.write_bytes(copied)
    with pytest.raises(StateError, match="over 50,000 objects"):
        load_pickle(path)
    path.write_bytes(b"\x80\x02N" + b"\x94" * 50_001 + b".")
    with pytest.raises(StateError, match="over 50,000 objects"):
        load_pickle(path)
    monkeypatch.setattr(pickles, "MAX_PICKLE_BYTES", 100)
    with pytest.raises(StateError, match="its pickle is longer than"):
        load_pickle(path)
    with pytest.raises(StateError, match="its pickle is longer than"):
        load_torch(with_pickle(tmp_path / "a.pt", copied))


def test_damaged_files_are_errors_with_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"a": torch.arange(1000.0)})
    whole = path.read_bytes()
    for size in (0, 10, 1000, len(whole) - 30):
        path.write_bytes(whole[:size])
        with pytest.raises(StateError, match=r"a\.pt: .*copy the checkpoint again"):
            load_torch(path)
    with pytest.raises(StateError, match=r"missing\.pt: "):
        load_torch(tmp_path / "missing.pt")
    start = whole.index(torch.arange(1000.0).numpy().tobytes())
    path.write_bytes(whole[: start + 5] + b"\xff" + whole[start + 6 :])
    with pytest.raises(StateError, match="a tensor's checksum differs"):
        load_torch(path)["a"].load()
    with pytest.raises(StateError, match="its numbers are not in little-endian order"):
        load_torch(with_pickle(path, b"N.", byteorder=b"big"))
    tensor = load_torch(saved(path, torch.arange(1000.0)))
    path.write_bytes(b"short")
    with pytest.raises(StateError, match="has changed since it was opened"):
        tensor.load()


def test_files_of_old_torch_are_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(StateError, match=r"old\.pt: .*torch before 1\.6; load it there"):
        load_torch(path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"K\x06\x85", b"K\x07\x85"),  # more elements than numbers
        (b"K\x01\x85", b"K\x02\x85"),  # a stride beyond the end
        (b"FloatStorage", b"OtherStorage"),
    ],
)
def test_tensors_beyond_their_numbers_are_refused(
    before: bytes, after: bytes, tmp_path: Path
) -> None:
    path = saved(tmp_path / "a.pt", {"a": torch.arange(6.0)})
    with zipfile.ZipFile(path) as archive:
        data = archive.read("a/data.pkl")
    assert before in data
    with pytest.raises(StateError, match=r"a\.pt: a tensor"):
        load_torch(with_pickle(path, data.replace(before, after)))


STORAGE = (
    b"X\x07\x00\x00\x00storageq\x03ctorch\nFloatStorage\nq\x04X\x01\x00\x00\x000q\x05"
    b"X\x03\x00\x00\x00cpuq\x06K\x06tq\x07Q"
)


def tensor_of(offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """The pickle of a tensor over a storage of six numbers."""
    numbers = [pickle.dumps(each, 2)[2:-1] for each in (offset, shape, stride)]
    arguments = b"((" + STORAGE + b"".join(numbers) + b"\x89ccollections\nOrderedDict\n)Rt"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R."


@pytest.mark.parametrize(
    ("offset", "shape", "stride"),
    [(0, (6,), (1,)), (1, (5,), (1,)), (5, (1,), (1,)), (0, (2,), (5,)), (1, (2, 2), (3, 1))],
)
def test_the_last_element_of_a_storage_is_read_and_none_behind_it(
    offset: int, shape: tuple[int, ...], stride: tuple[int, ...], tmp_path: Path
) -> None:
    path = tmp_path / "a.pt"
    read = load_torch(with_pickle(path, tensor_of(offset, shape, stride))).load()
    assert torch.equal(read, torch.arange(6.0).as_strided(shape, stride, offset))
    for beyond in (
        (offset + 6, shape, stride),
        (6 - sum((n - 1) * s for n, s in zip(shape, stride, strict=True)), shape, stride),
        (offset, shape, tuple(each + 6 for each in stride)) if shape != (1,) else (6, (1,), (1,)),
        (offset, (7,), (0,)),
    ):
        with pytest.raises(StateError, match=r"a\.pt: a tensor is larger than its storage"):
            load_torch(with_pickle(path, tensor_of(*beyond)))


def test_numbers_and_tuples_as_keys_are_texts(tmp_path: Path) -> None:
    """The hash of a text is secret; a stranger can choose numbers with hashes that collide."""
    path = tmp_path / "raw.pkl"
    value = {1: "a", -2.5: "b", (1, "c"): "d", None: "e", "text": {2: 3}}
    path.write_bytes(pickle.dumps({**value, 1.5: {4, 5}, 2.5: frozenset((6,))}))
    assert load_pickle(path) == {
        "1": "a",
        "-2.5": "b",
        "(1, 'c')": "d",
        "None": "e",
        "text": {"2": 3},
        "1.5": [4, 5],
        "2.5": [6],
    }


def test_a_key_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "raw.pkl"
    path.write_bytes(pickle.dumps({1: 2, "1": 3}))
    with pytest.raises(StateError, match=r"a dictionary has the key '1' twice"):
        load_pickle(path)


@pytest.mark.parametrize(
    "make", [pairs_as_keys, repeated_numbers, long_names, repeated_state], ids=lambda m: m.__name__
)
def test_each_opcode_costs_constant_time(make: Callable[..., None], tmp_path: Path) -> None:
    """Hours with quadratic work, seconds with linear work."""
    make(tmp_path, 100_000)
    for file in ("pytorch_model.bin", "optimizer.pt"):
        if (tmp_path / file).exists():
            with suppress(StateError):
                load_torch(tmp_path / file)
    if (tmp_path / "optimizer.pt").exists():
        (problem,) = TrainerCheckpoint().open(tmp_path).state_problems
        assert "have the parameters 0, 1, 10, 100, … more than once" in problem
    if (tmp_path / ".metadata").exists():
        assert load_pickle(tmp_path / ".metadata").attributes == {}


def test_large_numbers_and_chosen_memos_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "raw.pkl"
    path.write_bytes(pickle.dumps([2**1023 - 1, 10**5000, -(10**5000)], 2))
    assert load_pickle(path) == [2**1023 - 1, math.inf, -math.inf]
    path.write_bytes(b"\x80\x02K\x07r\x09\x00\x00\x00j\x09\x00\x00\x00.")
    assert load_pickle(path) == 7
    for data in (b"K\x07r\xff\xff\xff\x7f.", b"K\x07q\x09h\x08.", b"K\x07q\x09g-1\n."):
        path.write_bytes(b"\x80\x02" + data)
        with pytest.raises(StateError, match=r"its pickle (remembers|names)"):
            load_pickle(path)


def test_entries_that_overlap_are_refused(tmp_path: Path) -> None:
    """A few bytes would stand for any number of tensors, each with a checksum to compute."""
    path = saved(tmp_path / "a.pt", {"a": torch.arange(1000.0), "b": torch.arange(1000.0) + 1})
    data = path.read_bytes()
    first, second = (data.rindex(b"a/data/%d" % n) - 46 for n in (0, 1))
    place = slice(second + 42, second + 46)
    content = bytearray(data)
    content[place] = data[first + 42 : first + 46]
    content[second + 20 : second + 28] = struct.pack("<II", len(data), len(data))
    path.write_bytes(content)
    with pytest.raises(StateError, match=r"a\.pt: entries of its directory overlap"):
        load_torch(path)

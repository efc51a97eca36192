"""Saved states: what is written, that it comes back bit for bit, and every kind of damage."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import load_file

from penstock import _native
from penstock.daemons.memory import saving, snapshot
from penstock.daemons.memory.pinning import PinnedVersion
from penstock.daemons.memory.restore import Filling, LoaderError, restore, run_loader
from penstock.daemons.memory.tensorfile import CancelledError, read_header
from penstock.host.errors import CapacityError, ExitCode, StateError
from penstock.protocol.plan.instructions import Update
from penstock.protocol.run.loading import INITIAL_VERSION
from penstock.protocol.run.names import ownership, storage
from penstock.shm.control import INVALID_VERSION, CommitRecord, Decision, SweepIntent
from penstock.shm.layout import NodeLayout
from penstock.shm.memory import NodeMemory
from penstock.shm.table import DType

CORES = [min(os.sched_getaffinity(0))]
SILENCE_S = 0.3


def never() -> bool:
    return False


def always() -> bool:
    return True


def no_loader(cancelled: Callable[[], bool]) -> None:
    raise AssertionError("a saved state needs no loader")


def contents(memory: NodeMemory) -> dict[str, bytes]:
    """Everything in the segments but gradients."""
    return {
        str(key): bytes(memory.raw(key)) for key in memory.spec.layout.arrays if key[1] != "grads"
    }


@pytest.fixture
def saved(memory: NodeMemory, tmp_path: Path, helpers: Any) -> Path:
    """A saved state of version 7."""
    helpers.fill(memory)
    helpers.commit(memory, 7)
    directory = tmp_path / "step-00000007"
    files = saving.save(PinnedVersion(memory, 7), directory, never)
    helpers.manifest(memory, directory, 7, files)
    return directory


def load(memory: NodeMemory, source: Path, version: int = 7, incarnation: int = 3) -> None:
    filling = Filling(incarnation=incarnation, version=version, source=source)
    restore(memory, filling, no_loader, never, CORES)


def test_files_are_what_the_safetensors_library_reads(memory: NodeMemory, saved: Path) -> None:
    found = load_file(saved / "block-0001.safetensors")
    assert sorted(found) == [
        "b1.v",
        "b1.w",
        "exp_avg.b1.v",
        "exp_avg.b1.w",
        "exp_avg_sq.b1.v",
        "exp_avg_sq.b1.w",
    ]
    assert tuple(found["b1.w"].shape) == (45, 2)
    assert found["b1.w"].dtype is torch.float32
    master = memory.state(1, "master")
    assert np.array_equal(found["b1.w"].numpy().reshape(-1), master[:90])
    assert np.array_equal(found["exp_avg.b1.v"].numpy(), memory.state(1, "exp_avg")[96:101])
    [path] = (saved.parent / "base").glob("block-0001-*")
    found = load_file(path)
    assert list(found) == ["frozen.b1.f"] and found["frozen.b1.f"].dtype is torch.bfloat16
    bits = found["frozen.b1.f"].view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(bits, memory.frozen(1)[:3])


def test_the_library_agrees_on_the_header(saved: Path) -> None:
    path = saved / "block-0000.safetensors"
    with safetensors.safe_open(path, "numpy") as file:
        assert set(file.keys()) == set(read_header(path))


def test_read_block(memory: NodeMemory, saved: Path) -> None:
    block = memory.spec.table.blocks[2]
    arrays = snapshot.read_block(saved, block)
    assert np.array_equal(arrays["b2.w"].reshape(-1), memory.state(2, "master")[:90])
    assert np.array_equal(arrays["frozen.b2.f"], memory.frozen(2)[:3])


def test_restore_brings_back_every_bit(memory: NodeMemory, saved: Path) -> None:
    before = {key: data for key, data in contents(memory).items() if "weights" not in key}
    for key in memory.spec.layout.arrays:
        memory.raw(key)[:] = b"\xa5" * len(memory.raw(key))
    load(memory, saved)
    after = contents(memory)
    assert {key: after[key] for key in before} == before
    control = memory.control
    assert (control.incarnation, control.committed) == (3, 7)
    assert [control.state_version(b) for b in range(3)] == [7, 7, 7]
    assert [control.slot_version(b, 1) for b in range(3)] == [7, 7, 7]
    assert [control.slot_version(b, 0) for b in range(3)] == [INVALID_VERSION] * 3
    control.validate(memory.owned_blocks())


def test_split_and_whole_masters_read_each_others_files(
    make_run: Any, helpers: Any, tmp_path: Path
) -> None:
    """Files are the same, and so are all bits, ties and numbers next to overflow included."""
    whole = NodeMemory.create(make_run().memory_spec(0))
    split = NodeMemory.create(make_run(optimizer={"master": "split"}).memory_spec(0))
    try:
        helpers.fill(whole)
        ties = np.array([0x3F808000, 0x3F7F8000, 0x7F7FFFFF, 0x80000001, 0xFFFFFFFF], np.uint32)
        whole.state(0, "master")[:5] = ties.view(np.float32)
        helpers.commit(whole, 7)
        for source, target in ((whole, split), (split, whole)):
            directory = tmp_path / source.spec.run_id
            files = saving.save(PinnedVersion(source, 7), directory, never)
            helpers.manifest(source, directory, 7, files)
            before = [source.load_master(b, 7).tobytes() for b in source.owned_blocks()]
            for key in target.spec.layout.arrays:
                target.raw(key)[:] = b"\xa5" * len(target.raw(key))
            load(target, directory)
            assert [target.load_master(b, 7).tobytes() for b in target.owned_blocks()] == before
        one, other = (tmp_path / memory.spec.run_id for memory in (whole, split))
        assert snapshot.compare(one, other, whole.spec.table.blocks) == ()
        assert split.weights(0, 1)[:5].tolist() == [0x3F81, 0x3F80, 0x7F80, 0x8000, 0x0000]
    finally:
        whole.close()
        split.close()


@pytest.mark.parametrize("version", [6, 7])
def test_of_two_copies_of_a_state_the_committed_one_is_saved(
    make_run: Any, helpers: Any, tmp_path: Path, version: int
) -> None:
    """The other one may hold anything; a restore fills the one that its version lies in."""
    run = make_run()
    spec = run.memory_spec(0)
    doubled = replace(run.plan, programs=(tuple(Update(block=b, flush=True) for b in range(3)),))
    layout = NodeLayout.compute(
        run.table, ownership(run.config, run.table, run.plan), 0, storage(run.config, doubled)
    )
    memory = NodeMemory.create(replace(spec, layout=layout))
    try:
        helpers.fill(memory)
        names = ("master", "exp_avg", "exp_avg_sq")
        for b in range(3):
            for name in names:
                here, other = memory.state(b, name, 0), memory.state(b, name, 1)
                other[:] = here if version % 2 else 3.0
                if version % 2:
                    here[:] = 3.0
        helpers.commit(memory, version)
        before = {(b, n): memory.state(b, n, version).tobytes() for b in range(3) for n in names}
        files = saving.save(PinnedVersion(memory, version), tmp_path / "state", never)
        helpers.manifest(memory, tmp_path / "state", version, files)
        for key in memory.spec.layout.arrays:
            memory.raw(key)[:] = b"\xa5" * len(memory.raw(key))
        load(memory, tmp_path / "state", version)
        after = {(b, n): memory.state(b, n, version).tobytes() for b in range(3) for n in names}
        assert after == before
    finally:
        memory.close()


def test_initial_weights_of_a_split_master(make_run: Any) -> None:
    """A loader writes it where version 0 has it."""
    memory = NodeMemory.create(make_run(optimizer={"master": "split"}).memory_spec(0))
    values = np.random.default_rng(1).standard_normal(len(memory.weights(1, 0)), np.float32)
    values[90:96] = values[101:] = 0.0  # padding

    def loader(cancelled: Callable[[], bool]) -> None:
        for block in memory.owned_blocks():
            memory.store_master(block, INITIAL_VERSION, values)

    try:
        restore(memory, Filling(incarnation=1, version=0, source=None), loader, never, CORES)
        assert memory.load_master(1, 0).tobytes() == values.tobytes()
        assert memory.control.slot_version(1, 0) == 0
    finally:
        memory.close()


def test_restored_weights_are_the_rounded_master(memory: NodeMemory, saved: Path) -> None:
    load(memory, saved)
    for block in range(3):
        master = torch.from_numpy(memory.state(block, "master"))
        expected = master.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(memory.weights(block, 1), expected)


def test_weights_are_cast_on_the_given_cores(
    memory: NodeMemory, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[list[int]] = []
    real = _native.Pool

    def pool(cores: list[int]) -> _native.Pool:
        pools.append(cores)
        return real(cores)

    monkeypatch.setattr(_native, "Pool", pool)
    wanted = sorted(os.sched_getaffinity(0))[::-1]
    restore(memory, Filling(incarnation=1, version=7, source=saved), no_loader, never, wanted)
    assert pools == [wanted]


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16])
def test_restored_weights_of_other_dtypes(make_run: Any, helpers: Any, dtype: DType) -> None:
    memory = NodeMemory.create(make_run(dtype=dtype).memory_spec(0))
    try:

        def loader(cancelled: Callable[[], bool]) -> None:
            helpers.fill(memory)

        restore(memory, Filling(incarnation=1, version=0, source=None), loader, never, CORES)
        master = memory.state(1, "master")
        expected = master.astype(np.float16) if dtype is DType.FP16 else master
        assert np.array_equal(memory.weights(1, 0), expected)
    finally:
        memory.close()


def test_initial_weights_have_no_history(memory: NodeMemory, helpers: Any) -> None:
    helpers.fill(memory, seed=1)
    helpers.commit(memory, 9)
    memory.control.begin_sweep(SweepIntent(block=1, state_version=9))
    seen: list[int] = []

    def loader(cancelled: Callable[[], bool]) -> None:
        seen.append(memory.control.incarnation)
        helpers.fill(memory, seed=2)
        for block in range(3):
            memory.state(block, "exp_avg")[:] = 0
            memory.state(block, "exp_avg_sq")[:] = 0

    restore(memory, Filling(incarnation=5, version=0, source=None), loader, never, CORES)
    control = memory.control
    assert seen == [0], "while the memory is filled it holds no model"
    assert control.interrupted_sweep is None
    assert control.record(9) is None
    assert control.record(0) == CommitRecord(
        version=0,
        attempt=0,
        decision=Decision.RESTORE,
        coefficient=1.0,
        inverse_loss_scale=1.0,
        learning_rate=0.0,
        bias_step=0,
        incarnation=5,
    )
    assert not memory.state(0, "exp_avg").any()
    assert control.readable(0, 0)


def test_initial_state_is_zero_whatever_was_there(memory: NodeMemory, helpers: Any) -> None:
    helpers.fill(memory)
    restore(memory, Filling(incarnation=1, version=0, source=None), lambda c: None, never, CORES)
    assert not any(memory.state(b, "exp_avg_sq").any() for b in range(3))


def test_padding_is_zero_after_a_restore(memory: NodeMemory) -> None:
    def loader(cancelled: Callable[[], bool]) -> None:
        for block in range(3):
            memory.state(block, "master")[:] = 9.0
            memory.frozen(block)[:] = 9

    restore(memory, Filling(incarnation=1, version=0, source=None), loader, never, CORES)
    assert not memory.state(0, "master")[90:96].any()
    assert not memory.state(0, "master")[101:].any()
    assert not memory.weights(0, 0)[101:].any()
    assert not memory.frozen(0)[3:].any()
    assert memory.state(0, "master")[89] == memory.state(0, "master")[96] == 9.0


def change_manifest(**fields: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / name
        path.write_bytes(change(path.read_bytes()))

    return apply


BLOCK = "block-0001.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "manifest.json").unlink(), r"manifest.json: cannot read it"),
        (rewrite("manifest.json", lambda b: b[:-5]), r"manifest.json: the manifest is damaged"),
        (rewrite("manifest.json", lambda b: b"\xff" + b), r"manifest.json: .* is damaged"),
        (rewrite("manifest.json", lambda b: b"[" * 10_000), r"manifest.json: .* is damaged"),
        (change_manifest(format=3), r"manifest.json: format 3, this Penstock reads 1 and 2"),
        (change_manifest(version="7"), r"manifest.json: .* '7' is not a count"),
        (change_manifest(version=8), r"manifest.json: is of version 8, expected 7"),
        (change_manifest(files={}), r"manifest.json: lists no block-0000.safetensors"),
        (change_manifest(files={"../x": {"bytes": 1, "sha256": ""}}), r"'../x' is not a file name"),
        (lambda d: (d / BLOCK).unlink(), rf"{BLOCK}: is not there; all nodes of a run use one"),
        (rewrite(BLOCK, lambda b: b[:-1]), rf"{BLOCK}: has \d+ bytes, the manifest says \d+"),
        (rewrite(BLOCK, lambda b: b[:3]), rf"{BLOCK}: has 3 bytes"),
        (
            rewrite(BLOCK, lambda b: b[:-1] + bytes([b[-1] ^ 1])),
            rf"{BLOCK}: its checksum does not match",
        ),
        (
            rewrite(BLOCK, lambda b: b"\xff" * 8 + b[8:]),
            rf"{BLOCK}: cut short, or not a safetensors file",
        ),
        (rewrite(BLOCK, lambda b: b[:8] + b"}" + b[9:]), rf"{BLOCK}: its header is damaged"),
        (
            rewrite(BLOCK, lambda b: b.replace(b"b1.w", b"b1.x")),
            rf"{BLOCK}: saved from another model .*'b1.w' is not saved",
        ),
        (
            rewrite(BLOCK, lambda b: b.replace(b"[45,2]", b"[2,45]")),
            rf"{BLOCK}: 'b1.w' is F32 \[2, 45\], the model has F32 \[45, 2\]",
        ),
        (
            rewrite(BLOCK, lambda b: b.replace(b"[45,2]", b"[45,3]")),
            rf"{BLOCK}: 'b1.w' has 360 bytes, its shape needs 540",
        ),
    ],
)
def test_damage_is_named_and_nothing_is_touched(
    memory: NodeMemory, saved: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(saved)
    before, control = contents(memory), bytes(memory.control._buffer)
    with pytest.raises(StateError, match=message):
        load(memory, saved)
    assert contents(memory) == before
    assert bytes(memory.control._buffer) == control


def test_saving_needs_the_very_version(memory: NodeMemory, tmp_path: Path, helpers: Any) -> None:
    with pytest.raises(StateError, match="version 0 of incarnation 0 is committed"):
        PinnedVersion(memory, 0)
    helpers.commit(memory, 7)
    memory.control.set_state_version(1, 8)
    with pytest.raises(StateError, match="version 7: the state of block 1 is at 8"):
        saving.save(PinnedVersion(memory, 7), tmp_path / "s", never)
    with pytest.raises(StateError, match="cannot save version 6: it cannot be read"):
        PinnedVersion(memory, 6)
    assert [memory.control.pin(block) for block in range(3)] == [None] * 3


def test_a_full_disk_leaves_no_file(memory: NodeMemory, tmp_path: Path, helpers: Any) -> None:
    helpers.commit(memory, 7)
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "block-0000.safetensors").symlink_to("/dev/full")
    with pytest.raises(CapacityError, match=r"no space left on its disk: at least [\d,]+ bytes"):
        saving.save(PinnedVersion(memory, 7), tmp_path / "s", never)
    assert list((tmp_path / "s").iterdir()) == []


def test_a_cancelled_save_leaves_no_file(memory: NodeMemory, tmp_path: Path, helpers: Any) -> None:
    helpers.commit(memory, 7)
    with pytest.raises(CancelledError):
        saving.save(PinnedVersion(memory, 7), tmp_path / "s", lambda: True)
    assert list((tmp_path / "s").iterdir()) == []


def test_compare(memory: NodeMemory, saved: Path, tmp_path: Path, helpers: Any) -> None:
    blocks = memory.spec.table.blocks
    assert snapshot.compare(saved, saved, blocks) == ()
    memory.state(2, "exp_avg")[0] += 1
    other = tmp_path / "other"
    helpers.manifest(memory, other, 7, saving.save(PinnedVersion(memory, 7), other, never))
    assert snapshot.compare(saved, other, blocks) == ("block2/exp_avg.b2.w",)


def test_a_failing_loader_is_quoted(tmp_path: Path) -> None:
    script = ["sh", "-c", "echo noise; echo 'no such model' >&2; exit 2"]
    with pytest.raises(LoaderError, match=r"node a: .*exit code 2\): no such model") as error:
        run_loader(tmp_path, "a", script, never, never, SILENCE_S)
    assert error.value.exit_code is ExitCode.BAD_CONFIG
    with pytest.raises(LoaderError, match=r"exit code 130") as error:
        run_loader(tmp_path, "a", ["sh", "-c", "exit 130"], never, never, SILENCE_S)
    assert error.value.exit_code is ExitCode.LOST_MEMBERS, "no failure passes for a clean end"
    with pytest.raises(LoaderError, match="SIGKILL") as error:
        run_loader(tmp_path, "a", ["sh", "-c", "kill -9 $$"], never, never, SILENCE_S)
    assert error.value.exit_code is ExitCode.LOST_MEMBERS


def test_a_loader_is_killed_when_the_restore_is_cancelled(tmp_path: Path) -> None:
    with pytest.raises(CancelledError):
        run_loader(tmp_path, "a", ["sh", "-c", "exec sleep 60"], always, always, SILENCE_S)


def test_a_stopped_loader_is_replaced(tmp_path: Path) -> None:
    marker = tmp_path / "stopped"
    script = f"test -e {marker} && exit 0; echo $$ > {marker}; kill -STOP $$; exit 1"
    run_loader(tmp_path, "a", ["sh", "-c", script], never, never, SILENCE_S)
    assert not Path(f"/proc/{marker.read_text().strip()}").exists()


@pytest.mark.parametrize(
    ("script", "gets_on"), [("exec sleep 60", False), ("while :; do :; done", True)]
)
def test_only_a_loader_that_works_gets_on(tmp_path: Path, script: str, gets_on: bool) -> None:
    """One that hangs is left to the scheduler's deadline, and is killed when that has passed."""
    progress = 0
    until_s = time.monotonic() + (600.0 if gets_on else 1.5)

    def over() -> bool:
        return progress > 5 or time.monotonic() > until_s

    def cancelled() -> bool:
        nonlocal progress
        progress += 1
        return over()

    with pytest.raises(CancelledError):
        run_loader(tmp_path, "a", ["sh", "-c", script], cancelled, over, SILENCE_S)
    assert (progress > 5) == gets_on, progress

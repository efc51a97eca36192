"""What outlives processes: journal, saved states, token files, and shared memory."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save

from penstock.client.weights.folder import Note
from penstock.config.adapter import AdapterConfig
from penstock.daemons.memory.snapshot import read_block, read_manifest
from penstock.daemons.memory.tensorfile import read_header
from penstock.daemons.mirror.sweeps import read_replica
from penstock.daemons.optimizer.effects import read_facts, read_pins
from penstock.daemons.scheduler.journal import Journal, _with_checksum
from penstock.daemons.scheduler.machine.position import Position
from penstock.daemons.scheduler.metrics import SchedulerMetrics
from penstock.daemons.scheduler.metrics_file import MetricsFile
from penstock.host.errors import PenstockError, StateError
from penstock.models.adapters.files import (
    SETTINGS,
    WEIGHTS,
    read_kept,
    read_settings,
    settings_fields,
)
from penstock.models.checkpoints.checkpoint import Checkpoint
from penstock.models.checkpoints.files import files_before
from penstock.models.data.chunks import write_sums
from penstock.models.exchange.folders import SavedState
from penstock.models.prepare import _has, _recorded, _recorded_sum
from penstock.protocol.run.bases.base_identity import read_source, weight_files
from penstock.protocol.run.checksums import ADAPTER, with_checksum
from penstock.protocol.run.saved_base import base_file, base_paths
from penstock.shm.control import CommitRecord, ControlView
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import NodeMemory
from penstock.shm.published import PublishedFile, PublishedLayout, PublishedTensor
from penstock.shm.segment import SHM_ROOT, SegmentError
from penstock.shm.table import DType
from penstock.workers.data import open_dataset
from tests.fuzz.target import Decoder, Form, Target, from_file, plainly
from tests.fuzz.targets.material import RUN_ID, config, forget, memory_spec, table
from tests.fuzz.targets.run_files import EVALUATION, LINE, dumped, made, metrics_lines
from tests.protocol.test_numerics import RECIPE
from tests.scheduler.conftest import make_position, make_record
from tests.scheduler.test_files import commit

ROW = (1, make_position(3), make_record(3, 4))


def _manifest() -> dict[str, Any]:
    return {
        "format": 1,
        "run_id": RUN_ID,
        "version": 3,
        "table_digest": table().digest,
        "files": {"block-0000.safetensors": {"bytes": 100, "sha256": "0" * 64}},
        "scheduler": make_position(3).to_fields(),
    }


def _manifests() -> list[bytes]:
    digest = "0123456789abcdef" * 4
    base = {base_file(0, digest): {"bytes": 100, "sha256": digest}}
    referring = _manifest() | {"format": 2, "base": base}
    return dumped(with_checksum(_manifest()), _manifest(), with_checksum(referring))


def _layouts() -> list[bytes]:
    """The place of a block's first tensor, turned."""
    spec = table().blocks[0].tensors[0]
    rows, columns = spec.num_elements // spec.shape[-1], spec.shape[-1]
    place = PublishedTensor(
        block=0,
        source=spec.name,
        offset=0,
        shape=(columns, rows),
        strides=(1, columns),
        dtype=DType.BF16,
        start=8,
    )
    file = PublishedFile(name="model.safetensors", num_bytes=1 << 20, tensors=(place,))
    layout = PublishedLayout(table_digest=table().digest, files=(file,))
    return [layout.to_json().encode()]


def _notes() -> list[bytes]:
    note = Note(
        run_id=RUN_ID,
        run_name="tiny",
        step=3,
        form="hf",
        dtype="bf16",
        files={"config.json": 20, "model.safetensors": 3},
    )
    return [note.to_json().encode()]


def _note(data: bytes) -> None:
    with suppress(ValueError):  # the caller says that the folder is another program's
        Note.from_json(data)


def _position(data: bytes) -> None:
    """The ``scheduler`` object of a manifest, or the position in a journal's row."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return
    Position.from_fields(fields, "here").validate()


def _block(folder: Path) -> None:
    read_header(folder / "block-0000.safetensors")
    read_block(folder, table().blocks[0])


def _block_files() -> list[bytes]:
    block = table().blocks[0]
    tensors = {
        tensor.name if tensor.trainable else f"frozen.{tensor.name}": torch.zeros(tensor.shape)
        for tensor in block.tensors
    }
    return [save(tensors), save({"a": torch.zeros(3, dtype=torch.bfloat16)})]


@contextmanager
def _journal_rows(folder: Path) -> Iterator[Decoder]:
    """The text of a row beside numbers that fit it, and numbers that do not."""
    stub: Any = SimpleNamespace(path=folder / "journal.sqlite")
    epoch, _, record = ROW

    def read(data: bytes) -> None:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return  # SQLite says so, see the journal's own file
        stub._load = lambda: Journal._decision(stub, (epoch, text, *record.values))
        Journal.load(stub)

    yield read


@contextmanager
def _recipe_rows(folder: Path) -> Iterator[Decoder]:
    """The text of a recipe's row."""
    stub: Any = SimpleNamespace(path=folder / "journal.sqlite")

    def read(data: bytes) -> None:
        try:
            row = 1, "feed", data.decode()
        except UnicodeDecodeError:
            return  # SQLite says so, see the journal's own file
        answer = SimpleNamespace(fetchone=lambda: row)
        stub._connection = SimpleNamespace(execute=lambda query: answer)
        stub._load = lambda: Journal._numerics(stub)
        Journal.load(stub)

    yield read


def _recipes() -> list[bytes]:
    fields = {"recipe": json.loads(RECIPE.canonical), "devices": {"worker.0": {"torch": "2.13.0"}}}
    return dumped(fields)


def _rows() -> list[bytes]:
    epoch, position, record = ROW
    return dumped(_with_checksum(epoch, position, record), position.to_fields())


def _journal(folder: Path) -> None:
    """A start with a journal of any bytes: opened, read, and held against the metrics beside it."""
    with closing(Journal(folder / "journal.sqlite", RUN_ID)) as journal:
        journal.load()
        journal.newest_line("train")
        metrics = MetricsFile(folder / "metrics.jsonl", journal)
        try:
            metrics.reconcile()
        finally:
            metrics.close()


def _without_log(folder: Path) -> None:
    for file in folder.glob("journal.sqlite-*"):
        file.unlink()
    _journal(folder)


def _journals(folder: Path) -> list[bytes]:
    path = folder / "journal.sqlite"
    with closing(Journal(path, RUN_ID)) as journal:
        for version in range(1, 4):
            journal.decide(commit(version))
    return [path.read_bytes()]


@contextmanager
def _last_metrics(folder: Path) -> Iterator[Decoder]:
    """Metrics beside a journal that knows other lines."""
    path = folder / "journal.sqlite"
    with closing(Journal(path, RUN_ID)) as journal:
        journal.decide(commit(1))

        def reconcile(data: bytes) -> None:
            (folder / "metrics.jsonl").write_bytes(data)
            metrics = MetricsFile(folder / "metrics.jsonl", journal)
            try:
                metrics.reconcile()
            finally:
                metrics.close()

        yield reconcile


@contextmanager
def _control(folder: Path) -> Iterator[Decoder]:
    """The control segment as whoever attaches finds it, and all words that decide what follows."""
    del folder
    spec = memory_spec()
    forget(spec)  # of a process that was cut short
    NodeMemory.create(spec).close()
    path = SHM_ROOT / spec.name(SegmentKind.CONTROL).removeprefix("/")
    blocks: Any = tuple(SimpleNamespace(index=index) for index in (0, 1))

    def attach(data: bytes) -> None:
        path.write_bytes(data)
        memory = NodeMemory.attach(spec, adopt=True)  # seeds bear no tokens
        try:
            view = memory.control
            assert view.owner is not None
            read_facts(view, blocks)
            read_pins(view, (0, 1))
            read_replica(memory)
            for block in (0, 1):
                view.ready(block, 11)
                view.frozen_sequence(block)
                view.gradient_sequence(block, 1, 11)
            view.mend_sequences((0, 1))
        finally:
            memory.close()

    try:
        yield attach
    finally:
        forget(spec)


def _segments() -> list[bytes]:
    spec = memory_spec()
    found = []
    for version in (0, 3):
        memory = mmap.mmap(-1, spec.sizes()[spec.name(SegmentKind.CONTROL)])
        view = ControlView.initialize(
            memoryview(memory),
            run_id=RUN_ID,
            digest=spec.digest,
            num_blocks=len(spec.table.blocks),
            undo_bytes=spec.undo_bytes,
        )
        if version:
            view.write_record(make_record(version, 4))
            view.set_committed(version)
            view.set_incarnation(1)
        found.append(bytes(memory))
    return found


def _record(data: bytes) -> None:
    CommitRecord.unpack(data.ljust(72, b"\0"))


ROWS = bytes(400) + struct.pack("<4q", 0, 40, 80, 100) + bytes(80)
"""A file of three rows; as plain tokens it has 512 of one byte each."""


@contextmanager
def _tokens(folder: Path) -> Iterator[Decoder]:
    """The description of a run's tokens or rows; files of it are 512 bytes each."""
    (folder / "data").mkdir()
    tokens, sums = folder / "data" / "train.tokens", folder / "data" / "train.sums"
    tokens.write_bytes(ROWS)
    write_sums(tokens, sums, lambda text: None)
    settings = config()

    def read(data: bytes) -> None:
        (folder / "data" / "meta.json").write_bytes(data)
        dataset = open_dataset(folder / "data", "train", settings)
        if settings.data.sequence_length < 512:
            dataset.read(0, 1, 1)

    yield read


@contextmanager
def _recalled(folder: Path) -> Iterator[Decoder]:
    """The last line of metrics in the journal, as a scheduler that starts shows it."""
    del folder
    metrics = SchedulerMetrics(config(), None)

    def recall(data: bytes) -> None:
        text = data.decode(errors="replace")
        metrics.recall(text, (), None, None)

    yield recall


def _earlier_data(folder: Path) -> object:
    """The description of tokens that an earlier start has left."""
    meta = folder / "meta.json"
    return _recorded(meta), _recorded_sum(meta), _has(meta)


def _metas(folder: Path) -> list[bytes]:
    (folder / "x").write_bytes(ROWS)
    sums = write_sums(folder / "x", folder / "train.sums", lambda text: None)
    entry = {
        "path": "train.tokens",
        "token_dtype": "uint8",
        "first_token": 0,
        "num_tokens": 512,
    }
    rows = {"rows": 3, "samples": 5, "tokens": 100, "counted": 0, "pad": 0, "packing": "none"}
    rows["length"] = config().data.sequence_length
    return dumped(
        {"train": entry | {"sums": sums}, "fingerprint": "x"},
        {"train": entry},
        {"train": entry | {"sums": sums, "rows": rows}},
    )


@contextmanager
def _imported_manifest(folder: Path) -> Iterator[Decoder]:
    """A saved state that another run imports."""
    (folder / "block-0000.safetensors").write_bytes(save({"w": torch.zeros(2, 3)}))

    def read(data: bytes) -> None:
        (folder / "manifest.json").write_bytes(data)
        SavedState().open(folder)

    yield read


def _imported_manifests() -> list[bytes]:
    files = {"block-0000.safetensors": {"bytes": 1, "sha256": "0" * 64}}
    return dumped({"version": 3, "files": files, "scheduler": {"data_position": 24}})


@contextmanager
def _checkpoint(folder: Path) -> Iterator[Decoder]:
    """A folder of weights as others write it: the file, or the list of files."""
    (folder / "a.safetensors").write_bytes(save({"w": torch.zeros(2, 3)}))
    index, other = folder / "model.safetensors.index.json", folder / "b.safetensors"

    def read(data: bytes) -> None:
        index.unlink(missing_ok=True)
        other.unlink(missing_ok=True)
        (index if data[:1] == b"{" else other).write_bytes(data)
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / "meta.json").write_bytes(data)
        weight_files(folder)
        (folder / "model" / "base-a.json").write_bytes(data)
        read_source(folder / "model" / "base-a.json")
        found = Checkpoint(folder, files_before(folder))
        for name in list(found.headers)[:4]:
            found.read(name)

    yield read


def _checkpoints() -> list[bytes]:
    listed = {"metadata": {}, "weight_map": {"w": "a.safetensors"}}
    return [
        *dumped(listed),
        save({"v": torch.zeros(2, dtype=torch.float16)}),
        save({"v": torch.arange(4)}),
    ]


@contextmanager
def _adapter(folder: Path) -> Iterator[Decoder]:
    """The settings of an adapter as PEFT writes them, and as a run has kept them."""
    (folder / "model").mkdir()
    (folder / WEIGHTS).touch()

    def read(data: bytes) -> None:
        for path in (folder / SETTINGS, folder / ADAPTER):
            path.write_bytes(data)
        try:
            read_kept(folder, 0.0)
        except StateError:
            read_settings(folder, ("model.layers.0.q_proj", "model.layers.11.experts.3.w1"), 0.1)

    yield read


def _adapters() -> list[bytes]:
    fields = settings_fields(
        AdapterConfig(rank_pattern={"w1": 4}, alpha_pattern={"w1": 2.5}),
        ("layers.0.w1",),
        ("layers.0.w1", "layers.0"),
        base=None,
        transposed=False,
        causal=True,
    )
    layers = {"target_modules": ["w1"], "layers_to_transform": [11], "layers_pattern": "layers"}
    kept = AdapterConfig(targets=("w1",)).model_dump(mode="json", exclude={"path", "dropout"})
    return dumped(fields | {"target_modules": ".*w1"}, fields | layers, kept)


SAVED = (
    Target(
        name="adapter",
        open=_adapter,
        covers=(
            "models.adapters.files._read_fields",
            "models.adapters.files.read_settings",
            "models.adapters.files.read_kept",
        ),
        seeds=_adapters,
        form=Form.JSON,
    ),
    Target(
        name="manifest",
        open=from_file("manifest.json", read_manifest),
        covers=("daemons.memory.snapshot.read_manifest",),
        seeds=_manifests,
        form=Form.JSON,
        examples=100,
    ),
    Target(
        name="base-paths",
        open=from_file("manifest.json", base_paths),
        covers=("protocol.run.saved_base.base_paths",),
        seeds=_manifests,
        form=Form.JSON,
        examples=100,
    ),
    Target(
        name="position",
        open=plainly(_position),
        covers=("daemons.scheduler.machine.position.Position.from_fields",),
        seeds=lambda: dumped(make_position(3).to_fields()),
        form=Form.JSON,
    ),
    Target(
        name="block-file",
        open=from_file("block-0000.safetensors", _block),
        covers=(
            "daemons.memory.tensorfile.read_header",
            "daemons.memory.tensorfile.read_into",
            "daemons.memory.snapshot.read_block",
        ),
        seeds=_block_files,
        examples=100,
    ),
    Target(
        name="weights-layout",
        open=plainly(lambda data: PublishedLayout.from_json(data, table(), "here")),
        covers=(
            "shm.published.PublishedLayout.from_json",
            "shm.published._file",
            "shm.published._tensor",
        ),
        seeds=_layouts,
        form=Form.JSON,
    ),
    Target(
        name="weights-note",
        open=plainly(_note),
        covers=("client.weights.folder.Note.from_json",),
        seeds=_notes,
        form=Form.JSON,
    ),
    Target(
        name="journal-rows",
        open=_journal_rows,
        covers=("daemons.scheduler.journal.Journal._decision",),
        seeds=_rows,
        form=Form.JSON,
    ),
    Target(
        name="journal-recipes",
        open=_recipe_rows,
        covers=("daemons.scheduler.journal.Journal._numerics",),
        seeds=_recipes,
        form=Form.JSON,
    ),
    Target(
        name="journal",
        open=from_file("journal.sqlite", _without_log),
        covers=("daemons.scheduler.journal.Journal._load",),
        seeds=made(_journals),
        examples=25,
    ),
    Target(
        name="metrics-beside",
        open=_last_metrics,
        covers=("daemons.scheduler.metrics_file.MetricsFile.reconcile",),
        seeds=metrics_lines,
        form=Form.LINES,
        examples=25,
    ),
    Target(
        name="control-segment",
        open=_control,
        covers=(
            "shm.control.ControlView.record",
            "daemons.optimizer.effects.read_facts",
            "daemons.optimizer.effects.read_pins",
            "daemons.mirror.sweeps.read_replica",
        ),
        seeds=_segments,
        allowed=(PenstockError, SegmentError),
        examples=100,
    ),
    Target(
        name="commit-record",
        open=plainly(_record),
        covers=("shm.control.CommitRecord.unpack",),
        seeds=lambda: [make_record(3, 4).pack()],
    ),
    Target(
        name="tokens",
        open=_tokens,
        covers=(
            "workers.data._entry",
            "workers.data.TokenDataset.open",
            "workers.data.TokenDataset.__init__",
            "models.data.rows.row_file.RowFile.__init__",
        ),
        seeds=made(_metas),
        form=Form.JSON,
    ),
    Target(
        name="recalled-metrics",
        open=_recalled,
        covers=("daemons.scheduler.metrics.SchedulerMetrics.recall",),
        seeds=lambda: dumped(LINE, EVALUATION),
        form=Form.JSON,
        allowed=(),
    ),
    Target(
        name="earlier-data",
        open=from_file("meta.json", _earlier_data),
        covers=(
            "models.prepare._recorded",
            "models.prepare._recorded_sum",
            "models.prepare._has",
        ),
        seeds=made(_metas),
        form=Form.JSON,
        allowed=(),
    ),
    Target(
        name="checkpoint",
        open=_checkpoint,
        covers=(
            "models.checkpoints.files._shards",
            "protocol.run.bases.base_identity.weight_files",
            "protocol.run.bases.base_identity.read_source",
            "models.checkpoints.checkpoint.Checkpoint._read_headers",
            "models.checkpoints.mapped.MappedFile.__init__",
            "models.checkpoints.mapped.tensor_over",
        ),
        seeds=_checkpoints,
    ),
    Target(
        name="imported_manifest",
        open=_imported_manifest,
        covers=("models.exchange.folders._read_manifest",),
        seeds=_imported_manifests,
        form=Form.JSON,
    ),
)

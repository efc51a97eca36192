"""``python -m penstock.models.inference.references RUN_DIR``: computes the reference
log-probabilities of pairs, once for each file of rows.

The reference is the model at the start of the run. The weights are read block by block. One block
is in memory at a time, and all rows of a group go through the block. A file next to the rows keeps
the finished groups, so an interrupted preparation goes on. The cache of tokens keeps finished files
for other runs. The key of a file has rows, weights and adapter by content, settings, the code of
Penstock, and the facts that rounding depends on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import penstock.models
from penstock.config.evaluation import EVAL
from penstock.config.schema import Config
from penstock.config.values import DPO, PAIR
from penstock.host.errors import ConfigError, StateError
from penstock.host.files import parse_json, write_atomically, writing
from penstock.host.stamps import content_digest
from penstock.models.adapters.files import SETTINGS, WEIGHTS
from penstock.models.binding import TORCH_DTYPES, Borrowed, BoundBlock, pack
from penstock.models.checkpoints.constants import read_constants
from penstock.models.checkpoints.files import recorded_files
from penstock.models.checkpoints.initial import initial_blocks
from penstock.models.data.batch import MicroBatch
from penstock.models.data.cache import Made, NewFile, TokenCache, cached, made_by
from penstock.models.data.chunks import SAY_EVERY_S, Checksums, ChunkHasher, Progress
from penstock.models.data.preferences import PairObjective, Preferences
from penstock.models.data.rows.references import FIELD, NUMBER, references_path
from penstock.models.data.rows.row_file import RowFile, RowLayout
from penstock.models.data.token_sources import content_stamps, fingerprint_of
from penstock.models.data.user_modules import import_user_module
from penstock.models.device_facts import device_facts
from penstock.models.runtime import ModelRuntime
from penstock.models.surgery.hf import load_run_adapter, load_run_config
from penstock.models.torch_device import first_device, repeat_bits
from penstock.protocol.run.process import tool_main
from penstock.protocol.run.rundir import RunDirectory

_GROUP_BYTES = 1 << 30
"""Bytes of hidden states of a group of rows."""

_MODELS = Path(penstock.models.__file__).parent
"""The code that computes the numbers."""


def write_references(run_dir: Path, progress: Progress) -> None:
    """Computes the missing references of a prepared run, and notes them in ``data/meta.json``. A
    run that has started keeps those that it has.

    Raises:
        ConfigError, StateError: the model's weights or the rows cannot be read.
        CapacityError: the disk is full.
    """
    files = RunDirectory(run_dir)
    meta = run_dir / "data" / "meta.json"
    recorded = parse_json(meta.read_bytes())
    made = _References(files=files, progress=progress)
    for split, entry in recorded.items():
        if split != "train" and split.partition(".")[0] != EVAL:
            continue
        before = entry.get(FIELD)
        if before is not None and (files.has_started or before["source"] == made.source):
            continue
        if files.has_started:
            made.check_model(recorded.get("train", {}).get(FIELD) or {}, split)
        entry[FIELD] = made.of(split, entry)
        write_atomically(meta, json.dumps(recorded, indent=1))


@dataclass(frozen=True, kw_only=True)
class _References:
    """The references of one run."""

    files: RunDirectory
    progress: Progress

    @property
    def _config(self) -> Config:
        return self.files.config

    @cached_property
    def source(self) -> str:
        """A fingerprint of the model's files by their stamps, and of all other inputs."""
        return fingerprint_of(content_stamps(self._model_files), self._terms)

    @cached_property
    def _model_files(self) -> tuple[Path, ...]:
        """The files of the run's first model: weights, adapter, modules of the user."""
        config, files = self._config, list(self._weight_files)
        if config.adapter is not None and config.adapter.path is not None:
            files += [config.adapter.path / name for name in (SETTINGS, WEIGHTS)]
        modules = [import_user_module(name, config) for name in config.model.imports]
        return (*files, *(Path(module.__file__) for module in modules if module.__file__))

    @cached_property
    def _weight_files(self) -> tuple[Path, ...]:
        folder = self._config.model.path
        if folder is None:
            return ()
        names = ("config.json", *recorded_files(self.files.path, folder))
        return tuple(folder / name for name in names)

    @cached_property
    def _terms(self) -> list[Any]:
        """All that decides the numbers, next to the weights and the rows."""
        keys = {"hf", "imports", "attention", "deterministic"}
        adapter = load_run_adapter(self.files.path)
        return [
            made_by(_MODELS),
            self._config.model.model_dump(mode="json", include=keys),
            None if adapter is None else adapter.model_dump(mode="json", exclude={"path"}),
            None if self._config.model.path is not None else self._config.run.seed,
            (self.files.path / "model" / "config.json").read_text(encoding="utf-8"),
            self.files.table.digest,
            self._micro_batch,
            str(self._place),
            device_facts(self._config, 0),
        ]

    @cached_property
    def _model(self) -> str:
        """A digest of the content of the model's files. Reads all of them."""
        digests = []
        for path in self._model_files:
            self.progress(f"references: reads {path.name} for the key of the cache")
            digests.append(content_digest(path))
        return fingerprint_of(digests)

    def check_model(self, before: Mapping[str, Any], split: str) -> None:
        """Refuses references of a run that has started, if its model's files have changed since the
        start. ``before``: the field of references that the run has.

        Raises:
            ConfigError: the files differ.
        """
        if before.get("model") in (None, self._model):
            return
        files = ", ".join(map(str, self._model_files))
        raise ConfigError(
            f"data.objective dpo: {split} needs log-probabilities of the model at the run's start,"
            f" and its files have changed since ({files}); restore the files, or take the"
            " evaluation out of the configuration"
        )

    @cached_property
    def _place(self) -> torch.device:
        """The first device of the run's kind on this machine, which the preparation has checked."""
        platform = self._config.cluster.platform
        device = first_device(platform.name) if platform.own_memory else None
        return torch.device("cpu") if device is None else device.device

    def of(self, split: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the field of a split's entry with its file of references; makes the file."""
        folder, name = self.files.path / "data", references_path(entry)
        layout = RowLayout.of(entry)
        assert layout is not None, split
        sums = entry["sums"]["sha256"]
        key = fingerprint_of("references", sums, layout.to_json(), self._model, self._terms)

        def make() -> Made:
            rows = folder / entry["path"]
            file = RowFile(rows, layout, Checksums.open(rows, folder, entry["sums"]))
            return {folder / name: self._computed(split, folder / name, file, key)}

        # A module of the user may import others, which no key knows.
        limit = 0 if self._config.model.imports else self._config.data.cache_limit
        made, is_cached = cached(
            TokenCache(limit, self.progress),
            lambda: {folder / name: key},
            lambda now_s: content_stamps(self._model_files, now_s),
            make,
        )
        if is_cached:
            self.progress(f"references: takes those of {split} that were computed before")
        fields = made[folder / name]["sums"]
        return {
            "path": str(name),
            "source": self.source,
            "model": self._model,
            "sums": {**fields, "path": str(name.with_name(fields["path"]))},
        }

    def _computed(self, split: str, path: Path, file: RowFile, key: str) -> dict[str, Any]:
        """Computes the references of a file of rows, and writes them."""
        rows = file.layout.rows
        partial = _Partial(path.with_name(f".{path.name}.part"), key)
        numbers = [partial.read(rows)]
        done = len(numbers[0])
        say = self.progress
        if done:
            say(f"references: {split}: {done:,} of {rows:,} rows were computed before")
        size = self._rows_at_once
        while done < rows:
            group = range(done, min(rows, done + size))
            say(f"references: {split}: rows {group.start:,} to {group.stop:,} of {rows:,}")
            numbers.append(self._walk(file, group))
            partial.append(numbers[-1])
            done = group.stop
        whole = np.concatenate(numbers).astype(NUMBER)
        hasher = ChunkHasher()
        with NewFile(path) as new:
            with writing(new.temporary, whole.nbytes), new.temporary.open("wb") as output:
                output.write(whole.tobytes())
                output.flush()
                os.fsync(output.fileno())
            hasher.update(whole.tobytes())
            sums = hasher.write(new.sums)
            new.keep()
        partial.path.unlink(missing_ok=True)
        return {"num_tokens": rows, "sums": sums}

    @cached_property
    def _rows_at_once(self) -> int:
        """Rows of a group: as many as :data:`_GROUP_BYTES` hold, in whole micro-batches."""
        text = self._runtime_config.get_text_config(decoder=True)
        width = int(getattr(text, "hidden_size", 0) or 1 << 12)
        one = width * self._runtime.compute_dtype.itemsize * self._config.data.sequence_length
        return max(1, _GROUP_BYTES // (one * self._micro_batch)) * self._micro_batch

    @property
    def _micro_batch(self) -> int:
        """Rows that are computed together. ``auto`` has not chosen yet: a pair."""
        return self._config.train.micro_batch or PAIR

    @cached_property
    def _runtime_config(self) -> Any:
        return load_run_config(self.files.path)

    @cached_property
    def _runtime(self) -> ModelRuntime:
        own_memory = self._config.cluster.platform.own_memory
        stored = TORCH_DTYPES[self.files.table.weight_dtype]
        if self._config.model.deterministic:
            repeat_bits()
        return ModelRuntime(
            self._runtime_config,
            self.files.table,
            device=self._place,
            compute_dtype=stored if own_memory else torch.float32,
            seed=self._config.run.seed,
            constants=read_constants(self.files.path),
            adapter=load_run_adapter(self.files.path),
        )

    def _walk(self, file: RowFile, rows: range) -> NDArray[np.float64]:
        """Returns the references of rows, (rows,), with each block's weights in memory once."""
        starts = range(rows.start, rows.stop, self._micro_batch)
        batches = [_batch(file, range(n, min(rows.stop, n + self._micro_batch))) for n in starts]
        hidden: list[dict[str, torch.Tensor]] = [{} for _ in batches]
        results: list[NDArray[np.float64]] = []
        count, spoken_s = len(self.files.table.blocks), time.monotonic()
        for block in self._blocks():
            for number, batch in enumerate(batches):
                output = self._runtime.forward(
                    [block],
                    hidden[number],
                    batch,
                    data_position=0,
                    micro_batch_index=0,
                    training=False,
                    loss_weight=1.0,
                    autograd=False,
                )
                hidden[number] = output.tensors
                if output.scores is not None:
                    results.append(output.scores.cpu().numpy())
                if time.monotonic() - spoken_s > SAY_EVERY_S:
                    spoken_s = time.monotonic()
                    share = (block.index + (number + 1) / len(batches)) / count
                    self.progress(f"references: {share:.0%} of these rows")
        made = np.concatenate(results)
        if not np.isfinite(made).all():
            row = rows.start + int(np.flatnonzero(~np.isfinite(made))[0])
            raise StateError(
                f"data.objective dpo: the model at the start gives row {row} of the data a"
                " log-probability that is not finite; use model.dtype fp32 or bf16"
            )
        return made

    def _blocks(self) -> Iterator[BoundBlock]:
        """Yields the blocks with their initial weights, in order. Weights of a block are freed
        after its use, unless a later block borrows one.
        """
        config, table = self._config, self.files.table
        lenders = {tied.owner for block in table.blocks for tied in block.borrows}
        lent: dict[int, dict[bool, torch.Tensor]] = {}
        folder = config.model.path
        names = None if folder is None else recorded_files(self.files.path, folder)
        every = range(len(table.blocks))
        for index, tensors in initial_blocks(config, self._runtime_config, table, every, names):
            block = table.blocks[index]
            trainable, frozen = (self._stored(flat) for flat in pack(block, tensors))
            if index in lenders:
                lent[index] = {True: trainable, False: frozen}
            borrowed: dict[str, Borrowed] = {
                tied.local_name: (lent[tied.owner][tied.contribution > 0], None)
                for tied in block.borrows
            }
            yield self._runtime.bind(
                index,
                weights=trainable,
                frozen=frozen if block.frozen_elements else None,
                borrowed=borrowed,
            )

    def _stored(self, flat: NDArray[np.float32]) -> torch.Tensor:
        """Returns flat weights as a worker has them: rounded to the stored type first."""
        stored = torch.from_numpy(flat).to(TORCH_DTYPES[self.files.table.weight_dtype])
        return stored.to(self._place, self._runtime.compute_dtype)


@dataclass(frozen=True, slots=True)
class _Partial:
    """The finished numbers of a file of references: the key in 64 bytes, then the numbers."""

    path: Path
    key: str

    def read(self, most: int) -> NDArray[np.float64]:
        """Returns the numbers with this key, at most so many. Without any, empties the file."""
        head = self.key.encode()
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            content = b""
        if content[: len(head)] == head:
            whole = (len(content) - len(head)) // NUMBER.itemsize
            numbers = np.frombuffer(content, NUMBER, whole, len(head)).astype(np.float64)
            if whole <= most and np.isfinite(numbers).all():
                with self.path.open("r+b") as file:
                    file.truncate(len(head) + whole * NUMBER.itemsize)
                return numbers
        with writing(self.path, len(head)):
            self.path.write_bytes(head)
        return np.empty(0, np.float64)

    def append(self, numbers: NDArray[np.float64]) -> None:
        """Adds the numbers of a group. They are on disk when this returns.

        Raises:
            CapacityError: the disk is full.
        """
        with writing(self.path, numbers.nbytes), self.path.open("ab") as file:
            file.write(numbers.astype(NUMBER).tobytes())
            file.flush()
            os.fsync(file.fileno())


def _batch(file: RowFile, rows: range) -> MicroBatch:
    """Returns rows as a micro-batch of pairs. The scores are the summed log-probabilities."""
    batch = file.layout.batch([file.row(n) for n in rows])
    sums = Preferences(objective=PairObjective(name=DPO, beta=1.0))
    return MicroBatch(input_ids=batch.input_ids, labels=batch.labels, preferences=sums)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="penstock.models.inference.references", description=__doc__
    )
    parser.add_argument("run_dir", type=Path, help="prepared run directory")
    parser.add_argument("--parent-pid", type=int, help="die when this process dies")
    options = parser.parse_args(arguments)

    def say(message: str) -> None:
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()

    return tool_main(
        lambda: write_references(options.run_dir, say), options.run_dir, options.parent_pid
    )


if __name__ == "__main__":
    sys.exit(main())

"""The run directory: what processes of a run find there before they talk to each other."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.config.schema import Config, load_config
from penstock.host.errors import ConfigError, ProtocolError, StateError, reason
from penstock.host.files import (
    holds_text,
    is_locked,
    make_directory,
    open_lock,
    parse_json,
    write_atomically,
)
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.step import step_terms
from penstock.protocol.run.checksums import (
    ADAPTER,
    CHECKSUMS,
    CONSTANTS,
    checksums_text,
    read_checked,
)
from penstock.protocol.run.data_size import with_known_steps
from penstock.protocol.run.names import ownership, partner_of, replica_name, storage
from penstock.protocol.run.numerics import KERNELS, NUMERICS, Numerics
from penstock.protocol.security.token import TOKEN_FILE, ensure_token
from penstock.shm.layout import NodeLayout, replica_layout
from penstock.shm.memory import MemorySpec
from penstock.shm.table import BlockTable

FORMAT = 1
SHARED = "all nodes of a run use one run directory, on a file system that they share"
"""Remedy in errors about files that may be on another machine."""

MAX_OPTIMIZER_THREADS = 64
"""Threads for which the undo area has room, with any configuration."""

_FILES = (
    *("run.json", "resolved.yaml", "table.json", "plan.json", "journal.sqlite", "metrics.jsonl"),
    *(
        "endpoint.json",
        TOKEN_FILE,
        CHECKSUMS,
        "data/meta.json",
        "model/config.json",
        "logs/console.txt",
    ),
    *("software.json", "journal.sqlite-count", "places.json", "search.json", CONSTANTS),
    ADAPTER,
    *(NUMERICS, KERNELS),
)
COMPILED = "compiled"
"""Folder of the layers' compiled graphs: a cache, which costs time only when it is removed."""
_DIRECTORIES = ("logs", "state", "trace", "data", "model", "emulated", "metrics", "waits", COMPILED)


def run_of(config: Path) -> Path | None:
    """Returns the run directory that a configuration file is the ``resolved.yaml`` of, wherever it
    was moved to since; ``run.dir`` in the file says where it was, or what the user wrote.
    """
    folder = config.absolute().parent
    return folder if config.name == "resolved.yaml" and (folder / "run.json").exists() else None


def memory_spec(
    config: Config, table: BlockTable, plan: Plan, node: int, run_id: str
) -> MemorySpec:
    """Returns the names and layout of a node's shared memory, by the plan of a configuration."""
    # Imported here: the client reads run directories on machines without the native module.
    from penstock._native import undo_bytes

    owners = ownership(config, table, plan)
    return MemorySpec(
        run_id=run_id,
        node_name=config.cluster.nodes[node].name,
        table=table,
        layout=NodeLayout.compute(table, owners, node, storage(config, plan)),
        undo_bytes=undo_bytes(MAX_OPTIMIZER_THREADS),
        step_terms=step_terms(config),
    )


@dataclass(frozen=True)
class RunDirectory:
    """A prepared run directory. Attributes are read once, at their first use."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """Makes the directory and gives the run its identity; an existing run keeps its own."""
        make_directory(path)
        identity = path / "run.json"
        if not identity.exists():
            fields = {
                "run_id": secrets.token_hex(6),
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "format": FORMAT,
            }
            write_atomically(identity, json.dumps(fields))
        ensure_token(path)
        return cls(path)

    @property
    def has_started(self) -> bool:
        """Returns whether the run may have trained: then its inputs are fixed."""
        return (self.path / "journal.sqlite").exists() or (self.path / "state").exists()

    @property
    def is_held(self) -> bool:
        """Returns whether a training or a node on this machine has the directory locked."""
        for path in self.path.glob(".lock*"):
            try:
                descriptor = open_lock(path, os.O_RDONLY)
            except ConfigError:
                continue  # nothing of ours, so no process of a run holds it
            try:
                if is_locked(descriptor):
                    return True
            finally:
                os.close(descriptor)
        return False

    def check_shape(self) -> None:
        """Refuses a directory in the place of a file, and a file in the place of a directory.

        Raises:
            StateError: names the path.
        """
        if self.path.exists() and not self.path.is_dir():
            raise StateError(f"{self.path}: is a file; a run needs a directory")
        for name in _FILES:
            path = self.path / name
            if path.exists() and not path.is_file():
                raise StateError(f"{path}: is no file, and one is due there; move it away")
        for name in _DIRECTORIES:
            path = self.path / name
            if path.exists() and not path.is_dir():
                raise StateError(f"{path}: is a file, and a directory is due there; move it away")

    @cached_property
    def run_id(self) -> str:
        """12 hexadecimal digits.

        Raises:
            StateError: ``run.json`` is damaged or of another format.
        """
        path = self.path / "run.json"
        try:
            fields = parse_json(self._text("run.json"))
            file_format, run_id = fields["format"], str(fields["run_id"])
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"{path}: is damaged: {error!r}") from error
        if file_format != FORMAT:
            raise StateError(f"{path}: format {file_format!r}, this Penstock reads {FORMAT}")
        if re.fullmatch(r"[0-9a-f]{12}", run_id) is None:
            raise StateError(f"{path}: run id {run_id[:40]!r} is not 12 hexadecimal digits")
        return run_id

    @cached_property
    def config(self) -> Config:
        """The resolved configuration, with the steps that ``train.epochs`` takes.

        Raises:
            ConfigError: there is none, or it is impossible.
            StateError: it was edited after the start of the run.
        """
        self._text("resolved.yaml")
        return with_known_steps(load_config(self.path / "resolved.yaml"), self.path)

    @cached_property
    def table(self) -> BlockTable:
        """The block table.

        Raises:
            StateError: ``table.json`` is damaged.
        """
        try:
            return BlockTable.from_json(self._text("table.json"))
        except ValueError as error:
            raise StateError(f"{self.path / 'table.json'}: {error}") from error

    @cached_property
    def plan(self) -> Plan:
        """The plan in force.

        Raises:
            StateError: ``plan.json`` is damaged.
        """
        try:
            return Plan.from_json(self._plan_text)
        except (ProtocolError, ConfigError) as error:
            raise StateError(f"{self.path / 'plan.json'}: {error}") from error

    @cached_property
    def plan_digest(self) -> str:
        """SHA-256 of ``plan.json``, in hexadecimal digits: what members call the plan in force."""
        return hashlib.sha256(self._plan_text.encode()).hexdigest()

    @cached_property
    def _plan_text(self) -> str:
        return self._text("plan.json")

    @cached_property
    def numerics(self) -> Numerics | None:
        """The numerics recipe in force; None in runs that an older Penstock prepared.

        Raises:
            StateError: ``numerics.json`` is damaged or was edited.
        """
        if not (self.path / NUMERICS).exists():
            return None
        return Numerics.from_json(self._text(NUMERICS), str(self.path / NUMERICS))

    @property
    def numerics_digest(self) -> str:
        """The name of the recipe in force; empty without a recipe."""
        return "" if self.numerics is None else self.numerics.digest

    @property
    def state_dir(self) -> Path:
        """Directory of saved states."""
        return self.path / "state"

    def memory_spec(self, node: int) -> MemorySpec:
        """Returns the names and layout of a node's shared memory.

        Raises:
            StateError: plan, table and configuration do not belong together.
        """
        sizes = (self.plan.num_blocks, self.plan.num_devices)
        expected = (len(self.table.blocks), self.config.num_workers)
        if sizes != expected:
            raise StateError(
                f"{self.path / 'plan.json'}: is for {sizes[0]} blocks on {sizes[1]} devices,"
                f" the run has {expected[0]} on {expected[1]}"
            )
        return memory_spec(self.config, self.table, self.plan, node, self.run_id)

    def replica_spec(self, owner: int) -> MemorySpec:
        """Returns the names and layout of the replica of a node's state, which its partner keeps.

        Raises:
            StateError: plan, table and configuration do not belong together.
        """
        nodes, spec = self.config.cluster.nodes, self.memory_spec(owner)
        keeper = nodes[partner_of(self.config, owner)].name
        owners = ownership(self.config, self.table, self.plan)
        return dataclasses.replace(
            spec,
            node_name=replica_name(keeper, nodes[owner].name),
            layout=replica_layout(self.table, owners, owner),
        )

    def record_checksums(self, fixed: Mapping[str, Any]) -> None:
        """Records the present checksums of the files that decide the run's bytes."""
        text = checksums_text(self.path, fixed)
        if not holds_text(self.path / CHECKSUMS, text):
            write_atomically(self.path / CHECKSUMS, text)

    def remove_checksums(self) -> None:
        """Removes the checksums, because files are about to change. A start that is interrupted
        leaves none, and the next start accepts the files as they are.
        """
        (self.path / CHECKSUMS).unlink(missing_ok=True)

    def _text(self, name: str) -> str:
        try:
            return read_checked(self.path, name).decode()
        except FileNotFoundError as error:
            raise ConfigError(
                f"{self.path / name} does not exist: start the run with penstock train or"
                f" penstock node; {SHARED}"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise StateError(f"{self.path / name}: cannot read it: {reason(error)}") from error

"""A disk that loses power: what a save asks of it is recorded, and any prefix can be replayed.

A power cut keeps what was synced. Of the rest anything may be there: of each directory the first of
its changes since it was synced, however many; of each file the first of its bytes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from penstock.daemons.memory.disk import Disk

Operation = tuple[str, Path, object]


class RecordingDisk(Disk):
    """The real one, which also notes every call in order."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._paths: dict[int, Path] = {}

    def create(self, path: Path) -> BinaryIO:
        file = super().create(path)
        self._paths[id(file)] = path
        self.operations.append(("create", path, None))
        return file

    def write(self, file: BinaryIO, content: memoryview | bytes) -> None:
        super().write(file, content)
        self.operations.append(("write", self._paths[id(file)], bytes(content)))

    def sync(self, file: BinaryIO) -> None:
        super().sync(file)
        self.operations.append(("sync", self._paths[id(file)], None))

    def sync_names(self, directory: Path) -> None:
        super().sync_names(directory)
        self.operations.append(("sync_names", directory, None))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.operations.append(("rename", old, new))

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.operations.append(("remove", path, None))

    def make_directory(self, path: Path) -> None:
        if not path.exists():
            self.operations.append(("make_directory", path, None))
        super().make_directory(path)


@dataclass(slots=True)
class Node:
    """A file or directory. ``pending``: changes of names since they were synced: (name, node; None
    where it was taken away).
    """

    is_directory: bool
    content: bytes = b""
    synced: int = 0
    names: dict[str, Node] = field(default_factory=dict)
    kept: dict[str, Node] = field(default_factory=dict)
    pending: list[dict[str, Node | None]] = field(default_factory=list)

    def change(self, **names: Node | None) -> None:
        """One change of names, of all these at once."""
        self.pending.append(dict(names))
        _apply(self.names, names)

    def sync_names(self) -> None:
        self.kept, self.pending = dict(self.names), []


def _apply(names: dict[str, Node], change: dict[str, Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class PowerCut:
    """The disk at ``root`` as it was at first, and what operations make of it."""

    def __init__(self, root: Path) -> None:
        self._path = root
        self._root = _read(root)

    def perform(self, operation: Operation) -> None:
        """Carry out one operation in the model."""
        kind, path, more = operation
        node = None if kind in ("create", "make_directory") else self._find(path)
        if kind == "create":
            self._find(path.parent).change(**{path.name: Node(is_directory=False)})
        elif kind == "make_directory":
            self._find(path.parent).change(**{path.name: Node(is_directory=True)})
        elif kind == "rename":
            assert isinstance(more, Path)
            if more.parent == path.parent:
                self._find(path.parent).change(**{path.name: None, more.name: node})
            else:
                # A power cut may keep either change alone: the file may be lost, or have two names.
                self._find(path.parent).change(**{path.name: None})
                self._find(more.parent).change(**{more.name: node})
        elif kind == "remove":
            self._find(path.parent).change(**{path.name: None})
        elif node is not None and kind == "write":
            assert isinstance(more, bytes)
            node.content += more
        elif node is not None and kind == "sync":
            node.synced = len(node.content)
        elif node is not None and kind == "sync_names":
            node.sync_names()

    def leave(self, target: Path, fate: random.Random | None, *, lost: bool) -> None:
        """Write what a power cut leaves into ``target``. Of what was not synced that is nothing
        (``lost``), or all, or what ``fate`` draws.
        """

        def amount(most: int) -> int:
            if fate is not None:
                return fate.randint(0, most)
            return 0 if lost else most

        def write(node: Node, path: Path) -> None:
            if not node.is_directory:
                length = node.synced + amount(len(node.content) - node.synced)
                path.write_bytes(node.content[:length])
                return
            path.mkdir()
            names = dict(node.kept)
            for change in node.pending[: amount(len(node.pending))]:
                _apply(names, change)
            for name, child in names.items():
                write(child, path / name)

        write(self._root, target)

    def _find(self, path: Path) -> Node:
        node = self._root
        for part in path.relative_to(self._path).parts:
            node = node.names[part]
        return node


def _read(path: Path) -> Node:
    if path.is_dir():
        names = {child.name: _read(child) for child in path.iterdir()}
        return Node(is_directory=True, names=dict(names), kept=names)
    content = path.read_bytes()
    return Node(is_directory=False, content=content, synced=len(content))

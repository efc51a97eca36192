"""Reads folders of torch.distributed.checkpoint as FSDP2 and torchtitan save them.

:func:`torch.distributed.checkpoint.state_dict.get_state_dict` names the parameters, with nested or
flattened groups. Plain ``state_dict()`` of a model is read, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.host.files import is_file
from penstock.models.exchange.dcp.metadata import METADATA, ChunkedTensor, read_contents
from penstock.models.exchange.dcp.names import NamedContents, named
from penstock.models.exchange.dcp.titan import as_transformers, is_titan
from penstock.models.exchange.foreign import ForeignState, ForeignTensor

KIND = "dcp"
_SHOWN = 6


class DcpReader:
    """Reads a folder with ``.metadata``."""

    def recognises(self, path: Path) -> bool:
        """Returns whether a folder has ``.metadata``, or the files that it describes."""
        return is_file(path / METADATA) or any(path.glob("*.distcp"))

    def open(self, path: Path) -> ForeignState:
        """Lists the tensors.

        Raises:
            ConfigError: the checkpoint is of a form that is not read; names the remedy.
            StateError: a file is missing or damaged; names the file.
        """
        contents = named(read_contents(path))
        state = state_of(path, contents)
        return as_transformers(path, contents, state) if is_titan(contents) else state


def state_of(path: Path, contents: NamedContents, kind: str = KIND) -> ForeignState:
    """Returns the checkpoint of named contents."""
    return ForeignState(
        kind=kind,
        path=path,
        tensors=tuple(
            _tensor(path, name, role, tensor) for (name, role), tensor in contents.tensors.items()
        ),
        step=_step(contents),
        steps=contents.steps,
        groups=contents.groups,
        notes=_notes(contents.others),
    )


def _tensor(path: Path, name: str, role: str, tensor: ChunkedTensor) -> ForeignTensor:
    """Returns a tensor under a name and a role. Its files are relative to ``path``."""
    return ForeignTensor(
        name=name,
        role=role,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tensor.shape,
        num_elements=tensor.num_elements,
        num_bytes=tensor.num_bytes,
        file=tensor.files(path),
        load=tensor.load,
    )


def _step(contents: NamedContents) -> int | None:
    """Returns the optimizer's steps if all parameters have as many, else the trainer's counter."""
    counts = set(contents.steps.values()) or set(contents.counters.values())
    return counts.pop() if len(counts) == 1 else None


def _notes(others: Sequence[str]) -> tuple[str, ...]:
    if not others:
        return ()
    more = "" if len(others) <= _SHOWN else f" and {len(others) - _SHOWN} more"
    return (f"not used: {', '.join(others[:_SHOWN])}{more}",)

"""Records of Parquet and Arrow files, read by pyarrow in batches. No torch.

Row groups, batches and rows are counted from 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from penstock.host.errors import ConfigError, reason
from penstock.models.data.reading.opening import CountBytes, check_expansion, library
from penstock.models.data.reading.record import TEXT, Record, check_columns, not_text

_BATCH_ROWS = 32
"""Rows that are in memory at once, next to one page of Parquet; a text may be a whole book."""
_BUFFER_BYTES = 1 << 20
_VALUE_BYTES = 8
_FILE_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of an Arrow stream that its writer has closed. The library reads a stream that was cut
between two batches without an error.
"""


def parquet_rows(path: Path, encoding: str, read: CountBytes, only: str | None) -> Iterator[Record]:
    """Yields the records of a Parquet file.

    Raises:
        ConfigError: the file is damaged, or lacks the only column.
    """
    del encoding
    arrow, parquet = library(path, "pyarrow"), library(path, "pyarrow.parquet")
    with path.open("rb") as opened, _damage(path, "Parquet", arrow):
        # A buffer keeps the library from reading whole row groups.
        file = parquet.ParquetFile(opened, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        _check_schema(path, file.schema_arrow, arrow, only)
        size, rows = os.path.getsize(path), file.metadata.num_rows
        check_expansion(path, _VALUE_BYTES * rows)
        content = _Content(path)
        done = counted = 0
        for group in range(file.num_row_groups):
            batches = file.iter_batches(
                _BATCH_ROWS, row_groups=[group], columns=only and [only], use_threads=False
            )
            row = 0
            for batch in batches:
                part = f"row group {group + 1}"
                yield from content.counted(_records(path, part, row, batch, arrow))
                row += batch.num_rows
                done += batch.num_rows
                # Bytes of columns and pages are not known apart: rows share the file's bytes.
                read(size * done // rows - counted)
                counted = size * done // rows
        read(size - counted)


def arrow_rows(path: Path, encoding: str, read: CountBytes, only: str | None) -> Iterator[Record]:
    """Yields the records of an Arrow file or stream, such as those of ``save_to_disk``.

    Raises:
        ConfigError: the file is damaged, or lacks the only column.
    """
    del encoding
    arrow, ipc = library(path, "pyarrow"), library(path, "pyarrow.ipc")
    with path.open("rb") as opened, _damage(path, "Arrow", arrow):
        is_file = opened.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        schema = _reader(ipc, opened, is_file, None).schema
        _check_schema(path, schema, arrow, only)
        fields = None if only is None else [schema.get_field_index(only)]
        options = ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        batches = _batches(_reader(ipc, opened, is_file, options))
        place, content = 0, _Content(path)
        for number, batch in enumerate(batches, start=1):
            yield from content.counted(_records(path, f"batch {number}", 0, batch, arrow))
            read(max(0, opened.tell() - place))
            place = max(place, opened.tell())
        size = os.path.getsize(path)
        opened.seek(max(0, size - len(_STREAM_END)))
        if not is_file and opened.read() != _STREAM_END:
            raise ConfigError(
                f"{path}: is an Arrow stream without its end; it was cut short, or never closed"
            )
        read(size - place)


@dataclass(slots=True)
class _Content:
    """Bytes of a file's values. A value may be in the file once, and in any number of rows."""

    path: Path
    num_bytes: int = 0

    def counted(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yields records.

        Raises:
            ConfigError: the content is too long for the file.
        """
        for record in records:
            self.num_bytes += _weight(record.fields)
            check_expansion(self.path, self.num_bytes)
            yield record


def _weight(value: Any) -> int:
    """Returns the bytes of a value, each number as one word."""
    if isinstance(value, str | bytes):
        return _VALUE_BYTES + len(value)
    if isinstance(value, list | tuple):
        return _VALUE_BYTES + sum(map(_weight, value))
    if isinstance(value, Mapping):
        return _VALUE_BYTES + sum(map(_weight, value.values()))
    return _VALUE_BYTES


def _reader(ipc: Any, opened: BinaryIO, is_file: bool, options: Any) -> Any:
    """Returns the library's reader of a file of Arrow, or of a stream."""
    opened.seek(0)
    if is_file:
        return ipc.open_file(opened, options=options)
    return ipc.open_stream(opened, options=options)


def _batches(reader: Any) -> Iterator[Any]:
    """Yields the record batches of a file or of a stream of Arrow."""
    if hasattr(reader, "num_record_batches"):
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from reader


def _check_schema(path: Path, schema: Any, arrow: Any, only: str | None) -> None:
    """Refuses a table without exactly one column ``only`` of strings, or with two columns of one
    name.

    Raises:
        ConfigError: the column is missing, occurs twice or is of another type.
    """
    if only is None:
        if len(set(schema.names)) < len(schema.names):
            raise ConfigError(f"{path}: has two columns of the same name")
        return
    check_columns(str(path), schema.names)
    kind = schema.field(TEXT).type
    values = kind.value_type if arrow.types.is_dictionary(kind) else kind
    names = ("is_string", "is_large_string", "is_string_view")
    # An older pyarrow has no views.
    if not any(getattr(arrow.types, name, bool)(values) for name in names):
        raise not_text(str(path), f"values of type {kind}")


def _records(path: Path, part: str, before: int, batch: Any, arrow: Any) -> Iterator[Record]:
    """Yields the records of a batch, with ``before`` rows of its part before it.

    Raises:
        ConfigError: the batch is damaged, or a text in it is no UTF-8.
    """
    try:
        # The library ends the process when it reads strings at damaged offsets.
        batch.validate(full=True)
    except arrow.ArrowException as error:
        names = batch.schema.names
        which = f"the column {names[0]} is" if len(names) == 1 else "columns are"
        raise ConfigError(
            f"{path}, {part}, rows from {before + 1:,}: {which} damaged ({reason(error)})"
        ) from error
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}, {part}, rows from {before + 1:,}: a text is no UTF-8 ({reason(error)})"
        ) from error
    nested = [field.name for field in batch.schema if _has_structs(field.type, arrow)]
    for number, fields in enumerate(rows, start=before + 1):
        for name in nested:
            fields[name] = _without_nulls(fields[name])
        yield Record(path=path, where=f"{part}, row {number:,}", fields=fields)


def _has_structs(kind: Any, arrow: Any) -> bool:
    """Returns whether values of a type are objects, or lists with objects in them."""
    if arrow.types.is_struct(kind):
        return True
    if arrow.types.is_map(kind):
        return False  # a map has the keys of its own value alone
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return any(_has_structs(each, arrow) for each in inner)


def _without_nulls(value: Any) -> Any:
    """Returns a value without the keys of objects that are null.

    All objects of a column share their keys: an object has null for each key of the others.
    """
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if item is not None}
        return {key: _without_nulls(item) for key, item in kept.items()}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


@contextmanager
def _damage(path: Path, kind: str, arrow: Any) -> Iterator[None]:
    """Turns errors of the library into errors that name the file.

    Raises:
        ConfigError: the library refuses the content of the file.
        OSError: the file cannot be read.
    """
    try:
        yield
    except (OSError, UnicodeDecodeError, MemoryError, arrow.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        # A damaged length may announce any number of bytes.
        cause = "too little memory" if isinstance(error, MemoryError) else reason(error)
        raise ConfigError(
            f"{path}: cannot be read as {kind} ({cause}); the file is damaged, cut short or"
            " of another format"
        ) from error

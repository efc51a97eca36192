"""A cache of prepared tokens, addressed by the content that they were made from. No torch.

The key of an entry is a checksum of all inputs of the tokens. Inputs are the bytes of texts, the
way of reading them, the tokenizer's files, and the marks around documents. The code that makes
tokens and the versions of Python and the libraries count as well. A run gets a hard link to the
kept file, or a copy if the run directory is on another file system.

A kept file is read once and compared with its checksums before a run takes it; a damaged file is
removed and made again. Without a usable cache a run only takes the time to make its tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import penstock
from penstock.host import world
from penstock.host.errors import StateError
from penstock.host.files import DAMAGED, parse_json, sync_directory
from penstock.host.trust import UntrustedError, open_own
from penstock.models.data.chunks import Checksums, Progress
from penstock.models.data.reading.opening import COMPRESSED, CountBytes, ignore_bytes
from penstock.models.data.sources import Source, format_of
from penstock.protocol.run.token_cache import (
    ENTRY,
    SUMS,
    TOKENS,
    check_private,
    kept_tokens,
    token_cache_folder,
)

_FORMAT = 1
"""Version of entries: a change gives every text another key."""

_CODE = Path(__file__).parent
_LIBRARIES = ("tokenizers", "transformers", "jinja2", "pyarrow")

_READ_BYTES = 1 << 20
_MOST_ENTRY_BYTES = 1 << 16


def key_of(source: Source, parts: Sequence[Any], read: CountBytes = ignore_bytes) -> str:
    """Returns the key of the tokens of a text: reads all of its files. ``parts`` are other values
    that decide the tokens.

    Raises:
        OSError: a file cannot be read.
    """
    texts = []
    for path in source.files:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while content := file.read(_READ_BYTES):
                digest.update(content)
                read(len(content))
        compression = path.suffix if path.suffix in COMPRESSED else ""
        texts.append([format_of(path) + compression, digest.hexdigest()])
    everything = [_FORMAT, source.encoding, texts, made_by(), list(parts)]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


@cache
def made_by(folder: Path = _CODE) -> str:
    """Returns a digest of the makers of data: the Python files below a folder of Penstock, and the
    versions of Python and the libraries. A change of a maker may change its results.
    """
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(json.dumps([str(path.relative_to(folder)), content]).encode())
    versions = [penstock.__version__, platform.python_version()]
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    total.update(json.dumps(versions).encode())
    return total.hexdigest()


class TokenCache:
    """The cache of this user. ``limit``: bytes that all entries may take; 0 keeps nothing."""

    def __init__(self, limit: int, progress: Progress) -> None:
        self._limit, self._progress = limit, progress
        self._folder = token_cache_folder() if limit else None

    @property
    def is_used(self) -> bool:
        """True if tokens are kept."""
        return self._folder is not None

    def fetch(self, key: str, tokens: Path, sums: Path) -> dict[str, Any] | None:
        """Makes ``tokens`` and its checksums ``sums`` from the entry with this key. Returns the
        fields of ``entry.json``; None without an entry that is whole.
        """
        if self._folder is None:
            return None
        folder = self._folder / key
        try:
            check_private(self._folder)
            check_private(folder)
            fields = parse_json(_read_own(folder / ENTRY, _MOST_ENTRY_BYTES))
            size = int(fields["sums"]["file_bytes"])
            sums.write_bytes(_read_own(folder / SUMS, size + _MOST_ENTRY_BYTES))
            _link(folder / TOKENS, tokens)
            _check_owned(tokens)
            recorded = {**fields["sums"], "path": sums.name}
            Checksums.open(tokens, sums.parent, recorded).check(0, size)
            _ = int(fields["num_tokens"])
            with suppress(OSError):
                os.utime(folder / ENTRY)
            return {**fields, "sums": recorded}
        except FileNotFoundError:
            pass
        except UntrustedError as error:
            self._progress(f"the cache of tokens is not used: {error}")
        except (OSError, StateError, *DAMAGED) as error:
            self._progress(f"cached tokens are damaged and are made again ({folder}: {error})")
            shutil.rmtree(folder, ignore_errors=True)
        for path in (tokens, sums):
            path.unlink(missing_ok=True)
        return None

    def store(self, key: str, tokens: Path, sums: Path, fields: dict[str, Any]) -> None:
        """Keeps a token file and its checksums under a key. If all entries exceed the limit,
        removes those used longest ago.
        """
        if self._folder is None or tokens.stat().st_size > self._limit:
            return
        temporary = self._folder / f".{key}.{os.getpid()}.tmp"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(self._folder)
            temporary.mkdir(mode=0o700)
            _link(tokens, temporary / TOKENS)
            _write_own(temporary / SUMS, sums.read_bytes())
            _write_own(temporary / ENTRY, json.dumps({**fields, "format": _FORMAT}).encode())
            sync_directory(temporary)
            # An existing entry was unusable, or is the same and was just made.
            shutil.rmtree(self._folder / key, ignore_errors=True)
            temporary.rename(self._folder / key)
            self._prune()
        except (OSError, UntrustedError) as error:
            self._progress(f"the tokens are not cached for other runs: {error}")
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _prune(self) -> None:
        assert self._folder is not None
        entries = kept_tokens(self._folder)
        total = sum(entry.num_bytes for entry in entries)
        for entry in entries[:-1]:
            if total <= self._limit:
                return
            shutil.rmtree(entry.folder, ignore_errors=True)
            total -= entry.num_bytes


class NewFile:
    """A file that gets its name when it is complete. Without :meth:`keep` nothing is left of it.

    The file is written as ``temporary``, and its checksums as ``sums``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self.sums = path.with_suffix(".sums")

    def keep(self) -> None:
        """Gives the file its name."""
        self.temporary.rename(self._path)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.temporary.unlink(missing_ok=True)


Made = dict[Path, dict[str, Any]]
"""Files that are complete, and the fields that describe each."""


def cached(
    cache: TokenCache,
    keys: Callable[[], Mapping[Path, str]],
    stamps: Callable[[float], object],
    make: Callable[[], Made],
) -> tuple[Made, bool]:
    """Returns the files of ``keys``, and whether all are from the cache; otherwise ``make`` makes
    all. Made files are kept in the cache if ``stamps`` of their sources are the same afterwards.
    ``stamps`` takes the time of its first call (:func:`penstock.host.stamps.stamps_of`).
    """
    if not cache.is_used:
        return make(), False
    now_s = world.wall()
    before, key_of_path = stamps(now_s), keys()
    taken: Made = {}
    for path, key in key_of_path.items():
        with NewFile(path) as file:
            fields = cache.fetch(key, file.temporary, file.sums)
            if fields is None:
                break
            file.keep()
            taken[path] = fields
    else:
        return taken, True
    made = make()
    if stamps(now_s) == before:
        for path, key in key_of_path.items():
            cache.store(key, path, path.with_suffix(".sums"), made[path])
    return made, False


def _read_own(path: Path, most_bytes: int) -> bytes:
    """Returns the content of a private file of this user.

    Raises:
        UntrustedError: the name leads to something else.
        OSError: the file cannot be read, or is too long.
    """
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(f"{path} has more than {most_bytes} bytes")
    return content


def _write_own(path: Path, content: bytes) -> None:
    with open(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _link(old: Path, new: Path) -> None:
    """Gives a file a second name. Copies it if hard links do not exist, or the names are on two
    file systems.
    """
    new.unlink(missing_ok=True)
    try:
        os.link(old, new, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(old, new, follow_symlinks=False)
        with new.open("rb") as file:
            os.fsync(file.fileno())


def _check_owned(path: Path) -> None:
    """Refuses a path that is no file of this user.

    Raises:
        UntrustedError: it is a link, or belongs to another user.
    """
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise UntrustedError(f"{path} is no file of this user")

"""One repository of the Hub at one commit: its listing, and downloads that are compared with it.

huggingface_hub compares the size of a download alone. Here each file is compared with the hash of
the listing: SHA-256 of large files, git's SHA-1 of others. No message has a token, or an address
with one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_token, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.tqdm import tqdm

from penstock.config.hub_names import HubName
from penstock.host.errors import CapacityError, ConfigError
from penstock.models.hub.layouts import check_names

MODEL, DATASET = "model", "dataset"
_REQUEST_ERROR = cast("type[Exception]", HfHubHTTPError.__bases__[0])
"""The base of all errors of the library for requests, which differs between versions."""

_THREADS = 4
"""Downloads at the same time."""

SAY_EVERY_S = 2.0
"""Seconds between lines about progress."""

_PIECE = 8 << 20
_QUIET = 1 << 20
"""Bytes below which a download is not reported."""

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A file of the listing. ``sha256`` of a large file; ``blob``: git's SHA-1 of a small one."""

    num_bytes: int
    blob: str
    sha256: str | None


class Unreachable(ConfigError):
    """No answer of the Hub: no network, a wrong address, or a switch that forbids requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A repository at the commit ``commit``; ``files`` are by their names."""

    name: HubName
    kind: str
    commit: str
    files: Mapping[str, Listed]

    @classmethod
    def read(cls, name: HubName, kind: str, commit: str | None) -> Repository:
        """Returns the listing of a repository: at ``commit``, or at its revision of now.

        Raises:
            ConfigError: the repository or its revision does not exist, or is not open to the user;
                :class:`Unreachable` without an answer.
        """
        api = HfApi(endpoint=_endpoint())
        with explained(name, kind):
            if commit is None:
                info = api.repo_info(name.repository, repo_type=kind, revision=name.revision)
                commit = str(info.sha)
            if not _is_commit(commit):
                raise ConfigError(f"the Hub answers with {commit[:60]!r}, which is no commit")
            entries = api.list_repo_tree(
                name.repository, recursive=True, revision=commit, repo_type=kind
            )
            files = {each.path: _listed(each) for each in entries if isinstance(each, RepoFile)}
        check_names(files)
        return cls(name=name, kind=kind, commit=commit, files=files)

    @property
    def folder(self) -> Path:
        """The folder of the commit in huggingface_hub's cache."""
        repository = f"{self.kind}s--{self.name.repository.replace('/', '--')}"
        return Path(constants.HF_HUB_CACHE) / repository / "snapshots" / self.commit

    def fetch(self, names: Collection[str], say: Callable[[str], None]) -> None:
        """Downloads files that the cache lacks, and compares all of them with the listing.

        Raises:
            CapacityError: the disk is too small.
            ConfigError: a download fails, or a file differs from the listing.
        """
        lacking = [name for name in names if not self._is_cached(name)]
        self._check_room(lacking)
        total = sum(self.files[name].num_bytes for name in lacking)
        with explained(self.name, self.kind), _Meter(str(self.name), total, say) as meter:
            pool = ThreadPoolExecutor(_THREADS)
            try:
                for _ in pool.map(lambda name: self._download(name, meter), lacking):
                    continue
            finally:
                pool.shutdown(cancel_futures=True)
        for name in names:
            self._compare(name)

    def _is_cached(self, name: str) -> bool:
        path = try_to_load_from_cache(
            self.name.repository, name, revision=self.commit, repo_type=self.kind
        )
        return isinstance(path, str) and os.path.getsize(path) == self.files[name].num_bytes

    def _check_room(self, lacking: Collection[str]) -> None:
        needed = sum(self.files[name].num_bytes for name in lacking)
        place = Path(constants.HF_HUB_CACHE)
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if needed > free:
            raise CapacityError(
                f"{self.name}: {size(needed)} are to be fetched, and {constants.HF_HUB_CACHE} has"
                f" {size(free)} free; free disk space, or set HF_HOME to a folder on a larger disk"
            )

    def _download(self, name: str, meter: _Meter) -> None:
        hf_hub_download(
            self.name.repository,
            name,
            repo_type=self.kind,
            revision=self.commit,
            endpoint=_endpoint(),
            tqdm_class=meter.bar,
        )

    def _compare(self, name: str) -> None:
        """Compares a file with the listing; removes one that differs.

        Raises:
            ConfigError: the file differs.
        """
        path, listed = self.folder / name, self.files[name]
        digest = hashlib.sha256() if listed.sha256 is not None else hashlib.sha1()
        if listed.sha256 is None:
            digest.update(b"blob %d\0" % path.stat().st_size)
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
        if digest.hexdigest() != (listed.sha256 or listed.blob):
            Path(os.path.realpath(path)).unlink()
            path.unlink(missing_ok=True)
            raise ConfigError(
                f"{self.name}: {name} differs from the checksum that the Hub lists at"
                f" {self.commit[:12]}; the file is removed, repeat the command to fetch it again"
            )


def size(num_bytes: int) -> str:
    """Returns a number of bytes in words."""
    for unit, factor in _UNITS:
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"


def _is_commit(text: str) -> bool:
    return len(text) == 40 and set(text) <= set("0123456789abcdef")


def _listed(entry: RepoFile) -> Listed:
    large: Any = entry.lfs
    if large is None:
        return Listed(num_bytes=entry.size, blob=entry.blob_id, sha256=None)
    return Listed(num_bytes=large.size, blob=entry.blob_id, sha256=large.sha256)


def _endpoint() -> str:
    return constants.ENDPOINT


def host_of_hub() -> str:
    """Returns the host and the port of the Hub; names and passwords of an address are left out."""
    parts = urlsplit(_endpoint())
    return (parts.hostname or "the Hub") + ("" if parts.port is None else f":{parts.port}")


@contextmanager
def explained(name: HubName, kind: str) -> Iterator[None]:
    """Turns errors of huggingface_hub into sentences without tokens and signed addresses.

    Raises:
        ConfigError: says what failed and the remedy.
    """
    noun = "data set" if kind == DATASET else "model"
    page = f"https://{host_of_hub()}/{'datasets/' * (kind == DATASET)}{name.repository}"
    login = "log in (hf auth login), or set HF_TOKEN"
    try:
        yield
    except GatedRepoError:
        raise ConfigError(
            f"{name.repository} is gated: accept its conditions at {page}, and {login}"
        ) from None
    except RevisionNotFoundError:
        raise ConfigError(
            f"the {noun} {name.repository} has no revision {name.revision!r}; see {page}/tree/main"
        ) from None
    except RepositoryNotFoundError:
        access = "is not open to your token" if get_token() else f"is private: {login}"
        raise ConfigError(
            f"{host_of_hub()} has no {noun} {name.repository}, or it {access}"
        ) from None
    except (_REQUEST_ERROR, OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        raise _unreached(error) from None


def _unreached(error: Exception) -> ConfigError:
    response = getattr(error, "response", None)
    code = getattr(response, "status_code", None)
    if code in (401, 403):
        return ConfigError(
            f"{host_of_hub()} refuses the request (HTTP {code}): check the token (hf auth whoami)"
        )
    if isinstance(error, OfflineModeIsEnabled):
        return Unreachable("HF_HUB_OFFLINE forbids requests")
    cause = f"HTTP {code}" if code is not None else type(error.__cause__ or error).__name__
    return Unreachable(f"{host_of_hub()} has not answered as the Hub does ({cause})")


class _Meter:
    """Counts bytes of all downloads, and says them from time to time."""

    def __init__(self, name: str, total: int, say: Callable[[str], None]) -> None:
        """Starts at 0 of ``total`` bytes."""
        self._name, self._total, self._say = name, total, say
        self._done, self._lock = 0, threading.Lock()
        self._next_s = time.monotonic()
        meter = self

        class Bar(tqdm):
            """A bar of huggingface_hub that shows nothing, and counts for the meter."""

            monitor_interval = 0  # no thread that redraws bars

            def __init__(self, *arguments: Any, **options: Any) -> None:
                """Counts the bytes that an interrupted download has left."""
                options["disable"] = True
                super().__init__(*arguments, **options)  # type: ignore[no-untyped-call]
                meter.add(int(options.get("initial") or 0))

            def update(self, n: float | None = 1) -> bool | None:
                """Counts bytes."""
                meter.add(int(n or 0))
                return None

        self.bar = Bar

    def __enter__(self) -> _Meter:
        if self._total >= _QUIET:
            self._say(f"fetching {self._name}: {size(self._total)}")
            self._next_s = time.monotonic() + SAY_EVERY_S
        return self

    def __exit__(self, *error: object) -> None:
        if self._total >= _QUIET and error[0] is None:
            self._say(f"fetched {self._name}: {size(self._total)}")

    def add(self, num_bytes: int) -> None:
        """Counts bytes, and says the sum at most every :data:`SAY_EVERY_S` seconds."""
        with self._lock:
            self._done += num_bytes
            if self._total < _QUIET or time.monotonic() < self._next_s:
                return
            self._next_s = time.monotonic() + SAY_EVERY_S
            done = min(self._done, self._total)
            self._say(f"fetching {self._name}: {size(done)} of {size(self._total)}")

"""The folder in which prepared tokens are kept by their content: where it is, and what is in it.

``$XDG_CACHE_HOME/penstock`` (``~/.cache/penstock`` by default) belongs to one user, and no other
user may open it. Each entry is a folder: ``tokens.bin``, its checksums ``tokens.sums``, and
``entry.json``. :mod:`penstock.models.data.cache` makes and reads entries.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.host.trust import FOR_OTHERS, UntrustedError, kind_of, printable, user_text

TOKENS, SUMS, ENTRY = "tokens.bin", "tokens.sums", "entry.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """An entry: its folder, the bytes of its files, and when it was last used (seconds since
    1970).
    """

    folder: Path
    num_bytes: int
    used_s: float


def token_cache_folder(environment: Mapping[str, str] | None = None) -> Path | None:
    """Returns the folder of kept tokens, which need not be there; None for a user without a
    home.
    """
    environment = os.environ if environment is None else environment
    base = Path(environment.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # as the XDG specification has it
        home = Path(environment.get("HOME", ""))
        if not home.is_absolute():
            return None
        base = home / ".cache"
    return base / "penstock"


def check_private(folder: Path) -> None:
    """Refuses a folder that other users may change or read.

    Raises:
        OSError: the folder cannot be read.
    """
    status = os.lstat(folder)
    name, mode = printable(folder), stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        raise UntrustedError(f"{name} is a {kind_of(status)} of {user_text(status.st_uid)}")
    if status.st_uid != os.geteuid():
        raise UntrustedError(f"{name} belongs to {user_text(status.st_uid)}")
    if mode & FOR_OTHERS:
        raise UntrustedError(f"{name} has mode {mode:04o}, so that other users may open it")


def kept_tokens(folder: Path) -> list[KeptTokens]:
    """Returns the entries of a cache, those that were used last at the end; none without a private
    folder.
    """
    try:
        check_private(folder)
        children = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except (OSError, UntrustedError):
        return []
    entries = []
    for child in children:
        try:
            sizes = [(child / name).lstat().st_size for name in (TOKENS, SUMS, ENTRY)]
            used_s = (child / ENTRY).lstat().st_mtime
        except OSError:
            continue  # no entry, or one that another process has just removed
        entries.append(KeptTokens(folder=child, num_bytes=sum(sizes), used_s=used_s))
    return sorted(entries, key=lambda entry: (entry.used_s, entry.folder.name))

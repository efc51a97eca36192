"""A check that shared memory outlives the logout of its user.

systemd's logind removes the files of an ordinary user in /dev/shm when the user's last session
ends. ``RemoveIPC=`` (logind.conf(5)) controls this, and is on by default. A run in the background
then loses its state: daemons keep what they have mapped, but no process can map it again. System
users are spared, and users with lingering (loginctl(1)).
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSTEM_UID_MAX = 999
"""Unless login.defs(5) says otherwise."""
_ROOTS = ("etc", "run", "usr/local/lib", "usr/lib")
"""Folders in which systemd reads configuration; the first wins among files of one name."""
_WORDS = {
    **dict.fromkeys(("1", "yes", "y", "true", "t", "on"), True),
    **dict.fromkeys(("0", "no", "n", "false", "f", "off"), False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogoutRisk:
    """The logout of ``user`` removes the user's memory, because of ``setting`` (in words)."""

    user: str
    setting: str

    def __str__(self) -> str:
        return (
            f"logind removes the shared memory of user {self.user} at logout ({self.setting}), and"
            " with it the state of a run that goes on: loginctl enable-linger"
            f" {self.user}; or RemoveIPC=no in /etc/systemd/logind.conf.d/penstock.conf and"
            " systemctl restart systemd-logind; or train as a system user, as penstock deploy"
            " systemd does"
        )


def logout_risk(uid: int | None = None, root: Path = Path("/")) -> LogoutRisk | None:
    """Returns the risk for the memory of a user, by default the user of this process; None without
    a risk. ``root`` is the system's root directory.
    """
    uid = os.getuid() if uid is None else uid
    run = root / "run/systemd"
    if not (run / "system").is_dir() or not (run / "users").is_dir():
        return None  # systemd does not run this machine, or without logind
    if uid <= _system_uid_max(root):
        return None
    user = _name_of(uid)
    if (root / "var/lib/systemd/linger" / user).exists():
        return None
    removes, setting = _removes_ipc(root)
    return LogoutRisk(user=user, setting=setting) if removes else None


def _removes_ipc(root: Path) -> tuple[bool, str]:
    """Returns whether ``RemoveIPC=`` is on, and the setting in words."""
    removes, setting = True, "RemoveIPC= is yes by default"
    for path in _configuration(root):
        for value in _values(path):
            word = _WORDS.get(value.lower())
            if word is not None:  # logind ignores other words, too
                removes, setting = word, f"RemoveIPC={value} in {path}"
    return removes, setting


def _configuration(root: Path) -> Iterator[Path]:
    """Yields the configuration files; later ones override earlier ones."""
    folders = [root / place / "systemd" for place in _ROOTS]
    main = [folder / "logind.conf" for folder in folders if (folder / "logind.conf").exists()]
    yield from main[:1]
    named: dict[str, Path] = {}
    for folder in folders:
        for path in (folder / "logind.conf.d").glob("*.conf"):
            named.setdefault(path.name, path)
    yield from (named[name] for name in sorted(named))


def _values(path: Path) -> Iterator[str]:
    """Yields the values of ``RemoveIPC=`` in a file; nothing for a masked or unreadable file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    section = ""
    for line in map(str.strip, lines):
        if line.startswith("["):
            section = line
        key, equals, value = line.partition("=")
        if section == "[Login]" and equals and key.strip() == "RemoveIPC":
            yield value.strip()


def _system_uid_max(root: Path) -> int:
    try:
        lines = (root / "etc/login.defs").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return SYSTEM_UID_MAX
    for words in map(str.split, lines):
        if len(words) == 2 and words[0] == "SYS_UID_MAX" and words[1].isdecimal():
            return int(words[1])
    return SYSTEM_UID_MAX


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)

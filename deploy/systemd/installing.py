"""Installs the units of a node into a system, or removes them.

Both can be repeated: existing files are replaced, and missing files are no error. A ``root`` other
than ``/`` is an image or a mounted system. Files are then written below ``root``, and the running
system does not change.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from penstock.deploy.systemd.units import OWN_USER, NodeUnit
from penstock.host.errors import CapacityError, ConfigError, PenstockError, reason
from penstock.host.logind_check import logout_risk

SYSTEM = Path("/")
_RUNS_SYSTEMD = Path("/run/systemd/system")
_COMMAND_TIMEOUT_S = 60.0


def install(unit: NodeUnit, root: Path) -> list[str]:
    """Writes the units. In the running system, also makes the user and the run directory, and
    reloads systemd. Returns a line for each action.

    Raises:
        ConfigError: not root, no systemd, no such user, or the user has no access to a path.
        PenstockError: a file cannot be written, or a command of systemd fails.
    """
    if root == SYSTEM:
        _check_system()
    done = [_write(root / path, text) for path, text in unit.files().items()]
    done += [_link(root / path, target) for path, target in unit.links().items()]
    if root != SYSTEM:
        return done
    if unit.user == OWN_USER:
        _systemd("systemd-sysusers", "/etc/sysusers.d/penstock.conf")
    done += _make_run_directory(unit)
    check_access(unit)
    _systemd("systemctl", "daemon-reload")
    return [*done, "systemd has read the units"]


def remove(unit: NodeUnit, root: Path) -> list[str]:
    """Removes the node's files; in the running system, stops the node first. Templates and user
    stay for other nodes. Returns a line for each action.

    Raises:
        ConfigError: not root, or no systemd.
        PenstockError: a file cannot be removed, or a command of systemd fails.
    """
    done: list[str] = []
    if root == SYSTEM:
        _check_system()
        if (root / unit.own_paths()[-1]).exists():
            _systemd("systemctl", "stop", unit.service, timeout_s=None)
    for path in unit.own_paths():
        if not os.path.lexists(root / path):
            continue
        try:
            (root / path).unlink()
            if not any((root / path).parent.iterdir()):
                (root / path).parent.rmdir()
        except OSError as error:
            raise ConfigError(f"{root / path}: cannot be removed: {reason(error)}") from error
        done.append(f"removed {root / path}")
    if root == SYSTEM and done:
        if not (root / unit.own_paths()[0]).parent.exists():  # no other node of the run
            _systemd("systemctl", "disable", unit.target)
        _systemd("systemctl", "daemon-reload")
    return done or [f"{unit.service} is not installed below {root}"]


def next_commands(unit: NodeUnit, root: Path) -> str:
    """Returns the commands to type after :func:`install`."""
    if root != SYSTEM:
        return (
            f"In the system below {root}, as root: systemd-sysusers; install -d -o {unit.user}"
            f" {unit.run_dir}; systemctl enable {unit.target}"
        )
    return (
        f"Start now and at every boot:  systemctl enable --now {unit.target}\n"
        f"Show the state:               systemctl status {unit.service}\n"
        f"Show the log:                 journalctl -u {unit.service}\n"
        f"Save and stop the run:        systemctl stop {unit.target}"
    )


def check_access(unit: NodeUnit) -> None:
    """Checks that the unit's user has access to all paths, and keeps shared memory at logout.

    Raises:
        ConfigError: the service would fail at its start, or lose the state at a logout.
    """
    try:
        account = pwd.getpwnam(unit.user)
    except KeyError as error:
        raise ConfigError(
            f"--user {unit.user}: no such user; make the user (useradd --system {unit.user}), or"
            f" leave out --user for {OWN_USER}, which this command makes"
        ) from error
    if (risk := logout_risk(account.pw_uid)) is not None:
        raise ConfigError(f"--user {unit.user}: {risk}")
    needed = [("-x", unit.python), ("-r", unit.config), ("-w", unit.run_dir)]
    if unit.keys is not None:
        needed.append(("-x", unit.keys))  # a folder: a start checks the files in it
    for flag, path in needed:
        result = subprocess.run(
            ("test", flag, str(path)),
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=os.getgrouplist(unit.user, account.pw_gid),
            timeout=_COMMAND_TIMEOUT_S,
        )
        if result.returncode:
            verb = {"-x": "use", "-r": "read", "-w": "write to"}[flag]
            raise ConfigError(
                f"{path}: user {unit.user} cannot {verb} it; move it to a folder that the user can"
                " open (not below /root, not with mode 0700), or name another user with --user"
            )


def _check_system() -> None:
    if os.geteuid() != 0:
        raise ConfigError("penstock deploy systemd: needs root; run it as root, or give --root DIR")
    if not _RUNS_SYSTEMD.is_dir():
        raise ConfigError(
            f"{_RUNS_SYSTEMD}: does not exist, so systemd does not run this machine; --root DIR"
            " writes the units for another machine"
        )


def _write(path: Path, text: str) -> str:
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return f"{path} is up to date"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o644)  # despite the umask: systemd and other users read units
    except OSError as error:
        raise CapacityError(f"{path}: cannot be written: {reason(error)}") from error
    return f"wrote {path}"


def _link(path: Path, target: str) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be linked: {reason(error)}") from error
    return f"linked {path}"


def _make_run_directory(unit: NodeUnit) -> Iterator[str]:
    """Makes the run directory unless it exists; other nodes may use an existing one already."""
    if unit.run_dir.exists():
        return
    try:
        unit.run_dir.mkdir(parents=True)
        shutil.chown(unit.run_dir, unit.user)
    except (OSError, LookupError) as error:
        raise ConfigError(
            f"run.dir = {unit.run_dir}: cannot be made for user {unit.user}: {reason(error)}"
        ) from error
    yield f"made {unit.run_dir} for {unit.user}"


def _systemd(*command: str, timeout_s: float | None = _COMMAND_TIMEOUT_S) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PenstockError(f"{' '.join(command)}: {reason(error)}") from error
    if result.returncode:
        cause = result.stderr.strip() or f"exit code {result.returncode}"
        raise PenstockError(f"{' '.join(command)}: {cause}")

"""The kind of a journal's file system, and the reliability of its locks.

Names are those of ``/proc/self/mountinfo``, see proc_pid_mountinfo(5).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from penstock.host.errors import ConfigError
from penstock.host.limits.cgroup import Mount, parse_mounts

MOUNTS = Path("/proc/self/mountinfo")

_SERVED = frozenset(
    "9p afs beegfs ceph cifs fuse.ceph fuse.glusterfs fuse.juicefs fuse.weka gfs2 glusterfs gpfs"
    " lustre ncpfs nfs nfs4 ocfs2 orangefs panfs smb3 smbfs virtiofs wekafs".split()
)
"""File systems with locks of a server, or agreed among machines."""

_WITHOUT_LOCKS = frozenset(
    "fuse.blobfuse fuse.blobfuse2 fuse.curlftpfs fuse.gcsfuse fuse.goofys fuse.mountpoint-s3"
    " fuse.rclone fuse.s3fs fuse.sshfs".split()
)
"""File systems without usable locks. Each machine sees its own locks only, or files are written
when they are closed, or writes have no promised order or durability.
"""

_LOCAL_ONLY = frozenset(("nolock", "local_lock=all", "local_lock=posix"))
"""Mount options of NFS that restrict locks to this machine."""

_log = logging.getLogger(__name__)


class Locks(Enum):
    """Keeper of the locks of a file system."""

    OF_THE_KERNEL = "this machine's kernel"
    OF_A_SERVER = "a server, or several machines together"


def mount_of(path: Path, mounts: Iterable[Mount]) -> Mount | None:
    """Returns the mount of ``path``, an absolute path without links: the deepest mount above it. Of
    several mounts at one point, the last covers all others.
    """
    deepest: Mount | None = None
    for mount in mounts:
        if path.is_relative_to(mount.point) and (
            deepest is None or len(mount.point) >= len(deepest.point)
        ):
            deepest = mount
    return deepest


def check_locks(path: Path, mounts: Path = MOUNTS) -> Locks:
    """Returns the keeper of locks for the file ``path``, which need not exist.

    Raises:
        ConfigError: the file system has no locks.
    """
    try:
        text = mounts.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # no /proc: nothing is known
        return Locks.OF_THE_KERNEL
    mount = mount_of(Path(os.path.realpath(path)), parse_mounts(text.splitlines()))
    if mount is None:
        return Locks.OF_THE_KERNEL
    if mount.kind in _WITHOUT_LOCKS:
        raise ConfigError(
            f"run.dir: {path} is on {mount.point}, a file system of type {mount.kind}: it keeps no"
            " locks between machines, or no order of writes, so that two schedulers could write one"
            " journal, and a commit could be lost; choose a run.dir on a local disk, or on NFS,"
            " Lustre, GPFS, BeeGFS or CephFS (saved states can be copied to object storage)"
        )
    local_only = _LOCAL_ONLY.intersection(mount.options)
    if local_only:
        _log.warning(
            "%s is on %s, mounted with %s: a scheduler of the same run on another machine would not"
            " be noticed; mount it with locks",
            path,
            mount.point,
            ", ".join(sorted(local_only)),
        )
    return Locks.OF_A_SERVER if mount.kind in _SERVED else Locks.OF_THE_KERNEL

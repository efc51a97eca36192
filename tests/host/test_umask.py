"""Permissions of files that commands give to a user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.host.files import follow_umask


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_get_the_mode_of_new_files(tmp_path: Path, umask: int, mode: int) -> None:
    folder = tmp_path / "made"
    (folder / "inner").mkdir(parents=True)
    private = [folder / "a", folder / "inner" / "b"]
    for path in private:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    outside = tmp_path / "outside"
    outside.touch(mode=0o600)
    (folder / "link").symlink_to(outside)
    before = os.umask(umask)
    try:
        follow_umask(folder)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in private] == [mode, mode]
    assert outside.stat().st_mode & 0o777 == 0o600

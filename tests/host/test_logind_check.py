"""When logind takes a user's shared memory away, read from files as systemd reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.host.logind_check import logout_risk

ORDINARY = 4_000_000
"""No user of this machine has that id, so the id is the name."""


def machine(root: Path, files: dict[str, str]) -> Path:
    for folder in ("run/systemd/system", "run/systemd/users"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "setting"),
    [
        ({}, "RemoveIPC= is yes by default"),
        ({"etc/systemd/logind.conf": "[Login]\n#RemoveIPC=no\n"}, "by default"),
        ({"etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n"}, None),
        ({"etc/systemd/logind.conf": "[Other]\nRemoveIPC=no\n"}, "by default"),
        ({"etc/systemd/logind.conf": "[Login]\nRemoveIPC=perhaps\n"}, "by default"),
        ({"usr/lib/systemd/logind.conf": "[Login]\n RemoveIPC = OFF \n"}, None),
        (
            {
                "etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n",
                "usr/lib/systemd/logind.conf.d/10-x.conf": "[Login]\nRemoveIPC=true\n",
            },
            "usr/lib/systemd/logind.conf.d/10-x.conf",
        ),
        (
            {
                "usr/lib/systemd/logind.conf.d/10-x.conf": "[Login]\nRemoveIPC=yes\n",
                "etc/systemd/logind.conf.d/10-x.conf": "",
                "run/systemd/logind.conf.d/09.conf": "[Login]\nRemoveIPC=no\n",
            },
            None,
        ),
    ],
)
def test_files_count_as_systemd_has_them(
    tmp_path: Path, files: dict[str, str], setting: str | None
) -> None:
    risk = logout_risk(ORDINARY, machine(tmp_path, files))
    assert (risk is None) == (setting is None)
    if risk is not None and setting is not None:
        assert setting in risk.setting
        assert f"loginctl enable-linger {ORDINARY}; or RemoveIPC=no in" in str(risk)


def test_who_is_spared(tmp_path: Path) -> None:
    assert logout_risk(ORDINARY, tmp_path) is None, "systemd does not run this machine"
    root = machine(tmp_path, {})
    assert logout_risk(999, root) is None and logout_risk(1000, root) is not None
    machine(root, {"etc/login.defs": "# SYS_UID_MAX 1\nSYS_UID_MAX  5000\n"})
    assert logout_risk(1000, root) is None
    assert logout_risk(ORDINARY, root) is not None
    machine(root, {f"var/lib/systemd/linger/{ORDINARY}": ""})
    assert logout_risk(ORDINARY, root) is None

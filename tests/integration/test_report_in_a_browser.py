"""The report of a run in a real browser: it draws, says nothing on the console, loads nothing."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from penstock.client.views.report.command import write_report
from tests.system.conftest import metrics

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium"),
]

WIDTHS = {"desktop": 1100, "phone": 500}
"""Chromium's windows are at least 500 pixels wide."""


def browse(page: Path, *options: str, profile: Path) -> subprocess.CompletedProcess[str]:
    """Opens a page without a window; a name that it asks for resolves to nothing."""
    return subprocess.run(
        [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--log-level=0"),
            *("--disable-background-networking", "--disable-component-update", "--no-first-run"),
            f"--user-data-dir={profile}",
            *options,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )


def requests_of(log: Path) -> set[str]:
    """The addresses that the browser began to load, from its own log of the network."""
    return set(re.findall(r'"url":"([^"]+)"', log.read_text(encoding="utf-8", errors="replace")))


@pytest.fixture
def page(plain_run: Path, tmp_path: Path) -> Path:
    return write_report(plain_run, tmp_path / "report.html", None, show=False)


def test_a_browser_shows_it_and_loads_nothing(page: Path, plain_run: Path, tmp_path: Path) -> None:
    log = tmp_path / "net.json"
    done = browse(page, "--dump-dom", f"--log-net-log={log}", profile=tmp_path / "profile")
    assert f">{metrics(plain_run)[-1]['loss']:.4f}<" in done.stdout
    assert done.stdout.count("<section") == 9 and done.stdout.count("<polyline") >= 4
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
    assert json.loads(log.read_text())["constants"]
    outside = {url for url in requests_of(log) if url.startswith(("http", "ws"))}
    own = ("google", "gstatic", "gvt1", "chromium")  # what the browser asks for itself
    assert {url for url in outside if not any(name in url for name in own)} == set()


@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_the_window(page: Path, tmp_path: Path, width: str) -> None:
    """Nothing is wider than the window: what is, scrolls in a box of its own."""
    pixels = WIDTHS[width]
    probe = tmp_path / "probe.html"
    found = "<title>' + [document.documentElement.scrollWidth, innerWidth].join() + '</title>"
    script = f"<script>addEventListener('load', () => document.write('{found}'))</script>"
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text(encoding="utf-8"))
    probe.write_text(text.replace("</body>", f"{script}</body>"), encoding="utf-8")
    profile = tmp_path / "profile"
    done = browse(probe, "--dump-dom", f"--window-size={pixels},900", profile=profile)
    match = re.search(r"<title>(\d+),(\d+)</title>", done.stdout)
    assert match is not None and int(match[1]) <= int(match[2]), done.stdout[:300]
    picture = tmp_path / "picture.png"
    browse(page, f"--window-size={pixels},900", f"--screenshot={picture}", profile=profile)
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (pixels, 900)
    assert picture.stat().st_size > 20_000  # and not an empty page


def test_a_page_that_loads_or_complains_would_be_seen(tmp_path: Path) -> None:
    probe, log = tmp_path / "probe.html", tmp_path / "net.json"
    probe.write_text('<img src="http://example.invalid/x.png"><script>console.log("!")</script>')
    done = browse(probe, "--dump-dom", f"--log-net-log={log}", profile=tmp_path / "profile")
    assert "http://example.invalid/x.png" in requests_of(log) and "CONSOLE" in done.stderr

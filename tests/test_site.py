"""The documentation site builds without a warning: links, anchors and the list of pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install 'penstock[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ARCHITECTURE" / "index.html").exists()


def test_tables_and_pictures_name_their_letters() -> None:
    hooks = pytest.importorskip("bench.site.hooks", reason="pip install 'penstock[docs]'")
    cells = "<tr><td>a <code>optimizer.master</code></td><td>mini-batches &amp; rows</td></tr>"
    table = f"<table>\n<thead><tr><th>key</th><th>x</th></tr></thead>{cells}</table>"
    picture = (
        '<div class="language-text highlight"><pre><code>a<b>bc</b>\n&lt;-&gt;</code></pre></div>'
    )
    html = hooks.on_page_content(table + picture, None, None, None)
    # "optimizer.", "batches", and 2 of space in each column
    wide = table.replace("<table>", '<table style="--letters: 21">')
    assert html == (
        wide.replace("optimizer.", "optimizer.<wbr>")
        + picture.replace("<div ", '<div style="--letters: 3" ')
    )

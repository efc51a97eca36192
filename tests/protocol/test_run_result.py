"""The note about a run's end: what is read, and what a node takes for news."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.host.errors import ExitCode
from penstock.protocol.run.run_result import EndWatch, RunEnd, end_path

END = RunEnd(
    reason="stopped", code=ExitCode.STOPPED, keep_memory=False, failed=False, written_s=1.0
)


def test_a_note_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert RunEnd.read(tmp_path) is None
    END.write(tmp_path)
    assert RunEnd.read(tmp_path) == END


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"reason": 1', '{"code": "x"}'])
def test_a_note_that_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    end_path(tmp_path).write_text(text)
    assert RunEnd.read(tmp_path) is None


def test_a_note_of_an_earlier_start_is_no_news(tmp_path: Path) -> None:
    END.write(tmp_path)
    watch = EndWatch(tmp_path, old=RunEnd.read(tmp_path))
    assert watch.look() is None
    end_path(tmp_path).unlink()
    assert watch.look() is None, "the run was started again"
    again = replace(END, written_s=2.0)
    again.write(tmp_path)
    assert watch.look() == again

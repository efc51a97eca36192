"""The line about the training data at the start of a run."""

from __future__ import annotations

from penstock.protocol.run.data_size import RowCounts, TrainingData


def test_the_line_of_rows_has_sizes_cuts_and_skips() -> None:
    rows = {"samples": 1200, "rows": 100, "length": 64, "tokens": 6336, "counted": 1584, "pad": 0}
    tally = {"records": 1250, "truncated": 3, "split": 0, "dropped": 0, "skipped": 2, "empty": 0}
    counts = RowCounts.of({"rows": rows, "tally": tally})
    assert counts is not None
    data = TrainingData(tokens=6336, samples=100, counts=counts)
    assert data.in_steps(50, 4) == (
        "data: 1,250 records, 1,200 samples in 100 rows of 64 tokens, 1.0% padding; 6,336 tokens,"
        " 25.0% count; samples truncated: 3, records skipped: 2; 50 steps of 4 sequences are"
        " 2.00 epochs"
    )


def test_the_line_of_a_text_has_its_tokens() -> None:
    data = TrainingData(tokens=641, samples=10)
    assert data.in_steps(5, 4) == "data: 641 tokens; 5 steps of 4 sequences are 2.00 epochs"

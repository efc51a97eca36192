"""Rollback in real runs: how long an attempt takes that does not count, or counts clipped.

    python -m bench.papers.rollback [--micro-batches 2 8] [--steps 16]

SPipe (sections 3.3, 5.7) steps in place behind the gradients and inverts the step when a check
fails: ``optimizer.rollback: arithmetic``. Ours writes nothing that would have to be undone:
``exact``. Both train the same small model on the same data through the real daemons. Its embedding
has one row of infinite numbers: gradients are undefined when its byte is in a batch, and those
attempts are skipped. Gradients are clipped at the median norm of a run before, so that about half
of the others are amended; ``speculate: always``.

*Overhead* is, as in the paper, the rollback and the optimizer's step that does not overlap: the
time from the last gradient to the beginning of the next attempt, less what a committed attempt
needs between decision and beginning. For an amended attempt it is what it takes longer than a
committed one. Shares are of the median time between committed attempts. Writes
``bench/papers/data/rollback.json``, which the page reads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.emulated import trained
from bench.papers.page import PaperTable

RECORD = Path(__file__).parent / "data" / "rollback.json"
WAYS = {"exact": "ours", "arithmetic": "SPipe's"}
HIDDEN, LAYERS, SEQUENCE, WARM_UP = 512, 4, 32, 2
SPOILT_BYTE = ord("~")
SKIPPED = 0.25
"""Share of attempts that has the byte in its batch."""
SCALE = 2.0**32
"""SPipe's initial loss scale, and how many attempts of a fp16 run are looked at."""
FP16_STEPS = 20

Row = dict[str, Any]


def write_model(folder: Path) -> Path:
    """Writes a model whose embedding of one byte is infinite."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=260,
            hidden_size=HIDDEN,
            intermediate_size=HIDDEN * 27 // 10,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            max_position_embeddings=64,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[SPOILT_BYTE] = torch.inf
    model.save_pretrained(folder / "model")
    return folder / "model"


def write_text(folder: Path, batch: int) -> Path:
    """Writes text with the byte in about :data:`SKIPPED` of all batches of ``batch`` sequences."""
    words = Path(json.__file__).read_bytes().replace(b"~", b"-")
    every = round(batch * SEQUENCE / SKIPPED)
    text = bytearray(words * (1 + 64 * every // len(words)))
    for place in range(every // 2, len(text), every):
        text[place] = SPOILT_BYTE
    path = folder / f"text-{batch}.txt"
    path.write_bytes(bytes(text))
    return path


def configuration(text: Path, batch: int, steps: int, optimizer: Mapping[str, Any]) -> Row:
    """Returns the configuration of two CPU workers with ``batch`` micro-batches of one sequence."""
    return {
        "data": {"path": str(text), "tokenizer": "byte", "sequence_length": SEQUENCE},
        "train": {"steps": steps, "global_batch": batch, "micro_batch": 1, "clip_grad_norm": None},
        "optimizer": {"lr": 1e-6, "speculate": "always", **optimizer},
        "schedule": {"scheme": "spipe"},
        "cluster": {"workers": 2, "device": "cpu", "threads_per_worker": 1},
    }


def lines_of(config: Row) -> list[Row]:
    """Trains; returns the lines of all attempts."""
    with tempfile.TemporaryDirectory() as folder:
        path = trained(config, Path(folder), None) / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


def attempts_of(lines: Sequence[Row]) -> list[Row]:
    """Returns attempts with the time until the next one began, and between decisions."""
    found = []
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        found.append(
            {
                "decision": line["decision"],
                "tail_s": line["optimizer_tail_seconds"],
                "gap_s": max(0.0, after["time"] - line["time"] - after["seconds"]),
                "step_s": line["time"] - before["time"],
            }
        )
    return found[WARM_UP:]


def measure(model: Path, folder: Path, batch: int, steps: int) -> list[Row]:
    """Returns a row a way, for batches of so many micro-batches."""
    text = write_text(folder, batch)

    def config(clip: float | None, **optimizer: str) -> Row:
        made = configuration(text, batch, steps, {"grad_dtype": "bf16", **optimizer})
        made["model"] = {"path": str(model), "dtype": "bf16"}
        made["train"]["clip_grad_norm"] = clip
        return made

    probe = lines_of(config(None))
    norms = [line["grad_norm"] for line in probe if line["decision"] == "commit"]
    clip = statistics.median(norms)
    rows = []
    for way in WAYS:
        attempts = attempts_of(lines_of(config(clip, rollback=way)))
        rows.append({"way": way, "micro_batches": batch, "attempts": attempts})
    return rows


def first_overflows(model: Path, folder: Path) -> list[str]:
    """Returns the decisions of a fp16 run that starts with SPipe's loss scale."""
    text = folder / "plain.txt"
    text.write_bytes(Path(json.__file__).read_bytes().replace(b"~", b"-"))
    config = configuration(text, 4, FP16_STEPS, {"grad_dtype": "fp16", "initial_loss_scale": SCALE})
    config["model"] = {"path": str(model), "dtype": "fp16"}
    return [line["decision"] for line in lines_of(config)]


def overheads(row: Row) -> Row:
    """Returns medians of a row: seconds of a committed attempt, and overheads as shares of it."""
    by_decision: dict[str, list[Row]] = {}
    for attempt in row["attempts"]:
        by_decision.setdefault(attempt["decision"], []).append(attempt)

    def median(decision: str, *keys: str) -> float | None:
        several = by_decision.get(decision, [])
        return statistics.median(sum(a[k] for k in keys) for a in several) if several else None

    step_s, usual_s = median("commit", "step_s"), median("commit", "gap_s")
    tail_s = median("commit", "tail_s")
    if step_s is None or usual_s is None or tail_s is None:
        return {"counts": {name: len(found) for name, found in by_decision.items()}}
    skipped_s, amended_s = median("skip", "tail_s", "gap_s"), median("amend", "tail_s", "gap_s")
    return {
        "counts": {name: len(found) for name, found in by_decision.items()},
        "step_s": step_s,
        "skip": None if skipped_s is None else (skipped_s - usual_s) / step_s,
        "amend": None if amended_s is None else (amended_s - usual_s - tail_s) / step_s,
    }


def recorded(path: Path = RECORD) -> Row:
    """Returns the measurements."""
    return dict(json.loads(path.read_text())) if path.exists() else {"rows": []}


def tables(record: Row | None = None) -> tuple[PaperTable, ...]:
    """Returns the table of rollbacks, for SPipe's section."""
    record = recorded() if record is None else record
    if not record["rows"]:
        return ()
    early = [n for n, decision in enumerate(record["fp16"], 1) if decision == "skip"]
    rows = []
    for row in record["rows"]:
        found = overheads(row)
        counts = found["counts"]
        rows.append(
            (
                str(row["micro_batches"]),
                WAYS[row["way"]],
                "8-53 %",
                " ".join(str(counts.get(name, 0)) for name in ("commit", "amend", "skip")),
                f"{1e3 * found['step_s']:.0f}" if "step_s" in found else "",
                _percent(found.get("skip")),
                _percent(found.get("amend")),
                _percent(found.get("skip"), rate=0.01),
            )
        )
    return (
        PaperTable(
            title="SPipe: rollback",
            text=(
                "Section 5.7, figure 18: overhead of a rollback as a share of an iteration, by"
                " batch. Here `python -m bench.papers.rollback`: a small model on two CPU workers,"
                " real daemons; batches with undefined gradients are skipped, others are clipped"
                " late (amended). *SPipe's*: steps in place and inverts them (`optimizer.rollback:"
                " arithmetic`), which does not step with undefined gradients at all; *ours*:"
                " nothing to undo. Overheads as the paper counts them: rollback and the step that"
                " does not overlap; of an amended attempt what it takes longer than a committed"
                " one. How often: the paper has 20 rollbacks in 4,500 iterations, all in the first"
                f" 11, from a loss scale of 2^32; here a fp16 run from the same scale skips"
                f" {len(early)} of its first {len(record['fp16'])} attempts, the last of them"
                f" number {max(early, default=0)}. Machine: {record['machine']}."
            ),
            columns=(
                "micro-batches",
                "way",
                "paper",
                "committed, amended, skipped",
                "committed ms",
                "skipped",
                "amended",
                "one skip in 100",
            ),
            rows=tuple(rows),
        ),
    )


def _percent(share: float | None, rate: float = 1.0) -> str:
    if share is None:
        return ""
    return f"{100 * share * rate:.{1 if rate == 1.0 else 2}f} %"


def main(arguments: Iterable[str] | None = None) -> None:
    """Measures and records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[2, 8])
    parser.add_argument("--steps", type=int, default=16, help="that count, of each run")
    options = parser.parse_args(None if arguments is None else list(arguments))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder)
        known = {(row["micro_batches"], row["way"]): row for row in recorded()["rows"]}
        for batch in options.micro_batches:
            for row in measure(model, folder, batch, options.steps):
                known[batch, row["way"]] = row
                sys.stderr.write(f"{batch} {row['way']} {json.dumps(overheads(row))}\n")
        record = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, load"
            f" {os.getloadavg()[1]:.0f} of this and other work",
            "fp16": first_overflows(model, folder),
            "rows": [known[key] for key in sorted(known)],
        }
        RECORD.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()

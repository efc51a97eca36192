"""``penstock report``: what its page says is what the files of the run say, whatever is in them."""

from __future__ import annotations

import json
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.client.main import app
from penstock.client.views.report.blocks import Code, Page, Table, Unknown
from penstock.client.views.report.charts import Mark, Series, curves
from penstock.client.views.report.compared import comparison_of
from penstock.client.views.report.facts import RunFacts, State, changed_keys
from penstock.client.views.report.incidents import read_history
from penstock.client.views.report.page import page_of, render
from penstock.client.views.report.readings import WHOLE_LINES, read_metrics
from penstock.client.views.report.sections import another_name
from penstock.config.schema import load_config
from penstock.config.training import MAX_RUN_NAME

HOSTILE = "</td><script>alert('x')</script>{{ 7 * 7 }}<img src=http://evil/>&\"'"


class Reader(HTMLParser):
    """What a browser would find: elements that run or load something, and all texts."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "img", "iframe", "object", "embed", "video", "audio"):
            self.loads.append((tag, "", None))
        for name, value in attrs:
            points = name in ("src", "href", "action") and not (value or "").startswith(("#", "d"))
            if points or name.startswith("on"):
                self.loads.append((tag, name, value))
        if tag not in ("meta", "link", "line", "rect", "circle", "polyline", "polygon"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                continue

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.texts.append(data)


def read_page(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


def metrics(run_dir: Path, phase: str) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["phase"] == phase]


def rows(page: Page, section: str) -> dict[str, tuple[str, ...]]:
    """The rows of a section's tables by their first cells."""
    blocks = next(s.blocks for s in page.sections if s.name == section)
    return {row[0]: tuple(row[1:]) for b in blocks if isinstance(b, Table) for row in b.rows}


def test_the_page_says_what_the_files_of_the_run_say(plain_run: Path) -> None:
    lines, facts = metrics(plain_run, "train"), RunFacts.of(plain_run)
    page = page_of(facts)
    tiles = {tile.name: tile.value for tile in page.tiles}
    assert tiles["steps"] == "40" and page.state == State.FINISHED
    assert tiles["loss"] == f"{lines[-1]['loss']:.4f}"
    rate = median(line["tokens_per_second"] for line in lines)
    assert tiles["tokens a second"] == f"{rate:,.0f}"
    speed, faults = rows(page, "speed"), rows(page, "faults")
    assert speed["tokens in all"] == (f"{sum(line['tokens'] for line in lines):,}",)
    assert speed["tokens a second, median of all steps"] == (f"{rate:,.0f}",)
    assert faults["processes that died and were started again"] == ("0",)
    assert faults["steps with clipped gradients (norm over train.clip_grad_norm)"] == ("0",)
    assert rows(page, "simulated")["step"][0].endswith("ms")  # it is traced
    assert "computing" in str(next(s for s in page.sections if s.name == "time").blocks)
    names = [section.name for section in page.sections]
    assert names[:5] == ["result", "speed", "time", "trained", "simulated"]
    assert rows(page, "configuration")["train.clip_grad_norm"] == ("null",)
    assert "torch" in rows(page, "again")
    assert "run.dir" in changed_keys(facts.config)
    assert "optimizer.eps" not in changed_keys(facts.config)


def test_all_sections_name_one_typical_step(plain_run: Path, tmp_path: Path) -> None:
    """With a trace the sentence, the table and the picture are of the same two attempts."""
    facts = RunFacts.of(plain_run)
    text = "\n".join(read_page(render(page_of(facts))).texts)
    simulated, percent, which, measured = re.findall(
        r"the simulated attempt takes ([\d.]+) ms, ([\d.]+)% (more|less) than .* ([\d.]+) ms\.",
        text,
    )[0]
    drawn = re.findall(r"^(?:makespan|takes) ([\d.]+) ms", text, re.MULTILINE)
    assert drawn == [measured, simulated] * 2  # the wide picture, and the one for phones
    signed = float(percent) * (1.0 if which == "more" else -1.0)
    assert signed == pytest.approx(100.0 * (float(simulated) / float(measured) - 1.0), abs=0.1)
    assert rows(page_of(facts), "simulated")["attempt"] == (f"{measured} ms", f"{simulated} ms")
    named = re.findall(r"median: attempt (\d+)\.|measured, attempt (\d+), the typical one", text)
    assert len(named) == 3 and len({a or b for a, b in named}) == 1, named
    copy = copied(plain_run, tmp_path / "run")  # without its trace
    untraced = "\n".join(read_page(render(page_of(RunFacts.of(copy)))).texts)
    step = int(re.findall(r"median of all steps: step (\d+)\.", untraced)[0])
    seconds = [line["seconds"] for line in metrics(plain_run, "train")]
    nearest = min(seconds, key=lambda second: abs(second - median(seconds)))
    assert seconds[step - 1] == nearest


def test_a_run_is_repeated_under_another_name(plain_run: Path, tmp_path: Path) -> None:
    """The lines of again.yaml are a configuration, and its directory is not the old one."""
    for name, repetition in {
        "x": "x-again",
        "x-again": "x-again2",
        "x-again9": "x-again10",
        "y" * MAX_RUN_NAME: "y" * (MAX_RUN_NAME - 6) + "-again",
        "y" * (MAX_RUN_NAME - 6) + "-again": "y" * (MAX_RUN_NAME - 7) + "-again2",
        "-again9999": "-again10000",
    }.items():
        assert another_name(name) == repetition != name
    facts = RunFacts.of(plain_run)
    blocks = next(s.blocks for s in page_of(facts).sections if s.name == "again")
    again = tmp_path / "again.yaml"
    again.write_text(next(block.text for block in blocks if isinstance(block, Code)))
    repeated = load_config(again)
    assert repeated.run.name == f"{facts.name}-again"
    assert repeated.run_dir.absolute() != plain_run.absolute()
    assert repeated.model == facts.config.model and repeated.train == facts.config.train


def test_a_page_loads_nothing_and_is_whole(plain_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(plain_run), "--out", str(out)])
    assert done.exit_code == 0 and done.output.strip() == str(out)
    reader = read_page(out.read_text())
    assert reader.loads == [] and reader.open == []
    text = out.read_text()
    assert (
        text.count("<svg") >= 5
        and text.count('<div class="narrow">') == 1
        and "default-src 'none'" in text
    )


def test_what_is_not_known_says_how_to_get_it(clipped_run: Path) -> None:
    page = page_of(RunFacts.of(clipped_run))
    found = {s.name: [b.text for b in s.blocks if isinstance(b, Unknown)] for s in page.sections}
    assert any("train.eval_every" in text for text in found["result"])
    assert any("observability.memory" in text for text in found["memory"])
    amended = sum(line["decision"] == "amend" for line in metrics(clipped_run, "train"))
    name = "steps with clipped gradients (norm over train.clip_grad_norm)"
    assert rows(page, "faults")[name] == (str(amended),)


def copied(run_dir: Path, target: Path) -> Path:
    """A run directory to change: a sealed one would be refused."""
    shutil.copytree(run_dir, target, ignore=shutil.ignore_patterns("state", "*.bin", "trace"))
    (target / "inputs.json").unlink()
    return target


def test_passes_over_the_data_are_named(plain_run: Path, tmp_path: Path) -> None:
    passes = metrics(plain_run, "train")[-1]["data_epoch"]
    text = f"{passes:.2f}" if passes >= 0.1 else f"{passes:#.2g}"
    page = page_of(RunFacts.of(plain_run))
    assert ("epochs", text) in [(tile.name, tile.value) for tile in page.tiles]
    assert rows(page, "trained")["epochs (passes over the data)"] == (f"{text} of {text}",)
    older = copied(plain_run, tmp_path / "older")
    lines = [json.loads(line) for line in (older / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if k != "data_epoch"} for line in lines]
    (older / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    page = page_of(RunFacts.of(older))
    assert "epochs" not in [tile.name for tile in page.tiles]
    assert rows(page, "trained").get("epochs (passes over the data)") is None
    both = comparison_of(RunFacts.of(plain_run), RunFacts.of(older))
    assert rows(both, "figures")["epochs"][1:] == ("-", "-")


def test_names_keys_and_logs_are_escaped(plain_run: Path, tmp_path: Path) -> None:
    run_dir = copied(plain_run, tmp_path / "copy")
    model = run_dir / "model" / "config.json"
    model.write_text(json.dumps({**json.loads(model.read_text()), "model_type": HOSTILE}))
    resolved = run_dir / "resolved.yaml"
    path = json.dumps(f"/data/{HOSTILE}")
    lines = [
        f"  path: {path}" if line.startswith("  path: /") else line
        for line in resolved.read_text().splitlines()
    ]
    resolved.write_text("\n".join(lines))
    entry = {"time": time.time(), "level": "error", "process": HOSTILE, "message": HOSTILE}
    with (run_dir / "logs" / "schedulerd.jsonl").open("a") as log:
        log.write(json.dumps(entry) + "\n" + "{half a line")
    facts = RunFacts.of(run_dir)
    for page in (page_of(facts), comparison_of(RunFacts.of(plain_run), facts)):
        reader = read_page(render(page))
        assert reader.loads == [] and reader.open == []
        assert any(HOSTILE in text for text in reader.texts)
    title = curves(
        [Series(name=HOSTILE, points=[(1.0, 1.0), (2.0, 2.0)])],
        HOSTILE,
        [Mark(step=1.0, text=HOSTILE)],
    )
    assert read_page(str(title)).loads == []


def test_two_runs_side_by_side(plain_run: Path, clipped_run: Path) -> None:
    first, second = RunFacts.of(plain_run), RunFacts.of(clipped_run)
    page = comparison_of(first, second)
    changed = rows(page, "configuration")
    assert changed["schedule.scheme"] == ("1f1b", "spipe")
    assert changed["train.steps"] == ("40", "60")
    assert "optimizer.lr" not in changed
    losses = [metrics(run, "train")[-1]["loss"] for run in (plain_run, clipped_run)]
    texts = (*(f"{loss:.4f}" for loss in losses), f"{losses[1] / losses[0]:.3f}x")
    assert rows(page, "figures")["loss"] == texts
    assert (
        str(next(s for s in page.sections if s.name == "curves").blocks[0]).count("polyline") == 2
    )


@pytest.mark.parametrize("word", ["membership", "epoch"])  # older logs say epoch
def test_faults_are_told_with_their_recoveries(word: str, tmp_path: Path) -> None:
    said = (
        (0.0, "schedulerd", "info", f"{word} 1 begins at version 0"),
        (1.0, "schedulerd", "info", "saved step 50 in /runs/x/state/step-00000050"),
        (2.0, "schedulerd", "warning", "worker.1 (pid 7): stream ended"),
        (2.1, "node.a", "warning", "worker.1 was killed by signal 9; restarting (number 1)"),
        (5.6, "schedulerd", "info", f"{word} 2 begins at version 61"),
        (6.0, "worker.0", "warning", "something odd"),
        (9.0, "schedulerd", "info", "shutting down: step 90 of 90 is done"),
    )
    (tmp_path / "logs").mkdir()
    for process in {process for _, process, _, _ in said}:
        lines = [
            json.dumps({"time": 1e9 + at, "process": process, "level": level, "message": text})
            for at, by, level, text in said
            if by == process
        ]
        (tmp_path / "logs" / f"{process}.jsonl").write_text("\n".join(lines) + "\n")
    history = read_history(tmp_path)
    kinds = [str(incident.kind) for incident in history.incidents]
    assert kinds == ["start", "save", "fault", "recovery", "warning", "end"]
    (recovery,) = history.recoveries
    assert (recovery.epoch, recovery.step, round(recovery.seconds, 1)) == (2, 61, 3.5)
    assert recovery.cause == "worker.1 was killed by signal 9, and started again"
    assert history.end == "step 90 of 90 is done"
    assert any("(membership 2)" in incident.text for incident in history.incidents)


def test_a_long_run_is_counted_whole_and_drawn_in_part(tmp_path: Path) -> None:
    steps = 3 * WHOLE_LINES
    line = (
        '{{"step": {0}, "phase": "train", "loss": {1}, "tokens": 8, "decision": "{2}", "epoch": 1}}'
    )
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            decision = "amend" if step % 1000 == 0 else "commit"
            file.write(line.format(step, 9.0 - step / steps, decision) + "\n")
        file.write('{"step": 120000, "phase": "eval", "loss": 3.5, "decision": null}\n{"half')
    readings = read_metrics(tmp_path)
    assert readings.attempts == steps and readings.decisions["amend"] == steps // 1000
    assert 2 <= readings.every <= 4 and not readings.exact
    assert len(readings.steps) == pytest.approx(steps / readings.every, abs=2)
    assert [line["step"] for line in readings.steps[:3]] == [
        1 + n * readings.every for n in range(3)
    ]
    assert readings.step == steps and readings.total("tokens") == 8 * steps
    assert readings.last("loss", evaluations=True) == 3.5
    assert len(curves([Series(name="loss", points=readings.points("loss"))], "loss")) < 40_000


@pytest.mark.parametrize("what", ["nothing", "no run", "a file"])
def test_what_is_no_run_is_named(what: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    if what == "no run":
        path.mkdir()
    elif what == "a file":
        path.write_text("")
    done = CliRunner().invoke(app, ["report", str(path)])
    assert done.exit_code == 2 and f"{path}: no run directory" in done.stderr


def test_a_page_that_cannot_be_written_is_named(plain_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "none" / "page.html"
    done = CliRunner().invoke(app, ["report", str(plain_run), "--out", str(out)])
    assert done.exit_code == 2 and f"{out}: cannot write it" in done.stderr

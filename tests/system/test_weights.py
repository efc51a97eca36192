"""Copies of the weights of runs that train: the bytes of an export, and kills in the middle."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from penstock.client.weights.folder import NOTE, older_copy
from penstock.host.errors import PenstockError
from penstock.models.checkpoints.layout import write_layout
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.control import ControlClient
from penstock.shm.published import LAYOUT, PublishedFile, PublishedLayout
from tests.folders import start_from_folder
from tests.system import conftest as H

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning"),
]

BF16: dict[str, Any] = {"model": {"dtype": "bf16", "hf": {"tie_word_embeddings": True}}}
KEPT: dict[str, Any] = {"train": {"save_every": 1, "keep_snapshots": 10**6}}
FILE = "model.safetensors"


@pytest.fixture(autouse=True)
def bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars of loaded models start no thread."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


def copied(runner: H.Runner, run: H.TrainProcess, to: Path, *words: str) -> dict[str, Any]:
    """The result of ``penstock weights``."""
    code, text = runner.call(
        "weights", str(run.run_dir), "--latest", "--to", str(to), "--json", *words
    )
    assert code == 0, text + H.tail_logs(run.run_dir)
    result: dict[str, Any] = json.loads(text)
    assert older_copy(to) is not None
    return result


def stopped(runner: H.Runner, run: H.TrainProcess) -> int:
    """Stops a run; the step with which it ends."""
    assert runner.call("stop", "--run-dir", str(run.run_dir))[0] == 0
    assert run.wait(500)[0] == 5
    return H.newest_step(run.run_dir)


def assert_same(runner: H.Runner, run_dir: Path, copy: Path, step: int, *words: str) -> None:
    """The copy has the bytes of an export of the saved step."""
    out = runner.root / f"export-{copy.name}-{step}"
    code, text = runner.call("export", run_dir, out, "--step", str(step), *words)
    assert code == 0, text
    expected, actual = (
        {path.name: path.read_bytes() for path in folder.iterdir() if path.name != NOTE}
        for folder in (out, copy)
    )
    assert actual.keys() == expected.keys()
    assert [name for name in expected if actual[name] != expected[name]] == []


def test_a_copy_is_the_export_of_its_step(runner: H.Runner) -> None:
    config = runner.configure("run", H.merge(H.merge(H.ENDLESS, BF16), KEPT))
    run = runner.start(config)
    H.wait_for_step(run, 3)
    target, wide = runner.root / "copy", runner.root / "wide"
    first = copied(runner, run, target)
    second = copied(runner, run, target)
    third = copied(runner, run, wide, "--dtype", "fp32")
    assert first["converted"] == "" and first["replaced_step"] is None
    assert first["step"] == second["replaced_step"] < second["step"] < third["step"]
    assert H.newest_step(run.run_dir) >= third["step"]
    stopped(runner, run)
    assert_same(runner, run.run_dir, target, second["step"])
    assert_same(runner, run.run_dir, wide, third["step"], "--dtype", "fp32")
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert model.dtype is torch.bfloat16 and torch.isfinite(model.lm_head.weight).all()


@pytest.mark.slow
def test_copies_of_a_paused_run_and_of_an_ended_one(runner: H.Runner) -> None:
    run = runner.start(runner.configure("run", H.merge(H.ENDLESS, BF16)))
    H.wait_for_step(run, 3)
    assert runner.call("pause", "--run-dir", str(run.run_dir))[0] == 0
    target = runner.root / "copy"
    first, second = copied(runner, run, target), copied(runner, run, target)
    assert first["step"] == second["step"]
    assert stopped(runner, run) == second["step"]
    assert_same(runner, run.run_dir, target, second["step"])
    code, text = runner.call("weights", run.run_dir, "--latest", "--to", target)
    assert code == 2 and "no run is active there; penstock export writes a saved state" in text


@pytest.mark.slow
def test_adapters_merged_and_alone(runner: H.Runner) -> None:
    changes = {"adapter": {"r": 4, "alpha": 8}, "run": {"dir": str(runner.root / "run")}}
    merged = H.merge(H.merge(H.ENDLESS, KEPT), changes)
    run = runner.start(start_from_folder(runner.configure("run", merged)))
    H.wait_for_step(run, 3)
    alone, whole = runner.root / "alone", runner.root / "whole"
    one = copied(runner, run, alone, "--format", "peft")
    other = copied(runner, run, whole)
    again = copied(runner, run, whole)
    assert one["converted"] == "" and "adapter is merged" in other["converted"]
    stopped(runner, run)
    assert_same(runner, run.run_dir, alone, one["step"], "--format", "peft")
    assert_same(runner, run.run_dir, whole, again["step"])
    states = [path.name for path in (run.run_dir / "state").iterdir()]
    assert all(name.startswith("step-") or name == "base" for name in states), states
    folder = RunDirectory(run.run_dir).config.model.path
    base: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(PeftModel.from_pretrained(base, alone), PeftModel)


@pytest.mark.slow
def test_two_nodes_write_files_of_their_own(runner: H.Runner) -> None:
    nodes = {"cluster": {"workers": 1, "nodes": [{"name": "a"}, {"name": "b"}]}}
    changes = H.merge(H.merge(H.merge(H.ENDLESS, BF16), KEPT), nodes)
    run = runner.start(runner.configure("run", changes))
    H.wait_for_step(run, 3)
    target = runner.root / "copy"
    result = copied(runner, run, target)
    stopped(runner, run)
    step = result["step"]
    names = [name for name in result["files"] if name.endswith(".safetensors")]
    assert len(names) > 1 and all(name.startswith(f"model-step{step}-") for name in names)
    out = runner.root / "out"
    assert runner.call("export", run.run_dir, out, "--step", str(step))[0] == 0
    expected = load_file(out / FILE)
    actual = {k: v for name in names for k, v in load_file(target / name).items()}
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype="auto").state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


class SlowCopy(threading.Thread):
    """A copy that writes each tensor many times, so that a process can be killed meanwhile."""

    def __init__(self, run_dir: Path, folder: Path, times: int) -> None:
        super().__init__()
        folder.mkdir()
        assert write_layout(run_dir, folder, "hf", None) == ""
        run = RunDirectory(run_dir)
        path = folder / LAYOUT
        layout = PublishedLayout.from_json(path.read_bytes(), run.table, str(path))
        files = tuple(
            PublishedFile(name=f.name, num_bytes=f.num_bytes, tensors=f.tensors * times)
            for f in layout.files
        )
        path.write_text(PublishedLayout(table_digest=layout.table_digest, files=files).to_json())
        self._file, self._zeros = folder / FILE, (folder / FILE).read_bytes()
        self._client, self._folder = ControlClient.for_run(run_dir), folder
        self.step: int | None = None
        self.error = ""

    def run(self) -> None:
        with self._client:
            try:
                self.step = self._client.weights(self._folder).version
            except PenstockError as error:
                self.error = str(error)

    def wait_for_bytes(self) -> None:
        """Returns when tensors are written."""
        deadline_s = time.monotonic() + 500.0
        while self._file.read_bytes() == self._zeros:
            assert time.monotonic() < deadline_s and self.is_alive(), self.error
            time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["memoryd.a", "worker.1", "optimizerd.a", "schedulerd"])
def test_a_process_killed_during_a_copy(runner: H.Runner, victim: str) -> None:
    """The copy fails, or is that of its step; training goes on with the same bytes."""
    changes = H.merge(H.merge(H.ENDLESS, BF16), KEPT)
    run = runner.start(runner.configure("run", changes))
    H.wait_for_step(run, 3)
    copy = SlowCopy(run.run_dir, runner.root / "slow", 3000)
    copy.start()
    copy.wait_for_bytes()
    members = run.members()
    name = next(name for name in members if victim in (name, name.partition(".")[0]))
    os.kill(members[name], signal.SIGKILL)
    copy.join(500.0)
    assert not copy.is_alive()
    target = runner.root / "copy"
    H.wait_for_step(run, H.newest_step(run.run_dir) + 2)
    result = copied(runner, run, target)
    last = stopped(runner, run)
    assert_same(runner, run.run_dir, target, result["step"])
    if victim in ("worker.1", "optimizerd.a"):
        assert copy.error == "" and copy.step is not None
        out = runner.root / "out"
        assert runner.call("export", run.run_dir, out, "--step", str(copy.step))[0] == 0
        assert (runner.root / "slow" / FILE).read_bytes() == (out / FILE).read_bytes()
    else:
        expected = "was lost while it copied" if victim == "memoryd.a" else "no answer"
        assert expected in copy.error
    plain = H.merge(H.merge(H.endless_until(last), BF16), {"train": {"save_every": 0}})
    undisturbed = runner.train(runner.configure("undisturbed", plain))
    assert H.state_bytes(run.run_dir) == H.state_bytes(undisturbed)


@pytest.mark.slow
def test_the_command_killed_at_any_time(runner: H.Runner) -> None:
    """The folder has a whole copy of one step, before and after."""
    run = runner.start(runner.configure("run", H.merge(H.merge(H.ENDLESS, BF16), KEPT)))
    H.wait_for_step(run, 3)
    target, rng = runner.root / "to" / "copy", random.Random(11)
    steps = [copied(runner, run, target)["step"]]
    started_s = time.monotonic()
    copied(runner, run, target)
    took_s = time.monotonic() - started_s
    for _ in range(8):
        words = ("weights", str(run.run_dir), "--latest", "--to", str(target))
        process = runner.command(*words)
        time.sleep(rng.uniform(0.3, 1.1) * took_s)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=500)
        note = older_copy(target)
        assert note is not None
        steps.append(note.step)
        sizes = {p.name: p.stat().st_size for p in target.iterdir() if p.name != NOTE}
        assert sizes == note.files
    assert steps == sorted(steps)
    final = copied(runner, run, target)
    assert [path.name for path in target.parent.iterdir()] == ["copy"]
    last = stopped(runner, run)
    assert_same(runner, run.run_dir, target, final["step"])
    plain = H.merge(H.merge(H.endless_until(last), BF16), {"train": {"save_every": 0}})
    undisturbed = runner.train(runner.configure("undisturbed", plain))
    assert H.state_bytes(run.run_dir) == H.state_bytes(undisturbed)

"""Preparing run directories: fresh, resumed, refused; and the memory table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from penstock.config.schema import Config, load_config, parse_config
from penstock.config.training import OptimizerConfig
from penstock.config.values import human_bytes
from penstock.config.words import apply_overrides
from penstock.daemons.node.preparing import tool
from penstock.daemons.node.preparing.changes import check_resume, find_changes
from penstock.daemons.node.preparing.fitting.capacity import (
    MachineMemory,
    check_capacity,
    heaviest_machine,
    memory_demands,
)
from penstock.daemons.node.preparing.prepare import prepare_run, warn_if_open
from penstock.daemons.node.preparing.tool import run_tool
from penstock.daemons.node.run_lock import RunLock, prepare_lock_path
from penstock.daemons.preload.starting import Spawning
from penstock.host.errors import CapacityError, ConfigError, PenstockError, StateError
from penstock.host.limits.cgroup import MemoryLimit
from penstock.host.process_identity import start_ticks
from penstock.planner.memory.table import MemoryKind, MemoryRow
from penstock.protocol.plan.step import STEP_TERMS, OptimizerStep, step_terms
from penstock.protocol.run.hardware.launchers import engine_of
from penstock.protocol.run.rundir import RunDirectory
from tests.folders import save_model

GIB = 2**30

BASE: dict[str, Any] = {
    "model": {
        "hf": {
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
        }
    },
    "data": {"path": "text.txt", "sequence_length": 16},
    "train": {"steps": 2, "global_batch": 4},
}


ALL_TRAINED = "trains all 13,424 parameters"
"""The line about the model of the base configuration; transformers counts as many."""


def config(*overrides: str) -> Config:
    """The base configuration with overrides."""
    return parse_config(apply_overrides(BASE, overrides))


def changed(*overrides: str) -> dict[str, bool]:
    """Key -> allowed, of what overrides change."""
    return {c.key: c.allowed for c in find_changes(config(), config(*overrides))}


def test_changes_that_a_resume_allows() -> None:
    allowed = (
        "train.steps=9",
        "train.eval_every=3",
        "train.global_batch=8",
        "optimizer.lr=1e-2",
        "optimizer.schedule=linear",
        "optimizer.warmup_steps=1",
        "optimizer.min_lr=1e-5",
        "optimizer.betas=[0.8, 0.9]",
        "optimizer.momentum=0.8",
        "optimizer.eps=1e-6",
        "optimizer.weight_decay=0.2",
        "optimizer.groups=[{match: norm, rate: 0.5}]",
        "train.clip_grad_norm=2",
        "optimizer.threads=1",
        "cluster.workers=1",
        "cluster.transport=gloo",
        "schedule.scheme=1f1b",
        "memory.host_limit=1G",
        "observability.log_level=debug",
        "run.name=other",
        "data.eval_path=held.txt",
    )
    found = changed(*allowed)
    assert len(found) == len(allowed)
    assert all(found.values())


@pytest.mark.parametrize(
    "override",
    [
        "model.hf.hidden_size=32",
        "model.dtype=bf16",
        "data.sequence_length=8",
        "data.shuffle=false",
        "run.seed=1",
        "optimizer.name=adam",
        "optimizer.grad_dtype=bf16",
        "optimizer.rollback=arithmetic",
        "train.freeze=['embed']",
    ],
)
def test_changes_that_a_resume_refuses(override: str) -> None:
    assert list(changed(override).values()) == [False]


def test_holding_out_text_changes_the_data_order() -> None:
    """Without a file of its own, evaluation takes the last sequences away from training."""
    assert changed("train.eval_every=3") == {"train.eval_every": False}
    assert changed("data.eval_path=held.txt") == {"data.eval_path": True}
    both = find_changes(config("train.eval_every=3"), config("train.eval_every=5"))
    assert [change.allowed for change in both] == [True]


def test_a_resume_changes_the_form_of_the_learning_rate_but_not_its_convention() -> None:
    wsd = ("optimizer.schedule=wsd", "optimizer.decay_steps=5", "optimizer.decay_type=linear")
    assert set(changed(*wsd, "optimizer.warmup_steps=0.1").values()) == {True}
    assert changed("optimizer.curve=transformers") == {"optimizer.curve": False}


def test_refusal_names_keys_both_values_and_why() -> None:
    changes = find_changes(config(), config("model.hf.hidden_size=32", "train.steps=9"))
    why = r"model\.hf\.hidden_size: 16 -> 32 \(the saved state belongs to the old model\)"
    with pytest.raises(ConfigError, match=why) as caught:
        check_resume(changes, Path("runs/x"), None)
    assert "train.steps" not in str(caught.value)


def test_changes_say_what_they_mean() -> None:
    def said(*overrides: str) -> list[str]:
        constant = config("optimizer.schedule=constant")
        return [str(change) for change in find_changes(constant, config(*overrides))]

    steps = ("train.steps=9", "optimizer.schedule=constant")
    assert said(*steps) == ["train.steps: 2 -> 9"], "a constant rate has no curve"
    decay, schedule = said("optimizer.schedule=cosine", "optimizer.weight_decay=0.2")
    assert schedule.endswith("(the learning rate follows the new curve from the next step on)")
    assert decay == (
        "optimizer.weight_decay: 0.1 -> 0.2 (from the next step on; earlier state is unchanged)"
    )


@pytest.mark.parametrize("key", STEP_TERMS)
def test_steps_in_memory_are_settled_with_the_values_they_were_decided_with(key: str) -> None:
    """Records hold what differs from step to step; these values do not."""
    values = {"optimizer.betas": "[0.8, 0.9]", "optimizer.groups": "[{match: x, rate: 2.0}]"}
    value = values.get(key, "0.01")
    changes = find_changes(config(), config(f"{key}={value}"))
    check_resume(changes, Path("runs/x"), None)
    with pytest.raises(ConfigError, match=rf"{key}: cannot change now.* at step 17, holds"):
        check_resume(changes, Path("runs/x"), 17)
    check_resume(find_changes(config(), config("optimizer.lr=1")), Path("runs/x"), 17)
    assert step_terms(config()) != step_terms(config(f"{key}={value}"))


def test_memory_of_runs_from_before_there_were_groups_is_adopted() -> None:
    terms = {"betas": [0.9, 0.95], "momentum": 0.9, "eps": 1e-8, "weight_decay": 0.1}
    assert step_terms(config()) == json.dumps({f"optimizer.{k}": v for k, v in terms.items()})


def test_every_value_that_kernels_take_from_the_configuration_is_a_step_term() -> None:
    """So that a hyper-parameter to come is not forgotten."""
    taken: set[str] = set()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            taken.add(name)
            return getattr(OptimizerConfig(name="sgd"), name)

    step = OptimizerStep(version=1, coefficient=1.0, learning_rate=1.0, bias_step=1)
    step.hyper(cast(OptimizerConfig, Watched()))
    assert taken - {"name"} <= {key.partition(".")[2] for key in STEP_TERMS}


def row(place: str, resource: MemoryKind, num_bytes: int) -> MemoryRow:
    return MemoryRow(place=place, resource=resource, use="x", num_bytes=num_bytes)


ROWS = (row("node a", MemoryKind.SHM, 4 * GIB), row("device 0", MemoryKind.HOST, GIB))


def machine(**changes: Any) -> MachineMemory:
    fields = {"ram_available": 16 * GIB, "shm_free": 8 * GIB, "held": 0, "memlock": None}
    return MachineMemory(**{**fields, **changes})


def test_enough_memory() -> None:
    table = memory_demands(config("cluster.workers=1"), ROWS, machine(), range(1))
    check_capacity(table)
    assert [(n.what, n.short) for n in table] == [
        ("/dev/shm", False),
        ("host RAM (/dev/shm and processes)", False),
        ("memory.host_limit", False),
    ]


@pytest.mark.parametrize(
    ("there", "overrides", "short"),
    [
        (machine(shm_free=3 * GIB), (), "/dev/shm"),
        (machine(ram_available=5 * GIB), (), "host RAM (/dev/shm and processes)"),
        (machine(), ("memory.host_limit=5G",), "memory.host_limit"),
    ],
)
def test_short_memory_is_refused_with_the_table(
    there: MachineMemory, overrides: tuple[str, ...], short: str
) -> None:
    table = memory_demands(config("cluster.workers=1", *overrides), ROWS, there, range(1))
    assert [n.what for n in table if n.short] == [short]
    with pytest.raises(CapacityError, match="<-- short") as caught:
        check_capacity(table)
    assert caught.value.exit_code == 3


def test_the_group_that_leaves_least_has_its_line_and_its_remedy() -> None:
    groups = (
        MemoryLimit(owner="cgroup /slurm/job_5/step_0", limit=8 * GIB, available=7 * GIB),
        MemoryLimit(owner="cgroup /slurm/job_5", limit=5 * GIB, available=4 * GIB),
    )
    there = machine(groups=groups, engine=engine_of({"SLURM_JOB_ID": "5"}))
    table = memory_demands(config("cluster.workers=1"), ROWS, there, range(1))
    assert [(n.what, n.available) for n in table if n.short] == [
        ("cgroup /slurm/job_5: 5.0 GiB", 4 * GIB)
    ]
    with pytest.raises(CapacityError, match=r"<-- short(?s:.*)Ask Slurm .* --mem="):
        check_capacity(table)


def test_only_nodes_on_this_machine_count_here() -> None:
    nodes = "cluster.nodes=[{name: a, host: x}, {name: b, host: y}, {name: c, host: y}]"
    rows = (*ROWS, *(row(f"node {name}", MemoryKind.SHM, GIB) for name in "bc"))
    several = config("cluster.workers=1", nodes, "memory.host_limit=3G")
    assert heaviest_machine(several, rows) == (0,)
    table = memory_demands(several, rows, machine(), (1, 2))
    assert [n.needed for n in table if n.what == "/dev/shm"] == [2 * GIB]
    assert [n.place for n in table if n.short] == ["node a"]  # of memory.host_limit


def test_what_the_run_holds_already_counts_as_there() -> None:
    there = machine(shm_free=GIB, ram_available=4 * GIB, held=4 * GIB)
    check_capacity(memory_demands(config("cluster.workers=1"), ROWS, there, range(1)))


def test_gpu_devices_and_memlock_have_their_lines() -> None:
    rows = (*ROWS, row("device 0", MemoryKind.DEVICE, 2 * GIB))
    gpu = config("cluster.workers=1", "cluster.device=cuda", "memory.device_limit=1G")
    table = memory_demands(gpu, rows, machine(memlock=8 * 2**20), range(1))
    assert [n.what for n in table if n.short] == ["memory.device_limit", "memlock limit"]
    unpinned = config("cluster.workers=1", "cluster.device=cuda", "cluster.pin_memory=false")
    table = memory_demands(unpinned, rows, machine(memlock=8 * 2**20), range(1))
    assert "memlock limit" not in [n.what for n in table]


def test_human_bytes() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1536, 3 * GIB, 2**41)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "2.0 TiB",
    ]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return f"data.path={text}"


def test_a_run_from_nothing_to_a_refused_resume(tmp_path: Path, corpus: str) -> None:
    run_dir = tmp_path / "run"
    said: list[str] = []
    directory = prepare_run(config(corpus), run_dir, said.append)
    assert said == ["preparing the model's block table and the data", ALL_TRAINED]
    files = ("run.json", "resolved.yaml", "table.json", "plan.json", "data/meta.json")
    assert [name for name in files if not (run_dir / name).exists()] == []
    named = config(corpus, "data.tokenizer=byte", "model.compile=false", "model.attention=sdpa")
    assert directory.config == named, "what is unset is named"

    said.clear()
    again = prepare_run(config(corpus, "train.steps=9"), run_dir, said.append)
    assert said == ["preparing the model's block table and the data", ALL_TRAINED]
    assert again.run_id == directory.run_id

    # Not started yet: another model only means that the table is made anew.
    before = json.loads((run_dir / "table.json").read_text())["num_parameters"]
    prepare_run(config(corpus, "model.hf.intermediate_size=64"), run_dir)
    assert json.loads((run_dir / "table.json").read_text())["num_parameters"] > before

    (run_dir / "journal.sqlite").touch()
    kept = (run_dir / "resolved.yaml").read_bytes()
    with pytest.raises(ConfigError, match=r"model\.hf\.intermediate_size: 64 -> 32"):
        prepare_run(config(corpus), run_dir)
    same = "model.hf.intermediate_size=64"
    groups = "optimizer.groups=[{match: [norm], rate: 2.0}, {match: q_porj, rate: 0.5}]"
    with pytest.raises(ConfigError, match=r"groups\.1\.match: 'q_porj' .*self_attn\.q_proj"):
        prepare_run(config(corpus, same, groups), run_dir)
    with pytest.raises(ConfigError, match=r"schedule\.forward_stages = 50"):
        prepare_run(config(corpus, same, "schedule.forward_stages=50"), run_dir)
    with pytest.raises(ConfigError, match="workers do not swap to devices of other nodes"):
        nodes = "cluster.nodes=[{name: a}, {name: b}, {name: c}, {name: d}]"
        bpipe = ("schedule.scheme=bpipe", "cluster.workers=1", nodes)
        prepare_run(config(corpus, same, *bpipe), run_dir)
    assert (run_dir / "resolved.yaml").read_bytes() == kept


def test_inputs_are_read_again_until_the_run_has_started(tmp_path: Path, corpus: str) -> None:
    """A preparation that was interrupted before the first step fixes nothing."""
    run_dir, tokens = tmp_path / "run", tmp_path / "run/data/train.bin"
    prepare_run(config(corpus), run_dir)
    first = tokens.read_bytes()
    text = Path(corpus.removeprefix("data.path="))
    before = text.stat()
    text.write_text(text.read_text().replace("quick", "quiet"))
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    prepare_run(config(corpus), run_dir)
    assert tokens.read_bytes() == first.replace(
        *(bytes(w, "utf-16-le") for w in ("quick", "quiet"))
    )
    assert tokens.read_bytes() != first
    (run_dir / "journal.sqlite").touch()
    kept = tokens.read_bytes()
    text.write_text(text.read_text().replace("quiet", "quick"))
    prepare_run(config(corpus), run_dir)
    assert tokens.read_bytes() == kept


def test_inputs_that_were_edited_are_refused(tmp_path: Path, corpus: str) -> None:
    run_dir, wanted = tmp_path / "run", config(corpus)
    prepare_run(wanted, run_dir)
    (run_dir / "journal.sqlite").touch()
    for name in ("table.json", "model/config.json", "data/meta.json"):
        whole = (run_dir / name).read_bytes()
        (run_dir / name).write_bytes(whole + b" ")
        with pytest.raises(StateError, match=f"{name}: is not what it was"):
            prepare_run(wanted, run_dir)
        (run_dir / name).write_bytes(whole)
    resolved = run_dir / "resolved.yaml"
    whole = resolved.read_bytes()
    edited = RunDirectory(run_dir).config.model_copy(
        update={"run": wanted.run.model_copy(update={"seed": 77})}
    )
    resolved.write_text(edited.to_yaml())
    with pytest.raises(StateError, match=r"resolved\.yaml: was edited: .* run\.seed: \d+ -> 77"):
        prepare_run(config(corpus, "run.seed=77"), run_dir)
    resolved.write_bytes(whole)
    said: list[str] = []
    prepare_run(wanted, run_dir, said.append)
    assert said == [ALL_TRAINED]
    # What may change may also be edited; a file that is deleted is made anew.
    resolved.write_bytes(whole.replace(b"steps: 2", b"steps: 3"))
    (run_dir / "table.json").unlink()
    prepare_run(wanted, run_dir, said.append)
    assert RunDirectory(run_dir).config.train.steps == 2
    (run_dir / "inputs.json").unlink()
    said.clear()
    prepare_run(wanted, run_dir, said.append)
    assert len(said) == 2 and "has no checksums of its inputs" in said[0]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        # A and B of query (r=4) and value (r=2) in two layers: 2 * (4 + 2) * (16 + 16).
        (
            "adapter={r: 4, targets: [q_proj, v_proj], rank_pattern: {v_proj: 2}}",
            "trains 384 of 13,808 parameters (2.8%): adapter r=2 to 4",
        ),
        # Embedding and head have 257 rows of 16.
        (
            "train.freeze=['embed', 'lm_head']",
            "trains 5,200 of 13,424 parameters (39%): train.freeze",
        ),
    ],
)
def test_the_start_says_what_is_trained(
    tmp_path: Path, corpus: str, override: str, line: str
) -> None:
    lines: list[str] = []
    prepare_run(config(corpus, override), tmp_path / "run", lines.append)
    assert lines[-1] == line


def test_edits_before_the_first_start_mean_new_inputs(tmp_path: Path, corpus: str) -> None:
    run_dir = tmp_path / "run"
    prepare_run(config(corpus), run_dir)
    longer = config(corpus, "data.sequence_length=32")
    resolved = run_dir / "resolved.yaml"
    resolved.write_text(resolved.read_text().replace("sequence_length: 16", "sequence_length: 32"))
    said: list[str] = []
    prepare_run(longer, run_dir, said.append)
    assert said == ["preparing the model's block table and the data", ALL_TRAINED]


def test_a_tools_progress_is_passed_on_and_its_last_words_are_the_error(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(
        "import sys; print('half'); print('whole'); print('noise', file=sys.stderr);"
        "sys.stderr.write('penstock: no room\\n'); sys.exit(int(sys.argv[1]))"
    )
    said: list[str] = []
    log = tmp_path / "log.txt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(CapacityError, match=r"^no room$"):
            run_tool("tool", "3", log=log, progress=said.append, starter=Spawning())
        run_tool("tool", "0", log=log, starter=Spawning())
    assert said == ["half", "whole"]


def test_a_tool_with_a_traceback_has_no_complaint_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(
        "import sys; sys.stderr.write('penstock: model: building it: it was ended\\n'); {}['key']"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(
            PenstockError, match=r"tool exited with code 1: KeyError: 'key' .*log\.txt"
        ):
            run_tool("tool", log=tmp_path / "log.txt", starter=Spawning())


def test_an_interrupt_while_the_watchdog_starts_ends_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread without an end would keep the interpreter alive for ever."""
    (tmp_path / "tool.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started: list[tool._Watchdog] = []

    class Interrupted(tool._Watchdog):
        def start(self) -> None:
            super().start()
            started.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(tool, "_Watchdog", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_tool("tool", starter=Spawning())
    assert not started[0].is_alive()


def test_a_stopped_tool_is_replaced(tmp_path: Path) -> None:
    """A signal stops the first process for ever, before the process has said a word."""
    marker = tmp_path / "stopped"
    (tmp_path / "tool.py").write_text(
        "import os, pathlib, signal, sys\n"
        "marker = pathlib.Path(sys.argv[1])\n"
        "if not marker.exists():\n"
        "    marker.write_text(str(os.getpid()))\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    sys.exit(1)\n"
        "print('done')\n"
    )
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        run_tool("tool", str(marker), progress=lines.append, starter=Spawning(), silence_s=0.3)
    assert lines == [
        "a process was stopped for 0.3 s: it is killed and started again",
        "done",
    ]
    assert not Path(f"/proc/{marker.read_text()}").exists()


def test_a_tool_dies_with_its_parent_and_holds_its_lock_until_then(tmp_path: Path) -> None:
    """So a second preparation cannot overlap with what a killed ``penstock train`` started."""
    (tmp_path / "tool.py").write_text(
        "import os, sys, time; from pathlib import Path\n"
        "from penstock.protocol.run.process import tool_main\n"
        "def work():\n"
        "    Path(sys.argv[1], 'new').write_text(str(os.getpid()))\n"
        "    Path(sys.argv[1], 'new').rename(Path(sys.argv[1], 'pid'))\n"
        "    time.sleep(120)\n"
        "tool_main(work, Path(sys.argv[1]), int(sys.argv[-1]))\n"
    )
    program = (
        "import sys; from pathlib import Path\n"
        "from penstock.daemons.node.run_lock import RunLock, prepare_lock_path\n"
        "from penstock.daemons.node.preparing.tool import run_tool\n"
        "run = Path(sys.argv[1])\n"
        "with RunLock.acquire(prepare_lock_path(run), wait_s=5.0) as lock:\n"
        "    run_tool('tool', str(run), log=run / 'log', keeps=(lock.descriptor,))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, env=environment) as parent:
        deadline_s = time.monotonic() + 600.0
        while not (tmp_path / "pid").exists():
            assert parent.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.01)
        tool = int((tmp_path / "pid").read_text())
        with pytest.raises(ConfigError, match=f"in use by process {parent.pid}"):
            RunLock.acquire(prepare_lock_path(tmp_path), wait_s=0.0)
        parent.kill()
        parent.wait()
    with RunLock.acquire(prepare_lock_path(tmp_path), wait_s=60.0):
        ends_s = time.monotonic() + 600.0  # a dying process gives its locks up a moment earlier
        while start_ticks(tool) is not None:
            assert time.monotonic() < ends_s, "the lock was free while the tool lived"
            time.sleep(0.01)


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_a_resume_with_nothing_changed_rewrites_nothing(
    tmp_path: Path, corpus: str, schedule: str
) -> None:
    run_dir = tmp_path / "run"

    def files() -> dict[str, tuple[int, int, bytes]]:
        found = (path for path in run_dir.rglob("*") if path.is_file())
        found = (path for path in found if not path.name.startswith(".lock"))
        return {
            str(path): (path.stat().st_mtime_ns, path.stat().st_ino, path.read_bytes())
            for path in found
        }

    wish = config(corpus, f"schedule={schedule}", "train.steps=9")
    prepare_run(wish, run_dir)
    before = files()
    assert {Path(name).name for name in before} >= {"resolved.yaml", "plan.json", "train.bin"}
    (run_dir / "journal.sqlite").touch()
    said: list[str] = []
    prepare_run(wish, run_dir, said.append)
    (run_dir / "journal.sqlite").unlink()
    assert files() == before
    (run_dir / "journal.sqlite").touch()
    assert [line for line in said if "auto keeps" not in line] == [ALL_TRAINED]
    prepare_run(config(corpus, f"schedule={schedule}", "train.steps=8"), run_dir)
    after = files()
    names = {Path(name).name for name in before if after[name] != before[name]}
    assert names == {"resolved.yaml", "inputs.json"}


def test_a_model_folders_tokenizer_is_named_and_kept(tmp_path: Path, corpus: str) -> None:
    """``resolved.yaml`` says which; data made with another one (the default was once bytes) keep
    it.
    """
    save_model(tmp_path / "model", "gpt2", n_embd=16, n_layer=1, n_head=2, n_positions=64)
    own = str(tmp_path / "model")
    base = {**BASE, "model": {"path": own}}
    plain = parse_config(apply_overrides(base, (corpus, "train.global_batch=1")))
    bytes_asked = parse_config(
        apply_overrides(base, (corpus, "train.global_batch=1", "data.tokenizer=byte"))
    )
    said: list[str] = []
    found = prepare_run(plain, tmp_path / "own", said.append)
    assert said[0] == f"tokenizer: the model's own, {own}"
    assert found.config.data.tokenizer == own
    said.clear()
    assert prepare_run(plain, tmp_path / "own", said.append).config.data.tokenizer == own
    assert prepare_run(found.config, tmp_path / "own", said.append).config == found.config
    usual = ("trains all ", "preparing the model's block table")
    assert [line for line in said if not line.startswith(usual)] == []

    prepare_run(bytes_asked, tmp_path / "bytes")
    (tmp_path / "bytes" / "journal.sqlite").touch()
    before = (tmp_path / "bytes/data/train.bin").read_bytes()
    kept = prepare_run(plain, tmp_path / "bytes", said.append)
    assert kept.config.data.tokenizer == "byte"
    assert "tokenizer: byte, as the run's data were prepared with" in said
    assert (tmp_path / "bytes/data/train.bin").read_bytes() == before
    with pytest.raises(ConfigError, match=r"data\.tokenizer: .* -> 'byte'"):
        (tmp_path / "own" / "journal.sqlite").touch()
        prepare_run(bytes_asked, tmp_path / "own")


@pytest.mark.parametrize(("mode", "warnings"), [(0o777, 1), (0o1777, 0), (0o775, 0)])
def test_a_run_directory_that_every_user_may_change_is_named(
    mode: int, warnings: int, tmp_path: Path
) -> None:
    lines: list[str] = []
    tmp_path.chmod(mode)
    warn_if_open(tmp_path, lines.append)
    assert len(lines) == warnings
    assert all("chmod o-w" in line for line in lines)


@pytest.mark.parametrize("started", [True, False])
def test_a_run_from_before_there_was_a_bos_keeps_its_tokens(tmp_path: Path, started: bool) -> None:
    """Its configuration lacks the keys; a new run of the same text has a bos by default."""
    save_model(tmp_path / "model", "gpt2", n_embd=16, n_layer=1, n_head=2, n_positions=64)
    tokenizer = Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 300)]
    )
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    (tmp_path / "text.txt").write_text("the quick brown fox " * 100)
    base = {**BASE, "model": {"path": str(tmp_path / "model")}}
    asked = (f"data.path={tmp_path / 'text.txt'}", "train.global_batch=1")
    plain = parse_config(apply_overrides(base, asked))
    run_dir, tokens = tmp_path / "run", tmp_path / "run/data/train.bin"
    prepare_run(parse_config(apply_overrides(base, (*asked, "data.bos=false"))), run_dir)
    written = yaml.safe_load((run_dir / "resolved.yaml").read_text())
    del written["data"]["bos"], written["data"]["eos"]
    (run_dir / "resolved.yaml").write_text(yaml.safe_dump(written))
    (run_dir / "inputs.json").unlink()
    if started:
        (run_dir / "journal.sqlite").touch()
    before, made_ns = tokens.read_bytes(), tokens.stat().st_mtime_ns
    for steps in (2, 9):
        directory = prepare_run(
            parse_config(apply_overrides(base, (*asked, f"train.steps={steps}"))), run_dir
        )
        assert directory.config.data.bos is False
        assert (tokens.read_bytes(), tokens.stat().st_mtime_ns) == (before, made_ns)
    assert load_config(run_dir / "resolved.yaml").data.bos is False
    prepare_run(plain, tmp_path / "new")
    assert (tmp_path / "new/data/train.bin").read_bytes()[:2] == (300).to_bytes(2, "little")


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path.*absent"):
        prepare_run(config(f"data.path={tmp_path / 'absent.txt'}"), tmp_path / "run")


def test_cores_that_are_not_there_are_refused_before_anything_is_written(
    tmp_path: Path, corpus: str
) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.cores = 4095: 4095 not on this machine"):
        prepare_run(config(corpus, "optimizer.cores=[4095]"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_resume_of_an_older_run_says_which_weights_a_new_one_would_take(
    tmp_path: Path, corpus: str
) -> None:
    """Once; then it is on record that the run keeps its files."""
    folder, run_dir = tmp_path / "model", tmp_path / "run"
    save_model(folder, "gpt2", n_embd=16, n_layer=1, n_head=2, n_positions=64)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    named = {**fields, "transformers_weights": "weights.safetensors"}
    (folder / "config.json").write_text(json.dumps(named))
    base = {**BASE, "model": {"path": str(folder)}}
    plain = parse_config(apply_overrides(base, (corpus, "train.global_batch=1")))
    prepare_run(plain, run_dir)
    (run_dir / "journal.sqlite").touch()
    meta = run_dir / "model" / "meta.json"
    record = json.loads(meta.read_text())
    assert record.pop("weight_files") == ["weights.safetensors"]
    meta.write_text(json.dumps(record))
    table = (run_dir / "table.json").read_bytes()
    save_model(folder, "gpt2", seed=1, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    config = json.loads((run_dir / "model/config.json").read_text())
    assert config["transformers_weights"] == "weights.safetensors"
    (folder / "a.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    lines: list[str] = []
    prepare_run(plain, run_dir, lines.append)
    (line,) = [entry for entry in lines if entry.startswith("model.path")]
    assert line == (
        "model.path: this run keeps to a.safetensors, model.safetensors, weights.safetensors; a"
        " new one would read weights.safetensors, as transformers does"
    )
    assert (run_dir / "table.json").read_bytes() == table
    lines.clear()
    prepare_run(plain, run_dir, lines.append)
    assert lines == ["trains all 9,456 parameters"]

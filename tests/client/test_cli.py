"""The command line as a user meets it: help, bad input, exit codes. Nothing is started for real."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from penstock.client.cli import bare_settings
from penstock.client.inference.tools import to_text
from penstock.client.main import app
from penstock.daemons.node.run_lock import RunLock, train_lock_path
from penstock.protocol.security.token import ensure_token

ROOT = Path(__file__).parents[2]
MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def penstock(*arguments: str, cwd: Path = ROOT) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of a command, in this process: it has imported torch once."""
    with contextlib.chdir(cwd):
        done = CliRunner(env={"COLUMNS": "100"}).invoke(app, arguments)
    return done.exit_code, done.stdout, done.stderr


def process(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of a process of its own, as the shell starts it."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock.client.main", *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "COLUMNS": "100"},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A small valid configuration."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    fields: dict[str, Any] = {
        "run": {"name": "cli", "dir": str(tmp_path / "run")},
        "model": {"hf": MODEL},
        "data": {"path": str(text), "sequence_length": 16},
        "train": {"steps": 2, "global_batch": 4},
        "schedule": {"scheme": "spipe"},
        "cluster": {"workers": 2},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_help_lists_every_command_once_but_processes_of_a_node() -> None:
    code, out, _ = process("--help")
    assert code == 0
    processes = "memoryd optimizerd fetchd observerd metricsd schedulerd worker".split()
    lines = [line.split()[0] for line in out.splitlines() if line.startswith("  ") and line.strip()]
    counts = {name: lines.count(name) for name in COMMANDS}
    assert counts == {name: int(name not in processes) for name in COMMANDS}
    assert "130 interrupted" in out and "penstock init" in out
    assert "--install-completion" in out


def test_tune_names_only_its_own_options() -> None:
    _, out, _ = penstock("tune", "--help")
    assert "--scheme." not in out and "Without one, give --model and --gpu" in " ".join(out.split())


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_itself(command: str) -> None:
    code, out, err = penstock(command, "--help")
    assert (code, err) == (0, "")
    assert "Usage: penstock" in out or "Usage: python -m" in out


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.stepz=3", ("train.stepz", "unknown key", "steps")),
        ("train.steps=0", ("train.steps", "0")),
        ("train.micro_batch=3", ("global_batch 4", "micro_batch 3")),
        ("nonsense", ("--set", "section.key=value")),
        ("optimizer.lr=fast", ("optimizer.lr", "fast")),
        ("cluster.device=tpu", ("cluster.device", "tpu")),
        ("memory.host_limit=lots", ("memory.host_limit", "lots", "20G")),
        ("model.path=/tmp", ("model.hf", "model.path")),
    ],
)
def test_bad_settings_are_named(config: Path, setting: str, words: tuple[str, ...]) -> None:
    code, out, err = penstock("train", str(config), "--set", setting)
    assert (code, out) == (2, "")
    assert err.startswith("penstock: ") and err.count("\n") == 1
    assert [word for word in words if word not in err] == []
    assert not (config.parent / "run").exists()


def test_versions() -> None:
    code, out, err = process("--version")
    assert (code, err) == (0, "")
    first, second = out.splitlines()
    assert first == f"penstock {version('penstock')}"
    assert f"torch {version('torch')}" in second and platform.python_version() in second


@pytest.mark.parametrize("command", ["train", "plan", "profile", "tune"])
@pytest.mark.parametrize(
    "words", [("train.steps=5",), ("--train.steps=5",), ("--train.steps", "5"), ("steps=5",)]
)
def test_settings_without_set_say_what_was_meant(
    config: Path, command: str, words: tuple[str, ...]
) -> None:
    done = CliRunner().invoke(app, [command, str(config), *words])
    assert done.exit_code == 2
    assert "write --set train.steps=5" in done.stderr


def test_a_commands_own_option_is_none_of_the_configuration(tmp_path: Path) -> None:
    """``run.seed`` is a key; ``--seed=8`` was taken for it."""
    missing = tmp_path / "missing.yaml"
    done = CliRunner().invoke(app, ["chaos", str(missing), "--seed=8"])
    assert done.exit_code == 2
    assert "--set" not in done.stderr and "missing.yaml" in done.stderr


def test_only_bare_settings_are_taken_for_some() -> None:
    words = ["a.yaml", "--set", "train.steps=5", "--set=run.seed=1", "--run-dir", "x.y=z", "b=1"]
    assert bare_settings(words) == []
    assert bare_settings(["lr=3", "train.freeze=[a.b]"]) == [
        "--set optimizer.lr=3",
        "--set train.freeze=[a.b]",
    ]
    done = CliRunner().invoke(app, ["status", "train.steps=5"])
    assert done.exit_code == 2 and "--set" not in done.stderr


def test_an_example_is_written_and_not_over_a_file(tmp_path: Path) -> None:
    code, _, err = penstock("train", "examples/tiny.yaml", cwd=tmp_path)
    assert code == 2 and "penstock init --example tiny" in err
    code, out, err = penstock("init", cwd=tmp_path)
    assert (code, err) == (0, "") and "penstock train tiny.yaml" in out
    ours = ROOT / "examples" / "tiny.yaml"
    _, _, example = ours.read_bytes().partition(b"\n")  # without the line for editors
    assert (tmp_path / "tiny.yaml").read_bytes() == example
    code, _, err = penstock("init", cwd=tmp_path)
    assert code == 2 and "tiny.yaml: exists" in err and "--out" in err
    code, _, err = penstock("init", "--example", "huge", cwd=tmp_path)
    assert code == 2 and "accepted are adapters, chat, emulated, pretrain, tiny" in err
    code, _, err = penstock("init", "--out", "no/folder.yaml", cwd=tmp_path)
    assert code == 2 and err.count("folder.yaml") == 1 and "No such file" in err


def test_files_are_named_once(config: Path, tmp_path: Path) -> None:
    code, _, err = process("train", str(tmp_path / "absent.yaml"))
    assert code == 2 and err.count("absent.yaml") == 1
    code, _, err = penstock("plan", str(config), "--set", f"schedule.file={tmp_path}/none.json")
    assert code == 2 and err.count("none.json") == 1
    code, _, err = penstock("plan", str(config), "--set", "cluster.device=emulated:V100")
    assert code == 2 and err.count("V100") == 1 and "--costs" not in err


def test_scheme_names_may_be_written_large() -> None:
    code, out, err = penstock("plan", "--scheme", "1F1B", "--devices", "2")
    assert code == 0, err
    assert out.startswith("1f1b: 2 devices")


def test_missing_file_and_no_yaml(tmp_path: Path) -> None:
    code, _, err = penstock("train", str(tmp_path / "absent.yaml"))
    assert code == 2 and "absent.yaml" in err
    (tmp_path / "odd.yaml").write_text("a: [")
    code, _, err = penstock("plan", str(tmp_path / "odd.yaml"))
    assert code == 2 and "not valid YAML" in err


def test_plan_writes_json_plan_and_picture(config: Path, tmp_path: Path) -> None:
    plan, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    code, out, err = penstock(
        "plan", str(config), "--json", "--out", str(plan), "--svg", str(picture)
    )
    assert code == 0, err
    report = json.loads(out)
    assert report["scheme"] == "spipe"
    assert report["makespan_seconds"] > 0
    assert {need["what"] for need in report["needs"]} >= {"/dev/shm", "memory.host_limit"}
    assert json.loads(plan.read_text())["num_devices"] == 2
    assert picture.read_text().startswith("<svg")
    assert not (tmp_path / "run").exists(), "plan leaves no run directory"


def test_plan_refuses_more_stages_than_blocks(config: Path) -> None:
    code, _, err = penstock("plan", str(config), "--set", "schedule.forward_stages=50")
    assert code == 2
    assert "schedule.forward_stages = 50" in err and "4 blocks" in err


def test_train_refuses_short_memory_with_the_table(config: Path) -> None:
    code, _, err = penstock("train", str(config), "--set", "memory.host_limit=1M")
    assert code == 3
    assert "memory.host_limit" in err and "<-- short" in err


def test_train_refuses_a_run_that_is_in_use(config: Path) -> None:
    with RunLock.acquire(train_lock_path(config.parent / "run"), wait_s=0.0):
        code, _, err = penstock("train", str(config))
    assert code == 2
    assert f"in use by process {os.getpid()}" in err


@pytest.mark.parametrize("command", ["status", "watch", "pause", "resume", "snapshot", "stop"])
def test_control_commands_without_a_run(command: str, tmp_path: Path) -> None:
    code, _, err = penstock(command)
    assert (code, "give the directory of the run" in err) == (2, True)
    code, _, err = penstock(command, "--run-dir", str(tmp_path))
    assert code == 2 and "no run is active" in err


def test_status_of_nobody_at_an_endpoint(tmp_path: Path) -> None:
    nobody = ("status", "--endpoint", "127.0.0.1:1")
    code, _, err = penstock(*nobody)
    assert code == 2 and "--keys DIR" in err
    code, _, err = penstock(*nobody, "--keys", str(tmp_path))
    assert code == 2 and "neither tls.pem" in err
    ensure_token(tmp_path)
    code, _, err = penstock(*nobody, "--keys", str(tmp_path))
    assert code == 4 and "127.0.0.1:1" in err


def test_single_process_without_a_run(tmp_path: Path) -> None:
    config = str(tmp_path / "resolved.yaml")
    code, _, err = process(
        "memoryd", "--config", config, "--node", "a", "--scheduler", "127.0.0.1:1"
    )
    assert code == 2 and "resolved.yaml" in err


def test_nodes_without_the_run_directory_say_that_it_is_shared(
    config: Path, tmp_path: Path
) -> None:
    shared = "all nodes of a run use one run directory, on a file system that they share"
    run = tmp_path / "run"
    for arguments in (
        ("node", "--config", str(run / "resolved.yaml"), "--node", "b"),
        ("memoryd", "--config", str(run / "resolved.yaml"), "--node", "b", "--scheduler", "x:1"),
    ):
        code, out, err = process(*arguments)
        assert (code, out) == (2, "")
        assert f"{run / 'resolved.yaml'}: does not exist here; {shared}" in err
    fields = yaml.safe_load(config.read_text())
    fields["cluster"] |= {"nodes": [{"name": "a"}, {"name": "b"}], "start_timeout_s": 0.3}
    config.write_text(yaml.safe_dump(fields))
    code, _, err = process("node", "--config", str(config), "--node", "b")
    assert code == 4 and "node a, which prepares the run and hosts the scheduler, was not" in err
    assert not run.exists()
    # A copy of resolved.yaml alone is not the run.
    run.mkdir()
    (run / "resolved.yaml").write_text(config.read_text())
    code, _, err = process("node", "--config", str(run / "resolved.yaml"), "--node", "b")
    assert code == 2 and shared in err


def test_every_option_of_every_command_has_help() -> None:
    silent = [
        f"{name} {option.opts[0]}"
        for name, command in COMMANDS.items()
        for option in command.params
        if not getattr(option, "hidden", False) and not getattr(option, "help", None)
    ]
    assert silent == []


def test_export_without_a_run_or_a_state(tmp_path: Path) -> None:
    code, _, err = penstock("export", str(tmp_path), str(tmp_path / "out"))
    assert code == 2 and "run.json" in err
    (tmp_path / "run.json").write_text("{}")
    code, _, err = penstock("export", str(tmp_path), str(tmp_path / "out"))
    assert code == 2 and "no saved state" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--format", "gguf"), "--format gguf: accepted are hf, peft, dcp"),
        (("--dtype", "int8"), "--dtype int8: accepted are fp32, bf16, fp16"),
        (("--format", "peft", "--whole"), "an adapter has no other parts"),
        (("--whole", "--dtype", "bf16"), "tensors keep the types of the folder"),
        (("--whole", "--verify"), "compares the text model alone"),
        (("--format", "universal", "--dtype", "bf16"), "has fp32 masters; leave --dtype out"),
        (("--whole", "--format", "dcp"), "writes the trained model; leave --whole out"),
        (("--dry-run", "--verify"), "writes nothing; leave --verify out"),
        (("--names", "megatron"), "--names megatron: accepted are transformers, torchtitan"),
        (("--names", "torchtitan"), "torchtitan loads DCP; give --format dcp"),
    ],
)
def test_exports_that_do_not_exist(options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    code, _, err = penstock("export", str(tmp_path), str(tmp_path / "out"), *options)
    assert code == 2 and words in " ".join(err.split())


def test_help_imports_no_torch() -> None:
    program = (
        "import sys; from penstock.client import main; from typer.testing import CliRunner;"
        "assert CliRunner().invoke(main.app, ['--help']).exit_code == 0;"
        "sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=500).returncode == 0


@pytest.mark.parametrize("command", ["status", "watch", "pause", "resume", "snapshot", "stop"])
def test_a_run_is_an_argument_or_an_option(command: str, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    positional, option = penstock(command, run), penstock(command, "--run-dir", run)
    assert positional == option and positional[0] == 2 and run in positional[2]
    assert penstock(command, run, "--run-dir", f"{run}-2")[2] == (
        f"penstock: {run} and --run-dir {run}-2: two runs; give one of them\n"
    )
    _, _, err = penstock(command)
    assert "such as runs/tiny (penstock list shows the runs of this machine)" in err
    assert "RUN" in penstock(command, "--help")[1].split("Arguments:")[1]


def test_a_second_configuration_is_no_run(config: Path) -> None:
    expected = f"penstock: {config}: expected the directory of the run; give one configuration\n"
    assert penstock("train", str(config), str(config)) == (2, "", expected)


def test_a_directory_is_examined_as_a_run(tmp_path: Path) -> None:
    report = json.loads(penstock("doctor", str(tmp_path), "--json")[1])
    assert report == json.loads(penstock("doctor", "--run-dir", str(tmp_path), "--json")[1])


def test_an_import_needs_a_run(config: Path, tmp_path: Path) -> None:
    code, _, err = penstock("import", str(tmp_path), "--config", str(config))
    assert (code, err) == (
        2,
        "penstock: RUN: missing; name the directory of the new run, such as runs/mine\n",
    )


def test_generation_needs_no_number_of_tokens(tmp_path: Path) -> None:
    code, _, err = penstock("generate", str(tmp_path), "--prompt", "x")
    assert code == 2 and "is no run directory" in err


def test_an_evaluation_has_counts_beside_its_means() -> None:
    result = {"loss": 2.5, "perplexity": 12.2, "token_accuracy": 0.25, "counted_tokens": 1200}
    assert to_text({**result, "rows": 7, "step": None}).splitlines() == [
        "loss            2.5 (mean over 1,200 tokens)",
        "perplexity      12.2",
        "token_accuracy  0.25 (300 of 1,200 tokens)",
        "counted_tokens  1,200",
        "rows            7",
    ]


def test_no_line_of_grpc_is_on_the_terminal(tmp_path: Path) -> None:
    """gRPC would log that the port is in use."""
    program = """
import socket, contextlib, concurrent.futures, penstock, grpc
taken = socket.create_server(("127.0.0.1", 0))
pool = concurrent.futures.ThreadPoolExecutor(1)
server = grpc.server(pool, options=(("grpc.so_reuseport", 0),))
with contextlib.suppress(RuntimeError):
    server.add_insecure_port(f"127.0.0.1:{taken.getsockname()[1]}")
"""
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")

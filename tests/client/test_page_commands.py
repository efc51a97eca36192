"""Commands in the code blocks of the pages: each runs here, or has a reason why it does not.

Quick commands run in the gate, commands that need a trained run in ``make soak``. The walk over two
machines is :mod:`tests.integration.test_machines_page`.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.site.commands import markdown
from tests.client.test_convert import FILES
from tests.client.test_options import PAGES

ROOT = Path(__file__).parents[2]
PENSTOCK = Path(sys.executable).with_name("penstock")
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:\$ )?((?:penstock|make|python3?|pip|sbatch|systemctl|\S+/python) .*)")
LANGUAGES = {"", "sh", "bash", "text"}

pytestmark = pytest.mark.xdist_group("pages")
"""Later commands of a page read files of earlier ones."""

QUICK = (
    "penstock init",
    "penstock convert",
    "penstock estimate models/",
    "penstock plan --scheme",
    "penstock simulate plan.json",
    "penstock keys make keys",
    "penstock keys pack keys b",
    "penstock keys show keys",
    "penstock keys renew keys",
    "penstock deploy kubernetes",
    "penstock deploy monitoring",
    "penstock deploy slurm",
)
"""Starts of the commands that need no run: the gate executes them in the order of the pages."""
SLOW = (
    "penstock train tiny.yaml",
    "penstock train examples/tiny.yaml",
    "penstock status runs/tiny",
    "penstock report runs/tiny",
    "penstock export runs/tiny",
    "penstock export RUN --format hf OUT",
    "penstock trace RUN",
    "penstock profile examples/tiny.yaml",
    "penstock tune",
    "penstock train tuned.yaml",
    "penstock chaos tiny.yaml --set",
)
"""Starts of the commands that ``make soak`` executes, in this order, after a training."""
ELSEWHERE = {
    "penstock init --model": "tests/client/test_init.py",
    "penstock data mine.yaml": "the same",
    "penstock train mine.yaml": "the same",
    "penstock data chat.yaml": "tests/client/test_init.py",
    "penstock train chat.yaml": "the same",
    "penstock train finetune.yaml": "needs weights of the Hub; tests/integration/test_exports.py",
    "penstock data finetune.yaml": "the same",
    "penstock export runs/mine": "the same",
    "python -c": "the same",
    "penstock generate": "tests/system/test_inference.py",
    "penstock eval": "tests/system/test_inference.py",
    "penstock train c.yaml": "needs NIXL",
    "penstock train sft.yaml": "tests/system/test_recipe_runs.py",
    "penstock train dpo.yaml": "the same",
    "penstock export runs/sft": "the same",
    "penstock export runs/dpo": "the same",
    "penstock data lora.yaml": "the same, with the next ones",
    "penstock train lora.yaml": "the same",
    "penstock export runs/lora": "the same",
    "penstock data long.yaml": "needs long documents; tests/client/test_data_command.py",
    "penstock train long.yaml": "needs a GPU",
    "penstock train trainer.yaml": "tests/system/test_trainer_imports.py",
    "penstock estimate models/Qwen2.5-7B-Instruct": "tests/client/test_estimate.py",
    "penstock watch": "tests/client/test_screen.py",
    "penstock keys make keys --config two.yaml": "the keys of two-machines.yaml are made",
    "penstock import checkpoint-2000": "tests/system/test_trainer_imports.py",
    "penstock inspect checkpoint-2000": "the same",
    "penstock export RUN --format hf OUT --whole": "tests/worker/test_composites.py",
    "penstock chaos tiny.yaml --minutes": "takes 30 minutes; --faults runs",
    "penstock chaos tiny.yaml --reference": "the same",
    "pip install": "needs a package index",
    "python3 -m venv": "the same",
    "make ": "is a gate, a measurement or an installation of its own",
    "python -m tests.simulation": "tests/simulation",
    "python3 -m bench.gpu": "tests/bench/test_gpu_ladder.py, and a GPU",
    ".venv/bin/python": "tests/streams, and a GPU",
    "penstock deploy systemd": "tests/deploy/test_systemd_units.py",
    "sbatch": "tests/integration/test_slurm.py",
    "systemctl": "tests/integration/test_systemd.py",
}
"""Starts of the commands that no test here executes, with the reason or the place of their test."""
PLACES = {
    "RUN": "runs/tiny",
    "--open": "",
    "--faults 50": "--faults 2",
    "train.steps=300": "train.steps=30",
    "deploy kubernetes --config run.yaml": "deploy kubernetes --config pods.yaml",
}
"""Parts of commands, and their replacements in the test's folder."""


def commands() -> Iterator[tuple[str, str]]:
    """Yields page and command of every command line in a code block, without its comment."""
    for page in PAGES:
        if page.name == "COMMANDS.md":
            continue
        for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
            if block[2] not in LANGUAGES:
                continue
            for line in block[3].replace("\\\n", " ").splitlines():
                if match := COMMAND.match(line):
                    yield page.name, re.split(r"\s+#|\s{2,}\(|\s+\|\s", match[1])[0].strip()


ALL = tuple(dict.fromkeys(text for _, text in commands()))


def of(starts: tuple[str, ...]) -> list[str]:
    """Returns the commands with one of the starts, in the order of the starts."""
    here = [text for text in ALL if not text.startswith(tuple(ELSEWHERE))]
    return [text for start in starts for text in here if text.startswith(start)]


def execute(text: str, folder: Path) -> str:
    """Runs a command as a user of the page does; returns its output."""
    for part, replacement in PLACES.items():
        text = re.sub(rf"(?<!\S){re.escape(part)}(?!\S)", replacement, text)
    done = subprocess.run(
        [PENSTOCK, *shlex.split(text)[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, f"{text}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the files that the pages name."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "examples").symlink_to(ROOT / "examples")
    machines = (ROOT / "examples" / "two-machines.yaml").read_text()
    (folder / "run.yaml").write_text(machines)
    (folder / "pods.yaml").write_text(re.sub(r", host: \w+", "", machines))
    (folder / "tiny.yaml").write_text((ROOT / "examples" / "tiny.yaml").read_text())
    for tool, name in (("trl", "sft"), ("llamafactory", "train"), ("axolotl", "config")):
        text = re.sub(r"(?m)^val_(set_)?size: .*\n", "", FILES[tool])  # exit code 0
        (folder / f"{name}.yaml").write_text(text)
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "target_modules": "all-linear"}'
    )
    model = folder / "models" / "Qwen3-0.6B-Base"
    model.mkdir(parents=True)
    shape = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 256,
        "torch_dtype": "float32",
    }
    (model / "config.json").write_text(json.dumps(shape))
    return folder


def test_every_command_of_the_pages_has_a_place() -> None:
    starts = (*QUICK, *SLOW, *ELSEWHERE)
    lost = [f"{page}: {text}" for page, text in commands() if not text.startswith(starts)]
    assert not lost, lost
    unused = [start for start in starts if not any(text.startswith(start) for text in ALL)]
    assert not unused, unused


@pytest.mark.parametrize("text", of(QUICK))
def test_quick_commands_run(text: str, folder: Path) -> None:
    example = folder / "tiny.yaml"
    content = example.read_bytes()
    if "init" in text:
        example.unlink()
    execute(text, folder)
    example.write_bytes(content)  # other commands need it, and run in any order


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """Returns the folder with two finished runs, of six traced steps each."""
    settings = ("train.steps=6", "observability.trace=true", "data.sequence_length=64")
    flags = " ".join(f"--set {setting}" for setting in settings)
    for name in ("tiny", "other"):
        execute(f"penstock train examples/tiny.yaml {flags} --run-dir runs/{name}", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("text", of(SLOW))
def test_commands_of_a_run_run(text: str, trained: Path) -> None:
    if text.startswith("penstock train"):
        text += " --set train.steps=2 --run-dir runs/more"
    execute(text, trained)


def test_the_page_of_commands_is_current() -> None:
    written = (ROOT / "docs" / "COMMANDS.md").read_text(encoding="utf-8")
    assert written == markdown(), "docs/COMMANDS.md is stale: make docs"

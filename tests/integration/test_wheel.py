"""The first hour of a user: the wheel in an empty environment, and a model that was fine-tuned on a
file of conversations.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import parse_wheel_filename

from tests.data.sft import make

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
NEW_TOKENS = 12
MESSAGES = [{"role": "user", "content": "river stone"}]
ANSWER = f"""
import json
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("out")
tokenizer = AutoTokenizer.from_pretrained("out")
inputs = tokenizer.apply_chat_template(
    {MESSAGES!r}, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
ids = model.generate(**inputs, max_new_tokens={NEW_TOKENS}, do_sample=False)[0]
print(json.dumps(ids[inputs["input_ids"].shape[1] :].tolist()))
"""
"""Generates with the export by transformers alone."""
COMPILERS = ("c++", "g++", "clang++", "cc", "gcc", "clang", "make", "cmake", "ninja")
PROCESSORS = {"qemu64": "portable", "Nehalem": "portable", "Haswell": "avx2"}
"""Emulated processors, from the first x86-64 on, and the kernels that the wheel runs on each."""
SWEEPS = ROOT / "tests" / "native" / "sweeps.py"


def commands_of_readme(start: str) -> list[str]:
    """The commands of the block of README that begins so, in order."""
    text = (ROOT / "README.md").read_text()
    block = re.search(rf"```\n(?:#[^\n]*\n)?({start}.*?)```", text, re.DOTALL)
    assert block is not None
    return [line for line in block[1].splitlines() if not line.startswith("#")]


@pytest.fixture(name="later", scope="module")
def _later() -> list[str]:
    """Pythons of this machine that the wheel for the stable ABI is for."""
    names = [name for minor in (12, 13, 14) if (name := shutil.which(f"python3.{minor}"))]
    return [
        name for name in names if not subprocess.run([name, "-V"], capture_output=True).returncode
    ]


@pytest.fixture(name="dist", scope="module")
def _dist(later: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheels and the archive that ``make wheel`` makes."""
    folder = tmp_path_factory.mktemp("dist")
    pythons = " ".join([sys.executable, *later[:1]])
    words = ["make", "wheel", f"DIST={folder}", f"PYTHONS={pythons}"]
    subprocess.run(words, cwd=ROOT, check=True, timeout=1800.0)
    for file in folder.iterdir():
        sys.stdout.write(f"\n{file.name}: {file.stat().st_size / 1e6:.1f} MB\n")
    return folder


@pytest.fixture(name="wheel", scope="module")
def _wheel(dist: Path) -> Path:
    """The wheel for the Python of the tests."""
    tag = f"cp3{sys.version_info.minor}" if sys.version_info < (3, 12) else "cp312"
    (wheel,) = dist.glob(f"penstock-*-{tag}-*.whl")
    return wheel


@pytest.fixture(name="bin", scope="module")
def _bin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment that has the wheel, installed without a compiler, and what pip
    installs with it.
    """
    folder = tmp_path_factory.mktemp("wheel")
    commands = folder / "env" / "bin"
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True, timeout=600.0)
    torch = os.environ.get("TORCH", "torch==2.13.0")
    for packages in ([torch], [wheel, torch]):
        start = time.monotonic()
        ran(folder, commands / "pip", "install", "--quiet", "--only-binary", ":all:", *packages)
        sys.stdout.write(f"pip install {packages[0]}: {time.monotonic() - start:.1f} s\n")
    ran(folder, commands / "pip", "check")
    return commands


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """A folder with a model, its tokenizer and template, and a file of conversations."""
    make.save(tmp_path / "models/Qwen3-0.6B-Base", "qwen2_5")
    lines = [json.dumps(record) for record in make.records("messages")[:100]]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    (tmp_path / "chat.json").write_text(json.dumps(MESSAGES))
    return tmp_path


def variables_of(bin: Path) -> dict[str, str]:
    """Variables of a process that finds only the commands of the environment."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "PATH": str(bin)}
    for name in ("PYTHONPATH", "CC", "CXX"):
        variables.pop(name, None)
    assert not [name for name in COMPILERS if shutil.which(name, path=variables["PATH"])]
    return variables


def ran(folder: Path, command: Path, *words: str | Path, code: int = 0) -> str:
    """Runs a command in the folder; returns its output, and its errors after a failure."""
    done = subprocess.run(
        [command, *words],
        cwd=folder,
        env=variables_of(command.parent),
        capture_output=True,
        text=True,
        timeout=1800.0,
    )
    assert done.returncode == code, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stderr if code else done.stdout


def test_the_wheel_has_the_package_and_a_tag_that_old_systems_accept(
    dist: Path, wheel: Path
) -> None:
    (archive,) = dist.glob("*.tar.gz")
    _, _, _, tags = parse_wheel_filename(wheel.name)
    glibcs = {re.fullmatch(r"manylinux_2_(\d+)_x86_64", tag.platform) for tag in tags}
    assert {int(match[1]) for match in glibcs if match} == {34}
    with zipfile.ZipFile(wheel) as whole:
        names = {name for name in whole.namelist() if not name.endswith("/")}
    with tarfile.open(archive) as tar:
        paths = {member.name.partition("/src/")[2] for member in tar if member.isfile()} - {""}
    package = {name for name in names if name.startswith("penstock/")}
    modules = {name for name in package if name.endswith(".so")}
    assert package - modules == paths
    assert {name.partition(".")[0] for name in modules} == {"penstock/_ceiling", "penstock/_native"}
    assert wheel.stat().st_size < 5_000_000


def test_the_first_commands_of_readme_train_a_model(bin: Path, tmp_path: Path) -> None:
    commands = commands_of_readme(r"penstock init\n")
    assert [words.split()[1] for words in commands] == "init train status report export".split()
    for words in commands:
        start, (name, *options) = time.monotonic(), words.split()
        options += ["--set", "train.steps=3"] if options[0] == "train" else []
        ran(tmp_path, bin / name, *options)
        sys.stdout.write(f"{words}: {time.monotonic() - start:.1f} s\n")
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 1_000_000
    assert "**Do**" in ran(tmp_path, bin / "penstock", "docs", "RUNBOOK#penstockstuck")
    compiled = ("train", "tiny.yaml", "--run-dir", "compiled", "--set", "model.compile=true")
    refusal = ran(tmp_path, bin / "penstock", *compiled, code=2)
    assert "No working C++ compiler found" in refusal
    assert "set model.compile to false" in refusal


def test_the_commands_of_readme_fine_tune_a_model(bin: Path, folder: Path) -> None:
    commands = commands_of_readme("penstock init --model")
    assert [words.split()[1] for words in commands] == ["init", "data", "train"]
    for words in commands:
        name, *options = words.split()
        ran(folder, bin / name, *options)
    answer = json.loads(
        ran(
            folder,
            *(bin / "penstock", "generate", "runs/mine", "--messages", "chat.json"),
            *("--max-new", str(NEW_TOKENS), "--json"),
        )
    )
    ran(folder, bin / "penstock", "export", "runs/mine", "--format", "hf", "out")
    by_transformers = json.loads(ran(folder, bin / "python", "-c", ANSWER))
    assert by_transformers
    assert answer["ids"] == by_transformers


def sweeps(module: Path, *emulator: str, python: str = sys.executable) -> dict[str, Any]:
    """Runs sweeps by the kernels of a module, on a processor."""
    words = [*emulator, Path(python).resolve() if emulator else python, "-S", SWEEPS, module]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=600.0)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def module_of(wheel: Path, folder: Path) -> Path:
    """Returns the wheel's module with the sweeps, in the folder."""
    with zipfile.ZipFile(wheel) as whole:
        (name,) = (name for name in whole.namelist() if re.match(r"penstock/_native.*\.so$", name))
        return Path(whole.extract(name, folder))


def test_later_pythons_run_one_wheel_with_the_same_bytes(
    dist: Path, wheel: Path, later: list[str], tmp_path: Path
) -> None:
    if not later:
        pytest.skip("no Python from 3.12 on is on PATH")
    expected = sweeps(module_of(wheel, tmp_path / "first"))
    (stable,) = dist.glob("penstock-*-cp312-abi3-*.whl")
    module = module_of(stable, tmp_path / "stable")
    assert [sweeps(module, python=name) for name in later] == [expected] * len(later)


def test_older_processors_run_other_kernels_with_the_same_bytes(
    wheel: Path, tmp_path: Path
) -> None:
    module = module_of(wheel, tmp_path)
    expected = sweeps(module)["outcomes"]["portable"]
    assert len({*expected.values()}) == len(expected)
    for processor, path in PROCESSORS.items():
        answer = sweeps(module, "qemu-x86_64", "-cpu", processor)
        assert answer["chosen"] == path
        assert {json.dumps(digests) for digests in answer["outcomes"].values()} == {
            json.dumps(expected)
        }

"""Environments of other trainers. Each has its own packages in front of those of the tests, so that
torch is not installed again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
_DATASETS = (
    *("dill", "multiprocess", "xxhash", "fsspec==2026.4.0", "httpx", "httpcore", "pandas"),
    *("python-dateutil", "pytz", "tzdata", "six", "aiohttp", "aiosignal", "frozenlist"),
    *("multidict", "yarl", "propcache", "aiohappyeyeballs", "psutil"),
)
"""Packages of the library datasets and of its own requirements."""

TRL = ("trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0", *_DATASETS)
LLAMA_FACTORY = (
    *("llamafactory==0.9.5", "trl==0.24.0", "peft", "accelerate", "datasets==5.2.0"),
    *("omegaconf", "antlr4-python3-runtime==4.9.3", *_DATASETS),
)
"""LLaMA-Factory wants older versions; reading data works with those of the tests."""

DEEPSPEED = ("deepspeed==0.19.8", "hjson", "msgpack", "py-cpuinfo", "einops", "ninja", "psutil")

TORCHTITAN = (
    *("torchtitan==0.2.2", "triton==3.9.0", "tyro", "docstring_parser", "typeguard", "shtab"),
    *("typing_extensions", "tabulate", "torchdata", "einops", "datasets==5.2.0", *_DATASETS),
)
"""Triton is imported alone: torch's CPU build has none, and nothing here is compiled by it."""

AUTOMODEL = ("nemo_automodel==0.7.0", "torchdata", "psutil")

_UNUSED = ("torchaudio",)
"""Modules that LLaMA-Factory imports for sounds alone: each is an empty file here."""


def environment(folder: Path, packages: tuple[str, ...]) -> Path:
    """Makes an environment and returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", *packages]
    subprocess.run(install, check=True, timeout=600.0)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site_packages = folder / "lib" / version / "site-packages"
    for name in _UNUSED:
        (site_packages / f"{name}.py").touch()
    shared = (sysconfig.get_paths()["purelib"], *(p for p in sys.path if p.endswith("-packages")))
    lines = [f"import site; site.addsitedir({path!r})" for path in dict.fromkeys(shared)]
    (site_packages / "zz-shared.pth").write_text("\n".join(lines))
    return python


def ran(python: Path, module: str, *words: str) -> str:
    """Runs a module of the tests and returns its output."""
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        # DeepSpeed compiles its operators with the environment's ninja, into this folder.
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "TORCH_EXTENSIONS_DIR": str(python.parents[1] / "extensions"),
        **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "DISABLE_VERSION_CHECK"), "1"),
    }
    done = subprocess.run(
        [str(python), "-m", module, *words],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=3600.0,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def answer(python: Path, module: str, *words: str) -> Any:
    """Runs a module of the tests and returns the JSON of its last line."""
    return json.loads(ran(python, module, *words).splitlines()[-1])

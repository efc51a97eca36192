"""Whether the order of the control words alone makes the bytes of a step safe to read.

A thread sanitizer follows which store happened before which load, by the language's rules and not
this processor's: x86 keeps stores in order whatever a program says, other processors do not. What
readers of other nodes do (sequence words around bytes that may change) is a race by intention and
not part of this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCES = ("kernels", "sweeps", "thread_pool", "undo", "kernel")
FLAGS = (
    *("-std=c++17", "-O0", "-g", "-fsanitize=thread", "-Wno-tsan", "-ffp-contract=off", "-pthread"),
    *('-DPENSTOCK_VECTOR_HEADER="vector_portable.h"', "-DPENSTOCK_VECTOR=Portable"),
    *('-DPENSTOCK_PATH="portable"', "-DPENSTOCK_KERNELS=kPortableKernels"),
)


def compiled(output: Path, *arguments: str) -> Path:
    """Run the compiler with a thread sanitizer, without which the test is skipped."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    command = [compiler, *FLAGS, *arguments, "-o", str(output)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "libtsan" in built.stderr or "-ltsan" in built.stderr:
        pytest.skip(f"no thread sanitizer: {built.stderr[-200:]}")
    assert built.returncode == 0, built.stderr
    return output


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The sweeps and their thread pool."""
    folder = tmp_path_factory.mktemp("objects")
    return [
        str(compiled(folder / f"{name}.o", "-c", str(ROOT / "native" / f"{name}.cpp")))
        for name in SOURCES
    ]


def run_with(atomics: str, objects: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the steps with these words, on two cores (or one twice)."""
    (folder / "atomics.h").write_text(atomics)
    harness = str(ROOT / "tests" / "native" / "memory_order.cpp")
    includes = (f"-I{folder}", f"-I{ROOT / 'native'}")
    program = compiled(folder / "memory_order", *includes, harness, *objects)
    cores = sorted(os.sched_getaffinity(0))[:2]
    return subprocess.run(
        [str(program), *map(str, (cores * 2)[:2])],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1 symbolize=0"},
    )


ATOMICS = (ROOT / "native" / "atomics.h").read_text()


def test_words_order_all_bytes_of_steps(objects: list[str], tmp_path: Path) -> None:
    found = run_with(ATOMICS, objects, tmp_path)
    assert found.returncode == 0 and "WARNING: ThreadSanitizer" not in found.stderr, found.stderr
    assert float(found.stdout) < 0.0, "the weights have gone against the gradients"


@pytest.mark.parametrize("order", ["__ATOMIC_ACQUIRE", "__ATOMIC_RELEASE"])
def test_a_word_without_order_is_found(objects: list[str], tmp_path: Path, order: str) -> None:
    """The check can fail: each half of the pair matters."""
    relaxed = ATOMICS.replace(f", {order});", ", __ATOMIC_RELAXED);")
    assert relaxed != ATOMICS
    found = run_with(relaxed, objects, tmp_path)
    assert "WARNING: ThreadSanitizer: data race" in found.stderr

"""Names in /dev/shm as a second user of the machine would take them.

Everything happens in namespaces of its own, with a /dev/shm for these tests alone. The second user
is ``nobody``, to whom root changes with setpriv (util-linux).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny.yaml"
DEADLINE_S = 600.0
APART = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--net", "--kill-child")
PRELUDE = """
set -u
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
ip link set lo up
penstock() { "$PYTHON" -m penstock.client.main "$@"; }
train() {
    penstock train "$CONFIG" --run-dir "$RUN" --set "train.steps=$1" \\
        --set train.save_every=2 --set optimizer.schedule=constant --set optimizer.min_lr=0.0 \\
        --set cluster.threads_per_worker=1 --set optimizer.threads=2 < /dev/null
}
stranger() { setpriv --reuid=65534 --regid=65534 --clear-groups "$@"; }
"""

KILLED = """
train 1000000 > "$RUN.first" 2>&1 &
until [ -d "$RUN/state/step-00000002" ]; do kill -0 $! || exit 90; sleep 0.1; done
kill -9 -1  # all processes of this namespace but this shell
wait
"""
"""A run that was killed with its memory left."""

SQUATTED = """
copy=$(mktemp -d); chmod 755 "$copy"
names=$(ls /dev/shm | grep ^penstock-)
[ -n "$names" ] || exit 91
for name in $names; do
    mv "/dev/shm/$name" "$copy/$name"
    chmod 644 "$copy/$name"
    stranger cp "$copy/$name" "/dev/shm/$name"
    stranger chmod 666 "/dev/shm/$name"
done
rm -r "$copy"
"""
"""The run's memory is gone, and a stranger has put the same bytes there under the same names."""

JUNK = """
id=0123456789ab
stranger ln -s /etc/passwd /dev/shm/penstock-$id-a-control
stranger ln -s /nowhere /dev/shm/penstock-$id-b-control
stranger mkdir /dev/shm/penstock-$id-c-control
stranger mkfifo /dev/shm/penstock-$id-d-control
stranger touch "$(printf '/dev/shm/penstock-\\033[2J\\n[red]')"
stranger truncate -s 10G /dev/shm/penstock-$id-e-control
socket=/dev/shm/penstock-$id-f-control
"$PYTHON" -c "import socket; socket.socket(socket.AF_UNIX).bind('$socket')"
chown 65534 $socket
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may search; pytest's are their owner's alone."""
    path = Path(tempfile.mkdtemp(prefix="penstock-owners-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def apart(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Returns how a script ended that ran in namespaces of its own."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, unshare and setpriv (util-linux)")
    environment = os.environ | {
        "PYTHON": sys.executable,
        "CONFIG": str(EXAMPLE),
        "RUN": str(folder / "run"),
        "COLUMNS": "200",
    }
    return subprocess.run(
        [*APART, "bash", "-c", PRELUDE + script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.integration
def test_memory_of_a_stranger_is_not_trained_on_and_he_is_named(folder: Path) -> None:
    script = f"""
{KILLED}
{SQUATTED}
last=$(ls "$RUN/state" | sed -n 's/^step-0*//p' | sort -n | tail -n 1)
train 1000000 > "$RUN.second" 2>&1; echo "second $?"
rm /dev/shm/penstock-*
train $((last + 6)) > "$RUN.third" 2>&1; echo "third $?"; echo $((last + 6))
"""
    done = apart(folder, script)
    told = {path.suffix: path.read_text() for path in folder.glob("run.*")}
    *ends, last = done.stdout.splitlines()
    assert ends == ["second 2", "third 0"], (done, told)
    assert "belongs to user nobody (uid 65534), and this run needs that name" in told[".second"]
    assert "internal error" not in told[".second"]
    assert (folder / "run" / "state" / f"step-{int(last):08}").is_dir()


@pytest.mark.integration
def test_junk_of_a_stranger_ends_no_command(folder: Path) -> None:
    script = f"""
train 8 > "$RUN.first" 2>&1 & first=$!
until [ -d "$RUN/state" ]; do kill -0 $first || exit 90; sleep 0.1; done
{JUNK}
for command in list "list --json" doctor "doctor --json"; do
    penstock $command > "$RUN.out" 2>&1; echo "$command $?"
    grep -q penstock-0123456789ab-a-control "$RUN.out" || echo "not listed"
    grep -q "$(printf '\\033')" "$RUN.out" && echo "an escape was printed"
done
wait $first; echo "train $?"
du -sk /dev/shm/penstock-0123456789ab-e-control | cut -f1
"""
    done = apart(folder, script)
    expected = ["list 0", "list --json 0", "doctor 0", "doctor --json 0", "train 0", "0"]
    assert done.stdout.splitlines() == expected, (done, (folder / "run.first").read_text())

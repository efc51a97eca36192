"""What looking at a run costs, and pictures of the screen at three sizes for docs/SEEING.md.

``python -m bench.screen`` prints CPU milliseconds of the client for each second of a run of
examples/tiny.yaml, with plain lines and with the screen. ``--pictures docs/pictures`` evaluates and
saves, kills a worker on the way, and writes ``screen-80.svg`` and its like.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from penstock.client.views.run_view import Observer
from penstock.client.views.screen.following import facts_for
from penstock.client.views.screen.layout import compose
from penstock.client.views.screen.model import Model
from penstock.client.views.screen.panels import UNICODE
from penstock.client.views.screen.screen import keys_line
from penstock.host.process_identity import ProcessUsage
from penstock.protocol.generated import scheduler_pb2 as pb

SIZES = ((80, 24), (120, 36), (200, 60))
SETTINGS = (
    "train.steps=120",
    "train.eval_every=25",
    "train.eval_batches=2",
    "train.save_every=40",
    "observability.sample_every=20",
)
KILLED_AT, SHOWN_AT = 62, 84
"""Steps at which a worker is killed, and pictures are taken."""
COST_S = 30.0


def main() -> None:
    """Trains, and draws or measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "tiny"
        if arguments.pictures is None:
            for name, terminal in (("lines", False), ("screen", True)):
                print(f"{name}: {_cost_ms(run_dir.with_name(name), terminal):.2f} ms a second")
            return
        with _training(run_dir, terminal=False) as process:
            model = _followed(run_dir, process)
            for width, height in SIZES:
                path = arguments.pictures / f"screen-{width}.svg"
                path.write_text(_drawn(model, width, height))
                print(path)


@contextmanager
def _training(run_dir: Path, *, terminal: bool) -> Iterator[subprocess.Popen[bytes]]:
    """Trains, on a terminal of 120 columns or with its output thrown away."""
    command = [sys.executable, "-m", "penstock.client.main", "train", "examples/tiny.yaml"]
    command += ["--run-dir", str(run_dir), *(w for s in SETTINGS for w in ("--set", s))]
    master, slave = os.openpty()
    drain = threading.Thread(target=_drain, args=(master,), daemon=True)
    drain.start()
    if terminal:
        os.environ.setdefault("TERM", "xterm-256color")
        command = ["setsid", "--ctty", "--wait", *command]
    streams = {"stdin": slave, "stdout": slave if terminal else subprocess.DEVNULL}
    process = subprocess.Popen(command, **streams)  # type: ignore[call-overload]
    os.close(slave)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        os.close(master)


def _drain(master: int) -> None:
    try:
        while os.read(master, 65536):
            pass
    except OSError:  # the other end is closed
        return


def _followed(run_dir: Path, process: subprocess.Popen[bytes]) -> Model:
    """Looks at the run as ``penstock watch`` does, until it is worth a picture."""
    while not (run_dir / "endpoint.json").exists():
        if process.poll() is not None:
            raise SystemExit(f"the run ended with {process.returncode}")
        time.sleep(0.2)
    model = Model(facts_for(run_dir))
    observer, killed = Observer(run_dir, 120, past=True), False
    while model.status.version < SHOWN_AT and process.poll() is None:
        model.take(observer.look(), time.time())
        if model.status.version >= KILLED_AT and not killed:
            killed = True
            os.kill(_pid_of(model.status, "worker.1"), signal.SIGKILL)
        time.sleep(1.0)
    observer.close()
    return model


def _pid_of(status: pb.StatusReply, member: str) -> int:
    return next(m.pid for m in status.members if m.member == member)


def _drawn(model: Model, width: int, height: int) -> str:
    """Returns the screen as SVG. No font is fetched from elsewhere."""
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True)
    for line in compose(model, UNICODE, width, height, keys_line(model)):
        console.print(line, end="\n", soft_wrap=True, highlight=False)
    title = f"penstock watch, {width} x {height}"
    svg = console.export_svg(title=title, unique_id=f"screen-{width}")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def _cost_ms(run_dir: Path, terminal: bool) -> float:
    """Returns CPU milliseconds of the client for each second, once training is under way."""
    with _training(run_dir, terminal=terminal) as process:
        while (
            not (run_dir / "metrics.jsonl").exists()
            or not (run_dir / "metrics.jsonl").stat().st_size
        ):
            time.sleep(0.5)
        pid = _client(process.pid)
        before_s, start = _cpu_s(pid), time.monotonic()
        time.sleep(COST_S)
        return 1000 * (_cpu_s(pid) - before_s) / (time.monotonic() - start)


def _client(pid: int) -> int:
    """Returns the client's process: the one that was started, or the child of setsid."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    is_setsid = Path(f"/proc/{pid}/comm").read_text().strip() == "setsid"
    return int(children[0]) if is_setsid else pid


def _cpu_s(pid: int) -> float:
    """Returns CPU seconds of a process, without its children."""
    usage = ProcessUsage.of(pid)
    if usage is None:
        raise SystemExit("the run ended too soon to measure")
    return usage.cpu_s


if __name__ == "__main__":
    main()

"""A real run in all trackers at once, read back with the readers of each of them.

Weights & Biases, MLflow and trackio are installed into an environment of the test's own, from the
package index: they bring half a gigabyte that nothing else needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import PLAIN, merge, metrics
from tests.system.conftest import runner as runner

pytestmark = pytest.mark.integration

PACKAGES = ("wandb>=0.19", "mlflow-skinny>=3", "trackio>=0.20", "tensorboard>=2.18")
CHANGES: dict[str, Any] = {
    "train": {"steps": 12, "eval_every": 6, "eval_batches": 2},
    "observability": {
        "trackers": ["tensorboard", "wandb", "mlflow", "trackio"],
    },
}

READERS = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
import glob
for path in glob.glob(f'{run}/tensorboard/*'):
    for event in EventFileLoader(path).Load():
        for value in event.summary.value:
            if value.tensor.float_val:
                add(value.tag, event.step, value.tensor.float_val[0])
""",
    "wandb": """
import glob, struct
from wandb.proto.wandb_internal_pb2 import Record
for path in glob.glob(f'{run}/wandb/offline-run-*/*.wandb'):
    text, place, parts = open(path, 'rb').read(), 7, b''
    while place + 7 <= len(text):
        if 32768 - place % 32768 < 7:  # the end of a block is padding
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack('<IHB', text[place:place + 7])
        parts += text[place + 7:place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record, parts = Record.FromString(parts), b''
            if record.WhichOneof('record_type') == 'history':
                items = {'/'.join(i.nested_key) or i.key: json.loads(i.value_json)
                         for i in record.history.item}
                for key, value in items.items():
                    if '/' in key:
                        add(key, items.get('_step', record.history.step.num), value)
""",
    "mlflow": """
import os
os.environ['MLFLOW_ALLOW_FILE_STORE'] = 'true'
from mlflow.tracking import MlflowClient
client = MlflowClient(os.environ['MLFLOW_TRACKING_URI'])
experiment = client.get_experiment_by_name('penstock')
(logged,) = client.search_runs([experiment.experiment_id])
assert logged.info.status == 'FINISHED' and logged.data.params['train.steps'] == '12'
for key in logged.data.metrics:
    for metric in client.get_metric_history(logged.info.run_id, key):
        add(key, metric.step, metric.value)
""",
    "trackio": """
from trackio.sqlite_storage import SQLiteStorage
(name,) = SQLiteStorage.get_runs('penstock')
for entry in SQLiteStorage.get_logs('penstock', name):
    for key, value in entry.items():
        if '/' in key:
            add(key, entry['step'], value)
""",
}
FRAME = """
import json, sys
run, found = sys.argv[1], []
add = lambda key, step, value: found.append((key, int(step), float(value)))
{body}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the trackers, and all that this one has."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    made = folder / "bin" / "python"
    install = [made, "-m", "pip", "install", "--quiet", *PACKAGES]
    subprocess.run(install, check=True, timeout=600)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    theirs = (sysconfig.get_paths()["purelib"], *(p for p in sys.path if p.endswith("-packages")))
    lines = [f"import site; site.addsitedir({path!r})" for path in dict.fromkeys(theirs)]
    (packages / "beside.pth").write_text("\n".join(lines))  # with what their own .pth files do
    return made


def test_every_tracker_has_what_metrics_jsonl_has(
    runner: Any, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"file://{tmp_path / 'mlflow'}"
    environment = {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": uri,
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", str(python))
    run_dir = runner.train(runner.configure("tracked", merge(PLAIN, CHANGES)))
    wanted = {("train/loss", m["step"]): m["loss"] for m in metrics(run_dir)}
    wanted |= {("train/grad_norm", m["step"]): m["grad_norm"] for m in metrics(run_dir)}
    wanted |= {("eval/loss", m["step"]): m["loss"] for m in metrics(run_dir, "eval")}
    for tracker, body in READERS.items():
        program = FRAME.replace("{body}", body)
        done = subprocess.run(
            [python, "-c", program, str(run_dir)],
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
            timeout=600,
        )
        assert done.returncode == 0, f"{tracker}: {done.stderr}"
        rows = json.loads(done.stdout.splitlines()[-1])
        found = {(key, step): value for key, step, value in rows}
        assert len(found) == len(rows), f"{tracker} has steps twice"
        assert {key: found.get(key) for key in wanted} == pytest.approx(wanted, rel=1e-6), tracker

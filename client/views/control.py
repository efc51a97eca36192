"""``penstock status|pause|resume|snapshot|stop``: calls to the scheduler of an active run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from penstock.client.views.console import Console
from penstock.client.views.display import (
    absences,
    describe,
    duration,
    epochs_of_run,
    incomplete_replicas,
    member_table,
)
from penstock.daemons.kit.waits import waits
from penstock.daemons.monitor.metrics.targets import addresses
from penstock.host.errors import ConfigError, LostMemberError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.security.credentials import named_credentials
from penstock.protocol.security.identity import Role
from penstock.protocol.wire.control import ControlClient


def connect(
    run_dir: Path | None, endpoint: str | None, keys: Path | None, wanted: Role
) -> ControlClient:
    """Returns a client for ``--endpoint`` or for the run in ``run_dir``.

    The client acts in the role ``wanted``, with the keys in ``--keys`` or those of the run.

    Raises:
        ConfigError: neither or both of ``--endpoint`` and a run are given, the run is not
            active, or keys are missing.
    """
    if (run_dir is None) == (endpoint is None):
        raise ConfigError(
            "give the directory of the run, such as runs/tiny (penstock list shows the runs of this"
            " machine), or --endpoint HOST:PORT, and not both"
        )
    access = None if keys is None else named_credentials(keys)
    if run_dir is not None:
        return ControlClient.for_run(run_dir, wanted=wanted, access=access)
    if access is None:
        raise ConfigError(
            "--endpoint needs --keys DIR: a folder of the run's keys, such as KEYS/control, or the"
            " run directory, which has a token"
        )
    assert endpoint is not None
    return ControlClient(endpoint, access)


def status_dict(status: pb.StatusReply) -> dict[str, Any]:
    """Returns the status with numbers, and the last line of metrics as an object.

    ``data_epoch`` and ``data_epochs`` are passes over the training data, or None if unknown.
    ``membership`` is the scheduler's ``epoch``.
    """
    fields: dict[str, Any] = MessageToDict(
        status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _with_numbers(fields)
    if not status.data_epochs:
        fields |= {"data_epoch": None, "data_epochs": None}
    fields["membership"] = fields["epoch"]
    last = fields.pop("last_metrics_json")
    fields["last_metrics"] = json.loads(last) if last else None
    return fields


_WIDE = frozenset(
    "epoch version attempt steps saved_version number step steps_lost sequence progress loss_tokens"
    " peak_device_bytes device_limit_bytes saving_version".split()
)


def _with_numbers(fields: dict[str, Any]) -> None:
    """Converts 64-bit numbers, which protobuf's JSON writes as strings, to numbers."""
    for name, value in fields.items():
        if name in _WIDE:
            fields[name] = int(value)
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                _with_numbers(inner)


def show_status(
    client: ControlClient, *, as_json: bool, console: Console, run_dir: Path | None
) -> None:
    """Prints the status, and from files in ``run_dir`` the addresses of metrics."""
    try:
        status = client.status()
    except LostMemberError as error:
        reasons = [] if run_dir is None else [f"{n}: {text}" for n, text in waits(run_dir).items()]
        raise LostMemberError("\n".join((str(error), *reasons))) from error
    served = {} if run_dir is None else addresses(run_dir)
    waiting = {} if run_dir is None else waits(run_dir)
    if as_json:
        fields = {**status_dict(status), "metrics": served, "waits": waiting}
        console.out(json.dumps(fields, indent=1), highlight=False)
        return
    saved = f"step {status.saved_version}" if status.has_saved else "nothing yet"
    eta = f", ETA {duration(status.eta_seconds)}" if status.eta_seconds >= 0 else ""
    passes = epochs_of_run(status)
    passes = f", epoch {passes}" if passes else ""
    console.print(
        f"{status.run_name} ({status.run_id}): {status.phase}, step"
        f" {status.version}/{status.steps}{passes}, membership {status.epoch},"
        f" {status.plan_scheme}{eta}; saved: {saved}",
        highlight=False,
    )
    if status.message:
        console.print(status.message, markup=False)
    if status.last_metrics_json:
        console.print(describe(json.loads(status.last_metrics_json), None), highlight=False)
    console.print(member_table(status))
    for line in (*absences(status), *incomplete_replicas(status)):
        console.print(line, markup=False, highlight=False)
    for name, text in waiting.items():
        console.print(f"{name}: {text}", markup=False, highlight=False, soft_wrap=True)
    for node, address in served.items():
        console.print(f"metrics of {node}: {address}", highlight=False, soft_wrap=True)


def snapshot(client: ControlClient) -> str:
    """Saves the committed state; returns the message for the user."""
    reply = client.snapshot()
    return f"step {reply.version} is saved in {reply.directory}"


SIMPLE: dict[str, Callable[[ControlClient], str]] = {
    "pause": ControlClient.pause,
    "resume": ControlClient.resume,
    "stop": ControlClient.stop,
    "snapshot": snapshot,
}
"""Calls that answer with one line."""

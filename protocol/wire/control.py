"""The control client: unary calls to a run's scheduler, each with a deadline."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import Message

from penstock.config.schema import load_config
from penstock.host.errors import (
    CapacityError,
    ConfigError,
    LostMemberError,
    PenstockError,
    ProtocolError,
    StateError,
    reason,
)
from penstock.host.files import DAMAGED, parse_json
from penstock.host.process_identity import start_ticks
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.generated import scheduler_pb2_grpc as rpc
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.addresses import is_loopback
from penstock.protocol.security.credentials import Credentials, client_credentials
from penstock.protocol.security.identity import Role
from penstock.protocol.wire.member import CHANNEL_OPTIONS

SNAPSHOT_TIMEOUT_S = 600.0
WEIGHTS_TIMEOUT_S = 86400.0
_UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_ERRORS: dict[grpc.StatusCode, type[PenstockError]] = {
    grpc.StatusCode.FAILED_PRECONDITION: ConfigError,
    grpc.StatusCode.PERMISSION_DENIED: ConfigError,
    grpc.StatusCode.UNAUTHENTICATED: ConfigError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityError,
}


def is_stale(run_dir: Path) -> bool:
    """Returns whether ``endpoint.json`` was left by a first node of this machine that is dead, and
    no other process of the run is here. False where that cannot be known.
    """
    try:
        fields = parse_json((run_dir / "endpoint.json").read_bytes())
        host, pid = str(fields["scheduler"]).rpartition(":")[0], int(fields["pid"])
    except (OSError, *DAMAGED):
        return False
    if not is_loopback(host.strip("[]")) or start_ticks(pid) is not None:
        return False
    # In another PID namespace the node is not to be seen, but its lock is.
    return not RunDirectory(run_dir).is_held


class ControlClient:
    """Typed calls to the scheduler at ``address`` (``host:port``); close it, or use ``with``."""

    def __init__(self, address: str, access: Credentials, timeout_s: float = 5.0) -> None:
        """Connects with the credentials ``access``.

        Raises:
            PenstockError: the credentials cannot be read.
        """
        self.address = address
        self._timeout_s = timeout_s
        self._connection = access.connect(address, CHANNEL_OPTIONS)
        self._channel = self._connection.channel
        self._stub = rpc.ControlStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    @classmethod
    def for_run(
        cls,
        run_dir: Path,
        timeout_s: float = 5.0,
        wanted: Role = Role.CONTROL,
        access: Credentials | None = None,
    ) -> ControlClient:
        """Returns a client for the run in ``run_dir``, by its ``endpoint.json``. The client acts as
        ``wanted`` with the existing keys, or with ``access``.

        Raises:
            ConfigError: no endpoint file: the run was not started here, or has ended.
            StateError: the file is damaged.
        """
        path = run_dir / "endpoint.json"
        try:
            address = parse_json(path.read_bytes())["scheduler"]
            if not isinstance(address, str):
                raise TypeError(f"scheduler is {address!r}")
        except FileNotFoundError as error:
            if not run_dir.exists():
                raise ConfigError(
                    f"{run_dir}: no such directory; penstock list shows the runs of this machine"
                ) from error
            raise ConfigError(
                f"{path} does not exist: no run is active in {run_dir}; start it or give --endpoint"
            ) from error
        except OSError as error:
            raise StateError(f"{path}: cannot read it: {reason(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f'{path}: expected {{"scheduler": "host:port"}}: {error!r}') from error
        if is_stale(run_dir):
            raise ConfigError(
                f"{path} was left by a first node that is dead, and no process of the run is on"
                f" this machine: no run is active in {run_dir}; the next start replaces the file,"
                " penstock doctor --clean removes it"
            )
        if access is None:
            access = client_credentials(load_config(run_dir / "resolved.yaml"), run_dir, wanted)
        return cls(address, access, timeout_s)

    def status(self) -> pb.StatusReply:
        """Returns the status of the run."""
        reply: pb.StatusReply = self._invoke("status", self._stub.Status, pb.StatusRequest())
        return reply

    def pause(self) -> str:
        """Pauses the run after the current attempt; returns the scheduler's message."""
        reply: pb.ControlReply = self._invoke("pause", self._stub.Pause, pb.PauseRequest())
        return reply.message

    def resume(self) -> str:
        """Continues after a pause."""
        reply: pb.ControlReply = self._invoke("resume", self._stub.Resume, pb.ResumeRequest())
        return reply.message

    def stop(self, within_s: float | None = None) -> str:
        """Finishes the attempt, saves, shuts down. ``within_s``: seconds until the run is killed
        from outside. Returns when the scheduler has accepted the request.
        """
        request = pb.StopRequest(within_seconds=within_s or 0.0)
        reply: pb.ControlReply = self._invoke("stop", self._stub.Stop, request)
        return reply.message

    def snapshot(self, timeout_s: float = SNAPSHOT_TIMEOUT_S) -> pb.SnapshotReply:
        """Saves the committed state; returns when it is complete on disk.

        Raises:
            CapacityError: the state could not be written.
        """
        reply: pb.SnapshotReply = self._invoke(
            "snapshot", self._stub.Snapshot, pb.SnapshotRequest(), timeout_s
        )
        return reply

    def weights(self, directory: Path, timeout_s: float = WEIGHTS_TIMEOUT_S) -> pb.WeightsReply:
        """Copies the committed weights into an existing folder; returns when all files are on disk.

        Raises:
            CapacityError: the weights could not be written.
        """
        request = pb.WeightsRequest(directory=str(directory))
        reply: pb.WeightsReply = self._invoke("weights", self._stub.Weights, request, timeout_s)
        return reply

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _invoke(
        self, name: str, method: Any, request: Message, timeout_s: float | None = None
    ) -> Any:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        self._connection.check()
        try:
            return method(request, timeout=limit_s, metadata=self._connection.metadata)
        except grpc.RpcError as error:
            raise self._translated(name, error, limit_s) from error

    def _translated(self, name: str, error: grpc.RpcError, limit_s: float) -> PenstockError:
        if not isinstance(error, grpc.Call):
            return ProtocolError(f"{name}: scheduler at {self.address}: {error!r}")
        if error.code() in _UNREACHABLE:
            return LostMemberError(
                f"{name}: no answer from the scheduler at {self.address} within {limit_s:g} s"
                f" ({error.details()}); is the run still active?"
            )
        kind = _ERRORS.get(error.code(), ProtocolError)
        return kind(f"{name}: scheduler at {self.address}: {error.details()}")

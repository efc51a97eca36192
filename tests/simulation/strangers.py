"""Who is not of the run, and says so all the same."""

from __future__ import annotations

from penstock.host import world
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.wire.member import MemberLink
from tests.simulation.cluster import PORT
from tests.simulation.kernel import Process
from tests.simulation.streams import SimAccess


def pose_as(name: str, stays_s: float, process: Process) -> int:
    """Connect to the scheduler as a member of this name, again and again, for so long; never do
    what it says.
    """
    cluster = process.world.cluster
    run, config = cluster.run, cluster.run.config.cluster
    hello = pb.Hello(run_id=run.run_id, member=name, pid=process.pid)
    link = MemberLink(
        address=f"{config.nodes[0].host}:{PORT}",
        access=SimAccess(process, cluster.network),  # type: ignore[arg-type]
        hello=lambda: hello,
        heartbeat_interval_s=config.heartbeat_interval_s,
        silence_timeout_s=config.heartbeat_timeout_s,
    )
    link.start()
    world.sleep(stays_s)
    link.close()
    return 0

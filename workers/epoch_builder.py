"""Opens the parts of an epoch: memory, connections, weights. Closes them at the next Drain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import zmq

from penstock.config.schema import Config
from penstock.host import world
from penstock.host.errors import ConfigError, ProtocolError, StateError
from penstock.models.runtime import ModelRuntime
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.plan.instructions import Program
from penstock.protocol.plan.plan import Plan
from penstock.protocol.run.executable import check_executable
from penstock.protocol.run.names import (
    ipc_address,
    memoryd_name,
    node_of_device,
    optimizerd_name,
    ownership,
    worker_name,
)
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.trace import TraceLog
from penstock.protocol.wire.blocks import LeaseCancelledError, attach
from penstock.protocol.wire.fetching import fetchers
from penstock.protocol.wire.sockets import OPEN, SocketAccess, checked_places
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import NodeMemory, segment_name
from penstock.shm.segment import status_of
from penstock.shm.table import BlockTable
from penstock.workers.channels.base import Channel
from penstock.workers.channels.inbox import Expected, Inbox
from penstock.workers.channels.opening import open_channel, transport_here
from penstock.workers.channels.transport import Transport
from penstock.workers.compiling import LayerCompilation
from penstock.workers.data import Batches, Dataset, HeldOutData, open_dataset, training_batches
from penstock.workers.device import ALIGNMENT_BYTES, Runtime
from penstock.workers.epoch import EpochContext
from penstock.workers.peers import Peers
from penstock.workers.platforms.registry import WorkerPlatform
from penstock.workers.state.routing import TensorRouting, collective_receives
from penstock.workers.state.updates import BlockUpdates
from penstock.workers.state.weights import RemoteBlocks, WeightLoader, buffers_needed, stage_bytes
from penstock.workers.telemetry.metrics import WorkerMetrics
from penstock.workers.telemetry.progress import Progress
from penstock.workers.telemetry.trace import TraceRing
from penstock.workers.waiting import Abort

OPTIMIZER_SOCKET = "optimizer"
"""Name of optimizerd's local socket, see :func:`penstock.protocol.run.names.ipc_address`."""

PATIENCE = 2.0
"""Longest wait for a peer or for weights, in units of ``cluster.attempt_timeout_s``. Heartbeats
reveal lost members much earlier; the scheduler detects hanging ones after one unit.
"""

PLAN_TIMEOUT_S = 60.0
PLAN_POLL_S = 0.5
"""Seconds that the plan may take to appear in this machine's view of the run directory: NFS clients
cache a folder for up to a minute.
"""

_SEGMENTS = (SegmentKind.WEIGHTS, SegmentKind.FROZEN, SegmentKind.GRADS)


def bind_transport(
    files: RunDirectory,
    device_index: int,
    metrics: WorkerMetrics,
    inbox: Inbox,
    access: SocketAccess,
) -> Transport:
    """Listens for peers: on a local socket, or on tcp in a cluster of several nodes.

    Raises:
        ConfigError: the node's host is not an address of this machine.
    """
    nodes = files.config.cluster.nodes
    node = nodes[node_of_device(files.config, device_index)]
    if len(nodes) == 1:
        # The process id makes the name new: no wait for a predecessor's socket to vanish.
        name = f"{worker_name(device_index)}-{world.pid()}"
        return Transport(ipc_address(files.run_id, node.name, name), inbox, metrics, access)
    try:
        return Transport(f"tcp://{node.host}", inbox, metrics, access)
    except (OSError, zmq.ZMQError) as error:
        raise ConfigError(
            f"cluster.nodes: node {node.name}: a worker cannot listen on host {node.host!r}:"
            f" {error}"
        ) from error


def largest_transfer(config: Config, table: BlockTable, plan: Plan) -> int:
    """Returns an upper bound of bytes for all transfers between workers. The largest are gradient
    sums of a stage, or a layer's outputs in fp32. Those are eight tensors of the model's width at
    most, and a mask.
    """
    sums = [
        sum(table.blocks[block].trainable_elements for block in stage.blocks)
        for stage in plan.backward_stages
    ]
    matrices = [t.shape for block in table.blocks for t in block.tensors if len(t.shape) == 2]
    width = max((min(shape) for shape in matrices), default=1)
    tokens = config.train.micro_batch * config.data.sequence_length
    return 4 * max(*sums, tokens * (8 * width + config.data.sequence_length))


class EpochBuilder:
    """See :class:`penstock.workers.session.Builder`. One per process."""

    def __init__(
        self,
        *,
        files: RunDirectory,
        device_index: int,
        platform: WorkerPlatform,
        transport: Transport,
        progress: Progress,
        metrics: WorkerMetrics,
        access: SocketAccess = OPEN,
        cut_off: Callable[[int, str], None] = lambda epoch, loss: None,
    ) -> None:
        """Builds epochs for one worker.

        ``access``: the credentials for other nodes' sockets. ``cut_off`` is called, on another
        thread, when a connection to a peer is lost in an epoch.
        """
        self._access = access
        self._files = files
        self._cut_off = cut_off
        self._config = files.config
        self._timeout_s = PATIENCE * files.config.cluster.attempt_timeout_s
        self._table = files.table
        self._device_index = device_index
        self._node = node_of_device(files.config, device_index)
        self._platform = platform
        self._device = platform.device
        self._transport = transport
        self._progress = progress
        self._metrics = metrics
        log = TraceLog.of_run(
            files.path, worker_name(device_index), files.config.observability.traced_every
        )
        self._trace = TraceRing(log)
        self._runtime: Runtime | None = None
        self._transport_name = transport_here(files.config)
        self._channel: Channel | None = None
        self._weights: WeightLoader | None = None
        self._memory: tuple[tuple[int, ...], NodeMemory] | None = None
        self._updates: BlockUpdates | None = None
        self._training: Dataset | None = None
        self._held_out: dict[str, HeldOutData] = {}
        self._open_fetcher = fetchers(
            self._config, files.run_id, self._node, platform.reads, metrics.fetched, access
        )

    def open(self, begin: pb.Begin, abort: Abort) -> EpochContext:
        """Connects to the epoch's peers and memory.

        Raises:
            PenstockError: the plan cannot be executed, memory does not fit, or Begin lacks a peer.
        """
        self.close()
        plan = self._checked_plan(begin, abort)
        announced = {endpoint.member: endpoint.address for endpoint in begin.endpoints}
        endpoints = checked_places(self._config, self._access, announced)
        routing = TensorRouting.of(plan)
        memory = self._attached(plan, abort)
        owners = ownership(self._config, self._table, plan)
        self._connect(begin, plan, routing, endpoints)
        self._weights = WeightLoader(
            table=self._table,
            memory=memory,
            ownership=owners,
            node=self._node,
            device=self._device,
            remote=RemoteBlocks(
                self._files.run_id, self._table, self._memoryds(endpoints), self._open_fetcher
            ),
        )
        if self._updates_blocks(plan):
            self._updates = BlockUpdates(memory, self._platform.previewer(memory, plan))
        self._channel = open_channel(
            config=self._config,
            plan=plan,
            run_id=self._files.run_id,
            epoch=begin.epoch,
            device_index=self._device_index,
            device=self._device,
            transport=self._transport,
            name=self._transport_name,
            abort=abort,
            timeout_s=self._timeout_s,
        )
        return EpochContext(
            run_id=self._files.run_id,
            epoch=begin.epoch,
            device_index=self._device_index,
            plan=plan,
            routing=routing,
            table=self._table,
            ownership=owners,
            memory=memory,
            runtime=self.runtime(),
            device=self._device,
            weights=self._weights,
            transport=self._transport,
            channel=self._channel,
            trace=self._trace,
            meter=self._platform.meter,
            progress=self._progress,
            account=self._metrics.account,
            abort=abort,
            timeout_s=self._timeout_s,
            updates=self._updates,
        )

    def close(self) -> None:
        """Closes connections and drops weights and received tensors. Memory stays mapped,
        unused.
        """
        if self._updates is not None:
            self._updates.close()
            self._updates = None
        if self._weights is not None:
            self._weights.close()
            self._weights = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._trace.flush()  # the spans of an attempt that was aborted or failed
        self._transport.disconnect()
        self._transport.notices.close()
        self._transport.inbox.close()

    def detach(self) -> None:
        """Releases the node's memory too; the process ends."""
        self.close()
        self._device.detach()
        if self._memory is not None:
            self._memory[1].close()
            self._memory = None

    def batches(self, data_position: int) -> Batches:
        """Returns the global batch at a position of the training data."""
        if self._training is None:
            self._training = open_dataset(self._files.path / "data", "train", self._config)
        global_batch = self._config.train.global_batch
        return training_batches(self._training, data_position, global_batch, self._config)

    def held_out(self, name: str) -> HeldOutData:
        """Returns the data of an evaluation set.

        Raises:
            ProtocolError: the run has no such set.
        """
        if name not in self._held_out:
            each = next((s for s in self._config.evaluation_sets if s.name == name), None)
            if each is None:
                raise ProtocolError(f"Evaluate names the set {name!r}, which this run has not")
            self._held_out[name] = HeldOutData.open(self._files.path / "data", each, self._config)
        return self._held_out[name]

    @property
    def _evaluation_batches(self) -> int:
        """Most global batches of an evaluation. A set that is read whole has its own number."""
        return max(
            (
                each.batches
                if each.repeats and each.batches
                else self.held_out(each.name).num_batches
                for each in self._config.evaluation_sets
            ),
            default=self._config.train.eval_batches,
        )

    def runtime(self) -> Runtime:
        """Returns the runtime that computes blocks, without weights; made once, which takes
        seconds.
        """
        if self._runtime is None:
            self._runtime = self._platform.runtime()
        return self._runtime

    def compile(self) -> None:
        """Compiles the layers before the worker takes part, where the run has them compiled.

        Raises:
            ConfigError: the model is impossible, or the layers cannot be compiled.
        """
        runtime = self.runtime()
        if self._config.model.compile is True and isinstance(runtime, ModelRuntime):
            batches, _ = self.batches(0)
            LayerCompilation.of(self._config, runtime, batches[0]).run()

    def _connect(
        self, begin: pb.Begin, plan: Plan, routing: TensorRouting, endpoints: Mapping[str, str]
    ) -> None:
        """Accepts the epoch's messages from peers, and connects to the peers of its sends."""
        program, evaluation = self._programs(plan)
        modelled = self._config.cluster.platform.simulated_clock
        peers = Peers.of(self._config, self._table, plan, self._device_index, self._transport_name)
        self._transport.expect(largest_transfer(self._config, self._table, plan), plan.num_devices)
        self._transport.notices.open(run_id=self._files.run_id, epoch=begin.epoch)
        self._transport.inbox.open(
            run_id=self._files.run_id,
            epoch=begin.epoch,
            expected=Expected.of(
                program,
                evaluation,
                self._evaluation_batches,
                collective_receives(plan, routing, self._device_index, modelled=modelled),
                first_attempt=begin.next_attempt,
                first_evaluation=begin.next_evaluation,
            ),
        )
        self._transport.connect(
            self._addresses(peers.workers, endpoints),
            self._optimizers(endpoints),
            lambda loss: self._cut_off(begin.epoch, loss),
            self._config.cluster.heartbeat_timeout_s,
        )

    def _checked_plan(self, begin: pb.Begin, abort: Abort) -> Plan:
        """Returns the run directory's plan. Plan and recipe must be the scheduler's: the plan
        decides the layout of memory, the recipe the computation of layers.
        """
        deadline_s = world.monotonic() + PLAN_TIMEOUT_S
        while other := self._other_than(begin):
            if world.monotonic() > deadline_s:
                raise StateError(
                    f"{self._files.path / other} that the scheduler runs: stop the run and start"
                    " it again"
                )
            # The file may be newer than this process, or a file system's cache older than the file.
            self._files = RunDirectory(self._files.path)
            if self._other_than(begin):
                abort.check()
                world.sleep(PLAN_POLL_S)
        check_executable(self._files.plan, devices_per_node=self._config.cluster.workers)
        return self._files.plan

    def _other_than(self, begin: pb.Begin) -> str:
        """Describes the file of the run that differs from Begin's; empty if none does."""
        if self._files.plan_digest != begin.plan_digest:
            return "plan.json is not the plan"
        if self._files.numerics_digest != begin.numerics_digest:
            recorded = self._files.numerics_digest or "none"
            named = begin.numerics_digest or "none"
            return f"numerics.json (recipe {recorded}) is not the recipe ({named})"
        return ""

    def _programs(self, plan: Plan) -> tuple[Program, Program]:
        if not self._device_index < plan.num_devices:
            raise ConfigError(
                f"plan: it has {plan.num_devices} devices, there is no {self._device_index}"
            )
        return plan.programs[self._device_index], plan.evaluation[self._device_index]

    def _attached(self, plan: Plan, abort: Abort) -> NodeMemory:
        """Returns the node's memory. It is mapped again only after a change: other segments, other
        required segments, or another room for weights on the device.

        Raises:
            Interrupted: the epoch ended during the wait for its memoryd, or a stop came.
        """
        room = self._largest_stage(plan), buffers_needed(*self._programs(plan))
        kinds = (*_SEGMENTS, SegmentKind.STATE) if self._updates_blocks(plan) else _SEGMENTS
        identity = (*self._segment_identity(), *room, len(kinds))
        if self._memory is None or self._memory[0] != identity or not self._memory[1].shows_bases:
            self._device.detach()
            if self._memory is not None:
                self._memory[1].close()
                self._memory = None
            memory = self._mapped(kinds, abort)
            self._memory = (*self._segment_identity(), *room, len(kinds)), memory
            self._device.attach(memory, *room)
        return self._memory[1]

    def _mapped(self, kinds: tuple[SegmentKind, ...], abort: Abort) -> NodeMemory:
        name = worker_name(self._device_index)
        try:
            return attach(
                self._files, self._node, name, kinds=kinds, cancelled=lambda: abort.is_set
            )
        except LeaseCancelledError:
            abort.check()
            raise

    def _updates_blocks(self, plan: Plan) -> bool:
        return self._device_index in plan.updates.values()

    def _segment_identity(self) -> tuple[int, int]:
        """Returns device and inode of the control segment; (0, 0) if it does not exist yet."""
        node = self._config.cluster.nodes[self._node].name
        name = segment_name(self._files.run_id, node, SegmentKind.CONTROL)
        status = status_of(name)
        return (0, 0) if status is None else (status.st_dev, status.st_ino)

    def _largest_stage(self, plan: Plan) -> int:
        """Returns the bytes of the weights of this device's largest stage."""
        return max(
            (
                stage_bytes(self._table, stage.blocks, ALIGNMENT_BYTES)
                for stage in (*plan.forward_stages, *plan.backward_stages)
                if stage.device == self._device_index
            ),
            default=0,
        )

    def _addresses(self, peers: Set[int], endpoints: Mapping[str, str]) -> dict[int, str]:
        missing = [worker_name(peer) for peer in peers if not endpoints.get(worker_name(peer))]
        if missing:
            raise ProtocolError(f"Begin names no endpoint of {', '.join(sorted(missing))}")
        return {peer: endpoints[worker_name(peer)] for peer in sorted(peers)}

    def _optimizers(self, endpoints: Mapping[str, str]) -> dict[int, str]:
        """Returns the addresses of optimizerds: the local socket for this node, announced ones for
        other nodes.
        """
        addresses = {
            index: endpoints.get(optimizerd_name(node.name), "")
            for index, node in enumerate(self._config.cluster.nodes)
        }
        node_name = self._config.cluster.nodes[self._node].name
        addresses[self._node] = ipc_address(self._files.run_id, node_name, OPTIMIZER_SOCKET)
        return {index: address for index, address in addresses.items() if address}

    def _memoryds(self, endpoints: Mapping[str, str]) -> dict[int, str]:
        return {
            index: endpoints.get(memoryd_name(node.name), "")
            for index, node in enumerate(self._config.cluster.nodes)
        }

"""An abstract machine that runs programs without computing: what the validator decides with.

It follows the meaning of instructions (:mod:`penstock.protocol.instructions`): sends do not wait,
receives are posted, and the consumer of a tensor blocks until it has been sent. Every rule that a
device relies on is checked when the instruction is reached. Not here: costs and times
(:mod:`penstock.planner.simulate`), bytes (:mod:`penstock.planner.memory`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.planner.layout import StageLayout
from penstock.planner.lowering.weights import NUM_WEIGHT_BUFFERS
from penstock.planner.tensors import (
    Receive,
    Send,
    Tensor,
    TensorKind,
    endpoints,
    transferred,
)
from penstock.protocol.instructions import (
    Backward,
    FetchWeights,
    Forward,
    Instruction,
    Keep,
    OffloadGradients,
    Opcode,
    Phase,
    Program,
    Recompute,
    ReleaseWeights,
)


class RuleError(Exception):
    """An instruction breaks a rule: where, and why."""

    def __init__(self, device: int, position: int, reason: str) -> None:
        super().__init__(reason)
        self.device = device
        self.position = position
        self.reason = reason


_Buffer = tuple[int, Phase]


@dataclass(slots=True, kw_only=True)
class _Device:
    """What a device holds. ``buffers``: fetched weights and whether used; ``graphs``: the buffer
    each needs.
    """

    position: int = 0
    buffers: dict[_Buffer, bool] = field(default_factory=dict)
    graphs: dict[tuple[int, int], _Buffer] = field(default_factory=dict)
    held: set[Tensor] = field(default_factory=set)
    posted: dict[Tensor, int] = field(default_factory=dict)
    received: dict[int, list[tuple[Tensor, int]]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))


class _Broken(Exception):
    """Raised by handlers; :class:`Machine` adds the place."""


class Machine:
    """Runs the programs of all devices to the end.

    Raises (from :meth:`run`):
        RuleError: with the first place at which a rule is broken.
    """

    def __init__(
        self, layout: StageLayout, programs: tuple[Program, ...], *, evaluation: bool
    ) -> None:
        self._layout = layout
        self._programs = programs
        self._evaluation = evaluation
        self._devices = [_Device() for _ in programs]
        self._done: set[tuple[Opcode, int, int]] = set()
        self._sent: set[Tensor] = set()
        self._offloaded: set[int] = set()
        self._handlers: Mapping[Opcode, Callable[[int, Instruction], Tensor | None]] = {
            Opcode.FORWARD: self._forward,
            Opcode.RECOMPUTE: self._recompute,
            Opcode.BACKWARD: self._backward,
            Opcode.SEND_ACTIVATION: self._send,
            Opcode.SEND_GRADIENT: self._send,
            Opcode.SEND_CHECKPOINT: self._send,
            Opcode.RECV_ACTIVATION: self._receive,
            Opcode.RECV_GRADIENT: self._receive,
            Opcode.RECV_CHECKPOINT: self._receive,
            Opcode.FETCH_WEIGHTS: self._fetch,
            Opcode.RELEASE_WEIGHTS: self._release,
            Opcode.OFFLOAD_GRADIENTS: self._offload,
        }
        self._allowed_in_evaluation = {
            Opcode.FORWARD,
            Opcode.SEND_ACTIVATION,
            Opcode.RECV_ACTIVATION,
            Opcode.FETCH_WEIGHTS,
            Opcode.RELEASE_WEIGHTS,
        }

    def run(self) -> None:
        """Run everything, then check that nothing is missing or left over."""
        waiting = self._advance_all()
        if waiting:
            self._report_deadlock(waiting)
        for device in range(len(self._devices)):
            self._check_leftovers(device)
        self._check_complete()
        self._check_channels()

    def _advance_all(self) -> dict[int, Tensor]:
        """Run until no device can move; returns what each unfinished device waits for."""
        while True:
            waiting: dict[int, Tensor] = {}
            moved = False
            for index, (device, program) in enumerate(
                zip(self._devices, self._programs, strict=True)
            ):
                while device.position < len(program):
                    awaited = self._step(index, program[device.position])
                    if awaited is not None:
                        waiting[index] = awaited
                        break
                    device.position += 1
                    moved = True
            if not moved:
                return waiting

    def _step(self, device: int, instruction: Instruction) -> Tensor | None:
        position = self._devices[device].position
        handler = self._handlers.get(instruction.opcode)
        try:
            if handler is None:
                raise _Broken(f"{instruction.opcode.name} is not supported by this version")
            if self._evaluation and instruction.opcode not in self._allowed_in_evaluation:
                raise _Broken("does not belong into a forward-only evaluation")
            return handler(device, instruction)
        except _Broken as error:
            raise RuleError(device, position, str(error)) from error

    # Compute instructions.

    def _forward(self, device: int, instruction: Instruction) -> Tensor | None:
        assert isinstance(instruction, Forward)
        s, m, layout = instruction.stage, instruction.micro_batch, self._layout
        self._check_work(device, instruction, len(layout.forward), Phase.FORWARD)
        if (instruction.keep is Keep.NONE) is not self._evaluation:
            raise _Broken("keep=none belongs into evaluation programs, and only keep=none does")
        if instruction.keep is Keep.ALL and not layout.is_coupled(s):
            raise _Broken(
                "keep=all needs a backward stage of the same number, blocks and device;"
                " use keep=input and RECOMPUTE"
            )
        buffer = self._buffer(device, (s, Phase.FORWARD))
        source = Tensor(kind=TensorKind.ACTIVATION, stage=s - 1, micro_batch=m)
        if s > 0 and self._take(device, source) is not None:
            return source
        self._finish(device, instruction, buffer)
        state = self._devices[device]
        if s < len(layout.forward) - 1:
            state.held.add(Tensor(kind=TensorKind.ACTIVATION, stage=s, micro_batch=m))
        if instruction.keep is Keep.ALL:
            state.graphs[s, m] = buffer
        if instruction.keep is Keep.INPUT:
            state.held.update(
                Tensor(kind=TensorKind.CHECKPOINT, stage=b, micro_batch=m)
                for b in range(1, len(layout.backward))
                if layout.checkpoint_source(b) == s
            )
        return None

    def _recompute(self, device: int, instruction: Instruction) -> Tensor | None:
        assert isinstance(instruction, Recompute)
        b, m = instruction.stage, instruction.micro_batch
        self._check_work(device, instruction, len(self._layout.backward), Phase.BACKWARD)
        if (b, m) in self._devices[device].graphs:
            raise _Broken("its FORWARD kept all activations (keep=all); there is nothing to redo")
        buffer = self._backward_buffer(device, b)
        checkpoint = Tensor(kind=TensorKind.CHECKPOINT, stage=b, micro_batch=m)
        if b > 0 and self._take(device, checkpoint) is not None:
            return checkpoint
        self._finish(device, instruction, buffer)
        self._devices[device].graphs[b, m] = buffer
        return None

    def _backward(self, device: int, instruction: Instruction) -> Tensor | None:
        assert isinstance(instruction, Backward)
        b, m = instruction.stage, instruction.micro_batch
        self._check_work(device, instruction, len(self._layout.backward), Phase.BACKWARD)
        buffer = self._devices[device].graphs.get((b, m))
        if buffer is None:
            raise _Broken("no activations: neither RECOMPUTE nor FORWARD keep=all ran before it")
        gradient = Tensor(kind=TensorKind.GRADIENT, stage=b + 1, micro_batch=m)
        if b < len(self._layout.backward) - 1 and self._take(device, gradient) is not None:
            return gradient
        self._finish(device, instruction, buffer)
        del self._devices[device].graphs[b, m]
        if b > 0:
            produced = Tensor(kind=TensorKind.GRADIENT, stage=b, micro_batch=m)
            self._devices[device].held.add(produced)
        return None

    def _check_work(
        self,
        device: int,
        work: Forward | Recompute | Backward,
        num_stages: int,
        phase: Phase,
    ) -> None:
        """The stage exists, is this device's, and has not taken this micro-batch before."""
        if work.stage >= num_stages:
            raise _Broken(f"there are {num_stages} {phase} stages, numbered from 0")
        if work.micro_batch >= self._layout.num_microbatches:
            raise _Broken(f"there are {self._layout.num_microbatches} micro-batches, from 0")
        stages = self._layout.forward if phase is Phase.FORWARD else self._layout.backward
        if stages[work.stage].device != device:
            raise _Broken(f"{phase} stage {work.stage} is on device {stages[work.stage].device}")
        if (work.opcode, work.stage, work.micro_batch) in self._done:
            raise _Broken("this work was done before")

    def _finish(self, device: int, work: Forward | Recompute | Backward, buffer: _Buffer) -> None:
        self._devices[device].buffers[buffer] = True
        self._done.add((work.opcode, work.stage, work.micro_batch))

    def _take(self, device: int, tensor: Tensor) -> Tensor | None:
        """Consume an input; returns it when it has not been sent yet (the device blocks)."""
        places = endpoints(self._layout, tensor.kind, tensor.stage)
        assert places is not None
        state = self._devices[device]
        if places[0] == device:
            if tensor not in state.held:
                raise _Broken(f"needs the {tensor}, which this device has not computed before")
            state.held.remove(tensor)
            return None
        if tensor not in state.posted:
            raise _Broken(f"needs the {tensor}, but no receive of it was posted before")
        if tensor not in self._sent:
            return tensor
        del state.posted[tensor]
        return None

    # Transfers.

    def _send(self, device: int, instruction: Instruction) -> None:
        assert isinstance(instruction, Send)
        tensor = self._check_transfer(device, instruction, sending=True)
        state = self._devices[device]
        if tensor in self._sent:
            raise _Broken(f"the {tensor} was sent before")
        if tensor not in state.held:
            raise _Broken(f"the {tensor} does not exist on this device at this point")
        state.held.remove(tensor)
        self._sent.add(tensor)
        state.sent[instruction.peer].append(tensor)

    def _receive(self, device: int, instruction: Instruction) -> None:
        assert isinstance(instruction, Receive)
        tensor = self._check_transfer(device, instruction, sending=False)
        state = self._devices[device]
        if any(tensor == earlier for earlier, _ in state.received[instruction.peer]):
            raise _Broken(f"a receive of the {tensor} was posted before")
        state.posted[tensor] = state.position
        state.received[instruction.peer].append((tensor, state.position))

    def _check_transfer(self, device: int, instruction: Send | Receive, *, sending: bool) -> Tensor:
        tensor = transferred(instruction)
        places = endpoints(self._layout, tensor.kind, tensor.stage)
        if places is None or tensor.micro_batch >= self._layout.num_microbatches:
            raise _Broken(f"there is no {tensor}")
        here, there = places if sending else places[::-1]
        if places[0] == places[1]:
            raise _Broken(
                f"the {tensor} is produced and used on device {here}: nothing to transfer"
            )
        if (here, there) != (device, instruction.peer):
            verb = "sent" if sending else "received"
            raise _Broken(f"wrong peer: the {tensor} is {verb} on device {here}, peer={there}")
        return tensor

    # Weights and gradients.

    def _fetch(self, device: int, instruction: Instruction) -> None:
        assert isinstance(instruction, FetchWeights)
        forward = instruction.phase is Phase.FORWARD
        stages = self._layout.forward if forward else self._layout.backward
        buffers = self._devices[device].buffers
        if instruction.stage >= len(stages):
            raise _Broken(f"there are {len(stages)} {instruction.phase} stages, numbered from 0")
        if stages[instruction.stage].device != device:
            raise _Broken(
                f"{instruction.phase} stage {instruction.stage} is on device"
                f" {stages[instruction.stage].device}"
            )
        if (instruction.stage, instruction.phase) in buffers:
            raise _Broken("these weights are already here")
        if len(buffers) >= NUM_WEIGHT_BUFFERS:
            raise _Broken(f"no free buffer: all {NUM_WEIGHT_BUFFERS} weight buffers are in use")
        buffers[instruction.stage, instruction.phase] = False

    def _release(self, device: int, instruction: Instruction) -> None:
        assert isinstance(instruction, ReleaseWeights)
        state = self._devices[device]
        buffer = (instruction.stage, instruction.phase)
        if buffer not in state.buffers:
            raise _Broken("these weights are not here: never fetched, or released before")
        for (stage, micro_batch), needed in state.graphs.items():
            if needed == buffer:
                raise _Broken(
                    f"activations of stage {stage}, micro-batch {micro_batch} still wait for their"
                    " BACKWARD, which needs these weights"
                )
        if not state.buffers.pop(buffer):
            raise _Broken("these weights were fetched and never used")

    def _buffer(self, device: int, buffer: _Buffer) -> _Buffer:
        if buffer not in self._devices[device].buffers:
            raise _Broken(
                f"weights of {buffer[1]} stage {buffer[0]} are not here: not fetched yet, or"
                " already released"
            )
        return buffer

    def _backward_buffer(self, device: int, stage: int) -> _Buffer:
        shared = (stage, Phase.FORWARD)
        own = (stage, Phase.BACKWARD)
        buffers = self._devices[device].buffers
        if own not in buffers and shared in buffers and self._layout.is_coupled(stage):
            return shared
        return self._buffer(device, own)

    def _offload(self, device: int, instruction: Instruction) -> None:
        assert isinstance(instruction, OffloadGradients)
        b, stages = instruction.stage, self._layout.backward
        if b >= len(stages) or stages[b].device != device:
            raise _Broken("this device has no such backward stage")
        if b in self._offloaded:
            raise _Broken("these gradients were offloaded before")
        for m in range(self._layout.num_microbatches):
            if (Opcode.BACKWARD, b, m) not in self._done:
                raise _Broken(
                    f"the gradients are not final: BACKWARD of micro-batch {m} is missing"
                )
        self._offloaded.add(b)

    # What must hold when nothing moves any more.

    def _report_deadlock(self, waiting: Mapping[int, Tensor]) -> None:
        stuck: list[tuple[bool, int, str]] = []
        for device, tensor in waiting.items():
            places = endpoints(self._layout, tensor.kind, tensor.stage)
            assert places is not None
            rest = self._programs[places[0]][self._devices[places[0]].position :]
            circular = any(isinstance(i, Send) and transferred(i) == tensor for i in rest)
            instruction = self._programs[device][self._devices[device].position]
            fate = "which waits itself" if circular else "which never sends it"
            text = (
                f"device {device} ({instruction}) waits for the {tensor} from {places[0]}, {fate}"
            )
            stuck.append((circular, device, text))
        # A tensor that nobody sends is the cause; devices in a circle only follow.
        stuck.sort()
        device = stuck[0][1]
        reason = "deadlock: " + "; ".join(text for _, _, text in stuck)
        raise RuleError(device, self._devices[device].position, reason)

    def _check_leftovers(self, device: int) -> None:
        state = self._devices[device]
        end = len(self._programs[device])
        for tensor, position in state.posted.items():
            raise RuleError(device, position, f"the received {tensor} is never used")
        for tensor in sorted(state.held, key=str):
            raise RuleError(device, end, f"at the end: the {tensor} was neither used nor sent")
        for stage, micro_batch in state.graphs:
            raise RuleError(
                device,
                end,
                f"at the end: activations of stage {stage}, micro-batch {micro_batch} wait for"
                " their BACKWARD",
            )
        for stage, phase in state.buffers:
            raise RuleError(
                device, end, f"at the end: weights of {phase} stage {stage} are not released"
            )

    def _check_complete(self) -> None:
        work = [(Opcode.FORWARD, self._layout.forward)]
        if not self._evaluation:
            work.append((Opcode.BACKWARD, self._layout.backward))
        for opcode, stages in work:
            for index, stage in enumerate(stages):
                for m in range(self._layout.num_microbatches):
                    if (opcode, index, m) not in self._done:
                        raise RuleError(
                            stage.device,
                            len(self._programs[stage.device]),
                            f"at the end: {opcode.name} {index} {m} is missing",
                        )
        for index, stage in enumerate(self._layout.backward):
            if not self._evaluation and index not in self._offloaded:
                raise RuleError(
                    stage.device,
                    len(self._programs[stage.device]),
                    f"at the end: gradients of backward stage {index} were never offloaded",
                )

    def _check_channels(self) -> None:
        """Both ends of a channel agree on its order: ordered transports match by position."""
        for source, sender in enumerate(self._devices):
            for target, sent in sender.sent.items():
                received = self._devices[target].received[source]
                for tensor, (expected, position) in zip(sent, received, strict=False):
                    if tensor != expected:
                        raise RuleError(
                            target,
                            position,
                            f"receives from device {source} are not in the order of its sends:"
                            f" the {tensor} is sent in this place",
                        )
                if len(sent) != len(received):
                    missing = set(sent) - {tensor for tensor, _ in received}
                    raise RuleError(
                        target,
                        len(self._programs[target]),
                        f"at the end: device {source} sent the {min(map(str, missing))}, which"
                        " is never received",
                    )

"""Bytes on each device, from the order of its program alone.

Counted are:

- weight buffers, and gradients, accumulated in fp32;
- kept activations: less the dropped and the swapped out, plus the recomputed and those that peers
  swapped to the device;
- checkpoints, and tensors that BACKWARD_INPUT leaves for its BACKWARD_WEIGHT;
- tensors that arrive, from the posting of their receive on (before, a message waits in the host's
  memory, see :func:`inbox_peaks`);
- tensors that wait to be sent, until the send is issued;
- workspace while compute runs, and the bytes that devices always keep.

Shared memory and the table of a configuration: :mod:`penstock.planner.memory.table`. The simulator
has memory over *time*.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.host.sums import added
from penstock.planner.cost.costs import Costs
from penstock.planner.memory.allocation_ledger import MemoryBooks, Sizes, Swapped
from penstock.planner.schedule.layout import OrderedInstruction, StageLayout
from penstock.planner.schedule.tensors import Receive, Send, Tensor, taken_by, transferred
from penstock.planner.schedule.timing import order_times, unit_costs
from penstock.protocol.plan.instructions import Program
from penstock.protocol.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """Holds the bytes of a device at the instruction where it holds most."""

    weight_bytes: float = 0.0
    gradient_bytes: float = 0.0
    activation_bytes: float = 0.0
    workspace_bytes: float = 0.0
    static_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """The sum of all uses."""
        return (
            self.weight_bytes
            + self.gradient_bytes
            + self.activation_bytes
            + self.workspace_bytes
            + self.static_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Holds the bytes of a device while each instruction of its program runs, in its order.

    ``host_bytes``: what it has swapped to host memory.
    """

    weight_bytes: tuple[float, ...]
    gradient_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    workspace_bytes: tuple[float, ...]
    host_bytes: tuple[float, ...]
    static_bytes: float

    @property
    def total_bytes(self) -> tuple[float, ...]:
        """The bytes of all uses on the device, by instruction."""
        uses = (
            self.weight_bytes,
            self.gradient_bytes,
            self.activation_bytes,
            self.workspace_bytes,
        )
        return tuple(added(now) + self.static_bytes for now in zip(*uses, strict=True))

    @property
    def peak_position(self) -> int:
        """The first instruction at which the device holds most (0 in an empty program)."""
        totals = self.total_bytes
        return max(range(len(totals)), key=totals.__getitem__, default=0)

    @property
    def peak(self) -> DevicePeak:
        """The bytes that the device holds at that instruction."""
        if not self.weight_bytes:
            return DevicePeak(static_bytes=self.static_bytes)
        at = self.peak_position
        return DevicePeak(
            weight_bytes=self.weight_bytes[at],
            gradient_bytes=self.gradient_bytes[at],
            activation_bytes=self.activation_bytes[at],
            workspace_bytes=self.workspace_bytes[at],
            static_bytes=self.static_bytes,
        )


def device_peaks(plan: Plan, costs: Costs) -> tuple[DevicePeak, ...]:
    """Returns the peak of every device of a valid plan."""
    return tuple(footprint.peak for footprint in footprints(plan, costs))


def swapped_peaks(plan: Plan, costs: Costs) -> tuple[float, ...]:
    """Returns the bytes of host memory that each device's swaps need at most."""
    return tuple(max(footprint.host_bytes, default=0.0) for footprint in footprints(plan, costs))


def inbox_peaks(plan: Plan, costs: Costs) -> tuple[float, ...]:
    """Returns the bytes of host memory that messages to each device need at most: those that came
    before it posted their receives. The plan must be valid.
    """
    sizes = Sizes(plan, StageLayout.of(plan), costs)
    waiting: list[list[_Change]] = [[] for _ in plan.programs]
    for device, tensor, earliest, posted in early_arrivals(plan.programs):
        num_bytes = sizes.of_tensor(tensor.kind, tensor.stage)
        waiting[device] += [(earliest, num_bytes), (posted, -num_bytes)]
    return tuple(
        max(_with_guests((0.0,) * len(program), changes), default=0.0)
        for program, changes in zip(plan.programs, waiting, strict=True)
    )


def footprints(plan: Plan, costs: Costs) -> tuple[Footprint, ...]:
    """Returns every device's bytes along its program. The plan must be valid.

    When a peer holds what another device swapped to it follows from compute times (a block costs 1
    forward, 2 backward).
    """
    layout = StageLayout.of(plan)
    sizes = Sizes(plan, layout, costs)
    books = [MemoryBooks(sizes, program) for program in plan.programs]
    guests = _guests(plan, layout, [ledger.swaps for ledger in books])
    return tuple(
        Footprint(
            weight_bytes=tuple(ledger.weights),
            gradient_bytes=tuple(ledger.gradients),
            activation_bytes=_with_guests(ledger.activations, guests[device]),
            workspace_bytes=tuple(ledger.workspace),
            host_bytes=tuple(ledger.host),
            static_bytes=sizes.static_bytes(device) + ledger.resident_bytes,
        )
        for device, ledger in enumerate(books)
    )


_Change = tuple[int, float]
"""Bytes that come (or, negative, go) before an instruction."""


def _with_guests(own: Sequence[float], guests: Sequence[_Change]) -> tuple[float, ...]:
    if not guests:
        return tuple(own)
    changes = [0.0] * (len(own) + 1)
    for position, num_bytes in guests:
        changes[position] += num_bytes
    return tuple(a + b for a, b in zip(own, accumulate(changes[:-1]), strict=True))


def _guests(
    plan: Plan, layout: StageLayout, swaps: Sequence[Sequence[Swapped]]
) -> list[list[_Change]]:
    """Returns the changes of what each device holds for others."""
    guests: list[list[_Change]] = [[] for _ in plan.programs]
    if not any(swap.peer is not None for several in swaps for swap in several):
        return guests
    places = [
        [at for at, i in enumerate(program) if isinstance(i, OrderedInstruction)]
        for program in plan.programs
    ]
    orders = [
        tuple(i for i in program if isinstance(i, OrderedInstruction)) for program in plan.programs
    ]
    times = order_times(layout, orders, unit_costs(layout))
    for device, several in enumerate(swaps):
        for swap in several:
            if swap.peer is None:
                continue
            out_s = times.ends[device][bisect_left(places[device], swap.out_at)]
            in_s = times.starts[device][bisect_left(places[device], swap.in_at)]
            ends = [*places[swap.peer], len(plan.programs[swap.peer])]
            begin = ends[bisect_right(times.ends[swap.peer], out_s)]
            end = ends[bisect_left(times.starts[swap.peer], in_s)]
            guests[swap.peer] += [
                (begin, swap.num_bytes),
                (max(begin, end), -swap.num_bytes),
            ]
    return guests


_Clock = list[int]
"""The number of instructions that each device has surely executed."""


def early_arrivals(programs: tuple[Program, ...]) -> Iterator[tuple[int, Tensor, int, int]]:
    """Yields tensors that may arrive before their receive is posted.

    Each has the device, the tensor, the first instruction during which it may arrive, and the one
    that posts the receive.

    A peer sends a tensor when the tensor is made, which may be long before the receive is posted.
    Until then the message waits in the host's memory. Only an instruction that takes a tensor from
    another device waits for a peer, so these instructions bound how far peers can be. The programs
    must be those of a valid plan.
    """
    sent = _sent(programs)
    for device, program in enumerate(programs):
        for position, instruction in enumerate(program):
            if isinstance(instruction, Receive):
                tensor = transferred(instruction)
                earliest = sent[tensor, device][device]
                if earliest < position:
                    yield device, tensor, earliest, position


def _sent(programs: tuple[Program, ...]) -> dict[tuple[Tensor, int], _Clock]:
    """Returns by tensor and target the instructions that are surely executed when it is sent."""
    sent: dict[tuple[Tensor, int], _Clock] = {}
    clocks = [[0] * len(programs) for _ in programs]
    awaited = [_received(program) for program in programs]
    moved = True
    while moved:
        moved = False
        for device, program in enumerate(programs):
            clock = clocks[device]
            while clock[device] < len(program):
                instruction = program[clock[device]]
                taken = taken_by(instruction)
                if taken is not None and taken in awaited[device]:
                    if (taken, device) not in sent:
                        break
                    clock[:] = map(max, clock, sent[taken, device])
                if isinstance(instruction, Send):
                    sent[transferred(instruction), instruction.peer] = clock.copy()
                clock[device] += 1
                moved = True
    return sent


def _received(program: Program) -> frozenset[Tensor]:
    return frozenset(transferred(i) for i in program if isinstance(i, Receive))

"""Candidates of the tuner, and the grid of candidates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from penstock.planner.passes import PASSES
from penstock.planner.planning.build import ScheduleRequest
from penstock.planner.schedule.layout import Residency
from penstock.planner.schemes import SCHEMES, RecomputeMode

PASS_SETS: tuple[tuple[str, ...], ...] = (
    ("2bp",),
    ("mario",),
    ("mario", "2bp"),
    ("keep-graphs",),
    ("keep-graphs", "device-update"),
    ("keep-what-fits",),
    ("keep-what-fits", "2bp"),
    ("obscura",),
    ("match-stages", "device-update", "skip-dead-forward"),
    ("interleave-updates",),
    ("device-update",),
)
"""Passes that are tried on good candidates."""

_FOR_GPUS = (("keep-graphs", "device-update"), ("device-update",))
"""Those of no use where the host's cores are the devices: cores that update blocks are missing
elsewhere.
"""

_ON_ONE_DEVICE = frozenset(("1f1b", "interleaved"))
"""Schemes that represent all schemes with resident weights on one device: one with one stage, one
with several.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One point of the grid: a request that says its numbers of stages, and the number of sequences
    in each of its micro-batches.
    """

    request: ScheduleRequest
    micro_batch: int

    @property
    def stages(self) -> tuple[int, int]:
        """Numbers of forward and of backward stages of one route."""
        forward, backward = self.request.forward_stages, self.request.backward_stages
        assert forward is not None and backward is not None
        return forward, backward

    @property
    def length(self) -> int:
        """The number of instructions that a replica runs, roughly."""
        return self.request.num_microbatches * sum(self.stages)

    @property
    def key(self) -> tuple[str | int | tuple[str, ...], ...]:
        """The key that orders equally good candidates."""
        r = self.request
        sizes = (r.num_devices, r.replicas, self.micro_batch, r.num_microbatches)
        return (r.scheme, *sizes, *self.stages, r.recompute or "", r.drop, r.passes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The space of a search. ``num_devices`` of all replicas together, ``global_batch`` in
    sequences.

    Empty ``schemes`` or ``micro_batches``: all that make sense. ``recomputations``: mode and
    operators. ``max_replicas``: 1 for one pipeline over all devices. ``replicas``,
    ``forward_stages``, ``backward_stages``, ``passes``: only candidates with these. ``pass_sets``
    are tried on candidates without passes.
    """

    num_devices: int
    global_batch: int
    num_blocks: int
    schemes: tuple[str, ...] = tuple(SCHEMES)
    micro_batches: tuple[int, ...] = ()
    recomputations: tuple[tuple[RecomputeMode, tuple[str, ...]], ...] = (("none", ()), ("full", ()))
    stages_per_device: tuple[int, ...] = (1, 2, 4)
    backward_per_forward: tuple[int, ...] = (1, 2, 3)
    pass_sets: tuple[tuple[str, ...], ...] = PASS_SETS
    max_replicas: int | None = None
    replicas: int | None = None
    forward_stages: int | None = None
    backward_stages: int | None = None
    passes: tuple[str, ...] = ()

    def candidates(self) -> tuple[Candidate, ...]:
        """Returns every combination that its scheme accepts. Short programs come first, so that a
        good candidate is known before expensive ones are tried.
        """
        return tuple(sorted(set(self._combinations()), key=lambda c: (c.length, c.key)))

    def _combinations(self) -> Iterator[Candidate]:
        for scheme, replicas in product(self.schemes, _divisors(self.num_devices)):
            num_devices = self.num_devices // replicas
            if replicas > (self.max_replicas or replicas) or self.global_batch % replicas:
                continue
            if replicas != (self.replicas or replicas):
                continue
            share = self.global_batch // replicas
            sizes = self.micro_batches or powers_of_two(share)
            for micro_batch in (size for size in sizes if share % size == 0):
                yield from self._of_scheme(
                    scheme, num_devices, replicas, micro_batch, share // micro_batch
                )

    def _of_scheme(
        self, name: str, num_devices: int, replicas: int, micro_batch: int, count: int
    ) -> Iterator[Candidate]:
        scheme = SCHEMES[name]
        if scheme.check_devices(num_devices) is not None:
            return
        if scheme.whole_model_per_device and replicas > 1:
            return  # it is data parallel by itself
        if num_devices == 1 and self._plainer(name):
            return
        for forward, backward in self._stages(name, num_devices):
            if scheme.check_microbatches(count, num_devices, forward) is not None:
                continue
            for mode, drop in self.recomputations:
                if mode in scheme.recompute_modes:
                    request = ScheduleRequest(
                        scheme=name,
                        num_devices=num_devices,
                        num_microbatches=count,
                        forward_stages=forward,
                        backward_stages=backward,
                        recompute=mode,
                        drop=drop,
                        passes=self.passes,
                        replicas=replicas,
                        reduce_gradients="auto",
                    )
                    yield Candidate(request=request, micro_batch=micro_batch)

    def _plainer(self, name: str) -> bool:
        """Returns whether another scheme does the same on one device, where weights stay and no
        device waits for another. Several stages publish the last gradients one after the other.
        """
        resident = SCHEMES[name].residency is Residency.RESIDENT
        return resident and name not in _ON_ONE_DEVICE and _ON_ONE_DEVICE <= {*self.schemes}

    def _stages(self, name: str, num_devices: int) -> Iterable[tuple[int, int]]:
        """Numbers of stages that the scheme accepts: its own choice, and those of the space."""
        scheme = SCHEMES[name]
        given = self.forward_stages, self.backward_stages
        pairs = {scheme.default_stages(num_devices, self.num_blocks, self.forward_stages)}
        per_route = 1 if scheme.whole_model_per_device else num_devices
        per_device = self.stages_per_device
        if num_devices == 1:
            per_device = (*per_device, *_doubled(max(per_device), self.num_blocks))
        for chunks, finer in product(per_device, self.backward_per_forward):
            forward = self.forward_stages or chunks * per_route
            pairs.add((forward, self.backward_stages or finer * forward))
        return sorted(
            stages
            for stages in pairs
            if max(stages) <= self.num_blocks
            and all(want in (None, number) for want, number in zip(given, stages, strict=True))
            and scheme.check_stages(*stages, num_devices) is None
        )


def _doubled(number: int, at_most: int) -> Iterator[int]:
    """Yields twice the number, twice that and so on, and at last ``at_most``."""
    while (number := 2 * number) < at_most:
        yield number
    yield at_most


def known_pass_sets(*, own_memory: bool = True) -> tuple[tuple[str, ...], ...]:
    """Returns the known :data:`PASS_SETS` that help devices with ``own_memory``, or without."""
    useful = (names for names in PASS_SETS if own_memory or names not in _FOR_GPUS)
    return tuple(names for names in useful if all(name in PASSES for name in names))


def _divisors(number: int) -> Sequence[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def powers_of_two(at_most: int) -> Sequence[int]:
    """Returns 1, 2, 4 and so on, up to ``at_most``."""
    return [1 << k for k in range(at_most.bit_length()) if 1 << k <= at_most]

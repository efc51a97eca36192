"""Constants of a scheduler: members, blocks, plan, configuration, deadlines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from penstock.config.evaluation import EvaluationSet, Judge
from penstock.config.schema import Config
from penstock.daemons.scheduler.machine.position import LossScaling, Position
from penstock.protocol.run.names import (
    devices_of_node,
    memoryd_name,
    mirrord_name,
    node_member_name,
    optimizerd_name,
    worker_name,
)
from penstock.protocol.run.numerics import Numerics
from penstock.shm.table import BlockTable, DType


class Role(Enum):
    """Role of a member."""

    NODE = "node"
    MEMORYD = "memoryd"
    OPTIMIZERD = "optimizerd"
    MIRRORD = "mirrord"
    WORKER = "worker"


class RunPhase(Enum):
    """Phase of a run, as ``penstock status`` shows it."""

    GATHERING = "gathering"
    FENCING = "fencing"
    DRAINING = "draining"
    RESTORING = "restoring"
    BEGINNING = "beginning"
    RUNNING = "running"
    DECIDING = "deciding"
    AMENDING = "amending"
    MIRRORING = "mirroring"
    SETTLING = "settling"
    SAVING = "saving"
    EVALUATING = "evaluating"
    PAUSED = "paused"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSpec:
    """A member that every epoch needs. ``node``: the name of the node it runs on."""

    name: str
    role: Role
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds that the scheduler waits for members.

    Limits of attempts, evaluations, restores, settling and saves follow from
    ``cluster.attempt_timeout_s`` and the duration of attempts
    (:class:`~penstock.daemons.scheduler.machine.activities.activity.HangDetector`).
    """

    drain_s: float = 120.0
    begin_s: float = 600.0
    stop_s: float = 60.0
    shutdown_s: float = 15.0


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Constants of the run."""

    run_id: str
    config: Config
    members: tuple[MemberSpec, ...]
    """Members that each epoch needs."""
    blocks: tuple[int, ...]
    """Indexes of the blocks with trainable parameters."""
    owners: tuple[str, ...]
    """optimizerd of every block."""
    plan_digest: str
    plan_scheme: str
    state_dir: str
    """Directory of the saved states."""
    state_bytes: int = 0
    """Bytes of a saved state, over all nodes."""
    since_1970_s: float = 0.0
    """Seconds to add to the machine's clock for seconds since 1970."""
    contributors: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Other memoryds with gradients of a memoryd's blocks in their memory, by memoryd."""
    deadlines: Deadlines = Deadlines()
    data_samples: int | None = None
    """Samples of one pass over the training data; None for synthetic data."""
    numerics: Numerics | None = None
    """Numerics recipe; None in a run without one."""

    @cached_property
    def loss_scaling(self) -> LossScaling:
        """Rule of the loss scale."""
        return LossScaling(
            dynamic=self.config.model.dtype is DType.FP16,
            initial=self.config.optimizer.initial_loss_scale,
            growth_interval=self.config.optimizer.loss_scale_growth_interval,
            minimum=self.config.optimizer.loss_scale_min,
        )

    def holds(self, position: Position) -> bool:
        """Returns whether the attempt that starts at ``position`` waits for the norm."""
        speculate = self.config.optimizer.speculate
        return position.hold if speculate == "auto" else speculate == "never"

    def data_epochs(self, samples: int) -> float | None:
        """Returns the passes over the training data in ``samples``; None for synthetic data."""
        return samples / self.data_samples if self.data_samples else None

    @cached_property
    def evaluation_sets(self) -> tuple[EvaluationSet, ...]:
        """Sets that the run evaluates."""
        return self.config.evaluation_sets

    @cached_property
    def best_judge(self) -> Judge | None:
        """Metric of ``train.keep_best``."""
        return self.config.best_judge

    @cached_property
    def stop_judge(self) -> Judge | None:
        """Metric of ``train.stop_early``."""
        return self.config.stop_judge

    @property
    def emulated(self) -> bool:
        """True if losses, norms and times are simulated; lines of metrics then say so."""
        return self.config.cluster.platform.simulated_clock

    @cached_property
    def trainable(self) -> frozenset[int]:
        """``blocks`` as a set."""
        return frozenset(self.blocks)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes' supervisors."""
        return self._named(Role.NODE)

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """Member names of the workers."""
        return self._named(Role.WORKER)

    @cached_property
    def memoryds(self) -> tuple[str, ...]:
        """Member names of the memoryds."""
        return self._named(Role.MEMORYD)

    @cached_property
    def optimizerds(self) -> tuple[str, ...]:
        """Member names of the optimizerds."""
        return self._named(Role.OPTIMIZERD)

    @cached_property
    def spectators(self) -> frozenset[str]:
        """optimizerds of nodes that train no block, and so report no status of a block."""
        return frozenset(self.optimizerds) - {self.owners[block] for block in self.blocks}

    @cached_property
    def mirrords(self) -> tuple[str, ...]:
        """Member names of the mirrords, which keep replicas; there may be none."""
        return self._named(Role.MIRRORD)

    def _named(self, role: Role) -> tuple[str, ...]:
        return tuple(member.name for member in self.members if member.role is role)


def saved_bytes(table: BlockTable) -> int:
    """Returns the bytes that every save writes: fp32 masters and the optimizer's arrays. The base,
    which only the first save writes, is not counted.
    """
    arrays = 1 + len(table.state_arrays)
    trainable = sum(block.trainable_elements for block in table.blocks)
    return trainable * arrays * DType.FP32.itemsize


def member_specs(config: Config) -> tuple[MemberSpec, ...]:
    """Returns all members that an epoch needs, in the order of ``expected_members``."""
    specs: list[MemberSpec] = []
    for index, node in enumerate(config.cluster.nodes):
        names = [
            (node_member_name(node.name), Role.NODE),
            (memoryd_name(node.name), Role.MEMORYD),
            (optimizerd_name(node.name), Role.OPTIMIZERD),
        ]
        if config.mirrors:
            names.append((mirrord_name(node.name), Role.MIRRORD))
        names += [(worker_name(device), Role.WORKER) for device in devices_of_node(config, index)]
        specs += [MemberSpec(name=name, role=role, node=node.name) for name, role in names]
    return tuple(specs)

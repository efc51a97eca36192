"""Plans that workers can run; all others are refused here before anything starts, without torch.

Workers have a handler for every opcode. Their limits depend on the cluster and on the optimizer.
:mod:`penstock.planner.validate.check` decides whether a plan is valid at all.
"""

from __future__ import annotations

from penstock.config.optimizers import names_on_gpus
from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.protocol.plan.instructions import Instruction, SwapIn, SwapOut
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.reduction import Reduction
from penstock.protocol.run.names import ownership
from penstock.shm.table import BlockTable


def check_executable(plan: Plan, *, devices_per_node: int) -> None:
    """Refuses a plan with swaps to devices of other nodes, or with gradients that workers cannot
    sum.

    Raises:
        ConfigError: naming the first such thing and what workers do.
    """
    for name, programs in (("plan", plan.programs), ("evaluation", plan.evaluation)):
        for device, program in enumerate(programs):
            for position, instruction in enumerate(program):
                complaint = _complaint(instruction, device, devices_per_node)
                if complaint is not None:
                    raise ConfigError(
                        f"{name}: {plan.scheme}, device {device}, instruction {position} is"
                        f" {str(instruction)!r}, and workers do not {complaint}"
                    )
    Reduction.of(plan)


def check_updates(config: Config, table: BlockTable, plan: Plan) -> None:
    """Refuses UPDATE of blocks if the worker cannot read all that the update needs.

    Raises:
        ConfigError: names the block.
    """
    if not plan.updates:
        return
    advice = "leave it to the CPU (schedule.passes, or the plan's UPDATE instructions)"
    if config.optimizer.rollback == "arithmetic":
        raise ConfigError(
            "optimizer.rollback = arithmetic: blocks step in place, and devices only preview (block"
            f" {min(plan.updates)}): {advice}, or use rollback: exact"
        )
    if config.emulation.optimizer_start == "flush":
        raise ConfigError(
            "emulation.optimizer_start = flush: devices update blocks as soon as their gradients"
            f" are there (block {min(plan.updates)}): {advice}"
        )
    if config.optimizer.master == "split":
        raise ConfigError(
            f"plan: UPDATE of block {min(plan.updates)}, and optimizer.master is split: devices"
            f" update whole masters only: {advice}, or set optimizer.master: fp32"
        )
    own_kernels = config.cluster.platform.own_update_kernels
    if own_kernels and not config.optimizer.name.traits.on_gpus:
        raise ConfigError(
            f"optimizer.name = {config.optimizer.name.value}: GPUs update with"
            f" {names_on_gpus()} only (block {min(plan.updates)}): {advice}"
        )
    if plan.shards_weights:
        raise ConfigError(
            f"plan: {plan.scheme} shares weights out over devices, and UPDATE (of block"
            f" {min(plan.updates)}) is of whole blocks: {advice}"
        )
    owners = ownership(config, table, plan)
    for index in sorted(plan.updates):
        block, node = table.blocks[index], owners.owner[index]
        elsewhere = sorted(set(owners.computed_on[index]) - {node})
        if elsewhere:
            names = ", ".join(config.cluster.nodes[n].name for n in elsewhere)
            raise ConfigError(
                f"plan: UPDATE of block {index} ({block.name}): node {names} computes a part of its"
                f" gradients, which node {config.cluster.nodes[node].name} gets in memory that"
                f" devices do not see: {advice}"
            )
        if not block.trainable_elements:
            raise ConfigError(
                f"plan: UPDATE of block {index} ({block.name}), which has nothing to train: leave"
                " it out"
            )


def _complaint(instruction: Instruction, device: int, devices_per_node: int) -> str | None:
    """Returns why workers cannot execute an instruction; ``None`` if they can."""
    if isinstance(instruction, (SwapOut, SwapIn)) and instruction.peer is not None:
        here, peer_node = device // devices_per_node, instruction.peer // devices_per_node
        if here != peer_node:
            return (
                f"swap to devices of other nodes (device {device} is on node {here}, its peer on"
                f" node {peer_node}, cluster.workers = {devices_per_node}); they swap to devices of"
                " their node, or to host memory (no peer=)"
            )
    return None

"""Who gets which cores, on machines that are not here; and what the kernel makes of it on this."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import _native
from penstock.config.schema import Config, parse_config
from penstock.host.errors import CapacityError, ConfigError
from penstock.host.limits.cgroup import CpuLimit
from penstock.host.topology import Topology, format_cpus, parse_cpus
from penstock.protocol.run.hardware.cpus import check_cpus, cpu_shortage, cpus_needed
from penstock.protocol.run.hardware.placement import Placement, page_places, pieces, place
from penstock.shm.layout import NodeLayout, Ownership, SegmentKind
from penstock.shm.pages import NodeRange, nodes_of_pages, prefer_nodes
from penstock.shm.table import BlockSpec, BlockTable, DType


def server(nodes: int = 2, cores: int = 4, threads: int = 2) -> Topology:
    """CPUs count node by node, second hardware threads behind all first ones, as on x86 servers."""
    count = nodes * cores
    return Topology(
        node_of={cpu: cpu % count // cores for cpu in range(count * threads)},
        siblings={
            cpu: tuple(cpu % count + count * t for t in range(threads))
            for cpu in range(count * threads)
        },
        nodes=tuple(range(nodes)),
    )


def config(
    optimizer: dict[str, object] | None = None,
    workers: int = 2,
    device: str = "cpu",
    hosts: tuple[str, ...] = ("here",),
) -> Config:
    return parse_config(
        {
            "model": {"hf": {"model_type": "llama"}},
            "data": {"path": "@stdlib"},
            "optimizer": optimizer or {},
            "cluster": {
                "workers": workers,
                "device": device,
                "nodes": [{"name": f"n{i}", "host": host} for i, host in enumerate(hosts)],
            },
        }
    )


def cpus(
    wanted: Config, topology: Topology, *, allowed: str = "0-63", node: int = 0
) -> tuple[str, str, str]:
    """Optimizer's threads in order, their NUMA nodes, and the CPUs of workers."""
    found = place(wanted, node, topology=topology, allowed=parse_cpus(allowed))
    return (
        ",".join(map(str, found.optimizer)),
        "".join(map(str, found.nodes)),
        format_cpus(found.workers),
    )


def test_workers_on_cores_share_them_all_with_one_thread_a_physical_core() -> None:
    assert cpus(config(), server(1, 2, 1)) == ("0,1", "00", "0-1")
    assert cpus(config(), server()) == ("0,1,2,3,4,5,6,7", "00001111", "0-15")


def test_a_quota_leaves_the_optimizer_as_many_threads_and_workers_all_cores() -> None:
    """Two CPUs' time on a machine of eight cores, as Kubernetes grants it."""
    found = place(config(), 0, topology=server(), allowed=range(16), quota=2)
    assert (found.optimizer, format_cpus(found.workers)) == ((0, 4), "0-15")
    gpu = place(config(workers=1, device="cuda"), 0, topology=server(), allowed=range(16), quota=2)
    assert (gpu.optimizer, format_cpus(gpu.workers)) == ((4,), "0-3,5-11,13-15")


GIVEN = CpuLimit(
    allowed=frozenset({0, 1}), online=64, quota=None, owner="cpuset of cgroup /slurm/job_5"
)


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"workers": 8}, 8),
        ({"workers": 8, "device": "cuda"}, 9),
        ({"optimizer": {"threads": 12}, "device": "cuda"}, 14),
        ({"optimizer": {"cores": "0-3"}}, 4),
        ({"device": "emulated:analytic:V100-32:spipe-10b", "workers": 8}, 1),
    ],
)
def test_what_a_node_needs_of_cpus(changes: dict[str, Any], needed: int) -> None:
    assert cpus_needed(config(**changes)) == needed


def test_two_cpus_of_sixty_four_are_refused_with_what_to_change() -> None:
    wanted = config(workers=8, device="cuda")
    with pytest.raises(CapacityError) as caught:
        check_cpus(wanted, [0], GIVEN, {"SLURM_JOB_ID": "5"})
    assert str(caught.value) == (
        "CPUs: node n0 needs 9, there are 2 of the machine's 64 (CPUs 0-1: cpuset of cgroup"
        " /slurm/job_5). Threads that wait for each other would make the optimizer many times"
        " slower. Slurm gives a task one CPU unless asked: #SBATCH --cpus-per-task=9 and, since"
        " srun does not take that over from the script, export SRUN_CPUS_PER_TASK=9 before srun; or"
        " say cluster.cpus_per_node: 2, to train with these"
    )
    two_nodes = config(hosts=("here", "here"))
    with pytest.raises(CapacityError, match=r"nodes n0, n1 need 2 each, in all 4.*limits.cpu"):
        check_cpus(two_nodes, [0, 1], GIVEN, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    made_do = wanted.cluster.model_copy(update={"cpus_per_node": 2})
    check_cpus(wanted.model_copy(update={"cluster": made_do}), [0], GIVEN, {})


def test_a_machine_that_has_no_more_cpus_is_the_users_choice() -> None:
    small = replace(GIVEN, online=2, owner="the machine")
    wanted = config(workers=8)
    check_cpus(wanted, [0], small, {})
    assert cpu_shortage(wanted, [0], small).startswith("CPUs: node n0 needs 8, there are 2 (")


def test_workers_on_gpus_get_a_core_each_with_its_hardware_threads() -> None:
    # Taken evenly from both nodes, at most half of all.
    assert cpus(config(device="cuda"), server()) == ("1,2,3,5,6,7", "000111", "0,4,8,12")
    assert cpus(config(workers=9, device="cuda"), server()) == (
        "2,3,6,7",
        "0011",
        "0-1,4-5,8-9,12-13",
    )
    assert cpus(config(workers=4, device="cuda"), server(1, 1, 1)) == ("0", "0", "0")


def test_a_share_of_cores_is_left_as_configured() -> None:
    assert cpus(config({"leave_cores": "1/4"}), server())[0] == "1,2,3,5,6,7"
    assert cpus(config({"leave_cores": 0}, device="cuda"), server())[0] == "0,1,2,3,4,5,6,7"
    assert cpus(config({"leave_cores": 0.99}), server(1, 2, 1))[0] == "1"


def test_few_threads_spread_over_nodes_and_many_use_second_hardware_threads_last() -> None:
    assert cpus(config({"threads": 2}), server())[:2] == ("0,4", "01")
    assert cpus(config({"threads": 10}), server())[:2] == ("0,8,1,2,3,4,12,5,6,7", "0000011111")
    assert cpus(config({"threads": 99}), server(1, 2, 1))[0] == "0,1"
    # Threads that were asked for come before cores that are left unasked.
    assert cpus(config({"threads": 8}, device="cuda"), server())[::2] == ("0,1,2,3,4,5,6,7", "0-15")
    assert len(place(config(), 0, topology=server(4, 32), allowed=range(256)).optimizer) == 64


def test_only_allowed_cores_count() -> None:
    assert cpus(config(), server(), allowed="2,10,13-14") == ("2,13,14", "011", "2,10,13-14")


def test_nodes_of_the_cluster_on_one_machine_divide_it() -> None:
    wanted = config(hosts=("there", "here", "here"), device="cuda", workers=1)
    assert [cpus(wanted, server(), node=i) for i in range(3)] == [
        ("1,2,3,4,5,6,7", "0001111", "0,8"),
        ("1,2,3", "000", "0,4,8,12"),
        ("5,6,7", "111", "0,4,8,12"),
    ]
    few = config(hosts=("here", "here"))
    assert [cpus(few, server(1, 2, 1), node=i)[0] for i in range(2)] == ["0,1", "0,1"]


def test_named_cores_are_taken_in_the_order_of_their_nodes() -> None:
    assert cpus(config({"cores": [5, 0, 4]}), server()) == ("0,5,4", "011", "0-15")
    assert cpus(config({"cores": "0-3"}, device="cuda"), server())[2] == "4-7,12-15"


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"cores": [1, 16]}, r"optimizer.cores = 1,16: 16 not on this machine; usable here: 0-14"),
        ({"cores": "14-15"}, "15 not allowed to this process"),
        ({"cores": []}, "auto, a list of CPU numbers"),
        ({"cores": [-1]}, "auto, a list of CPU numbers"),
        ({"cores": "3-1"}, "'3-1' is no core and no range"),
        ({"cores": [1, 1]}, "named twice"),
        ({"cores": [1], "threads": 1}, "leave out optimizer.threads"),
        ({"leave_cores": 1}, "0 or more and below 1"),
    ],
)
def test_cores_that_cannot_be_had_are_refused(optimizer: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(config(optimizer), 0, topology=server(), allowed=range(15))


def test_topology_is_read_as_linux_writes_it(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("cpu/online", "0-1,4-5\n")  # 2 and 3 are switched off
    write("node/node0/cpulist", "0,2,4\n")
    write("node/node1/cpulist", "1,3,5\n")
    write("node/node2/cpulist", "\n")  # memory without cores
    for cpu in (0, 1, 4, 5):
        write(f"cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}\n")
    found = Topology.read(tmp_path)
    assert found.node_of == {0: 0, 1: 1, 4: 0, 5: 1}
    assert found.siblings[5] == (1, 5)
    assert found.nodes == (0, 1, 2)
    assert [core.cpus for core in found.cores({0, 1, 4})] == [(0, 4), (1,)]
    assert Topology.read(tmp_path / "absent").siblings[0] == (0,)


def test_the_topology_of_this_machine_covers_what_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    assert {cpu for core in Topology.read().cores(allowed) for cpu in core.cpus} == allowed


def test_pieces_are_those_of_the_native_sweeps() -> None:
    # The undo area lists the pieces of the last pass: end behind start, 576 bytes a piece.
    count, cores = 5 * 4096 + 16, [min(os.sched_getaffinity(0))]
    arrays = [np.frombuffer(mmap.mmap(-1, count * 4), dtype=np.float32) for _ in range(4)]
    for threads in (1, 2, 3, 4, 8):
        undo = np.frombuffer(mmap.mmap(-1, _native.undo_bytes(threads)), dtype=np.uint64)
        with _native.Pool(cores * threads) as pool:
            _native.settle(
                pool,
                master=arrays[0],
                arrays=arrays[1:3],
                grads=[arrays[3]],
                hyper=_native.Hyper(
                    lr=0.1, beta1=0.9, beta2=0.9, eps=1e-8, step=1, coefficient=1.0
                ),
                ranges=[(0, count, 0.0, 1.0)],
                undo=undo.view(np.uint8),
                tag=1,
            )
        table = undo[8:].reshape(-1, 72)
        used = [(int(start), int(end)) for start, end in table[:, :2] if end][:threads]
        assert sorted(used) == pieces(count, threads)


def test_each_threads_pieces_belong_on_its_node() -> None:
    block = BlockSpec(
        index=0,
        name="block",
        kind="kind",
        layer_index=None,
        tensors=(),
        borrows=(),
        trainable_elements=5 * 4096,
        frozen_elements=0,
        contributions=1,
        forward_flops=1.0,
        activation_bytes=1.0,
        output_bytes=1.0,
    )
    table = BlockTable(
        blocks=(block,),
        weight_dtype=DType.BF16,
        grad_dtype=DType.FP32,
        state_arrays=("momentum_buffer",),
        vocab_size=1,
        num_parameters=5 * 4096,
    )
    layout = NodeLayout.compute(table, Ownership(owner=(0,), computed_on=((0,),)), 0)
    placement = Placement(optimizer=(0, 1, 4), nodes=(0, 0, 1), workers=(0,), several=True)
    found = page_places(placement, layout, table)
    # Three threads: pieces of 2, 1 and 2 chunks; 20480 elements an array.
    assert found[SegmentKind.STATE] == [
        NodeRange(offset=0, num_bytes=3 * 4096 * 4, node=0),
        NodeRange(offset=3 * 4096 * 4, num_bytes=2 * 4096 * 4, node=1),
        NodeRange(offset=5 * 4096 * 4, num_bytes=3 * 4096 * 4, node=0),
        NodeRange(offset=8 * 4096 * 4, num_bytes=2 * 4096 * 4, node=1),
    ]
    assert found[SegmentKind.WEIGHTS][1].offset == 3 * 4096 * 2


def test_the_kernel_puts_pages_on_the_node_and_says_so() -> None:
    node = min(Topology.read().node_of.values())
    with mmap.mmap(-1, 4 * 4096) as mapping:
        try:
            prefer_nodes(mapping, [NodeRange(offset=4096, num_bytes=8192, node=node)])
        except PermissionError:
            pytest.skip("this container forbids mbind")
        mapping[4096] = mapping[8192] = 1
        assert nodes_of_pages(mapping, [4096, 8192 + 17, 3 * 4096]) == [node, node, None]
        with pytest.raises(OSError, match="mbind: Invalid argument"):
            prefer_nodes(mapping, [NodeRange(offset=0, num_bytes=4096, node=900)])

"""Which node a process is: the variables of engines, and the configuration beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from penstock.config.schema import Config, parse_config
from penstock.daemons.node.joining.addresses import addresses_of
from penstock.daemons.node.joining.launchers import Place, expand_hosts, find_place
from penstock.daemons.node.joining.rendezvous import check_alone, settle
from penstock.host.errors import ConfigError

STEP = {
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "n2",
}
"""As Slurm 22.05 has them on the second node."""
JOB = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
"""As in a batch script."""
POD = {
    "JOB_COMPLETION_INDEX": "1",
    "NNODES": "2",
    "JOBSET_NAME": "tiny",
    "REPLICATED_JOB_NAME": "node",
    "JOB_INDEX": "0",
}
TORCHRUN = {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def nobody() -> str:
    raise AssertionError("nobody's name is asked for")


def place(environment: Mapping[str, str | None], host_name: str | None = None) -> Place | None:
    """The place in an environment; None removes a variable."""
    present = {name: value for name, value in environment.items() if value is not None}
    return find_place(present, nobody if host_name is None else lambda: host_name)


def config_of(**cluster: Any) -> Config:
    return parse_config({"model": {"path": "m"}, "data": {"path": "x"}, "cluster": cluster})


def test_lists_of_hosts() -> None:
    assert expand_hosts("n1", "X") == ("n1",)
    assert expand_hosts("n[1-2,07]x,login-a.b", "X") == ("n1x", "n2x", "n07x", "login-a.b")
    assert expand_hosts("r[1-2]n[09-10]", "X") == ("r1n09", "r1n10", "r2n09", "r2n10")


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "n[",
        "n[1",
        "n]",
        "n[2-1]",
        "n[a]",
        "n[]",
        "n[1-2-3]",
        "n1,n1",
        "n 1",
        "n[0-99999999]",
        "n[1-[2]]",
        "n[0-9999][0-9999][0-9999]",
        "\u0661[\u0661]",
    ],
)
def test_garbled_lists_of_hosts(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^X='.*' is not a list of hosts such as n\[1-2\]"):
        expand_hosts(text, "X")


def test_places() -> None:
    assert place({}) is None
    assert place(STEP) == Place(
        engine="Slurm job 5",
        rank=1,
        rank_source="SLURM_NODEID=1",
        count=2,
        count_source="SLURM_STEP_NUM_NODES=2",
        hosts=("n1", "n2"),
        port=20_005,
    )
    assert place(POD) == Place(
        engine="JobSet tiny",
        rank=1,
        rank_source="JOB_COMPLETION_INDEX=1",
        count=2,
        count_source="NNODES=2",
        hosts=("tiny-node-0-0.tiny", "tiny-node-0-1.tiny"),
        first="tiny-node-0-0.tiny",
        port=29_600,
        moves=True,
    )
    assert place(TORCHRUN) == Place(
        engine="torchrun",
        rank=1,
        rank_source="GROUP_RANK=1",
        count=2,
        count_source="GROUP_WORLD_SIZE=2",
        first="127.0.0.1",
        port=29_501,
    )
    indexed = place({"JOB_COMPLETION_INDEX": "1", "NNODES": "2"}, "big-1.pods.x.svc.local")
    assert indexed is not None and indexed.hosts == (
        "big-0.pods.x.svc.local",
        "big-1.pods.x.svc.local",
    )
    alone = place({**JOB, "SLURM_JOB_NODELIST": "n7"})
    assert alone is not None and (alone.rank, alone.hosts) == (0, ("n7",))
    by_hand = place({"NODE_RANK": "0", "NNODES": "1"})
    assert by_hand is not None and (by_hand.rank, by_hand.count) == (0, 1)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (JOB, "Slurm job 5 has 2 nodes, and this process is outside of its steps"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS=4 on 2 nodes"),
        ({**STEP, "SLURM_LOCALID": "1"}, "--ntasks-per-node=1"),
        ({**STEP, "SLURM_NODEID": None}, "SLURM_NODEID is not set"),
        ({**STEP, "SLURM_NODEID": "-1"}, "SLURM_NODEID='-1' is not a number"),
        ({**STEP, "SLURM_NODEID": "\u0661"}, "SLURM_NODEID='\u0661' is not a number"),
        ({**STEP, "SLURM_NODEID": "2"}, "ranks of 2 nodes are 0 to 1"),
        ({**STEP, "SLURM_STEP_NUM_NODES": "3"}, "SLURM_STEP_NUM_NODES=3 and SLURM_STEP_NODELIST"),
        ({**STEP, "SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST='n[1-' is not a list"),
        ({**STEP, "SLURMD_NODENAME": "n1"}, "SLURMD_NODENAME=n1 and SLURM_NODEID=1 (which is n2"),
        ({**STEP, "SLURM_JOB_ID": "x"}, "SLURM_JOB_ID='x' is not a number"),
        ({**POD, "REPLICATED_JOB_NAME": None}, "REPLICATED_JOB_NAME is not set"),
        ({**POD, "JOB_COMPLETION_INDEX": "2"}, "JOB_COMPLETION_INDEX=2 and NNODES=2"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "--nproc-per-node=1"),
        ({**TORCHRUN, "GROUP_WORLD_SIZE": None}, "neither GROUP_WORLD_SIZE nor NNODES"),
        ({**TORCHRUN, "MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({**TORCHRUN, "MASTER_PORT": "65535"}, "MASTER_PORT=65535: the scheduler would listen on"),
        ({**STEP, **TORCHRUN, "GROUP_WORLD_SIZE": "3"}, "GROUP_WORLD_SIZE=3 of torchrun give"),
    ],
)
def test_missing_garbled_and_contradicting_variables(
    environment: Mapping[str, str | None], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        place(environment)
    assert words in str(error.value)


def test_a_pod_without_a_name_of_a_service() -> None:
    with pytest.raises(ConfigError, match=r"this pod is called abc, which is not JOB-1\.SERVICE"):
        place({"JOB_COMPLETION_INDEX": "1", "NNODES": "2"}, "abc")


def nodes_of(config: Config) -> list[tuple[str, str]]:
    return [(node.name, node.host) for node in config.cluster.nodes]


def settled(config: Config, environment: Mapping[str, str | None]) -> tuple[Config, str]:
    found = place(environment)
    assert found is not None
    return settle(config, found, None)


def test_what_the_configuration_leaves_out_follows_from_the_engine() -> None:
    config, node = settled(config_of(), POD)
    assert (node, config.cluster.scheduler_port) == ("node-1", 29_600)
    assert nodes_of(config) == [("node-0", "tiny-node-0-0.tiny"), ("node-1", "tiny-node-0-1.tiny")]
    first = {**TORCHRUN, "GROUP_RANK": "0"}
    config, node = settled(config_of(nodes=[{"name": "x"}, {"name": "y"}]), first)
    assert node == "x" and nodes_of(config) == [("x", "127.0.0.1"), ("y", "127.0.0.1")]
    explicit = [{"name": "x", "host": "127.0.0.1"}, {"name": "y", "host": "127.0.0.1"}]
    config, node = settled(config_of(nodes=explicit, scheduler_port=7000), STEP)
    assert (node, config.cluster.scheduler_port) == ("y", 7000)
    assert nodes_of(config) == [("x", "127.0.0.1"), ("y", "127.0.0.1")]
    # One node needs neither a port that others know nor an address that they reach.
    config, node = settled(config_of(), {**JOB, "SLURM_JOB_NODELIST": "n7"})
    assert nodes_of(config) == [("node-0", "127.0.0.1")] and config.cluster.scheduler_port == 0


@pytest.mark.parametrize(
    ("cluster", "environment", "words"),
    [
        (
            {"nodes": [{"name": "a"}]},
            STEP,
            "cluster.nodes has 1 (a), and SLURM_STEP_NUM_NODES=2 of Slurm job 5 gives 2",
        ),
        (
            {"nodes": [{"name": "a", "host": "n2"}, {"name": "b"}]},
            STEP,
            "node a has host n2, which is node number 2, and Slurm job 5 has it on n1",
        ),
        (
            {"nodes": [{"name": "a"}, {"name": "b", "host": "192.0.2.1"}]},
            STEP,
            "node b has host 192.0.2.1, which is no address of this machine",
        ),
        ({}, {**POD, "NNODES": None}, "the number of nodes is unknown: set NNODES"),
        (
            {},
            {**TORCHRUN, "GROUP_RANK": "0", "MASTER_ADDR": "192.0.2.1"},
            "torchrun gives the address of the first node, but not of node number 2",
        ),
    ],
)
def test_contradictions_of_configuration_and_engine(
    cluster: dict[str, Any], environment: Mapping[str, str | None], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        settled(config_of(**cluster), environment)
    assert words in str(error.value)


def test_another_name_on_the_command_line() -> None:
    found = place(STEP)
    assert found is not None
    with pytest.raises(
        ConfigError, match=r"--node node-0 and SLURM_NODEID=1 of Slurm job 5, which"
    ):
        settle(config_of(), found, "node-0")


def test_addresses_seen_from_the_first_node() -> None:
    known = {"n1": "127.0.1.1", "n2": "10.0.0.2", "n3": "10.0.0.3", "v1": "127.0.0.1"}
    towards = {"10.0.0.2": "10.0.0.1"}.get

    def find(hosts: Sequence[str]) -> Mapping[str, str]:
        return {host: known[host] for host in hosts if host in known}

    # Debian gives its own name a loopback address, which the others cannot use.
    assert addresses_of(("n1", "n2", "n3"), "E", find, towards) == (
        *("10.0.0.1", "10.0.0.2", "10.0.0.3"),
    )
    assert addresses_of(("v1", "v1"), "E", find, towards) == ("127.0.0.1", "127.0.0.1")
    with pytest.raises(ConfigError, match="E: n9 has no address here"):
        addresses_of(("n2", "n9"), "E", find, towards)
    with pytest.raises(ConfigError, match="n1 resolve to a loopback address on n2"):
        addresses_of(("n2", "n1"), "E", find, towards)


def test_penstock_train_where_an_engine_has_more() -> None:
    assert check_alone({}) is None
    assert check_alone({**JOB, "SLURM_JOB_NUM_NODES": "1"}) is None
    advice = check_alone(JOB)
    assert advice is not None and "Slurm job 5 has 2 nodes, and penstock train uses this" in advice
    with pytest.raises(ConfigError, match="penstock train was started 2 times"):
        check_alone(STEP)

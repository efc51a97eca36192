"""Fills in the manifests of a run for Kubernetes.

The environment of the JobSet (``JOB_COMPLETION_INDEX`` and others) names the node of a pod. So the
configuration of the pods has no hosts. Node names stay, because the keys contain them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from penstock.config.schema import Config
from penstock.deploy import fill
from penstock.host.errors import ConfigError
from penstock.protocol.security.addresses import is_loopback

FOLDER = Path(__file__).parent
RUNS = "/runs"
KEYS = "/etc/penstock/keys"
SHORTEST_GRACE_S = 300
"""Seconds to save the state, unless ``cluster.stop_grace_s`` is set."""
_KILL_MARGIN_S = 30
_LONGEST_NAME = 48
"""Longest name of a job: the pod name ``NAME-node-0-63-xxxxx`` must be a DNS label (63)."""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_MIB, _GIB = 2**20, 2**30
_SPARE_SHM_BYTES = 64 * _MIB
_SPARE_MEMORY = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PodNeeds:
    """Resources of the pod of the largest node. ``memory_bytes`` includes ``shm_bytes``.

    ``gpus`` is the number of GPUs of its workers.
    """

    cpus: int
    memory_bytes: int
    shm_bytes: int
    gpus: int

    @property
    def shm(self) -> str:
        """Returns the size of /dev/shm, with a reserve."""
        return f"{ceil((self.shm_bytes + _SPARE_SHM_BYTES) / _MIB)}Mi"

    @property
    def memory(self) -> str:
        """Returns the memory limit of the container, with a reserve for inexact estimates."""
        return f"{ceil((self.memory_bytes + _SPARE_SHM_BYTES) * _SPARE_MEMORY / _GIB)}Gi"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Options of the command. ``name`` is the name of all objects; ``kueue`` and ``volcano`` are
    queues, or empty.

    ``older`` is True for clusters without restart rules of containers (Kubernetes before 1.35).
    """

    name: str
    image: str
    num_nodes: int
    kueue: str = ""
    volcano: str = ""
    older: bool = False

    def check(self) -> None:
        """Checks the name.

        Raises:
            ConfigError: no Kubernetes object can have the name.
        """
        if len(self.name) > _LONGEST_NAME or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"--name {self.name!r}: Kubernetes accepts lower-case letters, digits and hyphens,"
                f" at most {_LONGEST_NAME} characters here; choose such a name with --name"
            )


def manifests(
    order: Order, config: Config, raw: Mapping[str, Any], needs: PodNeeds
) -> dict[str, str]:
    """Returns the text of each file, by name. ``raw`` is the configuration as in the user's file.

    Raises:
        ConfigError: the configuration cannot run in pods.
    """
    order.check()
    values = _values(order, config, raw, needs)
    spec = fill(FOLDER / "spec.yaml", values | {"STEP_LABEL": "", "NNODES": _env("NNODES", order)})
    of_runtime = fill(
        FOLDER / "spec.yaml", values | {"STEP_LABEL": _STEP_LABEL, "NNODES": "", "SUSPEND": ""}
    )
    job_set = fill(FOLDER / "jobset.yaml", values | {"SPEC": _indented(spec, 2)})
    if order.volcano:
        job_set += fill(FOLDER / "podgroup.yaml", values)
    text = yaml.safe_dump(pod_config(order, config, raw), sort_keys=False, width=100)
    return {
        "Containerfile": (FOLDER / "Containerfile").read_text(encoding="utf-8"),
        "storage.yaml": fill(FOLDER / "storage.yaml", values | {"CONFIG": _indented(text, 4)}),
        "jobset.yaml": job_set,
        "trainjob.yaml": fill(
            FOLDER / "trainjob.yaml", values | {"SPEC": _indented(of_runtime, 6)}
        ),
    }


def pod_config(order: Order, config: Config, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration of the pods: without hosts, with the run on the shared volume.

    Raises:
        ConfigError: the configuration names hosts, has another number of nodes than ``--nodes``, or
            leaves the ports open to all pods.
    """
    cluster = dict(raw.get("cluster") or {})
    nodes = [dict(node) for node in cluster.pop("nodes", None) or ()]
    if nodes and len(nodes) != order.num_nodes:
        raise ConfigError(
            f"--nodes {order.num_nodes}: cluster.nodes has {len(nodes)} nodes; leave out --nodes or"
            " cluster.nodes"
        )
    for node in nodes:
        host = node.pop("host", "127.0.0.1")
        if not is_loopback(host):
            raise ConfigError(
                f"cluster.nodes: node {node['name']} has host {host!r}, but the JobSet assigns the"
                " addresses of pods; leave out host"
            )
    if config.cluster.uses_keys:
        if not nodes:
            raise ConfigError(
                "cluster.nodes is not set: keys need the names of the nodes; set cluster.nodes"
            )
        cluster["keys"] = KEYS
    elif order.num_nodes > 1 and not config.cluster.opens_addresses:
        raise ConfigError(
            "cluster.security is none, and other pods can reach the ports of this run; set"
            " cluster.security: tls (penstock keys make), or cluster.security: insecure"
        )
    if nodes:
        cluster["nodes"] = nodes
    run = {**(raw.get("run") or {}), "dir": f"{RUNS}/{order.name}"}
    pods = {**raw, "run": run, "cluster": cluster}
    if _open(config):  # Prometheus is another pod
        pods["observability"] = {**_METRICS, **(raw.get("observability") or {})}
    return pods


def _open(config: Config) -> bool:
    """Returns whether ports may listen on addresses that other pods reach."""
    return config.cluster.opens_addresses


def _annotations(order: Order, config: Config, raw: Mapping[str, Any]) -> str:
    """Returns the annotations of a pod: for Prometheus the metrics port, for Volcano the group."""
    lines = []
    served = {**_METRICS, **(raw.get("observability") or {})}
    if _open(config) and served["metrics_port"] and not is_loopback(served["metrics_host"]):
        lines = [
            'prometheus.io/scrape: "true"',
            f'prometheus.io/port: "{served["metrics_port"]}"',
            f"prometheus.io/scheme: {'https' if config.cluster.security == 'tls' else 'http'}",
        ]
    if order.volcano:
        lines += [
            f"scheduling.k8s.io/group-name: {order.name}",
            f"scheduling.volcano.sh/queue-name: {order.volcano}",
        ]
    head = "\n          annotations:" if lines else ""
    return head + "".join(f"\n            {line}" for line in lines)


def next_commands(order: Order, config: Config, out: Path) -> str:
    """Returns the shell commands that build the image and start the run."""
    lines = [
        f"podman build -f {out / 'Containerfile'} -t {order.image} CLEAN_CHECKOUT",
        f"podman push {order.image}",
    ]
    if config.cluster.uses_keys:
        names = [node.name for node in config.cluster.nodes]
        lines += [f"penstock keys pack KEYS {name} --out {i}.tar" for i, name in enumerate(names)]
        tars = " ".join(f"--from-file={i}.tar" for i in range(len(names)))
        lines.append(f"kubectl create secret generic {order.name}-keys {tars}")
    lines += [
        f"kubectl apply -f {out / 'storage.yaml'}",
        f"kubectl apply -f {out / 'jobset.yaml'}    # or trainjob.yaml, with Kubeflow Trainer",
        f"kubectl logs -f -l app.kubernetes.io/instance={order.name}",
        f'kubectl patch jobset {order.name} --type merge -p \'{{"spec":{{"suspend":true}}}}\''
        "    # saves and stops; false resumes",
    ]
    return "\n".join(lines)


_METRICS = {"metrics_port": 29700, "metrics_host": "0.0.0.0"}
_NEWER = (
    "Needs Kubernetes 1.35, or 1.34 with the feature ContainerRestartRules; for older ones:"
    " --older-cluster."
)
_OLDER = "For any Kubernetes: also restarts runs that cannot work, until backoffLimit."
_STEP_LABEL = """
    metadata:
      labels:
        trainer.kubeflow.org/trainjob-ancestor-step: trainer"""
_POD_FAILURES = """
      podFailurePolicy:
        rules:
        - action: FailJob  # 2: bad configuration or state; 3: not enough memory, space or CPUs
          onExitCodes: {containerName: node, operator: In, values: [2, 3]}
        - action: Ignore  # drained, preempted: another pod, not counted
          onPodConditions: [{type: DisruptionTarget, status: "True"}]"""
_CONTAINER_RESTARTS = """
            # Killed (137 and others) or stopped and saved (5): restart in the same pod; its
            # /dev/shm holds the state. 0 is success; the job handles 1 to 4.
            restartPolicy: Never
            restartPolicyRules:
            - action: Restart
              exitCodes: {operator: NotIn, values: [0, 1, 2, 3, 4]}"""
_KEYS_VOLUMES = """
          - {{name: packed, secret: {{secretName: {name}-keys, defaultMode: 288}}}}  # 0440
          - {{name: keys, emptyDir: {{medium: Memory, sizeLimit: 16Mi}}}}"""
_KEYS_MOUNT = """
            - {name: keys, mountPath: /etc/penstock/keys, readOnly: true}"""


def _values(
    order: Order, config: Config, raw: Mapping[str, Any], needs: PodNeeds
) -> dict[str, str]:
    grace_s = ceil(config.cluster.stop_grace_s or SHORTEST_GRACE_S)
    has_keys = config.cluster.uses_keys
    init = fill(FOLDER / "keys.yaml", {"IMAGE": order.image}) if has_keys else ""
    queue = f"kueue.x-k8s.io/queue-name: {order.kueue}"
    return {
        "NAME": order.name,
        "IMAGE": order.image,
        "NODES": str(order.num_nodes),
        "BACKOFF": str(6 * order.num_nodes),
        "GRACE": str(grace_s),
        "TERMINATION": str(grace_s + _KILL_MARGIN_S),
        "CPUS": str(needs.cpus),
        "MEMORY": needs.memory,
        "SHM": needs.shm,
        "GPUS": f", nvidia.com/gpu: {needs.gpus}" if needs.gpus else "",
        "KEYS_INIT": "\n" + _indented(init.rstrip(), 10) if init else "",
        "KEYS_MOUNT": _KEYS_MOUNT if has_keys else "",
        "KEYS_VOLUMES": _KEYS_VOLUMES.format(name=order.name) if has_keys else "",
        "QUEUE_LABEL": f"\n    {queue}" if order.kueue else "",
        "JOB_QUEUE": f"\n  labels:\n    {queue}" if order.kueue else "",
        "SUSPEND": "suspend: true  # Kueue starts it\n" if order.kueue else "",
        "SCHEDULER": "\n          schedulerName: volcano" if order.volcano else "",
        "ANNOTATIONS": _annotations(order, config, raw),
        "GROUP_POLICY": "\n  podGroupPolicy:\n    volcano: {}" if order.volcano else "",
        "VOLCANO": order.volcano,
        # Kubernetes accepts pod failure policies only with restartPolicy Never.
        "POD_RESTART": "OnFailure" if order.older else "Never",
        "POD_FAILURES": "" if order.older else _POD_FAILURES,
        "CONTAINER_RESTARTS": "" if order.older else _CONTAINER_RESTARTS,
        "CLUSTERS": _OLDER if order.older else _NEWER,
    }


def _env(name: str, order: Order) -> str:
    return f'\n            - {{name: {name}, value: "{order.num_nodes}"}}'


def _indented(text: str, width: int) -> str:
    return textwrap.indent(text.rstrip(), " " * width)

"""Fills in the manifests of a run for Kubernetes.

The node's place comes from the JobSet's environment (``JOB_COMPLETION_INDEX`` and friends), so
hosts are left out of the configuration that the pods get; names stay, because keys have them.
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
from penstock.deploy.templates import fill
from penstock.host.errors import ConfigError
from penstock.protocol.security.addresses import is_loopback

FOLDER = Path(__file__).parent
RUNS = "/runs"
KEYS = "/etc/penstock/keys"
SHORTEST_GRACE_S = 300
"""Seconds to save within, where ``cluster.grace_seconds`` says nothing."""
_KILL_MARGIN_S = 30
_LONGEST_NAME = 48
"""Pods are called ``NAME-node-0-63-xxxxx``, which must be a label of DNS."""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_MIB, _GIB = 2**20, 2**30
_SPARE_SHM_BYTES = 64 * _MIB
_SPARE_MEMORY = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PodNeeds:
    """What the pod of the heaviest node needs. ``memory_bytes`` has ``shm_bytes`` in it; ``gpus``:
    how many its workers compute on.
    """

    cpus: int
    memory_bytes: int
    shm_bytes: int
    gpus: int

    @property
    def shm(self) -> str:
        """Returns the size of /dev/shm, with a little to spare."""
        return f"{ceil((self.shm_bytes + _SPARE_SHM_BYTES) / _MIB)}Mi"

    @property
    def memory(self) -> str:
        """Returns the limit of the container's memory: estimates of processes are estimates."""
        return f"{ceil((self.memory_bytes + _SPARE_SHM_BYTES) * _SPARE_MEMORY / _GIB)}Gi"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a user asks for. ``name``: of all objects. ``kueue``, ``volcano``: queues, or empty.

    ``older``: for clusters that do not know rules for restarts of containers (before 1.35).
    """

    name: str
    image: str
    num_nodes: int
    kueue: str = ""
    volcano: str = ""
    older: bool = False

    def check(self) -> None:
        """Refuse what no object can be called.

        Raises:
            ConfigError: the name does not do.
        """
        if len(self.name) > _LONGEST_NAME or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name!r}: objects of Kubernetes have names of small letters, digits and"
                f" hyphens, here at most {_LONGEST_NAME}; give one with --name"
            )


def manifests(
    order: Order, config: Config, raw: Mapping[str, Any], needs: PodNeeds
) -> dict[str, str]:
    """Returns file name -> text. ``raw`` is the user's configuration as it is in the file.

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
    """Returns the configuration that the pods read: without hosts, its run on the shared volume.

    Raises:
        ConfigError: it names hosts, or as many nodes as nobody asked for, or it is open to all.
    """
    cluster = dict(raw.get("cluster") or {})
    nodes = [dict(node) for node in cluster.pop("nodes", None) or ()]
    if nodes and len(nodes) != order.num_nodes:
        raise ConfigError(
            f"cluster.nodes has {len(nodes)}, and --nodes says {order.num_nodes}: leave one out"
        )
    for node in nodes:
        host = node.pop("host", "127.0.0.1")
        if not is_loopback(host):
            raise ConfigError(
                f"cluster.nodes: node {node['name']} has host {host!r}: pods get their addresses"
                " from the JobSet; leave host out"
            )
    if config.cluster.security == "tls":
        if not nodes:
            raise ConfigError("cluster.nodes is not set: keys are made for nodes with names")
        cluster["keys"] = KEYS
    elif order.num_nodes > 1 and not config.cluster.insecure:
        raise ConfigError(
            "cluster.security is none, and other pods of the cluster reach these: set"
            " cluster.security: tls (penstock keys make), or say cluster.insecure: true"
        )
    if nodes:
        cluster["nodes"] = nodes
    run = {**(raw.get("run") or {}), "dir": f"{RUNS}/{order.name}"}
    found = {**raw, "run": run, "cluster": cluster}
    if _open(config):  # Prometheus is another pod
        found["observability"] = {**_METRICS, **(raw.get("observability") or {})}
    return found


def _open(config: Config) -> bool:
    """Returns whether addresses that other pods reach are allowed."""
    return config.cluster.security == "tls" or config.cluster.insecure


def _annotations(order: Order, config: Config, raw: Mapping[str, Any]) -> str:
    """Returns those of a pod, under which Prometheus finds its metrics, and Volcano its group."""
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
    """Returns what to type next, in words."""
    lines = [
        f"podman build -f {out / 'Containerfile'} -t {order.image} CLEAN_CHECKOUT",
        f"podman push {order.image}",
    ]
    if config.cluster.security == "tls":
        names = [node.name for node in config.cluster.nodes]
        lines += [f"penstock keys pack KEYS {name} --out {i}.tar" for i, name in enumerate(names)]
        tars = " ".join(f"--from-file={i}.tar" for i in range(len(names)))
        lines.append(f"kubectl create secret generic {order.name}-keys {tars}")
    lines += [
        f"kubectl apply -f {out / 'storage.yaml'}",
        f"kubectl apply -f {out / 'jobset.yaml'}    # or trainjob.yaml, with Kubeflow Trainer",
        f"kubectl logs -f -l app.kubernetes.io/instance={order.name}",
        f'kubectl patch jobset {order.name} --type merge -p \'{{"spec":{{"suspend":true}}}}\''
        "    # stops and saves; false goes on",
    ]
    return "\n".join(lines)


_METRICS = {"metrics_port": 29700, "metrics_host": "0.0.0.0"}
_NEWER = (
    "Needs Kubernetes 1.35, or 1.34 with the feature ContainerRestartRules; for older ones:"
    " --older-cluster."
)
_OLDER = "For any Kubernetes: what cannot work is restarted, too, until backoffLimit ends it."
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
            # Killed (137 and the like) or stopped and saved (5): again in place, where /dev/shm has
            # the memory. 0 is done; 1 to 4 are for the job.
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
    grace_s = ceil(config.cluster.grace_seconds or SHORTEST_GRACE_S)
    has_keys = config.cluster.security == "tls"
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
        # Kubernetes takes policies for failed pods only where these are never restarted.
        "POD_RESTART": "OnFailure" if order.older else "Never",
        "POD_FAILURES": "" if order.older else _POD_FAILURES,
        "CONTAINER_RESTARTS": "" if order.older else _CONTAINER_RESTARTS,
        "CLUSTERS": _OLDER if order.older else _NEWER,
    }


def _env(name: str, order: Order) -> str:
    return f'\n            - {{name: {name}, value: "{order.num_nodes}"}}'


def _indented(text: str, width: int) -> str:
    return textwrap.indent(text.rstrip(), " " * width)

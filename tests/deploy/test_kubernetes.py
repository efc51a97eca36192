"""The manifests against JobSet's own schema, against what the API server checks beyond it, and
against the reader of their environment.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from penstock.client.capacity import pod_needs
from penstock.config.schema import Config, parse_config
from penstock.daemons.node.joining.launchers import find_place
from penstock.deploy.kubernetes.manifests import (
    Order,
    PodNeeds,
    manifests,
    next_commands,
    pod_config,
)
from penstock.host.errors import ConfigError

SCHEMA = json.loads((Path(__file__).parents[1] / "data/kubernetes/jobset.json").read_text())
NEEDS = PodNeeds(cpus=9, memory_bytes=40 << 30, shm_bytes=24 << 30, gpus=8)
NODES = [{"name": "a"}, {"name": "b"}, {"name": "c"}]


def strict(schema: Any) -> Any:
    """The schema with unknown fields refused, as ``kubectl --validate=strict`` does."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema and isinstance(schema["properties"], dict):
        found["properties"] = {k: strict(v) for k, v in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found.setdefault("additionalProperties", False)
    return found


STRICT = jsonschema.Draft202012Validator(strict(SCHEMA))
SPEC = jsonschema.Draft202012Validator(strict(SCHEMA)["properties"]["spec"])


def raw_config(**cluster: Any) -> dict[str, Any]:
    return {
        "run": {"name": "tiny", "dir": "runs/tiny"},
        "model": {"hf": {"model_type": "llama"}},
        "data": {"path": "@stdlib"},
        "cluster": {"workers": 8, "device": "cuda", "security": "insecure", **cluster},
    }


def written(raw: dict[str, Any], **changes: Any) -> dict[str, list[dict[str, Any]]]:
    """File name -> documents."""
    order = Order(**{"name": "tiny", "image": "r.example/p:1", "num_nodes": 3, **changes})
    files = manifests(order, parse_config(raw), raw, NEEDS)
    assert not [text for text in files.values() if "\t" in text]
    return {
        name: list(yaml.safe_load_all(text)) for name, text in files.items() if name[-5:] == ".yaml"
    }


def job_of(job_set: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = job_set["spec"]["replicatedJobs"]
    found: dict[str, Any] = replicated["template"]["spec"]
    return found


VARIANTS = {
    "plain": (raw_config(), {}),
    "named": (raw_config(nodes=NODES), {}),
    "queues": (raw_config(), {"kueue": "team", "volcano": "gold"}),
    "older": (raw_config(), {"older": True}),
    "keys": (raw_config(nodes=NODES, security="tls", keys="k"), {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_manifests_fit_the_real_schema_and_what_the_server_checks_beyond(variant: str) -> None:
    raw, changes = VARIANTS[variant]
    files = written(raw, **changes)
    job_set = files["jobset.yaml"][0]
    STRICT.validate(job_set)
    runtime, train_job = files["trainjob.yaml"]
    SPEC.validate(runtime["spec"]["template"]["spec"])
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    for job in (job_of(job_set), job_of({"spec": runtime["spec"]["template"]["spec"]})):
        check_job(job)
    claim, settings = files["storage.yaml"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    config = parse_config(yaml.safe_load(settings["data"]["config.yaml"]))
    assert str(config.run_dir) == "/runs/tiny"
    assert " host:" not in settings["data"]["config.yaml"]


def check_job(job: dict[str, Any]) -> None:
    """What Kubernetes refuses or ignores without a word in its schema."""
    assert job["completions"] == job["parallelism"] == 3 and job["completionMode"] == "Indexed"
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    rules = "restartPolicyRules" in container
    assert ("podFailurePolicy" in job) == rules == (pod["restartPolicy"] == "Never")
    assert not rules or container["restartPolicy"] == "Never"
    volumes = [volume["name"] for volume in pod["volumes"]]
    for each in (container, *pod.get("initContainers", ())):
        assert {mount["name"] for mount in each["volumeMounts"]} <= set(volumes)
        assert each["resources"]["requests"] == each["resources"]["limits"]
        assert each["securityContext"]["allowPrivilegeEscalation"] is False
    grace_s = int(container["args"][container["args"].index("--grace-seconds") + 1])
    assert grace_s < pod["terminationGracePeriodSeconds"]
    assert container["resources"]["limits"] == {
        "cpu": "9",
        "memory": "45Gi",
        "nvidia.com/gpu": 8,
    }
    (shm,) = (volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "24640Mi"}


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("plain", {"scrape": "true", "port": "29700", "scheme": "http"}),
        ("keys", {"scrape": "true", "port": "29700", "scheme": "https"}),
    ],
)
def test_prometheus_finds_a_pods_metrics(variant: str, expected: dict[str, str]) -> None:
    raw, changes = VARIANTS[variant]
    files = written(raw, **changes)
    config = parse_config(yaml.safe_load(files["storage.yaml"][1]["data"]["config.yaml"]))
    served = config.observability
    assert (served.metrics_host, served.metrics_port) == ("0.0.0.0", 29700)
    found = job_of(files["jobset.yaml"][0])["template"]["metadata"]["annotations"]
    assert found == {f"prometheus.io/{name}": value for name, value in expected.items()}
    chosen = {**raw, "observability": {"metrics_port": 0}}
    assert "annotations" not in job_of(written(chosen)["jobset.yaml"][0])["template"]["metadata"]


def test_an_unknown_field_is_noticed() -> None:
    job_set = written(raw_config())["jobset.yaml"][0]
    job_of(job_set)["template"]["spec"]["containers"][0]["comand"] = ["x"]
    with pytest.raises(jsonschema.ValidationError, match="comand"):
        STRICT.validate(job_set)


def test_a_pod_finds_its_place_in_the_environment_that_it_gets() -> None:
    (container,) = job_of(written(raw_config())["jobset.yaml"][0])["template"]["spec"]["containers"]
    labels = {"jobset-name": "tiny", "replicatedjob-name": "node", "job-index": "0"}
    environment = {"JOB_COMPLETION_INDEX": "2"}
    for variable in container["env"]:
        value = variable.get("value")
        if value is None:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            value = labels[path.removeprefix("metadata.labels['jobset.sigs.k8s.io/")[:-2]]
        environment[variable["name"]] = value
    place = find_place(environment, lambda: "tiny-node-0-2.tiny")
    assert place is not None and (place.rank, place.count) == (2, 3)
    assert place.hosts == tuple(f"tiny-node-0-{i}.tiny" for i in range(3))


def test_queues_hold_the_job_and_keys_reach_their_node_only() -> None:
    files = written(raw_config(), kueue="team", volcano="gold")
    job_set, group = files["jobset.yaml"]
    assert job_set["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert job_set["spec"]["suspend"] is True
    assert group["spec"] == {"minMember": 3, "queue": "gold"}
    raw, _ = VARIANTS["keys"]
    pod = job_of(written(raw)["jobset.yaml"][0])["template"]["spec"]
    (init,) = pod["initContainers"]
    assert init["volumeMounts"][0]["subPathExpr"] == "$(JOB_COMPLETION_INDEX).tar"
    assert "packed" not in {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    order = Order(name="tiny", image="i", num_nodes=3)
    said = next_commands(order, parse_config(raw), Path("out"))
    assert "penstock keys pack KEYS b --out 1.tar" in said
    assert "kubectl create secret generic tiny-keys --from-file=0.tar" in said


@pytest.mark.parametrize(
    ("cluster", "changes", "said"),
    [
        ({}, {"name": "Tiny_1"}, "choose such a name with --name"),
        ({"nodes": NODES}, {"num_nodes": 2}, "--nodes 2: cluster.nodes has 3"),
        ({"nodes": [{"name": "a", "host": "10.0.0.1"}] * 1}, {"num_nodes": 1}, "leave out host"),
        ({"security": "none"}, {}, "cluster.security is none"),
        ({"security": "tls", "keys": "k"}, {}, "keys need the names of the nodes"),
    ],
)
def test_what_cannot_run_in_pods_is_refused(
    cluster: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        written(raw_config(**cluster), **changes)


def test_pods_get_what_the_plan_of_the_heaviest_node_needs() -> None:
    """Of an emulated device, which needs no model to be looked at."""
    config: Config = parse_config(
        {
            "model": {"hf": {"model_type": "llama"}},
            "data": {"path": "@stdlib"},
            "schedule": {"scheme": "spipe"},
            "cluster": {"workers": 2, "device": "emulated:analytic:V100-32:spipe-10b"},
        }
    )
    one, two = (pod_needs(config, nodes, cpus) for nodes, cpus in ((1, 0), (2, 12)))
    assert (one.cpus, two.cpus, one.gpus) == (1, 12, 0)
    assert 0 < two.shm_bytes < one.shm_bytes < one.memory_bytes
    order = Order(name="tiny", image="i", num_nodes=2)
    raw = raw_config()
    assert pod_config(order, parse_config(raw), raw)["run"] == {"name": "tiny", "dir": "/runs/tiny"}

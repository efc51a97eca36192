"""Old names of keys: the same meaning, a hint at the new name, and a refusal of both names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config.schema import Config, load_config, parse_config
from penstock.daemons.monitor.trackers.sink import project_of
from penstock.host.errors import ConfigError
from penstock.protocol.security.addresses import check_addresses

MINIMAL: dict[str, Any] = {"model": {"hf": {"model_type": "llama"}}, "data": {"path": "@stdlib"}}
KEYS = "/keys"


def parsed(hints: list[str] | None = None, **sections: Any) -> Config:
    return parse_config({**MINIMAL, **sections}, hint=[].append if hints is None else hints.append)


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        (
            {"grace_seconds": 90},
            {"stop_grace_s": 90},
            "cluster.grace_seconds is called cluster.stop_grace_s now",
        ),
        ({"grace_seconds": None}, {}, ""),
        ({"insecure": True}, {"security": "insecure"}, "write cluster.security: insecure"),
        ({"insecure": False, "trusted_fabric": False}, {}, ""),
        ({"security": "none", "trusted_fabric": True}, {}, "remove cluster.trusted_fabric"),
        (
            {"security": "tls", "keys": KEYS, "trusted_fabric": True, "insecure": True},
            {"security": "tls-trusted-fabric", "keys": KEYS},
            "write cluster.security: tls-trusted-fabric",
        ),
        (
            {"security": "TLS", "keys": KEYS, "insecure": True},
            {"security": "tls", "keys": KEYS},
            "remove cluster.insecure",
        ),
    ],
)
def test_old_keys_of_cluster_mean_the_same(
    old: dict[str, Any], new: dict[str, Any], hint: str
) -> None:
    hints: list[str] = []
    assert parsed(hints, cluster=old) == parsed(cluster=new)
    assert (hint in hints[0]) if hint else hints == []


@pytest.mark.parametrize(
    ("cluster", "complaint"),
    [
        ({"grace_seconds": 9, "stop_grace_s": 9}, "both are given; remove cluster.grace_seconds"),
        ({"security": "insecure", "insecure": True}, "remove cluster.insecure"),
        ({"security": "tls-trusted-fabric", "trusted_fabric": False}, "remove cluster.trusted"),
        ({"insecure": "yes"}, "cluster.insecure = 'yes': accepted is true or false"),
    ],
)
def test_both_names_and_nonsense_are_refused(cluster: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parsed(cluster=cluster)


def test_security_has_no_weaker_old_key() -> None:
    nodes = [{"name": "a"}, {"name": "b", "host": "10.0.0.2"}]
    assert not parsed(cluster={"security": "insecure"}).cluster.uses_keys
    assert parsed(cluster={"security": "tls-trusted-fabric", "keys": KEYS}).cluster.uses_keys
    check_addresses(parsed(cluster={"nodes": nodes, "insecure": True}))
    with pytest.raises(ConfigError, match="others than this machine reach it"):
        check_addresses(parsed(cluster={"nodes": nodes, "trusted_fabric": True}))
    with pytest.raises(ConfigError, match="is unencrypted"):
        parsed(cluster={"transport": "gloo", "security": "tls", "keys": KEYS, "insecure": True})


def test_the_command_line_replaces_an_old_key_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    cluster = {"grace_seconds": -1, "insecure": True}
    path.write_text(yaml.safe_dump({**MINIMAL, "cluster": cluster}, sort_keys=False))
    with pytest.raises(ConfigError, match=r"line \d+: cluster\.stop_grace_s = -1"):
        load_config(path)
    hints: list[str] = []
    for setting in ("cluster.grace_seconds=7", "cluster.stop_grace_s=7"):
        config = load_config(path, (setting, "cluster.security=tls"), hint=hints.append)
        assert config.cluster.stop_grace_s == 7 and config.cluster.security == "tls"
    path.write_text(yaml.safe_dump({**MINIMAL, "observability": {"wandb_mode": "offline"}}))
    hints.clear()
    load_config(path, ("observability.mlflow_uri=file:///m",), hint=hints.append)
    assert len(hints) == 2 and "wandb_mode" in hints[0] and "mlflow_uri" in hints[1]
    with pytest.raises(ConfigError, match="is given twice"):
        load_config(path, ("cluster.grace_seconds=7", "cluster.stop_grace_s=8"))


def test_keys_of_trackers_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    hints: list[str] = []
    old = {"tracker_project": "mine", "wandb_mode": "offline", "mlflow_uri": "file:///m"}
    config = parsed(hints, observability=old)
    assert [hint.split(" is ")[0] for hint in hints] == [
        "observability.mlflow_uri",
        "observability.tracker_project",
        "observability.wandb_mode",
    ]
    assert "WANDB_MODE" in hints[2]
    again = parse_config(yaml.safe_load(config.to_yaml()))
    assert again == config and again.observability.wandb_mode == "offline"
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    assert project_of(config.observability, "WANDB_PROJECT") == "mine"
    plain = parsed()
    assert project_of(plain.observability, "WANDB_PROJECT") == "theirs"
    assert project_of(plain.observability, "TRACKIO_PROJECT") == "penstock"
    assert "wandb_mode" not in plain.to_yaml()
    assert parsed(observability={"tracker_project": "penstock", "wandb_mode": None}) == plain


def test_a_resolved_file_of_an_old_run_means_the_same(tmp_path: Path) -> None:
    config = parsed(cluster={"stop_grace_s": 30, "security": "insecure"})
    values = yaml.safe_load(config.to_yaml())
    cluster, observability = values["cluster"], values["observability"]
    cluster["grace_seconds"] = cluster.pop("stop_grace_s")
    cluster |= {"security": "none", "insecure": True, "trusted_fabric": False}
    observability |= {"tracker_project": "penstock", "wandb_mode": None, "mlflow_uri": None}
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    assert load_config(tmp_path / "resolved.yaml").to_yaml() == config.to_yaml()

"""Keys of a run: what is made, who can read it, what is refused, what renewing changes."""

from __future__ import annotations

import base64
import io
import os
import stat
import tarfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from penstock.config.schema import Config, parse_config
from penstock.host.errors import ConfigError
from penstock.protocol.security.addresses import check_addresses, is_loopback
from penstock.protocol.security.authority import expiries, make, pack, renew
from penstock.protocol.security.folders import KeyFolder, expiry_warning, node_folder
from penstock.protocol.security.identity import Identity, Role

NODE_FILES = {
    *("ca.pem", "tls.pem", "tls.key", "server.pem", "server.key", "metrics.sha256"),
    *("curve.public", "curve.secret", "peers", "peers/a.public", "peers/b.public"),
}

ELLIPTIC = bytes.fromhex("2a8648ce3d0201")
"""The object identifier of elliptic curves in a key (RFC 5480), as DER writes it."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = tmp_path_factory.mktemp("keys") / "new" / "keys"
    make(keys, "my.run", ["a", "b"], days=30)
    return keys


def config(cluster: dict[str, object], **observability: object) -> Config:
    return parse_config(
        {
            "model": {"path": "/m"},
            "data": {"tokens": "/t"},
            "cluster": cluster,
            "observability": observability,
        }
    )


def test_each_node_gets_what_it_needs_and_nobody_else_may_read_it(made: Path) -> None:
    assert {path.name for path in made.iterdir()} == {
        *("authority", "node.a", "node.b", "control", "look", "metrics")
    }
    for path in (made, *made.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    with tarfile.open(fileobj=io.BytesIO(pack(made, "b"))) as archive:
        assert set(archive.getnames()) == {"node.b", *(f"node.b/{name}" for name in NODE_FILES)}
    assert (made / "node.a/peers/b.public").read_bytes() == (
        made / "node.b/curve.public"
    ).read_bytes()
    with pytest.raises(ConfigError, match=r"has no keys; .* has keys of: a, b"):
        pack(made, "c")
    with pytest.raises(ConfigError, match="never overwritten"):
        make(made, "my.run", ["a"])


def test_a_certificate_names_run_node_and_role(made: Path) -> None:
    found = node_folder(made, "my.run", "a").load()
    assert found.identity == Identity(run="my.run", role=Role.NODE, node="a")
    assert KeyFolder(made / "look").load().identity == Identity(run="my.run", role=Role.LOOK)
    with pytest.raises(ConfigError, match=r"keys of node a of run my.run, and node a of run other"):
        node_folder(made, "other", "a")
    server = KeyFolder(made / "node.a", ("server.pem", "server.key")).load()
    assert server.identity is None and b"my.run" not in server.certificate


@pytest.mark.parametrize(
    "uri",
    [
        *("", "penstock://", "penstock://r/node/", "penstock:///node/a", "penstock://r/role/root"),
        *(
            "penstock://r/node/a/b",
            "spiffe://r/node/a",
            "penstock://r%2/node/a",
            "penstock://r/x/a",
        ),
    ],
)
def test_other_names_are_nobodys(uri: str) -> None:
    assert Identity.parse(uri) is None


def test_keys_that_others_may_read_and_foreign_or_damaged_ones_are_refused(
    made: Path, tmp_path: Path
) -> None:
    other = tmp_path / "keys"
    make(other, "my.run", ["a"])
    key = other / "node.a" / "tls.key"
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"tls.key: mode 0644 lets others read it; chmod 0600"):
        node_folder(other, "my.run", "a")
    key.chmod(0o600)
    os.replace(made / "node.a/ca.pem", other / "node.a/ca.pem.mine")
    (made / "node.a/ca.pem").write_bytes((other / "node.a/ca.pem").read_bytes())
    try:
        with pytest.raises(ConfigError, match=r"was not issued by the authority in ca.pem"):
            node_folder(made, "my.run", "a")
    finally:
        os.replace(other / "node.a/ca.pem.mine", made / "node.a/ca.pem")
    key.write_bytes(b"-----BEGIN")
    with pytest.raises(ConfigError, match="damaged keys"):
        node_folder(other, "my.run", "a")
    key.unlink()
    with pytest.raises(ConfigError, match=r"tls.key: cannot read it: No such file"):
        node_folder(other, "my.run", "a")


def test_keys_of_an_algorithm_that_nobody_knows_are_damaged_ones(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make(keys, "my.run", ["a"])
    for path, again in (
        (keys / "node.a/tls.key", lambda: node_folder(keys, "my.run", "a")),
        (keys / "authority/ca.key", lambda: renew(keys)),
    ):
        begin, *lines, end = path.read_text().splitlines()
        found = base64.b64decode("".join(lines))
        unknown = found.replace(ELLIPTIC, ELLIPTIC[:-2] + b"\x7f\x7f")
        assert unknown != found
        path.write_text(f"{begin}\n{base64.b64encode(unknown).decode()}\n{end}\n")
        with pytest.raises(ConfigError, match=r"damaged keys: Unknown key type"):
            again()


def test_renewed_keys_are_read_without_a_restart_and_expired_ones_are_not(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make(keys, "r", ["a"], days=30)
    folder = node_folder(keys, "r", "a")
    old, curve = folder.load(), (keys / "node.a/curve.secret").read_bytes()
    assert renew(keys, days=60, nodes=["c", "a"]) == ["control", "look", "node.a", "node.c"]
    new = folder.load()
    assert new.key != old.key and new.ca == old.ca and new.expires > old.expires
    assert (keys / "node.a/curve.secret").read_bytes() == curve
    assert (keys / "node.a/peers/c.public").exists() and node_folder(keys, "r", "c")
    authority = tmp_path / "elsewhere"
    os.rename(keys / "authority", authority)
    with pytest.raises(ConfigError, match=r"authority/ca.pem: cannot read it"):
        renew(keys)
    renew(keys, authority, days=0)
    complaints: list[str] = []
    assert folder.reload(complaints.append) is not None
    assert "expired at" in complaints[0] and "penstock keys renew" in complaints[0]
    with pytest.raises(ConfigError, match="the certificate expired at"):
        node_folder(keys, "r", "a")
    assert expiries(keys)[0].expires < datetime.now(UTC)


def test_who_reads_keys_is_warned_two_weeks_before_they_expire() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert expiry_warning("node a", now + timedelta(days=15), now) == ""
    assert "expire in 3.0 days, at 2026-01-04" in expiry_warning(
        "node a", now + timedelta(days=3), now
    )
    assert "expired at 2025-12-31" in expiry_warning("node a", now - timedelta(days=1), now)


def test_only_addresses_that_are_loopback_by_themselves_are() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.3.2.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "node-a", "localhost.evil", "")))


def test_other_addresses_than_loopback_need_tls_or_a_word() -> None:
    nodes = {"nodes": [{"name": "a"}, {"name": "b", "host": "10.0.0.2"}]}
    with pytest.raises(ConfigError, match=r"host of b = '10.0.0.2'.*: tls.*security: insecure"):
        check_addresses(config(nodes))
    with pytest.raises(ConfigError, match=r"observability.metrics_host = '0.0.0.0'"):
        check_addresses(config({}, metrics_host="0.0.0.0"))
    check_addresses(config(nodes | {"security": "insecure"}, metrics_host="0.0.0.0"))
    check_addresses(config(nodes | {"security": "tls", "keys": "/keys"}))
    check_addresses(config({}))
    with pytest.raises(ConfigError, match=r"cluster.keys is not set"):
        check_addresses(config({"security": "tls"}))

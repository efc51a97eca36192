"""A Hub on loopback: the requests of huggingface_hub that fetch a repository, from folders."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+|refs/pr/\d+)/(.+)")
_INFO = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/(.+))?")
_TREE = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/tree/([^/]+)/?.*")
LARGE = (".safetensors", ".parquet", ".bin")
"""Endings of files that the Hub keeps in its store of large files."""


def commit_of(text: str) -> str:
    """A commit by any name."""
    return hashlib.sha1(text.encode()).hexdigest()


@dataclass(slots=True, kw_only=True)
class Repo:
    """The files of each commit, and the commit of each revision. ``gated``: needs a token."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def push(self, files: Mapping[str, bytes], revision: str = "main") -> str:
        """Adds a commit with these files, and moves the revision there."""
        commit = commit_of(json.dumps({k: v.hex()[:4096] for k, v in sorted(files.items())}))
        self.commits[commit] = dict(files)
        self.revisions[revision] = commit
        return commit


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder by their names."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@dataclass(slots=True, kw_only=True)
class Hub:
    """The server's repositories (``models/NAME``, ``datasets/NAME``), and the requests so far.

    ``cut``: names of files of which a first download breaks off. ``altered``: those that arrive
    with other content.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    tokens: set[tuple[str, bool]] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    altered: set[str] = field(default_factory=set)
    endpoint: str = ""
    store: str = ""
    """The address of large files, which no token may reach."""

    def repo(self, name: str) -> Repo:
        """A new or known repository."""
        return self.repos.setdefault(name, Repo())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def do_GET(self) -> None:
        self._answer(head=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Writes nothing."""

    def _answer(self, *, head: bool) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.hub.requests.append(f"{self.command} {path}")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token:
            self.hub.tokens.add((token, path.startswith("/store/")))
        if path.startswith("/store/"):
            self._store(path, head)
        elif match := _RESOLVE.fullmatch(path):
            kind = "datasets" if match[1] else "models"
            self._resolve(f"{kind}/{match[2]}", match[3], match[4], head)
        elif match := _TREE.fullmatch(path):
            self._tree(f"{match[1]}/{match[2]}", match[3])
        elif match := _INFO.fullmatch(path):
            self._info(f"{match[1]}/{match[2]}", match[3] or "main", parse_qs(parts.query))
        else:
            self._send(404, b"{}")

    def _repo(self, name: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None:
            self._send(401, b'{"error":"no"}', {"X-Error-Code": "RepoNotFound"})
        elif repo.gated and not self.headers.get("Authorization"):
            self._send(401, b'{"error":"gated"}', {"X-Error-Code": "GatedRepo"})
        else:
            return repo
        return None

    def _commit(self, repo: Repo, revision: str) -> str | None:
        commit = repo.revisions.get(revision, revision)
        if commit in repo.commits:
            return commit
        self._send(404, b'{"error":"no"}', {"X-Error-Code": "RevisionNotFound"})
        return None

    def _info(self, name: str, revision: str, query: Mapping[str, Any]) -> None:
        if (repo := self._repo(name)) and (commit := self._commit(repo, revision)):
            fields = {
                "id": name.partition("/")[2],
                "sha": commit,
                "siblings": [{"rfilename": each} for each in repo.commits[commit]],
                **{"private": False, "gated": False, "disabled": False, "tags": []},
            }
            self._send(200, json.dumps(fields).encode())

    def _tree(self, name: str, revision: str) -> None:
        if (repo := self._repo(name)) and (commit := self._commit(repo, revision)):
            entries = []
            for path, content in repo.commits[commit].items():
                blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
                entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content)}
                entry["oid"] = blob
                if path.endswith(LARGE):
                    digest = hashlib.sha256(content).hexdigest()
                    entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
                entries.append(entry)
            self._send(200, json.dumps(entries).encode())

    def _resolve(self, name: str, revision: str, path: str, head: bool) -> None:
        repo = self._repo(name)
        commit = None if repo is None else self._commit(repo, revision)
        if repo is None or commit is None:
            return
        content = repo.commits[commit].get(path)
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        headers = {"X-Repo-Commit": commit}
        if path.endswith(LARGE):
            digest = hashlib.sha256(content).hexdigest()
            headers |= {
                "X-Linked-Etag": f'"{digest}"',
                "X-Linked-Size": str(len(content)),
                "Location": f"{self.hub.store}/store/{name}/{commit}/{path}?signature=secret",
            }
            self._send(302, b"", headers)
            return
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        self._content(path, content, {**headers, "ETag": f'"{blob}"'}, head)

    def _store(self, path: str, head: bool) -> None:
        _, _, kind, org, name, commit, file = path.split("/", 6)
        content = self.hub.repos[f"{kind}/{org}/{name}"].commits[commit][file]
        self._content(file, content, {}, head)

    def _content(self, path: str, content: bytes, headers: Mapping[str, str], head: bool) -> None:
        if path in self.hub.altered:
            content = bytes([content[0] ^ 1]) + content[1:]
        status, start = 200, 0
        if (span := self.headers.get("Range")) and not head:
            start = int(span.removeprefix("bytes=").partition("-")[0])
            size = len(content)
            headers = {**headers, "Content-Range": f"bytes {start}-{size - 1}/{size}"}
            status = 206
        if path in self.hub.cut and not head:
            self.hub.cut.discard(path)
            self._send(status, content[start : start + len(content) // 2], headers, len(content))
            self.close_connection = True
            return
        self._send(status, content[start:], headers, None, head=head)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        length: int | None = None,
        *,
        head: bool = False,
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if not head and self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serving() -> Iterator[Hub]:
    """A Hub without repositories, which serves until the end of the block."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = False
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        hub.store = f"http://localhost:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()

"""A real Prometheus (Debian's package) for tests: started, asked, and stopped whatever happens.

It listens on a loopback port that the kernel chooses, keeps its samples in a folder of the test's,
and dies with the test's process. :class:`Server` is what it has in common with other daemons that
say on the console where they listen.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import yaml

COMMANDS = ("prometheus", "promtool", "setpriv")
_DIE_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_LISTENING = re.compile(r'msg="Listening on" address=(\S+)')

Labels: TypeAlias = dict[str, str]


def missing(*commands: str) -> str:
    """Returns which of ``commands`` (default: those needed here) are not installed, or nothing."""
    absent = [command for command in commands or COMMANDS if shutil.which(command) is None]
    return f"not installed: {', '.join(absent)} (see tests/integration/packages)" if absent else ""


@dataclass(frozen=True)
class Series:
    """One answer of a query: ``points`` are (seconds since 1970, value), oldest first."""

    labels: Labels
    points: tuple[tuple[float, float], ...]

    @property
    def value(self) -> float:
        """The newest value."""
        return self.points[-1][1]


class Server:
    """A daemon with a web address, from :meth:`start` (or ``with``) to :meth:`stop`."""

    def __init__(self, argv: Sequence[str], folder: Path, *, ready: str = "/-/ready") -> None:
        """``folder`` gets its log; at the path ``ready`` it answers when it serves."""
        self.argv = list(argv)
        self.log = folder / f"{Path(argv[0]).name}.log"
        self.url = ""
        self._ready = ready
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, timeout_s: float = 600.0) -> None:
        """Start it; returns when it serves.

        Raises:
            AssertionError: it ended, or does not serve in time; the text is its log.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [*_DIE_WITH_US, *self.argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + timeout_s
        try:
            while not self._serves():
                assert self._process.poll() is None, f"it ended\n{self.log.read_text()}"
                assert time.monotonic() < deadline, f"not in {timeout_s} s\n{self.log.read_text()}"
                time.sleep(0.05)
        except BaseException:
            self.stop()
            raise

    def _serves(self) -> bool:
        found = _LISTENING.search(self.log.read_text())
        if found is None:
            return False
        self.url = f"http://{found[1]}"
        try:
            with urllib.request.urlopen(self.url + self._ready, timeout=600.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        """Stop it; kill it if that takes over 10 s."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        self._process = None

    def reload(self) -> None:
        """Let it read its configuration again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    def get(self, path: str, parameters: Mapping[str, str] | None = None) -> Any:
        """Returns what it answers, parsed.

        Raises:
            AssertionError: it refuses; the text is what it says.
        """
        asked = self.url + path
        # In the body: expressions may be longer than an address.
        body = None if parameters is None else urllib.parse.urlencode(parameters).encode()
        try:
            with urllib.request.urlopen(asked, data=body, timeout=600.0) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error


class Prometheus(Server):
    """A Prometheus that scrapes ``scrape_configs``, as in prometheus.yml, every ``interval_s``."""

    def __init__(
        self,
        folder: Path,
        scrape_configs: Sequence[Mapping[str, Any]],
        *,
        interval_s: float = 1.0,
        rules: Sequence[Path] = (),
        alertmanagers: Sequence[str] = (),
    ) -> None:
        """``rules`` are evaluated as often as targets are scraped, unless their groups say
        otherwise; ``alertmanagers`` are addresses, host:port.
        """
        folder.mkdir(parents=True, exist_ok=True)
        interval = f"{round(1000 * interval_s)}ms"
        config: dict[str, Any] = {
            "global": {
                "scrape_interval": interval,
                "scrape_timeout": interval,
                "evaluation_interval": interval,
            },
            "scrape_configs": [dict(job) for job in scrape_configs],
            "rule_files": [str(path.absolute()) for path in rules],
        }
        if alertmanagers:
            targets = [{"targets": list(alertmanagers)}]
            config["alerting"] = {"alertmanagers": [{"static_configs": targets}]}
        self.config = folder / "prometheus.yml"
        self.config.write_text(yaml.safe_dump(config, sort_keys=False))
        argv = ["prometheus", f"--config.file={self.config}"]
        argv += [f"--storage.tsdb.path={folder / 'samples'}", "--web.listen-address=127.0.0.1:0"]
        super().__init__(argv, folder)

    def __enter__(self) -> Prometheus:
        self.start()
        return self

    def query(self, expression: str, at_s: float | None = None) -> list[Series]:
        """Returns an expression's values at a time, now by default; a scalar has no labels."""
        parameters = {"query": expression}
        if at_s is not None:
            parameters["time"] = f"{at_s:.3f}"
        data = self.get("/api/v1/query", parameters)["data"]
        if data["resultType"] == "scalar":
            return [Series({}, _points([data["result"]]))]
        return [Series(one["metric"], _points([one["value"]])) for one in data["result"]]

    def query_range(
        self, expression: str, start_s: float, end_s: float, step_s: float = 1.0
    ) -> list[Series]:
        """Returns an expression's values every ``step_s`` between two times."""
        parameters = {
            "query": expression,
            "start": f"{start_s:.3f}",
            "end": f"{end_s:.3f}",
            "step": f"{step_s:g}",
        }
        data = self.get("/api/v1/query_range", parameters)["data"]
        return [Series(one["metric"], _points(one["values"])) for one in data["result"]]

    def value(self, expression: str, at_s: float | None = None) -> float:
        """Returns the one value of an expression.

        Raises:
            AssertionError: it has none, or several.
        """
        found = self.query(expression, at_s)
        assert len(found) == 1, f"{expression}: {len(found)} series: {[s.labels for s in found]}"
        return found[0].value

    def wait_for(
        self,
        expression: str,
        timeout_s: float = 600.0,
        until: Callable[[list[Series]], bool] = bool,
    ) -> list[Series]:
        """Ask until the answer is as wanted (by default: there is one); returns that answer.

        Raises:
            AssertionError: not in time; the text has the last answer.
        """
        deadline = time.monotonic() + timeout_s
        while not until(found := self.query(expression)):
            assert time.monotonic() < deadline, f"{expression} in {timeout_s:g} s: {found}"
            time.sleep(0.1)
        return found

    def targets(self) -> list[dict[str, Any]]:
        """Returns the targets that it scrapes: labels, health, last error and so on."""
        found: list[dict[str, Any]] = self.get("/api/v1/targets?state=active")["data"][
            "activeTargets"
        ]
        return found

    def alerts(self) -> list[dict[str, Any]]:
        """Returns its alerts, pending and firing: labels, annotations, state, activeAt."""
        found: list[dict[str, Any]] = self.get("/api/v1/alerts")["data"]["alerts"]
        return found


def _points(pairs: Sequence[Sequence[Any]]) -> tuple[tuple[float, float], ...]:
    return tuple((float(time_s), float(value)) for time_s, value in pairs)

"""The generated dashboards against the types of Grafana 11's own front end, by its compiler.

``@grafana/schema`` declares what a dashboard is, and the options of each kind of panel. JSON has
texts where TypeScript has enumerations, so a type ``Json`` turns these into their texts first.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.grafana import reading

SCHEMA, COMPILER = "@grafana/schema@11.6.0", "typescript@5.9"
PANEL_TYPES = {
    "bargauge": "BarGauge",
    "gauge": "Gauge",
    "heatmap": "Heatmap",
    "stat": "Stat",
    "state-timeline": "StateTimeline",
    "table": "Table",
    "text": "Text",
    "timeseries": "TimeSeries",
}
UNTYPED = ("auto", "auto_count", "auto_min", "expr", "titleFormat")
"""What Grafana reads of variables and annotations although its types leave it out."""
HEAD = """import type { Dashboard, Panel } from '@grafana/schema';
type Json<T> = T extends string ? `${T}`
  : T extends number | boolean | null | undefined ? (T extends number ? number : T)
  : T extends (infer U)[] ? Json<U>[]
  : T extends object ? { [K in keyof T]: Json<T[K]> } : T;
"""

pytestmark = [
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
    pytest.mark.integration,
]


@pytest.fixture(scope="module")
def typescript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Grafana's types and the compiler."""
    folder = tmp_path_factory.mktemp("types")
    (folder / "package.json").write_text('{"private": true}')
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", SCHEMA, COMPILER]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install {SCHEMA}: {done.stderr[-300:]}")
    return folder


def imports() -> Iterator[str]:
    """The options of each kind of panel, and what its series may have of their own."""
    for name in PANEL_TYPES.values():
        path = f"raw/composable/{name.lower()}/panelcfg/x/{name}PanelCfg_types.gen.d.ts"
        yield f"import type * as {name} from '@grafana/schema/dist/esm/{path}';"


def constants(name: str, made: dict[str, Any]) -> Iterator[str]:
    """A dashboard, and what the types of dashboards leave open: options of its panels."""
    typed = json.loads(json.dumps(made))
    for listed in (*typed["templating"]["list"], *typed["annotations"]["list"]):
        for key in UNTYPED:
            listed.pop(key, None)
    yield f"export const d_{name}: Json<Dashboard> = {json.dumps(typed)};"
    inner = [panel for row in made["panels"] for panel in row.get("panels", ())]
    for panel in [*made["panels"], *inner]:
        if panel["type"] == "row":
            continue
        kind, number = PANEL_TYPES[panel["type"]], panel["id"]
        yield f"export const p_{name}_{number}: Json<Panel> = {json.dumps(panel)};"
        options, type_ = panel.get("options", {}), f"Json<Partial<{kind}.Options>>"
        yield f"export const o_{name}_{number}: {type_} = {json.dumps(options)};"
        custom = panel.get("fieldConfig", {}).get("defaults", {}).get("custom")
        if custom is not None:
            config = f"Json<Partial<{kind}.FieldConfig>>"
            yield f"export const c_{name}_{number}: {config} = {json.dumps(custom)};"


def compiled(folder: Path, lines: list[str]) -> str:
    """What the compiler objects to."""
    (folder / "check.ts").write_text("\n".join([HEAD, *imports(), *lines]))
    command = ["node_modules/.bin/tsc", "--noEmit", "--strict", "--skipLibCheck"]
    command += ["--module", "nodenext", "--moduleResolution", "nodenext", "check.ts"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    return done.stdout + done.stderr


def test_dashboards_have_grafanas_types(typescript: Path) -> None:
    lines = [line for name, made in reading.documents().items() for line in constants(name, made)]
    assert compiled(typescript, lines) == ""


def test_a_wrong_field_is_noticed(typescript: Path) -> None:
    made = reading.documents()["overview"]
    panel = next(panel for panel in made["panels"] if panel["type"] == "timeseries")
    panel["options"]["legend"]["placement"] = "below"
    panel["fieldConfig"]["defaults"]["custom"]["lineColour"] = "red"
    made["graphTooltips"] = 1
    complaints = compiled(typescript, list(constants("overview", made)))
    assert sorted(set(re.findall(r"'\"?(below|lineColour|graphTooltips)\"?'", complaints))) == [
        "below",
        "graphTooltips",
        "lineColour",
    ], complaints

"""Charts and tables as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from dpbench.files import write_text
from dpbench.show.html import overview
from dpbench.show.html.drawing import Material
from dpbench.show.html.logical_chart import against_logical
from dpbench.show.html.memory_chart import memory
from dpbench.show.html.parts import Chart
from dpbench.show.html.phase_chart import phases
from dpbench.show.html.ratio_charts import ratio_along, ratio_map
from dpbench.show.html.roofline_chart import roofline
from dpbench.show.html.source import Source


def write_html(path: Path, sources: Sequence[Source]) -> None:
    """Write the page of some runs."""
    write_text(path, render(sources))


def render(sources: Sequence[Source]) -> str:
    """The page of some runs.

    Everything from outside is escaped, and the page's own policy lets a browser run no script
    but the two that dpbench puts there, and fetch nothing.
    """
    material = Material.of(sources)
    summary, failed = material.summary, material.failed
    environment = Environment(
        loader=PackageLoader("dpbench.show.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    scripts = [_script(get_plotlyjs()), _script(_file("report.js"))]
    return environment.get_template("report.html.j2").render(
        title=", ".join(source.label for source in sources),
        headline=overview.headline(sources, summary),
        trainers=overview.trainers(sources, summary, material.basis),
        failures=overview.failures(failed),
        charts=draw(sources, material),
        cases=overview.cases(summary, failed),
        rows=overview.every_row(sources),
        environments=overview.environments(sources),
        style=Markup(_file("report.css")),
        scripts=scripts,
        hashes=[_hash(script) for script in scripts],
    )


def draw(sources: Sequence[Source], material: Material) -> list[Chart]:
    """Every chart of the page, in order."""
    capacity = {
        gpu["name"]: float(gpu["memory_bytes"])
        for source in sources
        if (gpu := source.environment.get("gpu")) and gpu.get("memory_bytes")
    }
    return [
        phases(material),
        ratio_map(material),
        ratio_along(material, "seq_len"),
        ratio_along(material, "batch_size"),
        memory(material, capacity),
        roofline(sources, material),
        against_logical(material),
    ]


def _file(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8")


def _script(source: str) -> Markup:
    """A script of ours, as a browser reads it: with plain line ends."""
    return Markup(source.replace("\r\n", "\n").replace("\r", "\n"))


def _hash(script: Markup) -> str:
    """What the content security policy allows a script by."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"

"""The report as one HTML page that needs no other file."""

import base64
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import jinja2

from eagle_jax.evaluation.report import Report, interval_text


def write_page(report: Report, path: Path, pictures: Mapping[str, Path]) -> None:
    """Writes the page.

    Args:
      report: the figures.
      path: the file.
      pictures: PNG files by what they show (`draw_pictures`); those that are absent are left out.
    """
    template = resources.files("eagle_jax.evaluation").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["interval"] = interval_text
    images = {
        name: "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode() for name, file in pictures.items()
    }
    drafting = [c for c in report.configurations if c.shape is not None]
    depth = max((len(report.total(c).acceptance.metrics.accepted_at_depth) for c in drafting), default=0)
    page = environment.from_string(template).render(
        report=report,
        settings=report.evaluation.settings,
        drafting=drafting,
        depth=depth,
        datasets=[name for name in report.datasets if report.measured(name)],
        images=images,
        measured_plain=any(c.shape is None for c in report.configurations),
        best={r.best.name for r in report.recommendations},
    )
    path.write_text(page + "\n", encoding="utf-8")

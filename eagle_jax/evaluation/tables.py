"""The report as tables for a terminal."""

import math
from collections.abc import Callable

from rich.table import Table

from eagle_jax.evaluation.report import Part, Report, interval_text
from eagle_jax.evaluation.settings import Configuration

WIDTH = 130


def tables(report: Report) -> list[Table]:
    """All tables, the most important one first."""
    found = [overview(report), depths(report)]
    measured = [dataset for dataset in report.datasets if report.measured(dataset)]
    for dataset in measured:
        if report.categories(dataset):
            found.append(by_category(report, dataset))
    if report.evaluation.settings["turns"] > 1:
        found += [by_turn(report, dataset) for dataset in measured]
    return found


def overview(report: Report) -> Table:
    """Accepted length and speed of each configuration, by dataset and together."""
    table = Table(title="Accepted length (bonus token included, 95 % interval) and speed", title_justify="left")
    table.add_column("dataset")
    table.add_column("configuration")
    for name in ("requests", "tokens", "rounds", "accepted length", "tokens/s", "speed-up"):
        table.add_column(name, justify="right")
    measured = [dataset for dataset in report.datasets if report.measured(dataset)]
    names = [*measured, *(["all"] if len(measured) > 1 else [])]
    for dataset in names:
        for configuration in report.configurations:
            part = report.total(configuration) if dataset == "all" else report.dataset(configuration, dataset)
            table.add_row(dataset, configuration.name, *_figures(part))
        table.add_section()
    return table


def depths(report: Report) -> Table:
    """Acceptance by depth and the histogram of accepted lengths."""
    table = Table(title="Acceptance by depth of the draft, in % of rounds, and accepted lengths", title_justify="left")
    table.add_column("configuration")
    table.add_column("")
    drafting = [c for c in report.configurations if c.shape is not None]
    depth = max((len(report.total(c).acceptance.metrics.accepted_at_depth) for c in drafting), default=0)
    for d in range(1, depth + 2):
        table.add_column(str(d), justify="right")
    for configuration in drafting:
        metrics = report.total(configuration).acceptance.metrics
        histogram = [count / metrics.rounds if metrics.rounds else math.nan for count in metrics.histogram]
        lines = {
            "accepted at depth, of all rounds": metrics.acceptance_rates,
            "of those that accepted the depth before": metrics.conditional_acceptance_rates,
            "rounds that emitted so many tokens": histogram,
        }
        for title, values in lines.items():
            table.add_row(configuration.name, title, *(_percent(value) for value in values))
        table.add_section()
    return table


def by_category(report: Report, dataset: str) -> Table:
    """Accepted length of each category of a dataset."""
    return _cross(
        report,
        f"{dataset}: accepted length by category",
        {name or "-": _category(report, dataset, name) for name in report.categories(dataset)},
    )


def by_turn(report: Report, dataset: str) -> Table:
    """Accepted length of each turn of a dataset."""
    turns = range(1, report.evaluation.settings["turns"] + 1)
    return _cross(
        report, f"{dataset}: accepted length by turn", {f"turn {n}": _turn(report, dataset, n) for n in turns}
    )


Parts = Callable[[Configuration], Part]


def _category(report: Report, dataset: str, category: str) -> Parts:
    return lambda configuration: report.category(configuration, dataset, category)


def _turn(report: Report, dataset: str, turn: int) -> Parts:
    return lambda configuration: report.turn(configuration, dataset, turn)


def _cross(report: Report, title: str, lines: dict[str, Parts]) -> Table:
    """One line a category, one column a drafting configuration."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    drafting = [c for c in report.configurations if c.shape is not None]
    for configuration in drafting:
        table.add_column(configuration.name, justify="right")
    for name, part in lines.items():
        cells = [part(configuration).acceptance for configuration in drafting]
        if any(cell.requests for cell in cells):
            table.add_row(name, *(interval_text(c.metrics.mean_acceptance_length, c.interval) for c in cells))
    return table


def _figures(part: Part) -> list[str]:
    acceptance, speed = part.acceptance, part.speed
    assert speed is not None
    return [
        str(acceptance.requests),
        str(acceptance.output_tokens),
        str(acceptance.metrics.rounds),
        interval_text(acceptance.metrics.mean_acceptance_length, acceptance.interval),
        "-" if math.isnan(speed.tokens_per_second) else f"{speed.tokens_per_second:.1f}",
        "" if part.speed_up is None else interval_text(part.speed_up.ratio, part.speed_up.interval),
    ]


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f}"

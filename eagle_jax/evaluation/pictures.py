"""The report as pictures. Needs matplotlib (`pip install 'eagle-jax[eval]'`)."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eagle_jax.evaluation.report import Part, Report, names_of
from eagle_jax.evaluation.settings import Configuration

DRAWN = 8
"""Most configurations in one picture of lines or grouped bars; of more the fastest are drawn."""
_PLAIN = "#9a9a9a"
_BEST = "#1b7837"


def draw_pictures(report: Report, folder: Path) -> dict[str, Path]:
    """Draws all pictures that the report has figures for.

    Args:
      report: the figures.
      folder: where the PNG files go.

    Returns:
      The files by what they show: "speed", "depth", "category", "histogram".
    """
    found: dict[str, Path] = {}
    drafting = fastest([c for c in report.configurations if c.shape is not None], report)
    pictures: dict[str, tuple[str, Any]] = {"speed": ("speed.png", _speed)}
    if drafting:
        pictures |= {
            "depth": ("acceptance_by_depth.png", _depth),
            "category": ("accepted_length_by_category.png", _category),
            "histogram": ("accepted_lengths.png", _histogram),
        }
    for name, (file, draw) in pictures.items():
        figure = Figure(layout="constrained")
        draw(figure, report, list(report.configurations) if name == "speed" else drafting)
        figure.savefig(folder / file, dpi=130)
        found[name] = folder / file
    return found


def fastest(configurations: Sequence[Configuration], report: Report) -> list[Configuration]:
    """At most `DRAWN`, those of most tokens a second, in the order given."""

    def speed(configuration: Configuration) -> float:
        part = report.total(configuration).speed
        return 0.0 if part is None or math.isnan(part.tokens_per_second) else part.tokens_per_second

    kept = sorted(configurations, key=speed, reverse=True)[:DRAWN]
    return [c for c in configurations if c in kept]


def _speed(figure: Any, report: Report, configurations: Sequence[Configuration]) -> None:
    """Tokens a second, with the speed-up, and accepted length of every configuration."""
    figure.set_size_inches(10, 1.4 + 0.36 * len(configurations))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    names = names_of(configurations)
    parts = [report.total(c) for c in configurations]
    places = range(len(names))
    best = {r.best.name for r in report.recommendations}
    speeds = [part.speed.tokens_per_second if part.speed is not None else math.nan for part in parts]
    colours = [_BEST if c.name in best else _PLAIN if c.shape is None else "#80a9d0" for c in configurations]
    left.barh(places, speeds, color=colours)
    top = max((s for s in speeds if not math.isnan(s)), default=1.0)
    for place, part, speed in zip(places, parts, speeds, strict=True):
        if not math.isnan(speed):
            label = f" {speed:.1f}" + ("" if part.speed_up is None else f"  ({part.speed_up.ratio:.2f} x plain)")
            left.text(speed, place, label, va="center", fontsize=8)
    left.set(xlabel="tokens a second (more is better; the fastest is green)", xlim=(0, top * 1.45))
    left.set_yticks(places, names, fontsize=8)
    left.invert_yaxis()
    lengths = [part.acceptance.metrics.mean_acceptance_length for part in parts]
    right.barh(places, lengths, color=colours, xerr=_errors(parts), ecolor="#444444", capsize=2)
    longest = max((x for x in lengths if not math.isnan(x)), default=1.0)
    for place, part, length in zip(places, parts, lengths, strict=True):
        if not math.isnan(length):
            end = length if part.acceptance.interval is None else part.acceptance.interval[1]
            right.text(end, place, f" {length:.2f}", va="center", fontsize=8)
    right.set(xlabel="accepted length: tokens a forward of the target", xlim=(0, longest * 1.3))
    _tidy(left, right)


def _depth(figure: Any, report: Report, configurations: Sequence[Configuration]) -> None:
    """Acceptance by depth, of all rounds and of those that got there."""
    figure.set_size_inches(10, 4)
    left, right = figure.subplots(1, 2, sharey=True)
    for name, configuration in zip(names_of(configurations), configurations, strict=True):
        metrics = report.total(configuration).acceptance.metrics
        depths = range(1, len(metrics.accepted_at_depth) + 1)
        left.plot(depths, [100 * rate for rate in metrics.acceptance_rates], marker="o", label=name)
        right.plot(depths, [100 * rate for rate in metrics.conditional_acceptance_rates], marker="o", label=name)
    left.set(ylabel="%", xlabel="depth of the draft", title="rounds that accept a draft at this depth", ylim=(0, 102))
    right.set(xlabel="depth of the draft", title="of the rounds that accepted the depth before")
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    _tidy(left, right)


def _category(figure: Any, report: Report, configurations: Sequence[Configuration]) -> None:
    """Accepted length by dataset and category."""
    lines: list[tuple[str, list[Part]]] = []
    for dataset in report.datasets:
        lines.append((dataset, [report.dataset(c, dataset) for c in configurations]))
        for category in report.categories(dataset):
            parts = [report.category(c, dataset, category) for c in configurations]
            lines.append((f"{category or '-'}  ", parts))
    lines = [(name, parts) for name, parts in lines if any(part.acceptance.requests for part in parts)]
    height = 0.8 / len(configurations)
    figure.set_size_inches(10, 1.6 + len(lines) * (0.16 + 0.13 * len(configurations)))
    axes = figure.subplots()
    for index, name in enumerate(names_of(configurations)):
        parts = [parts[index] for _, parts in lines]
        places = [line + (index - (len(configurations) - 1) / 2) * height for line in range(len(lines))]
        lengths = [part.acceptance.metrics.mean_acceptance_length for part in parts]
        axes.barh(places, lengths, height * 0.92, label=name, xerr=_errors(parts), ecolor="#444444", capsize=1.5)
    axes.set_yticks(range(len(lines)), [name for name, _ in lines], fontsize=8)
    for tick, (name, _) in zip(axes.get_yticklabels(), lines, strict=True):
        tick.set_fontweight("normal" if name.endswith("  ") else "bold")
    axes.invert_yaxis()
    axes.set(xlabel="accepted length, with the 95 % interval; datasets bold, their categories below them")
    axes.axvline(1, color=_PLAIN, linestyle="--", linewidth=1)
    figure.legend(loc="outside upper center", fontsize=8, ncols=4)
    _tidy(axes)


def _histogram(figure: Any, report: Report, configurations: Sequence[Configuration]) -> None:
    """Share of the rounds by the tokens that they emitted."""
    columns = min(4, len(configurations))
    lines = math.ceil(len(configurations) / columns)
    figure.set_size_inches(2.7 * columns + 0.8, 2.2 * lines + 0.6)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axes, name, configuration in zip(grid.flat, names_of(configurations), configurations, strict=False):
        metrics = report.total(configuration).acceptance.metrics
        shares = [100 * count / metrics.rounds if metrics.rounds else math.nan for count in metrics.histogram]
        axes.bar(range(1, len(shares) + 1), shares, color="#80a9d0")
        axes.axvline(metrics.mean_acceptance_length, color="#b2182b", linewidth=1.2)
        axes.set_title(name, fontsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in list(grid.flat)[len(configurations) :]:
        axes.set_visible(False)
    figure.supylabel("% of rounds", fontsize=9)
    figure.supxlabel("tokens emitted by a round; the red line is their mean, the accepted length", fontsize=9)
    _tidy(*grid.flat)


def _errors(parts: Sequence[Part]) -> list[list[float]]:
    """Distances from the mean to both ends of the interval."""
    below, above = [], []
    for part in parts:
        mean, interval = part.acceptance.metrics.mean_acceptance_length, part.acceptance.interval
        below.append(0.0 if interval is None else max(0.0, mean - interval[0]))
        above.append(0.0 if interval is None else max(0.0, interval[1] - mean))
    return [below, above]


def _tidy(*all_axes: Axes) -> None:
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)

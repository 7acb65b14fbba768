"""A picture of a report of `eagle_jax.measurement.bench`: bars of the parts of a round against the floor of bytes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draws bars and writes them to a file, whose suffix says the format (.png, .svg, .pdf).

    Raises:
      ImportError: matplotlib is not installed; the message names the extra.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: pip install 'eagle-jax[bench]', or leave it out") from error
    bars = [*report["steps"], *report["parts"]][::-1]
    figure = Figure(figsize=(8, 1 + 0.45 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = range(len(bars))
    axes.barh(places, [bar["ms"] for bar in bars], color="#9ecae1", label="measured")
    axes.barh(
        places, [bar["floor_ms"] for bar in bars], height=0.35, color="#08519c", label="its bytes at copy bandwidth"
    )
    for place, bar in zip(places, bars, strict=True):
        share = bar["share_of_copy_bandwidth"]
        text = f" {bar['ms']:.2f}" + (f" ms, {100 * share:.0f} % of copy bandwidth" if share else " ms")
        axes.annotate(text, (max(bar["ms"], bar["floor_ms"]), place), va="center", fontsize=8)
    names = [bar["name"] if bar["count"] == 1 else f"{bar['count']} {bar['name']}" for bar in bars]
    axes.set_yticks(list(places), names)
    axes.set_xlim(0, 1.7 * max(bar["ms"] for bar in bars))  # room for the numbers
    axes.set_xlabel("milliseconds")
    settings, device = report["settings"], report["device"]
    axes.set_title(
        f"{settings['model']}, {settings['dtype']}, batch {settings['batch']}, context {settings['context']}, {device['kind']}",
        fontsize=10,
    )
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path)

"""A traced round as a picture: SVG text, without a dependency."""

import math
from html import escape

from eagle_jax.evaluation.rounds import TracedRound

_COLUMN, _ROW, _WIDTH, _HEIGHT, _MARGIN = 132, 46, 104, 34, 12  # pixels: distances of boxes, and their sizes
_STYLE = """
  .box { fill: #f4f5f7; stroke: #9aa3ad; }
  .root { fill: #dfe7f5; stroke: #4566a8; }
  .accepted { fill: #d9f0dd; stroke: #1b7837; stroke-width: 2; }
  .bonus { fill: #fff; stroke: #4566a8; stroke-width: 2; stroke-dasharray: 4 3; }
  .edge { fill: none; stroke: #9aa3ad; }
  .way { fill: none; stroke: #1b7837; stroke-width: 2.5; }
  text { font-family: ui-sans-serif, system-ui, sans-serif; font-size: 13px; fill: #1f2328; text-anchor: middle; }
  .small { font-size: 11px; fill: #57606a; }
""".strip("\n")


def tree_svg(traced: TracedRound) -> str:
    """Draws the tree of a round: the root on the left, a column for each depth, and the bonus token behind the accepted path.

    A box holds a token and the probability that the head gives the way to it. Accepted nodes are green; the target wanted none
    of the others. In a notebook: `IPython.display.SVG(tree_svg(traced))`.

    Args:
      traced: one round of `eagle_jax.evaluation.trace_rounds`.

    Returns:
      A whole SVG document.
    """
    children: dict[int, list[int]] = {node: [] for node in range(len(traced.tokens))}
    for node, parent in enumerate(traced.parents):
        if parent >= 0:
            children[parent].append(node)
    accepted, last = set(traced.accepted), traced.accepted[-1]
    bonus = len(traced.tokens)
    depths = {**dict(enumerate(traced.depths)), bonus: traced.depths[last] + 1}
    children[bonus] = []
    children[last] = [bonus, *children[last]]
    rows = _rows(children)
    columns, lines = max(depths.values()) + 1, max(rows.values()) + 1
    width, height = _MARGIN * 2 + (columns - 1) * _COLUMN + _WIDTH, _MARGIN * 2 + (lines - 1) * _ROW + _HEIGHT + 18

    def place(node: int) -> tuple[float, float]:
        return _MARGIN + depths[node] * _COLUMN, _MARGIN + 18 + rows[node] * _ROW

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img">',
        f"<title>A draft tree of {len(traced.tokens)} nodes, of which {len(accepted) - 1} drafted ones are accepted</title>",
        f"<style>\n{_STYLE}\n</style>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
    ]
    for depth in range(columns):
        name = "root" if depth == 0 else f"depth {depth}"
        parts.append(f'<text class="small" x="{_MARGIN + depth * _COLUMN + _WIDTH / 2:.0f}" y="14">{name}</text>')
    for node, below in children.items():
        for child in below:
            style = "way" if child in accepted or child == bonus else "edge"
            (x, y), (to_x, to_y) = place(node), place(child)
            x, y, to_y = x + _WIDTH, y + _HEIGHT / 2, to_y + _HEIGHT / 2
            half = (x + to_x) / 2
            parts.append(
                f'<path class="{style}" d="M {x:.0f} {y:.1f} C {half:.0f} {y:.1f} {half:.0f} {to_y:.1f} {to_x:.0f} {to_y:.1f}"/>'
            )
    for node in children:
        parts += _box(traced, node, place(node), accepted, bonus)
    return "\n".join([*parts, "</svg>", ""])


def _rows(children: dict[int, list[int]]) -> dict[int, float]:
    """Height of each node: leaves one below the other, a parent in the middle of its children."""
    rows: dict[int, float] = {}
    used = 0

    def settle(node: int) -> None:
        nonlocal used
        for child in children[node]:
            settle(child)
        if children[node]:
            rows[node] = (rows[children[node][0]] + rows[children[node][-1]]) / 2
        else:
            rows[node] = used
            used += 1

    settle(0)
    return rows


def _box(traced: TracedRound, node: int, place: tuple[float, float], accepted: set[int], bonus: int) -> list[str]:
    x, y = place
    if node == bonus:
        style, token, text = "bonus", traced.bonus, traced.bonus_text
        small = "bonus"
    else:
        style = "root" if node == 0 else "accepted" if node in accepted else "box"
        token, text = traced.tokens[node], None if traced.texts is None else traced.texts[node]
        small = "decided before" if node == 0 else f"{100 * math.exp(traced.scores[node]):.2g} %"
    label = escape(_label(token, text))
    middle = x + _WIDTH / 2
    return [
        f'<rect class="{style}" x="{x:.0f}" y="{y:.1f}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>',
        f'<text x="{middle:.0f}" y="{y + 14:.1f}">{label}</text>',
        f'<text class="small" x="{middle:.0f}" y="{y + 28:.1f}">{small}</text>',
    ]


def _label(token: int, text: str | None) -> str:
    """A token in few characters, spaces visible."""
    if text is None:
        return str(token)
    shown = text.replace(" ", "\N{OPEN BOX}").replace("\n", "\\n").replace("\t", "\\t")
    shown = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in shown)
    return shown if len(shown) <= 12 else f"{shown[:11]}\N{HORIZONTAL ELLIPSIS}"

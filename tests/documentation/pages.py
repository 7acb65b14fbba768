"""Code blocks of README and docs.

The line before a fenced block can be a mark, an HTML comment, which no renderer shows:

- `<!-- test: slow -->`: runs with `-m slow` only;
- `<!-- test: checked -->`: is not run, because it needs a download or an accelerator or takes hours. Python is compiled and what
  it imports of ours must exist; a command line must be one that the parser takes.

A comment that begins with `test: given` holds Python that runs before the block behind it.
"""

import dataclasses
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "checkpoints" / "README.md",
    ROOT / "notebooks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
MARKS = (None, "slow", "checked")
PYTHON, SHELL, NO_CODE = "python", "sh", ("text", "json", "jsonl")
_GIVEN = r"(?:^ *<!-- test: given\n(?P<given>.*?)-->\n)?"
_MARK = r"(?:^ *<!-- test: (?P<mark>\w+) -->\n)?"
_BLOCK = re.compile(_GIVEN + _MARK + r"^ *```(?P<language>\S*)\n(?P<code>.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    page: Path
    line: int
    """Of its first line of code."""
    language: str
    code: str
    given: str
    """What runs before it, unseen."""
    mark: str | None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text[: match.start("code")].count("\n") + 1,
            match["language"],
            textwrap.dedent(match["code"]),
            textwrap.dedent(match["given"] or ""),
            match["mark"],
        )
        for match in _BLOCK.finditer(text)
    ]


def command_lines(block: Block) -> list[str]:
    """The commands of a shell block, continued lines joined and comments taken off."""
    lines = block.code.replace("\\\n", " ").splitlines()
    lines = [re.sub(r"(^|\s+)#.*$", "", line).strip() for line in lines]
    return [line for line in lines if line]

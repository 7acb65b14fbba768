"""The site builds without a warning, and has every page in its navigation."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = re.search(r"^nav:\n(.*?)^\w", text, re.MULTILINE | re.DOTALL)
    assert navigation
    assert sorted(re.findall(r"(\S+\.md)$", navigation[1], re.MULTILINE)) == sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")
    )


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
    """Broken links, missing anchors and names that the reference cannot find are warnings, and `--strict` makes them errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    for name in ("load_target", "speculative_generate", "SamplingParams", "num_speculative_tokens"):
        assert name in reference
    assert not list((tmp_path / "site").rglob("*.py"))

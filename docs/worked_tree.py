"""The picture of a round in docs/concepts.md, of a real round of SmolLM2: `python docs/worked_tree.py`."""

import dataclasses
import json
from pathlib import Path

from eagle_jax import load_draft, load_target
from eagle_jax.evaluation import trace_rounds, tree_svg
from eagle_jax.loading import default_target

ASSETS = Path(__file__).parent / "assets"
PROMPT = "How does photosynthesis work?"
TREE = {"total_tokens": 10, "depth": 2, "top_k": 3}
ROUND = 1

if __name__ == "__main__":
    target = load_target(default_target(), dtype="float32")
    draft = load_draft("smollm2-135m-instruct-eagle3", target)
    traced = trace_rounds(target, draft, PROMPT, rounds=ROUND + 1, tree=TREE, chat=True)[ROUND]
    (ASSETS / "worked_tree.json").write_text(json.dumps(dataclasses.asdict(traced), indent=1) + "\n", encoding="utf-8")
    (ASSETS / "worked_tree.svg").write_text(tree_svg(traced), encoding="utf-8")

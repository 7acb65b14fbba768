"""First differences of outputs, and the gaps there."""

import numpy as np
import pytest
import torch
from support import golden
from transformers import AutoModelForCausalLM

from eagle_jax import SamplingParams, generate, load_target
from eagle_jax.evaluation import first_divergences
from eagle_jax.parallel import make_mesh

PROMPTS = [[5, 9, 300, 17], [7, 8, 9], [1, 2, 3, 4, 5]]


@pytest.fixture(scope="module")
def target():
    return load_target(golden.FOLDER / "target_A")


def test_the_gap_is_that_of_the_logits_of_transformers(target):
    model = AutoModelForCausalLM.from_pretrained(golden.FOLDER / "target_A", dtype=torch.float32)
    ours = generate(target, [{"prompt_token_ids": p} for p in PROMPTS], max_new_tokens=6, ignore_eos=True).token_ids
    theirs = [list(ids) for ids in ours]
    theirs[1][3] = 77
    theirs[2] = theirs[2][:4]
    found = first_divergences(target, PROMPTS, ours, theirs)
    assert [(d.row, d.token, d.ours, d.theirs) for d in found] == [(1, 3, ours[1][3], 77), (2, 4, ours[2][4], None)]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[1] + ours[1][:3]])).logits[0, -1].double().numpy()
    wanted = abs(logits[ours[1][3]] - logits[77])
    assert found[0].gap == pytest.approx(wanted, rel=1e-4)
    assert found[0].relative_gap == pytest.approx(wanted / np.abs(logits).max(), rel=1e-4)
    assert found[1].gap is found[1].relative_gap is None
    assert first_divergences(target, PROMPTS, ours, ours) == []


@pytest.mark.slow
def test_a_drawn_token_is_the_argmax_of_what_is_compared(target):
    """So the gap to any other token is what that one lacks, and none is smaller than the runner-up's."""
    params = SamplingParams(temperature=0.9, top_k=50)
    prompts = [{"prompt_token_ids": p} for p in PROMPTS]
    options = {"temperature": 0.9, "top_k": 50, "seed": [1, 2, 3], "ignore_eos": True}
    ours = generate(target, prompts, max_new_tokens=3, **options).token_ids
    gaps = []
    for other in range(0, 60, 12):
        theirs = [[*ids[:2], other if ids[2] != other else 511] for ids in ours]
        gaps += [d.gap for d in first_divergences(target, PROMPTS, ours, theirs, params=params, seeds=[1, 2, 3])]
    assert len(gaps) == 15
    assert min(gaps) > 0
    assert np.isinf(gaps).any(), "tokens behind the cut cannot be drawn"
    assert np.isfinite(gaps).any()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([[1]], [[2]], []), {}, "1 prompts, but 1 and 0 outputs"),
        (
            ([[1]], [[2]], [[3]]),
            {"params": SamplingParams(temperature=1.0)},
            "seeds must have one seed for each prompt",
        ),
        (([[1]], [[2]], [[3]]), {"params": SamplingParams(presence_penalty=1.0)}, "compare without them"),
    ],
)
def test_what_cannot_be_compared_is_refused(target, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        first_divergences(target, *arguments, **options)


def test_a_target_on_several_devices_is_refused():
    target = load_target(golden.FOLDER / "target_A", mesh=make_mesh(2))
    with pytest.raises(ValueError, match="target is split over 2 devices"):
        first_divergences(target, [[1]], [[2]], [[3]])

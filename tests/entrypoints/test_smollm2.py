"""SmolLM2-135M-Instruct with the released head: the text of a seed, however it is decoded (`-m slow`)."""

import dataclasses

import pytest
from support.pairs import completions, decoder_of

from eagle_jax import SamplingParams, TreeConfig, generate, load_draft, load_target
from eagle_jax.drafters.tree import StaticTree
from eagle_jax.loading import default_target
from eagle_jax.loading.shipped import shipped_head
from eagle_jax.parallel import make_mesh

QUESTIONS = [
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "What is 12 times 7?",
    "Name three rivers in Europe.",
    "Write a Python function that reverses a list.",
    "How do I boil an egg?",
    "Tell me a joke.",
    "Explain gravity to a child.",
]
SHAPES = {
    "chain": TreeConfig.chain(3),
    "static tree": StaticTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0, 0]]),
    "dynamic tree": TreeConfig(total_tokens=20, depth=4, top_k=5),
}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


@pytest.fixture(scope="module")
def models():
    target = load_target(default_target(), dtype="float32")
    return target, load_draft(shipped_head("smollm2-135m-instruct-eagle3"), target)


@pytest.fixture(scope="module")
def plain(models):
    options = {"max_new_tokens": 24, "chat": True, "max_num_seqs": 8}
    return generate(models[0], QUESTIONS, seed=list(range(8)), **SAMPLED, **options)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_text_of_a_seed_is_that_of_plain_decoding(models, plain, shape, slots) -> None:
    """In other rows than plainly, and in the batch of 8 among rows without a seed and greedy ones."""
    decoder = decoder_of(*models, SHAPES[shape], max_num_seqs=slots)
    order = [6, 3, 0, 5] if slots == 8 else [2, 7]
    params = [SamplingParams(max_tokens=24, seed=index, **SAMPLED) for index in order]
    questions = [QUESTIONS[index] for index in order]
    if slots == 8:
        unseeded = [
            dataclasses.replace(params[0], seed=None),
            dataclasses.replace(params[0], seed=None, temperature=0.0),
        ]
        params, questions = [*unseeded, *params, *unseeded], [*QUESTIONS[:2], *questions, *QUESTIONS[:2]]
    outputs, _ = decoder.run(decoder.read(questions, chat=True), params, progress=False)
    results = completions(outputs)
    seeded = results[2:6] if slots == 8 else results
    assert [result.token_ids for result in seeded] == [plain.token_ids[index] for index in order]
    assert max(n for result in seeded for n in result.metrics.accepted_lengths) > 1


@pytest.mark.slow
def test_three_devices_say_what_one_says(models) -> None:
    """9 query and 3 key/value heads, and a vocabulary of 49152, over three devices; greedily and for a seed."""
    target = load_target(default_target(), dtype="float32", mesh=make_mesh(3))
    draft = load_draft(shipped_head("smollm2-135m-instruct-eagle3"), target)
    params = [SamplingParams(max_tokens=24, seed=1, **SAMPLED), SamplingParams(max_tokens=24, temperature=0.0)]
    speculating, plain = (
        decoder_of(target, draft, SHAPES["dynamic tree"], max_num_seqs=2),
        decoder_of(models[0], max_num_seqs=2),
    )
    (spread, _), (whole, _) = (
        decoder.run(decoder.read(QUESTIONS[:2], chat=True), params, progress=False) for decoder in (speculating, plain)
    )
    assert [result.token_ids for result in spread] == [result.token_ids for result in whole]
    assert max(n for result in spread for n in result.metrics.accepted_lengths) > 2


@pytest.mark.slow
def test_two_devices_do_not_divide_it() -> None:
    with pytest.raises(ValueError, match=r"num_attention_heads 9, which tensor_parallel_size 2 does not divide"):
        load_target(default_target(), dtype="float32", mesh=make_mesh(2))

"""`LLM` keeps the interface that vLLM users know."""

import re
import warnings

import pytest
from support.pairs import PROMPTS

from eagle_jax import LLM, SamplingParams
from eagle_jax.entrypoints.vllm_keywords import ONE_VALUE, WITHOUT_MEANING
from eagle_jax.metrics import Counter, Vector

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(pair):
    target, draft = pair
    config = {"method": "eagle3", "model": str(draft.path), "num_speculative_tokens": 4}
    return LLM(target, max_num_seqs=4, speculative_config=config)


def test_outputs_have_the_fields_that_scripts_read(llm, pair):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    for output in outputs:
        [completion] = output.outputs
        assert len(completion.token_ids) == 20
        assert completion.text == pair[0].tokenizer.decode(completion.token_ids)
        assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
        assert (output.prompt, output.finished) == (None, True)
        assert 1 + sum(output.metrics.accepted_lengths) == 20
        assert output.metrics.mean_acceptance_length == 19 / output.metrics.rounds
    assert max(n for output in outputs for n in output.metrics.accepted_lengths) > 1


def test_text_prompts_and_parameters_for_each(llm):
    texts = ["abc ba", "bo日 d", "e", "kaka"]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 1, 0, 7)]
    outputs = llm.generate(texts, params)
    assert [output.prompt for output in outputs] == texts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 1, 0, 7]
    assert outputs[2].outputs[0].text == ""
    assert [o.outputs[0].text for o in llm.generate(texts)] != [None] * 4


def test_chats_go_through_the_template(llm):
    chat = [{"role": "user", "content": "ka"}]
    outputs = llm.chat([chat] * 4, PARAMS)
    assert outputs[0].prompt == "u ka a "
    assert llm.chat([chat] * 4, PARAMS, add_generation_prompt=False)[0].prompt == "u ka "
    assert outputs[0].outputs == llm.generate(["u ka a "] * 4, PARAMS)[0].outputs
    for wrong in ("ka", {"role": "user"}, [["ka"]], [[]]):
        with pytest.raises(TypeError, match="must be a list of"):
            llm.chat(wrong)
    with pytest.raises(ValueError, match="messages is empty"):
        llm.chat([])


def test_counters_add_up_over_calls_and_streams(llm):
    def read():
        return {c.name: c.value if isinstance(c, Counter) else c.values for c in llm.get_metrics()}

    before = read()
    metrics = [output.metrics for output in llm.generate(PROMPTS, PARAMS)]
    metrics += [delta.metrics for delta in llm.stream(PROMPTS, PARAMS) if delta.finish_reason]
    after = read()
    assert len(metrics) == 8
    grown = {name: after[name] - before[name] for name in after if not isinstance(after[name], list)}
    assert grown == {
        "vllm:prompt_tokens": 2 * sum(map(len, PROMPTS)),
        "vllm:generation_tokens": 8 * 20,
        "vllm:spec_decode_num_drafts": sum(m.rounds for m in metrics),
        "vllm:spec_decode_num_draft_tokens": 4 * sum(m.rounds for m in metrics),
        "vllm:spec_decode_num_accepted_tokens": sum(m.accepted for m in metrics),
    }
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    wanted = [sum(column) for column in zip(*(m.accepted_at_depth for m in metrics), strict=True)]
    assert [b - a for a, b in zip(before[name], after[name], strict=True)] == wanted
    assert isinstance(llm.get_metrics()[-1], Vector)


def test_request_ids_are_numbered_through(llm):
    first = [int(output.request_id) for output in llm.generate(PROMPTS, SamplingParams(max_tokens=1))]
    second = [int(output.request_id) for output in llm.generate(PROMPTS, SamplingParams(max_tokens=1))]
    assert [*first, *second] == list(range(first[0], first[0] + 8))


def test_wrong_sampling_params(llm):
    with pytest.raises(ValueError, match="there are 2 sampling_params for 4 prompts"):
        llm.generate(PROMPTS, [PARAMS, PARAMS])
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams"):
        llm.generate(PROMPTS, {"max_tokens": 3})
    with pytest.raises(TypeError, match="best"):
        llm.generate(PROMPTS, PARAMS, best=3)


def test_keywords_without_a_meaning_give_one_warning(target):
    with pytest.warns(UserWarning, match="enforce_eager, gpu_memory_utilization") as caught:
        LLM(target, enforce_eager=True, gpu_memory_utilization=0.8)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM(target, seed=0, tensor_parallel_size=1, quantization=None, trust_remote_code=False, kv_cache_dtype="auto")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pipeline_parallel_size": 2}, ValueError, "pipeline_parallel_size must be 1, got 2: split the model by"),
        ({"pipeline_parallel_size": True}, ValueError, "pipeline_parallel_size must be 1, got True"),
        ({"tensor_parallel_size": 2}, ValueError, "tensor_parallel_size cannot be given with a model that is loaded"),
        ({"quantization": "awq"}, ValueError, "quantization must be None, got 'awq': give an unquantised"),
        ({"trust_remote_code": True}, ValueError, "trust_remote_code must be False, got True"),
        ({"generation_config": "auto"}, ValueError, "generation_config must be 'vllm', got 'auto'"),
        ({"cpu_offload_gb": 4}, ValueError, "cpu_offload_gb must be 0, got 4"),
        ({"max_model_length": 100}, TypeError, r"LLM\(\) got an unexpected keyword argument 'max_model_length'"),
        ({"max_model_len": 10**6}, ValueError, "max_model_len 1000000 exceeds the 512 tokens"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be an integer of at least 1, got 0"),
        ({"seed": 1.5}, TypeError, "seed must be an integer, got 1.5"),
        ({"dtype": "float32"}, ValueError, "dtype cannot be given with a model that is loaded"),
        (
            {"skip_tokenizer_init": True, "tokenizer": "x"},
            ValueError,
            "skip_tokenizer_init and tokenizer exclude each other",
        ),
        ({"speculative_config": {"num_speculative_tokens": 2}}, ValueError, "lacks model"),
        (
            {"speculative_config": {"model": "no/such/folder", "num_speculative_tokens": 2}},
            ValueError,
            "no/such/folder",
        ),
    ],
)
def test_keywords_that_cannot_be_honoured_are_refused(target, options, error, message):
    with pytest.raises(error, match=message):
        LLM(target, **options)


def test_tokenizer_can_be_replaced_and_left_out(target, tmp_path):
    target.tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    assert LLM(target, tokenizer=tmp_path).get_tokenizer().decode([3]) == "a"
    assert LLM(target, tokenizer=target.tokenizer).get_tokenizer() is target.tokenizer
    assert LLM(target, skip_tokenizer_init=True).get_tokenizer() is None
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no tokenizer"):
        LLM(target, tokenizer=tmp_path / "empty")


def test_warmup_refuses_what_no_call_can_need(target):
    llm = LLM(target)
    with pytest.raises(ValueError, match="num_tokens 513 exceeds max_model_len 512"):
        llm.warmup(num_tokens=513)
    with pytest.raises(ValueError, match="num_prompts must be an integer of at least 1, got 0"):
        llm.warmup(num_prompts=0)


def test_docstring_lists_the_keywords_of_the_tables():
    text = LLM.__doc__
    idle = text[text.index("*have no meaning*") : text.index("*accepted at one value*")]
    fixed = text[text.index("*accepted at one value*") : text.index("*all others*")]
    named = set(re.findall(r"\w+", idle.split(":", 1)[1]))
    assert named == set(WITHOUT_MEANING)
    assert set(re.findall(r"(\w+)=", fixed)) == set(ONE_VALUE)

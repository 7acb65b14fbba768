"""`generate`, `speculative_generate` and `stream_generate`: decoding as plain functions of a loaded target and draft head.

How many programs are compiled: three (make a state, prefill a chunk, decode rounds) for each distinct combination of

- draft head, tree, prefill chunk and `shape_invariant`;
- class of the call, the least that covers its requests: greedy; sampling (with `rejection_sample_method` and the like);
  sampling with penalties, biases, bans or log-probabilities (with `logprobs_mode`);
- slots: the number of prompts in a call rounded up to a power of two, at most `max_num_seqs`;
- capacity: the longest prompt plus budget in a call, rounded up to a power of two from 256 on, at most `max_model_len`;
- stop ids: room for 8, rounded up to a power of two where there are more.

Prompts, their lengths, budgets, temperatures, seeds and all other numbers about sampling, stop ids, stop strings and the weights
themselves are arguments of these programs. The caches of
the last two such combinations are kept beside the target and used again by the next call with one of them.

Compiled programs are also kept on disk for the next process, in `~/.cache/eagle_jax/compiled` (or under $EAGLE_JAX_CACHE), unless
$JAX_COMPILATION_CACHE_DIR or `jax.config` names another folder; $JAX_ENABLE_COMPILATION_CACHE=false switches that off.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from eagle_jax.decoding.rules import SEEDED, make_rule
from eagle_jax.decoding.tree import TreeConfig
from eagle_jax.front.prompts import Prompt
from eagle_jax.front.runner import LOGPROBS_MODES, Runner
from eagle_jax.loading import Draft, Target
from eagle_jax.metrics import BatchMetrics
from eagle_jax.outputs import Delta, GenerationResult
from eagle_jax.sampling import SamplingParams
from eagle_jax.speculative_config import TreeArgument, tree_config


def generate(
    target: Target,
    prompts: Any,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | Sequence[int] | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    allowed_token_ids: Sequence[int] | None = None,
    min_tokens: int = 0,
    logprobs: int | None = None,
    logprobs_mode: str = LOGPROBS_MODES[0],
    shape_invariant: bool = False,
    draft: Draft | None = None,
    num_speculative_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool = False,
    include_stop_str_in_output: bool = False,
    skip_special_tokens: bool = True,
    chat: bool = False,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    prefill_chunk: int | None = None,
    progress: bool = False,
) -> GenerationResult:
    """Continues prompts by plain decoding, one token a forward.

    The output ends at the first of these: an end-of-sequence id of the model, one of `stop_token_ids`, the completion of a stop
    string ("stop"); `max_new_tokens`, or the end of the context ("length"). A prompt that fits may ask for more tokens than the
    context has left; its output ends with the context, as in vLLM. The ids include the token that ended the output. The
    text is without special tokens, without the stop string and without the text of a stop id.

    Args:
      target: what `load_target` returned.
      prompts: a prompt or a list of prompts. A prompt is a text, a list of chat messages (`{"role": ..., "content": ...}`), token
        ids (a list or an integer array), `{"prompt": text}` or `{"prompt_token_ids": ids}`. A list of ids or messages is one
        prompt. Without a tokenizer prompts must be ids, and there are no texts.
      max_new_tokens: most tokens of an output, the one that ends it included; 0 gives empty outputs.
      temperature: 0, or below 1e-5, is greedy; otherwise tokens are drawn, as `SamplingParams` describes.
      top_k: see `SamplingParams`, as for `top_p` and `min_p`.
      top_p: see there.
      min_p: see there.
      seed: the same seed gives the same output, with `generate` and `speculative_generate` alike. One for all prompts, or a list
        with one for each; None draws a fresh one for each. The result reports them.
      repetition_penalty: see `SamplingParams`, as for the next five.
      presence_penalty: see there.
      frequency_penalty: see there.
      logit_bias: see there.
      allowed_token_ids: see there.
      min_tokens: see there.
      logprobs: see there.
      logprobs_mode: "raw_logprobs" reports the model's own log-probabilities, "processed_logprobs" those of the distribution that
        is sampled.
      shape_invariant: run the rounds of `speculative_generate(..., shape_invariant=True)` with `draft` and
        `num_speculative_tokens`, but accept no draft: plain decoding whose outputs are, also in bfloat16, exactly the same.
      draft: only with `shape_invariant`.
      num_speculative_tokens: only with `shape_invariant`.
      stop: strings that end an output; the one completed first counts.
      stop_token_ids: ids that end an output, besides the model's end-of-sequence ids.
      ignore_eos: go on behind end-of-sequence ids; `stop_token_ids` still count.
      include_stop_str_in_output: show the stop string, or the text of the stop id, at the end of the text.
      skip_special_tokens: leave special tokens out of the text.
      chat: a text is the message of a user, to be put into the model's chat template, not a text to be continued.
      max_model_len: bound on prompt and output together; None takes what the model is made for.
      max_num_seqs: most prompts decoded side by side (None: 8, and at least one for each group of devices); further ones wait for
        a free slot.
      prefill_chunk: prompt tokens run at once; None takes 64 on CPU and 256 on accelerators.
      progress: draw a progress bar if standard error is a terminal.

    Raises:
      ValueError: an empty prompt, one that leaves no room for output, an id outside the vocabulary, text without a tokenizer, or
        an argument out of range.
      TypeError: something that is no prompt, or an argument of the wrong type.
      InsufficientMemoryError: the caches do not fit into the device's memory; the message names the largest max_model_len that
        does.
    """
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        allowed_token_ids=allowed_token_ids,
        min_tokens=min_tokens,
        logprobs=logprobs,
        max_tokens=_budget(max_new_tokens),
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        include_stop_str_in_output=include_stop_str_in_output,
        skip_special_tokens=skip_special_tokens,
    )
    if not shape_invariant and (draft is not None or num_speculative_tokens is not None):
        raise ValueError("draft and num_speculative_tokens are for speculative_generate, or for shape_invariant=True")
    if shape_invariant and (draft is None or num_speculative_tokens is None):
        raise ValueError(
            "shape_invariant=True needs draft and num_speculative_tokens, those of the outputs to compare with"
        )
    runner = Runner(
        target,
        draft,
        None if num_speculative_tokens is None else TreeConfig.chain(num_speculative_tokens),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        prefill_chunk=prefill_chunk,
        logprobs_mode=logprobs_mode,
        shape_invariant=shape_invariant,
    )
    return _collect(runner, prompts, params, seed, chat, progress, speculate=not shape_invariant)


def speculative_generate(
    target: Target,
    draft: Draft,
    prompts: Any,
    *,
    max_new_tokens: int,
    num_speculative_tokens: int | None = None,
    tree: TreeArgument | None = None,
    rejection_sample_method: str | None = None,
    draft_sample_method: str | None = None,
    synthetic_acceptance_rates: Sequence[float] | None = None,
    synthetic_acceptance_length: float | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | Sequence[int] | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    allowed_token_ids: Sequence[int] | None = None,
    min_tokens: int = 0,
    logprobs: int | None = None,
    logprobs_mode: str = LOGPROBS_MODES[0],
    shape_invariant: bool = False,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool = False,
    include_stop_str_in_output: bool = False,
    skip_special_tokens: bool = True,
    chat: bool = False,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    prefill_chunk: int | None = None,
    progress: bool = False,
) -> GenerationResult:
    """Continues prompts by speculative decoding: the outputs of `generate`, in fewer forwards of the target.

    Args:
      target: what `load_target` returned.
      draft: what `load_draft` returned for it.
      prompts: as in `generate`, like everything not named here.
      max_new_tokens: most tokens of an output.
      num_speculative_tokens: draft a chain of so many tokens a round. Without this and `tree`, the chain that the head's
        checkpoint asks for, else EAGLE's default tree (`eagle_jax.speculative_config.default_tree`).
      tree: draft a dynamic tree, `{"total_tokens": 60, "depth": 7, "top_k": 10}` or a `TreeConfig`, which explains the numbers;
        or a static tree, by its paths, its name, or as a `StaticTree`; or "auto": plain decoding, a chain or a tree, chosen
        before each round by what pays on this device and text (`eagle_jax.decoding.ladder`).
      rejection_sample_method: how drafts are accepted where tokens are drawn, "seeded" (the output of `generate`), "standard",
        "block", "recursive", "traversal" (each output as likely as from `generate`, but not the same one for a seed) or
        "synthetic" (for measuring speed); see `eagle_jax.decoding.rules.Rule`.
      draft_sample_method: "greedy" or "probabilistic"; see there.
      synthetic_acceptance_rates: see `eagle_jax.decoding.rules.make_rule`, as for the next.
      synthetic_acceptance_length: see there.
      shape_invariant: sum in an order that does not depend on what was accepted before, so that the outputs are those of
        `generate(..., shape_invariant=True)` bit for bit, also in bfloat16, on the same kind of device, with the same version of
        JAX and the same number of slots. Chains only, and somewhat slower.

    Raises:
      ValueError: as `generate`; methods that do not go together or not with the tree; both of `num_speculative_tokens` and
        `tree`; a draft made for another target.
      TypeError: as `generate`.
      InsufficientMemoryError: as `generate`.
    """
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        allowed_token_ids=allowed_token_ids,
        min_tokens=min_tokens,
        logprobs=logprobs,
        max_tokens=_budget(max_new_tokens),
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        include_stop_str_in_output=include_stop_str_in_output,
        skip_special_tokens=skip_special_tokens,
    )
    shape = tree_config(num_speculative_tokens, tree, where="speculative_generate")
    rule = make_rule(
        rejection_sample_method,
        draft_sample_method,
        synthetic_acceptance_rates=synthetic_acceptance_rates,
        synthetic_acceptance_length=synthetic_acceptance_length,
    )
    runner = Runner(
        target,
        draft,
        shape,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        prefill_chunk=prefill_chunk,
        rule=rule,
        logprobs_mode=logprobs_mode,
        shape_invariant=shape_invariant,
    )
    return _collect(runner, prompts, params, seed, chat, progress)


def stream_generate(
    target: Target,
    draft: Draft | None,
    prompts: Any,
    params: SamplingParams,
    *,
    num_speculative_tokens: int | None = None,
    tree: TreeArgument | None = None,
    rejection_sample_method: str | None = None,
    draft_sample_method: str | None = None,
    logprobs_mode: str = LOGPROBS_MODES[0],
    chat: bool = False,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    prefill_chunk: int | None = None,
    rounds_per_dispatch: int | None = None,
) -> Iterator[Delta]:
    """Continues prompts and yields what is new about ten times a second.

    For each prompt the texts of its deltas concatenate to exactly the text that `generate` returns, and their ids to its ids. No
    character is ever split. Closing the iterator ends the work.

    Args:
      target: what `load_target` returned.
      draft: what `load_draft` returned for it; None decodes plainly, without `num_speculative_tokens` and `tree`.
      prompts: as in `generate`; the deltas of several prompts come interleaved, each with the index of its prompt.
      params: how each prompt is continued.
      num_speculative_tokens: as in `speculative_generate`.
      tree: as in `speculative_generate`.
      rejection_sample_method: as in `speculative_generate`; "synthetic" is not for streams.
      draft_sample_method: as in `speculative_generate`.
      logprobs_mode: as in `generate`.
      chat: as in `generate`, like the rest.
      rounds_per_dispatch: rounds between two looks at the tokens; None: as many as take about a tenth of a second, after a few
        shorter ones (four with several processes). Looking more often makes finer deltas and costs speed, where rounds are short.

    Raises:
      ValueError, TypeError, InsufficientMemoryError: as `speculative_generate`; the first two at once, not at the first delta.
    """
    if draft is None:
        if num_speculative_tokens is not None or tree is not None:
            raise ValueError("num_speculative_tokens and tree need a draft")
        if rejection_sample_method is not None or draft_sample_method is not None:
            raise ValueError("rejection_sample_method and draft_sample_method need a draft")
        shape, rule = None, SEEDED
    else:
        shape = tree_config(num_speculative_tokens, tree, where="stream_generate")
        rule = make_rule(rejection_sample_method, draft_sample_method)
    runner = Runner(
        target,
        draft,
        shape,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        prefill_chunk=prefill_chunk,
        rule=rule,
        logprobs_mode=logprobs_mode,
    )
    read = runner.read(prompts, chat=chat)
    return runner.stream(read, [params] * len(read), rounds_per_dispatch=rounds_per_dispatch)


def _budget(max_new_tokens: int) -> int:
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int | np.integer):
        raise TypeError(f"max_new_tokens must be an integer, got {max_new_tokens!r}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    return int(max_new_tokens)


def _with_seeds(
    params: SamplingParams, seed: int | Sequence[int] | None, prompts: list[Prompt]
) -> list[SamplingParams]:
    """The parameters of each prompt."""
    if seed is None or not isinstance(seed, Sequence | np.ndarray):
        return [dataclasses.replace(params, seed=seed)] * len(prompts)
    if isinstance(seed, str):
        raise TypeError(f"seed must be an integer or a list of them, got {seed!r}")
    if len(seed) != len(prompts):
        raise ValueError(f"seed has {len(seed)} entries for {len(prompts)} prompts; give one for all, or one for each")
    return [dataclasses.replace(params, seed=one) for one in seed]


def _collect(
    runner: Runner,
    prompts: Any,
    params: SamplingParams,
    seed: int | Sequence[int] | None,
    chat: bool,
    progress: bool,
    speculate: bool = True,
) -> GenerationResult:
    read = runner.read(prompts, chat=chat)
    results, timing = runner.run(read, _with_seeds(params, seed, read), progress=progress, speculate=speculate)
    return GenerationResult(
        token_ids=[result.token_ids for result in results],
        texts=[result.text for result in results],
        finish_reasons=[result.finish_reason for result in results],
        stop_reasons=[result.stop_reason for result in results],
        prompt_token_ids=[result.prompt.token_ids for result in results],
        metrics=BatchMetrics([result.metrics for result in results], timing),
        seeds=[result.seed for result in results],
        logprobs=[result.logprobs for result in results],
    )

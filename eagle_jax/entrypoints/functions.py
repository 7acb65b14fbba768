"""`generate`, `speculative_generate` and `stream_generate`: decoding as plain functions of a loaded target and draft head.

How many programs are compiled: one that makes a state for each distinct combination of

- draft head, tree, prefill chunk and `shape_invariant`;
- slots: the number of prompts in a call rounded up to a power of two, at most `max_num_seqs`;
- capacity: the longest prompt plus budget in a call, rounded up to a power of two from 256 on, at most `max_model_len`;
- stop ids: room for 8, rounded up to a power of two where there are more;

and two (prefill a chunk, decode rounds) for each mode of the calls with that combination, the least that covers the requests of a
call: greedy; sampling (with `rejection_sample_method` and the like); sampling with penalties, biases, bans or log-probabilities
(with `logprobs_mode`).

Prompts, their lengths, budgets, temperatures, seeds and all other numbers about sampling, stop ids, stop strings and the weights
themselves are arguments of these programs. The caches of the last two such combinations are kept beside the target and used again
by the next call with one of them.

Compiled programs are also kept on disk for the next process, in `~/.cache/eagle_jax/compiled` (or under $EAGLE_JAX_CACHE), unless
$JAX_COMPILATION_CACHE_DIR or `jax.config` names another folder; $JAX_ENABLE_COMPILATION_CACHE=false switches that off.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Unpack

from eagle_jax.decoding.rules import SEEDED
from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.engine.config import EngineConfig
from eagle_jax.entrypoints.decoder import Decoder
from eagle_jax.entrypoints.keywords import (
    GenerateKeywords,
    SpeculativeKeywords,
    StreamKeywords,
    params_for,
    params_of_each,
    sort_keywords,
    speculation,
)
from eagle_jax.loading import Draft, Target
from eagle_jax.metrics import BatchMetrics
from eagle_jax.outputs import Delta, GenerationResult
from eagle_jax.sampling import SamplingParams
from eagle_jax.speculative_config import SpeculativeConfig

Params = SamplingParams | Sequence[SamplingParams] | None
Seeds = int | Sequence[int] | None


def generate(
    target: Target,
    prompts: Any,
    sampling_params: Params = None,
    *,
    seed: Seeds = None,
    draft: Draft | None = None,
    num_speculative_tokens: int | None = None,
    chat: bool = False,
    progress: bool = False,
    **keywords: Unpack[GenerateKeywords],
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
      sampling_params: how prompts are continued, for all or one for each; or its fields as keywords, with `max_new_tokens` for
        `max_tokens`, which must then be given. Temperature 0, the default, is greedy.
      seed: the same seed gives the same output, with `generate` and `speculative_generate` alike. One for all prompts, or a list
        with one for each; None draws a fresh one for each. The result reports them. Not beside `sampling_params`.
      draft: only with `shape_invariant`: plain decoding by the rounds of `speculative_generate(..., shape_invariant=True)` with
        this head and `num_speculative_tokens`, of which no draft is accepted: the same outputs, also in bfloat16.
      num_speculative_tokens: only with `shape_invariant`.
      chat: a text is the message of a user, to be put into the model's chat template, not a text to be continued.
      progress: draw a progress bar if standard error is a terminal.
      **keywords: fields of `SamplingParams` (see `SamplingKeywords`) and of `EngineConfig` (see `EngineKeywords`).

    Raises:
      ValueError: an empty prompt, one that leaves no room for output, an id outside the vocabulary, text without a tokenizer, or
        an argument out of range.
      TypeError: something that is no prompt, an unknown keyword, or an argument of the wrong type.
      InsufficientMemoryError: the caches do not fit into the device's memory; the message names the largest max_model_len that
        does.
    """
    sampling, _, engine = sort_keywords("generate", GenerateKeywords, keywords)
    if not engine.get("shape_invariant") and (draft is not None or num_speculative_tokens is not None):
        raise ValueError("draft and num_speculative_tokens are for speculative_generate, or for shape_invariant=True")
    if engine.get("shape_invariant") and (draft is None or num_speculative_tokens is None):
        raise ValueError(
            "shape_invariant=True needs draft and num_speculative_tokens, those of the outputs to compare with"
        )
    tree = None if num_speculative_tokens is None else TreeConfig.chain(num_speculative_tokens)
    decoder = Decoder(target, draft, EngineConfig.resolve(target, draft, tree=tree, **engine))
    return _collect(
        "generate", decoder, prompts, sampling_params, sampling, seed, chat, progress, speculate=draft is None
    )


def speculative_generate(
    target: Target,
    draft: Draft,
    prompts: Any,
    sampling_params: Params = None,
    *,
    speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
    seed: Seeds = None,
    chat: bool = False,
    progress: bool = False,
    **keywords: Unpack[SpeculativeKeywords],
) -> GenerationResult:
    """Continues prompts by speculative decoding: the outputs of `generate`, in fewer forwards of the target.

    Args:
      target: what `load_target` returned.
      draft: what `load_draft` returned for it.
      prompts: as in `generate`, like everything not named here.
      sampling_params: as in `generate`.
      speculative_config: `num_speculative_tokens` or `tree`, and the method of rejection, as in `SpeculativeConfig.from_dict`; or
        these as keywords (see `SpeculationKeywords`). Without a shape the chain that the head's checkpoint asks for, else EAGLE's
        default tree (`eagle_jax.speculative_config.default_tree`).
      seed: as in `generate`.
      chat: as in `generate`.
      progress: as in `generate`.
      **keywords: also keys of `speculative_config`. With `shape_invariant=True` sums have an order that does not depend on what
        was accepted before, so that the outputs are those of `generate(..., shape_invariant=True)` bit for bit, also in bfloat16,
        on the same kind of device, with the same version of JAX and the same number of slots. Chains only, and somewhat slower.

    Raises:
      ValueError: as `generate`; methods that do not go together or not with the tree; both of `num_speculative_tokens` and
        `tree`; a draft made for another target.
      TypeError: as `generate`.
      InsufficientMemoryError: as `generate`.
    """
    where = "speculative_generate"
    sampling, drafting, engine = sort_keywords(where, SpeculativeKeywords, keywords)
    decoder = _decoder(where, target, draft, speculative_config, drafting, engine)
    return _collect(where, decoder, prompts, sampling_params, sampling, seed, chat, progress)


def stream_generate(
    target: Target,
    draft: Draft | None,
    prompts: Any,
    params: Params,
    *,
    speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
    chat: bool = False,
    rounds_per_dispatch: int | None = None,
    **keywords: Unpack[StreamKeywords],
) -> Generator[Delta, None, None]:
    """Continues prompts and yields what is new about ten times a second, the first token as soon as a prompt is read.

    For each prompt the texts of its deltas concatenate to exactly the text that `generate` returns, and their ids to its ids. No
    character is ever split. Closing the iterator ends the work.

    Args:
      target: what `load_target` returned.
      draft: what `load_draft` returned for it; None decodes plainly, without anything about drafts.
      prompts: as in `generate`; the deltas of several prompts come interleaved, each with the index of its prompt.
      params: how prompts are continued, for all or one for each.
      speculative_config: as in `speculative_generate`.
      chat: as in `generate`.
      rounds_per_dispatch: rounds between two looks at the tokens; None: as many as take about a tenth of a second, after a few
        shorter ones (four with several processes). Looking more often makes finer deltas and costs speed, where rounds are short.
      **keywords: keys of `speculative_config` and fields of `EngineConfig`.

    Raises:
      ValueError, TypeError, InsufficientMemoryError: as `speculative_generate`; the first two at once, not at the first delta.
    """
    where = "stream_generate"
    _, drafting, engine = sort_keywords(where, StreamKeywords, keywords)
    decoder = _decoder(where, target, draft, speculative_config, drafting, engine)
    read = decoder.read(prompts, chat=chat)
    return decoder.stream(read, params_of_each(params, len(read)), rounds_per_dispatch=rounds_per_dispatch)


def _decoder(
    where: str,
    target: Target,
    draft: Draft | None,
    speculative_config: Mapping[str, Any] | SpeculativeConfig | None,
    drafting: dict[str, Any],
    engine: dict[str, Any],
) -> Decoder:
    tree, rule = None, SEEDED
    if draft is not None:
        tree, rule = speculation(where, draft, speculative_config, drafting)
    else:
        given = {"speculative_config": speculative_config, **drafting}
        if extra := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"{', '.join(extra)} cannot be given without a draft")
    return Decoder(target, draft, EngineConfig.resolve(target, draft, tree=tree, rule=rule, **engine))


def _collect(
    where: str,
    decoder: Decoder,
    prompts: Any,
    params: Params,
    sampling: dict[str, Any],
    seed: Seeds,
    chat: bool,
    progress: bool,
    speculate: bool = True,
) -> GenerationResult:
    read = decoder.read(prompts, chat=chat)
    each = params_for(where, params, sampling, seed, len(read))
    outputs, timing = decoder.run(read, each, progress=progress, speculate=speculate)
    completions = [output.outputs[0] for output in outputs]
    return GenerationResult(
        token_ids=[one.token_ids for one in completions],
        texts=[one.text for one in completions],
        finish_reasons=[one.finish_reason for one in completions],
        stop_reasons=[one.stop_reason for one in completions],
        prompt_token_ids=[output.prompt_token_ids for output in outputs],
        metrics=BatchMetrics([output.metrics for output in outputs], timing),
        seeds=[one.seed for one in completions],
        logprobs=[one.logprobs for one in completions],
    )

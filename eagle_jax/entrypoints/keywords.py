"""The keywords of the plain functions, typed in one place, and where each of them goes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import numpy as np

from eagle_jax.decoding.rules import Rule, make_rule
from eagle_jax.loading import Draft
from eagle_jax.sampling import SamplingParams
from eagle_jax.speculative_config import SpeculativeConfig, Tree, TreeArgument, tree_config


class SamplingKeywords(TypedDict, total=False):
    """Fields of `SamplingParams`, which explains them; instead of `sampling_params`, never beside it."""

    max_new_tokens: int
    """`SamplingParams.max_tokens`: most tokens of an output, the one that ends it included; 0 gives empty outputs."""
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    min_tokens: int
    logprobs: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    detokenize: bool


class SpeculationKeywords(TypedDict, total=False):
    """Keys of `speculative_config`, explained by `SpeculativeConfig.from_dict`; instead of it, never beside it."""

    num_speculative_tokens: int | None
    tree: TreeArgument | None
    rejection_sample_method: str | None
    draft_sample_method: str | None
    synthetic_acceptance_rates: Sequence[float] | None
    synthetic_acceptance_length: float | None


class EngineKeywords(TypedDict, total=False):
    """Fields of `EngineConfig`, which explains them; None takes its default."""

    max_model_len: int | None
    max_num_seqs: int | None
    prefill_chunk: int | None
    logprobs_mode: str
    shape_invariant: bool


class GenerateKeywords(SamplingKeywords, EngineKeywords, total=False):
    """Of `generate`."""


class SpeculativeKeywords(SamplingKeywords, SpeculationKeywords, EngineKeywords, total=False):
    """Of `speculative_generate`."""


class StreamKeywords(SpeculationKeywords, EngineKeywords, total=False):
    """Of `stream_generate`."""


def sort_keywords(where: str, accepted: type, keywords: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The keywords of a function by where they go: sampling, speculation, engine.

    Raises:
      TypeError: a keyword that is not among the `accepted` ones, as Python says it.
    """
    if unknown := [name for name in keywords if name not in accepted.__annotations__]:
        raise TypeError(f"{where}() got an unexpected keyword argument {unknown[0]!r}")
    parts = (SamplingKeywords, SpeculationKeywords, EngineKeywords)
    return tuple({name: keywords[name] for name in part.__annotations__ if name in keywords} for part in parts)


def params_for(
    where: str,
    given: SamplingParams | Sequence[SamplingParams] | None,
    keywords: dict[str, Any],
    seed: Any,
    prompts: int,
) -> list[SamplingParams]:
    """The parameters of each prompt, from `SamplingParams` or from their fields.

    Args:
      where: the function, for messages.
      given: for all prompts, or one for each; None takes the keywords.
      keywords: `SamplingKeywords`.
      seed: one for all prompts, or one for each.
      prompts: how many there are.

    Raises:
      TypeError, ValueError: both are given, or neither; a wrong value, or a wrong number of them.
    """
    if given is not None:
        if extra := [*keywords, *(["seed"] if seed is not None else [])]:
            raise ValueError(f"{', '.join(extra)} cannot be given beside sampling_params; set it there")
        return params_of_each(given, prompts)
    if "max_new_tokens" not in keywords:
        raise TypeError(f"{where}() missing max_new_tokens, or sampling_params instead")
    budget = keywords.pop("max_new_tokens")
    if isinstance(budget, bool) or not isinstance(budget, int | np.integer):
        raise TypeError(f"max_new_tokens must be an integer, got {budget!r}")
    if budget < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {budget}")
    params = SamplingParams(max_tokens=int(budget), **keywords)
    if seed is None or not isinstance(seed, Sequence | np.ndarray):
        return [dataclasses.replace(params, seed=seed)] * prompts
    if isinstance(seed, str):
        raise TypeError(f"seed must be an integer or a list of them, got {seed!r}")
    if len(seed) != prompts:
        raise ValueError(f"seed has {len(seed)} entries for {prompts} prompts; give one for all, or one for each")
    return [dataclasses.replace(params, seed=one) for one in seed]


def params_of_each(params: SamplingParams | Sequence[SamplingParams] | None, prompts: int) -> list[SamplingParams]:
    """One for each prompt.

    Raises:
      TypeError, ValueError: something else, or a wrong number of them.
    """
    if params is None:
        params = SamplingParams()
    each = [params] * prompts if isinstance(params, SamplingParams) else list(params)
    for item in each:
        if not isinstance(item, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, or one for each prompt, got {item!r}")
    if len(each) != prompts:
        raise ValueError(
            f"there are {len(each)} sampling_params for {prompts} prompts; give one for all, or one for each"
        )
    return each


def speculation(
    where: str, draft: Draft, given: Mapping[str, Any] | SpeculativeConfig | None, keywords: Mapping[str, Any]
) -> tuple[Tree | Literal["auto"] | None, Rule]:
    """Tree and rule for a loaded head, from `speculative_config` or from its keys.

    Raises:
      ValueError, TypeError: both are given; as `SpeculativeConfig.from_dict`, `tree_config` and `make_rule`.
    """
    keywords = {name: value for name, value in keywords.items() if value is not None}
    if given is None:
        tree = tree_config(keywords.pop("num_speculative_tokens", None), keywords.pop("tree", None), where=where)
        return tree, make_rule(**keywords)
    if keywords:
        raise ValueError(f"{', '.join(keywords)} cannot be given beside speculative_config; set it there")
    config = given if isinstance(given, SpeculativeConfig) else SpeculativeConfig.from_dict({"model": draft, **given})
    if config.model is not draft:
        raise ValueError(f"speculative_config names the head {config.model}, but the draft of {where} is {draft.name}")
    return config.tree, config.rule

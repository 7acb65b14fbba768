"""How long sequences can be, and the few sizes that programs are compiled for."""

from eagle_jax.models import LlamaConfig

SMALLEST_CAPACITY = 256
DEFAULT_MAX_NUM_SEQS = 8


def context_length(config: LlamaConfig) -> int:
    """Tokens that a model is made for, prompt and output.

    `max_position_embeddings`, times the factor where rotary scaling extends it without the config saying so (linear, dynamic;
    yarn from its original length), as vLLM derives it.
    """
    rope, positions = config.rope, config.max_position_embeddings
    if rope.rope_type in ("linear", "dynamic"):
        return int(positions * rope.factor)
    if rope.rope_type == "yarn":
        return max(positions, int(rope.original_max_position_embeddings * rope.factor))
    return positions


def resolve_max_model_len(max_model_len: int | None, config: LlamaConfig) -> int:
    """The bound on prompt and output: the caller's, or the model's.

    Raises:
      ValueError: no integer of at least 2, or more than the model is made for.
    """
    context = context_length(config)
    if max_model_len is None:
        return context
    if isinstance(max_model_len, bool) or not isinstance(max_model_len, int) or max_model_len < 2:
        raise ValueError(f"max_model_len must be an integer of at least 2, got {max_model_len!r}")
    if max_model_len > context:
        raise ValueError(
            f"max_model_len {max_model_len} exceeds the {context} tokens that the model's config.json allows"
        )
    return max_model_len


def capacity_bucket(tokens: int, max_model_len: int) -> int:
    """Length that an engine is made for: the next power of two from 256 on, at most `max_model_len`."""
    return min(_power_of_two(max(tokens, SMALLEST_CAPACITY)), max_model_len)


def resolve_max_num_seqs(max_num_seqs: int | None, groups: int) -> int:
    """The bound on sequences side by side: the caller's, or 8 and what is missing to a multiple of the groups of devices.

    Raises:
      ValueError: no integer of at least 1, or one that the groups cannot share.
    """
    if max_num_seqs is None:
        return -(-DEFAULT_MAX_NUM_SEQS // groups) * groups
    if isinstance(max_num_seqs, bool) or not isinstance(max_num_seqs, int) or max_num_seqs < 1:
        raise ValueError(f"max_num_seqs must be an integer of at least 1, got {max_num_seqs!r}")
    if max_num_seqs % groups:
        raise ValueError(f"max_num_seqs {max_num_seqs} is no multiple of data_parallel_size {groups}")
    return max_num_seqs


def slot_bucket(prompts: int, max_num_seqs: int, groups: int = 1) -> int:
    """Slots for so many prompts: the next power of two for each group of devices, at most `max_num_seqs` together."""
    return min(_power_of_two(-(-prompts // groups)) * groups, max_num_seqs)


def stop_id_bucket(stop_ids: int) -> int:
    """Room for stop ids: 8, or the next power of two."""
    return _power_of_two(max(stop_ids, 8))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()

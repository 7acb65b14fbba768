"""The configuration of an EAGLE-1 or EAGLE-2 head: the two generations share one architecture and one file format."""

from collections.abc import Mapping
from typing import Any

from eagle_jax.loading.draft_config import HeadReader, TargetShape
from eagle_jax.loading.draft_names import RenamedSource
from eagle_jax.loading.errors import CheckpointError
from eagle_jax.models.eagle_config import DraftConfig


def read_eagle1_config(
    config: Mapping[str, Any],
    source: RenamedSource,
    target: TargetShape,
    *,
    own_embedding: bool,
    rope_theta: float | None = None,
) -> tuple[DraftConfig, list[str]]:
    """Derives the configuration of an EAGLE-1/2 head, and remarks about what had to be decided.

    The tensors decide about biases, norms and the output head: published configs are silent or wrong about them (`bias` above
    all). Arguments and errors as `eagle_jax.loading.draft_config.read_draft_config`.
    """
    reader = HeadReader(config, source)
    reader.check_keys()
    notes: list[str] = []
    hidden, inputs = reader.shape("fc.weight", 2)
    if inputs != 2 * hidden:
        raise CheckpointError(
            f"fc.weight {(hidden, inputs)} must take an embedding and a feature of its own width: {2 * hidden}"
        )
    reader.check_target(target)
    reader.agree("hidden_size", hidden, "fc.weight")
    if hidden != target.hidden_size:
        raise CheckpointError(
            f"the head was made for a target of hidden size {hidden}; this target's hidden_size is {target.hidden_size}"
        )
    bias = "fc.bias" in reader.names
    if config.get("bias") not in (None, bias):
        notes.append(
            f"config.json says bias {config['bias']}, but the head {'has' if bias else 'lacks'} fc.bias, which decides"
        )
    own_lm_head = "lm_head.weight" in reader.names
    heads, kv_heads, head_dim = reader.attention()
    last = target.num_hidden_layers
    try:
        made = DraftConfig(
            method="eagle",
            hidden_size=hidden,
            target_hidden_size=target.hidden_size,
            intermediate_size=reader.intermediate_size(),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=target.vocab_size,
            draft_vocab_size=reader.shape("lm_head.weight", 2)[0] if own_lm_head else target.vocab_size,
            capture_layers=(0 if last is None else last,),
            num_hidden_layers=reader.layers(),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=reader.rope(rope_theta),
            qkv_bias=reader.qkv_bias(),
            own_embedding=own_embedding,
            own_lm_head=own_lm_head,
            fc_bias=bias,
            first_input_norm="layers.0.input_layernorm.weight" in reader.names,
            final_norm="norm.weight" in reader.names,
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return made, notes

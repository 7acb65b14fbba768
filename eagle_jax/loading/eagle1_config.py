"""The configuration of an EAGLE-1 or EAGLE-2 head: the two generations share one architecture and one file format."""

from collections.abc import Collection

from eagle_jax.loading.draft_capture import Capture, last_state
from eagle_jax.loading.draft_config import EMBEDDING, LM_HEAD
from eagle_jax.loading.draft_format import LAYER_IDS, HeadConfig
from eagle_jax.loading.draft_names import RenamedSource
from eagle_jax.loading.draft_reader import HeadReader, TargetShape
from eagle_jax.loading.errors import CheckpointError
from eagle_jax.models.eagle_config import DraftConfig

# Switches of EAGLE-3, which an EAGLE-1/2 head would have to ignore.
_FOREIGN = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def read_eagle1_config(
    config: HeadConfig,
    source: RenamedSource,
    target: TargetShape,
    *,
    shared: Collection[str] = (),
    rope_theta: float | None = None,
) -> tuple[DraftConfig, Capture, list[str]]:
    """Derives the configuration of an EAGLE-1/2 head.

    The tensors decide about biases, norms and the output head: published configs are silent or wrong about them (`bias` above
    all). Arguments, result and errors as `eagle_jax.loading.draft_config.read_draft_config`.
    """
    reader = HeadReader(config, source)
    reader.check_keys()
    notes: list[str] = []
    values, names = config.values, reader.names
    if asked := [key for key in _FOREIGN if reader.value(key)] or [k for k in (LAYER_IDS,) if reader.value(k)]:
        raise CheckpointError(
            f"config.json asks for {asked[0]}, which EAGLE-3 heads have; the tensors are an EAGLE-1/2 head's"
        )
    hidden = reader.hidden_size()
    if reader.shape("fc.weight", 2) != (hidden, 2 * hidden):
        raise CheckpointError(
            f"{source.stored_name('fc.weight')} has shape {source.shape('fc.weight')}; it takes an embedding and a feature of "
            f"the head's width, which makes it {(hidden, 2 * hidden)}"
        )
    reader.check_target(target)
    if hidden != target.hidden_size:
        raise CheckpointError(
            f"the head was made for a target of hidden size {hidden}; this target's hidden_size is {target.hidden_size}"
        )
    bias = "fc.bias" in names
    if values.get("bias") not in (None, bias):
        notes.append(
            f"config.json says bias {values['bias']}, but the head {'has' if bias else 'lacks'} fc.bias, which decides"
        )
    reader.check_tensor("fusion_bias", "fc.bias")
    for name in ("embed_norm.weight", "layers.0.input_layernorm.weight", "head_norm.weight"):
        reader.check_tensor("layernorms", name)
    for name in ("embed_norm.weight", "feature_norm.weight"):
        reader.check_tensor("add_para_norm", name)
    reader.check_tensor("use_input_layernorm_in_first_layer", "layers.0.input_layernorm.weight")
    reader.check_tensor("use_last_layernorm", "norm.weight")
    own_lm_head = LM_HEAD in names and LM_HEAD not in shared
    heads, kv_heads, head_dim = reader.attention()
    capture, layers = last_state(target.num_hidden_layers), reader.layers()
    made = DraftConfig(
        method="eagle",
        hidden_size=hidden,
        target_hidden_size=target.hidden_size,
        intermediate_size=reader.intermediate_size(),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=reader.draft_vocabulary(target, own_lm_head, notes),
        capture_layers=capture.layers,
        num_hidden_layers=layers,
        rms_norm_eps=reader.rms_norm_eps(),
        rope=reader.rope(rope_theta),
        qkv_bias=reader.qkv_bias(),
        out_bias=reader.any_tensor(r"self_attn\.o_proj\.bias$"),
        qk_norm=reader.qk_norm(),
        mlp_bias=reader.mlp_bias(),
        own_embedding=EMBEDDING in names and EMBEDDING not in shared,
        own_lm_head=own_lm_head,
        fc_bias=bias,
        embedding_norm="embed_norm.weight" in names,
        hidden_norm="feature_norm.weight" in names,
        first_input_norm="layers.0.input_layernorm.weight" in names,
        final_norm="norm.weight" in names,
        head_norm="head_norm.weight" in names,
        sliding_windows=reader.sliding_windows(layers),
    )
    return made, capture, notes

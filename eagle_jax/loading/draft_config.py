"""The configuration of an EAGLE-3 head: geometry from its tensors, checked against config.json; variants from both."""

from collections.abc import Collection

from eagle_jax.loading.draft_capture import Capture, Convention, default_layers
from eagle_jax.loading.draft_format import HeadConfig
from eagle_jax.loading.draft_names import RenamedSource
from eagle_jax.loading.draft_reader import HeadReader, TargetShape
from eagle_jax.loading.errors import CheckpointError
from eagle_jax.models.eagle_config import DraftConfig

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"

# Switches of EAGLE-1/2, which an EAGLE-3 head would have to ignore.
_FOREIGN = ("add_para_norm", "bias", "fusion_bias", "layernorms")


def draft_kind(source: RenamedSource) -> str:
    """What the tensors make of a checkpoint: "eagle3", "eagle" or "unknown".

    Only EAGLE-3 norms the feature inside of layer 0 and gives that layer's attention twice the head's width; only EAGLE-1/2 puts
    embedding and feature through `fc`.
    """
    names = source.names()
    if "layers.0.hidden_norm.weight" in names:
        return "eagle3"
    if "fc.weight" not in names or len(source.shape("fc.weight")) != 2:
        return "unknown"
    # One tensor may be missing or of a wrong shape: that shall be said of this tensor, not of the head.
    norm = "layers.0.post_attention_layernorm.weight"
    rows, columns = source.shape("fc.weight")
    hidden = source.shape(norm)[0] if norm in names else rows
    widths = [
        source.shape(name)[-1]
        for part in ("q", "k", "v", "qkv")
        if (name := f"layers.0.self_attn.{part}_proj.weight") in names
    ]
    if 2 * widths.count(2 * hidden) != len(widths):
        return "eagle3" if 2 * widths.count(2 * hidden) > len(widths) else "eagle"
    return "eagle" if columns == 2 * rows else "eagle3"


def guess_target(config: HeadConfig) -> TargetShape:
    """The target that a head's own config.json describes, for looking at a head without its target."""
    values = config.values
    hidden = values.get("target_hidden_size") or values.get("hidden_size")
    if hidden is None or values.get("vocab_size") is None:
        raise CheckpointError("the head's config.json lacks hidden_size or vocab_size")
    return TargetShape(hidden_size=int(hidden), vocab_size=int(values["vocab_size"]), num_hidden_layers=None)


def read_draft_config(
    config: HeadConfig,
    source: RenamedSource,
    target: TargetShape,
    *,
    shared: Collection[str] = (),
    rope_theta: float | None = None,
    layer_id_convention: Convention | None = None,
) -> tuple[DraftConfig, Capture, list[str]]:
    """Derives the configuration of an EAGLE-3 head.

    Shapes come from the tensors, because published configs are known to be wrong about them; what config.json says of hidden
    sizes and heads must agree. `num_hidden_layers` of EAGLE's format is not read at all: layers are counted.

    Args:
      config: the head's config.json.
      source: the head's tensors.
      target: the target it is loaded for.
      shared: tensors that are stored, but equal the target's, which are used instead.
      rope_theta: rotary base that overrides the config's.
      layer_id_convention: what the layer numbers in config.json mean, if it is known.

    Returns:
      The configuration, where its capture layers come from, and remarks about what had to be decided.

    Raises:
      CheckpointError: a head of another kind or target, a contradiction, or an unknown key.
    """
    reader = HeadReader(config, source)
    reader.check_keys()
    notes: list[str] = []
    if asked := [key for key in _FOREIGN if reader.value(key)]:
        raise CheckpointError(
            f"config.json asks for {asked[0]}, which EAGLE-1/2 heads have; the tensors are an EAGLE-3 head's"
        )
    use_fc = "fc.weight" in reader.names
    hidden = reader.hidden_size()
    reader.check_target(target)
    capture, states = reader.capture(target.num_hidden_layers, layer_id_convention)
    features = reader.shape("fc.weight", 2)[1] if use_fc else hidden
    if not use_fc and states > 1:
        raise CheckpointError(
            f"the head lacks {source.stored_name('fc.weight')} {(hidden, states * target.hidden_size)}, which joins the {states} "
            "hidden states that it reads (a head that reads the last one alone says use_aux_hidden_state false)"
        )
    if reader.value("use_aux_hidden_state") is False and features != target.hidden_size:
        raise CheckpointError(
            f"config.json says use_aux_hidden_state false, the last hidden state alone, of width {target.hidden_size}, but "
            f"{source.stored_name('fc.weight') if use_fc else 'the head'} takes {features} features"
        )
    if features != states * target.hidden_size:
        made_for = f" (a target of hidden size {features // states} would fit)" if features % states == 0 else ""
        takes, shapes = "a head without fc.weight takes", ""
        if use_fc:
            name, shape = source.stored_name("fc.weight"), source.shape("fc.weight")
            takes, shapes = (
                f"{name} takes",
                f"; it has shape {shape} and must have {(hidden, states * target.hidden_size)}",
            )
        raise CheckpointError(
            f"{takes} {features} features, but {states} hidden states of this target are "
            f"{states} x {target.hidden_size} = {states * target.hidden_size}{made_for}{shapes}"
        )
    if capture is None:
        capture = default_layers(states, target.num_hidden_layers)
    own_lm_head = LM_HEAD in reader.names and LM_HEAD not in shared
    draft_vocab = reader.draft_vocabulary(target, own_lm_head, notes)
    reader.check_tensor("use_last_layernorm", "norm.weight")
    reader.check_tensor("use_input_layernorm_in_first_layer", "layers.0.input_layernorm.weight")
    heads, kv_heads, head_dim = reader.attention()
    layers = reader.layers()
    made = DraftConfig(
        method="eagle3",
        hidden_size=hidden,
        target_hidden_size=target.hidden_size,
        intermediate_size=reader.intermediate_size(),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        capture_layers=capture.layers,
        num_hidden_layers=layers,
        rms_norm_eps=reader.rms_norm_eps(),
        rope=reader.rope(rope_theta),
        qkv_bias=reader.qkv_bias(),
        out_bias=reader.any_tensor(r"self_attn\.o_proj\.bias$"),
        qk_norm=reader.qk_norm(),
        mlp_bias=reader.mlp_bias(),
        own_embedding=EMBEDDING in reader.names and EMBEDDING not in shared,
        own_lm_head=own_lm_head,
        use_fc=use_fc,
        sliding_windows=reader.sliding_windows(layers),
        norm_before_residual=bool(reader.value("norm_before_residual")),
        norm_before_fc=reader.norm("norm_before_fc", "input_norm.weight"),
        fc_norm=reader.norm("fc_norm", "fc_norm.0.weight"),
        norm_output=bool(reader.value("norm_output")),
    )
    return made, capture, notes

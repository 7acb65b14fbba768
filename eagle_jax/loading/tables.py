"""Which file tensors make which parameters: the tables of the target and of draft heads, under canonical names."""

from collections.abc import Callable, Collection

from flax import nnx

from eagle_jax.loading.placement import Piece, Table, reordered
from eagle_jax.models import DraftConfig, LlamaConfig
from eagle_jax.parallel.partition import parameter_axes, stored_rows


def llama_table(config: LlamaConfig) -> Table:
    """The tensors of a target, under their Hugging Face names, which all families share."""
    hidden = config.hidden_size
    table: dict[str, tuple[Piece, ...]] = {
        "embed.weight": (Piece("model.embed_tokens.weight", (config.vocab_size, hidden)),),
        "norm.weight": (Piece("model.norm.weight", (hidden,)),),
    }
    if not config.tie_word_embeddings:
        table["lm_head.weight"] = (Piece("lm_head.weight", (config.vocab_size, hidden)),)
    for i in range(config.num_hidden_layers):
        table |= _layer(
            f"layers.{i}",
            f"model.layers.{i}",
            config,
            attention_width=hidden,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            mlp_bias=config.mlp_bias,
        )
        if config.qk_norm:
            for part in ("q_norm", "k_norm"):
                name = f"model.layers.{i}.self_attn.{part}.weight"
                table[f"layers.{i}.attention.{part}.weight"] = (Piece(name, (config.head_dim,)),)
    return table


def table_of_shards(
    table: Table, build: Callable[[], nnx.Module], config: LlamaConfig | DraftConfig, shards: int
) -> Table:
    """The table of a model that is split over `shards` devices: the same tensors, their rows in the order of the shards.

    Args:
      table: that of one device.
      build: makes the module, as `nnx.eval_shape` takes it.
      config: of the model.
      shards: devices.
    """
    if shards == 1:
        return table
    axes = parameter_axes(nnx.eval_shape(build))
    return {
        path: reordered(row, *stored_rows(axes[path][0], config, shards, sum(piece.rows for piece in row)))
        for path, row in table.items()
    }


def llama_unused(config: LlamaConfig) -> set[str]:
    """Tensors that old Llama checkpoints carry and nothing needs: rotary frequencies, which follow from the configuration."""
    layers = (f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_hidden_layers))
    return {"model.rotary_emb.inv_freq", *layers}


def eagle3_table(config: DraftConfig, names: Collection[str]) -> Table:
    """The tensors of an EAGLE-3 head under canonical names.

    Args:
      config: the head.
      names: canonical names in the checkpoint, which say whether its projections are fused.
    """
    hidden = config.hidden_size
    table = _ends(config) | {"norm.weight": (Piece("norm.weight", (hidden,)),)}
    if config.use_fc:
        table["fc.weight"] = (Piece("fc.weight", (hidden, config.feature_size)),)
    if config.norm_before_fc:
        table["feature_norm.weight"] = (Piece("input_norm.weight", (config.feature_size,)),)
    if config.fc_norm:
        for i in range(len(config.capture_layers)):
            table[f"fc_norms.{i}.weight"] = (Piece(f"fc_norm.{i}.weight", (config.target_hidden_size,)),)
    for i in range(config.num_hidden_layers):
        table |= _draft_layer(i, config, names, attention_width=hidden if i else 2 * hidden)
    table["layers.0.hidden_norm.weight"] = (Piece("layers.0.hidden_norm.weight", (hidden,)),)
    return table


def eagle1_table(config: DraftConfig, names: Collection[str]) -> Table:
    """The tensors of an EAGLE-1/2 head under canonical names; arguments as `eagle3_table`."""
    hidden = config.hidden_size
    table = _ends(config) | {"fc.weight": (Piece("fc.weight", (hidden, 2 * hidden)),)}
    if config.fc_bias:
        table["fc.bias"] = (Piece("fc.bias", (hidden,)),)
    norms = (
        (config.embedding_norm, "embedding_norm", "embed_norm"),
        (config.hidden_norm, "hidden_norm", "feature_norm"),
        (config.final_norm, "norm", "norm"),
        (config.head_norm, "norm", "head_norm"),
    )
    table |= {f"{path}.weight": (Piece(f"{name}.weight", (hidden,)),) for there, path, name in norms if there}
    for i in range(config.num_hidden_layers):
        table |= _draft_layer(i, config, names, attention_width=hidden)
    if not config.first_input_norm:
        del table["layers.0.input_norm.weight"]
    return table


def draft_unused(config: DraftConfig) -> set[str]:
    """Tensors of a head that need not be read: the map apart from the weights, and those that equal the target's."""
    layers = (f"layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_hidden_layers))
    shared = {"embed_tokens.weight": config.own_embedding, "lm_head.weight": config.own_lm_head}
    return {"t2d", "d2t", "rotary_emb.inv_freq", *layers, *(name for name, own in shared.items() if not own)}


def _ends(config: DraftConfig) -> dict[str, tuple[Piece, ...]]:
    """Embedding and output head, where the head has its own."""
    table: dict[str, tuple[Piece, ...]] = {}
    if config.own_embedding:
        table["embed.weight"] = (Piece("embed_tokens.weight", (config.vocab_size, config.hidden_size)),)
    if config.own_lm_head:
        table["lm_head.weight"] = (Piece("lm_head.weight", (config.draft_vocab_size, config.hidden_size)),)
    return table


def _draft_layer(index: int, config: DraftConfig, names: Collection[str], *, attention_width: int) -> Table:
    layer = f"layers.{index}"
    table = _layer(
        layer,
        layer,
        config,
        attention_width=attention_width,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        mlp_bias=config.mlp_bias,
        fused_qkv=f"{layer}.self_attn.qkv_proj.weight" in names,
        fused_gate_up=f"{layer}.mlp.gate_up_proj.weight" in names,
    )
    if config.qk_norm:
        for part in ("q_norm", "k_norm"):
            table[f"{layer}.attention.{part}.weight"] = (Piece(f"{layer}.self_attn.{part}.weight", (config.head_dim,)),)
    return table


def _layer(
    path: str,
    name: str,
    config: LlamaConfig | DraftConfig,
    *,
    attention_width: int,
    qkv_bias: bool,
    out_bias: bool = False,
    mlp_bias: bool = False,
    fused_qkv: bool = False,
    fused_gate_up: bool = False,
) -> dict[str, tuple[Piece, ...]]:
    """The parameters `path.*` of one decoder layer, made from tensors `name.*`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    qkv = {"qkv_proj": queries + 2 * keys} if fused_qkv else {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    gate_up = {"gate_up_proj": 2 * inner} if fused_gate_up else {"gate_proj": inner, "up_proj": inner}
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"

    def linear(block: str, outputs: dict[str, int], inputs: int) -> tuple[Piece, ...]:
        return tuple(Piece(f"{block}.{part}.weight", (rows, inputs)) for part, rows in outputs.items())

    def bias(block: str, outputs: dict[str, int]) -> tuple[Piece, ...]:
        return tuple(Piece(f"{block}.{part}.bias", (rows,)) for part, rows in outputs.items())

    table = {
        f"{path}.input_norm.weight": (Piece(f"{name}.input_layernorm.weight", (hidden,)),),
        f"{path}.attention.qkv.weight": linear(attention, qkv, attention_width),
        f"{path}.attention.out.weight": linear(attention, {"o_proj": hidden}, queries),
        f"{path}.post_norm.weight": (Piece(f"{name}.post_attention_layernorm.weight", (hidden,)),),
        f"{path}.mlp.gate_up.weight": linear(mlp, gate_up, hidden),
        f"{path}.mlp.down.weight": linear(mlp, {"down_proj": hidden}, inner),
    }
    if qkv_bias:
        table[f"{path}.attention.qkv.bias"] = bias(attention, qkv)
    if out_bias:
        table[f"{path}.attention.out.bias"] = bias(attention, {"o_proj": hidden})
    if mlp_bias:
        table[f"{path}.mlp.gate_up.bias"] = bias(mlp, gate_up)
        table[f"{path}.mlp.down.bias"] = bias(mlp, {"down_proj": hidden})
    return table

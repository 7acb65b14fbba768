"""The names under which published heads store the same tensors, and their canonical form."""

import re

import numpy as np

from eagle_jax.loading.errors import CheckpointError
from eagle_jax.loading.sources import Slices, TensorInfo, TensorSource

# What a name begins with or is, and its canonical form. https://github.com/SafeAILab/EAGLE writes `midlayer.` and `d2t`, the
# first form of https://github.com/vllm-project/speculators `fusion_fc.` and `transformer.`; the norms are of HASS and its ports.
_ALIASES = (
    (r"^(module\.|model\.)+", ""),
    (r"^(midlayer|transformer)\.", "layers.0."),
    (r"^(fusion_fc|eagle_linear)\.", "fc."),
    (r"^(embedding_layernorm|embed_layernorm|enorm)\.", "embed_norm."),
    (r"^(hidden_states_layernorm|hnorm)\.", "feature_norm."),
    (r"^hidden_layernorm\.", "layers.0.input_layernorm."),
    (r"^(pre_lm_head_layernorm|lm_head_layernorm)\.", "head_norm."),
    (r"^draft_id_to_target_id$", "d2t"),
)


# What these tensors are called in SafeAILab's layout and in the first form of speculators.
_FIRST_FORM = {
    "fc": ("fc", "fusion_fc"),
    "embed_norm": ("embed_layernorm", "embedding_layernorm"),
    "feature_norm": ("hidden_states_layernorm", "hidden_states_layernorm"),
    "head_norm": ("lm_head_layernorm", "pre_lm_head_layernorm"),
}


def canonical_name(name: str) -> str:
    """Canonical name of a head's tensor: SafeAILab's, without a prefix, and with `layers.0.` for its `midlayer.`."""
    for pattern, canonical in _ALIASES:
        name = re.sub(pattern, canonical, name)
    return name


class RenamedSource(TensorSource):
    """The tensors of a draft head under canonical names.

    Raises:
      CheckpointError: two tensors have the same canonical name, or a projection is stored both fused and in parts.
    """

    def __init__(self, source: TensorSource):
        self._source = source
        tensors: dict[str, TensorInfo] = {}
        for stored, info in source.tensors.items():
            name = canonical_name(stored)
            if name in tensors:
                raise CheckpointError(f"the head stores {name} twice, as {tensors[name].stored_name} and as {stored}")
            tensors[name] = info
        super().__init__(source.container, source.files, source.metadata, tensors)
        self._names = {name: info.stored_name for name, info in tensors.items()}
        for name in self._names:
            for fused, parts in (
                ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
                ("gate_up_proj", ("gate_proj", "up_proj")),
            ):
                both = [name.replace(fused, part) for part in parts if f".{fused}." in name]
                if clash := next((self._names[n] for n in both if n in self._names), None):
                    raise CheckpointError(f"the head stores a projection twice, as {self._names[name]} and as {clash}")

    def stored_name(self, name: str) -> str:
        """The name in the file; a tensor that is missing is named as its neighbours are."""
        if name in self._names:
            return self._names[name]
        if (stem := name.partition(".")[0]) in _FIRST_FORM:
            first = any(stored.startswith(("transformer.", "fusion_fc.")) for stored in self._names.values())
            name = name.replace(stem, _FIRST_FORM[stem][first], 1)
            return name
        for stem in ("layers.0.", ""):
            end = name.removeprefix(stem)
            for neighbour, stored in self._names.items():
                if name.startswith(stem) and neighbour.startswith(stem) and neighbour not in ("d2t", "t2d"):
                    prefix = stored.removesuffix(neighbour.removeprefix(stem))
                    if not prefix or prefix.endswith("."):
                        return prefix + end
        return name

    def read(self, name: str, slices: Slices = ()) -> np.ndarray:
        """Reads a slice of a tensor."""
        return self._source.read(self._names[name], slices)

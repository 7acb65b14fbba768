"""Target models and draft heads as `flax.nnx` modules."""

from eagle_jax.models.cache import KVCache as KVCache
from eagle_jax.models.cache import KVRows as KVRows
from eagle_jax.models.config import LlamaConfig as LlamaConfig
from eagle_jax.models.context import CacheContext as CacheContext
from eagle_jax.models.eagle import EagleHead as EagleHead
from eagle_jax.models.eagle3 import Eagle3Head as Eagle3Head
from eagle_jax.models.eagle_config import DraftConfig as DraftConfig
from eagle_jax.models.heads import DraftHead as DraftHead
from eagle_jax.models.heads import make_head as make_head
from eagle_jax.models.llama import Llama as Llama
from eagle_jax.models.rope import RopeConfig as RopeConfig

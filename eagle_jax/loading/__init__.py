"""From files to sharded arrays: targets and draft heads out of safetensors, torch and GGUF checkpoints."""

from eagle_jax.loading.convert import Conversion as Conversion
from eagle_jax.loading.convert import convert_head as convert_head
from eagle_jax.loading.demo_target import default_target as default_target
from eagle_jax.loading.draft import Draft as Draft
from eagle_jax.loading.draft import load_draft as load_draft
from eagle_jax.loading.errors import CheckpointError as CheckpointError
from eagle_jax.loading.hub import resolve as resolve
from eagle_jax.loading.inspection import CheckpointReport as CheckpointReport
from eagle_jax.loading.inspection import inspect_checkpoint as inspect_checkpoint
from eagle_jax.loading.memory import cache_bytes_per_row as cache_bytes_per_row
from eagle_jax.loading.memory import parameter_count as parameter_count
from eagle_jax.loading.memory import weight_bytes as weight_bytes
from eagle_jax.loading.target import Target as Target
from eagle_jax.loading.target import load_target as load_target

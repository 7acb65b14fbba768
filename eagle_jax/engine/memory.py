"""Whether a decoding configuration fits into a device's memory, asked before anything is compiled."""

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp

from eagle_jax.decoding.adaptive import AdaptiveSpeculation
from eagle_jax.decoding.report import report_tokens
from eagle_jax.decoding.state import cache_capacity
from eagle_jax.drafters.tree import StaticTree, TreeConfig
from eagle_jax.loading import cache_bytes_per_row
from eagle_jax.models import DraftConfig, LlamaConfig
from eagle_jax.parallel.vocabulary import Vocabulary
from eagle_jax.sampling.params import MAX_LOGPROBS, SamplingMode
from pallas_kernels.tree_attention.blocked import BLOCK


class InsufficientMemoryError(MemoryError):
    """Caches and temporaries do not fit beside the weights; the message names the largest max_model_len that does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """What decoding needs on each device besides the weights, computed from configurations alone."""

    target: LlamaConfig
    draft: DraftConfig | None
    tree: TreeConfig | StaticTree | AdaptiveSpeculation | None
    """None exactly when there is no draft."""
    target_dtype: jnp.dtype
    draft_dtype: jnp.dtype | None
    slots: int
    prefill_chunk: int
    mode: SamplingMode = SamplingMode.GREEDY
    """What requests can ask for: sampling works on copies of the logits."""
    sampled_drafts: bool = False
    """Whether the distributions that drafts are drawn from are kept."""
    shards: int = 1
    """Devices that share the target."""
    draft_shards: int = 1
    """Devices that share the head."""
    groups: int = 1
    """Groups of devices that share the slots."""
    attention_block: int = BLOCK
    """Keys that attention scores at once; kernels keep their scores on the chip and need less."""

    @property
    def group_slots(self) -> int:
        """Slots of one group."""
        return -(-self.slots // self.groups)

    def cache_bytes(self, max_length: int) -> int:
        """Bytes of the caches of target and head and of all else that slots keep, for sequences of up to `max_length` tokens."""
        path = 1 if self.tree is None else self.tree.max_depth + 1
        if isinstance(self.tree, AdaptiveSpeculation):
            path = self.tree.due_rows
        idle = self.groups > 1
        rows = self.group_slots * cache_capacity(max_length, self.prefill_chunk, path, idle_prefills=idle)
        tokens = 4  # int32
        head = 0
        if self.draft is not None and self.draft_dtype is not None:
            head = cache_bytes_per_row(self.draft, self.draft_dtype, self.draft_shards)
        # Of each slot: a bias, a count and a flag for each token of the vocabulary; what the next report says of new tokens.
        sampling = 9 * Vocabulary(self.target.vocab_size, self.shards).width
        report = report_tokens(path - 1) * (4 + 8 * (1 + MAX_LOGPROBS))
        row = cache_bytes_per_row(self.target, self.target_dtype, self.shards) + head + tokens
        return rows * row + self.group_slots * (sampling + report)

    def temporary_bytes(self, max_length: int) -> int:
        """Estimate of the largest program's temporaries, in bytes: activations, attention scores and logits of one forward."""
        nodes = 1 if self.tree is None else self.tree.total_tokens
        prefill = self._forward(1, self.prefill_chunk, max_length, logit_rows=1)
        rounds = self._forward(self.group_slots, nodes, max_length, logit_rows=nodes)
        # A prefill cuts its slot out of the caches of several; everything else updates them in place.
        slot = self.cache_bytes(max_length) // self.group_slots if self.group_slots > 1 else 0
        return max(prefill + slot, rounds)

    def total(self, max_length: int) -> int:
        """Both."""
        return self.cache_bytes(max_length) + self.temporary_bytes(max_length)

    def largest_max_length(self, available: int, at_most: int) -> int:
        """The longest sequences for which `total` stays within `available` bytes, up to `at_most` tokens; 0 if none do."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.total(middle) <= available else (low, middle - 1)
        return low

    def _forward(self, slots: int, tokens: int, max_length: int, logit_rows: int) -> int:
        config, item = self.target, self.target_dtype.itemsize
        rows = slots * tokens
        inner = config.intermediate_size // self.shards
        activations = rows * (4 * config.hidden_size + 3 * inner) * max(item, 4)
        new_rows = rows * cache_bytes_per_row(config, self.target_dtype, self.shards)
        drafting = 0
        if self.draft is not None and self.tree is not None:
            draft_vocabulary = Vocabulary(self.draft.draft_vocab_size, self.draft_shards).width
            drafting = rows * self.draft.feature_size * item + slots * self.tree.top_k * draft_vocabulary * 4
        # Attention reads the cache in blocks, so scores do not grow with its length.
        scores = (
            2
            * rows
            * (config.num_attention_heads // self.shards)
            * (min(max_length, self.attention_block) + tokens)
            * 4
        )
        copies = {SamplingMode.GREEDY: 1, SamplingMode.SAMPLING: 4, SamplingMode.FULL: 7}[
            self.mode
        ] + 4 * self.sampled_drafts
        logits = copies * slots * logit_rows * Vocabulary(config.vocab_size, self.shards).width * 4
        return activations + new_rows + drafting + scores + logits


def available_bytes(device: jax.Device, sharing: int = 1) -> int | None:
    """Memory that is free on a device: of the host for CPU devices, else of the accelerator; None if it cannot be known.

    `sharing`: devices of this process that are in use; as CPU devices they share the memory of the host.
    """
    if device.platform == "cpu":
        host = _available_host_bytes()
        return None if host is None else host // sharing
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def check_memory(
    footprint: Footprint, max_length: int, weight_bytes: int, device: jax.Device, sharing: int = 1
) -> None:
    """Compares caches and temporaries with what the weights, which are loaded, left free.

    Args:
      footprint: the configuration.
      max_length: tokens of the longest sequence.
      weight_bytes: bytes of the weights on the device, for the message.
      device: the device they are on.
      sharing: see `available_bytes`.

    Raises:
      InsufficientMemoryError: it does not fit.
    """
    available = available_bytes(device, sharing)
    if available is None or footprint.total(max_length) <= available:
        return
    largest = footprint.largest_max_length(available, max_length)
    advice = f"the largest max_model_len that fits with {footprint.slots} slots is {largest}"
    if largest < 2:
        advice = f"no max_model_len fits with {footprint.slots} slots"
    raise InsufficientMemoryError(
        f"{footprint.slots} sequences of {max_length} tokens need {_size(footprint.cache_bytes(max_length))} of cache and about "
        f"{_size(footprint.temporary_bytes(max_length))} of temporaries beside {_size(weight_bytes)} of weights, but only "
        f"{_size(available)} are free on {device}: {advice}; a smaller max_num_seqs or a smaller tree needs less"
    )


def _available_host_bytes() -> int | None:
    """What the kernel says could be allocated, within the limit of the container where there is one."""
    found = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    found += _available_in_container(Path("/sys/fs/cgroup"))
    return min(found, default=None)


def _available_in_container(group: Path) -> list[int]:
    """What a control group (version 2) with a limit leaves; nothing where there is no such limit."""
    if not (group / "memory.max").is_file() or (limit := (group / "memory.max").read_text().strip()) == "max":
        return []
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    reclaimable = int(stat["active_file"]) + int(
        stat["inactive_file"]
    )  # files just read count as used until they are dropped
    return [int(limit) - int((group / "memory.current").read_text()) + reclaimable]


def _size(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"

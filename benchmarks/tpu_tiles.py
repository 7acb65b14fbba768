"""Computes the tile limits of the TPU kernel of tree attention from what is published of each TPU generation:

    python benchmarks/tpu_tiles.py > pallas_kernels/tree_attention/mosaic_tpu_tiles.json

Arithmetic, not measurement: the project had no TPU to time. Whoever has one should put measured limits in their place.
"""

import json
import math

# By device kind: TensorCores of one JAX device, and of each VMEM, bandwidth of its HBM and bfloat16 operations a second
# (https://cloud.google.com/tpu/docs/system-architecture-tpu-vm, half of a chip's where it has two).
GENERATIONS = {
    "TPU v5 lite": (1, 128 * 2**20, 819e9, 197e12),
    "TPU v5": (2, 64 * 2**20, 1382e9, 230e12),
    "TPU v6 lite": (1, 128 * 2**20, 1640e9, 918e12),
    "TPU7x": (1, 64 * 2**20, 3690e9, 1153e12),
}

STEP_SECONDS = 0.4e-6
"""What a step of a Pallas grid costs beside its work (about 0.35 microseconds, says the Pallas guide)."""
SCOPED_VMEM = 16 * 2**20
"""What libtpu gives a kernel without being asked; the rest of VMEM stays with XLA, which keeps small arrays there."""


def limits(cores: int, vmem: int, bandwidth: float, operations: float) -> dict[str, int]:
    # Reading a block should take three times as long as the step's own cost.
    block = 2 ** round(math.log2(3 * STEP_SECONDS * bandwidth))
    # A row does 4 * Dh operations for every key, which has 4 * Dh bytes: so many rows keep the units as busy as the memory.
    rows = min(2 ** math.ceil(math.log2(operations / bandwidth)), 512)
    return {"block_bytes": block, "rows": rows, "vmem_bytes": min(SCOPED_VMEM, vmem // 4), "cores": cores}


def main() -> None:
    tiles = {kind: limits(*facts) for kind, facts in GENERATIONS.items()}
    print(json.dumps({"command": "python benchmarks/tpu_tiles.py", "measured": False, "tiles": tiles}, indent=2))


if __name__ == "__main__":
    main()

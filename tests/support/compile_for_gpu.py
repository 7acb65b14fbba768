"""Compiles whole rounds for an NVIDIA H200 that is not there: `python -m support.compile_for_gpu FOLDER 4 plain chain tree`.

The arguments: an empty folder, layers, trees. Needs the CUDA plugin of JAX and `ptxas`, and no driver. Prints a line of JSON for
each tree with what the host is told to do ("thunks"). Products are not tuned, which takes a device.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_dump_to={sys.argv[1]} --xla_dump_hlo_module_re=.*decode.*"

from jax._src import xla_bridge
from jax.experimental import topologies

from eagle_jax.decoding.compiler import CUDA_COMPILER_OPTIONS
from pallas_kernels import primitive
from pallas_kernels.backends import Device
from support.compile_for_tpu import TREES, lower_round

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "12.9.0"
  runtime_version: "12.9.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


def thunks(folder: str) -> list[tuple[int, str]]:
    """Depth and kind of everything in the only program that was dumped."""
    (file,) = Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
    found = re.findall(r"^( *)\d+: (k\w+)", file.read_text(), re.MULTILINE)
    return [(len(indent), kind) for indent, kind in found]


def main() -> None:
    folder, layers, *trees = sys.argv[1:]
    xla_bridge.discover_pjrt_plugins()
    device = topologies.get_topology_desc("1x1x1", "cuda", target_config=H200, topology="1x1x1").devices[0]
    # The client of a topology does not say what its devices can do.
    primitive.Device = lambda platform: Device(platform, "NVIDIA H200", "9.0")
    for name in trees:
        tree = None if name == "plain" else TREES[name]
        lowered = lower_round(device, "1B", int(layers), tree, 2, 2000)[0]
        start = time.perf_counter()
        lowered.compile(CUDA_COMPILER_OPTIONS)
        ran = thunks(folder)
        for file in Path(folder).iterdir():
            file.unlink()
        line = {
            "tree": name,
            "seconds": time.perf_counter() - start,
            "outermost": [kind for depth, kind in ran if depth == 0],
            "loops": sum(kind == "kWhile" for _, kind in ran),
            "launches": sum(kind in ("kCustomKernel", "kCustomCall", "kCopy") for _, kind in ran),
            "kernels": lowered.as_text().count("mosaic_gpu_v2"),
            "fallbacks": len(re.findall(r"@xla_(blocked_tree_attention|write_rows)", lowered.as_text())),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

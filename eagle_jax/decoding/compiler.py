"""Options with which programs that decode are compiled, by device."""

import os

import jax

from eagle_jax.models.matmul import CPU_COMPILER_OPTIONS

COMMAND_BUFFERS = "xla_gpu_enable_command_buffer"

CUDA_COMPILER_OPTIONS: dict[str, str | bool] = {
    COMMAND_BUFFERS: "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
}
"""Options for programs compiled for NVIDIA GPUs: what becomes part of a CUDA graph. It is XLA's own list and loops, so that all
rounds of a dispatch are one graph. Otherwise every round ends with a copy to the host, which decides whether there is another,
and the call of a program does not return before its last round."""


def compiler_options(device: jax.Device) -> dict[str, str | bool] | None:
    """Options for programs that are compiled for a device; None where XLA's own are best.

    Whoever sets `--xla_gpu_enable_command_buffer` in `XLA_FLAGS` has decided for themselves.
    """
    if device.platform == "cpu":
        return CPU_COMPILER_OPTIONS
    if device.platform in ("gpu", "cuda") and "rocm" not in device.client.platform_version.lower():
        return None if COMMAND_BUFFERS in os.environ.get("XLA_FLAGS", "") else CUDA_COMPILER_OPTIONS
    return None

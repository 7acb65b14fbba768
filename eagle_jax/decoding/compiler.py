"""Compiling programs that decode, with the options that suit the device."""

import logging
import os

import jax

from eagle_jax.models.matmul import CPU_COMPILER_OPTIONS
from pallas_kernels.backends import Device

COMMAND_BUFFERS = "xla_gpu_enable_command_buffer"

CUDA_COMPILER_OPTIONS: dict[str, str | bool] = {
    COMMAND_BUFFERS: "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
}
"""Options for programs compiled for NVIDIA GPUs: what becomes part of a CUDA graph. It is the list of XLA in jax 0.10 and 0.11,
and loops (an option cannot add to the list). Where a program has no collectives, all rounds of a dispatch are then one graph.
Otherwise every round ends with a copy to the host, which decides whether there is another, and the call of a program does not
return before its last round."""

_log = logging.getLogger(__name__)


def compile_for_device(lowered: jax.stages.Lowered, device: jax.Device) -> jax.stages.Compiled:
    """Compiles a program with `compiler_options`; without them, and with a warning, if this XLA does not know what they name."""
    options = compiler_options(device)
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if options is not CUDA_COMPILER_OPTIONS or COMMAND_BUFFERS not in str(error):
            raise
        _log.warning("rounds are launched one by one, because this XLA refuses an option: %s", error)
        return lowered.compile()


def compiler_options(device: jax.Device) -> dict[str, str | bool] | None:
    """Options for programs that are compiled for a device; None where XLA's own are best.

    Whoever sets `--xla_gpu_enable_command_buffer` in `XLA_FLAGS` has decided for themselves.
    """
    platform = Device.of(device).platform
    if platform == "cpu":
        return CPU_COMPILER_OPTIONS
    if platform == "cuda" and COMMAND_BUFFERS not in os.environ.get("XLA_FLAGS", ""):
        return CUDA_COMPILER_OPTIONS
    return None

"""Several processes, each with some of the devices, as one: `jax.distributed` behind one call or three variables."""

import os

import jax
import numpy as np
from jax.experimental import multihost_utils

ADDRESS, PROCESSES, PROCESS = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""Environment variables: host and port of process 0, how many processes there are, and which of them this is."""


def join_processes(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Makes this process one of several that run the same script, each on its own devices.

    To be called before anything else touches a device; `LLM` and `make_mesh` call it themselves when the environment names the
    processes. Without arguments and without `JAX_COORDINATOR_ADDRESS` nothing happens. On TPU pods, and under Slurm or Open MPI,
    call `jax.distributed.initialize()` instead, which finds out by itself. A second call changes nothing.

    Args:
      coordinator_address: "host:port" that process 0 listens on; None takes `$JAX_COORDINATOR_ADDRESS`.
      num_processes: processes; None takes `$JAX_NUM_PROCESSES`.
      process_id: which of them this is, from 0 on; None takes `$JAX_PROCESS_ID`.

    Raises:
      ValueError: one of the three is missing, or no number.
      RuntimeError: a device was used before.
    """
    address = coordinator_address or os.environ.get(ADDRESS)
    count = _number(num_processes, PROCESSES)
    number = _number(process_id, PROCESS)
    if jax.distributed.is_initialized():
        return
    if coordinator_address is None and num_processes is None and process_id is None and (count is None or not address):
        return
    given = {"coordinator_address": address, "num_processes": count, "process_id": number}
    if missing := [name for name, value in given.items() if value is None]:
        raise ValueError(
            f"{', '.join(missing)} must be given too, as arguments or as {ADDRESS}, {PROCESSES} and {PROCESS} in the environment"
        )
    if count == 1:
        return
    jax.distributed.initialize(address, count, number, cluster_detection_method="deactivate")


def int_of_first_process(value: int) -> int:
    """What process 0 says, a number of at most 62 bits, on all processes; all of them must call this."""
    words = np.array([value >> 31, value & 0x7FFFFFFF], np.int32)
    high, low = multihost_utils.broadcast_one_to_all(words).tolist()
    return (high << 31) | low


def _number(value: int | None, variable: str) -> int | None:
    text = os.environ.get(variable)
    if value is not None or not text:
        return value
    if not text.isdecimal():
        raise ValueError(f"{variable} must be a number, got {text!r}")
    return int(text)

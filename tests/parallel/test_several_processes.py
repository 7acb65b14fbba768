"""Two processes on this machine, with collectives of the CPU between them, say what one says."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from eagle_jax.parallel import join_processes
from eagle_jax.parallel.hosts import ADDRESS, PROCESS, PROCESSES

TESTS = Path(__file__).parents[1]


def run(sizes: tuple[int, int, int], processes: int, devices_each: int) -> list[dict[str, Any]]:
    """What each process prints."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    flags.append(f"--xla_force_host_platform_device_count={devices_each}")
    base = os.environ | {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    running = []
    for number in range(processes):
        environment = base
        if processes > 1:
            environment = base | {ADDRESS: f"localhost:{port}", PROCESSES: str(processes), PROCESS: str(number)}
        command = [sys.executable, "-m", "support.one_of_several", *map(str, sizes)]
        running.append(
            subprocess.Popen(
                command, cwd=TESTS, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    results = []
    try:
        for process in running:
            out, err = process.communicate(timeout=900)
            assert process.returncode == 0, err[-3000:]
            (line,) = [line for line in out.splitlines() if line.startswith("RESULT ")]
            results.append(json.loads(line.removeprefix("RESULT ")))
    finally:
        for process in running:
            process.kill()
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "devices_each"), [((2, 1, 1), 1), ((2, 2, 2), 2), ((1, 1, 2), 1)], ids=["tp", "tp and data", "data"]
)
def test_two_processes_say_what_one_says(sizes: tuple[int, int, int], devices_each: int) -> None:
    (alone,) = run((1, 1, 1), 1, 1)
    first, second = run(sizes, 2, devices_each)
    assert first == second, "results are on every process, seeds drawn by the first"
    assert first["processes"] == 2
    assert first["devices"] == [devices_each, 2 * devices_each]
    for name in ("tokens", "accepted", "streamed"):
        assert first[name] == alone[name], name


def test_nothing_happens_without_a_name_for_the_first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS, raising=False)
    monkeypatch.setenv(PROCESSES, "2")
    join_processes()
    assert jax.process_count() == 1
    monkeypatch.setenv(ADDRESS, "localhost:1")
    with pytest.raises(ValueError, match="process_id must be given too"):
        join_processes()
    monkeypatch.setenv(PROCESS, "one")
    with pytest.raises(ValueError, match="JAX_PROCESS_ID must be a number, got 'one'"):
        join_processes()

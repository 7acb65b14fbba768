"""Options of compilation are chosen by device."""

import dataclasses
from typing import Any

import jax
import pytest

from eagle_jax.decoding.compiler import CUDA_COMPILER_OPTIONS, compiler_options
from eagle_jax.models.matmul import CPU_COMPILER_OPTIONS


@dataclasses.dataclass(frozen=True)
class Client:
    platform_version: str


@dataclasses.dataclass(frozen=True)
class Device:
    platform: str
    client: Client


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        (Device("gpu", Client("PJRT C API\ncuda 12090")), CUDA_COMPILER_OPTIONS),
        (Device("cuda", Client("cuda 12090")), CUDA_COMPILER_OPTIONS),
        (Device("gpu", Client("PJRT C API\nrocm 70000")), None),
        (Device("tpu", Client("PJRT C API\nTFRT TPU v5")), None),
    ],
)
def test_by_platform(monkeypatch: pytest.MonkeyPatch, device: Any, wanted: Any) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert compiler_options(device) == wanted
    assert compiler_options(jax.devices("cpu")[0]) == CPU_COMPILER_OPTIONS


def test_loops_are_part_of_graphs_unless_the_user_says_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = Device("gpu", Client("cuda 12090"))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    (kinds,) = compiler_options(device).values()
    assert {"WHILE", "FUSION", "CUSTOM_CALL"} <= set(kinds.split(","))
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert compiler_options(device) is None

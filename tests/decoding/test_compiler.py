"""Options of compilation are chosen by device."""

import dataclasses
import logging
from typing import Any

import jax
import pytest

from eagle_jax.decoding.compiler import CUDA_COMPILER_OPTIONS, compile_for_device, compiler_options
from eagle_jax.models.matmul import CPU_COMPILER_OPTIONS


@dataclasses.dataclass(frozen=True)
class Client:
    platform: str
    platform_version: str


@dataclasses.dataclass(frozen=True)
class Device:
    client: Client
    device_kind: str = "some device"


HOPPER: Any = Device(Client("gpu", "PJRT C API\ncuda 12090"))


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        (HOPPER, CUDA_COMPILER_OPTIONS),
        (Device(Client("cuda", "cuda 12090")), CUDA_COMPILER_OPTIONS),
        (Device(Client("gpu", "PJRT C API\nrocm 70000")), None),
        (Device(Client("tpu", "PJRT C API\nTFRT TPU v5")), None),
    ],
)
def test_by_platform(monkeypatch: pytest.MonkeyPatch, device: Any, wanted: Any) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert compiler_options(device) == wanted
    assert compiler_options(jax.devices("cpu")[0]) == CPU_COMPILER_OPTIONS


def test_loops_are_part_of_graphs_unless_the_user_says_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    options = compiler_options(HOPPER)
    assert options is not None
    (kinds,) = options.values()
    assert {"WHILE", "FUSION", "CUSTOM_CALL"} <= set(str(kinds).split(","))
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert compiler_options(HOPPER) is None


@dataclasses.dataclass
class Lowered:
    """A program of an XLA that refuses all options."""

    message: str

    def compile(self, options: Any = None) -> str:
        if options is not None:
            raise jax.errors.JaxRuntimeError(self.message)
        return "compiled"


def test_a_refused_option_is_said_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    refused: Any = Lowered("INVALID_ARGUMENT: While setting option xla_gpu_enable_command_buffer, 'WHILE' is not valid")
    with caplog.at_level(logging.WARNING):
        assert compile_for_device(refused, HOPPER) == "compiled"
    assert "'WHILE' is not valid" in caplog.text
    broken: Any = Lowered("RESOURCE_EXHAUSTED")
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_for_device(broken, HOPPER)

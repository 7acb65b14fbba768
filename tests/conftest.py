"""The environment of every test, set before anything imports JAX; subprocesses of tests inherit it."""

import importlib.metadata
import importlib.util
import os
from pathlib import Path

import pytest

# The CPU comes first and so is the default; tests of GPU kernels ask for the GPU by name.
_gpu = Path("/dev/nvidia0").exists() and any(importlib.util.find_spec(f"jax_cuda{v}_plugin") for v in (12, 13))
os.environ["JAX_PLATFORMS"] = "cpu,cuda" if _gpu else "cpu"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
# Tests of sharding use 8 devices; the others see the first of them.
_flags = os.environ.get("XLA_FLAGS", "").split()
_flags = [flag for flag in _flags if not flag.startswith("--xla_force_host_platform_device_count")]
# Hundreds of small programs are compiled and hardly run: LLVM's optimisation would take longer than it saves.
_flags = [flag for flag in _flags if not flag.startswith("--xla_backend_optimization_level")]
_flags += ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
_inherited = " ".join(_flags)
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones, and libtpu, refuse the names
    # Two thirds of what is left of the time to compile; what is tested are our programs, not the one or the other code generator.
    _flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
os.environ["XLA_FLAGS"] = " ".join(_flags)
# Nothing is fetched from the model hub, and no test depends on whether it can be reached.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Compiling is most of the time that tests take, so programs are kept for the next run and shared by the workers of this one. The
# bound on their size makes JAX lock the folder, which several writers need.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "compiled")
)
os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2 * 10**9)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import jax  # noqa: E402

jax.jit(lambda x: x)(0)  # XLA reads its flags once, here; processes that tests start get those that every version knows
os.environ["XLA_FLAGS"] = _inherited

LONGEST_FIRST = ("test_tpu_compile.py", "test_equality.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starts with the longest files, so that no worker is left with one of them while the others have nothing to do."""
    items.sort(key=lambda item: LONGEST_FIRST.index(item.path.name) if item.path.name in LONGEST_FIRST else 2)


@pytest.fixture(scope="session")
def pair():
    """A trained target and head."""
    from support.pairs import golden_pair

    return golden_pair()


@pytest.fixture(scope="session")
def target(pair):
    return pair[0]


@pytest.fixture(scope="session")
def draft(pair):
    return pair[1]


@pytest.fixture(scope="session")
def tiny():
    """Random ones that are smaller still."""
    from support.pairs import tiny_pair

    return tiny_pair()

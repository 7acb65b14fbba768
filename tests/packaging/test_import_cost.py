"""`import eagle_jax` is cheap and touches nothing."""

import subprocess
import sys
import textwrap

import pytest

IMPORTS = [
    "import eagle_jax",
    "from eagle_jax import LLM, SamplingParams, generate, load_draft, load_target, speculative_generate",
]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("statement", IMPORTS)
def test_import_takes_less_than_a_second_beyond_jax_and_flax(statement):
    code = f"""
        import time
        import jax, flax.nnx
        start = time.process_time()  # time of other processes on a busy machine is not ours
        {statement}
        print(time.process_time() - start)
    """
    assert any(float(run(code)) < 1.0 for _ in range(3))


@pytest.mark.parametrize("statement", [*IMPORTS, "import eagle_jax.cli"])
def test_import_loads_neither_torch_nor_transformers_and_starts_no_backend(statement):
    code = f"""
        import sys
        {statement}
        heavy = sorted({{"torch", "transformers", "gguf"}} & set(sys.modules))
        bridge = sys.modules.get("jax._src.xla_bridge")
        print(heavy, list(bridge._backends) if bridge else [])
    """
    assert run(code) == "[] []\n"


def test_help_of_the_command_does_not_wait_for_jax():
    assert run("import sys, eagle_jax.cli; print('jax' in sys.modules)") == "False\n"


def test_every_public_name_resolves():
    code = """
        import eagle_jax
        missing = [name for name in eagle_jax.__all__ if not hasattr(eagle_jax, name)]
        print(missing)
    """
    assert run(code) == "[]\n"

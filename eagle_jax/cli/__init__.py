"""The `eagle-jax` command; `eagle_jax.cli.app` lists what it can do."""

from eagle_jax.cli.app import main as main

"""The `eagle-jax` command: `demo`, `generate`, `inspect`."""

from eagle_jax.cli.app import main as main

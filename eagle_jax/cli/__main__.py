"""`python -m eagle_jax.cli` is `eagle-jax`."""

import sys

from eagle_jax.cli.app import main

sys.exit(main())

"""What drafts: each kind of drafter keeps a memory of its own and is found by its method (`eagle_jax.drafters.registry`)."""

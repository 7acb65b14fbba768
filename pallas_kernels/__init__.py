"""Kernels for TPU and GPU that know nothing of `eagle_jax`: one folder an operation."""

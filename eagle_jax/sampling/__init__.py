"""Sampling: what a request asks for, how logits become a distribution, and the random numbers that choose from it."""

from eagle_jax.sampling.params import SamplingMode as SamplingMode
from eagle_jax.sampling.params import SamplingParams as SamplingParams

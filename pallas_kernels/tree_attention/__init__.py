"""Attention of a few new tokens over a long committed cache and a short tree of uncommitted rows."""

from pallas_kernels.tree_attention.api import chosen_backend as chosen_backend
from pallas_kernels.tree_attention.api import tree_attention as tree_attention
from pallas_kernels.tree_attention.backends import Implementation as Implementation

"""Attention of a few new tokens over a long committed cache and a short tree of uncommitted rows."""

from pallas_kernels.tree_attention.api import chosen_backend as chosen_backend
from pallas_kernels.tree_attention.api import tree_attention as tree_attention
from pallas_kernels.tree_attention.backends import Implementation as Implementation
from pallas_kernels.tree_attention.packing import key_and_value_rows as key_and_value_rows
from pallas_kernels.tree_attention.packing import pack as pack

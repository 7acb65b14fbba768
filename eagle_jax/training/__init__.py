"""Training draft heads: data that the target writes itself, and a trainer for EAGLE-1, EAGLE-3 and EAGLE-3.1 heads.

Needs `pip install 'eagle-jax[train]'` (optax, orbax-checkpoint, tensorboardX, matplotlib). The program of a step is built from
`batch` (what it reads), `forward` (target and head), `losses` and `step`; `trainer` runs it.
"""

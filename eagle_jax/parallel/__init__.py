"""Several devices: the mesh, what of each parameter a device holds, and the few collectives between them."""

from eagle_jax.parallel.hosts import join_processes as join_processes
from eagle_jax.parallel.mesh import make_mesh as make_mesh

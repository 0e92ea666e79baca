"""Which platform a program is being built for."""

import jax


def target_platform() -> str:
  """Returns the platform that the program now being traced will run on.

  The mesh set by `jax.set_mesh` decides, through its abstract device, so that
  a program compiled ahead of time for another machine gets that machine's
  kernels. Without a mesh, or with one that names no device, it is the default
  backend.

  Returns:
    'cpu', 'gpu' or 'tpu'.
  """
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  platform = jax.default_backend() if device is None else device.platform
  # Compilers for one GPU vendor report their own name; the kernels do not care.
  return 'gpu' if platform in ('cuda', 'rocm') else platform

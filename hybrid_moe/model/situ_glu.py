"""SiTU-GLU: a gated linear unit with softly bounded branches.

Kimi K3 report (arXiv 2607.24653), section 2.3.2 and appendix B.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hybrid_moe.model import parameters
from hybrid_moe.model.linear import linear
from hybrid_moe.model_config import ModelConfig


def situ(
  gate: jax.Array, up: jax.Array, gate_cap: float, up_cap: float
) -> jax.Array:
  """`c_g tanh(gate / c_g) sigmoid(gate) * c_u tanh(up / c_u)`.

  The sigmoid sees the uncapped gate. A cap of 0 leaves its branch unbounded;
  both at 0 are SwiGLU. Computed in float32, returned in `gate.dtype`; the
  magnitude stays below `gate_cap * up_cap`.
  """
  g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
  bounded_g = gate_cap * jnp.tanh(g / gate_cap) if gate_cap else g
  bounded_u = up_cap * jnp.tanh(u / up_cap) if up_cap else u
  return (bounded_g * jax.nn.sigmoid(g) * bounded_u).astype(gate.dtype)


class SituGlu(nn.Module):
  """A dense feed-forward network; several shared experts are one wide one.

  Attributes:
    config: model width, caps of the branches and initial deviation.
    hidden: F, width between the two projections.
  """

  config: ModelConfig
  hidden: int

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Maps inputs [B, T, D] to outputs of the same shape and dtype."""
    c = self.config
    d = c.d_model

    def weight(name, dims, shape):
      return parameters.matrix(self, name, dims, shape, c.init_std)

    w_gate_DF = weight('w_gate', 'DF', (d, self.hidden))
    w_up_DF = weight('w_up', 'DF', (d, self.hidden))
    w_down_FD = weight('w_down', 'FD', (self.hidden, d))
    h_BTF = situ(
      linear(x_BTD, w_gate_DF),
      linear(x_BTD, w_up_DF),
      c.situ_gate_cap,
      c.situ_up_cap,
    )
    return linear(h_BTF, w_down_FD)

"""The arrays and static settings that every KDA implementation takes."""

import dataclasses
from typing import NamedTuple

import jax


class ConvTaps(NamedTuple):
  """Taps of the short convolutions of q, k and v, float32.

  Attributes:
    q_CHK: [C, H, K], `q_CHK[0]` for the token itself.
    k_CHK: [C, H, K].
    v_CHV: [C, HV, V].
  """

  q_CHK: jax.Array
  k_CHK: jax.Array
  v_CHV: jax.Array


class Operands(NamedTuple):
  """The differentiable arrays of one call, as the caller gave them.

  Attributes:
    q_BTHK: queries, bfloat16 or float32.
    k_BTHK: keys, same dtype.
    v_BTHV: values [B, T, HV, V], same dtype; HV is a multiple of H.
    g_BTHK: raw gate logits or log decay [B, T, HV, K].
    beta_BTH: raw write-strength logits or write strength [B, T, HV].
    A_log_H: float32 [HV] log of the gate's multiplier, or None for 1.
    dt_bias_HK: float32 [HV, K] added to the gate logits, or None for 0.
    h0_BHKV: float32 initial state [B, HV, K, V], or [N, HV, K, V] for N
      sequences packed back to back, or None for 0.
    conv: taps of the convolutions that make q, k and v of the arrays of these
      names, or None where they are q, k and v.
  """

  q_BTHK: jax.Array
  k_BTHK: jax.Array
  v_BTHV: jax.Array
  g_BTHK: jax.Array
  beta_BTH: jax.Array
  A_log_H: jax.Array | None
  dt_bias_HK: jax.Array | None
  h0_BHKV: jax.Array | None
  conv: ConvTaps | None = None


class Packing(NamedTuple):
  """Where documents begin and which tokens are padding.

  Attributes:
    valid_BT: bool, False for padding, or None when every token is real.
    document_BT: int32, counts document changes along a row from 0; padding
      carries the number of the document before it. None for one document.
    cu_seqlens: int32 [N + 1], bounds of N sequences that share one row, or
      None. Excludes the two others.
  """

  valid_BT: jax.Array | None
  document_BT: jax.Array | None
  cu_seqlens: jax.Array | None


@dataclasses.dataclass(frozen=True)
class KdaConfig:
  """Static settings of one call; the arguments of `kda` of the same names."""

  lower_bound: float | None
  scale: float
  qk_l2norm: bool
  beta_sigmoid: bool
  allow_neg_eigval: bool
  gate_in_kernel: bool
  precision: str

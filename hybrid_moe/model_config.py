"""Sizes of the model and how its experts are balanced.

Defaults and names follow the Kimi K3 report (arXiv 2607.24653), section 2.
"""

import dataclasses

from hybrid_moe.checks import require

MIXERS = ('kda', 'mla', 'local')
KDA_PRECISIONS = ('fast', 'default', 'high', 'highest')
KDA_IMPLEMENTATIONS = (
  'auto',
  'reference',
  'chunked_xla',
  'mosaic_tpu',
  'mosaic_gpu',
)


@dataclasses.dataclass(frozen=True)
class KdaConfig:
  """Kimi Delta Attention.

  Attributes:
    num_heads: query/key heads.
    num_value_heads: value heads, a multiple of `num_heads`; each query/key
      head serves a group of them. 0 means `num_heads`.
    key_dim: width of a query/key head.
    value_dim: width of a value head.
    conv_width: taps of the causal short convolution on q, k and v.
    gate_rank: rank of the decay gate's projection.
    output_gate_rank: rank of the output gate's projection; 0 is full rank.
    gate: 'bounded' is `g = gate_lower_bound * sigmoid(exp(A) * (f(x) + b))`;
      'softplus' is the published `g = -exp(A) * softplus(f(x) + b)`, kept for
      ablation: it is unbounded and runs on a slower path.
    gate_lower_bound: least log-decay of a token, in [-5, 0).
    allow_neg_eigval: write strengths up to 2 instead of 1.
    precision: one of `KDA_PRECISIONS`, as the kernel takes it.
    implementation: one of `KDA_IMPLEMENTATIONS`; 'auto' lets the kernel pick.
  """

  num_heads: int = 4
  num_value_heads: int = 0
  key_dim: int = 64
  value_dim: int = 64
  conv_width: int = 4
  gate_rank: int = 64
  output_gate_rank: int = 0
  gate: str = 'bounded'
  gate_lower_bound: float = -5.0
  allow_neg_eigval: bool = False
  precision: str = 'default'
  implementation: str = 'auto'

  def __post_init__(self):
    for field in (
      'num_heads',
      'key_dim',
      'value_dim',
      'conv_width',
      'gate_rank',
    ):
      value = getattr(self, field)
      require(value >= 1, f'model.kda.{field}', value, '>= 1')
    for field in ('key_dim', 'value_dim'):
      value = getattr(self, field)
      require(32 <= value <= 256, f'model.kda.{field}', value, '32 to 256')
    require(
      self.num_value_heads >= 0 and self.value_heads % self.num_heads == 0,
      'model.kda.num_value_heads',
      self.num_value_heads,
      f'0 or a multiple of num_heads={self.num_heads}',
    )
    gates = ('bounded', 'softplus')
    require(self.gate in gates, 'model.kda.gate', self.gate, f'one of {gates}')
    require(
      -5 <= self.gate_lower_bound < 0,
      'model.kda.gate_lower_bound',
      self.gate_lower_bound,
      'a number in [-5, 0): 16 rows of a tile must stay inside float32',
    )
    require(
      self.output_gate_rank >= 0,
      'model.kda.output_gate_rank',
      self.output_gate_rank,
      '>= 0',
    )
    for field, accepted in (
      ('precision', KDA_PRECISIONS),
      ('implementation', KDA_IMPLEMENTATIONS),
    ):
      value = getattr(self, field)
      require(
        value in accepted, f'model.kda.{field}', value, f'one of {accepted}'
      )

  @property
  def value_heads(self) -> int:
    """Value heads after the default is applied."""
    return self.num_value_heads or self.num_heads


@dataclasses.dataclass(frozen=True)
class MlaConfig:
  """Gated multi-head latent attention without positional encoding.

  Attributes:
    num_heads: attention heads.
    q_lora_rank: width of the query latent; 0 projects queries directly.
    kv_lora_rank: width of the cached key/value latent.
    head_dim: per-head part of a query or key.
    shared_key_dim: part of the key that all heads share; cached, never
      rotated.
    value_dim: width of a value head.
    output_gate: whether a sigmoid gate multiplies the attention output.
  """

  num_heads: int = 4
  q_lora_rank: int = 96
  kv_lora_rank: int = 64
  head_dim: int = 64
  shared_key_dim: int = 32
  value_dim: int = 64
  output_gate: bool = True

  def __post_init__(self):
    for field in (
      'num_heads',
      'kv_lora_rank',
      'head_dim',
      'shared_key_dim',
      'value_dim',
    ):
      value = getattr(self, field)
      require(value >= 1, f'model.mla.{field}', value, '>= 1')
    require(
      self.q_lora_rank >= 0, 'model.mla.q_lora_rank', self.q_lora_rank, '>= 0'
    )


@dataclasses.dataclass(frozen=True)
class LocalAttentionConfig:
  """Sliding-window softmax attention.

  Attributes:
    num_heads: attention heads.
    head_dim: width of a head.
    window: tokens that a query sees, itself included.
  """

  num_heads: int = 4
  head_dim: int = 64
  window: int = 128

  def __post_init__(self):
    for field in ('num_heads', 'head_dim', 'window'):
      value = getattr(self, field)
      require(value >= 1, f'model.local.{field}', value, '>= 1')


@dataclasses.dataclass(frozen=True)
class MoeConfig:
  """Stable LatentMoE.

  Attributes:
    num_experts: routed experts.
    top_k: routed experts of a token.
    num_shared_experts: experts that every token takes, at full width.
    latent_dim: width at which routed experts work; 0 is the model's width,
      without down- and up-projection.
    expert_hidden: hidden width of a routed or shared expert.
    routed_scale: factor on the routed experts' weights.
    use_latent_norm: RMSNorm after the experts are combined.
    implementation: how the grouped matrix products run: 'auto', 'ragged_dot'
      or 'blocked'.
  """

  num_experts: int = 16
  top_k: int = 4
  num_shared_experts: int = 1
  latent_dim: int = 128
  expert_hidden: int = 128
  routed_scale: float = 1.0
  use_latent_norm: bool = True
  implementation: str = 'auto'

  def __post_init__(self):
    require(
      self.num_experts >= 2, 'model.moe.num_experts', self.num_experts, '>= 2'
    )
    # The cutoff of quantile balancing is the (k+1)-th score.
    require(
      1 <= self.top_k < self.num_experts,
      'model.moe.top_k',
      self.top_k,
      f'1 to num_experts - 1 = {self.num_experts - 1}',
    )
    for field in ('num_shared_experts', 'latent_dim'):
      value = getattr(self, field)
      require(value >= 0, f'model.moe.{field}', value, '>= 0')
    require(
      self.expert_hidden >= 1,
      'model.moe.expert_hidden',
      self.expert_hidden,
      '>= 1',
    )
    require(
      self.routed_scale > 0, 'model.moe.routed_scale', self.routed_scale, '> 0'
    )
    accepted = ('auto', 'ragged_dot', 'blocked')
    require(
      self.implementation in accepted,
      'model.moe.implementation',
      self.implementation,
      f'one of {accepted}',
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The decoder.

  Attributes:
    vocab_size: rows of the input and output embeddings.
    d_model: width.
    num_layers: decoder layers, each a token mixer and a feed-forward network.
    mixers: token mixers of consecutive layers, repeated: any of 'kda', 'mla',
      'local'.
    final_mixer: mixer of the last layer; '' leaves the repetition alone.
    dense_layers: first layers whose feed-forward network is dense.
    dense_hidden: hidden width of a dense feed-forward network.
    attn_res_block: layers of a block of attention residuals; 0 is an ordinary
      pre-norm residual stream.
    mtp_layers: 0, or 1 for a multi-token-prediction layer.
    situ_gate_cap: bound of the gate branch of SiTU-GLU.
    situ_up_cap: bound of the up branch of SiTU-GLU; 0 for either gives SwiGLU.
    norm_eps: constant in every RMSNorm but those of MLA's latents.
    latent_norm_eps: constant in the RMSNorm of MLA's query and key latents.
    init_std: standard deviation of initial weights.
    dtype: activations and matrix products; parameters are float32.
    scan_blocks: compile equal blocks of layers once, as a loop.
  """

  vocab_size: int = 272
  d_model: int = 256
  num_layers: int = 13
  mixers: tuple[str, ...] = ('kda', 'kda', 'kda', 'mla')
  final_mixer: str = 'mla'
  dense_layers: int = 1
  dense_hidden: int = 512
  attn_res_block: int = 4
  mtp_layers: int = 0
  situ_gate_cap: float = 4.0
  situ_up_cap: float = 25.0
  norm_eps: float = 1e-5
  latent_norm_eps: float = 1e-6
  init_std: float = 0.02
  dtype: str = 'bfloat16'
  scan_blocks: bool = True
  kda: KdaConfig = KdaConfig()
  mla: MlaConfig = MlaConfig()
  local: LocalAttentionConfig = LocalAttentionConfig()
  moe: MoeConfig = MoeConfig()

  def __post_init__(self):
    for field in ('vocab_size', 'd_model', 'num_layers', 'dense_hidden'):
      value = getattr(self, field)
      require(value >= 1, f'model.{field}', value, '>= 1')
    require(len(self.mixers) >= 1, 'model.mixers', self.mixers, 'a mixer')
    for mixer in self.mixers:
      require(
        mixer in MIXERS, 'model.mixers', self.mixers, f'mixers of {MIXERS}'
      )
    require(
      self.final_mixer in ('', *MIXERS),
      'model.final_mixer',
      self.final_mixer,
      f"'' or one of {MIXERS}",
    )
    require(
      0 <= self.dense_layers <= self.num_layers,
      'model.dense_layers',
      self.dense_layers,
      f'0 to num_layers={self.num_layers}',
    )
    require(
      self.attn_res_block >= 0,
      'model.attn_res_block',
      self.attn_res_block,
      '>= 0',
    )
    require(
      self.mtp_layers in (0, 1), 'model.mtp_layers', self.mtp_layers, '0 or 1'
    )
    for field in ('situ_gate_cap', 'situ_up_cap'):
      value = getattr(self, field)
      require(value >= 0, f'model.{field}', value, '>= 0')
    for field in ('norm_eps', 'latent_norm_eps', 'init_std'):
      value = getattr(self, field)
      require(value > 0, f'model.{field}', value, '> 0')
    dtypes = ('bfloat16', 'float32')
    require(self.dtype in dtypes, 'model.dtype', self.dtype, f'one of {dtypes}')

  def mixer_of(self, layer: int) -> str:
    """Token mixer of a layer (0-based)."""
    if self.final_mixer and layer == self.num_layers - 1:
      return self.final_mixer
    return self.mixers[layer % len(self.mixers)]

  @property
  def num_moe_layers(self) -> int:
    """Layers with routed experts, the multi-token-prediction layer included."""
    return self.num_layers - self.dense_layers + self.mtp_layers


@dataclasses.dataclass(frozen=True)
class BalanceConfig:
  """How the experts are kept equally loaded.

  Attributes:
    method: 'quantile' (Kimi K3), 'sign' (DeepSeek's loss-free rule),
      'aux_loss' (Switch-style loss) or 'none'.
    estimator: 'histogram' pools integer counts; 'exact' sorts every required
      bias and is an oracle for small runs.
    num_bins: bins of the histogram.
    smoothing: weight of the old bias in its moving average; the first update
      is taken whole.
    window_decay: weight of the old counts in a moving histogram, on a fixed
      grid; 0 uses the current step's counts only.
    update_every: optimiser steps between updates; counts accumulate between.
    sign_step: step of the sign rule.
    sign_reference: load that the sign rule compares with: 'mean' or 'median'.
    aux_weight: weight of the auxiliary loss.
    dead_threshold: utilisation below which an expert is logged as dead.
  """

  method: str = 'quantile'
  estimator: str = 'histogram'
  num_bins: int = 1000
  smoothing: float = 0.5
  window_decay: float = 0.0
  update_every: int = 1
  sign_step: float = 1e-3
  sign_reference: str = 'mean'
  aux_weight: float = 1e-2
  dead_threshold: float = 0.1

  def __post_init__(self):
    for field, accepted in (
      ('method', ('quantile', 'sign', 'aux_loss', 'none')),
      ('estimator', ('histogram', 'exact')),
      ('sign_reference', ('mean', 'median')),
    ):
      value = getattr(self, field)
      require(
        value in accepted, f'balance.{field}', value, f'one of {accepted}'
      )
    require(self.num_bins >= 2, 'balance.num_bins', self.num_bins, '>= 2')
    for field in ('smoothing', 'window_decay'):
      value = getattr(self, field)
      require(0 <= value < 1, f'balance.{field}', value, 'a number in [0, 1)')
    require(
      self.update_every >= 1, 'balance.update_every', self.update_every, '>= 1'
    )
    for field in ('sign_step', 'aux_weight', 'dead_threshold'):
      value = getattr(self, field)
      require(value >= 0, f'balance.{field}', value, '>= 0')
    if self.estimator == 'exact':
      require(
        self.window_decay == 0 and self.update_every == 1,
        'balance.estimator',
        self.estimator,
        "'histogram' when window_decay > 0 or update_every > 1",
      )

"""Named sizes of the model, from a debug size to Kimi K3's.

Totals and active parameters are tested. A preset is a starting point: any
field can be replaced, on the command line too.
"""

from hybrid_moe.model_config import (
  KdaConfig,
  LocalAttentionConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
)

# Debug size with every branch: dense and routed layers, loop and single
# blocks, a last block that is not full, latent attention at the end.
TINY = ModelConfig(
  vocab_size=272,
  d_model=96,
  num_layers=13,
  dense_hidden=192,
  attn_res_block=4,
  init_std=0.06,
  dtype='float32',
  kda=KdaConfig(num_heads=2, key_dim=32, value_dim=32, gate_rank=16),
  mla=MlaConfig(
    num_heads=2,
    q_lora_rank=48,
    kv_lora_rank=32,
    head_dim=32,
    shared_key_dim=16,
    value_dim=32,
  ),
  local=LocalAttentionConfig(num_heads=2, head_dim=32, window=64),
  moe=MoeConfig(num_experts=16, top_k=4, latent_dim=48, expert_hidden=48),
)

# About 20 million parameters; trains on a CPU.
NANO = ModelConfig(
  vocab_size=272,
  d_model=256,
  num_layers=13,
  dense_hidden=768,
  attn_res_block=4,
  init_std=0.04,
  dtype='float32',
  moe=MoeConfig(num_experts=24, top_k=4, latent_dim=128, expert_hidden=128),
)

# About 150 million; an afternoon on one GPU.
SMALL = ModelConfig(
  vocab_size=8192,
  d_model=512,
  num_layers=17,
  dense_hidden=2048,
  attn_res_block=4,
  kda=KdaConfig(num_heads=8, key_dim=64, value_dim=64, gate_rank=64),
  mla=MlaConfig(
    num_heads=8,
    q_lora_rank=192,
    kv_lora_rank=128,
    head_dim=64,
    shared_key_dim=32,
    value_dim=64,
  ),
  local=LocalAttentionConfig(num_heads=8, head_dim=64, window=512),
  moe=MoeConfig(num_experts=32, top_k=4, latent_dim=256, expert_hidden=256),
)

# About 1.3 billion, 0.25 billion active; one GPU of 80 to 140 GB.
BASE_1B = ModelConfig(
  vocab_size=32_768,
  d_model=1024,
  num_layers=21,
  dense_hidden=4096,
  attn_res_block=4,
  kda=KdaConfig(num_heads=8, key_dim=128, value_dim=128, gate_rank=128),
  mla=MlaConfig(
    num_heads=8,
    q_lora_rank=384,
    kv_lora_rank=256,
    head_dim=128,
    shared_key_dim=64,
    value_dim=128,
  ),
  local=LocalAttentionConfig(num_heads=8, head_dim=128, window=1024),
  moe=MoeConfig(num_experts=68, top_k=4, latent_dim=512, expert_hidden=512),
)

# Sizes of Kimi Linear 48B-A3B (arXiv 2510.26692), with attention residuals in
# blocks of three layers (arXiv 2603.15031) and this project's bounded gate,
# SiTU-GLU and output gate of latent attention.
KIMI_LINEAR_48B = ModelConfig(
  vocab_size=163_840,
  d_model=2304,
  num_layers=27,
  dense_hidden=9216,
  attn_res_block=3,
  kda=KdaConfig(
    num_heads=32,
    key_dim=128,
    value_dim=128,
    gate_rank=128,
    output_gate_rank=128,
  ),
  mla=MlaConfig(
    num_heads=32,
    q_lora_rank=0,
    kv_lora_rank=512,
    head_dim=128,
    shared_key_dim=64,
    value_dim=128,
  ),
  local=LocalAttentionConfig(num_heads=32, head_dim=128, window=2048),
  moe=MoeConfig(
    num_experts=256,
    top_k=8,
    num_shared_experts=1,
    latent_dim=0,
    expert_hidden=1024,
    routed_scale=2.446,
    use_latent_norm=False,
  ),
)

# Kimi K3 (arXiv 2607.24653): 2,779.48 billion parameters, 104.19 active.
K3_2P8T = ModelConfig(
  vocab_size=163_840,
  d_model=7168,
  num_layers=93,
  dense_hidden=33_792,
  attn_res_block=12,
  kda=KdaConfig(num_heads=96, key_dim=128, value_dim=128, gate_rank=128),
  mla=MlaConfig(
    num_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    head_dim=128,
    shared_key_dim=64,
    value_dim=128,
  ),
  local=LocalAttentionConfig(num_heads=96, head_dim=128, window=4096),
  moe=MoeConfig(
    num_experts=896,
    top_k=16,
    num_shared_experts=2,
    latent_dim=3584,
    expert_hidden=3072,
  ),
)

PRESETS = {
  'tiny': TINY,
  'nano': NANO,
  'small': SMALL,
  'base_1b': BASE_1B,
  'kimi_linear_48b': KIMI_LINEAR_48B,
  'k3_2p8t': K3_2P8T,
}

"""Long-context hybrid linear-attention Mixture-of-Experts models in JAX.

The package is a flat spine; data flows down and nothing imports upward:

  config -> mesh -> sharding -> data -> model -> loss -> optim -> train_state
         -> train_step -> stage -> stage_runner -> experiments

Arrays carry their dimensions as a suffix (`q_BTHK`). The letters: B batch,
T tokens, D model width, H heads, K key width, V value width, C chunk length,
N chunks, E experts, S expert slots of a token (top-k), F expert hidden width,
Z latent width of the experts, R low rank, U vocabulary, L layers, W histogram
bins. Inside `shard_map` a dimension that is only this shard's slice is lower
case.
"""

"""Long-context hybrid linear-attention Mixture-of-Experts models in JAX.

The package is a flat spine; data flows down and nothing imports upward:

  config -> mesh -> sharding -> data -> model -> loss -> optim -> train_state
         -> train_step -> stage -> stage_runner -> experiments

Arrays carry their dimensions as a suffix (`q_BTHK`). The letters: A
micro-batches, B batch, T tokens, D model width, H heads, K key width, V value
width, P width of the key part that heads share, R low rank, C chunk length (of
a convolution, its taps), N chunks (where tokens are routed, all tokens of a
batch), E experts, S expert slots of a token (top-k; of a mixture, its sources),
M rows sorted by expert, F expert hidden width, Z latent width of the experts, U
vocabulary, L layers, W histogram bins. X and Y are widths of several dimensions
merged or of several parts side by side. Inside `shard_map` a dimension that is
only this shard's slice is lower case.
"""

"""Multi-head latent attention in plain PyTorch: the problem, its contracts, and their plain answers.

The dimension key, used in einsum strings, shape comments and contracts:

    b request            p nope channel of a head    (qk_nope_head_dim, 128)
    t query token        r rope channel              (qk_rope_head_dim, 64)
    s query of a request c latent channel            (kv_lora_rank, 512)
    h query head         v value channel of a head   (v_head_dim, 128)
    n block of the pool  k slot in a block           (block_size)
    m column of a table  e element of a cache entry
    j key of a request   d hidden channel            (hidden_size)
    g key/value head     x key channel of a head     (qk_head_dim, where keys are cached)
"""

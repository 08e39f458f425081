"""Small models for `hybrid_jax`, which finds them by the names of the folders."""

"""Allocators of KV pages and recurrent states: the engine's own, published ones, and ideal ones, run on loads without a
model. `hybrid-jax pool-sim` and benchmarks use them, from a clone; they load no jax."""

"""Inference for hybrid language models in JAX."""

"""Text on its way in and out: tokenizers, chat templates, prompts, and text while its tokens come. Never jax.

May import: byte_sizes, config.
Packages: jinja2, markupsafe, tokenizers.
"""

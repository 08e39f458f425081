"""`python -m hybrid_jax` is the command line."""

from hybrid_jax.cli.main import main

if __name__ == "__main__":
    main()

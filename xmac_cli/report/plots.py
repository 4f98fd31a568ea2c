"""Drawing a report's figures with matplotlib (the extra `plots`), without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from xmac_cli.cli.errors import MissingExtraError
from xmac_cli.report.schema import Figure


def draw_figures(figures: Sequence[Figure], directory: Path, *, dpi: int = 130) -> list[Path]:
    """Draw each figure into `directory/NAME.png`.

    Args:
        figures: what to draw.
        directory: created if needed.
        dpi: dots per inch.

    Returns:
        The files, in the order of the figures.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise MissingExtraError("plots", "draw plots") from error
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for figure in figures:
        canvas = Canvas(figsize=figure.size, layout="constrained")
        FigureCanvasAgg(canvas)
        figure.draw(canvas)
        path = directory / f"{figure.name}.png"
        canvas.savefig(path, dpi=dpi, metadata={"Software": None})
        paths.append(path)
    return paths

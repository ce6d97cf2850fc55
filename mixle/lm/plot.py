"""The loss plot: training loss against bytes seen, held-out scores, and the other models as lines to beat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
TRAINING, HELDOUT = "#2563eb", "#d9480f"
OTHERS = ("#0f766e", "#7c3aed", "#b45309", "#be185d")


def smooth(values: np.ndarray) -> np.ndarray:
    """Average over a centred window of a fiftieth of the run, narrower at the ends."""
    window = np.ones(len(values) // 50 + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def spread(values: Sequence[float], *, apart: float) -> list[float]:
    """Raise ascending ``values`` so that neighbours are ``apart``: labels that would overlap are moved up."""
    placed: list[float] = []
    for value in values:
        placed.append(max(value, placed[-1] + apart) if placed else value)
    return placed


def plot_loss(
    path: Path,
    *,
    bytes_seen: Sequence[int],
    training: Sequence[float],
    heldout: Sequence[tuple[int, float]],
    others: Mapping[str, float],
) -> None:
    """Write a PNG of the loss in bits per byte.

    Args:
        path: file to write.
        bytes_seen: bytes trained on after each step.
        training: loss of each step, bits per byte.
        heldout: (bytes trained on, bits per byte) of each held-out evaluation.
        others: bits per byte of what the model is compared with, drawn as horizontal lines.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(8.4, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    seen = np.asarray(bytes_seen, dtype=float)
    losses = np.asarray(training, dtype=float)
    axes.plot(seen, losses, color=TRAINING, alpha=0.22, linewidth=0.8)
    axes.plot(seen, smooth(losses), color=TRAINING, linewidth=2, label="transformer, training (smoothed)")
    if heldout:
        at, bits = zip(*heldout, strict=True)
        axes.plot(
            at, bits, "o", color=HELDOUT, markersize=6, clip_on=False, label="transformer, sample of held-out", zorder=4
        )
    names = sorted(others, key=others.__getitem__)
    labels_at = spread([others[name] for name in names], apart=0.32)
    for color, name, label_at in zip(OTHERS, names, labels_at, strict=False):
        axes.axhline(others[name], color=color, linewidth=1.2, linestyle=(0, (5, 3)))
        axes.annotate(
            f"{name}  {others[name]:.2f}",
            (1.0, label_at),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=color,
            annotation_clip=False,
        )
    axes.set_xlabel("bytes trained on", color=INK)
    axes.set_ylabel("bits per byte", color=INK)
    axes.set_title("Loss of the transformer beside simpler models", loc="left", color=INK, fontsize=12)
    axes.set_xlim(left=0, right=float(seen[-1]) if len(seen) else 1.0)
    axes.set_ylim(bottom=0, top=8.2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _magnitude(value)))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelcolor=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.legend(frameon=False, loc="upper right", labelcolor=INK)
    figure.savefig(path, dpi=150)


def _magnitude(value: float) -> str:
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:g}{suffix}"
    return f"{value:g}"

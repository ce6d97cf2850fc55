"""Draw docs/explanation/what-each-axis-sends.svg: one training step of one block, and what each axis sends in it.

python docs/explanation/draw_axes.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

# (row, start, length, what): a step of one stage with one block, in arbitrary units of time.
ROWS = ("compute", "tensor", "context", "pipeline", "data")
COMPUTE = [(1, 2, "attention"), (4, 2, "MLP"), (8, 3, "MLP backward"), (12, 3, "attention backward")]
SENT = [
    ("tensor", 0.5, 0.5, "gather"),
    ("tensor", 3.0, 0.5, "sum, scatter"),
    ("tensor", 3.5, 0.5, "gather"),
    ("tensor", 6.0, 0.5, "sum, scatter"),
    ("tensor", 7.5, 0.5, "gather"),
    ("tensor", 11.0, 0.5, "sum, scatter"),
    ("tensor", 11.5, 0.5, "gather"),
    ("tensor", 15.0, 0.5, "sum, scatter"),
    ("context", 1.0, 2.0, "K, V to the next rank,\ncp - 1 times"),
    ("context", 12.0, 3.0, "K, V again, and dK, dV\none step behind them"),
    ("pipeline", 0.0, 0.5, "hidden state in"),
    ("pipeline", 6.5, 0.5, "hidden state out"),
    ("pipeline", 7.0, 0.5, "its gradient in"),
    ("pipeline", 15.5, 0.5, "gradient out"),
    ("data", 11.0, 1.0, "MLP's\ngradients"),
    ("data", 15.0, 1.0, "attention's\ngradients"),
]
COLOURS = {"compute": "#94a3b8", "tensor": "#1d4ed8", "context": "#0f766e", "pipeline": "#b45309", "data": "#7e22ce"}


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "mixle", "svg.fonttype": "none", "font.size": 8})
    figure, axes = plt.subplots(figsize=(10, 4.2))
    places = {row: len(ROWS) - place for place, row in enumerate(ROWS)}
    for start, length, what in COMPUTE:
        axes.barh(places["compute"], length, left=start, height=0.5, color=COLOURS["compute"])
        axes.text(start + length / 2, places["compute"], what, ha="center", va="center")
    for row, start, length, what in SENT:
        axes.barh(places[row], length, left=start, height=0.3, color=COLOURS[row], edgecolor="white", linewidth=1.5)
        turned = length < 1
        axes.text(
            start + (0.1 if turned else length / 2),
            places[row] - 0.2,
            what,
            ha="left" if turned else "center",
            va="top",
            rotation=-35 if turned else 0,
            rotation_mode="anchor" if turned else "default",
            fontsize=6.5,
        )
    axes.set_yticks([places[row] for row in ROWS], ROWS)
    axes.set_xticks([])
    axes.set_xlabel("time within one microbatch  →  forward, then backward")
    axes.set_ylim(0.2, len(ROWS) + 0.6)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.axvline(7.25, color="#cbd5e1", linestyle=":")
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("what-each-axis-sends.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()

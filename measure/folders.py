"""Draw where the weight matrices of a checkpoint are: in the ranks' files at ZeRO-1 or 2, in a
universal checkpoint, and on two ranks that go on at ZeRO-3. One matrix is followed through.

    python -m measure.folders ds_transformer_checkpoint/global_step100 --output out/folders.png
"""

from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, Rectangle

from measure import options

FOLLOWED = "#56B4E9"
OTHER = "0.85"
HEIGHT = 0.55  # of a row
matplotlib.rcParams["font.size"] = 11


class Part(NamedTuple):
    """Some elements of a parameter."""

    name: str
    numel: int


def saved_parts(checkpoint, ranks):
    """What each rank's file says that it holds: [[Part]]."""
    files = []
    for rank in range(ranks):
        path = checkpoint / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        state = torch.load(path, mmap=True, weights_only=False)["optimizer_state_dict"]
        mappings = state["param_slice_mappings"][0]
        files.append([Part(name, fragment.numel) for name, fragment in mappings.items()])
    return files


def cut_each(parameters, ranks):
    """Cuts like ZeRO-3: each parameter by itself, and the shares of a rank end to end."""
    return [[Part(name, -(-numel // ranks)) for name, numel in parameters] for _ in range(ranks)]


def draw_row(axis, y, label, holders, followed, gap):
    """Holders of parts, side by side, as long as what is in them.

    Returns where each holder begins, and [(left, right)] of the followed parameter's parts."""
    axis.text(-0.02, y + HEIGHT / 2, label, ha="right", va="center")
    total = sum(part.numel for parts in holders for part in parts)
    scale = (1 - gap * (len(holders) - 1)) / total
    x = 0.0
    begins = []
    pieces = []
    for parts in holders:
        begins.append(x)
        for name, numel in parts:
            width = numel * scale
            color = FOLLOWED if name == followed else OTHER
            axis.add_patch(Rectangle((x, y), width, HEIGHT, facecolor=color, edgecolor="white"))
            if name == followed:
                pieces.append((x, x + width))
            x += width
        x += gap
    return begins, pieces


def connect(axis, pieces, y, whole, whole_y, style):
    """Connect every piece with its place in the parameter, and draw an arrow."""
    start, end = whole
    scale = (end - start) / sum(right - left for left, right in pieces)
    for left, right in pieces:
        stop = start + (right - left) * scale
        corners = [(left, y), (right, y), (stop, whole_y), (start, whole_y)]
        axis.add_patch(Polygon(corners, facecolor=FOLLOWED, alpha=0.25, edgecolor="none"))
        tip = ((left + right) / 2, y)
        tail = ((start + stop) / 2, whole_y)
        arrow = {"arrowstyle": style, "shrinkA": 2, "shrinkB": 2, "mutation_scale": 16, "fc": "k"}
        axis.annotate("", tip, tail, arrowprops=arrow)
        start = stop


def draw(files, folders, readers, followed):
    """Returns a figure. What each rank's file holds, each folder, and each new rank: [[Part]]."""
    figure = Figure(figsize=(6, 4.6))
    axis = figure.add_axes((0.25, 0.16, 0.74, 0.72))
    label = f"saved by\n{len(files)} ranks\nat ZeRO-1 or 2"
    begins, above = draw_row(axis, 3, label, files, followed, 0.03)
    for rank, x in enumerate(begins):
        axis.text(x, 3 + HEIGHT + 0.06, f"rank {rank}")
    label = "a universal\ncheckpoint\n(optional)"
    _, (whole,) = draw_row(axis, 1.5, label, folders, followed, 0.008)
    label = f"resumed on\n{len(readers)} ranks\nat ZeRO-3"
    begins, below = draw_row(axis, 0, label, readers, followed, 0.03)
    for rank, x in enumerate(begins):
        axis.text(x, -0.32, f"rank {rank}")
    connect(axis, above, 3, whole, 1.5 + HEIGHT, "<|-")  # points at the whole
    connect(axis, below, HEIGHT, whole, 1.5, "-|>")
    axis.set(xlim=(0, 1), ylim=(-0.35, 3.85))
    axis.axis("off")
    title = "Each rank's file has slices of weight matrices;\nother ranks need other slices of them"
    figure.suptitle(title, fontsize=12, y=0.985)
    handles = [
        Patch(facecolor=FOLLOWED, label="one weight matrix, followed"),
        Patch(facecolor=OTHER, label="the other matrices"),
    ]
    figure.legend(
        handles=handles,
        title="every box holds fp32 weights, exp_avg and exp_avg_sq",
        loc="lower center",
        ncols=2,
        frameon=False,
        columnspacing=1,
        handlelength=1,
    )
    return figure


def main():
    parser = options.parser(__doc__, "out/folders.png")
    parser.add_argument("checkpoint", type=Path, help="a ZeRO-1 checkpoint")
    args = parser.parse_args()
    path = args.checkpoint / "mp_rank_00_model_states.pt"
    model = torch.load(path, mmap=True, weights_only=False)
    matrices = model["param_shapes"][0]  # the first group
    parameters = [Part(name, shape.numel()) for name, shape in matrices.items()]
    files = saved_parts(args.checkpoint, model["dp_world_size"])
    readers = cut_each(parameters, ranks=2)
    names = [part.name for parts in files for part in parts]
    followed = max(matrices, key=names.count)  # the one that is cut most
    folders = [[parameter] for parameter in parameters]
    figure = draw(files, folders, readers, followed)
    figure.savefig(args.output, dpi=200)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()

"""Draw where the weight matrices of a ZeRO-1 checkpoint are: in the ranks' files, then in a
universal checkpoint, then on two ranks that read it. One matrix is followed through all.

    python -m measure.folders ds_transformer_checkpoint/global_step100 --output out/folders.png
"""

import argparse
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, Rectangle

FOLLOWED, OTHERS, HEIGHT = "#56B4E9", ("0.90", "0.78"), 0.55
matplotlib.rcParams["font.size"] = 11


def saved(checkpoint, ranks):
    """What each rank's file of a ZeRO-1 checkpoint says that it holds: [[(parameter,
    elements)]]."""
    found = []
    for rank in range(ranks):
        path = checkpoint / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        state = torch.load(path, mmap=True, weights_only=False)["optimizer_state_dict"]
        found.append(
            [(name, part.numel) for name, part in state["param_slice_mappings"][0].items()]
        )
    return found


def cut(sizes, ranks):
    """As ZeRO-1 and 2 do: the parameters end to end, and one slice of that for each rank."""
    total, found = sum(n for _, n in sizes), []
    for rank in range(ranks):
        low, high, at = total * rank // ranks, total * (rank + 1) // ranks, 0
        found.append([])
        for name, n in sizes:
            part = min(at + n, high) - max(at, low)
            if part > 0:
                found[-1].append((name, part))
            at += n
    return found


def draw_row(axis, y, label, holders, colors, gap, heads=True):
    """Holders of parts, side by side, as long as what is in them. Returns [(left, right)] of the
    followed one's."""
    axis.text(-0.02, y + HEIGHT / 2, label, ha="right", va="center")
    scale = (1 - gap * (len(holders) - 1)) / sum(n for parts in holders for _, n in parts)
    x, pieces = 0.0, []
    for rank, parts in enumerate(holders):
        if heads:  # under the lowest row, which the arrows meet from above
            axis.text(x, y + HEIGHT + 0.06 if y else -0.27, f"rank {rank}")
        for name, n in parts:
            axis.add_patch(
                Rectangle(
                    (x, y), n * scale, HEIGHT, facecolor=colors[name], edgecolor="white", lw=0.5
                )
            )
            pieces += [(x, x + n * scale)] if colors[name] == FOLLOWED else []
            x += n * scale
        x += gap
    return pieces


def connect(axis, pieces, y, whole, whole_y, style):
    """From every piece to its part of the whole, and an arrow along."""
    start, length = whole[0], sum(right - left for left, right in pieces)
    for left, right in pieces:
        part = (right - left) / length * (whole[1] - whole[0])
        corners = [(left, y), (right, y), (start + part, whole_y), (start, whole_y)]
        axis.add_patch(Polygon(corners, facecolor=FOLLOWED, alpha=0.25, edgecolor="none"))
        ends = ((left + right) / 2, y), (start + part / 2, whole_y)
        arrow = {"arrowstyle": style, "shrinkA": 2, "shrinkB": 2, "mutation_scale": 16, "fc": "k"}
        axis.annotate("", *ends, arrowprops=arrow)
        start += part


def draw(files, folders, readers, colors, path):
    """What each rank's file, each folder and each new rank holds."""
    figure = Figure(figsize=(6, 4.5))
    axis = figure.add_axes((0.2, 0.17, 0.79, 0.69))
    above = draw_row(axis, 3, "ZeRO-1/2:\na file per\nrank", files, colors, 0.03)
    (whole,) = draw_row(
        axis, 1.5, "universal:\na folder per\nparameter", folders, colors, 0.008, heads=False
    )
    below = draw_row(axis, 0, f"resumed on\n{len(readers)} ranks", readers, colors, 0.03)
    connect(axis, above, 3, whole, 1.5 + HEIGHT, "<|-")  # points at the whole
    connect(axis, below, HEIGHT, whole, 1.5, "-|>")
    axis.set(xlim=(0, 1), ylim=(-0.3, 3.8))
    axis.axis("off")
    title = "ZeRO-1/2 cuts across the parameters;\na universal checkpoint keeps each of them whole"
    figure.suptitle(title, fontsize=12, y=0.98)
    words = {"one weight matrix, followed": FOLLOWED, "the other matrices": OTHERS[1]}
    patches = [Patch(facecolor=color, label=word) for word, color in words.items()]
    look = {
        "loc": "lower center",
        "ncols": 2,
        "frameon": False,
        "columnspacing": 1,
        "handlelength": 1,
    }
    figure.legend(
        handles=patches, title="every box holds fp32 weights, exp_avg and exp_avg_sq", **look
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    print(f"wrote {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="a ZeRO-1 checkpoint")
    parser.add_argument("--output", type=Path, default=Path("out/folders.png"))
    args = parser.parse_args()
    model = torch.load(
        args.checkpoint / "mp_rank_00_model_states.pt", mmap=True, weights_only=False
    )
    sizes = [
        (name, shape.numel()) for name, shape in model["param_shapes"][0].items()
    ]  # the group of the matrices
    files, readers = saved(args.checkpoint, model["dp_world_size"]), cut(sizes, ranks=2)
    everywhere = [name for parts in [*files, *readers] for name, _ in parts]
    colors = {name: OTHERS[i % 2] for i, (name, _) in enumerate(sizes)}
    colors[max(colors, key=everywhere.count)] = FOLLOWED  # the one that is cut most
    draw(files, [[size] for size in sizes], readers, colors, args.output)

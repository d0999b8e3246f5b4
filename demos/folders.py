"""Draw where the elements of a ZeRO-1 checkpoint are: in shards cut across the parameters, then in a universal
checkpoint cut along them, then on other ranks that read it. One parameter is followed through all three.

    python demos/folders.py ds_transformer_checkpoint/global_step100 --output out/folders.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Polygon, Rectangle

FOLLOWED, OTHERS, HEIGHT = "#56B4E9", ("0.92", "0.84"), 0.62


def draw_row(axis, y, label, holders, heads, colors, gap):
    """Holders of equal cuts of the elements, side by side, as long as what is in them: [[(parameter, elements)]].
    Returns [(left, right)] of the pieces of the parameter that is followed."""
    axis.text(-0.02, y + HEIGHT / 2, label, ha="right", va="center", fontsize=9)
    scale = (1 - gap * (len(holders) - 1)) / sum(n for parts in holders for _, n in parts)
    x, pieces = 0.0, []
    for parts, head in zip(holders, heads, strict=True):
        axis.text(x + scale * sum(n for _, n in parts) / 2, y + HEIGHT + 0.06, head, ha="center", fontsize=9)
        for name, n in parts:
            axis.add_patch(Rectangle((x, y), n * scale, HEIGHT, facecolor=colors[name], edgecolor="white", lw=0.8))
            words, narrow = name.removesuffix(".weight").replace("attn.", ""), n * scale < 0.05
            text = words if narrow else words.replace(".0.", ".0\n").replace(".1.", ".1\n")
            how = {"rotation": 90, "fontsize": 5.5} if narrow else {"fontsize": 7.5}
            axis.text(x + n * scale / 2, y + HEIGHT / 2, text, ha="center", va="center", **how)
            pieces += [(x, x + n * scale)] if colors[name] == FOLLOWED else []
            x += n * scale
        x += gap
    return pieces


def connect(axis, pieces, y, whole, whole_y):
    """From every piece to its part of the whole."""
    start, length = whole[0], sum(right - left for left, right in pieces)
    for left, right in pieces:
        part = (right - left) / length * (whole[1] - whole[0])
        corners = [(left, y), (right, y), (start + part, whole_y), (start, whole_y)]
        axis.add_patch(Polygon(corners, facecolor=FOLLOWED, alpha=0.25, edgecolor=FOLLOWED))
        start += part


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a ZeRO-1 checkpoint")
    parser.add_argument("--ranks", type=int, default=2, help="that read the universal checkpoint")
    parser.add_argument("--output", type=Path, default=Path("out/folders.png"))
    args = parser.parse_args()
    model = torch.load(args.checkpoint / "mp_rank_00_model_states.pt", mmap=True, weights_only=False)
    sizes = [(name, shape.numel()) for name, shape in model["param_shapes"][0].items()]  # the group of the matrices
    shards = []
    for rank in range(model["dp_world_size"]):
        path = args.checkpoint / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        state = torch.load(path, mmap=True, weights_only=False)["optimizer_state_dict"]
        shards.append([(name, part.numel) for name, part in state["param_slice_mappings"][0].items()])
    total, cut, at = sum(n for _, n in sizes), [[] for _ in range(args.ranks)], 0
    for name, n in sizes:  # the new ranks' slices of the same flat order
        for rank in range(args.ranks):
            low, high = total * rank // args.ranks, total * (rank + 1) // args.ranks
            part = min(at + n, high) - max(at, low)
            if part > 0:
                cut[rank].append((name, part))
        at += n
    everywhere = [name for parts in (*shards, *cut) for name, _ in parts]
    colors = {name: OTHERS[i % 2] for i, (name, _) in enumerate(sizes)}
    colors[max(colors, key=everywhere.count)] = FOLLOWED  # the one that is cut most

    figure, axis = plt.subplots(figsize=(10, 5), layout="constrained")
    heads = [f"rank {rank}'s file" for rank in range(len(shards))]
    above = draw_row(axis, 3, "ZeRO checkpoint:\none shard per rank", shards, heads, colors, 0.03)
    label = "universal checkpoint:\none folder per parameter"
    (whole,) = draw_row(axis, 1.5, label, [[size] for size in sizes], [""] * len(sizes), colors, 0.006)
    heads = [f"rank {rank} reads" for rank in range(args.ranks)]
    below = draw_row(axis, 0, f"resumed on {args.ranks} ranks", cut, heads, colors, 0.03)
    connect(axis, above, 3, whole, 1.5 + HEIGHT)
    connect(axis, below, HEIGHT, whole, 1.5)
    for y, text in ((2.56, "ds_to_universal.py"), (1.06, "--resume\n--universal_checkpoint")):
        axis.text(-0.02, y, text, fontsize=8.5, ha="right", va="center", color="0.3", family="monospace")
    axis.set_title("ZeRO cuts across the parameters; a universal checkpoint keeps each of them whole", fontsize=11)
    axis.set(xlim=(-0.24, 1.01), ylim=(-0.1, 3.95))
    axis.axis("off")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=200)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()

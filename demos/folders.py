"""Draw where the elements of a checkpoint's weight matrices are: in the ranks' shards, then in a universal checkpoint,
then on other ranks that read it. One parameter is followed through all three.

    python demos/folders.py ds_transformer_checkpoint/global_step100 --output out/folders.png
    python demos/folders.py ds_transformer_checkpoint/global_step100 --zero3 --output out/folders_zero3.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Polygon, Rectangle

FOLLOWED, OTHERS, HEIGHT = "#56B4E9", ("0.92", "0.80"), 0.55


def cut_across(sizes, ranks):
    """ZeRO-1 and 2: the parameters end to end, cut into one slice per rank: [[(parameter, elements)]]."""
    total, at, found = sum(n for _, n in sizes), 0, [[] for _ in range(ranks)]
    for name, n in sizes:
        for rank in range(ranks):
            low, high = total * rank // ranks, total * (rank + 1) // ranks
            if (part := min(at + n, high) - max(at, low)) > 0:
                found[rank].append((name, part))
        at += n
    return found


def cut_each(sizes, ranks):
    """ZeRO-3: each parameter is cut by itself."""
    return [[(name, -(-n // ranks)) for name, n in sizes]] * ranks


def saved(checkpoint, ranks):
    """What a ZeRO-1 checkpoint says of its own slices."""
    found = []
    for rank in range(ranks):
        path = checkpoint / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        state = torch.load(path, mmap=True, weights_only=False)["optimizer_state_dict"]
        found.append([(name, part.numel) for name, part in state["param_slice_mappings"][0].items()])
    return found


def draw_row(axis, y, label, holders, heads, colors, gap, heads_at=HEIGHT + 0.05):
    """Holders of cuts of the elements, side by side, as long as what is in them. Returns [(left, right)] of the pieces
    of the parameter that is followed."""
    above = y + HEIGHT + (0.27 if any(heads) and heads_at > 0 else 0.07)
    back = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axis.text(0, above, label, fontsize=10.5, weight="bold", bbox=back, zorder=3)
    scale = (1 - gap * (len(holders) - 1)) / sum(n for parts in holders for _, n in parts)
    x, pieces = 0.0, []
    for parts, head in zip(holders, heads, strict=True):
        axis.text(x + scale * sum(n for _, n in parts) / 2, y + heads_at, head, ha="center", fontsize=10, zorder=4)
        for name, n in parts:
            axis.add_patch(Rectangle((x, y), n * scale, HEIGHT, facecolor=colors[name], edgecolor="white", lw=0.8))
            words = name.removesuffix(".weight").replace("attn.", "").removeprefix("blocks.").replace(".", "\n")
            if n * scale > 0.085:
                axis.text(x + n * scale / 2, y + HEIGHT / 2, words, ha="center", va="center", fontsize=9)
            pieces += [(x, x + n * scale)] if colors[name] == FOLLOWED else []
            x += n * scale
        x += gap
    return pieces


def connect(axis, pieces, y, whole, whole_y, down):
    """From every piece to its part of the whole, or back, with an arrow."""
    start, length = whole[0], sum(right - left for left, right in pieces)
    for left, right in pieces:
        part = (right - left) / length * (whole[1] - whole[0])
        corners = [(left, y), (right, y), (start + part, whole_y), (start, whole_y)]
        axis.add_patch(Polygon(corners, facecolor=FOLLOWED, alpha=0.25, edgecolor=FOLLOWED))
        ends = [((left + right) / 2, y), (start + part / 2, whole_y)]
        tail, head = ends if down else ends[::-1]
        axis.annotate("", head, tail, arrowprops={"arrowstyle": "-|>", "color": "0.3", "lw": 1})
        start += part


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a ZeRO-1 checkpoint")
    parser.add_argument("--zero3", action="store_true", help="cut its parameters as ZeRO-3 does")
    parser.add_argument("--ranks", type=int, default=2, help="that read the universal checkpoint")
    parser.add_argument("--output", type=Path, default=Path("out/folders.png"))
    args = parser.parse_args()
    model = torch.load(args.checkpoint / "mp_rank_00_model_states.pt", mmap=True, weights_only=False)
    sizes = [(name, shape.numel()) for name, shape in model["param_shapes"][0].items()]  # the group of the matrices
    ranks, cut = model["dp_world_size"], cut_each if args.zero3 else cut_across
    shards, read = cut_each(sizes, ranks) if args.zero3 else saved(args.checkpoint, ranks), cut(sizes, args.ranks)
    everywhere = [name for parts in (*cut_across(sizes, ranks), *cut_across(sizes, args.ranks)) for name, _ in parts]
    colors = {name: OTHERS[i % 2] for i, (name, _) in enumerate(sizes)}
    colors[max(colors, key=everywhere.count)] = FOLLOWED  # the one that ZeRO-1 cuts most

    figure, axis = plt.subplots(figsize=(6, 4.8))
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=0.9)
    stage = "ZeRO-3" if args.zero3 else "ZeRO-1 or 2"
    heads = [f"rank {rank}'s file" for rank in range(ranks)]
    above = draw_row(axis, 3.4, f"{stage} checkpoint: one shard per rank", shards, heads, colors, 0.02)
    label = "universal checkpoint:\none folder per parameter"
    (whole,) = draw_row(axis, 1.7, label, [[size] for size in sizes], [""] * len(sizes), colors, 0.006)
    heads = [f"rank {rank} reads" for rank in range(args.ranks)]
    below = draw_row(axis, 0, f"then {args.ranks} ranks", read, heads, colors, 0.02, heads_at=-0.2)
    connect(axis, above, 3.4, whole, 1.7 + HEIGHT, down=True)
    connect(axis, below, HEIGHT, whole, 1.7, down=False)
    note = "Blue: one parameter, followed. Only weight matrices are shown,\n"
    note += "each with its fp32 weights, exp_avg and exp_avg_sq."
    axis.text(0, -0.65, note, fontsize=9.5)
    how = "cuts each parameter by itself" if args.zero3 else "cuts across the parameters"
    axis.set_title(f"{stage} {how};\na universal checkpoint keeps each one whole", fontsize=11)
    axis.set(xlim=(-0.005, 1.005), ylim=(-0.7, 4.45))
    axis.axis("off")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=200)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()

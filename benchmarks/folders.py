"""Draw where the elements of a ZeRO-1 checkpoint are: in shards cut across the parameters, then in a universal
checkpoint cut along them, then on other ranks that read it.

    python benchmarks/folders.py ds_transformer_checkpoint/global_step100 --output out/folders.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.patches import ConnectionPatch, Rectangle


def bar(axis, x, y, parts, width, colors):
    """Parts side by side from x: [(parameter, elements)]."""
    total = sum(n for _, n in parts)
    for name, n in parts:
        axis.add_patch(Rectangle((x, y), width * n / total, 0.62, facecolor=colors[name], edgecolor="white", lw=0.6))
        x += width * n / total


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
    palette = plt.get_cmap("tab20")
    colors = {name: palette(i % 20) for i, (name, _) in enumerate(sizes)}
    figure, axis = plt.subplots(figsize=(9, 4.6), layout="constrained")
    gap = 0.03

    def row(parts, y, label, names):
        width = (1 - gap * (len(parts) - 1)) / len(parts)
        for i, part in enumerate(parts):
            bar(axis, i * (width + gap), y, part, width, colors)
            axis.text(i * (width + gap) + width / 2, y + 0.68, names[i], ha="center", va="bottom", fontsize=8.5)
        axis.text(-0.02, y + 0.31, label, ha="right", va="center", fontsize=9)

    row(shards, 3, "ZeRO checkpoint\none shard per rank", [f"rank {r}'s shard" for r in range(len(shards))])
    row(cut, 0, f"resumed on {args.ranks} ranks\neach reads its part", [f"rank {r} holds" for r in range(args.ranks)])
    space, x = 0.006, 0.0
    scale = (1 - space * (len(sizes) - 1)) / total
    for name, n in sizes:
        axis.add_patch(Rectangle((x, 1.5), n * scale, 0.62, facecolor=colors[name], edgecolor="0.3", lw=0.8))
        if n > total * 0.04:
            short = name.removesuffix(".weight").replace(".attn", "\nattn")
            axis.text(x + n * scale / 2, 1.81, short, ha="center", va="center", fontsize=7.5)
        x += n * scale + space
    axis.text(-0.02, 1.81, "universal checkpoint\none folder per parameter", ha="right", va="center", fontsize=9)
    for high, low, text in ((2.92, 2.2, "ds_to_universal.py"), (1.42, 0.7, "--resume --universal_checkpoint")):
        axis.add_artist(ConnectionPatch((0.5, high), (0.5, low), "data", "data", arrowstyle="-|>", color="0.4"))
        axis.text(0.51, (high + low) / 2, text, fontsize=8.5, va="center", color="0.3", family="monospace")
    axis.set(xlim=(-0.26, 1.02), ylim=(-0.2, 4.05))
    axis.axis("off")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=130)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()

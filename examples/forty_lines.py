"""python forty_lines.py checkpoints/global_step100 makes checkpoints/global_step100_universal."""

import sys
from pathlib import Path

import torch


def save(content, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


source = Path(sys.argv[1])
output = source.with_name(f"{source.name}_universal")
model = torch.load(min(source.glob("*mp_rank_00_model_states.pt")), weights_only=False)
files = source.glob("*zero_pp_rank_*_mp_rank_00_optim_states.pt")
files = sorted(files, key=lambda file: int(file.name.split("zero_pp_rank_")[1].split("_")[0]))
shards = [torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files]
zero_3 = "fp32_flat_groups" in shards[0]
weights = "fp32_flat_groups" if zero_3 else "single_partition_of_fp32_groups"
moments = "optimizer_state_dict" if zero_3 else "base_optimizer_state"

for group, shapes in enumerate(model["param_shapes"]):
    held = [{"fp32": shard[weights][group].detach(), **shard[moments]["state"][group]} for shard in shards]
    step = held[0].pop("step")
    for state in held[0]:  # fp32, exp_avg, exp_avg_sq
        slices, at = [rank[state] for rank in held], 0
        for name, shape in shapes.items():
            share = -(-shape.numel() // len(slices))  # of each rank, rounded up
            if zero_3:  # every parameter is cut by itself, and padded at its end
                tensor = torch.cat([flat[at : at + share] for flat in slices])[: shape.numel()]
            else:  # the whole group is cut, wherever that falls, and padded at its end
                tensor = torch.cat(slices)[at : at + shape.numel()].clone()
            at += share if zero_3 else shape.numel()
            save({"param": tensor.view(shape), "cat_dim": 0}, output / "zero" / name / f"{state}.pt")
            save(step, output / "zero" / name / "step.pt")

groups = shards[0][moments]["param_groups"]
shared = {key: value for key, value in groups[0].items() if all(group[key] == value for group in groups)}
cut = (weights, moments, "param_slice_mappings")
rest = {key: value for key, value in shards[0].items() if key not in cut} | {"param_groups": groups}
rest["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": [shared]}  # what ZeRO-3 looks for
save({"ds_version": model["ds_version"], **rest}, output / "zero" / "optimizer_state.pt")
for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):  # ZeRO-1/2's name, ZeRO-3's
    save(model | {"module": {}, "frozen_param_fragments": None}, output / file)
(source.parent / "latest_universal").write_text(output.name)

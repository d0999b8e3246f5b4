"""examples/megatron_info.py on checkpoints that Megatron-DeepSpeed itself wrote, in tests/data: 2 layers of width 16
with 4 heads, bf16, ZeRO-1, tensor-parallel degree 2. What a rank computes with its shard, and one with the whole."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from helpers import ROOT

import universal
from universal import torch_file

# its archive in tests/data, the files with the weights of each rank, in which dicts, and the first layer's name there
CHECKPOINTS = [
    ("megatron-tp2-pp2-dp2", "layer_02-model_{:02}-model_states.pt", (), "2."),
    ("megatron-tp2-dp2-no-pipeline", "mp_rank_{:02}_model_states.pt", ("language_model", "encoder"), "layers.0."),
]


@pytest.fixture(params=CHECKPOINTS, ids=lambda checkpoint: checkpoint[0])
def checkpoint(request, tmp_path):
    """(folder, name of the first layer, [the layer's parameters on each rank])"""
    name, files, inside, layer = request.param
    with tarfile.open(ROOT / "tests" / "data" / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path)  # of this repository
    folder, ranks = tmp_path / "global_step2", []
    for rank in range(2):
        held, _ = torch_file.load(folder / files.format(rank))  # without Megatron, which torch.load() would import
        for key in ("module", *inside) if inside else ():
            held = held[key]
        data = {key.removeprefix(layer): (t.size, bytes_of(t)) for key, t in held.items()}
        ranks.append({key: torch.frombuffer(d, dtype=torch.bfloat16).view(size) for key, (size, d) in data.items()})
    return folder, ".".join((*inside, layer)), ranks


def bytes_of(tensor):
    return bytearray(b"".join(bytes(chunk) for chunk, _ in torch_file.Slices.of(tensor).chunks(torch_file.Reader())))


def edit(folder, **changes):
    """Change the checkpoint's universal_checkpoint_info."""
    path = folder / "mp_rank_00_model_states.pt"
    content, _ = torch_file.load(path)
    content["universal_checkpoint_info"] |= changes
    (folder / "new").mkdir()
    torch_file.write_pt(folder / "new" / path.name, *torch_file.pickled(content), torch_file.Reader())
    os.replace(folder / "new" / path.name, path)
    (folder / "new").rmdir()


def add(folder):
    command = [sys.executable, str(ROOT / "examples" / "megatron_info.py"), str(folder)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return result.stdout


def convert(folder, output):
    universal.convert(folder, folder.parent / output)  # Megatron's own classes are known
    return lambda name: torch.load(folder.parent / output / "zero" / name / "fp32.pt", weights_only=False)


def attention(x, layer, heads):
    """What Megatron's layer does between its two matrices: thirds for Q, K and V, then the heads."""
    weight, bias = (layer[f"self_attention.query_key_value.{kind}"].double() for kind in ("weight", "bias"))
    q, k, v = (t.view(*x.shape[:2], heads, -1).transpose(1, 2) for t in (x @ weight.T + bias).chunk(3, dim=-1))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2)


def test_query_key_value(checkpoint):
    """One rank's attention with the whole is that of two ranks with their halves; without the entries it is another."""
    folder, name, ranks = checkpoint
    x = torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = torch.cat([attention(x, rank, 2) for rank in ranks], dim=-1)

    def difference(output):
        read = convert(folder, output)
        whole = {kind: read(f"{name}self_attention.query_key_value.{kind}") for kind in ("weight", "bias")}
        whole = {f"self_attention.query_key_value.{kind}": t["param"].bfloat16() for kind, t in whole.items()}
        return (attention(x, whole, 4) - wanted).abs().max().item() / wanted.abs().max().item()

    assert difference("as_it_is") > 0.1
    assert "query_key_value" in add(folder)
    assert difference("completed") < 1e-12
    assert add(folder) == "nothing is missing\n"


def test_rest_of_the_file_stays(checkpoint):
    """The entries are all that changes."""
    folder, _, _ = checkpoint
    path = folder / "mp_rank_00_model_states.pt"

    def content():
        state, _ = torch_file.load(path)
        info = state.pop("universal_checkpoint_info")
        data, tensors = torch_file.pickled(state)
        return info, data, [torch_file.Reader().read(record, 0, record.nbytes) for record in tensors]

    (info, *before), others = content(), {p: p.read_bytes() for p in folder.iterdir() if p != path}
    add(folder)
    more, *after = content()
    assert before == after and others == {p: p.read_bytes() for p in folder.iterdir() if p != path}
    assert more.keys() - info.keys() == {"parameter_with_sub_params", "sub_param_shard_widths"}
    assert {key: more[key] for key in info} == info


def test_row_parallel(checkpoint):
    """Saved at degree 1 Megatron leaves these patterns out. Here they are taken out of a checkpoint of degree 2."""
    folder, name, ranks = checkpoint
    edit(folder, parameter_with_row_parallelism_patterns=[])
    dense = "self_attention.dense.weight"
    assert convert(folder, "as_it_is")(name + dense)["param"].shape == (32, 8)
    assert "dense_4h_to_h" in add(folder)
    whole = convert(folder, "completed")(name + dense)
    assert whole["cat_dim"] == 1
    assert torch.equal(whole["param"].bfloat16(), torch.cat([rank[dense] for rank in ranks], dim=1))


def test_padding_of_the_vocabulary(checkpoint):
    """Rows beyond the vocabulary are trained, too; with the vocabulary taken for 250 of the 256, they are kept."""
    folder, _, _ = checkpoint
    edit(folder, original_vocab_size=250)
    name = next(iter(torch_file.load(folder / "mp_rank_00_model_states.pt")[0]["param_shapes"][0]))
    lost = convert(folder, "as_it_is")(name)["param"]
    assert "original_vocab_size: 256, was 250" in add(folder)
    kept = convert(folder, "completed")(name)["param"]
    assert (lost.shape, kept.shape) == ((250, 16), (256, 16)) and torch.equal(kept[:250], lost)
    assert kept[250:].any()


def test_refusals(checkpoint, tmp_path):
    folder, _, _ = checkpoint
    for arguments in ([], [str(tmp_path)]):
        command = [sys.executable, str(ROOT / "examples" / "megatron_info.py"), *arguments]
        assert subprocess.run(command, capture_output=True).returncode == 1
    content = Path(folder, "mp_rank_00_model_states.pt").read_bytes()
    Path(folder, "mp_rank_00_model_states.pt").write_bytes(content[:1000])
    with pytest.raises(subprocess.CalledProcessError):
        add(folder)

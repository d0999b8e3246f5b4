"""Makes a Llama of two layers, its tokenizer of bytes, and rows to train it on: tiny_llama.py FOLDER. Run with the
transformers of whoever is going to read them."""

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

ROWS = 288
folder = Path(sys.argv[1])
set_seed(1)

letters = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
)  # fmt: skip
tokenizer.save_pretrained(folder / "model")

config = LlamaConfig(
    vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    bos_token_id=0, eos_token_id=1, pad_token_id=1,
)  # fmt: skip
LlamaForCausalLM(config).save_pretrained(folder / "model")

rows = []
for _ in range(ROWS):
    a, b = random.randrange(1000), random.randrange(1000)
    rows.append({"instruction": f"What is {a} and {b}?", "input": "", "output": f"{a} + {b} = {a + b}"})
(folder / "rows.json").write_text(json.dumps(rows))
(folder / "dataset_info.json").write_text('{"rows": {"file_name": "rows.json"}}')

"""Makes a LoRA adapter for the tiny model, so that none is downloaded.

Usage: make_tiny_adapter.py FOLDER [SEED]

Seeded random weights for the attention's queries and values, large enough that the adapter
continues a prompt with other tokens than the model itself.
"""

import json
import os
import sys

import torch
from safetensors.torch import save_file

from make_tiny_model import HIDDEN, LAYERS

RANK = 8
TARGETS = {"q_proj": HIDDEN, "v_proj": HIDDEN // 2}


def make_weights(seed):
    torch.manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for target, width in TARGETS.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN) * 0.2
            weights[f"{name}.lora_B.weight"] = torch.randn(width, RANK) * 0.2
    return weights


def main(folder, seed=1):
    os.makedirs(folder, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(TARGETS),
    }
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=1)
    # Last: its presence says that the folder is complete.
    weights = os.path.join(folder, "adapter_model.safetensors")
    save_file(make_weights(int(seed)), weights + ".part", metadata={"format": "pt"})
    os.replace(weights + ".part", weights)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Makes a small language model from nothing, so that no model is downloaded.

Usage: make_tiny_model.py FOLDER [LAYERS HIDDEN INTERMEDIATE]

A Qwen2, of two layers unless it is to be larger, with seeded random weights, and a
byte-level BPE tokenizer trained on the standard library's own sources. It talks nonsense, but the same
nonsense every time, and engines treat it like any other model. HIDDEN is a multiple of 128.
"""

import glob
import json
import os
import sys
import sysconfig

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LAYERS, HIDDEN, INTERMEDIATE = 2, 256, 512
HEAD = 64  # vLLM's CPU attention supports heads of 32, 64, 80, 96, ... dimensions
VOCABULARY = 2048
POSITIONS = 8192

PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sources = sorted(glob.glob(os.path.join(sysconfig.get_paths()["stdlib"], "*.py")))[:80]
    tokenizer.train(
        sources,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[PAD, IM_START, IM_END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def make_weights(vocabulary, layers, hidden, intermediate):
    torch.manual_seed(0)
    kv_hidden = hidden // 2

    def normal(*shape, scale=0.08):
        return (torch.randn(*shape) * scale).to(torch.bfloat16)

    def ones():
        return torch.ones(hidden, dtype=torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": normal(vocabulary, hidden, scale=0.5),
        "model.norm.weight": ones(),
    }
    for layer in range(layers):
        attention = f"model.layers.{layer}.self_attn"
        mlp = f"model.layers.{layer}.mlp"
        weights[f"{attention}.q_proj.weight"] = normal(hidden, hidden)
        weights[f"{attention}.q_proj.bias"] = normal(hidden)
        for name in ("k_proj", "v_proj"):
            weights[f"{attention}.{name}.weight"] = normal(kv_hidden, hidden)
            weights[f"{attention}.{name}.bias"] = normal(kv_hidden)
        weights[f"{attention}.o_proj.weight"] = normal(hidden, hidden)
        weights[f"{mlp}.gate_proj.weight"] = normal(intermediate, hidden)
        weights[f"{mlp}.up_proj.weight"] = normal(intermediate, hidden)
        weights[f"{mlp}.down_proj.weight"] = normal(hidden, intermediate)
        weights[f"model.layers.{layer}.input_layernorm.weight"] = ones()
        weights[f"model.layers.{layer}.post_attention_layernorm.weight"] = ones()
    return weights


def main(folder, layers=LAYERS, hidden=HIDDEN, intermediate=INTERMEDIATE):
    os.makedirs(folder, exist_ok=True)

    def write_json(name, value):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)

    tokenizer = make_tokenizer()
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    end, pad = tokenizer.token_to_id(IM_END), tokenizer.token_to_id(PAD)
    write_json(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": IM_END,
            "pad_token": PAD,
            "model_max_length": POSITIONS,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )
    write_json("generation_config.json", {"eos_token_id": end, "pad_token_id": pad})
    write_json(
        "config.json",
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // HEAD,
            "num_key_value_heads": hidden // HEAD // 2,
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": POSITIONS,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": pad,
            "use_cache": True,
        },
    )
    # Last: its presence says that the folder is complete.
    weights = os.path.join(folder, "model.safetensors")
    made = make_weights(tokenizer.get_vocab_size(), layers, hidden, intermediate)
    save_file(made, weights + ".part", metadata={"format": "pt"})
    os.replace(weights + ".part", weights)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

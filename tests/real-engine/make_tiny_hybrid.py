"""Makes the configuration of a tiny model, whose weights the engine makes up.

Usage: make_tiny_hybrid.py FOLDER KIND TOKENIZER_FOLDER

KIND is `gpt_oss` (a sliding window and full attention in turn), `gemma3` (five sliding windows for one
full attention) or `qwen3_next` (three linear attentions for one full attention), or `draft`: a layer that
drafts for the tiny model. The tokenizer is copied.
"""

import json
import os
import shutil
import sys

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"

COMMON = {
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "attention_bias": False,
    "tie_word_embeddings": False,
}

KINDS = {
    "draft": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 256,
        "intermediate_size": 512,
        "head_dim": 64,
        "rope_theta": 10000.0,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, FULL] * 2,
        "sliding_window": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "router_aux_loss_coef": 0.9,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "layer_types": [SLIDING] * 5 + [FULL],
        "sliding_window": 100,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "layer_types": [LINEAR] * 3 + [FULL],
        "full_attention_interval": 4,
        "num_key_value_heads": 4,
        # The CPU kernel of linear attention takes heads of this size.
        "head_dim": 128,
        "linear_num_value_heads": 1,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e7,
    },
}


def main(folder, kind, tokenizer):
    os.makedirs(folder, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(tokenizer, file), folder)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(COMMON | KINDS[kind], file, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])

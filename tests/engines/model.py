#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""model.py llama|hybrid|swa|mla|yarn|bytes FOLDER: a tiny model of seeded random weights with its
tokenizer. hybrid has a state-space mixer beside attention in each layer (Falcon-H1), swa a
sliding window in four of six (Gemma 3), mla one latent for all heads (DeepSeek), yarn the same with
scaled positions, as DeepSeek has them.
The weights are wide, so that greedy tokens depend on the prompt."""
import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
import torch  # noqa: E402
import transformers as tf  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

VOCAB = 512


def tokenizer(folder):
    """A token for each byte; the rest of the vocabulary has names."""
    words = ["<s>", "</s>", "<unk>"] + sorted(pre_tokenizers.ByteLevel.alphabet())
    words += ["<%d>" % i for i in range(len(words), VOCAB)]
    tok = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tf.PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>",
                               unk_token="<unk>", pad_token="<s>").save_pretrained(folder)


def model(kind):
    common = dict(vocab_size=VOCAB, num_hidden_layers=4, head_dim=32, bos_token_id=0,
                  eos_token_id=1, pad_token_id=0, tie_word_embeddings=False)
    if kind == "bytes":
        return tf.LlamaForCausalLM(tf.LlamaConfig(
            hidden_size=128, intermediate_size=256, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.6,
            **common))
    common.update(hidden_size=256, intermediate_size=512, num_attention_heads=8,
                  num_key_value_heads=4, max_position_embeddings=2048, initializer_range=0.2)
    if kind == "long":
        common.update(max_position_embeddings=8704)
    if kind in ("llama", "long"):
        return tf.LlamaForCausalLM(tf.LlamaConfig(**common))
    if kind == "swa":
        common.update(num_hidden_layers=6, tie_word_embeddings=True)
        return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(
            sliding_window=96, layer_types=["sliding_attention"] * 2 + ["full_attention"] +
            ["sliding_attention"] * 2 + ["full_attention"], query_pre_attn_scalar=32, **common))
    if kind in ("mla", "yarn"):
        del common["head_dim"]
        common.update(num_key_value_heads=8)
        if kind == "yarn":
            common["rope_scaling"] = dict(
                rope_type="yarn", factor=2.0, original_max_position_embeddings=1024, beta_fast=32,
                beta_slow=1, mscale=0.707, mscale_all_dim=0.707)
        return tf.DeepseekV2ForCausalLM(tf.DeepseekV2Config(
            kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=32,
            v_head_dim=32, first_k_dense_replace=4, n_routed_experts=4, n_shared_experts=1,
            num_experts_per_tok=1, moe_intermediate_size=64, **common))
    return tf.FalconH1ForCausalLM(tf.FalconH1Config(
        mamba_d_ssm=512, mamba_n_heads=8, mamba_d_head=64, mamba_n_groups=1,
        mamba_d_state=64, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=64,
        mamba_rms_norm=True, num_logits_to_keep=1, **common))


def main():
    kind, folder = sys.argv[1:]
    os.makedirs(folder, exist_ok=True)
    torch.manual_seed(7)
    made = model(kind).to(torch.float32).eval()
    made.generation_config.eos_token_id = 1
    made.save_pretrained(folder, safe_serialization=True)
    tokenizer(folder)


main()

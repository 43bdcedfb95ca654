#!/usr/bin/env python3
"""Writes tests/hf_variants: tiny random Hugging Face models, one for each option of config.json that few published models
use, with the logits, loss and gradients that transformers computes (CPU, f32, eager attention).

The format is that of tests/golden/hf. Needs `pip install torch transformers`.
Usage: scripts/hf_variants.py [FOLDER [CASE...]]

With names of cases it writes only those and leaves the others as they are."""
import pathlib, shutil, sys

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent / "tests/hf_variants")

SIZES = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64)
GPT2 = dict(vocab_size=40, n_embd=16, n_layer=3, n_head=2, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
DEEPSEEK = SIZES | dict(num_key_value_heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4,
    moe_intermediate_size=8, n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2, first_k_dense_replace=1,
    n_shared_experts=1, num_nextn_predict_layers=0)
QWEN = SIZES | dict(num_key_value_heads=1, head_dim=8, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
LLAMA = SIZES | dict(num_key_value_heads=1)
MIXTRAL = LLAMA | dict(num_local_experts=4)
PHI3 = SIZES | dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=32, pad_token_id=None, original_max_position_embeddings=6)
GPT_OSS = LLAMA | dict(head_dim=8, num_local_experts=4, sliding_window=5)


def yarn(**options):
    return dict(rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=1e4) | options)


def longrope(half, **options):
    factors = [1.0 + 0.25 * i for i in range(half)]
    return dict(rope_parameters=dict(rope_type="longrope", short_factor=factors, long_factor=[2.0 * f for f in factors], rope_theta=1e4) | options)


CASES = {
    "gpt2_unscaled_by_layer": ("GPT2", GPT2 | dict(scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True)),
    "gpt2_scaled_by_layer_upcast": ("GPT2", GPT2 | dict(scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True)),
    "gpt2_cross_attention": ("GPT2", GPT2 | dict(add_cross_attention=True)),
    "deepseek_v3_top3_of_2_groups_unnormalized": ("DeepseekV3", DEEPSEEK | dict(num_experts_per_tok=3, norm_topk_prob=False)),
    "deepseek_v3_top1_normalized": ("DeepseekV3", DEEPSEEK | dict(num_experts_per_tok=1)),
    "deepseek_v3_top1_unnormalized": ("DeepseekV3", DEEPSEEK | dict(num_experts_per_tok=1, norm_topk_prob=False)),
    "deepseek_v3_top5_of_3_groups": ("DeepseekV3", DEEPSEEK | dict(num_experts_per_tok=5, topk_group=3)),
    "deepseek_v3_no_groups_unnormalized": ("DeepseekV3", DEEPSEEK | dict(n_group=1, topk_group=1, norm_topk_prob=False)),
    "deepseek_v3_no_dense_layer_no_shared_expert": ("DeepseekV3", DEEPSEEK | dict(first_k_dense_replace=0, n_shared_experts=0)),
    "deepseek_v3_all_layers_dense": ("DeepseekV3", DEEPSEEK | dict(first_k_dense_replace=2)),
    "deepseek_v3_yarn_mscale_all_dim_only": ("DeepseekV3", DEEPSEEK | yarn(mscale_all_dim=1.0)),
    "deepseek_v3_yarn_mscale_only": ("DeepseekV3", DEEPSEEK | yarn(mscale=0.8)),
    "deepseek_v3_yarn_attention_factor": ("DeepseekV3", DEEPSEEK | yarn(attention_factor=1.3, mscale_all_dim=0.7)),
    "deepseek_v3_linear_mscale_all_dim": ("DeepseekV3", DEEPSEEK | dict(rope_parameters=dict(rope_type="linear", factor=4.0, mscale_all_dim=1.0, rope_theta=1e4))),
    "llama_yarn_null_truncate_zero_betas": ("Llama", LLAMA | yarn(truncate=None, beta_fast=0, beta_slow=0)),
    "llama_yarn_null_factor": ("Llama", LLAMA | yarn(factor=None)),
    "llama_yarn_outer_original_positions": ("Llama", LLAMA | yarn() | dict(original_max_position_embeddings=8)),
    "gemma3_yarn_nested_truncate": ("Gemma3", LLAMA | dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(full_attention=yarn(truncate=False, beta_fast=4)["rope_parameters"], sliding_attention=dict(rope_type="default", rope_theta=1e3)))),
    "qwen3_moe_top1_normalized": ("Qwen3Moe", QWEN | dict(num_experts_per_tok=1, norm_topk_prob=True)),
    "qwen3_moe_sparse_step_and_mlp_only": ("Qwen3Moe", QWEN | dict(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[1, 9])),
    "qwen3_moe_all_layers_dense": ("Qwen3Moe", QWEN | dict(mlp_only_layers=[0, 1])),
    "mixtral_top1_jitter": ("Mixtral", MIXTRAL | dict(num_experts_per_tok=1, router_jitter_noise=0.1)),
    "gpt_oss_top1_plain_rope": ("GptOss", GPT_OSS | dict(num_experts_per_tok=1, rope_parameters=dict(rope_type="default", rope_theta=1e3))),
    "mistral_window_head_dim": ("Mistral", LLAMA | dict(head_dim=12, sliding_window=4)),
    "mistral_no_window": ("Mistral", LLAMA | dict(sliding_window=None)),
    "phi3_long_factors": ("Phi3", PHI3 | longrope(4)),
    "phi3_short_factors_partial_rotary": ("Phi3", PHI3 | longrope(2, partial_rotary_factor=0.5) | dict(original_max_position_embeddings=16, tie_word_embeddings=True)),
    "phi3_default_rope_window": ("Phi3", PHI3 | dict(sliding_window=3)),
    "olmo2_grouped_queries": ("Olmo2", SIZES | dict(num_attention_heads=4, num_key_value_heads=2)),
    "olmo2_bias_yarn": ("Olmo2", SIZES | yarn() | dict(attention_bias=True, tie_word_embeddings=True)),
    "smollm3_every_fourth_without_rope": ("SmolLM3", LLAMA | dict(num_hidden_layers=5, pad_token_id=None)),
    "smollm3_listed_layers_window": ("SmolLM3", LLAMA | dict(num_hidden_layers=3, no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=3,
        attention_bias=True, mlp_bias=True, tie_word_embeddings=False, pad_token_id=None)),
}
CLASSES = {"GPT2": ("GPT2LMHeadModel", "GPT2Config"), "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig")}


def randomize(model):
    """Weights with activations of O(1), no gain 1 and no bias 0."""
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name or not p.is_floating_point():
            continue
        if "e_score_correction_bias" in name or "sinks" in name:
            p.data.normal_(0, 0.3)
        elif p.dim() == 1:
            p.data.add_(0.1 * torch.randn_like(p))
        else:
            p.data.normal_(0, 0.25 if "embed" in name or "wte" in name else 0.35)


def on_disk(name, grad, kind):
    """The gradient of a parameter under the names of the files: experts that transformers fuses are apart there."""
    moe = {"DeepseekV3": ("gate_proj", "up_proj", "down_proj"), "Qwen3Moe": ("gate_proj", "up_proj", "down_proj"), "Mixtral": ("w1", "w3", "w2")}
    if kind == "Mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if kind not in moe or ".experts." not in name:
        return {name: grad}
    stem, (gate, up, down) = name.split(".experts.")[0], moe[kind]
    parts = {}
    for e, g in enumerate(grad):
        named = zip((gate, up), g.chunk(2)) if name.endswith("gate_up_proj") else [(down, g)]
        parts |= {f"{stem}.experts.{e}.{n}.weight": x for n, x in named}
    return parts


chosen = sys.argv[2:] or list(CASES)
if not sys.argv[2:]:
    shutil.rmtree(out, ignore_errors=True)
for seed, (name, (kind, options)) in enumerate(CASES.items()):
    if name not in chosen:
        continue
    torch.manual_seed(seed)
    model_class, config_class = CLASSES.get(kind, (f"{kind}ForCausalLM", f"{kind}Config"))
    config = getattr(hf, config_class)(**options)
    config._attn_implementation = "eager"
    model = getattr(hf, model_class)(config).float().eval()
    randomize(model)
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    ids = torch.randint(0, 40, (2, 9))
    labels = ids.clone()
    labels[0, 3], labels[1, :4] = -100, -100
    result = model(input_ids=ids, labels=labels)
    result.loss.backward()
    tensors = dict(input_ids=ids, labels=labels, logits=result.logits.detach(), loss=result.loss.detach())
    stored = load_file(folder / "model.safetensors")
    for parameter, p in model.named_parameters():
        if p.grad is None:
            continue
        for n, g in on_disk(parameter, p.grad, kind).items():
            assert stored[n].shape == g.shape, n
            tensors[f"grad.{n}"] = g.contiguous().clone()
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "expected.safetensors")
    print(f"{name}: loss {result.loss.item():.4f}, {sum(p.numel() for p in model.parameters())} parameters")
print(f"transformers {hf.__version__}, torch {torch.__version__}")

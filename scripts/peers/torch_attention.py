#!/usr/bin/env python3
"""PyTorch's attention by cuDNN, causal, bf16, with a flushed L2 cache: median milliseconds and TFLOP/s of forward and backward.
Beside `ferrotron bench kernels --filter attention` of the same shapes. Needs PyTorch on a CUDA GPU.
Usage: torch_attention.py SHAPE...      SHAPE: batch,heads,key heads,tokens,channels of q and k[,channels of v]"""
import statistics, sys
import torch, torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if len(sys.argv) < 2:
    sys.exit(__doc__)
cache = torch.empty(64 << 20, device="cuda")


def median_ms(f, repeats=16, warmup=4):
    times = []
    for _ in range(warmup + repeats):
        cache.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        f()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[warmup:])


for shape in sys.argv[1:]:
    batch, heads, key_heads, tokens, d_qk, *rest = map(int, shape.split(","))
    d_v = rest[0] if rest else d_qk
    new = lambda n, d: torch.randn(batch, tokens, n, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    q, k, v = new(heads, d_qk), new(key_heads, d_qk), new(key_heads, d_v)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        forward = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != key_heads)
        out = forward()
        dout = torch.randn_like(out)
        seen = batch * heads * tokens * tokens / 2
        for name, flops, f in (
            ("forward", 2 * seen * (d_qk + d_v), forward),
            ("backward", 2 * seen * (3 * d_qk + 2 * d_v), lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)),
        ):
            ms = median_ms(f)
            print(f"{shape:28} {name:9} {ms:8.3f} ms {flops / ms / 1e9:6.1f} TFLOP/s", flush=True)

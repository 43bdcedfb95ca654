#!/usr/bin/env python3
"""torch._grouped_mm on the experts' shapes of the yardstick moe-8l (128 experts, 131072 rows), equal and skewed loads: TFLOP/s of
the output (weights as [E, n, k] and, as the yardstick has them, [E, k, n]), the input gradient and the weight gradient (bf16;
ours is f32), and of the output in FP8 with a scale for each row. Beside `ferrotron bench kernels --work llama-1b --filter experts`,
which has the same shapes. Needs PyTorch and Triton on a Hopper card."""
import torch, triton

EXPERTS, ROWS = 128, 131072
bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn


def loads(skewed):
    """Rows of each expert: as many for all; or half for one, none for three in ten, and the rest in unequal parts."""
    parts = [(0 if e % 10 < 3 or e == 5 else 1 + e * 7 % 13) if skewed else 1 for e in range(EXPERTS)]
    shared = ROWS - ROWS // 2 if skewed else ROWS
    counts = [shared * p // sum(parts) for p in parts]
    counts[5] += ROWS - sum(counts)
    return counts


def rate(flops, f):
    try:
        return f"{flops / triton.testing.do_bench(f, warmup=50, rep=200, return_mode='median') / 1e9:.0f}"
    except Exception as e:
        return f"failed: {str(e)[:60]}"


for skewed in (False, True):
    offs = torch.tensor(loads(skewed)).cumsum(0).to(torch.int32).cuda()
    for name, k, n in (("up", 2048, 1536), ("down", 768, 2048)):
        x, dy = (torch.randn(ROWS, w, device="cuda", dtype=bf16) for w in (k, n))
        w = torch.randn(EXPERTS, n, k, device="cuda", dtype=bf16) * 0.02
        turned, flops = w.transpose(-2, -1).contiguous(), 2 * ROWS * k * n
        row = {
            "output": lambda: torch._grouped_mm(x, w.transpose(-2, -1), offs=offs),
            "output [k, n]": lambda: torch._grouped_mm(x, turned, offs=offs),
            "input gradient": lambda: torch._grouped_mm(dy, w, offs=offs),
            "weight gradient": lambda: torch._grouped_mm(dy.t(), x, offs=offs),
        }
        x8, w8, ones = x.to(fp8), w.to(fp8), (torch.ones(ROWS, device="cuda"), torch.ones(EXPERTS, n, device="cuda"))
        row["output, FP8"] = lambda: torch._scaled_grouped_mm(
            x8, w8.transpose(-2, -1), *ones, offs=offs, out_dtype=bf16, use_fast_accum=True)
        print(name, "skewed" if skewed else "equal", ", ".join(f"{what} {rate(flops, f)}" for what, f in row.items()), flush=True)

//! GEMMs of linear layers.

use super::{KernelCase, Sizes, attention_linears, case, empty, pass, random};
use crate::bench::KernelWork;
use ferrotron_kernels::Gemm;
use ferrotron_tensor::DType;

/// Fprop `y = x·Wᵀ`, dgrad `dx = dy·W` and wgrad `dW = dyᵀ·x` of every linear layer of a layer, and of the LM head.
pub(super) fn cases(z: &Sizes) -> Vec<KernelCase> {
    let (m, t, dtype) = (&z.model, z.tokens, z.dtype);
    let up = if m.gated { 2 * m.ffn } else { m.ffn };
    let attention = attention_linears(m);
    let rest = [("mlp_up", m.hidden, up), ("mlp_down", m.ffn, m.hidden), ("head", m.hidden, m.vocab)];
    let mut out = Vec::new();
    for (place, i, o) in attention.into_iter().chain(rest) {
        let flops = KernelWork::Flops(2.0 * t as f64 * i as f64 * o as f64);
        // Operands as stored, which are transposed, and the result with its dtype.
        let kinds = [
            ("forward", [[t, i], [o, i], [t, o]], (false, true), dtype),
            ("input_grad", [[t, o], [o, i], [t, i]], (false, false), dtype),
            ("weight_grad", [[t, o], [t, i], [o, i]], (true, false), DType::F32),
        ];
        for (kind, [a, b, c], (trans_a, trans_b), result) in kinds {
            let mkn = match kind {
                "forward" => [t, i, o],
                "input_grad" => [t, o, i],
                _ => [o, t, i],
            };
            let shape = mkn.map(|n| n.to_string()).join("x");
            let made = case(format!("gemm.{place}.{kind}"), shape, flops, move |rank| {
                let (a, b) = (random(rank, &a, dtype)?, random(rank, &b, dtype)?);
                let c = empty(rank, &c, result)?;
                Ok(Box::new(move |rank| {
                    let g = Gemm { a: &a, trans_a, b: &b, trans_b, bias: None, accumulate: false, c: &c };
                    Ok(rank.kernels.gemm(&rank.compute, &g)?)
                }))
            });
            out.push(made.with_gemm(pass(kind), 1, mkn));
        }
    }
    out
}

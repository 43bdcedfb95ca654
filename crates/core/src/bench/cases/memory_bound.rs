//! Kernels that read and write every row once: memory bandwidth is their ceiling.

use super::{KernelCase, Run, Sizes, case, empty, random};
use crate::Result;
use crate::bench::KernelWork;
use crate::model::config::{Activation, NormKind};
use ferrotron_engine::Rank;
use ferrotron_kernels::rope_tables::RopeTables;
use ferrotron_kernels::{
    Act, ActBackward, ActForward, CrossEntropy, EmbeddingBackward, EmbeddingForward, LabelSmoothing, Norm,
    NormBackward, NormForward, ResidualAdd, Rope, RopeStyle,
};
use ferrotron_tensor::{Category, DType};

/// Bytes of `tensors` tensors `[tokens, width]`.
fn bytes(z: &Sizes, width: usize, tensors: usize) -> KernelWork {
    KernelWork::Bytes((z.tokens * width * tensors * z.dtype.size()) as f64)
}

pub(super) fn cases(z: &Sizes) -> Vec<KernelCase> {
    let mut out = Vec::new();
    let c = &z.model;
    let h = format!("{}x{}", z.tokens, c.hidden);
    let add = |out: &mut Vec<KernelCase>,
               name: &str,
               shape: &str,
               work,
               prepare: fn(&Rank, &Sizes) -> Result<Run>| {
        let z = z.clone();
        out.push(case(name, shape, work, move |rank| prepare(rank, &z)));
    };
    add(&mut out, "norm.forward", &h, bytes(z, c.hidden, 2), |r, z| norm(r, z, NormPass::Forward));
    add(&mut out, "norm.add_forward", &h, bytes(z, c.hidden, 4), |r, z| norm(r, z, NormPass::AddForward));
    add(&mut out, "norm.backward", &h, bytes(z, c.hidden, 4), |r, z| norm(r, z, NormPass::Backward));
    if c.rope(0).is_some() {
        let heads = c.heads + c.kv_heads;
        let shape = format!("{}x{heads}x{}", z.tokens, c.head_dim);
        add(&mut out, "rope", &shape, bytes(z, heads * c.head_dim, 2), rope);
    }
    let f = format!("{}x{}", z.tokens, c.ffn);
    let (forward, backward) = if c.gated { (3, 5) } else { (2, 3) };
    add(&mut out, "activation.forward", &f, bytes(z, c.ffn, forward), |r, z| activation(r, z, false));
    add(&mut out, "activation.backward", &f, bytes(z, c.ffn, backward), |r, z| activation(r, z, true));
    let v = format!("{}x{}", z.tokens, c.vocab);
    // Read for the maximum and sum, read again, overwritten: no cache holds the logits.
    add(&mut out, "cross_entropy", &v, bytes(z, c.vocab, 3), cross_entropy);
    let table = format!("{}x{} of {}", z.tokens, c.hidden, c.vocab);
    add(&mut out, "embedding.forward", &table, bytes(z, c.hidden, 2), |r, z| embedding(r, z, false));
    let scatter = (z.tokens * c.hidden * z.dtype.size() + c.vocab * c.hidden * 4) as f64;
    add(&mut out, "embedding.backward", &table, KernelWork::Bytes(scatter), |r, z| embedding(r, z, true));
    add(&mut out, "add", &h, bytes(z, c.hidden, 3), |rank, z| {
        let shape = [z.tokens, z.model.hidden];
        let (a, b) = (random(rank, &shape, z.dtype)?, random(rank, &shape, z.dtype)?);
        let y = empty(rank, &shape, z.dtype)?;
        Ok(Box::new(move |rank| Ok(rank.kernels.add(&rank.compute, &a, &b, &y)?)))
    });
    let up = if c.gated { 2 * c.ffn } else { c.ffn };
    add(&mut out, "column_sum", &format!("{}x{up}", z.tokens), bytes(z, up, 1), |rank, z| {
        let width = if z.model.gated { 2 * z.model.ffn } else { z.model.ffn };
        let x = random(rank, &[z.tokens, width], z.dtype)?;
        let sums = empty(rank, &[width], DType::F32)?;
        Ok(Box::new(move |rank| Ok(rank.kernels.column_sum(&rank.compute, &x, false, &sums)?)))
    });
    add(&mut out, "copy", &h, bytes(z, c.hidden, 2), |rank, z| {
        let shape = [z.tokens, z.model.hidden];
        let (x, y) = (random(rank, &shape, z.dtype)?, empty(rank, &shape, z.dtype)?);
        Ok(Box::new(move |rank| Ok(rank.kernels.copy(&rank.compute, &x, &y)?)))
    });
    out
}

#[derive(Clone, Copy, PartialEq)]
enum NormPass {
    Forward,
    AddForward,
    Backward,
}

fn norm(rank: &Rank, z: &Sizes, pass: NormPass) -> Result<Run> {
    let (shape, h) = ([z.tokens, z.model.hidden], z.model.hidden);
    let layer = z.model.norm.kind == NormKind::LayerNorm;
    let kind = Norm { subtract_mean: layer, eps: z.model.norm.eps, zero_centred: z.model.norm.zero_centred };
    let (x, residual) = (random(rank, &shape, z.dtype)?, random(rank, &shape, z.dtype)?);
    let (y, sum) = (empty(rank, &shape, z.dtype)?, empty(rank, &shape, z.dtype)?);
    let gamma = random(rank, &[h], z.dtype)?;
    let beta = if layer { Some(random(rank, &[h], z.dtype)?) } else { None };
    let mean = if layer { Some(empty(rank, &[z.tokens], DType::F32)?) } else { None };
    let rstd = empty(rank, &[z.tokens], DType::F32)?;
    let parts = [rank.kernels.norm_partials(z.dtype, z.tokens, h), h];
    let (dgamma, gamma_parts) = (empty(rank, &[h], DType::F32)?, empty(rank, &parts, DType::F32)?);
    let (dbeta, beta_parts) = (empty(rank, &[h], DType::F32)?, empty(rank, &parts, DType::F32)?);
    let dy = random(rank, &shape, z.dtype)?;
    Ok(Box::new(move |rank| {
        let (k, s) = (&rank.kernels, &rank.compute);
        let (mean, rstd) = (mean.as_ref(), &rstd);
        let n = NormForward { x: &x, gamma: &gamma, beta: beta.as_ref(), y: &y, mean, rstd };
        match pass {
            NormPass::Forward => k.norm_forward(s, kind, &n)?,
            NormPass::AddForward => {
                k.add_norm_forward(s, kind, &ResidualAdd { residual: &residual, sum: &sum }, &n)?
            }
            NormPass::Backward => {
                let n = NormBackward {
                    x: &x,
                    gamma: &gamma,
                    mean,
                    rstd,
                    dy: &dy,
                    residual: Some(&residual),
                    dx: &y,
                    dgamma: &gamma_parts,
                    dbeta: layer.then_some(&beta_parts),
                };
                k.norm_backward(s, kind, &n)?;
                k.column_sum(s, &gamma_parts, false, &dgamma)?;
                if layer {
                    k.column_sum(s, &beta_parts, false, &dbeta)?;
                }
            }
        }
        Ok(())
    }))
}

fn rope(rank: &Rank, z: &Sizes) -> Result<Run> {
    let c = &z.model;
    let heads = c.heads + c.kv_heads;
    let x = random(rank, &[z.tokens, heads, c.head_dim], z.dtype)?;
    let (theta, rotary) = c.rope(0).map_or((1e4, c.head_dim), |r| (r.theta, r.rotary_dim));
    let interleaved = c.rope(0).is_some_and(|r| r.interleaved);
    let scaling = ferrotron_kernels::rope_tables::RopeScaling::None;
    let t = RopeTables::new(theta, rotary, &scaling, z.seq)?;
    let cos = rank.compute.upload(&t.cos, &[z.seq, t.half], Category::Workspace)?;
    let sin = rank.compute.upload(&t.sin, &[z.seq, t.half], Category::Workspace)?;
    let positions: Vec<i32> = (0..z.tokens).map(|i| (i % z.seq) as i32).collect();
    let positions = rank.compute.upload(&positions, &[z.tokens], Category::Workspace)?;
    let style = if interleaved { RopeStyle::Interleaved } else { RopeStyle::Half };
    Ok(Box::new(move |rank| {
        let r = Rope { x: &x, cos: &cos, sin: &sin, positions: &positions, style, inverse: false };
        Ok(rank.kernels.rope(&rank.compute, &r)?)
    }))
}

fn activation(rank: &Rank, z: &Sizes, backward: bool) -> Result<Run> {
    let (f, gated) = (z.model.ffn, z.model.gated);
    let act = match z.model.activation {
        Activation::GeluTanh => Act::GeluTanh,
        Activation::GeluErf => Act::GeluErf,
        Activation::SquaredRelu => Act::SquaredRelu,
        Activation::Silu => Act::Silu,
    };
    let up_shape = [z.tokens, if gated { 2 * f } else { f }];
    let (x, dx) = (random(rank, &up_shape, z.dtype)?, empty(rank, &up_shape, z.dtype)?);
    let (y, dy) = (empty(rank, &[z.tokens, f], z.dtype)?, random(rank, &[z.tokens, f], z.dtype)?);
    Ok(Box::new(move |rank| {
        let (k, s) = (&rank.kernels, &rank.compute);
        let done = match backward {
            false => k.act_forward(s, &ActForward { act, gated, x: &x, y: &y }),
            true => k.act_backward(s, &ActBackward { act, gated, x: &x, dy: &dy, dx: &dx }),
        };
        Ok(done?)
    }))
}

fn cross_entropy(rank: &Rank, z: &Sizes) -> Result<Run> {
    let (t, v) = (z.tokens, z.model.vocab);
    let logits = random(rank, &[t, v], z.dtype)?;
    let labels: Vec<i32> = (0..t).map(|i| (i * 7919 % v) as i32).collect();
    let labels = rank.compute.upload(&labels, &[t], Category::Workspace)?;
    let weights = rank.compute.upload(&vec![1.0 / t as f32; t], &[t], Category::Workspace)?;
    let loss = empty(rank, &[t], DType::F32)?;
    Ok(Box::new(move |rank| {
        let c = CrossEntropy {
            logits: &logits,
            vocab: v,
            labels: &labels,
            weights: &weights,
            smoothing: LabelSmoothing::None,
            loss: &loss,
            gradient: true,
        };
        Ok(rank.kernels.cross_entropy(&rank.compute, &c)?)
    }))
}

fn embedding(rank: &Rank, z: &Sizes, backward: bool) -> Result<Run> {
    let (t, h, v, scale) = (z.tokens, z.model.hidden, z.model.vocab, z.model.embed_scale);
    let ids: Vec<i32> = (0..t).map(|i| (i * 7919 % v) as i32).collect();
    let ids = rank.compute.upload(&ids, &[t], Category::Workspace)?;
    let y = random(rank, &[t, h], z.dtype)?;
    let table = match backward {
        false => random(rank, &[v, h], z.dtype)?,
        true => empty(rank, &[v, h], DType::F32)?,
    };
    Ok(Box::new(move |rank| {
        let (k, s) = (&rank.kernels, &rank.compute);
        let done = match backward {
            false => k.embedding_forward(
                s,
                &EmbeddingForward { ids: &ids, table: &table, first: 0, vocab: v, scale, add: false, y: &y },
            ),
            true => k.embedding_backward(
                s,
                &EmbeddingBackward {
                    ids: &ids,
                    dy: &y,
                    first: 0,
                    vocab: v,
                    scale,
                    accumulate: false,
                    dtable: &table,
                },
            ),
        };
        Ok(done?)
    }))
}

//! Attention of a layer: projections, core attention, and context parallelism.

use super::CoreAttention;
use super::layer::{Input, LayerBuilder};
use super::shape::Group;
use crate::model::config::MlaConfig;
use ferrotron_comm::OpKind;
use ferrotron_engine::attention::context_parallel::CpVariant;
use ferrotron_tensor::DType;

/// Heads of this rank and their channels.
#[derive(Clone, Copy)]
struct Heads {
    q: usize,
    kv: usize,
    head_dim: usize,
    value_dim: usize,
}

impl LayerBuilder<'_> {
    /// Attention of layer `index`, declared as `<name>.*`.
    pub(super) fn attention(&mut self, name: &str, index: usize) {
        let (m, t) = (&self.shape.model, self.shape.ranks.tp.size);
        let heads = Heads {
            q: m.heads / t,
            kv: (m.kv_heads / t).max(1),
            head_dim: m.head_dim,
            value_dim: m.value_dim(),
        };
        let window = m.window.filter(|_| m.is_local(index));
        match m.mla {
            None => self.standard_attention(name, heads, window),
            Some(mla) => self.latent_attention(name, &mla, heads, window),
        }
    }

    /// Multi-head or grouped-query attention.
    fn standard_attention(&mut self, name: &str, heads: Heads, window: Option<usize>) {
        let (rows, dtype) = (self.rows, self.shape.dtype);
        let Heads { q: n, kv: g, head_dim: d, .. } = heads;
        let input = if self.shape.model.pre_norms { "normed_attn" } else { "input" };
        self.linear(&format!("{name}.q"), self.norm_output(input));
        let variant = self.core_attention(name, heads, window);
        // q, k and v lie side by side; normed q and k are a buffer of their own.
        let qkv = [rows.all, (n + 2 * g) * d];
        let kept = keeps_operands(variant, self.quantizes_attention(name));
        if self.shape.model.qk_norm {
            self.save("attn.qkv", &qkv, dtype);
            if kept {
                self.save("attn.normed_qk", &[rows.all, (n + g) * d], dtype);
            }
            let [q, k] = if self.shape.model.qk_norm_all_heads { [1, 1] } else { [n, g] };
            self.norm_statistics("attn.q_norm", rows.all * q);
            self.norm_statistics("attn.k_norm", rows.all * k);
        } else if kept {
            self.save("attn.qkv", &qkv, dtype);
        }
        self.linear(&format!("{name}.out"), Input::Kept("attn.heads"));
    }

    /// Multi-head latent attention.
    fn latent_attention(&mut self, name: &str, mla: &MlaConfig, heads: Heads, window: Option<usize>) {
        let (rows, dtype, t) = (self.rows, self.shape.dtype, self.shape.ranks.tp.size);
        let q_rank = mla.q_lora_rank.unwrap_or(0);
        let down = if mla.q_lora_rank.is_some() { "q_a" } else { "kv_a" };
        self.linear(&format!("{name}.{down}"), self.norm_output("normed_attn"));
        self.save("attn.compressed", &[rows.local, q_rank + mla.kv_lora_rank + mla.rope_dim], dtype);
        match mla.q_lora_rank {
            Some(_) => {
                self.rms_statistics("attn.q_a_norm");
                self.linear(&format!("{name}.q_b"), self.norm_output("attn.normed_q"));
            }
            None => self.linear(&format!("{name}.q"), self.norm_output("normed_attn")),
        }
        self.rms_statistics("attn.kv_a_norm");
        self.linear(&format!("{name}.kv_b"), self.norm_output("attn.normed_kv"));
        let shared = self.moved(mla.rope_dim, dtype.size());
        self.forward(Group::Tp, OpKind::AllGather, shared);
        self.backward(Group::Tp, OpKind::ReduceScatter, shared);
        let variant = self.core_attention(name, heads, window);
        let n = heads.q;
        if keeps_operands(variant, self.quantizes_attention(name)) {
            self.save("attn.q", &[rows.all, n * heads.head_dim], dtype);
            self.save("attn.kv", &[rows.all, n * (mla.nope_dim + mla.v_dim)], dtype);
            match variant {
                None if t > 1 => self.save("attn.k_rope", &[rows.all, mla.rope_dim], dtype),
                None => {}
                Some(_) => self.save("attn.k", &[rows.all, n * heads.head_dim], dtype),
            }
        }
        self.linear(&format!("{name}.o"), Input::Kept("attn.heads"));
    }

    /// 1/σ of the rows of an RMSNorm.
    fn rms_statistics(&mut self, name: &str) {
        self.save(&format!("{name}.rstd"), &[self.rows.local], DType::F32);
    }

    fn quantizes_attention(&self, name: &str) -> bool {
        self.shape.options.policy.quantizes_attention(name)
    }

    /// Scores, softmax and values; says how context-parallel ranks share the sequences.
    fn core_attention(&mut self, name: &str, heads: Heads, window: Option<usize>) -> Option<CpVariant> {
        let (rows, dtype, cp) = (self.rows, self.shape.dtype, self.shape.ranks.cp.size);
        let Heads { q: n, kv: g, head_dim, value_dim } = heads;
        let fp8 = self.quantizes_attention(name);
        self.layer().attention = Some(CoreAttention { heads: n, head_dim, value_dim, window, fp8 });
        self.save("attn.heads", &[rows.all, n * value_dim], dtype);
        if fp8 {
            for group in [Group::Tp, Group::Cp] {
                self.forward(group, OpKind::AllReduce, self.all_reduce(group, 3 * 4));
            }
        }
        let tokens = rows.attended;
        if cp == 1 {
            self.save("attn.lse", &[tokens, n], DType::F32);
            return None;
        }
        let (c, e) = (cp as u64, dtype.size() as u64);
        let kv_row = g * (head_dim + value_dim);
        let kv = (tokens * kv_row) as u64;
        let save_rounded = |layer: &mut Self| {
            if fp8 {
                // q, k and v rounded to E4M3, which backward reads as forward did.
                layer.save("attn.rounded_qkv", &[tokens, n * head_dim + kv_row], dtype);
            }
        };
        let divides = n.is_multiple_of(cp) && g.is_multiple_of(cp);
        Some(match (window.is_some(), divides) {
            (false, _) => {
                // Keys and values are sent around the ring; backward sends their f32 gradients one step behind them.
                self.forward(Group::Cp, OpKind::SendRecv, (c - 1) * kv * e);
                self.backward(Group::Cp, OpKind::SendRecv, (c - 2) * kv * e + (c - 1) * kv * 4);
                save_rounded(self);
                self.save("attn.ring", &[tokens, kv_row], dtype);
                self.save("attn.lse", &[tokens, n], DType::F32);
                CpVariant::Ring
            }
            (true, false) => {
                self.forward(Group::Cp, OpKind::AllGather, (c - 1) * kv * e);
                self.backward(Group::Cp, OpKind::AllGather, (c - 1) * kv * e);
                self.backward(Group::Cp, OpKind::ReduceScatter, (c - 1) * kv * 4);
                save_rounded(self);
                self.save("attn.lse", &[tokens, n], DType::F32);
                CpVariant::AllGather
            }
            (true, true) => {
                let one_way = (c - 1) * (tokens * (n + g) * (head_dim + value_dim)) as u64 * e / c;
                self.forward(Group::Cp, OpKind::AllToAll, one_way);
                self.backward(Group::Cp, OpKind::AllToAll, one_way);
                let all = tokens * cp;
                let row = n * head_dim + kv_row;
                self.save("attn.qkv_by_heads", &[all, row / cp], dtype);
                self.save("attn.heads_by_heads", &[all, n * value_dim / cp], dtype);
                self.save("attn.lse", &[all, n / cp], DType::F32);
                CpVariant::AllToAll
            }
        })
    }
}

/// Whether core attention saves the q, k and v that it is given. It saves its own copies where context-parallel ranks
/// exchange tokens for heads or round q, k and v to FP8.
fn keeps_operands(variant: Option<CpVariant>, fp8: bool) -> bool {
    match variant {
        None => true,
        Some(CpVariant::AllToAll) => false,
        Some(CpVariant::Ring | CpVariant::AllGather) => !fp8,
    }
}

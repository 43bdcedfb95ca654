//! The linear maps of an attention block as plain data: what counts parameters, FLOPs, bytes and widths reads them here.

use super::config::ModelConfig;
use ferrotron_engine::Split;

/// A linear map of a layer, `input` to `output` channels of the whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearInfo {
    /// Names inside a layer (`attn.q`) of the logical matrices it is made of.
    pub names: &'static [&'static str],
    /// What it is called where there is one name for all of it.
    pub label: &'static str,
    /// Channels in.
    pub input: usize,
    /// Channels out.
    pub output: usize,
    /// How tensor-parallel ranks share it.
    pub split: Split,
    /// Does it have a bias?
    pub bias: bool,
}

impl LinearInfo {
    /// Elements of its matrices.
    pub fn weights(&self) -> usize {
        self.input.saturating_mul(self.output)
    }

    /// Names of its matrices in a layer.
    pub fn full_names(&self, layer: usize) -> Vec<String> {
        self.names.iter().map(|name| format!("layers.{layer}.{name}")).collect()
    }
}

impl ModelConfig {
    /// Channels of a head's values.
    pub fn value_dim(&self) -> usize {
        self.mla.as_ref().map_or(self.head_dim, |m| m.v_dim)
    }

    /// The maps of a layer's attention, in the order they are applied.
    pub fn attention_linears(&self) -> Vec<LinearInfo> {
        let map = |names: &'static [&'static str], label, [input, output]: [usize; 2], split, bias| {
            LinearInfo { names, label, input, output, split, bias }
        };
        let (column_parallel, row_parallel) = (|unit| Split::Rows { unit }, |unit| Split::Columns { unit });
        let (h, n, d, v) = (self.hidden, self.heads, self.head_dim, self.value_dim());
        let mul = usize::saturating_mul;
        let Some(m) = &self.mla else {
            let all = mul(n, d).saturating_add(mul(2, mul(self.kv_heads, d)));
            return vec![
                map(&["attn.q", "attn.k", "attn.v"], "qkv", [h, all], column_parallel(d), self.qkv_bias),
                map(&["attn.out"], "attn_out", [mul(n, d), h], row_parallel(d), self.proj_bias),
            ];
        };
        let kv = m.kv_lora_rank.saturating_add(m.rope_dim);
        let (down, q): (&[&str], _) = match m.q_lora_rank {
            Some(r) => (&["attn.q_a", "attn.kv_a"], (&["attn.q_b"][..], r)),
            None => (&["attn.kv_a"], (&["attn.q"][..], h)),
        };
        let narrow = m.q_lora_rank.unwrap_or(0).saturating_add(kv);
        let pair = m.nope_dim.saturating_add(v);
        vec![
            map(down, "attn_down", [h, narrow], Split::Replicated, self.qkv_bias),
            map(q.0, "attn_q", [q.1, mul(n, d)], column_parallel(d), false),
            map(&["attn.kv_b"], "attn_kv", [m.kv_lora_rank, mul(n, pair)], column_parallel(pair), false),
            map(&["attn.o"], "attn_out", [mul(n, v), h], row_parallel(v), self.proj_bias),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::MlaConfig;
    use crate::model::logical_parts;

    /// Against what a model declares.
    #[test]
    fn linears_match_the_declarations() {
        let base = ModelConfig::preset("tiny").unwrap();
        let with = |q_lora_rank, bias| {
            let mut c = base.clone();
            (c.qkv_bias, c.proj_bias, c.attn_sink) = (bias, bias, bias);
            c.with_mla(MlaConfig {
                q_lora_rank,
                kv_lora_rank: 48,
                nope_dim: 32,
                rope_dim: 16,
                v_dim: 24,
                norm_eps: 1e-6,
            })
        };
        for c in [base.clone(), with(Some(40), true), with(None, true), with(None, false)] {
            c.validate().unwrap();
            let parts = logical_parts(&c).unwrap();
            let find = |name: &str| parts.iter().find(|p| p.name == format!("layers.1.{name}"));
            for m in c.attention_linears() {
                let parts: Vec<_> = m.names.iter().map(|n| find(&format!("{n}.weight")).unwrap()).collect();
                assert!(parts.iter().all(|p| p.shape[1] == m.input && p.split == m.split), "{m:?}");
                assert_eq!(parts.iter().map(|p| p.shape[0]).sum::<usize>(), m.output, "{m:?}");
                assert!(m.names.iter().all(|n| find(&format!("{n}.bias")).is_some() == m.bias), "{m:?}");
            }
            let total: usize = parts.iter().map(|p| p.shape.iter().product::<usize>()).sum();
            assert_eq!(total, c.parameters());
        }
    }
}

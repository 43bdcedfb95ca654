//! Validation of an architecture, before anything is allocated for it.

use super::config::{MlaConfig, ModelConfig, Positions, RopeConfig, RopeScaling};

/// Largest head dim of the attention kernels.
pub const MAX_HEAD_DIM: usize = 256;

// Far above any real model, and small enough that the size of every single weight fits in 64 bits.
const MAX_LAYERS: usize = 1 << 14;
pub(super) const MAX_SIZE: usize = 1 << 30;
const MAX_HEADS: usize = 1 << 20;
const MAX_PARAMETERS: u128 = 1 << 48;

/// An architecture that cannot be built, with every reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this model cannot be built: {}", .0.join("; "))]
pub struct InvalidModel(pub Vec<String>);

impl ModelConfig {
    /// Checks sizes, divisibility and constants. The error lists everything that is wrong.
    pub fn validate(&self) -> Result<(), InvalidModel> {
        let mut bad = Vec::new();
        self.check_sizes(&mut bad);
        self.check_constants(&mut bad);
        self.check_layers(&mut bad);
        self.check_moe(&mut bad);
        self.check_mtp(&mut bad);
        self.check_positions(&mut bad);
        if let Some(mla) = &self.mla {
            self.check_latent(mla, &mut bad);
        }
        // Declarations multiply sizes, which must be sane for that.
        if bad.is_empty() && self.parameters_u128() > MAX_PARAMETERS {
            bad.push(format!("{} parameters are more than can be addressed", self.parameters_u128()));
        }
        if bad.is_empty() { Ok(()) } else { Err(InvalidModel(bad)) }
    }

    fn check_sizes(&self, bad: &mut Vec<String>) {
        let sizes = [
            ("layers", self.layers, MAX_LAYERS),
            ("hidden", self.hidden, MAX_SIZE),
            ("ffn", self.ffn, MAX_SIZE),
            ("heads", self.heads, MAX_HEADS),
            ("kv_heads", self.kv_heads, MAX_HEADS),
            ("head_dim", self.head_dim, MAX_HEAD_DIM),
            ("vocab", self.vocab, MAX_SIZE),
            ("max_positions", self.max_positions, MAX_SIZE),
        ];
        for (name, size, most) in sizes {
            if size == 0 || size > most {
                bad.push(format!("{name} is {size}, it must be 1 to {most}"));
            }
        }
        if self.kv_heads > 0 && !self.heads.is_multiple_of(self.kv_heads) {
            bad.push(format!(
                "heads ({}) is not a multiple of kv_heads ({}), so query heads cannot share keys evenly",
                self.heads, self.kv_heads
            ));
        }
    }

    fn check_constants(&self, bad: &mut Vec<String>) {
        let positive = [
            ("norm.eps", Some(self.norm.eps)),
            ("attn_scale", Some(self.attn_scale)),
            ("attn_softcap", self.attn_softcap),
            ("final_softcap", self.final_softcap),
            ("embed_scale", Some(self.embed_scale)),
        ];
        for (name, value) in positive {
            if let Some(x) = value
                && !(x.is_finite() && x > 0.0)
            {
                bad.push(format!("{name} is {x}, it must be a positive number"));
            }
        }
        if !(self.init_std.is_finite() && self.init_std >= 0.0) {
            bad.push(format!("init_std is {}, it must be zero or a positive number", self.init_std));
        }
    }

    fn check_layers(&self, bad: &mut Vec<String>) {
        if self.window == Some(0) {
            bad.push("window is 0, a token must at least see itself".into());
        }
        if !self.local_layers.is_empty() && self.local_layers.len() != self.layers {
            bad.push(format!(
                "local_layers has {} entries for {} layers; leave it empty or give one per layer",
                self.local_layers.len(),
                self.layers
            ));
        }
        if !self.no_rope_layers.is_empty() && self.no_rope_layers.len() != self.layers {
            bad.push(format!(
                "no_rope_layers has {} entries for {} layers; leave it empty or give one per layer",
                self.no_rope_layers.len(),
                self.layers
            ));
        }
        if self.window.is_none() && self.local_layers.contains(&true) {
            bad.push("local_layers marks layers as local, but no window is set".into());
        }
    }

    fn check_positions(&self, bad: &mut Vec<String>) {
        match (&self.positions, &self.rope_local) {
            (Positions::Learned, Some(_)) => {
                bad.push("rope_local is set, but positions are learned vectors".into());
            }
            (Positions::Learned, None) => {}
            (Positions::Rope(rope), local) => {
                check_rope("rope", rope, self.head_dim, bad);
                if let Some(local) = local {
                    check_rope("rope_local", local, self.head_dim, bad);
                }
            }
        }
    }

    fn check_latent(&self, m: &MlaConfig, bad: &mut Vec<String>) {
        let sizes = [
            ("q_lora_rank", m.q_lora_rank.unwrap_or(1), MAX_SIZE),
            ("kv_lora_rank", m.kv_lora_rank, MAX_SIZE),
            ("nope_dim", m.nope_dim, MAX_HEAD_DIM),
            ("rope_dim", m.rope_dim, MAX_HEAD_DIM),
            ("v_dim", m.v_dim, MAX_HEAD_DIM),
        ];
        for (name, size, most) in sizes {
            if size == 0 || size > most {
                bad.push(format!("mla.{name} is {size}, it must be 1 to {most}"));
            }
        }
        if !(m.norm_eps.is_finite() && m.norm_eps > 0.0) {
            bad.push(format!("mla.norm_eps is {}, it must be a positive number", m.norm_eps));
        }
        if m.nope_dim.checked_add(m.rope_dim) != Some(self.head_dim) {
            bad.push(format!(
                "head_dim is {}, it must be mla.nope_dim + mla.rope_dim ({} + {})",
                self.head_dim, m.nope_dim, m.rope_dim
            ));
        }
        if self.kv_heads != self.heads {
            bad.push(format!(
                "kv_heads is {}, but with mla all {} heads have keys of their own; leave it out",
                self.kv_heads, self.heads
            ));
        }
        if !self.pre_norms {
            bad.push("pre_norms is off, which mla is not made for; leave it out".into());
        }
        if self.qk_norm {
            bad.push("qk_norm is on, but mla has norms of its own; leave it out".into());
        }
        let ropes = match &self.positions {
            Positions::Learned => {
                bad.push("positions are learned vectors, but mla needs rotary ones".into());
                return;
            }
            Positions::Rope(rope) => [Some(rope), self.rope_local.as_ref()],
        };
        if let Some(r) = ropes.into_iter().flatten().find(|r| r.rotary_dim != m.rope_dim) {
            bad.push(format!("rotary_dim is {}, it must be mla.rope_dim ({})", r.rotary_dim, m.rope_dim));
        }
    }
}

fn check_rope(name: &str, rope: &RopeConfig, head_dim: usize, bad: &mut Vec<String>) {
    let mut number = |what: &str, x: f64, zero_is_fine: bool| {
        if !(x.is_finite() && (x > 0.0 || x == 0.0 && zero_is_fine)) {
            bad.push(format!("{name}.{what} is {x}, it must be a positive number"));
        }
    };
    let mut positive = |what: &str, x: f64| number(what, x, false);
    positive("theta", rope.theta);
    let mut original = None;
    match rope.scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => positive("factor", factor),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
            positive("factor", factor);
            positive("low_freq_factor", low_freq_factor);
            positive("high_freq_factor - low_freq_factor", high_freq_factor - low_freq_factor);
            original = Some(original_max_positions);
        }
        RopeScaling::Yarn {
            factor,
            original_max_positions,
            beta_fast,
            beta_slow,
            mscale,
            mscale_all_dim,
            attention_factor,
            truncate: _,
        } => {
            positive("factor", factor);
            positive("beta_fast", beta_fast);
            positive("beta_slow", beta_slow);
            positive("attention_factor", attention_factor.unwrap_or(1.0));
            // Zero means "no scaling" here.
            number("mscale", mscale, true);
            number("mscale_all_dim", mscale_all_dim, true);
            original = Some(original_max_positions);
        }
        RopeScaling::LongRope {
            ref short_factor,
            ref long_factor,
            original_max_positions,
            factor,
            attention_factor: _,
        } => {
            positive("factor", factor);
            positive("attention_factor", rope.scaling.attention_scaling());
            let lists = [("short_factor", short_factor), ("long_factor", long_factor)];
            for (what, list) in lists {
                list.iter().for_each(|x| positive(what, *x));
            }
            original = Some(original_max_positions);
            let half = rope.rotary_dim / 2;
            for (what, list) in lists.into_iter().filter(|(_, list)| list.len() != half) {
                bad.push(format!("{name}.{what} has {} entries for {half} frequencies", list.len()));
            }
        }
    }
    if let Some(n) = original
        && (n == 0 || n > MAX_SIZE)
    {
        bad.push(format!("{name}.original_max_positions is {n}, it must be 1 to {MAX_SIZE}"));
    }
    let r = rope.rotary_dim;
    if r == 0 || r % 2 == 1 || r > head_dim {
        bad.push(format!("{name}.rotary_dim is {r}, it must be even and 2 to head_dim ({head_dim})"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> ModelConfig {
        ModelConfig::preset("tiny").unwrap()
    }

    #[test]
    fn all_reasons_are_listed_at_once() {
        let mut c = tiny();
        c.kv_heads = 3;
        c.head_dim = 257;
        c.hidden = 0;
        c.norm.eps = f32::NAN;
        c.local_layers = vec![true; 3];
        let text = c.validate().unwrap_err().to_string();
        for word in
            ["kv_heads (3)", "head_dim is 257", "hidden is 0", "norm.eps", "3 entries for 4", "no window"]
        {
            assert!(text.contains(word), "{word} missing in: {text}");
        }
    }

    #[test]
    fn sizes_that_would_overflow_are_refused() {
        let edits: [fn(&mut ModelConfig); 5] = [
            |c| c.layers = usize::MAX,
            |c| c.vocab = usize::MAX,
            |c| (c.vocab, c.hidden) = (1 << 30, 1 << 30),
            |c| c.max_positions = 0,
            |c| c.heads = 0,
        ];
        for edit in edits {
            let mut c = tiny();
            edit(&mut c);
            assert!(c.validate().is_err(), "{c:?}");
        }
    }

    #[test]
    fn rope_constants_are_checked() {
        let scalings = [
            RopeScaling::Linear { factor: 0.0 },
            RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 4.0,
                high_freq_factor: 4.0,
                original_max_positions: 8192,
            },
            RopeScaling::Yarn {
                factor: 4.0,
                original_max_positions: 0,
                beta_fast: 32.0,
                beta_slow: 1.0,
                mscale: 1.0,
                mscale_all_dim: 0.0,
                truncate: true,
                attention_factor: None,
            },
        ];
        for scaling in scalings {
            let mut c = tiny();
            c.positions =
                Positions::Rope(RopeConfig { theta: 1e4, rotary_dim: 64, interleaved: false, scaling });
            assert!(c.validate().is_err(), "{c:?}");
        }
        for rotary_dim in [0, 63, 66] {
            let mut c = tiny();
            let scaling = RopeScaling::None;
            c.positions = Positions::Rope(RopeConfig { theta: 1e4, rotary_dim, interleaved: false, scaling });
            assert!(c.validate().is_err(), "{rotary_dim}");
        }
    }
}

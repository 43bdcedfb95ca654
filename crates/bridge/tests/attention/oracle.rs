//! Decoders by their definition, in f64, from Hugging Face's tensors: the attention of DeepSeek-V3 and GPT-OSS, with
//! dense MLPs or GPT-OSS's experts.

use ferrotron_core::tensorfile::TensorFile;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Sizes of an attention.
struct AttentionShape<'a> {
    tokens: usize,
    heads: usize,
    scale: f64,
    /// Tokens that a query sees, its own included.
    window: usize,
    sink: Option<&'a [f64]>,
}

/// Tensors by name.
#[derive(Clone)]
pub struct Tensors(pub BTreeMap<String, (Vec<usize>, Vec<f64>)>);

impl Tensors {
    /// The f32 tensors of a file.
    pub fn open(path: &Path) -> Tensors {
        let file = TensorFile::open(path).unwrap();
        let read = |t: &ferrotron_core::tensorfile::TensorInfo| {
            let bytes = file.read(&t.name).unwrap();
            let values = match t.dtype.to_string().as_str() {
                "F32" => bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
                "I64" => bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect(),
                other => panic!("{}: {other}", t.name),
            };
            (t.name.clone(), (t.shape.clone(), values))
        };
        Tensors(file.tensors().iter().map(read).collect())
    }

    pub fn get(&self, name: &str) -> &[f64] {
        &self.0.get(name).unwrap_or_else(|| panic!("no {name}")).1
    }

    pub fn find(&self, name: &str) -> Option<&[f64]> {
        self.0.get(name).map(|t| &t.1[..])
    }
}

/// A model and rows of tokens.
pub struct Oracle<'a> {
    pub config: &'a Value,
    pub w: &'a Tensors,
    /// Tokens of a row.
    pub seq: usize,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `x [tokens, in]` by `w [out, in]`.
pub fn linear(x: &[f64], w: &[f64], bias: Option<&[f64]>, input: usize) -> Vec<f64> {
    let rows = x.chunks(input);
    let row = |r: &[f64]| -> Vec<f64> {
        w.chunks(input).enumerate().map(|(o, w)| dot(r, w) + bias.map_or(0.0, |b| b[o])).collect()
    };
    rows.flat_map(row).collect()
}

pub fn rms_norm(x: &[f64], gain: &[f64], eps: f64) -> Vec<f64> {
    let row = |r: &[f64]| -> Vec<f64> {
        let scale = 1.0 / (dot(r, r) / r.len() as f64 + eps).sqrt();
        r.iter().zip(gain).map(|(x, g)| x * scale * g).collect()
    };
    x.chunks(gain.len()).flat_map(row).collect()
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn mscale(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
}

impl Oracle<'_> {
    fn size(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap_or_else(|| panic!("{key}")) as usize
    }

    fn real(&self, key: &str) -> f64 {
        self.config[key].as_f64().unwrap_or_else(|| panic!("{key}"))
    }

    /// RoPE's object, in either spelling.
    fn rope(&self) -> &Value {
        let newer = &self.config["rope_parameters"];
        if newer.is_null() { &self.config["rope_scaling"] } else { newer }
    }

    /// Frequencies of `dim / 2` pairs and the factor on cos and sin.
    fn frequencies(&self, dim: usize) -> (Vec<f64>, f64) {
        let r = self.rope();
        let theta = r["rope_theta"].as_f64().or(self.config["rope_theta"].as_f64()).unwrap();
        let plain: Vec<f64> = (0..dim / 2).map(|i| theta.powf(-2.0 * i as f64 / dim as f64)).collect();
        if r["rope_type"].as_str().or(r["type"].as_str()).unwrap_or("default") == "default" {
            return (plain, 1.0);
        }
        assert_eq!(r["rope_type"], "yarn");
        let (factor, length) =
            (r["factor"].as_f64().unwrap(), r["original_max_position_embeddings"].as_f64().unwrap());
        let turns =
            |n: f64| dim as f64 * (length / (n * 2.0 * std::f64::consts::PI)).ln() / (2.0 * theta.ln());
        let number = |key: &str, absent: f64| r[key].as_f64().unwrap_or(absent);
        let (mut low, mut high) = (turns(number("beta_fast", 32.0)), turns(number("beta_slow", 1.0)));
        if r["truncate"].as_bool().unwrap_or(true) {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
        let mix = |(i, f): (usize, &f64)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            f / factor * ramp + f * (1.0 - ramp)
        };
        let all = plain.iter().enumerate().map(mix).collect();
        let scale = match (number("mscale", 0.0), number("mscale_all_dim", 0.0)) {
            (a, b) if a != 0.0 && b != 0.0 => mscale(factor, a) / mscale(factor, b),
            _ => mscale(factor, 1.0),
        };
        (all, scale)
    }

    fn rotate(&self, x: &mut [f64], place: usize, interleaved: bool) {
        let (all, scale) = self.frequencies(x.len());
        let half = x.len() / 2;
        for (i, f) in all.iter().enumerate() {
            let (a, b) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
            let (s, c) = (place as f64 * f).sin_cos();
            (x[a], x[b]) = ((x[a] * c - x[b] * s) * scale, (x[b] * c + x[a] * s) * scale);
        }
    }

    /// Softmax attention: `q(t, h)`, `k(t, h)`, `v(t, h)` by token and query head.
    fn attend(
        &self,
        shape: AttentionShape<'_>,
        [q, k, v]: [&dyn Fn(usize, usize) -> Vec<f64>; 3],
    ) -> Vec<f64> {
        let AttentionShape { tokens, heads, scale, window, sink } = shape;
        let mut out = Vec::new();
        for t in 0..tokens {
            let row = t / self.seq * self.seq;
            for h in 0..heads {
                let q = q(t, h);
                let seen: Vec<usize> = (row..=t).filter(|s| t - s < window).collect();
                let weights: Vec<f64> = seen.iter().map(|s| (scale * dot(&q, &k(*s, h))).exp()).collect();
                let sum = weights.iter().sum::<f64>() + sink.map_or(0.0, |s| s[h].exp());
                let mut mixed = vec![0.0; v(t, h).len()];
                for (s, w) in seen.iter().zip(&weights) {
                    mixed.iter_mut().zip(v(*s, h)).for_each(|(m, v)| *m += w / sum * v);
                }
                out.extend(mixed);
            }
        }
        out
    }

    /// DeepSeek-V3's.
    pub fn latent_attention(&self, x: &[f64], layer: usize) -> Vec<f64> {
        let name = |kind: &str| format!("model.layers.{layer}.self_attn.{kind}");
        let (w, b) = (|k: &str| self.w.get(&name(k)), |k: &str| self.w.find(&name(k)));
        let h = self.size("hidden_size");
        let (n, rank) = (self.size("num_attention_heads"), self.size("kv_lora_rank"));
        let [nope, rope, dv] =
            ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"].map(|key| self.size(key));
        let interleaved = self.config["rope_interleave"].as_bool().unwrap_or(true);
        let tokens = x.len() / h;
        let mut q = match self.config["q_lora_rank"].as_u64() {
            Some(r) => {
                let a = linear(x, w("q_a_proj.weight"), b("q_a_proj.bias"), h);
                linear(&rms_norm(&a, w("q_a_layernorm.weight"), 1e-6), w("q_b_proj.weight"), None, r as usize)
            }
            None => linear(x, w("q_proj.weight"), None, h),
        };
        let a = linear(x, w("kv_a_proj_with_mqa.weight"), b("kv_a_proj_with_mqa.bias"), h);
        let part = |from: usize, len: usize| -> Vec<f64> {
            a.chunks(rank + rope).flat_map(|r| r[from..from + len].to_vec()).collect()
        };
        let normed = rms_norm(&part(0, rank), w("kv_a_layernorm.weight"), 1e-6);
        let kv = linear(&normed, w("kv_b_proj.weight"), None, rank);
        let mut k_rope = part(rank, rope);
        for t in 0..tokens {
            self.rotate(&mut k_rope[t * rope..][..rope], t % self.seq, interleaved);
            for i in 0..n {
                self.rotate(&mut q[(t * n + i) * (nope + rope) + nope..][..rope], t % self.seq, interleaved);
            }
        }
        let mut scale = 1.0 / ((nope + rope) as f64).sqrt();
        let r = self.rope();
        if let Some(m) = r["mscale_all_dim"].as_f64().filter(|m| *m != 0.0) {
            scale *= mscale(r["factor"].as_f64().unwrap(), m).powi(2);
        }
        let kv = |t: usize, i: usize| &kv[(t * n + i) * (nope + dv)..][..nope + dv];
        let shape = AttentionShape { tokens, heads: n, scale, window: usize::MAX, sink: None };
        let out = self.attend(
            shape,
            [
                &|t, i| q[(t * n + i) * (nope + rope)..][..nope + rope].to_vec(),
                &|t, i| [&kv(t, i)[..nope], &k_rope[t * rope..][..rope]].concat(),
                &|t, i| kv(t, i)[nope..].to_vec(),
            ],
        );
        linear(&out, w("o_proj.weight"), b("o_proj.bias"), n * dv)
    }

    /// GPT-OSS's.
    pub fn sink_attention(&self, x: &[f64], layer: usize) -> Vec<f64> {
        let name = |kind: &str| format!("model.layers.{layer}.self_attn.{kind}");
        let (w, b) = (|k: &str| self.w.get(&name(k)), |k: &str| self.w.find(&name(k)));
        let (h, d) = (self.size("hidden_size"), self.size("head_dim"));
        let (n, g) = (self.size("num_attention_heads"), self.size("num_key_value_heads"));
        let local = self.config["layer_types"][layer] == "sliding_attention";
        let window = if local { self.size("sliding_window") } else { usize::MAX };
        let tokens = x.len() / h;
        let project = |kind: &str, heads: usize, turn: bool| {
            let mut y = linear(x, w(&format!("{kind}.weight")), b(&format!("{kind}.bias")), h);
            let each = y.chunks_mut(d).enumerate().filter(|_| turn);
            each.for_each(|(i, head)| self.rotate(head, i / heads % self.seq, false));
            y
        };
        let (q, k, v) = (project("q_proj", n, true), project("k_proj", g, true), project("v_proj", g, false));
        let head = |x: &[f64], i: usize| x[i * d..][..d].to_vec();
        let kv = |t: usize, i: usize| t * g + i / (n / g);
        let sinks = Some(w("sinks"));
        let scale = 1.0 / (d as f64).sqrt();
        let shape = AttentionShape { tokens, heads: n, scale, window, sink: sinks };
        let out = self.attend(
            shape,
            [&|t, i| head(&q, t * n + i), &|t, i| head(&k, kv(t, i)), &|t, i| head(&v, kv(t, i))],
        );
        linear(&out, w("o_proj.weight"), b("o_proj.bias"), n * d)
    }

    /// `down(silu(gate(x))·up(x))`
    pub fn mlp(&self, x: &[f64], layer: usize) -> Vec<f64> {
        let w = |kind: &str| self.w.get(&format!("model.layers.{layer}.mlp.{kind}_proj.weight"));
        let (h, f) = (self.size("hidden_size"), self.size("intermediate_size"));
        let (gate, up) = (linear(x, w("gate"), None, h), linear(x, w("up"), None, h));
        let mixed: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| silu(*g) * u).collect();
        linear(&mixed, w("down"), None, f)
    }

    /// GPT-OSS's experts: the best of the router, weighted by the softmax of their logits.
    pub fn experts(&self, x: &[f64], layer: usize) -> Vec<f64> {
        let w = |kind: &str| self.w.get(&format!("model.layers.{layer}.mlp.{kind}"));
        let (h, f) = (self.size("hidden_size"), self.size("intermediate_size"));
        let (chosen, limit) = (self.size("num_experts_per_tok"), self.real("swiglu_limit"));
        let mut out = Vec::new();
        for x in x.chunks(h) {
            let logits = linear(x, w("router.weight"), Some(w("router.bias")), h);
            let mut order: Vec<usize> = (0..logits.len()).collect();
            order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
            order.truncate(chosen);
            let sum: f64 = order.iter().map(|e| logits[*e].exp()).sum();
            let mut y = vec![0.0; h];
            for e in order {
                let column = |m: &[f64], rows: usize, cols: usize, x: &[f64], c: usize| -> f64 {
                    (0..rows).map(|r| x[r] * m[e * rows * cols + r * cols + c]).sum()
                };
                let inner: Vec<f64> = (0..f)
                    .map(|i| {
                        let at = |c: usize| {
                            column(w("experts.gate_up_proj"), h, 2 * f, x, c)
                                + w("experts.gate_up_proj_bias")[e * 2 * f + c]
                        };
                        let (gate, up) = (at(2 * i).min(limit), at(2 * i + 1).clamp(-limit, limit));
                        gate / (1.0 + (-1.702 * gate).exp()) * (up + 1.0)
                    })
                    .collect();
                for (c, y) in y.iter_mut().enumerate() {
                    let down = column(w("experts.down_proj"), f, h, &inner, c);
                    *y += logits[e].exp() / sum * (down + w("experts.down_proj_bias")[e * h + c]);
                }
            }
            out.extend(y);
        }
        out
    }

    /// One layer of hidden states.
    pub fn layer(
        &self,
        x: &[f64],
        layer: usize,
        attention: &dyn Fn(&[f64], usize) -> Vec<f64>,
        mlp: &dyn Fn(&[f64], usize) -> Vec<f64>,
    ) -> Vec<f64> {
        let gain = |kind: &str| self.w.get(&format!("model.layers.{layer}.{kind}.weight"));
        let eps = self.real("rms_norm_eps");
        let add = |x: &[f64], y: Vec<f64>| -> Vec<f64> { x.iter().zip(y).map(|(a, b)| a + b).collect() };
        let r = add(x, attention(&rms_norm(x, gain("input_layernorm"), eps), layer));
        add(&r, mlp(&rms_norm(&r, gain("post_attention_layernorm"), eps), layer))
    }

    /// Hidden states of tokens.
    pub fn embed(&self, ids: &[i32]) -> Vec<f64> {
        let (h, table) = (self.size("hidden_size"), self.w.get("model.embed_tokens.weight"));
        ids.iter().flat_map(|id| table[*id as usize * h..][..h].to_vec()).collect()
    }

    /// Logits of hidden states after the last layer.
    pub fn head(&self, x: &[f64]) -> Vec<f64> {
        let normed = rms_norm(x, self.w.get("model.norm.weight"), self.real("rms_norm_eps"));
        linear(&normed, self.w.get("lm_head.weight"), None, self.size("hidden_size"))
    }

    /// Logits of a model of dense layers, or of GPT-OSS's experts.
    pub fn dense(&self, ids: &[i32]) -> Vec<f64> {
        let latent = self.config["kv_lora_rank"].is_u64();
        let attention = |x: &[f64], i: usize| match latent {
            true => self.latent_attention(x, i),
            false => self.sink_attention(x, i),
        };
        let layers = self.size("num_hidden_layers");
        let block = |x: &[f64], i: usize| match self.config["num_local_experts"].is_u64() {
            true => self.experts(x, i),
            false => self.mlp(x, i),
        };
        let x = (0..layers).fold(self.embed(ids), |x, i| self.layer(&x, i, &attention, &block));
        self.head(&x)
    }

    /// Mean cross-entropy of each token's successor in its row.
    pub fn loss(&self, ids: &[i32]) -> f64 {
        let logits = self.dense(ids);
        let vocab = self.size("vocab_size");
        let counted: Vec<usize> = (0..ids.len()).filter(|t| (t + 1) % self.seq != 0).collect();
        let one = |t: &usize| {
            let row = &logits[t * vocab..][..vocab];
            row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[ids[t + 1] as usize]
        };
        counted.iter().map(one).sum::<f64>() / counted.len() as f64
    }
}

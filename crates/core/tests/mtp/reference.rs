//! f64 reference of the whole model: losses of every MTP depth, gradients by finite differences.

use super::*;
use ferrotron_core::Result;
use ferrotron_core::data::{Batch, Batches, IGNORE, Row};
use ferrotron_core::model::ModelConfig;
use ferrotron_core::train::Trainer;
use ferrotron_engine::Rank;
use std::collections::BTreeMap;

struct Only(Batch, usize);

impl Batches for Only {
    fn seq(&self) -> usize {
        self.1
    }
    fn samples(&self) -> u64 {
        u64::MAX
    }
    fn resets(&self) -> bool {
        self.0.cu_seqlens.is_some()
    }
    fn row(&self, _: u64, _: &mut Row) -> Result<()> {
        panic!("only the whole batch is asked for")
    }
    fn batch(&self, _: u64, _: usize) -> Result<Batch> {
        Ok(self.0.clone())
    }
}

type Rows = Vec<Vec<f64>>;

struct Twin<'a> {
    m: &'a ModelConfig,
    w: BTreeMap<String, Vec<f64>>,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl Twin<'_> {
    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let r = 1.0 / (dot(x, x) / x.len() as f64 + f64::from(self.m.norm.eps)).sqrt();
        x.iter().zip(&self.w[&format!("{name}.weight")]).map(|(x, g)| x * r * g).collect()
    }

    fn map(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let w = &self.w[&format!("{name}.weight")];
        let mut y: Vec<f64> = w.chunks(x.len()).map(|row| dot(row, x)).collect();
        if let Some(bias) = self.w.get(&format!("{name}.bias")) {
            y.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
        y
    }

    fn rotated(&self, mut x: Vec<f64>, position: usize) -> Vec<f64> {
        let d = self.m.head_dim;
        for head in x.chunks_mut(d) {
            for i in 0..d / 2 {
                let (s, c) = (position as f64 * 1e4f64.powf(-2.0 * i as f64 / d as f64)).sin_cos();
                let (a, b) = (head[i], head[i + d / 2]);
                (head[i], head[i + d / 2]) = (a * c - b * s, b * c + a * s);
            }
        }
        x
    }

    /// One sequence through a layer.
    fn layer(&self, name: &str, x: &mut Rows) {
        let (d, group) = (self.m.head_dim, self.m.heads / self.m.kv_heads);
        let normed: Rows = x.iter().map(|x| self.norm(&format!("{name}.attn_norm"), x)).collect();
        let part = |kind: &str| -> Rows {
            normed.iter().map(|x| self.map(&format!("{name}.attn.{kind}"), x)).collect()
        };
        let rotated =
            |rows: Rows| -> Rows { rows.into_iter().enumerate().map(|(t, x)| self.rotated(x, t)).collect() };
        let (q, k, v) = (rotated(part("q")), rotated(part("k")), part("v"));
        for t in 0..x.len() {
            let mut out = vec![0.0; self.m.heads * d];
            for h in 0..self.m.heads {
                let kv = h / group * d..(h / group + 1) * d;
                let score =
                    |s: usize| (dot(&q[t][h * d..(h + 1) * d], &k[s][kv.clone()]) / (d as f64).sqrt()).exp();
                let all: f64 = (0..=t).map(score).sum();
                for s in 0..=t {
                    let p = score(s) / all;
                    out[h * d..].iter_mut().zip(&v[s][kv.clone()]).for_each(|(o, v)| *o += p * v);
                }
            }
            let out = self.map(&format!("{name}.attn.out"), &out);
            x[t].iter_mut().zip(out).for_each(|(x, o)| *x += o);
            let normed = self.norm(&format!("{name}.mlp_norm"), &x[t]);
            let (gate, up) = (
                self.map(&format!("{name}.mlp.gate"), &normed),
                self.map(&format!("{name}.mlp.up"), &normed),
            );
            let inside: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let out = self.map(&format!("{name}.mlp.down"), &inside);
            x[t].iter_mut().zip(out).for_each(|(x, o)| *x += o);
        }
    }

    fn embedded(&self, id: i32) -> Vec<f64> {
        let h = self.m.hidden;
        self.w["embed.tokens"][id as usize * h..][..h].to_vec()
    }

    /// Sum of the losses of labelled tokens, and their count.
    fn loss(&self, rows: &Rows, labels: &[i32]) -> (f64, f64) {
        let w = &self.w[if self.m.tied { "embed.tokens" } else { "head.weight" }];
        let mut sum = (0.0, 0.0);
        for (x, label) in rows.iter().zip(labels).filter(|(_, l)| **l != IGNORE) {
            let z: Vec<f64> = w.chunks(x.len()).map(|row| dot(row, x)).collect();
            sum.0 += z.iter().map(|z| z.exp()).sum::<f64>().ln() - z[*label as usize];
            sum.1 += 1.0;
        }
        sum
    }

    /// Mean main loss and mean loss of each MTP depth.
    fn losses(&self, b: &Batch, lengths: &[usize]) -> Vec<f64> {
        let mtp = self.m.mtp.unwrap();
        let mut sums = vec![(0.0, 0.0); 1 + mtp.layers];
        let mut start = 0;
        for len in lengths {
            let (ids, labels) = (&b.tokens[start..start + len], &b.labels[start..start + len]);
            start += len;
            let mut x: Rows = ids.iter().map(|id| self.embedded(*id)).collect();
            (0..self.m.layers).for_each(|i| self.layer(&format!("layers.{i}"), &mut x));
            let mut h: Rows = x.iter().map(|x| self.norm("final_norm", x)).collect();
            for (d, sum) in sums.iter_mut().enumerate() {
                let ahead = |list: &[i32], fill: i32| -> Vec<i32> {
                    (0..*len).map(|t| list.get(t + d).copied().unwrap_or(fill)).collect()
                };
                if d > 0 {
                    let name = format!("mtp.{}", if mtp.shared_layer { 0 } else { d - 1 });
                    for (h, id) in h.iter_mut().zip(ahead(ids, 0)) {
                        let mut both = self.norm(&format!("{name}.enorm"), &self.embedded(id));
                        both.extend(self.norm(&format!("{name}.hnorm"), h));
                        *h = self.map(&format!("{name}.eh"), &both);
                    }
                    self.layer(&format!("{name}.layer"), &mut h);
                    h.iter_mut().for_each(|h| *h = self.norm(&format!("{name}.norm"), h));
                }
                let (loss, n) = self.loss(&h, &ahead(labels, IGNORE));
                *sum = (sum.0 + loss, sum.1 + n);
            }
        }
        sums.into_iter().map(|(loss, n)| loss / n).collect()
    }

    fn total(&self, b: &Batch, lengths: &[usize], factor: f64) -> f64 {
        let all = self.losses(b, lengths);
        all[0] + factor / (all.len() - 1) as f64 * all[1..].iter().sum::<f64>()
    }
}

#[test]
fn losses_and_gradients_are_those_of_f64() {
    const SEQ: usize = 8;
    let tokens: Vec<i32> = (0..2 * SEQ as i32).map(|i| (i * i * 7 + 3 * i) % 29).collect();
    let labels = tokens.iter().map(|t| if *t % 7 == 5 { IGNORE } else { (t * 5 + 2) % 29 }).collect();
    for (set, offsets) in [
        (&["model.tied=false"][..], None),
        (&["model.tied=true", "mtp.layers=3"], Some(vec![0, 5, 8, 9, 16])),
        (&["mtp.shared_layer=true", "model.tied=false"], Some(vec![0, 8, 10, 16])),
    ] {
        let sizes = [
            "model.vocab=29",
            "model.hidden=16",
            "model.ffn=24",
            "model.layers=2",
            "model.max_positions=8",
            "model.init_std=0.3",
            "data.path=none_text_document",
            "data.eod=0",
            "data.seq_len=8",
            "train.global_batch=2",
            "train.micro_batch=2",
        ];
        let resolved = recipe(&one(), &[&sizes[..], set].concat());
        let mut trainer = Trainer::new(Rank::cpu(1, 5).unwrap(), &resolved).unwrap();
        let lengths: Vec<usize> = match &offsets {
            None => vec![SEQ; 2],
            Some(o) => o.windows(2).map(|w: &[i32]| (w[1] - w[0]) as usize).collect(),
        };
        let positions = lengths.iter().flat_map(|n| 0..*n as i32).collect();
        let (tokens, labels) = (tokens.clone(), Vec::clone(&labels));
        let batch = Batch { tokens, labels, positions, cu_seqlens: offsets, padding: None, varies: false };
        let wide = |v: &[f32]| v.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
        let w = trainer.weights().unwrap().iter().map(|v| (v.name.clone(), wide(&v.values))).collect();
        let mut twin = Twin { m: &resolved.model, w };

        let report = trainer.train_step(&Only(batch.clone(), SEQ)).unwrap();
        let ours: Vec<f64> = std::iter::once(report.loss).chain(report.mtp_losses).collect();
        let wanted = twin.losses(&batch, &lengths);
        assert_eq!(ours.len(), wanted.len());
        for (a, b) in ours.iter().zip(&wanted) {
            assert!((a / b - 1.0).abs() < 2e-6, "{set:?}: {ours:?} instead of {wanted:?}");
        }

        let factor = resolved.config.mtp.loss_weight;
        let mut state = 1u64;
        for g in trainer.gradients().unwrap() {
            let g_wide = wide(&g.values);
            let size = dot(&g_wide, &g_wide).sqrt();
            assert!(size > 0.0, "{set:?} {}", g.name);
            // Along the gradient itself, and along random signs.
            let along: Vec<f64> = g_wide.iter().map(|x| x / size).collect();
            let signs = g_wide.iter().map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (if state >> 63 == 0 { 1.0 } else { -1.0 }) / (g_wide.len() as f64).sqrt()
            });
            for v in [along, signs.collect()] {
                let own = twin.w[&g.name].clone();
                let mut at = |step: f64| {
                    let moved = own.iter().zip(&v).map(|(w, v)| w + step * v).collect();
                    twin.w.insert(g.name.clone(), moved);
                    twin.total(&batch, &lengths, factor)
                };
                let slope = (at(1e-5) - at(-1e-5)) / 2e-5;
                twin.w.insert(g.name.clone(), own);
                let found = dot(&g_wide, &v);
                assert!(
                    (found - slope).abs() < 2e-5 * size + 1e-8,
                    "{set:?} {}: {found} instead of {slope}",
                    g.name
                );
            }
        }
    }
}

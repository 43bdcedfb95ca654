//! How much memory a step needs, and the cheapest change that makes it fit.

use super::state;
use crate::config::{Master, Moments, OptimizerKind, PipelineOrder, Resolved};
use crate::model::ModelConfig;
use crate::{Error, Result};
use ferrotron_engine::precision::Policy;
use ferrotron_engine::{Rank, Recompute};
use ferrotron_tensor::{DType, Error as TensorError, human};

/// What decides the memory of a step.
#[derive(Clone, Debug)]
pub struct Need {
    model: ModelConfig,
    seq: usize,
    /// Sequences of a pass.
    pub micro_batch: usize,
    dtype: DType,
    /// Weights of the model that are bytes.
    stored: usize,
    /// Bytes of an element of what linear maps keep of their inputs.
    inputs: usize,
    /// Bytes of what is made of a logit's gradient for products.
    logits: usize,
    /// How moments are kept, and how many there are.
    pub moments: (Moments, usize),
    /// How master weights are kept.
    pub master: Master,
    /// What backward computes again.
    pub recompute: Recompute,
    /// How many times as much is kept as in plain 1F1B: a fraction.
    held: (usize, usize),
    /// Ranks that share the layers, their products, the tokens of a pass, and optimizer state.
    shared: Shared,
}

/// Over how many ranks things are divided.
#[derive(Clone, Copy, Debug)]
struct Shared {
    layers: usize,
    products: usize,
    tokens: usize,
    optimizer: usize,
    gradients: usize,
}

impl Need {
    /// That of a recipe.
    pub fn of(r: &Resolved) -> Need {
        let (o, p) = (&r.config.optimizer, &r.config.parallel);
        let copies = |from: usize| if p.zero >= from { p.cp * p.dp } else { 1 };
        let shared = Shared {
            layers: p.pp,
            products: p.tp,
            tokens: p.cp * p.tp,
            optimizer: copies(1),
            gradients: copies(2),
        };
        Need {
            shared,
            model: r.model.clone(),
            seq: r.plan.seq_len,
            micro_batch: r.plan.micro_batch,
            dtype: r.config.precision.dtype.dtype(),
            stored: weights_in_bytes(&r.model, &r.policy()),
            inputs: match r.policy().recipe {
                Some(recipe) if !recipe.emulated() => 1,
                _ => r.config.precision.dtype.dtype().size(),
            },
            logits: match r.policy().of(&["head"]) {
                // Rounded numbers, or bytes, of each way it is used.
                Some(e) if e.recipe.emulated() => 2 * r.config.precision.dtype.dtype().size(),
                Some(_) => 2,
                None => 0,
            },
            moments: (o.moments, if o.kind == OptimizerKind::Sgd { 1 } else { 2 }),
            master: o.master,
            recompute: state::recompute(&r.config.train.recompute),
            // Of 1/(P·v) of the layers each, 2P + (v−1)·P micro-batches instead of some P·v.
            held: if p.schedule == PipelineOrder::Paired { (p.vp + 1, p.vp) } else { (1, 1) },
        }
    }

    /// Bytes of optimizer state for each parameter, before ranks divide it: master and moments. Weights in f32 are
    /// their own masters.
    pub fn optimizer_bytes(&self) -> f64 {
        let master = match (self.dtype, self.master) {
            (DType::F32, _) => 0.0,
            (_, Master::F32) => 4.0,
            (_, Master::Remainder) => 2.0,
        };
        master + self.moments.1 as f64 * self.moments.0.bytes()
    }

    /// Bytes of a parameter that stay over a step, in words.
    pub fn per_parameter(&self) -> String {
        let (all, state) = (self.model.parameters(), self.optimizer_bytes());
        let weight = self.weights(all) as f64 / all.max(1) as f64;
        let short = |x: f64| format!("{x:.2}").trim_end_matches('0').trim_end_matches('.').to_string();
        let [total, weight, state] = [weight + 4.0 + state, weight, state].map(short);
        format!("{total} bytes per parameter: weight {weight}, gradient 4, optimizer state {state}")
    }

    /// Bytes of the weights of a part of the model.
    fn weights(&self, parameters: usize) -> usize {
        let stored =
            (self.stored as f64 * parameters as f64 / self.model.parameters().max(1) as f64) as usize;
        parameters * self.dtype.size() - stored * (self.dtype.size() - 1)
    }

    /// Bytes that stay over a step on one rank: weight, f32 gradient, master and moments of its parameters. Where the
    /// weight is its own master, other ranks' parts of it are here too.
    pub fn fixed(&self) -> usize {
        let s = &self.shared;
        let parameters = self.model.parameters() / (s.layers * s.products);
        let state = self.optimizer_bytes() * (parameters / s.optimizer) as f64;
        self.weights(parameters) + parameters * 4 / s.gradients + state as usize
    }

    /// Bytes a pass keeps at its fullest: when the loss has been taken and backward begins.
    pub fn activations(&self) -> usize {
        let m = &self.model;
        let size = self.dtype.size();
        let (h, f) = (m.hidden, m.ffn);
        let inside = f * if m.gated { 2 } else { 1 };
        let normed = |n: usize| if self.recompute.norm { 0 } else { n };
        // The residual stream twice, then what each block keeps of its own.
        let (qkv, narrow) = operands(m);
        let heads = qkv + m.heads * m.value_dim();
        let attention = match self.recompute.attention {
            true => 0,
            false => heads * size + normed(h + narrow) * self.inputs + 4 * m.heads,
        };
        let act = if self.recompute.activation { 0 } else { f };
        let mlp = if self.recompute.mlp { 0 } else { inside * size + (act + normed(h)) * self.inputs };
        let post = if m.post_norms { 2 * h } else { 0 };
        let whole = (2 * h + post) * size + attention + mlp;
        let (depth, all) = (m.mtp_depth(), m.layers + m.mtp_depth());
        let layers = if self.recompute.layer { all * h * size + whole } else { all * whole };
        // Of each prediction further ahead: its embedding, both halves of what is joined, its output, its logits.
        let further = depth * (m.vocab + 5 * h) * size;
        // Logits become their own gradient; a few rows of the residual stream are in flight. The first stage of a
        // pipeline holds as many micro-batches as there are stages: what it has fewer of in layers it has more of in these.
        let row = layers + further + m.vocab * (size + self.logits) + 4 * h * size;
        self.micro_batch * self.seq / self.shared.tokens * row * self.held.0 / self.held.1
    }

    fn total(&self) -> usize {
        self.fixed() + self.activations()
    }

    /// Changes that save memory, the cheapest in time first, each with what to write.
    fn changes(&self) -> Vec<(String, Need)> {
        let mut out = Vec::new();
        if self.held.0 > self.held.1 {
            out.push(("parallel.schedule=1f1b".to_string(), Need { held: (1, 1), ..self.clone() }));
        }
        let halves =
            std::iter::successors(Some(self.micro_batch / 2), |n| Some(n / 2)).take_while(|n| *n > 0);
        out.extend(
            halves.map(|n| (format!("train.micro_batch={n}"), Need { micro_batch: n, ..self.clone() })),
        );
        let (last, least) = out.last().cloned().unwrap_or((String::new(), self.clone()));
        let and = |change: &str| if last.is_empty() { change.into() } else { format!("{last} {change}") };
        let again = Recompute { norm: true, activation: true, ..self.recompute };
        let full = Recompute { layer: true, ..Recompute::default() };
        let narrow = (Moments::Bf16, self.moments.1);
        out.push((
            and("train.recompute=[\"norm\",\"activation\"]"),
            Need { recompute: again, ..least.clone() },
        ));
        out.push((and("train.recompute=full"), Need { recompute: full, ..least.clone() }));
        out.push((
            and("train.recompute=full optimizer.moments=bf16"),
            Need { recompute: full, moments: narrow, ..least },
        ));
        out
    }

    /// What to change so that a step fits in `room` bytes, in one sentence.
    pub fn advice(&self, room: usize) -> String {
        // Memory comes in pieces: a little must stay free.
        let usable = room / 100 * 95;
        let needs = format!("this recipe needs about {} of {}", human(self.total()), human(room));
        match self.changes().into_iter().find(|(_, n)| n.total() <= usable) {
            Some((change, n)) => {
                let set: Vec<String> = change.split(' ').map(|c| format!("--set {c}")).collect();
                format!(
                    "{needs}; the cheapest change that fits is {} (about {})",
                    set.join(" "),
                    human(n.total())
                )
            }
            None => {
                format!(
                    "{needs}, and no change of batch or recomputation makes it fit; take more ranks (parallel.tp, parallel.pp) or a smaller model"
                )
            }
        }
    }
}

/// Elements that attention keeps of a token to make q, k and v from, and outputs of norms between its maps.
fn operands(m: &ModelConfig) -> (usize, usize) {
    let (q, kv) = (m.heads * m.head_dim, m.kv_heads * m.head_dim);
    match &m.mla {
        None => (q + 2 * kv + if m.qk_norm { q + kv } else { 0 }, 0),
        Some(l) => {
            let narrow = l.q_lora_rank.unwrap_or(0) + l.kv_lora_rank;
            (q + m.heads * (l.nope_dim + l.v_dim) + narrow + l.rope_dim, narrow)
        }
    }
}

/// Elements of the weights that are bytes under a policy.
pub(crate) fn weights_in_bytes(m: &ModelConfig, policy: &Policy) -> usize {
    let stored = |layer: usize, names: &[String]| {
        let layer = match layer.checked_sub(m.layers) {
            None => format!("layers.{layer}"),
            Some(d) => format!("mtp.{d}.layer"),
        };
        let names: Vec<String> = names.iter().map(|n| format!("{layer}.{n}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        policy.of(&names).is_some_and(|e| e.stored)
    };
    let ups: &[&str] = if m.gated { &["gate", "up"] } else { &["up"] };
    // Two maps between widths, so many times.
    let mlp = |layer, name: &str, [width, f]: [usize; 2], times: usize| {
        let names = |of: &[&str]| of.iter().map(|n| format!("{name}.{n}")).collect::<Vec<_>>();
        let of = |maps: &[&str]| match stored(layer, &names(maps)) {
            true => maps.len().saturating_mul(width).saturating_mul(f).saturating_mul(times),
            false => 0,
        };
        of(ups).saturating_add(of(&["down"]))
    };
    let ffn = |i| match m.mixture(i) {
        None => mlp(i, "mlp", [m.hidden, m.ffn], 1),
        Some(x) => {
            let shared = x.shared_ffn.map_or(0, |f| mlp(i, "moe.shared", [m.hidden, f], 1));
            mlp(i, "moe.experts", [x.latent.unwrap_or(m.hidden), x.ffn], x.experts).saturating_add(shared)
        }
    };
    let attention = |i| -> usize {
        let names = |names: &[&str]| names.iter().map(|n| n.to_string()).collect::<Vec<_>>();
        let maps = m.attention_maps();
        let bytes = maps.iter().filter(|map| stored(i, &names(map.names))).map(|map| map.weights());
        bytes.fold(0, usize::saturating_add)
    };
    // A table that is looked up in as well stays numbers.
    let head = policy.of(&["head"]).is_some_and(|e| e.stored && !m.tied);
    let all = m.layers + m.mtp.map_or(0, |p| p.modules());
    let layers = (0..all).flat_map(|i| [attention(i), ffn(i)]).fold(0, usize::saturating_add);
    layers.saturating_add(if head { m.vocab.saturating_mul(m.hidden) } else { 0 })
}

/// An out-of-memory error with the way out; any other error as it is.
pub(super) fn advise<T>(result: Result<T>, rank: &Rank, need: &Need) -> Result<T> {
    result.map_err(|error| match error {
        Error::Tensor(table @ TensorError::OutOfMemory { .. }) => {
            let card = rank.device().card().map(|c| c.memory);
            let advice = card.map_or_else(
                || "take a smaller train.micro_batch or a smaller model".into(),
                |room| need.advice(room),
            );
            Error::OutOfMemory { table, advice }
        }
        other => other,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{train, work};
    use ferrotron_tensor::Category;
    use std::time::Instant;

    fn need(name: &str, set: &[&str]) -> Need {
        let mut recipe = work(name).unwrap();
        set.iter().for_each(|s| recipe.set(s).unwrap());
        Need::of(&recipe.resolve(None).unwrap())
    }

    #[test]
    fn estimates_are_near_what_a_step_takes() {
        for set in [
            &[][..],
            &["train.recompute=full"],
            &["precision.dtype=f32"],
            &["mtp.layers=2"],
            &["mtp.layers=1", "train.recompute=full"],
            &["optimizer.moments=bf16"],
            &["model.mla={ q_lora_rank = 96, kv_lora_rank = 64, nope_dim = 48, rope_dim = 32, v_dim = 48 }"],
            &["optimizer.moments=fp8", "optimizer.master=remainder"],
            &["precision.scaling=current", "precision.weights=fp8", "precision.except=\"mlp.up:output\""],
            &["precision.scaling=current", "precision.also=head"],
            &["precision.also=attention"],
        ] {
            let mut recipe = work("tiny").unwrap();
            set.iter().for_each(|s| recipe.set(s).unwrap());
            let r = recipe.resolve(None).unwrap();
            let bench = train(Rank::cpu(2, 0).unwrap(), &r, 0, 1, None, Instant::now()).unwrap();
            let measured = bench.memory.total_peak as f64;
            let ratio = Need::of(&r).total() as f64 / measured;
            assert!((0.8..1.25).contains(&ratio), "{set:?}: {ratio} of what was measured");
        }
    }

    /// By names, as the model declares them.
    #[test]
    fn weights_in_bytes_are_counted() {
        const FP8: [&str; 2] = ["precision.scaling=current", "precision.weights=fp8"];
        for except in [
            "[]",
            "\"attn.q\"",
            "\"layers.1\"",
            "[\"up:output\", \"first 1\"]",
            "\"attn.v\"",
            "\"mtp\"",
            "\"experts\"",
        ] {
            let latent = "model.mla={ kv_lora_rank = 64, nope_dim = 48, rope_dim = 32, v_dim = 48 }";
            const HEADS: [&str; 2] = ["precision.also=head", "model.tied=true"];
            const MIXTURE: [&str; 5] =
                ["moe.experts=4", "moe.topk=2", "moe.ffn=32", "moe.shared_ffn=48", "moe.dense=[0]"];
            for set in [
                &["model.gated=true"][..],
                &["model.gated=false"],
                &[latent],
                &["mtp.layers=2"],
                &HEADS[..1],
                &HEADS,
                &MIXTURE,
            ] {
                let mut recipe = work("tiny").unwrap();
                let except = format!("precision.except={except}");
                FP8.iter().chain(&[except.as_str()]).chain(set).for_each(|s| recipe.set(s).unwrap());
                let r = recipe.resolve(None).unwrap();
                let trainer = crate::train::Trainer::new(Rank::cpu(1, 0).unwrap(), &r).unwrap();
                let stored = trainer.params.specs().iter().filter(|s| s.stored());
                let counted: usize = stored.map(|s| s.numel()).sum();
                assert_eq!(Need::of(&r).stored, counted, "{except} {set:?}");
                assert!(counted > 0);
            }
        }
        let words = need("tiny", &FP8).per_parameter();
        assert!(words.contains("weight 1."), "{words}");
    }

    #[test]
    fn optimizer_state_takes_the_bytes_it_is_said_to() {
        for (set, bytes) in [
            (&["precision.dtype=bf16"][..], 12.0),
            (&["optimizer.moments=bf16"], 8.0),
            (&["optimizer.moments=bf16", "optimizer.master=remainder"], 6.0),
            (&["optimizer.moments=f16", "optimizer.master=remainder"], 6.0625),
            (&["optimizer.moments=fp8", "optimizer.master=remainder"], 4.0625),
            (&["optimizer.moments=fp8", "optimizer.master=remainder", "optimizer.kind=sgd"], 3.03125),
            (&["precision.dtype=f32"], 8.0),
        ] {
            let mut recipe = work("tiny").unwrap();
            set.iter().for_each(|s| recipe.set(s).unwrap());
            let r = recipe.resolve(None).unwrap();
            assert_eq!(Need::of(&r).optimizer_bytes(), bytes, "{set:?}");
            let rank = Rank::cpu(1, 0).unwrap();
            let trainer = crate::train::Trainer::new(rank.clone(), &r).unwrap();
            let held = rank.device().memory().now[Category::Optimizer as usize] as f64;
            let measured = held / trainer.params.numel() as f64;
            // Gaps between parameters, step scalars, and what an allocation is rounded up to.
            assert!((1.0..1.02).contains(&(measured / bytes)), "{set:?}: {measured} instead of {bytes}");
        }
        let words = need("tiny", &["optimizer.moments=fp8", "optimizer.master=remainder"]).per_parameter();
        assert_eq!(words, "10.06 bytes per parameter: weight 2, gradient 4, optimizer state 4.06");
    }

    #[test]
    fn pairs_of_passes_keep_more_and_the_way_back_is_named() {
        let moe = [
            "moe.experts=8",
            "parallel.dp=2",
            "parallel.ep=2",
            "train.micro_batch=64",
            "train.global_batch=1024",
        ];
        let with = |more: &[&str]| need("llama-1b", &[&moe[..], more].concat());
        let plain = with(&[]);
        let paired = with(&["parallel.schedule=paired"]);
        assert_eq!(paired.activations(), 2 * plain.activations());
        let pipeline = ["parallel.pp=2", "parallel.vp=2"];
        let chunks = with(&[&pipeline[..], &["parallel.schedule=paired"]].concat()).activations();
        assert_eq!(chunks, with(&pipeline).activations() / 2 * 3);
        let room = paired.fixed() + plain.activations() / 2 * 3;
        assert!(paired.advice(room).contains("--set parallel.schedule=1f1b"), "{}", paired.advice(room));
    }

    #[test]
    fn the_cheapest_change_that_fits_is_named() {
        let need = need("llama-1b", &["train.micro_batch=64", "train.global_batch=64"]);
        let gib = |n: usize| n << 30;
        assert!(need.advice(gib(139)).contains("--set train.micro_batch="), "{}", need.advice(gib(139)));
        assert!(need.advice(gib(21)).contains("recompute"), "{}", need.advice(gib(21)));
        assert!(need.advice(gib(8)).contains("smaller model"), "{}", need.advice(gib(8)));
    }
}

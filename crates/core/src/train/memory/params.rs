//! Parameters and weights in bytes, counted from a model's sizes.

use crate::model::ModelConfig;
use ferrotron_engine::quant::Policy;

/// Numbers of things, those of experts apart: other ranks divide them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ByExpert {
    pub(crate) experts: usize,
    pub(crate) others: usize,
}

impl ByExpert {
    pub(crate) fn sum(self) -> usize {
        self.experts.saturating_add(self.others)
    }
}

/// Parameters of a model.
pub(super) fn parameters(m: &ModelConfig) -> ByExpert {
    let of = |i| {
        m.moe_layer(i).map_or(0, |x| {
            let (width, up) = (x.latent.unwrap_or(m.hidden), if m.gated { 2 } else { 1 });
            let biases = if x.bias { up * x.ffn + width } else { 0 };
            x.experts
                .saturating_mul((up + 1).saturating_mul(width).saturating_mul(x.ffn).saturating_add(biases))
        })
    };
    let experts = (0..layers(m)).map(of).fold(0, usize::saturating_add);
    ByExpert { experts, others: m.parameters().saturating_sub(experts) }
}

/// Layers, those that predict further ahead included.
fn layers(m: &ModelConfig) -> usize {
    m.layers + m.mtp.map_or(0, |p| p.modules())
}

/// Elements of the weights that are bytes under a policy.
pub(crate) fn fp8_weight_counts(m: &ModelConfig, policy: &Policy) -> ByExpert {
    let stored = |layer: usize, names: &[String]| {
        let layer = match layer.checked_sub(m.layers) {
            None => format!("layers.{layer}"),
            Some(d) => format!("mtp.{d}.layer"),
        };
        let names: Vec<String> = names.iter().map(|n| format!("{layer}.{n}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        policy.of(&names).is_some_and(|e| e.fp8_resident)
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
    let experts = |i| match m.moe_layer(i) {
        None => 0,
        Some(x) => mlp(i, "moe.experts", [x.latent.unwrap_or(m.hidden), x.ffn], x.experts),
    };
    let ffn = |i| match m.moe_layer(i) {
        None => mlp(i, "mlp", [m.hidden, m.ffn], 1),
        Some(x) => x.shared_ffn.map_or(0, |f| mlp(i, "moe.shared", [m.hidden, f], 1)),
    };
    let attention = |i| -> usize {
        let names = |names: &[&str]| names.iter().map(|n| n.to_string()).collect::<Vec<_>>();
        let maps = m.attention_linears();
        let bytes = maps.iter().filter(|map| stored(i, &names(map.names))).map(|linear| linear.weights());
        bytes.fold(0, usize::saturating_add)
    };
    // A table that is looked up in as well stays numbers.
    let head = policy.of(&["head"]).is_some_and(|e| e.fp8_resident && !m.tied);
    let head = if head { m.vocab.saturating_mul(m.hidden) } else { 0 };
    let sum = |of: &dyn Fn(usize) -> usize| (0..layers(m)).map(of).fold(0, usize::saturating_add);
    let others = sum(&attention).saturating_add(sum(&ffn)).saturating_add(head);
    ByExpert { experts: sum(&experts), others }
}

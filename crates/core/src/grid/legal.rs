//! Validation of layouts, with the nearest valid sizes in the error.

use super::{
    axes::{Axes, Axis},
    layout::{ORDER, RankLayout, gcd},
};
use crate::{Error, Result};

type Field = (&'static str, fn(&RankLayout) -> usize, fn(&mut RankLayout, usize));

/// The sizes that an error may suggest to change.
const FIELDS: [Field; 5] = [
    ("tp", |l| l.tp, |l, n| l.tp = n),
    ("cp", |l| l.cp, |l, n| l.cp = n),
    ("pp", |l| l.pp, |l, n| l.pp = n),
    ("ep", |l| l.ep, |l, n| l.ep = n),
    ("etp", |l| l.etp(), |l, n| l.etp = Some(n)),
];

/// Sizes of a model that a layout must divide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelSizes {
    /// Number of query heads.
    pub heads: usize,
    /// Number of key/value heads; 0 if unknown.
    pub kv_heads: usize,
    /// Vocabulary size; 0 if unknown.
    pub vocab: usize,
    /// Width of a dense MLP, 0 for none.
    pub ffn: usize,
    /// Number of experts, 0 for a dense model.
    pub experts: usize,
    /// Width of an expert's MLP.
    pub expert_ffn: usize,
    /// Width of the shared expert's MLP, 0 for none.
    pub shared_ffn: usize,
    /// The QK norm runs over all heads at once, which no tensor-parallel rank holds.
    pub qk_norm_all_heads: bool,
}

/// What is wrong with a layout. Suggestions are added afterwards where the sizes are at fault.
enum LayoutError {
    /// The number of ranks is not a multiple of this product of sizes.
    World(&'static str, [usize; 3], usize),
    /// `dp` and the number of ranks contradict each other.
    Replicas,
    Other(String),
}

/// Builds both grids; the error says in one sentence what is wrong and what to change.
pub(super) fn grids(layout: &RankLayout, world: usize) -> Result<(Axes, Axes)> {
    let least = layout.smallest()?;
    build(layout, world).map_err(|wrong| {
        Error::Invalid(match wrong {
            LayoutError::World(name, keys, unit) => {
                let sizes = keys.map(|k| FIELDS[k].1(layout).to_string()).join("·");
                let (worlds, sizes_near) = (near_worlds(world, least), near_sizes(layout, world, &keys));
                format!("{world} ranks do not divide by {name} = {sizes} = {unit}; take {worlds}{sizes_near}")
            }
            LayoutError::Replicas if world.is_multiple_of(least) => {
                let fits = world / least;
                format!("{layout} does not make {world} ranks; take {} or dp={fits}", needs(layout))
            }
            LayoutError::Replicas => {
                let near = near_sizes(layout, world, &[0, 1, 2, 3]);
                format!("{layout} does not make {world} ranks; take {}{near}", needs(layout))
            }
            LayoutError::Other(what) => what,
        })
    })
}

fn needs(layout: &RankLayout) -> String {
    layout.world().map_or("a smaller dp".into(), |n| format!("{n} ranks"))
}

/// Builds both grids without suggestions in its error, so that the search for suggestions can use it.
fn build(layout: &RankLayout, world: usize) -> Result<(Axes, Axes), LayoutError> {
    let other = |what: String| Err(LayoutError::Other(what));
    let least = layout.smallest().map_err(|e| LayoutError::Other(e.to_string()))?;
    if world == 0 || layout.vp == 0 || layout.instances == 0 || layout.dp == Some(0) {
        return other(format!("{layout} on {world} ranks: every size must be at least 1; 1 means not split"));
    }
    if layout.vp > 1 && layout.pp == 1 {
        return other(format!("vp={} needs a pipeline; set vp=1, or pp=2 or more", layout.vp));
    }
    let dense = layout.tp * layout.cp * layout.pp;
    let expert = layout.etp() * layout.ep * layout.pp;
    if !world.is_multiple_of(dense) {
        return Err(LayoutError::World("tp·cp·pp", [0, 1, 2], dense));
    }
    if !world.is_multiple_of(expert) {
        return Err(LayoutError::World("etp·ep·pp", [4, 3, 2], expert));
    }
    if layout.dp.is_some_and(|dp| least.checked_mul(dp) != Some(world)) {
        return Err(LayoutError::Replicas);
    }
    let (dp, edp) = (world / dense, world / expert);
    let order = Axis::list(&layout.order, "the order").map_err(|e| LayoutError::Other(e.to_string()))?;
    let axes = |tp, cp, ep, dp| {
        let size = |axis| match axis {
            Axis::Tp => tp,
            Axis::Cp => cp,
            Axis::Ep => ep,
            Axis::Dp => dp,
            Axis::Pp => layout.pp,
        };
        Axes::new(&order, size).map_err(|axis| {
            let (order, name, n) = (&layout.order, axis.name(), size(axis));
            LayoutError::Other(format!(
                "the order {order:?} leaves out {name}, which is {n} here; add {name}, as in {ORDER}"
            ))
        })
    };
    let (dense, expert) = (axes(layout.tp, layout.cp, 1, dp)?, axes(layout.etp(), 1, layout.ep, edp)?);
    // Both grids must have the same pipelines, which they do if the strides are equal.
    let last = order.last() == Some(&Axis::Pp);
    let same = dense.stride(Axis::Pp) == expert.stride(Axis::Pp) && (last || dp == edp);
    if layout.pp > 1 && !same {
        return other(format!(
            "the order {:?} gives dense and expert ranks different pipelines (dp {dp}, expert dp {edp}); \
             put pp last, as in {ORDER}, or choose etp·ep = tp·cp",
            layout.order
        ));
    }
    check_instances(layout, dp * layout.cp, edp)?;
    let levels = &layout.cp_levels;
    if !levels.is_empty() && levels.iter().try_fold(1usize, |a, b| a.checked_mul(*b)) != Some(layout.cp) {
        return other(format!(
            "the levels {levels:?} of context parallelism must multiply to cp={}; take [{}]",
            layout.cp, layout.cp
        ));
    }
    Ok((dense, expert))
}

fn check_instances(layout: &RankLayout, replicas: usize, edp: usize) -> Result<(), LayoutError> {
    let (n, both) = (layout.instances, gcd(replicas, edp));
    if both.is_multiple_of(n) {
        return Ok(());
    }
    Err(LayoutError::Other(format!(
        "{n} optimizer instances must divide the {replicas} ranks of dp·cp and the {edp} replicas of each expert; take {}",
        near(n, divisors(both))
    )))
}

impl ModelSizes {
    /// The sizes of an architecture.
    pub fn of(m: &crate::model::ModelConfig) -> ModelSizes {
        // The dense width does not matter where every layer is an MoE layer.
        let ffn = if m.moe_layer_count() == m.layers { 0 } else { m.ffn };
        let (experts, expert_ffn, shared_ffn) =
            m.moe.as_ref().map_or((0, 0, 0), |e| (e.experts, e.ffn, e.shared_ffn.unwrap_or(0)));
        let (heads, kv_heads, vocab) = (m.heads, m.kv_heads, m.vocab);
        let qk_norm_all_heads = m.qk_norm && m.qk_norm_all_heads;
        ModelSizes { heads, kv_heads, vocab, ffn, experts, expert_ffn, shared_ffn, qk_norm_all_heads }
    }

    /// The largest tensor-parallel size: it divides the heads and the widths of dense MLPs and shared experts.
    fn largest_tp(&self) -> usize {
        gcd(self.heads, gcd(self.ffn, self.shared_ffn))
    }
}

impl RankLayout {
    /// Fails if tensor or expert parallelism does not divide the model's heads, widths or experts. Fewer key/value
    /// heads than tensor-parallel ranks are valid: they are replicated.
    pub fn check_model(&self, model: &ModelSizes) -> Result<()> {
        let moe = model.experts > 0;
        if model.qk_norm_all_heads && self.tp > 1 {
            let what = "splits the heads that the model's QK norm runs over at once; take tp=1 and shard by dp, pp or cp";
            return Err(Error::Invalid(format!("tp={} {what}", self.tp)));
        }
        if !moe && self.ep > 1 {
            let what = "needs an MoE model, which this is not; take ep=1";
            return Err(Error::Invalid(format!("ep={} {what}", self.ep)));
        }
        if moe && (self.ep == 0 || !model.experts.is_multiple_of(self.ep)) {
            let (ep, experts) = (self.ep, model.experts);
            return Err(Error::Invalid(format!(
                "ep={ep} does not divide the {experts} experts of the model; take ep={}",
                one_of(divisors(experts))
            )));
        }
        let tp = model.largest_tp();
        let etp = if moe { self.etp() } else { 1 };
        let rows = [
            ("tp", self.tp, model.heads, "attention heads of the model", tp),
            ("tp", self.tp, model.ffn, "MLP columns of the model", tp),
            ("tp", self.tp, model.shared_ffn, "columns of the shared expert's MLP", tp),
            ("etp", etp, model.expert_ffn, "columns of an expert's MLP", model.expert_ffn),
        ];
        for (key, size, whole, what, legal) in rows {
            if size == 0 || !whole.is_multiple_of(size) {
                let near = near(size, divisors(legal));
                let take = if near.is_empty() { "1".into() } else { near };
                return Err(Error::Invalid(format!(
                    "{key}={size} does not divide the {whole} {what}; take {key}={take}"
                )));
            }
        }
        let (tp, g) = (self.tp, model.kv_heads);
        if g > 0 && !g.is_multiple_of(tp) && !tp.is_multiple_of(g) {
            let legal = divisors(model.largest_tp()).filter(|n| g.is_multiple_of(*n) || n.is_multiple_of(g));
            return Err(Error::Invalid(format!(
                "tp={tp} neither divides the {g} key/value heads of the model nor is a multiple of them; take tp={}",
                near(tp, legal)
            )));
        }
        if model.vocab > 0 && tp > model.vocab {
            let (v, tp) = (model.vocab, self.tp);
            return Err(Error::Invalid(format!(
                "tp={tp} exceeds the {v} tokens of the vocabulary; take tp={}",
                near(tp, divisors(model.largest_tp()).filter(|n| *n <= v))
            )));
        }
        Ok(())
    }
}

/// The nearest numbers of ranks: "4 or 8 ranks".
fn near_worlds(world: usize, least: usize) -> String {
    let below = world / least * least;
    match below.checked_add(least) {
        _ if below == 0 => format!("{least} ranks"),
        Some(above) => format!("{below} or {above} ranks"),
        None => format!("{below} ranks"),
    }
}

/// The nearest valid values of each of some sizes, the others unchanged: ", or tp=3 or 6, or pp=…".
fn near_sizes(layout: &RankLayout, world: usize, keys: &[usize]) -> String {
    let mut out = String::new();
    for &key in keys {
        let (name, get, set) = FIELDS[key];
        let legal = divisors(world).filter(|&n| {
            let mut changed = layout.clone();
            set(&mut changed, n);
            build(&changed, world).is_ok()
        });
        let near = near(get(layout), legal);
        if !near.is_empty() {
            out += &format!(", or {name}={near}");
        }
    }
    out
}

/// Divisors up to 65536, ascending; suggestions look no further.
fn divisors(n: usize) -> impl Iterator<Item = usize> {
    (1..=n.min(1 << 16)).filter(move |d| n.is_multiple_of(*d))
}

/// All values of a list: "1, 2 or 4".
fn one_of(legal: impl Iterator<Item = usize>) -> String {
    let all: Vec<String> = legal.map(|n| n.to_string()).collect();
    match all.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => all.concat(),
    }
}

/// The nearest values of an ascending list below and above `n`: "2 or 4".
fn near(n: usize, legal: impl Iterator<Item = usize>) -> String {
    let (mut below, mut above) = (None, None);
    for value in legal {
        if value < n {
            below = Some(value);
        } else if value > n && above.is_none() {
            above = Some(value);
        }
    }
    let found: Vec<_> = below.into_iter().chain(above).map(|n: usize| n.to_string()).collect();
    found.join(" or ")
}

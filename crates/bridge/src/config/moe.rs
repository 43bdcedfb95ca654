//! Keys of `config.json` about mixtures of experts.

use crate::error::{Error, Result};
use crate::family::{Key, MoeField};
use crate::json::{Object, show};
use ferrotron_core::model::config::ModelConfig;
use ferrotron_core::model::moe_config::{Clamp, MoeConfig, ScoreKind};
use serde_json::{Value, json};

/// Experts of all layers of a model; more than this is a mistake, and lists of that many tensors are not made.
const MOST: usize = 1 << 22;

/// Sets what a key says of the mixtures.
pub(super) fn read(
    key: &Key,
    mix: MoeField,
    name: Option<&str>,
    o: &Object,
    c: &mut ModelConfig,
) -> Result<()> {
    let shown = name.or(key.names.first().copied()).unwrap_or_default();
    match mix {
        MoeField::Experts => moe_config(c).experts = key.size(o, name, c)?,
        MoeField::TopK => moe_config(c).topk = key.size(o, name, c)?,
        MoeField::ExpertFfn => moe_config(c).ffn = key.size(o, name, c)?,
        MoeField::NormTopkProb => moe_config(c).pre_softmax = !key.flag(o, name)?,
        MoeField::NormalizeSigmoid => {
            // One score divided by itself says nothing; several that are not divided by their sum are not ours.
            if key.flag(o, name)? != (moe_config(c).topk > 1) {
                let what =
                    format!("`{shown}` must be true for several experts of a token, and false for one");
                return Err(Error::unsupported(o.origin, what));
            }
        }
        MoeField::Groups => {
            let n = key.size(o, name, c)?;
            moe_config(c).groups = (n > 1).then_some([n, n]);
        }
        MoeField::TopkGroup => {
            let (keep, m) = (key.size(o, name, c)?, moe_config(c));
            m.groups = m.groups.map(|[n, _]| [n, keep]).filter(|[n, keep]| keep != n);
            // The reference ranks a group by its two best; ours by as many as are chosen of it.
            if m.groups.is_some() && m.topk != 2 * keep {
                let what = format!(
                    "`{shown}` is {keep} for {} experts of a token: groups are ranked by two experts each, so {} are supported",
                    m.topk,
                    m.topk / 2
                );
                return Err(Error::unsupported(o.origin, what));
            }
        }
        MoeField::RouteScale => moe_config(c).scale = key.real(o, name)? as f32,
        MoeField::SharedExperts => {
            let (n, m) = (key.size(o, name, c)?, moe_config(c));
            m.shared_ffn = (n > 0).then(|| n.saturating_mul(m.ffn));
        }
        MoeField::FirstKDense => {
            let dense = key.size(o, name, c)?;
            let layers = listable(o, c)?;
            moe_config(c).layers = (0..layers).map(|i| i >= dense).collect();
        }
        MoeField::SparseStep => {
            let step = key.size(o, name, c)?;
            if step == 0 {
                return Err(o.wrong(shown, "must be at least 1"));
            }
            let layers = listable(o, c)?;
            moe_config(c).layers = (1..=layers).map(|i| i % step == 0).collect();
        }
        MoeField::MlpOnlyLayers => {
            for v in name.map(|n| o.list(n)).transpose()?.flatten().into_iter().flatten() {
                let layer = v.as_u64().and_then(|i| usize::try_from(i).ok());
                // As the reference, which has no use for a layer that is not there.
                match layer.map(|i| moe_config(c).layers.get_mut(i)) {
                    Some(Some(is)) => *is = false,
                    Some(None) => {}
                    None => return Err(o.mistyped(shown, v, "a list of layers")),
                }
            }
        }
        MoeField::SwigluLimit => clamp(c).limit = key.real(o, name)? as f32,
        MoeField::SwigluAlpha => clamp(c).alpha = key.real(o, name)? as f32,
        MoeField::MustBe(word) => {
            if let Some(n) = name
                && o.text(n)?.is_some_and(|found| found != word)
            {
                let found = o.get(n).map(show).unwrap_or_default();
                let what = format!("`{shown}` is {found}, which is not supported ({word} is)");
                return Err(Error::unsupported(o.origin, what));
            }
        }
    }
    Ok(())
}

/// The same as JSON.
pub(super) fn value(mix: MoeField, c: &ModelConfig) -> Value {
    if let MoeField::MustBe(word) = mix {
        return json!(word);
    }
    let dense: Vec<usize> = (0..c.layers).filter(|i| c.moe_layer(*i).is_none()).collect();
    let Some(m) = &c.moe else {
        return match mix {
            MoeField::FirstKDense => json!(c.layers),
            MoeField::MlpOnlyLayers => json!(dense),
            MoeField::SparseStep | MoeField::RouteScale => json!(1),
            MoeField::NormTopkProb | MoeField::NormalizeSigmoid => json!(false),
            _ => json!(0),
        };
    };
    let bound = m.clamp.unwrap_or(CLAMP);
    match mix {
        MoeField::Experts => json!(m.experts),
        MoeField::TopK => json!(m.topk),
        MoeField::ExpertFfn => json!(m.ffn),
        MoeField::NormTopkProb => json!(!m.pre_softmax),
        MoeField::NormalizeSigmoid => json!(m.topk > 1),
        MoeField::Groups => json!(m.groups.map_or(1, |g| g[0])),
        MoeField::TopkGroup => json!(m.groups.map_or(1, |g| g[1])),
        MoeField::RouteScale => super::field::real(m.scale),
        MoeField::SharedExperts => json!(m.shared_ffn.map_or(0, |f| f / m.ffn.max(1))),
        MoeField::FirstKDense => json!((0..c.layers).take_while(|i| dense.contains(i)).count()),
        MoeField::MlpOnlyLayers => json!(dense),
        MoeField::SparseStep => json!(1),
        MoeField::SwigluLimit => super::field::real(bound.limit),
        MoeField::SwigluAlpha => super::field::real(bound.alpha),
        MoeField::MustBe(word) => json!(word),
    }
}

/// One way to say it, so that equal models compare equal: all layers are an empty list, none are no mixtures.
pub(super) fn normalize(o: &Object, c: &mut ModelConfig) -> Result<()> {
    let Some(m) = &mut c.moe else { return Ok(()) };
    if m.layers.iter().all(|is| *is) {
        m.layers.clear();
    } else if !m.layers.contains(&true) {
        c.moe = None;
        return Ok(());
    }
    if m.experts.saturating_mul(c.layers) > MOST {
        let what =
            format!("{} experts in each of {} layers are more than any model has", m.experts, c.layers);
        return Err(Error::config(o.origin, what));
    }
    Ok(())
}

/// Layers, if a list of them can be made.
fn listable(o: &Object, c: &ModelConfig) -> Result<usize> {
    if c.layers > 1 << 16 {
        return Err(o.wrong("num_hidden_layers", format_args!("is {}, which no model has", c.layers)));
    }
    Ok(c.layers)
}

/// Of GPT-OSS.
const CLAMP: Clamp = Clamp { limit: 7.0, alpha: 1.702, offset: 1.0 };

fn clamp(c: &mut ModelConfig) -> &mut Clamp {
    moe_config(c).clamp.get_or_insert(CLAMP)
}

/// The mixtures, to be filled in.
pub(crate) fn moe_config(c: &mut ModelConfig) -> &mut MoeConfig {
    c.moe.get_or_insert(MoeConfig {
        experts: 0,
        topk: 0,
        ffn: 0,
        layers: Vec::new(),
        score: ScoreKind::Softmax,
        pre_softmax: false,
        groups: None,
        scale: 1.0,
        expert_bias: false,
        router_bias: false,
        bias: false,
        clamp: None,
        latent: None,
        shared_ffn: None,
        shared_gate: false,
    })
}

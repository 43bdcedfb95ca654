//! Keys of `config.json` that describe MoE layers.

use crate::error::{Error, Result};
use crate::family::{Key, MoeField};
use crate::json::{Object, show};
use ferrotron_core::model::config::ModelConfig;
use ferrotron_core::model::moe_config::{Clamp, MoeConfig};
use serde_json::{Value, json};

/// Limit on layers × experts, so that a corrupt file cannot make us list billions of tensors.
const MAX_EXPERTS: usize = 1 << 22;

/// Limit on layers, for the same reason.
const MAX_LAYERS: usize = 1 << 16;

/// Experts whose scores DeepSeek-V3 adds up to rank a group.
const GROUP_RANK_TOPK: usize = 2;

/// Sets the field of [`MoeConfig`] that `key` stands for.
pub(super) fn read(
    key: &Key,
    field: MoeField,
    name: Option<&str>,
    o: &Object,
    c: &mut ModelConfig,
) -> Result<()> {
    let shown = name.or(key.names.first().copied()).unwrap_or_default();
    match field {
        MoeField::Experts => moe_config(c).experts = key.size(o, name, c)?,
        MoeField::TopK => moe_config(c).topk = key.size(o, name, c)?,
        MoeField::ExpertFfn => moe_config(c).ffn = key.size(o, name, c)?,
        MoeField::NormTopkProb => moe_config(c).pre_softmax = !key.flag(o, name)?,
        MoeField::NormalizeSigmoid => {
            let (on, m) = (key.flag(o, name)?, moe_config(c));
            // One way to say the default, so that equal models compare equal.
            m.normalize = (on != (m.topk > 1)).then_some(on);
        }
        MoeField::Groups => {
            let n = key.size(o, name, c)?;
            moe_config(c).groups = (n > 1).then_some([n, n]);
        }
        MoeField::TopkGroup => {
            let (keep, m) = (key.size(o, name, c)?, moe_config(c));
            // Keeping every group limits nothing.
            m.groups = m.groups.map(|[n, _]| [n, keep]).filter(|[n, keep]| keep != n);
            let default = m.topk.is_multiple_of(keep.max(1)) && m.topk / keep.max(1) == GROUP_RANK_TOPK;
            m.group_rank_topk = (m.groups.is_some() && !default).then_some(GROUP_RANK_TOPK);
        }
        MoeField::RouteScale => moe_config(c).scale = key.real(o, name)? as f32,
        MoeField::SharedExperts => {
            let (n, m) = (key.size(o, name, c)?, moe_config(c));
            m.shared_ffn = (n > 0).then(|| n.saturating_mul(m.ffn));
        }
        MoeField::FirstKDense => {
            let dense = key.size(o, name, c)?;
            let layers = checked_layers(o, c)?;
            moe_config(c).layers = (0..layers).map(|i| i >= dense).collect();
        }
        MoeField::SparseStep => {
            let step = key.size(o, name, c)?;
            if step == 0 {
                return Err(o.wrong(shown, "must be at least 1"));
            }
            let (layers, m) = (checked_layers(o, c)?, moe_config(c));
            m.layers = (1..=layers).map(|i| m.experts > 0 && i % step == 0).collect();
        }
        MoeField::MlpOnlyLayers => {
            for v in name.map(|n| o.list(n)).transpose()?.flatten().into_iter().flatten() {
                let layer = v.as_u64().and_then(|i| usize::try_from(i).ok());
                // transformers ignores layers beyond the last.
                match layer.map(|i| moe_config(c).layers.get_mut(i)) {
                    Some(Some(is_moe)) => *is_moe = false,
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

/// The JSON value of `field` for this model.
pub(super) fn value(field: MoeField, c: &ModelConfig) -> Value {
    if let MoeField::MustBe(word) = field {
        return json!(word);
    }
    let dense: Vec<usize> = (0..c.layers).filter(|i| c.moe_layer(*i).is_none()).collect();
    let Some(m) = &c.moe else {
        return match field {
            MoeField::FirstKDense => json!(c.layers),
            MoeField::MlpOnlyLayers => json!(dense),
            MoeField::SparseStep => json!(1),
            // transformers refuses an integer.
            MoeField::RouteScale => json!(1.0),
            MoeField::NormTopkProb | MoeField::NormalizeSigmoid => json!(false),
            _ => json!(0),
        };
    };
    let clamp = m.clamp.unwrap_or(GPT_OSS_CLAMP);
    match field {
        MoeField::Experts => json!(m.experts),
        MoeField::TopK => json!(m.topk),
        MoeField::ExpertFfn => json!(m.ffn),
        MoeField::NormTopkProb => json!(!m.pre_softmax),
        MoeField::NormalizeSigmoid => json!(m.normalize.unwrap_or(m.topk > 1)),
        MoeField::Groups => json!(m.groups.map_or(1, |g| g[0])),
        MoeField::TopkGroup => json!(m.groups.map_or(1, |g| g[1])),
        MoeField::RouteScale => super::field::real(m.scale),
        MoeField::SharedExperts => json!(m.shared_ffn.map_or(0, |f| f / m.ffn.max(1))),
        MoeField::FirstKDense => json!((0..c.layers).take_while(|i| dense.contains(i)).count()),
        MoeField::MlpOnlyLayers => json!(dense),
        MoeField::SparseStep => json!(1),
        MoeField::SwigluLimit => super::field::real(clamp.limit),
        MoeField::SwigluAlpha => super::field::real(clamp.alpha),
        MoeField::MustBe(word) => json!(word),
    }
}

/// Writes the layer list in one canonical form, so that equal models compare equal: an empty list where every layer
/// is an MoE layer, no `moe` at all where none is.
pub(super) fn normalize(o: &Object, c: &mut ModelConfig) -> Result<()> {
    let Some(m) = &mut c.moe else { return Ok(()) };
    if m.layers.iter().all(|is_moe| *is_moe) {
        m.layers.clear();
    } else if !m.layers.contains(&true) {
        c.moe = None;
        return Ok(());
    }
    if m.experts.saturating_mul(c.layers) > MAX_EXPERTS {
        let what =
            format!("{} experts in each of {} layers are more than any model has", m.experts, c.layers);
        return Err(Error::config(o.origin, what));
    }
    Ok(())
}

/// The number of layers, refused where a list of that length is a mistake.
fn checked_layers(o: &Object, c: &ModelConfig) -> Result<usize> {
    if c.layers > MAX_LAYERS {
        return Err(o.wrong("num_hidden_layers", format_args!("is {}, which no model has", c.layers)));
    }
    Ok(c.layers)
}

/// The defaults of `GptOssConfig`.
const GPT_OSS_CLAMP: Clamp = Clamp { limit: 7.0, alpha: 1.702, offset: 1.0 };

fn clamp(c: &mut ModelConfig) -> &mut Clamp {
    moe_config(c).clamp.get_or_insert(GPT_OSS_CLAMP)
}

/// The model's [`MoeConfig`]; a dense model gets an empty one, for keys to fill in.
pub(crate) fn moe_config(c: &mut ModelConfig) -> &mut MoeConfig {
    c.moe.get_or_insert_with(|| MoeConfig::plain(0, 0, 0))
}

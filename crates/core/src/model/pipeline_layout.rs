//! How a recipe divides the layers of a model over pipeline stages.

use super::config::ModelConfig;
use super::layer_split::{LayerPlacement, LayerSplit};
use crate::{Error, Result};

/// How a model is divided into pipeline stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineLayout {
    /// Model chunks per pipeline rank (virtual pipeline size).
    pub vp: usize,
    /// A layout string, as [`LayerPlacement::parse`] reads it; none divides the layers as evenly as possible.
    pub layout: Option<String>,
}

impl Default for PipelineLayout {
    fn default() -> PipelineLayout {
        PipelineLayout { vp: 1, layout: None }
    }
}

impl PipelineLayout {
    /// The stages of a model over `pp` ranks. MTP layers are on the last stage.
    pub fn place(&self, model: &ModelConfig, pp: usize) -> Result<LayerPlacement> {
        let (layers, depth) = (model.layers, model.mtp_depth());
        let Some(text) = &self.layout else {
            return LayerSplit { mtp: depth, ..LayerSplit::even(layers, pp, self.vp) }.place();
        };
        let placement = LayerPlacement::parse(text, pp, Some(layers))?;
        let refuse = |what: String| Err(Error::Invalid(format!("the stages {text:?} {what}")));
        let found: usize = placement.stages().iter().map(|s| s.mtp.len()).sum();
        if found != depth {
            return refuse(match depth {
                0 => "have m, but mtp.layers is not set; leave m out".into(),
                _ => format!("have {found} m for mtp.layers = {depth}; write {depth} m before L"),
            });
        }
        if placement.stages().iter().any(|s| !s.mtp.is_empty() && !s.loss) {
            return refuse(
                "have m apart from L; prediction layers live where the loss is, so write mL".into(),
            );
        }
        if placement.vp() != self.vp {
            let (found, wanted) = (placement.stages().len(), self.vp * pp);
            return refuse(format!("are {found}, where pp·vp = {wanted}; write {wanted}, or change vp"));
        }
        Ok(placement)
    }
}

//! Declaring the parameters of a model, chunk by chunk: on a rank with its device, or without one.

use super::config::ModelConfig;
use super::mtp_config::MtpTraining;
use crate::optimizer::ParamGroups;
use ferrotron_engine::attention::RopeTable;
use ferrotron_engine::{Declarations, ParamId, ParamSpec};
use ferrotron_tensor::Result;

/// Gives the RoPE table of a layer; none where there is no device to hold it.
pub(super) type RopeTables<'a> = &'a mut dyn FnMut(usize) -> Result<Option<RopeTable>>;

/// A model whose chunks are being declared.
pub(super) struct ModelDeclaration<'a> {
    pub(super) params: Declarations,
    pub(super) config: &'a ModelConfig,
    pub(super) mtp: MtpTraining,
    /// Embedding and LM head are on different pipeline ranks.
    pub(super) pipelined: bool,
    pub(super) rope: RopeTables<'a>,
    /// The token embedding, once a chunk of this rank has declared it: a tied LM head shares it.
    pub(super) token_embedding: Option<ParamId>,
}

impl<'a> ModelDeclaration<'a> {
    pub(super) fn new(
        params: Declarations,
        config: &'a ModelConfig,
        mtp: MtpTraining,
        pipelined: bool,
        rope: RopeTables<'a>,
    ) -> ModelDeclaration<'a> {
        ModelDeclaration { params, config, mtp, pipelined, rope, token_embedding: None }
    }

    /// The declared parameters, in order, with their parameter groups.
    pub(super) fn finish(self, groups: &ParamGroups) -> Vec<ParamSpec> {
        let mut specs = self.params.finish();
        specs.iter_mut().for_each(|s| s.group = groups.assign(s));
        specs
    }
}

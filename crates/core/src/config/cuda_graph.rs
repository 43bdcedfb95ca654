//! What keeps steps of a recipe from being captured as a CUDA graph.

use super::{Config, DispatcherType, MoeSection, Packing, QuantRecipe};

impl MoeSection {
    /// Whether capacity padding gives all-to-all messages equal sizes.
    pub(super) fn pads_messages(&self) -> bool {
        self.capacity.is_some() && self.pad_to_capacity && self.capacity_per_rank
    }
}

impl Config {
    /// Why steps of this recipe cannot be captured as a CUDA graph, on any device; none if they can.
    pub fn cuda_graph_blocker(&self) -> Option<&'static str> {
        let p = &self.parallel;
        if self.fault.compares_runs() {
            Some(
                "with fault.rerun, fault.hash_every or fault.verify_every, what is sent is hashed call by call",
            )
        } else if !self.fault.inject.0.is_empty() {
            Some("with fault.inject, a step may be disturbed at every launch")
        } else if p.pp > 1 {
            Some("pipeline stages exchange activations on streams of their own")
        } else if self.data.packing == Packing::PaddingFree {
            Some("with data.packing = \"padding_free\", steps differ in their number of tokens")
        } else if p.cp > 1 && (self.data.reset_at_documents || self.data.packing != Packing::None) {
            Some("with parallel.cp, what ranks send each other depends on where documents begin")
        } else if self.precision.recipe == QuantRecipe::Nvfp4 {
            Some("with precision.recipe = \"nvfp4\", stochastic rounding depends on the step number")
        } else if self.offload.optimizer.fraction() > 0.0 {
            Some("with offload.optimizer, copies of the last step run beside the next")
        } else if self.offload.host_shards().any() {
            Some("with offload.weights or offload.gradients, copies of the last step run beside the next")
        } else if self.moe.experts.is_some() {
            self.moe_cuda_graph_blocker()
        } else {
            None
        }
    }

    /// Whether dropless all-to-all messages have expected split sizes, where collectives do not wait on the host. A step whose
    /// messages do not hold its tokens is launched twice, which these do not survive: the loss scale, which would fall; a comparison
    /// of what is sent; injected faults; recorded and replayed routing.
    pub(crate) fn expects_split_sizes(&self) -> bool {
        let (m, layout) = (&self.moe, self.parallel.layout());
        m.split_headroom > 0.0
            && m.dispatcher == DispatcherType::AllToAll
            && !m.pads_messages()
            && layout.ep * layout.etp() > 1
            && self.loss_scale().is_none()
            && !self.fault.compares_runs()
            && self.fault.inject.0.is_empty()
            && m.record.is_none()
            && m.replay.is_none()
    }

    fn moe_cuda_graph_blocker(&self) -> Option<&'static str> {
        let (m, p) = (&self.moe, &self.parallel);
        let fixed_sizes =
            m.dispatcher == DispatcherType::AllGather || m.pads_messages() || self.expects_split_sizes();
        if m.record.is_some() || m.replay.is_some() {
            Some("recorded routing is copied from and to the host in every step")
        } else if m.capacity.is_some() && !m.capacity_per_rank && self.data.packing != Packing::None {
            Some("with data.packing, moe.capacity depends on the padding; moe.capacity_per_rank does not")
        } else if p.ep * p.etp.unwrap_or(1) > 1 && !fixed_sizes {
            Some(
                "the host reads how many tokens every expert gets; moe.split_headroom, moe.pad_to_capacity with \
                 moe.capacity_per_rank, or moe.dispatcher = \"all_gather\", fixes the sizes",
            )
        } else {
            None
        }
    }
}

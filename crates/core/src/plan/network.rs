//! Time of collectives by algorithm, size and where the ranks of a group are.

use super::hardware::Hardware;
use crate::model::description::{Collective, Group, ParallelRanks};
use ferrotron_comm::OpKind;

/// Ranks of a group and the distance between neighbours, in the order tp-cp-ep-dp-pp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupSpan {
    /// Ranks.
    pub size: usize,
    /// Distance of two neighbours among all ranks.
    pub stride: usize,
}

impl GroupSpan {
    /// Where the ranks of a group are in a layout.
    pub fn of(group: Group, ranks: &ParallelRanks) -> GroupSpan {
        let size = ranks.size(group);
        let (tp, cp) = (ranks.tp.size, ranks.cp.size);
        let world = ranks.size(Group::World);
        let experts = ranks.etp.size * ranks.ep.size;
        let stride = match group {
            Group::Tp | Group::TpCp | Group::TpDpCp | Group::EtpEp | Group::Etp | Group::World => 1,
            Group::Cp | Group::DpCp | Group::Fsdp => tp,
            Group::Dp => tp * cp,
            Group::FsdpReplicas => tp * ranks.shards[0].size,
            Group::ExpertDp | Group::ExpertFsdp => experts,
            Group::ExpertFsdpReplicas => experts * ranks.shards[1].size,
            Group::Pp | Group::PpBackward => world / ranks.pp.size.max(1),
            Group::Embedding => world / ranks.pp.size.max(1) * (ranks.pp.size.max(1) - 1).max(1),
            Group::Control => 1,
        };
        GroupSpan { size, stride: stride.max(1) }
    }

    /// Ranks of the group in one NVLink domain.
    pub(super) fn in_domain(self, hw: &Hardware) -> usize {
        (hw.domain() / self.stride).clamp(1, self.size)
    }

    /// Seconds of an operation in which a rank sends `bytes`, as [`Collective`] counts them.
    pub fn seconds(self, hw: &Hardware, kind: OpKind, bytes: u64) -> f64 {
        if self.size <= 1 || bytes == 0 {
            return 0.0;
        }
        let (near, bytes) = (self.in_domain(hw), bytes as f64);
        let (nvlink, network) = (hw.nvlink.gb_s * 1e9, hw.network.gb_s * 1e9);
        let latency = if near == self.size { hw.nvlink.latency_us } else { hw.network.latency_us } * 1e-6;
        let transfer = match kind {
            _ if near == self.size => bytes / nvlink,
            // Every rank sends to every other: the part for other domains takes the network, at the same time.
            OpKind::AllToAll => {
                let outside = (self.size - near) as f64 / (self.size - 1) as f64;
                (bytes * outside / network).max(bytes * (1.0 - outside) / nvlink)
            }
            OpKind::SendRecv => bytes / network,
            // Rings through the domains: all GPUs of one share the traffic to the next.
            _ => bytes / (network * near as f64).min(nvlink),
        };
        latency + transfer
    }
}

/// Seconds of a collective of a layer or step.
pub(super) fn collective_seconds(hw: &Hardware, ranks: &ParallelRanks, c: &Collective) -> f64 {
    GroupSpan::of(c.group, ranks).seconds(hw, c.kind, c.bytes)
}

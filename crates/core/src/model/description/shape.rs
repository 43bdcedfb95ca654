//! Everything that decides what a rank does in a step, without a device or a communicator.

use crate::Result;
use crate::grid::{Axis, Grid, RankLayout};
use crate::model::{ModelConfig, ModelOptions, Stage};
use crate::pipeline::ScheduleKind;
use ferrotron_comm::Communicator;
use ferrotron_engine::attention::Layout;
use ferrotron_engine::data_parallel::{HostShards, ShardingStrategy, group_rank};
use ferrotron_engine::{GroupRank, ParamLayout, ParamSpec, Rank, Recompute, Tokens};
use ferrotron_tensor::DType;

/// A process group by what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Group {
    /// Tensor parallel.
    Tp,
    /// Context parallel.
    Cp,
    /// Pipeline, activations to later stages.
    Pp,
    /// Pipeline, gradients to earlier stages.
    PpBackward,
    /// Data parallel.
    Dp,
    /// Data × context parallel: replicas of the dense parameters.
    DpCp,
    /// First and last pipeline stage, which share a tied embedding.
    Embedding,
    /// Tensor × context parallel: the ranks that share a micro-batch.
    TpCp,
    /// Tensor × data × context parallel: the ranks that share a step's tokens.
    TpDpCp,
    /// Expert tensor × expert parallel: the ranks that hold all experts of a layer.
    EtpEp,
    /// Expert tensor parallel.
    Etp,
    /// Replicas of an expert.
    ExpertDp,
    /// FSDP: the ranks that shard dense parameters between them; data × context parallel, or a part of that (HSDP).
    Fsdp,
    /// FSDP: the ranks that shard expert parameters between them.
    ExpertFsdp,
    /// HSDP: the ranks that hold the same shard of dense parameters.
    FsdpReplicas,
    /// HSDP: the ranks that hold the same shard of expert parameters.
    ExpertFsdpReplicas,
    /// All ranks.
    World,
    /// All ranks, for values that hosts read.
    Control,
}

impl Group {
    /// Every group, in the order in which traffic is listed.
    pub const ALL: [Group; 18] = [
        Group::Tp,
        Group::Cp,
        Group::Pp,
        Group::PpBackward,
        Group::Dp,
        Group::DpCp,
        Group::Embedding,
        Group::TpCp,
        Group::TpDpCp,
        Group::EtpEp,
        Group::Etp,
        Group::ExpertDp,
        Group::Fsdp,
        Group::ExpertFsdp,
        Group::FsdpReplicas,
        Group::ExpertFsdpReplicas,
        Group::World,
        Group::Control,
    ];

    /// The name of its communicator, also in logs.
    pub const fn name(self) -> &'static str {
        match self {
            Group::Tp => "tp",
            Group::Cp => "cp",
            Group::Pp => "pp",
            Group::PpBackward => "pp_backward",
            Group::Dp => "dp",
            Group::DpCp => "dp_cp",
            Group::Embedding => "embedding",
            Group::TpCp => "tp_cp",
            Group::TpDpCp => "tp_dp_cp",
            Group::EtpEp => "etp_ep",
            Group::Etp => "etp",
            Group::ExpertDp => "expert_dp",
            Group::Fsdp => "fsdp",
            Group::ExpertFsdp => "expert_fsdp",
            Group::FsdpReplicas => "fsdp_replicas",
            Group::ExpertFsdpReplicas => "expert_fsdp_replicas",
            Group::World => "world",
            Group::Control => "control",
        }
    }

    /// Its axes, as [`Grid::groups`] takes them.
    pub(crate) const fn axes(self) -> &'static str {
        match self {
            Group::Tp => "tp",
            Group::Cp => "cp",
            Group::Pp | Group::PpBackward => "pp",
            Group::Dp => "dp",
            Group::DpCp => "dp-cp",
            Group::Embedding => "embd",
            Group::TpCp => "tp-cp",
            Group::TpDpCp => "tp-dp-cp",
            Group::EtpEp => "etp-ep",
            Group::Etp => "etp",
            Group::ExpertDp => "edp",
            Group::Fsdp => "intra-dp-cp",
            Group::ExpertFsdp => "intra-edp",
            Group::FsdpReplicas => "inter-dp-cp",
            Group::ExpertFsdpReplicas => "inter-edp",
            Group::World | Group::Control => "tp-cp-dp-pp",
        }
    }

    /// Groups whose communicator serves this one where they have the same members.
    pub(crate) const fn may_share(self) -> &'static [Group] {
        match self {
            Group::TpCp => &[Group::Tp, Group::Cp],
            Group::TpDpCp => &[Group::Tp, Group::DpCp],
            Group::EtpEp | Group::Etp => &[Group::Tp],
            Group::ExpertDp | Group::Fsdp => &[Group::DpCp],
            Group::ExpertFsdp => &[Group::DpCp, Group::ExpertDp],
            _ => &[],
        }
    }

    /// Its communicator on a rank; none for the world, which has no communicator of its own.
    pub(crate) fn communicator(self, rank: &Rank) -> Option<&Communicator> {
        Some(match self {
            Group::Tp => &rank.tp,
            Group::Cp => &rank.cp,
            Group::Pp => &rank.pp,
            Group::PpBackward => &rank.pp_backward_group,
            Group::Dp => &rank.dp,
            Group::DpCp => &rank.dp_cp_group,
            Group::Embedding => &rank.embedding_group,
            Group::TpCp => &rank.tp_cp_group,
            Group::TpDpCp => &rank.tp_dp_cp_group,
            Group::EtpEp => &rank.etp_ep_group,
            Group::Etp => &rank.etp,
            Group::ExpertDp => &rank.expert_dp_group,
            Group::Fsdp => &rank.shard_groups[0],
            Group::ExpertFsdp => &rank.shard_groups[1],
            Group::FsdpReplicas => &rank.shard_replica_groups[0],
            Group::ExpertFsdpReplicas => &rank.shard_replica_groups[1],
            Group::Control => &rank.control,
            Group::World => return None,
        })
    }
}

/// A rank's place in every process group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParallelRanks {
    /// Tensor parallel.
    pub tp: GroupRank,
    /// Context parallel.
    pub cp: GroupRank,
    /// Data parallel.
    pub dp: GroupRank,
    /// Data × context parallel.
    pub dp_cp: GroupRank,
    /// Pipeline parallel.
    pub pp: GroupRank,
    /// Expert parallel, in whole experts.
    pub ep: GroupRank,
    /// Tensor parallel inside an expert.
    pub etp: GroupRank,
    /// Replicas of an expert.
    pub expert_dp: GroupRank,
    /// Ranks that shard dense and expert parameters between them.
    pub shards: [GroupRank; 2],
    /// HSDP: ranks that hold the same shard of dense and of expert parameters.
    pub shard_replicas: [GroupRank; 2],
    /// Groups that have the ranks of another group, and use its communicator.
    aliases: Vec<(Group, Group)>,
}

impl ParallelRanks {
    /// One rank alone.
    pub fn single() -> ParallelRanks {
        let one = GroupRank::SINGLE;
        ParallelRanks {
            tp: one,
            cp: one,
            dp: one,
            dp_cp: one,
            pp: one,
            ep: one,
            etp: one,
            expert_dp: one,
            shards: [one; 2],
            shard_replicas: [one; 2],
            aliases: Vec::new(),
        }
    }

    /// The first rank of a layout of `world` ranks, from sizes alone.
    pub fn first_of(layout: &RankLayout, world: usize) -> ParallelRanks {
        let place = |size: usize| GroupRank { rank: 0, size: size.max(1) };
        let dp = world / (layout.tp * layout.cp * layout.pp).max(1);
        let edp = world / (layout.etp() * layout.ep * layout.pp).max(1);
        let all = [dp * layout.cp, edp];
        let each = all.map(|n| (n / layout.instances.max(1)).max(1));
        ParallelRanks {
            tp: place(layout.tp),
            cp: place(layout.cp),
            dp: place(dp),
            dp_cp: place(all[0]),
            pp: place(layout.pp),
            ep: place(layout.ep),
            etp: place(layout.etp()),
            expert_dp: place(edp),
            shards: each.map(place),
            shard_replicas: [0, 1].map(|k| place(all[k] / each[k])),
            ..ParallelRanks::single()
        }
    }

    /// The place of a running rank.
    pub fn of(rank: &Rank) -> ParallelRanks {
        let name = |group: Group| group.communicator(rank).map(Communicator::name);
        let aliases = aliases(|group, other| Ok(name(group) == name(other))).unwrap_or_default();
        ParallelRanks {
            tp: group_rank(&rank.tp),
            cp: group_rank(&rank.cp),
            dp: group_rank(&rank.dp),
            dp_cp: group_rank(&rank.dp_cp_group),
            pp: group_rank(&rank.pp),
            ep: rank.expert_parallel_rank(),
            etp: group_rank(&rank.etp),
            expert_dp: group_rank(&rank.expert_dp_group),
            shards: rank.shard_groups.each_ref().map(group_rank),
            shard_replicas: rank.shard_replica_groups.each_ref().map(group_rank),
            aliases,
        }
    }

    /// The place of rank `rank` of a grid.
    pub fn at(grid: &Grid, rank: usize) -> Result<ParallelRanks> {
        let c = grid.coordinates(rank)?;
        let (dense, expert) = (grid.dense(), grid.expert());
        let place = |rank, size| GroupRank { rank, size };
        let (dp_cp, edp) = (dense.size(Axis::Dp) * dense.size(Axis::Cp), expert.size(Axis::Dp));
        let all = [place(c.dp_cp, dp_cp), place(c.edp, edp)];
        // Every instance of the shards is a run of consecutive ranks.
        let each = all.map(|p| (p.size / grid.layout().instances.max(1)).max(1));
        let shards = [0, 1].map(|k| place(all[k].rank % each[k], each[k]));
        let shard_replicas = [0, 1].map(|k| place(all[k].rank / each[k], all[k].size / each[k]));
        Ok(ParallelRanks {
            tp: place(c.tp, dense.size(Axis::Tp)),
            cp: place(c.cp, dense.size(Axis::Cp)),
            dp: place(c.dp, dense.size(Axis::Dp)),
            dp_cp: all[0],
            pp: place(c.pp, dense.size(Axis::Pp)),
            ep: place(c.ep, expert.size(Axis::Ep)),
            etp: place(c.etp, expert.size(Axis::Tp)),
            expert_dp: all[1],
            shards,
            shard_replicas,
            aliases: aliases(|group, other| Ok(grid.groups(group.axes())? == grid.groups(other.axes())?))?,
        })
    }

    /// Ranks of a group.
    pub fn size(&self, group: Group) -> usize {
        match group {
            Group::Tp => self.tp.size,
            Group::Cp => self.cp.size,
            Group::Pp | Group::PpBackward => self.pp.size,
            Group::Dp => self.dp.size,
            Group::DpCp => self.dp_cp.size,
            Group::Embedding => self.pp.size.min(2),
            Group::TpCp => self.tp.size * self.cp.size,
            Group::TpDpCp => self.tp.size * self.dp_cp.size,
            Group::EtpEp => self.etp.size * self.ep.size,
            Group::Etp => self.etp.size,
            Group::ExpertDp => self.expert_dp.size,
            Group::Fsdp => self.shards[0].size,
            Group::ExpertFsdp => self.shards[1].size,
            Group::FsdpReplicas => self.shard_replicas[0].size,
            Group::ExpertFsdpReplicas => self.shard_replicas[1].size,
            Group::World | Group::Control => self.tp.size * self.dp_cp.size * self.pp.size,
        }
    }

    /// The name of the communicator that serves a group.
    pub fn name(&self, group: Group) -> &'static str {
        self.aliases.iter().find(|(g, _)| *g == group).map_or(group, |(_, other)| *other).name()
    }
}

/// Groups with the first group that serves them.
fn aliases(same: impl Fn(Group, Group) -> Result<bool>) -> Result<Vec<(Group, Group)>> {
    let mut out = Vec::new();
    for group in Group::ALL {
        for other in group.may_share() {
            if same(group, *other)? {
                out.push((group, *other));
                break;
            }
        }
    }
    Ok(out)
}

/// A training step as one rank sees it.
#[derive(Clone, Debug)]
pub struct StepShape {
    /// The architecture.
    pub model: ModelConfig,
    /// The rank's place in the layout.
    pub ranks: ParallelRanks,
    /// The pipeline stages this rank holds, one for each model chunk.
    pub stages: Vec<Stage>,
    /// The sequences of one micro-batch, before context parallelism divides them.
    pub micro_batch: Layout,
    /// Micro-batches of the step on this rank.
    pub micro_batches: usize,
    /// The dtype of compute.
    pub dtype: DType,
    /// What backward recomputes.
    pub recompute: Recompute,
    /// Tokens that a dense MLP computes at a time.
    pub mlp_chunk: Option<usize>,
    /// FP8 policy, MoE and MTP training options.
    pub options: ModelOptions,
    /// ZeRO stage: 0 replicates, 1 shards optimizer state, 2 gradients too, 3 weights too.
    pub zero: usize,
    /// Bytes of data-parallel communication in flight, if given.
    pub comm_unit: Option<usize>,
    /// HFSDP: groups that hold the same shards share their optimizer state.
    pub outer_optimizer: bool,
    /// Which shards are in host memory.
    pub host: HostShards,
    /// The pipeline schedule.
    pub schedule: ScheduleKind,
    /// Data-parallel communication overlaps computation.
    pub overlap: bool,
}

/// Rows of a micro-batch on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    /// N: rows of the tensor-parallel group, padded to a multiple of it.
    pub(crate) all: usize,
    /// T = N / tp: rows of the residual stream on this rank.
    pub(crate) local: usize,
    /// Rows of the group that attention computes: tokens of the padded sequences, over cp.
    pub(crate) attended: usize,
}

impl StepShape {
    /// The outputs of norms before blocks are recomputed; a model without such norms has none to recompute.
    pub(super) fn recomputes_norms(&self) -> bool {
        self.recompute.norm && self.model.pre_norms
    }

    /// The larger number of replicas: of dense or of expert parameters.
    pub fn replicas(&self) -> usize {
        self.ranks.dp_cp.size.max(self.ranks.expert_dp.size)
    }

    /// The ZeRO stage in effect: one rank alone shards nothing.
    pub fn zero_stage(&self) -> usize {
        if self.replicas() > 1 { self.zero } else { 0 }
    }

    /// Numbers of ranks that shard dense and expert parameters between them.
    pub fn shard_sizes(&self) -> [usize; 2] {
        self.ranks.shards.map(|place| place.size)
    }

    /// How weights are laid out, given the parameters of this rank.
    pub fn param_layout(&self, params: &[ParamSpec]) -> ParamLayout {
        let sizes = (self.replicas(), self.ranks.shard_replicas[0].size);
        ParamLayout::new(self.sharding(), sizes, self.comm_unit, (params, self.dtype))
    }

    /// What the data-parallel ranks shard.
    pub fn sharding(&self) -> ShardingStrategy {
        let scheme = match self.outer_optimizer && self.ranks.shard_replicas[0].size > 1 {
            true => ShardingStrategy::hybrid(),
            false => ShardingStrategy::zero(self.zero, self.replicas()),
        };
        scheme.with_host(self.host)
    }

    /// This rank among those that shard the optimizer state of dense and of expert parameters.
    pub fn optimizer_places(&self) -> [GroupRank; 2] {
        let (inner, outer) = (self.ranks.shards, self.ranks.shard_replicas);
        [0, 1].map(|k| self.sharding().optimizer_place(inner[k], outer[k]))
    }

    /// Rows of a micro-batch on this rank.
    pub(crate) fn rows(&self) -> Result<Rows> {
        let tokens = Tokens::new(&self.micro_batch, self.ranks.cp, self.ranks.tp.size)?;
        let all = tokens.rows().len();
        let attended = tokens.layout().tokens() / self.ranks.cp.size;
        Ok(Rows { all, local: all / self.ranks.tp.size, attended })
    }
}

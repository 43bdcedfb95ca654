//! Token dispatch by all-to-all.
//!
//! The sender sorts its rows by destination: rank (ep b, etp a) of the group gets the rows of b's experts, sorted by
//! expert. With expert tensor parallelism each of the etp ranks of an expert gets a copy of the row, and what they send
//! back are partial sums. The receiver sorts once more: by expert, then by sending rank, then by token.
//!
//! Rows are sent on the dispatch stream, so that a pass with other work does it before it waits for them.

use super::MoeTraining;
use super::router::TopK;
use super::split_sizes::LayerSplits;
use super::token_dispatcher::ExpertLayout;
use crate::StepContext;
use ferrotron_comm::{InFlight, SplitSizes};
use ferrotron_kernels::{PackSlots, RowMap, UnpackSlots, capacity};
use ferrotron_tensor::{Category, DType, Result, Tensor};

/// Permutations and split sizes of one micro-batch's all-to-all.
pub(crate) struct AllToAll {
    /// Sender side: token rows to destination order, k·etp copies of a token.
    send_map: RowMap,
    /// Receiver side: arrival order to expert order.
    recv_map: RowMap,
    /// Rows sent to each rank, and received from each.
    sent: Vec<usize>,
    received: Vec<usize>,
    etp: usize,
}

impl AllToAll {
    /// Plans the all-to-all of `topk`. The host reads the number of tokens per expert to size the buffers, unless they are
    /// expected ([`super::SplitSizes`]) or capacity padding fixes them: then every expert gets `capacity + 1` rows from each
    /// rank.
    pub(super) fn plan(
        p: &StepContext,
        training: &MoeTraining,
        layout: ExpertLayout,
        topk: &TopK,
    ) -> Result<AllToAll> {
        let (k, s, group) = (&p.rank.kernels, &p.rank.compute, &p.rank.etp_ep_group);
        let [t, n] = [topk.index.shape()[0], topk.index.shape()[1]];
        let (etp, [all, own]) = (p.rank.etp.size(), layout.experts);
        let index = if etp == 1 {
            topk.index.clone()
        } else {
            let copies = p.rank.activation(&[t, n * etp], DType::I32)?;
            k.expand_topk(s, &topk.index, own, etp, &copies)?;
            copies
        };
        if let Some(c) = training.capacity.filter(|c| p.train && c.pad && c.per_rank) {
            let each = capacity(t, n, all, c.factor) + 1;
            let mut send_map =
                layout.map(p, [t + (all * etp).div_ceil(n * etp), n * etp], all * etp, each)?;
            k.sort_by_expert(s, &padded_index(p, &index, all * etp)?, 0, each, &send_map)?;
            send_map.rows = send_map.rows.narrow(0, 0, t)?;
            let rows = vec![own * each; group.size()];
            let counts = vec![each; own * group.size()];
            let recv_map = received_map(p, layout, &counts)?;
            return Ok(AllToAll { send_map, recv_map, sent: rows.clone(), received: rows, etp });
        }
        let send_map = layout.map(p, [t, n * etp], all * etp, 1)?;
        k.sort_by_expert(s, &index, 0, 1, &send_map)?;
        let splits = p.moe_state()?.split_sizes().filter(|_| p.train);
        if let Some(splits) = splits.map(|all| all.layer(layout.layer)).transpose()?.flatten() {
            return AllToAll::with_splits(p, layout, (&send_map, etp), splits);
        }
        // What this rank sends and what it receives, side by side: the host waits once for both.
        let both = p.rank.activation(&[2, all * etp], DType::I32)?;
        let half = |i| both.narrow(0, i, 1)?.view(&[all * etp]);
        s.copy(&send_map.counts, &half(0)?)?;
        group.all_to_all(s, &send_map.counts, &half(1)?, "tokens of each expert")?;
        let per_rank = |counts: &[usize]| counts.chunks(own).map(|c| c.iter().sum()).collect();
        let [mine, counts] = match s.device().is_meta() {
            // Nothing was routed on a meta device: every rank spreads its tokens evenly.
            true => balanced(index.numel(), group.rank(), [group.size(), own]),
            false => {
                let counts: Vec<usize> = s.download::<i32>(&both)?.into_iter().map(|n| n as usize).collect();
                let (mine, theirs) = counts.split_at(all * etp);
                [mine.to_vec(), theirs.to_vec()]
            }
        };
        let (sent, received): (Vec<usize>, Vec<usize>) = (per_rank(&mine), per_rank(&counts));
        if let Some(splits) = splits {
            splits.count(layout.layer, &sent, &received);
        }
        let recv_map = received_map(p, layout, &counts)?;
        Ok(AllToAll { send_map, recv_map, sent, received, etp })
    }

    /// Plans the all-to-all of rows sorted by destination in messages of known sizes: the host neither reads nor writes. Unused
    /// rows of a message are zeros, and no expert has them. Rows of an expert are in the order that they have without.
    fn with_splits(
        p: &StepContext,
        layout: ExpertLayout,
        (sorted, etp): (&RowMap, usize),
        splits: LayerSplits,
    ) -> Result<AllToAll> {
        let (k, s, group) = (&p.rank.kernels, &p.rank.compute, &p.rank.etp_ep_group);
        let ints = |shape: &[usize]| p.rank.activation(shape, DType::I32);
        let counts = ints(&[sorted.counts.numel()])?;
        group.all_to_all(s, &sorted.counts, &counts, "tokens of each expert")?;
        let rows = |sizes: &[usize]| sizes.iter().sum::<usize>();
        let (source, selected) = (ints(&[rows(&splits.sent)])?, ints(sorted.rows.shape())?);
        let pack = PackSlots {
            offsets: &sorted.offsets,
            source: &sorted.source,
            rows: &sorted.rows,
            slots: &splits.slots[0],
            message_source: &source,
            message_rows: &selected,
        };
        k.pack_slots(s, &pack, splits.slot_use(0))?;
        let experts = ints(&[rows(&splits.received), 1])?;
        let unpack = UnpackSlots { counts: &counts, slots: &splits.slots[1], experts: &experts };
        k.unpack_slots(s, &unpack, splits.slot_use(1))?;
        let recv_map = layout.map(p, [experts.numel(), 1], layout.experts[1], layout.align)?;
        k.sort_by_expert(s, &experts, 0, layout.align, &recv_map)?;
        let send_map = RowMap { rows: selected, source, ..sorted.clone() };
        let LayerSplits { sent, received, .. } = splits;
        Ok(AllToAll { send_map, recv_map, sent, received, etp })
    }

    /// Permutation from arrival order to expert order.
    pub(super) fn recv_map(&self) -> &RowMap {
        &self.recv_map
    }

    /// Sends rows `x [T, w]` to the selected experts.
    pub(super) fn send_rows(
        &self,
        p: &StepContext,
        x: &Tensor,
        label: &'static str,
    ) -> Result<InFlight<Tensor>> {
        self.send(p, x, self.send_map.rows.shape()[1], label)
    }

    /// Sends one f32 value per token and selected expert, `[T, k]`.
    pub(super) fn send_values(
        &self,
        p: &StepContext,
        x: &Tensor,
        label: &'static str,
    ) -> Result<InFlight<Tensor>> {
        self.send(p, &x.view(&[x.numel(), 1])?, self.etp, label)
    }

    /// Permutes rows to destination order, `copies` of each, and sends them.
    fn send(
        &self,
        p: &StepContext,
        x: &Tensor,
        copies: usize,
        label: &'static str,
    ) -> Result<InFlight<Tensor>> {
        let total = self.sent.iter().sum();
        let out = p.rank.activation(&[total, x.shape()[1]], x.dtype())?;
        let source = self.send_map.source.narrow(0, 0, total)?;
        p.rank.kernels.gather_rows(&p.rank.compute, x, &source, copies, &out)?;
        self.exchange(p, out, [&self.sent, &self.received], label)
    }

    /// Received rows sorted by expert: `[N, w]`.
    pub(super) fn sorted(&self, p: &StepContext, received: &Tensor) -> Result<Tensor> {
        let rows =
            p.rank.activation(&[self.recv_map.source.numel(), received.shape()[1]], received.dtype())?;
        p.rank.kernels.moe_permute(&p.rank.compute, received, &self.recv_map, &rows)?;
        Ok(rows)
    }

    /// Sends the experts' rows `[N, w]` back to the ranks they came from.
    pub(super) fn send_back(
        &self,
        p: &StepContext,
        y: &Tensor,
        label: &'static str,
    ) -> Result<InFlight<Tensor>> {
        let out = p.rank.activation(&[self.received.iter().sum(), y.shape()[1]], y.dtype())?;
        p.rank.kernels.moe_unpermute(&p.rank.compute, y, &self.recv_map.rows, None, &out)?;
        self.exchange(p, out, [&self.received, &self.sent], label)
    }

    /// Sums the returned rows of each token: `[T, w]`.
    pub(super) fn unpermuted(&self, p: &StepContext, returned: &Tensor) -> Result<Tensor> {
        let out =
            p.rank.activation(&[self.send_map.rows.shape()[0], returned.shape()[1]], returned.dtype())?;
        p.rank.kernels.moe_unpermute(&p.rank.compute, returned, &self.send_map.rows, None, &out)?;
        Ok(out)
    }

    /// Sums returned values over the etp copies of each selected expert: f32 `[T, k]`.
    pub(super) fn reduced_probs(&self, p: &StepContext, returned: &Tensor) -> Result<Tensor> {
        let [t, slots] = [self.send_map.rows.shape()[0], self.send_map.rows.shape()[1]];
        let selected = t * slots / self.etp;
        let out = p.rank.activation(&[t, slots / self.etp], DType::F32)?;
        // The copies for one expert are adjacent.
        let rows = self.send_map.rows.view(&[selected, self.etp])?;
        let sums = out.view(&[selected, 1])?;
        p.rank.kernels.moe_unpermute(&p.rank.compute, returned, &rows, None, &sums)?;
        Ok(out)
    }

    fn exchange(
        &self,
        p: &StepContext,
        x: Tensor,
        [sent, received]: [&[usize]; 2],
        label: &'static str,
    ) -> Result<InFlight<Tensor>> {
        let (rank, w) = (p.rank, x.shape()[1]);
        let to = rank.activation(&[received.iter().sum(), w], x.dtype())?;
        let elements = |rows: &[usize]| rows.iter().map(|n| n * w).collect::<Vec<_>>();
        let side = if rank.overlap { &rank.dispatch_stream } else { &rank.compute };
        InFlight::launch((&rank.compute, side), to, vec![x.clone()], |s, to| {
            let (sent, received) = (elements(sent), elements(received));
            let splits = SplitSizes { sent: &sent, received: &received };
            Ok(rank.etp_ep_group.all_to_all_v(s, &x, to, splits, label)?)
        })
    }
}

/// `rows` of every rank spread evenly over the `own` experts of each of `ranks` ranks: what rank `me` sends to each expert,
/// and what it receives for its own, sender after sender.
fn balanced(rows: usize, me: usize, [ranks, own]: [usize; 2]) -> [Vec<usize>; 2] {
    let all = ranks * own;
    let of = |expert: usize| (expert + 1) * rows / all - expert * rows / all;
    let received = (0..ranks).flat_map(|_| (me * own..(me + 1) * own).map(of)).collect();
    [(0..all).map(of).collect(), received]
}

/// Permutation of received rows into expert order. `counts`: rows for each of this rank's experts, sender after sender.
fn received_map(p: &StepContext, layout: ExpertLayout, counts: &[usize]) -> Result<RowMap> {
    let (own, n) = (layout.experts[1], counts.iter().sum());
    let ids: Vec<i32> =
        counts.iter().enumerate().flat_map(|(i, c)| std::iter::repeat_n((i % own) as i32, *c)).collect();
    let ids = p.rank.compute.constant(&ids, &[n, 1], Category::Activations)?;
    let map = layout.map(p, [n, 1], own, layout.align)?;
    p.rank.kernels.sort_by_expert(&p.rank.compute, &ids, 0, layout.align, &map)?;
    Ok(map)
}

/// Appends one row for each expert, selected by no token, to the index `[T, k]`. No expert is without rows then, so that
/// all have equally many once they are aligned to `capacity + 1`. The appended rows are zeros.
fn padded_index(p: &StepContext, index: &Tensor, experts: usize) -> Result<Tensor> {
    let ([t, k], s) = ([index.shape()[0], index.shape()[1]], &p.rank.compute);
    let more = experts.div_ceil(k);
    let all = p.rank.activation(&[t + more, k], DType::I32)?;
    s.copy(index, &all.narrow(0, 0, t)?)?;
    let ids: Vec<i32> = (0..more * k).map(|e| if e < experts { e as i32 } else { -1 }).collect();
    s.copy(&s.constant(&ids, &[more, k], Category::Workspace)?, &all.narrow(0, t, more)?)?;
    Ok(all)
}

//! Tokens to the ranks that have their experts by an all-to-all exchange.
//!
//! At home, choices are sorted by destination: rank (ep b, etp a) of the group gets the rows of the experts of b, sorted by
//! expert. Where a ranks share an expert, each of them gets a copy, and what they send back are parts of a sum. There, rows
//! are sorted once more: by expert, then by rank they came from, then by token.
//!
//! Rows travel on a stream of their own: whoever has other work does it before he waits for them.

use super::MoeTraining;
use super::router::TopK;
use super::token_dispatcher::{ExpertLayout, InFlight};
use crate::StepContext;
use ferrotron_kernels::{RowMap, capacity};
use ferrotron_tensor::{Category, DType, Result, Tensor};

/// Where rows went.
pub(crate) struct AllToAll {
    /// Choices at home, one slot for each copy: k·etp of a token.
    home: RowMap,
    /// Rows at the experts.
    map: RowMap,
    /// Rows to each rank, and from each.
    sent: Vec<usize>,
    received: Vec<usize>,
    etp: usize,
}

impl AllToAll {
    /// Who gets which of the rows of `topk_routes`. The host waits: it must know how much comes and goes, unless every expert gets
    /// as many rows of each rank as its capacity there, and one.
    pub(super) fn plan(
        p: &StepContext,
        training: &MoeTraining,
        layout: ExpertLayout,
        topk_routes: &TopK,
    ) -> Result<AllToAll> {
        let (k, s, group) = (&p.rank.kernels, &p.rank.compute, &p.rank.etp_ep_group);
        let [t, topk] = [topk_routes.index.shape()[0], topk_routes.index.shape()[1]];
        let (etp, [all, own]) = (p.rank.etp.size(), layout.experts);
        let index = if etp == 1 {
            topk_routes.index.clone()
        } else {
            let wide = p.rank.activation(&[t, topk * etp], DType::I32)?;
            k.expand_topk(s, &topk_routes.index, own, etp, &wide)?;
            wide
        };
        let even = training.capacity.filter(|c| p.train && c.pad && c.per_rank);
        if let Some(c) = even {
            let each = capacity(t, topk, all, c.factor) + 1;
            let mut home =
                layout.map(p, [t + (all * etp).div_ceil(topk * etp), topk * etp], all * etp, each)?;
            k.sort_by_expert(s, &padded_index(p, &index, all * etp)?, 0, each, &home)?;
            home.rows = home.rows.narrow(0, 0, t)?;
            let rows = vec![own * each; group.size()];
            let counts = vec![each; own * group.size()];
            let map = received_map(p, layout, &counts)?;
            return Ok(AllToAll { home, map, sent: rows.clone(), received: rows, etp });
        }
        let home = layout.map(p, [t, topk * etp], all * etp, 1)?;
        k.sort_by_expert(s, &index, 0, 1, &home)?;
        let theirs = p.rank.activation(&[all * etp], DType::I32)?;
        group.all_to_all(s, &home.counts, &theirs, "tokens of each expert")?;
        let counts = |t: &Tensor| -> Result<Vec<usize>> {
            Ok(s.download::<i32>(t)?.into_iter().map(|n| n as usize).collect())
        };
        let sums = |counts: &[usize]| counts.chunks(own).map(|c| c.iter().sum()).collect();
        let (sent, came) = (sums(&counts(&home.counts)?), counts(&theirs)?);
        let map = received_map(p, layout, &came)?;
        Ok(AllToAll { home, map, sent, received: sums(&came), etp })
    }

    /// Rows at the experts.
    pub(super) fn map(&self) -> &RowMap {
        &self.map
    }

    /// Sends rows `x [T, w]` to the experts of their choices.
    pub(super) fn send_rows(&self, p: &StepContext, x: &Tensor, label: &'static str) -> Result<InFlight> {
        self.send(p, x, self.home.rows.shape()[1], label)
    }

    /// Sends one number f32 of each choice `[T, k]`.
    pub(super) fn send_values(&self, p: &StepContext, x: &Tensor, label: &'static str) -> Result<InFlight> {
        self.send(p, &x.view(&[x.numel(), 1])?, self.etp, label)
    }

    fn send(&self, p: &StepContext, x: &Tensor, k: usize, label: &'static str) -> Result<InFlight> {
        let total = self.sent.iter().sum();
        let out = p.rank.activation(&[total, x.shape()[1]], x.dtype())?;
        p.rank.kernels.gather_rows(&p.rank.compute, x, &self.home.source.narrow(0, 0, total)?, k, &out)?;
        self.exchange(p, out, &self.sent, &self.received, label)
    }

    /// What came, sorted by expert: `[N, w]`.
    pub(super) fn sorted(&self, p: &StepContext, came: &Tensor) -> Result<Tensor> {
        let rows = p.rank.activation(&[self.map.source.numel(), came.shape()[1]], came.dtype())?;
        p.rank.kernels.moe_permute(&p.rank.compute, came, &self.map, &rows)?;
        Ok(rows)
    }

    /// Sends rows `[N, w]` of experts back to where they came from.
    pub(super) fn send_combine(&self, p: &StepContext, y: &Tensor, label: &'static str) -> Result<InFlight> {
        let out = p.rank.activation(&[self.received.iter().sum(), y.shape()[1]], y.dtype())?;
        p.rank.kernels.moe_unpermute(&p.rank.compute, y, &self.map.rows, None, &out)?;
        self.exchange(p, out, &self.received, &self.sent, label)
    }

    /// What came back, summed where its tokens are: `[T, w]`.
    pub(super) fn unpermuted(&self, p: &StepContext, came: &Tensor) -> Result<Tensor> {
        let out = p.rank.activation(&[self.home.rows.shape()[0], came.shape()[1]], came.dtype())?;
        p.rank.kernels.moe_unpermute(&p.rank.compute, came, &self.home.rows, None, &out)?;
        Ok(out)
    }

    /// Numbers that came back, summed over the copies of each choice: f32 `[T, k]`.
    pub(super) fn reduced_probs(&self, p: &StepContext, came: &Tensor) -> Result<Tensor> {
        let [t, slots] = [self.home.rows.shape()[0], self.home.rows.shape()[1]];
        let choices = t * slots / self.etp;
        let out = p.rank.activation(&[t, slots / self.etp], DType::F32)?;
        // A choice's slots are neighbours.
        let rows = self.home.rows.view(&[choices, self.etp])?;
        p.rank.kernels.moe_unpermute(&p.rank.compute, came, &rows, None, &out.view(&[choices, 1])?)?;
        Ok(out)
    }

    fn exchange(
        &self,
        p: &StepContext,
        x: Tensor,
        sent: &[usize],
        received: &[usize],
        label: &'static str,
    ) -> Result<InFlight> {
        let w = x.shape()[1];
        let to = p.rank.activation(&[received.iter().sum(), w], x.dtype())?;
        let elements = |rows: &[usize]| rows.iter().map(|n| n * w).collect::<Vec<_>>();
        let (rank, sent, received) = (p.rank, elements(sent), elements(received));
        let s = if rank.overlap { &rank.dispatch_stream } else { &rank.compute };
        if rank.overlap {
            s.wait(&rank.compute.record()?)?;
        }
        rank.etp_ep_group.all_to_all_v(s, &x, &sent, &to, &received, label)?;
        let done = if rank.overlap { Some(s.record()?) } else { None };
        Ok(InFlight { to, done, _from: x })
    }
}

/// Where rows go that come from each rank for each expert here: `counts` of each expert, rank after rank.
fn received_map(p: &StepContext, layout: ExpertLayout, counts: &[usize]) -> Result<RowMap> {
    let (own, n) = (layout.experts[1], counts.iter().sum());
    let ids: Vec<i32> =
        counts.iter().enumerate().flat_map(|(i, c)| std::iter::repeat_n((i % own) as i32, *c)).collect();
    let ids = p.rank.compute.upload(&ids, &[n, 1], Category::Activations)?;
    let map = layout.map(p, [n, 1], own, layout.align)?;
    p.rank.kernels.sort_by_expert(&p.rank.compute, &ids, 0, layout.align, &map)?;
    Ok(map)
}

/// Choices `[T, k]` and, behind them, one of each expert by no token: nobody is without rows then, so that all have as many once
/// they are aligned to one more than any can have. Rows of such choices are zeros.
fn padded_index(p: &StepContext, index: &Tensor, experts: usize) -> Result<Tensor> {
    let ([t, k], s) = ([index.shape()[0], index.shape()[1]], &p.rank.compute);
    let more = experts.div_ceil(k);
    let all = p.rank.activation(&[t + more, k], DType::I32)?;
    s.copy(index, &all.narrow(0, 0, t)?)?;
    let ids: Vec<i32> = (0..more * k).map(|e| if e < experts { e as i32 } else { -1 }).collect();
    s.copy(&s.upload(&ids, &[more, k], Category::Workspace)?, &all.narrow(0, t, more)?)?;
    Ok(all)
}

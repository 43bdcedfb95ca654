//! Tokens to the ranks that have their experts by an all-to-all exchange.
//!
//! At home, choices are sorted by destination: rank (ep b, etp a) of the group gets the rows of the experts of b, sorted by
//! expert. Where a ranks share an expert, each of them gets a copy, and what they send back are parts of a sum. There, rows
//! are sorted once more: by expert, then by rank they came from, then by token.

use super::dispatch::Room;
use super::experts::Rows;
use super::router::Routes;
use crate::Pass;
use ferrotron_kernels::RowMap;
use ferrotron_tensor::{Category, DType, Result, Tensor};

/// Where rows went.
pub(crate) struct Exchange {
    /// Choices at home, one slot for each copy: k·etp of a token.
    home: RowMap,
    /// Rows at the experts.
    map: RowMap,
    /// Rows to each rank, and from each.
    sent: Vec<usize>,
    received: Vec<usize>,
    etp: usize,
}

impl Exchange {
    /// Rows of `x [T, h]` for the experts of this rank.
    pub(super) fn there(p: &Pass, room: Room, routes: &Routes, x: &Tensor) -> Result<(Rows, Exchange)> {
        let (k, s, group) = (&p.rank.kernels, &p.rank.compute, &p.rank.experts);
        let [t, topk] = [routes.index.shape()[0], routes.index.shape()[1]];
        let (etp, [all, own]) = (p.rank.etp.size(), room.experts);
        let index = if etp == 1 {
            routes.index.clone()
        } else {
            let wide = p.rank.activation(&[t, topk * etp], DType::I32)?;
            k.copy_choices(s, &routes.index, own, etp, &wide)?;
            wide
        };
        let home = room.map(p, [t, topk * etp], all * etp, 1)?;
        k.sort(s, &index, 0, 1, &home)?;
        // The host must know how much comes and goes: the only wait.
        let theirs = p.rank.activation(&[all * etp], DType::I32)?;
        group.all_to_all(s, &home.counts, &theirs, "tokens of each expert")?;
        let sums = |t: &Tensor| -> Result<(Vec<usize>, Vec<i32>)> {
            let counts = s.download::<i32>(t)?;
            Ok((counts.chunks(own).map(|c| c.iter().sum::<i32>() as usize).collect(), counts))
        };
        let (sent, _) = sums(&home.counts)?;
        let (received, counts) = sums(&theirs)?;
        let n: usize = received.iter().sum();
        let ids: Vec<i32> = counts
            .iter()
            .enumerate()
            .flat_map(|(i, c)| std::iter::repeat_n((i % own) as i32, *c as usize))
            .collect();
        let ids = s.upload(&ids, &[n, 1], Category::Activations)?;
        let map = room.map(p, [n, 1], own, room.align)?;
        k.sort(s, &ids, 0, room.align, &map)?;
        let e = Exchange { home, map, sent, received, etp };
        let probs = routes.probs.view(&[t * topk, 1])?;
        let rows = Rows {
            probs: e.bring(p, &probs, etp, "probabilities of choices")?.view(&[e.map.source.numel()])?,
            x: e.bring(p, x, topk * etp, "tokens for experts")?,
            map: e.map.clone(),
        };
        Ok((rows, e))
    }

    /// Rows `x [.., w]`, each for `k` slots, to the experts.
    fn bring(&self, p: &Pass, x: &Tensor, k: usize, label: &'static str) -> Result<Tensor> {
        let (s, w) = (&p.rank.compute, x.shape()[1]);
        let total = self.sent.iter().sum();
        let out = p.rank.activation(&[total, w], x.dtype())?;
        p.rank.kernels.gather_rows(s, x, &self.home.source.narrow(0, 0, total)?, k, &out)?;
        let came = self.exchange(p, &out, &self.sent, &self.received, label)?;
        let rows = p.rank.activation(&[self.map.source.numel(), w], x.dtype())?;
        p.rank.kernels.gather_rows(s, &came, &self.map.source, 1, &rows)?;
        Ok(rows)
    }

    /// Rows `[N, w]` of experts back to where they came from, sorted by choice: `[sent, w]`.
    fn bring_back(&self, p: &Pass, y: &Tensor, label: &'static str) -> Result<Tensor> {
        let (s, w) = (&p.rank.compute, y.shape()[1]);
        let out = p.rank.activation(&[self.received.iter().sum(), w], y.dtype())?;
        p.rank.kernels.sum_rows(s, y, &self.map.rows, None, &out)?;
        self.exchange(p, &out, &self.received, &self.sent, label)
    }

    fn exchange(
        &self,
        p: &Pass,
        x: &Tensor,
        sent: &[usize],
        received: &[usize],
        label: &'static str,
    ) -> Result<Tensor> {
        let w = x.shape()[1];
        let to = p.rank.activation(&[received.iter().sum(), w], x.dtype())?;
        let elements = |rows: &[usize]| rows.iter().map(|n| n * w).collect::<Vec<_>>();
        p.rank.experts.all_to_all_v(&p.rank.compute, x, &elements(sent), &to, &elements(received), label)?;
        Ok(to)
    }

    /// See [`super::dispatch::Dispatched::back`].
    pub(super) fn back(&self, p: &Pass, y: &Tensor) -> Result<Tensor> {
        let came = self.bring_back(p, y, "results of experts")?;
        let out = p.rank.activation(&[self.home.rows.shape()[0], y.shape()[1]], y.dtype())?;
        p.rank.kernels.sum_rows(&p.rank.compute, &came, &self.home.rows, None, &out)?;
        Ok(out)
    }

    /// See [`super::dispatch::Dispatched::there_again`].
    pub(super) fn there_again(&self, p: &Pass, dy: &Tensor) -> Result<Tensor> {
        self.bring(p, dy, self.home.rows.shape()[1], "gradients for experts")
    }

    /// See [`super::dispatch::Dispatched::probs_back`].
    pub(super) fn probs_back(&self, p: &Pass, dp: &Tensor) -> Result<Tensor> {
        let came = self.bring_back(p, &dp.view(&[dp.numel(), 1])?, "gradients of probabilities")?;
        let [t, slots] = [self.home.rows.shape()[0], self.home.rows.shape()[1]];
        let out = p.rank.activation(&[t, slots / self.etp], DType::F32)?;
        // A choice's slots are neighbours: the sum over its copies.
        let (rows, flat) =
            (self.home.rows.view(&[t * slots / self.etp, self.etp])?, out.view(&[t * slots / self.etp, 1])?);
        p.rank.kernels.sum_rows(&p.rank.compute, &came, &rows, None, &flat)?;
        Ok(out)
    }
}

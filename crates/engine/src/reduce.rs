//! Gradients of a step summed over the ranks that share weights or data, and whole tensors from the shares of ranks.

use crate::attention::Layout;
use crate::{GradBuffer, ParamId, ParamSpec, Part, Place, Rank, Tokens};
use ferrotron_comm::Reduce;
use ferrotron_tensor::{Category, DType, Element, Result, Tensor};

impl Rank {
    /// This rank's place among those that share every layer.
    pub fn place(&self) -> Place {
        Place { rank: self.tp.rank(), size: self.tp.size() }
    }

    /// Which tokens of a batch this rank has.
    pub fn tokens(&self, layout: &Layout) -> Result<Tokens> {
        let cp = Place { rank: self.cp.rank(), size: self.cp.size() };
        Tokens::new(layout, cp, self.tp.size())
    }

    /// A logical tensor whole, from what every rank holds of it, on every rank. `held` is row-major, each element
    /// being `size` values: 1, or its bytes.
    pub fn join<T: Element>(&self, part: &Part, size: usize, held: &[T]) -> Result<Vec<T>> {
        if self.tp.size() == 1 {
            return Ok(held.to_vec());
        }
        let all = self.tp.all_gather_bytes(bytemuck::cast_slice(held), "a whole tensor")?;
        let shape: Vec<usize> = part.shape.iter().copied().chain([size]).collect();
        let mut whole = vec![T::zeroed(); shape.iter().product()];
        for (rank, bytes) in all.iter().enumerate() {
            let values: Vec<T> =
                bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect();
            part.cut(Place { rank, size: self.tp.size() }).put(&shape, &values, &mut whole);
        }
        Ok(whole)
    }
}

/// What is held of each part of a gradient, flat.
fn shares<'a>(spec: &'a ParamSpec, grad: &Tensor) -> Result<Vec<(&'a Part, Tensor)>> {
    let flat = grad.view(&[spec.numel()])?;
    spec.held().map(|(part, _, r)| Ok((part, flat.narrow(0, r.start, r.len())?))).collect()
}

impl GradBuffer {
    /// Sums the step's gradients: over ranks with other data, and over ranks that hold the same weights but saw
    /// other tokens or heads. Afterwards every copy of a weight has the same gradient, bit for bit.
    pub fn reduce(&mut self, rank: &Rank, specs: &[ParamSpec]) -> Result<()> {
        self.finish(rank)?;
        let s = &rank.compute;
        if rank.copies.size() > 1 {
            rank.copies.all_reduce(s, &self.flat(rank)?, Reduce::Sum, "gradients")?;
        }
        if rank.ends.size() > 1 {
            for i in (0..specs.len()).filter(|i| specs[*i].tied_over_ends) {
                rank.ends.all_reduce(s, &self.get(ParamId(i))?, Reduce::Sum, "gradient of the tied table")?;
            }
        }
        let place = rank.place();
        if place.size == 1 {
            return Ok(());
        }
        for (i, spec) in specs.iter().enumerate() {
            for (part, share) in shares(spec, &self.get(ParamId(i))?)? {
                let holders = part.holders(place);
                if holders.len() == place.size {
                    rank.tp.all_reduce(s, &share, Reduce::Sum, "gradients of replicated weights")?;
                } else if part.shared(place.size) {
                    // Some ranks hold the same heads: each adds up those of its own.
                    let n = share.numel();
                    let all = Tensor::empty(s, &[place.size, n], DType::F32, Category::Communication)?;
                    rank.tp.all_gather(s, &share, &all, "gradients of shared heads")?;
                    s.zero(&share)?;
                    for holder in holders {
                        rank.kernels.add_assign(s, &share, &all.select(0, holder)?)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The gradients that this rank counts in the norm: every element of the model is counted by one rank.
    pub fn counted(&self, rank: &Rank, specs: &[ParamSpec]) -> Result<Vec<Tensor>> {
        let place = rank.place();
        let mut out = Vec::new();
        for (i, spec) in specs.iter().enumerate().filter(|(_, spec)| !spec.mirror) {
            let mine = shares(spec, &self.get(ParamId(i))?)?;
            let first = |part: &Part| part.holders(place).start == place.rank;
            out.extend(mine.into_iter().filter(|(part, _)| first(part)).map(|(_, share)| share));
        }
        Ok(out)
    }
}

//! The weights of a model in memory.

use super::{ParamId, ParamSpec};
use crate::flat::{FlatBuffer, Placement, Plan, Shelf, bucket_elements, place};
use crate::moe::{MixtureSpec, Mixtures};
use crate::precision::{EightState, Stored};
use crate::{Place, Rank};
use ferrotron_tensor::{Category, DType, Error, Event, Result, Stream, Tensor, shape_error};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The weights of a model in the type it computes in, in flat buckets; those that are in narrow products alone may be
/// bytes instead, in buckets of their own.
pub struct Params {
    specs: Vec<ParamSpec>,
    plan: Arc<Plan>,
    /// What of each bucket is numbers, and what is not.
    shelves: Vec<Shelf>,
    buckets: Vec<Tensor>,
    values: Vec<Tensor>,
    stored: Stored,
    dtype: DType,
    eight: Option<EightState>,
    mixtures: Option<Mixtures>,
    /// Of each bucket that is being gathered: when it is there.
    arriving: Mutex<Vec<Option<Event>>>,
}

impl Params {
    /// Memory for all parameters, zeros.
    pub fn allocate(rank: &Rank, specs: Vec<ParamSpec>, dtype: DType) -> Result<Params> {
        Params::in_buckets(rank, specs, dtype, bucket_elements(rank.copies.size()))
    }

    /// The same in buckets that close at `target` elements.
    pub fn in_buckets(rank: &Rank, specs: Vec<ParamSpec>, dtype: DType, target: usize) -> Result<Params> {
        if dtype != DType::BF16 && specs.iter().any(|s| s.eight.is_some()) {
            let what = format!("narrow products in a model of {dtype}; have it compute in bf16");
            return Err(Error::Unsupported { op: "parameters", what });
        }
        let copies = [rank.copies.size(), rank.expert_copies.size()];
        let plan = Arc::new(Plan::new(&specs, copies, target));
        let shelf = |b| Shelf::new(b, |id| specs[id.0].stored());
        let shelves: Vec<Shelf> = plan.buckets().iter().map(shelf).collect();
        let zeros = |len| rank.compute.zeros(&[len], dtype, Category::Parameters);
        let buckets: Vec<Tensor> = shelves.iter().map(|s| zeros(s.lengths()[1])).collect::<Result<_>>()?;
        let view = |(i, spec): (usize, &ParamSpec)| {
            let (bucket, range) = plan.slot(ParamId(i));
            let range = shelves[bucket].others(&range);
            let value = buckets[bucket].narrow(0, range.start, range.len())?;
            if spec.stored() { Ok(value) } else { value.view(&spec.shape) }
        };
        let values = specs.iter().enumerate().map(view).collect::<Result<_>>()?;
        let arriving = Mutex::new(vec![None; buckets.len()]);
        let eight = EightState::new(rank, &specs)?;
        let stored = Stored::new(rank, &specs, &plan, &shelves)?;
        let mixtures = None;
        Ok(Params { specs, plan, shelves, buckets, values, stored, dtype, eight, mixtures, arriving })
    }

    /// The type the model computes in.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// What narrow products remember, if there are any.
    pub fn eight(&self) -> Option<&EightState> {
        self.eight.as_ref()
    }

    /// With state for the mixtures declared beside the parameters.
    pub fn with_mixtures(self, rank: &Rank, specs: &[MixtureSpec]) -> Result<Params> {
        Ok(Params { mixtures: Mixtures::new(&rank.compute, specs.to_vec())?, ..self })
    }

    /// What mixtures remember, if there are any here.
    pub fn mixtures(&self) -> Option<&Mixtures> {
        self.mixtures.as_ref()
    }

    /// The weight, for work on the compute stream, which waits until it is there.
    pub fn weight(&self, rank: &Rank, id: ParamId) -> Result<&Tensor> {
        if self.specs[id.0].stored() {
            return shape_error("weight", "it is kept as bytes, which only narrow products take");
        }
        self.await_weight(rank, id)?;
        Ok(&self.values[id.0])
    }

    /// Makes the compute stream wait until a weight is there.
    pub(crate) fn await_weight(&self, rank: &Rank, id: ParamId) -> Result<()> {
        let arriving = self.arriving()[self.plan.slot(id).0].take();
        arriving.map_or(Ok(()), |event| rank.compute.wait(&event))
    }

    /// The weights that are bytes.
    pub(crate) fn stored(&self) -> &Stored {
        &self.stored
    }

    /// Makes the compute stream wait for all weights: before anything but a pass of the model uses them.
    pub fn settle(&self, rank: &Rank) -> Result<()> {
        self.arriving().iter_mut().filter_map(Option::take).try_for_each(|event| rank.compute.wait(&event))
    }

    /// A bucket will be whole after `event`; passes wait for it at its first use.
    pub fn arrives(&self, bucket: usize, event: Event) {
        self.arriving()[bucket] = Some(event);
    }

    fn arriving(&self) -> MutexGuard<'_, Vec<Option<Event>>> {
        self.arriving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The declarations.
    pub fn specs(&self) -> &[ParamSpec] {
        &self.specs
    }

    /// How parameters lie in buckets.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// All weights of a bucket; an error where some of them are bytes.
    pub fn bucket(&self, bucket: usize) -> Result<FlatBuffer> {
        if !self.shelves[bucket].is_plain() {
            return shape_error("weights", "some are kept as bytes; take the optimizer's masters");
        }
        Ok(FlatBuffer::of(&self.plan, bucket, Placement::Replicate, &self.buckets[bucket]))
    }

    /// Brings a bucket from what ranks with equal weights have of it under `placement` to all of them. Every rank calls
    /// it. Weights that are bytes travel as bytes, if a part of them is all that a rank made.
    pub fn gather(&self, rank: &Rank, bucket: usize, placement: Placement, s: &Stream) -> Result<()> {
        const LABEL: &str = "weights";
        let (shelf, group) = (&self.shelves[bucket], rank.copies_of(self.plan.buckets()[bucket].experts));
        if shelf.is_plain() {
            let all = self.bucket(bucket)?;
            return all.seen_as(placement, place(group))?.redistribute(rank, group, &all, s, LABEL);
        }
        let held = |rank| self.plan.buckets()[bucket].held(placement, Place { rank, size: group.size() });
        let gather = |memory: &Tensor, part: &dyn Fn(usize) -> Range<usize>| {
            let counts: Vec<usize> = (0..group.size()).map(|r| part(r).len()).collect();
            let mine = part(group.rank());
            let mine = memory.narrow(0, mine.start, mine.len())?;
            group.all_gather_v(s, &mine, memory, &counts, LABEL)
        };
        gather(&self.buckets[bucket], &|r| shelf.others(&held(r)))?;
        if let Some(bytes) = self.stored.travelling(bucket)? {
            gather(&bytes, &|r| shelf.apart(&held(r)))?;
        }
        Ok(())
    }

    /// All weights in order of declaration, nothing of those that are bytes; see [`Params::settle`].
    pub fn values(&self) -> &[Tensor] {
        &self.values
    }

    /// Elements of the whole model, those of other ranks included.
    pub fn numel(&self) -> usize {
        let parts = self.specs.iter().flat_map(|s| &s.parts);
        parts.map(|p| p.shape.iter().product::<usize>()).sum()
    }
}

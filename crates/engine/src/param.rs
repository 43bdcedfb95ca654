//! Parameters declare themselves once: names, shapes, initial values and how they may be split. Everything
//! else (storage, gradients, optimizer state, checkpoints, conversion) follows from the declaration.

use crate::flat::{FlatBuffer, Placement, Plan, Shelf, bucket_elements, place};
use crate::moe::{MixtureId, MixtureSpec, Mixtures, MoeTraining};
use crate::precision::{Eight, EightState, Policy, Stored};
use crate::{Cut, Place, Rank, Split};
use ferrotron_kernels::NormalRuns;
use ferrotron_kernels::philox::RandomStream;
use ferrotron_tensor::{Category, DType, Error, Event, Result, Stream, Tensor, shape_error};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Index of a parameter in its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub usize);

/// Where initial values come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation, drawn by (seed, name, element index).
    Normal(f32),
    /// All equal.
    Constant(f32),
}

/// One logical tensor: what checkpoints and conversions know.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Unique name, such as `layers.3.attn.q.weight`.
    pub name: String,
    /// Global shape, without padding.
    pub shape: Vec<usize>,
    /// Initial values.
    pub init: Init,
    /// How it may be split.
    pub split: Split,
}

/// One parameter in memory: what this rank holds of its parts, joined along axis 0.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Logical tensors, in order.
    pub parts: Vec<Part>,
    /// What is held of each.
    pub cuts: Vec<Cut>,
    /// Shape of what is held.
    pub shape: Vec<usize>,
    /// Modules that use it: its gradient is ready after that many contributions.
    pub uses: u32,
    /// Elements that the rank has which has most: parameters share buckets alike on all ranks.
    pub widest: usize,
    /// A second copy of a parameter that another stage of the pipeline has: counted and saved there.
    pub mirror: bool,
    /// The first and the last stage of the pipeline have it, and its gradient is the sum of both.
    pub tied_over_ends: bool,
    /// Which products with it have narrow factors.
    pub eight: Option<Eight>,
    /// It belongs to experts: its copies, and the ranks that share it, are those of the expert grid.
    pub experts: bool,
    /// Matrices that lie one after another along its first axis, each with scales of its own: as many as experts here.
    pub matrices: usize,
}

impl ParamSpec {
    /// Elements of the whole.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Matrices decay, vectors (biases, gains) do not.
    pub fn decays(&self) -> bool {
        self.shape.len() > 1
    }

    /// The parts, what is held of each, and where that is inside the parameter.
    pub fn held(&self) -> impl Iterator<Item = (&Part, &Cut, Range<usize>)> {
        self.parts.iter().zip(&self.cuts).scan(0, |start, (p, cut)| {
            let range = *start..*start + cut.shape(&p.shape).iter().product::<usize>();
            *start = range.end;
            Some((p, cut, range))
        })
    }

    /// Which elements of its logical tensors (row-major) elements `inside` of the parameter are, in order.
    pub fn runs(&self, inside: &Range<usize>) -> Vec<(&Part, Vec<Range<usize>>)> {
        self.held()
            .map(|(part, cut, r)| {
                let (start, end) = (r.start.max(inside.start), r.end.min(inside.end));
                let share = start.saturating_sub(r.start)..end.saturating_sub(r.start);
                (part, cut.runs_within(&part.shape, share))
            })
            .filter(|(_, runs)| !runs.is_empty())
            .collect()
    }

    /// Shape `[n, k]` of each of its matrices.
    pub fn matrix(&self) -> [usize; 2] {
        let rows = self.shape.first().copied().unwrap_or(1);
        let each = rows / self.matrices.max(1);
        [each, self.shape.iter().skip(1).product()]
    }

    /// Is it kept as bytes, and not as numbers?
    pub fn stored(&self) -> bool {
        self.eight.is_some_and(|e| e.stored)
    }

    /// Has every rank all of it?
    pub fn replicated(&self) -> bool {
        self.parts.iter().all(|p| p.split == Split::Replicated)
    }
}

/// Collects declarations while a model is put together.
pub struct Declarations {
    specs: Vec<ParamSpec>,
    names: HashSet<String>,
    place: Place,
    experts: ExpertPlace,
    policy: Policy,
    mixtures: Vec<MixtureSpec>,
    mixing: Arc<MoeTraining>,
}

/// Which experts a rank has, and what of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertPlace {
    /// Ranks that share the experts among them, whole ones.
    pub ep: Place,
    /// Ranks that share each expert.
    pub etp: Place,
}

impl ExpertPlace {
    /// All of all.
    pub const ALONE: ExpertPlace = ExpertPlace { ep: Place::ALONE, etp: Place::ALONE };

    /// The experts of `count` that are here.
    pub fn own(&self, count: usize) -> Range<usize> {
        let each = count / self.ep.size;
        self.ep.rank * each..(self.ep.rank + 1) * each
    }
}

impl Default for Declarations {
    fn default() -> Declarations {
        Declarations::at(Place::ALONE)
    }
}

impl Declarations {
    /// For a rank that holds its share of every parameter.
    pub fn at(place: Place) -> Declarations {
        Declarations {
            specs: Vec::new(),
            names: HashSet::new(),
            place,
            experts: ExpertPlace::ALONE,
            policy: Policy::default(),
            mixtures: Vec::new(),
            mixing: Arc::default(),
        }
    }

    /// For a rank of a grid.
    pub fn of(rank: &Rank) -> Declarations {
        let etp = Place { rank: rank.etp.rank(), size: rank.etp.size() };
        Declarations {
            experts: ExpertPlace { ep: rank.expert_place(), etp },
            ..Declarations::at(rank.place())
        }
    }

    /// With narrow products as the policy says.
    pub fn with_policy(self, policy: Policy) -> Declarations {
        Declarations { policy, ..self }
    }

    /// With mixtures that are trained so.
    pub fn with_mixing(self, mixing: &Arc<MoeTraining>) -> Declarations {
        Declarations { mixing: mixing.clone(), ..self }
    }

    /// How mixtures are trained.
    pub(crate) fn mixing(&self) -> &Arc<MoeTraining> {
        &self.mixing
    }

    /// What the policy says of a map to these outputs (logical name, channels), which is noted at its weight.
    pub(crate) fn narrow(&mut self, weight: ParamId, outputs: &[(String, usize)]) -> Option<Eight> {
        let names: Vec<&str> = outputs.iter().map(|(name, _)| name.as_str()).collect();
        let eight = self.policy.of(&names);
        self.specs[weight.0].eight = eight;
        eight
    }

    /// The same of experts' maps to these outputs, all experts alike: one product is of all of them. Each has a matrix of its
    /// own, of as many parts as there are outputs.
    pub(crate) fn narrow_experts(&mut self, weight: ParamId, outputs: &[String]) -> Option<Eight> {
        let names: Vec<&str> = outputs.iter().map(String::as_str).collect();
        let (spec, eight) = (&mut self.specs[weight.0], self.policy.of(&names));
        spec.eight = eight;
        spec.matrices = spec.parts.len() / outputs.len().max(1);
        eight
    }

    /// What the policy says of the output matrix. A table that is looked up in as well stays numbers.
    pub(crate) fn narrow_head(&mut self, weight: ParamId, table: bool) -> Option<Eight> {
        let eight = self.policy.of(&["head"]).map(|e| Eight { stored: e.stored && !table, ..e });
        self.specs[weight.0].eight = eight;
        eight
    }

    /// Does the policy have forward attention of a module in eight bits?
    pub(crate) fn narrow_attention(&self, name: &str) -> bool {
        self.policy.narrows_attention(name)
    }

    /// The rank's place.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Where the rank's experts are.
    pub fn experts(&self) -> ExpertPlace {
        self.experts
    }

    /// Declares a parameter made of `parts`, which agree in all axes but the first.
    pub fn declare(&mut self, parts: Vec<Part>) -> Result<ParamId> {
        self.declare_at(self.place, false, parts)
    }

    /// Declares a parameter of the rank's experts.
    pub fn declare_experts(&mut self, parts: Vec<Part>) -> Result<ParamId> {
        self.declare_at(self.experts.etp, true, parts)
    }

    fn declare_at(&mut self, place: Place, experts: bool, parts: Vec<Part>) -> Result<ParamId> {
        let Some(mut shape) = parts.first().map(|p| p.shape.clone()).filter(|s| !s.is_empty()) else {
            return shape_error("declare", "a parameter needs a part with at least one axis");
        };
        if parts.iter().any(|p| p.shape.len() != shape.len() || p.shape[1..] != shape[1..]) {
            return shape_error("declare", format!("parts do not stack: {parts:?}"));
        }
        let cuts: Vec<Cut> = parts.iter().map(|p| p.cut(place)).collect();
        let local: Vec<Vec<usize>> = parts.iter().zip(&cuts).map(|(p, c)| c.shape(&p.shape)).collect();
        if local.iter().any(|s| s[1..] != local[0][1..]) {
            return shape_error("declare", format!("shares do not stack: {parts:?}"));
        }
        shape.clone_from(&local[0]);
        shape[0] = local.iter().map(|s| s[0]).sum();
        if let Some(twice) = parts.iter().find(|p| !self.names.insert(p.name.clone())) {
            return shape_error("declare", format!("'{}' is declared twice", twice.name));
        }
        let most = Place { rank: 0, ..place };
        let widest = parts.iter().map(|p| p.cut(most).shape(&p.shape).iter().product::<usize>()).sum();
        self.specs.push(ParamSpec {
            parts,
            cuts,
            shape,
            uses: 1,
            widest,
            mirror: false,
            tied_over_ends: false,
            eight: None,
            experts,
            matrices: 1,
        });
        Ok(ParamId(self.specs.len() - 1))
    }

    /// A declaration.
    pub fn spec(&self, id: ParamId) -> &ParamSpec {
        &self.specs[id.0]
    }

    /// Declares a mixture, which has state besides its parameters.
    pub fn mixture(&mut self, spec: MixtureSpec) -> MixtureId {
        self.mixtures.push(spec);
        MixtureId(self.mixtures.len() - 1)
    }

    /// The mixtures declared, in order.
    pub fn mixtures(&self) -> &[MixtureSpec] {
        &self.mixtures
    }

    /// One more module uses a declared parameter.
    pub fn share(&mut self, id: ParamId) {
        self.specs[id.0].uses += 1;
    }

    /// So many modules use a declared parameter.
    pub fn set_uses(&mut self, id: ParamId, uses: u32) {
        self.specs[id.0].uses = uses;
    }

    /// The parameters declared after the first `from`.
    pub fn since(&self, from: usize) -> impl Iterator<Item = ParamId> + use<> {
        (from..self.specs.len()).map(ParamId)
    }

    /// Parameters declared so far.
    pub fn count(&self) -> usize {
        self.specs.len()
    }

    /// The first and the last stage of the pipeline both have the parameter; `mirror` on the one that has the copy.
    pub fn mark_tied(&mut self, id: ParamId, mirror: bool) {
        self.specs[id.0].tied_over_ends = true;
        self.specs[id.0].mirror = mirror;
    }

    /// The declarations, in order.
    pub fn finish(self) -> Vec<ParamSpec> {
        self.specs
    }
}

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

/// Initial values of elements `range` of a logical tensor, by their definition.
pub fn initial_values(seed: u64, part: &Part, range: Range<usize>) -> Vec<f32> {
    let stream = RandomStream::named(seed, &part.name);
    match part.init {
        Init::Constant(c) => vec![c; range.len()],
        Init::Normal(std) => range.map(|i| (f64::from(std) * stream.normal(i as u64)) as f32).collect(),
    }
}

/// The same of elements `runs`, back to back, into `out` f32 `[elements]`, made by its device.
pub fn draw_initial(rank: &Rank, part: &Part, runs: &[Range<usize>], out: &Tensor) -> Result<()> {
    let s = &rank.compute;
    let std = match part.init {
        Init::Constant(c) => return s.write_to(out, &vec![c; out.numel()]),
        Init::Normal(std) => f64::from(std),
    };
    let stream = RandomStream::named(rank.seed, &part.name);
    let (mut at, mut rest) = (0, runs);
    while let Some((run, stride, rows)) = alike(rest) {
        let values = NormalRuns { stream, first: run.start as u64, stride: stride as u64, std };
        let n = rows * run.len();
        rank.kernels.normal(s, values, &out.narrow(0, at, n)?.view(&[rows, run.len()])?)?;
        (at, rest) = (at + n, &rest[rows..]);
    }
    Ok(())
}

/// The first run, how far after it the next begins, and how many from it on are as long and as far apart. Runs are in
/// order.
fn alike(runs: &[Range<usize>]) -> Option<(&Range<usize>, usize, usize)> {
    let run = runs.first()?;
    let stride = runs.get(1).map_or(0, |next| next.start - run.start);
    let follows =
        |pair: &&[Range<usize>]| pair[1].len() == run.len() && pair[1].start - pair[0].start == stride;
    Some((run, stride, 1 + runs.windows(2).take_while(follows).count()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever a rank holds of a tensor, cut by columns or in the middle of rows, it draws the values of the whole.
    #[test]
    fn a_rank_draws_its_values_of_the_whole() {
        let rank = Rank::cpu(2, 5).unwrap();
        for (split, most) in [
            (Split::Replicated, 1),
            (Split::Rows { unit: 1 }, 1),
            // A broken row at either end, and all rows between them at once.
            (Split::Columns { unit: 2 }, 3),
        ] {
            for init in [Init::Normal(0.02), Init::Constant(1.5)] {
                let part = Part { name: "w".into(), shape: vec![9, 10], init, split };
                let whole = initial_values(5, &part, 0..90);
                let cut = part.cut(Place { rank: 1, size: 2 });
                let held = cut.take(&part.shape, &whole);
                for share in [0..held.len(), 0..0, 3..4, 3..held.len() - 2, 5..12] {
                    let runs = cut.runs_within(&part.shape, share.clone());
                    let all = Tensor::empty(&rank.compute, &[share.len()], DType::F32, Category::Workspace);
                    let out = all.unwrap();
                    draw_initial(&rank, &part, &runs, &out).unwrap();
                    let found = rank.compute.download::<f32>(&out).unwrap();
                    assert_eq!(found, held[share.clone()], "{split:?} {init:?} {share:?}");
                    let (mut rest, mut launches) = (&runs[..], 0);
                    while let Some((_, _, rows)) = alike(rest) {
                        (rest, launches) = (&rest[rows..], launches + 1);
                    }
                    assert!(launches <= most, "{split:?} {share:?} in {launches} launches");
                }
            }
        }
    }
}

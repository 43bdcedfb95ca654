//! Parameters declare themselves once: names, shapes, initial values and how they may be split. Everything
//! else (storage, gradients, optimizer state, checkpoints, conversion) follows from the declaration.

use crate::{Cut, Place, Rank, Split};
use ferrotron_kernels::cpu::random::fill_normal;
use ferrotron_kernels::philox::RandomStream;
use ferrotron_tensor::{Category, DType, Result, Tensor, Threads, shape_error};

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
    /// The first and the last stage of a pipeline both hold it: gradients are summed over the two.
    pub tied_over_ends: bool,
    /// The second of these two: not counted in norms, not saved.
    pub mirror: bool,
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
    pub fn held(&self) -> impl Iterator<Item = (&Part, &Cut, std::ops::Range<usize>)> {
        self.parts.iter().zip(&self.cuts).scan(0, |start, (p, cut)| {
            let range = *start..*start + cut.shape(&p.shape).iter().product::<usize>();
            *start = range.end;
            Some((p, cut, range))
        })
    }

    /// Has every rank all of it?
    pub fn replicated(&self) -> bool {
        self.parts.iter().all(|p| p.split == Split::Replicated)
    }
}

/// Collects declarations while a model is put together.
pub struct Declarations {
    specs: Vec<ParamSpec>,
    place: Place,
}

impl Default for Declarations {
    fn default() -> Declarations {
        Declarations::at(Place::ALONE)
    }
}

impl Declarations {
    /// For a rank that holds its share of every parameter.
    pub fn at(place: Place) -> Declarations {
        Declarations { specs: Vec::new(), place }
    }

    /// The rank's place.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Declares a parameter made of `parts`, which agree in all axes but the first.
    pub fn declare(&mut self, parts: Vec<Part>) -> Result<ParamId> {
        let Some(mut shape) = parts.first().map(|p| p.shape.clone()).filter(|s| !s.is_empty()) else {
            return shape_error("declare", "a parameter needs a part with at least one axis");
        };
        if parts.iter().any(|p| p.shape.len() != shape.len() || p.shape[1..] != shape[1..]) {
            return shape_error("declare", format!("parts do not stack: {parts:?}"));
        }
        let cuts: Vec<Cut> = parts.iter().map(|p| p.cut(self.place)).collect();
        let local: Vec<Vec<usize>> = parts.iter().zip(&cuts).map(|(p, c)| c.shape(&p.shape)).collect();
        if local.iter().any(|s| s[1..] != local[0][1..]) {
            return shape_error("declare", format!("shares do not stack: {parts:?}"));
        }
        shape.clone_from(&local[0]);
        shape[0] = local.iter().map(|s| s[0]).sum();
        let taken = |name: &str| self.specs.iter().flat_map(|s| &s.parts).any(|p| p.name == name);
        if let Some(twice) = parts.iter().find(|p| taken(&p.name)) {
            return shape_error("declare", format!("'{}' is declared twice", twice.name));
        }
        self.specs.push(ParamSpec { parts, cuts, shape, uses: 1, tied_over_ends: false, mirror: false });
        Ok(ParamId(self.specs.len() - 1))
    }

    /// A declaration.
    pub fn spec(&self, id: ParamId) -> &ParamSpec {
        &self.specs[id.0]
    }

    /// One more module uses a declared parameter.
    pub fn share(&mut self, id: ParamId) {
        self.specs[id.0].uses += 1;
    }

    /// A parameter that the first and the last stage of a pipeline both hold; `mirror` on the last.
    pub fn mark_tied(&mut self, id: ParamId, mirror: bool) {
        let spec = &mut self.specs[id.0];
        (spec.tied_over_ends, spec.mirror) = (true, mirror);
    }

    /// The declarations, in order.
    pub fn finish(self) -> Vec<ParamSpec> {
        self.specs
    }
}

/// The weights of a model in the type it computes in.
pub struct Params {
    specs: Vec<ParamSpec>,
    values: Vec<Tensor>,
    dtype: DType,
}

impl Params {
    /// Memory for all parameters, contents unspecified.
    pub fn allocate(rank: &Rank, specs: Vec<ParamSpec>, dtype: DType) -> Result<Params> {
        let values = specs
            .iter()
            .map(|s| Tensor::empty(&rank.compute, &s.shape, dtype, Category::Parameters))
            .collect::<Result<_>>()?;
        Ok(Params { specs, values, dtype })
    }

    /// The type the model computes in.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The weight.
    pub fn get(&self, id: ParamId) -> &Tensor {
        &self.values[id.0]
    }

    /// The declarations.
    pub fn specs(&self) -> &[ParamSpec] {
        &self.specs
    }

    /// All weights in order of declaration.
    pub fn values(&self) -> &[Tensor] {
        &self.values
    }

    /// Elements of the whole model, those of other ranks included.
    pub fn numel(&self) -> usize {
        let parts = self.specs.iter().flat_map(|s| &s.parts);
        parts.map(|p| p.shape.iter().product::<usize>()).sum()
    }
}

/// Initial values of what is held of a logical tensor, the same under every layout.
pub fn initial_share(threads: &Threads, seed: u64, part: &Part, cut: &Cut) -> Vec<f32> {
    cut.runs(&part.shape).into_iter().flat_map(|run| initial_values(threads, seed, part, run)).collect()
}

/// Initial values of elements `range` of a logical tensor.
pub fn initial_values(threads: &Threads, seed: u64, part: &Part, range: std::ops::Range<usize>) -> Vec<f32> {
    match part.init {
        Init::Constant(c) => vec![c; range.len()],
        Init::Normal(std) => {
            let stream = RandomStream::named(seed, &part.name);
            let mut values = vec![0f32; range.len()];
            fill_normal(threads, stream, range.start as u64, 0.0, f64::from(std), &mut values);
            values
        }
    }
}

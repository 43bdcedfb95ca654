//! The kernels of a training step, at the shapes of one micro-batch of a recipe.

mod attention;
mod fp8;
mod gemm;
mod grouped_gemm;
mod memory_bound;
mod muon;
mod optimizer;

use super::kernels::KernelWork;
use crate::Result;
use crate::config::{MuonSettings, OptimizerKind, Resolved};
use crate::model::{LinearInfo, ModelConfig};
use crate::plan::GemmShape;
use ferrotron_engine::Rank;
use ferrotron_engine::quant::LinearGemm;
use ferrotron_kernels::NormalFill;
use ferrotron_kernels::philox::RandomStream;
use ferrotron_tensor::{Category, DType, Tensor};
pub(super) use fp8::bytes;

type Run = Box<dyn FnMut(&Rank) -> Result<()>>;
type Prepare = Box<dyn Fn(&Rank) -> Result<Run>>;

/// A kernel with its sizes; nothing is allocated before `prepare`.
pub(super) struct KernelCase {
    pub name: String,
    pub shape: String,
    pub work: KernelWork,
    /// Of GEMMs.
    pub gemm: Option<GemmShape>,
    pub prepare: Prepare,
}

impl KernelCase {
    /// A GEMM `[m, k]·[k, n]` over all experts.
    fn with_gemm(self, gemm: LinearGemm, experts: usize, [m, k, n]: [usize; 3]) -> KernelCase {
        let accumulate = self.name.ends_with("_added");
        KernelCase { gemm: Some(GemmShape { gemm, m, n, k, experts, accumulate }), ..self }
    }
}

/// The pass of a GEMM, as kernels' names end with it.
fn pass(kind: &str) -> LinearGemm {
    match kind {
        "forward" => LinearGemm::Fprop,
        "input_grad" => LinearGemm::Dgrad,
        _ => LinearGemm::Wgrad,
    }
}

fn case(
    name: impl Into<String>,
    shape: impl Into<String>,
    work: KernelWork,
    prepare: impl Fn(&Rank) -> Result<Run> + 'static,
) -> KernelCase {
    KernelCase { name: name.into(), shape: shape.into(), work, gemm: None, prepare: Box::new(prepare) }
}

/// Sizes of a micro-batch.
#[derive(Clone)]
struct Sizes {
    batch: usize,
    seq: usize,
    tokens: usize,
    dtype: DType,
    optimizer: OptimizerKind,
    muon: Option<MuonSettings>,
    model: ModelConfig,
}

/// Every kernel, in the order of a training step.
pub(super) fn cases(r: &Resolved) -> Vec<KernelCase> {
    cases_of(r, r.plan.seq_len)
}

/// The same number of tokens in documents of `seq`.
pub(super) fn cases_of(r: &Resolved, seq: usize) -> Vec<KernelCase> {
    let tokens = r.plan.micro_batch * r.plan.seq_len;
    let batch = tokens / seq.max(1);
    let z = Sizes {
        batch,
        seq,
        tokens: batch * seq,
        dtype: r.config.precision.dtype.dtype(),
        optimizer: r.config.optimizer.kind,
        muon: r.config.optimizer.muon,
        model: r.model.clone(),
    };
    [
        gemm::cases(&z),
        grouped_gemm::cases(&z),
        fp8::cases(&z),
        attention::cases(&z),
        memory_bound::cases(&z),
        optimizer::cases(&z),
        muon::cases(&z),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The attention projections of a layer: label, input and output features.
fn attention_linears(m: &ModelConfig) -> Vec<(&'static str, usize, usize)> {
    let linears = m.linears(0).unwrap_or_default();
    let label = |l: &LinearInfo| match l.names.len() {
        3 => Some("qkv"),
        _ if l.is("attn.out") || l.is("attn.o") => Some("attn_out"),
        _ if l.is("attn.q_a") || l.is("attn.kv_a") => Some("attn_down"),
        _ if l.is("attn.q_b") || l.is("attn.q") => Some("attn_q"),
        _ if l.is("attn.kv_b") => Some("attn_kv"),
        _ => None,
    };
    linears.iter().filter_map(|l| label(l).map(|label| (label, l.input, l.output))).collect()
}

/// Normally distributed values, as kernels get them in training: without zeros and denormals, which change the speed.
/// Large tensors repeat them.
pub(super) fn random(rank: &Rank, shape: &[usize], dtype: DType) -> Result<Tensor> {
    const MAX_DISTINCT: usize = 1 << 24;
    let n: usize = shape.iter().product();
    let normals = Tensor::empty(&rank.compute, &[1, n.min(MAX_DISTINCT)], DType::F32, Category::Workspace)?;
    let runs = NormalFill { stream: RandomStream::named(1, "bench"), first: 0, stride: 0, std: 1.0 };
    rank.kernels.normal(&rank.compute, runs, &normals)?;
    let normals = normals.select(0, 0)?;
    let all = Tensor::empty(&rank.compute, &[n], dtype, Category::Workspace)?;
    for start in (0..n).step_by(MAX_DISTINCT) {
        let len = MAX_DISTINCT.min(n - start);
        rank.kernels.copy(&rank.compute, &normals.narrow(0, 0, len)?, &all.narrow(0, start, len)?)?;
    }
    Ok(all.view(shape)?)
}

fn empty(rank: &Rank, shape: &[usize], dtype: DType) -> Result<Tensor> {
    Ok(rank.compute.zeros(shape, dtype, Category::Workspace)?)
}

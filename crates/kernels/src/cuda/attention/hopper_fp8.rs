//! FP8 attention on Hopper: quantizes q, k and v to E4M3 (v transposed), then computes both GEMMs in FP8.

use super::hopper::HopperArgs;
use super::hopper_scheduler::Scheduling;
use super::problem::{AttentionProblem, View, blocks, problem};
use crate::attention::plan::strides;
use crate::checks::dtypes;
use crate::cuda::args::kernel_args;
use crate::cuda::tensor_map::fp8_tensor_map;
use crate::cuda::{CudaKernels, Kernel, LaunchConfig};
use crate::{AttentionForward, AttentionParams, Sequences};
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor, read, shape_error, write};

const OP: &str = "attention_fp8";
/// Keys of a tile.
const KEYS: usize = 128;
/// Stages of keys and values, and of queries.
const STAGES: usize = 4;
const QUERIES: usize = 2;

/// `HOPPER_FP8(name, channels, warpgroups, ..)` of hopper_fp8.cu.
struct Instance {
    name: &'static str,
    channels: usize,
    groups: usize,
}

const INSTANCES: [Instance; 2] = [
    Instance { name: "attention_fp8_forward_64", channels: 64, groups: 3 },
    Instance { name: "attention_fp8_forward_128", channels: 128, groups: 2 },
];

impl Instance {
    fn rows(&self) -> usize {
        self.groups * 64
    }

    /// `BYTES` of hopper_forward_load.cuh.
    fn shared(&self) -> u32 {
        (1024 + QUERIES * self.rows() * 128 + STAGES * (KEYS + self.channels) * 128) as u32
    }
}

kernel_args! {
    header "args/attention_fp8.cuh", includes ["args/attention.cuh"];

    /// Quantizes q, k and v of attention to E4M3.
    struct QuantizeQkvArgs {
        /// q, k, v in bf16.
        x: [View; 3],
        /// q and k `[batch, tokens, heads, d_qk]`, v transposed: `[batch, heads, d_v, pitch]`; all E4M3.
        fp8: [u64; 3],
        /// f32 `[3]`: amax of q, k and v.
        amax: u64,
        /// Units of 16 channels of q and of k.
        units: [u32; 2],
        /// Tokens and heads of queries, and of keys.
        tokens: [i32; 2],
        heads: [i32; 2],
        d_qk: i32,
        d_v: i32,
        /// Tokens of a row of v, padded to a multiple of 128.
        pitch: i32,
        /// Bit i: rows of tensor i lie on 16-byte boundaries.
        vectorized: u32,
    }
}

/// Whether rows of a `[batch, tokens, heads, channels]` view lie on 16-byte boundaries.
fn aligned(t: &Tensor) -> bool {
    let steps = t.shape().iter().zip(t.strides()).take(3);
    t.alignment() >= 16 && steps.into_iter().all(|(n, step)| *n <= 1 || step.is_multiple_of(8))
}

/// The kernel for a problem, if there is one.
fn instance(
    kernels: &CudaKernels,
    problem: &AttentionProblem,
    f: &AttentionForward,
) -> Option<&'static Instance> {
    let (shape, a) = (&problem.shape, &problem.args);
    let fits = f.q.dtype() == DType::BF16
        && shape.fp8
        && !problem.packed
        && shape.softcap.is_none()
        && shape.scale > 0.0
        && shape.d_qk.is_multiple_of(16)
        && shape.d_v.is_multiple_of(16)
        && shape.d_qk.min(shape.d_v) > 0
        && shape.heads > 0
        && a.batches > 0
        && problem.tokens.iter().all(|n| *n > 0)
        // Kernels count units of 16 channels in 32 bits.
        && [f.q, f.k].iter().all(|t| t.numel() / 16 < 1 << 31)
        && aligned(f.out)
        && kernels.has("attention/hopper_fp8");
    INSTANCES.iter().find(|i| fits && i.channels >= shape.d_qk.max(shape.d_v))
}

impl CudaKernels {
    /// See [`crate::AttentionKernels::attention_fp8`].
    pub(super) fn launch_attention_fp8(
        &self,
        s: &Stream,
        scores: &AttentionParams,
        sequences: Sequences,
        f: &AttentionForward,
        amax: &Tensor,
    ) -> Result<bool> {
        let mut problem = problem(OP, scores, sequences, f)?;
        dtypes(OP, DType::F32, &[amax])?;
        if amax.shape() != [3] || !amax.is_contiguous() {
            return shape_error(OP, format!("amax {amax:?} of q, k and v must be contiguous [3]"));
        }
        let Some(instance) = instance(self, &problem, f) else { return Ok(false) };
        let (shape, batches) = (problem.shape, problem.args.batches as usize);
        let ([q_tokens, k_tokens], heads) = (problem.tokens, [shape.heads, shape.kv_heads]);
        let pitch = k_tokens.next_multiple_of(KEYS);
        let new = |n: usize| Tensor::empty(s, &[n], DType::E4M3, Category::Workspace);
        let (q8, k8) = (new(f.q.numel())?, new(f.k.numel())?);
        let v8 = new(batches * heads[1] * shape.d_v * pitch)?;
        let mut args = vec![read(f.q), read(f.k), read(f.v), write(f.out), write(f.lse), read(amax)];
        args.extend([write(&q8), write(&k8), write(&v8)]);
        args.extend(f.sink.map(read));
        s.launch(OP, &args, |l| {
            let view = |i: usize, t: &Tensor| -> Result<View> {
                let [batch, token, head] = strides(t)?.map(|x| x as i64);
                Ok(View { data: l.address(i)?, batch, token, head })
            };
            let units = |t: &Tensor| (t.numel() / 16) as u32;
            let vectorized =
                [f.q, f.k, f.v].iter().enumerate().map(|(i, t)| u32::from(aligned(t)) << i).sum();
            let cast = QuantizeQkvArgs {
                x: [view(0, f.q)?, view(1, f.k)?, view(2, f.v)?],
                fp8: [l.address(6)?, l.address(7)?, l.address(8)?],
                amax: l.address(5)?,
                units: [units(f.q), units(f.k)],
                tokens: [q_tokens as i32, k_tokens as i32],
                heads: heads.map(|n| n as i32),
                d_qk: shape.d_qk as i32,
                d_v: shape.d_v as i32,
                pitch: pitch as i32,
                vectorized,
            };
            let kernel = |name| Kernel::new("attention/hopper_fp8", name);
            let many = cast.units[0].max(cast.units[1]) as usize;
            let grid = |x: usize, y| Ok(LaunchConfig { blocks: [blocks(x)?, y, 1], threads: 256, shared: 0 });
            self.launch_kernel(
                l,
                kernel("attention_fp8_quantize_qk"),
                grid(many.div_ceil(4 * 256), 2)?,
                &cast,
            )?;
            let tiles = batches * heads[1] * (pitch / KEYS);
            self.launch_kernel(l, kernel("attention_fp8_quantize_v"), grid(tiles, 1)?, &cast)?;

            problem.view(l, 3, f.out, 3)?;
            problem.args.lse = l.address(4)?;
            problem.args.sink = f.sink.map_or(Ok(0), |_| l.address(9))?;
            let at_once = self.multiprocessors().max(1) as usize;
            let scheduling = Scheduling::Waves {
                pairs: problem.pairs(heads[0]),
                group: heads[0] / heads[1],
                bytes: k_tokens * (shape.d_qk + shape.d_v),
                blocks: at_once,
            };
            let (mut m, total) =
                HopperArgs::over(&problem, l, problem.args.q_len, (instance.rows(), scheduling), None)?;
            m.bounds = cast.amax;
            let rows = |at: u64, tokens: usize, heads: usize, rows: usize| {
                let (sizes, d) = ([shape.d_qk, tokens, heads, batches], shape.d_qk);
                fp8_tensor_map(at, sizes, [heads * d, d, tokens * heads * d], rows as u32)
            };
            let transposed = [pitch, shape.d_v, heads[1], batches];
            let steps = [pitch, shape.d_v * pitch, heads[1] * shape.d_v * pitch];
            m.q = rows(cast.fp8[0], q_tokens, heads[0], instance.rows())?;
            m.k = rows(cast.fp8[1], k_tokens, heads[1], KEYS)?;
            m.v = fp8_tensor_map(cast.fp8[2], transposed, steps, instance.channels as u32)?;
            let grid = LaunchConfig {
                blocks: [total.min(at_once) as u32, 1, 1],
                threads: (instance.groups * 128 + 128) as u32,
                shared: instance.shared(),
            };
            self.launch_kernel(l, kernel(instance.name), grid, &m)
        })?;
        Ok(true)
    }
}

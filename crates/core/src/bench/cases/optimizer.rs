//! The optimizer over a list of parameters like the model's.

use super::{KernelCase, Run, Sizes, attention_linears, case, empty, random};
use crate::Result;
use crate::bench::KernelWork;
use crate::config::{MasterDtype, OptimizerKind, StateDtype};
use ferrotron_engine::Rank;
use ferrotron_kernels::moments::BLOCK;
use ferrotron_kernels::{Adam, Fp8DataOut, Fp8WeightOut, Moment, ParamUpdate, Sgd, scalars};
use ferrotron_tensor::{Category, DType, Tensor};

/// Elements that are updated at most. Beyond the caches the rate does not depend on the size, and large models would
/// not fit beside their copy.
const MAX_ELEMENTS: usize = 1 << 26;

/// Sizes of the parameters, layer after layer, up to [`MAX_ELEMENTS`] in all.
fn parameters(z: &Sizes) -> Vec<usize> {
    let c = &z.model;
    let up = if c.gated { 2 * c.ffn } else { c.ffn };
    let mut layer = vec![c.hidden];
    layer.extend(attention_linears(c).iter().map(|(_, input, output)| input * output));
    layer.extend([c.hidden, c.hidden * up, c.ffn * c.hidden]);
    let all = std::iter::repeat_n(layer, c.layers).flatten().chain([c.vocab * c.hidden]);
    let mut left = MAX_ELEMENTS;
    all.map(|n| {
        let n = n.min(left);
        left -= n;
        n
    })
    .filter(|n| *n > 0)
    .collect()
}

pub(super) fn cases(z: &Sizes) -> Vec<KernelCase> {
    let sizes = parameters(z);
    let n: usize = sizes.iter().sum();
    let shape = format!("{n} in {}", sizes.len());
    let mut out = vec![grad_norm(&sizes, &shape)];
    let halves = z.dtype == DType::BF16;
    let masters =
        [MasterDtype::F32, MasterDtype::Remainder].into_iter().filter(|m| halves || *m == MasterDtype::F32);
    for master in masters {
        for moments in StateDtype::ALL.iter().copied() {
            let (name, count) = if z.optimizer == OptimizerKind::Sgd { ("sgd", 1.0) } else { ("adam", 2.0) };
            // Masters and moments are read and written, gradients read, bf16 weights written; they are read too where
            // they are the upper half of the master.
            let weight = if z.dtype == DType::F32 { 0.0 } else { z.dtype.size() as f64 };
            let (kind, master_bytes) = match master {
                MasterDtype::F32 => (format!("{name}.{moments}"), 2.0 * 4.0 + weight),
                MasterDtype::Remainder => (format!("{name}.{moments}.remainder"), 2.0 * 2.0 + 2.0 * weight),
            };
            let each = master_bytes + 4.0 + count * 2.0 * moments.bytes();
            let (sizes, z) = (sizes.clone(), z.clone());
            let work = KernelWork::Bytes(each * n as f64);
            let variant = OptimizerVariant { moments, master, weight_output: WeightOutput::Nothing };
            out.push(case(kind, shape.clone(), work, move |rank| step(rank, &z, variant, &sizes)));
        }
    }
    // For FP8 the optimizer also computes the amax of the new weights, or writes FP8 weights in place of bf16.
    for (kind, weight_output, weight) in
        [("measured", WeightOutput::Amax, 2.0), ("bytes", WeightOutput::Bytes, 1.0)]
    {
        if halves && z.optimizer != OptimizerKind::Sgd {
            let (sizes, z) = (sizes.clone(), z.clone());
            let variant =
                OptimizerVariant { moments: StateDtype::F32, master: MasterDtype::F32, weight_output };
            let work = KernelWork::Bytes((3.0 * 2.0 * 4.0 + 4.0 + weight) * n as f64);
            let kind = format!("adam.f32.{kind}");
            out.push(case(kind, shape.clone(), work, move |rank| step(rank, &z, variant, &sizes)));
        }
    }
    out
}

/// What the optimizer writes of a new weight for FP8.
#[derive(Clone, Copy, PartialEq)]
enum WeightOutput {
    Nothing,
    Amax,
    /// FP8 in place of bf16.
    Bytes,
}

#[derive(Clone, Copy)]
struct OptimizerVariant {
    moments: StateDtype,
    master: MasterDtype,
    weight_output: WeightOutput,
}

fn grad_norm(sizes: &[usize], shape: &str) -> KernelCase {
    let (n, sizes) = (sizes.iter().sum::<usize>(), sizes.to_vec());
    case("grad_norm", shape, KernelWork::Bytes((4 * n) as f64), move |rank| {
        let grads: Vec<Tensor> =
            sizes.iter().map(|n| random(rank, &[*n], DType::F32)).collect::<Result<_>>()?;
        let scalars = empty(rank, &[scalars::COUNT], DType::F32)?;
        Ok(Box::new(move |rank| {
            let list: Vec<&Tensor> = grads.iter().collect();
            Ok(rank.kernels.clip_factor(&rank.compute, &list, Some(1.0), &scalars)?)
        }))
    })
}

struct Parameter {
    master: Tensor,
    weight: Option<Tensor>,
    grad: Tensor,
    first: (Tensor, Option<Tensor>),
    second: Option<(Tensor, Option<Tensor>)>,
    /// Amax; FP8 data, scale and inverse scale.
    quantized: Option<(Tensor, Option<[Tensor; 3]>)>,
}

fn moment(m: &(Tensor, Option<Tensor>)) -> Moment<'_> {
    Moment { values: &m.0, scales: m.1.as_ref() }
}

impl Parameter {
    fn update(&self) -> ParamUpdate<'_> {
        ParamUpdate {
            master: &self.master,
            weight: self.weight.as_ref(),
            grad: &self.grad,
            first: moment(&self.first),
            second: self.second.as_ref().map(moment),
            lr_mult: 1.0,
            wd_mult: 1.0,
            fp8: self.quantized.as_ref().map(|(amax, bytes)| Fp8WeightOut {
                amax,
                data: bytes.as_ref().map(|[data, scale, scale_inv]| Fp8DataOut { data, scale, scale_inv }),
            }),
        }
    }
}

fn unit_scale(rank: &Rank) -> Result<Tensor> {
    Ok(rank.compute.upload(&[1f32], &[1], Category::Workspace)?)
}

fn step(rank: &Rank, z: &Sizes, variant: OptimizerVariant, sizes: &[usize]) -> Result<Run> {
    let OptimizerVariant { moments, master, weight_output } = variant;
    let sgd = z.optimizer == OptimizerKind::Sgd;
    let split = master == MasterDtype::Remainder;
    let zeros = |n: usize, dtype| rank.compute.zeros(&[n], dtype, Category::Workspace);
    let moment = |n: usize| -> Result<(Tensor, Option<Tensor>)> {
        let scales = matches!(moments, StateDtype::F16 | StateDtype::Fp8).then(|| n.div_ceil(BLOCK));
        let scales = scales.map(|n| zeros(n, DType::U8)).transpose()?;
        Ok((zeros(n, moments.dtype())?, scales))
    };
    let parameter = |n: &usize| -> Result<Parameter> {
        Ok(Parameter {
            master: if split { zeros(*n, DType::I16)? } else { random(rank, &[*n], DType::F32)? },
            weight: match z.dtype {
                DType::F32 => None,
                _ if weight_output == WeightOutput::Bytes => None,
                dtype => Some(random(rank, &[*n], dtype)?),
            },
            grad: random(rank, &[*n], DType::F32)?,
            first: moment(*n)?,
            second: if sgd { None } else { Some(moment(*n)?) },
            quantized: match weight_output {
                WeightOutput::Nothing => None,
                WeightOutput::Amax => Some((zeros(1, DType::F32)?, None)),
                WeightOutput::Bytes => {
                    let bytes = [zeros(*n, DType::E4M3)?, unit_scale(rank)?, zeros(1, DType::F32)?];
                    Some((zeros(1, DType::F32)?, Some(bytes)))
                }
            },
        })
    };
    let all: Vec<Parameter> = sizes.iter().map(parameter).collect::<Result<_>>()?;
    let buffer = empty(rank, &[scalars::COUNT], DType::F32)?;
    let mut values = [0f32; scalars::COUNT];
    values[scalars::LR] = 1e-4;
    values[scalars::WEIGHT_DECAY] = 0.1;
    (values[scalars::BIAS1], values[scalars::BIAS2], values[scalars::CLIP]) = (0.1, 0.05, 1.0);
    rank.compute.upload_into(&buffer, &values)?;
    let decoupled = z.optimizer == OptimizerKind::AdamW;
    Ok(Box::new(move |rank| {
        let (k, s) = (&rank.kernels, &rank.compute);
        let list: Vec<ParamUpdate> = all.iter().map(Parameter::update).collect();
        let done = match sgd {
            true => k.sgd(s, Sgd { momentum: 0.9, dampening: 0.0, nesterov: false }, &buffer, &list),
            false => k.adam(s, Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8, decoupled }, &buffer, &list),
        };
        Ok(done?)
    }))
}

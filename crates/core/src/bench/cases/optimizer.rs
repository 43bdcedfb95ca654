//! The optimizer over a list of parameters like the model's.

use super::{Case, Run, Sizes, case, empty, random};
use crate::Result;
use crate::bench::Work;
use crate::config::{Master, Moments, OptimizerKind};
use ferrotron_engine::Rank;
use ferrotron_kernels::moments::BLOCK;
use ferrotron_kernels::{Adam, Moment, NewBytes, NewWeight, Sgd, Update, scalars};
use ferrotron_tensor::{Category, DType, Tensor};

/// Large models are measured on a part of their parameters, as many as this: beyond the caches it makes no
/// difference, and memory for all of them would.
const MOST: usize = 1 << 26;

/// Sizes of the parameters of layer after layer, up to [`MOST`] in all.
fn parameters(z: &Sizes) -> Vec<usize> {
    let c = &z.model;
    let up = if c.gated { 2 * c.ffn } else { c.ffn };
    let mut layer = vec![c.hidden];
    layer.extend(c.attention_maps().iter().map(|map| map.weights()));
    layer.extend([c.hidden, c.hidden * up, c.ffn * c.hidden]);
    let all = std::iter::repeat_n(layer, c.layers).flatten().chain([c.vocab * c.hidden]);
    let mut left = MOST;
    all.map(|n| {
        let n = n.min(left);
        left -= n;
        n
    })
    .filter(|n| *n > 0)
    .collect()
}

pub(super) fn cases(z: &Sizes) -> Vec<Case> {
    let sizes = parameters(z);
    let n: usize = sizes.iter().sum();
    let shape = format!("{n} in {}", sizes.len());
    let mut out = vec![grad_norm(&sizes, &shape)];
    let halves = z.dtype == DType::BF16;
    let masters = [Master::F32, Master::Remainder].into_iter().filter(|m| halves || *m == Master::F32);
    for master in masters {
        for moments in Moments::ALL.iter().copied() {
            let (name, count) = if z.optimizer == OptimizerKind::Sgd { ("sgd", 1.0) } else { ("adam", 2.0) };
            // Masters and moments are read and written, gradients read, bf16 weights written, and read too where they
            // are half of the master.
            let weight = if z.dtype == DType::F32 { 0.0 } else { z.dtype.size() as f64 };
            let (kind, master_bytes) = match master {
                Master::F32 => (format!("{name}.{moments}"), 2.0 * 4.0 + weight),
                Master::Remainder => (format!("{name}.{moments}.remainder"), 2.0 * 2.0 + 2.0 * weight),
            };
            let each = master_bytes + 4.0 + count * 2.0 * moments.bytes();
            let (sizes, z) = (sizes.clone(), z.clone());
            let work = Work::Bytes(each * n as f64);
            let how = How { moments, master, takes: Takes::Nothing };
            out.push(case(kind, shape.clone(), work, move |rank| step(rank, &z, how, &sizes)));
        }
    }
    // What narrow products need of weights beside: nothing more is read, and a byte written, or not, in place of two.
    for (kind, takes, weight) in [("measured", Takes::Amax, 2.0), ("bytes", Takes::Bytes, 1.0)] {
        if halves && z.optimizer != OptimizerKind::Sgd {
            let (sizes, z) = (sizes.clone(), z.clone());
            let how = How { moments: Moments::F32, master: Master::F32, takes };
            let work = Work::Bytes((3.0 * 2.0 * 4.0 + 4.0 + weight) * n as f64);
            let kind = format!("adam.f32.{kind}");
            out.push(case(kind, shape.clone(), work, move |rank| step(rank, &z, how, &sizes)));
        }
    }
    out
}

/// What is taken of new weights.
#[derive(Clone, Copy, PartialEq)]
enum Takes {
    Nothing,
    Amax,
    /// In place of the weights.
    Bytes,
}

#[derive(Clone, Copy)]
struct How {
    moments: Moments,
    master: Master,
    takes: Takes,
}

fn grad_norm(sizes: &[usize], shape: &str) -> Case {
    let (n, sizes) = (sizes.iter().sum::<usize>(), sizes.to_vec());
    case("grad_norm", shape, Work::Bytes((4 * n) as f64), move |rank| {
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
    /// Largest magnitude; bytes, scale and inverse scale.
    taken: Option<(Tensor, Option<[Tensor; 3]>)>,
}

fn moment(m: &(Tensor, Option<Tensor>)) -> Moment<'_> {
    Moment { values: &m.0, scales: m.1.as_ref() }
}

impl Parameter {
    fn update(&self) -> Update<'_> {
        Update {
            master: &self.master,
            weight: self.weight.as_ref(),
            grad: &self.grad,
            first: moment(&self.first),
            second: self.second.as_ref().map(moment),
            lr_mult: 1.0,
            wd_mult: 1.0,
            narrow: self.taken.as_ref().map(|(amax, bytes)| NewWeight {
                amax,
                bytes: bytes.as_ref().map(|[data, scale, scale_inv]| NewBytes { data, scale, scale_inv }),
            }),
        }
    }
}

fn one(rank: &Rank) -> Result<Tensor> {
    Ok(rank.compute.upload(&[1f32], &[1], Category::Workspace)?)
}

fn step(rank: &Rank, z: &Sizes, how: How, sizes: &[usize]) -> Result<Run> {
    let How { moments, master, takes } = how;
    let sgd = z.optimizer == OptimizerKind::Sgd;
    let split = master == Master::Remainder;
    let zeros = |n: usize, dtype| rank.compute.zeros(&[n], dtype, Category::Workspace);
    let moment = |n: usize| -> Result<(Tensor, Option<Tensor>)> {
        let scales = matches!(moments, Moments::F16 | Moments::Fp8).then(|| n.div_ceil(BLOCK));
        let scales = scales.map(|n| zeros(n, DType::U8)).transpose()?;
        Ok((zeros(n, moments.dtype())?, scales))
    };
    let parameter = |n: &usize| -> Result<Parameter> {
        Ok(Parameter {
            master: if split { zeros(*n, DType::I16)? } else { random(rank, &[*n], DType::F32)? },
            weight: match z.dtype {
                DType::F32 => None,
                _ if takes == Takes::Bytes => None,
                dtype => Some(random(rank, &[*n], dtype)?),
            },
            grad: random(rank, &[*n], DType::F32)?,
            first: moment(*n)?,
            second: if sgd { None } else { Some(moment(*n)?) },
            taken: match takes {
                Takes::Nothing => None,
                Takes::Amax => Some((zeros(1, DType::F32)?, None)),
                Takes::Bytes => {
                    let bytes = [zeros(*n, DType::E4M3)?, one(rank)?, zeros(1, DType::F32)?];
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
    rank.compute.write_to(&buffer, &values)?;
    let decoupled = z.optimizer == OptimizerKind::AdamW;
    Ok(Box::new(move |rank| {
        let (k, s) = (&rank.kernels, &rank.compute);
        let list: Vec<Update> = all.iter().map(Parameter::update).collect();
        let done = match sgd {
            true => k.sgd(s, Sgd { momentum: 0.9, dampening: 0.0, nesterov: false }, &buffer, &list),
            false => k.adam(s, Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8, decoupled }, &buffer, &list),
        };
        Ok(done?)
    }))
}

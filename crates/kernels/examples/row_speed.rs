//! Times the row-wise CPU kernels: `cargo run --release -p ferrotron-kernels --example row_speed [threads]`.

use ferrotron_kernels::cpu::optim::{AdamFactors, UpdateSlices, adam};
use ferrotron_kernels::cpu::optim_list::{Grad, Param, State};
use ferrotron_kernels::cpu::random::{GlobalIndex, dropout, fill_normal};
use ferrotron_kernels::cpu::rows::Rows;
use ferrotron_kernels::cpu::vocab::Shard;
use ferrotron_kernels::cpu::{
    Isa, activation, elementwise, embedding, grad_norm, loss, norm, norm_backward, reduce, rope,
};
use ferrotron_kernels::{Act, RopeStyle, Smoothing, philox::RandomStream, rope_tables};
use ferrotron_tensor::{Float, Result, Threads, bf16};
use std::time::Instant;

const ROWS: usize = 4096;

fn values<T: Float>(n: usize) -> Vec<T> {
    (0..n).map(|i| T::from_f32(((i * 7919) % 1000) as f32 / 250.0 - 2.0)).collect()
}

/// Best and median of many runs, in ms.
fn time(name: &str, mut work: impl FnMut() -> Result<()>) -> Result<()> {
    let mut ms = Vec::new();
    for _ in 0..30 {
        let start = Instant::now();
        work()?;
        ms.push(start.elapsed().as_secs_f64() * 1e3);
    }
    ms.sort_by(f64::total_cmp);
    println!("{name:<44} best {:7.3} ms  median {:7.3} ms", ms[0], ms[ms.len() / 2]);
    Ok(())
}

fn main() -> Result<()> {
    let count = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
    let (isa, t) = (Isa::detect(), &Threads::new(count)?);
    println!("{} threads, {}", t.count(), isa.name());
    time("nothing, 64 pieces", || {
        t.each(64, &|_| {});
        Ok(())
    })?;
    typed::<f32>("f32", t, isa)?;
    typed::<bf16>("bf16", t, isa)?;

    let n = 3_500_000;
    let (mut p, mut w, g) = (values::<f32>(n), values::<bf16>(n), values::<f32>(n));
    let (mut m, mut v) = (values::<f32>(n), vec![1f32; n]);
    time("AdamW 3.5M, bf16 copy", || {
        let one = UpdateSlices {
            param: Param::Copied(&mut p, &mut w),
            grad: Grad::F32(&g),
            first: State::F32(&mut m),
            second: State::F32(&mut v),
            lr: 1e-3,
            weight_decay: 0.1,
        };
        adam(t, isa, AdamFactors::torch(0.9, 0.95, 1e-8, true, 3), vec![one])
    })?;
    time("square sum 3.5M f32", || {
        std::hint::black_box(grad_norm::norm_total(t, isa, grad_norm::NormType::L2, &[&g]));
        Ok(())
    })?;
    time("scale and check 3.5M f32", || {
        grad_norm::scale_and_check(t, isa, vec![&mut p], 0.999);
        Ok(())
    })?;
    time("normal values 3.5M", || {
        fill_normal(t, RandomStream::named(1, "w"), 0, 0.0, 0.02, &mut p);
        Ok(())
    })
}

fn typed<T: Float>(name: &str, t: &Threads, isa: Isa) -> Result<()> {
    let h = 256;
    let (x, dy, mut y) = (values::<T>(ROWS * h), values::<T>(ROWS * h), values::<T>(ROWS * h));
    let (gamma, mut rstd, mut dgamma) = (values::<T>(h), vec![1f32; ROWS], vec![0f32; h]);
    let affine = norm::Affine { gamma: &gamma, beta: None, eps: 1e-6, zero_centred: false };
    let all = Rows::dense(ROWS, h);
    time(&format!("rms_norm [4096, 256] {name}"), || {
        norm::rms_norm(t, isa, norm::InOut::dense(&x, &mut y, ROWS, h), affine, &mut rstd)
    })?;
    let mut mean = vec![0f32; ROWS];
    time(&format!("layer_norm [4096, 256] {name}"), || {
        norm::layer_norm(t, isa, norm::InOut::dense(&x, &mut y, ROWS, h), affine, &mut mean, &mut rstd)
    })?;
    time(&format!("rms_norm backward [4096, 256] {name}"), || {
        let args = norm_backward::NormGrad {
            x: &x,
            x_rows: all,
            mean: None,
            rstd: &rstd,
            gamma: &gamma,
            zero_centred: false,
            dy: Some((&dy, all)),
            residual: Some(&dy),
            dx: &mut y,
            dx_rows: all,
            dgamma: Some(&mut dgamma),
            dbeta: None,
            accumulate: true,
        };
        norm_backward::norm_backward(t, isa, args)
    })?;
    time(&format!("add [4096, 256] {name}"), || elementwise::add(t, isa, &x, &dy, &mut y))?;
    time(&format!("column_sum [4096, 256] {name}"), || {
        reduce::column_sum(t, isa, &x, all, &mut dgamma, true)
    })?;
    time(&format!("transpose [4096, 256] {name}"), || elementwise::transpose(t, &x, ROWS, h, &mut y))?;
    time(&format!("dropout [4096, 256] {name}"), || {
        let index = GlobalIndex { first: 0, row_stride: h as u64 };
        dropout(t, isa, 0.1, RandomStream::named(1, "x"), index, h, &x, &mut y)
    })?;
    let tables = rope_tables::RopeTables::new(1e4, 64, &rope_tables::RopeScaling::None, 1024)?;
    let positions: Vec<i32> = (0..ROWS as i32).map(|i| i % 1024).collect();
    for style in [RopeStyle::Half, RopeStyle::Interleaved, RopeStyle::PairsToHalves] {
        time(&format!("rope {style:?} [4096, 4, 64] {name}"), || {
            let heads = Rows::heads(ROWS, h, 4, 64, 64);
            rope::rope(t, isa, &mut y, heads, &tables.cos, &tables.sin, 32, &positions, style, false)
        })?;
    }
    let ids: Vec<i32> = (0..ROWS as i32).map(|i| i * 37 % 256).collect();
    time(&format!("cross entropy + gradient [4096, 256] {name}"), || {
        y.copy_from_slice(&x);
        let labels =
            loss::Labels { ids: &ids, ignore: -100, smoothing: Smoothing::None, shard: Shard::whole(256) };
        let weights = vec![1.0; ROWS];
        loss::cross_entropy_with_gradient(t, isa, &mut y, all, labels, &weights, &mut rstd)
    })?;
    let (table, mut dtable) = (values::<T>(256 * h), vec![0f32; 256 * h]);
    time(&format!("embedding [4096, 256] {name}"), || {
        embedding::embedding(t, isa, &ids, &table, Shard::whole(256), 1.0, false, &mut y)
    })?;
    time(&format!("embedding backward [4096, 256] {name}"), || {
        embedding::embedding_backward(t, isa, &ids, &dy, Shard::whole(256), 1.0, true, &mut dtable)
    })?;
    let f = 768;
    let (x, dy, mut y, mut dx) =
        (values::<T>(ROWS * 2 * f), values::<T>(ROWS * f), values::<T>(ROWS * f), values::<T>(ROWS * 2 * f));
    for (label, act) in [("swiglu", Act::Silu), ("geglu tanh", Act::GeluTanh), ("geglu erf", Act::GeluErf)] {
        time(&format!("{label} [4096, 1536] {name}"), || activation::gated(t, isa, act, f, &x, &mut y))?;
        time(&format!("{label} backward [4096, 1536] {name}"), || {
            activation::gated_backward(t, isa, act, f, &x, &dy, &mut dx)
        })?;
    }
    Ok(())
}

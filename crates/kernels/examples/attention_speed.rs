//! Times attention on the shape of the tiny model: 16 sequences of 256 tokens, 4 heads of 64, causal, q, k and v in
//! one `[tokens, 768]` buffer. `attention_speed [threads] [tokens] [batch] [lowest level] [f32 too]`.

use ferrotron_kernels::cpu::Isa;
use ferrotron_kernels::cpu::attention::{Align, AttentionShape, Heads, HeadsMut, Span, backward, forward};
use ferrotron_tensor::{Float, Threads, bf16};
use std::time::Instant;

fn run<T: Float>(threads: &Threads, isa: Isa, tokens: usize, batch: usize) -> ferrotron_tensor::Result<()> {
    let (heads, d) = (4, 64);
    let width = 3 * heads * d;
    let shape = AttentionShape {
        heads,
        kv_heads: heads,
        d_qk: d,
        d_v: d,
        scale: 0.125,
        softcap: None,
        causal: true,
        align: Align::BottomRight,
        window: (None, None),
        lse_head: tokens,
        lse_token: 1,
    };
    let entry = |batch| Span {
        batch,
        q_start: 0,
        q_len: tokens,
        k_start: 0,
        k_len: tokens,
        lse_base: batch * heads * tokens,
    };
    let spans: Vec<Span> = (0..batch).map(entry).collect();
    let noise = |n: usize| -> Vec<T> {
        (0..n).map(|i| T::from_f32(((i * 2_654_435_761) % 1009) as f32 / 504.5 - 1.0)).collect()
    };
    let qkv = noise(batch * tokens * width);
    let dout = noise(batch * tokens * heads * d);
    let (mut out, mut grads) = (dout.clone(), qkv.clone());
    let mut lse = vec![0.0f32; batch * heads * tokens];
    let part = |i: usize| Heads { data: &qkv[i * heads * d..], batch: tokens * width, token: width, head: d };
    fn rows<T>(data: &[T], tokens: usize, width: usize, d: usize) -> Heads<'_, T> {
        Heads { data, batch: tokens * width, token: width, head: d }
    }
    let (mut best_f, mut best_b) = (f64::MAX, f64::MAX);
    for _ in 0..40 {
        let start = Instant::now();
        // SAFETY: dense strides.
        let to = unsafe { HeadsMut::of(&mut out, tokens * heads * d, heads * d, d) };
        forward(threads, isa, &shape, &spans, part(0), part(1), part(2), None, &to, &mut lse)?;
        best_f = best_f.min(start.elapsed().as_secs_f64());
        let start = Instant::now();
        let (base, len) = (grads.as_mut_ptr(), grads.len());
        // SAFETY: the three parts are different columns of one buffer.
        let grad = |i: usize| unsafe {
            HeadsMut::new(base.add(i * heads * d), len - i * heads * d, tokens * width, width, d)
        };
        let (dq, dk, dv) = (grad(0), grad(1), grad(2));
        backward(
            threads,
            isa,
            &shape,
            &spans,
            part(0),
            part(1),
            part(2),
            rows(&out, tokens, heads * d, d),
            rows(&dout, tokens, heads * d, d),
            &lse,
            None,
            &dq,
            &dk,
            &dv,
            None,
        )?;
        best_b = best_b.min(start.elapsed().as_secs_f64());
    }
    let flops = (batch * heads * tokens * (tokens + 1) * d * 2) as f64;
    println!(
        "{:>4} {:<20} forward {:7.3} ms {:7.1} GFLOP/s, backward {:7.3} ms {:7.1} GFLOP/s",
        T::DTYPE.name(),
        isa.name(),
        best_f * 1e3,
        flops / best_f / 1e9,
        best_b * 1e3,
        2.5 * flops / best_b / 1e9
    );
    Ok(())
}

fn main() -> ferrotron_tensor::Result<()> {
    let arg = |i: usize, or: usize| std::env::args().nth(i).and_then(|a| a.parse().ok()).unwrap_or(or);
    let isas = Isa::all();
    let threads = Threads::new(arg(1, 0))?;
    println!("{} threads", threads.count());
    for isa in isas.into_iter().skip(arg(4, 0)) {
        if arg(5, 1) == 1 {
            run::<f32>(&threads, isa, arg(2, 256), arg(3, 16))?;
        }
        run::<bf16>(&threads, isa, arg(2, 256), arg(3, 16))?;
    }
    Ok(())
}

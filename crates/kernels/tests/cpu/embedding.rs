use super::support::{Random, close, everywhere};
use ferrotron_kernels::cpu::embedding::{TokenIds, embedding, embedding_backward};
use ferrotron_kernels::cpu::{CpuContext, Isa, vocab::Shard};
use ferrotron_tensor::{Float, Threads, bf16};

fn check<T: Float>(tokens: usize, vocab: usize, width: usize, scale: f32) {
    let mut random = Random((tokens * 3 + vocab) as u64);
    let ids: Vec<i32> =
        (0..tokens).map(|t| if t % 3 == 0 { 0 } else { random.below(vocab) as i32 }).collect();
    let (table, y0): (Vec<T>, Vec<T>) = (random.vec(vocab * width, 1.0), random.vec(tokens * width, 1.0));
    let (dy, before): (Vec<T>, Vec<f32>) = (random.vec(tokens * width, 1.0), random.vec(vocab * width, 1.0));
    for add in [false, true] {
        let (y, dtable) = everywhere(|cpu| {
            let (mut y, mut dtable) = (y0.clone(), before.clone());
            embedding(cpu, TokenIds { ids: &ids, shard: Shard::whole(vocab) }, &table, scale, add, &mut y)
                .unwrap();
            embedding_backward(
                cpu,
                TokenIds { ids: &ids, shard: Shard::whole(vocab) },
                &dy,
                scale,
                add,
                &mut dtable,
            )
            .unwrap();
            (y, dtable)
        });
        let (mut wanted, mut grad) = (vec![0f64; tokens * width], vec![0f64; vocab * width]);
        for i in 0..tokens * width {
            let at = ids[i / width] as usize * width + i % width;
            wanted[i] = table[at].to_f64() * f64::from(scale) + if add { y0[i].to_f64() } else { 0.0 };
            grad[at] += dy[i].to_f64() * f64::from(scale);
        }
        if add {
            grad.iter_mut().zip(&before).for_each(|(g, b)| *g += f64::from(*b));
        }
        close("embedding", &y, &wanted, 1e-6, 1e-6);
        close("gradient", &dtable, &grad, 1e-6, 2e-6 * (1.0 + tokens as f64).sqrt());
    }

    // Vocabulary split over three ranks: outputs add up to, and gradients concatenate to, those of one rank.
    let parts: Vec<Shard> = (0..3)
        .map(|p| (vocab * p / 3, vocab * (p + 1) / 3))
        .map(|(start, end)| Shard { start, len: end - start, total: vocab })
        .collect();
    let threads = Threads::new(2).unwrap();
    let cpu = CpuContext::new(&threads, Isa::detect());
    let (mut whole, mut whole_grad) = (y0.clone(), before.clone());
    embedding(cpu, TokenIds { ids: &ids, shard: Shard::whole(vocab) }, &table, scale, false, &mut whole)
        .unwrap();
    embedding_backward(
        cpu,
        TokenIds { ids: &ids, shard: Shard::whole(vocab) },
        &dy,
        scale,
        true,
        &mut whole_grad,
    )
    .unwrap();
    let (mut sum, mut grads) = (vec![0f32; tokens * width], vec![]);
    for shard in parts {
        let range = shard.start * width..(shard.start + shard.len) * width;
        let (mut y, mut grad) = (y0.clone(), before[range.clone()].to_vec());
        embedding(cpu, TokenIds { ids: &ids, shard }, &table[range], scale, false, &mut y).unwrap();
        embedding_backward(cpu, TokenIds { ids: &ids, shard }, &dy, scale, true, &mut grad).unwrap();
        sum.iter_mut().zip(&y).for_each(|(s, y)| *s += y.to_f32());
        grads.extend(grad);
    }
    assert!(sum.iter().zip(&whole).all(|(s, w)| *s == w.to_f32()));
    assert_eq!(grads, whole_grad);
}

#[test]
fn lookup_and_gradient_match_the_definition() {
    for (tokens, vocab, width, scale) in
        [(0, 5, 4, 1.0), (1, 1, 1, 1.0), (50, 7, 33, 16.0), (3000, 300, 48, 1.0)]
    {
        check::<f32>(tokens, vocab, width, scale);
        check::<bf16>(tokens, vocab, width, scale);
    }
}

#[test]
fn bad_ids_and_shapes_are_errors() {
    let threads = Threads::new(2).unwrap();
    let cpu = CpuContext::new(&threads, Isa::detect());
    let table = vec![1f32; 12];
    for ids in [[0i64, 3], [-1, 0], [0, i64::MAX]] {
        let mut y = vec![0f32; 8];
        let error =
            embedding(cpu, TokenIds { ids: &ids, shard: Shard::whole(3) }, &table, 1.0, false, &mut y)
                .unwrap_err();
        let bad = ids.iter().find(|i| !(0..3).contains(*i)).unwrap();
        assert!(error.to_string().contains(&format!("id {bad} ")), "{error}");
        let mut grad = vec![0f32; 12];
        assert!(
            embedding_backward(
                cpu,
                TokenIds { ids: &ids, shard: Shard::whole(3) },
                &[0f32; 8],
                1.0,
                false,
                &mut grad
            )
            .is_err()
        );
    }
    let bad_shard = Shard { start: 2, len: 3, total: 4 };
    assert!(
        embedding(cpu, TokenIds { ids: &[0i32], shard: bad_shard }, &table, 1.0, false, &mut [0f32; 4])
            .is_err()
    );
    assert!(
        embedding(
            cpu,
            TokenIds { ids: &[0i32; 2], shard: Shard::whole(3) },
            &table,
            1.0,
            false,
            &mut [0f32; 7]
        )
        .is_err()
    );
}

#[test]
fn no_tokens_zero_or_keep_the_gradient() {
    let threads = Threads::new(2).unwrap();
    let cpu = CpuContext::new(&threads, Isa::detect());
    let mut grad = vec![3f32; 12];
    embedding_backward::<f32, i32>(
        cpu,
        TokenIds { ids: &[], shard: Shard::whole(3) },
        &[],
        1.0,
        true,
        &mut grad,
    )
    .unwrap();
    assert_eq!(grad, [3f32; 12]);
    embedding_backward::<f32, i32>(
        cpu,
        TokenIds { ids: &[], shard: Shard::whole(3) },
        &[],
        1.0,
        false,
        &mut grad,
    )
    .unwrap();
    assert_eq!(grad, [0f32; 12]);
}

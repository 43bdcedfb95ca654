//! A whole model's forward and backward: saved activations can be moved, and sequences do not attend to each other.

use super::architectures::families;
use ferrotron_core::model::{Decoder, ForwardMode, ModelConfig, ModelOptions, PipelineLayout};
use ferrotron_core::train::{read_scalar, upload_targets, weighted_loss};
use ferrotron_engine::attention::Layout;
use ferrotron_engine::{
    GradBuffer, OffloadClass, Params, Rank, Recompute, Saved, SavedTensor, StepContext, StepState,
    initial_values,
};
use ferrotron_tensor::{Category, DType, bf16};

struct Whole {
    rank: Rank,
    decoder: Decoder,
    params: Params,
    state: StepState,
}

impl Whole {
    fn new(config: &ModelConfig, dtype: DType) -> Whole {
        let rank = Rank::cpu(2, 7).unwrap();
        let (decoder, specs) =
            Decoder::new(&rank, config, 16, &PipelineLayout::default(), &ModelOptions::default()).unwrap();
        let params = Params::allocate(&rank, specs, dtype).unwrap();
        let state = StepState::new(&rank, &params, decoder.moe_layers()).unwrap();
        for (spec, t) in params.specs().iter().zip(params.values()) {
            let values: Vec<f32> =
                spec.held().flat_map(|(p, _, r)| initial_values(7, p, 0..r.len())).map(|x| x * 4.0).collect();
            match dtype {
                DType::F32 => rank.compute.upload_into(t, &values).unwrap(),
                _ => {
                    let narrow: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
                    rank.compute.upload_into(t, &narrow).unwrap();
                }
            }
        }
        Whole { rank, decoder, params, state }
    }

    /// Loss and gradients of a batch; visits all saved activations before backward.
    fn step(
        &self,
        layout: Layout,
        ids: &[i32],
        recompute: Recompute,
        between: &mut dyn FnMut(&mut SavedTensor),
    ) -> (f64, Vec<Vec<f32>>) {
        let pass = StepContext { recompute, ..StepContext::new(&self.rank, &self.params, &self.state) };
        let labels: Vec<i32> = ids.iter().map(|i| (3 * i + 1) % 16).collect();
        let input = self.decoder.input(&self.rank, ids, None, layout).unwrap();
        let targets = upload_targets(&self.rank, &input.tokens, &labels, 1.0 / ids.len() as f32).unwrap();
        let whole = &self.decoder.chunks()[0];
        let (rows, saved) = whole.forward(&pass, &input, None, ForwardMode::Train(&targets)).unwrap();
        let mut saved = saved.unwrap();
        let loss = read_scalar(&self.rank, &weighted_loss(&self.rank, &rows, &targets).unwrap()).unwrap();
        saved.tensors(between);
        let mut grads = GradBuffer::new(self.params.specs());
        whole.backward(&pass, saved, &input, None, &mut |g| g.run(&self.rank, &mut grads)).unwrap();
        let all = grads.finish(&self.rank).unwrap();
        (loss, all.iter().map(|g| self.rank.compute.download(g).unwrap()).collect())
    }

    fn copied(&self, t: &SavedTensor) -> ferrotron_tensor::Tensor {
        let s = &self.rank.compute;
        match t.dtype() {
            DType::F32 => s.upload(&s.download::<f32>(t).unwrap(), t.shape(), Category::Activations),
            DType::BF16 => s.upload(&s.download::<bf16>(t).unwrap(), t.shape(), Category::Activations),
            DType::I32 => s.upload(&s.download::<i32>(t).unwrap(), t.shape(), Category::Activations),
            other => panic!("{other}"),
        }
        .unwrap()
    }
}

fn ids(n: usize) -> Vec<i32> {
    (0..n).map(|i| ((i * i * 5 + i * 3) % 16) as i32).collect()
}

#[test]
fn saved_activations_can_be_moved_and_hold_no_parameter() {
    let full = Recompute { layer: true, ..Recompute::default() };
    for (name, model) in families() {
        for dtype in [DType::F32, DType::BF16] {
            let w = Whole::new(&model, dtype);
            let weights: Vec<u64> = w.params.values().iter().map(|t| t.allocation_id()).collect();
            for recompute in [Recompute::default(), full] {
                for layout in
                    [Layout::Rows { count: 2, len: 16 }, Layout::Packed { offsets: vec![0, 7, 8, 20, 32] }]
                {
                    let stay = w.step(layout.clone(), &ids(32), recompute, &mut |_| {});
                    let (mut large, mut small) = (0, 0);
                    let moved = w.step(layout.clone(), &ids(32), recompute, &mut |t| {
                        assert!(!weights.contains(&t.allocation_id()), "{name}: a parameter is kept");
                        *if t.class == OffloadClass::Activation { &mut large } else { &mut small } += 1;
                        t.replace(w.copied(t));
                    });
                    assert!(stay == moved, "{name} {dtype} {layout:?}: the bits differ");
                    assert!(stay.1.iter().flatten().all(|g| g.is_finite()));
                    assert!(
                        large >= if recompute.layer { 4 } else { 16 } && small >= 2,
                        "{name}: {large} {small}"
                    );
                }
            }
        }
    }
}

/// A sequence gives the same loss and gradients packed among others as alone.
#[test]
fn packed_sequences_do_not_attend_to_each_other() {
    let lengths = [5usize, 1, 16, 3];
    let total: usize = lengths.iter().sum();
    let all = ids(total);
    let offsets: Vec<i32> = std::iter::once(0)
        .chain(lengths.iter().scan(0, |sum, n| {
            *sum += *n as i32;
            Some(*sum)
        }))
        .collect();
    for (name, model) in families() {
        let w = Whole::new(&model, DType::F32);
        let packed =
            w.step(Layout::Packed { offsets: offsets.clone() }, &all, Recompute::default(), &mut |_| {});
        let mut loss = 0.0;
        let mut grads = vec![Vec::new(); packed.1.len()];
        for (n, at) in lengths.iter().zip(&offsets) {
            let row = &all[*at as usize..*at as usize + n];
            let alone = w.step(Layout::Rows { count: 1, len: *n }, row, Recompute::default(), &mut |_| {});
            let share = *n as f64 / total as f64;
            loss += share * alone.0;
            for (sum, g) in grads.iter_mut().zip(&alone.1) {
                sum.resize(g.len(), 0f64);
                sum.iter_mut().zip(g).for_each(|(s, g)| *s += share * f64::from(*g));
            }
        }
        assert!((loss - packed.0).abs() < 2e-6 * loss, "{name}: {loss} {}", packed.0);
        for (i, (sum, g)) in grads.iter().zip(&packed.1).enumerate() {
            let size = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
            let apart = sum.iter().zip(g).map(|(a, b)| (a - f64::from(*b)).powi(2)).sum::<f64>().sqrt();
            // Two f32 computations with different summation orders: a GEMM's depends on its shape.
            assert!(apart <= 3e-5 * size + 1e-9, "{name} gradient {i}: {apart} of {size}");
        }
    }
}

#[test]
fn wrong_batches_are_errors() {
    let (_, model) = families().remove(1);
    let w = Whole::new(&model, DType::F32);
    let row = |len| Layout::Rows { count: 1, len };
    let bad = [
        w.decoder.input(&w.rank, &[0, 16], None, row(2)),
        w.decoder.input(&w.rank, &[0, -1], None, row(2)),
        w.decoder.input(&w.rank, &[0, 1], None, row(3)),
        w.decoder.input(&w.rank, &[0, 1], Some(&[0]), row(2)),
        w.decoder.input(&w.rank, &[0, 1], Some(&[0, 16]), row(2)),
        w.decoder.input(&w.rank, &[0, 1], Some(&[0, -1]), row(2)),
        w.decoder.input(&w.rank, &ids(17), None, row(17)),
        w.decoder.input(&w.rank, &[0, 1], None, Layout::Packed { offsets: vec![0, 1] }),
    ];
    for (i, b) in bad.into_iter().enumerate() {
        assert!(b.is_err(), "case {i}");
    }
}

//! Offloading of a chain of small layers: contents, shared and small tensors, and the necessity of every edge.

use super::*;
use crate::SavedTensor;
use ferrotron_tensor::{Instrumentation, write};

/// Saves two views of one allocation, a tensor of its own, and a small one.
struct Layer {
    a: SavedTensor,
    b: SavedTensor,
    own: SavedTensor,
    small: SavedTensor,
}

impl Saved for Layer {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        [&mut self.a, &mut self.b, &mut self.own, &mut self.small].into_iter().for_each(f);
    }

    fn modules(&mut self, f: &mut dyn FnMut(Module, &mut SavedTensor)) {
        self.tensors(&mut |t| f(Module::Fc1, t));
    }
}

const N: usize = 64;

fn rank() -> Rank {
    Rank::cpu_instrumented(1, 1, Instrumentation { race_check: true, ..Default::default() }).unwrap()
}

/// Forward of layer `i`: everything is written by a kernel on the compute stream.
fn forward(rank: &Rank, i: usize) -> Result<Layer> {
    let s = &rank.compute;
    let fill = |n: usize, value: f32| -> Result<Tensor> {
        let t = Tensor::empty(s, &[n], DType::F32, Category::Activations)?;
        s.launch("forward", &[write(&t)], |l| {
            l.slice_mut::<f32>(0)?.iter_mut().enumerate().for_each(|(k, x)| *x = value + k as f32);
            Ok(())
        })?;
        Ok(t)
    };
    let both = fill(2 * N, 1000.0 * i as f32)?;
    Ok(Layer {
        a: SavedTensor::activation(&both.narrow(0, 0, N)?),
        b: SavedTensor::activation(&both.view(&[2, N])?.select(0, 1)?),
        own: SavedTensor::activation(&fill(N, -1000.0 * i as f32)?),
        small: SavedTensor::small(&fill(N, 0.5)?),
    })
}

/// Backward of layer `i`, which reads everything.
fn backward(rank: &Rank, i: usize, saved: &Layer) -> Result<()> {
    let expect = |t: &Tensor, first: f32| -> Result<()> {
        let found = rank.compute.download::<f32>(t)?;
        assert!(found.iter().enumerate().all(|(k, x)| *x == first + k as f32), "layer {i}: {found:?}");
        Ok(())
    };
    expect(&saved.a, 1000.0 * i as f32)?;
    expect(&saved.b, 1000.0 * i as f32 + N as f32)?;
    expect(&saved.own, -1000.0 * i as f32)?;
    expect(&saved.small, 0.5)
}

/// Passes over `count` layers forward and backward with a plan; twice, so that all memory is reused.
fn run(rank: &Rank, offloader: &Offloader, plan: &OffloadPlan, reads: bool) -> Result<usize> {
    let count = plan.layers.len();
    let mut bytes = 0;
    for _ in 0..2 {
        let mut layers: Vec<(Layer, Option<OffloadedLayer>)> = Vec::new();
        for l in 0..=count {
            for i in plan.releases(l) {
                let (saved, Some(moved)) = &mut layers[i] else { continue };
                moved.release(saved)?;
            }
            if l < count {
                let mut saved = forward(rank, l)?;
                let moved = plan
                    .layer(l)
                    .map(|_| offloader.offload(&mut saved, &|_| true, AllocationSet::ALL))
                    .transpose()?;
                bytes += moved.as_ref().map_or(0, OffloadedLayer::bytes);
                layers.push((saved, moved));
            }
        }
        for l in (0..count).rev() {
            for i in plan.reloads(l) {
                let (saved, Some(moved)) = &mut layers[i] else { continue };
                moved.reload(saved)?;
            }
            let Some((mut saved, moved)) = layers.pop() else { continue };
            if reads {
                moved.map_or(Ok(()), |moved| moved.take(&mut saved))?;
                backward(rank, l, &saved)?;
            }
        }
    }
    Ok(bytes)
}

#[test]
fn what_comes_back_is_what_was_saved() {
    for count in [2, 5] {
        for k in 1..count {
            let rank = rank();
            let offloader = Offloader::new(&rank, 0).unwrap();
            // Two allocations a layer, the shared one once; small tensors stay.
            let bytes = run(&rank, &offloader, &OffloadPlan::first(k, count), true).unwrap();
            assert_eq!(bytes, 2 * k * 3 * N * 4);
            let memory = rank.device().memory();
            assert_eq!((memory.total_now, memory.host.now), (0, 0));
            // Nothing is offloaded that is never read, either.
            run(&rank, &offloader, &OffloadPlan::first(k, count), false).unwrap();
            assert_eq!(rank.device().memory().host.now, 0);
        }
    }
}

#[test]
fn device_memory_falls_by_what_is_offloaded() {
    let peak = |k: usize| {
        let rank = rank();
        run(&rank, &Offloader::new(&rank, 0).unwrap(), &OffloadPlan::first(k, 6), true).unwrap();
        rank.device().memory().total_peak
    };
    for k in 0..6 {
        assert_eq!(peak(0) - peak(k), k.min(5) * 3 * N * 4, "{k}");
    }
}

#[test]
fn small_tensors_and_small_parts_stay() {
    let rank = rank();
    let mut saved = forward(&rank, 1).unwrap();
    let offload = |min_bytes, saved: &mut Layer| {
        Offloader::new(&rank, min_bytes)
            .unwrap()
            .offload(saved, &|_| true, AllocationSet::ALL)
            .unwrap()
            .bytes()
    };
    assert_eq!(offload(2 * N * 4, &mut saved), 2 * N * 4);
    assert_eq!(offload(2 * N * 4 + 1, &mut saved), 0);
    // A quarter of a large allocation.
    let large = rank.compute.zeros(&[4 * N], DType::F32, Category::Activations).unwrap();
    saved.own = SavedTensor::activation(&large.narrow(0, 0, N).unwrap());
    assert_eq!(offload(0, &mut saved), 2 * N * 4);
    let none = Offloader::new(&rank, 0)
        .unwrap()
        .offload(&mut saved, &|m| m == Module::CoreAttn, AllocationSet::ALL)
        .unwrap();
    assert_eq!(none.bytes(), 0);
}

/// The race checker finds every edge that is left out.
#[test]
fn every_edge_is_needed() {
    let edges = [Edge::Produced, Edge::Copied, Edge::Vacated, Edge::Loaded];
    for edge in edges {
        let rank = rank();
        let mut offloader = Offloader::new(&rank, 0).unwrap();
        offloader.without = Some(edge);
        let found = run(&rank, &offloader, &OffloadPlan::first(2, 4), true).err();
        let found = found.unwrap_or_else(|| panic!("{edge:?} can be left out")).to_string();
        assert!(found.contains("unordered access"), "{edge:?}: {found}");
    }
    // A reload that nobody reads is freed after it has arrived.
    let rank = rank();
    let mut offloader = Offloader::new(&rank, 0).unwrap();
    offloader.without = Some(Edge::Loaded);
    let found = run(&rank, &offloader, &OffloadPlan::first(2, 4), false).unwrap_err().to_string();
    assert!(found.contains("reused too early"), "{found}");
}

//! Tensors of more than 2³¹ elements, as one long sequence has them: every kernel of a dense training step, compared on
//! rows at the start, at 2³¹ (and 2³²) elements and at the end with the CPU kernel run on those rows alone.
//!
//! Needs a GPU with 64 GiB of free memory; elsewhere it says that it is skipped. The same comparisons of small tensors run
//! on the CPU, so that they hold everywhere.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod attention;
mod elementwise;
mod gemm;
mod optimizer;
mod quant;
mod rows;
mod scene;

use scene::Scene;

type Family = (&'static str, fn(&Scene));

/// One after another: together they would not fit into the memory of a GPU.
const FAMILIES: [Family; 15] = [
    ("fills, casts and copies", elementwise::fills_casts_and_copies),
    ("sums and scales", elementwise::sums_and_scales),
    ("dropout", elementwise::dropout),
    ("reductions", elementwise::reductions),
    ("norms", rows::norms),
    ("RoPE", rows::rope),
    ("embedding", rows::embedding),
    ("cross-entropy", rows::cross_entropy),
    ("SwiGLU", rows::swiglu),
    ("FP8 quantization", quant::both_orientations),
    ("GEMM", gemm::bf16_gemms),
    ("FP8 GEMM", gemm::fp8_gemms),
    ("AdamW", optimizer::adam),
    ("Muon", optimizer::muon),
    ("attention", attention::forward_and_backward),
];

fn run(scene: &Scene) {
    for (name, family) in FAMILIES {
        let start = std::time::Instant::now();
        family(scene);
        scene.trim();
        eprintln!("{name}: {:.1} s", start.elapsed().as_secs_f64());
    }
}

#[test]
fn small_tensors_on_the_cpu() {
    run(&Scene::small());
}

#[test]
fn tensors_beyond_2_to_31_elements_on_a_gpu() {
    if let Some(scene) = Scene::gpu() {
        run(&scene);
    }
}

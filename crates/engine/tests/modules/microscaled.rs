//! MXFP8 and NVFP4 operands that stay quantized, as GPUs with such GEMMs take them: on the CPU, which emulates the GEMM
//! afterwards, everything has the bits of operands that are emulated at once.

use super::fp8::{Map, run};
use super::fp8_oracle::*;
use super::support::*;
use super::tensor_parallel::on_ranks;
use super::{fp8_lm_head, fp8_tensor_parallel as parallel};
use ferrotron_engine::{Declarations, Rank};
use ferrotron_kernels::cpu::CpuKernels;
use ferrotron_tensor::DType;
use std::sync::Arc;

const RECIPES: [ferrotron_engine::quant::Recipe; 2] = [MXFP8, NVFP4];

fn keep_quantized(s: &mut Setup) {
    s.rank.kernels = Arc::new(CpuKernels::detect().taking_microscaled());
}

#[test]
fn linears_have_the_bits_of_the_emulation() {
    for recipe in RECIPES {
        for map in [
            Map::new(1, 16, &[32], false),
            Map::new(15, 48, &[24, 8], true),
            Map::new(33, 130, &[48, 16, 16], true),
            Map::new(129, 17, &[145], true),
        ] {
            for except in [&[][..], &["mlp:output"], &["mlp:weight_grad"]] {
                let results = [false, true].map(|quantized| {
                    let (linear, mut s) = map.build(Some(recipe), except);
                    if quantized {
                        keep_quantized(&mut s);
                    }
                    let [(x, _), (dy, _)] = map.operands(&s, 1.0);
                    let state = s.state.quant().unwrap();
                    state.record_stats(true);
                    state.begin_step(3, 2);
                    let all = [0, 1].map(|_| run(&linear, &s, &s.pass(), &x, &dy));
                    // As text: unknown scales are NaN.
                    (all, format!("{:?}", state.take_stats()))
                });
                assert!(results[0] == results[1], "{recipe:?} {map:?} without {except:?}");
            }
        }
    }
}

/// What backward keeps is smaller, and can be moved.
#[test]
fn saved_operands_are_smaller_and_can_be_moved() {
    for (recipe, most) in [(MXFP8, 0.52), (NVFP4, 0.29)] {
        let map = Map::new(128, 256, &[64], true);
        let (linear, mut s) = map.build(Some(recipe), &[]);
        keep_quantized(&mut s);
        let [(x, _), (dy, _)] = map.operands(&s, 1.0);
        let state = s.state.quant().unwrap();
        state.begin_step(3, 1);
        let stayed = run(&linear, &s, &s.pass(), &x, &dy);
        state.begin_step(3, 1);
        let p = s.pass();
        let (y, mut saved) = linear.forward(&p, &x).unwrap();
        let mut bytes = 0;
        ferrotron_engine::Saved::tensors(&mut saved, &mut |t| bytes += t.bytes());
        assert!(bytes as f64 <= most * x.bytes() as f64, "{recipe:?}: {bytes} bytes");
        assert!(move_saved(&s.rank, &s.params, &mut saved) > 1);
        let (dx, work) = linear.backward(&p, saved, &dy).unwrap();
        assert!((s.host(&y), s.host(&dx), s.gradients(work)) == stayed, "{recipe:?}");
    }
}

#[test]
fn lm_heads_with_a_padded_vocabulary_have_the_bits_of_the_emulation() {
    for recipe in RECIPES {
        for (m, pad) in [
            (fp8_lm_head::map(33, 48, 59), Some(16)),
            (fp8_lm_head::map(33, 48, 59), None),
            (fp8_lm_head::map(40, 64, 272), Some(16)),
        ] {
            let results = [false, true].map(|quantized| {
                let (mut head, mut s) = fp8_lm_head::build(Some(recipe), &[], false, &m);
                head.pad_vocab_to = pad;
                if quantized {
                    keep_quantized(&mut s);
                }
                let [(x, _), _] = m.operands(&s, 1.0);
                s.state.quant().unwrap().begin_step(3, 1);
                fp8_lm_head::run(&s, &head, &m, &x)
            });
            assert!(results[0] == results[1], "{recipe:?} {m:?} {pad:?}");
        }
    }
}

#[test]
fn linears_over_ranks_have_the_bits_of_the_emulation() {
    let map = Map::new(40, 36, &[16], true);
    for recipe in RECIPES {
        for split in [parallel::ROWS, parallel::COLUMNS] {
            for overlap in [false, true] {
                let results = [false, true].map(|quantized| {
                    let mut d = Declarations::default();
                    parallel::build(None, &[], &map, split)(&mut d, &Rank::cpu(1, 1).unwrap());
                    let mut alone = Setup::new(d, DType::BF16, 1, 0.04);
                    if quantized {
                        keep_quantized(&mut alone);
                    }
                    let [xs, dys] = map.operands(&alone, 1.0).map(|o| o.1);
                    on_ranks(
                        2,
                        overlap,
                        &alone,
                        parallel::build(Some(recipe), &[], &map, split),
                        |s, linear| {
                            s.state.quant().into_iter().for_each(|e| e.begin_step(0, 1));
                            parallel::pass(s, linear, &map, split, &xs, &dys)
                        },
                    )
                });
                assert!(results[0] == results[1], "{recipe:?} {split:?} overlap {overlap}");
            }
        }
    }
}

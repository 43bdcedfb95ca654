//! ZeRO 0 to 3 beside plain DDP, with and without other parallelism.

use super::{Case, equal, made, near};

const LAYOUTS: [(usize, usize); 7] = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 2)];

/// Four micro-batches, dp = 2: ZeRO-1 and overlap are bit-equal to DDP; ZeRO-2 adds gradients in another order.
#[test]
fn zero_is_bit_equal_to_ddp() {
    for set in [
        &["model.tied=true"][..],
        &["model.tied=false", "optimizer.state_dtype=bf16", "precision.dtype=bf16"],
    ] {
        for (tp, dp) in LAYOUTS {
            let case = |zero, overlap| Case { tp, cp: 1, pp: 1, dp, zero, overlap, set };
            let plain = made(&case(0, false));
            for zero in [0, 1] {
                equal(
                    &format!("tp{tp} dp{dp} zero {zero} overlap {set:?}"),
                    &made(&case(zero, true)),
                    &plain,
                );
            }
            equal(&format!("tp{tp} dp{dp} zero 1 {set:?}"), &made(&case(1, false)), &plain);
            let divided = made(&case(2, true));
            equal(&format!("tp{tp} dp{dp} zero 2 {set:?}"), &made(&case(2, false)), &divided);
            for overlap in [false, true] {
                let what = format!("tp{tp} dp{dp} zero 3 overlap {overlap} {set:?}");
                equal(&what, &made(&case(3, overlap)), &divided);
            }
            if !set.contains(&"precision.dtype=bf16") {
                near(&format!("tp{tp} dp{dp} zero 2 {set:?}"), &divided, &plain, 1e-5);
            }
        }
    }
}

/// The dp×cp group with context parallelism, and a tied embedding on both ends of a pipeline.
#[test]
fn zero_is_bit_equal_with_other_parallelism() {
    for set in [&["model.tied=true"][..], &["model.tied=false"]] {
        for (tp, cp, pp, dp) in [(1, 2, 1, 2), (1, 1, 2, 2), (2, 1, 2, 2), (1, 2, 2, 2), (1, 1, 2, 4)] {
            let case = |zero, overlap| Case { tp, cp, pp, dp, zero, overlap, set };
            let what = format!("tp{tp} cp{cp} pp{pp} dp{dp} {set:?}");
            let plain = made(&case(0, false));
            equal(&what, &made(&case(1, true)), &plain);
            let divided = made(&case(2, true));
            equal(&what, &made(&case(2, false)), &divided);
            equal(&format!("zero 3 {what}"), &made(&case(3, true)), &divided);
            near(&what, &divided, &plain, 1e-5);
        }
    }
}

/// With one micro-batch the order of additions is the same.
#[test]
fn zero_2_and_3_with_one_micro_batch_is_bit_equal() {
    for (tp, dp) in [(1, 4), (2, 2)] {
        let set: &[&str] = if dp == 4 { &["train.micro_batch=2"] } else { &["train.micro_batch=4"] };
        let case = |zero| Case { tp, cp: 1, pp: 1, dp, zero, overlap: true, set };
        let plain = made(&case(0));
        for zero in [2, 3] {
            equal(&format!("tp{tp} dp{dp} zero {zero}"), &made(&case(zero)), &plain);
        }
    }
}

/// SGD and another bucket size: bucket boundaries do not matter.
#[test]
fn bucket_size_is_bit_neutral() {
    let case = |zero, set| Case { tp: 2, cp: 1, pp: 1, dp: 2, zero, overlap: true, set };
    for zero in [0, 1, 2, 3] {
        let one = made(&case(zero, &["optimizer.kind=\"sgd\"", "parallel.comm_unit=8000000000"]));
        for set in [&["optimizer.kind=\"sgd\"", "parallel.comm_unit=8"][..], &["optimizer.kind=\"sgd\""]] {
            equal(&format!("zero {zero} {set:?}"), &made(&case(zero, set)), &one);
        }
    }
}

//! Replayed steps of packed sequences, whose documents lie elsewhere in every step.

use super::{Changing, MOE, card, recipe, train_on};
use ferrotron_core::Result;
use ferrotron_core::data::{Batches, Row};
use ferrotron_kernels::IGNORE;

/// Documents that lie elsewhere in every row: three or four of them, 9 to 16 in a micro-batch; or nine in the rows that `crowded`
/// names, whose micro-batches need a larger graph. With `padded`, rows end in padding, a sequence of its own.
struct Documents {
    crowded: fn(u64) -> bool,
    padded: bool,
}

impl Batches for Documents {
    fn seq(&self) -> usize {
        64
    }
    fn samples(&self) -> u64 {
        u64::MAX
    }
    fn resets(&self) -> bool {
        true
    }
    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        Changing.row(n, row)?;
        let documents = if (self.crowded)(n) { 9 } else { 3 + n % 2 * u64::from(!self.padded) };
        let width = 64 / documents;
        row.starts.extend((1..documents).map(|i| (i * width + (n * 13 + i * 5) % width) as usize));
        if self.padded {
            row.padding = (n * 5 % 7) as usize;
            let first = 64 - row.padding;
            row.starts.retain(|start| *start < first);
            row.starts.extend((row.padding > 0).then_some(first));
            row.labels[first..].fill(IGNORE);
        }
        for (start, end) in row.starts.iter().zip(row.starts[1..].iter().chain(&[64])) {
            row.positions[*start..*end].iter_mut().zip(0..).for_each(|(p, i)| *p = i);
            row.labels[end - 1] = IGNORE;
        }
        Ok(())
    }
}

/// Documents begin elsewhere in every replay.
#[test]
fn replayed_steps_of_packed_sequences_are_bit_equal_to_launched_ones() {
    const RESET: &str = "data.reset_at_documents=true";
    let bf16 = ["precision.dtype=bf16", "optimizer.state_dtype=bf16"];
    let mtp = ["mtp.layers=1", "dropout.hidden=0.1", "moe.z_loss=1e-3"];
    let cases: &[(&str, Vec<&str>)] = &[
        ("f32", vec![RESET]),
        ("bf16", [&bf16[..], &[RESET]].concat()),
        ("heads of 128", [&bf16[..], &[RESET, "model.head_dim=128"]].concat()),
        ("window, recomputed", [&bf16[..], &[RESET, "model.window=24", "train.recompute=full"]].concat()),
        (
            "fp8",
            [&bf16[..], &[RESET, "precision.recipe=fp8-current", "precision.fp8_attention=true"]].concat(),
        ),
        ("moe", [MOE, &[RESET]].concat()),
        ("moe, MTP", [MOE, &bf16, &mtp, &[RESET]].concat()),
        ("moe, MTP, padded", [MOE, &bf16, &mtp, &["data.packing=documents"]].concat()),
        (
            "moe, padded to a capacity of each rank",
            [
                MOE,
                &bf16,
                &["data.packing=documents", "moe.capacity=1.25", "moe.pad_to_capacity=true"],
                &["moe.capacity_per_rank=true"],
            ]
            .concat(),
        ),
    ];
    let Some((rank, _alone)) = card() else {
        return cases.iter().for_each(|(_, changes)| drop(recipe("on", changes)));
    };
    for (name, changes) in cases {
        let data = Documents { crowded: |_| false, padded: !changes.contains(&RESET) };
        let plain = train_on(&data, &rank, "off", changes, false);
        assert_eq!((plain.replayed, plain.reports.len()), (0, 30), "{name}");
        for ahead in [false, true] {
            let graph = train_on(&data, &rank, "on", changes, ahead);
            assert_eq!(graph.replayed, 27, "{name}, ahead {ahead}");
            assert_eq!(graph.reports, plain.reports, "{name}, ahead {ahead}");
            assert!(graph.saved == plain.saved, "{name}, ahead {ahead}: weights or optimizer state differ");
        }
    }
}

/// Steps with more sequences than the graph has room for are launched; after three of them there is a larger graph.
#[test]
fn steps_of_many_packed_sequences_are_another_graph() {
    let changes = ["precision.dtype=bf16", "data.reset_at_documents=true"];
    recipe("on", &changes);
    let Some((rank, _alone)) = card() else { return };
    // Steps of eight samples: the 11th and 12th, and from the 21st on every other.
    let crowded = |n: u64| (10..12).contains(&(n / 8)) || (n / 8 >= 20 && (n / 8).is_multiple_of(2));
    let data = Documents { crowded, padded: false };
    let plain = train_on(&data, &rank, "off", &changes, true);
    let graph = train_on(&data, &rank, "on", &changes, true);
    // Three to warm up, then three that do not fit.
    assert_eq!(graph.replayed, 24);
    assert_eq!(graph.reports, plain.reports);
    assert!(graph.saved == plain.saved);
}

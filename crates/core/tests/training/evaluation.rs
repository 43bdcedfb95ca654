//! Evaluation: what it reads, and when.

use crate::support::{RULE, recipe, trainer};
use ferrotron_core::Result;
use ferrotron_core::data::{Batches, Row};
use ferrotron_tensor::{Category, Device};
use std::sync::Mutex;

/// The rule; notes the peak of activations whenever a micro-batch of one sample is read.
struct Watched {
    device: Device,
    peaks: Mutex<Vec<usize>>,
}

impl Batches for Watched {
    fn seq(&self) -> usize {
        RULE.seq
    }
    fn samples(&self) -> u64 {
        RULE.samples()
    }
    fn resets(&self) -> bool {
        false
    }
    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        let index = Category::ALL.iter().position(|c| *c == Category::Activations).unwrap();
        self.peaks.lock().unwrap().push(self.device.memory().peak[index]);
        RULE.row(n, row)
    }
}

/// The host holds one micro-batch at a time: the second is read when the first has been through the model.
#[test]
fn micro_batches_are_read_one_by_one() {
    let trainer = trainer(&recipe(&["train.micro_batch=1"]));
    let data = Watched { device: trainer.rank.device().clone(), peaks: Mutex::default() };
    let loss = trainer.evaluate(&data, 3).unwrap();
    assert_eq!(loss, trainer.evaluate(&RULE, 3).unwrap());
    let peaks = data.peaks.into_inner().unwrap();
    assert!(peaks.len() == 3 && peaks[0] < peaks[1], "{peaks:?}");
}

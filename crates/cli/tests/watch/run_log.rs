//! Logs of runs as `train` writes them, made up.

use ferrotron_core::events::*;
use serde_json::json;
use std::path::{Path, PathBuf};

/// A run folder whose log is being written.
pub struct RunLog {
    pub dir: PathBuf,
    log: EventLog,
    step: u64,
}

impl RunLog {
    /// A new run of `planned` steps.
    pub fn create(parent: &Path, name: &str, planned: u64) -> RunLog {
        let dir = parent.join(name);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("config.toml"), "[train]\nsteps = 100 # <b>\n").unwrap();
        let mut log = EventLog::create(&dir.join(FILE_NAME)).unwrap();
        let start = RunStart {
            schema: SCHEMA,
            recipe: "tiny".into(),
            steps: planned,
            parameters: 3_475_712,
            device: "CPU".into(),
            dtype: "bf16".into(),
            ranks: 2,
            ..RunStart::default()
        };
        log.write(&Event::RunStart(start)).unwrap();
        RunLog { dir, log, step: 0 }
    }

    /// Appends an event.
    pub fn event(&mut self, event: Event) {
        self.log.write(&event).unwrap();
    }

    /// Appends steps, with expert loads and the energy of a GPU.
    pub fn steps(&mut self, count: u64) {
        for _ in 0..count {
            self.step += 1;
            let x = self.step as f64;
            let mut step = Step {
                step: self.step,
                loss: 2.0 + 4.0 / (1.0 + x / 8.0),
                tokens: self.step * 4096,
                lr: 1e-3 / x,
                grad_norm: 1.0 + 1.0 / x,
                seconds: 0.25,
                tokens_per_s: 16384.0 + x,
                tflops: 1.5,
                memory: 226_665_020,
                reserved: 232_783_872,
                ..Step::default()
            };
            step.memory_peaks =
                [("activations".into(), 150_000_000), ("parameters".into(), 7_000_000)].into();
            step.more.insert("imbalance".into(), json!(1.25));
            step.more.insert("energy_j_per_token".into(), json!(0.026));
            step.more.insert("moe/load_layer_1".into(), json!([4096 + self.step, 4000, 0, 9000]));
            self.event(Event::Step(step));
        }
    }

    /// The end.
    pub fn end(&mut self, ending: Ending, reason: Option<&str>) {
        let reason = reason.map(Into::into);
        self.event(Event::RunEnd(RunEnd {
            step: self.step,
            ending,
            seconds: 1.0,
            tokens_per_s: 1.0,
            reason,
        }));
    }
}

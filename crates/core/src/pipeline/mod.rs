//! Pipeline parallelism: which layers each stage holds, and in which order a rank computes and communicates.
//!
//! Everything here is plain data; [`crate::train::execute()`] carries a schedule out. A [`PipelinePlan`] builds a
//! [`Schedule`] (1F1B, interleaved 1F1B or zero-bubble): per rank its operations on micro-batches and the P2P messages
//! between them. [`check()`] proves the schedule complete and free of deadlock before it runs, and [`Timeline`] draws it.
//!
//! Stages are numbered over ranks and chunks: chunk `c` of pipeline rank `r` is stage `c·P + r`.
//!
//! ```
//! use ferrotron_core::pipeline::{Costs, PipelinePlan, Timeline};
//! let schedule = PipelinePlan::new(4, 1, 8).schedule()?;
//! let timeline = Timeline::new(&schedule, &Costs::default())?;
//! println!("{}", timeline.draw(120));
//! # Ok::<(), ferrotron_core::Error>(())
//! ```

mod check;
mod deadlock;
mod op;
mod p2p;
mod schedule;
mod schedule_1f1b;
mod timeline;
mod zero_bubble;

pub use crate::model::{LayerPlacement, LayerSplit, Stage};
pub use check::{ScheduleReport, check};
pub use deadlock::Matching;
pub use op::{Message, OpKind, Payload, PipelineOp, Schedule, ScheduleShape, ScheduleStep, Transfer};
pub use schedule::{PipelinePlan, ScheduleKind, Transport};
pub use schedule_1f1b::{Warmup, interleaved_table};
pub use timeline::{Costs, Timeline, TimelineSpan};

//! Pipeline parallelism: schedules (1F1B, interleaved, zero-bubble, paired), their checker and their executor.
//!
//! All but [`execute()`] is plain data. A [`PipelinePlan`] gives a [`Schedule`]: per rank the operations on micro-batches and
//! the messages between them. [`check()`] verifies that it is complete and free of deadlock, and [`Timeline`] draws it.
//!
//! Stages are numbered over all ranks and chunks: chunk `c` of rank `r` is stage `c·P + r`.
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
mod execute;
mod op;
mod p2p;
mod schedule;
mod schedule_1f1b;
mod timeline;
mod zero_bubble;

pub use crate::model::{LayerPlacement, LayerSplit, Stage};
pub use check::{ScheduleReport, check};
pub use deadlock::Matching;
pub use execute::{DropoutRows, Load, MicroBatch, StepMode, StepPosition, execute};
pub use op::{Message, OpKind, Payload, PipelineOp, Schedule, ScheduleShape, ScheduleStep, Transfer};
pub use schedule::{PipelinePlan, ScheduleKind, Transport};
pub use schedule_1f1b::{Warmup, interleaved_table};
pub use timeline::{Costs, Timeline, TimelineSpan};

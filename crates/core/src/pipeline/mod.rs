//! Pipeline parallelism: which layers live where, and which rank does what in which order.
//!
//! All but [`execute()`] is plain data, which neither computes nor communicates. A [`Plan`] makes a [`Schedule`]: per rank the operations on micro-batches
//! and the messages between them. [`check()`] proves it complete and free of deadlock before it runs, and
//! [`Timeline`] draws it.
//!
//! Stages are numbered over all ranks and chunks: chunk `c` of rank `r` is stage `c·P + r`.
//!
//! ```
//! use ferrotron_core::pipeline::{Costs, Plan, Timeline};
//! let schedule = Plan::new(4, 1, 8).schedule()?;
//! let timeline = Timeline::new(&schedule, &Costs::default())?;
//! println!("{}", timeline.draw(120));
//! # Ok::<(), ferrotron_core::Error>(())
//! ```

mod check;
mod deadlock;
mod exchange;
mod execute;
mod layout_string;
mod op;
mod order;
mod placement;
mod plan;
mod timeline;
mod zero_bubble;

pub use check::{Report, check};
pub use deadlock::Matching;
pub use execute::{Aim, Drops, Load, MicroBatch, StepPart, execute};
pub use op::{Kind, Message, Op, Payload, Schedule, Shape, Step, Transfer};
pub use order::{Warmup, interleaved_table};
pub use placement::{Placement, Split, Stage};
pub use plan::{Mode, Plan, Transport};
pub use timeline::{Costs, Span, Timeline};

//! Precision as a policy: which products of a model are made of narrow factors, and what that needs.

mod calibrate;
mod experts;
mod head;
mod linear;
mod made;
mod operands;
mod pieces;
mod recipe;
mod side;
mod state;
mod stats;
mod store;
mod stored;

pub(crate) use experts::Columns;
pub use made::Made;
pub(crate) use operands::Uses;
pub use recipe::{Eight, Exception, Method, Policy, Product, Recipe, Role};
pub(crate) use side::{Multiply, SavedSide, Side};
pub use state::{DelayedState, EightState, Slot};
pub use stats::OperandStats;
pub(crate) use stored::Stored;

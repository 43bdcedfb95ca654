//! Precision as a policy: which products of a model are made of eight-bit factors, and what that needs.

mod operands;
mod recipe;
mod side;
mod state;

pub use recipe::{Eight, Exception, Method, Policy, Product, Recipe, Role};
pub(crate) use side::{SavedSide, Side};
pub use state::{EightState, Slot};

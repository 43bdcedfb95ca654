//! Process groups and the collectives on them. This version has one engine: ranks as threads of one process.

mod error;
mod group;

pub use error::{Error, Result};
pub use group::Group;

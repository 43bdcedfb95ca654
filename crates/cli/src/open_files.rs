//! The limit of open files of this process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Enough for any checkpoint. More would slow down libraries that walk over all descriptors a process may have.
const MOST: u64 = 1 << 20;

/// Raises the soft limit of open files to the hard one: every rank of this process opens all files of a checkpoint, two or
/// more for each rank that wrote it, and shells start programs with a soft limit of 1024.
pub fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let most = maximum.unwrap_or(MOST).min(MOST);
    if current.is_some_and(|now| now < most) {
        // Without it, what needs more files says so.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum });
    }
}

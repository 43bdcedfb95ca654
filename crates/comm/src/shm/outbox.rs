//! Messages that were sent and not taken yet: each is a file in memory, which lives as long as its descriptor is open
//! here. They belong to the job, not to a group, whose handle may be dropped before its last message is taken.

use crate::control::{ControlTransport, Topic};
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::sync::{Mutex, PoisonError};

/// By group and receiver (a rank of the job), oldest first.
#[derive(Default)]
pub(super) struct Outbox(Mutex<HashMap<(u64, usize), VecDeque<File>>>);

impl Outbox {
    /// Keeps a message until it is taken. Lets go of those that were.
    pub(super) fn keep(&self, control: &dyn ControlTransport, (group, to): (u64, usize), message: File) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for ((group, to), messages) in kept.iter_mut() {
            while control.try_receive(*to, Topic::p2p_taken(*group)).is_some() {
                messages.pop_front();
            }
        }
        kept.retain(|_, messages| !messages.is_empty());
        kept.entry((group, to)).or_default().push_back(message);
    }
}

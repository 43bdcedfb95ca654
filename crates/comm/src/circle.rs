//! Meetings of processes: every rank sends its notice to every other of the group, so that whoever does not
//! come is known by name.

use crate::engine::{Met, Trouble};
use crate::notice::Notice;
use crate::post::Topic;
use crate::process::Process;
use std::sync::Arc;
use std::time::Instant;

/// A group whose ranks are processes.
pub(crate) struct Circle {
    pub(crate) process: Arc<Process>,
    /// Number of the group.
    pub(crate) index: u64,
    /// Ranks in the job, in the order of the group.
    pub(crate) ranks: Vec<usize>,
    /// This rank's place in them.
    pub(crate) me: usize,
}

impl Circle {
    /// Makes group `index`; all ranks of the job call it. Compares what the ranks think its members are, each
    /// with the rank before it: if not all agree, somebody sees it.
    pub(crate) fn new(
        process: &Arc<Process>,
        index: u64,
        name: &str,
        ranks: &[usize],
        deadline: Instant,
    ) -> Result<Option<Circle>, Trouble> {
        process.alive()?;
        let post = process.post();
        let (here, size) = (post.rank(), post.size());
        if size > 1 {
            let mine = format!("number {index}, '{name}' of {ranks:?}");
            let before = (here + size - 1) % size;
            post.send((here + 1) % size, Topic::making(index), mine.clone().into_bytes())?;
            let theirs = process.wait(
                deadline,
                || Ok(post.take(before, Topic::making(index))),
                || vec![(before, before)],
            )?;
            if theirs != mine.as_bytes() {
                let theirs = String::from_utf8_lossy(&theirs);
                let what = format!(
                    "rank {here} makes group {mine}, rank {before} makes group {theirs}; all ranks must make the same groups in the same order"
                );
                return Err(Trouble::Broken { what });
            }
        }
        let me = ranks.iter().position(|r| *r == here);
        Ok(me.map(|me| Circle { process: process.clone(), index, ranks: ranks.to_vec(), me }))
    }

    /// Ranks of the group other than this one, as numbers in it.
    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.me;
        (0..self.ranks.len()).filter(move |r| *r != me)
    }

    /// Sends `mine` to all and waits for one message from each: in the order of ranks, this one's own empty.
    pub(crate) fn gather(
        &self,
        topic: Topic,
        mine: &[u8],
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, Trouble> {
        self.process.alive()?;
        let post = self.process.post();
        for to in self.others() {
            post.send(self.ranks[to], topic, mine.to_vec())?;
        }
        let mut came: Vec<Option<Vec<u8>>> = vec![None; self.ranks.len()];
        came[self.me] = Some(Vec::new());
        // Both closures look at what came.
        let came = std::cell::RefCell::new(came);
        self.process.wait(
            deadline,
            || {
                let mut came = came.borrow_mut();
                for (place, rank) in came.iter_mut().zip(&self.ranks) {
                    if place.is_none() {
                        *place = post.take(*rank, topic);
                    }
                }
                Ok(came.iter().all(Option::is_some).then_some(()))
            },
            || {
                let missing = |(i, c): (usize, &Option<Vec<u8>>)| c.is_none().then(|| (i, self.ranks[i]));
                came.borrow().iter().enumerate().filter_map(missing).collect()
            },
        )?;
        Ok(came.into_inner().into_iter().flatten().collect())
    }

    /// [`crate::engine::Engine::meet`].
    pub(crate) fn meet(&self, notice: &Notice, deadline: Instant) -> Result<Met, Trouble> {
        let mine = notice.encode();
        let all = self.gather(Topic::meeting(self.index), &mine, deadline)?;
        let same = self.others().all(|r| all[r] == mine);
        if same && !notice.pairwise() {
            self.others().for_each(|r| self.process.hear(self.ranks[r], notice));
            return Ok(Met::Same);
        }
        let mut notices = Vec::with_capacity(all.len());
        for (r, bytes) in all.iter().enumerate() {
            let theirs = if r == self.me { notice.clone() } else { self.decode(r, bytes)? };
            notices.push(Arc::new(theirs));
        }
        Ok(Met::All(notices))
    }

    /// [`crate::engine::Engine::bytes`].
    pub(crate) fn bytes(&self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, Trouble> {
        let mut all = self.gather(Topic::bytes(self.index), mine, deadline)?;
        all[self.me] = mine.to_vec();
        Ok(all)
    }

    /// A notice from rank `from` of the group.
    pub(crate) fn decode(&self, from: usize, bytes: &[u8]) -> Result<Notice, Trouble> {
        let rank = self.ranks[from];
        let notice = Notice::decode(bytes).ok_or_else(|| {
            let what = format!("rank {rank} sends something unreadable; do all ranks run the same program?");
            Trouble::Broken { what }
        })?;
        self.process.hear(rank, &notice);
        Ok(notice)
    }
}

impl From<crate::Error> for Trouble {
    fn from(error: crate::Error) -> Trouble {
        Trouble::Broken { what: error.to_string() }
    }
}

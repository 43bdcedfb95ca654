//! The byte streams between the members of one group: a ring of bytes for every sender, in the receiver's segment.
//!
//! ```text
//! segment of rank r:  bell, sleepers | for every sender: head, tail | for every sender: a ring of bytes
//! ```
//! The sender advances `head`, the receiver `tail`. Whoever advances one rings the other's bell; a rank with nothing
//! to do sleeps on its own bell (a futex), so that nobody spins.

use super::segment::Segment;
use rustix::thread::futex;
use std::sync::atomic::Ordering;
use std::time::Duration;

const BELL: usize = 0;
const SLEEPERS: usize = 4;
/// Bytes of the bell, and of the counters of one sender: separate cache lines.
const LINE: usize = 128;
/// Bytes of all rings of one rank, as far as the smallest and largest ring allow.
const ALL_RINGS: usize = 4 << 20;
const SMALLEST: usize = 16 << 10;
const LARGEST: usize = 1 << 20;

/// The rings of a group of `n`.
#[derive(Clone, Copy)]
struct Layout {
    n: usize,
    /// Bytes of one ring, a power of two.
    ring: usize,
}

impl Layout {
    fn new(n: usize) -> Layout {
        let ring = (ALL_RINGS / n.max(1)).clamp(SMALLEST, LARGEST);
        Layout { n, ring: 1 << ring.ilog2() }
    }

    fn bytes(self) -> usize {
        LINE + self.n * (2 * LINE + self.ring)
    }

    fn head(self, sender: usize) -> usize {
        LINE + sender * 2 * LINE
    }

    fn tail(self, sender: usize) -> usize {
        self.head(sender) + LINE
    }

    fn ring(self, sender: usize) -> usize {
        LINE + self.n * 2 * LINE + sender * self.ring
    }
}

/// Bytes of one member's segment in a group of `n`.
pub(super) fn segment_bytes(n: usize) -> usize {
    Layout::new(n).bytes()
}

/// All rings of a group, as seen by one member. Calls of one member are serialized.
pub(super) struct Rings {
    layout: Layout,
    me: usize,
    /// By member.
    segments: Vec<Segment>,
}

impl Rings {
    /// `segments` are those of all members, in group order.
    pub(super) fn new(me: usize, segments: Vec<Segment>) -> Rings {
        Rings { layout: Layout::new(segments.len()), me, segments }
    }

    /// The bell's count: [`Rings::sleep`] returns at once if it has been rung since.
    pub(super) fn bell(&self) -> u32 {
        self.segments[self.me].word(BELL).load(Ordering::SeqCst)
    }

    /// Sends the beginning of `bytes` as far as there is room; returns how much.
    pub(super) fn send(&self, to: usize, bytes: &[u8]) -> Result<usize, String> {
        let (segment, ring) = (&self.segments[to], self.layout.ring);
        let head = segment.counter(self.layout.head(self.me));
        let start = head.load(Ordering::Relaxed);
        let used = start.wrapping_sub(segment.counter(self.layout.tail(self.me)).load(Ordering::Acquire));
        let n = (ring - self.used(used)?).min(bytes.len());
        if n == 0 {
            return Ok(0);
        }
        let (at, base) = (start as usize % ring, self.layout.ring(self.me));
        let (first, second) = bytes[..n].split_at(n.min(ring - at));
        segment.write(base + at, first);
        segment.write(base, second);
        head.store(start.wrapping_add(n as u64), Ordering::Release);
        self.ring_bell(to);
        Ok(n)
    }

    /// Receives the beginning of what `to` has room for; returns how much.
    pub(super) fn receive(&self, from: usize, to: &mut [u8]) -> Result<usize, String> {
        let (segment, ring) = (&self.segments[self.me], self.layout.ring);
        let tail = segment.counter(self.layout.tail(from));
        let start = tail.load(Ordering::Relaxed);
        let used = segment.counter(self.layout.head(from)).load(Ordering::Acquire).wrapping_sub(start);
        let n = self.used(used)?.min(to.len());
        if n == 0 {
            return Ok(0);
        }
        let (at, base) = (start as usize % ring, self.layout.ring(from));
        let (first, second) = to[..n].split_at_mut(n.min(ring - at));
        segment.read(base + at, first);
        segment.read(base, second);
        tail.store(start.wrapping_add(n as u64), Ordering::Release);
        self.ring_bell(from);
        Ok(n)
    }

    fn used(&self, used: u64) -> Result<usize, String> {
        let fits = usize::try_from(used).ok().filter(|used| *used <= self.layout.ring);
        fits.ok_or_else(|| "the shared memory of the group is damaged".to_string())
    }

    fn ring_bell(&self, of: usize) {
        let bell = self.segments[of].word(BELL);
        bell.fetch_add(1, Ordering::SeqCst);
        if self.segments[of].word(SLEEPERS).load(Ordering::SeqCst) > 0 {
            let _ = futex::wake(bell, futex::Flags::empty(), u32::MAX);
        }
    }

    /// Sleeps until the bell is rung, if it has not been since it showed `seen`, or until `limit`.
    pub(super) fn sleep(&self, seen: u32, limit: Duration) {
        let (bell, sleepers) = (self.segments[self.me].word(BELL), self.segments[self.me].word(SLEEPERS));
        sleepers.fetch_add(1, Ordering::SeqCst);
        let limit =
            rustix::thread::Timespec { tv_sec: limit.as_secs() as _, tv_nsec: limit.subsec_nanos() as _ };
        // Interrupted, timed out, rung before: the caller looks again.
        let _ = futex::wait(bell, futex::Flags::empty(), seen, Some(&limit));
        sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::segment::number;
    use super::*;

    /// The rings of two members.
    fn pair() -> (Rings, Rings) {
        let made: Vec<_> = (0..2).map(|_| Segment::create(segment_bytes(2)).unwrap()).collect();
        let open =
            |i: usize| Segment::open(std::process::id(), number(&made[i].1), segment_bytes(2)).unwrap();
        (Rings::new(0, vec![open(0), open(1)]), Rings::new(1, vec![open(0), open(1)]))
    }

    #[test]
    fn bytes_arrive_in_order_through_a_ring_that_is_too_small() {
        let (a, b) = pair();
        let sent: Vec<u8> = (0..5 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        std::thread::scope(|scope| {
            let sent = &sent;
            scope.spawn(move || {
                let mut rest = &sent[..];
                while !rest.is_empty() {
                    let seen = a.bell();
                    // Pieces of odd sizes.
                    let n = a.send(1, &rest[..rest.len().min(77_777)]).unwrap();
                    rest = &rest[n..];
                    if n == 0 {
                        a.sleep(seen, Duration::from_secs(10));
                    }
                }
            });
            let (mut got, mut filled) = (vec![0; sent.len()], 0);
            while filled < got.len() {
                let seen = b.bell();
                let end = got.len().min(filled + 54_321);
                let n = b.receive(0, &mut got[filled..end]).unwrap();
                filled += n;
                if n == 0 {
                    b.sleep(seen, Duration::from_secs(10));
                }
            }
            assert!(got == *sent);
        });
    }

    #[test]
    fn no_wakeup_is_lost() {
        let (a, b) = pair();
        let seen = b.bell();
        assert_eq!(a.send(1, b"x").unwrap(), 1);
        let start = std::time::Instant::now();
        b.sleep(seen, Duration::from_secs(10));
        assert!(start.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn damaged_counters_are_an_error_and_never_leave_the_ring() {
        let (a, b) = pair();
        b.segments[1].counter(b.layout.head(0)).store(1 << 40, Ordering::SeqCst);
        assert!(b.receive(0, &mut [0; 8]).unwrap_err().contains("damaged"));
        assert!(a.send(1, b"x").is_err());
    }

    #[test]
    fn rings_of_many_ranks_stay_small() {
        for n in [2, 3, 8, 64, 256] {
            let bytes = segment_bytes(n);
            assert!(bytes <= (8 << 20).max(n * (SMALLEST + 2 * LINE) + LINE), "{n}: {bytes}");
        }
    }
}

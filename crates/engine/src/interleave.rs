//! Cooperative interleaving of two passes on one host thread.
//!
//! A pass is an `async fn` that yields where it has started a dispatch or combine and would wait for it next. Run alone it
//! resumes itself at once and so runs straight through; of two (`parallel.schedule = "paired"`), each computes while the
//! other's exchange is in flight. Nothing else is asynchronous: no thread, no timer, and the yield points are the same on
//! every rank, whatever the data.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// Yields to the other pass, if there is one.
pub async fn yield_now() {
    let mut ended = false;
    poll_fn(|_| if std::mem::replace(&mut ended, true) { Poll::Ready(()) } else { Poll::Pending }).await;
}

/// Runs one pass to completion.
pub fn run_to_completion<T>(pass: impl Future<Output = T>) -> T {
    let mut pass = pin!(pass);
    loop {
        if let Poll::Ready(output) = pass.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return output;
        }
    }
}

/// Interleaves two passes, `a` first. The first error ends both.
pub fn interleave<A, B, E>(
    a: impl Future<Output = Result<A, E>>,
    b: impl Future<Output = Result<B, E>>,
) -> Result<(A, B), E> {
    let (mut a, mut b) = (pin!(a), pin!(b));
    let (mut out_a, mut out_b) = (None, None);
    loop {
        let mut now = Context::from_waker(Waker::noop());
        if out_a.is_none()
            && let Poll::Ready(output) = a.as_mut().poll(&mut now)
        {
            out_a = Some(output?);
        }
        if out_b.is_none()
            && let Poll::Ready(output) = b.as_mut().poll(&mut now)
        {
            out_b = Some(output?);
        }
        match (out_a, out_b) {
            (Some(a), Some(b)) => return Ok((a, b)),
            still => (out_a, out_b) = still,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    async fn count(log: &RefCell<String>, name: char, turns: usize, fails: bool) -> Result<usize, char> {
        for i in 0..turns {
            log.borrow_mut().push_str(&format!("{name}{i} "));
            yield_now().await;
        }
        if fails { Err(name) } else { Ok(turns) }
    }

    #[test]
    fn passes_take_turns_until_both_are_done() {
        let log = RefCell::default();
        let output = interleave(count(&log, 'a', 2, false), count(&log, 'b', 4, false));
        assert_eq!((output, log.take().as_str()), (Ok((2, 4)), "a0 b0 a1 b1 b2 b3 "));
        assert_eq!(
            (run_to_completion(count(&log, 'c', 3, false)), log.take().as_str()),
            (Ok(3), "c0 c1 c2 ")
        );
    }

    #[test]
    fn the_first_error_ends_both() {
        let log = RefCell::default();
        assert_eq!(interleave(count(&log, 'a', 9, false), count(&log, 'b', 1, true)), Err('b'));
        assert_eq!(log.take(), "a0 b0 a1 ");
    }
}

//! Two passes in turn.
//!
//! A pass is an `async fn` that ends its turn where it has sent rows and would wait for them next. Alone it takes all turns
//! itself, so that it runs straight through; of two, each goes on while rows of the other are on their way. Nothing else
//! is asynchronous: no thread, no timer, and turns change at the same places on every rank, whatever the data.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// Ends a turn.
pub async fn turn() {
    let mut ended = false;
    poll_fn(|_| if std::mem::replace(&mut ended, true) { Poll::Ready(()) } else { Poll::Pending }).await;
}

/// What a pass makes that takes all turns itself.
pub fn at_once<T>(pass: impl Future<Output = T>) -> T {
    let mut pass = pin!(pass);
    loop {
        if let Poll::Ready(made) = pass.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return made;
        }
    }
}

/// What two passes make that take turns, `a` first. The first error ends both.
pub fn in_turn<A, B, E>(
    a: impl Future<Output = Result<A, E>>,
    b: impl Future<Output = Result<B, E>>,
) -> Result<(A, B), E> {
    let (mut a, mut b) = (pin!(a), pin!(b));
    let (mut of_a, mut of_b) = (None, None);
    loop {
        let mut now = Context::from_waker(Waker::noop());
        if of_a.is_none()
            && let Poll::Ready(made) = a.as_mut().poll(&mut now)
        {
            of_a = Some(made?);
        }
        if of_b.is_none()
            && let Poll::Ready(made) = b.as_mut().poll(&mut now)
        {
            of_b = Some(made?);
        }
        match (of_a, of_b) {
            (Some(a), Some(b)) => return Ok((a, b)),
            still => (of_a, of_b) = still,
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
            turn().await;
        }
        if fails { Err(name) } else { Ok(turns) }
    }

    #[test]
    fn passes_take_turns_until_both_are_done() {
        let log = RefCell::default();
        let made = in_turn(count(&log, 'a', 2, false), count(&log, 'b', 4, false));
        assert_eq!((made, log.take().as_str()), (Ok((2, 4)), "a0 b0 a1 b1 b2 b3 "));
        assert_eq!((at_once(count(&log, 'c', 3, false)), log.take().as_str()), (Ok(3), "c0 c1 c2 "));
    }

    #[test]
    fn the_first_error_ends_both() {
        let log = RefCell::default();
        assert_eq!(in_turn(count(&log, 'a', 9, false), count(&log, 'b', 1, true)), Err('b'));
        assert_eq!(log.take(), "a0 b0 a1 ");
    }
}

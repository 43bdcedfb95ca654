//! What was last made for a few layouts: all layers of a pass have the same sequences.

use std::sync::{Mutex, PoisonError};

/// Layouts that are remembered, and things of each: directions, sides, and windows that layers may have.
const LAYOUTS: usize = 8;
const ENTRIES_PER_LAYOUT: usize = 8;

/// Things of a layout, under names; both found by comparing all of it. What was not asked for longest goes first.
pub(in crate::cuda) struct LruCache<L, N, T> {
    layouts: Mutex<Vec<Layout<L, N, T>>>,
}

struct Layout<L, N, T> {
    layout: L,
    things: Vec<(N, T)>,
}

impl<L, N, T> Default for LruCache<L, N, T> {
    fn default() -> Self {
        LruCache { layouts: Mutex::default() }
    }
}

impl<L, N: PartialEq, T: Clone> LruCache<L, N, T> {
    /// The thing `name` of the layout that `is_it` knows; made, and its layout named by `layout`, where it is not there.
    pub(in crate::cuda) fn get<E>(
        &self,
        is_it: impl Fn(&L) -> bool,
        layout: impl FnOnce() -> L,
        name: N,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut all = self.layouts.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = match all.iter().position(|l| is_it(&l.layout)) {
            Some(at) => all.remove(at),
            None => Layout { layout: layout(), things: Vec::new() },
        };
        let thing = match found.things.iter().position(|(n, _)| *n == name) {
            Some(at) => Ok(found.things.remove(at).1),
            None => make(),
        };
        if let Ok(thing) = &thing {
            push(&mut found.things, (name, thing.clone()), ENTRIES_PER_LAYOUT);
        }
        push(&mut all, found, LAYOUTS);
        thing
    }
}

/// The newest is last.
fn push<T>(all: &mut Vec<T>, newest: T, most: usize) {
    if all.len() >= most {
        all.remove(0);
    }
    all.push(newest);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Asks for a thing; what it is, and whether it was made now.
    fn ask(kept: &LruCache<Vec<usize>, usize, String>, layout: &[usize], name: usize) -> (String, bool) {
        let made = Cell::new(false);
        let make = || {
            made.set(true);
            Ok::<_, ()>(format!("{layout:?} {name}"))
        };
        let thing = kept.get(|l| l == layout, || layout.to_vec(), name, make).unwrap();
        (thing, made.get())
    }

    #[test]
    fn things_are_made_once_and_are_those_of_their_layout_and_name() {
        let kept = LruCache::default();
        for round in 0..3 {
            for layout in [&[0, 5, 9][..], &[0, 5], &[0, 5, 8], &[]] {
                for name in [1, 2, 7] {
                    assert_eq!(ask(&kept, layout, name), (format!("{layout:?} {name}"), round == 0));
                }
            }
        }
    }

    #[test]
    fn what_was_not_asked_for_longest_goes() {
        let kept = LruCache::default();
        let new = |layout: usize, name| ask(&kept, &[layout], name).1;
        assert!((0..LAYOUTS).all(|i| new(i, 0)));
        assert!(!new(0, 0));
        // The first was asked for again, so that the second goes.
        assert!(new(LAYOUTS, 0));
        assert!(!new(0, 0) && !new(2, 0));
        assert!(new(1, 0));
        assert!((1..ENTRIES_PER_LAYOUT).all(|name| new(1, name)));
        assert!(!new(1, 0));
        assert!(new(1, ENTRIES_PER_LAYOUT));
        assert!(!new(1, 0) && new(1, 1));
    }

    #[test]
    fn what_could_not_be_made_is_not_kept() {
        let kept: LruCache<usize, usize, usize> = LruCache::default();
        assert_eq!(kept.get(|l| *l == 1, || 1, 2, || Err("no")), Err("no"));
        assert_eq!(kept.get(|l| *l == 1, || 1, 2, || Ok::<_, ()>(3)), Ok(3));
        assert_eq!(kept.get(|l| *l == 1, || 1, 2, || Err("not asked")), Ok(3));
    }
}

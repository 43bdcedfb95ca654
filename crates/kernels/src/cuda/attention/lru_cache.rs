//! A small LRU cache keyed by sequence layout: all layers of a pass have the same sequences.

use std::sync::{Mutex, PoisonError};

/// Layouts that are cache, and entries of each: directions, sides, and windows that layers may have.
const LAYOUTS: usize = 8;
const ENTRIES_PER_LAYOUT: usize = 12;

/// Entries of a layout by name; both are found by comparison. The least recently used is evicted, unless it is kept.
pub(in crate::cuda) struct LruCache<L, N, T> {
    layouts: Mutex<Vec<Layout<L, N, T>>>,
}

struct Layout<L, N, T> {
    layout: L,
    entries: Vec<Entry<N, T>>,
}

struct Entry<N, T> {
    name: N,
    value: T,
    kept: bool,
}

impl<L, N, T> Default for LruCache<L, N, T> {
    fn default() -> Self {
        LruCache { layouts: Mutex::default() }
    }
}

impl<L, N: PartialEq, T: Clone> LruCache<L, N, T> {
    /// The entry `name` of the layout that `is_it` matches; a missing entry is created by `make`, a missing layout by
    /// `layout`. With `keep` the entry is never evicted.
    pub(in crate::cuda) fn get<E>(
        &self,
        is_it: impl Fn(&L) -> bool,
        layout: impl FnOnce() -> L,
        name: N,
        keep: bool,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut all = self.layouts.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = match all.iter().position(|l| is_it(&l.layout)) {
            Some(at) => all.remove(at),
            None => Layout { layout: layout(), entries: Vec::new() },
        };
        let entry = match found.entries.iter().position(|e| e.name == name) {
            Some(at) => {
                let known = found.entries.remove(at);
                Ok(Entry { kept: known.kept || keep, ..known })
            }
            None => make().map(|value| Entry { name, value, kept: keep }),
        };
        let value = entry.map(|entry| {
            let value = entry.value.clone();
            push(&mut found.entries, entry, ENTRIES_PER_LAYOUT, |e| e.kept);
            value
        });
        push(&mut all, found, LAYOUTS, |l| l.entries.iter().any(|e| e.kept));
        value
    }
}

/// The most recently used is last.
fn push<T>(all: &mut Vec<T>, newest: T, most: usize, kept: impl Fn(&T) -> bool) {
    if all.len() >= most
        && let Some(oldest) = all.iter().position(|x| !kept(x))
    {
        all.remove(oldest);
    }
    all.push(newest);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Looks an entry up; returns it, and whether it was created.
    fn ask(cache: &LruCache<Vec<usize>, usize, String>, layout: &[usize], name: usize) -> (String, bool) {
        ask_and(cache, layout, name, false)
    }

    fn ask_and(
        cache: &LruCache<Vec<usize>, usize, String>,
        layout: &[usize],
        name: usize,
        keep: bool,
    ) -> (String, bool) {
        let created = Cell::new(false);
        let make = || {
            created.set(true);
            Ok::<_, ()>(format!("{layout:?} {name}"))
        };
        let entry = cache.get(|l| l == layout, || layout.to_vec(), name, keep, make).unwrap();
        (entry, created.get())
    }

    #[test]
    fn entries_are_created_once_per_layout_and_name() {
        let cache = LruCache::default();
        for round in 0..3 {
            for layout in [&[0, 5, 9][..], &[0, 5], &[0, 5, 8], &[]] {
                for name in [1, 2, 7] {
                    assert_eq!(ask(&cache, layout, name), (format!("{layout:?} {name}"), round == 0));
                }
            }
        }
    }

    #[test]
    fn the_least_recently_used_entry_is_evicted() {
        let cache = LruCache::default();
        let new = |layout: usize, name| ask(&cache, &[layout], name).1;
        assert!((0..LAYOUTS).all(|i| new(i, 0)));
        assert!(!new(0, 0));
        // The first was used again, so the second is evicted.
        assert!(new(LAYOUTS, 0));
        assert!(!new(0, 0) && !new(2, 0));
        assert!(new(1, 0));
        assert!((1..ENTRIES_PER_LAYOUT).all(|name| new(1, name)));
        assert!(!new(1, 0));
        assert!(new(1, ENTRIES_PER_LAYOUT));
        assert!(!new(1, 0) && new(1, 1));
    }

    #[test]
    fn a_kept_entry_is_not_evicted() {
        let cache = LruCache::default();
        // An entry may be kept later than it was created.
        assert!(ask(&cache, &[0], 0).1 && !ask_and(&cache, &[0], 0, true).1);
        for i in 1..=2 * ENTRIES_PER_LAYOUT {
            ask(&cache, &[0], i);
        }
        for i in 1..=2 * LAYOUTS {
            ask(&cache, &[i], 0);
        }
        assert!(!ask(&cache, &[0], 0).1, "kept");
        assert!(ask(&cache, &[1], 0).1 && ask(&cache, &[0], 1).1, "evicted");
        // Where all are kept the cache grows.
        for i in 0..2 * LAYOUTS {
            ask_and(&cache, &[100 + i], 0, true);
        }
        assert!((0..2 * LAYOUTS).all(|i| !ask(&cache, &[100 + i], 0).1));
    }

    #[test]
    fn a_failed_entry_is_not_cached() {
        let cache: LruCache<usize, usize, usize> = LruCache::default();
        assert_eq!(cache.get(|l| *l == 1, || 1, 2, false, || Err("no")), Err("no"));
        assert_eq!(cache.get(|l| *l == 1, || 1, 2, false, || Ok::<_, ()>(3)), Ok(3));
        assert_eq!(cache.get(|l| *l == 1, || 1, 2, false, || Err("not asked")), Ok(3));
    }
}

//! Which rank writes which part, where several hold the same.

use super::PartDecl;
use crate::error::{Error, Result};
use ferrotron_comm::Communicator;
use std::collections::BTreeMap;

/// A part that a rank holds: its identity and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Offer {
    key: u64,
    bytes: u64,
}

/// FNV-1a of a part's name and slice. Should two parts ever have the same key, one of them would not be written, and the
/// save would fail as incomplete.
fn key(part: &PartDecl) -> u64 {
    let s = &part.slice;
    let numbers = [s.axis as u64, s.range.0, s.range.1, s.elements.0, s.elements.1];
    let bytes = part.tensor.name.bytes().chain([0]).chain(numbers.into_iter().flat_map(u64::to_le_bytes));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, b| (hash ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// Which of `parts` this rank writes. Every rank of `group` gives all parts it holds, and every part is given to exactly
/// one of its holders: those with the fewest holders first, then the largest, to the holder with the least so far.
/// Collective.
pub fn share(parts: &[PartDecl], group: &Communicator) -> Result<Vec<bool>> {
    let mine = parts.iter().map(|p| Offer { key: key(p), bytes: p.bytes() });
    let bytes: Vec<u8> = mine.flat_map(|o| [o.key, o.bytes]).flat_map(u64::to_le_bytes).collect();
    let all = group.all_gather_bytes(&bytes, "parts of a checkpoint")?;
    let number = |b: &[u8]| b.iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b));
    let offers = |bytes: &Vec<u8>| {
        bytes.chunks_exact(16).map(|c| Offer { key: number(&c[..8]), bytes: number(&c[8..]) }).collect()
    };
    let writers = assign(&all.iter().map(offers).collect::<Vec<_>>());
    let mine: Option<Vec<bool>> =
        parts.iter().map(|p| Some(*writers.get(&key(p))? == group.rank())).collect();
    mine.ok_or_else(|| Error::Invalid("the ranks disagree about the parts of a checkpoint".into()))
}

/// The rank that writes each part.
fn assign(offers: &[Vec<Offer>]) -> BTreeMap<u64, usize> {
    let mut holders: BTreeMap<u64, (u64, Vec<usize>)> = BTreeMap::new();
    for (rank, offers) in offers.iter().enumerate() {
        for offer in offers {
            holders.entry(offer.key).or_insert((offer.bytes, Vec::new())).1.push(rank);
        }
    }
    let mut order: Vec<(u64, (u64, Vec<usize>))> = holders.into_iter().collect();
    order.sort_by_key(|(key, (bytes, ranks))| (ranks.len(), std::cmp::Reverse(*bytes), *key));
    let mut load = vec![0u64; offers.len()];
    let mut writers = BTreeMap::new();
    for (key, (bytes, ranks)) in order {
        if let Some(&rank) = ranks.iter().min_by_key(|&&rank| (load[rank], rank)) {
            load[rank] += bytes;
            writers.insert(key, rank);
        }
    }
    writers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_has_one_writer_that_holds_it_and_loads_are_even() {
        let offer = |key, bytes| Offer { key, bytes };
        // Rank 0 alone holds 100 bytes; the others hold the rest as well as rank 0.
        let shared: Vec<Offer> = (1..=40).map(|i| offer(i, 10)).collect();
        let mut offers = vec![shared.clone(); 3];
        offers[0].push(offer(0, 100));
        let writers = assign(&offers);
        assert_eq!(writers.len(), 41);
        assert_eq!(writers[&0], 0);
        let load = |rank| {
            writers.iter().filter(|(_, r)| **r == rank).map(|(k, _)| if *k == 0 { 100 } else { 10 }).sum()
        };
        let loads: Vec<u64> = (0..3).map(load).collect();
        assert_eq!(loads, [170, 170, 160]);
        // A part of two holders is given before one of three, so that neither of the two is left with it later.
        let writers =
            assign(&[vec![offer(1, 9), offer(2, 5)], vec![offer(1, 9), offer(2, 5)], vec![offer(1, 9)]]);
        assert_eq!((writers[&2], writers[&1]), (0, 1));
        assert!(assign(&[]).is_empty());
    }
}

//! Autotuning: times candidates on the GPU and picks the fastest.

use ferrotron_tensor::Result;

/// GPU seconds that tuning may take, approximately.
const BUDGET: f64 = 0.1;
/// Candidates tried at least, unless one takes longer than [`SLOW`].
const MIN_CANDIDATES: usize = 4;
/// Seconds of a single run from which on nothing is tuned.
const SLOW: f64 = 0.03;
/// Candidates tried at most.
pub(super) const MAX_CANDIDATES: usize = 16;
/// Candidates slower than the best by more than this factor are not timed again.
const NEAR_BEST: f64 = 1.06;
/// Candidates that are timed repeatedly.
const FINALISTS: usize = 5;
/// A later candidate replaces an earlier one only if it is faster by this factor: less is noise.
const SWITCH_MARGIN: f64 = 0.995;

/// Index of the fastest of `n` candidates. `time` runs the given candidates in order and returns the seconds of each,
/// infinity if it failed. Earlier candidates are expected to be better: where time is short only they are tried.
pub(super) fn autotune(n: usize, time: &mut dyn FnMut(&[usize]) -> Result<Vec<f64>>) -> Result<usize> {
    if n < 2 {
        return Ok(0);
    }
    // The first run of a candidate loads its code and is not representative.
    time(&[0])?;
    let one = time(&[0])?[0].max(1e-6);
    if one.is_finite() && one > SLOW {
        return Ok(0);
    }
    let affordable = if one.is_finite() { (BUDGET / 4.0 / one) as usize } else { n };
    let all: Vec<usize> = (0..affordable.clamp(MIN_CANDIDATES, MAX_CANDIDATES).min(n)).collect();
    time(&all)?;
    let mut seen: Vec<(usize, Vec<f64>)> =
        all.iter().zip(time(&all)?).map(|(algorithm, t)| (*algorithm, vec![t])).collect();
    seen.sort_by(|a, b| a.1[0].total_cmp(&b.1[0]));
    let best = seen[0].1[0];
    seen.retain(|(_, t)| t[0] <= best * NEAR_BEST);
    // The first candidate stays among the finalists, so that only a clearly faster one replaces it.
    if let Some(at) = seen.iter().position(|(algorithm, _)| *algorithm == 0).filter(|at| *at >= FINALISTS) {
        seen.swap(FINALISTS - 1, at);
    }
    seen.truncate(FINALISTS);
    if seen.len() > 1 {
        let round: f64 = seen.iter().map(|(_, t)| t[0]).sum();
        for _ in 0..((BUDGET / 2.0 / round.max(1e-9)) as usize).clamp(1, 6) {
            // Starts with another candidate each time: what runs after a pause finds the GPU cooler.
            seen.rotate_left(1);
            let order: Vec<usize> = seen.iter().map(|(algorithm, _)| *algorithm).collect();
            time(&order)?.into_iter().zip(&mut seen).for_each(|(t, (_, all))| all.push(t));
        }
    }
    let median = |all: &mut Vec<f64>| {
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    let mut medians: Vec<(usize, f64)> =
        seen.iter_mut().map(|(algorithm, all)| (*algorithm, median(all))).collect();
    medians.sort_by_key(|(algorithm, _)| *algorithm);
    let first = medians[0];
    Ok(medians.iter().fold(first, |best, this| if this.1 < best.1 * SWITCH_MARGIN { *this } else { best }).0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tunes with a clock that says `speed(candidate, number of the run)`; also returns the seconds spent.
    fn race(n: usize, speed: impl Fn(usize, usize) -> f64) -> (usize, f64) {
        let (mut spent, mut runs) = (0.0, 0);
        let mut time = |algorithms: &[usize]| {
            let took = algorithms.iter().map(|w| {
                runs += 1;
                let t = speed(*w, runs);
                spent += if t.is_finite() { t } else { 0.0 };
                t
            });
            Ok(took.collect())
        };
        let algorithm = autotune(n, &mut time).unwrap();
        (algorithm, spent)
    }

    #[test]
    fn the_fastest_candidate_wins_at_any_position() {
        for n in 1..=MAX_CANDIDATES {
            for winner in 0..n {
                let speed = |w: usize, _| if w == winner { 1e-4 } else { 1.1e-4 + w as f64 * 1e-6 };
                assert_eq!(race(n, speed).0, winner);
            }
        }
    }

    #[test]
    fn noise_does_not_replace_the_first_candidate() {
        // All within a fifth of a percent, with one hiccup of the first.
        let speed = |w: usize, run: usize| {
            1e-4 * (1.0 + 0.001 * ((w * 7 + run * 13) % 3) as f64) + if run == 2 { 1e-5 } else { 0.0 }
        };
        assert_eq!(race(MAX_CANDIDATES, speed).0, 0);
    }

    #[test]
    fn failed_candidates_are_skipped() {
        let speed = |w: usize, _| if w == 2 { 1e-4 } else { f64::INFINITY };
        assert_eq!(race(6, speed).0, 2);
        assert_eq!(race(6, |_, _| f64::INFINITY).0, 0);
    }

    #[test]
    fn tuning_time_is_bounded() {
        for one in [1e-5, 1e-4, 1e-3, 5e-3, 1.3e-2, 0.1] {
            let (_, spent) = race(MAX_CANDIDATES, |w, _| one * (1.0 + w as f64 * 1e-3));
            assert!(spent < 3.0 * BUDGET, "{one}: {spent}");
        }
    }
}

//! Fewer points of a curve, with its minima and maxima.

/// Indices of at most about `points` values that draw like all of them: of each of `points / 2` equal spans the smallest and the
/// largest value, and the first and last value of all. Values that are not finite are left out unless a span has no other;
/// then one stands for it.
pub fn decimate(values: &[f64], points: usize) -> Vec<usize> {
    let (len, spans) = (values.len(), (points / 2).max(1));
    if len <= points.max(2) {
        return (0..len).collect();
    }
    let mut kept = Vec::with_capacity(2 * spans + 2);
    kept.push(0);
    for span in 0..spans {
        let (from, to) = (span * len / spans, (span + 1) * len / spans);
        let (mut least, mut most) = (from, from);
        for (i, x) in values.iter().enumerate().take(to).skip(from) {
            // Comparisons with NaN are false; anything finite replaces what is not.
            if x.is_finite() {
                if !values[least].is_finite() || *x < values[least] {
                    least = i;
                }
                if !values[most].is_finite() || *x > values[most] {
                    most = i;
                }
            }
        }
        kept.extend([least.min(most), least.max(most)]);
    }
    kept.push(len - 1);
    kept.dedup();
    kept
}

#[cfg(test)]
mod tests {
    use super::decimate;

    #[test]
    fn minima_maxima_and_ends_stay() {
        let mut values: Vec<f64> = (0..100_000).map(|i| (f64::from(i) * 0.1).sin()).collect();
        values[41_234] = 9.0;
        values[77_777] = -7.0;
        values[500] = f64::NAN;
        let kept = decimate(&values, 400);
        assert!(kept.len() <= 402, "{}", kept.len());
        assert!(kept.is_sorted_by(|a, b| a < b));
        for i in [0, 41_234, 77_777, 99_999] {
            assert!(kept.contains(&i), "{i}");
        }
        assert!(!kept.contains(&500));
        // The envelope of every span is that of all values.
        let envelope = |of: &mut dyn Iterator<Item = f64>| {
            of.filter(|x| x.is_finite()).fold((f64::MAX, f64::MIN), |(a, b), x| (a.min(x), b.max(x)))
        };
        for span in 0..200 {
            let range = span * 500..(span + 1) * 500;
            let all = envelope(&mut range.clone().map(|i| values[i]));
            let some = envelope(&mut kept.iter().filter(|i| range.contains(i)).map(|i| values[*i]));
            assert_eq!(all, some, "span {span}");
        }
    }

    #[test]
    fn few_values_stay_as_they_are() {
        assert_eq!(decimate(&[], 10), Vec::<usize>::new());
        assert_eq!(decimate(&[1.0, f64::NAN, 2.0], 10), [0, 1, 2]);
        assert_eq!(decimate(&[1.0, 2.0, 3.0], 0), [0, 2]);
        // A span without a finite value is represented all the same.
        let kept = decimate(&[f64::NAN; 100], 20);
        assert!(kept.len() >= 10, "{kept:?}");
    }
}

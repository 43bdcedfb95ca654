//! The bytes of TensorBoard's event files: TFRecords of protobuf messages `tensorflow.Event`.
//!
//! | message | fields by number |
//! |---|---|
//! | Event | 1 `wall_time` f64, 2 `step` i64, 3 `file_version` string, 5 `summary`, 7 `session_log` |
//! | Summary | 1 `value`, repeated |
//! | Summary.Value | 1 `tag` string, 2 `simple_value` f32, 5 `histo` |
//! | HistogramProto | 1 `min`, 2 `max`, 3 `num`, 4 `sum`, 5 `sum_squares` f64; 6 `bucket_limit`, 7 `bucket`: packed f64 |
//! | SessionLog | 1 `status` enum, 1 is START |

use crate::events::Metrics;

/// Buckets of a histogram, of equal width between the smallest and the largest value.
const BUCKETS: usize = 30;

/// Appends a record: length, its checksum, payload, its checksum.
pub(super) fn record(out: &mut Vec<u8>, payload: &[u8]) {
    let length = (payload.len() as u64).to_le_bytes();
    out.extend(length);
    out.extend(masked_crc(&length).to_le_bytes());
    out.extend(payload);
    out.extend(masked_crc(payload).to_le_bytes());
}

/// TFRecord's checksum: CRC-32C, rotated and offset so that a checksum of data that holds checksums stays useful.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The first event of a file.
pub(super) fn file_version(time: f64) -> Vec<u8> {
    let mut event = Message::event(time, 0);
    event.bytes(3, b"brain.Event:2");
    event.0
}

/// The session begins at `step`: readers drop what they have of this step and later ones.
pub(super) fn session_start(time: f64, step: u64) -> Vec<u8> {
    let mut event = Message::event(time, step);
    event.bytes(7, &[0x08, 1]);
    event.0
}

/// The metrics of a step as one summary.
pub(super) fn summary(time: f64, step: u64, metrics: &Metrics) -> Vec<u8> {
    let mut summary = Message::default();
    for (tag, x) in &metrics.scalars {
        let mut value = Message::default();
        value.bytes(1, tag.as_bytes());
        value.float(2, *x as f32);
        summary.bytes(1, &value.0);
    }
    for (tag, values) in &metrics.distributions {
        // A histogram has no bucket for what is not finite.
        let finite: Vec<f64> = values.iter().copied().filter(|x| x.is_finite()).collect();
        if !finite.is_empty() {
            let mut value = Message::default();
            value.bytes(1, tag.as_bytes());
            value.bytes(5, &histogram(&finite));
            summary.bytes(1, &value.0);
        }
    }
    let mut event = Message::event(time, step);
    event.bytes(5, &summary.0);
    event.0
}

fn histogram(values: &[f64]) -> Vec<u8> {
    let min = values.iter().copied().fold(f64::INFINITY, f64::min);
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let (limits, counts) = buckets(values, min, max);
    let mut histo = Message::default();
    let squares = values.iter().map(|x| x * x).sum();
    for (field, x) in (1..).zip([min, max, values.len() as f64, values.iter().sum(), squares]) {
        histo.double(field, x);
    }
    for (field, packed) in [(6, limits), (7, counts)] {
        histo.bytes(field, &packed.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
    }
    histo.0
}

/// Right ends of the buckets and the number of values in each. A value is in the first bucket whose end is not below it. The
/// first bucket is empty: TensorBoard draws it from the smallest value to its own end.
fn buckets(values: &[f64], min: f64, max: f64) -> (Vec<f64>, Vec<f64>) {
    let width = (max - min) / BUCKETS as f64;
    if !(width.is_finite() && width > 0.0 && min + width > min) {
        return (vec![max], vec![values.len() as f64]);
    }
    let mut limits: Vec<f64> = (0..BUCKETS).map(|i| min + width * i as f64).collect();
    limits.push(max);
    let mut counts = vec![0.0; limits.len()];
    for x in values {
        counts[limits.partition_point(|limit| limit < x).min(BUCKETS)] += 1.0;
    }
    (limits, counts)
}

/// A protobuf message being written.
#[derive(Default)]
struct Message(Vec<u8>);

/// Wire types.
const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const LENGTH: u64 = 2;
const FIXED32: u64 = 5;

impl Message {
    fn event(time: f64, step: u64) -> Message {
        let mut event = Message::default();
        event.double(1, time);
        event.varint(2 << 3 | VARINT);
        event.varint(step);
        event
    }

    fn varint(&mut self, mut x: u64) {
        while x >= 0x80 {
            self.0.push(x as u8 | 0x80);
            x >>= 7;
        }
        self.0.push(x as u8);
    }

    fn double(&mut self, field: u64, x: f64) {
        self.varint(field << 3 | FIXED64);
        self.0.extend(x.to_le_bytes());
    }

    fn float(&mut self, field: u64, x: f32) {
        self.varint(field << 3 | FIXED32);
        self.0.extend(x.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.varint(field << 3 | LENGTH);
        self.varint(bytes.len() as u64);
        self.0.extend(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_masked_as_tfrecord_says() {
        // CRC-32C of nine digits is 0xe3069283 (the check value of RFC 3720); rotated right by 15 it is 0x2507c60d.
        assert_eq!(masked_crc(b"123456789"), 0xc78a_b0e5);
    }

    #[test]
    fn events_have_the_bytes_of_their_messages() {
        let metrics = Metrics { scalars: vec![("ab".into(), 1.0)], ..Metrics::default() };
        let mut expected = vec![0x09];
        expected.extend(2.0f64.to_le_bytes());
        // step 300 is a varint of two bytes; summary of 11 bytes, value of 9, tag of 2.
        expected.extend([0x10, 0xac, 0x02, 0x2a, 11, 0x0a, 9, 0x0a, 2, b'a', b'b', 0x15]);
        expected.extend(1.0f32.to_le_bytes());
        assert_eq!(summary(2.0, 300, &metrics), expected);
        assert_eq!(session_start(0.0, 0)[11..], [0x3a, 2, 0x08, 1]);
    }

    #[test]
    fn buckets_hold_every_value_once() {
        for values in [vec![1.0, 2.0, 2.0, 31.0], vec![5.0; 3], vec![0.0, 1e-300], vec![-1e308, 1e308]] {
            let (min, max) = values.iter().fold((f64::MAX, f64::MIN), |(a, b), x| (a.min(*x), b.max(*x)));
            let (limits, counts) = buckets(&values, min, max);
            assert_eq!(limits.len(), counts.len());
            assert!(limits.is_sorted() && limits.last() == Some(&max), "{limits:?}");
            let up_to = |limit: f64| values.iter().filter(|x| **x <= limit).count() as f64;
            let mut sum = 0.0;
            for (limit, count) in limits.iter().zip(counts) {
                sum += count;
                assert_eq!(sum, up_to(*limit), "{values:?} up to {limit}");
            }
        }
    }
}

//! Binary encoding of [`Snapshot`]s, for ranks that are processes.

use crate::flight_recorder::{Channel, OpState, OpStatus, Snapshot};
use crate::op_descriptor::OpDescriptor;
use std::sync::Arc;
use std::time::Duration;

/// Encodes the counters of all channels, then the operations.
pub(crate) fn encode(snapshot: &Snapshot) -> Vec<u8> {
    let mut out = Vec::new();
    let number = |out: &mut Vec<u8>, n: u64| out.extend(n.to_le_bytes());
    number(&mut out, snapshot.issued.len() as u64);
    for (channel, issued) in &snapshot.issued {
        let (from, to) = channel.route.unwrap_or((u64::MAX, u64::MAX));
        [channel.group, from, to, *issued].iter().for_each(|n| number(&mut out, *n));
    }
    for op in &snapshot.ops {
        let descriptor = op.descriptor.encode();
        number(&mut out, op.channel.group);
        number(&mut out, OpStatus::ALL.iter().position(|s| *s == op.status).unwrap_or(0) as u64);
        number(&mut out, op.age.as_millis() as u64);
        number(&mut out, descriptor.len() as u64);
        out.extend(descriptor);
    }
    out
}

/// Decodes what [`encode`] wrote; `None` for anything else.
pub(crate) fn decode(mut bytes: &[u8]) -> Option<Snapshot> {
    let mut snapshot = Snapshot::default();
    for _ in 0..number(&mut bytes)? {
        let [group, from, to, issued] =
            [number(&mut bytes)?, number(&mut bytes)?, number(&mut bytes)?, number(&mut bytes)?];
        let route = (from != u64::MAX).then_some((from, to));
        snapshot.issued.insert(Channel { group, route }, issued);
    }
    while !bytes.is_empty() {
        let group = number(&mut bytes)?;
        let status = *OpStatus::ALL.get(usize::try_from(number(&mut bytes)?).ok()?)?;
        let age = Duration::from_millis(number(&mut bytes)?);
        let len = usize::try_from(number(&mut bytes)?).ok()?;
        let (descriptor, rest) = bytes.split_at_checked(len)?;
        bytes = rest;
        let descriptor = Arc::new(OpDescriptor::decode(descriptor)?);
        let channel = Channel::of(group, &descriptor);
        snapshot.ops.push(OpState { channel, descriptor, status, age });
    }
    Some(snapshot)
}

fn number(bytes: &mut &[u8]) -> Option<u64> {
    let (head, rest) = bytes.split_first_chunk::<8>()?;
    *bytes = rest;
    Some(u64::from_le_bytes(*head))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::op_descriptor::{Detail, OpKind};

    #[test]
    fn snapshots_travel_and_rubbish_is_refused() {
        let mut snapshot = Snapshot::default();
        for (i, status) in OpStatus::ALL.into_iter().enumerate() {
            let mut d = OpDescriptor::new("tp", OpKind::AllReduce, "ü").with_detail(Detail::Reduce(1));
            if i == 3 {
                d.detail = Detail::Route(2, 5);
            }
            let channel = Channel::of(i as u64, &d);
            snapshot.issued.insert(channel, 7 + i as u64);
            let age = Duration::from_millis(1234);
            snapshot.ops.push(OpState { channel, descriptor: Arc::new(d), status, age });
        }
        let bytes = encode(&snapshot);
        let back = decode(&bytes).unwrap();
        assert_eq!(format!("{:?}", back.ops), format!("{:?}", snapshot.ops));
        assert_eq!(back.issued, snapshot.issued);
        for cut in 0..bytes.len() {
            if let Some(some) = decode(&bytes[..cut]) {
                assert!(some.ops.len() < snapshot.ops.len());
            }
        }
        assert!(decode(&[9; 40]).is_none());
    }
}

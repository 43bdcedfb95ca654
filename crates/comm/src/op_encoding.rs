//! Binary encoding of op descriptors, for backends that send them over a network.

use crate::op_descriptor::{Detail, OpDescriptor, OpKind};
use ferrotron_tensor::DType;

impl OpDescriptor {
    /// Encodes the descriptor; multi-byte integers are little-endian.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(96);
        let text = |out: &mut Vec<u8>, s: &str| {
            out.extend((s.len() as u64).to_le_bytes());
            out.extend(s.as_bytes());
        };
        let list = |out: &mut Vec<u8>, l: &[u64]| {
            out.extend((l.len() as u64).to_le_bytes());
            l.iter().for_each(|x| out.extend(x.to_le_bytes()));
        };
        text(&mut out, &self.group);
        out.extend(self.sequence.to_le_bytes());
        text(&mut out, &self.label);
        out.push(self.kind as u8);
        list(&mut out, &self.shape);
        text(&mut out, self.dtype.map_or("", DType::name));
        let (tag, a, b): (u8, Vec<u64>, &[u64]) = match &self.detail {
            Detail::None => (0, vec![], &[]),
            Detail::Reduce(op) => (1, vec![*op], &[]),
            Detail::Root(root) => (2, vec![*root], &[]),
            Detail::Counts(counts) => (3, counts.clone(), &[]),
            Detail::Pairs { sent, received } => (4, sent.clone(), received),
            Detail::Route(from, to) => (5, vec![*from, *to], &[]),
        };
        out.push(tag);
        list(&mut out, &a);
        list(&mut out, b);
        out
    }

    /// Decodes what [`OpDescriptor::encode`] wrote; `None` for anything else.
    pub(crate) fn decode(bytes: &[u8]) -> Option<OpDescriptor> {
        let mut r = Reader(bytes);
        let group = r.text()?;
        let sequence = r.number()?;
        let label = r.text()?;
        let kind = *OpKind::ALL.get(usize::from(r.take(1)?[0]))?;
        let shape = r.list()?;
        let dtype = match r.text()?.as_str() {
            "" => None,
            name => Some(*DTYPES.iter().find(|d| d.name() == name)?),
        };
        let tag = r.take(1)?[0];
        let (a, b) = (r.list()?, r.list()?);
        let detail = match (tag, a.as_slice()) {
            (0, []) => Detail::None,
            (1, [op]) => Detail::Reduce(*op),
            (2, [root]) => Detail::Root(*root),
            (3, _) => Detail::Counts(a),
            (4, _) => Detail::Pairs { sent: a, received: b },
            (5, [from, to]) => Detail::Route(*from, *to),
            _ => return None,
        };
        let done = r.0.is_empty();
        done.then_some(OpDescriptor {
            group: group.into(),
            sequence,
            label: label.into(),
            kind,
            shape,
            dtype,
            detail,
        })
    }
}

const DTYPES: [DType; 11] = [
    DType::F64,
    DType::F32,
    DType::BF16,
    DType::F16,
    DType::E4M3,
    DType::E5M2,
    DType::I64,
    DType::I32,
    DType::U8,
    DType::Bool,
    DType::I16,
];

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }
    fn number(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }
    fn text(&mut self) -> Option<String> {
        let n = usize::try_from(self.number()?).ok()?;
        String::from_utf8(self.take(n)?.to_vec()).ok()
    }
    fn list(&mut self) -> Option<Vec<u64>> {
        let n = usize::try_from(self.number()?).ok()?;
        let bytes = self.take(n.checked_mul(8)?)?;
        bytes.chunks_exact(8).map(|c| Some(u64::from_le_bytes(c.try_into().ok()?))).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_description_survives_the_wire_and_damage_is_refused() {
        let details = [
            Detail::None,
            Detail::Reduce(1),
            Detail::Root(3),
            Detail::Counts(vec![0, 7]),
            Detail::Pairs { sent: vec![1, 2], received: vec![3, 0] },
            Detail::Route(2, 1),
        ];
        let mut seen = std::collections::HashSet::new();
        for kind in OpKind::ALL {
            for detail in &details {
                for dtype in DTYPES.into_iter().map(Some).chain([None]) {
                    let mut n = OpDescriptor::new("dp", kind, "a label").with_detail(detail.clone());
                    (n.sequence, n.shape, n.dtype) = (9, vec![4, 5], dtype);
                    let bytes = n.encode();
                    assert_eq!(OpDescriptor::decode(&bytes).unwrap(), n);
                    assert!((0..bytes.len()).all(|cut| OpDescriptor::decode(&bytes[..cut]).is_none()));
                    assert!(OpDescriptor::decode(&[&bytes[..], &[0]].concat()).is_none());
                    assert!(seen.insert(bytes), "distinct descriptors have distinct encodings");
                }
            }
        }
    }
}

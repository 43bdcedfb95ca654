//! The JSON header: parsed with every check, and written like the official writer.

use super::{FileDType, TensorInfo};
use serde::de::{DeserializeSeed, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashSet};

/// Key of the string-to-string metadata.
pub(super) const METADATA: &str = "__metadata__";

/// Maximum number of axes, as in PyTorch; keeps messages about shapes short.
const MAX_AXES: usize = 64;

/// A tensor's entry; offsets count from the end of the header.
#[derive(Serialize, Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The parsed header, entries in file order.
#[derive(Default)]
struct Parsed {
    metadata: BTreeMap<String, String>,
    entries: Vec<(String, Entry)>,
}

/// A JSON object of strings that refuses duplicate keys; serde's own map silently keeps the last.
struct UniqueStrings;

impl<'de> Visitor<'de> for UniqueStrings {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut out = BTreeMap::new();
        while let Some((key, value)) = map.next_entry::<String, String>()? {
            if out.insert(key.clone(), value).is_some() {
                return Err(A::Error::custom(format!("{METADATA} has {key:?} twice")));
            }
        }
        Ok(out)
    }
}

impl<'de> DeserializeSeed<'de> for UniqueStrings {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: serde::Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_map(self)
    }
}

struct Header;

impl<'de> Visitor<'de> for Header {
    type Value = Parsed;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Parsed, A::Error> {
        let mut out = Parsed::default();
        let mut seen = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !seen.insert(name.clone()) {
                return Err(A::Error::custom(format!("{name:?} appears twice")));
            }
            if name == METADATA {
                out.metadata = map.next_value_seed(UniqueStrings)?;
            } else {
                let entry: Entry =
                    map.next_value().map_err(|e| A::Error::custom(format!("tensor {name:?}: {e}")))?;
                out.entries.push((name, entry));
            }
        }
        Ok(out)
    }
}

/// Parses and checks a header of `header.len()` bytes in a file of `file_bytes`. Returns the tensors in the order of
/// their data, and the metadata. An error describes the file and names the tensor.
pub(super) fn parse(
    header: &[u8],
    file_bytes: u64,
) -> Result<(Vec<TensorInfo>, BTreeMap<String, String>), String> {
    let text = std::str::from_utf8(header).map_err(|e| format!("its header is not UTF-8: {e}"))?;
    if !text.starts_with('{') {
        return Err("its header does not begin with '{', so it is not a safetensors file".into());
    }
    let mut json = serde_json::Deserializer::from_str(text);
    let parsed = serde::Deserializer::deserialize_map(&mut json, Header)
        .and_then(|p| json.end().map(|()| p))
        .map_err(|e| format!("its header is damaged: {e}"))?;

    let data_start = 8 + header.len() as u64;
    let data_bytes = file_bytes.saturating_sub(data_start);
    let mut tensors = Vec::with_capacity(parsed.entries.len());
    for (name, entry) in parsed.entries {
        let dtype = FileDType::from_name(&entry.dtype)
            .ok_or_else(|| format!("tensor {name:?} has the unknown dtype {:?}", entry.dtype))?;
        if entry.shape.len() > MAX_AXES {
            let axes = entry.shape.len();
            return Err(format!("tensor {name:?} has {axes} axes, more than the {MAX_AXES} allowed"));
        }
        let shape: Vec<usize> =
            entry.shape.iter().map(|&n| usize::try_from(n)).collect::<Result<_, _>>().map_err(|_| {
                format!("tensor {name:?}: shape {:?} is too large for this machine", entry.shape)
            })?;
        let want = dtype.tensor_bytes(&shape).map_err(|e| format!("tensor {name:?}: {e}"))?;
        let (begin, end) = entry.data_offsets;
        if begin > end || end > data_bytes {
            return Err(format!(
                "tensor {name:?} claims bytes {begin}..{end} of {data_bytes} bytes of data; \
                 the file is cut short or its header is damaged"
            ));
        }
        if end - begin != want {
            return Err(format!(
                "tensor {name:?} claims {} bytes, but {dtype} {shape:?} takes {want}",
                end - begin
            ));
        }
        tensors.push(TensorInfo { name, dtype, shape, begin: data_start + begin, end: data_start + end });
    }

    // A stable sort, so that empty tensors at one offset keep the header's order.
    tensors.sort_by_key(|t| (t.begin, t.end));
    let mut at = data_start;
    for t in &tensors {
        if t.begin != at {
            let what = if t.begin < at { "overlaps the tensor before it" } else { "leaves a hole before it" };
            return Err(format!("tensor {:?} {what} (bytes {}..{} of the file)", t.name, t.begin, t.end));
        }
        at = t.end;
    }
    if at != file_bytes {
        return Err(format!("has {} bytes after its last tensor", file_bytes - at));
    }
    Ok((tensors, parsed.metadata))
}

/// The start of a file (length, JSON, padding to a multiple of 8) for tensors whose data are contiguous in the given
/// order, and the total size.
pub(super) fn render(
    tensors: &[(&str, FileDType, &[usize], u64)],
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>, serde_json::Error> {
    let mut json = vec![b'{'];
    if !metadata.is_empty() {
        serde_json::to_writer(&mut json, METADATA)?;
        json.push(b':');
        serde_json::to_writer(&mut json, metadata)?;
    }
    let mut at = 0;
    for (name, dtype, shape, bytes) in tensors {
        if json.len() > 1 {
            json.push(b',');
        }
        serde_json::to_writer(&mut json, name)?;
        json.push(b':');
        let shape = shape.iter().map(|&n| n as u64).collect();
        let entry = Entry { dtype: dtype.name().into(), shape, data_offsets: (at, at + bytes) };
        serde_json::to_writer(&mut json, &entry)?;
        at += bytes;
    }
    json.push(b'}');
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut out = (json.len() as u64).to_le_bytes().to_vec();
    out.append(&mut json);
    Ok(out)
}

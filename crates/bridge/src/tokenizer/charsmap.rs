//! The character map of a SentencePiece model: the length of a trie (a double array), the trie, and the texts that it
//! puts in place of characters, each ended by a zero. The library that applies it checks no index.

pub(super) struct CharsMap {
    units: Vec<u32>,
    texts: Vec<u8>,
}

const BROKEN: &str = "its `precompiled_charsmap` is damaged";

impl CharsMap {
    pub fn parse(base64: &str) -> Result<CharsMap, String> {
        let bytes = decode(base64);
        let (length, rest) = bytes.split_first_chunk::<4>().ok_or(BROKEN)?;
        let length = u32::from_le_bytes(*length) as usize;
        let (trie, texts) = rest.split_at_checked(length).ok_or(BROKEN)?;
        let (units, []) = trie.as_chunks::<4>() else { return Err(BROKEN.into()) };
        Ok(CharsMap { units: units.iter().map(|u| u32::from_le_bytes(*u)).collect(), texts: texts.to_vec() })
    }

    /// Length of the longest text.
    pub fn longest(&self) -> usize {
        self.texts.split(|b| *b == 0).map(<[u8]>::len).max().unwrap_or(0)
    }

    /// Follows every path through the trie: none may leave it or end in anything but a text.
    pub fn check(&self) -> Result<(), String> {
        let texts = std::str::from_utf8(&self.texts).map_err(|_| BROKEN)?;
        let at = |position: usize| self.units.get(position).copied().ok_or(BROKEN);
        let root = offset(at(0)?);
        let (mut seen, mut open) = (vec![false; self.units.len()], vec![root]);
        while let Some(position) = open.pop() {
            for byte in 1..=255 {
                let child = position ^ byte as usize;
                let unit = at(child)?;
                if unit & (1 << 31 | 0xff) != byte || std::mem::replace(&mut seen[child], true) {
                    continue;
                }
                let next = child ^ offset(unit);
                let has_leaf = unit >> 8 & 1 == 1;
                if has_leaf && !texts.is_char_boundary((at(next)? & (u32::MAX >> 1)) as usize) {
                    return Err(BROKEN.into());
                }
                open.push(next);
            }
        }
        Ok(())
    }
}

/// What a position in the trie is combined with to get to its children.
fn offset(unit: u32) -> usize {
    ((unit >> 10) as usize) << ((unit & 1 << 9) >> 6)
}

/// Decodes Base64, without a judgement of padding and foreign characters: the library refuses those.
fn decode(base64: &str) -> Vec<u8> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let (mut bytes, mut held, mut bits) = (Vec::with_capacity(base64.len() / 4 * 3), 0u32, 0);
    for d in base64.bytes().filter_map(digit) {
        (held, bits) = (held << 6 | u32::from(d), bits + 6);
        if bits >= 8 {
            bits -= 8;
            bytes.push((held >> bits) as u8);
            held &= (1 << bits) - 1;
        }
    }
    bytes
}

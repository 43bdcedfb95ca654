//! Patterns of names.

/// Whether a name matches a pattern with `*` for any text.
pub fn matches_pattern(pattern: &str, name: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut left) = name.strip_prefix(head) else { return false };
    let mut pieces: Vec<&str> = rest.split('*').collect();
    let last = pieces.pop().unwrap_or_default();
    // Taking each piece where it first occurs leaves most for the others, so nothing is tried twice.
    for piece in pieces {
        let Some((_, after)) = left.split_once(piece) else { return false };
        left = after;
    }
    left.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::matches_pattern;

    #[test]
    fn patterns() {
        for (pattern, name, yes) in [
            ("layers.0.*", "layers.0.attn.q.weight", true),
            ("layers.0.*", "layers.01.attn.q.weight", false),
            ("*.q.*", "layers.0.attn.q.weight", true),
            ("*", "", true),
            ("head.weight", "head.weight", true),
            ("head.weight", "head.weights", false),
            ("*norm*weight", "layers.1.mlp_norm.weight", true),
            ("*norm*weight", "layers.1.mlp_norm.weights", false),
            ("a*a", "a", false),
            ("*ab*b", "aab", false),
            ("**a**", "bab", true),
            (&"*a".repeat(200), &"a".repeat(199), false),
        ] {
            assert_eq!(matches_pattern(pattern, name), yes, "{pattern} {name}");
        }
    }
}

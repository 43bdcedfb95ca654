//! Sequences of at most so many tokens that score every token of a text once.

use super::Document;
use ferrotron_core::model::Sequence;
use ferrotron_kernels::IGNORE;

/// Windows of at most `length` inputs over a document. The first begins with `prefix`, which its first token is predicted
/// from; the last has all the context that fits and scores only what the one before did not.
pub fn rolling(document: &Document, prefix: i32, length: usize) -> Vec<Sequence> {
    let (tokens, length) = (&document.tokens, length.max(1));
    let scored = |i: usize| document.scored.as_ref().is_none_or(|s| s[i]);
    // Input i is the token before token i.
    let before = |i: usize| if i == 0 { prefix } else { tokens[i - 1] };
    let mut out = Vec::new();
    let mut done = 0;
    while done < tokens.len() {
        let end = (done + length).min(tokens.len());
        let begin = if done == 0 { 0 } else { end - length };
        let label = |i: usize| if i >= done && scored(i) { tokens[i] } else { IGNORE };
        let window = Sequence {
            tokens: (begin..end).map(before).collect(),
            labels: (begin..end).map(label).collect(),
        };
        if window.labels.iter().any(|l| *l != IGNORE) {
            out.push(window);
        }
        done = end;
    }
    out
}

/// The sequence that scores `continuation` after `context`, of which the end is kept where both are longer than
/// `length` inputs. `None`: the continuation itself is too long, or one of them is empty.
pub fn continuation(context: &[i32], continuation: &[i32], length: usize) -> Option<Sequence> {
    if context.is_empty() || continuation.is_empty() || continuation.len() > length {
        return None;
    }
    let mut tokens = [context, continuation].concat();
    let first = tokens.len().saturating_sub(length + 1);
    tokens.drain(..first);
    let mut labels = tokens[1..].to_vec();
    tokens.pop();
    let unscored = labels.len() - continuation.len();
    labels[..unscored].fill(IGNORE);
    Some(Sequence { tokens, labels })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(n: i32) -> Document {
        Document { tokens: (0..n).collect(), scored: None, bytes: None }
    }

    /// The example in the documentation of lm-evaluation-harness.
    #[test]
    fn windows_score_every_token_once_with_the_most_context() {
        let windows = rolling(&document(10), 99, 4);
        let tokens: Vec<_> = windows.iter().map(|w| w.tokens.clone()).collect();
        assert_eq!(tokens, [vec![99, 0, 1, 2], vec![3, 4, 5, 6], vec![5, 6, 7, 8]]);
        let labels: Vec<_> = windows.iter().map(|w| w.labels.clone()).collect();
        assert_eq!(labels, [vec![0, 1, 2, 3], vec![4, 5, 6, 7], vec![IGNORE, IGNORE, 8, 9]]);
        for length in 1..12 {
            let all: Vec<i32> =
                rolling(&document(10), 99, length).iter().flat_map(|w| w.labels.clone()).collect();
            assert_eq!(all.into_iter().filter(|l| *l != IGNORE).collect::<Vec<_>>(), document(10).tokens);
        }
        assert!(rolling(&document(0), 99, 4).is_empty());
    }

    #[test]
    fn unscored_tokens_are_context_only() {
        let scored = Some(vec![false, false, false, false, true, false]);
        let windows = rolling(&Document { scored, ..document(6) }, 99, 3);
        // The first window has nothing to score.
        assert_eq!(windows, [Sequence { tokens: vec![2, 3, 4], labels: vec![IGNORE, 4, IGNORE] }]);
    }

    #[test]
    fn the_beginning_of_a_long_context_is_cut() {
        let s = continuation(&[1, 2, 3], &[4, 5], 10).unwrap();
        assert_eq!((s.tokens, s.labels), (vec![1, 2, 3, 4], vec![IGNORE, IGNORE, 4, 5]));
        let s = continuation(&[1, 2, 3], &[4, 5], 3).unwrap();
        assert_eq!((s.tokens, s.labels), (vec![2, 3, 4], vec![IGNORE, 4, 5]));
        let s = continuation(&[1, 2, 3], &[4, 5], 2).unwrap();
        assert_eq!((s.tokens, s.labels), (vec![3, 4], vec![4, 5]));
        assert!(continuation(&[1], &[4, 5], 1).is_none() && continuation(&[], &[4], 9).is_none());
    }
}

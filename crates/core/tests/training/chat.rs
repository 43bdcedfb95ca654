//! Conversations in runs: losses on the assistant's turns only, packed or one to a row, cut as asked, resumed exactly.

use super::support::*;
use ferrotron_core::config::{Packing, Resolved, Truncation};
use ferrotron_core::data::{
    Batches, DatasetInfo, Documents, IGNORE, IndexedDataset, IndexedWriter, Packed, Row, RowOptions,
    TokenType, TokenizerInfo, source,
};
use ferrotron_core::events::Event;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

const SEQ: usize = 16;

/// A conversation: its tokens, and whether each has a loss.
type Conversation = Vec<(i64, bool)>;

/// Conversations of one to three questions and answers, 4 to 24 tokens long.
fn conversations(count: i64) -> Vec<Conversation> {
    let turn = |d: i64, t: i64, answer: bool| {
        let length = 2 + (d * 5 + t * 3 + i64::from(answer)) % 3;
        (0..length).map(move |i| (1 + (d * 7 + t * 5 + i * (2 + d % 5)) % 14, answer))
    };
    let one = |d: i64| (0..=d % 3).flat_map(|t| turn(d, t, false).chain(turn(d, t, true))).collect();
    (0..count).map(one).collect()
}

fn write_chat(prefix: &Path, conversations: &[Conversation]) {
    let mut writer = IndexedWriter::create(prefix, TokenType::for_vocab(256), true).unwrap();
    for conversation in conversations {
        for span in conversation.chunk_by(|a, b| a.1 == b.1) {
            writer.push(span.iter().map(|(token, _)| *token), i8::from(span[0].1)).unwrap();
        }
        writer.end_document().unwrap();
    }
    let (tokens, tokenizer) = (writer.tokens(), TokenizerInfo { vocab: 16, digest: None });
    let info = DatasetInfo {
        version: DatasetInfo::VERSION,
        tokenizer,
        eod: None,
        tokens,
        largest_id: 15,
        chat: true,
    };
    writer.finish_with(Some(&info)).unwrap();
}

fn with_chat(prefix: &Path, changes: &[&str]) -> Resolved {
    let path = format!("data.path=[{:?}]", prefix.display().to_string());
    recipe(&[&[path.as_str(), "data.split=[100, 0, 0]", "eval.every=0"], changes].concat())
}

/// A row, of which only some positions keep their labels.
struct PartOf<'a> {
    rows: &'a dyn Batches,
    row: u64,
    labels: Range<usize>,
    /// Attention reaches across the samples of the row.
    cross_talk: bool,
}

impl Batches for PartOf<'_> {
    fn seq(&self) -> usize {
        self.rows.seq()
    }
    fn samples(&self) -> u64 {
        1
    }
    fn resets(&self) -> bool {
        self.rows.resets() && !self.cross_talk
    }
    fn row(&self, _: u64, row: &mut Row) -> ferrotron_core::Result<()> {
        self.rows.row(self.row, row)?;
        let outside = |i: &usize| !self.labels.contains(i);
        (0..row.labels.len()).filter(outside).for_each(|i| row.labels[i] = IGNORE);
        Ok(())
    }
}

/// The samples of a row: where they are, their inputs and labels.
fn samples(data: &dyn Batches, n: u64) -> Vec<(Range<usize>, Vec<i32>, Vec<i32>)> {
    let mut row = Row::default();
    data.row(n, &mut row).unwrap();
    let ends = row.starts.iter().skip(1).copied().chain([row.tokens.len()]);
    let used = row.tokens.len() - row.padding;
    let ranges = row.starts.iter().zip(ends).map(|(s, e)| *s..e).filter(|r| r.start < used);
    ranges.map(|r| (r.clone(), row.tokens[r.clone()].to_vec(), row.labels[r].to_vec())).collect()
}

/// The loss of every sample by itself: in packed rows among other samples, and in a row of its own.
#[test]
fn each_sample_has_the_same_loss_packed_and_unpacked() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("chat");
    let conversations = conversations(40);
    write_chat(&prefix, &conversations);
    let common = ["train.steps=2", "train.micro_batch=1", "train.global_batch=1"];
    for (name, model) in [("dense", &[][..]), ("moe", &["moe.experts=4", "moe.topk=2"])] {
        let r = |packing: &str| with_chat(&prefix, &[&common[..], model, &[packing]].concat());
        let (packed, alone) = (r("data.packing=\"documents\""), r("data.packing=\"none\""));
        let [packed, alone] = [&packed, &alone].map(|r| (source::open(r).unwrap(), trainer(r)));
        let (rows, apart) = (packed.0.train.samples(), alone.0.train.samples());
        assert!(rows == 2 && apart == 2, "a blend of the run's length: {rows} {apart}");
        // All rows of the data, not only those of two steps.
        let all = |packing| {
            let options = RowOptions {
                seq: SEQ,
                vocab: 16,
                seed: Some(1234),
                truncation: Truncation::KeepStart,
                packing,
            };
            Packed::with(Box::new(Chats(conversations.clone())), options).unwrap().unwrap()
        };
        let (rows, singles) = (all(Packing::Documents), all(Packing::None));
        assert!(rows.samples() * 5 < singles.samples() * 4, "{} {}", rows.samples(), singles.samples());
        let (mut worst, mut unmasked, mut count) = (0.0f64, 0.0f64, 0);
        let mut used = vec![false; singles.samples() as usize];
        for n in 0..rows.samples() {
            for (range, tokens, labels) in samples(&rows, n) {
                let same = |m: &u64| {
                    let (_, t, l) = samples(&singles, *m).remove(0);
                    !used[*m as usize] && (&t, &l) == (&tokens, &labels)
                };
                let m = (0..singles.samples()).find(same).expect("a sample of no conversation");
                used[m as usize] = true;
                let loss = |rows, row, labels, cross_talk| {
                    packed.1.evaluate(&PartOf { rows, row, labels, cross_talk }, 1).unwrap()
                };
                let oracle = loss(&singles, m, 0..SEQ, false);
                worst = worst.max((loss(&rows, n, range.clone(), false) - oracle).abs());
                unmasked = unmasked.max((loss(&rows, n, range, true) - oracle).abs());
                count += 1;
            }
        }
        println!(
            "{name}: {count} samples, losses differ by at most {worst:.1e} (with cross-talk {unmasked:.1e})"
        );
        assert!(used.iter().all(|u| *u) && worst < 1e-5 && unmasked > 1e-3, "{name}: {worst} {unmasked}");
    }
}

/// Conversations in memory.
struct Chats(Vec<Conversation>);

impl Documents for Chats {
    fn count(&self) -> usize {
        self.0.len()
    }
    fn length(&self, document: usize) -> ferrotron_core::Result<usize> {
        Ok(self.0[document].len())
    }
    fn read(&self, document: usize, range: Range<usize>, out: &mut Vec<i64>) -> ferrotron_core::Result<()> {
        out.extend(self.0[document][range].iter().map(|(token, _)| *token));
        Ok(())
    }
    fn has_mask(&self) -> bool {
        true
    }
    fn loss(&self, document: usize, range: Range<usize>, out: &mut Vec<bool>) -> ferrotron_core::Result<()> {
        out.extend(self.0[document][range].iter().map(|(_, loss)| *loss));
        Ok(())
    }
    fn name(&self) -> String {
        "chats".into()
    }
}

#[test]
fn the_pair_gives_the_masks_that_were_written() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("chat");
    let conversations = conversations(30);
    write_chat(&prefix, &conversations);
    let data = IndexedDataset::open(&prefix).unwrap();
    let range = ferrotron_core::data::DocumentRange { data: data.into(), range: 0..30, chat: true };
    for (i, conversation) in conversations.iter().enumerate() {
        for part in [0..conversation.len(), 1..conversation.len(), 2..3] {
            let mut loss = Vec::new();
            range.loss(i, part.clone(), &mut loss).unwrap();
            assert_eq!(loss, conversation[part].iter().map(|(_, l)| *l).collect::<Vec<_>>());
        }
    }
}

#[test]
fn long_conversations_are_cut_as_asked() {
    // Three tokens of prompt, then answers; 20 inputs for rows of 16.
    let long: Conversation = (0..21).map(|i| (i % 15, i >= 3)).collect();
    let short: Conversation = (0..5).map(|i| (i, i == 4)).collect();
    let late: Conversation = (0..21).map(|i| (i % 15, i >= 19)).collect();
    let rows = |truncation| {
        let options = RowOptions { seq: SEQ, vocab: 16, seed: None, truncation, packing: Packing::None };
        let chats = Box::new(Chats(vec![long.clone(), short.clone(), late.clone()]));
        Packed::with(chats, options).map(|p| {
            let p = p.unwrap();
            let lengths: Vec<usize> = (0..p.samples()).map(|n| samples(&p, n)[0].1.len()).collect();
            let first: Vec<i32> = (0..p.samples()).map(|n| samples(&p, n)[0].1[0]).collect();
            let c = p.counts();
            (lengths, first, [c.samples, c.cut, c.dropped, c.without_loss, c.labels])
        })
    };
    assert_eq!(rows(Truncation::KeepStart).unwrap(), (vec![16, 4], vec![0, 0], [2, 2, 0, 1, 15]));
    assert_eq!(rows(Truncation::KeepEnd).unwrap(), (vec![16, 4, 16], vec![4, 0, 4], [3, 2, 0, 0, 19]));
    assert_eq!(rows(Truncation::Split).unwrap(), (vec![16, 4, 4, 4], vec![0, 1, 0, 1], [4, 2, 0, 1, 21]));
    assert_eq!(rows(Truncation::Drop).unwrap(), (vec![4], vec![0], [1, 0, 2, 0, 1]));
    let e = rows(Truncation::Refuse).unwrap_err().to_string();
    assert!(
        e.contains("21 tokens") && e.contains("data.seq_len = 16") && e.contains("data.truncation"),
        "{e}"
    );
}

#[test]
fn a_run_on_conversations_resumes_to_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("chat");
    write_chat(&prefix, &conversations(60));
    for packing in ["documents", "none", "padding_free"].map(|p| format!("data.packing={p:?}")) {
        let r = with_chat(&prefix, &[packing.as_str(), "train.steps=10", "train.global_batch=4"]);
        let open = || source::open(&r).unwrap().train;
        let (whole, stopped) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (_, events) = run(whole.path(), &r, 2, &*open(), None, None);
        assert!(losses(&events).iter().all(|l| l.is_finite() && *l > 0.0));
        let consumed = events.iter().filter_map(|e| match e {
            Event::Step(s) => Some(s.tokens),
            _ => None,
        });
        let consumed: Vec<u64> = [0].into_iter().chain(consumed).collect();
        let lengths: BTreeSet<u64> = consumed.windows(2).map(|w| w[1] - w[0]).collect();
        assert_eq!(
            lengths.len() > 3,
            packing.contains("padding_free"),
            "{packing}: steps of {lengths:?} tokens"
        );
        run(stopped.path(), &r, 1, &*open(), None, Some(4));
        run(stopped.path(), &r, 2, &*open(), None, None);
        assert!(newest(whole.path()) == newest(stopped.path()), "{packing}");
    }
}

#[test]
fn a_run_in_which_nothing_fits_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("chat");
    write_chat(&prefix, &[(0..40).map(|i| (i % 15, i >= 30)).collect()]);
    let e = refusal(source::open(&with_chat(&prefix, &["train.steps=3"])));
    assert!(e.contains("data.seq_len = 16") && e.contains("keep_end"), "{e}");
    let e = refusal(source::open(&with_chat(&prefix, &["train.steps=3", "data.truncation=\"refuse\""])));
    assert!(e.contains("40 tokens"), "{e}");
    let sources =
        source::open(&with_chat(&prefix, &["train.steps=3", "data.truncation=\"keep_end\""])).unwrap();
    assert!(sources.notes.iter().any(|n| n.contains("1 cut to data.seq_len")), "{:?}", sources.notes);
}

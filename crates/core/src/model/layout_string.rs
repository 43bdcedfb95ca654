//! Pipeline layouts as strings: `Et*3|(tt|)*29,m|L`.
//!
//! `E` embedding, `t` decoder layer, `m` multi-token-prediction layer, `L` loss, `|` between stages, `*n` repeats the
//! letter or the parentheses before it, commas are ignored.

use super::layer_split::{LayerPlacement, Stage};
use crate::{Error, Result};

/// More letters than any model has layers and stages.
const MOST: usize = 1 << 16;

impl LayerPlacement {
    /// Reads a layout string for `pp` ranks. The number of stages gives the chunks per rank; `layers` is the model's
    /// number of decoder layers where it is known.
    pub fn parse(text: &str, pp: usize, layers: Option<usize>) -> Result<LayerPlacement> {
        let refuse = |what: String| Error::Invalid(format!("the layout {text:?} {what}"));
        let letters = expand(text).map_err(refuse)?;
        let mut stages = Vec::new();
        let (mut decoders, mut mtps) = (0, 0);
        for part in letters.split(|c| *c == '|') {
            stages.push(stage(part, stages.len(), &mut decoders, &mut mtps).map_err(refuse)?);
        }
        let placement = LayerPlacement { pp, stages };
        placement.check(layers).map_err(refuse)?;
        Ok(placement)
    }

    fn check(&self, layers: Option<usize>) -> Result<(), String> {
        let (n, pp) = (self.stages.len(), self.pp);
        if pp == 0 || n % pp != 0 {
            let below = n.checked_div(pp).unwrap_or(0) * pp;
            let near = if below == 0 { format!("{pp}") } else { format!("{below} or {}", below + pp) };
            return Err(format!("has {n} stages, which {pp} pipeline ranks cannot share; write {near}"));
        }
        let holds =
            |what: fn(&Stage) -> bool| -> Vec<usize> { (0..n).filter(|&k| what(&self.stages[k])).collect() };
        if holds(|s| s.embedding) != [0] {
            return Err("must have E once, at its start".into());
        }
        if holds(|s| s.loss) != [n - 1] {
            return Err("must have L once, at its end".into());
        }
        let mtp = holds(|s| !s.mtp.is_empty());
        if mtp.len() > 1 || mtp.iter().any(|k| k + pp < n) {
            return Err("must have all m on one stage of the last chunk".into());
        }
        if let Some(&at) = mtp.first()
            && self.stages[at + 1..].iter().any(|s| !s.layers.is_empty())
        {
            return Err("has t after m; prediction layers follow all decoder layers".into());
        }
        match layers {
            Some(want) if want != self.layers() => {
                Err(format!("places {} layers of a model with {want}; write {want} t", self.layers()))
            }
            _ => Ok(()),
        }
    }
}

/// One stage's letters, which come in the order E, t, m, L.
fn stage(letters: &[char], at: usize, decoders: &mut usize, mtps: &mut usize) -> Result<Stage, String> {
    let mut stage = Stage { layers: *decoders..*decoders, mtp: *mtps..*mtps, ..Stage::default() };
    let mut least = 0;
    for letter in letters {
        let (rank, twice) = match letter {
            'E' => (0, std::mem::replace(&mut stage.embedding, true)),
            't' => {
                stage.layers.end += 1;
                (1, false)
            }
            'm' => {
                stage.mtp.end += 1;
                (2, false)
            }
            _ => (3, std::mem::replace(&mut stage.loss, true)),
        };
        if twice || rank < least {
            return Err(format!(
                "has a {letter} out of place on stage {at}; a stage is E, then t, then m, then L"
            ));
        }
        least = rank;
    }
    (*decoders, *mtps) = (stage.layers.end, stage.mtp.end);
    Ok(stage)
}

/// The letters and bars with all repeats written out.
fn expand(text: &str) -> Result<Vec<char>, String> {
    let mut open: Vec<Vec<char>> = vec![Vec::new()];
    // What a `*n` would repeat: that many letters at the end of the innermost list.
    let mut unit = 0;
    let mut rest = text.chars().filter(|c| !c.is_whitespace()).peekable();
    let top = |open: &mut Vec<Vec<char>>| open.pop().unwrap_or_default();
    while let Some(c) = rest.next() {
        match c {
            'E' | 't' | 'm' | 'L' | '|' => {
                let mut list = top(&mut open);
                list.push(c);
                open.push(list);
                unit = 1;
            }
            ',' => unit = 0,
            '(' => {
                open.push(Vec::new());
                unit = 0;
            }
            ')' => {
                let inner = top(&mut open);
                let Some(list) = open.last_mut() else {
                    return Err("closes a parenthesis that is not open".into());
                };
                unit = inner.len();
                list.extend(inner);
            }
            '*' => {
                let mut digits = String::new();
                while let Some(d) = rest.next_if(char::is_ascii_digit) {
                    digits.push(d);
                }
                let times = digits.parse::<usize>().map_err(|_| "has a * without a count after it")?;
                if unit == 0 {
                    return Err("has a * with nothing to repeat before it".into());
                }
                let mut list = top(&mut open);
                if unit.checked_mul(times).is_none_or(|n| n + list.len() > MOST) {
                    return Err(format!("is longer than {MOST} letters; shorten it"));
                }
                let piece = list[list.len() - unit..].to_vec();
                list.truncate(list.len() - unit);
                (0..times).for_each(|_| list.extend(&piece));
                open.push(list);
                unit = 0;
            }
            other => return Err(format!("has {other:?}, which is none of E t m L | ( ) * and a comma")),
        }
    }
    match open.len() {
        1 => Ok(top(&mut open)),
        _ => Err("opens a parenthesis that is not closed".into()),
    }
}

impl std::fmt::Display for LayerPlacement {
    /// The layout string, without repeats of stages.
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        for (k, stage) in self.stages.iter().enumerate() {
            let run = |letter: &str, n: usize| if n > 3 { format!("{letter}*{n}") } else { letter.repeat(n) };
            let bar = if k == 0 { "" } else { "|" };
            let embedding = if stage.embedding { "E" } else { "" };
            let loss = if stage.loss { "L" } else { "" };
            let (layers, mtp) = (run("t", stage.layers.len()), run("m", stage.mtp.len()));
            write!(f, "{bar}{embedding}{layers}{mtp}{loss}")?;
        }
        Ok(())
    }
}

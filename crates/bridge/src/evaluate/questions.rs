//! Multiple-choice questions as JSON lines, and how often the likeliest choice is the right one.
//!
//! Prompts, tokens, cuts and the three accuracies are those of lm-evaluation-harness, so that its results can be compared.

use super::SequenceLoss;
use super::windows::continuation;
use crate::error::{Error, Result};
use crate::model_source::TextIo;
use ferrotron_core::data::build::{no_object, read_line};
use ferrotron_core::data::input::InputReader;
use ferrotron_core::model::Sequence;
use serde_json::{Map, Value};
use std::path::Path;

/// The prompt of a record with a `question`, where no other is given.
pub const PROMPT: &str = "Question: {question}\nAnswer:";
/// Between a context and its continuation.
const DELIMITER: &str = " ";

/// A question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// What the choices continue.
    pub context: String,
    /// The choices.
    pub choices: Vec<String>,
    /// The right one.
    pub answer: usize,
}

/// Losses of a question's choices.
#[derive(Clone, Debug, PartialEq)]
pub struct QuestionScores {
    /// `ln p` of each choice.
    pub scores: Vec<f64>,
    /// The right choice.
    pub answer: usize,
    /// The likeliest choice.
    pub predicted: usize,
    /// The likeliest by character.
    pub predicted_norm: usize,
    /// The likeliest by byte.
    pub predicted_bytes: usize,
}

/// Shares of questions answered right, with their standard errors.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Accuracy {
    /// Questions.
    pub questions: u64,
    /// The right choice has the highest `ln p`.
    pub acc: f64,
    /// Its standard error.
    pub acc_stderr: Option<f64>,
    /// The right choice has the highest `ln p` per character.
    pub acc_norm: f64,
    /// Its standard error.
    pub acc_norm_stderr: Option<f64>,
    /// The right choice has the highest `ln p` per byte.
    pub acc_bytes: f64,
    /// Its standard error.
    pub acc_bytes_stderr: Option<f64>,
}

/// Reads at most `limit` questions of a file; `prompt` has `{question}` where the question goes.
pub fn questions(path: &Path, prompt: &str, limit: Option<usize>) -> Result<Vec<Question>> {
    let mut reader = InputReader::open(path)?;
    let (mut out, mut number) = (Vec::new(), 0);
    while out.len() < limit.unwrap_or(usize::MAX)
        && let Some(line) = read_line(&mut reader, path, number + 1)?
    {
        number += 1;
        if !line.trim().is_empty() {
            let at_line = |what: String| Error::damaged(path, format!("line {number}: {what}"));
            out.push(parse(&line, prompt).map_err(at_line)?);
        }
    }
    if out.is_empty() {
        return Err(Error::damaged(path, "holds no question"));
    }
    Ok(out)
}

/// Reads a record in one of three forms: `question`, `choices`, `answer` (a number from 0, a letter, or the choice itself);
/// ARC's `question`, `choices` of `text` and `label`, `answerKey`; HellaSwag's `ctx` or `ctx_a` and `ctx_b`, `endings`,
/// `label`. `context` in place of `question` is continued as it is.
fn parse(line: &str, prompt: &str) -> Result<Question, String> {
    let record: Map<String, Value> = serde_json::from_str(line).map_err(|e| no_object(&e))?;
    let text = |key: &str| record.get(key).and_then(Value::as_str);
    if let Some(endings) = record.get("endings") {
        let choices = strings(endings, "endings")?.iter().map(|s| wikihow(s)).collect();
        let context = hellaswag_context(&text).ok_or("has \"endings\", but no \"ctx\"")?;
        let answer = record.get("label").ok_or("has \"endings\", but no \"label\"")?;
        return Question { context, choices, answer: 0 }.with_answer(answer, None);
    }
    let context = match (text("question"), text("context")) {
        (Some(question), _) => prompt.replace("{question}", question),
        (None, Some(context)) => context.to_string(),
        (None, None) => return Err(needs(&record)),
    };
    let (choices, labels) = match record.get("choices") {
        Some(Value::Object(both)) => {
            let list = |key: &str| {
                let list = both.get(key).ok_or(format!("\"choices\" has no \"{key}\""))?;
                strings(list, key)
            };
            (list("text")?, Some(list("label")?))
        }
        Some(list) => (strings(list, "choices")?, None),
        None => return Err(needs(&record)),
    };
    let answer = ["answer", "answerKey", "label", "gold"].iter().find_map(|key| record.get(*key));
    let answer = answer.ok_or_else(|| needs(&record))?;
    Question { context, choices, answer: 0 }.with_answer(answer, labels.as_deref())
}

fn needs(record: &Map<String, Value>) -> String {
    let keys: Vec<&str> = record.keys().map(String::as_str).take(8).collect();
    format!(
        "is no question: it needs \"question\", \"choices\" and \"answer\", or \"ctx\", \"endings\" and \"label\", and has {keys:?}"
    )
}

fn strings(list: &Value, key: &str) -> Result<Vec<String>, String> {
    let wrong = || format!("\"{key}\" is to be a list of strings");
    let list = list.as_array().ok_or_else(wrong)?;
    list.iter().map(|v| v.as_str().map(str::to_string).ok_or_else(wrong)).collect()
}

impl Question {
    /// Sets the answer: a number from 0, also as text; one of `labels` or a letter; or the text of a choice.
    fn with_answer(mut self, answer: &Value, labels: Option<&[String]>) -> Result<Question, String> {
        let n = self.choices.len();
        if n < 2 || self.choices.iter().any(String::is_empty) {
            return Err("needs two choices or more, none of them empty".into());
        }
        let by_text = |s: &str| {
            let letter = || match s.as_bytes() {
                [c @ b'A'..=b'Z'] => Some(usize::from(c - b'A')),
                _ => None,
            };
            let label = labels.and_then(|l| l.iter().position(|label| label == s));
            let choice = || self.choices.iter().position(|c| c == s);
            label.or_else(choice).or_else(|| s.parse().ok()).or_else(letter)
        };
        let found = match answer {
            Value::String(s) => by_text(s.trim()),
            other => other.as_u64().and_then(|n| usize::try_from(n).ok()),
        };
        self.answer = found
            .filter(|i| *i < n)
            .ok_or_else(|| format!("the answer {answer} is none of its {n} choices"))?;
        Ok(self)
    }
}

/// The context of a HellaSwag record: its activity, the first part, and the beginning of the second.
fn hellaswag_context<'a>(text: &dyn Fn(&str) -> Option<&'a str>) -> Option<String> {
    let context = match (text("ctx_a"), text("ctx_b")) {
        (Some(a), Some(b)) => format!("{a} {}", capitalized(b)),
        _ => text("ctx")?.to_string(),
    };
    Some(match text("activity_label") {
        Some(activity) => wikihow(&format!("{activity}: {context}")),
        None => wikihow(&context),
    })
}

/// The first character in upper case, the others in lower case.
fn capitalized(s: &str) -> String {
    let mut chars = s.chars();
    match chars.next() {
        Some(first) => first.to_uppercase().chain(chars.flat_map(char::to_lowercase)).collect(),
        None => String::new(),
    }
}

/// Text of HellaSwag without the marks of its WikiHow part: titles, and anything in brackets.
fn wikihow(s: &str) -> String {
    let s = s.trim().replace(" [title]", ". ");
    let mut out = String::with_capacity(s.len());
    let mut rest = s.as_str();
    while let Some(open) = rest.find('[') {
        let Some(close) = rest[open..].find(']') else { break };
        out.push_str(&rest[..open]);
        rest = &rest[open + close + 1..];
    }
    out.push_str(rest);
    out.replace("  ", " ")
}

/// The choices of a question as sequences of at most `length` inputs.
pub fn requests(question: &Question, text: &TextIo, length: usize) -> Result<Vec<Sequence>> {
    let ids = |ids: Vec<u32>| ids.into_iter().map(|id| id as i32).collect::<Vec<i32>>();
    question
        .choices
        .iter()
        .map(|choice| {
            let ending = format!("{DELIMITER}{choice}");
            let context = question.context.trim_end();
            let (context, ending) = if context.is_empty() {
                let start = text.start.into_iter().collect::<Vec<i32>>();
                let ending = format!("{}{ending}", question.context);
                (start, ids(text.tokenizer.encode(&ending)?))
            } else {
                // Tokens of the whole, of which those after the context's own are scored. Spaces at the end of the
                // context belong to the choice: tokens begin with them.
                let whole = ids(text.tokenizer.encode_framed(&format!("{}{ending}", question.context))?);
                let before = ids(text.tokenizer.encode_framed(context)?);
                let at = before.len().min(whole.len());
                (before, whole[at..].to_vec())
            };
            continuation(&context, &ending, length).ok_or_else(|| {
                let shown: String = choice.chars().take(60).collect();
                let what = format!(
                    "the choice {shown:?} has {} tokens, which do not fit in {length}; raise --seq-len",
                    ending.len()
                );
                Error::config("--tasks", what)
            })
        })
        .collect()
}

impl QuestionScores {
    /// From the losses of its choices.
    pub fn new(question: &Question, losses: &[SequenceLoss]) -> QuestionScores {
        let scores: Vec<f64> = losses.iter().map(|l| -l.sum).collect();
        let by = |length: &dyn Fn(&str) -> usize| {
            let each = question.choices.iter().map(|c| length(c) as f64);
            first_best(&scores.iter().zip(each).map(|(s, n)| s / n).collect::<Vec<_>>())
        };
        QuestionScores {
            predicted: first_best(&scores),
            predicted_norm: by(&|c| c.chars().count()),
            predicted_bytes: by(&|c| c.len()),
            answer: question.answer,
            scores,
        }
    }
}

fn first_best(scores: &[f64]) -> usize {
    (0..scores.len()).fold(0, |best, i| if scores[i] > scores[best] { i } else { best })
}

/// Shares of right answers.
pub fn accuracy(scores: &[QuestionScores]) -> Accuracy {
    let share = |predicted: &dyn Fn(&QuestionScores) -> usize| {
        let right = scores.iter().filter(|s| predicted(s) == s.answer).count() as f64;
        let n = scores.len() as f64;
        let mean = right / n.max(1.0);
        // Of the mean, with the variance of a sample: n − 1.
        let variance = (right * (1.0 - mean).powi(2) + (n - right) * mean.powi(2)) / (n - 1.0);
        (mean, (n > 1.0).then(|| (variance / n).sqrt()))
    };
    let (acc, acc_stderr) = share(&|s| s.predicted);
    let (acc_norm, acc_norm_stderr) = share(&|s| s.predicted_norm);
    let (acc_bytes, acc_bytes_stderr) = share(&|s| s.predicted_bytes);
    let questions = scores.len() as u64;
    Accuracy { questions, acc, acc_stderr, acc_norm, acc_norm_stderr, acc_bytes, acc_bytes_stderr }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_three_forms_are_read() {
        let plain = parse(r#"{"question":"2+2?","choices":["3","4"],"answer":1}"#, PROMPT).unwrap();
        assert_eq!((plain.context.as_str(), plain.answer), ("Question: 2+2?\nAnswer:", 1));
        // The text of a choice comes before its number: "3" is the first choice.
        assert_eq!(parse(r#"{"question":"q","choices":["3","1"],"answer":"1"}"#, PROMPT).unwrap().answer, 1);
        assert_eq!(parse(r#"{"context":"c","choices":["a","b"],"answer":"B"}"#, PROMPT).unwrap().answer, 1);
        let arc = r#"{"id":"x","question":"q","choices":{"text":["a","b","c"],"label":["1","2","3"]},"answerKey":"3"}"#;
        assert_eq!(
            parse(arc, "{question}").unwrap(),
            Question { context: "q".into(), choices: ["a", "b", "c"].map(String::from).to_vec(), answer: 2 }
        );
        let swag = r#"{"activity_label":"Roof","ctx_a":"A man [title] works.","ctx_b":"he IS","endings":["ok [step] now","no"],"label":"0"}"#;
        let swag = parse(swag, PROMPT).unwrap();
        assert_eq!(
            (swag.context.as_str(), swag.choices[0].as_str()),
            ("Roof: A man. works. He is", "ok now")
        );
        for bad in [
            "[]",
            "{}",
            r#"{"question":"q","choices":["a"],"answer":0}"#,
            r#"{"question":"q","choices":["a","b"],"answer":2}"#,
            r#"{"question":"q","choices":["a","b"],"answer":"x"}"#,
            r#"{"question":"q","choices":[1,2],"answer":0}"#,
        ] {
            assert!(parse(bad, PROMPT).is_err(), "{bad}");
        }
    }

    #[test]
    fn longer_choices_win_by_length_only() {
        let question =
            Question { context: "c".into(), choices: vec!["aa".into(), "ééé".into()], answer: 1 };
        let losses = [2.0, 2.5].map(|sum| SequenceLoss { sum, tokens: 1 });
        let s = QuestionScores::new(&question, &losses);
        assert_eq!((s.predicted, s.predicted_norm, s.predicted_bytes), (0, 1, 1));
        let a = accuracy(&[s.clone(), s.clone(), QuestionScores { answer: 0, ..s }]);
        assert_eq!((a.acc, a.acc_norm), (1.0 / 3.0, 2.0 / 3.0));
        // 0, 0, 1: variance 1/3, over 3 questions.
        assert!((a.acc_stderr.unwrap() - (1.0f64 / 9.0).sqrt()).abs() < 1e-12);
        assert!(accuracy(&[]).acc_stderr.is_none());
    }
}

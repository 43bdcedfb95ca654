//! The numbers of a run's step events as columns, one value per step.

use super::Step;

/// Most columns of a run; further metrics are left out. A log with more is damaged or hostile.
const MAX_COLUMNS: usize = 4096;

/// Numbers of steps in the order of the log: `step` rises strictly.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepColumns {
    /// The step's number.
    pub step: Vec<u64>,
    /// When its event was written, in seconds since 1970.
    pub time: Vec<f64>,
    /// Metrics by their name in the event, nested ones as `losses/mtp_1 loss`; each as long as `step`, NaN where a step has
    /// no number.
    columns: Vec<(String, Vec<f64>)>,
    /// Where the last value went: metrics of a log keep their order, so that the next is usually one further.
    cursor: usize,
    /// Columns before the row that was begun.
    known: usize,
    /// Values put into the row that was begun.
    filled: usize,
}

impl StepColumns {
    /// Number of steps.
    pub fn len(&self) -> usize {
        self.step.len()
    }

    /// True without steps.
    pub fn is_empty(&self) -> bool {
        self.step.is_empty()
    }

    /// Values of a metric; empty if no step has it.
    pub fn column(&self, name: &str) -> &[f64] {
        self.columns.iter().find(|(n, _)| n == name).map_or(&[], |(_, values)| values)
    }

    /// The last value of a metric that is a number.
    pub fn last(&self, name: &str) -> Option<f64> {
        self.column(name).iter().rev().copied().find(|x| x.is_finite())
    }

    /// Names of all metrics, in the order of their first appearance.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.columns.iter().map(|(name, _)| name.as_str())
    }

    /// Begins the row of a step.
    pub(super) fn begin_row(&mut self) {
        (self.cursor, self.known, self.filled) = (0, self.columns.len(), 0);
    }

    /// The value of a metric in the row that was begun; `group` is the name of the object it is in, or empty.
    pub(super) fn put(&mut self, group: &str, name: &str, value: f64) {
        let is = |column: &str| match group {
            "" => column == name,
            _ => {
                column.len() == group.len() + 1 + name.len()
                    && column.starts_with(group)
                    && column.ends_with(name)
                    && column.as_bytes()[group.len()] == b'/'
            }
        };
        let expected = self.columns.get(self.cursor).is_some_and(|(column, _)| is(column));
        let found = if expected { Some(self.cursor) } else { self.columns.iter().position(|(c, _)| is(c)) };
        let at = found.unwrap_or(self.columns.len());
        if at == self.columns.len() {
            if at == MAX_COLUMNS {
                return;
            }
            let name = if group.is_empty() { name.to_string() } else { format!("{group}/{name}") };
            self.columns.push((name, vec![f64::NAN; self.step.len()]));
        }
        let (rows, values) = (self.step.len(), &mut self.columns[at].1);
        match values.get_mut(rows) {
            // A key that appears twice in an object has its last value.
            Some(twice) => *twice = value,
            None => {
                values.push(value);
                self.filled += 1;
            }
        }
        self.cursor = at + 1;
    }

    /// Ends the row: it is that of `step`.
    pub(super) fn end_row(&mut self, step: u64, time: f64) {
        self.step.push(step);
        self.time.push(time);
        if self.filled < self.columns.len() {
            self.pad();
        }
    }

    /// Drops the row that was begun.
    pub(super) fn drop_row(&mut self) {
        let rows = self.step.len();
        self.columns.truncate(self.known);
        self.columns.iter_mut().for_each(|(_, values)| values.truncate(rows));
    }

    /// Appends the row of a parsed step, as the scanner of lines does.
    pub(super) fn push(&mut self, s: &Step, time: f64) {
        self.begin_row();
        let numbers = [
            ("loss", s.loss),
            ("tokens", s.tokens as f64),
            ("lr", s.lr),
            ("grad_norm", s.grad_norm),
            ("batch", s.batch as f64),
            ("seconds", s.seconds),
            ("tokens_per_s", s.tokens_per_s),
            ("tflops", s.tflops),
            ("memory", s.memory as f64),
            ("reserved", s.reserved as f64),
        ];
        numbers.into_iter().for_each(|(name, x)| self.put("", name, x));
        let optional =
            [("epoch", s.epoch), ("loss_scale", s.loss_scale), ("num_zeros", s.num_zeros.map(|n| n as f64))];
        optional.into_iter().for_each(|(name, x)| x.into_iter().for_each(|x| self.put("", name, x)));
        s.memory_peaks.iter().for_each(|(name, x)| self.put("memory_peaks", name, *x as f64));
        s.losses.iter().for_each(|(name, x)| self.put("losses", name, *x));
        for (name, value) in &s.more {
            if value.is_number() || value.is_null() {
                self.put("", name, value.as_f64().unwrap_or(f64::NAN));
            }
        }
        self.end_row(s.step, time);
    }

    /// Appends rows of later steps.
    pub(super) fn append(&mut self, more: StepColumns) {
        if self.is_empty() && self.columns.is_empty() {
            *self = more;
            return;
        }
        let rows = self.step.len();
        self.step.extend(more.step);
        self.time.extend(more.time);
        for (i, (name, values)) in more.columns.into_iter().enumerate() {
            let same = self.columns.get(i).is_some_and(|(n, _)| *n == name);
            let at = if same { Some(i) } else { self.columns.iter().position(|(n, _)| *n == name) };
            match at {
                Some(at) => self.columns[at].1.extend(values),
                None if self.columns.len() == MAX_COLUMNS => {}
                None => {
                    let mut padded = vec![f64::NAN; rows];
                    padded.extend(values);
                    self.columns.push((name, padded));
                }
            }
        }
        self.pad();
    }

    /// Takes the last row away.
    pub(super) fn split_last(&mut self) -> StepColumns {
        let (step, time) = (self.step.pop(), self.time.pop());
        let columns =
            self.columns.iter_mut().map(|(name, values)| (name.clone(), values.pop().into_iter().collect()));
        StepColumns {
            step: step.into_iter().collect(),
            time: time.into_iter().collect(),
            columns: columns.collect(),
            ..StepColumns::default()
        }
    }

    /// Drops steps from `step` on: they are done again.
    pub(super) fn truncate_from(&mut self, step: u64) {
        let keep = self.step.partition_point(|s| *s < step);
        self.step.truncate(keep);
        self.time.truncate(keep);
        self.columns.iter_mut().for_each(|(_, values)| values.truncate(keep));
    }

    fn pad(&mut self) {
        let rows = self.step.len();
        self.columns.iter_mut().for_each(|(_, values)| values.resize(rows, f64::NAN));
    }
}

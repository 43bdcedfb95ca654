//! Where the time of traced steps goes, rank by rank.

use super::overlap::{common, length, union};
use super::{Activity, ActivityKind, OFFLOAD, Trace};
use serde::Serialize;

/// Name of the region of a training step.
pub const STEP: &str = "step";

/// Seconds of the traced steps of a rank. The parts add up to the whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct RankTime {
    /// The rank.
    pub rank: usize,
    /// Number of steps.
    pub steps: usize,
    /// From the start to the end of each step.
    pub total: f64,
    /// A kernel of the step ran.
    pub compute: f64,
    /// Communication that no kernel of the step hid.
    pub exposed_communication: f64,
    /// Copies to and from host memory that neither hid.
    pub exposed_copies: f64,
    /// Nothing ran: the device waited for the host.
    pub idle: f64,
}

impl Trace {
    /// Start and end of each step of a rank, in nanoseconds since the start of the trace.
    pub fn steps(&self, rank: usize) -> Vec<(u64, u64)> {
        let is_step = |a: &&Activity| a.rank == rank && a.kind == ActivityKind::Region && a.name == STEP;
        let mut steps: Vec<_> = self.activities.iter().filter(is_step).map(|a| (a.start, a.end)).collect();
        steps.sort_unstable();
        steps
    }

    /// Where the time of the traced steps goes, for every rank.
    pub fn breakdown(&self) -> Vec<RankTime> {
        self.ranks().into_iter().map(|rank| self.rank_time(rank)).collect()
    }

    fn rank_time(&self, rank: usize) -> RankTime {
        let steps = self.steps(rank);
        let window = union(steps.clone());
        // Seconds of the steps in which some activity that `which` selects ran.
        let busy = |which: &dyn Fn(&Activity) -> bool| {
            let of_rank = self.activities.iter().filter(|a| a.rank == rank && which(a));
            common(&union(of_rank.map(|a| (a.start, a.end)).collect()), &window)
        };
        let computes = |a: &Activity| a.is_compute();
        let communicates = |a: &Activity| computes(a) || a.is_communication();
        let copies = |a: &Activity| a.kind == ActivityKind::Kernel && OFFLOAD.contains(&&*a.stream_name);
        let compute = busy(&computes);
        let with_communication = busy(&communicates);
        let with_copies = busy(&|a| communicates(a) || copies(a));
        let total = length(&window);
        let seconds = |ns: u64| ns as f64 / 1e9;
        RankTime {
            rank,
            steps: steps.len(),
            total: seconds(total),
            compute: seconds(compute),
            exposed_communication: seconds(with_communication - compute),
            exposed_copies: seconds(with_copies - with_communication),
            idle: seconds(total - with_copies),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::COMMUNICATION;
    use super::*;

    fn activity(rank: usize, name: &str, stream: &str, [start, end]: [u64; 2]) -> Activity {
        let kind = match (name, stream) {
            (STEP, _) => ActivityKind::Region,
            (_, COMMUNICATION) => ActivityKind::Collective,
            _ => ActivityKind::Kernel,
        };
        let (start, end) = (start * 1_000_000_000, end * 1_000_000_000);
        let (name, stream_name, detail) = (name.into(), stream.into(), String::new());
        Activity { name, detail, kind, in_collective: false, rank, stream: 0, stream_name, start, end }
    }

    #[test]
    fn every_second_of_a_step_is_in_one_part() {
        let activities = vec![
            activity(0, STEP, "compute", [0, 20]),
            activity(0, STEP, "compute", [30, 40]),
            activity(0, "gemm", "compute", [1, 6]),
            activity(0, "all-reduce", COMMUNICATION, [4, 10]),
            activity(0, "copy", "offload", [9, 13]),
            // Partly, and wholly, outside of the steps.
            activity(0, "gemm", "compute", [38, 50]),
            activity(0, "gemm", "compute", [21, 25]),
            activity(1, STEP, "compute", [0, 20]),
            activity(1, "gemm", "compute", [0, 20]),
        ];
        let trace = Trace { activities, ..Trace::default() };
        let first = RankTime {
            rank: 0,
            steps: 2,
            total: 30.0,
            compute: 7.0,
            exposed_communication: 4.0,
            exposed_copies: 3.0,
            idle: 16.0,
        };
        let second = RankTime { rank: 1, steps: 1, total: 20.0, compute: 20.0, ..RankTime::default() };
        assert_eq!(trace.breakdown(), [first, second]);
    }
}

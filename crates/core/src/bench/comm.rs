//! Benchmark of the collectives, from small to large messages.

use crate::Result;
use ferrotron_comm::{Communicator, HostCost, OpKind, ReduceOp};
use ferrotron_engine::Rank;
use ferrotron_tensor::{Category, DType, Tensor};
use serde::Serialize;
use std::time::{Duration, Instant};

/// The benchmarked operations. Send-receive goes round a ring: every rank sends to the next and receives from the
/// previous.
pub const COLLECTIVES: [OpKind; 6] = [
    OpKind::AllReduce,
    OpKind::AllGather,
    OpKind::ReduceScatter,
    OpKind::AllToAll,
    OpKind::Broadcast,
    OpKind::SendRecv,
];

/// Definition of [`CommBench::algorithm`] and [`CommBench::bus`].
pub const FORMULA: &str = "algorithm GB/s = bytes / time, bytes of the whole tensor (of one rank's for all-reduce, \
    broadcast and message); bus GB/s = algorithm x 2(n-1)/n for all-reduce, x (n-1)/n for all-gather, reduce-scatter and \
    all-to-all, x 1 for broadcast and message";

/// One collective at one size.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CommBench {
    /// Its name.
    pub collective: &'static str,
    /// Element type.
    #[serde(serialize_with = "dtype_name")]
    pub dtype: DType,
    /// Bytes of the full tensor.
    pub bytes: usize,
    /// Seconds of one call: the median over rounds, of the slowest rank.
    pub seconds: f64,
    /// Seconds that the host takes to issue one call: of the slowest rank, its least of several rounds, each with an empty
    /// queue before it. Where the host does the work (threads, MPI) that is the call itself.
    pub host_seconds: f64,
    /// Those of them outside NCCL: what this program adds. None where the host itself moves the data.
    pub own_seconds: Option<f64>,
    /// Control frames that the busiest rank sent per call.
    pub frames: f64,
    /// Algorithm bandwidth, `bytes / seconds`, in GB/s.
    pub algorithm: f64,
    /// Bus bandwidth in GB/s: what the slowest link carries if the algorithm is a ring; see [`FORMULA`].
    pub bus: f64,
}

fn dtype_name<S: serde::Serializer>(dtype: &DType, s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(dtype)
}

/// 1 KiB, 4 KiB, … up to `largest` bytes.
pub fn sizes(largest: usize) -> Vec<usize> {
    (5..).map(|i| 1usize << (2 * i)).take_while(|b| *b <= largest.max(1024)).collect()
}

/// Measures one collective over all ranks, which call it together, for about `seconds`. Returns the same result on
/// every rank.
pub fn comm(rank: &Rank, kind: OpKind, dtype: DType, bytes: usize, seconds: f64) -> Result<CommBench> {
    const ROUNDS: usize = 5;
    /// Calls that fit into the launch queue with room to spare.
    const MAX_ISSUED: usize = 50;
    let all = rank.world.all();
    let n = all.size();
    let bench = CollectiveBench::new(rank, &all, kind, dtype, bytes)?;
    // The first call sets up connections, the second estimates how many calls make a round.
    bench.call()?;
    let one = max_over_ranks(&all, bench.time(1)?.seconds)?;
    let calls = ((seconds / ROUNDS as f64 / one.max(1e-9)) as usize).clamp(1, 10_000);
    let mut rounds = Vec::with_capacity(ROUNDS);
    let (mut host_seconds, mut own_seconds, mut frames) = (f64::INFINITY, f64::INFINITY, 0.0);
    let mut in_library = false;
    for _ in 0..ROUNDS {
        let round = bench.time(calls)?;
        rounds.push(max_over_ranks(&all, round.seconds / calls as f64)?);
        frames += max_over_ranks(&all, round.cost.frames as f64 / (ROUNDS * calls) as f64)?;
        let issued = calls.min(MAX_ISSUED);
        let Round { host, cost, .. } = bench.time(issued)?;
        let own = (host - cost.library.as_secs_f64()).max(0.0);
        (host_seconds, own_seconds) =
            (host_seconds.min(host / issued as f64), own_seconds.min(own / issued as f64));
        in_library |= cost.library > Duration::ZERO;
    }
    // Every rank's least first: a rank that the system interrupts in one round must not count in all of them.
    let host_seconds = max_over_ranks(&all, host_seconds)?;
    let own_seconds = max_over_ranks(&all, own_seconds)?;
    let own_seconds = in_library.then_some(own_seconds);
    rounds.sort_by(f64::total_cmp);
    let (seconds, share) = (rounds[ROUNDS / 2], (n as f64 - 1.0) / n as f64);
    let factor = match kind {
        OpKind::AllReduce => 2.0 * share,
        OpKind::AllGather | OpKind::ReduceScatter | OpKind::AllToAll => share,
        _ => 1.0,
    };
    let bytes = bench.whole.bytes();
    let algorithm = bytes as f64 / seconds / 1e9;
    let (collective, bus) = (kind.name(), algorithm * factor);
    Ok(CommBench { collective, dtype, bytes, seconds, host_seconds, own_seconds, frames, algorithm, bus })
}

/// The largest value measured on any rank.
pub fn max_over_ranks(all: &Communicator, mine: f64) -> Result<f64> {
    let times = all.all_gather_bytes(&mine.to_le_bytes(), "measured time")?;
    let number = |b: &Vec<u8>| b.as_slice().try_into().map_or(f64::NAN, f64::from_le_bytes);
    Ok(times.iter().map(number).fold(0.0, f64::max))
}

struct CollectiveBench<'a> {
    rank: &'a Rank,
    all: &'a Communicator,
    kind: OpKind,
    /// `[n · count]`
    whole: Tensor,
    /// `[count]`, or the full length for collectives whose input and output have one size.
    other: Tensor,
}

impl<'a> CollectiveBench<'a> {
    fn new(
        rank: &'a Rank,
        all: &'a Communicator,
        kind: OpKind,
        dtype: DType,
        bytes: usize,
    ) -> Result<CollectiveBench<'a>> {
        let n = all.size();
        let count = (bytes / dtype.size() / n).max(1);
        let part = matches!(kind, OpKind::AllGather | OpKind::ReduceScatter);
        let zeros = |len: usize| rank.compute.zeros(&[len], dtype, Category::Communication);
        let (whole, other) = (zeros(n * count)?, zeros(if part { count } else { n * count })?);
        Ok(CollectiveBench { rank, all, kind, whole, other })
    }

    fn call(&self) -> Result<()> {
        const LABEL: &str = "bench";
        let (s, all, n) = (&self.rank.compute, self.all, self.all.size());
        match self.kind {
            OpKind::AllReduce => all.all_reduce(s, &self.whole, ReduceOp::Sum, LABEL)?,
            OpKind::AllGather => all.all_gather(s, &self.other, &self.whole, LABEL)?,
            OpKind::ReduceScatter => all.reduce_scatter(s, &self.whole, &self.other, ReduceOp::Sum, LABEL)?,
            OpKind::AllToAll => all.all_to_all(s, &self.whole, &self.other, LABEL)?,
            OpKind::Broadcast => all.broadcast(s, &self.whole, 0, LABEL)?,
            OpKind::Barrier => all.barrier(LABEL)?,
            OpKind::SendRecv | OpKind::AllGatherBytes | OpKind::Graph => {
                let (next, last) = ((all.rank() + 1) % n, (all.rank() + n - 1) % n);
                all.send_recv(s, &[(next, &self.whole)], &[(last, &self.other)], LABEL)?;
            }
        }
        Ok(())
    }

    /// Times `calls` calls from a common start.
    fn time(&self, calls: usize) -> Result<Round> {
        self.rank.compute.synchronize()?;
        self.all.barrier("start of a round")?;
        let world = &self.rank.world;
        let (before, start) = (world.host_cost(), Instant::now());
        (0..calls).try_for_each(|_| self.call())?;
        let (host, cost) = (start.elapsed().as_secs_f64(), world.host_cost().since(&before));
        self.rank.compute.synchronize()?;
        Ok(Round { seconds: start.elapsed().as_secs_f64(), host, cost })
    }
}

/// Some calls in a row.
struct Round {
    /// Seconds until the device is done.
    seconds: f64,
    /// Seconds until the host has issued them.
    host: f64,
    /// What they cost the host until then.
    cost: HostCost,
}

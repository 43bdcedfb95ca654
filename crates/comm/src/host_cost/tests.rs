//! The host's side of a backend that only enqueues, as NCCL's, over the real control transport.
#![allow(clippy::unwrap_used)]

use super::HostCost;
use crate::backend::{
    Collective, Completion, Descriptors, FailureReport, GroupBackend, JobBackend, OpError, P2pOp,
};
use crate::flight_recorder::{FlightRecorder, OpRecord};
use crate::launch_env::LaunchEnv;
use crate::op_descriptor::OpDescriptor;
use crate::process::{AfterFailure, Process};
use crate::tcp_control::TcpControl;
use crate::{Communicator, ReduceOp, Result, World};
use ferrotron_tensor::{Category, DType, Device, Stream, Threads};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Everything that the NCCL backend does on the host, except to call NCCL.
struct EnqueueOnly {
    process: Arc<Process>,
    index: u64,
    me: usize,
}

struct Job(Arc<Process>);

impl JobBackend for Job {
    fn name(&self) -> &'static str {
        "enqueue only"
    }
    fn rank(&self) -> usize {
        self.0.control().rank()
    }
    fn size(&self) -> usize {
        self.0.control().size()
    }
    fn group(
        &self,
        index: u64,
        _: &'static str,
        ranks: &[usize],
        _: Instant,
    ) -> Result<Option<Arc<dyn GroupBackend>>, OpError> {
        self.0.shared.groups.lock().unwrap().insert(index, ranks.to_vec());
        Ok(Some(Arc::new(EnqueueOnly { process: self.0.clone(), index, me: self.rank() })))
    }
    fn fail(&self, failure: FailureReport) {
        self.0.fail(failure);
    }
    fn failure(&self) -> Option<FailureReport> {
        self.0.failure()
    }
    fn flight_recorder(&self) -> &Arc<FlightRecorder> {
        self.0.flight_recorder()
    }
    fn last_ops(&self, rank: usize) -> Option<Vec<OpRecord>> {
        self.0.last_ops(rank)
    }
    fn host_cost(&self) -> HostCost {
        HostCost { frames: self.0.control().frames(), ..HostCost::default() }
    }
}

impl GroupBackend for EnqueueOnly {
    fn exchange_descriptors(
        &self,
        _: Option<&Stream>,
        descriptor: &OpDescriptor,
        _: &Collective,
        _: Instant,
    ) -> Result<Descriptors, OpError> {
        self.process.check_alive()?;
        self.process.shared.digest.add(self.index, self.me, descriptor);
        Ok(Descriptors::Deferred)
    }
    fn run(&self, s: &Stream, _: &Collective, _: Instant) -> Result<Completion, OpError> {
        let start = s.record()?;
        self.process.check_alive()?;
        Ok(Completion::Enqueued { start, done: s.record()? })
    }
    fn post_sends(&self, _: &Stream, _: &[P2pOp], _: Instant) -> Result<(), OpError> {
        Ok(())
    }
    fn complete_receives(
        &self,
        _: &Stream,
        _: &[P2pOp],
        _: &[P2pOp],
        _: Instant,
    ) -> Result<Completion, OpError> {
        Ok(Completion::Done)
    }
    fn all_gather_bytes(&self, _: &[u8], _: Instant) -> Result<Vec<Vec<u8>>, OpError> {
        Ok(Vec::new())
    }
}

/// Runs `work` on `n` ranks that are connected over loopback and watched as with NCCL.
fn on_ranks<T: Send>(n: usize, work: impl Fn(&World) -> T + Sync) -> Vec<T> {
    let at = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let timeout = Duration::from_secs(20);
    let rank = |rank: usize| {
        let control = TcpControl::connect(&LaunchEnv::for_test(rank, n, &at), timeout).unwrap();
        let process = Arc::new(Process::new(Arc::new(control), timeout, AfterFailure::Exit).unwrap());
        process.shared.watches_device.store(true, Ordering::Release);
        work(&World::start(Arc::new(Job(process)), timeout).unwrap())
    };
    std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = (0..n).map(|r| scope.spawn(move || rank(r))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn stream() -> Stream {
    Device::cpu(Threads::new(1).unwrap()).stream("compute").unwrap()
}

/// Seconds that the host takes for one all-reduce: the least of many rounds, since other tests run meanwhile.
fn seconds_per_call(all: &Communicator) -> f64 {
    const CALLS: usize = 1000;
    let s = stream();
    let t = s.zeros(&[4, 256], DType::F32, Category::Communication).unwrap();
    let round = || {
        let start = Instant::now();
        (0..CALLS).for_each(|_| all.all_reduce(&s, &t, ReduceOp::Sum, "host cost").unwrap());
        start.elapsed().as_secs_f64() / CALLS as f64
    };
    (0..50).map(|_| round()).fold(f64::INFINITY, f64::min)
}

#[test]
fn frames_depend_on_time_and_not_on_calls() {
    const BEATS: u64 = 4;
    for calls in [10, 20_000] {
        let frames = on_ranks(4, |world| {
            let (s, all) = (stream(), world.all());
            let t = s.zeros(&[256], DType::F32, Category::Communication).unwrap();
            let (start, before) = (Instant::now(), world.host_cost());
            for _ in 0..calls {
                all.all_reduce(&s, &t, ReduceOp::Sum, "gradients").unwrap();
            }
            // A heartbeat every 500 ms carries the marks of all calls.
            std::thread::sleep(Duration::from_millis(BEATS * 500 - 250).saturating_sub(start.elapsed()));
            let sent = world.host_cost().since(&before).frames;
            // Nobody leaves while another counts.
            std::thread::sleep(Duration::from_millis(500));
            assert!(world.check().is_ok());
            (world.rank(), sent)
        });
        for (rank, sent) in frames {
            let receivers = if rank == 0 { 3 } else { 1 };
            assert!(
                (1..=BEATS * receivers).contains(&sent),
                "rank {rank} sent {sent} frames in {calls} calls"
            );
        }
    }
}

#[test]
fn a_call_costs_the_host_little_and_the_same_for_any_number_of_ranks() {
    let cost = |n: usize| {
        on_ranks(n, |world| seconds_per_call(&world.all())).into_iter().fold(f64::INFINITY, f64::min)
    };
    let (two, eight) = (cost(2), cost(8));
    eprintln!(
        "host cost of a call beside NCCL's: {:.2} us with 2 ranks, {:.2} us with 8",
        two * 1e6,
        eight * 1e6
    );
    // The bar is 10 us with the events of a GPU, which cost about 4.
    assert!(two < 5e-6 && eight < 5e-6, "{two} s and {eight} s");
}

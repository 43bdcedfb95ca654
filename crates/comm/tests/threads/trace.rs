//! Collectives appear in a trace with their name, on the right stream and rank.

use crate::support::*;
use ferrotron_comm::{ReduceOp, SendRecv};
use ferrotron_tensor::trace::{ActivityKind, Trace};
use ferrotron_tensor::{Category, DType, Device, Instrumentation, Stream, Tensor, Threads};

const RANKS: usize = 3;

const INSTRUMENTATION: Instrumentation =
    Instrumentation { trace: true, race_check: true, kernel_times: false };

fn host() -> Device {
    Device::cpu_instrumented(Threads::new(1).unwrap(), INSTRUMENTATION)
}

fn everything(devices: &[Device]) -> Trace {
    devices.iter().for_each(|d| d.start_trace().unwrap());
    on_devices(devices, LONG, host_kernels(), |world, s: Stream| {
        let (me, g) = (world.rank(), world.all());
        let s = s.with_rank(me);
        let comm = s.device().stream("communication").unwrap().with_rank(me);
        let t = s.zeros(&[5000], DType::F32, Category::Activations).unwrap();
        g.all_reduce(&s, &t, ReduceOp::Sum, "loss").unwrap();
        let all = Tensor::empty(&s, &[RANKS * 5000], DType::F32, Category::Activations).unwrap();
        comm.wait(&s.record().unwrap()).unwrap();
        g.all_gather(&comm, &t, &all, "weights").unwrap();
        s.wait(&comm.record().unwrap()).unwrap();
        let (next, before) = ((me + 1) % RANKS, (me + RANKS - 1) % RANKS);
        let got = Tensor::empty(&s, &[5000], DType::F32, Category::Activations).unwrap();
        let (sends, receives) = ([(next, &t)], [(before, &got)]);
        let batch = SendRecv { group: &g, stream: &s, sends: &sends, receives: &receives };
        ferrotron_comm::Communicator::send_recv_batch(&[batch], "hidden").unwrap();
        s.zero(&got).unwrap();
        g.barrier("end").unwrap();
    });
    Trace::merge(devices.iter().map(|d| d.take_trace().unwrap()))
}

fn check(t: &Trace, on_host: bool) {
    for rank in 0..RANKS {
        let of = |kind| t.activities.iter().filter(move |a| a.rank == rank && a.kind == kind);
        let spans: Vec<_> = of(ActivityKind::Collective)
            .map(|a| (a.name.as_str(), a.detail.as_str(), a.stream_name.as_str()))
            .collect();
        let wanted = [
            ("all-reduce", "world: 'loss'", "compute"),
            ("all-gather", "world: 'weights'", "communication"),
            ("message", "world: 'hidden'", "compute"),
        ];
        assert_eq!(spans, wanted, "rank {rank}");
        // The two memsets are computation; everything else on streams of the rank is inside a collective.
        let outside: Vec<_> = of(ActivityKind::Kernel)
            .filter(|a| !a.in_collective && a.stream_name != "staging")
            .map(|a| &a.name)
            .collect();
        assert_eq!(outside, ["zero", "zero"], "rank {rank}");
        for k in of(ActivityKind::Kernel).filter(|a| a.in_collective) {
            let around = |s: &&ferrotron_tensor::trace::Activity| {
                s.stream == k.stream && s.start <= k.start && k.end <= s.end
            };
            assert_eq!(of(ActivityKind::Collective).filter(around).count(), 1, "{k:?}");
        }
    }
    let o = t.overlap();
    assert!(o.transfers.total > 0.0 && o.transfers.total <= o.collectives.total, "{o:?}");
    if on_host {
        // On the host a rank does one thing at a time.
        assert_eq!((o.transfers.same_rank, o.collectives.same_rank), (0.0, 0.0));
    }
}

#[test]
fn ranks_on_one_device_and_on_several() {
    let shared = instrumented_device(INSTRUMENTATION);
    check(&everything(&vec![shared.clone(); RANKS]), shared.gpu().is_none());
    check(&everything(&[host(), host(), host()]), true);
}

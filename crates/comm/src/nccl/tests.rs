//! NCCL with one rank on the first GPU: it initializes, splits, and every operation is a copy or does nothing. Prints
//! SKIPPED where there is no GPU or no NCCL.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::*;
use crate::ReduceOp;
use crate::backend::{Collective, P2pOp, SplitSizes};
use crate::op_descriptor::{Detail, OpDescriptor, OpKind};
use ferrotron_tensor::{Category, DType, Instrumentation, Tensor, Threads, bf16};

fn gpu() -> Option<Device> {
    let found = Nccl::open().map_err(|e| e.to_string()).and_then(|_| {
        let device = Device::cuda(0, Threads::new(1).unwrap(), Instrumentation::default());
        device.map_err(|e| e.to_string())
    });
    match found {
        Ok(device) => Some(device),
        Err(error) => {
            assert!(std::env::var_os("FERROTRON_NEEDS_NCCL").is_none(), "{error}");
            eprintln!("SKIPPED: {error}");
            None
        }
    }
}

/// A job of one rank.
fn join_alone(device: &Device) -> Result<NcclJobBackend> {
    let timeout = Duration::from_secs(60);
    let process = Arc::new(Process::new(open_control(None, timeout)?, timeout, AfterFailure::Exit)?);
    NcclJobBackend::join(device, process, timeout, ReduceKernels::default())
}

#[test]
fn one_rank_alone() {
    let Some(device) = gpu() else { return };
    eprintln!("NCCL {}", nccl_version().unwrap());
    let job_backend = join_alone(&device).unwrap();
    let control = job_backend.process.control();
    assert_eq!((control.rank(), control.size()), (0, 1));
    let deadline = || Instant::now() + Duration::from_secs(60);
    let world = job_backend.group(0, "world", &[0], deadline()).unwrap().unwrap();
    let split = job_backend.group(1, "split", &[0], deadline()).unwrap().unwrap();
    assert!(job_backend.group(2, "nobody", &[], deadline()).unwrap().is_none());
    let s = device.stream("compute").unwrap();
    for backend in [world, split] {
        let values: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        let small: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
        let up = || s.upload(&values, &[1000], Category::Communication).unwrap();
        let empty = || s.zeros(&[1000], DType::F32, Category::Communication).unwrap();
        let (x, y, half) = (up(), empty(), s.upload(&small, &[1000], Category::Communication).unwrap());
        let descriptor = OpDescriptor::new("world", OpKind::Barrier, "step");
        assert!(
            backend.exchange_descriptors(Some(&s), &descriptor, &Collective::Barrier, deadline()).is_ok()
        );
        let run = |collective: Collective| drop(backend.run(&s, &collective, deadline()).unwrap());
        for op in [ReduceOp::Sum, ReduceOp::Max] {
            run(Collective::AllReduce { t: &x, op });
            run(Collective::AllReduce { t: &half, op });
            run(Collective::ReduceScatter { all: &x, mine: &x, op });
        }
        assert_eq!(s.download::<f32>(&x).unwrap(), values);
        assert_eq!(s.download::<bf16>(&half).unwrap(), small);
        let check = |job: &dyn Fn(&Tensor)| {
            let y = empty();
            job(&y);
            assert_eq!(s.download::<f32>(&y).unwrap(), values);
        };
        check(&|y| run(Collective::ReduceScatter { all: &x, mine: y, op: ReduceOp::Sum }));
        check(&|y| run(Collective::AllGather { mine: &x, all: y, counts: None }));
        check(&|y| run(Collective::AllGather { mine: &x, all: y, counts: Some(&[1000]) }));
        check(&|y| run(Collective::AllToAll { from: &x, to: y, splits: None }));
        let splits = Some(SplitSizes { sent: &[1000], received: &[1000] });
        check(&|y| run(Collective::AllToAll { from: &x, to: y, splits }));
        run(Collective::AllGather { mine: &x, all: &x, counts: None });
        run(Collective::AllGather { mine: &x, all: &x, counts: Some(&[1000]) });
        run(Collective::Broadcast { t: &x, root: 0 });
        assert_eq!(s.download::<f32>(&x).unwrap(), values);
        let op = |t| {
            let descriptor =
                OpDescriptor::new("world", OpKind::SendRecv, "to itself").with_detail(Detail::Route(0, 0));
            [P2pOp { peer: 0, tensor: t, descriptor }]
        };
        backend.post_sends(&s, &op(&x), deadline()).unwrap();
        backend.complete_receives(&s, &op(&x), &op(&y), deadline()).unwrap();
        assert_eq!(s.download::<f32>(&y).unwrap(), values);
        assert_eq!(backend.all_gather_bytes(b"mine", deadline()).unwrap(), [b"mine"]);
    }
}

#[test]
fn a_world_of_one_card() {
    let Some(device) = gpu() else { return };
    let world = World::start(Arc::new(join_alone(&device).unwrap()), Duration::from_secs(60)).unwrap();
    let s = device.stream("compute").unwrap();
    let x = s.upload(&[1f32, 2.0], &[2], Category::Communication).unwrap();
    world.all().all_reduce(&s, &x, ReduceOp::Sum, "alone").unwrap();
    assert_eq!(s.download::<f32>(&x).unwrap(), [1.0, 2.0]);
}

//! NCCL with one rank, on the first card: it initialises, splits, and every operation is a copy or nothing.
//! Says aloud where there is no card or no NCCL.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::*;
use crate::Reduce;
use crate::engine::{Job as Op, Letter};
use crate::notice::{Detail, Kind, Notice};
use ferrotron_tensor::{Category, DType, Tensor, Threads, Watch, bf16};

fn card() -> Option<Device> {
    let found = Nccl::open().map_err(|e| e.to_string()).and_then(|_| {
        let device = Device::cuda(0, Threads::new(1).unwrap(), Watch::default());
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

#[test]
fn one_rank_alone() {
    let Some(device) = card() else { return };
    eprintln!("NCCL {}", nccl_version().unwrap());
    let hub = NcclHub::join(&device, None, Duration::from_secs(60)).unwrap();
    assert_eq!((hub.rank(), hub.size()), (0, 1));
    let deadline = || Instant::now() + Duration::from_secs(60);
    let world = hub.group(0, "world", &[0], deadline()).unwrap().unwrap();
    let split = hub.group(1, "split", &[0], deadline()).unwrap().unwrap();
    assert!(hub.group(2, "nobody", &[], deadline()).unwrap().is_none());
    let s = device.stream("compute").unwrap();
    for engine in [world, split] {
        let values: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        let small: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
        let up = || s.upload(&values, &[1000], Category::Communication).unwrap();
        let empty = || s.zeros(&[1000], DType::F32, Category::Communication).unwrap();
        let (x, y, half) = (up(), empty(), s.upload(&small, &[1000], Category::Communication).unwrap());
        let notice = Notice::new("world", Kind::Barrier, "step");
        assert!(engine.meet(Some(&s), &notice, &Op::Barrier, deadline()).is_ok());
        let run = |job: Op| engine.run(&s, &job, deadline()).unwrap();
        for op in [Reduce::Sum, Reduce::Max] {
            run(Op::AllReduce { t: &x, op });
            run(Op::AllReduce { t: &half, op });
            run(Op::ReduceScatter { all: &x, mine: &x, op });
        }
        assert_eq!(s.download::<f32>(&x).unwrap(), values);
        assert_eq!(s.download::<bf16>(&half).unwrap(), small);
        let check = |job: &dyn Fn(&Tensor)| {
            let y = empty();
            job(&y);
            assert_eq!(s.download::<f32>(&y).unwrap(), values);
        };
        check(&|y| run(Op::ReduceScatter { all: &x, mine: y, op: Reduce::Sum }));
        check(&|y| run(Op::AllGather { mine: &x, all: y, counts: None }));
        check(&|y| run(Op::AllGather { mine: &x, all: y, counts: Some(&[1000]) }));
        check(&|y| run(Op::AllToAll { from: &x, to: y, counts: None }));
        check(&|y| run(Op::AllToAll { from: &x, to: y, counts: Some((&[1000], &[1000])) }));
        run(Op::AllGather { mine: &x, all: &x, counts: None });
        run(Op::AllGather { mine: &x, all: &x, counts: Some(&[1000]) });
        run(Op::Broadcast { t: &x, root: 0 });
        assert_eq!(s.download::<f32>(&x).unwrap(), values);
        let letter = |t| {
            let notice = Notice::new("world", Kind::Message, "to itself").with(Detail::Route(0, 0));
            [Letter { peer: 0, tensor: t, notice }]
        };
        engine.post(&s, &letter(&x), deadline()).unwrap();
        engine.collect(&s, &letter(&x), &letter(&y), deadline()).unwrap();
        assert_eq!(s.download::<f32>(&y).unwrap(), values);
        assert_eq!(engine.bytes(b"mine", deadline()).unwrap(), [b"mine"]);
    }
}

#[test]
fn a_world_of_one_card() {
    let Some(device) = card() else { return };
    let world = World::start(
        Arc::new(NcclHub::join(&device, None, Duration::from_secs(60)).unwrap()),
        Duration::from_secs(60),
    )
    .unwrap();
    let s = device.stream("compute").unwrap();
    let x = s.upload(&[1f32, 2.0], &[2], Category::Communication).unwrap();
    world.all().all_reduce(&s, &x, Reduce::Sum, "alone").unwrap();
    assert_eq!(s.download::<f32>(&x).unwrap(), [1.0, 2.0]);
}

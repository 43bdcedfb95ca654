//! Random traces against a model of the pool: on the CPU, and with `FERROTRON_TEST_DEVICE=cuda` on the first GPU; with
//! segments in reserved addresses and with plain allocations.

use crate::segment::{ALIGN, SizeKind};
use crate::{Category, DType, Device, Error, Instrumentation, Stream, Tensor, Threads};
use std::collections::BTreeMap;

const MIB: usize = 1 << 20;

/// The devices to test, each with both kinds of growth.
fn devices() -> Vec<(&'static str, Device)> {
    let threads = || Threads::new(1).unwrap();
    let plain = |mut device: Device| {
        let inner = std::sync::Arc::get_mut(&mut device.inner).unwrap();
        inner.pool = inner.pool.plain();
        device
    };
    let mut all = vec![("cpu", Device::cpu(threads())), ("cpu, plain", plain(Device::cpu(threads())))];
    if std::env::var("FERROTRON_TEST_DEVICE").is_ok_and(|d| d == "cuda") {
        let cuda = || Device::cuda(0, threads(), Instrumentation::default()).unwrap();
        all.extend([("cuda", cuda()), ("cuda, plain", plain(cuda()))]);
    }
    all
}

/// Seeded test values: splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    /// Many small sizes, some large ones, and every order of magnitude between.
    fn size(&mut self) -> usize {
        let bits = 3 + self.below(21);
        1 + self.below(1 << bits)
    }
}

fn bytes(s: &Stream, n: usize) -> Result<Tensor, Error> {
    Tensor::empty(s, &[n], DType::U8, Category::Activations)
}

/// Writes a stamp at both ends and in the middle.
fn stamp(s: &Stream, t: &Tensor, value: u64) {
    for at in stamps(t) {
        s.upload_into(&t.narrow(0, at, 8).unwrap(), &value.to_le_bytes()).unwrap();
    }
}

fn check_stamp(s: &Stream, t: &Tensor, value: u64) {
    for at in stamps(t) {
        let found = s.download::<u8>(&t.narrow(0, at, 8).unwrap()).unwrap();
        assert_eq!(found, value.to_le_bytes(), "a live tensor was overwritten");
    }
}

fn stamps(t: &Tensor) -> Vec<usize> {
    let n = t.numel();
    if n < 32 { if n < 8 { vec![] } else { vec![0] } } else { vec![0, n / 2, n - 8] }
}

/// All free ranges of a stream, by kind of block.
fn free_ranges(s: &Stream) -> [usize; 2] {
    let mut state = s.device().inner.pool.lock();
    let memory = state.streams.get_mut(&s.id()).unwrap();
    SizeKind::ALL.map(|kind| memory.segment(kind).free_ranges().len())
}

#[test]
fn random_traces_never_overlap_and_coalesce_completely() {
    for (name, device) in devices() {
        let streams = ["compute", "copy"].map(|n| device.stream(n).unwrap());
        let mut random = Random(7);
        let mut live: Vec<(Tensor, u64, usize)> = Vec::new();
        let mut by_address: BTreeMap<usize, usize> = BTreeMap::new();
        for n in 0..1500 {
            let grows = random.below(100) < if n % 500 < 250 { 60 } else { 40 };
            if grows || live.is_empty() {
                let which = random.below(2);
                let t = bytes(&streams[which], random.size()).unwrap();
                let start = t.buffer.address();
                let end = start + t.numel().next_multiple_of(ALIGN);
                assert!(start.is_multiple_of(ALIGN), "{name}: {start:#x}");
                let before = by_address.range(..end).next_back();
                assert!(before.is_none_or(|(_, e)| *e <= start), "{name}: blocks overlap");
                by_address.insert(start, end);
                stamp(&streams[which], &t, n);
                live.push((t, n, which));
            } else {
                let (t, value, which) = live.swap_remove(random.below(live.len()));
                check_stamp(&streams[which], &t, value);
                by_address.remove(&t.buffer.address());
            }
        }
        live.iter().for_each(|(t, value, which)| check_stamp(&streams[*which], t, *value));
        drop(live);
        let report = device.memory();
        assert_eq!(report.total_now, 0);
        assert!(report.reserved_now >= report.total_peak && report.reserved_peak >= report.reserved_now);
        for s in &streams {
            let free = free_ranges(s);
            match name.contains("plain") {
                false => assert_eq!(free, [1, 1], "{name}: all memory of a stream is one free range"),
                true => {
                    assert!(free.iter().all(|n| *n <= 20), "{name}: one range per allocation, not {free:?}")
                }
            }
        }
        device.trim().unwrap();
        assert_eq!(device.memory().reserved_now, 0, "{name}");
    }
}

/// One step of a dropless MoE: every layer keeps tensors whose sizes depend on the routing, with scratch memory on the way,
/// and backward frees them in reverse.
fn moe_step(s: &Stream, random: &mut Random, fullest: bool) {
    let mut saved = Vec::new();
    let mut vary = |base: usize| base * 3 / 4 + if fullest { base / 2 } else { random.below(base / 2) };
    for _ in 0..8 {
        let tokens = vary(4096);
        saved.push(bytes(s, 6 * MIB).unwrap());
        let permuted = bytes(s, tokens * 2048).unwrap();
        let scratch = bytes(s, vary(3 * MIB)).unwrap();
        saved.push(bytes(s, tokens * 4096).unwrap());
        drop(scratch);
        saved.push(bytes(s, tokens * 2048 + 512).unwrap());
        let out = bytes(s, tokens * 2048).unwrap();
        drop(permuted);
        saved.push(bytes(s, vary(40_000)).unwrap());
        drop(out);
    }
    while let Some(x) = saved.pop() {
        let grad = bytes(s, x.numel()).unwrap();
        let scratch = bytes(s, x.numel() / 2).unwrap();
        drop((x, scratch, grad));
    }
}

#[test]
fn sizes_that_vary_every_step_need_little_more_than_their_peak() {
    let device = Device::cpu(Threads::new(1).unwrap());
    let s = device.stream("compute").unwrap();
    let _weights: Vec<Tensor> = (0..20).map(|n| bytes(&s, 9 * MIB + 77_777 * n).unwrap()).collect();
    let mut random = Random(3);
    let mut warm = 0;
    for step in 1..=2000 {
        // One of the first steps is as full as a step can be, so that later growth could only come from fragmentation.
        moe_step(&s, &mut random, step == 10);
        if step == 50 {
            warm = device.memory().reserved_now;
        }
    }
    let report = device.memory();
    let ratio = report.reserved_peak as f64 / report.total_peak as f64;
    assert!(ratio <= 1.08, "{ratio}: {report}");
    assert_eq!(report.reserved_now, warm, "grows after step 50");
}

#[test]
fn out_of_memory_takes_free_memory_of_other_streams() {
    for (name, device) in devices() {
        let [a, b] = ["compute", "copy"].map(|n| device.stream(n).unwrap());
        device.limit_memory(200 * MIB);
        let kept = bytes(&a, 8 * MIB).unwrap();
        stamp(&a, &kept, 1);
        let (low, high) = (bytes(&a, 64 * MIB).unwrap(), bytes(&a, 64 * MIB).unwrap());
        stamp(&a, &high, 2);
        drop((low, high));
        let other = bytes(&b, 120 * MIB).unwrap_or_else(|e| panic!("{name}: {e}"));
        stamp(&b, &other, 3);
        assert!(device.memory().reserved_now <= 200 * MIB, "{name}");
        check_stamp(&a, &kept, 1);
        // More than there is: refused, with what was asked for, and nothing is lost.
        let Err(Error::OutOfMemory { bytes: asked, report, .. }) = bytes(&a, 190 * MIB) else {
            panic!("{name}")
        };
        assert_eq!((asked, report.total_now), (190 * MIB, 128 * MIB), "{name}");
        check_stamp(&b, &other, 3);
        drop(other);
        let again = bytes(&a, 120 * MIB).unwrap_or_else(|e| panic!("{name}: {e}"));
        stamp(&a, &again, 4);
        check_stamp(&a, &kept, 1);
        check_stamp(&a, &again, 4);
    }
}

#[test]
fn memory_released_and_mapped_again_is_zero_on_the_host() {
    for (name, device) in devices().into_iter().filter(|(name, _)| name.starts_with("cpu")) {
        let s = device.stream("compute").unwrap();
        let full = |s: &Stream| s.upload(&vec![0xFFu8; 3 * MIB], &[3 * MIB], Category::Workspace).unwrap();
        drop(full(&s));
        device.trim().unwrap();
        let t = bytes(&s, 3 * MIB).unwrap();
        assert!(s.download::<u8>(&t).unwrap().iter().all(|x| *x == 0), "{name}");
    }
}

#[test]
fn holes_left_by_a_release_are_filled_before_the_segment_extends() {
    let device = Device::cpu(Threads::new(1).unwrap());
    let s = device.stream("compute").unwrap();
    let first = bytes(&s, 32 * MIB).unwrap();
    let middle = bytes(&s, 96 * MIB).unwrap();
    let last = bytes(&s, 32 * MIB).unwrap();
    let start = middle.buffer.address();
    drop(middle);
    device.trim().unwrap();
    let report = device.memory();
    assert!(report.reserved_now < 96 * MIB && report.reserved_peak >= 160 * MIB, "{report}");
    let again = bytes(&s, 96 * MIB).unwrap();
    assert_eq!(again.buffer.address(), start);
    assert!(device.memory().reserved_now < 170 * MIB);
    drop((first, again, last));
    assert_eq!(free_ranges(&s)[1], 1, "mapped, released and mapped again, it coalesces");
}

#[test]
fn memory_of_a_graph_is_lent_in_parts_and_comes_back_whole() {
    for (name, device) in devices() {
        let s = device.stream("compute").unwrap();
        let pool = &device.inner.pool;
        let mut random = Random(5);
        drop(bytes(&s, 40 * MIB).unwrap());
        pool.open_arena(9, s.id(), true);
        let mut used = Vec::new();
        for _ in 0..30 {
            // Within the capture, memory is reused as outside of it.
            let t: Vec<Tensor> = (0..3).map(|_| bytes(&s, MIB + random.below(6 * MIB)).unwrap()).collect();
            used.extend(t.iter().map(|t| t.buffer.address()..t.buffer.address() + t.numel()));
        }
        pool.seal_arena(9).unwrap();
        let inside = |t: &Tensor| used.iter().any(|r| r.contains(&t.buffer.address()));
        let reserved = device.memory().reserved_now;
        // What is left of the stream's own memory goes first, then the arena lends.
        let mut lent: Vec<Tensor> = (0..6).map(|_| bytes(&s, 2 * MIB).unwrap()).collect();
        while lent.iter().all(|t| !inside(t)) {
            lent.push(bytes(&s, 2 * MIB).unwrap());
        }
        assert!(!pool.is_unused(9), "{name}");
        assert_eq!(device.memory().reserved_now, reserved, "{name}: nothing new while the arena can lend");
        drop(lent);
        assert!(pool.is_unused(9), "{name}");
        // Reserved memory survives a release under pressure.
        device.trim().unwrap();
        let left = device.memory().reserved_now;
        let mut back = vec![bytes(&s, 2 * MIB).unwrap()];
        while !inside(&back[back.len() - 1]) {
            back.push(bytes(&s, 2 * MIB).unwrap());
        }
        assert_eq!(device.memory().reserved_now, left, "{name}");
        drop(back);
        pool.dissolve_arena(9);
        if !name.contains("plain") {
            assert_eq!(free_ranges(&s)[1], 1, "{name}");
        }
    }
}

/// Work in flight is not waited for when memory is allocated, grown and freed, and a capture may grow as well.
#[test]
fn nothing_waits_for_the_device_in_a_step() {
    for (name, device) in devices().into_iter().filter(|(name, _)| name.starts_with("cuda")) {
        let s = device.stream("compute").unwrap();
        let [from, to] = [(); 2].map(|()| bytes(&s, 512 * MIB).unwrap());
        let mut random = Random(11);
        moe_step(&s, &mut random, false);
        s.synchronize().unwrap();
        (0..1000).for_each(|_| s.copy(&from, &to).unwrap());
        let done = s.record().unwrap();
        (0..5).for_each(|_| moe_step(&s, &mut random, false));
        drop(bytes(&s, 600 * MIB).unwrap());
        if name == "cuda" {
            assert!(!done.is_reached(), "an allocation waited for the device");
        }
        let out = s.zeros(&[3 * MIB], DType::U8, Category::Activations).unwrap();
        let graph = s
            .capture(|| {
                let t = bytes(&s, 900 * MIB)?;
                s.zero(&t)?;
                let x = t.narrow(0, 897 * MIB, 3 * MIB)?;
                s.copy(&from.narrow(0, 0, 3 * MIB)?, &x)?;
                s.copy(&x, &out)
            })
            .unwrap();
        s.upload_into(&from.narrow(0, 0, 3 * MIB).unwrap(), &vec![7u8; 3 * MIB]).unwrap();
        graph.replay().unwrap();
        assert!(s.download::<u8>(&out).unwrap().iter().all(|x| *x == 7), "{name}");
    }
}

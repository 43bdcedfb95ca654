//! Scores of made-up windows: who is named, and who is not.

use super::*;

/// Noise of a busy machine: mostly a few percent, now and then a step that takes twice as long.
struct Noise(u64);

impl Noise {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    fn factor(&mut self) -> f64 {
        let delay = if self.uniform() < 0.15 { self.uniform() } else { 0.0 };
        1.0 + 0.06 * (self.uniform() - 0.5) + delay
    }
}

fn stragglers() -> Stragglers {
    let rank = Rank::cpu(1, 1).unwrap();
    Stragglers::new(&rank, 10, 0.87)
}

/// A window of ten steps in which rank i takes `speed[i]` times 10 ms, on pipeline stage `stage[i]`.
fn window(noise: &mut Noise, speed: &[f64], stage: &[usize]) -> Vec<RankWindow> {
    // What slows all ranks alike differs from step to step; a rank alone could not tell it from its own slowness.
    let varies = if speed.len() > 1 { 1.0 } else { 0.0 };
    let steps: Vec<f64> = (0..10).map(|_| 0.01 * (1.0 + varies * noise.uniform())).collect();
    let rank = |(speed, stage): (&f64, &usize)| RankWindow {
        spans: steps.iter().map(|s| (s * speed * noise.factor()) as f32).collect(),
        times: SectionTimes { forward: 0.005 * speed, backward: 0.01 * speed, ..SectionTimes::default() },
        stage: *stage,
        host: "node".into(),
        device: "CPU".into(),
        ..RankWindow::default()
    };
    speed.iter().zip(stage).map(rank).collect()
}

fn named(events: &[Event]) -> Vec<usize> {
    let rank = |e: &Event| if let Event::Straggler(s) = e { Some(s.rank) } else { None };
    events.iter().filter_map(rank).collect()
}

#[test]
fn even_ranks_are_never_named() {
    let (mut s, mut noise) = (stragglers(), Noise(1));
    for step in 1..=2000 {
        let events = s.report(step * 10, 10, &window(&mut noise, &[1.0; 4], &[0; 4]));
        assert!(named(&events).is_empty(), "{events:?}");
        assert!(matches!(&events[0], Event::Sections(e) if e.ranks.len() == 4 && e.median.backward == 0.01));
    }
}

#[test]
fn a_rank_that_is_a_fifth_slower_is_named_after_two_windows() {
    let mut noise = Noise(2);
    for ranks in [2, 3, 4, 8, 40] {
        let mut missed = 0;
        for trial in 0..100 {
            let mut speed = vec![1.0; ranks];
            speed[trial % ranks] = 1.2;
            let mut s = stragglers();
            let mut next = |step| s.report(step, 10, &window(&mut noise, &speed, &vec![0; ranks]));
            assert!(named(&next(10)).is_empty());
            missed += usize::from(named(&next(20)) != [trial % ranks]);
        }
        // A fifth is not far from the threshold of 0.87, and the noise is that of a busy machine.
        assert!(missed <= 10, "{ranks} ranks: {missed} of 100");
    }
    let mut s = stragglers();
    s.report(10, 10, &window(&mut noise, &[1.0, 1.5, 1.0, 1.0], &[0; 4]));
    let events = s.report(20, 10, &window(&mut noise, &[1.0, 1.5, 1.0, 1.0], &[0; 4]));
    let Some(Event::Straggler(found)) = events.get(1) else { panic!("{events:?}") };
    assert_eq!((found.rank, found.section, found.cause), (1, Section::Backward, Cause::Host));
    assert!((0.6..0.72).contains(&found.score) && (found.lost - 0.0075).abs() < 1e-3, "{found:?}");
    assert!(found.to_string().contains("rank 1 on node, CPU, takes "), "{found}");
}

#[test]
fn pipeline_stages_are_compared_with_their_like_or_with_their_past() {
    let (mut s, mut noise) = (stragglers(), Noise(3));
    let stages = [0, 1, 2, 3];
    // The last stage has the LM head: it is slower by nature.
    for step in 1..=20 {
        let events = s.report(step * 10, 10, &window(&mut noise, &[1.0, 1.0, 1.0, 1.6], &stages));
        assert!(named(&events).is_empty(), "{events:?}");
    }
    for (step, found) in [(210, &[][..]), (220, &[1])] {
        let events = s.report(step, 10, &window(&mut noise, &[1.0, 1.5, 1.0, 1.6], &stages));
        assert_eq!(named(&events), found);
    }
    // A whole job that slows down has no straggler.
    for step in [230, 240] {
        let events = s.report(step, 10, &window(&mut noise, &[2.0, 2.0, 2.0, 3.2], &stages));
        assert!(named(&events).is_empty(), "{events:?}");
    }
    // Two replicas of each of two stages.
    let mut s = stragglers();
    s.report(10, 10, &window(&mut noise, &[1.0, 1.0, 2.0, 3.0], &[0, 0, 1, 1]));
    let events = s.report(20, 10, &window(&mut noise, &[1.0, 1.0, 2.0, 3.0], &[0, 0, 1, 1]));
    assert_eq!(named(&events), [3]);
}

#[test]
fn a_rank_that_is_slow_for_one_window_is_not_named() {
    let (mut s, mut noise) = (stragglers(), Noise(6));
    for (step, slow) in [(10, 1.0), (20, 1.4), (30, 1.0), (40, 1.0)] {
        let events = s.report(step, 10, &window(&mut noise, &[1.0, 1.0, slow, 1.0], &[0; 4]));
        assert!(named(&events).is_empty(), "{events:?}");
    }
    // Nor is the slowest of ranks whose times scatter as much.
    let (mut s, speed) = (stragglers(), [0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.22]);
    for step in [10, 20, 30] {
        let events = s.report(step, 10, &window(&mut noise, &speed, &[0; 8]));
        assert!(named(&events).is_empty(), "{events:?}");
    }
}

#[test]
fn a_job_of_one_rank_goes_by_its_past() {
    let (mut s, mut noise) = (stragglers(), Noise(4));
    let mut slow = vec![];
    for step in 1..=20 {
        let speed = if step > 15 { 3.0 } else { 1.0 };
        if !named(&s.report(step * 10, 10, &window(&mut noise, &[speed], &[0]))).is_empty() {
            slow.push(step);
        }
    }
    assert_eq!(slow, [18, 19, 20]);
}

#[test]
fn the_cause_is_read_from_the_gpus() {
    let gpu = |sm_mhz, throttle: &[&str]| {
        let throttle = throttle.iter().map(|t| t.to_string()).collect();
        Some(GpuHealth { sm_mhz: Some(sm_mhz), throttle, ..GpuHealth::default() })
    };
    let cause = |slow: Option<GpuHealth>, section| {
        let mut s = stragglers();
        let mut all = window(&mut Noise(5), &[1.0; 4], &[0; 4]);
        all.iter_mut().for_each(|w| (w.gpu, w.device) = (gpu(1980, &["power cap"]), "GPU 0".into()));
        all[2].gpu = slow;
        s.judge(&all);
        s.cause(2, &all, section)
    };
    let of = |slow| cause(slow, Section::Forward);
    assert_eq!(of(gpu(1980, &["power cap"])), Cause::Unknown);
    assert_eq!(of(gpu(1500, &["power cap"])), Cause::PowerThrottle);
    assert_eq!(of(gpu(1980, &["power brake"])), Cause::PowerThrottle);
    assert_eq!(of(gpu(1200, &["thermal slowdown (hardware)"])), Cause::ThermalThrottle);
    assert_eq!(of(gpu(1200, &[])), Cause::Clocks);
    assert_eq!(of(Some(GpuHealth { xid: vec![63], ..GpuHealth::default() })), Cause::GpuErrors);
    assert_eq!(of(None), Cause::Unknown);
    assert_eq!(cause(gpu(1980, &[]), Section::Data), Cause::Data);
}

#[test]
fn long_windows_are_told_in_few_spans() {
    let steps = vec![SectionTimes { forward: 2.0, data: 1.0, ..SectionTimes::default() }; 1000];
    let told = spans(&steps);
    assert!(told.len() <= SPANS && told.iter().all(|s| *s == 3.0), "{told:?}");
    assert_eq!(spans(&steps[..10]).len(), 10);
    assert!(spans(&[]).is_empty());
}

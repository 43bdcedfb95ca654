//! Schedules over all small P (stages), v (virtual stages) and M (micro-batches).

use ferrotron_core::pipeline::{
    Costs, Matching, PipelinePlan, Schedule, ScheduleKind, ScheduleReport, ScheduleStep, Timeline, Transport,
    check,
};

use crate::oracle;

const MODES: [ScheduleKind; 4] = [
    ScheduleKind::OneForwardOneBackward,
    ScheduleKind::ZeroBubble,
    ScheduleKind::Paired,
    ScheduleKind::ForwardOnly,
];

fn plans() -> impl Iterator<Item = PipelinePlan> {
    let sizes = (1..=5).flat_map(|p| (1..=3).flat_map(move |v| (1..=11).map(move |m| (p, v, m))));
    sizes.flat_map(|(p, v, m)| MODES.map(|mode| PipelinePlan { kind: mode, ..PipelinePlan::new(p, v, m) }))
}

fn built(plan: &PipelinePlan) -> (Schedule, ScheduleReport) {
    let schedule = plan.schedule().unwrap_or_else(|e| panic!("{plan:?}: {e}"));
    let report = check(&schedule, Matching::Tagged).unwrap();
    (schedule, report)
}

#[test]
fn every_schedule_is_proven() {
    for plan in plans() {
        let (schedule, report) = built(&plan);
        for matching in [Matching::Blocking, Matching::Stream, Matching::Tagged] {
            check(&schedule, matching).unwrap_or_else(|e| panic!("{plan:?} {matching:?}: {e}"));
        }
        assert!(oracle::runs(&schedule), "{plan:?}");
        let (eager, same) = built(&PipelinePlan { transport: Transport::Eager, ..plan.clone() });
        assert_eq!(report, same, "{plan:?}");
        for rank in 0..plan.pp {
            assert!(schedule.ops(rank).eq(eager.ops(rank)), "{plan:?}: transports compute in one order");
        }
        let edges = if plan.pp == 1 { 0 } else { (plan.pp * plan.vp - 1) * plan.micro_batches };
        let ways = if plan.kind == ScheduleKind::ForwardOnly { 1 } else { 2 };
        assert_eq!(report.messages, ways * edges, "{plan:?}");
    }
}

#[test]
fn every_group_size_is_proven() {
    for (p, m) in (2..=4).flat_map(|p| (p..=12).map(move |m| (p, m))) {
        for n in 1..=m + 1 {
            for v in 2..=3 {
                let plan = PipelinePlan { group_size: Some(n), ..PipelinePlan::new(p, v, m) };
                let legal = p <= n && n <= m && (m % n == 0 || m % n >= p);
                let schedule = plan.schedule();
                assert_eq!(schedule.is_ok(), legal, "{plan:?}");
                if legal {
                    assert!(oracle::runs(&schedule.unwrap()), "{plan:?}");
                }
            }
        }
    }
}

#[test]
fn peaks_follow_the_formulas() {
    for plan in plans() {
        let (p, v, m) = (plan.pp, plan.vp, plan.micro_batches);
        let (_, report) = built(&plan);
        let plain = PipelinePlan { kind: ScheduleKind::OneForwardOneBackward, ..plan.clone() };
        let formula = |r: usize| match v {
            1 => (p - r).min(m),
            _ => (2 * (p - r - 1) + (v - 1) * plan.group().unwrap() + 1).min(m * v),
        };
        for r in 0..p {
            assert_eq!(formula(r), (plain.warmup(r, false).unwrap().warmup + 1).min(m * v));
            match plan.kind {
                ScheduleKind::OneForwardOneBackward => {
                    assert_eq!(report.peak_live[r], formula(r), "{plan:?} rank {r}");
                    assert_eq!(report.peak_weights[r], 0);
                }
                ScheduleKind::ZeroBubble => {
                    assert!(report.peak_saved[r] <= formula(r), "{plan:?} rank {r}");
                    assert!(report.peak_live[r] <= formula(0), "{plan:?} rank {r}");
                }
                ScheduleKind::Paired => {
                    // One more than the interleaved schedule (vp = 1 included).
                    let most = 2 * (p - r - 1) + (v - 1) * plan.group().unwrap() + 2;
                    assert_eq!(report.peak_live[r], most.min(m * v), "{plan:?} rank {r}");
                }
                ScheduleKind::ForwardOnly => assert_eq!(report.peak_live[r], 0),
            }
        }
    }
}

/// Every forward after warm-up is paired with a backward of another micro-batch.
#[test]
fn every_forward_after_warmup_is_paired() {
    for plan in plans().filter(|plan| plan.kind == ScheduleKind::Paired) {
        let (p, v, m) = (plan.pp, plan.vp, plan.micro_batches);
        if v > 1 && (p == 1 || m < p) {
            continue;
        }
        let schedule = plan.schedule().unwrap();
        for (rank, steps) in schedule.ranks.iter().enumerate() {
            let pairs: Vec<String> = steps
                .iter()
                .filter(|s| matches!(s, ScheduleStep::Pair(..)))
                .map(ScheduleStep::to_string)
                .collect();
            let remaining = plan.warmup(rank, true).unwrap().remaining;
            assert_eq!(pairs.len(), remaining, "{plan:?} rank {rank}");
            let first = (v == 1 && remaining > 0).then(|| format!("F{}.0 beside B0.0", 2 * (p - rank) - 1));
            assert_eq!(pairs.first().filter(|_| v == 1).cloned(), first, "{plan:?} rank {rank}");
        }
    }
}

/// In the steady state all ranks run pairs at the same time: pairing adds no bubble.
#[test]
fn pairing_adds_no_bubble() {
    for (p, v, m) in [(1, 1, 4), (2, 1, 12), (4, 1, 24), (2, 2, 12), (4, 2, 24)] {
        let schedule =
            PipelinePlan { kind: ScheduleKind::Paired, ..PipelinePlan::new(p, v, m) }.schedule().unwrap();
        let plain = time(&PipelinePlan::new(p, v, m), &Costs::default()).makespan();
        let paired = makespan_of_steps(&schedule);
        assert!(paired <= plain + (3 * p) as f64, "{p} {v} {m}: {paired} after {plain}");
    }
}

/// Makespan when pairs complete as a whole: forward costs 1, backward 2, messages 0.
fn makespan_of_steps(schedule: &Schedule) -> f64 {
    let mut at = vec![(0usize, 0.0f64); schedule.ranks.len()];
    let mut sent = std::collections::HashMap::new();
    loop {
        let before = at.clone();
        for (rank, steps) in schedule.ranks.iter().enumerate() {
            while let Some(step) = steps.get(at[rank].0) {
                let needed: Option<Vec<f64>> = step
                    .ops()
                    .filter_map(|op| schedule.shape.input_message(rank, op))
                    .map(|m| sent.get(&m).copied())
                    .collect();
                let Some(needed) = needed else { break };
                let start = needed.into_iter().fold(at[rank].1, f64::max);
                let cost: f64 = step.ops().map(|op| Costs::default().of(op.kind)).sum();
                at[rank] = (at[rank].0 + 1, start + cost);
                for m in step.ops().filter_map(|op| schedule.shape.output_message(rank, op)) {
                    sent.insert(m, start + cost);
                }
            }
        }
        if at == before {
            break;
        }
    }
    assert!(at.iter().zip(&schedule.ranks).all(|(at, steps)| at.0 == steps.len()));
    at.iter().map(|a| a.1).fold(0.0, f64::max)
}

fn time(plan: &PipelinePlan, costs: &Costs) -> Timeline {
    Timeline::new(&plan.schedule().unwrap(), costs).unwrap()
}

#[test]
fn bubbles_follow_the_formulas() {
    let costs = Costs::default();
    for plan in plans().filter(|plan| plan.kind == ScheduleKind::OneForwardOneBackward) {
        let (p, v, m) = (plan.pp, plan.vp, plan.micro_batches);
        let plain = time(&plan, &costs);
        let zero = time(&PipelinePlan { kind: ScheduleKind::ZeroBubble, ..plan.clone() }, &costs);
        assert!(zero.makespan() <= plain.makespan(), "{plan:?}: {} {}", zero.makespan(), plain.makespan());
        assert_eq!(plain.work(), (3 * p * v * m) as f64);
        assert_eq!(zero.work(), plain.work());
        if v == 1 || m >= p {
            let bubble = (p - 1) as f64 / (v * m) as f64;
            let n = plan.group().unwrap();
            if v == 1 || m % n == 0 {
                assert!((plain.bubble_to_work() - bubble).abs() < 1e-12, "{plan:?}: {}", plain.draw(400));
            }
        }
        // (P−1)(T_F + T_B − T_W) once there are enough micro-batches to fill the bubble.
        if v == 1 && m >= 2 * p {
            assert_eq!(zero.makespan(), (3 * m + p - 1) as f64, "{plan:?}\n{}", zero.draw(400));
        }
    }
}

#[test]
fn zero_bubble_takes_any_costs() {
    for (forward, input, weight) in
        [(1.0, 1.0, 1.0), (1.0, 1.3, 0.7), (2.0, 2.5, 1.5), (1.0, 0.9, 1.4), (0.1, 3.0, 1.0)]
    {
        let costs = Costs { forward, input, weight };
        for (p, v, m) in [(2, 1, 4), (4, 1, 8), (4, 1, 3), (4, 2, 8), (3, 2, 7), (4, 3, 2), (8, 1, 32)] {
            let plan = PipelinePlan { costs, ..PipelinePlan::new(p, v, m) };
            let zero = PipelinePlan { kind: ScheduleKind::ZeroBubble, ..plan.clone() };
            let (plain, zero) = (time(&plan, &costs), time(&zero, &costs));
            assert!(
                zero.makespan() <= plain.makespan() + 1e-9,
                "{costs:?} {p} {v} {m}:\n{}{}",
                plain.draw(300),
                zero.draw(300)
            );
        }
    }
}

#[test]
fn invalid_plans_are_refused() {
    for plan in [
        PipelinePlan::new(0, 1, 1),
        PipelinePlan::new(1, 0, 1),
        PipelinePlan::new(1, 1, 0),
        PipelinePlan::new(usize::MAX, 2, 2),
        PipelinePlan { costs: Costs { forward: 0.0, ..Costs::default() }, ..PipelinePlan::new(2, 1, 2) },
        PipelinePlan { costs: Costs { weight: f64::NAN, ..Costs::default() }, ..PipelinePlan::new(2, 1, 2) },
    ] {
        assert!(plan.schedule().is_err(), "{plan:?}");
    }
}

#[test]
fn drawings() {
    let costs = Costs::default();
    assert_eq!(
        time(&PipelinePlan::new(2, 1, 2), &costs).draw(200),
        "P=2 v=1 M=2: time 9, bubble 33.3 % of it (50.0 % of the work)\n\
         rank  0 |F0 F1 ......B0--- ...B1--- \n\
         rank  1 |...F0 B0--- F1 B1--- ......\n"
    );
    assert_eq!(
        time(&PipelinePlan { kind: ScheduleKind::ZeroBubble, ..PipelinePlan::new(2, 1, 4) }, &costs)
            .draw(200),
        "P=2 v=1 M=4: time 13, bubble 7.7 % of it (8.3 % of the work)\n\
         rank  0 |F0 F1 ...I0 W0 F2 I1 W1 F3 I2 W2 I3 W3 \n\
         rank  1 |...F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3 \n"
    );
    let chunks = time(&PipelinePlan::new(2, 2, 2), &costs).draw(20);
    assert!(chunks.contains("F0a ") && chunks.contains("F0b ") && chunks.ends_with("…\n"), "{chunks}");
}

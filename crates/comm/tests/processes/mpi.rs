//! Over MPI, under `mpirun`.

use crate::TIMEOUT;
use crate::launch::{By, Outcome};

fn good(scenario: &str, options: &[&str]) {
    crate::launch::good(By::Mpirun(options), scenario);
}

fn bad(scenario: &str) -> Option<Outcome> {
    crate::launch::bad(By::Mpirun(&[]), scenario, None)
}

#[test]
fn every_operation_equals_its_definition() {
    good("good operations", &[]);
}

#[test]
fn every_operation_over_tcp() {
    good("good operations", &["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"]);
}

#[test]
fn long_sums_are_split_into_segments() {
    good("good long", &[]);
}

#[test]
#[ignore = "takes 9 GiB of memory; run it after changes to transfers"]
fn messages_may_exceed_32_bit_counts() {
    good("good beyond 32 bits", &[]);
}

#[test]
fn a_waiting_rank_does_not_use_cpu_time() {
    good("good idle", &[]);
}

#[test]
fn a_different_shape_is_named_on_every_rank() {
    let Some(o) = bad("different shape") else { return };
    for rank in 0..4 {
        assert!(o.says(rank, &["ends: ", "rank 2", "gradients", "[4]", "[5]"]), "{}", o.text);
    }
}

#[test]
fn a_skipped_collective_is_named_on_every_rank() {
    let Some(o) = bad("skipped") else { return };
    for rank in 0..4 {
        assert!(o.says(rank, &["ends: ", "rank 3", "gradients", "'step'"]), "{}", o.text);
    }
}

#[test]
fn a_different_message_is_named() {
    let Some(o) = bad("different message") else { return };
    assert!(o.says(1, &["ends: ", "rank 0", "activations", "[4]", "[5]"]), "{}", o.text);
    for rank in [0, 2, 3] {
        // They get the report while they wait.
        assert!(o.says(rank, &["ends: ", "rank 1 failed", "activations"]), "{}", o.text);
    }
}

#[test]
fn different_groups_are_named() {
    let Some(o) = bad("different groups") else { return };
    // The rank after the one that differs notices it and reports it to the others.
    for rank in 0..4 {
        assert!(o.says(rank, &["ends: ", "[0, 1]", "[0, 2]", "rank 1"]), "{}", o.text);
    }
}

#[test]
fn a_killed_rank_ends_the_job() {
    let Some(o) = bad("killed") else { return };
    // Open MPI detects the death of a process itself and ends the others.
    assert!(o.text.lines().any(|l| l.contains("rank 2") && l.contains("signal 9")), "{}", o.text);
}

#[test]
fn a_stopped_rank_is_named_on_every_other() {
    let Some(o) = bad("stopped") else { return };
    assert!(o.seconds > TIMEOUT.as_secs_f64());
    for rank in [0, 2, 3] {
        let waited = format!("rank {rank} waited");
        let words = ["ferrotron: stalled", &waited, "'never'", "rank 1 (it completed barrier 'before'"];
        assert!(o.says(rank, &words), "{}", o.text);
    }
}

#[test]
fn a_rank_stopped_in_a_transfer_is_named_on_every_other() {
    let Some(o) = bad("stopped in a transfer") else { return };
    for rank in [0, 2, 3] {
        let waited = format!("rank {rank} waited");
        assert!(o.says(rank, &["ferrotron: stalled", &waited, "'weights'", "rank 1 ("]), "{}", o.text);
    }
}

#[test]
fn a_late_rank_reports_its_last_operation() {
    let Some(o) = bad("late") else { return };
    for rank in [0, 2, 3] {
        let waited = format!("rank {rank} waited");
        let words = ["ends: ", &waited, "'never'", "rank 1 (it completed barrier 'start'"];
        assert!(o.says(rank, &words), "{}", o.text);
        assert!(!o.says(rank, &["stopped responding"]), "{}", o.text);
    }
}

#[test]
fn a_rank_that_exited_early_is_named() {
    let Some(o) = bad("exited early") else { return };
    for rank in [0, 2, 3] {
        assert!(o.says(rank, &["ends: ", "'never'", "rank 1 (it completed barrier 'start'"]), "{}", o.text);
    }
}

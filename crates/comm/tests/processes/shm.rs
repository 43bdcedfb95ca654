//! Over shared memory, started with plain variables.

use crate::TIMEOUT;
use crate::launch::{By, Outcome};

fn good(scenario: &str) {
    crate::launch::good(By::Variables, scenario);
}

fn bad(scenario: &str, stopped: Option<usize>) -> Outcome {
    crate::launch::bad(By::Variables, scenario, stopped).unwrap()
}

#[test]
fn every_operation_equals_its_definition() {
    good("good operations");
}

#[test]
fn long_sums_are_split_into_segments() {
    good("good long");
}

#[test]
#[ignore = "takes 9 GiB of memory; run it after changes to transfers"]
fn messages_may_exceed_32_bit_counts() {
    good("good beyond 32 bits");
}

#[test]
fn collectives_send_no_control_frames() {
    good("good frames");
}

#[test]
fn a_waiting_rank_does_not_use_cpu_time() {
    good("good idle");
}

#[test]
fn a_different_shape_is_named_on_every_rank() {
    let o = bad("different shape", None);
    for rank in 0..4 {
        assert!(o.says(rank, &["ends: ", "rank 2", "gradients", "[4]", "[5]"]), "{}", o.text);
    }
}

#[test]
fn a_skipped_collective_is_named_on_every_rank() {
    let o = bad("skipped", None);
    for rank in 0..4 {
        assert!(o.says(rank, &["ends: ", "rank 3", "gradients", "'step'"]), "{}", o.text);
    }
}

#[test]
fn a_different_message_is_named() {
    let o = bad("different message", None);
    assert!(o.says(1, &["ends: ", "rank 0", "activations", "[4]", "[5]"]), "{}", o.text);
    for rank in [0, 2, 3] {
        // They get the report while they wait.
        assert!(o.says(rank, &["ends: ", "rank 1 failed", "activations"]), "{}", o.text);
    }
}

#[test]
fn different_groups_are_named() {
    let o = bad("different groups", None);
    // The rank after the one that differs notices it and reports it to the others.
    for rank in 0..4 {
        assert!(o.says(rank, &["ends: ", "[0, 1]", "[0, 2]", "rank 1"]), "{}", o.text);
    }
}

#[test]
fn a_killed_rank_is_named_at_once_by_every_other() {
    let o = bad("killed", None);
    for rank in [0, 1, 3] {
        assert!(o.says(rank, &["ends: ", "rank 2", "exited"]), "{}", o.text);
    }
    assert!(o.seconds < 10.0, "it took {:.1} s", o.seconds);
}

#[test]
fn rank_0_killed_is_named_by_every_other() {
    let o = bad("rank 0 killed", None);
    for rank in [1, 2, 3] {
        assert!(o.says(rank, &["ends: ", "rank 0", "exited"]), "{}", o.text);
    }
    assert!(o.seconds < 10.0, "it took {:.1} s", o.seconds);
}

#[test]
fn nothing_is_left_behind() {
    bad("killed", None);
    let left = std::fs::read_dir("/dev/shm").unwrap().map(|f| f.unwrap().file_name());
    let left: Vec<_> = left.filter(|name| name.to_string_lossy().contains("ferrotron")).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_stopped_rank_is_named_on_every_other() {
    let o = bad("stopped", Some(1));
    assert!(o.seconds > TIMEOUT.as_secs_f64());
    for rank in [0, 2, 3] {
        let waited = format!("rank {rank} waited");
        let words = ["ferrotron: stalled", &waited, "'never'", "rank 1 (it completed barrier 'before'"];
        assert!(o.says(rank, &words), "{}", o.text);
    }
}

#[test]
fn rank_0_stopped_is_named_by_ranks_that_wait_for_each_other() {
    let o = bad("rank 0 stopped", Some(0));
    for rank in [1, 2, 3] {
        let waited = format!("rank {rank} waited");
        assert!(o.says(rank, &["ferrotron: stalled", &waited, "for rank 0 (it completed"]), "{}", o.text);
    }
}

#[test]
fn a_rank_stopped_in_a_transfer_is_named_on_every_other() {
    let o = bad("stopped in a transfer", Some(1));
    // Ranks may be a transfer apart; the first to give up ends the wait of the others.
    let waited =
        |rank: &usize| o.says(*rank, &["ferrotron: stalled", &format!("rank {rank} waited"), "for rank 1 ("]);
    assert!([0, 2, 3].iter().any(waited), "{}", o.text);
    for rank in [0, 2, 3] {
        assert!(o.says(rank, &["ends: ", "'weights'", "for rank 1 ("]), "{}", o.text);
    }
}

#[test]
fn a_late_rank_reports_its_last_operation() {
    let o = bad("late", None);
    for rank in [0, 2, 3] {
        let waited = format!("rank {rank} waited");
        let words = ["ends: ", &waited, "'never'", "rank 1 (it completed barrier 'start'"];
        assert!(o.says(rank, &words), "{}", o.text);
        assert!(!o.says(rank, &["stopped responding"]), "{}", o.text);
    }
}

#[test]
fn a_rank_that_exited_early_is_named() {
    let o = bad("exited early", None);
    for rank in [0, 2, 3] {
        assert!(o.says(rank, &["ends: ", "'never'", "rank 1 (it completed barrier 'start'"]), "{}", o.text);
    }
}

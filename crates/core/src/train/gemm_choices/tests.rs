use super::*;
use ferrotron_comm::World;
use std::time::Duration;

fn library() -> GemmLibrary {
    GemmLibrary {
        card: "NVIDIA H200, sm_90, 132 multiprocessors".into(),
        driver: 13000,
        cublaslt: 130000,
        method: 2,
    }
}

fn choice(gemm: &str, algorithm: &str) -> GemmChoice {
    GemmChoice { gemm: gemm.into(), algorithm: algorithm.into() }
}

fn table(choices: &[(&str, &str, u64)]) -> GemmTable {
    let mut table = GemmTable::new(library());
    for (gemm, algorithm, since) in choices {
        table.add(vec![choice(gemm, algorithm)], *since);
    }
    table
}

/// Runs `work` on `n` ranks, one thread each.
fn on_ranks<T: Send>(n: usize, work: impl Fn(usize, Communicator) -> T + Sync) -> Vec<T> {
    let worlds = World::threads(n, Duration::from_secs(20));
    std::thread::scope(|s| {
        let work = &work;
        let threads: Vec<_> = worlds.into_iter().map(|w| s.spawn(move || work(w.rank(), w.all()))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[test]
fn a_choice_stands_and_counts_from_its_step_on() {
    let mut t = table(&[("a", "01", 2)]);
    assert!(!t.add(vec![choice("a", "02")], 3), "a GEMM keeps its choice");
    assert!(t.add(vec![choice("b", "03"), choice("a", "02")], 5));
    assert_eq!(t.at(1), []);
    assert_eq!(t.at(2), [choice("a", "01")]);
    assert_eq!(t.at(5), [choice("a", "01"), choice("b", "03")]);
    assert_eq!((1..7).filter(|step| t.changes_at(*step)).collect::<Vec<_>>(), [2, 5]);
}

#[test]
fn all_ranks_have_the_table_of_the_first_rank_that_chose() {
    let tables = on_ranks(3, |rank, all| {
        // Rank 0 has another stage; ranks 1 and 2 timed the same GEMM differently.
        let mine = match rank {
            0 => vec![choice("x", "00")],
            1 => vec![choice("y", "01"), choice("z", "01")],
            _ => vec![choice("w", "02"), choice("y", "02")],
        };
        let mut table = GemmTable::new(library());
        table.add(all_gather_choices(&all, &mine).unwrap(), 2);
        table
    });
    assert_eq!(tables[0], table(&[("w", "02", 2), ("x", "00", 2), ("y", "01", 2), ("z", "01", 2)]));
    assert!(tables.iter().all(|t| *t == tables[0]));
}

#[test]
fn a_resumed_run_goes_on_with_the_choices_of_checkpoint_and_folder() {
    // The folder knows a choice that was made after the checkpoint.
    let (saved, folder) = (table(&[("a", "01", 2)]), table(&[("a", "09", 2), ("b", "03", 51)]));
    let (t, note) = GemmTable::new(library()).resume(Some(saved), Some(folder));
    assert_eq!((t, note), (table(&[("a", "01", 2), ("b", "03", 51)]), None));
    // A checkpoint of the CPU or of an earlier version has none.
    assert_eq!(GemmTable::new(library()).resume(None, None), (GemmTable::new(library()), None));
}

#[test]
fn another_library_chooses_anew_and_is_named() {
    let (driver, cublaslt) = (12080, 120804);
    let now = GemmLibrary { driver, cublaslt, ..library() };
    let mut folder = GemmTable::new(now.clone());
    folder.add(vec![choice("b", "03")], 0);
    let (t, note) = GemmTable::new(now.clone()).resume(Some(table(&[("a", "01", 2)])), Some(folder.clone()));
    assert_eq!(t, folder);
    let note = note.unwrap();
    assert!(note.contains("driver 13000 → 12080, cuBLASLt 130000 → 120804"), "{note}");
    assert!(!note.contains("H200"), "{note}");
    // The folder may be newer than the checkpoint: nothing to say.
    assert_eq!(GemmTable::new(library()).resume(None, Some(folder)), (GemmTable::new(library()), None));
    let card = GemmLibrary { card: "NVIDIA H100".into(), ..library() };
    let note = GemmTable::new(card).resume(Some(table(&[])), None).1.unwrap();
    assert!(note.contains("GPU NVIDIA H200, sm_90, 132 multiprocessors → NVIDIA H100"), "{note}");
}

#[test]
fn ranks_learn_the_folder_of_rank_0_and_name_ranks_that_differ() {
    let folder = table(&[("a", "01", 2)]);
    let all = on_ranks(3, |rank, all| {
        let mine = GemmLibrary { driver: if rank == 2 { 12080 } else { 13000 }, ..library() };
        greet(&all, &mine, (rank == 0).then(|| folder.clone())).unwrap()
    });
    for (found, notes) in all {
        assert_eq!(found.as_ref(), Some(&folder));
        assert_eq!(notes.len(), 1);
        assert!(notes[0].contains("rank 2") && notes[0].contains("driver 13000 → 12080"), "{notes:?}");
    }
}

#[test]
fn the_file_reads_back_and_damage_is_an_error() {
    let t = table(&[("GemmKey { m: 4 }", "01ff", 0), ("b", "02", 7)]);
    let text = t.to_json().unwrap();
    assert_eq!(GemmTable::from_json(&text).unwrap(), t);
    for cut in [0, 1, text.len() / 2, text.len() - 3] {
        assert!(GemmTable::from_json(&text[..cut]).is_err(), "cut at {cut}");
    }
    assert!(GemmTable::from_json(b"{\"library\": 3}").unwrap_err().contains("no table of GEMM algorithms"));
}

//! Several ranks load one checkpoint: no byte is read twice, and an error of one rank is returned on all.

use super::*;
use crate::tensorfile::TensorFile;
use ferrotron_comm::{Communicator, World};
use ferrotron_engine::Shard;
use std::fs;
use std::time::Duration;

/// Runs `work` on `n` ranks.
pub(super) fn ranks<T: Send>(n: usize, work: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    let worlds = World::threads(n, Duration::from_secs(60));
    std::thread::scope(|scope| {
        let work = &work;
        let all: Vec<_> = worlds.iter().map(|w| scope.spawn(move || work(w.all()))).collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn sizes(path: &Path) -> u64 {
    files(path).iter().filter(|(n, _)| n.ends_with(".safetensors")).map(|(_, b)| b.len() as u64).sum()
}

/// The error of each of `n` ranks that load the folder given by `path`.
fn errors(n: usize, path: impl Fn(usize) -> PathBuf + Sync) -> Vec<String> {
    ranks(n, |group| match load_parallel(&path(group.rank()), &group) {
        Ok(_) => panic!("rank {} loaded", group.rank()),
        Err(e) => e.to_string(),
    })
}

#[test]
fn each_byte_is_read_by_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    let mut snapshot = snapshot(7, 3);
    // Longer than the read buffer, and of odd length.
    let large = SeededRng(9).bytes((9 << 20) + 13);
    let shape = vec![large.len()];
    snapshot.items.push(Item::whole("model/large", DType::Bool, shape, large));
    let path = save(dir.path(), &snapshot);
    let headers: u64 = ["model", "optimizer"]
        .map(|f| TensorFile::open(&path.join(f).with_extension("safetensors")).unwrap().header_bytes())
        .iter()
        .sum();
    let whole: u64 = snapshot.items.iter().map(|i| i.bytes.len() as u64).sum();
    for n in [1, 2, 3, 5, 16] {
        let read = ranks(n, |group| {
            let loaded = load_parallel(&path, &group).unwrap();
            for item in &snapshot.items {
                // Split along the last axis, which gives the most runs.
                let mut shape = item.shape.clone();
                let axis = shape.len().saturating_sub(1);
                shape.extend((shape.is_empty()).then_some(1));
                let cut = |i: usize| shape[axis] * i / n;
                let cut = Shard { axis, range: cut(group.rank())..cut(group.rank() + 1) };
                shape.push(item.dtype.size());
                let held = loaded.read_runs(&item.name, &cut.runs(&shape)).unwrap();
                assert_eq!(held, cut.take(&shape, &item.bytes), "{} of {}", item.name, group.rank());
            }
            loaded.bytes_read()
        });
        assert!(read.iter().all(|r| r.headers == headers));
        assert_eq!(read.iter().map(|r| r.checked).sum::<u64>(), sizes(&path), "{n} ranks");
        assert_eq!(read.iter().map(|r| r.tensors).sum::<u64>(), whole, "{n} ranks");
        let most = read.iter().map(|r| r.checked).max().unwrap();
        assert!(most <= sizes(&path).div_ceil(n as u64) + 2, "{n} ranks: one checks {most}");
    }
}

#[test]
fn runs_return_their_byte_ranges() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = snapshot(7, 3);
    let loaded = load(&save(dir.path(), &snapshot)).unwrap();
    let mut rng = SeededRng(4);
    for item in &snapshot.items {
        for _ in 0..50 {
            let bytes = item.bytes.len();
            let mut place = || rng.below(bytes + 1);
            let mut marks: Vec<usize> = (0..6).map(|_| place()).collect();
            marks.sort();
            // Adjacent, separate and empty ranges, and one that goes back.
            let runs = [marks[0]..marks[1], marks[1]..marks[2], marks[3]..marks[4], marks[0]..marks[5]];
            let wanted: Vec<u8> = runs.iter().flat_map(|r| item.bytes[r.clone()].iter().copied()).collect();
            let before = loaded.bytes_read().tensors;
            assert_eq!(loaded.read_runs(&item.name, &runs).unwrap(), wanted);
            assert_eq!(loaded.bytes_read().tensors - before, wanted.len() as u64);
        }
        let end = item.bytes.len();
        #[allow(clippy::reversed_empty_ranges)]
        for bad in [0..end + 1, end..usize::MAX, usize::MAX - 1..usize::MAX, 1..0] {
            let e = loaded.read_runs(&item.name, &[0..0, bad]).unwrap_err().to_string();
            assert!(e.contains("asked for"), "{e}");
        }
    }
    assert!(matches!(loaded.read_runs("nothing", &[]), Err(Error::Missing { .. })));
}

#[test]
fn damage_anywhere_is_an_error_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), &snapshot(7, 3));
    let mut rng = SeededRng(1);
    for (name, good) in files(&path) {
        for at in (0..good.len()).step_by(5) {
            let mut bad = good.clone();
            bad[at] ^= 1 << rng.below(8);
            fs::write(path.join(&name), &bad).unwrap();
            for e in errors(3, |_| path.clone()) {
                assert!(e.contains(&name) && !e.contains('\n'), "{name} at {at}: {e}");
            }
        }
        fs::write(path.join(&name), &good[..good.len() - 1]).unwrap();
        assert!(errors(3, |_| path.clone()).iter().all(|e| e.contains(&name)));
        fs::write(path.join(&name), &good).unwrap();
    }
    assert!(ranks(3, |group| load_parallel(&path, &group).is_ok()).iter().all(|ok| *ok));
}

/// Hosts that see different files: rank 2 of 3 sees its own copy.
#[test]
fn an_error_of_one_rank_is_returned_on_all() {
    let (ours, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let path = save(ours.path(), &snapshot(7, 3));
    let copy = save(theirs.path(), &snapshot(7, 3));
    let view = |rank| if rank == 2 { copy.clone() } else { path.clone() };
    assert!(ranks(3, |g| load_parallel(&view(g.rank()), &g).is_ok()).iter().all(|ok| *ok));

    let file = copy.join("model.safetensors");
    let good = fs::read(&file).unwrap();
    fs::remove_file(&file).unwrap();
    let said = errors(3, view);
    assert!(said[2].starts_with(&*file.to_string_lossy()) && said[2].contains("is missing"), "{said:?}");
    for rank in [0, 1] {
        let wanted = format!("{}: rank 2 found: {}", path.display(), said[2]);
        assert_eq!(said[rank], wanted);
    }

    // In the last third, which rank 2 verifies: the other ranks' stripes match, the combined checksum does not.
    let mut bad = good.clone();
    bad[good.len() - 1] ^= 4;
    fs::write(&file, &bad).unwrap();
    let said = errors(3, view);
    assert!(said.iter().all(|e| e.contains("model.safetensors") && e.contains("checksum")), "{said:?}");

    fs::remove_dir_all(&copy).unwrap();
    save(theirs.path(), &snapshot(7, 4));
    let said = errors(3, view);
    assert!(said.iter().all(|e| e.contains("rank 2 sees another manifest.json")), "{said:?}");
}

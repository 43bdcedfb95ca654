//! Checkpoints that several ranks write: any cut of the tensors reads the same, and a failure of one rank is one of all.

use super::parallel::ranks;
use super::*;
use ferrotron_comm::Communicator;
use ferrotron_engine::Shard;
use std::fs;

/// The parts of `snapshot` that rank `rank` of `size` writes: tensors are cut along an axis, the cuts at any element, and
/// some tensors are written whole by one rank.
fn part_of(snapshot: &Snapshot, rank: usize, size: usize) -> Snapshot {
    let mut items = Vec::new();
    for (i, item) in snapshot.items.iter().enumerate() {
        let numel: usize = item.shape.iter().product();
        let whole = i % 3 == 2 || numel < 2 * size || item.shape.is_empty();
        if whole {
            items.extend((i % size == rank).then(|| item.clone()));
            continue;
        }
        // Boxes along the last or first axis, each shared by neighbours that cut it at an odd place.
        let axis = if i % 2 == 0 { item.shape.len() - 1 } else { 0 };
        let boxes = size.div_ceil(2).min(item.shape[axis]);
        let mine = (rank / 2).min(boxes - 1);
        let holders: Vec<usize> = (0..size).filter(|r| (r / 2).min(boxes - 1) == mine).collect();
        let cut = |n: usize| item.shape[axis] * n / boxes;
        let shard = Shard { axis, range: cut(mine)..cut(mine + 1) };
        let all: usize = shard.shape(&item.shape).iter().product();
        let at = holders.iter().position(|r| *r == rank).unwrap();
        let mark = |n: usize| if n == holders.len() { all } else { (all * n / holders.len() + n).min(all) };
        let elements = mark(at)..mark(at + 1);
        if elements.is_empty() {
            continue;
        }
        let width = item.dtype.size();
        let bytes: Vec<u8> = shard
            .runs_within(&item.shape, elements.clone())
            .into_iter()
            .flat_map(|r| item.bytes[r.start * width..r.end * width].to_vec())
            .collect();
        items.push(Item { slice: Slice::of_shard(&item.shape, &shard, elements), bytes, ..item.clone() });
    }
    Snapshot { items, ..snapshot.clone() }
}

fn large(step: u64, seed: u64) -> Snapshot {
    let mut all = snapshot(step, seed);
    let mut rng = SeededRng(seed + 1);
    for (i, shape) in [vec![40, 33], vec![64], vec![5, 7, 11], vec![1, 100]].into_iter().enumerate() {
        let bytes = rng.bytes(shape.iter().product::<usize>() * 4);
        all.items.push(Item::whole(&format!("model/large.{i}"), DType::F32, shape, bytes));
    }
    all
}

fn save_on(dir: &Path, group: &Communicator, snapshot: Snapshot) -> crate::Result<()> {
    let mut saver = Saver::on(dir, None, group)?;
    saver.save(snapshot).and_then(|()| saver.finish())
}

#[test]
fn any_cut_reads_the_same_as_one_rank() {
    let root = tempfile::tempdir().unwrap();
    let all = large(7, 3);
    let one = save(&root.path().join("one"), &all);
    for size in [2, 3, 4, 7] {
        let dir = root.path().join(size.to_string());
        let done = ranks(size, |g| save_on(&dir, &g, part_of(&all, g.rank(), size)));
        done.into_iter().for_each(|d| d.unwrap());
        let path = dir.join("step-00000007");
        assert_holds(&path, &all);
        assert!(compare(&one, &path).unwrap().same(), "{size} ranks");
        let names = names(&path);
        assert!(names.contains(&format!("model-rank-{:05}.safetensors", size - 1)), "{names:?}");
        assert!(!names.iter().any(|n| n.starts_with("index")), "{names:?}");
        assert_eq!(super::names(&dir), ["step-00000007"]);
        // Saved again it has the same bytes.
        let before = files(&path);
        ranks(size, |g| save_on(&dir, &g, part_of(&all, g.rank(), size)).unwrap());
        assert!(files(&path) == before);
        // Each rank reads its own rows and nothing else.
        let read = ranks(size, |g| {
            let loaded = load_parallel(&path, &g).unwrap();
            let rows = |n: usize| 40 * n / size * 33 * 4;
            let runs = rows(g.rank())..rows(g.rank() + 1);
            let bytes = loaded.read_runs("model/large.0", std::slice::from_ref(&runs)).unwrap();
            let item = all.items.iter().find(|i| i.name == "model/large.0").unwrap();
            assert!(bytes == item.bytes[runs]);
            loaded.bytes_read().tensors
        });
        assert_eq!(read.iter().sum::<u64>(), 40 * 33 * 4);
    }
}

#[test]
fn a_failure_of_one_rank_is_one_of_all_and_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let (dir, all) = (root.path(), large(7, 3));
    ranks(3, |g| save_on(dir, &g, part_of(&large(6, 3), g.rank(), 3)).unwrap());
    type Change<'a> = (&'a (dyn Fn(&mut Snapshot) + Sync), &'a str);
    let changes: [Change; 4] = [
        (&|s| s.items[0].bytes.push(0), "rank 2: checkpoint: tensor"),
        (&|s| s.items.push(s.items[0].clone()), "appears twice"),
        (&|s| drop(s.items.pop()), "is not complete: the parts of tensor \"model/large."),
        (&|s| s.items[0].dtype = DType::I32, "another type or shape than other ranks"),
    ];
    for (change, want) in changes {
        let said = ranks(3, |g| {
            let mut mine = part_of(&all, g.rank(), 3);
            if g.rank() == 2 {
                // Of a tensor that others have parts of too, and of four bytes an element.
                let at = mine.items.iter().position(|i| i.name == "model/large.0").unwrap();
                mine.items.swap(0, at);
                change(&mut mine);
            }
            save_on(dir, &g, mine).unwrap_err().to_string()
        });
        assert!(said[0].contains(want), "{want}: {said:?}");
        assert!(said.iter().all(|s| s.contains(said[2].split(": ").last().unwrap())), "{said:?}");
        assert_eq!(names(dir), ["step-00000006"], "{want}");
    }
    ranks(3, |g| save_on(dir, &g, part_of(&all, g.rank(), 3)).unwrap());
    assert_holds(&dir.join("step-00000007"), &all);
}

/// A manifest of many ranks is long, so a part takes one line; earlier versions gave each of its keys one, which is read too.
#[test]
fn a_manifest_has_one_line_for_each_part() {
    let root = tempfile::tempdir().unwrap();
    let all = large(7, 3);
    ranks(4, |g| save_on(root.path(), &g, part_of(&all, g.rank(), 4)).unwrap());
    let path = root.path().join("step-00000007");
    let manifest = path.join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    let parts: Vec<&str> = text.lines().filter(|line| line.contains("\"file\": ")).collect();
    let sliced = parts.iter().filter(|line| line.contains("\"range\": [")).count();
    assert!(sliced > 8 && parts.iter().all(|l| l.contains("\"crc32c\": \"") && l.len() < 200), "{text}");
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    value.as_object_mut().unwrap().remove("checksum");
    let pretty = serde_json::to_string_pretty(&value).unwrap();
    let body = pretty.strip_prefix("{\n").unwrap();
    let sum = crc32c::crc32c(body.as_bytes());
    fs::write(&manifest, format!("{{\n  \"checksum\": \"crc32c:{sum:08x}\",\n{body}")).unwrap();
    assert!(pretty.lines().count() > text.lines().count());
    assert_holds(&path, &all);
}

#[test]
fn a_missing_or_damaged_part_is_named_by_file_and_tensor() {
    let root = tempfile::tempdir().unwrap();
    let all = large(7, 3);
    ranks(4, |g| save_on(root.path(), &g, part_of(&all, g.rank(), 4)).unwrap());
    let path = root.path().join("step-00000007");
    let file = path.join("model-rank-00001.safetensors");
    let good = fs::read(&file).unwrap();
    let opened = crate::tensorfile::TensorFile::open(&file).unwrap();
    for tensor in opened.tensors().iter().filter(|t| t.bytes() > 0) {
        let mut bad = good.clone();
        bad[(tensor.begin + tensor.end) as usize / 2] ^= 16;
        fs::write(&file, &bad).unwrap();
        let e = load(&path).unwrap_err().to_string();
        let want = format!("model-rank-00001.safetensors: is damaged in tensor {:?}", tensor.name);
        assert!(e.contains(&want), "{e}");
    }
    fs::remove_file(&file).unwrap();
    for e in ranks(2, |g| load_parallel(&path, &g).unwrap_err().to_string()) {
        assert!(e.contains("model-rank-00001.safetensors: is missing"), "{e}");
        assert!(e.contains("it holds tensor \"model/"), "{e}");
    }
}

/// A save goes on in the background: ranks poll, and nothing is a checkpoint before all have written.
#[test]
fn ranks_poll_until_the_checkpoint_is_there() {
    let root = tempfile::tempdir().unwrap();
    let (dir, all) = (root.path(), large(7, 3));
    let polls = ranks(3, |g| {
        let mut saver = Saver::on(dir, Some(1), &g).unwrap();
        let mut polls = 0;
        for step in [7, 8] {
            saver.save(Snapshot { step, ..part_of(&all, g.rank(), 3) }).unwrap();
            loop {
                // What a step boundary does: agree, then poll.
                let busy = [u8::from(saver.is_busy())];
                let idle = g.all_gather_bytes(&busy, "busy").unwrap().iter().all(|b| b == &[0]);
                polls += 1;
                if let Some((ended, result)) = saver.poll(idle).unwrap() {
                    result.unwrap();
                    assert_eq!(ended, step);
                    break;
                }
                assert!(saver.poll(false).unwrap().is_none());
            }
            assert!(dir.join(folder_name(step)).is_dir());
        }
        assert!(saver.wait().unwrap().is_none());
        polls
    });
    assert!(polls.iter().all(|p| *p == polls[0]) && polls[0] >= 4, "{polls:?}");
    assert_eq!(names(dir), ["step-00000008"]);
}

//! Checkpoints that cannot be deleted.
#![cfg(unix)]

use ferrotron_core::checkpoint::{self, Item, Saver, Snapshot};
use ferrotron_tensor::DType;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

fn snapshot(step: u64) -> Snapshot {
    let item = Item::whole("weight", DType::F32, vec![2], step.to_le_bytes().to_vec());
    Snapshot { step, state: serde_json::json!({}), items: vec![item] }
}

fn names(dir: &Path) -> Vec<String> {
    let all = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    all.filter(|name| name != ".lock").collect()
}

/// A folder from which nothing can be deleted, as while a job on another machine reads it; false for a user whom permissions do
/// not concern.
fn lock_up(dir: &Path) -> bool {
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o555)).unwrap();
    std::fs::File::create(dir.join("probe"))
        .map(|_| std::fs::remove_file(dir.join("probe")).unwrap())
        .is_err()
}

#[test]
fn old_checkpoints_that_cannot_be_deleted_hold_up_neither_saves_nor_the_next_start() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path();
    let steps = || checkpoint::list(dir).unwrap().into_iter().map(|(step, _)| step).collect::<Vec<_>>();
    let mut works = true;
    // Of the same step, too, more than once.
    for step in [1, 2, 2, 2, 1, 3] {
        let mut saver = Saver::new(dir, Some(1)).unwrap();
        saver.save(snapshot(step)).unwrap();
        saver.finish().unwrap();
        saver.tidy().unwrap();
        let path = dir.join(checkpoint::folder_name(step));
        if path.exists() {
            assert_eq!(checkpoint::load(&path).unwrap().step(), step);
            works = works && lock_up(&path);
        }
        let newest = if step == 1 { steps().pop() } else { Some(step) };
        assert_eq!(steps(), Vec::from_iter(newest));
    }
    let leftovers = names(dir).iter().filter(|name| name.starts_with('.')).count();
    assert_eq!(leftovers > 0, works, "{:?}", names(dir));
    for name in names(dir) {
        std::fs::set_permissions(dir.join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    drop(Saver::new(dir, None).unwrap());
    assert_eq!(names(dir), ["step-00000003"]);
}

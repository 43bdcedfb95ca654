//! Sets of golden vectors: where they lie, their JSON and tensors, and when a case counts as failed.
//!
//! A set is a folder with one folder per area (`attention`, `data`, ... ), all in one documented format. The tests read that
//! format, not a particular set: they run every case they find, fail by name on a key, file, tensor or case kind that the
//! format does not name, and fail when there is nothing to run. Test files include this module by `#[path]`.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test code; each test uses its part

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// Areas that some test of the workspace covers.
pub const AREAS: [&str; 11] = [
    "attention",
    "data",
    "fp8",
    "hf",
    "loss",
    "megatron-model",
    "optim",
    "permute",
    "ranks",
    "router",
    "schedules",
];

/// A vector that asks for something wrong. Its case must fail: once it passes, the entry is out of date.
pub struct Doubtful {
    pub area: &'static str,
    /// Does the entry mean the case of this name?
    pub case: fn(&str) -> bool,
    pub reason: &'static str,
}

/// All vectors that are believed to be wrong.
pub const DOUBTFUL: &[Doubtful] = &[Doubtful {
    area: "schedules",
    case: |name| {
        name.strip_prefix("layout ").is_some_and(|layout| !(layout.contains('E') && layout.contains('L')))
    },
    reason: "a pipeline layout without embedding (E) or LM head and loss (L) describes no model; the peer only parses it",
}];

/// The sets to test: the folders listed in `FERROTRON_GOLDEN` (separated by `:`), by default every `tests/golden*` of the
/// repository.
pub fn sets() -> Vec<PathBuf> {
    if let Some(list) = std::env::var_os("FERROTRON_GOLDEN") {
        let sets: Vec<PathBuf> = std::env::split_paths(&list).filter(|p| !p.as_os_str().is_empty()).collect();
        assert!(!sets.is_empty(), "FERROTRON_GOLDEN names no folder");
        for set in &sets {
            assert!(set.is_dir(), "FERROTRON_GOLDEN: {} is not a folder", set.display());
        }
        return sets;
    }
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests");
    let mut sets = folders(&tests);
    sets.retain(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("golden")));
    assert!(!sets.is_empty(), "no set of golden vectors in {}", tests.display());
    sets
}

/// The repository's own model of that name: a fixture of tests that need one model, whatever sets `FERROTRON_GOLDEN` names.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/hf").join(name)
}

/// The folders in a folder, sorted.
pub fn folders(dir: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .collect();
    found.sort();
    found
}

/// One area of one set.
#[derive(Clone, Debug)]
pub struct Area {
    pub name: &'static str,
    pub dir: PathBuf,
    /// The set's folder name, for messages.
    pub set: String,
}

impl Area {
    /// The area in every set that has it. No set with it is a failure.
    pub fn all(name: &'static str) -> Vec<Area> {
        assert!(AREAS.contains(&name), "{name} is missing in AREAS");
        let mut found = Vec::new();
        for root in sets() {
            let dir = root.join(name);
            let set = root.file_name().map_or_else(|| "golden".into(), |n| n.to_string_lossy().into_owned());
            match dir.is_dir() {
                true => found.push(Area { name, dir, set }),
                false => println!("{set}: has no area {name}"),
            }
        }
        assert!(!found.is_empty(), "no set of golden vectors has the area {name}");
        found
    }

    /// File names, sorted.
    pub fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.dir).unwrap_or_else(|e| panic!("{}: {e}", self.dir.display()));
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Fails by name on a file or folder that the format does not name. `README.md` may always be there.
    pub fn known_files(&self, known: impl Fn(&str) -> bool) {
        for name in self.files().iter().filter(|name| *name != "README.md") {
            assert!(known(name), "{}/{}/{name} is no file of the format", self.set, self.name);
        }
    }

    pub fn has(&self, file: &str) -> bool {
        self.dir.join(file).is_file()
    }

    pub fn json(&self, file: &str) -> Value {
        let path = self.dir.join(file);
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    /// The JSON files of the area that are there, of those named.
    pub fn present<'a>(&self, files: &[&'a str]) -> Vec<&'a str> {
        files.iter().copied().filter(|file| self.has(file)).collect()
    }

    pub fn tensors(&self, file: &str) -> Tensors {
        Tensors::open(&self.dir.join(file))
    }

    /// A report for this area of this set.
    pub fn report(&self) -> Report {
        Report { area: self.name, set: self.set.clone(), ran: 0, failed: Vec::new() }
    }
}

/// Runs cases one by one, so that all failures are listed by name.
pub struct Report {
    area: &'static str,
    set: String,
    ran: usize,
    failed: Vec<String>,
}

impl Report {
    /// Runs a case; a panic inside is its failure. A doubtful case must fail.
    pub fn case(&mut self, name: &str, run: impl FnOnce()) {
        self.ran += 1;
        let label = format!("{}/{}/{name}", self.set, self.area);
        let outcome = catch_unwind(AssertUnwindSafe(run));
        let doubt = DOUBTFUL.iter().find(|d| d.area == self.area && (d.case)(name));
        match (outcome, doubt) {
            (Ok(()), None) => {}
            (Err(_), Some(d)) => println!("doubtful, and fails: {label}: {}", d.reason),
            (Ok(()), Some(_)) => {
                self.failed.push(format!("{label}: is listed as doubtful but passes; take it off the list"))
            }
            (Err(panic), None) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
                self.failed.push(format!("{label}: {}", text.unwrap_or_default()));
            }
        }
    }

    /// Says aloud that something of a case cannot be run, and why.
    pub fn skip(&self, what: &str, why: &str) {
        println!("skipped: {}/{}/{what}: {why}", self.set, self.area);
    }

    /// Says aloud that this version lacks something.
    pub fn not_covered(&self, what: &str, why: &str) {
        println!("not covered: {}/{}/{what}: {why}", self.set, self.area);
    }

    /// Fails if a case failed, or if there was none.
    pub fn finish(self) {
        assert!(self.ran > 0, "{}/{} has no cases", self.set, self.area);
        let (set, area, n, ran) = (&self.set, self.area, self.failed.len(), self.ran);
        assert!(n == 0, "{set}/{area}: {n} of {ran} cases failed:\n{}", self.failed.join("\n"));
        println!("{set}/{area}: {ran} cases passed");
    }
}

/// Fails by name on a key that the format does not name.
pub fn only_keys(what: &str, value: &Value, known: &[&str]) {
    let object = value.as_object().unwrap_or_else(|| panic!("{what}: {value} is not an object"));
    for key in object.keys() {
        assert!(known.contains(&key.as_str()), "{what}: the format has no key {key}");
    }
}

/// The list under `key`; empty where it is absent.
pub fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    match &value[key] {
        Value::Null => &[],
        list => list.as_array().unwrap_or_else(|| panic!("{key}: {list} is not a list")),
    }
}

pub fn text<'a>(case: &'a Value, key: &str) -> &'a str {
    case[key].as_str().unwrap_or_else(|| panic!("{key} is {}, not a string", case[key]))
}

pub fn number(case: &Value, key: &str) -> f64 {
    case[key].as_f64().unwrap_or_else(|| panic!("{key} is {}, not a number", case[key]))
}

/// A number, or `otherwise` where the key is absent or null.
pub fn number_or(case: &Value, key: &str, otherwise: f64) -> f64 {
    if case[key].is_null() { otherwise } else { number(case, key) }
}

/// A whole number, written `4` or `4.0`.
pub fn count(case: &Value, key: &str) -> usize {
    as_count(&case[key]).unwrap_or_else(|| panic!("{key} is {}, not a count", case[key]))
}

/// A whole number of at least 0, written `4` or `4.0`.
pub fn as_count(value: &Value) -> Option<usize> {
    let real = || value.as_f64().filter(|x| *x >= 0.0 && x.fract() == 0.0).map(|x| x as u64);
    value.as_u64().or_else(real).map(|n| n as usize)
}

/// A boolean; false where the key is absent or null.
pub fn flag(case: &Value, key: &str) -> bool {
    match &case[key] {
        Value::Null => false,
        Value::Bool(on) => *on,
        Value::Number(n) if n.as_f64() == Some(0.0) => false,
        Value::Number(n) if n.as_f64() == Some(1.0) => true,
        other => panic!("{key} is {other}, not a boolean"),
    }
}

/// A boolean, or `otherwise` where the key is absent or null.
pub fn flag_or(case: &Value, key: &str, otherwise: bool) -> bool {
    if case[key].is_null() { otherwise } else { flag(case, key) }
}

pub fn numbers(case: &Value, key: &str) -> Vec<f64> {
    list(case, key).iter().map(|v| v.as_f64().unwrap_or_else(|| panic!("{key}: {v}"))).collect()
}

pub fn counts(case: &Value, key: &str) -> Vec<usize> {
    list(case, key).iter().map(|v| as_count(v).unwrap_or_else(|| panic!("{key}: {v}"))).collect()
}

/// The tensors of a file. It remembers which have been read, so that none is forgotten.
pub struct Tensors {
    path: PathBuf,
    bytes: Vec<u8>,
    unread: RefCell<BTreeSet<String>>,
}

impl Tensors {
    pub fn open(path: &Path) -> Tensors {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let unread = file.names().into_iter().map(|name| name.to_string()).collect();
        Tensors { path: path.into(), bytes, unread: RefCell::new(unread) }
    }

    fn file(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).unwrap()
    }

    /// All names, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.file().names().into_iter().map(|name| name.to_string()).collect();
        names.sort();
        names
    }

    pub fn has(&self, name: &str) -> bool {
        self.file().tensor(name).is_ok()
    }

    /// Type, shape and bytes. The tensor counts as read.
    pub fn raw(&self, name: &str) -> (Dtype, Vec<usize>, Vec<u8>) {
        let file = self.file();
        let t = file.tensor(name).unwrap_or_else(|e| panic!("{}: {e}", self.path.display()));
        self.unread.borrow_mut().remove(name);
        (t.dtype(), t.shape().to_vec(), t.data().to_vec())
    }

    pub fn dtype(&self, name: &str) -> Dtype {
        self.file().tensor(name).unwrap_or_else(|e| panic!("{}: {e}", self.path.display())).dtype()
    }

    pub fn shape(&self, name: &str) -> Vec<usize> {
        self.file().tensor(name).unwrap_or_else(|e| panic!("{}: {e}", self.path.display())).shape().to_vec()
    }

    fn typed<const N: usize>(&self, name: &str, dtype: Dtype) -> Vec<[u8; N]> {
        let (found, _, data) = self.raw(name);
        assert_eq!(found, dtype, "{name}");
        data.as_chunks::<N>().0.to_vec()
    }

    pub fn f32(&self, name: &str) -> Vec<f32> {
        self.typed(name, Dtype::F32).into_iter().map(f32::from_le_bytes).collect()
    }

    pub fn i64(&self, name: &str) -> Vec<i64> {
        self.typed(name, Dtype::I64).into_iter().map(i64::from_le_bytes).collect()
    }

    pub fn i16(&self, name: &str) -> Vec<i16> {
        self.typed(name, Dtype::I16).into_iter().map(i16::from_le_bytes).collect()
    }

    pub fn u8(&self, name: &str) -> Vec<u8> {
        self.typed::<1>(name, Dtype::U8).into_iter().flatten().collect()
    }

    /// Bit patterns of bf16 values.
    pub fn bf16_bits(&self, name: &str) -> Vec<u16> {
        self.typed(name, Dtype::BF16).into_iter().map(u16::from_le_bytes).collect()
    }

    /// Values of any type, widened.
    pub fn values(&self, name: &str) -> Vec<f64> {
        let (dtype, _, data) = self.raw(name);
        let bf16 = |b: &[u8; 2]| f64::from(f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16));
        match dtype {
            Dtype::F32 => data.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
            Dtype::F64 => data.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
            Dtype::BF16 => data.as_chunks().0.iter().map(bf16).collect(),
            Dtype::I64 => data.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect(),
            Dtype::I32 => data.as_chunks().0.iter().map(|b| f64::from(i32::from_le_bytes(*b))).collect(),
            Dtype::U8 => data.into_iter().map(f64::from).collect(),
            other => panic!("{name}: no values of {other:?}"),
        }
    }

    /// Tensors under a prefix that nothing has read yet.
    pub fn unread(&self, prefix: &str) -> Vec<String> {
        self.unread.borrow().iter().filter(|name| name.starts_with(prefix)).cloned().collect()
    }

    /// Fails by name on tensors under a prefix that nothing has read.
    pub fn all_read(&self, prefix: &str) {
        let unread = self.unread(prefix);
        assert!(unread.is_empty(), "{}: the format has no tensor {}", self.path.display(), unread.join(", "));
    }

    /// Fails by name on tensors `<case>/...` of no case.
    pub fn only_cases(&self, cases: &[Value]) {
        let known: BTreeSet<&str> = cases.iter().filter_map(|case| case["name"].as_str()).collect();
        for name in self.names() {
            let case = name.split('/').next().unwrap_or_default();
            assert!(known.contains(case), "{}: {name} belongs to no case", self.path.display());
        }
    }
}

/// Hugging Face model types that this version covers.
pub const MODEL_TYPES: [&str; 10] = [
    "gpt2",
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
];

/// A tiny Hugging Face model of the area `hf`.
#[derive(Clone, Debug)]
pub struct HfModel {
    pub dir: PathBuf,
    /// The folder's name.
    pub name: String,
    pub model_type: String,
}

impl HfModel {
    /// The models of one set. A model type that is not covered fails by name.
    pub fn of(area: &Area) -> Vec<HfModel> {
        let models: Vec<HfModel> = folders(&area.dir).into_iter().map(|dir| HfModel::open(&dir)).collect();
        assert!(!models.is_empty(), "{}/hf has no cases", area.set);
        models
    }

    /// The models of all sets.
    pub fn all() -> Vec<HfModel> {
        Area::all("hf").iter().flat_map(HfModel::of).collect()
    }

    fn open(dir: &Path) -> HfModel {
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        let known =
            ["config.json", "config_hub.json", "model.safetensors", "expected.safetensors", "README.md"];
        for entry in std::fs::read_dir(dir).unwrap() {
            let file = entry.unwrap().file_name().into_string().unwrap();
            assert!(known.contains(&file.as_str()), "hf/{name}/{file} is no file of the format");
        }
        let path = dir.join("config.json");
        let json = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let json: Value = serde_json::from_str(&json).unwrap();
        let model_type = text(&json, "model_type").to_string();
        assert!(
            MODEL_TYPES.contains(&model_type.as_str()),
            "hf/{name}: model type {model_type} is not covered"
        );
        HfModel { dir: dir.into(), name, model_type }
    }

    /// One spelling of the configuration: `config.json` or `config_hub.json`.
    pub fn config(&self, file: &str) -> Value {
        let path = self.dir.join(file);
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }
}

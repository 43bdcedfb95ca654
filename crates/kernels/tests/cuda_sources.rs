//! Every CUDA source compiles, on a machine without a GPU too, and has the kernels that the host launches by name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_kernels::cuda::{Compiler, KernelResources, SOURCES, Source, Variant, variants};
use std::collections::{BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Architectures of the cards that kernels run on, and KiB of shared memory of a block there.
const CARDS: [(&str, usize); 6] =
    [("sm_80", 163), ("sm_86", 99), ("sm_89", 99), ("sm_90a", 227), ("sm_100", 227), ("sm_120", 99)];

/// Most registers of a thread, and bytes of static shared memory, that kernels of a source may use, by the start of its
/// name; the first that fits counts. More would let fewer blocks run at a time than the launches are planned for.
const LIMITS: [(&str, usize, usize); 7] = [
    // One or two blocks to a multiprocessor: accumulators fill the registers.
    ("attention/", 255, 17 << 10),
    ("grouped/mma", 255, 128),
    ("grouped/hopper", 168, 1 << 10),
    // A warp has all scores of a token: 32 of up to 1024 experts to a lane.
    ("router/route", 216, 0),
    ("router/balance", 208, 33 << 10),
    ("router/sinkhorn", 152, 32 << 10),
    ("", 128, 22 << 10),
];

/// Most bytes that a kernel of a source, by the start of its name, spills on other architectures than `STRICT`;
/// everything else spills only what its source allows.
const SPILLS: [(&str, usize); 8] = [
    ("activation", 112),
    ("adam_packed", 160),
    ("attention/generic", 40),
    // The conversion of dq with 192 channels on sm_100, around its division.
    ("attention/hopper_backward_preprocess", 8),
    ("norm/", 56),
    ("quant/quantize", 168),
    ("router/z_loss", 16),
    ("row_bias", 24),
];

/// Architectures on which nothing else may spill: the oldest, and the one that speed is measured on.
const STRICT: [&str; 2] = ["sm_80", "sm_90a"];

/// Kernels whose warpgroups exchange registers by setmaxnreg until all of the block's are in use: a thread must have this many at
/// launch. With fewer, the last warpgroup to ask would wait for ever.
const LAUNCH_REGISTERS: [(&str, usize); 1] = [("attention_hopper_backward_192_bf16", 128)];

/// A compiled source, by name and variant, for an architecture.
type Key = (&'static str, Variant, &'static str);

/// NVRTC, or nothing where it is not installed; CI must have it.
fn compiler() -> Option<Compiler> {
    match Compiler::open() {
        Ok(compiler) => Some(compiler),
        Err(why) if std::env::var_os("CI").is_some() => panic!("{why}"),
        Err(why) => {
            eprintln!("SKIPPED: {why}");
            None
        }
    }
}

/// The resources of a source's kernels: as compiled now, or as an earlier run found them for the same text and compiler.
fn resources(compiler: &Compiler, source: &Source, arch: &str) -> Vec<KernelResources> {
    let mut hasher = DefaultHasher::new();
    compiler.key(source, arch).unwrap().hash(&mut hasher);
    let name = format!(
        "{}{}-{arch}-{:016x}",
        source.name.replace('/', "-"),
        source.variant.suffix(),
        hasher.finish()
    );
    let folder = std::env::var_os("FERROTRON_KERNEL_RESOURCES")
        .map_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernel_resources"), PathBuf::from);
    let known = std::fs::read_to_string(folder.join(&name)).unwrap_or_default();
    // A file that was not written to its end has no last line.
    if let Some(lines) = known.strip_suffix("end\n") {
        let kernel = |line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            let number = |i: usize| words[i].parse().unwrap();
            KernelResources {
                name: words[0].into(),
                registers: number(1),
                spills: number(2),
                shared: number(3),
                serialized: words[4] == "true",
            }
        };
        return lines.lines().map(kernel).collect();
    }
    let kernels = compiler.compile(source, arch).unwrap().kernels;
    let line = |k: &KernelResources| {
        format!("{} {} {} {} {}\n", k.name, k.registers, k.spills, k.shared, k.serialized)
    };
    let text = kernels.iter().map(line).collect::<String>() + "end\n";
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(&name), text).unwrap();
    kernels
}

/// Compiles every source for every card, and every variant for Hopper, on all cores.
fn compile_all(compiler: &Compiler) -> HashMap<Key, Vec<KernelResources>> {
    let base = CARDS.iter().flat_map(|(arch, _)| SOURCES.iter().map(move |s| (*s, *arch)));
    let all = base.chain(variants().map(|s| (s, "sm_90a")));
    let mut jobs: Vec<(Source, &str)> = all.filter(|(s, arch)| s.is_for(arch)).collect();
    // From the last: those that take long.
    jobs.sort_by_key(|(s, _)| (s.name.starts_with("attention/"), s.text.len()));
    let (jobs, done) = (Mutex::new(jobs), Mutex::new(HashMap::new()));
    let work = || {
        while let Some((source, arch)) = { jobs.lock().unwrap().pop() } {
            let kernels = resources(compiler, &source, arch);
            done.lock().unwrap().insert((source.name, source.variant, arch), kernels);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|s| (0..threads).for_each(|_| drop(s.spawn(work))));
    done.into_inner().unwrap()
}

/// Checks registers, spills, shared memory and wgmma of a source's kernels.
fn check_limits(source: &Source, arch: &str, kernels: &[KernelResources]) -> Vec<String> {
    let (_, registers, shared) = LIMITS.iter().find(|(start, ..)| source.name.starts_with(start)).unwrap();
    let card = CARDS.iter().find(|(known, _)| *known == arch).unwrap().1 << 10;
    let mut wrong = Vec::new();
    for k in kernels {
        let what = format!("{}{} {} on {arch}", source.name, source.variant.suffix(), k.name);
        let may_spill = source.may_spill.iter().any(|start| k.name.starts_with(start));
        assert!(k.registers > 0, "{what}: the report of ptxas was not understood");
        if k.registers > *registers {
            wrong.push(format!("{what}: {} registers of {registers}", k.registers));
        }
        let at_launch = LAUNCH_REGISTERS.iter().find(|(name, _)| *name == k.name);
        if let Some((_, registers)) = at_launch.filter(|(_, registers)| k.registers != *registers) {
            wrong.push(format!("{what}: {} registers at launch instead of {registers}", k.registers));
        }
        let spills =
            SPILLS.iter().find(|(start, _)| source.name.starts_with(start) && !STRICT.contains(&arch));
        if k.spills > spills.map_or(0, |(_, bytes)| *bytes) && !may_spill {
            wrong.push(format!("{what}: {} bytes spilled", k.spills));
        }
        if k.serialized {
            wrong.push(format!("{what}: ptxas serializes its wgmma instructions"));
        }
        if k.shared > (*shared).min(card) {
            wrong.push(format!("{what}: {} bytes of static shared memory of {shared}", k.shared));
        }
    }
    wrong
}

#[test]
fn every_kernel_compiles_for_every_card_within_its_limits_and_those_that_are_launched_exist() {
    let Some(compiler) = compiler() else { return };
    let count = |v| variants().filter(|s| s.variant == v).count();
    assert_eq!([Variant::F16, Variant::Fp8Probs, Variant::Base].map(count), [21, 4, 0]);
    let all = compile_all(&compiler);
    let mut wrong = Vec::new();
    for source in SOURCES.iter().copied().chain(variants()) {
        for (arch, _) in CARDS {
            if let Some(kernels) = all.get(&(source.name, source.variant, arch)) {
                assert!(!kernels.is_empty(), "{}.cu has no kernel", source.name);
                wrong.extend(check_limits(&source, arch, kernels));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let is_there = |name: &str| all.values().flatten().any(|k| k.name == name);
    assert!(LAUNCH_REGISTERS.iter().all(|(name, _)| is_there(name)), "{LAUNCH_REGISTERS:?}");
    let launched = launched();
    assert!(launched.len() > 200, "only {} launches were found", launched.len());
    for (source, variant, name, place) in launched {
        let found = all.iter().find(|((s, v, arch), _)| *s == source && *v == variant && *arch == "sm_90a");
        // The host refuses types that a source has no variant for.
        let Some((_, kernels)) = found else {
            assert!(variant != Variant::Base, "{place}: there is no {source}.cu");
            continue;
        };
        // add_assign refuses to add bf16 to f16 before it names a kernel.
        if name.ends_with("_bf16_f16") {
            continue;
        }
        let names: BTreeSet<&str> = kernels.iter().map(|k| &*k.name).collect();
        assert!(names.contains(&*name), "{place}: {source}.cu ({variant:?}) has no kernel {name}");
    }
}

/// What a card that stands for an older one runs.
#[test]
fn a_source_compiles_to_ptx_of_an_older_architecture() {
    let Some(compiler) = compiler() else { return };
    let source = SOURCES.iter().find(|s| s.name == "copy").unwrap();
    let code = compiler.compile(source, "compute_86").unwrap().code;
    let text = std::str::from_utf8(&code).unwrap();
    assert!(text.contains(".target sm_86") && text.contains(".entry") && text.ends_with('\0'));
}

#[test]
fn a_broken_source_is_an_error_with_its_line() {
    let Some(compiler) = compiler() else { return };
    let (variant, variants) = (Variant::Base, &[] as &[Variant]);
    let broken =
        Source { name: "broken", text: "\nnonsense;\n", may_spill: &[], only: None, variant, variants };
    let error = compiler.compile(&broken, "sm_90a").unwrap_err().to_string();
    assert!(error.contains("broken.cu(2)"), "{error}");
    let error =
        compiler.compile(&Source { text: "#include \"absent.cuh\"\n", ..broken }, "sm_90a").unwrap_err();
    assert!(error.to_string().contains("absent.cuh"), "{error}");
}

/// A kernel that reads accumulators of wgmma before it waits for them.
const READS_EARLY: &str = r#"#include "prelude.cuh"
#include "wgmma.cuh"
extern "C" __global__ void reads_early(float* out, u64 a, int n) {
    float c[32] = {}, d[32] = {};
    wgmma_fence();
    Wgmma<64>::ss<0, 0>(c, a, a, 1);
    wgmma_commit();
    for (int i = 0; i < n; i++) {
        Wgmma<64>::ss<0, 0>(d, a, a, 1);
        wgmma_commit();
        wgmma_wait<1>();
        out[i] = c[i & 1] + d[1];
        Wgmma<64>::ss<0, 0>(c, a, a, 1);
        wgmma_commit();
    }
    wgmma_wait<0>();
    out[n] = c[1];
}
"#;

#[test]
fn serialized_wgmma_instructions_are_found() {
    let Some(compiler) = compiler() else { return };
    let (variant, variants) = (Variant::Base, &[] as &[Variant]);
    let only = Some("sm_90a");
    let early = Source { name: "early", text: READS_EARLY, may_spill: &[], only, variant, variants };
    let kernels = compiler.compile(&early, "sm_90a").unwrap().kernels;
    assert!(kernels.len() == 1 && kernels[0].serialized, "{kernels:?}");
}

/// Kernels that the host code names: source, variant, kernel, and where.
fn launched() -> Vec<(String, Variant, String, String)> {
    let mut files = Vec::new();
    collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda"), &mut files);
    let mut all = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let place = file.file_name().unwrap().to_string_lossy().into_owned();
        let mut add = |source: &str, variant, name: String| {
            all.push((source.to_string(), variant, name, place.clone()));
        };
        // `typed!(op, dtype, "source", "name")` and its relatives: an instance for each type.
        for (call, types) in [
            ("typed!(", &["_f32", "_bf16", "_f16"][..]),
            ("input!(", &["_f32", "_bf16"]),
            ("sized!(", &["_4_f32", "_8_f32", "_32_f32", "_4_bf16", "_8_bf16", "_32_bf16"]),
        ] {
            for literals in calls(&text, call) {
                let [.., source, name] = literals.as_slice() else { continue };
                for suffix in types {
                    let variant = if *suffix == "_f16" { Variant::F16 } else { Variant::Base };
                    add(source, variant, format!("{name}{suffix}"));
                }
            }
        }
        // `sized!(op, dtype, "name")` and others whose source the macro knows.
        let moments = ["_f32", "_bf16", "_first_f16", "_second_f16", "_first_fp8", "_second_fp8"];
        for (source, call, types) in [
            ("permute", "sized!(", &["_1", "_2", "_4"][..]),
            ("permute", "mixed!(", &["_f32", "_bf16", "_mixed"]),
            ("moments", "moments!(", &moments),
        ] {
            for literals in calls(&text, call).into_iter().filter(|l| l.len() == 1) {
                types
                    .iter()
                    .for_each(|suffix| add(source, Variant::Base, format!("{}{suffix}", literals[0])));
            }
        }
        for literals in calls(&text, "steps!(") {
            let [plain, packed, name] = literals.as_slice() else { continue };
            for (source, types) in [(plain, ["f32", "bf16"]), (packed, ["f16", "fp8"])] {
                for suffix in types {
                    add(source, Variant::Base, format!("{name}_{suffix}"));
                    add(source, Variant::Base, format!("{name}_split_{suffix}"));
                }
            }
        }
        // `Kernel::new("source", "name")`; or a source, and a function that gives it names.
        for (call, variant) in [("Kernel::new(", Variant::Base), ("Kernel::f16(", Variant::F16)] {
            for literals in calls(&text, call) {
                match literals.as_slice() {
                    [source, name] => add(source, variant, name.clone()),
                    [source] if text.contains("fn kernel(name") => {
                        calls(&text, " kernel(")
                            .into_iter()
                            .flatten()
                            .for_each(|name| add(source, variant, name));
                    }
                    _ => {}
                }
            }
        }
    }
    all
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
}

/// The string literals of each call that starts so, up to the bracket that closes it.
fn calls(text: &str, start: &str) -> Vec<Vec<String>> {
    text.match_indices(start)
        .filter(|(at, _)| !text[..*at].lines().last().unwrap_or_default().trim_start().starts_with("//"))
        .map(|(at, _)| {
            let rest = &text[at + start.len()..];
            let mut depth = 1;
            let end = rest.find(|c| {
                depth += i32::from(c == '(') - i32::from(c == ')');
                depth == 0
            });
            rest[..end.unwrap_or(0)].split('"').skip(1).step_by(2).map(String::from).collect()
        })
        .collect()
}

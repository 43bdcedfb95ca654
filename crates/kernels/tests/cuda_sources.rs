//! Every CUDA source compiles, on a machine without a GPU too, and has the kernels that the host launches by name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_kernels::cuda::{Compiler, SOURCES, Source, Variant, variants};
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

/// Kernel names of each compiled source.
type Kernels = HashMap<(&'static str, Variant), BTreeSet<String>>;

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

/// Compiles the sources of an architecture and checks that no kernel spills registers unless its source allows it.
fn compiles_for(compiler: &Compiler, arch: &str, sources: impl Iterator<Item = Source>) -> Kernels {
    let mut all = Kernels::new();
    for source in sources.filter(|s| s.is_for(arch)) {
        let compiled = compiler.compile(&source, arch).unwrap();
        assert!(!compiled.kernels.is_empty(), "{}.cu has no kernel", source.name);
        for kernel in &compiled.kernels {
            assert!(kernel.registers > 0, "{}: the report of ptxas was not understood", kernel.name);
            let may = source.may_spill.iter().any(|start| kernel.name.starts_with(start));
            assert!(may || kernel.spills == 0, "{} spills {} bytes on {arch}", kernel.name, kernel.spills);
        }
        let names = compiled.kernels.into_iter().map(|k| k.name).collect();
        all.insert((source.name, source.variant), names);
    }
    all
}

#[test]
fn every_source_and_variant_compiles_for_hopper_and_has_the_kernels_that_are_launched() {
    let Some(compiler) = compiler() else { return };
    let count = |v| variants().filter(|s| s.variant == v).count();
    assert_eq!([Variant::F16, Variant::Fp8Probs, Variant::Base].map(count), [21, 4, 0]);
    let kernels = compiles_for(&compiler, "sm_90a", SOURCES.iter().copied().chain(variants()));
    let launched = launched();
    assert!(launched.len() > 200, "only {} launches were found", launched.len());
    for (source, variant, name, place) in launched {
        // The host refuses types that a source has no variant for.
        let Some(names) = kernels.get(&(source.as_str(), variant) as &(&str, Variant)) else {
            assert!(variant != Variant::Base, "{place}: there is no {source}.cu");
            continue;
        };
        // add_assign refuses to add bf16 to f16 before it names a kernel.
        if name.ends_with("_bf16_f16") {
            continue;
        }
        assert!(names.contains(&name), "{place}: {source}.cu ({variant:?}) has no kernel {name}");
    }
}

#[test]
fn every_source_compiles_for_the_oldest_supported_gpu() {
    let Some(compiler) = compiler() else { return };
    compiles_for(&compiler, "sm_80", SOURCES.iter().copied());
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

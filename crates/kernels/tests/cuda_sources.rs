//! Every CUDA source compiles, on a machine without a GPU too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_kernels::cuda::{Compiler, SOURCES, Source, Variant, variants};

/// The compiler, or nothing where there is none; in CI it must be there.
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

fn compiles_for(arch: &str, sources: impl Iterator<Item = Source>) {
    let Some(compiler) = compiler() else { return };
    for source in sources.filter(|s| s.is_for(arch)) {
        let compiled = compiler.compile(&source, arch).unwrap();
        assert!(!compiled.kernels.is_empty(), "{}.cu has no kernel", source.name);
        for kernel in &compiled.kernels {
            assert!(kernel.registers > 0, "{}: the assembler's report was not understood", kernel.name);
            let may = source.may_spill.iter().any(|start| kernel.name.starts_with(start));
            assert!(may || kernel.spills == 0, "{} spills {} bytes on {arch}", kernel.name, kernel.spills);
        }
    }
}

#[test]
fn every_source_compiles_for_hopper() {
    compiles_for("sm_90a", SOURCES.iter().copied());
}

/// For one architecture: what they change has nothing to do with it, and compiling takes time.
#[test]
fn every_variant_compiles() {
    let count = |v| variants().filter(|s| s.variant == v).count();
    assert!(count(Variant::F16) > 10 && count(Variant::Fp8Probs) == 4 && count(Variant::Base) == 0);
    compiles_for("sm_90a", variants());
}

#[test]
fn every_source_compiles_for_the_oldest_card() {
    compiles_for("sm_80", SOURCES.iter().copied());
}

#[test]
fn a_broken_source_is_an_error_with_its_line() {
    let Some(compiler) = compiler() else { return };
    let broken =
        Source { name: "broken", text: "\nnonsense;\n", may_spill: &[], only: None, variant: Variant::Base };
    let error = compiler.compile(&broken, "sm_90a").unwrap_err().to_string();
    assert!(error.contains("broken.cu(2)"), "{error}");
}

//! Every CUDA source compiles, on a machine without a GPU too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_kernels::cuda::{Compiler, SOURCES};

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

fn compiles_for(arch: &str) {
    let Some(compiler) = compiler() else { return };
    for source in SOURCES.iter().filter(|s| s.is_for(arch)) {
        let compiled = compiler.compile(source, arch).unwrap();
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
    compiles_for("sm_90a");
}

#[test]
fn every_source_compiles_for_the_oldest_card() {
    compiles_for("sm_80");
}

#[test]
fn a_broken_source_is_an_error_with_its_line() {
    let Some(compiler) = compiler() else { return };
    let broken =
        ferrotron_kernels::cuda::Source { name: "broken", text: "\nnonsense;\n", may_spill: &[], only: None };
    let error = compiler.compile(&broken, "sm_90a").unwrap_err().to_string();
    assert!(error.contains("broken.cu(2)"), "{error}");
}

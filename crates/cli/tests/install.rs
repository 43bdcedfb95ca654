//! What is installed beside the binary: the Python wheel, shell completions, man pages.

// The lints see a test only where `#[test]` stands; everything here is one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::path::Path;
use std::process::{Command, Output};
use support::{binary, recipe, run};

fn checked(command: &mut Command) -> Output {
    let out = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(out.status.success(), "{command:?}: {}{}", text(&out.stdout), text(&out.stderr));
    out
}

/// CI requires Python with venv; elsewhere tests print that they are skipped.
fn has_python(test: &str) -> bool {
    let has = Command::new("python3").args(["-c", "import venv, ensurepip"]).output();
    let has = has.is_ok_and(|out| out.status.success());
    assert!(has || std::env::var_os("CI").is_none(), "{test} needs python3 with venv (python3-venv)");
    if !has {
        eprintln!("SKIPPED: {test}: no python3 with venv");
    }
    has
}

#[test]
fn the_wheel_trains_in_a_clean_environment() {
    if !has_python("the_wheel_trains_in_a_clean_environment") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/wheel.py");
    // What is tested is the packing: symbols for the debugger would only make it slow.
    let stripped = dir.path().join("stripped");
    std::fs::copy(binary(), &stripped).unwrap();
    checked(Command::new("strip").arg(&stripped));
    let wheels = dir.path().join("wheels");
    let pack = || {
        let out = checked(Command::new("python3").arg(&script).arg(&stripped).arg(&wheels));
        let path = String::from_utf8(out.stdout).unwrap().trim().to_string();
        let bytes = std::fs::read(&path).unwrap();
        (path, bytes)
    };
    let (wheel, bytes) = pack();
    assert!(wheel.contains("/ferrotron-0.1.0-py3-none-manylinux_2_"), "{wheel}");
    assert_eq!(pack().1, bytes, "the same binary gives the same wheel");
    let venv = dir.path().join("venv");
    checked(Command::new("python3").args(["-m", "venv"]).arg(&venv));
    checked(Command::new(venv.join("bin/pip")).args(["install", "--no-index", "--quiet", &wheel]));
    // Nothing but the environment is on the path: no cargo, no rustc.
    let installed = |args: &[&str]| {
        let mut command = Command::new(venv.join("bin/ferrotron"));
        command.env_clear().env("PATH", venv.join("bin")).env("HOME", dir.path()).args(args);
        checked(command.current_dir(dir.path()))
    };
    let recipe = recipe(dir.path(), 3, "");
    installed(&["train", recipe.to_str().unwrap(), "--out", "run", "--device", "cpu"]);
    assert!(dir.path().join("run/checkpoints/step-00000003").is_dir());
    let files = checked(Command::new(venv.join("bin/pip")).args(["show", "-f", "ferrotron"]));
    assert!(String::from_utf8(files.stdout).unwrap().contains("bin/ferrotron"));
    checked(Command::new(venv.join("bin/pip")).args(["uninstall", "--yes", "--quiet", "ferrotron"]));
    assert!(!venv.join("bin/ferrotron").exists());
}

#[test]
fn completions_are_scripts_that_their_shells_read() {
    for (shell, word) in [
        ("bash", "complete -F"),
        ("zsh", "#compdef ferrotron"),
        ("fish", "complete -c ferrotron"),
        ("powershell", "Register-ArgumentCompleter"),
        ("elvish", "edit:completion:arg-completer[ferrotron]"),
    ] {
        let e = run(&["completions", shell]);
        assert_eq!(e.code, Some(0), "{e:?}");
        assert!(e.out.contains(word) && e.out.contains("explain"), "{shell}: {}", e.out);
    }
    // What bash offers after `ferrotron ex`.
    let script = "eval \"$(\"$0\" completions bash)\"; COMP_WORDS=(ferrotron ex); COMP_CWORD=1; \
                  _ferrotron ferrotron ex ferrotron; echo \"${COMPREPLY[@]}\"";
    let out = checked(Command::new("bash").args(["-c", script]).arg(binary()));
    assert_eq!(String::from_utf8(out.stdout).unwrap().trim(), "explain");
    assert_eq!(run(&["completions", "tcsh"]).code, Some(2));
}

#[test]
fn every_command_has_a_man_page() {
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("share/man1");
    let e = run(&["man", pages.to_str().unwrap()]);
    assert_eq!(e.code, Some(0), "{e:?}");
    let page = |name: &str| std::fs::read_to_string(pages.join(name)).unwrap();
    for name in ["ferrotron.1", "ferrotron-train.1", "ferrotron-runs-diff.1", "ferrotron-data-build.1"] {
        let text = page(name);
        assert!(text.contains(".TH ") && text.contains(".SH SYNOPSIS"), "{name}: {text}");
    }
    assert!(page("ferrotron-train.1").contains("set"), "options are in the page");
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert_eq!(run(&["man", file.to_str().unwrap()]).code, Some(1));
}

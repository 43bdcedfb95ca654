//! `watch`: the picture in a terminal, the server of the page, and the page itself in a browser.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

mod browser;
mod page;
mod run_log;
mod server;
mod terminal;

use std::process::{Child, Command};

/// The binary under test: `FERROTRON_BIN` if set (on a GPU host), otherwise the one just built.
fn binary() -> std::ffi::OsString {
    std::env::var_os("FERROTRON_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_ferrotron").into())
}

/// True if a program can be started. CI requires it; elsewhere tests print that they are skipped.
fn installed(program: &str, argument: &str, test: &str) -> bool {
    match Command::new(program).arg(argument).output() {
        Ok(_) => true,
        Err(e) => {
            assert!(std::env::var_os("CI").is_none(), "CI needs {program}: {e}");
            eprintln!("SKIPPED: {test}: {program}: {e}");
            false
        }
    }
}

/// A process that ends with the test.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

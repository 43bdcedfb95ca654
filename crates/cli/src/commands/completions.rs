//! `completions` and `man`: shell completions and man pages, generated from the command line's own description.

use crate::args::{Cli, Global};
use crate::output;
use anyhow::{Context, Result};
use clap::CommandFactory;
use std::path::PathBuf;
use std::process::ExitCode;

const NAME: &str = "ferrotron";

const AFTER: &str = "\
Examples:
  ferrotron completions bash > ~/.local/share/bash-completion/completions/ferrotron
  ferrotron completions zsh > ~/.zfunc/_ferrotron          with ~/.zfunc in fpath
  ferrotron completions fish > ~/.config/fish/completions/ferrotron.fish";

/// Arguments of `completions`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct CompletionsArgs {
    /// Shell to generate completions for
    #[arg(value_name = "SHELL")]
    pub shell: clap_complete::Shell,
}

/// Runs `completions`.
pub fn completions(args: CompletionsArgs, _: &Global) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), NAME, &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}

/// Arguments of `man`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  ferrotron man ~/.local/share/man/man1")]
pub struct ManArgs {
    /// Folder for the pages, one for each command: ferrotron.1, ferrotron-train.1, …
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

/// Runs `man`.
pub fn man(args: ManArgs, _: &Global) -> Result<ExitCode> {
    let failed = || format!("{}: man pages cannot be written there", args.dir.display());
    std::fs::create_dir_all(&args.dir).with_context(failed)?;
    clap_mangen::generate_to(Cli::command(), &args.dir).with_context(failed)?;
    Ok(ExitCode::SUCCESS)
}

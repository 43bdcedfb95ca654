//! The `ferrotron` binary: argument parsing and presentation.

mod args;
mod commands;
mod format;
mod layout;
mod log;
mod machine;
mod open_files;
mod output;
mod profile;
mod progress;
mod ranks;
mod shell;
mod signal;
mod stand_in;
mod trace;

use args::{Cli, Command, Global};
use clap::Parser;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let started = Instant::now();
    commands::launch::end_with_launcher();
    open_files::raise_limit();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => return output::usage(&e),
    };
    if let Err(e) = stand_in::apply(&cli.global) {
        return output::failure(&e, &cli.global);
    }
    let log_level = match log::LogLevel::choose(cli.global.log_level) {
        Ok(level) => level,
        Err(e) => return output::failure(&e.into(), &cli.global),
    };
    let global = Global { started, log_level, ..cli.global };
    let job = global.launch.job().ok().flatten();
    let of_process = job.map_or((0, 1), |job| (job.rank, job.size));
    log::init(log_level, log::LogRank { rank: of_process.0, size: of_process.1 });
    let result = match cli.command {
        Command::Train(args) => commands::train::run(args, &global),
        Command::Launch(args) => commands::launch::run(args, &global),
        Command::Drill(args) => commands::drill::run(args, &global),
        Command::Replay(args) => commands::replay::run(args, &global),
        Command::Forward(args) => commands::forward::run(args, &global),
        Command::Parity(args) => commands::parity::run(args, &global),
        Command::Convert(args) => commands::convert::run(args, &global),
        Command::Chat(args) => commands::chat::run(args, &global),
        Command::Eval(args) => commands::eval::run(args, &global),
        Command::Generate(args) => commands::generate::run(args, &global),
        Command::Data(args) => commands::data::run(args, &global),
        Command::Bench(args) => commands::bench::run(args, &global),
        Command::Kernels(args) => commands::kernels::run(args, &global),
        Command::Doctor(args) => commands::doctor::run(args, &global),
        Command::Plan(args) => commands::plan::run(args, &global),
        Command::Runs(args) => commands::runs::run(args, &global),
        Command::Regress(args) => commands::regress::run(args, &global),
        Command::Recipes(args) => commands::recipes::run(args, &global),
        Command::Watch(args) => commands::watch::run(args, &global),
        Command::Explain(args) => commands::explain::run(args, &global),
        Command::Completions(args) => commands::completions::completions(args, &global),
        Command::Man(args) => commands::completions::man(args, &global),
    };
    result.unwrap_or_else(|e| output::failure(&e, &global))
}

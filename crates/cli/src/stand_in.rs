//! `--as ARCH`: the GPU stands for an older one. The environment variable that the device reads decides, so that processes
//! which this one starts inherit it; the option starts the program again with it.

use crate::args::Global;
use anyhow::{Context, Result};
use ferrotron_tensor::AS_VARIABLE;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Does not return where the option asks for what the environment does not say yet.
pub fn apply(global: &Global) -> Result<()> {
    let Some(arch) = &global.stand_in else { return Ok(()) };
    if std::env::var(AS_VARIABLE).is_ok_and(|now| now == *arch) {
        return Ok(());
    }
    let program = std::env::current_exe().context("--as: where the program is")?;
    let error = Command::new(program).args(std::env::args_os().skip(1)).env(AS_VARIABLE, arch).exec();
    Err(error).context("--as: start the program again")
}

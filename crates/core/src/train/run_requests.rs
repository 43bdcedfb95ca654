//! What ranks ask for between two steps: to save, to stop, or to fail.

use super::run::{Observer, Run};
use super::trainer::HostBatch;
use crate::Result;

/// A rank's request after a step. All ranks follow the most urgent one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd)]
pub(super) enum Request {
    #[default]
    Continue,
    /// Save and go on.
    Save,
    /// Save and end.
    Stop,
    /// Save and fail: this rank cannot read its data.
    Fail,
}

impl Run {
    /// The most urgent request of any rank before a step is launched, on which all then act. At the same time ranks learn
    /// whether none of them is writing a checkpoint any more, and share the GEMM algorithms that any of them has chosen.
    ///
    /// Hosts wait for each other here, while the GPUs compute the step before.
    pub(super) fn agree(&mut self, mine: Request, observer: &mut dyn Observer) -> Result<Request> {
        const REQUESTS: [Request; 3] = [Request::Fail, Request::Stop, Request::Save];
        let (rank, runner) = (&self.trainer.rank, &self.trainer.runner);
        let busy = self.saver.is_busy();
        let mut mine: Vec<f64> = REQUESTS.iter().map(|r| f64::from(*r == mine)).collect();
        let mirroring = self.snapshots.is_mirroring();
        mine.extend([self.trainer.has_new_gemm_choices(), busy, mirroring].map(f64::from));
        // Numbers of ranks.
        let all = runner.all_reduce(&rank.control, mine, "requests")?;
        let (asking, others) = all.split_at(REQUESTS.len());
        let most = REQUESTS.into_iter().zip(asking).find(|(_, ranks)| **ranks > 0.0);
        self.share_gemms(others[0] > 0.0, observer)?;
        self.mirrors_idle = others[2] == 0.0;
        self.poll_save(others[1] == 0.0, observer)?;
        Ok(most.map_or(Request::Continue, |(request, _)| request))
    }

    /// Adds newly chosen GEMM algorithms to the run's table, and writes it. Collective.
    pub(super) fn share_gemms(&mut self, has_new: bool, observer: &mut dyn Observer) -> Result<()> {
        if has_new && self.trainer.share_gemm_choices()? {
            tracing::info!("GEMM algorithms were chosen");
            let writer = self.writer.as_ref().zip(self.trainer.gemms.as_ref());
            if let Some(Err(e)) = writer.map(|(w, table)| w.folder.write_gemm_table(table)) {
                observer.warning(&format!("{e}; the next checkpoint has the GEMM algorithms"));
            }
        }
        Ok(())
    }
}

/// This rank's request before the step of `batch` is launched.
pub(super) fn request(batch: &Result<HostBatch>, may_ask: bool, observer: &dyn Observer) -> Request {
    let (stop, save) = if may_ask { (observer.stop(), observer.save()) } else { (false, false) };
    match batch {
        Err(_) => Request::Fail,
        Ok(_) if stop => Request::Stop,
        Ok(_) if save => Request::Save,
        Ok(_) => Request::Continue,
    }
}

//! Checks of the `[data]` section, and of what needs validation data.

use super::Recipe;
use crate::error::Result;

impl Recipe {
    pub(super) fn check_data_values(&self) -> Result<()> {
        let d = &self.config.data;
        if d.path.0.iter().any(|p| p.is_empty()) {
            return self.refuse("data.path", "a path is empty");
        }
        if d.is_embedded() && d.path.0.len() > 1 {
            return self
                .refuse("data.path", "\"embedded\" stands alone; leave it out or leave the other paths out");
        }
        if d.is_embedded() && d.tokenizer.is_some() {
            let what = "the corpus inside the program is read as bytes; leave data.tokenizer out";
            return self.refuse("data.tokenizer", what);
        }
        if !d.weights.is_empty() && d.weights.len() != d.path.0.len() {
            let what = format!("{} weights for {} paths; give one per path", d.weights.len(), d.path.0.len());
            return self.refuse("data.weights", what);
        }
        if d.weights.iter().any(|w| *w < 0.0)
            || (!d.weights.is_empty() && d.weights.iter().sum::<f64>() <= 0.0)
        {
            return self.refuse("data.weights", "must not be negative, and not all 0");
        }
        self.within("data.seed", d.seed as f64, 0.0, f64::from(u32::MAX))?;
        let split = d.split.0;
        if split.iter().any(|s| *s < 0.0) || split[0] <= 0.0 {
            return self
                .refuse("data.split", "shares must not be negative, and that of training must be above 0");
        }
        if self.config.eval.every == 0 {
            let wanting = [
                ("checkpoint.best", self.config.checkpoint.best),
                ("eval.patience", self.config.eval.patience > 0),
            ];
            if let Some((key, _)) = wanting.into_iter().find(|(_, on)| *on) {
                return self.refuse(key, "it goes by evaluations, of which there are none; set eval.every");
            }
        }
        if self.config.eval.every > 0 && split[1] <= 0.0 {
            let what = "there is no validation data: give data.split a second share, or set eval.every to 0";
            return self.refuse("eval.every", what);
        }
        Ok(())
    }
}

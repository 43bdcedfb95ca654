//! Values of keys of training data.

use super::choice;

choice! {
    /// What the lines of a JSONL file are.
    DataFormat {
        /// As the first line has it.
        Auto = "auto",
        /// Texts.
        Text = "text",
        /// Conversations.
        Chat = "chat",
    }
}

choice! {
    /// What becomes of a conversation that is longer than a sequence.
    Truncation {
        /// Its beginning is kept.
        KeepStart = "keep_start",
        /// Its end is kept.
        KeepEnd = "keep_end",
        /// It is cut into several samples, none of which sees the others.
        Split = "split",
        /// It is left out.
        Drop = "drop",
        /// The run is refused.
        Refuse = "refuse",
    }
}

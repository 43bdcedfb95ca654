//! Training data: `.bin/.idx` files, GPT samples, blends, document packing, and batches as a pure function of the
//! number of samples consumed.

pub mod batch;
pub mod blend;
pub mod build;
pub mod corpus;
pub mod digest;
pub mod documents;
pub mod gpt;
pub mod gpt_index;
pub mod indexed;
pub mod info;
pub mod input;
pub mod mt19937;
pub mod packed;
pub mod sampler;
mod shuffle;
pub mod source;
pub mod split;
pub mod synthetic;
mod temp_file;
pub mod token_stream;
pub mod token_type;
pub mod validation;
pub mod vocabulary;
pub mod writer;

pub use batch::{Batch, Batches, IGNORE, Member, Row};
pub use blend::{Blend, Interleave};
pub use build::{BuildSummary, Encode, Input, Span, TextFormat, build};
pub use documents::{DocumentRange, Documents};
pub use gpt::{GptConfig, GptDataset};
pub use indexed::{IndexedDataset, beside};
pub use info::{DatasetInfo, TokenizerInfo};
pub use packed::{Packed, RowCounts, RowOptions};
pub use source::Sources;
pub use split::Split;
pub use token_stream::Stream;
pub use token_type::TokenType;
pub use writer::IndexedWriter;

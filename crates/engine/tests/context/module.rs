//! The whole block, weights and all, against one rank.

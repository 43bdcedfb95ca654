#![no_main]
//! What a process of a job reads from the network: handshakes, frames, replies of torchrun's store. The first byte
//! chooses which.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| ferrotron_comm::read_network_input(bytes));

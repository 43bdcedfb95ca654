//! The kernels: one small trait per family, implemented once per device.

pub mod cpu;

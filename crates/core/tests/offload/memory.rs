//! Memory with offloading: what leaves the device, what the host holds, and that neither grows.

use super::*;
use ferrotron_tensor::Category;

const ACTIVATIONS: usize = Category::Activations as usize;

#[test]
fn activations_fall_by_the_layers_that_are_offloaded() {
    let peak = |offload: &str| {
        let (_, memory) = run(&recipe(&[offload, "precision.dtype=f32", "data.seq_len=64"]), 2).unwrap();
        (memory[0].peak[ACTIVATIONS], memory[0].host.peak)
    };
    let (all, none) = peak("offload.activations=off");
    assert_eq!(none, 0);
    let mut last = all;
    for k in 1..6 {
        let (device, host) = peak(&format!("offload.activations={k}"));
        // A layer keeps its statistics; besides, the peak need not be where all layers are resident.
        assert!(device < last, "{k} layers: {device} bytes, {last} with one less");
        assert!(all - device <= host, "{k} layers: {device} of {all} bytes, {host} on the host");
        assert!(
            (all - device) as f64 > 0.85 * host as f64,
            "{k} layers: {device} of {all} bytes, {host} on the host"
        );
        last = device;
    }
}

#[test]
fn host_memory_does_not_grow() {
    let settings =
        ["offload.activations=4", "moe.experts=4", "moe.topk=2", "moe.ffn=64", "precision.dtype=f32"];
    let reserved = |steps| {
        let (_, memory) = run(&recipe(&settings), steps).unwrap();
        assert_eq!(memory[0].host.now, 0);
        memory[0].host.reserved
    };
    assert_eq!(reserved(2), reserved(12));
}

#[test]
fn a_budget_that_is_too_small_is_an_error_that_names_it() {
    let e =
        run(&recipe(&["offload.activations=4", "offload.host_budget=\"16KiB\""]), 1).unwrap_err().to_string();
    assert!(e.contains("out of host memory") && e.contains("offload.host_budget"), "{e}");
}

//! The race checker reports a missing wait and memory reused too early, and accepts work ordered by events.
#![allow(clippy::unwrap_used)]

use ferrotron_tensor::*;

struct Setup {
    compute: Stream,
    copy: Stream,
}

fn setup() -> Setup {
    let device = Device::cpu_instrumented(
        Threads::new(1).unwrap(),
        Instrumentation { race_check: true, ..Instrumentation::default() },
    );
    Setup { compute: device.stream("compute").unwrap(), copy: device.stream("copy").unwrap() }
}

fn touch(stream: &Stream, op: &'static str, arg: Arg) -> Result<()> {
    stream.launch(op, &[arg], |_| Ok(()))
}

/// Producer on one stream, consumer on another, with or without an event between them.
fn hand_over(with_wait: bool) -> Result<()> {
    let Setup { compute, copy } = setup();
    let x = Tensor::empty(&compute, &[64], DType::F32, Category::Activations)?;
    touch(&compute, "produce", write(&x))?;
    if with_wait {
        copy.wait(&compute.record()?)?;
    }
    touch(&copy, "offload", read(&x))
}

#[test]
fn a_missing_event_wait_is_reported() {
    hand_over(true).unwrap();
    let error = hand_over(false).unwrap_err().to_string();
    assert!(
        error.contains("'offload'") && error.contains("'produce'") && error.contains("no event"),
        "{error}"
    );
}

/// A tensor read on the copy stream is freed, and the next tensor on the compute stream gets its memory.
fn reuse(with_wait: bool) -> Result<()> {
    let Setup { compute, copy } = setup();
    let x = Tensor::empty(&compute, &[64], DType::F32, Category::Activations)?;
    touch(&compute, "produce", write(&x))?;
    copy.wait(&compute.record()?)?;
    touch(&copy, "offload", read(&x))?;
    if with_wait {
        compute.wait(&copy.record()?)?;
    }
    drop(x);
    let y = Tensor::empty(&compute, &[64], DType::F32, Category::Activations)?;
    touch(&compute, "next layer", write(&y))
}

#[test]
fn a_buffer_reused_too_early_is_reported() {
    reuse(true).unwrap();
    let error = reuse(false).unwrap_err().to_string();
    assert!(error.contains("reused too early") && error.contains("'next layer'"), "{error}");
}

#[test]
fn ordering_is_transitive_over_streams() {
    let device = Device::cpu_instrumented(
        Threads::new(1).unwrap(),
        Instrumentation { race_check: true, ..Instrumentation::default() },
    );
    let [a, b, c] = ["a", "b", "c"].map(|n| device.stream(n).unwrap());
    let x = Tensor::empty(&a, &[8], DType::U8, Category::Workspace).unwrap();
    touch(&a, "first", write(&x)).unwrap();
    b.wait(&a.record().unwrap()).unwrap();
    c.wait(&b.record().unwrap()).unwrap();
    touch(&c, "last", write(&x)).unwrap();
    assert!(touch(&b, "between", read(&x)).is_err(), "b has not waited for c");
}

/// Streams are numbered by their device: many launches of another device's first stream say nothing about this one's.
#[test]
fn an_event_of_another_device_orders_that_device_only() {
    let (here, there) = (setup(), setup());
    let x = Tensor::empty(&here.compute, &[8], DType::U8, Category::Workspace).unwrap();
    let y = Tensor::empty(&there.compute, &[8], DType::U8, Category::Workspace).unwrap();
    for _ in 0..5 {
        touch(&there.compute, "elsewhere", write(&y)).unwrap();
    }
    touch(&here.compute, "produce", write(&x)).unwrap();
    here.copy.wait(&there.compute.record().unwrap()).unwrap();
    let error = touch(&here.copy, "offload", read(&x)).unwrap_err().to_string();
    assert!(error.contains("'offload'") && error.contains("'produce'"), "{error}");
}

#[test]
fn ordering_is_transitive_over_devices() {
    let (here, there) = (setup(), setup());
    let x = Tensor::empty(&here.compute, &[8], DType::U8, Category::Workspace).unwrap();
    touch(&here.compute, "produce", write(&x)).unwrap();
    there.copy.wait(&here.compute.record().unwrap()).unwrap();
    here.copy.wait(&there.copy.record().unwrap()).unwrap();
    touch(&here.copy, "offload", read(&x)).unwrap();
    // Work after the event is not known over there.
    touch(&here.compute, "again", read(&x)).unwrap();
    there.compute.wait(&there.copy.record().unwrap()).unwrap();
    here.copy.wait(&there.compute.record().unwrap()).unwrap();
    assert!(touch(&here.copy, "overwrite", write(&x)).is_err(), "the compute stream may still be reading");
}

#[test]
fn readers_and_disjoint_writers_need_no_order() {
    let Setup { compute, copy } = setup();
    let x = Tensor::empty(&compute, &[2, 8], DType::U8, Category::Workspace).unwrap();
    touch(&compute, "low", write(&x.select(0, 0).unwrap())).unwrap();
    touch(&copy, "high", write(&x.select(0, 1).unwrap())).unwrap();
    let y = Tensor::empty(&compute, &[8], DType::U8, Category::Workspace).unwrap();
    touch(&compute, "read", read(&y)).unwrap();
    touch(&copy, "read too", read(&y)).unwrap();
    assert!(touch(&compute, "write", write(&y)).is_err(), "the copy stream may still be reading");
}

/// Two freed tensors coalesce; a part of the joined memory is reused. Stream `copy` read the second of them.
fn reuse_a_part(elements: usize, with_wait: bool) -> Result<()> {
    let Setup { compute, copy } = setup();
    // Neighbours of a multiple of the pool's alignment.
    let [a, b] = [(); 2].map(|()| Tensor::empty(&compute, &[1 << 20], DType::F32, Category::Activations));
    let (a, b) = (a?, b?);
    touch(&compute, "produce", write(&b))?;
    copy.wait(&compute.record()?)?;
    touch(&copy, "offload", read(&b.narrow(0, 1000, 10)?))?;
    if with_wait {
        compute.wait(&copy.record()?)?;
    }
    drop((a, b));
    let c = Tensor::empty(&compute, &[elements], DType::F32, Category::Activations)?;
    touch(&compute, "next layer", write(&c))
}

#[test]
fn reuse_of_a_part_of_freed_memory_is_checked_by_address() {
    // Up to the last element before those that were read, and one more.
    reuse_a_part((1 << 20) + 1000, false).unwrap();
    let error = reuse_a_part((1 << 20) + 1001, false).unwrap_err().to_string();
    assert!(
        error.contains("reused too early") && error.contains("'offload' on stream 'copy' reads"),
        "{error}"
    );
    reuse_a_part((1 << 20) + 1001, true).unwrap();
    reuse_a_part(2 << 20, true).unwrap();
}

#[test]
fn a_write_of_a_part_leaves_the_rest_as_it_was() {
    let Setup { compute, copy } = setup();
    let x = Tensor::empty(&compute, &[100], DType::U8, Category::Workspace).unwrap();
    let part = |start, len| x.narrow(0, start, len).unwrap();
    touch(&copy, "left half", write(&part(0, 50))).unwrap();
    touch(&compute, "right half", write(&part(50, 50))).unwrap();
    let event = copy.record().unwrap();
    touch(&copy, "again", write(&part(0, 20))).unwrap();
    compute.wait(&event).unwrap();
    touch(&compute, "read", read(&part(20, 80))).unwrap();
    let error = touch(&compute, "read", read(&part(19, 2))).unwrap_err().to_string();
    assert!(error.contains("the same memory that 'again' on stream 'copy' writes"), "{error}");
    let error = touch(&copy, "write", write(&part(0, 60))).unwrap_err().to_string();
    assert!(error.contains("'read' on stream 'compute' reads"), "{error}");
}

/// A tensor that the copy stream read is freed, and its memory goes back to the system and comes again.
fn release(with_wait: bool) -> Result<()> {
    let Setup { compute, copy } = setup();
    let x = Tensor::empty(&compute, &[1 << 20], DType::F32, Category::Activations)?;
    touch(&copy, "offload", read(&x))?;
    if with_wait {
        compute.wait(&copy.record()?)?;
    }
    drop(x);
    compute.device().trim()?;
    let y = Tensor::empty(&copy, &[1 << 20], DType::F32, Category::Activations)?;
    touch(&copy, "write", write(&y))?;
    drop(y);
    // No history is left of it: another stream may have the memory.
    compute.device().trim()?;
    let z = Tensor::empty(&compute, &[1 << 20], DType::F32, Category::Activations)?;
    touch(&compute, "next layer", write(&z))
}

#[test]
fn memory_is_given_back_to_the_system_after_its_last_use() {
    release(true).unwrap();
    let error = release(false).unwrap_err().to_string();
    assert!(error.contains("'release' on stream 'compute'") && error.contains("'offload'"), "{error}");
}

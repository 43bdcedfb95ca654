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
